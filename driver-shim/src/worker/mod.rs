//! Volumes: what the layers, containers and snapshots of the engines are on the appliance and on this machine.
//!
//! ```text
//!              a volume's content
//!   Inherited ----- first write -----> Disk ------ seal ------> Snapshot
//!       |                (a clone of what its parent is)            ^
//!       +---------------------------- bind -------------------------+
//!
//!   above images:      Upper --- commit ---> Lower --- pack and seal, later -----> Image
//!                        +--- Apply ---> ImageFile ------ seal ---------------------^
//!
//!   appliance:  workers/ID/disks/UUID   one clone for each Disk, one for all that is Upper, or for one
//!               workers/ID/holds/UUID   one clone for each Snapshot and Image: keeps it alive
//!               workers/ID/lease        heartbeat
//!               published/SNAPSHOT      keeps snapshots that images in a registry refer to
//!   machine:    STATE/mounts/UUID       a disk, mounted for writing
//!               STATE/views/SNAPSHOT    a snapshot, mounted for reading, shared by all readers
//!               STATE/images/SNAPSHOT   the image of a layer, the same (layers.rs)
//! ```
//!
//! Invariants (ARCHITECTURE.md states them too):
//! - **D1** Every file of this worker on the appliance is named by exactly one volume, or is a disk of upper
//!   directories, or listed as obsolete; it is listed before it is made. After a crash what the state does not know is
//!   obsolete.
//! - **D2** A snapshot that a volume is has a clone of this worker, so the appliance keeps it.
//!   The appliance deletes it when its last clone goes; a worker deletes only what it took itself
//!   and nothing was ever cloned from.
//! - **D3** What is mounted for writing is the disk of one volume, or of one worker's upper directories, by that
//!   worker; such a directory is that of one volume.
//! - **D4** A snapshot is taken of a frozen file system: every one mounts read-only as it is.
//! - **D5** What an engine was told is in the state first.
//! - **D6** What has nothing below it is cloned from an empty disk that is, byte for byte, what
//!   this worker's `mkfs.ext4` made, or that made it for this volume alone.
//!
//! Work on one volume is done one at a time, under its lock; a volume is locked before what it
//! was made above, never after it. Every operation runs in a task of its own, so that an engine
//! that goes away in the middle of a call leaves nothing half done.

mod ahead;
mod appliance;
mod capturing;
mod chains;
mod empty_disk;
mod error;
mod imaging;
mod init_layer;
mod keyed;
mod layers;
mod lease;
mod lowers;
mod merging;
mod mounting;
mod publications;
mod reap;
mod references;
mod removal;
mod sealed;
mod sealing;
mod state;
mod superblock;
mod taking;
mod trees;
mod unused;
mod uppers;
mod usage;
mod volume;
mod waiting;
mod without_init;

use std::collections::HashMap;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use parking_lot::Mutex;
use slackwater_attach::Attach;
use slackwater_client::Client;
use slackwater_client::types::{SnapshotId, Timestamp};
use tokio::sync::{Notify, OnceCell, Semaphore};
use uuid::Uuid;

pub use self::appliance::Held;
pub use self::chains::Registration;
pub use self::error::WorkerError;
pub use self::imaging::{IMAGE_SIZE_BYTES, NewImage};
pub(crate) use self::keyed::KeyedLocks;
pub use self::layers::Rootfs;
pub use self::lease::{LEASE_INTERVAL, Lease};
pub use self::lowers::IMAGED_AFTER;
pub use self::merging::{Merged, ViewOfImages};
pub use self::mounting::{Pin, View};
pub(crate) use self::publications::publisher;
pub use self::publications::{Chosen, Published, Unpublished};
pub use self::reap::Reconciled;
pub use self::trees::{Added, Tree, Written};
pub use self::uppers::upper_of;
pub use self::volume::{
    Access, Archive, ContainerdExtra, Content, Directory, DockerExtra, Engine, Extra, Key, Kind,
    LayerKind, MountedAs, OwnDisk, Push, SnapshotRef, Usage, Volume,
};
pub use self::without_init::BelowContainer;

use self::state::{Change, State};
use crate::credential;
use crate::metrics::Metrics;
use crate::registry::Registries;
use crate::trust::Trust;

/// Size of a disk where none is asked for. Sparse, so only what is written counts; large enough
/// that nobody meets it, small enough that the file system's own maps stay a few MiB.
pub const DISK_SIZE_BYTES_DEFAULT: u64 = 64 << 30;

