//! Fills a store with very many distinct blocks in little time and on little disk: each is a
//! number and zeros, which compress to some tens of bytes.

use bytes::{BufMut, Bytes, BytesMut};
use slackwater_blockstore::{
    BLOCK_BYTES, BLOCK_BYTES_U64, FilePath, InodeId, Options, Stability, Store,
};

use crate::failure::Failure;
use crate::stop::Stop;

/// Blocks of one write.
const BLOCKS_PER_WRITE: u64 = 1024;

/// Size at which a segment is sealed: as many chunks as 64 MiB of blocks that do not compress,
/// so that a store of so many chunks has as many segments as it would have in use.
const SEGMENT_BYTES: u64 = 64 << 20;

/// What one of these blocks takes of a segment, about: its entry and its compressed bytes.
const STORED_BLOCK_BYTES: u64 = 80;

/// Memory of a store while it is filled: the more of the index is sorted in memory, the less often
/// it is sorted on the disk.
const MEMORY_BYTES: u64 = 4 << 30;

/// Options of a store that is filled so.
pub(crate) fn options(data_dir: &std::path::Path) -> Options {
    let mut options = Options::new(data_dir);
    options.memory_bytes = MEMORY_BYTES;
    options.segment_bytes = SEGMENT_BYTES / BLOCK_BYTES_U64 * STORED_BLOCK_BYTES;
    options
}

/// A file that grows.
#[derive(Debug)]
pub(crate) struct Filled {
    inode: InodeId,
    blocks: u64,
}

impl Filled {
    /// Makes the file, for at most that many blocks.
    pub(crate) fn new(store: &Store, blocks_max: u64) -> Result<Self, Failure> {
        let path = FilePath::parse("filled.img")?;
        let inode = store.create_file(&path, blocks_max * BLOCK_BYTES_U64)?.attributes.inode;
        Ok(Self { inode, blocks: 0 })
    }

    /// Writes and commits distinct blocks until the file has that many.
    pub(crate) fn grow(&mut self, store: &Store, blocks: u64, stop: &Stop) -> Result<(), Failure> {
        while self.blocks < blocks {
            stop.check()?;
            let count = BLOCKS_PER_WRITE.min(blocks - self.blocks);
            let data = numbered(self.blocks, count);
            store.write(self.inode, self.blocks * BLOCK_BYTES_U64, data, Stability::Unstable)?;
            self.blocks += count;
        }
        store.commit(self.inode)?;
        Ok(())
    }
}

/// That many blocks, each with its number.
fn numbered(first: u64, count: u64) -> Bytes {
    let blocks = usize::try_from(count).unwrap_or(0);
    let mut bytes = BytesMut::with_capacity(blocks * BLOCK_BYTES);
    for number in first..first + count {
        let end = bytes.len() + BLOCK_BYTES;
        // No block is all zeros: those are not stored.
        bytes.put_u64(number + 1);
        bytes.resize(end, 0);
    }
    bytes.freeze()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn every_block_is_stored_once_and_takes_little() {
        let stop = Stop::listen(Duration::from_secs(600)).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(options(folder.path())).unwrap();
        let mut filled = Filled::new(&store, 5000).unwrap();
        filled.grow(&store, 3000, &stop).unwrap();
        filled.grow(&store, 5000, &stop).unwrap();
        let stats = store.stats();
        assert_eq!(stats.chunk_count, 5000);
        let block_bytes = stats.chunk_bytes / 5000;
        assert!(block_bytes < STORED_BLOCK_BYTES, "{block_bytes} bytes a block");
    }
}
