//! Makes the export visible: mounts it, or adopts what an earlier process mounted.

mod mounting;
mod replacing;

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

pub(crate) use mounting::{choose_method, has_nfs};
use uuid::Uuid;

use crate::image;
use crate::kernel::{self, MountPoint};
use crate::locks::Locks;
use crate::mounter::Mounter;
use crate::sandbox;
use crate::serving::{self, Service, Serving};
use crate::sparse::SparseFile;
use crate::syncing::Syncing;
use crate::tools::{TOOL_TIME_LIMIT, Tools};
use crate::{AttachError, Method, Mounted, Options, Rights, Source};

/// Where the export shows its snapshots.
pub(crate) const SNAPSHOTS: &str = ".snapshot";

/// The file of the FUSE export with its statistics.
pub(crate) const STATISTICS: &str = ".slackwater-stats";

/// Disks are other people's: only root reaches what is made for them.
const DIRECTORY_MODE: u32 = 0o700;

/// How long the first NFS mount may take: the daemon starts even if the appliance is away, and
/// tries again when a disk is mounted.
const FIRST_MOUNT_TIME_LIMIT: Duration = Duration::from_secs(10);

/// Longest wait for the kernel to free loop devices that nothing is mounted from: beyond it they are held on purpose.
pub(crate) const FREED_WITHIN: Duration = Duration::from_secs(10);

/// How often that is looked at.
const FREED_PAUSE: Duration = Duration::from_millis(20);

/// How long an export that is in use is tried again to be unmounted; who waits for longer has a program in it.
const CLOSED_WITHIN: Duration = Duration::from_secs(2);

/// The export and what is done with it.
#[derive(Debug)]
pub(crate) struct Export {
    options: Options,
    pub(crate) method: Method,
    /// A local directory stands for the export, and nothing is to be mounted.
    is_local: bool,
    /// Without symbolic links, as the kernel prints it.
    pub(crate) state_directory: PathBuf,
    /// Where the export is visible, and where its snapshots are.
    pub(crate) directory: PathBuf,
    snapshots: PathBuf,
    pub(crate) tools: Tools,
    pub(crate) mounter: Mounter,
    pub(crate) locks: Locks,
    /// Targets that were frozen and not thawed.
    pub(crate) frozen: Mutex<HashSet<PathBuf>>,
    /// Targets whose freeze was given up, and goes on until it is undone.
    pub(crate) late: Mutex<HashSet<PathBuf>>,
    /// Syncs that were given up, and go on: the next one of that target waits for what they say.
    pub(crate) late_syncs: Mutex<HashMap<PathBuf, Syncing>>,
    serving: Mutex<Option<Serving>>,
    pub(crate) lost: Vec<Mounted>,
    /// What is mounted at these may go where the export has to be mounted again: nothing uses it.
    unused: Vec<PathBuf>,
}

/// Where a source is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    /// Below the export, as `Mounted::source` shows it.
    pub(crate) path: String,
    /// On this machine.
    pub(crate) file: PathBuf,
}

impl Export {
    /// Mounts or adopts the export.
    pub(crate) async fn open(
        options: Options,
        unused: Vec<PathBuf>,
    ) -> Result<Arc<Self>, AttachError> {
        let state_directory = make_directory(&options.state_directory)?;
        let directory = state_directory.join("export");
        let existing = kernel::mounted_at(&directory)?;
        let tools = Tools::new(options.nfs_address, &options.tool_program);
        let method = match (options.method, &existing) {
            (Some(method), _) => method,
            (None, Some(point)) if point.kind == serving::FILE_SYSTEM => Method::Fuse,
            (None, Some(_)) => Method::Nfs,
            (None, None) if options.prefers_fuse => Method::Fuse,
            (None, None) => choose_method(&tools).await,
        };
        let snapshots = match method {
            Method::Nfs => state_directory.join("export.snapshot"),
            Method::Fuse => directory.join(SNAPSHOTS),
        };
        let mut export = Self {
            method,
            is_local: false,
            state_directory,
            directory,
            snapshots,
            tools,
            mounter: Mounter::default(),
            locks: Locks::default(),
            frozen: Mutex::default(),
            late: Mutex::default(),
            late_syncs: Mutex::default(),
            serving: Mutex::default(),
            lost: Vec::new(),
            unused,
            options,
        };
        export.take(existing).await?;
        let export = Arc::new(export);
        export.tidy().await?;
        Ok(export)
    }

