//! Mounts: disks for writing, one each; snapshots for reading, one for all readers.
//!
//! Engines take and give back mounts at a quick pace (a `docker run` twice within milliseconds),
//! so what nobody uses any more stays mounted for a while.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use slackwater_attach::{AttachError, Source};
use slackwater_client::types::SnapshotId;
use uuid::Uuid;

use super::lowers::LowerLayer;
use super::state::FileKind;
use super::volume::{Access, Content, Directory, Key, MountedAs, SnapshotRef, Volume};
use super::{Worker, WorkerError};

/// How long a mount without users stays: longer than an engine takes between two uses, short
/// enough that hundreds of short containers do not pile up.
pub(super) const IDLE: Duration = Duration::from_secs(10);

/// A shared read-only mount of a snapshot, there for as long as this lives.
#[derive(Debug)]
pub struct View {
    worker: Worker,
    snapshot: SnapshotId,
    path: PathBuf,
}

impl View {
    /// Where it is mounted.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn snapshot(&self) -> SnapshotId {
        self.snapshot
    }
}

impl Drop for View {
    fn drop(&mut self) {
        let mut views = self.worker.inner.views.lock();
        if let Some(count) = views.get_mut(&self.snapshot) {
            *count -= 1;
            if *count == 0 {
                views.remove(&self.snapshot);
            }
        }
        drop(views);
        self.worker.unmount_view_later(self.snapshot);
    }
}

/// A volume that the driver itself uses, mounted for as long as this lives. Unlike a user it is
/// not recorded: it ends with the process.
#[derive(Debug)]
pub struct Pin {
    worker: Worker,
    key: Key,
    path: PathBuf,
}

impl Pin {
    /// Where it is mounted.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.worker.unpin(&self.key);
    }
}

/// What a volume reads as.
#[derive(Debug)]
pub(super) enum Resolved {
    /// An empty disk.
    Empty,
    /// A snapshot.
    Snapshot(SnapshotRef),
    /// The disk of this volume, which is the asked one or one above which it was made.
    Disk(Key),
    /// These layers, the highest one first.
    Images(Vec<LowerLayer>),
}

impl Worker {
    /// Mounts a volume and counts one user more, durably. For writing it gets a disk of its own
    /// first, if it has none; for reading it is sealed first, if it is a disk that nobody uses.
    ///
    /// # Errors
    /// `NotFound`; `ReadOnly` if it is to be written and is a snapshot; `Appliance`, `Attach`,
    /// `State`.
    pub async fn acquire(&self, key: &Key, access: Access) -> Result<PathBuf, WorkerError> {
        self.acquire_counted(key, access, None).await
    }

    /// [`Self::acquire`] for a call of the engine that may be carried out again after this
    /// process died: it counts once.
    ///
    /// # Errors
    /// As [`Self::acquire`].
    pub async fn acquire_once(
        &self,
        key: &Key,
        access: Access,
        call: Uuid,
    ) -> Result<PathBuf, WorkerError> {
        self.acquire_counted(key, access, Some(call)).await
    }

    async fn acquire_counted(
        &self,
        key: &Key,
        access: Access,
        call: Option<Uuid>,
    ) -> Result<PathBuf, WorkerError> {
        let key = key.clone();
        self.run(async move |worker: Self| {
            let _lock = worker.inner.volume_locks.lock(&key).await;
            let has_counted = Arc::new(AtomicBool::new(false));
            let count = {
                let has_counted = Arc::clone(&has_counted);
                move |volume: &mut Volume| {
                    let counted = volume.count_once(call, |users| users + 1);
                    has_counted.store(counted, Ordering::Release);
                }
            };
            let mounted = worker.mount_locked(&key, access, count).await;
            if mounted.is_err() && has_counted.load(Ordering::Acquire) {
                // Nobody gives back what nobody got.
                worker.change(&key, move |volume| volume.uncount(call)).await?;
            }
            mounted
        })
        .await
    }

    /// Mounts a volume as [`Self::acquire`] does, to stay mounted until it is sealed or removed.
    ///
    /// # Errors
    /// As [`Self::acquire`].
    pub async fn ensure_mounted(&self, key: &Key, access: Access) -> Result<PathBuf, WorkerError> {
        let key = key.clone();
        self.run(async move |worker: Self| {
            let _lock = worker.inner.volume_locks.lock(&key).await;
            worker.mount_locked(&key, access, |volume| volume.is_kept_mounted = true).await
        })
        .await
    }

