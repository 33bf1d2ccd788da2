//! From disk to snapshot: sealing, committing, binding.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use slackwater_attach::{Attach, AttachError};
use slackwater_client::types::{Snapshot, SnapshotId};
use tokio::time::timeout;
use uuid::Uuid;

use super::chains::Registration;
use super::imaging::IMAGE_SIZE_BYTES;
use super::layers::IMAGES_MAX;
use super::lowers::{LowerLayer, images_in};
use super::mounting::Resolved;
use super::sealed::{Became, Hold, Outcome, Sealed};
use super::state::FileKind;
use super::taking::Sealing;
use super::usage::{inodes_told, usage_of_image, used_inodes};
use super::volume::{Content, Extra, Key, LayerKind, SnapshotRef, Usage, Volume};
use super::{Worker, WorkerError, now};

/// How long sealing waits for users to let go: BuildKit gives a layer back just after it has
/// begun the next one.
const USERS_WAIT_MAX: Duration = Duration::from_secs(5);

/// How often it looks.
const USERS_WAIT_STEP: Duration = Duration::from_millis(20);

/// Longest time in which a disk that is written stands still for its snapshot: programs in containers notice more.
const FROZEN_TIME_MAX: Duration = Duration::from_secs(10);

/// Time between two tries to thaw a file system.
const THAW_INTERVAL: Duration = Duration::from_secs(1);

/// Sees that a snapshot is a disk, or an image, as the size of its file tells.
fn require_kind(snapshot: &Snapshot, layers: LayerKind) -> Result<(), WorkerError> {
    let (id, got_bytes) = (snapshot.id, snapshot.size_bytes);
    match (layers, got_bytes == IMAGE_SIZE_BYTES) {
        (LayerKind::Disks, false) | (LayerKind::Images, true) => Ok(()),
        (LayerKind::Disks, true) => {
            Err(WorkerError::OtherKind { id, got_bytes, expected: "a disk, and this is an image" })
        }
        (LayerKind::Images, false) => {
            Err(WorkerError::OtherKind { id, got_bytes, expected: "the image of a layer" })
        }
    }
}

impl Worker {
    /// Makes a volume an immutable snapshot. With a chain id, which says what the volume holds, the
    /// snapshot is registered as that chain; if another worker's was registered before, and its maker is
    /// trusted, that one is taken, and the disk is dropped. What is a snapshot already stays as it is.
    ///
    /// # Errors
    /// `NotFound`; `Busy` while it is in use; `Appliance`, `Attach`, `State`.
    pub async fn seal(
        &self,
        key: &Key,
        chain: Option<Registration>,
    ) -> Result<SnapshotRef, WorkerError> {
        let key = key.clone();
        self.run(async move |worker: Self| {
            let _lock = worker.inner.volume_locks.lock(&key).await;
            worker.seal_locked(&key, chain).await
        })
        .await
    }

    /// Seals a volume as [`Self::seal`] does, if it is not yet, and gives it another name and other data of its engine,
    /// in one step. `extra` makes these from whether the snapshot is not for all. What was written above images, and is no
    /// registered chain, has its snapshot later ([`Self::make_image`]).
    ///
    /// # Errors
    /// As [`Self::seal`]; `Exists` if the new name is taken.
    pub async fn commit(
        &self,
        key: &Key,
        chain: Option<Registration>,
        to: Key,
        extra: impl FnOnce(bool) -> Extra + Send + 'static,
    ) -> Result<Volume, WorkerError> {
        let key = key.clone();
        self.run(async move |worker: Self| {
            let _lock = worker.inner.volume_locks.lock(&key).await;
            worker.require_free(&key, &to)?;
            if let Some(directory) = worker.committed_directory(&key, chain.as_ref()).await? {
                let became = Became::Lower(directory);
                let committed = worker.record_as(&key, to, extra(false), became).await?;
                worker.inner.imaging.notify_one();
                return Ok(committed);
            }
            let outcome = worker.sealed(&key, chain).await?;
            let layer = match &outcome {
                Outcome::Becomes(sealed) => Some((sealed.snapshot, sealed.layers())),
                Outcome::Is(_) => worker.existing(&key)?.layer(),
            };
            let (became, is_restricted) = match outcome {
                Outcome::Becomes(sealed) => {
                    let is_restricted = sealed.is_restricted;
                    (Became::Snapshot(sealed), is_restricted)
                }
                // It was bound, to what may be of another worker.
                Outcome::Is(snapshot) if layer.is_some() => {
                    (Became::Same, worker.is_restricted(snapshot.id).await?)
                }
                Outcome::Is(_) => (Became::Same, false),
            };
            // Mostly the next layer, or a container, is above it at once. If it cannot be recorded, nothing uses the image,
            // and it is unmounted some seconds later.
            if let Some((image, LayerKind::Images)) = layer {
                worker.make_ready(image.id);
            }
            worker.record_as(&key, to, extra(is_restricted), became).await
        })
        .await
    }

