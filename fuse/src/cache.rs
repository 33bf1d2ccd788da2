//! The worker's cache of blocks: content-addressed, bounded, on disk, shared by all files.
//!
//! ```text
//! cache directory:  blocks.v1   slot 0 | slot 1 | ...       4 KiB each
//!                   index.v1    fingerprint of slot 0 | ... 8 bytes each, little-endian, 0: empty
//!                   lock        held while a process uses the directory
//! ```
//!
//! Nothing is synced and no order between the two files is assumed: whatever is read is hashed,
//! and what is not the block that it should be is dropped and fetched again. So a process that
//! is killed, a torn write or a lost page costs a fetch, never a wrong byte. What the disk
//! refuses to take is not kept, and that is all. It grows only while there is room on the disk for
//! others, too: the driver's state may lie there, and a driver that cannot write it stands still.
//!
//! The functions block and belong on a thread that may.

use std::fs::{File, OpenOptions};
use std::io::{self, IoSliceMut};
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;
use rustix::fs::{FlockOperation, StatVfs, flock, fstatvfs};
use rustix::io::{Errno, ReadWriteFlags, preadv2};

use crate::error::ServeError;
use crate::slots::{Fingerprint, Slot, Slots};
use crate::statistics::Statistics;

/// The file of the blocks in the cache directory.
pub const CACHE_FILE: &str = "blocks.v1";

/// Bytes of a block.
pub(crate) const BLOCK_BYTES: usize = 4096;
const BLOCK_BYTES_U64: u64 = 4096;
const INDEX_ENTRY_BYTES: usize = 8;
const INDEX_ENTRY_BYTES_U64: u64 = 8;
/// Room on the disk below which the cache does not grow.
const ROOM_BYTES_MIN: u64 = 512 << 20;

/// Of a small disk an eighth; of one that tells no size, none.
const ROOM_SHARE: u64 = 8;
/// Only the owner: what is in it are blocks of every container's disk.
const DIRECTORY_MODE: u32 = 0o700;
/// How long a process that was just killed may take to let go of the lock.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(5);
const LOCK_WAIT_STEP: Duration = Duration::from_millis(50);

/// What is read does not stay in the page cache: `RWF_DONTCACHE` of preadv2(2), since Linux 6.14 on some file systems.
const UNCACHED: ReadWriteFlags = ReadWriteFlags::from_bits_retain(0x80);

/// BLAKE3-256 of a block.
pub(crate) type Hash = [u8; 32];

/// Whether the bytes are that block.
pub(crate) fn is_block(bytes: &[u8], hash: &Hash) -> bool {
    blake3::hash(bytes).as_bytes() == hash
}

/// A cache.
#[derive(Debug)]
pub(crate) struct BlockCache {
    slots: Mutex<Slots>,
    blocks: File,
    index: File,
    statistics: Arc<Statistics>,
    room_bytes_min: u64,
    /// Whether the kernel, or the disk's file system, always keeps in the page cache what is read.
    keeps_pages: AtomicBool,
    /// Whether it was told that the disk refuses blocks.
    is_refusal_told: AtomicBool,
    _lock: File,
}

fn file_error(path: PathBuf) -> impl FnOnce(io::Error) -> ServeError {
    |source| ServeError::File { path, source }
}

fn open_file(path: PathBuf) -> Result<File, ServeError> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    options.open(&path).map_err(file_error(path))
}

fn lock(directory: &Path) -> Result<File, ServeError> {
    let path = directory.join("lock");
    let file = open_file(path.clone())?;
    let end = Instant::now() + LOCK_WAIT_MAX;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(Errno::WOULDBLOCK) if Instant::now() < end => std::thread::sleep(LOCK_WAIT_STEP),
            Err(Errno::WOULDBLOCK) => {
                return Err(ServeError::CacheInUse { path: directory.to_owned() });
            }
            Err(errno) => return Err(ServeError::File { path, source: errno.into() }),
        }
    }
}