/// An appliance with less room than this is full for a layer, and may refuse heartbeats: it is what
/// one segment takes.
pub(crate) const FULL_BELOW_BYTES: u64 = 64 << 20;

/// What a worker is made of.
#[derive(Debug, Clone)]
pub struct WorkerOptions {
    /// The appliance.
    pub client: Client,
    /// How its files are attached; its `state_directory` is taken to be the worker's.
    pub attach: slackwater_attach::Options,
    /// Where the state, the mounts and the recordings are; made if it is missing.
    pub state_directory: PathBuf,
    /// Size of a disk where none is asked for.
    pub disk_size_bytes: u64,
    /// How layers of containerd's images are kept that have nothing below them; the others are kept as what is
    /// below them.
    pub layers: LayerKind,
    /// Which references, and whose chains, it takes.
    pub trust: Trust,
    /// Time from the commit of a layer to its image, where layers are images and nothing needs it before.
    pub imaged_after: Duration,
    /// How registries are asked whether this worker may read a blob.
    pub registries: Registries,
}

/// The volumes of this machine. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Worker {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    options: WorkerOptions,
    worker_id: Uuid,
    state: State,
    attach: OnceCell<Attach>,
    volume_locks: KeyedLocks<Key>,
    view_locks: KeyedLocks<SnapshotId>,
    /// Whether it was said that the kernel mounts no images.
    has_warned_of_images: AtomicBool,
    /// Layers that are packed at once.
    packing: Semaphore,
    /// Disks that are captured at once: each has a snapshot and a mount of its own for that time.
    moments: Semaphore,
    /// Work on disks that waits for the appliance.
    disk_work: waiting::DiskWork,
    /// By size: each is made once.
    empty_disk_locks: KeyedLocks<u64>,
    /// Guards of views and images, by snapshot.
    views: Mutex<HashMap<SnapshotId, usize>>,
    /// Turns of what is made ahead.
    ahead: Arc<Semaphore>,
    /// When a disk could not be made ahead.
    ahead_failed_at: Mutex<Option<std::time::Instant>>,
    /// Images that are unmounted if nothing uses them.
    idle_images: Mutex<layers::IdleImages>,
    /// Volumes whose mounts the driver itself is using.
    pinned: Mutex<HashMap<Key, usize>>,
    /// Files that are being made: listed as obsolete, but not to be deleted.
    in_progress: Mutex<std::collections::HashSet<Uuid>>,
    /// Snapshots that were captured and may still be bound.
    captured: Mutex<HashMap<SnapshotId, std::time::Instant>>,
    /// What is known of snapshots.
    figures: Mutex<HashMap<SnapshotId, usage::Figures>>,
    /// References that were written and may come back at once.
    written: references::Written,
    metrics: Metrics,
    /// Obsolete files whose deletion failed.
    undeleted: reap::Undeleted,
    /// Held while it is decided which disk takes new upper directories, and for reading until a volume has one.
    upper_disk: tokio::sync::RwLock<()>,
    /// What is known of the current one while it has none.
    upper_disk_idle: Mutex<Option<unused::Idle>>,
    /// Disks that nothing uses, and that were to be unmounted for another export.
    freed_disks: Mutex<std::collections::HashSet<Uuid>>,
    /// Read while a volume is given directories as lower ones, written while one is replaced by an image.
    giving: tokio::sync::RwLock<()>,
    /// Wakes what makes the images of committed layers.
    imaging: Arc<Notify>,
    /// Held while the image of a committed layer is made.
    imaging_locks: KeyedLocks<Key>,
    imaging_failures: Mutex<HashMap<Key, lowers::Failed>>,
    /// Held while upper directories are removed.
    upper_removals: tokio::sync::Mutex<()>,
    /// Held while a disk of upper directories is synced.
    upper_syncs: KeyedLocks<Uuid>,
    /// Held while it is counted what an upper directory holds.
    upper_walks: Arc<tokio::sync::Mutex<()>>,
    /// What was counted last, by the name of the directory.
    upper_usages: Mutex<HashMap<Uuid, Usage>>,
    /// Upper directories that the driver reads, by name.
    held_uppers: Mutex<HashMap<Uuid, usize>>,
    /// Disks from which something could not be removed.
    unremoved: reap::Undeleted,
    reap: Arc<Notify>,
    reaping: tokio::sync::Mutex<()>,
    /// The files on the appliance were compared with the state since the start.
    has_compared_files: AtomicBool,
}

