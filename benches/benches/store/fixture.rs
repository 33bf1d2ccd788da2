//! A store in a folder of its own.

use std::sync::Arc;

use slackwater_benches::Content;
use slackwater_blockstore::{
    BLOCK_BYTES_U64, InodeId, Options, SnapshotId, SnapshotRequest, Stability, Store,
};
use tempfile::TempDir;

use crate::common::path;

/// Most bytes of one write: as much as NFS takes in one.
const WRITE_BYTES_MAX: usize = 1 << 20;

pub(crate) struct Fixture {
    // Dropped before its folder.
    pub(crate) store: Arc<Store>,
    pub(crate) content: Content,
    _folder: TempDir,
}

impl Fixture {
    /// A store that cleans up in the background, as a served one does.
    pub(crate) fn new() -> Self {
        Self::with(|_| {})
    }

    /// A store that does nothing by itself: what is measured is all that it does.
    pub(crate) fn quiet() -> Self {
        Self::with(|options| options.background = false)
    }

    fn with(change: impl FnOnce(&mut Options)) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let mut options = Options::new(folder.path());
        options.memory_bytes = Options::MEMORY_BYTES_MIN;
        change(&mut options);
        let store = Store::open(options).expect("a store");
        Self { store, content: Content::new(1), _folder: folder }
    }

    pub(crate) fn file(&self, name: &str, size_bytes: u64) -> InodeId {
        let file = self.store.create_file(&path(name), size_bytes).expect("a file");
        file.attributes.inode
    }

    /// Writes that many blocks that the store has not seen, and commits.
    pub(crate) fn write(&mut self, inode: InodeId, offset_bytes: u64, blocks: u64) {
        let data = self.content.blocks(blocks);
        self.write_data(inode, offset_bytes, &data);
    }

    /// Writes in pieces as a client does, and commits.
    pub(crate) fn write_data(&self, inode: InodeId, offset_bytes: u64, data: &bytes::Bytes) {
        let mut offset_bytes = offset_bytes;
        for start in (0..data.len()).step_by(WRITE_BYTES_MAX) {
            let piece = data.slice(start..data.len().min(start + WRITE_BYTES_MAX));
            let blocks =
                slackwater_blockstore::blocks_in(u64::try_from(piece.len()).expect("64 bits"));
            self.store.write(inode, offset_bytes, piece, Stability::Unstable).expect("a write");
            offset_bytes += blocks * BLOCK_BYTES_U64;
        }
        self.store.commit(inode).expect("a commit");
    }

    pub(crate) fn snapshot(&self, name: &str) -> SnapshotId {
        let request = SnapshotRequest::default();
        self.store.snapshot(&path(name), request).expect("a snapshot").id
    }
}
