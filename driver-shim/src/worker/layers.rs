//! Layers as images: each an EROFS file system of its layer alone, mounted once for all that is above it.
//!
//! ```text
//!   appliance                          machine                            engine
//!   .snapshot/A    first layer   <--   STATE/images/A   --\
//!   .snapshot/B    next layer    <--   STATE/images/B   ---+--> overlay, mounted by the engine
//!   workers/ID/disks/DISK        <--   STATE/mounts/DISK --/    (lowerdir B:A, upperdir DISK/NAME/upper)
//! ```
//! A container or a layer that is being written has a directory, with the upper one of the overlay, on a disk that
//! all of them share (uppers.rs). When it is sealed, the layer of what is there becomes an image, whose cost is
//! in proportion to what was written: at once, or some time after its commit (lowers.rs).
//!
//! Invariants:
//! - Below an image are images alone, or layers that will be images, or nothing: it has marks for what it removes of these.
//! - An image is mounted while a volume that was given its mount point reads it, or the driver itself does. One that nothing
//!   uses stays mounted while it is a layer of this worker, with what the kernel has cached of it, up to a number.
//! - An image is mounted from a snapshot, which nothing can write.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Instant;

use futures_util::{StreamExt, TryStreamExt, stream};
use rustix::fs::XattrFlags;
use slackwater_attach::{Mounted, Source};
use slackwater_client::types::SnapshotId;
use uuid::Uuid;

use super::lowers::directories_in;
use super::mounting::IDLE;
use super::state::Change;
use super::uppers::{HeldUpper, upper_of, work_of};
use super::volume::{Access, Content, Extra, Key, LayerKind, MountedAs, SnapshotRef, Volume};
use super::{Inner, Worker, WorkerError};

/// Most images one above the other. The engine gives their paths to mount(2) in one page of 4 KiB, below a
/// directory that containerd enters first: 17 bytes each leave room for the upper directory and the other options.
/// Docker's own limit is 125 layers.
pub(super) const IMAGES_MAX: usize = 128;

/// Images without users that stay mounted. Each takes some kernel memory, and a line of the table of mounts, which every
/// engine reads; this is some ten images of common size, or the deepest one.
const KEPT_IMAGES_MAX: usize = 128;

/// Images that are mounted at a time: enough to hide the appliance's answer time.
const MOUNTED_AT_ONCE: usize = 8;

/// Linux' limit of an extended attribute, and of the list of their names (`limits.h`).
const ATTRIBUTES_BYTES_MAX: usize = 64 << 10;

/// Extended attributes of a root that its upper directory does not get.
const NOT_COPIED: [&[u8]; 3] = [b"trusted.overlay.", b"user.overlay.", b"security.selinux"];

/// What an overlay of ours is mounted with: nothing in an upper directory that says where content is instead of
/// having it. `redirect_dir=off` turns `metacopy` off, too, an option that `BuildKit` does not know and refuses.
pub(super) const OVERLAY_OPTIONS: [&str; 2] = ["index=off", "redirect_dir=off"];

/// How the directory tree of a volume is put together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rootfs {
    /// It is this directory.
    Directory(PathBuf),
    /// It is an overlay of these, or the only one of them.
    Overlay {
        /// The directories of its images, the highest one first; none below what nothing is below.
        lowers: Vec<PathBuf>,
        /// The directory that has the overlay's own, if something may be written.
        directory: Option<PathBuf>,
    },
}

impl Rootfs {
    /// Where what is written goes: a directory of the driver's; `None` if nothing may be written.
    #[must_use]
    pub fn written(&self) -> Option<PathBuf> {
        match self {
            Self::Directory(path) => Some(path.clone()),
            Self::Overlay { directory, .. } => directory.as_deref().map(upper_of),
        }
    }

