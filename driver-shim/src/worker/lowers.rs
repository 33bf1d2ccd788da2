//! Committed layers that have no image yet: their directories are read as lower ones as they are.
//!
//! ```text
//!   Upper --commit: sync--> Lower --some time later: pack, snapshot--> Image
//!                             ^
//!   what is above it: lowerdir=STATE/mounts/DISK/NAME/upper            lowerdir=STATE/images/...
//! ```
//! So a commit costs a sync and a record, whatever was written, and what is above it is mounted without another mount. Much
//! of what is committed is gone before it would be an image: the init layers of Docker's containers, and the steps of builds.
//! Layers that are registered for others are images at once.
//!
//! Invariants:
//! - What is committed is on the appliance before the commit is answered, on the disk of its directory, maybe in the journal
//!   of that alone. So once a disk lost writes, nothing more of it is mounted or packed until the machine was restarted:
//!   then it is mounted again, and the journal counts.
//! - Nothing is to write the directory any more. As with overlayfs on a local disk that is the engine's to see to.
//! - A directory stays for as long as a volume has it, or was given it as a lower one: an engine mounts what it was given,
//!   also after the layer has become an image. It is given under `giving`, which the record of an image waits for.
//! - Of a layer, the directory and the image show the same above the same layers, but for what is no part of a layer:
//!   sockets, and attributes that mean something to an overlay.
//! - Below a directory is an image at the lowest place: a layer above nothing is written without an overlay, and can have
//!   what that would take for marks. It is an image at once.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use slackwater_archive::ArchiveError;
use slackwater_client::types::{SnapshotId, Timestamp};

use super::layers::on_disk;
use super::merging::Merged;
use super::mounting::Resolved;
use super::sealed::Outcome;
use super::uppers::{HeldUpper, upper_of};
use super::volume::{Content, Directory, Key, SnapshotRef, Volume};
use super::{Registration, Worker, WorkerError, now};

/// Time from the last commit to the making of images, of those that have none yet. By then a build is through mostly, and a short
/// container gone.
pub const IMAGED_AFTER: Duration = Duration::from_secs(10);

/// Time from a commit to the making of its image where others follow it again and again.
const IMAGED_AT_LAST: Duration = Duration::from_secs(300);

/// How long nothing is looked for where no layer is without an image: a commit wakes it.
const LOOK_INTERVAL: Duration = Duration::from_secs(600);

/// Time to the next try of what failed: twice as long with each try, up to one of the others.
const RETRY_MIN: Duration = Duration::from_secs(30);
/// Of all layers, as while the appliance is away, or of one for a reason that may pass.
const PAUSE_MAX: Duration = Duration::from_secs(300);
/// Of a layer that is none for anything but an overlay, and is read for it.
const RETRY_MAX: Duration = Duration::from_secs(3600);

/// Bytes for the paths of lower directories in the options of a mount, which fit into one page of 4 KiB with those of the
/// upper directory. Those of as many images as there may be take as much.
const PATHS_BYTES_MAX: usize = 3072;

/// A path below the state directory, with a colon: `images/` and half of an id; `mounts/DISK/NAME/upper`.
const IMAGE_PATH_BYTES: usize = 7 + 16 + 1;
const DIRECTORY_PATH_BYTES: usize = 7 + 36 + 1 + 36 + 6 + 1;

/// One layer below a volume of images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LowerLayer {
    /// Its image.
    Image(SnapshotRef),
    /// The directory of one that has no image yet.
    Directory(Directory),
}

/// A layer of which no image could be made.
#[derive(Debug)]
pub(super) struct Failed {
    /// The time between the last try and the next.
    wait: Duration,
    next: Instant,
}

impl Failed {
    /// One more, after the last one.
    fn after(last: Option<&Self>, max: Duration) -> Self {
        let wait = last.map_or(RETRY_MIN, |last| (2 * last.wait).min(max));
        Self { wait, next: Instant::now() + wait }
    }
}

/// Whether no image could be made because of what the layer is.
fn is_of_layer(error: &WorkerError) -> bool {
    let WorkerError::Image { source, .. } = error else { return false };
    matches!(
        source,
        ArchiveError::Unpackable { .. }
            | ArchiveError::Changes { .. }
            | ArchiveError::Members { .. }
            | ArchiveError::Directories { .. }
            | ArchiveError::Member { .. }
    )
}

/// Whether an error is none of one layer, but meets all.
fn concerns_all(error: &WorkerError) -> bool {
    matches!(
        error,
        WorkerError::Appliance { .. }
            | WorkerError::Full { .. }
            | WorkerError::State { .. }
            | WorkerError::Interrupted { .. }
    )
}

