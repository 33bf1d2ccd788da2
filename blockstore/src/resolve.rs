//! From a block of a layer to its chunk: the layers below it, their window sets, and the cache
//! of resolved windows.
//!
//! ```text
//! open layer   [  . X . . ]        window of the file = own entries over
//! frozen       [ Y . . . H ]                            the window of the layer below
//! frozen       [ Z Z Z Z Z ]
//! ```
//! A window of a frozen layer is resolved once and shared by all clones above it. A window in
//! which the open layer has no entry *is* the window below. A commit drops the windows it wrote
//! to and leaves the layer's own entries there (`own_runs.rs`), so that they are resolved again
//! without the index.
//!
//! The structure lock: walks of the layers hold it shared, the application of a commit holds it
//! exclusively (`commit.rs`). So a walk sees the index, the layer table and the caches of one
//! moment, and no stale window is cached. The map of a layer with many entries is read without it
//! when the layer is first met, and the walk begins again: commits do not wait for that.

use std::collections::{HashMap, HashSet};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::RwLock;
use quick_cache::Weighter;
use quick_cache::sync::Cache;

use crate::error::{Error, Result};
use crate::id::LayerId;
use crate::kv::{Family, Kv, KvRead};
use crate::layer_sets::{Emptied, LayerSet, LayerSets};
use crate::layer_windows::{LISTED_RUNS_MAX, Loaded};
use crate::own_runs::{OwnRuns, OwnWindow};
use crate::record::{LayerRecord, LayerState, Run, key, split_two};
use crate::transaction::Touched;
use crate::units::WINDOW_BLOCKS;
use crate::window::{Canvas, Window};

/// Bytes that a cached window takes in memory beside its runs, about.
const WINDOW_MEMORY_BYTES: u64 = 160;

/// The part of the memory that lists of own entries take: they serve files that are written at
/// random, the rest serves all that is read.
const OWN_RUNS_DIVISOR: u64 = 4;

/// The part of the memory that the window sets of layers take.
const SETS_DIVISOR: u64 = 4;

/// Layers whose records are kept in memory.
const LAYERS_CACHED: usize = 1 << 16;

/// Bytes that such a record takes in memory, about.
const LAYER_MEMORY_BYTES: u64 = 128;

/// Over this many windows a change drops all cached windows of its layer at once.
const DROP_SINGLY_MAX: u64 = 64;

/// A layer in memory.
#[derive(Debug)]
pub(crate) struct Layer {
    pub(crate) parent: Option<LayerId>,
    pub(crate) is_open: bool,
    /// Its map takes long to read.
    is_large: bool,
    /// A window of it was resolved and cached, maybe long ago. In a chain of layers few are ever
    /// looked up themselves, and the others need no look into the cache.
    was_resolved: AtomicBool,
}

/// A cached window weighs what its runs take.
#[derive(Clone, Debug)]
struct WindowWeight;

impl Weighter<(LayerId, u32, u64), Arc<Window>> for WindowWeight {
    fn weight(&self, _: &(LayerId, u32, u64), window: &Arc<Window>) -> u64 {
        WINDOW_MEMORY_BYTES + window.memory_bytes()
    }
}

/// Why a walk stopped.
enum Stop {
    Failed(Error),
    /// The map of this layer takes long to read, and is to be read first, without the structure lock.
    Load(LayerId),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

type Walked<T> = std::result::Result<T, Stop>;

/// Layers in memory. A commit that changes a layer puts another one in its place.
type Layers = Cache<LayerId, Arc<Layer>>;

/// A layer at one moment.
#[derive(Clone, Debug)]
pub(crate) struct LayerMoment {
    layers: Arc<Layers>,
    layer: Arc<Layer>,
}

impl LayerMoment {
    pub(crate) fn parent(&self) -> Option<LayerId> {
        self.layer.parent
    }

