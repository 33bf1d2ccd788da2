//! What the benchmarks share: content that nothing deduplicates or compresses, files of a known
//! number of extents, and NFSv3 as a client speaks it.

mod content;
pub mod wire;

use slackwater_blockstore::{BLOCK_BYTES_U64, FilePath, InodeId, Result, Stability, Store};

pub use content::{Content, mix};

/// Blocks of data that one write of [`write_extents`] carries: 8 MiB with the holes between.
pub const EXTENTS_PER_WRITE: u64 = 1024;

/// Bytes of a file in which each of `extents` blocks of data is followed by a hole.
#[must_use]
pub const fn extents_bytes(extents: u64) -> u64 {
    extents * 2 * BLOCK_BYTES_U64
}

/// Makes a file whose every second block is data, so that no two blocks of data are one extent,
/// and commits it.
///
/// # Errors
/// Those of the store.
pub fn write_extents(
    store: &Store,
    path: &FilePath,
    extents: u64,
    content: &mut Content,
) -> Result<InodeId> {
    let inode = store.create_file(path, extents_bytes(extents))?.attributes.inode;
    let mut written = 0;
    while written < extents {
        let count = EXTENTS_PER_WRITE.min(extents - written);
        let data = content.alternating(count);
        store.write(inode, extents_bytes(written), data, Stability::Unstable)?;
        written += count;
    }
    store.commit(inode)?;
    Ok(inode)
}