/// The time that is left until the image is to be made of what was committed then, where the last commit was at
/// `last`: it would slow down what commits one layer after the other, as a build does.
fn time_left(committed: Timestamp, last: Timestamp, now: Timestamp, after: Duration) -> Duration {
    // A clock that was set back says nothing.
    let age = |moment: Timestamp| now.as_nanos().checked_sub(moment.as_nanos());
    let left = |after: Duration, moment| {
        after.saturating_sub(age(moment).map_or(Duration::MAX, Duration::from_nanos))
    };
    left(after, last).min(left(after.max(IMAGED_AT_LAST), committed))
}

/// When the last of these layers was committed that can become an image. A clock that was set back since says nothing.
fn last_commit(layers: &[Volume], now: Timestamp) -> Timestamp {
    let whole = layers.iter().filter(|layer| !layer.is_damaged).map(|layer| layer.created_at);
    whole.filter(|moment| *moment <= now).max().unwrap_or(Timestamp::from_nanos(0))
}

/// The images among layers, in their order.
pub(super) fn images_in(lowers: &[LowerLayer]) -> Vec<SnapshotRef> {
    let image = |lower: &LowerLayer| match lower {
        LowerLayer::Image(image) => Some(*image),
        LowerLayer::Directory(_) => None,
    };
    lowers.iter().filter_map(image).collect()
}

/// The directories among layers, in their order.
pub(super) fn directories_in(lowers: &[LowerLayer]) -> Vec<Directory> {
    let directory = |lower: &LowerLayer| match lower {
        LowerLayer::Image(_) => None,
        LowerLayer::Directory(directory) => Some(*directory),
    };
    lowers.iter().filter_map(directory).collect()
}

/// What the paths of layers take in the options of a mount.
fn path_bytes(lowers: &[LowerLayer]) -> usize {
    let bytes = |lower: &LowerLayer| match lower {
        LowerLayer::Image(_) => IMAGE_PATH_BYTES,
        LowerLayer::Directory(_) => DIRECTORY_PATH_BYTES,
    };
    lowers.iter().map(bytes).sum()
}

impl Worker {
    /// The layers that a volume reads, or would read if it had nothing of its own, the highest one first; none if it is not
    /// made of images.
    ///
    /// # Errors
    /// `NotFound`, `OfImages`; `Damaged` if one of them is.
    pub(super) fn lowers_of(&self, volume: &Volume) -> Result<Vec<LowerLayer>, WorkerError> {
        match volume.content {
            Content::Disk { .. } | Content::Upper { .. } | Content::ImageFile { .. } => {
                self.lowers_below(volume)
            }
            _ => self.lowers_from(&volume.key),
        }
    }

    /// The layers below a volume's own.
    ///
    /// # Errors
    /// As [`Self::lowers_of`].
    pub(super) fn lowers_below(&self, volume: &Volume) -> Result<Vec<LowerLayer>, WorkerError> {
        match &volume.parent {
            Some(parent) => self.lowers_from(parent),
            None => Ok(Vec::new()),
        }
    }

    fn lowers_from(&self, key: &Key) -> Result<Vec<LowerLayer>, WorkerError> {
        match self.resolve(key)? {
            Resolved::Images(lowers) => Ok(lowers),
            Resolved::Empty | Resolved::Snapshot(_) | Resolved::Disk(_) => Ok(Vec::new()),
        }
    }

    /// The images of a volume and of all below it, also where the layers between cannot be used.
    pub(super) fn images_from(&self, volume: &Volume) -> Vec<SnapshotId> {
        let below = |volume: &Volume| self.get(volume.parent.as_ref()?);
        let all = std::iter::successors(Some(volume.clone()), below);
        let image = |volume: Volume| match volume.content {
            Content::Image { snapshot, .. } => Some(snapshot.id),
            _ => None,
        };
        all.filter_map(image).collect()
    }

