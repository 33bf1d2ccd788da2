//! What volumes hold of their own: bytes as the appliance says, inodes as their file systems do.
//!
//! ```text
//! a layer that was sealed here     used of the snapshot less used of the one below; inodes of its disk less those below
//! one that was adopted or bound    the same; a label of the snapshot has the inodes, as nothing of it is mounted, or the
//!                                  superblock of its disk (superblock.rs) where its maker told none, as release 0.2
//! a disk that is written           what no snapshot of it has, and at least what it has more than it was cloned from
//! an upper directory               blocks and inodes of what is in it; once it is committed, counted once
//! ```
//! A snapshot of a disk that is written (`image commit`, an administrator's) leaves nothing that the disk alone has.
//! What was written over before that is counted no more; all that is new still is.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;
use slackwater_client::types::Snapshot;
use slackwater_client::{Client, RetryPolicy};
use tokio::time::timeout;
use uuid::Uuid;

use super::layers::on_disk;
use super::lowers::LowerLayer;
use super::uppers::upper_of;
use super::volume::{Content, Directory, Key, SnapshotRef, Usage, Volume};
use super::{Worker, WorkerError};

/// Label of a snapshot that a worker took: the inodes in use on the disk. A hint that is shown.
pub(super) const INODES_LABEL: &str = "slackwater.inodes";

/// Inodes that an empty ext4 counts as used.
const EMPTY_DISK_INODES: u64 = 10;

/// Bytes of a disk for each inode, as `attach` makes file systems.
const BYTES_PER_INODE: u64 = 16 << 10;

/// Bytes of a block of stat(2).
const STAT_BLOCK_BYTES: u64 = 512;

/// Memory of paths of directories that are to be looked at, and files with several names: more than ordinary containers
/// have.
const WALK_BYTES_MAX: usize = 64 << 20;
const LINKED_MAX: usize = 1 << 20;

/// What an allocation takes beyond its bytes, about.
const ALLOCATION_BYTES: usize = 32;

/// Longest time in which a directory is counted: others wait. It is looked at after so many inodes.
const WALK_TIME_MAX: Duration = Duration::from_secs(60);
const INODES_BETWEEN_LOOKS: u64 = 1024;

/// How long who asks waits for a new figure where there is an older one: less than `snapshotter.rs` waits.
const COUNTED_WITHIN: Duration = Duration::from_secs(1);

/// How a directory is opened that a program in a container may change.
const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Snapshots whose figures are kept in memory: they do not change.
const KNOWN_MAX: usize = 4096;

/// What the appliance says of a snapshot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Figures {
    used_bytes: u64,
    /// 0 if its maker told none.
    inodes: u64,
}

impl Worker {
    /// What a snapshot holds beyond the one below it. `disk_inodes` is 0 if they are not known.
    pub(super) async fn usage_of(
        &self,
        snapshot: &Snapshot,
        below: Option<SnapshotRef>,
        disk_inodes: u64,
    ) -> Result<Usage, WorkerError> {
        let known = match below {
            Some(below) => self.figures_of(self.client(), below).await?,
            None => None,
        };
        let used_below = known.map_or(0, |known| known.used_bytes);
        Ok(Usage {
            size_bytes: snapshot.used_bytes.saturating_sub(used_below),
            inodes: self.inodes_above(below, known, disk_inodes),
            disk_inodes,
        })
    }

    /// What the appliance says of a snapshot; `None` if it is gone, or this worker does not read it.
    async fn figures_of(
        &self,
        client: &Client,
        snapshot: SnapshotRef,
    ) -> Result<Option<Figures>, WorkerError> {
        if let Some(&known) = self.inner.figures.lock().get(&snapshot.id) {
            return Ok(Some(known));
        }
        let figures = match client.snapshot(snapshot.id).await {
            Ok(found) => Figures { used_bytes: found.used_bytes, inodes: inodes_told(&found) },
            Err(error) if self.is_out_of_reach(&error) => return Ok(None),
            Err(source) => return Err(source.into()),
        };
        let mut known = self.inner.figures.lock();
        if known.len() >= KNOWN_MAX {
            known.clear();
        }
        known.insert(snapshot.id, figures);
        Ok(Some(figures))
    }