    /// No commit has changed the layer since. For the leader, next to whom nobody commits.
    pub(crate) fn is_current(&self, id: LayerId) -> bool {
        self.layers.get(&id).is_some_and(|layer| Arc::ptr_eq(&layer, &self.layer))
    }
}

/// Resolves windows; holds the caches.
#[derive(Debug)]
pub(crate) struct Resolver {
    kv: Arc<dyn Kv>,
    /// See the module's text.
    pub(crate) structure: RwLock<()>,
    layers: Arc<Layers>,
    sets: LayerSets,
    /// Own entries of layers that were written to lately.
    own: OwnRuns,
    windows: Cache<(LayerId, u32, u64), Arc<Window>, WindowWeight>,
    /// How often entries moved between layers: a reader whose layer was looked up before a move
    /// and resolved after it looks again.
    moves: AtomicU64,
    /// Layers whose cached windows were dropped all at once, and how often: part of the key.
    epochs: RwLock<HashMap<LayerId, u32>>,
}

impl Resolver {
    pub(crate) fn new(kv: Arc<dyn Kv>, memory_bytes: u64) -> Self {
        let (own_bytes, sets_bytes) =
            (memory_bytes / OWN_RUNS_DIVISOR, memory_bytes / SETS_DIVISOR);
        let memory_bytes = memory_bytes - own_bytes - sets_bytes;
        let windows = usize::try_from(memory_bytes / WINDOW_MEMORY_BYTES).unwrap_or(usize::MAX);
        Self {
            kv,
            structure: RwLock::new(()),
            layers: Arc::new(Cache::new(LAYERS_CACHED)),
            sets: LayerSets::new(sets_bytes),
            own: OwnRuns::new(own_bytes),
            windows: Cache::with_weighter(windows, memory_bytes, WindowWeight),
            moves: AtomicU64::new(0),
            epochs: RwLock::new(HashMap::new()),
        }
    }

    /// Bytes that cached windows, lists, sets and layers take in memory, about.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let layers = u64::try_from(self.layers.len()).unwrap_or(u64::MAX);
        self.windows.weight()
            + self.own.memory_bytes()
            + self.sets.memory_bytes()
            + layers.saturating_mul(LAYER_MEMORY_BYTES)
    }

    /// A number that changes whenever entries move between layers.
    pub(crate) fn moves(&self) -> u64 {
        self.moves.load(Ordering::Acquire)
    }

    /// Entries moved. The caller holds the structure lock exclusively.
    pub(crate) fn note_move(&self) {
        self.moves.fetch_add(1, Ordering::AcqRel);
    }

    fn cache_key(&self, layer: LayerId, window: u64) -> (LayerId, u32, u64) {
        let epoch = self.epochs.read().get(&layer).copied().unwrap_or(0);
        (layer, epoch, window)
    }

    /// The window if it can be told without touching the index.
    pub(crate) fn cached(&self, layer: LayerId, window: u64) -> Option<Arc<Window>> {
        if let Some(found) = self.windows.get(&self.cache_key(layer, window)) {
            return Some(found);
        }
        // An open layer without entries in the window shows the window below.
        let state = self.layers.get(&layer)?;
        if !state.is_open {
            return None;
        }
        if self.sets.get(layer)?.owns(window) {
            return self.overlay_in_memory(layer, window);
        }
        self.cached_below(&state, window)
    }

    fn cached_below(&self, state: &Layer, window: u64) -> Option<Arc<Window>> {
        match state.parent {
            Some(parent) => self.windows.get(&self.cache_key(parent, window)),
            None => Some(Arc::new(Window::default())),
        }
    }

    /// The window of an open layer that was written to since it was last resolved.
    fn overlay_in_memory(&self, layer: LayerId, window: u64) -> Option<Arc<Window>> {
        // A commit that is being applied would be waited for.
        let _walk = self.structure.try_read()?;
        let own = self.own.get(layer, window)?;
        // Again, now that nothing changes.
        let state = self.layers.get(&layer).filter(|state| state.is_open)?;
        let below = self.cached_below(&state, window)?;
        let resolved = Arc::new(below.overlaid(&inside(&own, window)));
        self.windows.insert(self.cache_key(layer, window), Arc::clone(&resolved));
        Some(resolved)
    }

    /// The window with all layers resolved.
    pub(crate) fn window(&self, layer: LayerId, window: u64) -> Result<Arc<Window>> {
        if let Some(found) = self.cached(layer, window) {
            return Ok(found);
        }
        self.walking(|loaded| self.walk(layer, window, loaded))
    }

