//! What all parts of an open store share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;
use quick_cache::Weighter;
use quick_cache::sync::Cache;

use crate::access_times::AccessTimes;
use crate::aside::Cleaning;
use crate::background::Bell;
use crate::commit::{Committer, Weight, commit};
use crate::dedup::DedupIndex;
use crate::disk::Disk;
use crate::error::{Error, Result};
use crate::file::{File, FileTable};
use crate::id::{ChunkId, InodeId, StoreId};
use crate::index_copy::IndexCopies;
use crate::kind::FileKind;
use crate::kv::{Family, Kv};
use crate::options::Options;
use crate::record::{InodeRecord, LogPosition, key};
use crate::reserve::Shares;
use crate::resolve::Resolver;
use crate::scrub::Scrub;
use crate::segments::Segments;
use crate::stats::Summary;
use crate::steady::SteadyClock;
use crate::time::Clock;
use crate::transaction::Transaction;
use crate::units::BLOCK_BYTES_U64;

/// How the store's memory budget is divided, in sixteenths of it; what is left is for what is
/// not counted: batches under way, RocksDB's own bookkeeping, the allocator's slack.
mod share {
    /// RocksDB's block cache and write buffers.
    pub(super) const INDEX: u64 = 4;
    /// Blocks read.
    pub(super) const BLOCKS: u64 = 4;
    /// Blocks written and not committed.
    pub(super) const DIRTY: u64 = 3;
    /// Resolved windows, and which windows the layers have entries in.
    pub(super) const WINDOWS: u64 = 1;
    /// Segment directories, and the chunks that were stored lately, by hash.
    pub(super) const DIRECTORIES: u64 = 1;
    const _: () = assert!(INDEX + BLOCKS + DIRTY + WINDOWS + DIRECTORIES <= 13);
}

/// The memory budget of each part.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget {
    pub(crate) index_bytes: u64,
    pub(crate) blocks_bytes: u64,
    pub(crate) dirty_bytes: u64,
    pub(crate) windows_bytes: u64,
    pub(crate) directories_bytes: u64,
}

impl Budget {
    pub(crate) fn of(options: &Options) -> Self {
        let sixteenth = options.memory_bytes.max(Options::MEMORY_BYTES_MIN) / 16;
        Self {
            index_bytes: sixteenth * share::INDEX,
            blocks_bytes: sixteenth * share::BLOCKS,
            dirty_bytes: sixteenth * share::DIRTY,
            windows_bytes: sixteenth * share::WINDOWS,
            directories_bytes: sixteenth * share::DIRECTORIES,
        }
    }
}

/// Each cached block weighs its bytes and about as much as its bookkeeping takes.
#[derive(Clone, Debug)]
pub(crate) struct BlockWeight;

const BLOCK_BOOKKEEPING_BYTES: u64 = 128;

impl Weighter<ChunkId, Bytes> for BlockWeight {
    fn weight(&self, _: &ChunkId, block: &Bytes) -> u64 {
        u64::try_from(block.len()).unwrap_or(u64::MAX) + BLOCK_BOOKKEEPING_BYTES
    }
}

/// Counts since start.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) dedup_hits: AtomicU64,
    pub(crate) dedup_misses: AtomicU64,
    pub(crate) zero_blocks: AtomicU64,
    pub(crate) cache_hits: AtomicU64,
    pub(crate) cache_misses: AtomicU64,
    pub(crate) cache_bypassed: AtomicU64,
    pub(crate) reclaimed_entries: AtomicU64,
    pub(crate) compacted_bytes: AtomicU64,
    pub(crate) scrubbed_bytes: AtomicU64,
    pub(crate) reclaim_failures: AtomicU64,
}

/// How full the store is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Space {
    pub(crate) capacity_bytes: u64,
    pub(crate) used_bytes: u64,
    /// What data may still take: less than what is free by the reserves.
    pub(crate) room_bytes: u64,
    /// See [`crate::reserve`]. At least what is held.
    pub(crate) shares: Shares,
    /// Free on the disk, what is reserved left out.
    pub(crate) disk_free_bytes: u64,
}