impl BlockCache {
    /// The cache in `directory`, which is made if it is not there. What an earlier process left
    /// there is used as far as it fits into `size_bytes`.
    pub(crate) fn open(
        directory: &Path,
        size_bytes: u64,
        statistics: Arc<Statistics>,
    ) -> Result<Self, ServeError> {
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(DIRECTORY_MODE)
            .create(directory)
            .map_err(file_error(directory.to_owned()))?;
        let lock = lock(directory)?;
        let (blocks_path, index_path) = (directory.join(CACHE_FILE), directory.join("index.v1"));
        let (blocks, index) = (open_file(blocks_path.clone())?, open_file(index_path.clone())?);
        let capacity = u32::try_from(size_bytes / BLOCK_BYTES_U64).unwrap_or(u32::MAX);
        cut(&blocks, u64::from(capacity) * BLOCK_BYTES_U64).map_err(file_error(blocks_path))?;
        cut(&index, u64::from(capacity) * INDEX_ENTRY_BYTES_U64)
            .map_err(file_error(index_path.clone()))?;
        let mut slots = Slots::new(capacity);
        let stored = std::fs::read(&index_path).map_err(file_error(index_path))?;
        for entry in stored.as_chunks::<INDEX_ENTRY_BYTES>().0 {
            slots.restore(u64::from_le_bytes(*entry));
        }
        let disk_bytes =
            fstatvfs(&blocks).map_or(0, |disk| disk.f_blocks.saturating_mul(disk.f_frsize));
        let room_bytes_min = ROOM_BYTES_MIN.min(disk_bytes / ROOM_SHARE);
        Ok(Self {
            slots: Mutex::new(slots),
            blocks,
            index,
            statistics,
            room_bytes_min,
            keeps_pages: AtomicBool::new(false),
            is_refusal_told: AtomicBool::new(false),
            _lock: lock,
        })
    }

    /// Bytes of the blocks that are kept.
    pub(crate) fn used_bytes(&self) -> u64 {
        u64::try_from(self.slots.lock().len()).unwrap_or(0) * BLOCK_BYTES_U64
    }

    /// Whether a block is there, as it seems. It does not count as used.
    pub(crate) fn has(&self, hash: &Hash) -> bool {
        Fingerprint::of(hash).is_some_and(|print| self.slots.lock().has(print))
    }

    /// For each hash its block, if it is there.
    pub(crate) fn get(&self, hashes: &[Hash]) -> Vec<Option<Bytes>> {
        let places: Vec<Option<Slot>> = {
            let mut slots = self.slots.lock();
            let mut find = |hash| Fingerprint::of(hash).and_then(|print| slots.find(print));
            hashes.iter().map(&mut find).collect()
        };
        let mut found = Vec::with_capacity(hashes.len());
        let wanted: Vec<_> = hashes.iter().zip(places).collect();
        // Blocks that came together lie together: one read for them.
        let follows = |left: &(&Hash, Option<Slot>), right: &(&Hash, Option<Slot>)| {
            left.1.map(Slot::next) == right.1 && right.1.is_some()
        };
        for run in wanted.chunk_by(follows) {
            match run.first() {
                Some((_, Some(first))) => self.read_run(run, *first, &mut found),
                _ => found.push(None),
            }
        }
        let hits = found.iter().flatten().count();
        self.statistics.cache_hits.add_length(hits);
        self.statistics.cache_misses.add_length(found.len() - hits);
        found
    }

    fn read_run(&self, run: &[(&Hash, Option<Slot>)], first: Slot, found: &mut Vec<Option<Bytes>>) {
        let mut bytes = vec![0; run.len() * BLOCK_BYTES];
        let offset = u64::from(first.0) * BLOCK_BYTES_U64;
        if let Err(error) = self.read_at(&mut bytes, offset) {
            // Each block of it is seen to be bad below.
            tracing::warn!(%error, offset, "the cache cannot be read");
            bytes.fill(0);
        }
        let bytes = Bytes::from(bytes);
        for (number, (hash, slot)) in run.iter().enumerate() {
            let block = bytes.slice(number * BLOCK_BYTES..(number + 1) * BLOCK_BYTES);
            let is_good = is_block(&block, hash);
            if !is_good && let (Some(slot), Some(print)) = (slot, Fingerprint::of(hash)) {
                self.drop_bad(*slot, print);
            }
            found.push(is_good.then_some(block));
        }
    }