    /// Binds a volume to a snapshot as [`Self::bind`] does and renames it as [`Self::commit`]
    /// does, in one step for whoever looks at the new name.
    ///
    /// # Errors
    /// As [`Self::bind`] and [`Self::commit`].
    pub async fn commit_bound(
        &self,
        key: &Key,
        to: Key,
        (snapshot, layers): (SnapshotId, LayerKind),
        extra: Extra,
    ) -> Result<Volume, WorkerError> {
        let key = key.clone();
        self.run(async move |worker: Self| {
            let _lock = worker.inner.volume_locks.lock(&key).await;
            worker.require_free(&key, &to)?;
            let bound = worker.bound(&key, snapshot, layers).await?;
            // Loop devices are for what is used.
            if layers == LayerKind::Images && Attach::mounts_images_from_files() {
                worker.make_ready(snapshot);
            }
            worker.record_as(&key, to, extra, Became::Snapshot(bound)).await
        })
        .await
    }

    /// A volume can be renamed: it is there, and nothing has the new name.
    fn require_free(&self, key: &Key, to: &Key) -> Result<(), WorkerError> {
        self.existing(key)?;
        match self.get(to) {
            Some(_) => Err(WorkerError::Exists { key: to.clone() }),
            None => Ok(()),
        }
    }

    /// Makes a volume be a snapshot of the appliance; what it was before is dropped.
    ///
    /// # Errors
    /// `NotFound`, `UnknownSnapshot`, `Appliance`, `State`; `Busy` while it is in use.
    pub async fn bind(&self, key: &Key, snapshot: SnapshotId) -> Result<SnapshotRef, WorkerError> {
        self.bind_as(key, snapshot, LayerKind::Disks).await
    }

    /// Makes a volume be a snapshot that is a disk, as [`Self::bind`] does, or the image of its layer.
    ///
    /// # Errors
    /// As [`Self::bind`].
    pub async fn bind_as(
        &self,
        key: &Key,
        snapshot: SnapshotId,
        layers: LayerKind,
    ) -> Result<SnapshotRef, WorkerError> {
        let key = key.clone();
        self.run(async move |worker: Self| {
            let _lock = worker.inner.volume_locks.lock(&key).await;
            worker.bind_locked(&key, snapshot, layers).await
        })
        .await
    }

    async fn bind_locked(
        &self,
        key: &Key,
        id: SnapshotId,
        layers: LayerKind,
    ) -> Result<SnapshotRef, WorkerError> {
        let bound = self.bound(key, id, layers).await?;
        self.record(key, bound).await
    }

    /// What a volume becomes that is bound to a snapshot.
    async fn bound(
        &self,
        key: &Key,
        id: SnapshotId,
        layers: LayerKind,
    ) -> Result<Sealed, WorkerError> {
        self.await_users(key).await?;
        let volume = self.existing(key)?;
        let snapshot = self.look_up(id).await?;
        require_kind(&snapshot, layers)?;
        if layers == LayerKind::Images {
            self.require_images_below(&volume, id).await?;
        }
        let hold = Hold::Clone(self.clone_as(FileKind::Hold, id).await?);
        if layers == LayerKind::Images {
            let usage = usage_of_image(&snapshot, inodes_told(&snapshot));
            return Ok(Sealed::new(&snapshot, layers, hold, usage));
        }
        let below = match volume.parent.as_ref().map(|parent| self.resolve(parent)).transpose()? {
            Some(Resolved::Snapshot(below)) => Some(below),
            Some(Resolved::Disk(_)) => None,
            Some(Resolved::Images(_)) => self.counted_empty_disk(snapshot.size_bytes).await?,
            // What the file system itself takes is nobody's own.
            Some(Resolved::Empty) | None => self.counted_empty_disk(snapshot.size_bytes).await?,
        };
        let disk_inodes = match inodes_told(&snapshot) {
            0 => self.inodes_on_disk(hold.name(), snapshot.size_bytes).await,
            told => told,
        };
        let usage = self.usage_of(&snapshot, below, disk_inodes).await?;
        Ok(Sealed::new(&snapshot, layers, hold, usage))
    }