    /// Inodes of a disk with so many beyond those of the snapshot below it: as a volume of this worker remembers them, or as
    /// its maker told. None of it is counted where those of a layer below are not known: they would count as this one's.
    fn inodes_above(
        &self,
        below: Option<SnapshotRef>,
        told: Option<Figures>,
        disk_inodes: u64,
    ) -> u64 {
        let above_empty = disk_inodes.saturating_sub(EMPTY_DISK_INODES);
        let Some(below) = below else { return above_empty };
        let volumes = self.inner.state.matching(|volume| volume.snapshot() == Some(below));
        let is_layer = !volumes.is_empty() && !self.is_known_as_empty(below);
        let own = volumes.into_iter().filter_map(|volume| Some(volume.usage?.disk_inodes));
        match own.chain(told.map(|told| told.inodes)).find(|inodes| *inodes > 0) {
            Some(inodes) => disk_inodes.saturating_sub(inodes),
            None if is_layer => 0,
            None => above_empty,
        }
    }

    /// What a volume holds of its own. From memory for a snapshot; for a disk, one short question
    /// to the appliance, and at first another one; for an upper directory, a look at all that is in it.
    ///
    /// # Errors
    /// `NotFound`, `Appliance`, `Local`.
    pub async fn usage(&self, key: &Key) -> Result<Usage, WorkerError> {
        let volume = self.existing(key)?;
        if let (Content::Lower { .. }, Some(usage)) = (&volume.content, volume.usage) {
            return Ok(usage);
        }
        let (name, from) = match volume.content {
            Content::Inherited => return Ok(Usage::default()),
            // Between its unpacking and its commit, which follows at once.
            Content::ImageFile { inodes, .. } => return Ok(Usage { inodes, ..Usage::default() }),
            Content::Snapshot { .. } | Content::Image { .. } => {
                return Ok(volume.usage.unwrap_or_default());
            }
            Content::Lower { disk, name } => {
                return self.usage_of_lower(key, Directory { disk, name }).await;
            }
            Content::Upper { disk, name } => {
                // After a reboot only its container mounts a disk of its own.
                if volume.extra.own_disk().is_some() && volume.mounted.is_none() {
                    let once = self.client().with_retry(RetryPolicy::never());
                    let size_bytes = once.file(&self.disk_path(disk)).await?.unique_bytes;
                    return Ok(Usage { size_bytes, ..Usage::default() });
                }
                return self.usage_of_upper(disk, name).await;
            }
            Content::Disk { name, from, .. } => (name, from),
        };
        let once = self.client().with_retry(RetryPolicy::never());
        let file = once.file(&self.disk_path(name)).await?;
        // Without it the rest is right for as long as no snapshot was taken.
        let known = self.figures_of(&once, from).await.ok().flatten();
        let grown = known.map_or(0, |below| file.used_bytes.saturating_sub(below.used_bytes));
        let disk_inodes = match volume.mounted {
            Some(_) => used_inodes(&self.disk_target(name)).unwrap_or_default(),
            None => 0,
        };
        let inodes = self.inodes_above(Some(from), known, disk_inodes);
        Ok(Usage { size_bytes: file.unique_bytes.max(grown), inodes, disk_inodes })
    }
}

impl Worker {
    /// What a committed directory holds: counted once, as nothing changes it any more.
    async fn usage_of_lower(&self, key: &Key, directory: Directory) -> Result<Usage, WorkerError> {
        let held = self.hold_directories(&[directory])?;
        self.mount_lowers(&[LowerLayer::Directory(directory)]).await?;
        let turn = Arc::clone(&self.inner.upper_walks).lock_owned().await;
        let (worker, key) = (self.clone(), key.clone());
        on_disk(self.path_of_directory(directory), move |upper| {
            let _turn = (turn, held);
            let is_it = |volume: &Volume| volume.directory() == Some(directory);
            if let Some(usage) = worker.get(&key).filter(is_it).and_then(|volume| volume.usage) {
                return Ok(usage);
            }
            let usage = usage_below(upper)?;
            // Here, as the one who asked may have left. One that is gone has none.
            let known = |volume: &mut Volume| {
                if is_it(volume) {
                    volume.usage = Some(usage);
                }
            };
            if let Err(error) = worker.inner.state.update(&key, known) {
                tracing::debug!(%key, %error, "the usage of a layer is counted again");
            }
            Ok(usage)
        })
        .await
    }

    /// What an upper directory holds: as it was counted last, if counting it takes long.
    async fn usage_of_upper(&self, disk: Uuid, name: Uuid) -> Result<Usage, WorkerError> {
        let target = self.disk_target(disk);
        let directory = target.join(name.to_string());
        let known = self.inner.upper_usages.lock().get(&name).copied();
        let worker = self.clone();
        let counting = async move {
            // Of all directories one at a time, also after the caller has left: who asks, asks again soon.
            let turn = Arc::clone(&worker.inner.upper_walks).lock_owned().await;
            on_disk(directory, move |directory| {
                let _turn = turn;
                let usage = usage_below(&upper_of(directory))?;
                let mut usages = worker.inner.upper_usages.lock();
                if usages.len() >= KNOWN_MAX {
                    usages.clear();
                }
                usages.insert(name, usage);
                Ok(usage)
            })
            .await
        };
        match known {
            None => counting.await,
            Some(known) => timeout(COUNTED_WITHIN, counting).await.unwrap_or(Ok(known)),
        }
    }
}

