//! What nothing uses, and stays mounted for what comes: images of layers, and the disk that takes new upper directories.
//!
//! ```text
//! last user gone,
//! or made ahead  --10 s--> a layer of this worker    stays (layers.rs: up to a number)
//!                          the empty disk            stays for 10 minutes, if it takes little space
//!                          all else                  unmounted
//! the driver ends                                    these are unmounted, the empty disk given up
//! the driver starts                                  an empty disk that is left, as after a kill, is given up
//! the export is to be mounted again                  images that nothing uses and disks that were given up are unmounted first
//! ```
//! What is mounted holds up a change of how the appliance is attached, and who removes the driver.
//!
//! Invariant: what has a user is not unmounted.

use std::collections::HashSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use slackwater_client::RetryPolicy;
use uuid::Uuid;

use super::Worker;
use super::mounting::IDLE;
use super::state::{Change, FileKind};

/// How long the disk stays with nothing on it: a new one costs the next container a clone, a loop device and a mount, some ten
/// times what it else waits for the driver.
const EMPTY_DISK_TIME: Duration = Duration::from_secs(600);

/// It stays so long if it takes less than this: what was removed from a file system goes on taking room.
const EMPTY_DISK_BYTES: u64 = 256 << 20;

/// And less than one part of this many of what the appliance has free, which others need more.
const EMPTY_DISK_SHARE: u64 = 64;

/// How long this waits for the appliance, as a driver that stops, or that has more to clean up.
const ANSWER_TIME: Duration = Duration::from_secs(2);

/// What is known of a disk that nothing is on.
#[derive(Debug)]
pub(super) struct Idle {
    since: Instant,
    /// It was asked for, and takes little space: nothing writes to it.
    takes_little: bool,
}

/// What to do with a disk that nothing is on.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    LookIn(Duration),
    Ask,
    LetGo,
}

/// That, so long after the last directory was removed. What cannot be removed goes with the disk.
fn next(elapsed: Duration, has_all_removed: bool) -> Next {
    match elapsed {
        _ if elapsed < IDLE => Next::LookIn(IDLE.saturating_sub(elapsed)),
        _ if elapsed < EMPTY_DISK_TIME && has_all_removed => Next::Ask,
        _ => Next::LetGo,
    }
}

impl Worker {
    /// Gives up the current disk if nothing was on it for some time. Returns when to look again.
    pub(super) async fn look_at_idle_upper_disk(&self) -> Option<Duration> {
        let disk = self.inner.state.upper_disk()?;
        if !self.inner.state.uppers_on(disk).is_empty() {
            *self.inner.upper_disk_idle.lock() = None;
            return None;
        }
        let (elapsed, is_known) = {
            let mut idle = self.inner.upper_disk_idle.lock();
            let now = || Idle { since: Instant::now(), takes_little: false };
            let idle = idle.get_or_insert_with(now);
            (idle.since.elapsed(), idle.takes_little)
        };
        let left = EMPTY_DISK_TIME.saturating_sub(elapsed);
        let next = next(elapsed, !self.inner.unremoved.has(disk));
        match next {
            Next::LookIn(time) => return Some(time),
            Next::Ask if is_known => return Some(left),
            Next::Ask | Next::LetGo => {}
        }
        let takes_little = self.takes_little(disk).await;
        let is_awaited = |idle: &Idle| idle.since.elapsed() < elapsed;
        if self.inner.upper_disk_idle.lock().as_ref().is_none_or(is_awaited) {
            return Some(IDLE);
        }
        match takes_little {
            // To unmount it waits for the appliance.
            None => Some(IDLE),
            Some(true) if next == Next::Ask => {
                if let Some(idle) = &mut *self.inner.upper_disk_idle.lock() {
                    idle.takes_little = true;
                }
                Some(left)
            }
            Some(_) => {
                self.let_go_of_empty_disk(disk).await;
                None
            }
        }
    }

    /// Has the current disk stay as if its last container had just gone, if nothing is on it.
    pub(super) fn keep_idle_upper_disk(&self) {
        if let Some(idle) = &mut *self.inner.upper_disk_idle.lock() {
            idle.since = Instant::now();
        }
    }

    /// Whether a disk takes little space on the appliance, if that answers.
    async fn takes_little(&self, disk: Uuid) -> Option<bool> {
        let asking = self.client().with_retry(RetryPolicy::never());
        let path = self.disk_path(disk);
        let asking = async { tokio::join!(asking.file(&path), asking.stats()) };
        match tokio::time::timeout(ANSWER_TIME, asking).await.ok()? {
            (Ok(file), Ok(stats)) => {
                let limit = EMPTY_DISK_BYTES.min(stats.available_bytes / EMPTY_DISK_SHARE);
                Some(file.used_bytes < limit)
            }
            // The appliance has it no more.
            (Err(error), _) if error.is_not_found() => Some(false),
            (Err(_), _) | (_, Err(_)) => None,
        }
    }