impl Inner {
    fn new(options: WorkerOptions, worker_id: Uuid, state: State) -> Self {
        Self {
            options,
            worker_id,
            state,
            attach: OnceCell::new(),
            volume_locks: KeyedLocks::default(),
            view_locks: KeyedLocks::default(),
            has_warned_of_images: AtomicBool::new(false),
            packing: Semaphore::new(imaging::PACKED_AT_ONCE),
            moments: Semaphore::new(imaging::PACKED_AT_ONCE),
            disk_work: waiting::DiskWork::default(),
            empty_disk_locks: KeyedLocks::default(),
            views: Mutex::default(),
            ahead: ahead::turns(),
            ahead_failed_at: Mutex::default(),
            idle_images: Mutex::default(),
            pinned: Mutex::default(),
            in_progress: Mutex::default(),
            captured: Mutex::default(),
            figures: Mutex::default(),
            written: references::Written::default(),
            metrics: Metrics::default(),
            undeleted: reap::Undeleted::default(),
            upper_disk: tokio::sync::RwLock::default(),
            upper_disk_idle: Mutex::default(),
            freed_disks: Mutex::default(),
            giving: tokio::sync::RwLock::default(),
            imaging: Arc::new(Notify::new()),
            imaging_locks: KeyedLocks::default(),
            imaging_failures: Mutex::default(),
            upper_removals: tokio::sync::Mutex::default(),
            upper_syncs: KeyedLocks::default(),
            upper_walks: Arc::default(),
            upper_usages: Mutex::default(),
            held_uppers: Mutex::default(),
            unremoved: reap::Undeleted::default(),
            reap: Arc::new(Notify::new()),
            reaping: tokio::sync::Mutex::default(),
            has_compared_files: AtomicBool::new(false),
        }
    }
}

impl Worker {
    /// Opens the worker's state, and takes over what an earlier process left. Does not need the
    /// appliance: calls that do fail until it is there.
    ///
    /// # Errors
    /// `State` if another daemon has it open, `Local` if a directory cannot be made.
    pub async fn open(mut options: WorkerOptions) -> Result<Self, WorkerError> {
        let local = |path: &Path| {
            let path = path.to_owned();
            move |source| WorkerError::Local { path, source }
        };
        for name in ["", "mounts", "views", "images", "merged", "recordings"] {
            let path = options.state_directory.join(name);
            std::fs::create_dir_all(&path).map_err(local(&path))?;
        }
        // The kernel names mounts by paths without symlinks.
        let canonical = options.state_directory.canonicalize();
        options.state_directory = canonical.map_err(local(&options.state_directory))?;
        options.attach.state_directory.clone_from(&options.state_directory);
        let state = State::open(&options.state_directory.join("state.redb"))?;
        // Not before the state is this process's alone.
        merging::forget_mount_points(&options.state_directory);
        let worker_id = identity(&state, &options.state_directory, &machine_id())?;
        forget_users_of_another_boot(&state)?;
        let worker = Self { inner: Arc::new(Inner::new(options, worker_id, state)) };
        // A dead process may have been in the middle of one.
        worker.forget_commits().await;
        worker.start_reaping();
        worker.start_imaging();
        worker.start_lease();
        worker.start_reconciling();
        Ok(worker)
    }

    /// The volume of that name. From memory.
    #[must_use]
    pub fn get(&self, key: &Key) -> Option<Volume> {
        self.inner.state.get(key)
    }

    /// The chain id of the layers that a volume is known to show. From memory.
    #[must_use]
    pub fn chain_of(&self, key: &Key) -> Option<String> {
        match self.get(key)?.extra {
            Extra::Containerd(extra) => extra.chain,
            Extra::Docker(_) => None,
        }
    }

    /// All volumes of an engine. From memory.
    #[must_use]
    pub fn list(&self, engine: Engine) -> Vec<Volume> {
        self.inner.state.of_engine(engine)
    }

    /// The first volume of an engine, in order of names, that is as asked for. From memory; `is_wanted` runs under the lock
    /// of the volumes: it must not ask the worker for any.
    #[must_use]
    pub fn find(&self, engine: Engine, is_wanted: impl Fn(&Volume) -> bool) -> Option<Volume> {
        self.inner.state.find(|volume| volume.key.engine == engine && is_wanted(volume))
    }

    /// The volumes that were made directly above this one. From memory.
    #[must_use]
    pub fn children(&self, key: &Key) -> Vec<Key> {
        self.inner.state.children(key)
    }

