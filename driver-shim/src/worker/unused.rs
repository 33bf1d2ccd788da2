//! What nothing uses, and stays mounted for what comes: images of layers.
//!
//! ```text
//! last user gone --10 s--> a layer of this worker    stays (layers.rs: up to a number)
//!                          all else                  unmounted
//! the driver ends, or the export is to be mounted again --> all that nothing uses is unmounted
//! ```
//! What is mounted holds up a change of how the appliance is attached, and who removes the driver.
//!
//! Invariant: what has a user is not unmounted. To unmount an image waits for no appliance.

use std::collections::HashSet;
use std::path::PathBuf;

use super::Worker;

impl Worker {
    /// Unmounts what nothing uses and stays mounted for what comes. What fails is logged, and the next start finds it.
    pub async fn unmount_all_unused(&self) {
        // What this process did not open it left as it is.
        if self.attached().is_none() {
            return;
        }
        if let Err(error) = self.unmount_kept_images().await {
            tracing::warn!(%error, "images that nothing uses stay mounted");
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
