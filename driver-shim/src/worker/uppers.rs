//! Upper directories: what is written above images, for all volumes of a worker on one disk, but for those that are to
//! have their own.
//!
//! ```text
//!   appliance                        machine
//!   workers/ID/disks/DISK   <----    STATE/mounts/DISK        an ext4 that stays mounted
//!                                      NAME/upper, NAME/work  of one volume
//!                                      NAME/...               of a volume that is gone: removed in the background
//! ```
//! So a container costs a directory, and no clone, loop device and mount of its own. One disk takes new directories, the
//! *current* one. It is given up when writes to it were lost, when it cannot be used or is nearly full, when nothing is
//! on it for some time (unused.rs), or when it takes much more space on the appliance than its files: what ext4 freed stays there.
//! The next volume then gets a new one. A disk that was given up goes with the last volume that has, or was given, a
//! directory on it.
//!
//! A volume that is to have a disk of its own has its directory on one that never is the current one, and that nothing is
//! to be removed from. Else all that holds for a disk that was given up holds for that one.
//!
//! Invariants:
//! - A directory is named by a volume before it is made, and its name is never used again: one that no volume names can
//!   be removed, once no engine has it mounted and the driver does not read it. Those that are lower ones stay for what was
//!   given them, too (lowers.rs).
//! - A volume gets a directory on the current disk, which stays the current one until that is in the state, or on one
//!   that nothing else has.
//! - A sync of a disk that failed damages all that have a directory there: the kernel does not tell whose write was
//!   lost, and tells it to the first that syncs. A sync through an overlay takes no error away; one by a program on a root
//!   without images below does.

use std::collections::HashSet;
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use slackwater_attach::{AttachError, Source};
use tokio::sync::{RwLockReadGuard, RwLockWriteGuard};
use uuid::Uuid;

use super::layers::{copy_attributes, on_disk};
use super::merging::path_of;
use super::removal::{Chosen, Removal, remove_from};
use super::state::Change;
use super::volume::{Content, Directory, Key, Volume};
use super::{Worker, WorkerError};

/// Size of a disk of upper directories, or that of a volume's own disk if that is larger: all containers of a machine
/// share it. Sparse, so only what is written counts. It is not the size of images' files.
const UPPER_DISK_SIZE_BYTES: u64 = 1 << 40;

/// A disk that takes less space on the appliance is kept, however little is on it.
const KEPT_BYTES: u64 = 4 << 30;

/// A disk that takes this many times what its files take is given up for a new one.
const WASTED_TIMES: u64 = 2;

/// A disk with less than one part of this many free, of its blocks or its inodes, takes no more directories.
const FULL_SHARE: u64 = 16;

/// What is mounted, with the directories of overlays.
const MOUNTS: &str = "/proc/self/mountinfo";

/// The directories of an overlay.
const UPPER: &str = "upper";
const UNFINISHED: &str = "upper.new";
const WORK: &str = "work";

/// The upper directory of the overlay that has its directories here.
#[must_use]
pub fn upper_of(directory: &Path) -> PathBuf {
    directory.join(UPPER)
}

/// The directory of the work of that overlay.
pub(super) fn work_of(directory: &Path) -> PathBuf {
    directory.join(WORK)
}

/// The directory of the overlay with this upper directory.
pub(super) fn directory_of_upper(upper: &Path) -> Option<&Path> {
    upper.parent().filter(|_| upper.ends_with(UPPER))
}

/// Permissions of a root that nothing is below.
const ROOT_MODE: u32 = 0o755;

/// Permissions of the directory around an overlay's.
const AROUND_MODE: u32 = 0o700;

/// Whether the directories of an overlay are there.
enum Made {
    /// All.
    Whole,
    /// All but the upper one, which [`make_root`] makes; with the root of what is below, if anything is.
    ButRoot(io::Result<Option<File>>),
}

/// Makes the directories of an overlay, if they are not there. The root of what is below is opened only here, as mostly
/// nothing is to be made; and here already: what names it may be gone before the upper directory is made.
fn make_directories(directory: &Path, highest: Option<&Path>) -> io::Result<Made> {
    make_directory(directory)?;
    make_directory(&work_of(directory))?;
    if upper_of(directory).try_exists()? {
        return Ok(Made::Whole);
    }
    make_directory(&directory.join(UNFINISHED))?;
    Ok(Made::ButRoot(highest.map(open_root).transpose()))
}