    /// Mounts what layers need; where each is seen, in the same order. A volume or a count of views says that they are used.
    pub(super) async fn mount_lowers(
        &self,
        lowers: &[LowerLayer],
    ) -> Result<Vec<PathBuf>, WorkerError> {
        let mut images = self.mount_images(&images_in(lowers)).await?.into_iter();
        let mut disks: Vec<_> = directories_in(lowers).into_iter().map(|one| one.disk).collect();
        disks.sort_unstable();
        disks.dedup();
        for disk in disks {
            let Err(error) = self.mount_upper_disk(disk).await else { continue };
            // One that ext4 made read-only after an error is no other disk.
            let on_it = directories_in(lowers).into_iter().find(|one| one.disk == disk);
            let path = on_it.map(|one| self.path_of_directory(one)).unwrap_or_default();
            if !on_disk(path, Path::try_exists).await.unwrap_or_default() {
                return Err(error);
            }
        }
        let path = |lower: &LowerLayer| match lower {
            LowerLayer::Image(_) => images.next(),
            LowerLayer::Directory(directory) => Some(self.path_of_directory(*directory)),
        };
        Ok(lowers.iter().filter_map(path).collect())
    }

    pub(super) fn path_of_directory(&self, directory: Directory) -> PathBuf {
        upper_of(&self.disk_target(directory.disk).join(directory.name.to_string()))
    }

    /// The directory of what was written above images, if it is to be the committed layer: then all of it is on the
    /// appliance. The volume's lock is held.
    pub(super) async fn committed_directory(
        &self,
        key: &Key,
        chain: Option<&Registration>,
    ) -> Result<Option<Directory>, WorkerError> {
        let volume = self.existing(key)?;
        let Content::Upper { disk, name } = volume.content else { return Ok(None) };
        // Others want what is registered. A disk of its own would stay for one directory.
        let is_later = chain.is_none() && volume.extra.own_disk().is_none();
        if !is_later || self.lowers_below(&volume)?.is_empty() {
            return Ok(None);
        }
        if volume.is_damaged {
            return Err(WorkerError::Damaged { key: key.clone() });
        }
        self.await_users(key).await?;
        if !self.shorten_paths_below(&volume).await? {
            return Ok(None);
        }
        let directory = Directory { disk, name };
        if !on_disk(self.path_of_directory(directory), Path::try_exists).await? {
            // No engine has mounted it, or none since the machine was started.
            let below = self.merged(&self.lowers_below(&volume)?).await?;
            self.ready_upper(disk, name, below.as_ref().map(Merged::path)).await?;
        }
        self.sync_upper(key, disk).await?;
        // It was counted while it was written.
        self.inner.upper_usages.lock().remove(&name);
        Ok(Some(directory))
    }

    /// Makes images of the lowest directories below a volume, until there is room for the path of one more; `false` if there
    /// is none even so, as above very many images.
    async fn shorten_paths_below(&self, volume: &Volume) -> Result<bool, WorkerError> {
        let below = std::iter::successors(volume.parent.clone(), |key| self.get(key)?.parent);
        let is_lower = |key: &Key| {
            self.get(key).is_some_and(|one| matches!(one.content, Content::Lower { .. }))
        };
        let mut keys: Vec<_> = below.filter(is_lower).collect();
        loop {
            if path_bytes(&self.lowers_below(volume)?) + DIRECTORY_PATH_BYTES <= PATHS_BYTES_MAX {
                return Ok(true);
            }
            let Some(lowest) = keys.pop() else { return Ok(false) };
            if self.inner.imaging_failures.lock().contains_key(&lowest) {
                continue;
            }
            match self.make_image(&lowest).await {
                // It stays a directory.
                Err(error @ WorkerError::Image { .. }) => {
                    self.note_failed_image(&lowest, &error);
                }
                outcome => outcome?,
            }
        }
    }

    /// Makes the image of a committed layer now, if it has none yet. Nothing waits for that but who wants the same.
    ///
    /// # Errors
    /// `NotFound`, `Image`, `Appliance`, `Attach`, `State`, `Local`.
    pub async fn make_image(&self, key: &Key) -> Result<(), WorkerError> {
        let key = key.clone();
        self.run(async move |worker: Self| {
            let _one = worker.inner.imaging_locks.lock(&key).await;
            let Some((directory, lowers)) = worker.lower_directory(&key).await? else {
                return Ok(());
            };
            // Without the volume's lock, which its removal needs.
            let sealed = match worker.image_of_lower(&key, directory, &lowers).await {
                Ok(Outcome::Becomes(sealed)) => sealed,
                Ok(Outcome::Is(_)) => return Ok(()),
                // What was removed, or became an image, in between is no fault.
                Err(error) => {
                    return match worker.existing(&key)?.directory() == Some(directory) {
                        true => Err(error),
                        false => Ok(()),
                    };
                }
            };
            let _lock = worker.inner.volume_locks.lock(&key).await;
            match worker.existing(&key)?.directory() == Some(directory) {
                true => worker.record(&key, sealed).await.map(drop),
                false => Ok(()),
            }
        })
        .await
    }