    /// Does `work` under the structure lock, and again after each layer that had to be read first. It
    /// is told which were, and reads those itself if they are forgotten again.
    fn walking<T>(&self, work: impl Fn(&HashSet<LayerId>) -> Walked<T>) -> Result<T> {
        let mut loaded = HashSet::new();
        loop {
            let outcome = {
                let _walk = self.structure.read();
                work(&loaded)
            };
            match outcome {
                Ok(found) => return Ok(found),
                Err(Stop::Failed(error)) => return Err(error),
                Err(Stop::Load(layer)) => {
                    self.load_large(layer)?;
                    loaded.insert(layer);
                }
            }
        }
    }

    /// Reads which windows a layer has entries in, while commits go on.
    fn load_large(&self, id: LayerId) -> Result<()> {
        let set = self.sets.begin(id);
        // Of one moment; the entries themselves may be others by now.
        let Loaded { windows, .. } =
            Loaded::read(self.kv.view().as_ref(), id, self.sets.ranges_max())?;
        let _walk = self.structure.read();
        self.sets.finish(id, &set, windows);
        Ok(())
    }

    /// The window, for a caller that holds the structure lock.
    fn walk(&self, layer: LayerId, window: u64, loaded: &HashSet<LayerId>) -> Walked<Arc<Window>> {
        let state = self.layer(layer)?;
        if !state.is_open {
            return self.walk_frozen(layer, window, loaded);
        }
        let below = match state.parent {
            Some(parent) => self.walk_frozen(parent, window, loaded)?,
            None => Arc::new(Window::default()),
        };
        let set = self.set(layer, &state, loaded)?;
        if !set.owns(window) {
            return Ok(below);
        }
        let own = self.own_list(layer, window, &set)?;
        let resolved = Arc::new(below.overlaid(&inside(&own, window)));
        self.windows.insert(self.cache_key(layer, window), Arc::clone(&resolved));
        Ok(resolved)
    }

    fn walk_frozen(
        &self,
        layer: LayerId,
        window: u64,
        loaded: &HashSet<LayerId>,
    ) -> Walked<Arc<Window>> {
        let mut canvas = Canvas::new(window);
        let mut below = None;
        let mut next = Some(layer);
        while let Some(current) = next.filter(|_| !canvas.is_full()) {
            let state = self.layer(current)?;
            if state.was_resolved.load(Ordering::Relaxed) {
                below = self.windows.get(&self.cache_key(current, window));
                if below.is_some() {
                    break;
                }
            }
            let set = self.set(current, &state, loaded)?;
            if set.owns(window) {
                canvas.add(&self.own_list(current, window, &set)?);
            }
            next = state.parent;
        }
        let below = below.unwrap_or_default();
        let resolved = if canvas.is_blank() { below } else { Arc::new(canvas.over(&below)) };
        self.layer(layer)?.was_resolved.store(true, Ordering::Relaxed);
        self.windows.insert(self.cache_key(layer, window), Arc::clone(&resolved));
        Ok(resolved)
    }

    /// The layer's own entries that meet a window, whole.
    fn own_list(&self, layer: LayerId, window: u64, set: &LayerSet) -> Result<OwnWindow> {
        if let Some(own) = self.own.get(layer, window) {
            return Ok(own);
        }
        let (floor, start) = (set.reaching_from(window) * WINDOW_BLOCKS, window * WINDOW_BLOCKS);
        let range = (start, start + WINDOW_BLOCKS);
        Ok(whole_runs(self.kv.as_ref(), (layer, floor), range)?.into())
    }

    /// The layer's own entries that meet or touch a window, whole, for one who will write to it.
    pub(crate) fn own_window(&self, layer: LayerId, window: u64) -> Result<OwnWindow> {
        if let Some(own) = self.own.get(layer, window) {
            return Ok(own);
        }
        let _walk = self.structure.read();
        let own = if self.is_empty_around(layer, window) {
            OwnWindow::default()
        } else {
            let from = self.sets.get(layer).map_or(0, |set| set.reaching_from(window));
            let (start, behind) = (window * WINDOW_BLOCKS, (window + 1) * WINDOW_BLOCKS + 1);
            let range = (start.saturating_sub(1), behind);
            whole_runs(self.kv.as_ref(), (layer, from * WINDOW_BLOCKS), range)?.into()
        };
        self.own.put(layer, window, Arc::clone(&own));
        Ok(own)
    }

