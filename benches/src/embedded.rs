//! Clone of the file of most extents in a store of this very process, without any server.

use std::sync::Arc;
use std::time::{Duration, Instant};

use slackwater_benches::{Content, write_extents};
use slackwater_blockstore::{FilePath, Options, SnapshotId, SnapshotRequest, Store};
use tempfile::TempDir;

use crate::cases::EXTENTS_MAX;
use crate::failure::Failure;

/// A store with the file and its snapshot.
pub(crate) struct Embedded {
    // Dropped before its folder.
    store: Arc<Store>,
    snapshot: SnapshotId,
    target: FilePath,
    _folder: TempDir,
}

impl Embedded {
    /// Makes the store and the file.
    pub(crate) fn prepare() -> Result<Self, Failure> {
        let folder = tempfile::tempdir().map_err(Failure::on("make a temporary folder"))?;
        let store = Store::open(Options::new(folder.path()))?;
        let (source, target) = (FilePath::parse("source.img")?, FilePath::parse("clone.img")?);
        write_extents(&store, &source, EXTENTS_MAX, &mut Content::new(3))?;
        let snapshot = store.snapshot(&source, SnapshotRequest::default())?.id;
        Ok(Self { store, snapshot, target, _folder: folder })
    }

    /// One clone; its deletion is not timed.
    pub(crate) fn time_clone(&self) -> Result<Duration, Failure> {
        let start = Instant::now();
        self.store.clone_snapshot(self.snapshot, &self.target)?;
        let elapsed = start.elapsed();
        self.store.remove_path(&self.target)?;
        Ok(elapsed)
    }
}