    /// The directory that a committed layer is, and the layers below it.
    async fn lower_directory(
        &self,
        key: &Key,
    ) -> Result<Option<(Directory, Vec<LowerLayer>)>, WorkerError> {
        let _lock = self.inner.volume_locks.lock(key).await;
        let volume = self.existing(key)?;
        match volume.content {
            Content::Lower { .. } if volume.is_damaged => {
                Err(WorkerError::Damaged { key: key.clone() })
            }
            Content::Lower { disk, name } => {
                Ok(Some((Directory { disk, name }, self.lowers_below(&volume)?)))
            }
            _ => Ok(None),
        }
    }

    async fn image_of_lower(
        &self,
        key: &Key,
        directory: Directory,
        lowers: &[LowerLayer],
    ) -> Result<Outcome, WorkerError> {
        // `None`: the driver ends.
        let _turn = self.inner.packing.acquire().await.ok();
        let held: Vec<HeldUpper> = self.hold_directories(&[directory])?;
        self.mount_lowers(&[LowerLayer::Directory(directory)]).await?;
        let made = self.new_image_above(lowers).await?;
        let packed = self.pack(key, self.path_of_directory(directory), None, made).await;
        drop(held);
        let (made, imaged) = packed?;
        // What was lost up to now may be what was read.
        self.sync_upper(key, directory.disk).await?;
        let outcome = self.sealed_image(key, (made.name(), imaged.inodes), None).await?;
        // It is listed until the volume names it.
        Ok(outcome.keeping(made.into_making()))
    }

    /// As [`Self::layer_of`], with an image for what has none yet.
    ///
    /// # Errors
    /// As [`Self::make_image`].
    pub async fn layer_as_snapshot(&self, key: &Key) -> Result<Option<SnapshotRef>, WorkerError> {
        self.make_image(key).await?;
        self.layer_of(key)
    }

    /// The committed layers that have no image yet, the oldest first. From memory.
    #[must_use]
    pub fn without_image(&self) -> Vec<Volume> {
        let is_lower = |volume: &Volume| matches!(volume.content, Content::Lower { .. });
        let mut found = self.inner.state.matching(is_lower);
        found.sort_by_key(|volume| volume.created_at);
        found
    }

    pub(super) fn start_imaging(&self) {
        // Held weakly while it waits, so that the last worker to go closes the state, once an image that is being made is.
        let inner = Arc::downgrade(&self.inner);
        let wanted = Arc::clone(&self.inner.imaging);
        tokio::spawn(async move {
            let mut pause = None;
            while let Some(inner) = inner.upgrade() {
                let worker = Self { inner };
                let wait = worker.make_due_images(&mut pause).await;
                drop(worker);
                let _ = tokio::time::timeout(wait, wanted.notified()).await;
            }
        });
    }

    /// Makes the images whose time has come. Returns the time to the next look; `pause` is that of all layers, while none
    /// can be made.
    async fn make_due_images(&self, pause: &mut Option<Failed>) -> Duration {
        if let Some(failed) = pause {
            let left = failed.next.saturating_duration_since(Instant::now());
            if left > Duration::ZERO {
                return left;
            }
        }
        let volumes = self.without_image();
        let is_there = |key: &Key| volumes.iter().any(|volume| volume.key == *key);
        self.inner.imaging_failures.lock().retain(|key, _| is_there(key));
        let mut next = LOOK_INTERVAL;
        let mut last = last_commit(&volumes, now());
        // Of those whose disk lost writes that was said.
        for volume in volumes.iter().filter(|volume| !volume.is_damaged) {
            let left = self.time_to_image(volume, last);
            if left > Duration::ZERO {
                next = next.min(left);
                continue;
            }
            let made = self.make_image(&volume.key).await;
            last = last.max(last_commit(&self.without_image(), now()));
            match made {
                Ok(()) => *pause = None,
                // Of one that is gone, or has another one below it whose disk lost writes, there is nothing to say.
                Err(WorkerError::NotFound { .. } | WorkerError::Damaged { .. }) => {}
                Err(error) if !concerns_all(&error) => {
                    next = next.min(self.note_failed_image(&volume.key, &error));
                }
                // The others would fail alike.
                Err(error) => {
                    let failed = Failed::after(pause.as_ref(), PAUSE_MAX);
                    let wait = failed.wait;
                    tracing::warn!(layers = volumes.len(), %error, next_try_seconds = wait.as_secs(),
                        "committed layers have no images yet, and are used as they are");
                    *pause = Some(failed);
                    return wait;
                }
            }
        }
        *pause = None;
        next
    }