    /// It is known that the layer has no entry in the window or in those beside it.
    fn is_empty_around(&self, layer: LayerId, window: u64) -> bool {
        let Some(set) = self.sets.get(layer) else { return false };
        set.next_from(window.saturating_sub(1), false).is_none_or(|next| next > window + 1)
    }

    /// The layer as it is now.
    pub(crate) fn moment(&self, id: LayerId) -> Result<LayerMoment> {
        let _walk = self.structure.read();
        Ok(LayerMoment { layers: Arc::clone(&self.layers), layer: self.layer(id)? })
    }

    /// The layer, loaded if need be. The caller holds the structure lock.
    fn layer(&self, id: LayerId) -> Result<Arc<Layer>> {
        self.layer_if_there(id)?.ok_or_else(|| {
            Error::corrupt(format!("layer {id}"), "a file or layer names it, yet it does not exist")
        })
    }

    /// The layer, unless it is gone by now.
    fn layer_if_there(&self, id: LayerId) -> Result<Option<Arc<Layer>>> {
        if let Some(layer) = self.layers.get(&id) {
            return Ok(Some(layer));
        }
        let Some(bytes) = self.kv.get(Family::Layer, &key::layer(id))? else { return Ok(None) };
        let record = LayerRecord::decode_of(id, &bytes)?;
        let layer = Arc::new(in_memory(&record));
        self.layers.insert(id, Arc::clone(&layer));
        Ok(Some(layer))
    }

    /// Which windows the layer has entries in. The caller holds the structure lock.
    fn set(&self, id: LayerId, layer: &Layer, loaded: &HashSet<LayerId>) -> Walked<Arc<LayerSet>> {
        if let Some(set) = self.sets.get(id) {
            return Ok(set);
        }
        if layer.is_large && !loaded.contains(&id) {
            return Err(Stop::Load(id));
        }
        let Loaded { windows, lists } = Loaded::read(self.kv.as_ref(), id, self.sets.ranges_max())?;
        for (window, runs) in lists {
            self.own.put(id, window, runs);
        }
        Ok(self.sets.put(id, windows))
    }

    /// The first window at or behind `window` in which one of `changed` has entries and one of
    /// `chain` has data: elsewhere there is nothing to see.
    pub(crate) fn next_visible(
        &self,
        changed: &[LayerId],
        chain: &[LayerId],
        window: u64,
    ) -> Result<Option<u64>> {
        let mut window = window;
        loop {
            let Some(owned) = self.next_owned(changed, window, false)? else { return Ok(None) };
            let Some(data) = self.next_owned(chain, owned, true)? else { return Ok(None) };
            if owned == data {
                return Ok(Some(owned));
            }
            window = data;
        }
    }

    /// The first window at or behind `window` in which one of the layers has entries. A layer
    /// of a chain that is gone by now collapsed into its neighbour in the chain.
    fn next_owned(&self, layers: &[LayerId], window: u64, data: bool) -> Result<Option<u64>> {
        self.walking(|loaded| {
            let mut next = None;
            for &id in layers {
                let Some(layer) = self.layer_if_there(id)? else { continue };
                let found = self.set(id, &layer, loaded)?.next_from(window, data);
                next = match (next, found) {
                    (Some(a), Some(b)) => Some(std::cmp::min(a, b)),
                    (a, b) => a.or(b),
                };
            }
            Ok(next)
        })
    }

    /// The layer and all below it.
    pub(crate) fn chain(&self, layer: LayerId) -> Result<Vec<LayerId>> {
        let _walk = self.structure.read();
        let mut chain = Vec::new();
        let mut next = Some(layer);
        while let Some(current) = next {
            chain.push(current);
            next = self.layer(current)?.parent;
        }
        Ok(chain)
    }