    /// Mounts a volume as [`Self::acquire`] does, for the driver itself.
    ///
    /// # Errors
    /// As [`Self::acquire`].
    pub async fn pin(&self, key: &Key, access: Access) -> Result<Pin, WorkerError> {
        let key = key.clone();
        self.run(async move |worker: Self| {
            let _lock = worker.inner.volume_locks.lock(&key).await;
            *worker.inner.pinned.lock().entry(key.clone()).or_default() += 1;
            match worker.mount_locked(&key, access, |_| ()).await {
                Ok(path) => Ok(Pin { worker: worker.clone(), key, path }),
                Err(error) => {
                    worker.unpin(&key);
                    Err(error)
                }
            }
        })
        .await
    }

    /// Counts a volume as used by the driver itself, where something of it is seen already.
    pub(super) fn pin_at(&self, key: &Key, path: PathBuf) -> Pin {
        *self.inner.pinned.lock().entry(key.clone()).or_default() += 1;
        Pin { worker: self.clone(), key: key.clone(), path }
    }

    fn unpin(&self, key: &Key) {
        let mut pinned = self.inner.pinned.lock();
        if let Some(count) = pinned.get_mut(key) {
            *count -= 1;
            if *count == 0 {
                pinned.remove(key);
            }
        }
        drop(pinned);
        if let Some(volume) = self.get(key) {
            self.unmount_later(&volume);
        }
    }

    /// Whether somebody relies on the volume's mount: an engine, or the driver itself.
    pub(super) fn is_used(&self, volume: &Volume) -> bool {
        volume.is_in_use() || self.inner.pinned.lock().contains_key(&volume.key)
    }

    /// Counts one user less, durably; without users the volume is unmounted some time later.
    /// Releasing what nobody has acquired changes nothing.
    ///
    /// # Errors
    /// `NotFound`, `State`.
    pub async fn release(&self, key: &Key) -> Result<(), WorkerError> {
        self.release_counted(key, None).await
    }

    /// [`Self::release`] for a call that may be carried out again: it counts once.
    ///
    /// # Errors
    /// As [`Self::release`].
    pub async fn release_once(&self, key: &Key, call: Uuid) -> Result<(), WorkerError> {
        self.release_counted(key, Some(call)).await
    }

    async fn release_counted(&self, key: &Key, call: Option<Uuid>) -> Result<(), WorkerError> {
        let key = key.clone();
        self.run(async move |worker: Self| {
            // Not under the volume's lock: who holds that may be waiting for just this.
            let release = move |volume: &mut Volume| {
                let _ = volume.count_once(call, |users| users.saturating_sub(1));
            };
            let volume = worker.change(&key, release).await?;
            if !volume.is_in_use() {
                worker.unmount_later(&volume);
            }
            Ok(())
        })
        .await
    }

    /// Mounts a snapshot for reading.
    ///
    /// # Errors
    /// `UnknownSnapshot`, `Appliance`, `Attach`.
    pub async fn view(&self, snapshot: SnapshotRef) -> Result<View, WorkerError> {
        self.run(async move |worker: Self| {
            let _lock = worker.inner.view_locks.lock(&snapshot.id).await;
            let path = worker.mount_view(snapshot.id).await?;
            *worker.inner.views.lock().entry(snapshot.id).or_default() += 1;
            Ok(View { worker: worker.clone(), snapshot: snapshot.id, path })
        })
        .await
    }

    /// Mounts, and records it by `count`. The volume's lock is held.
    async fn mount_locked(
        &self,
        key: &Key,
        access: Access,
        count: impl FnOnce(&mut Volume) + Send + 'static,
    ) -> Result<PathBuf, WorkerError> {
        let volume = self.existing(key)?;
        let name = match (access, &volume.content) {
            (
                Access::ReadWrite,
                Content::Snapshot { .. } | Content::Image { .. } | Content::ImageFile { .. },
            ) => {
                return Err(WorkerError::ReadOnly { key: key.clone() });
            }
            (_, Content::Upper { .. } | Content::Lower { .. }) => {
                return Err(WorkerError::OfImages { key: key.clone() });
            }
            (Access::ReadWrite, Content::Inherited) => self.make_disk(&volume).await?,
            (Access::ReadWrite, Content::Disk { name, .. }) => *name,
            // Who reads what another writes sees it change.
            (Access::ReadOnly, Content::Disk { name, .. }) if volume.is_in_use() => *name,
            (Access::ReadOnly, _) => return self.view_locked(key, count).await,
        };
        // Counted first, so that nobody unmounts what is just being mounted (D5).
        self.change(key, |volume| {
            volume.mounted = Some(MountedAs::Disk);
            count(volume);
        })
        .await?;
        self.mount_disk(name).await
    }

