//! The window sets of layers (`layer_windows.rs`) in memory, bounded by what they take.
//!
//! ```text
//! begin ----> an empty set, to which commits add what they touch
//!   |   the index is read, and nobody waits for that: one moment of it, behind `begin`
//! finish ---> both together name every window, and maybe one too many
//! ```
//! A set of more ranges than one layer may take names windows too many: the nearest are joined.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use quick_cache::sync::{Cache, DefaultLifecycle};
use quick_cache::{DefaultHashBuilder, OptionsBuilder, Weighter};

use crate::id::LayerId;
use crate::layer_windows::Windows;
use crate::transaction::{Touched, TouchedWindows};
use crate::window_set::WindowSet;

/// Bytes that the set of a layer with an entry or two takes, about.
const SET_MEMORY_BYTES: u64 = 512;

/// Bytes that a range takes in the tree of a set, about.
const RANGE_MEMORY_BYTES: u64 = 40;

/// The set of one layer takes at most this share of the memory of all: else it would never stay.
const SHARE_DIVISOR: u64 = 4;

/// Fewer ranges than this are not joined, however little memory there is.
const RANGES_MIN: usize = 64;

/// Windows in which a commit leaves layers without an entry. They are named until all of it is applied:
/// a reader that waits for nobody could else see what is below before what moved there.
#[derive(Debug, Default)]
pub(crate) struct Emptied(HashMap<LayerId, WindowSet>);

impl Emptied {
    /// One change more, in their order: an entry may take the place of one that went.
    pub(crate) fn note(&mut self, touched: &Touched) {
        let (start, end) = touched.empty;
        if start >= end && !self.0.contains_key(&touched.layer) {
            return;
        }
        let empty = self.0.entry(touched.layer).or_default();
        for range in &touched.windows {
            empty.remove(range.start, range.end);
        }
        empty.insert(start, end);
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (LayerId, &WindowSet)> {
        self.0.iter().map(|(layer, empty)| (*layer, empty))
    }
}

/// The set of one layer.
#[derive(Debug, Default)]
pub(crate) struct LayerSet {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    windows: Windows,
    /// It was read; before, it only holds what was touched meanwhile.
    is_whole: bool,
}

impl LayerSet {
    /// Whether the layer has an entry in the window, or may have.
    pub(crate) fn owns(&self, window: u64) -> bool {
        self.state.lock().windows.owned.contains(window)
    }

    /// The first window at or behind `window` that the layer has entries in, or (`data`) data.
    pub(crate) fn next_from(&self, window: u64, data: bool) -> Option<u64> {
        let state = self.state.lock();
        let set = if data { &state.windows.data } else { &state.windows.owned };
        set.next_from(window)
    }

    /// No entry that begins before this window reaches into `window`, or up to it: one that does is in
    /// every window in between.
    pub(crate) fn reaching_from(&self, window: u64) -> u64 {
        let state = self.state.lock();
        let owned = &state.windows.owned;
        let before = window.saturating_sub(1);
        owned.start_of(before).or_else(|| owned.start_of(window)).unwrap_or(window)
    }

    fn is_whole(&self) -> bool {
        self.state.lock().is_whole
    }
}

/// A set weighs what its ranges took when it was put here: it is put again when that changes.
#[derive(Clone, Debug)]
struct Weighed {
    set: Arc<LayerSet>,
    bytes: u64,
}

#[derive(Clone, Debug)]
struct SetWeight;

impl Weighter<LayerId, Weighed> for SetWeight {
    fn weight(&self, _: &LayerId, weighed: &Weighed) -> u64 {
        weighed.bytes
    }
}

/// See the module's text.
#[derive(Debug)]
pub(crate) struct LayerSets {
    sets: Cache<LayerId, Weighed, SetWeight>,
    /// Of the windows with entries of one layer, and of those with data.
    ranges_max: usize,
}

impl LayerSets {
    pub(crate) fn new(memory_bytes: u64) -> Self {
        let items = usize::try_from(memory_bytes / SET_MEMORY_BYTES).unwrap_or(usize::MAX).max(1);
        // One shard: of several each would refuse a set that is larger than its own share.
        let options = OptionsBuilder::new()
            .shards(1)
            .estimated_items_capacity(items)
            .weight_capacity(memory_bytes)
            .build();
        let sets = match options {
            Ok(options) => Cache::with_options(
                options,
                SetWeight,
                DefaultHashBuilder::default(),
                DefaultLifecycle::default(),
            ),
            // Never so: all that it needs is given.
            Err(_) => Cache::with_weighter(items, memory_bytes, SetWeight),
        };
        let ranges = memory_bytes / SHARE_DIVISOR / RANGE_MEMORY_BYTES / 2;
        let ranges_max = usize::try_from(ranges).unwrap_or(usize::MAX).max(RANGES_MIN);
        Self { sets, ranges_max }
    }