    /// Gives up a disk if it is the current one, and nothing is on it. What fails is logged, and tried again with the next
    /// look.
    pub(super) async fn let_go_of_empty_disk(&self, disk: Uuid) {
        let _changing = self.inner.upper_disk.write().await;
        let is_current = self.inner.state.upper_disk() == Some(disk);
        if !is_current || !self.inner.state.uppers_on(disk).is_empty() {
            return;
        }
        *self.inner.upper_disk_idle.lock() = None;
        if let Err(error) = self.apply(vec![Change::upper_disk(None)]).await {
            tracing::warn!(%disk, %error, "the disk of what is written above images stays");
        }
    }

    /// Gives up the current disk if nothing is on it, before this process has opened anything: it may be one of another
    /// appliance, or have lost writes. What fails is logged.
    pub(super) async fn let_go_of_disk_of_before(&self) {
        // Who has this decides about the disk now, or puts something on it.
        let Ok(_changing) = self.inner.upper_disk.try_write() else { return };
        let Some(disk) = self.inner.state.upper_disk() else { return };
        if self.inner.state.uppers_on(disk).is_empty()
            && let Err(error) = self.apply(vec![Change::upper_disk(None)]).await
        {
            tracing::warn!(%disk, %error, "the disk of what is written above images stays");
        }
    }

    /// Unmounts what nothing uses and stays mounted for what comes. What fails is logged, and the next start finds it.
    pub async fn unmount_all_unused(&self) {
        // What this process did not open it left as it is.
        if self.attached().is_none() {
            return;
        }
        let _nothing_ahead = tokio::time::timeout(ANSWER_TIME, self.nothing_ahead()).await;
        let images = async {
            if let Err(error) = self.unmount_kept_images().await {
                tracing::warn!(%error, "images that nothing uses stay mounted");
            }
        };
        tokio::join!(images, self.unmount_empty_disk());
    }

    async fn unmount_empty_disk(&self) {
        if self.inner.state.upper_disk().is_none() && self.obsolete_files().is_empty() {
            return;
        }
        // To unmount a disk, ext4 writes: while the appliance is away that would wait, and hold up the next start.
        let asking = self.client().with_retry(RetryPolicy::never());
        let asked = tokio::time::timeout(ANSWER_TIME, asking.stats()).await;
        if asked.is_err() || matches!(&asked, Ok(Err(error)) if error.is_without_answer()) {
            tracing::warn!(
                "the appliance does not answer: disks that nothing uses stay as they are; the next start goes on"
            );
            return;
        }
        if let Some(disk) = self.inner.state.upper_disk() {
            self.let_go_of_empty_disk(disk).await;
        }
        self.clean_up().await;
    }

    /// Where nothing uses what is mounted, as far as the state tells: images without a user, and disks that are to be deleted.
    /// To unmount a disk waits for the appliance that has it, which may be gone for ever: each is named once.
    pub(super) fn unused_targets(&self) -> Vec<PathBuf> {
        let mounted =
            self.inner.state.matching(|volume| volume.mounted.is_some() && self.is_used(volume));
        let used = mounted.iter().flat_map(|volume| self.images_from(volume));
        let viewed: Vec<_> = self.inner.views.lock().keys().copied().collect();
        let used: HashSet<_> = used.chain(viewed).map(|id| self.image_target(id)).collect();
        let images = entries(self.images_directory()).filter(|target| !used.contains(target));
        let mounts: HashSet<_> = entries(self.disks_directory()).collect();
        let mut disks = self.obsolete_files();
        disks.retain(|file| {
            file.kind == FileKind::Disk
                && mounts.contains(&self.disk_target(file.name))
                && self.inner.freed_disks.lock().insert(file.name)
        });
        images.chain(disks.iter().map(|disk| self.disk_target(disk.name))).collect()
    }
}

/// What is in a directory; without it, nothing is mounted there.
fn entries(directory: PathBuf) -> impl Iterator<Item = PathBuf> {
    std::fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_nothing_is_on_stays_for_some_time_unless_something_cannot_be_removed() {
        let second = Duration::from_secs(1);
        assert_eq!(next(Duration::ZERO, true), Next::LookIn(IDLE));
        assert_eq!(next(IDLE - second, false), Next::LookIn(second));
        assert_eq!(next(IDLE, true), Next::Ask);
        assert_eq!(next(EMPTY_DISK_TIME - second, true), Next::Ask);
        assert_eq!(next(IDLE, false), Next::LetGo);
        assert_eq!(next(EMPTY_DISK_TIME, true), Next::LetGo);
    }
}
