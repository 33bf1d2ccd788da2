//! What the next container is likely to need, made in the background when that becomes likely.
//!
//! ```text
//! a layer of images was pulled or committed -+-> its image is mounted
//!                                            +-> the disk that takes upper directories is made and mounted, if there is none
//! ```
//! An image that is pulled is mostly run at once, and its first container would wait for both.
//!
//! Invariants:
//! - No call waits for this, or fails by it: a call that needs one of them makes it, or waits until it is made, and says what
//!   is wrong.
//! - What nothing comes to use goes as all that nothing uses (unused.rs).

use std::sync::Arc;

use slackwater_attach::Attach;
use slackwater_client::types::SnapshotId;

use super::Worker;
use super::layers::Images;
use super::mounting::IDLE;

/// Images that are mounted ahead at a time, and those that take a loop device until they can be unmounted: as many as an image
/// of very many layers has. An engine that pulls more at once, and runs none, leaves no more waiting.
pub(super) const AHEAD_MAX: usize = 64;

impl Worker {
    /// Has what a container above this layer's image would wait for.
    pub(super) fn make_ready(&self, image: SnapshotId) {
        self.mount_ahead(image);
        if self.attached().is_none() || self.inner.state.upper_disk().is_none() {
            let worker = self.clone();
            tokio::spawn(async move {
                if let Err(error) = worker.make_upper_disk_ahead().await {
                    tracing::debug!(%error, "the disk of what is written above images is made later");
                }
            });
        }
    }

    /// Mounts an image that is likely to be read soon; it stays for some time.
    fn mount_ahead(&self, id: SnapshotId) {
        let Ok(permit) = Arc::clone(&self.inner.ahead).try_acquire_owned() else { return };
        *self.inner.views.lock().entry(id).or_default() += 1;
        let (ids, paths, _directories) = (vec![id], Vec::new(), Vec::new());
        let held = Images { worker: self.clone(), ids, paths, _directories };
        tokio::spawn(async move {
            if let Err(error) = held.worker.mount_image(id).await {
                tracing::debug!(image = %id, %error, "not mounted ahead");
            }
            drop(held);
            if !Attach::mounts_images_from_files() {
                // It has a loop device so long.
                tokio::time::sleep(IDLE).await;
            }
            drop(permit);
        });
    }
}
