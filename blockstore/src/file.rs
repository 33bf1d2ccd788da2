//! A file in memory: its committed record, and what clients wrote since.
//!
//! ```text
//! WRITE -> dirty blocks -> (flush takes them) -> flushing blocks -> committed, in the layer
//! ```
//! Locks, in this order: `flush` (one flush, truncate or snapshot at a time), then the commit,
//! then `state` (short, never across I/O); `waiting` is held with no other but `flush`,
//! and `state` is taken under `room`. The list of noted times of access is locked under `state`.

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::{Condvar, Mutex, RwLock};

use crate::error::{Error, Result};
use crate::id::{InodeId, LayerId};
use crate::record::{Body, InodeRecord};
use crate::time::Timestamp;
use crate::types::Attributes;
use crate::units::{BLOCK_BYTES, BLOCK_BYTES_U64, block_of, blocks_in};

/// Blocks by number, each of exactly one block's bytes.
pub(crate) type Blocks = BTreeMap<u64, Bytes>;

/// What unflushed writes changed in the attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pending {
    pub(crate) size_bytes: u64,
    pub(crate) modified_at: Timestamp,
    /// Behind every stamp of a change that was shown before: after a restart the clock may be behind the
    /// one that gave those, and a client's cache would not notice what was written.
    pub(crate) changed_at: Timestamp,
}

/// The part of a file that changes under `state`.
#[derive(Debug)]
pub(crate) struct FileState {
    /// As committed.
    pub(crate) record: InodeRecord,
    pub(crate) pending: Option<Pending>,
    pub(crate) dirty: Blocks,
    /// Bytes of large writes since the last flush: what of them was written over meanwhile still
    /// takes memory, as blocks are slices of what came in.
    pub(crate) large_bytes: usize,
    /// The same of the blocks that are being flushed.
    pub(crate) flushing_large_bytes: usize,
    /// Since when there have been dirty blocks or a pending change.
    pub(crate) dirty_since: Option<Instant>,
    /// Taken by the flush under way, and not yet in the layer.
    pub(crate) flushing: Blocks,
    /// Cut off by the truncate under way, which may fail still. No flush takes them.
    pub(crate) aside: Blocks,
    /// When it was last read, if that is not committed: see `access_times.rs`.
    pub(crate) accessed_at: Option<Timestamp>,
    /// Its last link is gone.
    pub(crate) deleted: bool,
}

impl FileState {
    /// The size, unflushed writes included.
    pub(crate) fn size_bytes(&self) -> u64 {
        self.pending.map_or(self.record.size_bytes, |pending| pending.size_bytes)
    }

    /// Whether the file still has a name.
    pub(crate) fn present(&self, inode: InodeId) -> Result<()> {
        if self.deleted { Err(Error::Stale { inode: inode.get() }) } else { Ok(()) }
    }

    /// The open layer.
    pub(crate) fn layer(&self) -> Result<LayerId> {
        match self.record.body {
            Body::File { layer, .. } => Ok(layer),
            Body::Directory { .. } | Body::Symlink { .. } | Body::Special(_) => {
                Err(Error::invalid("this inode is not a file"))
            }
        }
    }

    /// The attributes, unflushed writes included.
    pub(crate) fn attributes(&self, inode: InodeId) -> Attributes {
        let mut attributes = attributes_of(inode, &self.record);
        attributes.accessed_at = self.accessed_at.unwrap_or(attributes.accessed_at);
        if let Some(pending) = self.pending {
            attributes.size_bytes = pending.size_bytes;
            attributes.modified_at = pending.modified_at;
            attributes.changed_at = attributes.changed_at.max(pending.changed_at);
        }
        attributes
    }

    /// A block that is not committed yet.
    pub(crate) fn unflushed(&self, block: u64) -> Option<&Bytes> {
        [&self.dirty, &self.flushing, &self.aside].into_iter().find_map(|blocks| blocks.get(&block))
    }

    /// Unflushed blocks of a range, newest version each.
    pub(crate) fn unflushed_range(&self, first: u64, end: u64) -> Blocks {
        let mut blocks = Blocks::new();
        for source in [&self.aside, &self.flushing, &self.dirty] {
            blocks.extend(source.range(first..end).map(|(block, bytes)| (*block, bytes.clone())));
        }
        blocks
    }

    /// Bytes that were written and are not in the layer yet.
    pub(crate) fn unflushed_bytes(&self) -> usize {
        self.dirty_bytes() + self.flushing.len() * BLOCK_BYTES
    }

