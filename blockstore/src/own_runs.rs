//! The own entries of layers, window by window, as the last commit left them: what a write to a
//! hot file needs of the map, without a look into the index.
//!
//! ```text
//! windows    |   w - 1   |     w     |   w + 1   |
//! entries      A A A A A   B B . C C   C C D
//! list of w            A   B     C               A touches w, C reaches out of it, both whole
//! ```
//! A list holds whole entries, so a change of one entry outdates the lists of all windows that
//! it meets or touches ([`windows_beside`]). Lists are put in and dropped under the structure
//! lock, in the moment in which the index changes (`resolve.rs`), and so are always as it is.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::RwLock;
use quick_cache::Weighter;
use quick_cache::sync::Cache;

use crate::id::LayerId;
use crate::record::Run;
use crate::units::WINDOW_BLOCKS;

/// The entries that meet or touch one window, whole, in order.
pub(crate) type OwnWindow = Arc<[Run]>;

/// Bytes that a cached list takes in memory beside its runs, about.
const LIST_MEMORY_BYTES: u64 = 160;

/// Over this many windows a change drops all lists of its layer at once: more than one run of
/// chunks mostly spans, since it ends with its segment; a hole may span billions.
const DROP_SINGLY_MAX: u64 = 1024;

/// The windows (end left out) whose lists hold the run.
pub(crate) fn windows_beside(run: &Run) -> (u64, u64) {
    (run.first.saturating_sub(1) / WINDOW_BLOCKS, run.end() / WINDOW_BLOCKS + 1)
}

/// A list weighs what its runs take.
#[derive(Clone, Debug)]
struct ListWeight;

impl Weighter<(LayerId, u32, u64), OwnWindow> for ListWeight {
    fn weight(&self, _: &(LayerId, u32, u64), runs: &OwnWindow) -> u64 {
        let bytes = size_of_val::<[Run]>(runs);
        LIST_MEMORY_BYTES + u64::try_from(bytes).unwrap_or(u64::MAX)
    }
}

/// See the module's text.
#[derive(Debug)]
pub(crate) struct OwnRuns {
    lists: Cache<(LayerId, u32, u64), OwnWindow, ListWeight>,
    /// Layers whose lists were dropped all at once, and how often: part of the key.
    epochs: RwLock<HashMap<LayerId, u32>>,
}

impl OwnRuns {
    pub(crate) fn new(memory_bytes: u64) -> Self {
        let lists = usize::try_from(memory_bytes / LIST_MEMORY_BYTES).unwrap_or(usize::MAX);
        Self {
            lists: Cache::with_weighter(lists, memory_bytes, ListWeight),
            epochs: RwLock::new(HashMap::new()),
        }
    }

    pub(crate) fn memory_bytes(&self) -> u64 {
        self.lists.weight()
    }

    fn key(&self, layer: LayerId, window: u64) -> (LayerId, u32, u64) {
        let epoch = self.epochs.read().get(&layer).copied().unwrap_or(0);
        (layer, epoch, window)
    }

    pub(crate) fn get(&self, layer: LayerId, window: u64) -> Option<OwnWindow> {
        self.lists.get(&self.key(layer, window))
    }

    /// The caller holds the structure lock.
    pub(crate) fn put(&self, layer: LayerId, window: u64, runs: OwnWindow) {
        self.lists.insert(self.key(layer, window), runs);
    }

    /// Drops the lists of windows from `start` up to `end` (left out). The caller holds the
    /// structure lock exclusively.
    pub(crate) fn drop_range(&self, layer: LayerId, (start, end): (u64, u64)) {
        if end.saturating_sub(start) > DROP_SINGLY_MAX {
            *self.epochs.write().entry(layer).or_insert(0) += 1;
            return;
        }
        for window in start..end {
            self.lists.remove(&self.key(layer, window));
        }
    }

    /// The layer is gone; its number is never used again.
    pub(crate) fn forget(&self, layer: LayerId) {
        self.epochs.write().remove(&layer);
    }
}
