//! Chunks that were found to be damaged: no block shares them.
//!
//! One that nothing names any more harms nobody, so it does not count as damage; but it is stored until
//! compaction drops it, and a block of that content must not bring it back to life.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::RwLock;

use crate::id::ChunkId;

/// Damaged chunks that are remembered: about 1 MiB of them. With more the disk is to be replaced.
pub(crate) const DAMAGED_MAX: usize = 1 << 16;

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct Damage {
    /// At most [`DAMAGED_MAX`], and whether each was named when it was last looked at.
    chunks: RwLock<BTreeMap<ChunkId, bool>>,
    /// There were any: spares every other store the lock.
    has_any: AtomicBool,
}

impl Damage {
    /// The chunk is named, and cannot be read; `false` if that was known, or if too many are.
    pub(crate) fn note(&self, chunk: ChunkId) -> bool {
        let mut chunks = self.chunks.write();
        self.has_any.store(true, Ordering::Release);
        if let Some(is_named) = chunks.get_mut(&chunk) {
            *is_named = true;
            return false;
        }
        let has_room = chunks.len() < DAMAGED_MAX;
        if has_room {
            chunks.insert(chunk, true);
        }
        has_room
    }

    /// Nothing names the chunk.
    pub(crate) fn note_dead(&self, chunk: ChunkId) {
        if self.contains(chunk)
            && let Some(is_named) = self.chunks.write().get_mut(&chunk)
        {
            *is_named = false;
        }
    }

    /// The chunk was read, or is no longer stored.
    pub(crate) fn forget(&self, chunk: ChunkId) {
        if self.contains(chunk) {
            self.chunks.write().remove(&chunk);
        }
    }

    /// Whether the chunk is known to be damaged.
    pub(crate) fn contains(&self, chunk: ChunkId) -> bool {
        self.has_any.load(Ordering::Acquire) && self.chunks.read().contains_key(&chunk)
    }

    /// How many damaged chunks something names, as far as is known.
    pub(crate) fn named(&self) -> u64 {
        let chunks = self.chunks.read();
        u64::try_from(chunks.values().filter(|is_named| **is_named).count()).unwrap_or(u64::MAX)
    }
}