    /// The options of the overlay's mount, as containerd and `BuildKit` know them.
    #[must_use]
    pub fn overlay_options(&self) -> Vec<String> {
        let Self::Overlay { lowers, directory } = self else { return Vec::new() };
        let mut options = Vec::new();
        if let Some(directory) = directory {
            options.extend(OVERLAY_OPTIONS.map(str::to_owned));
            options.push(format!("workdir={}", work_of(directory).display()));
            options.push(format!("upperdir={}", upper_of(directory).display()));
        }
        let lowers: Vec<_> = lowers.iter().map(|path| path.to_string_lossy()).collect();
        options.push(format!("lowerdir={}", lowers.join(":")));
        options
    }
}

/// Images that may be unused, each with the time at which to look.
#[derive(Debug, Default)]
pub(super) struct IdleImages {
    times: HashMap<SnapshotId, Instant>,
    /// Those that stay mounted, the longest unused first. Some may be in use again.
    kept: VecDeque<SnapshotId>,
    /// Those of all that were mounted ahead, and that nothing has used yet.
    unused: HashSet<SnapshotId>,
    /// Something waits for the next time.
    is_waited_for: bool,
}

/// What to do next with images that may be unused.
enum Next {
    None,
    At(Instant),
    Now(Vec<SnapshotId>),
}

impl IdleImages {
    /// Notes images, those that are noted with a new time. Whether something has to wait for it.
    fn add(&mut self, ids: Vec<SnapshotId>, time: Instant) -> bool {
        self.times.extend(ids.into_iter().map(|id| (id, time)));
        !std::mem::replace(&mut self.is_waited_for, true)
    }

    /// Whether nothing knows when to look at a mounted image again, which may be a layer.
    fn is_overlooked(&self, id: SnapshotId, is_layer: bool) -> bool {
        !(self.times.contains_key(&id) || is_layer && self.kept.contains(&id))
    }

    /// Notes an image that is mounted ahead. One that stays mounted since it was used goes on as such.
    pub(super) fn note_unused(&mut self, id: SnapshotId) {
        if !self.kept.contains(&id) {
            self.unused.insert(id);
        }
    }

    /// Notes images that something uses.
    fn note_used(&mut self, ids: &[SnapshotId]) {
        self.unused.retain(|id| !ids.contains(id));
    }

    /// Has images stay mounted. Those that are too many then do not: first what nothing used, then the longest unused.
    fn keep(&mut self, ids: Vec<SnapshotId>) -> Vec<SnapshotId> {
        self.kept.retain(|id| !ids.contains(id));
        for id in ids {
            match self.unused.contains(&id) {
                true => self.kept.push_front(id),
                false => self.kept.push_back(id),
            }
        }
        let excess = self.kept.len().saturating_sub(KEPT_IMAGES_MAX);
        let excess: Vec<_> = self.kept.drain(..excess).collect();
        self.note_used(&excess);
        excess
    }

    fn forget(&mut self, ids: &[SnapshotId]) {
        self.kept.retain(|id| !ids.contains(id));
        self.note_used(ids);
    }

    fn next(&mut self, now: Instant) -> Next {
        let mut due: Vec<_> = self.times.extract_if(|_, time| *time <= now).collect();
        due.sort_by_key(|(_, time)| *time);
        let due: Vec<_> = due.into_iter().map(|(id, _)| id).collect();
        let first = self.times.values().min();
        match first {
            _ if !due.is_empty() => Next::Now(due),
            Some(time) => Next::At(*time),
            None => {
                self.is_waited_for = false;
                Next::None
            }
        }
    }
}

/// Images that the driver reads, mounted for as long as this lives.
#[derive(Debug)]
pub(super) struct Images {
    pub(super) worker: Worker,
    pub(super) ids: Vec<SnapshotId>,
    pub(super) paths: Vec<PathBuf>,
    /// Layers that are directories stay, too.
    pub(super) _directories: Vec<HeldUpper>,
}

impl Drop for Images {
    fn drop(&mut self) {
        let mut views = self.worker.inner.views.lock();
        for id in &self.ids {
            if let Some(count) = views.get_mut(id) {
                *count -= 1;
                if *count == 0 {
                    views.remove(id);
                }
            }
        }
        drop(views);
        self.worker.unmount_images_later(std::mem::take(&mut self.ids));
    }
}

