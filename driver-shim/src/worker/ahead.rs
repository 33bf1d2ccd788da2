//! What the next container is likely to need, made in the background when that becomes likely.
//!
//! ```text
//! an engine asks for a layer of an image -----------+-> the disk that takes upper directories is made and mounted, if there is none
//! a layer that is an image was pulled or committed -+-> the same, and its image is mounted
//! ```
//! An image that is pulled is mostly run at once, and its first container would wait for both.
//!
//! Invariants:
//! - No call begins this, or fails by it. A call that needs what is just being made waits for that, and makes it itself if that
//!   failed, or took too long.
//! - What nothing comes to use goes as all that nothing uses (unused.rs). It pushes out no image that was used.

use std::sync::Arc;
use std::time::{Duration, Instant};

use slackwater_attach::Attach;
use slackwater_client::types::SnapshotId;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::Worker;
use super::layers::Images;
use super::volume::LayerKind;

/// What is made ahead at a time: few of the tools that attach disks and images, which calls of the engines need. A layer that
/// is pulled beside so many is mounted by the call that needs it.
const AHEAD_MAX: u32 = 8;

/// How long that may take: from then on a call that needs it tries by itself.
const AHEAD_TIME: Duration = Duration::from_secs(30);

/// How long no disk is made ahead after one could not be made.
const FAILED_PAUSE: Duration = Duration::from_secs(60);

/// The turns of what is made ahead.
pub(super) fn turns() -> Arc<Semaphore> {
    Arc::new(Semaphore::new(usize::try_from(AHEAD_MAX).unwrap_or(1)))
}

impl Worker {
    /// An image is being pulled: a container above it will need the disk, which takes longer to make than all else.
    pub fn expect_container(&self) {
        // Loop devices are for what is used.
        if self.layers_setting() == LayerKind::Images && Attach::mounts_images_from_files() {
            self.have_upper_disk();
        }
    }

    /// Has what a container above this layer's image would wait for.
    pub(super) fn make_ready(&self, image: SnapshotId) {
        self.mount_ahead(image);
        self.have_upper_disk();
    }

    /// Mounts an image that is likely to be read soon; it stays for some time.
    fn mount_ahead(&self, id: SnapshotId) {
        let Some(turn) = self.turn() else { return };
        *self.inner.views.lock().entry(id).or_default() += 1;
        self.inner.idle_images.lock().note_unused(id);
        let (ids, paths, _directories) = (vec![id], Vec::new(), Vec::new());
        let held = Images { worker: self.clone(), ids, paths, _directories };
        tokio::spawn(async move {
            let _turn = turn;
            match tokio::time::timeout(AHEAD_TIME, held.worker.mount_image(id)).await {
                Ok(Ok(_)) => {}
                Ok(Err(error)) => tracing::debug!(image = %id, %error, "not mounted ahead"),
                Err(_) => tracing::debug!(image = %id, "not mounted ahead: it takes too long"),
            }
        });
    }

    /// Makes the disk that takes upper directories, or has it stay if there is one that nothing is on.
    fn have_upper_disk(&self) {
        if self.attached().is_some() && self.inner.state.upper_disk().is_some() {
            self.keep_idle_upper_disk();
            return;
        }
        let failed_at = *self.inner.ahead_failed_at.lock();
        if failed_at.is_some_and(|failed_at| failed_at.elapsed() < FAILED_PAUSE) {
            return;
        }
        let Some(turn) = self.turn() else { return };
        let worker = self.clone();
        tokio::spawn(async move {
            let _turn = turn;
            let made = tokio::time::timeout(AHEAD_TIME, worker.make_upper_disk_ahead()).await;
            let reason = match made {
                Ok(Ok(())) => return,
                Ok(Err(error)) => error.to_string(),
                Err(_) => format!("it takes longer than {AHEAD_TIME:?}"),
            };
            tracing::info!(
                reason,
                "the disk of what is written above images is not made before the first container"
            );
            *worker.inner.ahead_failed_at.lock() = Some(Instant::now());
        });
    }

    /// Waits until nothing is made ahead, for a driver that stops. Nothing begins before the answer goes.
    pub(super) async fn nothing_ahead(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.inner.ahead).acquire_many_owned(AHEAD_MAX).await.ok()
    }

    fn turn(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.inner.ahead).try_acquire_owned().ok()
    }
}
