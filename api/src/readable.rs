//! Which snapshots a worker that joined reads.
//!
//! ```text
//! of its own files   taken of a file below workers/ID/
//! registered         as a chain
//! an empty disk      by its name, which drivers give to the disks that they unpack base layers on (FORMAT.md)
//! published          published/SNAPSHOT is a clone of it
//! bound              a file of the worker is a clone of it: it read the snapshot when it made that, or had it taken
//!                    of that file
//! ```
//! Not those of files of administrators, and not those of other workers' disks, which they take to commit or to
//! compare.

use std::collections::HashSet;

use slackwater_blockstore::{
    Error as StoreError, FilePath, Result as StoreResult, Snapshot, SnapshotFilter, SnapshotId,
    Store,
};
use uuid::Uuid;

use crate::reserved;
use crate::scope::{PUBLISHED, WORKERS};

/// Files of a worker that are looked at for clones: far more than a machine has disks, and few enough that a worker's calls
/// do not take seconds each.
const FILES_MAX: usize = 16_384;

/// Files that are read from the store in one go: a few MiB.
const BATCH: usize = 4096;

/// Snapshots that are read in one go: with all their labels at most 32 MiB.
pub(crate) const SNAPSHOT_BATCH: usize = 64;

/// With what the names of empty disks begin.
const EMPTY_DISKS: &str = "slackwater-empty-";

/// Whether the worker with this id reads the snapshot. May wait for the disk.
///
/// # Errors
/// `NotFound` if there is no such snapshot, and the common ones.
pub fn worker_reads(store: &Store, worker_id: Uuid, snapshot: SnapshotId) -> StoreResult<bool> {
    WorkerReads::new(worker_id).reads(store, &store.snapshot_info(snapshot)?)
}

/// What one worker reads, for one call.
#[derive(Debug)]
pub(crate) struct WorkerReads {
    /// With what the paths of its files begin.
    home: String,
    /// The snapshots that its files are clones of, once they were looked for.
    bound: Option<HashSet<SnapshotId>>,
}

impl WorkerReads {
    pub(crate) fn new(worker_id: Uuid) -> Self {
        Self { home: format!("{WORKERS}/{worker_id}/"), bound: None }
    }

    /// Whether it reads this snapshot. May wait for the disk.
    ///
    /// # Errors
    /// The common ones.
    pub(crate) fn reads(&mut self, store: &Store, snapshot: &Snapshot) -> StoreResult<bool> {
        let is_empty_disk =
            snapshot.name.as_ref().is_some_and(|name| name.starts_with(EMPTY_DISKS));
        let is_shared = snapshot.path.starts_with(self.home.as_bytes())
            || is_empty_disk
            || reserved::is_registered(&snapshot.labels);
        if is_shared || snapshot.clone_count == 0 {
            return Ok(is_shared);
        }
        Ok(is_published(store, snapshot.id)? || self.is_bound(store, snapshot.id)?)
    }

    fn is_bound(&mut self, store: &Store, snapshot: SnapshotId) -> StoreResult<bool> {
        if self.bound.is_none() {
            self.bound = Some(origins(store, &self.home)?);
        }
        Ok(self.bound.as_ref().is_some_and(|bound| bound.contains(&snapshot)))
    }
}

/// Whether there is a snapshot of a file of the worker with this id, also of one that is gone. Looks at all snapshots.
///
/// # Errors
/// The common ones.
pub(crate) fn has_snapshots(store: &Store, worker_id: Uuid) -> StoreResult<bool> {
    let home = format!("{WORKERS}/{worker_id}/");
    let mut filter = SnapshotFilter::default();
    loop {
        let batch = store.list_snapshots(&filter, SNAPSHOT_BATCH)?;
        if batch.iter().any(|snapshot| snapshot.path.starts_with(home.as_bytes())) {
            return Ok(true);
        }
        match batch.last() {
            Some(last) if batch.len() == SNAPSHOT_BATCH => filter.after = Some(last.id),
            _ => return Ok(false),
        }
    }
}

/// Whether the file by which a snapshot is published is there, and a clone of it.
fn is_published(store: &Store, snapshot: SnapshotId) -> StoreResult<bool> {
    match store.file_info(&FilePath::parse(&format!("{PUBLISHED}/{snapshot}"))?) {
        Ok(file) => Ok(file.origin_snapshot == Some(snapshot)),
        Err(
            StoreError::NotFound { .. }
            | StoreError::NotDirectory { .. }
            | StoreError::WrongKind { .. },
        ) => Ok(false),
        Err(error) => Err(error),
    }
}

/// The snapshots that files with paths that begin so are clones of.
fn origins(store: &Store, prefix: &str) -> StoreResult<HashSet<SnapshotId>> {
    let mut found = HashSet::new();
    let mut after = None;
    for _ in 0..FILES_MAX.div_ceil(BATCH) {
        let files = store.list_files(prefix, after.as_ref(), BATCH)?;
        let is_last = files.len() < BATCH;
        found.extend(files.iter().filter_map(|file| file.origin_snapshot));
        after = files.into_iter().last().map(|file| file.path);
        if is_last {
            break;
        }
    }
    Ok(found)
}
