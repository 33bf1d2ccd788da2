//! `slackwater-driver attach` and `detach`: a disk of the appliance as a directory, for people,
//! scripts and machines without an engine. Nothing of a daemon is needed; a state directory of
//! its own is, so that a daemon never takes the mounts for its own.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use clap::{ArgGroup, Args, ValueEnum};
use serde_json::json;
use slackwater_attach::{Access, Attach, AttachError, Options, Rights, Source};
use slackwater_client::Client;
use slackwater_client::types::{CreateSnapshot, DeletionPolicy, SnapshotId};
use uuid::Uuid;

use super::{Format, print};
use crate::daemon;
use crate::error::DriverError;
use crate::settings::{Config, Size};

/// Where clones that are made here lie on the appliance.
const CLONES_FOLDER: &str = "attached";

/// Directory of the export in which snapshots are files.
const SNAPSHOTS: &str = ".snapshot/";

/// How long a snapshot stays of which no clone could be made.
const UNHELD_SECONDS: u64 = 3600;

/// What a file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum FileSystem {
    /// A disk
    Ext4,
    /// An image that is only read
    Erofs,
}

/// Attaches a disk.
#[derive(Clone, Debug, Args)]
#[command(group(ArgGroup::new("source").required(true).args(["file", "snapshot", "clone"])))]
pub(super) struct AttachArguments {
    /// Where it is to be seen; made if missing, with those above it for root alone
    directory: PathBuf,
    /// A file of the appliance that holds an ext4, or an image; a worker that joined needs a token (--token-file) for
    /// each of these
    #[arg(long, value_name = "PATH")]
    file: Option<String>,
    /// Make the file with this size first, with an ext4 on it; there must be none yet
    #[arg(long, value_name = "SIZE", requires = "file", conflicts_with = "read_only")]
    create: Option<Size>,
    /// Make an ext4 on the file first, which must not hold data; no other machine may have it in use
    #[arg(long, requires = "file", conflicts_with_all = ["create", "read_only"])]
    format: bool,
    /// A snapshot of such a file, read-only; one of a disk that was in use has to be cloned instead
    #[arg(long, value_name = "ID")]
    snapshot: Option<SnapshotId>,
    /// A new clone of a snapshot, or of a file with what was synced to it, or written where it is attached by this command;
    /// its path on the appliance is printed, and it stays there after `detach`
    #[arg(long, value_name = "ID|PATH")]
    clone: Option<String>,
    /// What it holds; an EROFS image is mounted for reading, and must not be written while it is. The kernel parses it, so
    /// take only one whose writer you trust
    #[arg(long = "type", value_name = "TYPE", default_value = "ext4")]
    file_system: FileSystem,
    /// Refuse writes
    #[arg(long)]
    read_only: bool,
    /// Let set-user-id and set-group-id programs and file capabilities of the disk count here: it
    /// can then make any local user root, so only for disks that you trust
    #[arg(long)]
    suid: bool,
    /// Let device files of the disk be devices here, with the same warning
    #[arg(long)]
    dev: bool,
}

/// Detaches it.
#[derive(Clone, Debug, Args)]
pub(super) struct DetachArguments {
    /// Where it is seen
    directory: PathBuf,
}

pub(super) async fn attach(
    arguments: &AttachArguments,
    config: &Config,
    format: Format,
) -> Result<(), DriverError> {
    if arguments.file_system == FileSystem::Erofs
        && (arguments.create.is_some() || arguments.format)
    {
        return Err(DriverError::Usage(
            "--create and --format make an ext4; an EROFS image is written as a whole, as by mkfs.erofs and \
             `slackwater import`: leave them out, or --type erofs"
                .to_owned(),
        ));
    }
    let _lock = daemon::take_directories(config)?;
    let rights = Rights { set_id: arguments.suid, devices: arguments.dev };
    let options = Options { rights, ..config.attach_options().await? };
    let attach = Attach::open(options).await?;
    let directory = absolute(&arguments.directory)?;
    if let Err(error) = attach_at(&attach, &directory, arguments, config, format).await {
        // The export stays if another disk needs it.
        let _ = attach.shut_down().await;
        return Err(error);
    }
    Ok(())
}

async fn attach_at(
    attach: &Attach,
    directory: &Path,
    arguments: &AttachArguments,
    config: &Config,
    format: Format,
) -> Result<(), DriverError> {
    let is_image = arguments.file_system == FileSystem::Erofs;
    let is_read_only = arguments.read_only || arguments.snapshot.is_some() || is_image;
    let access = if is_read_only { Access::ReadOnly } else { Access::ReadWrite };
    let attached = match arguments.snapshot {
        Some(id) => {
            let source = Source::Snapshot(Uuid::from_bytes(*id.as_bytes()));
            mount(attach, source, directory, (arguments.file_system, access)).await?;
            Attached { path: None, snapshot: Some(id) }
        }
        None => {
            let (path, snapshot) = file_of(attach, arguments, config).await?;
            match (snapshot, format) {
                (Some(_), Format::Text) => print(&format!("{path}\n")),
                // It stays if it cannot be mounted.
                (Some(_), Format::Json) => remark(&format!("made the clone {path}")),
                (None, _) => {}
            }
            let how = (arguments.file_system, access);
            mount(attach, Source::File(&path), directory, how).await?;
            Attached { path: Some(path), snapshot }
        }
    };
    if format == Format::Json {
        let Attached { path, snapshot } = attached;
        let answer = json!({ "directory": directory.display().to_string(), "path": path,
            "snapshot_id": snapshot, "read_only": is_read_only });
        print(&format!("{answer:#}\n"));
    }
    Ok(())
}