impl Worker {
    /// Whether a volume has, or had, no more than its own layer.
    pub(super) fn is_above_images(&self, key: &Key) -> Result<bool, WorkerError> {
        let volume = self.existing(key)?;
        let is_image = matches!(volume.content, Content::ImageFile { .. } | Content::Image { .. });
        Ok(is_image || volume.layers == LayerKind::Images)
    }

    /// Makes a volume that is only read, as [`Self::create`] does. One of images counts as mounted from the beginning, to
    /// stay so until it is removed: one record instead of two.
    ///
    /// # Errors
    /// As [`Self::create`]; `Damaged` if what is below is, `OfImages` if that is no layer.
    pub async fn create_view(
        &self,
        key: Key,
        parent: Option<Key>,
        extra: Extra,
    ) -> Result<Volume, WorkerError> {
        let volume = Volume::new(key, parent, extra, LayerKind::Disks);
        self.run(async move |worker: Self| worker.create_as_mounted(volume).await).await
    }

    /// Records a new volume. One of images counts as mounted, and has been given what is below it.
    pub(super) async fn create_as_mounted(&self, volume: Volume) -> Result<Volume, WorkerError> {
        // What is given here is not replaced before that is in the state.
        let _giving = self.inner.giving.read().await;
        let lowers = match &volume.parent {
            Some(parent) if self.get(parent).is_some() => self.lowers_below(&volume)?,
            // One that is not there is refused below.
            _ => Vec::new(),
        };
        let volume = match lowers.is_empty() && volume.directory().is_none() {
            true => volume,
            false => {
                let (mounted, given) = (Some(MountedAs::Images), directories_in(&lowers));
                Volume { mounted, is_kept_mounted: true, given, ..volume }
            }
        };
        self.apply(vec![Change::Create(Box::new(volume.clone()))]).await?;
        Ok(volume)
    }

    /// Sees that a volume is mounted as far as the driver mounts it, to stay so until it is sealed or removed.
    ///
    /// # Errors
    /// As [`Self::acquire`]; `TooManyImages`.
    pub async fn ensure_rootfs(&self, key: &Key, access: Access) -> Result<Rootfs, WorkerError> {
        let volume = self.existing(key)?;
        let lowers = self.lowers_of(&volume)?;
        if lowers.is_empty() && (volume.layers == LayerKind::Disks || access == Access::ReadOnly) {
            return Ok(Rootfs::Directory(self.ensure_mounted(key, access).await?));
        }
        if lowers.len() > IMAGES_MAX {
            return Err(WorkerError::TooManyImages { key: key.clone(), got: lowers.len() });
        }
        let key = key.clone();
        self.run(async move |worker: Self| {
            let _lock = worker.inner.volume_locks.lock(&key).await;
            worker.rootfs_locked(&key, access).await
        })
        .await
    }

    async fn rootfs_locked(&self, key: &Key, access: Access) -> Result<Rootfs, WorkerError> {
        let volume = self.existing(key)?;
        let upper = match (access, &volume.content) {
            (Access::ReadWrite, Content::Upper { disk, name }) => Some((*disk, *name)),
            (
                Access::ReadOnly,
                Content::Inherited | Content::Image { .. } | Content::Lower { .. },
            ) => None,
            _ => return Err(WorkerError::ReadOnly { key: key.clone() }),
        };
        let lowers = {
            // What is given here is not replaced before that is in the state.
            let _giving = self.inner.giving.read().await;
            let lowers = self.lowers_of(&volume)?;
            // Counted first, so that nothing unmounts what is just being mounted (D5).
            if volume.mounted != Some(MountedAs::Images) || !volume.is_kept_mounted {
                let given = directories_in(&lowers);
                self.change(key, move |volume| {
                    volume.mounted = Some(MountedAs::Images);
                    volume.is_kept_mounted = true;
                    let new = given.into_iter().filter(|one| !volume.given.contains(one));
                    volume.given.extend(new.collect::<Vec<_>>());
                })
                .await?;
            }
            lowers
        };
        let lowers = self.mount_lowers(&lowers).await?;
        let directory = match upper {
            Some((disk, name)) => {
                Some(self.ready_upper(disk, name, lowers.first().cloned()).await?)
            }
            None => None,
        };
        Ok(Rootfs::Overlay { lowers, directory })
    }