    /// Sees that a volume can be an image: below it are images alone, or nothing, and this machine mounts images.
    async fn require_images_below(
        &self,
        volume: &Volume,
        id: SnapshotId,
    ) -> Result<(), WorkerError> {
        let key = &volume.key;
        match volume.parent.as_ref().map(|parent| self.resolve(parent)).transpose()? {
            None | Some(Resolved::Empty) => {}
            Some(Resolved::Images(lowers)) => {
                if images_in(&lowers).iter().any(|image| image.id == id) {
                    return Err(WorkerError::ImageTwice { id, key: key.clone() });
                }
                if lowers.len() >= IMAGES_MAX {
                    let got = lowers.len() + 1;
                    return Err(WorkerError::TooManyImages { key: key.clone(), got });
                }
            }
            Some(Resolved::Snapshot(_) | Resolved::Disk(_)) => {
                return Err(WorkerError::ImageAboveDisk { id, key: key.clone() });
            }
        }
        match self.attach().await?.has_images().await {
            true => Ok(()),
            false => Err(WorkerError::NoImages { id }),
        }
    }

    /// What a read-only view of the volume would show, without sealing anything: `None` if that
    /// is an empty disk, or one that is still written.
    ///
    /// # Errors
    /// `NotFound`.
    pub async fn snapshot_of(&self, key: &Key) -> Result<Option<SnapshotRef>, WorkerError> {
        match self.resolve(key)? {
            Resolved::Snapshot(snapshot) => Ok(Some(snapshot)),
            Resolved::Images(_) => Err(WorkerError::OfImages { key: key.clone() }),
            Resolved::Empty | Resolved::Disk(_) => Ok(None),
        }
    }

    /// The snapshot of the layer that a volume shows, whether it has the layers below or not: its size tells which
    /// ([`LayerKind::of`]). `None` as of [`Self::snapshot_of`].
    ///
    /// # Errors
    /// `NotFound`.
    pub fn layer_of(&self, key: &Key) -> Result<Option<SnapshotRef>, WorkerError> {
        match self.resolve(key)? {
            Resolved::Snapshot(snapshot) => Ok(Some(snapshot)),
            Resolved::Images(lowers) => match lowers.first() {
                Some(LowerLayer::Image(image)) => Ok(Some(*image)),
                Some(LowerLayer::Directory(_)) | None => Ok(None),
            },
            Resolved::Empty | Resolved::Disk(_) => Ok(None),
        }
    }

    /// [`Self::seal`], the volume's lock held.
    pub(super) async fn seal_locked(
        &self,
        key: &Key,
        chain: Option<Registration>,
    ) -> Result<SnapshotRef, WorkerError> {
        match self.sealed(key, chain).await? {
            Outcome::Is(snapshot) => Ok(snapshot),
            Outcome::Becomes(sealed) => self.record(key, sealed).await,
        }
    }

    /// Makes the snapshot that a volume becomes, which is still to be recorded. The volume's lock is held.
    async fn sealed(&self, key: &Key, chain: Option<Registration>) -> Result<Outcome, WorkerError> {
        let volume = self.existing(key)?;
        match volume.content {
            Content::Snapshot { snapshot, .. } | Content::Image { snapshot, .. } => {
                Ok(Outcome::Is(snapshot))
            }
            Content::ImageFile { name, inodes } => {
                self.sealed_image(key, (name, inodes), chain).await
            }
            Content::Upper { disk, name } | Content::Lower { disk, name } => {
                let (made, imaged) = self.image_of_upper(&volume, (disk, name)).await?;
                // It is listed until the volume names it.
                let sealed = self.sealed_image(key, (made.name(), imaged.inodes), chain).await?;
                Ok(sealed.keeping(made.into_making()))
            }
            Content::Disk { .. } if volume.layers == LayerKind::Images => {
                Err(WorkerError::OfImages { key: key.clone() })
            }
            Content::Disk { name, from, size_bytes } => {
                self.sealed_disk(key, name, (from, size_bytes), chain).await
            }
            Content::Inherited if chain.is_none() => {
                // It shows the images below it, and needs none of its own.
                match self.lowers_of(&volume)?.first() {
                    Some(LowerLayer::Image(highest)) => return Ok(Outcome::Is(*highest)),
                    Some(LowerLayer::Directory(_)) => {
                        return Err(WorkerError::OfImages { key: key.clone() });
                    }
                    None => {}
                }
                let snapshot = self.settled(key).await?;
                let hold = Hold::Clone(self.clone_as(FileKind::Hold, snapshot.id).await?);
                Ok(Outcome::Becomes(Sealed::of_below(snapshot, hold)))
            }
            // What is registered as a chain is a snapshot of its own.
            Content::Inherited => {
                self.make_disk(&volume).await?;
                Box::pin(self.sealed(key, chain)).await
            }
        }
    }