impl Space {
    pub(crate) fn full(&self) -> Error {
        Error::NoSpace { used_bytes: self.used_bytes, capacity_bytes: self.capacity_bytes }
    }
}

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) store: StoreId,
    pub(crate) handle_key: [u8; 32],
    pub(crate) options: Options,
    pub(crate) budget: Budget,
    pub(crate) kv: Arc<dyn Kv>,
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) segments: Arc<Segments>,
    pub(crate) dedup: Arc<DedupIndex>,
    pub(crate) resolver: Resolver,
    pub(crate) files: FileTable,
    pub(crate) access_times: AccessTimes,
    pub(crate) clock: Clock,
    pub(crate) steady: Mutex<SteadyClock>,
    pub(crate) committer: Committer,
    pub(crate) blocks: Cache<ChunkId, Bytes, BlockWeight>,
    pub(crate) tally: Tally,
    pub(crate) pool: rayon::ThreadPool,
    /// Bytes in segment files, kept up to date by commits and compaction.
    pub(crate) file_bytes: AtomicU64,
    /// Bytes of those that the log has ahead of its records, and data is yet to take.
    pub(crate) spare_bytes: AtomicU64,
    /// Bytes of the index on the disk, as last asked.
    pub(crate) index_bytes: AtomicU64,
    /// What of the log is durable in the index: segments before it are not needed to recover.
    pub(crate) checkpoint: Mutex<LogPosition>,
    /// The copy of the index, and the log files that wait for the next one.
    pub(crate) copies: IndexCopies,
    /// Commits that the start replayed.
    pub(crate) replayed_commits: u64,
    /// For `stats`, when it may not wait for the leader.
    pub(crate) summary: Mutex<Summary>,
    /// Wakes the thread that commits files of which much is dirty.
    pub(crate) much_dirty: Arc<Bell>,
    pub(crate) scrub: Scrub,
    /// Jobs of reclaim, and files that compaction could not move, that failed of late; and where the
    /// job under way is.
    pub(crate) aside: Mutex<Cleaning>,
    /// How often directories got another parent: see `ancestry.rs`.
    pub(crate) directory_moves: Arc<AtomicU64>,
    /// One slice of reclaim at a time.
    pub(crate) reclaim: Mutex<()>,
    /// One compaction at a time, and none beside what lists segments or enters their hashes.
    pub(crate) gc: Mutex<()>,
}

impl Core {
    /// Runs `work` in a transaction; see [`commit`].
    pub(crate) fn commit<T: Send + 'static>(
        &self,
        work: impl for<'a> FnOnce(&mut Transaction<'a>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        commit(self, Weight::default(), work)
    }

    /// Whether reads are taken: they are until the store is closed, poisoned or not.
    pub(crate) fn readable(&self) -> Result<()> {
        if self.committer.is_closed() { Err(Error::Closed) } else { Ok(()) }
    }

    /// The inode as committed.
    pub(crate) fn inode(&self, inode: InodeId) -> Result<InodeRecord> {
        self.readable()?;
        match self.kv.get(Family::Inode, &key::inode(inode))? {
            Some(bytes) => InodeRecord::decode(&bytes),
            None => Err(Error::Stale { inode: inode.get() }),
        }
    }

    /// The file, loaded if need be. Other kinds of inodes are refused.
    pub(crate) fn file(&self, inode: InodeId) -> Result<Arc<File>> {
        if let Some(file) = self.files.get(inode) {
            return Ok(file);
        }
        let _moment = self.resolver.structure.read();
        let record = self.inode(inode)?;
        match record.kind() {
            FileKind::File => Ok(self.files.insert(inode, record)),
            FileKind::Directory => Err(Error::IsDirectory { what: format!("inode {inode}") }),
            got @ (FileKind::Symlink | FileKind::Special(_)) => {
                let what = format!("inode {inode}");
                Err(Error::WrongKind { what, got, expected: FileKind::File })
            }
        }
    }

    /// Counts bytes of files that went. Never below zero: a count that wrapped would tell of a
    /// full store.
    pub(crate) fn lower_file_bytes(&self, bytes: u64) {
        let lower = |before: u64| Some(before.saturating_sub(bytes));
        // Never refused: the closure always has an answer.
        let _ = self.file_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, lower);
    }

    /// Asks the index how much it takes.
    pub(crate) fn look_at_index(&self) {
        self.index_bytes.store(self.kv.disk_bytes(), Ordering::Relaxed);
    }

    /// How full the store is: by its own capacity, or by its disk if that is less.
    pub(crate) fn space(&self) -> Space {
        let used_bytes =
            self.file_bytes.load(Ordering::Relaxed) + self.index_bytes.load(Ordering::Relaxed);
        let used_bytes = used_bytes.saturating_sub(self.spare_bytes.load(Ordering::Relaxed));
        let on_disk = self.disk.space().ok();
        let (held, for_start) = (self.disk.reserved_bytes(), self.disk.reserved_for_start_bytes());
        let disk_free_bytes = on_disk.map_or(u64::MAX, |space| space.available_bytes);
        let free = disk_free_bytes.saturating_add(held).saturating_add(for_start);
        let of_disk = used_bytes.saturating_add(free);
        let capacity_bytes =
            self.options.capacity_bytes.map_or(of_disk, |capacity| capacity.min(of_disk));
        let mut shares = Shares::of(capacity_bytes, self.options.segment_bytes);
        shares.reserve_bytes = shares.reserve_bytes.max(held);
        shares.start_bytes = shares.start_bytes.max(for_start);
        // Twice, as deletes add to it: or a full store would give its reserve to the index while it
        // could still be kept for the time when somebody else fills the disk.
        let kept_bytes = (shares.reserve_bytes)
            .saturating_add(shares.start_bytes)
            .saturating_add(self.kv.needed_bytes().saturating_mul(2));
        Space {
            capacity_bytes,
            used_bytes,
            room_bytes: capacity_bytes.saturating_sub(used_bytes).saturating_sub(kept_bytes),
            shares,
            disk_free_bytes,
        }
    }
}

/// Whether this many dirty bytes are too many.
pub(crate) fn over(dirty_bytes: u64, limit_bytes: u64) -> bool {
    dirty_bytes > limit_bytes.max(BLOCK_BYTES_U64)
}