/// Blocks and inodes of a directory with what is below it. What a program removes at the same time does not count.
/// Blocks.
///
/// # Errors
/// There is no such directory, as on a disk that is not mounted; it is too large or too deep to be counted.
fn usage_below(top: &Path) -> io::Result<Usage> {
    let top = rustix::fs::openat(CWD, top, DIRECTORY, Mode::empty())?;
    let mut walk = Walk {
        usage: Usage::default(),
        linked: HashSet::new(),
        ahead: vec![PathBuf::from(".")],
        ahead_bytes: 0,
        until: Instant::now() + WALK_TIME_MAX,
        top,
    };
    walk.count(&rustix::fs::fstat(&walk.top)?);
    while let Some(path) = walk.ahead.pop() {
        walk.ahead_bytes = walk.ahead_bytes.saturating_sub(cost_of(&path));
        match walk.count_in(&path) {
            // It is gone, or another file system is mounted there.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV) | Ok(()) => {}
            Err(errno) => return Err(errno.into()),
        }
        if walk.ahead_bytes > WALK_BYTES_MAX
            || walk.linked.len() >= LINKED_MAX
            || Instant::now() > walk.until
        {
            return Err(io::Error::other("it has more directories or hard links than are counted"));
        }
    }
    Ok(walk.usage)
}

/// Memory of a path that waits.
fn cost_of(path: &Path) -> usize {
    path.as_os_str().len() + size_of::<PathBuf>() + ALLOCATION_BYTES
}

/// A look at all that is below a directory.
struct Walk {
    top: OwnedFd,
    usage: Usage,
    /// Files with several names that were counted.
    linked: HashSet<u64>,
    /// Directories that are to be looked at.
    ahead: Vec<PathBuf>,
    ahead_bytes: usize,
    until: Instant,
}

impl Walk {
    fn count(&mut self, stat: &Stat) {
        self.usage.inodes += 1;
        let blocks = u64::try_from(stat.st_blocks).unwrap_or_default();
        self.usage.size_bytes += blocks * STAT_BLOCK_BYTES;
    }

    fn count_in(&mut self, path: &Path) -> Result<(), Errno> {
        // A program in the container can put a link in the place of a directory.
        let beneath = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
        let directory = rustix::fs::openat2(&self.top, path, DIRECTORY, Mode::empty(), beneath)?;
        for entry in Dir::read_from(&directory)? {
            let entry = entry?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            let stat = match rustix::fs::statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW) {
                Err(Errno::NOENT) => continue,
                other => other?,
            };
            let is_directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
            // A file counts once, whatever names it has.
            if !is_directory && stat.st_nlink > 1 && !self.linked.insert(stat.st_ino) {
                continue;
            }
            self.count(&stat);
            let is_look = self.usage.inodes.is_multiple_of(INODES_BETWEEN_LOOKS);
            if self.linked.len() >= LINKED_MAX || is_look && Instant::now() > self.until {
                break;
            }
            if is_directory && self.ahead_bytes <= WALK_BYTES_MAX {
                let path = path.join(OsStr::from_bytes(name.to_bytes()));
                self.ahead_bytes += cost_of(&path);
                self.ahead.push(path);
            }
        }
        Ok(())
    }
}

/// What an image holds, which has its own layer alone.
pub(super) fn usage_of_image(snapshot: &Snapshot, inodes: u64) -> Usage {
    Usage { size_bytes: snapshot.used_bytes, inodes, disk_inodes: 0 }
}

/// The inodes that a snapshot's label tells; 0 if there is none, or more than its disk can have.
pub(super) fn inodes_told(snapshot: &Snapshot) -> u64 {
    let told = snapshot.labels.get(INODES_LABEL).and_then(|text| text.parse().ok());
    told.filter(|inodes| *inodes <= snapshot.size_bytes / BYTES_PER_INODE).unwrap_or_default()
}

/// Inodes in use on a mounted file system.
pub(super) fn used_inodes(target: &Path) -> Result<u64, WorkerError> {
    let statistics = rustix::fs::statvfs(target)
        .map_err(|error| WorkerError::Local { path: target.to_owned(), source: error.into() })?;
    Ok(statistics.f_files.saturating_sub(statistics.f_ffree))
}