    async fn sealed_disk(
        &self,
        key: &Key,
        disk: Uuid,
        (from, size_bytes): (SnapshotRef, u64),
        chain: Option<Registration>,
    ) -> Result<Outcome, WorkerError> {
        self.await_users(key).await?;
        let target = self.mount_disk(disk).await?;
        self.sync_disk(key, &target).await?;
        let disk_inodes = used_inodes(&target)?;
        // Others look for one of the usual size.
        let chain = chain.filter(|_| size_bytes == self.disk_size_bytes());
        let sealing = Sealing::Disk { target: &target, name: disk };
        let (snapshot, hold) = self.snapshot_and_hold(&sealing, chain.as_ref()).await?;
        let usage = self.usage_of(&snapshot, Some(from), disk_inodes).await?;
        Ok(Outcome::Becomes(Sealed::new(&snapshot, LayerKind::Disks, hold, usage)))
    }

    /// Makes the snapshot of an image that is written, with so many inodes.
    pub(super) async fn sealed_image(
        &self,
        key: &Key,
        (name, inodes): (Uuid, u64),
        chain: Option<Registration>,
    ) -> Result<Outcome, WorkerError> {
        let below = self.existing(key)?.parent.and_then(|parent| self.chain_of(&parent));
        let sealing = Sealing::Image { name, inodes, below };
        let (snapshot, hold) = self.snapshot_and_hold(&sealing, chain.as_ref()).await?;
        let usage = usage_of_image(&snapshot, inodes);
        Ok(Outcome::Becomes(Sealed::new(&snapshot, LayerKind::Images, hold, usage)))
    }

    /// Records that a volume is a snapshot now; its disk, if it had one, is dropped.
    pub(super) async fn record(
        &self,
        key: &Key,
        sealed: Sealed,
    ) -> Result<SnapshotRef, WorkerError> {
        let snapshot = sealed.snapshot;
        // What was given the directory of a layer is in the state, or sees the image.
        let _given = self.inner.giving.write().await;
        self.become_content(key, sealed.content(), Some(sealed.usage)).await?;
        self.inner.captured.lock().remove(&snapshot.id);
        Ok(snapshot)
    }

    /// Records that a volume has another name and other data of its engine; and what it is now.
    async fn record_as(
        &self,
        key: &Key,
        to: Key,
        extra: Extra,
        became: Became,
    ) -> Result<Volume, WorkerError> {
        let content = became.content();
        let images = match content {
            Some(_) => self.mounted_images_of(key)?,
            None => Vec::new(),
        };
        let change = move |volume: &mut Volume| {
            if let Some((content, usage)) = content {
                volume.become_content(content, usage);
            }
            (volume.key, volume.extra, volume.created_at) = (to, extra, now());
        };
        let inner = Arc::clone(&self.inner);
        let of = key.clone();
        let renamed = tokio::task::spawn_blocking(move || inner.state.rename(&of, change)).await;
        self.inner.reap.notify_one();
        let renamed = renamed.map_err(super::interrupted)??;
        self.unmount_images_later(images);
        if let Became::Snapshot(sealed) = became {
            self.inner.captured.lock().remove(&sealed.snapshot.id);
        }
        Ok(renamed)
    }

    /// Records what a volume is from now on; nothing of it is mounted any more.
    pub(super) async fn become_content(
        &self,
        key: &Key,
        content: Content,
        usage: Option<Usage>,
    ) -> Result<Volume, WorkerError> {
        let images = self.mounted_images_of(key)?;
        let became = self.change(key, move |volume| volume.become_content(content, usage)).await?;
        self.unmount_images_later(images);
        Ok(became)
    }