    /// The target of an image's mount. Half of the id is short, and a second image there would be refused.
    pub(super) fn image_target(&self, id: SnapshotId) -> PathBuf {
        let name = Uuid::from_bytes(*id.as_bytes()).as_simple().to_string();
        self.images_directory().join(&name[..name.len() / 2])
    }

    /// Where images are mounted, each at a directory of its own.
    pub(super) fn images_directory(&self) -> PathBuf {
        self.state_directory().join("images")
    }

    /// Mounts images; where each is, in the same order. A volume or a count of views says that they are used.
    pub(super) async fn mount_images(
        &self,
        images: &[SnapshotRef],
    ) -> Result<Vec<PathBuf>, WorkerError> {
        let ids: Vec<_> = images.iter().map(|image| image.id).collect();
        self.inner.idle_images.lock().note_used(&ids);
        let are_mounted = self.are_mounted(&ids).await?;
        let each = stream::iter(ids.into_iter().zip(are_mounted));
        let mounting = each.map(|(id, is_mounted)| async move {
            match is_mounted {
                true => Ok(self.image_target(id)),
                false => self.mount_image(id).await,
            }
        });
        mounting.buffered(MOUNTED_AT_ONCE).try_collect().await
    }

    /// Which images are mounted. What mounts or unmounts one is waited for; after that, one that is used stays as it is.
    async fn are_mounted(&self, ids: &[SnapshotId]) -> Result<Vec<bool>, WorkerError> {
        for id in ids {
            drop(self.inner.view_locks.lock(id).await);
        }
        self.look_at_mounts(ids).await
    }

    /// Which images are mounted at this moment.
    async fn look_at_mounts(&self, ids: &[SnapshotId]) -> Result<Vec<bool>, WorkerError> {
        let source = |id: &SnapshotId| Source::Snapshot(Uuid::from_bytes(*id.as_bytes()));
        let targets: Vec<_> = ids.iter().map(|id| self.image_target(*id)).collect();
        let images: Vec<_> =
            ids.iter().map(source).zip(targets.iter().map(|path| &**path)).collect();
        Ok(self.attach().await?.mounted_images(&images)?)
    }

    pub(super) async fn mount_image(&self, id: SnapshotId) -> Result<PathBuf, WorkerError> {
        let _lock = self.inner.view_locks.lock(&id).await;
        let target = self.image_target(id);
        let source = Source::Snapshot(Uuid::from_bytes(*id.as_bytes()));
        self.attach().await?.mount_image(source, &target).await?;
        Ok(target)
    }