    /// Takes a local directory as the export.
    pub(crate) async fn local(
        options: Options,
        directory: &Path,
    ) -> Result<Arc<Self>, AttachError> {
        let directory = make_directory(directory)?;
        let export = Self {
            method: options.method.unwrap_or(Method::Nfs),
            is_local: true,
            state_directory: make_directory(&options.state_directory)?,
            snapshots: directory.join(SNAPSHOTS),
            directory,
            tools: Tools::new(options.nfs_address, &options.tool_program),
            mounter: Mounter::default(),
            locks: Locks::default(),
            frozen: Mutex::default(),
            late: Mutex::default(),
            late_syncs: Mutex::default(),
            serving: Mutex::default(),
            lost: Vec::new(),
            unused: Vec::new(),
            options,
        };
        let export = Arc::new(export);
        export.tidy().await?;
        Ok(export)
    }

    /// Goes on with what is mounted, or mounts.
    async fn take(&mut self, existing: Option<MountPoint>) -> Result<(), AttachError> {
        let existing = match existing {
            Some(point) if !self.is_ours(&point) => {
                self.replace(&point).await?;
                None
            }
            Some(point) if !self.is_mounted_alike(&point).await => {
                let name = |mounts: Option<&str>| match mounts {
                    Some(mounts) => format!("by a secret path below {mounts}"),
                    None => "by the address of this machine".to_owned(),
                };
                let (is, should) = (name(self.mounted_below(&point)), name(self.mounts_below()));
                self.replace_if_idle(
                    point,
                    &format!("it is mounted {is}, and {should} from now on"),
                )
                .await?
            }
            // Its server cannot be replaced below disks that are in use: before Linux 6.9 a request that it has taken
            // would wait for ever.
            Some(point) if !self.is_served_alike() => {
                self.replace_if_idle(point, "it is served with earlier settings").await?
            }
            // Its disks could not go on by another mount either. FUSE mounts again by itself.
            Some(point)
                if self.method == Method::Nfs
                    && self.are_all_unused()?
                    && self.is_refused().await =>
            {
                self.replace_if_idle(point, "the appliance refuses its handles").await?
            }
            other => other,
        };
        match (self.method, existing) {
            (Method::Nfs, _) => {
                if let Err(error) = self.mount_nfs(FIRST_MOUNT_TIME_LIMIT).await {
                    tracing::warn!(%error, "the export is mounted when a disk is");
                }
            }
            (Method::Fuse, None) => self.start_serving()?,
            (Method::Fuse, Some(_)) => match self.service().adopt()? {
                Some(serving) => self.set_serving(Some(serving)),
                None => self.recover().await?,
            },
        }
        match self.method {
            Method::Nfs => Ok(()),
            Method::Fuse => self.refuse_links(&self.directory, TOOL_TIME_LIMIT).await,
        }
    }

    /// Whether a FUSE export is served with the settings that it would be served with now.
    pub(crate) fn is_served_alike(&self) -> bool {
        self.method == Method::Nfs || self.is_local || self.service().is_served_alike()
    }

    fn start_serving(&self) -> Result<(), AttachError> {
        make_directory(&self.directory)?;
        let mut source = self.source();
        if let Some(mounts) = self.mounts_below() {
            source.push_str(&format!("/{mounts}"));
        }
        let serving = self.service().start(&source, &self.directory)?;
        self.set_serving(Some(serving));
        Ok(())
    }

    fn service(&self) -> Service {
        let Options { fuse_program, mounts_end, .. } = &self.options;
        Service::new(fuse_program.clone(), &self.state_directory, *mounts_end)
    }

    fn set_serving(&self, serving: Option<Serving>) {
        *self.serving.lock().unwrap_or_else(PoisonError::into_inner) = serving;
    }

    /// What the files of its disks may do here.
    pub(crate) fn rights(&self) -> Rights {
        self.options.rights
    }

    /// See that the export can be used.
    pub(crate) async fn require(&self) -> Result<(), AttachError> {
        if self.is_local {
            return Ok(());
        }
        let is_over = match self.method {
            Method::Nfs => return self.mount_nfs(TOOL_TIME_LIMIT).await,
            Method::Fuse => {
                let serving = self.serving.lock().unwrap_or_else(PoisonError::into_inner);
                serving.as_ref().is_none_or(Serving::is_over)
            }
        };
        if is_over {
            return Err(AttachError::Export {
                address: self.options.nfs_address,
                export: self.options.export.clone(),
                reason: "its FUSE mount was taken away; restart slackwater-driver".to_owned(),
            });
        }
        Ok(())
    }

