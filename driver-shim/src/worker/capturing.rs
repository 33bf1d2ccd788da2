//! Snapshots of what a volume holds at this moment, which goes on as it is.
//!
//! ```text
//!   disk             frozen --> snapshot
//!
//!   upper directory  its disk frozen --> snapshot of the disk --> mounted for reading --> NAME/upper, packed
//!                                                                                            |
//!                                                          workers/ID/holds/UUID, an image <-+--> snapshot of that
//! ```
//! So both are of one moment, whatever is written at that time: a container stands still for as long as the snapshot of its disk
//! takes, and not while what it wrote is packed. What comes of it has no clone: it lives until it is bound or published, or
//! for a short time.

use std::time::Instant;

use slackwater_client::types::SnapshotId;
use uuid::Uuid;

use super::appliance::Making;
use super::layers::IMAGES_MAX;
use super::merging::Merged;
use super::mounting::{IDLE, View};
use super::state::FileKind;
use super::uppers::upper_of;
use super::volume::{Content, Key, MountedAs, SnapshotRef, Volume};
use super::{Worker, WorkerError};

/// A disk as it was at one moment, mounted.
struct Moment {
    view: View,
    /// Keeps the snapshot.
    kept: Making,
}

impl Worker {
    /// Takes a snapshot of what a volume holds at this moment; it stays as it is. The snapshot
    /// lives for an hour unless a volume is bound to it.
    ///
    /// # Errors
    /// `NotFound`, `Appliance`, `Attach`, `State`; `OfImages` of what is above images.
    pub async fn capture(&self, key: &Key) -> Result<SnapshotRef, WorkerError> {
        let key = key.clone();
        self.run(async move |worker: Self| {
            let _lock = worker.inner.volume_locks.lock(&key).await;
            let Content::Disk { name, size_bytes, .. } = worker.existing(&key)?.content else {
                return worker.settled(&key).await;
            };
            if worker.is_above_images(&key)? {
                return Err(WorkerError::OfImages { key });
            }
            let target = worker.mount_disk(name).await?;
            let taken = worker.take_running(&key, &target, name).await;
            // It may have been unmounted before: then it is again.
            let volume = worker.existing(&key)?;
            if !volume.is_in_use() {
                worker.unmount_later(&Volume {
                    mounted: Some(MountedAs::Disk),
                    ..worker.change(&key, |volume| volume.mounted = Some(MountedAs::Disk)).await?
                });
            }
            let snapshot = taken?;
            worker.inner.captured.lock().insert(snapshot.id, Instant::now());
            Ok(SnapshotRef { id: snapshot.id, size_bytes })
        })
        .await
    }

    /// Whether what a volume shows is made of images, and so is a capture of it ([`Self::capture_image`]).
    ///
    /// # Errors
    /// `NotFound`.
    pub fn shows_images(&self, key: &Key) -> Result<bool, WorkerError> {
        Ok(self.is_above_images(key)? || !self.lowers_of(&self.existing(key)?)?.is_empty())
    }

    /// The same of a volume that is written above images: the image of what it has written so far, as the layer above
    /// `parent`, which is the volume's own parent or below that; above nothing without one. The volume can be written
    /// all the time.
    ///
    /// # Errors
    /// `NotFound`, `Damaged`, `TooManyImages`, `Image`, `Appliance`, `Attach`, `State`; `NothingWritten` of one that is
    /// not written.
    pub async fn capture_image(
        &self,
        key: &Key,
        parent: Option<Key>,
    ) -> Result<SnapshotRef, WorkerError> {
        let key = key.clone();
        self.run(async move |worker: Self| worker.image_of_moment(&key, parent.as_ref()).await)
            .await
    }

    async fn image_of_moment(
        &self,
        key: &Key,
        parent: Option<&Key>,
    ) -> Result<SnapshotRef, WorkerError> {
        // `None`: the driver ends.
        let _moment = self.inner.moments.acquire().await.ok();
        // Held for the moment alone: what is packed afterwards nothing changes.
        let lock = self.inner.volume_locks.lock(key).await;
        let volume = self.existing(key)?;
        let Content::Upper { disk, name } = volume.content else {
            return Err(WorkerError::NothingWritten { key: key.clone() });
        };
        let above = match parent {
            Some(parent) => self.lowers_of(&self.existing(parent)?)?,
            None => Vec::new(),
        };
        if above.len() >= IMAGES_MAX {
            return Err(WorkerError::TooManyImages { key: key.clone(), got: above.len() + 1 });
        }
        let below = parent.and_then(|parent| self.chain_of(parent));
        // What a container deleted is looked up where it saw it.
        let seen = self.merged(&self.lowers_below(&volume)?).await?;
        // One that no engine has mounted yet, as after a reboot, has no directories.
        self.ready_upper(disk, name, seen.as_ref().map(Merged::path)).await?;
        let made = self.new_image_above(&above).await?;
        let moment = self.moment_of(key, disk).await?;
        drop(lock);
        // After the lock: who has that waits for a turn, too.
        let _turn = self.inner.packing.acquire().await.ok();
        let upper = upper_of(&moment.view.path().join(name.to_string()));
        let packed = self.pack(key, upper, seen, made).await;
        self.let_go_of(moment).await;
        let (made, imaged) = packed?;
        let labels = self.labels_of_image(imaged.inodes, below.as_deref());
        let taken = self.take_image_as(made.name(), None, labels, false).await;
        let snapshot = taken.map_err(|error| self.refused(error))?;
        self.inner.captured.lock().insert(snapshot.id, Instant::now());
        Ok(SnapshotRef { id: snapshot.id, size_bytes: snapshot.size_bytes })
    }

    /// Mounts a disk of upper directories as it is now. The lock of this volume, which has a directory there, is held.
    async fn moment_of(&self, key: &Key, disk: Uuid) -> Result<Moment, WorkerError> {
        let target = self.disk_target(disk);
        let taken = {
            // As a sync: what is found is in the state before another looks.
            let _turn = self.inner.upper_syncs.lock(&disk).await;
            self.take_running(key, &target, disk).await?
        };
        let kept = self.clone_as(FileKind::Hold, taken.id).await;
        self.inner.captured.lock().remove(&taken.id);
        let snapshot = SnapshotRef { id: taken.id, size_bytes: taken.size_bytes };
        Ok(Moment { kept: kept?, view: self.view(snapshot).await? })
    }

    /// Unmounts it, and has the snapshot deleted.
    async fn let_go_of(&self, moment: Moment) {
        let Moment { view, kept } = moment;
        let id: SnapshotId = view.snapshot();
        drop(view);
        let Err(error) = self.unmount_view(id).await else { return };
        tracing::warn!(snapshot = %id, %error, "a disk that was captured stays mounted for some time");
        let worker = self.clone();
        tokio::spawn(async move {
            let _kept = kept;
            // By then it was tried again, as of each view.
            tokio::time::sleep(2 * IDLE).await;
            if let Err(error) = worker.unmount_view(id).await {
                tracing::warn!(snapshot = %id, %error, "unmounting a disk that was captured");
            }
        });
    }
}