/// A directory, without opening what it may be by then: this can be done late.
fn open_root(path: &Path) -> io::Result<File> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(File::from(rustix::fs::open(path, flags, Mode::empty())?))
}

/// Gives the upper directory, which is the root that is seen, what the one below has; under its name once it is whole.
fn make_root(directory: &Path, highest: Option<&File>) -> io::Result<()> {
    let (unfinished, upper) = (directory.join(UNFINISHED), upper_of(directory));
    if upper.try_exists()? {
        return Ok(());
    }
    let Some(highest) = highest else {
        fs::set_permissions(&unfinished, Permissions::from_mode(ROOT_MODE))?;
        return fs::rename(&unfinished, &upper);
    };
    let root = highest.metadata()?;
    std::os::unix::fs::chown(&unfinished, Some(root.uid()), Some(root.gid()))?;
    copy_attributes(&path_of(highest), &unfinished)?;
    fs::set_permissions(&unfinished, Permissions::from_mode(root.mode() & 0o7777))?;
    File::open(&unfinished)?.set_modified(root.modified()?)?;
    fs::rename(&unfinished, &upper)
}

fn make_directory(path: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(AROUND_MODE).create(path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

/// How far directories were removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Removed {
    /// None is left.
    All,
    /// Some could not be removed now.
    Later,
    /// Some are left, and the next call removes more.
    Some,
}

/// Whether an error says that a disk takes nothing more: what is not to pass by itself.
fn is_unusable(error: &WorkerError) -> bool {
    let unusable = [Errno::ROFS, Errno::IO, Errno::NOSPC, Errno::UCLEAN, Errno::BADMSG];
    match error {
        WorkerError::Attach { source } => matches!(
            source,
            AttachError::Damaged { .. }
                | AttachError::NotFound { .. }
                | AttachError::NotRegular { .. }
                // Not writable any more: ext4 turned read-only after an error.
                | AttachError::Occupied { .. }
                | AttachError::InUse { .. }
        ),
        WorkerError::Local { source, .. } => source
            .raw_os_error()
            .is_some_and(|code| unusable.map(Errno::raw_os_error).contains(&code)),
        _ => false,
    }
}

fn has_directory_on(volume: &Volume, disk: Uuid) -> bool {
    volume.directory().is_some_and(|own| own.disk == disk)
}

/// A directory that a volume is to have. While this lives its disk is the current one.
#[derive(Debug)]
pub(super) struct NewUpper<'a> {
    disk: Uuid,
    name: Uuid,
    _current: RwLockReadGuard<'a, ()>,
}

/// An upper directory that the driver reads or writes: it is not removed while this lives.
#[derive(Debug)]
pub(super) struct HeldUpper {
    worker: Worker,
    name: Uuid,
    path: PathBuf,
}

impl HeldUpper {
    /// The upper directory.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for HeldUpper {
    fn drop(&mut self) {
        let mut held = self.worker.inner.held_uppers.lock();
        if let Some(count) = held.get_mut(&self.name) {
            *count -= 1;
            if *count == 0 {
                held.remove(&self.name);
            }
        }
        drop(held);
        self.worker.inner.reap.notify_one();
    }
}

impl Worker {
    /// Makes a volume that is written above images: a record that has its directory, and says that it is mounted.
    pub(super) async fn create_upper(&self, volume: Volume) -> Result<Volume, WorkerError> {
        self.run(async move |worker: Self| {
            if let Some(own) = volume.extra.own_disk() {
                let size_bytes = own.size_bytes.unwrap_or(worker.disk_size_bytes());
                let disk = worker.new_disk(size_bytes).await?;
                let content = Content::Upper { disk: disk.file.name, name: Uuid::new_v4() };
                return worker.create_as_mounted(Volume { content, ..volume }).await;
            }
            let new = worker.new_upper().await?;
            let content = Content::Upper { disk: new.disk, name: new.name };
            worker.create_as_mounted(Volume { content, ..volume }).await
        })
        .await
    }