    fn time_to_image(&self, volume: &Volume, last: Timestamp) -> Duration {
        let after = self.inner.options.imaged_after;
        let left = time_left(volume.created_at, last, now(), after);
        let failures = self.inner.imaging_failures.lock();
        let retry = failures.get(&volume.key).map(|failed| failed.next);
        left.max(
            retry.map_or(Duration::ZERO, |next| next.saturating_duration_since(Instant::now())),
        )
    }

    /// Returns how long the next try waits.
    fn note_failed_image(&self, key: &Key, error: &WorkerError) -> Duration {
        let mut failures = self.inner.imaging_failures.lock();
        let max = if is_of_layer(error) { RETRY_MAX } else { PAUSE_MAX };
        let failed = Failed::after(failures.get(key), max);
        let wait = failed.wait;
        failures.insert(key.clone(), failed);
        tracing::warn!(%key, %error, next_try_seconds = wait.as_secs(),
            "a committed layer has no image, and stays where it was written");
        wait
    }
}

#[cfg(test)]
mod tests {
    use slackwater_client::types::SnapshotId;
    use uuid::Uuid;

    use super::super::layers::IMAGES_MAX;
    use super::super::volume::{DockerExtra, Extra, LayerKind};
    use super::*;

    #[test]
    fn the_time_of_an_image_comes_and_a_failure_waits_longer_each_time() {
        let second = |count: u64| Timestamp::from_nanos(count * 1_000_000_000);
        let after = Duration::from_secs(10);
        for (now, left) in [(100, 10), (104, 6), (110, 0), (200, 0), (99, 0)] {
            let left = Duration::from_secs(left);
            assert_eq!(time_left(second(100), second(100), second(now), after), left, "{now}");
        }
        // The last commit of all counts, but not for ever.
        for (last, now, left) in [(120, 122, 8), (120, 130, 0), (395, 397, 3), (399, 400, 0)] {
            let left = Duration::from_secs(left);
            assert_eq!(time_left(second(100), second(last), second(now), after), left, "{now}");
        }
        let long = 2 * IMAGED_AT_LAST;
        assert_eq!(time_left(second(100), second(100), second(100), long), long);
        let mut failed = Failed::after(None, PAUSE_MAX);
        let mut waits = vec![failed.wait.as_secs()];
        for _ in 0..5 {
            failed = Failed::after(Some(&failed), PAUSE_MAX);
            waits.push(failed.wait.as_secs());
        }
        assert_eq!(waits, [30, 60, 120, 240, 300, 300]);
        assert!(failed.next <= Instant::now() + PAUSE_MAX);
    }

    #[test]
    fn the_last_commit_is_of_a_layer_that_can_become_an_image() {
        let layer = |committed, is_damaged| Volume {
            created_at: Timestamp::from_nanos(committed),
            is_damaged,
            ..Volume::new(
                Key::docker("layer"),
                None,
                Extra::Docker(DockerExtra::default()),
                LayerKind::Images,
            )
        };
        let layers = [layer(5, false), layer(9, false), layer(7, false), layer(12, true)];
        let last = |now| last_commit(&layers, Timestamp::from_nanos(now)).as_nanos();
        assert_eq!(last(20), 9, "not of one whose disk lost writes");
        assert_eq!(last(9), 9);
        // The clock was set back: what was committed later than now says nothing.
        assert_eq!(last(8), 7);
        assert_eq!(last(4), 0);
        assert_eq!(last_commit(&[], Timestamp::from_nanos(20)).as_nanos(), 0);
    }

    #[test]
    fn the_paths_of_layers_fit_into_the_options_of_a_mount() {
        let image = SnapshotRef { id: SnapshotId::from_bytes([7; 16]), size_bytes: 1 };
        assert!(path_bytes(&[LowerLayer::Image(image); IMAGES_MAX]) <= PATHS_BYTES_MAX);
        let directory = Directory { disk: Uuid::nil(), name: Uuid::nil() };
        let path = format!("mounts/{}/{}/upper:", directory.disk, directory.name);
        assert_eq!(path.len(), DIRECTORY_PATH_BYTES);
        let lowers = [LowerLayer::Directory(directory), LowerLayer::Image(image)];
        assert_eq!(path_bytes(&lowers), path.len() + "images/0123456789abcdef:".len());
        assert_eq!(images_in(&lowers), [image]);
        assert_eq!(directories_in(&lowers), [directory]);
    }
}