    /// Memory that the dirty blocks hold.
    pub(crate) fn dirty_bytes(&self) -> usize {
        self.large_bytes.max(self.dirty.len() * BLOCK_BYTES)
    }

    /// It must not be dropped from memory.
    fn is_kept(&self) -> bool {
        self.is_dirty() || self.accessed_at.is_some()
    }

    /// There is something to flush.
    pub(crate) fn is_dirty(&self) -> bool {
        !self.dirty.is_empty() || !self.flushing.is_empty() || self.pending.is_some()
    }
}

/// The attributes of a committed record.
pub(crate) fn attributes_of(inode: InodeId, record: &InodeRecord) -> Attributes {
    Attributes {
        inode,
        generation: record.generation,
        kind: record.kind(),
        mode: record.mode,
        link_count: record.link_count,
        uid: record.uid,
        gid: record.gid,
        size_bytes: record.size_bytes,
        used_bytes: record.used_blocks * BLOCK_BYTES_U64,
        accessed_at: record.accessed_at,
        modified_at: record.modified_at,
        changed_at: record.changed_at,
    }
}

/// What is told the outcome of a commit, and the attributes after it.
pub(crate) type Told = Box<dyn FnOnce(Result<Attributes>) + Send>;

/// Who waits for a commit of the file without holding a thread.
#[derive(Default)]
pub(crate) struct Waiting {
    pub(crate) told: Vec<Told>,
    /// A thread is at it, and looks again before it leaves.
    pub(crate) is_served: bool,
}

impl std::fmt::Debug for Waiting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Waiting")
            .field("told", &self.told.len())
            .field("is_served", &self.is_served)
            .finish()
    }
}

/// Where writers wait while too much of a file is not flushed.
#[derive(Debug, Default)]
pub(crate) struct Room {
    lock: Mutex<()>,
    made: Condvar,
}

impl Room {
    pub(crate) fn ring(&self) {
        // Not between a waiter's last look and its sleep.
        drop(self.lock.lock());
        self.made.notify_all();
    }

    /// Waits for a ring as long as `is_full`, but no longer than this.
    pub(crate) fn wait(&self, period: Duration, is_full: impl Fn() -> bool) {
        let mut guard = self.lock.lock();
        if is_full() {
            self.made.wait_for(&mut guard, period);
        }
    }
}

/// A file that someone reads or writes.
#[derive(Debug)]
pub(crate) struct File {
    pub(crate) inode: InodeId,
    pub(crate) flush: Mutex<()>,
    pub(crate) waiting: Mutex<Waiting>,
    /// Rung when a flush has made room for more.
    pub(crate) room: Room,
    pub(crate) state: RwLock<FileState>,
}

impl File {
    /// What became of a look at the file's layers. Once its last link is gone reclaim takes them, and
    /// waits for nobody: that they are missing, or entries of theirs, is no damage then.
    pub(crate) fn unless_deleted<T>(&self, outcome: Result<T>) -> Result<T> {
        match outcome {
            Err(Error::Corrupt { .. }) if self.state.read().deleted => {
                Err(Error::Stale { inode: self.inode.get() })
            }
            outcome => outcome,
        }
    }
}

/// Files in memory beyond which those that nobody uses are dropped.
pub(crate) const FILES_IN_MEMORY: usize = 4096;

/// The files in memory, and the bytes that are dirty in all of them.
#[derive(Debug, Default)]
pub(crate) struct FileTable {
    files: RwLock<HashMap<InodeId, Arc<File>>>,
    dirty_bytes: AtomicU64,
    /// Memory of the large writes whose blocks are not flushed, in all files.
    large_bytes: AtomicU64,
    /// The last flush found no room.
    is_full: AtomicBool,
}

impl FileTable {
    /// The file, if it is in memory.
    pub(crate) fn get(&self, inode: InodeId) -> Option<Arc<File>> {
        self.files.read().get(&inode).cloned()
    }