    /// Reads blocks. The kernel keeps them for the file that they are read for: it need not keep here what it has to read
    /// from the disk.
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        if !self.keeps_pages.load(Ordering::Relaxed) {
            let read = preadv2(&self.blocks, &mut [IoSliceMut::new(bytes)], offset, UNCACHED);
            match read {
                Ok(length) if length == bytes.len() => return Ok(()),
                // Rare, and told apart below: a file that was cut, a signal, a disk that fails.
                Ok(_) | Err(Errno::INTR | Errno::IO) => {}
                Err(_) => self.keeps_pages.store(true, Ordering::Relaxed),
            }
        }
        self.blocks.read_exact_at(bytes, offset)
    }

    /// A slot whose bytes are not its block's: or it was given to another one meanwhile.
    fn drop_bad(&self, slot: Slot, fingerprint: Fingerprint) {
        if self.slots.lock().forget(slot, fingerprint) {
            self.statistics.cache_damaged.add(1);
            // The entry may stay in the index: after a restart it is found out again.
            tracing::debug!(slot = slot.0, "a block of the cache was damaged and is dropped");
        }
    }

    /// Keeps a block that was verified. Whether it could be kept.
    pub(crate) fn insert(&self, hash: &Hash, block: &[u8]) -> bool {
        let Some(fingerprint) = Fingerprint::of(hash) else { return true };
        let has_room = self.has_room();
        let Some(slot) = self.slots.lock().claim(has_room) else { return false };
        let written = self.write(slot, fingerprint, block);
        let content = written.is_ok().then_some(fingerprint);
        self.slots.lock().release(slot, content);
        let is_kept = written.is_ok();
        if let Err(error) = written
            && !self.is_refusal_told.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(%error, "the cache cannot be written: blocks are fetched each time");
        }
        is_kept
    }

    /// Whether it may grow. A disk that does not say may be full, and says so then.
    fn has_room(&self) -> bool {
        let room = |disk: StatVfs| disk.f_bavail.saturating_mul(disk.f_frsize);
        fstatvfs(&self.blocks).map_or(true, |disk| room(disk) >= self.room_bytes_min)
    }

    fn write(&self, slot: Slot, fingerprint: Fingerprint, block: &[u8]) -> io::Result<()> {
        self.blocks.write_all_at(block, u64::from(slot.0) * BLOCK_BYTES_U64)?;
        let entry = fingerprint.stored().to_le_bytes();
        self.index.write_all_at(&entry, u64::from(slot.0) * INDEX_ENTRY_BYTES_U64)
    }
}