async fn mount(
    attach: &Attach,
    source: Source<'_>,
    directory: &Path,
    (file_system, access): (FileSystem, Access),
) -> Result<(), AttachError> {
    match file_system {
        FileSystem::Ext4 => attach.mount(source, directory, access).await,
        FileSystem::Erofs => attach.mount_image(source, directory).await,
    }
}

/// What is attached.
struct Attached {
    /// The path on the appliance; none for a snapshot.
    path: Option<String>,
    /// The snapshot that it is, or is a clone of.
    snapshot: Option<SnapshotId>,
}

/// The file that is to be attached, made as the arguments say.
async fn file_of(
    attach: &Attach,
    arguments: &AttachArguments,
    config: &Config,
) -> Result<(String, Option<SnapshotId>), DriverError> {
    let client = config.target.client()?;
    if let Some(what) = &arguments.clone {
        let snapshot = match what.parse() {
            Ok(snapshot) => snapshot,
            Err(_) => snapshot_of(attach, &client, what).await?,
        };
        let path = format!("{CLONES_FOLDER}/{}", Uuid::new_v4());
        client.create_clone(snapshot, &path).await?;
        return Ok((path, Some(snapshot)));
    }
    let path = arguments.file.clone().unwrap_or_default();
    let path = path.trim_start_matches('/').to_owned();
    if let Some(size) = arguments.create {
        client.create_file(&path, size.bytes()).await?;
        if let Err(error) = attach.make_file_system(&path).await {
            // It was made by this, and nothing is on it.
            let _ = client.delete_file(&path).await;
            return Err(error.into());
        }
    } else if arguments.format {
        require_blank(&client, &path).await?;
        attach.make_file_system(&path).await?;
    }
    Ok((path, None))
}

/// Refuses a file that holds data, also what was written to it and is not committed yet: a snapshot has that.
async fn require_blank(client: &Client, path: &str) -> Result<(), DriverError> {
    let request = CreateSnapshot {
        path: path.to_owned(),
        expires_in_seconds: Some(UNHELD_SECONDS),
        ..CreateSnapshot::default()
    };
    let snapshot = client.create_snapshot(&request).await?;
    // What cannot be deleted now goes by itself.
    let _ = client.delete_snapshot(snapshot.id).await;
    match snapshot.used_bytes {
        0 => Ok(()),
        used_bytes => Err(DriverError::Usage(format!(
            "{path} holds {used_bytes} bytes of data, which --format would overwrite: leave it out to attach what is \
             there, or take a new file"
        ))),
    }
}

/// A snapshot of a file as it is now, with what was written where it is attached here. It goes with its last clone.
async fn snapshot_of(
    attach: &Attach,
    client: &Client,
    path: &str,
) -> Result<SnapshotId, DriverError> {
    let path = path.trim_start_matches('/');
    for mounted in attach.mounts_anywhere().await? {
        if mounted.source == path && !mounted.read_only {
            attach.sync(&mounted.target).await?;
        }
    }
    let request = CreateSnapshot {
        path: path.to_owned(),
        deletion_policy: DeletionPolicy::OnZeroClones,
        expires_in_seconds: Some(UNHELD_SECONDS),
        ..CreateSnapshot::default()
    };
    Ok(client.create_snapshot(&request).await?.id)
}

/// Detaches, and lets go of the export with the last disk; an error if what was written last did
/// not come to the appliance.
pub(super) async fn detach(
    arguments: &DetachArguments,
    config: &Config,
    format: Format,
) -> Result<(), DriverError> {
    let _lock = daemon::lock(&config.state_dir)?;
    let attach = Attach::open(config.attach_options().await?).await?;
    let directory = absolute(&arguments.directory)?;
    let mounts = attach.mounts_anywhere().await?;
    let at = without_links_above(&directory);
    let source = mounts.into_iter().find(|mounted| mounted.target == at);
    // Of a snapshot there is no path.
    let source = source.map(|mounted| mounted.source).filter(|path| !path.starts_with(SNAPSHOTS));
    // Unmounting drops what cannot be written, and says nothing.
    let lost = match attach.sync(&directory).await {
        Ok(()) | Err(AttachError::NotMounted { .. }) => None,
        Err(error @ AttachError::LostWrites { .. }) => Some(error),
        Err(error) => return Err(error.into()),
    };
    attach.unmount(&directory).await?;
    let ended = match attach.shut_down().await {
        Ok(()) | Err(AttachError::Busy { .. }) => Ok(()),
        Err(error) => Err(error),
    };
    lost.map_or(ended, Err)?;
    if format == Format::Json {
        let detached = json!({ "directory": directory.display().to_string(), "path": source });
        print(&format!("{detached:#}\n"));
    } else if let Some(path) = source.filter(|path| path.starts_with(&format!("{CLONES_FOLDER}/")))
    {
        remark(&format!(
            "the clone stays on the appliance: `attach --file {path}` attaches it again, `slackwater file rm {path}` deletes it"
        ));
    }
    Ok(())
}

/// The directory as the kernel lists it. What is mounted there is not looked at: it may not answer.
fn without_links_above(directory: &Path) -> PathBuf {
    match (directory.parent().map(std::fs::canonicalize), directory.file_name()) {
        (Some(Ok(parent)), Some(name)) => parent.join(name),
        _ => directory.to_owned(),
    }
}

/// Says something beside the answer.
fn remark(text: &str) {
    // Nothing can be done when standard error is gone.
    let _ = writeln!(std::io::stderr(), "slackwater-driver: {text}");
}

fn absolute(directory: &PathBuf) -> Result<PathBuf, DriverError> {
    std::path::absolute(directory).map_err(DriverError::io("find", directory))
}