    /// Unmounts images some time after the last call, those that nothing uses by then and that are not to stay.
    pub(super) fn unmount_images_later(&self, ids: Vec<SnapshotId>) {
        if ids.is_empty() {
            return;
        }
        // Outside a runtime nothing runs any more: the next start finds the mounts.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        if self.inner.idle_images.lock().add(ids, Instant::now() + IDLE) {
            runtime.spawn(unmount_idle_images(Arc::downgrade(&self.inner)));
        }
    }

    async fn unmount_unused_images(&self, ids: Vec<SnapshotId>) {
        let unused: Vec<_> = ids.into_iter().filter(|id| !self.has_users(*id)).collect();
        // What is wrong is said of each.
        let Ok(mounted) = self.mounted_images().await else {
            self.inner.idle_images.lock().forget(&unused);
            return self.unmount_images(unused).await;
        };
        let (unused, gone): (Vec<_>, Vec<_>) =
            unused.into_iter().partition(|id| mounted.contains_key(id));
        // Of loop devices a machine, and the more a container, has few.
        let can_stay =
            |id: &SnapshotId| mounted.get(id).is_some_and(|mounted| mounted.loop_device.is_none());
        let stays = |id: &SnapshotId| can_stay(id) && self.inner.state.has_image(*id);
        let (layers, others): (Vec<_>, Vec<_>) = unused.into_iter().partition(stays);
        let excess = {
            let mut idle = self.inner.idle_images.lock();
            idle.forget(&[&*others, &gone].concat());
            idle.keep(layers)
        };
        self.unmount_images([others, excess].concat()).await;
    }

    /// Unmounts those of these images that nothing uses. What fails is logged: the next start finds the mounts.
    async fn unmount_images(&self, ids: Vec<SnapshotId>) {
        let unmounting = stream::iter(ids).for_each_concurrent(MOUNTED_AT_ONCE, |id| async move {
            if let Err(error) = self.unmount_image(id).await {
                tracing::warn!(image = %id, %error, "unmounting an image that nothing uses");
            }
        });
        unmounting.await;
    }

    /// Notes images that are mounted, as an earlier process left them.
    pub(super) fn found_images(&self, ids: Vec<SnapshotId>) {
        let with_layers = ids.into_iter().map(|id| (id, self.inner.state.has_image(id)));
        let mut found: Vec<_> = with_layers.collect();
        {
            let idle = self.inner.idle_images.lock();
            found.retain(|(id, is_layer)| idle.is_overlooked(*id, *is_layer));
        }
        self.unmount_images_later(found.into_iter().map(|(id, _)| id).collect());
    }

    /// Unmounts the images that nothing uses, also those that were to stay.
    pub(super) async fn unmount_kept_images(&self) -> Result<(), WorkerError> {
        let mounted = self.mounted_images().await?;
        let unused = mounted.into_keys().filter(|id| !self.has_users(*id));
        self.unmount_images(unused.collect()).await;
        Ok(())
    }

    /// The images that are mounted where this driver mounts them.
    async fn mounted_images(&self) -> Result<HashMap<SnapshotId, Mounted>, WorkerError> {
        let images = self.images_directory();
        let mounts = self.attach().await?.mounts().await?.into_iter();
        let ours = mounts.filter(|mounted| mounted.target.parent() == Some(&*images));
        Ok(ours.filter_map(|mounted| Some((image_of(&mounted.source)?, mounted))).collect())
    }

    fn has_users(&self, id: SnapshotId) -> bool {
        self.inner.views.lock().contains_key(&id) || self.is_image_used(id)
    }

    /// Unmounts an image if nothing uses it.
    pub(super) async fn unmount_image(&self, id: SnapshotId) -> Result<(), WorkerError> {
        let _lock = self.inner.view_locks.lock(&id).await;
        if self.has_users(id) {
            return Ok(());
        }
        self.attach().await?.unmount(&self.image_target(id)).await?;
        Ok(())
    }

    fn is_image_used(&self, id: SnapshotId) -> bool {
        let is_user = |volume: &Volume| volume.mounted.is_some() && self.is_used(volume);
        self.inner.state.reads_image(id, is_user)
    }
}

/// The image that a source of a mount is: it ends with the id, of which the name of the directory is a half.
pub(super) fn image_of(source: &str) -> Option<SnapshotId> {
    source.rsplit('/').next()?.parse().ok()
}

/// Looks at images when their time has come, until none is left. Held weakly while it waits, so that the last worker to
/// go closes the state; the next start finds the mounts.
async fn unmount_idle_images(inner: Weak<Inner>) {
    let _waiting = Waiting(Weak::clone(&inner));
    loop {
        let Some(inner) = inner.upgrade() else { return };
        let next = inner.idle_images.lock().next(Instant::now());
        match next {
            Next::None => return,
            Next::At(time) => {
                drop(inner);
                tokio::time::sleep_until(time.into()).await;
            }
            Next::Now(ids) => Worker { inner }.unmount_unused_images(ids).await,
        }
    }
}

/// What waits for the time of images. Should it end by a fault, the next image starts another one.
struct Waiting(Weak<Inner>);

impl Drop for Waiting {
    fn drop(&mut self) {
        if std::thread::panicking()
            && let Some(inner) = self.0.upgrade()
        {
            inner.idle_images.lock().is_waited_for = false;
        }
    }
}