    /// Makes a volume: a record alone, durable; nothing is asked of the appliance.
    ///
    /// # Errors
    /// `Exists`, `ParentNotFound`, `State`.
    pub async fn create(
        &self,
        key: Key,
        parent: Option<Key>,
        extra: Extra,
    ) -> Result<Volume, WorkerError> {
        self.create_keeping(key, parent, extra, LayerKind::Disks).await
    }

    /// Makes a volume as [`Self::create`] does, and says how what is written to it is kept. One of images has its upper
    /// directory from the beginning, and counts as mounted, to stay so until it is sealed or removed.
    ///
    /// # Errors
    /// As [`Self::create`]; for one of images `Appliance` and `Attach`, too.
    pub async fn create_keeping(
        &self,
        key: Key,
        parent: Option<Key>,
        extra: Extra,
        layers: LayerKind,
    ) -> Result<Volume, WorkerError> {
        let volume = Volume::new(key, parent, extra, layers);
        if layers == LayerKind::Images {
            return self.create_upper(volume).await;
        }
        let made = volume.clone();
        self.apply(vec![Change::Create(Box::new(volume))]).await?;
        Ok(made)
    }

    /// Changes what the engine keeps with a volume, durably.
    ///
    /// # Errors
    /// `NotFound`, `State`.
    pub async fn update(
        &self,
        key: &Key,
        change: impl FnOnce(&mut Extra) + Send + 'static,
    ) -> Result<Volume, WorkerError> {
        self.change(key, |volume| change(&mut volume.extra)).await
    }

    /// Its id, given when its state was made.
    #[must_use]
    pub fn worker_id(&self) -> Uuid {
        self.inner.worker_id
    }

    /// Which references, and whose chains, it takes.
    #[must_use]
    pub fn trust(&self) -> &Trust {
        &self.inner.options.trust
    }

    /// How layers are to be kept that have nothing below them.
    #[must_use]
    pub fn layers_setting(&self) -> LayerKind {
        self.inner.options.layers
    }

    /// Size of a disk where none is asked for.
    #[must_use]
    pub fn disk_size_bytes(&self) -> u64 {
        self.inner.options.disk_size_bytes
    }

    /// What is counted of the engines' calls.
    #[must_use]
    pub fn metrics(&self) -> &Metrics {
        &self.inner.metrics
    }

    /// Files on the appliance that nobody needs and that are still there.
    #[must_use]
    pub fn waiting_to_be_deleted(&self) -> usize {
        self.inner.state.obsolete().len()
    }

    /// Where the recordings of layers are.
    #[must_use]
    pub fn recordings_directory(&self) -> PathBuf {
        self.inner.options.state_directory.join("recordings")
    }

    /// The appliance.
    #[must_use]
    pub fn client(&self) -> &Client {
        &self.inner.options.client
    }

    /// How files are attached, if they were attached already.
    #[must_use]
    pub fn attached(&self) -> Option<&Attach> {
        self.inner.attach.get()
    }

    /// What attaches files: opened at the first call.
    ///
    /// # Errors
    /// `Attach`.
    pub async fn attach(&self) -> Result<&Attach, WorkerError> {
        let open = || async {
            self.let_go_of_disk_of_before().await;
            let (options, unused) = (self.inner.options.attach.clone(), self.unused_targets());
            let attach = Attach::open_freeing(options, unused).await?;
            for lost in attach.lost() {
                tracing::error!(target = %lost.target.display(), source = %lost.source,
                    "the export died with its processes: what had this mounted sees I/O errors");
            }
            Ok::<_, WorkerError>(attach)
        };
        self.inner.attach.get_or_try_init(open).await
    }

    /// Where the state, the mounts and the recordings are.
    #[must_use]
    pub fn state_directory(&self) -> &Path {
        &self.inner.options.state_directory
    }

    /// Applies changes of the state on a thread that may wait for the disk.
    async fn apply(&self, changes: Vec<Change>) -> Result<(), WorkerError> {
        let inner = Arc::clone(&self.inner);
        let applied = tokio::task::spawn_blocking(move || inner.state.apply(&changes)).await;
        self.inner.reap.notify_one();
        applied.map_err(interrupted)?
    }

    /// Changes one volume's record.
    async fn change(
        &self,
        key: &Key,
        change: impl FnOnce(&mut Volume) + Send + 'static,
    ) -> Result<Volume, WorkerError> {
        let inner = Arc::clone(&self.inner);
        let key = key.clone();
        let changed = tokio::task::spawn_blocking(move || inner.state.update(&key, change)).await;
        self.inner.reap.notify_one();
        changed.map_err(interrupted)?
    }