    async fn new_upper(&self) -> Result<NewUpper<'_>, WorkerError> {
        loop {
            let current = self.inner.upper_disk.read().await;
            if let Some(disk) = self.inner.state.upper_disk() {
                *self.inner.upper_disk_idle.lock() = None;
                return Ok(NewUpper { disk, name: Uuid::new_v4(), _current: current });
            }
            drop(current);
            self.make_upper_disk().await?;
        }
    }

    /// The size of a disk of upper directories.
    pub(super) fn upper_disk_size_bytes(&self) -> u64 {
        UPPER_DISK_SIZE_BYTES.max(self.disk_size_bytes())
    }

    async fn make_upper_disk(&self) -> Result<(), WorkerError> {
        let changing = self.inner.upper_disk.write().await;
        self.make_upper_disk_locked(&changing).await
    }

    /// Makes the current disk if there is none, unless it is being made or given up by another call.
    pub(super) async fn make_upper_disk_ahead(&self) -> Result<(), WorkerError> {
        // One that a process before had is given up with this.
        self.attach().await?;
        match self.inner.upper_disk.try_write() {
            Ok(changing) => self.make_upper_disk_locked(&changing).await,
            Err(_) => Ok(()),
        }
    }

    async fn make_upper_disk_locked(
        &self,
        _changing: &RwLockWriteGuard<'_, ()>,
    ) -> Result<(), WorkerError> {
        if self.inner.state.upper_disk().is_some() {
            return Ok(());
        }
        let size_bytes = self.upper_disk_size_bytes();
        let (_, making) = self.clone_empty_disk(size_bytes).await?;
        let disk = making.file.name;
        // One that cannot be mounted is of no use to anything.
        self.mount_disk(disk).await?;
        *self.inner.upper_disk_idle.lock() = None;
        self.apply(vec![Change::upper_disk(Some(disk))]).await?;
        tracing::info!(%disk, size_bytes, "made the disk of what is written above images");
        Ok(())
    }

    /// Has the next volume get another disk. The volumes on this one go on there.
    pub(super) async fn give_up_upper_disk(
        &self,
        disk: Uuid,
        reason: &str,
    ) -> Result<(), WorkerError> {
        let _changing = self.inner.upper_disk.write().await;
        if self.inner.state.upper_disk() == Some(disk) {
            tracing::info!(%disk, reason, "what is written above images goes to another disk");
            self.apply(vec![Change::upper_disk(None)]).await?;
        }
        Ok(())
    }

    /// Whether a new volume would get another disk than this one did, as that was given up.
    pub fn has_other_disk_than(&self, volume: &Volume) -> bool {
        let is_shared = volume.extra.own_disk().is_none();
        is_shared
            && volume.directory().is_some_and(|own| self.inner.state.upper_disk() != Some(own.disk))
    }

    /// Looks at the disks: what is lost, what can be removed, and whether the current one is of use. What fails is
    /// logged, and tried again with the next look.
    pub(super) async fn look_at_upper_disks(&self) {
        let shared = self.inner.state.shared_upper_disks();
        for disk in self.inner.state.upper_disks() {
            let looked = match shared.contains(&disk) {
                // After a reboot nothing has mounted it yet, and there may be something to remove.
                true => match self.mount_upper_disk(disk).await {
                    Ok(target) => self.look_at_upper_disk(disk, target).await,
                    Err(error) => Err(error),
                },
                false => self.look_for_loss(disk).await,
            };
            let Err(error) = looked else { continue };
            tracing::warn!(%disk, %error, "looking at a disk of what is written above images");
            if is_unusable(&error)
                && let Err(error) = self.give_up_upper_disk(disk, &error.to_string()).await
            {
                tracing::warn!(%disk, %error, "it stays the one that takes more");
            }
        }
    }

    async fn look_at_upper_disk(&self, disk: Uuid, target: PathBuf) -> Result<(), WorkerError> {
        self.look_for_loss(disk).await?;
        if self.inner.state.upper_disk() != Some(disk) {
            return Ok(());
        }
        let figures = on_disk(target, |target| Ok(rustix::fs::statvfs(target)?)).await?;
        let is_low = |free: u64, all: u64| free < all / FULL_SHARE;
        if is_low(figures.f_bavail, figures.f_blocks) || is_low(figures.f_favail, figures.f_files) {
            return self.give_up_upper_disk(disk, "it is nearly full").await;
        }
        let used = figures.f_blocks.saturating_sub(figures.f_bfree);
        let files_bytes = used.saturating_mul(figures.f_frsize);
        let taken_bytes = match self.client().file(&self.disk_path(disk)).await {
            Ok(file) => file.used_bytes,
            Err(error) if error.is_not_found() => {
                return self.give_up_upper_disk(disk, "the appliance has it no more").await;
            }
            Err(source) => return Err(source.into()),
        };
        if taken_bytes > KEPT_BYTES && taken_bytes / WASTED_TIMES > files_bytes {
            let reason = format!("it takes {taken_bytes} bytes for {files_bytes} of files");
            self.give_up_upper_disk(disk, &reason).await?;
        }
        Ok(())
    }

    /// Mounts a disk. One that is mounted waits for nothing, such as a sync of it.
    pub(super) async fn mount_upper_disk(&self, disk: Uuid) -> Result<PathBuf, WorkerError> {
        let (path, target) = (self.disk_path(disk), self.disk_target(disk));
        let access = slackwater_attach::Access::ReadWrite;
        match self.attach().await?.is_mounted(Source::File(&path), &target, access)? {
            true => Ok(target),
            false => self.mount_disk(disk).await,
        }
    }

    /// Mounts the disk with the directory of a volume, and sees that it has those of the overlay; where that is.
    /// `highest` is the root of what is below. A disk that cannot be used takes no new ones.
    pub(super) async fn ready_upper(
        &self,
        disk: Uuid,
        name: Uuid,
        highest: Option<PathBuf>,
    ) -> Result<PathBuf, WorkerError> {
        let below = highest.clone();
        let made = match self.mount_upper_disk(disk).await {
            Ok(target) => {
                let directory = target.join(name.to_string());
                let make = move |path: &Path| make_directories(path, below.as_deref());
                self.work_on_disk(directory.clone(), make).await.map(|made| (directory, made))
            }
            Err(error) => Err(error),
        };
        let (directory, made) = match made {
            Ok(made) => made,
            Err(error) if is_unusable(&error) => {
                self.give_up_upper_disk(disk, &error.to_string()).await?;
                // What is wrong with it may be that writes were lost.
                self.look_for_loss(disk).await?;
                return Err(error);
            }
            Err(error) => return Err(error),
        };
        let Made::ButRoot(opened) = made else { return Ok(directory) };
        // What fails from here on is mostly the fault of what is below.
        let below = opened.map_err(|source| {
            let path = highest.unwrap_or_default();
            WorkerError::Local { path, source }
        })?;
        self.work_on_disk(directory.clone(), move |path| make_root(path, below.as_ref())).await?;
        Ok(directory)
    }

    /// Brings what was written to a disk to the appliance, for a volume that has a directory there.
    pub(super) async fn sync_upper(&self, key: &Key, disk: Uuid) -> Result<(), WorkerError> {
        // One at a time: what another sync finds is in the state before this volume is looked at.
        let _turn = self.inner.upper_syncs.lock(&disk).await;
        if self.existing(key)?.is_damaged {
            return Err(WorkerError::Damaged { key: key.clone() });
        }
        let Err(error) = self.attach().await?.sync(&self.disk_target(disk)).await else {
            return Ok(());
        };
        // The kernel tells it once: it counts also if the volume is gone by now.
        if matches!(error, AttachError::LostWrites { .. }) {
            self.note_loss_of_uppers(disk).await?;
        }
        Err(error.into())
    }

    /// Syncs a disk, and notes it if that says that writes were lost. One that is not mounted has lost none.
    async fn look_for_loss(&self, disk: Uuid) -> Result<(), WorkerError> {
        let _turn = self.inner.upper_syncs.lock(&disk).await;
        let is_whole = |volume: &Volume| has_directory_on(volume, disk) && !volume.is_damaged;
        // Said once.
        if self.inner.state.upper_disk() != Some(disk)
            && self.inner.state.matching(is_whole).is_empty()
        {
            return Ok(());
        }
        match self.attach().await?.sync(&self.disk_target(disk)).await {
            Err(AttachError::LostWrites { target, reason }) => {
                tracing::error!(target = %target.display(), reason,
                    "writes were lost of what is written above images: remove the containers that run there, and run them again from their images; they are not committed");
                self.note_loss_of_uppers(disk).await
            }
            Ok(()) | Err(AttachError::NotMounted { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Remembers of all that have a directory on a disk that writes to it were lost.
    pub(super) async fn note_loss_of_uppers(&self, disk: Uuid) -> Result<(), WorkerError> {
        // First: from then on no other volume comes to it.
        self.give_up_upper_disk(disk, "writes to it were lost").await?;
        let inner = Arc::clone(&self.inner);
        let noted = tokio::task::spawn_blocking(move || {
            let is_whole = |volume: &Volume| has_directory_on(volume, disk) && !volume.is_damaged;
            inner.state.update_matching(is_whole, |volume| volume.is_damaged = true)
        });
        noted.await.map_err(super::interrupted)?
    }

    /// Sees that the upper directory of a volume, which is on a mounted disk, is not removed for as long as the answer
    /// lives; `None` if it is the volume's no more.
    pub(super) fn hold_upper(&self, key: &Key) -> Option<HeldUpper> {
        let directory = self.get(key)?.directory()?;
        let held = self.hold_directory(directory);
        // Only now: before, it can have been looked at by who removes it.
        (self.get(key)?.directory()? == directory).then_some(held)
    }

    fn hold_directory(&self, directory: Directory) -> HeldUpper {
        *self.inner.held_uppers.lock().entry(directory.name).or_default() += 1;
        let path = self.path_of_directory(directory);
        HeldUpper { worker: self.clone(), name: directory.name, path }
    }

    /// The same of directories that volumes have or were given.
    ///
    /// # Errors
    /// `Local` if one is none's any more.
    pub(super) fn hold_directories(
        &self,
        directories: &[Directory],
    ) -> Result<Vec<HeldUpper>, WorkerError> {
        let held: Vec<_> = directories.iter().map(|one| self.hold_directory(*one)).collect();
        for (directory, held) in directories.iter().zip(&held) {
            if !self.inner.state.uppers_on(directory.disk).contains(&directory.name) {
                let source = io::Error::new(
                    ErrorKind::NotFound,
                    "its layer is an image by now, try it again",
                );
                return Err(WorkerError::Local { path: held.path.clone(), source });
            }
        }
        Ok(held)
    }

    /// Removes the directories that no volume names from the disks that are mounted, for some time.
    pub(super) async fn remove_uppers(&self) -> Removed {
        let _turn = self.inner.upper_removals.lock().await;
        let mut removed = Removed::All;
        for disk in self.inner.state.shared_upper_disks() {
            let (worker, target) = (self.clone(), self.disk_target(disk));
            let unwanted = move |names| worker.unwanted(disk, names);
            let outcome = on_disk(target, move |target| remove_from(target, unwanted)).await;
            let removal = outcome.unwrap_or_else(|error| Removal {
                failed: Some(io::Error::other(error)),
                ..Removal::default()
            });
            match &removal.failed {
                Some(error) => self.note_unremoved(disk, error),
                None => self.inner.unremoved.forget(disk),
            }
            removed = removed.max(match removal {
                Removal { has_more: true, removed: 1.., .. } => Removed::Some,
                Removal { has_more: false, failed: None, .. } => Removed::All,
                _ => Removed::Later,
            });
        }
        removed
    }

    /// Removes now what volumes that are gone had written, as far as that is possible.
    pub async fn clean_up_uppers(&self) {
        while self.remove_uppers().await == Removed::Some {}
    }

    /// Which of a disk's directories can be removed: none if what memory says is not certain.
    fn unwanted(&self, disk: Uuid, mut names: Vec<Uuid>) -> io::Result<Chosen> {
        if self.inner.state.require_certain().is_err() {
            return Ok(Chosen::default());
        }
        let wanted = self.inner.state.uppers_on(disk);
        names.retain(|name| !wanted.contains(name));
        if names.is_empty() {
            return Ok(Chosen::default());
        }
        // An engine may commit what it has mounted still.
        let mounted = names_in(&fs::read(MOUNTS)?);
        let held = self.inner.held_uppers.lock();
        let (later, now): (Vec<_>, Vec<_>) =
            names.into_iter().partition(|name| mounted.contains(name) || held.contains_key(name));
        Ok(Chosen { now, has_later: !later.is_empty() })
    }
}

/// The UUIDs in the table of mounts, which can have other bytes than those of a text.
fn names_in(mounts: &[u8]) -> HashSet<Uuid> {
    let words = mounts.split(|byte| !byte.is_ascii_hexdigit() && *byte != b'-');
    words.filter_map(|word| Uuid::try_parse_ascii(word).ok()).collect()
}
