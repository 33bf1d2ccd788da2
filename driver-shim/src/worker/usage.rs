//! What volumes hold of their own: bytes as the appliance says, inodes as their file systems do.
//!
//! ```text
//! a layer that was sealed here     used of the snapshot less used of the one below; inodes of its disk less those below
//! one that was adopted or bound    the same; a label of the snapshot has the inodes, as nothing of it is mounted
//! a disk that is written           what no snapshot of it has, and at least what it has more than it was cloned from
//! ```
//! A snapshot of a disk that is written (`image commit`, an administrator's) leaves nothing that the disk alone has.
//! What was written over before that is counted no more; all that is new still is.

use std::path::Path;

use slackwater_client::types::Snapshot;
use slackwater_client::{Client, RetryPolicy};

use super::volume::{Content, Key, LayerKind, SnapshotRef, Usage};
use super::{Worker, WorkerError};

/// Label of a snapshot that a worker took: the inodes in use on the disk. A hint that is shown.
pub(super) const INODES_LABEL: &str = "slackwater.inodes";

/// Inodes that an empty ext4 counts as used.
const EMPTY_DISK_INODES: u64 = 10;

/// Inodes on a disk that takes an overlay's writes: its two directories, and the one that overlayfs makes.
const OVERLAY_INODES: u64 = 3;

/// Bytes of a disk for each inode, as `attach` makes file systems.
const BYTES_PER_INODE: u64 = 16 << 10;

/// Snapshots whose figures are kept in memory: they do not change.
const KNOWN_MAX: usize = 4096;

/// What the appliance says of a snapshot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Figures {
    used_bytes: u64,
    /// 0 if its maker told none.
    inodes: u64,
}

impl Worker {
    /// What a snapshot holds beyond the one below it. `disk_inodes` is 0 if they are not known.
    pub(super) async fn usage_of(
        &self,
        snapshot: &Snapshot,
        below: Option<SnapshotRef>,
        disk_inodes: u64,
    ) -> Result<Usage, WorkerError> {
        let known = match below {
            Some(below) => self.figures_of(self.client(), below).await?,
            None => None,
        };
        let used_below = known.map_or(0, |known| known.used_bytes);
        Ok(Usage {
            size_bytes: snapshot.used_bytes.saturating_sub(used_below),
            inodes: disk_inodes.saturating_sub(self.inodes_of(below, known)),
            disk_inodes,
        })
    }

    /// What the appliance says of a snapshot; `None` if it is gone, or this worker does not read it.
    async fn figures_of(
        &self,
        client: &Client,
        snapshot: SnapshotRef,
    ) -> Result<Option<Figures>, WorkerError> {
        if let Some(&known) = self.inner.figures.lock().get(&snapshot.id) {
            return Ok(Some(known));
        }
        let figures = match client.snapshot(snapshot.id).await {
            Ok(found) => Figures { used_bytes: found.used_bytes, inodes: inodes_told(&found) },
            Err(error) if self.is_out_of_reach(&error) => return Ok(None),
            Err(source) => return Err(source.into()),
        };
        let mut known = self.inner.figures.lock();
        if known.len() >= KNOWN_MAX {
            known.clear();
        }
        known.insert(snapshot.id, figures);
        Ok(Some(figures))
    }

    /// Inodes in use on the disk of a snapshot: as a volume that was sealed here remembers them, or as its maker told.
    fn inodes_of(&self, snapshot: Option<SnapshotRef>, told: Option<Figures>) -> u64 {
        let Some(snapshot) = snapshot else { return EMPTY_DISK_INODES };
        let volumes = self.inner.state.matching(|volume| volume.snapshot() == Some(snapshot));
        let own = volumes.into_iter().filter_map(|volume| Some(volume.usage?.disk_inodes));
        let told = told.map(|told| told.inodes);
        own.chain(told).find(|inodes| *inodes > 0).unwrap_or(EMPTY_DISK_INODES)
    }

    /// What a volume holds of its own. From memory for a snapshot; for a disk, one short question
    /// to the appliance, and at first another one.
    ///
    /// # Errors
    /// `NotFound`, `Appliance`.
    pub async fn usage(&self, key: &Key) -> Result<Usage, WorkerError> {
        let volume = self.existing(key)?;
        let (name, from) = match volume.content {
            Content::Inherited => return Ok(Usage::default()),
            // Between its unpacking and its commit, which follows at once.
            Content::ImageFile { inodes, .. } => return Ok(Usage { inodes, ..Usage::default() }),
            Content::Snapshot { .. } | Content::Image { .. } => {
                return Ok(volume.usage.unwrap_or_default());
            }
            Content::Disk { name, from, .. } => (name, from),
        };
        let once = self.client().with_retry(RetryPolicy::never());
        let file = once.file(&self.disk_path(name)).await?;
        // Without it the rest is right for as long as no snapshot was taken.
        let known = self.figures_of(&once, from).await.ok().flatten();
        let grown = known.map_or(0, |below| file.used_bytes.saturating_sub(below.used_bytes));
        let disk_inodes = match volume.mounted {
            Some(_) => used_inodes(&self.disk_target(name)).unwrap_or_default(),
            None => 0,
        };
        let own = if volume.layers == LayerKind::Images { OVERLAY_INODES } else { 0 };
        let inodes = disk_inodes.saturating_sub(self.inodes_of(Some(from), known) + own);
        Ok(Usage { size_bytes: file.unique_bytes.max(grown), inodes, disk_inodes })
    }
}

/// What an image holds, which has its own layer alone.
pub(super) fn usage_of_image(snapshot: &Snapshot, inodes: u64) -> Usage {
    Usage { size_bytes: snapshot.used_bytes, inodes, disk_inodes: 0 }
}

/// The inodes that a snapshot's label tells; 0 if there is none, or more than its disk can have.
pub(super) fn inodes_told(snapshot: &Snapshot) -> u64 {
    let told = snapshot.labels.get(INODES_LABEL).and_then(|text| text.parse().ok());
    told.filter(|inodes| *inodes <= snapshot.size_bytes / BYTES_PER_INODE).unwrap_or_default()
}

/// Inodes in use on a mounted file system.
pub(super) fn used_inodes(target: &Path) -> Result<u64, WorkerError> {
    let statistics = rustix::fs::statvfs(target)
        .map_err(|error| WorkerError::Local { path: target.to_owned(), source: error.into() })?;
    Ok(statistics.f_files.saturating_sub(statistics.f_ffree))
}