    async fn view_locked(
        &self,
        key: &Key,
        count: impl FnOnce(&mut Volume) + Send + 'static,
    ) -> Result<PathBuf, WorkerError> {
        let snapshot = self.settled(key).await?;
        let _lock = self.inner.view_locks.lock(&snapshot.id).await;
        self.change(key, move |volume| {
            volume.mounted = Some(MountedAs::View(snapshot.id));
            count(volume);
        })
        .await?;
        self.mount_view(snapshot.id).await
    }

    /// The target of a disk's mount.
    pub(super) fn disk_target(&self, name: Uuid) -> PathBuf {
        self.disks_directory().join(name.to_string())
    }

    /// Where disks are mounted, each at a directory of its own.
    pub(super) fn disks_directory(&self) -> PathBuf {
        self.state_directory().join("mounts")
    }

    pub(super) async fn mount_disk(&self, name: Uuid) -> Result<PathBuf, WorkerError> {
        let target = self.disk_target(name);
        let path = self.disk_path(name);
        let source = Source::File(&path);
        let access = slackwater_attach::Access::ReadWrite;
        self.attach().await?.mount(source, &target, access).await?;
        Ok(target)
    }

    fn view_target(&self, snapshot: SnapshotId) -> PathBuf {
        self.state_directory().join("views").join(snapshot.to_string())
    }

    /// Mounts a snapshot. Its view lock is held.
    async fn mount_view(&self, snapshot: SnapshotId) -> Result<PathBuf, WorkerError> {
        let target = self.view_target(snapshot);
        let source = Source::Snapshot(Uuid::from_bytes(*snapshot.as_bytes()));
        let access = slackwater_attach::Access::ReadOnly;
        self.attach().await?.mount(source, &target, access).await?;
        Ok(target)
    }

    /// What a volume reads as, by its own content or by that of what it was made above.
    pub(super) fn resolve(&self, key: &Key) -> Result<Resolved, WorkerError> {
        let mut key = key.clone();
        let mut layers = Vec::new();
        loop {
            let volume = self.existing(&key)?;
            match volume.content {
                Content::Inherited => {}
                Content::Image { snapshot, .. } => layers.push(LowerLayer::Image(snapshot)),
                Content::Lower { .. } if volume.is_damaged => {
                    return Err(WorkerError::Damaged { key });
                }
                Content::Lower { disk, name } => {
                    layers.push(LowerLayer::Directory(Directory { disk, name }));
                }
                // Below an image are images alone.
                _ if !layers.is_empty() => return Err(WorkerError::OfImages { key }),
                Content::Snapshot { snapshot, .. } => return Ok(Resolved::Snapshot(snapshot)),
                Content::Disk { .. } | Content::Upper { .. } | Content::ImageFile { .. } => {
                    return Ok(Resolved::Disk(key));
                }
            }
            match volume.parent {
                Some(parent) => key = parent,
                None if layers.is_empty() => return Ok(Resolved::Empty),
                None => return Ok(Resolved::Images(layers)),
            }
        }
    }

    /// The snapshot that a volume reads as; a disk among what it reads is sealed for it. The
    /// volume's own lock is held.
    pub(super) async fn settled(&self, key: &Key) -> Result<SnapshotRef, WorkerError> {
        match self.resolve(key)? {
            Resolved::Snapshot(snapshot) => Ok(snapshot),
            Resolved::Images(_) => Err(WorkerError::OfImages { key: key.clone() }),
            Resolved::Empty => self.empty_disk(self.disk_size_bytes()).await,
            Resolved::Disk(owner) if self.is_above_images(&owner)? => {
                Err(WorkerError::OfImages { key: key.clone() })
            }
            Resolved::Disk(owner) if owner == *key => Box::pin(self.seal_locked(key, None)).await,
            Resolved::Disk(owner) => {
                let _lock = self.inner.volume_locks.lock(&owner).await;
                Box::pin(self.seal_locked(&owner, None)).await
            }
        }
    }

