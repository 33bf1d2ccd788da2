//! Options of a store.

use std::path::PathBuf;
use std::time::Duration;

/// How to open a store. Every field has a sane default but the data directory.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where the store lives; made if missing. Ignored by [`crate::Store::open_with`].
    pub data_dir: PathBuf,
    /// Bytes that segments and index may occupy; `None`: all of the disk's.
    pub capacity_bytes: Option<u64>,
    /// Memory of all caches and buffers of the store together.
    pub memory_bytes: u64,
    /// Size at which a log segment is sealed.
    pub segment_bytes: u64,
    /// Dirty blocks of one file older than this are committed in the background.
    pub dirty_age: Duration,
    /// Threads that hash and compress for commits.
    pub hash_threads: usize,
    /// Segments whose live share is below this are compacted (0 to 1).
    pub compaction_live_ratio: f64,
    /// Bytes a second that background compaction may rewrite.
    pub compaction_bytes_per_second: u64,
    /// Bytes a second that are read to find damage before it is needed; 0: none.
    pub scrub_bytes_per_second: u64,
    /// How long the machine's clock has to run without a jump, from the start on, before snapshots expire by it.
    pub steady_clock: Duration,
    /// Run reclaim, collapse, compaction, ageing and expiry on background threads. Tests that
    /// want one thread turn it off and call [`crate::Store::gc`].
    pub background: bool,
    /// Compress chunks with lz4 where it saves at least one eighth.
    pub compress: bool,
    /// Chunks whose hashes stay in memory at most, before they go into the index; `None`: as many
    /// as the memory budget has room for.
    pub recent_chunks_max: Option<usize>,
}

impl Options {
    /// Smallest memory budget that the store works with.
    pub const MEMORY_BYTES_MIN: u64 = 64 << 20;

    /// The defaults, for a store in `data_dir`.
    #[must_use]
    pub fn new(data_dir: impl Into<PathBuf>) -> Self {
        Self {
            data_dir: data_dir.into(),
            capacity_bytes: None,
            memory_bytes: 1 << 30,
            segment_bytes: 64 << 20,
            dirty_age: Duration::from_secs(5),
            hash_threads: std::thread::available_parallelism().map_or(2, |n| n.get().min(8)),
            compaction_live_ratio: 0.5,
            compaction_bytes_per_second: 64 << 20,
            // A terabyte in three days, and hardly a hundredth of what a disk can do.
            scrub_bytes_per_second: 4 << 20,
            // Longer than a clock stays wrong that something else puts right, as NTP does after a boot.
            steady_clock: Duration::from_secs(3600),
            background: true,
            compress: true,
            recent_chunks_max: None,
        }
    }
}