    /// The images that a volume has mounted.
    fn mounted_images_of(&self, key: &Key) -> Result<Vec<SnapshotId>, WorkerError> {
        let volume = self.existing(key)?;
        let lowers = volume.mounted.map(|_| self.lowers_of(&volume)).transpose()?;
        let images = images_in(&lowers.unwrap_or_default());
        Ok(images.into_iter().map(|image| image.id).collect())
    }

    /// Brings what is dirty to the appliance, before anybody has to stand still for it. A failure
    /// is remembered: the kernel reports a lost write to one sync only.
    pub(super) async fn sync_disk(&self, key: &Key, target: &Path) -> Result<(), WorkerError> {
        let volume = self.existing(key)?;
        if volume.is_damaged {
            return Err(WorkerError::Damaged { key: key.clone() });
        }
        let Err(error) = self.attach().await?.sync(target).await else {
            return Ok(());
        };
        self.note_loss(key, &error).await?;
        Err(error.into())
    }

    /// Remembers of a volume that writes were lost, if the error says so.
    pub(super) async fn note_loss(
        &self,
        key: &Key,
        error: &AttachError,
    ) -> Result<(), WorkerError> {
        if !matches!(error, AttachError::LostWrites { .. }) {
            return Ok(());
        }
        if let Some(directory) = self.existing(key)?.directory() {
            return self.note_loss_of_uppers(directory.disk).await;
        }
        self.change(key, |volume| volume.is_damaged = true).await.map(drop)
    }

    /// Takes a snapshot of a disk that is written meanwhile. A freeze writes back what got dirty
    /// since the sync before it, and tells nobody if that fails: only another sync does. A frozen
    /// file system cannot be synced, so one that does not thaw is as good as a failed sync. A
    /// snapshot that is refused here has no name, and is deleted as one that nobody bound.
    pub(super) async fn take_running(
        &self,
        key: &Key,
        target: &Path,
        disk: Uuid,
    ) -> Result<Snapshot, WorkerError> {
        self.sync_disk(key, target).await?;
        let taking = self.take_frozen(target, async |inodes| {
            // What is written there stands still: an appliance that is slow, or is reached through it, is not waited for.
            let taken = timeout(FROZEN_TIME_MAX, self.take_snapshot(disk, inodes)).await;
            let waited = FROZEN_TIME_MAX;
            taken
                .map_err(|_| WorkerError::Frozen { target: target.to_owned(), waited })?
                .map_err(|error| self.refused(error))
        });
        let (snapshot, thawed) = taking.await?;
        // At once: what follows may take as long as a capture that nobody binds is kept.
        self.inner.captured.lock().insert(snapshot.id, Instant::now());
        let whole = match thawed {
            Ok(()) => self.sync_disk(key, target).await,
            Err(error) => Err(error.into()),
        };
        if whole.is_err() {
            self.inner.captured.lock().remove(&snapshot.id);
        }
        whole.map(|()| snapshot)
    }

    /// Takes a snapshot of a mounted disk, with so many inodes in use, while its file system stands still (D4); whether it
    /// moves again, too.
    pub(super) async fn take_frozen(
        &self,
        target: &Path,
        take: impl AsyncFnOnce(Option<u64>) -> Result<Snapshot, WorkerError>,
    ) -> Result<(Snapshot, Result<(), AttachError>), WorkerError> {
        let attach = self.attach().await?;
        attach.freeze(target).await?;
        // Those who take the snapshot over have mounted nothing of it.
        let inodes = used_inodes(target).ok();
        let taken = take(inodes).await;
        let thawed = attach.thaw(target).await;
        if let Err(error) = &thawed {
            tracing::error!(target = %target.display(), %error, "cannot thaw yet; trying on");
            let (attach, target) = (attach.clone(), target.to_owned());
            tokio::spawn(async move {
                while attach.thaw(&target).await.is_err() {
                    tokio::time::sleep(THAW_INTERVAL).await;
                }
            });
        }
        Ok((taken?, thawed))
    }

    /// Waits for the users of a disk to let go of it.
    pub(super) async fn await_users(&self, key: &Key) -> Result<(), WorkerError> {
        let started = Instant::now();
        loop {
            let users = self.existing(key)?.users;
            if users == 0 && !self.inner.pinned.lock().contains_key(key) {
                return Ok(());
            }
            if started.elapsed() >= USERS_WAIT_MAX {
                return Err(WorkerError::Busy { key: key.clone(), users });
            }
            tokio::time::sleep(USERS_WAIT_STEP).await;
        }
    }
}