    /// When a commit is applied: the layer has entries in these windows. The caller holds
    /// the structure lock exclusively.
    pub(crate) fn add_windows(&self, touched: Touched) {
        let Touched { layer: id, windows: touched, empty: _, stale, known } = touched;
        self.sets.add(id, &touched);
        for range in &touched {
            self.drop_range(id, (range.start, range.end));
        }
        for range in stale {
            self.own.drop_range(id, range);
        }
        for (window, runs) in known {
            self.own.put(id, window, runs);
        }
    }

    fn drop_range(&self, layer: LayerId, (start, end): (u64, u64)) {
        if end.saturating_sub(start) > DROP_SINGLY_MAX {
            *self.epochs.write().entry(layer).or_insert(0) += 1;
            return;
        }
        for window in start..end {
            self.windows.remove(&self.cache_key(layer, window));
        }
    }

    /// When all else of a commit is applied: the layers have no entries in these windows any more, and
    /// a look for some would step over all that were deleted there. The caller holds the structure lock
    /// exclusively.
    pub(crate) fn drop_empty(&self, emptied: &Emptied) {
        for (layer, empty) in emptied.iter() {
            self.sets.drop_empty(layer, empty);
        }
    }

    /// When these layers are gone, and no file is known by them any more. A reader that took one of
    /// them for its file's just before looks again: until it does, old windows of theirs must not
    /// come to light, as they would without the epoch. The caller holds the structure lock exclusively.
    pub(crate) fn forget(&self, gone: &[LayerId]) {
        if gone.is_empty() {
            return;
        }
        self.note_move();
        for id in gone {
            self.epochs.write().remove(id);
            self.own.forget(*id);
        }
    }

    /// After a commit is applied: the layer's record changed, or it is gone. The caller holds
    /// the structure lock exclusively.
    pub(crate) fn layer_changed(&self, id: LayerId, record: Option<&LayerRecord>) {
        match record {
            None => {
                self.layers.remove(&id);
                self.sets.remove(id);
            }
            Some(record) => {
                let fresh = in_memory(record);
                if let Some(old) = self.layers.get(&id) {
                    let was_resolved = old.was_resolved.load(Ordering::Relaxed);
                    fresh.was_resolved.store(was_resolved, Ordering::Relaxed);
                    self.layers.insert(id, Arc::new(fresh));
                }
            }
        }
    }
}

fn in_memory(record: &LayerRecord) -> Layer {
    let few = u64::try_from(LISTED_RUNS_MAX).unwrap_or(u64::MAX);
    Layer {
        parent: record.parent,
        is_open: matches!(record.state, LayerState::Open(_)),
        is_large: record.runs > few,
        was_resolved: AtomicBool::new(false),
    }
}

/// The parts of a layer's entries that are inside a window, in its coordinates.
fn inside(runs: &[Run], window: u64) -> Vec<Run> {
    let start = window * WINDOW_BLOCKS;
    let parts = runs.iter().filter_map(|run| run.cut(start, start + WINDOW_BLOCKS));
    parts.map(|run| Run { first: run.first - start, ..run }).collect()
}

/// The entries of a layer that meet `[first, end)`, whole, in order: none that begins before `floor`
/// does. Runs that overlap are damage: which of them a block reads from is unknown.
fn whole_runs(
    kv: &dyn KvRead,
    (layer, floor): (LayerId, u64),
    (first, end): (u64, u64),
) -> Result<Vec<Run>> {
    let mut runs = Vec::new();
    let floor = key::map(layer, floor.min(first));
    let (from, to) = (key::map(layer, first), key::map(layer, end));
    kv.scan_reaching(Family::Map, (&floor, &from, &to), &mut |key, value| {
        let (_, start) = split_two("map key", key)?;
        let run = Run::decode(start, value)?;
        if runs.last().is_some_and(|before: &Run| before.end() > run.first) {
            let reason = format!("block {start} is mapped twice");
            return Err(Error::corrupt(format!("map of layer {layer}"), reason));
        }
        runs.extend(Some(run).filter(|run| run.end() > first));
        Ok(ControlFlow::Continue(()))
    })?;
    Ok(runs)
}

#[cfg(test)]
mod tests;