    /// Opens a regular file for reading and writing.
    pub(crate) async fn open_file(&self, path: String) -> Result<File, AttachError> {
        self.require().await?;
        check_path(&path)?;
        let directory = self.directory.to_path_buf();
        let open = move || {
            let found = sandbox::open(&directory, Path::new(&path))?;
            // By the descriptor: its name may be another file's by now.
            let named = format!("/proc/self/fd/{}", found.as_raw_fd());
            let opened = File::options().read(true).write(true).open(named);
            opened.map_err(|source| AttachError::System {
                action: "open",
                path: PathBuf::from(path),
                source,
            })
        };
        tokio::task::spawn_blocking(open).await.unwrap_or(Err(AttachError::Interrupted))
    }

    /// Where a source is.
    pub(crate) fn place(&self, source: Source<'_>) -> Result<Place, AttachError> {
        match source {
            Source::File(path) => {
                check_path(path)?;
                Ok(Place { path: path.to_owned(), file: self.directory.join(path) })
            }
            Source::Snapshot(id) => {
                let file = self.snapshots.join(id.to_string());
                Ok(Place { path: format!("{SNAPSHOTS}/{id}"), file })
            }
        }
    }

    /// The path below the export of a file that the kernel names. One whose mount is gone from
    /// the tree is printed without the mount's own path.
    fn path_of(&self, file: &Path) -> String {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        if let Ok(id) = file.strip_prefix(&self.snapshots) {
            return format!("{SNAPSHOTS}/{}", text(id));
        }
        let below = file.strip_prefix(&self.directory).or_else(|_| file.strip_prefix("/"));
        let path = text(below.unwrap_or(file));
        match Uuid::try_parse(&path) {
            Ok(_) => format!("{SNAPSHOTS}/{path}"),
            Err(_) => path,
        }
    }

    /// The loop devices on files of the export, whoever mounted them.
    pub(crate) fn devices(&self) -> Result<Vec<kernel::LoopDevice>, AttachError> {
        kernel::loop_devices(|file| self.has(file))
    }

    /// What a mount of a loop device, or of an image, shows.
    pub(crate) fn disk(&self, point: &MountPoint) -> Option<Mounted> {
        let (file, loop_device) = match kernel::loop_device(&point.source) {
            Some(device) => (device.file, Some(device.device)),
            None if self.is_image(point) => (point.source.clone(), None),
            None => return None,
        };
        Some(Mounted {
            target: point.target.clone(),
            source: self.path_of(&file),
            read_only: point.read_only,
            loop_device,
        })
    }

    /// Whether an image is mounted there from its file of the export.
    fn is_image(&self, point: &MountPoint) -> bool {
        point.kind == image::FILE_SYSTEM && self.has(&point.source)
    }

    /// Whether a path of this machine is one of a file of the export.
    fn has(&self, file: &Path) -> bool {
        file.starts_with(&self.directory) || file.starts_with(&self.snapshots)
    }

    /// Where the snapshots are.
    pub(crate) fn snapshot_directory(&self) -> &Path {
        &self.snapshots
    }

    /// The disks that are mounted below the state directory.
    pub(crate) fn disks(&self) -> Result<Vec<Mounted>, AttachError> {
        let points = kernel::mount_points()?.into_iter();
        let ours = points.filter(|point| point.target.starts_with(&self.state_directory));
        Ok(ours.filter_map(|point| self.disk(&point)).collect())
    }

    /// The disks of this export that are mounted anywhere in this mount namespace.
    pub(crate) fn disks_anywhere(&self) -> Result<Vec<Mounted>, AttachError> {
        let devices = self.devices()?;
        // An image without a device is known by its file.
        let is_ours = |mounted: &Mounted| {
            let is_it = |device: &PathBuf| devices.iter().any(|other| other.device == *device);
            mounted.loop_device.as_ref().is_none_or(is_it)
        };
        let points = kernel::mount_points()?.into_iter();
        Ok(points.filter_map(|point| self.disk(&point)).filter(is_ours).collect())
    }

    /// The disks that are mounted below the state directory, and the images that are mounted anywhere from
    /// files of this export: no loop device tells of these.
    fn users(&self) -> Result<Vec<Mounted>, AttachError> {
        let mut users = self.disks()?;
        for image in self.disks_anywhere()?.into_iter().filter(|one| one.loop_device.is_none()) {
            if !users.contains(&image) {
                users.push(image);
            }
        }
        Ok(users)
    }

    /// Puts right what a killed process left half done.
    async fn tidy(self: &Arc<Self>) -> Result<(), AttachError> {
        for device in self.devices()?.iter().filter(|device| !device.is_autoclear) {
            // Attached, not yet mounted or not yet marked: the mark frees it, now or later.
            self.detach_device(&device.device).await?;
        }
        SparseFile::remove_left(&self.state_directory);
        self.thaw_all().await
    }

