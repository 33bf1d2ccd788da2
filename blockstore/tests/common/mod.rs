//! Stores in memory for tests, and the bytes they are filled with.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, reason = "shared by several tests")]

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use slackwater_blockstore::disk::{Disk, MemoryDisk};
use slackwater_blockstore::kv::{Kv, MemoryKv};
use slackwater_blockstore::{FilePath, Options, Source, Store};

/// Options of a small store without threads: tests call `gc` themselves.
pub(crate) fn options() -> Options {
    let mut options = Options::new("unused");
    options.background = false;
    options.steady_clock = Duration::ZERO;
    options.memory_bytes = Options::MEMORY_BYTES_MIN;
    options.segment_bytes = 64 << 10;
    options.hash_threads = 1;
    options.compaction_live_ratio = 0.7;
    // So few that hashes go into the index all the time.
    options.recent_chunks_max = Some(24);
    options
}

/// A store in memory and the parts below it.
pub(crate) struct Fixture {
    pub(crate) kv: Arc<MemoryKv>,
    pub(crate) disk: MemoryDisk,
    pub(crate) store: Arc<Store>,
}

impl Fixture {
    pub(crate) fn new() -> Self {
        Self::open(Arc::new(MemoryKv::new()), MemoryDisk::new())
    }

    pub(crate) fn open(kv: Arc<MemoryKv>, disk: MemoryDisk) -> Self {
        let store = open(&kv, &disk).unwrap();
        Self { kv, disk, store }
    }

    /// Closes the store cleanly and opens it again.
    pub(crate) fn restart(self) -> Self {
        self.store.close().unwrap();
        drop(self.store);
        Self::open(self.kv, self.disk)
    }

    /// Every invariant holds, data included.
    pub(crate) fn check(&self) {
        assert_sound(&self.store);
    }
}

pub(crate) fn open(
    kv: &Arc<MemoryKv>,
    disk: &MemoryDisk,
) -> slackwater_blockstore::Result<Arc<Store>> {
    let kv: Arc<dyn Kv> = Arc::clone(kv) as Arc<dyn Kv>;
    let disk: Arc<dyn Disk> = Arc::new(disk.clone());
    Store::open_with(kv, disk, options())
}

pub(crate) fn assert_sound(store: &Store) {
    let report = store.check(true).unwrap();
    assert!(report.is_clean(), "{:#?}", report.problems);
}

pub(crate) fn path(text: &str) -> FilePath {
    FilePath::parse(text).unwrap()
}

/// `length` bytes that depend on the seed; seeds under 8 give bytes that repeat often, so that
/// blocks deduplicate and compress, and seed 0 gives zeros.
pub(crate) fn bytes(seed: u64, length: usize) -> Bytes {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let fill = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[0]
    };
    match seed {
        0 => Bytes::from(vec![0; length]),
        1..8 => Bytes::from(vec![seed.to_le_bytes()[0]; length]),
        _ => (0..length).map(fill).collect(),
    }
}

/// The whole content of a file or snapshot.
pub(crate) fn content(store: &Store, source: Source) -> Vec<u8> {
    let mut all = Vec::new();
    loop {
        let offset = u64::try_from(all.len()).unwrap();
        let reply = store.read(source, offset, 1 << 20).unwrap();
        all.extend(reply.to_vec());
        if reply.end_of_file {
            return all;
        }
    }
}
