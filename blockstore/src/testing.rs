//! A store in memory seen from inside, for unit tests.
#![allow(clippy::unwrap_used, reason = "tests")]

pub(crate) mod hooked;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::check::check;
use crate::core::Core;
use crate::data;
use crate::dedup::DedupIndex;
use crate::disk::{FileRole, MemoryDisk};
use crate::id::{ChunkId, InodeId};
use crate::kv::MemoryKv;
use crate::name::{FilePath, Name};
use crate::namespace::{self, Removal};
use crate::options::Options;
use crate::progress::Progress;
use crate::record::{SegmentRecord, key};
use crate::types::{Source, Stability};
use crate::units::{BLOCK_BYTES, BLOCK_BYTES_U64};
use crate::{open, paths, write};

/// The store's parts.
pub(crate) struct World {
    pub(crate) kv: Arc<MemoryKv>,
    pub(crate) disk: MemoryDisk,
    pub(crate) core: Arc<Core>,
    /// Memory for the hashes of recent chunks, if it is not the store's own share.
    recent_bytes: Option<u64>,
}

/// Without threads, with memory for large streams; whatever has a dead chunk is compacted.
pub(crate) fn options(segment_bytes: u64) -> Options {
    let mut options = Options::new("unused");
    options.background = false;
    options.steady_clock = Duration::ZERO;
    options.segment_bytes = segment_bytes;
    options.hash_threads = 2;
    options.compaction_live_ratio = 1.0;
    options.scrub_bytes_per_second = 0;
    options
}

impl World {
    pub(crate) fn new(options: Options, recent_bytes: Option<u64>) -> Self {
        Self::open((Arc::default(), MemoryDisk::new()), options, recent_bytes)
    }

    fn open(
        (kv, disk): (Arc<MemoryKv>, MemoryDisk),
        options: Options,
        recent_bytes: Option<u64>,
    ) -> Self {
        let mut core = open::open_core(
            Arc::clone(&kv) as _,
            Arc::new(disk.clone()),
            options,
            open::Opening::Serve,
        )
        .unwrap();
        open::initialize(&core).unwrap();
        if let Some(recent_bytes) = recent_bytes {
            let leader = core.committer.leader.lock();
            let ids = leader.segments.keys().copied();
            let index = DedupIndex::open(kv.as_ref(), &core.segments, ids, recent_bytes).unwrap();
            drop(leader);
            core.dedup = Arc::new(index);
        }
        Self { kv, disk, core: Arc::new(core), recent_bytes }
    }

    /// A restart after a power cut that lost what was not synced.
    pub(crate) fn crash(self) -> Self {
        self.open_copy()
    }

    /// What a restart after a power cut would find now.
    pub(crate) fn open_copy(&self) -> Self {
        let parts = (Arc::new(self.kv.crash()), self.disk.crash(|| false));
        Self::open(parts, self.core.options.clone(), self.recent_bytes)
    }

    /// A restart with an index that has all.
    pub(crate) fn restart(self) -> Self {
        crate::compact::checkpoint(&self.core).unwrap();
        self.crash()
    }

    pub(crate) fn create(&self, name: &str) -> InodeId {
        let path = FilePath::parse(name).unwrap();
        paths::create_file(&self.core, &path, 0).unwrap().attributes.inode
    }

    pub(crate) fn remove(&self, name: &str) {
        let name = Name::new(name.as_bytes()).unwrap();
        namespace::remove(&self.core, InodeId::ROOT, &name, Removal::Any).unwrap();
    }

    pub(crate) fn write(&self, inode: InodeId, first_block: u64, data: Bytes) {
        let offset = first_block * BLOCK_BYTES_U64;
        write::write(&self.core, inode, offset, data, Stability::Unstable).unwrap();
    }

    /// Writes blocks from their seeds, durably.
    pub(crate) fn put(&self, inode: InodeId, first_block: u64, seeds: &[u64]) {
        let offset = first_block * BLOCK_BYTES_U64;
        write::write(&self.core, inode, offset, blocks(seeds), Stability::FileSync).unwrap();
    }

    /// Six segments of 16 blocks each, each in a file of its own, of which the first two blocks live:
    /// for worlds with segments of 64 KiB. Answers the file, and what it reads as.
    pub(crate) fn six_segments(&self) -> (InodeId, Vec<u8>) {
        let inode = self.create("six");
        for part in 0..6 {
            let seeds: Vec<u64> = (part * 16 + 1..=part * 16 + 16).collect();
            self.put(inode, part * 16, &seeds);
        }
        for part in 0..6 {
            self.put(inode, part * 16 + 2, &[0; 14]);
        }
        let content = (0..6).flat_map(|part| {
            let lives = blocks(&[part * 16 + 1, part * 16 + 2]);
            lives.into_iter().chain(std::iter::repeat_n(0, 14 * BLOCK_BYTES))
        });
        (inode, content.collect())
    }

    /// Flips a bit of a stored chunk; once more, and it is as before.
    pub(crate) fn flip(&self, chunk: ChunkId) {
        let place = self.core.segments.entries(chunk, 1).unwrap()[0].0.unwrap();
        let name = self.core.segments.file_of(chunk.segment()).unwrap();
        self.disk.flip_bit(name, usize::try_from(place.offset_bytes).unwrap() + 100);
    }

    /// Segments that are still in the sealed log file that they were written to.
    pub(crate) fn not_compacted(&self) -> Vec<u64> {
        let leader = self.core.committer.leader.lock();
        let is_left = |record: &SegmentRecord| {
            record.file.role == FileRole::Log && record.directory_offset_bytes.is_some()
        };
        let left = leader.segments.iter().filter(|(_, record)| is_left(record));
        let mut numbers: Vec<u64> = left.map(|(id, _)| id.get()).collect();
        numbers.sort_unstable();
        numbers
    }

    pub(crate) fn content(&self, inode: InodeId) -> Vec<u8> {
        let mut all = Vec::new();
        loop {
            let offset = u64::try_from(all.len()).unwrap();
            let reply = data::read(&self.core, Source::File(inode), offset, 1 << 20).unwrap();
            all.extend(reply.to_vec());
            if reply.end_of_file {
                return all;
            }
        }
    }

    /// Every invariant holds, data included.
    pub(crate) fn check(&self) {
        let report = check(&self.core, true, &Progress::default()).unwrap();
        assert!(report.is_clean(), "{:#?}", report.problems);
    }

    pub(crate) fn hits_and_misses(&self) -> (u64, u64) {
        let stats = crate::stats::stats(&self.core);
        (stats.dedup_hits, stats.dedup_misses)
    }

    /// The mark behind the segments whose hashes are in the index.
    pub(crate) fn has_mark(&self) -> bool {
        use crate::kv::KvRead;
        let kv: &dyn crate::kv::Kv = self.kv.as_ref();
        KvRead::get(kv, crate::kv::Family::Meta, key::META_HASHED).unwrap().is_some()
    }
}

/// Blocks of random bytes, each told by its seed; 0 gives zeros.
pub(crate) fn blocks(seeds: &[u64]) -> Bytes {
    let mut bytes = Vec::with_capacity(seeds.len() * BLOCK_BYTES);
    for &seed in seeds {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        for _ in 0..BLOCK_BYTES / 8 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            bytes.extend_from_slice(&state.to_le_bytes());
        }
    }
    Bytes::from(bytes)
}