    /// Gives a volume a disk of its own. Its lock is held.
    pub(super) async fn make_disk(&self, volume: &Volume) -> Result<Uuid, WorkerError> {
        let wanted_bytes = volume.extra.disk_size_bytes();
        let (from, making) = match self.resolve(&volume.key)? {
            Resolved::Images(_) => {
                return Err(WorkerError::OfImages { key: volume.key.clone() });
            }
            Resolved::Empty => {
                // One of each size stays on the appliance, and clients of containerd choose sizes: such a disk grows.
                let own = volume.extra.own_disk();
                let size_bytes = wanted_bytes.filter(|_| own.is_none());
                self.clone_empty_disk(size_bytes.unwrap_or(self.disk_size_bytes())).await?
            }
            Resolved::Snapshot(_) | Resolved::Disk(_) => {
                let from = self.settled(&volume.key).await?;
                (from, self.clone_as(FileKind::Disk, from.id).await?)
            }
        };
        let size_bytes = wanted_bytes.unwrap_or(from.size_bytes);
        if size_bytes < from.size_bytes {
            return Err(WorkerError::TooSmall {
                got_bytes: size_bytes,
                least_bytes: from.size_bytes,
            });
        }
        if size_bytes > from.size_bytes {
            let path = self.path_of(making.file);
            self.client().resize_file(&path, size_bytes).await?;
            self.attach().await?.grow_file_system(&path).await?;
        }
        let name = making.file.name;
        self.change(&volume.key, move |volume| {
            volume.content = Content::Disk { name, from, size_bytes };
        })
        .await?;
        Ok(name)
    }

    /// Unmounts what a volume has mounted, unless it is used again by then.
    pub(super) fn unmount_later(&self, volume: &Volume) {
        match volume.mounted {
            Some(MountedAs::View(snapshot)) => self.unmount_view_later(snapshot),
            Some(MountedAs::Disk) => {
                // Outside a runtime nothing runs any more: the next start finds the mount.
                let Ok(runtime) = tokio::runtime::Handle::try_current() else {
                    return;
                };
                let (worker, key) = (self.clone(), volume.key.clone());
                runtime.spawn(async move {
                    tokio::time::sleep(IDLE).await;
                    if let Err(error) = worker.unmount_idle(&key).await {
                        tracing::warn!(%key, %error, "unmounting what nobody uses");
                    }
                });
            }
            Some(MountedAs::Images) | None => {}
        }
    }

    async fn unmount_idle(&self, key: &Key) -> Result<(), WorkerError> {
        let _lock = self.inner.volume_locks.lock(key).await;
        let Some(volume) = self.get(key) else {
            return Ok(());
        };
        let Content::Disk { name, .. } = volume.content else {
            return Ok(());
        };
        if self.is_used(&volume) || volume.mounted != Some(MountedAs::Disk) {
            return Ok(());
        }
        // Unmounting would lose the error of a lost write without a word.
        let target = self.disk_target(name);
        match self.sync_disk(key, &target).await {
            // Damaged is known already; not mounted, there is nothing to sync.
            Ok(())
            | Err(WorkerError::Damaged { .. })
            | Err(WorkerError::Attach { source: AttachError::NotMounted { .. } }) => {}
            Err(error) => return Err(error),
        }
        if let Err(error) = self.attach().await?.unmount(&target).await {
            // What was busy was synced once more.
            self.note_loss(key, &error).await?;
            return Err(error.into());
        }
        self.change(key, |volume| volume.mounted = None).await?;
        Ok(())
    }

    /// Unmounts a view, unless it is used again by then.
    pub(super) fn unmount_view_later(&self, snapshot: SnapshotId) {
        // Outside a runtime nothing runs any more: the next start finds the mount.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return;
        };
        let worker = self.clone();
        runtime.spawn(async move {
            tokio::time::sleep(IDLE).await;
            if let Err(error) = worker.unmount_view(snapshot).await {
                tracing::warn!(%snapshot, %error, "unmounting a view that nobody uses");
            }
        });
    }

    /// Unmounts a view if nobody uses it.
    pub(super) async fn unmount_view(&self, snapshot: SnapshotId) -> Result<(), WorkerError> {
        let _lock = self.inner.view_locks.lock(&snapshot).await;
        let is_viewed = self.inner.views.lock().contains_key(&snapshot);
        let wanted = Some(MountedAs::View(snapshot));
        let viewers = self.inner.state.matching(|volume| volume.mounted == wanted);
        if is_viewed || viewers.iter().any(|volume| self.is_used(volume)) {
            return Ok(());
        }
        self.attach().await?.unmount(&self.view_target(snapshot)).await?;
        Ok(())
    }
}