    /// Runs an operation to its end, also if the caller stops waiting for it.
    async fn run<T, F, O>(&self, operation: O) -> Result<T, WorkerError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, WorkerError>> + Send + 'static,
        O: FnOnce(Self) -> F,
    {
        let outcome = tokio::spawn(operation(self.clone())).await.map_err(interrupted)?;
        match outcome {
            Err(
                error @ (WorkerError::Attach { .. }
                | WorkerError::Image { .. }
                | WorkerError::InitLayer { .. }
                | WorkerError::Local { .. }),
            ) => Err(self.reason_of_appliance(&error.to_string()).await.unwrap_or(error)),
            other => other,
        }
    }

    fn existing(&self, key: &Key) -> Result<Volume, WorkerError> {
        self.get(key).ok_or_else(|| WorkerError::NotFound { key: key.clone() })
    }
}

fn interrupted(error: tokio::task::JoinError) -> WorkerError {
    WorkerError::Interrupted { reason: error.to_string() }
}

/// The moment.
pub(crate) fn now() -> Timestamp {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let nanos = since.map(|since| since.as_nanos()).unwrap_or_default();
    Timestamp::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

/// The id of this worker. It is the name of its directory on the appliance, where it takes back
/// what it does not know: a copy of this machine must not take it for its own.
fn identity(state: &State, directory: &Path, machine: &str) -> Result<Uuid, WorkerError> {
    let known = state.fact("worker_id").and_then(|text| text.parse().ok());
    let before = state.fact("machine_id").unwrap_or_default();
    let is_copy = !machine.is_empty() && !before.is_empty() && machine != before;
    if is_copy && !state.is_empty() {
        return Err(WorkerError::OtherMachine { path: directory.to_owned() });
    }
    let id = match known.filter(|_| !is_copy) {
        Some(id) => id,
        None => {
            // The appliance knows it by another id, or another machine has it: two would replace it for each other.
            let path = directory.to_owned();
            let discarded = credential::discard(directory);
            if discarded.map_err(|source| WorkerError::Local { path, source })? {
                tracing::warn!(
                    "the credential was of another worker and is removed: this one has a new id, and has to join"
                );
            }
            Uuid::new_v4()
        }
    };
    // That of another worker.
    let upper_disk = is_copy.then(|| Change::upper_disk(None));
    let facts = [
        Change::Fact("worker_id".to_owned(), id.to_string()),
        // One that has no id today is not forgotten.
        Change::Fact(
            "machine_id".to_owned(),
            if machine.is_empty() { before } else { machine.to_owned() },
        ),
    ];
    state.apply(&facts.into_iter().chain(upper_disk).collect::<Vec<_>>())?;
    Ok(id)
}

/// The id of the worker that has this state directory, which is made now if it has none.
///
/// # Errors
/// As [`Worker::open`].
pub fn worker_id_in(state_directory: &Path) -> Result<Uuid, WorkerError> {
    let state = State::open(&state_directory.join("state.redb"))?;
    identity(&state, state_directory, &machine_id())
}

/// The id of this machine; one without an id has none to compare.
fn machine_id() -> String {
    std::fs::read_to_string("/etc/machine-id").unwrap_or_default().trim().to_owned()
}

/// After a reboot nothing is mounted, and no engine will release what it acquired before.
fn forget_users_of_another_boot(state: &State) -> Result<(), WorkerError> {
    let path = Path::new("/proc/sys/kernel/random/boot_id");
    let boot = std::fs::read_to_string(path)
        .map_err(|source| WorkerError::Local { path: path.to_owned(), source })?;
    let boot = boot.trim().to_owned();
    if state.fact("boot_id").as_ref() == Some(&boot) {
        return Ok(());
    }
    let mut changes = vec![Change::Fact("boot_id".to_owned(), boot)];
    let is_lower = |volume: &Volume| matches!(volume.content, Content::Lower { .. });
    for mut volume in state.matching(|volume| volume.is_in_use() || is_lower(volume)) {
        volume.users = 0;
        volume.is_kept_mounted = false;
        volume.mounted = None;
        match is_lower(&volume) {
            // Its disk is mounted again: what is in the journal counts.
            true => volume.is_damaged = false,
            false => volume.given = Vec::new(),
        }
        changes.push(Change::Put(Box::new(volume)));
    }
    state.apply(&changes)
}