    /// Takes the export away.
    pub(crate) async fn close(&self) -> Result<(), AttachError> {
        self.wait_until_unused().await?;
        self.mounter.end();
        if self.is_local {
            return Ok(());
        }
        if self.method == Method::Nfs {
            self.unmount_all(&self.snapshots).await?;
            let _absent = fs::remove_dir(&self.snapshots);
        }
        self.unmount_all(&self.directory).await?;
        let serving = self.serving.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(serving) = serving {
            serving.end().await;
        }
        let _absent = fs::remove_dir(&self.directory);
        Ok(())
    }

    /// Waits for loop devices whose disks are unmounted: programs that look at all devices of the machine hold one open
    /// for a moment, and the kernel frees it after that.
    ///
    /// # Errors
    /// `Busy`: a disk or an image is mounted, or a device was not freed in [`FREED_WITHIN`].
    async fn wait_until_unused(&self) -> Result<(), AttachError> {
        let deadline = Instant::now() + FREED_WITHIN;
        loop {
            let (disks, devices) = (self.users()?, self.devices()?);
            if disks.is_empty() && devices.is_empty() {
                return Ok(());
            }
            let points = kernel::mount_points()?;
            let are_going = disks.is_empty() && devices.iter().all(|one| one.is_going(&points));
            if !are_going || Instant::now() >= deadline {
                let disks = disks.into_iter().map(|disk| disk.target);
                let devices = devices.into_iter().map(|device| device.device);
                return Err(AttachError::Busy { targets: disks.chain(devices).collect() });
            }
            tokio::time::sleep(FREED_PAUSE).await;
        }
    }
}

/// Refuses what could lead out of the export, or confuse what reads it back from the kernel.
fn check_path(path: &str) -> Result<(), AttachError> {
    let fault = if path.is_empty() {
        "it is empty"
    } else if path.chars().any(char::is_control) {
        "it holds a control character"
    } else if path.split('/').any(|part| matches!(part, "" | "." | "..")) {
        "each part must be a name"
    } else if path.split('/').next() == Some(SNAPSHOTS) {
        "a snapshot is named by its id"
    } else {
        return Ok(());
    };
    Err(AttachError::Path { got: path.to_owned(), reason: fault })
}

/// Makes a directory with those above it, for the owner alone; its path as the kernel prints it.
pub(crate) fn make_directory(path: &Path) -> Result<PathBuf, AttachError> {
    let failed = |source| AttachError::System {
        action: "make the directory",
        path: path.to_owned(),
        source,
    };
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true).mode(DIRECTORY_MODE).create(path).map_err(failed)?;
    path.canonicalize().map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_that_lead_elsewhere_are_refused() {
        for path in ["workers/a/disks/b", "a", "a.b/..c"] {
            assert!(check_path(path).is_ok(), "{path}");
        }
        for path in ["", "/a", "a/", "a//b", "..", "a/../b", "./a", "a\nb", ".snapshot/x"] {
            assert!(check_path(path).is_err(), "{path:?}");
        }
    }

    /// An export that is a directory, with these options.
    pub(super) async fn local(
        directory: &Path,
        method: Option<Method>,
        address: &str,
    ) -> Arc<Export> {
        let options = Options {
            method,
            nfs_address: address.parse().unwrap(),
            export: "/slackwater".to_owned(),
            mount_path: None,
            state_directory: directory.join("state"),
            fuse_program: Vec::new(),
            tool_program: Vec::new(),
            prefers_fuse: false,
            rights: Rights::default(),
            mounts_end: false,
        };
        Export::local(options, &directory.join("export")).await.unwrap()
    }

    #[tokio::test]
    async fn a_file_is_known_again_with_and_without_the_path_of_its_mount() {
        let directory = tempfile::tempdir().unwrap();
        let export = local(directory.path(), None, "127.0.0.1:2049").await;
        let id = Uuid::from_u128(7);
        let file = export.place(Source::File("workers/w/disks/d")).unwrap();
        let snapshot = export.place(Source::Snapshot(id)).unwrap();
        for place in [&file, &snapshot] {
            assert_eq!(export.path_of(&place.file), place.path);
            assert_eq!(export.path_of(&Path::new("/").join(&place.path)), place.path);
        }
        // The snapshots are a mount of their own over NFS.
        assert_eq!(export.path_of(Path::new(&format!("/{id}"))), snapshot.path);
    }
}
