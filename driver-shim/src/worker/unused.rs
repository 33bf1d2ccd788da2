//! What nothing uses, and stays mounted for what comes: images of layers, and the disk that takes new upper directories.
//!
//! ```text
//! last user gone --10 s--> a layer of this worker    stays (layers.rs: up to a number)
//!                          the empty disk            stays for 10 minutes, if it takes little space
//!                          all else                  unmounted
//! the driver ends                                    all that nothing uses is unmounted, the empty disk given up
//! the export is to be mounted again                  images that nothing uses are unmounted first
//! ```
//! What is mounted holds up a change of how the appliance is attached, and who removes the driver.
//!
//! Invariant: what has a user is not unmounted.

use std::collections::HashSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use slackwater_client::RetryPolicy;
use uuid::Uuid;

use super::mounting::IDLE;
use super::state::Change;
use super::uppers::Removed;
use super::{Worker, WorkerError};

/// How long the disk stays with nothing on it: a new one costs the next container a clone, a loop device and a mount, some ten
/// times what it else waits for the driver.
const EMPTY_DISK_TIME: Duration = Duration::from_secs(600);

/// It stays so long if it takes less than this: what was removed from a file system goes on taking room.
const EMPTY_DISK_BYTES: u64 = 256 << 20;

/// And less than one part of this many of what the appliance has free, which others need more.
const EMPTY_DISK_SHARE: u64 = 64;

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
    pub(super) async fn look_at_idle_upper_disk(&self, removed: Removed) -> Option<Duration> {
        let disk = self.inner.state.upper_disk()?;
        if !self.inner.state.uppers_on(disk).is_empty() {
            *self.inner.upper_disk_idle.lock() = None;
            return None;
        }
        let since = *self.inner.upper_disk_idle.lock().get_or_insert_with(Instant::now);
        match next(since.elapsed(), removed == Removed::All) {
            Next::LookIn(time) => return Some(time),
            Next::Ask if self.takes_little(disk).await => {
                return Some(EMPTY_DISK_TIME.saturating_sub(since.elapsed()));
            }
            Next::Ask | Next::LetGo => {}
        }
        self.let_go_of_empty_disk().await;
        None
    }

    /// Whether a disk takes little space on the appliance. One that cannot be asked for counts as much.
    async fn takes_little(&self, disk: Uuid) -> bool {
        let asking = self.client().with_retry(RetryPolicy::never());
        let path = self.disk_path(disk);
        match tokio::join!(asking.file(&path), asking.stats()) {
            (Ok(file), Ok(stats)) => {
                let limit = EMPTY_DISK_BYTES.min(stats.available_bytes / EMPTY_DISK_SHARE);
                file.used_bytes < limit
            }
            _ => false,
        }
    }

    /// Gives up the current disk if nothing is on it. What fails is logged, and tried again with the next look.
    pub(super) async fn let_go_of_empty_disk(&self) {
        let _changing = self.inner.upper_disk.write().await;
        *self.inner.upper_disk_idle.lock() = None;
        let Some(disk) = self.inner.state.upper_disk() else { return };
        if !self.inner.state.uppers_on(disk).is_empty() {
            return;
        }
        if let Err(error) = self.apply(vec![Change::upper_disk(None)]).await {
            tracing::warn!(%disk, %error, "the disk of what is written above images stays");
        }
    }

    /// Unmounts what nothing uses and stays mounted for what comes. What fails is logged, and the next start finds it.
    pub async fn unmount_all_unused(&self) {
        // What this process did not open it left as it is.
        if self.attached().is_none() {
            return;
        }
        if let Err(error) = self.unmount_kept_images().await {
            tracing::warn!(%error, "images that nothing uses stay mounted");
        }
        self.let_go_of_empty_disk().await;
        // To unmount it, ext4 writes: while the appliance is away that would wait, and hold up the next start.
        match self.client().with_retry(RetryPolicy::never()).readyz().await {
            Err(error) if error.is_without_answer() => {
                tracing::warn!(%error, "disks that nothing is on stay mounted");
            }
            _ => self.clean_up().await,
        }
    }

    /// Where nothing uses what is mounted, as far as the state tells: images without a user.
    pub(super) fn unused_targets(&self) -> Vec<PathBuf> {
        let mounted =
            self.inner.state.matching(|volume| volume.mounted.is_some() && self.is_used(volume));
        let used = mounted.iter().flat_map(|volume| self.images_from(volume));
        let viewed: Vec<_> = self.inner.views.lock().keys().copied().collect();
        let used: HashSet<_> = used.chain(viewed).map(|id| self.image_target(id)).collect();
        // Without the directory nothing is mounted there.
        let entries = std::fs::read_dir(self.images_directory()).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).filter(|target| !used.contains(target)).collect()
    }
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
