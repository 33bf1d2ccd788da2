//! `slackwater-driver attach` and `detach`: a disk of the appliance as a directory, for people,
//! scripts and machines without an engine. Nothing of a daemon is needed; a state directory of
//! its own is, so that a daemon never takes the mounts for its own.

use std::path::PathBuf;

use clap::{ArgGroup, Args};
use slackwater_attach::{Access, Attach, AttachError, Options, Rights, Source};
use slackwater_client::types::SnapshotId;
use uuid::Uuid;

use super::print;
use crate::daemon;
use crate::error::DriverError;
use crate::settings::Config;

/// Where clones that are made here lie on the appliance.
const CLONES_FOLDER: &str = "attached";

/// Attaches a disk.
#[derive(Clone, Debug, Args)]
#[command(group(ArgGroup::new("source").required(true).args(["file", "snapshot", "clone"])))]
pub(super) struct AttachArguments {
    /// Where it is to be seen; made if missing, with those above it for root alone
    directory: PathBuf,
    /// A file of the appliance that holds an ext4
    #[arg(long, value_name = "PATH")]
    file: Option<String>,
    /// A snapshot of such a file, read-only
    #[arg(long, value_name = "ID")]
    snapshot: Option<SnapshotId>,
    /// A new clone of a snapshot, for which a worker that joined needs a token; its path on the appliance is printed
    #[arg(long, value_name = "ID")]
    clone: Option<SnapshotId>,
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
) -> Result<(), DriverError> {
    let _lock = daemon::take_directories(config)?;
    let rights = Rights { set_id: arguments.suid, devices: arguments.dev };
    let options = Options { rights, ..config.attach_options().await? };
    let attach = Attach::open(options).await?;
    let directory = absolute(&arguments.directory)?;
    let mut path = arguments.file.clone().unwrap_or_default();
    let source = if let Some(id) = arguments.snapshot {
        Source::Snapshot(Uuid::from_bytes(*id.as_bytes()))
    } else {
        if let Some(id) = arguments.clone {
            path = format!("{CLONES_FOLDER}/{}", Uuid::new_v4());
            config.target.client()?.create_clone(id, &path).await?;
            print(&format!("{path}\n"));
        }
        Source::File(path.trim_start_matches('/'))
    };
    let is_read_only = arguments.read_only || arguments.snapshot.is_some();
    let access = if is_read_only { Access::ReadOnly } else { Access::ReadWrite };
    if let Err(error) = attach.mount(source, &directory, access).await {
        // The export stays if another disk needs it.
        let _ = attach.shut_down().await;
        return Err(error.into());
    }
    Ok(())
}

/// Detaches, and lets go of the export with the last disk; an error if what was written last did
/// not come to the appliance.
pub(super) async fn detach(
    arguments: &DetachArguments,
    config: &Config,
) -> Result<(), DriverError> {
    let _lock = daemon::lock(&config.state_dir)?;
    let attach = Attach::open(config.attach_options().await?).await?;
    let directory = absolute(&arguments.directory)?;
    // Unmounting drops what cannot be written, and says nothing.
    let lost = match attach.sync(&directory).await {
        Ok(()) | Err(AttachError::NotMounted { .. }) => None,
        Err(error @ AttachError::LostWrites { .. }) => Some(error),
        Err(error) => return Err(error.into()),
    };
    attach.unmount(&directory).await?;
    let ended = match attach.shut_down().await {
        Ok(()) | Err(AttachError::Busy { .. }) => Ok(()),
        Err(error) => Err(error.into()),
    };
    lost.map_or(ended, |error| Err(error.into()))
}

fn absolute(directory: &PathBuf) -> Result<PathBuf, DriverError> {
    std::path::absolute(directory).map_err(DriverError::io("find", directory))
}