/// Works on a directory on a thread that may wait for the disk.
pub(super) async fn on_disk<T: Send + 'static>(
    path: PathBuf,
    work: impl FnOnce(&Path) -> io::Result<T> + Send + 'static,
) -> Result<T, WorkerError> {
    let of = path.clone();
    let done = tokio::task::spawn_blocking(move || work(&of)).await;
    let done = done.unwrap_or_else(|stopped| Err(io::Error::other(stopped)));
    done.map_err(|source| WorkerError::Local { path, source })
}

/// Gives a directory the extended attributes of another one, but for those that overlayfs or the machine keeps there.
pub(super) fn copy_attributes(from: &Path, to: &Path) -> io::Result<()> {
    let mut names = vec![0; ATTRIBUTES_BYTES_MAX];
    let length = rustix::fs::listxattr(from, &mut names[..])?;
    for name in names[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        if NOT_COPIED.iter().any(|prefix| name.starts_with(prefix)) {
            continue;
        }
        let name = OsStr::from_bytes(name);
        let mut value = vec![0; ATTRIBUTES_BYTES_MAX];
        let length = rustix::fs::getxattr(from, name, &mut value[..])?;
        rustix::fs::setxattr(to, name, &value[..length], XattrFlags::empty())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn id(number: u8) -> SnapshotId {
        Uuid::from_u128(number.into()).to_string().parse().unwrap()
    }

    #[test]
    fn the_images_that_were_unused_longest_are_too_many() {
        let id = |number: usize| id(u8::try_from(number).unwrap());
        let mut idle = IdleImages::default();
        assert_eq!(idle.keep((0..KEPT_IMAGES_MAX).map(id).collect()), []);
        assert_eq!(idle.keep(vec![id(0)]), [], "it was one of them");
        assert_eq!(idle.keep(vec![id(200), id(201)]), [id(1), id(2)]);
        idle.forget(&[id(0), id(3)]);
        assert_eq!(idle.keep(vec![id(202), id(203), id(204)]), [id(4)]);
        assert!(idle.is_overlooked(id(1), true), "it does not stay any more");
        assert!([5, 204].into_iter().all(|number| !idle.is_overlooked(id(number), true)));
        assert!(idle.is_overlooked(id(5), false), "its layer has gone");
        idle.add(vec![id(5)], Instant::now());
        assert!(!idle.is_overlooked(id(5), false), "its time will come");
    }

    #[test]
    fn an_image_that_was_mounted_ahead_pushes_out_none_that_was_used() {
        let id = |number: usize| id(u8::try_from(number).unwrap());
        let mut idle = IdleImages::default();
        assert_eq!(idle.keep((1..KEPT_IMAGES_MAX).map(id).collect()), []);
        [200, 201, 202, 1].into_iter().for_each(|number| idle.note_unused(id(number)));
        assert_eq!(idle.keep(vec![id(200)]), [], "there is room for one");
        idle.note_used(&[id(202)]);
        assert_eq!(idle.keep(vec![id(201), id(202), id(1)]), [id(201), id(200)]);
        assert_eq!(idle.keep(vec![id(203)]), [id(2)]);
        assert!(idle.unused.is_empty(), "it is bounded");
    }

    #[test]
    fn an_image_is_looked_at_once_some_time_after_it_was_let_go_of_last() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let mut idle = IdleImages::default();
        assert!(idle.add(vec![id(1), id(2)], start + second));
        assert!(!idle.add(vec![id(2), id(3)], start + 3 * second), "one waits already");
        assert!(matches!(idle.next(start), Next::At(time) if time == start + second));
        assert!(matches!(idle.next(start + second), Next::Now(ids) if ids == [id(1)]));
        assert!(matches!(idle.next(start + second), Next::At(time) if time == start + 3 * second));
        let Next::Now(mut ids) = idle.next(start + 4 * second) else { panic!("two are left") };
        ids.sort();
        assert_eq!(ids, [id(2), id(3)]);
        assert!(!idle.add(vec![id(1)], start + 5 * second), "it was not said that none is left");
        assert!(matches!(idle.next(start + 5 * second), Next::Now(ids) if ids == [id(1)]));
        assert!(matches!(idle.next(start + 5 * second), Next::None));
        assert!(idle.add(vec![id(1)], start + 6 * second));
    }
}