    /// Adds a file that was just loaded; the one that is there already wins. The caller holds
    /// the structure lock, so the record is current.
    pub(crate) fn insert(&self, inode: InodeId, record: InodeRecord) -> Arc<File> {
        let mut files = self.files.write();
        if files.len() >= FILES_IN_MEMORY {
            files.retain(|_, file| Arc::strong_count(file) > 1 || file.state.read().is_kept());
        }
        let fresh = || {
            Arc::new(File {
                inode,
                flush: Mutex::new(()),
                waiting: Mutex::default(),
                room: Room::default(),
                state: RwLock::new(FileState {
                    record,
                    pending: None,
                    dirty: Blocks::new(),
                    large_bytes: 0,
                    flushing_large_bytes: 0,
                    dirty_since: None,
                    flushing: Blocks::new(),
                    aside: Blocks::new(),
                    accessed_at: None,
                    deleted: false,
                }),
            })
        };
        Arc::clone(files.entry(inode).or_insert_with(fresh))
    }

    /// All files in memory.
    pub(crate) fn all(&self) -> Vec<Arc<File>> {
        self.files.read().values().cloned().collect()
    }

    /// After a commit was applied: what it made of an inode. The caller holds the structure
    /// lock exclusively. `cut_bytes`: its size was set to this.
    pub(crate) fn inode_changed(
        &self,
        inode: InodeId,
        record: Option<InodeRecord>,
        cut_bytes: Option<u64>,
    ) {
        let Some(file) = self.get(inode) else { return };
        match record {
            Some(record) => {
                let mut state = file.state.write();
                state.record = record;
                if let Some(size_bytes) = cut_bytes {
                    self.cut(&mut state, size_bytes);
                }
            }
            None => {
                let mut state = file.state.write();
                state.deleted = true;
                state.pending = None;
                state.dirty_since = None;
                let bytes = bytes_of(state.dirty.len());
                state.dirty.clear();
                state.aside.clear();
                self.dirty_bytes.fetch_sub(bytes, Ordering::AcqRel);
                self.sub_large(&mut state.large_bytes);
                drop(state);
                self.files.write().remove(&inode);
            }
        }
    }

    /// Writes that came while the size was being set count as before it; those that come from now on,
    /// when it can be seen, do not.
    fn cut(&self, state: &mut FileState, size_bytes: u64) {
        state.aside.clear();
        let behind = state.dirty.split_off(&blocks_in(size_bytes));
        self.sub_dirty(behind.len());
        let inside = usize::try_from(size_bytes % BLOCK_BYTES_U64).unwrap_or(0);
        if inside > 0
            && let Some(tail) = state.dirty.get_mut(&block_of(size_bytes))
        {
            let mut bytes = tail.to_vec();
            bytes[inside..].fill(0);
            *tail = Bytes::from(bytes);
        }
        if let Some(pending) = &mut state.pending {
            pending.size_bytes = size_bytes;
            pending.modified_at = state.record.modified_at;
        }
    }

    /// Notes whether a flush found room for what is dirty.
    pub(crate) fn note_full(&self, is_full: bool) {
        self.is_full.store(is_full, Ordering::Release);
    }

    /// Whether what is dirty could not be flushed of late for want of room.
    pub(crate) fn is_full(&self) -> bool {
        self.is_full.load(Ordering::Acquire)
    }

    pub(crate) fn dirty_bytes(&self) -> u64 {
        self.dirty_bytes.load(Ordering::Acquire)
    }

    /// Memory that dirty blocks take: their own bytes, or those of the writes that they came in,
    /// which one block that is left of each still holds.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.dirty_bytes().max(self.large_bytes.load(Ordering::Acquire))
    }

    /// A large write came to a file.
    pub(crate) fn add_large(&self, of_file: &mut usize, bytes: usize) {
        *of_file += bytes;
        self.large_bytes.fetch_add(u64::try_from(bytes).unwrap_or(u64::MAX), Ordering::AcqRel);
    }

    /// None of a file's large writes is held any more.
    pub(crate) fn sub_large(&self, of_file: &mut usize) {
        let bytes = u64::try_from(std::mem::take(of_file)).unwrap_or(u64::MAX);
        self.large_bytes.fetch_sub(bytes, Ordering::AcqRel);
    }

    pub(crate) fn add_dirty(&self, blocks: usize) {
        self.dirty_bytes.fetch_add(bytes_of(blocks), Ordering::AcqRel);
    }

    pub(crate) fn sub_dirty(&self, blocks: usize) {
        self.dirty_bytes.fetch_sub(bytes_of(blocks), Ordering::AcqRel);
    }
}

fn bytes_of(blocks: usize) -> u64 {
    u64::try_from(blocks).unwrap_or(u64::MAX).saturating_mul(BLOCK_BYTES_U64)
}