/// Makes the file at most this long.
fn cut(file: &File, length_max: u64) -> io::Result<()> {
    if file.metadata()?.len() > length_max { file.set_len(length_max) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn open(directory: &Path, blocks: u64) -> BlockCache {
        BlockCache::open(directory, blocks * BLOCK_BYTES_U64, Arc::default()).unwrap()
    }

    fn block(seed: u8) -> (Hash, Vec<u8>) {
        let bytes = vec![seed; BLOCK_BYTES];
        (*blake3::hash(&bytes).as_bytes(), bytes)
    }

    fn put(cache: &BlockCache, seed: u8) {
        let (hash, bytes) = block(seed);
        cache.insert(&hash, &bytes);
    }

    fn has(cache: &BlockCache, seed: u8) -> bool {
        let (hash, bytes) = block(seed);
        let found = cache.get(&[hash]).remove(0);
        assert!(found.as_ref().is_none_or(|found| found[..] == bytes[..]), "other bytes");
        found.is_some()
    }

    #[test]
    fn blocks_outlive_the_process() {
        let folder = tempfile::tempdir().unwrap();
        let cache = open(folder.path(), 8);
        (1..=5).for_each(|seed| put(&cache, seed));
        drop(cache);
        let cache = open(folder.path(), 8);
        assert!((1..=5).all(|seed| has(&cache, seed)));
        assert_eq!(cache.used_bytes(), 5 * BLOCK_BYTES_U64);
        let all: Vec<Hash> = (0..=6).map(|seed| block(seed).0).collect();
        let found = cache.get(&all);
        let there: Vec<bool> = found.iter().map(Option::is_some).collect();
        assert_eq!(there, [false, true, true, true, true, true, false]);
    }

    #[test]
    fn the_directory_is_the_owners_alone() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path().join("deep/cache");
        let _cache = open(&directory, 1);
        let mode = std::fs::metadata(&directory).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
    }

    #[test]
    fn a_smaller_cache_keeps_what_fits() {
        let folder = tempfile::tempdir().unwrap();
        let cache = open(folder.path(), 8);
        (1..=8).for_each(|seed| put(&cache, seed));
        drop(cache);
        let cache = open(folder.path(), 3);
        assert_eq!((1..=8).filter(|seed| has(&cache, *seed)).count(), 3);
        let length = std::fs::metadata(folder.path().join("blocks.v1")).unwrap().len();
        assert_eq!(length, 3 * BLOCK_BYTES_U64);
        drop(cache);
        let cache = open(folder.path(), 0);
        put(&cache, 1);
        assert!(!has(&cache, 1));
    }

    #[test]
    fn it_does_not_grow_on_a_disk_that_is_nearly_full() {
        let folder = tempfile::tempdir().unwrap();
        let mut cache = open(folder.path(), 8);
        (1..=3).for_each(|seed| put(&cache, seed));
        cache.room_bytes_min = u64::MAX;
        (4..=6).for_each(|seed| put(&cache, seed));
        assert_eq!(cache.used_bytes(), 3 * BLOCK_BYTES_U64);
        let length = std::fs::metadata(folder.path().join("blocks.v1")).unwrap().len();
        assert_eq!(length, 3 * BLOCK_BYTES_U64);
        assert!(has(&cache, 6), "what is new still takes the place of what is old");
        let mut empty = open(&folder.path().join("empty"), 8);
        empty.room_bytes_min = u64::MAX;
        put(&empty, 1);
        assert!(!has(&empty, 1));
    }

    #[test]
    fn damage_costs_a_fetch_only() {
        let folder = tempfile::tempdir().unwrap();
        let cache = open(folder.path(), 8);
        (1..=4).for_each(|seed| put(&cache, seed));
        let file = OpenOptions::new().write(true).open(folder.path().join("blocks.v1")).unwrap();
        file.write_all_at(&[0xff; 100], 4096 + 4000).unwrap();
        assert_eq!([1, 2, 3, 4].map(|seed| has(&cache, seed)), [true, false, false, true]);
        put(&cache, 2);
        assert!(has(&cache, 2));
    }

    #[test]
    fn two_processes_never_share_it() {
        let folder = tempfile::tempdir().unwrap();
        let _first = open(folder.path(), 8);
        let second = BlockCache::open(folder.path(), 4096, Arc::default());
        assert!(matches!(second, Err(ServeError::CacheInUse { .. })));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        /// A process that is killed: the files as it left them, with any of their pages torn,
        /// and any entry of the index lost or that of another block. No wrong byte comes out,
        /// and what is put in comes out again.
        #[test]
        fn after_a_kill_only_good_blocks_come_out(
            seeds in prop::collection::vec(any::<u8>(), 1..30),
            torn in prop::collection::vec((0_u64..16, 0_u64..4096), 0..8),
            entries in prop::collection::vec((0_u64..16, any::<u8>()), 0..8),
            cut_bytes in 0_u64..200,
        ) {
            let folder = tempfile::tempdir().unwrap();
            let cache = open(folder.path(), 16);
            seeds.iter().for_each(|seed| put(&cache, *seed));
            drop(cache);
            let (blocks, index) = (folder.path().join("blocks.v1"), folder.path().join("index.v1"));
            let blocks = OpenOptions::new().write(true).open(blocks).unwrap();
            for (slot, offset) in torn {
                blocks.write_all_at(b"torn", slot * BLOCK_BYTES_U64 + offset).unwrap();
            }
            let index = OpenOptions::new().write(true).open(index).unwrap();
            for (slot, seed) in entries {
                let entry = Fingerprint::of(&block(seed).0).unwrap().stored().to_le_bytes();
                index.write_all_at(&entry, slot * INDEX_ENTRY_BYTES_U64).unwrap();
            }
            cut(&index, cut_bytes).unwrap();
            let cache = open(folder.path(), 16);
            for seed in 0..=u8::MAX {
                has(&cache, seed);
            }
            for seed in seeds {
                put(&cache, seed);
                prop_assert!(has(&cache, seed));
            }
        }
    }
}