    /// Bytes that the sets take in memory, about.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.sets.weight()
    }

    pub(crate) fn ranges_max(&self) -> usize {
        self.ranges_max
    }

    /// The set of a layer, if it is known.
    pub(crate) fn get(&self, layer: LayerId) -> Option<Arc<LayerSet>> {
        self.sets.get(&layer).map(|weighed| weighed.set).filter(|set| set.is_whole())
    }

    /// A set that is read now. The caller holds the structure lock.
    pub(crate) fn put(&self, layer: LayerId, windows: Windows) -> Arc<LayerSet> {
        let set = Arc::new(LayerSet::default());
        self.complete(layer, &set, windows);
        set
    }

    /// From now on commits add what they touch to the set, which is about to be read.
    pub(crate) fn begin(&self, layer: LayerId) -> Arc<LayerSet> {
        if let Some(weighed) = self.sets.get(&layer) {
            return weighed.set;
        }
        let set = Arc::new(LayerSet::default());
        self.sets.insert(layer, Weighed { set: Arc::clone(&set), bytes: SET_MEMORY_BYTES });
        set
    }

    /// The set was read from a moment behind [`LayerSets::begin`]. One that is no longer here may
    /// lack something, and is dropped. The caller holds the structure lock.
    pub(crate) fn finish(&self, layer: LayerId, set: &Arc<LayerSet>, windows: Windows) {
        let weighed = self.sets.get(&layer);
        if weighed.is_some_and(|weighed| Arc::ptr_eq(&weighed.set, set)) {
            self.complete(layer, set, windows);
        }
    }

    fn complete(&self, layer: LayerId, set: &Arc<LayerSet>, windows: Windows) {
        let bytes = {
            let mut state = set.state.lock();
            state.windows.join(windows);
            state.is_whole = true;
            self.weigh(&mut state.windows)
        };
        self.sets.insert(layer, Weighed { set: Arc::clone(set), bytes });
    }

    /// A commit changed these windows. The caller holds the structure lock exclusively.
    pub(crate) fn add(&self, layer: LayerId, touched: &[TouchedWindows]) {
        let Some(Weighed { set, bytes: before_bytes }) = self.sets.get(&layer) else { return };
        let bytes = {
            let mut state = set.state.lock();
            for range in touched {
                state.windows.owned.insert(range.start, range.end);
                if range.has_data {
                    state.windows.data.insert(range.start, range.end);
                }
            }
            self.weigh(&mut state.windows)
        };
        if bytes != before_bytes {
            self.sets.insert(layer, Weighed { set, bytes });
        }
    }

    /// A commit left these windows without an entry. The caller holds the structure lock exclusively.
    pub(crate) fn drop_empty(&self, layer: LayerId, empty: &WindowSet) {
        let Some(Weighed { set, bytes: before_bytes }) = self.sets.get(&layer) else { return };
        let bytes = {
            let mut state = set.state.lock();
            for (start, end) in empty.iter() {
                state.windows.owned.remove(start, end);
                state.windows.data.remove(start, end);
            }
            self.weigh(&mut state.windows)
        };
        if bytes != before_bytes {
            self.sets.insert(layer, Weighed { set, bytes });
        }
    }

    /// The layer is gone.
    pub(crate) fn remove(&self, layer: LayerId) {
        self.sets.remove(&layer);
    }

    /// Bounds the sets, and answers what they take.
    fn weigh(&self, windows: &mut Windows) -> u64 {
        windows.bound(self.ranges_max);
        let ranges = windows.owned.ranges() + windows.data.ranges();
        let ranges = u64::try_from(ranges).unwrap_or(u64::MAX);
        SET_MEMORY_BYTES.saturating_add(ranges.saturating_mul(RANGE_MEMORY_BYTES))
    }
}
