//! From a block of a layer to its chunk: the layers below it, their window sets, and the cache
//! of resolved windows.
//!
//! ```text
//! open layer   [  . X . . ]        window of the file = own entries over
//! frozen       [ Y . . . H ]                            the window of the layer below
//! frozen       [ Z Z Z Z Z ]
//! ```
//! A window of a frozen layer is resolved once and shared by all clones above it. A window in
//! which the open layer has no entry *is* the window below.
//!
//! The structure lock: walks of the layers hold it shared, the application of a commit holds it
//! exclusively (`commit.rs`). So a walk sees the index, the layer table and the caches of one
//! moment, and no stale window is cached.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};
use quick_cache::Weighter;
use quick_cache::sync::Cache;

use crate::error::{Error, Result};
use crate::id::{ChunkId, LayerId};
use crate::kv::{Family, Kv, KvRead};
use crate::record::{LayerRecord, LayerState, Run, Target, key, split_two};
use crate::transaction::Touched;
use crate::units::WINDOW_BLOCKS;
use crate::window_set::WindowSet;

/// Bytes that a cached window takes in memory beside its runs, about.
const WINDOW_MEMORY_BYTES: u64 = 160;

/// Layers whose records and window sets are kept in memory.
const LAYERS_CACHED: usize = 1 << 16;

/// Over this many windows a change drops all cached windows of its layer at once.
const DROP_SINGLY_MAX: u64 = 64;

/// A window with all layers resolved: runs of chunks in order; what is between them is zeros.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Window {
    /// `first` counts from the window's start.
    runs: Vec<Run>,
}

impl Window {
    /// The runs, first blocks counted from the window's start; holes are left out.
    pub(crate) fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// For each block of the window its chunk.
    pub(crate) fn chunks(&self) -> Vec<Option<ChunkId>> {
        let mut chunks = vec![None; usize::try_from(WINDOW_BLOCKS).unwrap_or(0)];
        for run in &self.runs {
            let Target::Chunks(first) = run.target else {
                continue;
            };
            for step in 0..run.count {
                if let Some(slot) =
                    usize::try_from(run.first + step).ok().and_then(|i| chunks.get_mut(i))
                {
                    *slot = Some(first.plus(step));
                }
            }
        }
        chunks
    }

    /// This window with `own` entries (in window coordinates, in order, disjoint) over it.
    fn overlaid(&self, own: &[Run]) -> Self {
        let mut runs: Vec<Run> = Vec::with_capacity(self.runs.len() + own.len());
        let mut below = self.runs.iter();
        let mut current = below.next().copied();
        let mut covered = 0;
        let keep = |runs: &mut Vec<Run>, run: Run| match runs.last_mut() {
            Some(last)
                if last.end() == run.first && last.target.continues(last.count, run.target) =>
            {
                last.count += run.count;
            }
            _ => runs.push(run),
        };
        let end_of_window = Run { first: WINDOW_BLOCKS, count: 1, target: Target::Hole };
        for over in own.iter().chain([&end_of_window]) {
            // What lies below and before this entry shows through.
            while let Some(run) = current {
                if let Some(part) = run.cut(covered, over.first) {
                    keep(&mut runs, part);
                }
                if run.end() > over.first {
                    break;
                }
                current = below.next().copied();
            }
            if over.first < WINDOW_BLOCKS && over.target != Target::Hole {
                keep(&mut runs, *over);
            }
            covered = over.end();
        }
        Self { runs }
    }
}

/// A layer in memory.
#[derive(Debug)]
pub(crate) struct Layer {
    pub(crate) parent: Option<LayerId>,
    pub(crate) is_open: bool,
    /// Loaded at first use.
    windows: Mutex<Option<Windows>>,
}

/// The windows that a layer has entries in.
#[derive(Debug, Default)]
struct Windows {
    /// With any entry.
    owned: WindowSet,
    /// With data, as far as is known: the inside of a long hole is left out, so that nobody
    /// walks through it window by window.
    data: WindowSet,
}

/// A cached window weighs what its runs take.
#[derive(Clone, Debug)]
struct WindowWeight;

impl Weighter<(LayerId, u32, u64), Arc<Window>> for WindowWeight {
    fn weight(&self, _: &(LayerId, u32, u64), window: &Arc<Window>) -> u64 {
        let runs = window.runs.capacity() * size_of::<Run>();
        WINDOW_MEMORY_BYTES + u64::try_from(runs).unwrap_or(u64::MAX)
    }
}

impl Windows {
    /// Adds a run, and answers the window behind it. In the first and the last window of a hole
    /// there may be data beside it.
    fn add(&mut self, run: &Run) -> u64 {
        let (start, behind) = (run.first / WINDOW_BLOCKS, run.end().div_ceil(WINDOW_BLOCKS));
        self.owned.insert(start, behind);
        match run.target {
            Target::Chunks(_) => self.data.insert(start, behind),
            Target::Hole => {
                self.data.insert(start, start + 1);
                self.data.insert(behind - 1, behind);
            }
        }
        behind
    }
}

/// Resolves windows; holds the caches.
#[derive(Debug)]
pub(crate) struct Resolver {
    kv: Arc<dyn Kv>,
    /// See the module's text.
    pub(crate) structure: RwLock<()>,
    layers: Cache<LayerId, Arc<Layer>>,
    windows: Cache<(LayerId, u32, u64), Arc<Window>, WindowWeight>,
    /// How often entries moved between layers: a reader whose layer was looked up before a move
    /// and resolved after it looks again.
    moves: AtomicU64,
    /// Layers whose cached windows were dropped all at once, and how often: part of the key.
    epochs: RwLock<HashMap<LayerId, u32>>,
}

impl Resolver {
    pub(crate) fn new(kv: Arc<dyn Kv>, memory_bytes: u64) -> Self {
        let windows = usize::try_from(memory_bytes / WINDOW_MEMORY_BYTES).unwrap_or(usize::MAX);
        Self {
            kv,
            structure: RwLock::new(()),
            layers: Cache::new(LAYERS_CACHED),
            windows: Cache::with_weighter(windows, memory_bytes, WindowWeight),
            moves: AtomicU64::new(0),
            epochs: RwLock::new(HashMap::new()),
        }
    }

    /// Bytes that cached windows take in memory, about.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.windows.weight()
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

    /// The window if it is cached, without touching the index.
    pub(crate) fn cached(&self, layer: LayerId, window: u64) -> Option<Arc<Window>> {
        if let Some(found) = self.windows.get(&self.cache_key(layer, window)) {
            return Some(found);
        }
        // An open layer without entries in the window shows the window below.
        let state = self.layers.get(&layer)?;
        if !state.is_open || state.windows.lock().as_ref()?.owned.contains(window) {
            return None;
        }
        match state.parent {
            Some(parent) => self.windows.get(&self.cache_key(parent, window)),
            None => Some(Arc::new(Window::default())),
        }
    }

    /// The window with all layers resolved.
    pub(crate) fn window(&self, layer: LayerId, window: u64) -> Result<Arc<Window>> {
        if let Some(found) = self.cached(layer, window) {
            return Ok(found);
        }
        let _walk = self.structure.read();
        self.walk(layer, window)
    }

    /// The window, for a caller that holds the structure lock.
    fn walk(&self, layer: LayerId, window: u64) -> Result<Arc<Window>> {
        let state = self.layer(layer)?;
        if !state.is_open {
            return self.walk_frozen(layer, window);
        }
        let below = match state.parent {
            Some(parent) => self.walk_frozen(parent, window)?,
            None => Arc::new(Window::default()),
        };
        if !self.owns(layer, &state, window)? {
            return Ok(below);
        }
        let resolved = Arc::new(below.overlaid(&self.own_runs(layer, window)?));
        self.windows.insert(self.cache_key(layer, window), Arc::clone(&resolved));
        Ok(resolved)
    }

    fn walk_frozen(&self, layer: LayerId, window: u64) -> Result<Arc<Window>> {
        let mut owners = Vec::new();
        let mut base = Arc::new(Window::default());
        let mut next = Some(layer);
        while let Some(current) = next {
            if let Some(found) = self.windows.get(&self.cache_key(current, window)) {
                base = found;
                break;
            }
            let state = self.layer(current)?;
            if self.owns(current, &state, window)? {
                owners.push(current);
            }
            next = state.parent;
        }
        for owner in owners.into_iter().rev() {
            base = Arc::new(base.overlaid(&self.own_runs(owner, window)?));
        }
        self.windows.insert(self.cache_key(layer, window), Arc::clone(&base));
        Ok(base)
    }

    /// The layer's own entries in a window, in window coordinates.
    fn own_runs(&self, layer: LayerId, window: u64) -> Result<Vec<Run>> {
        let start = window * WINDOW_BLOCKS;
        let runs = runs_between(self.kv.as_ref(), layer, start, start + WINDOW_BLOCKS)?;
        let local = runs.into_iter().map(|run| Run { first: run.first - start, ..run });
        Ok(local.collect())
    }

    /// The layer, loaded if need be. The caller holds the structure lock.
    fn layer(&self, id: LayerId) -> Result<Arc<Layer>> {
        if let Some(layer) = self.layers.get(&id) {
            return Ok(layer);
        }
        let bytes = self.kv.get(Family::Layer, &key::layer(id))?.ok_or_else(|| {
            Error::corrupt(format!("layer {id}"), "a file or layer names it, yet it does not exist")
        })?;
        let layer = Arc::new(in_memory(&LayerRecord::decode(&bytes)?));
        self.layers.insert(id, Arc::clone(&layer));
        Ok(layer)
    }

    fn owns(&self, id: LayerId, layer: &Layer, window: u64) -> Result<bool> {
        let mut windows = layer.windows.lock();
        if windows.is_none() {
            *windows = Some(self.load_windows(id)?);
        }
        Ok(windows.as_ref().is_some_and(|windows| windows.owned.contains(window)))
    }

    /// Finds the windows that a layer has entries in: one look-up for each, not for each entry.
    fn load_windows(&self, id: LayerId) -> Result<Windows> {
        let mut set = Windows::default();
        let mut from = 0;
        let end = key::map(LayerId::new(id.get() + 1), 0);
        loop {
            // An entry that begins in a window that was passed may reach into this one.
            let reaching = match runs_between(self.kv.as_ref(), id, from, from + 1)?.first() {
                Some(_) => self.kv.last_at_or_before(Family::Map, &key::map(id, from))?,
                None => None,
            };
            if let Some((key, value)) = reaching {
                let (_, first) = split_two("map key", &key)?;
                from = set.add(&Run::decode(first, &value)?) * WINDOW_BLOCKS;
                continue;
            }
            let mut found = None;
            self.kv.scan(Family::Map, &key::map(id, from), &end, &mut |key, value| {
                let (_, first) = split_two("map key", key)?;
                found = Some(Run::decode(first, value)?);
                Ok(ControlFlow::Break(()))
            })?;
            let Some(run) = found else { return Ok(set) };
            // Others that begin in these windows add nothing, but by reaching further.
            from = set.add(&run) * WINDOW_BLOCKS;
        }
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
        let _walk = self.structure.read();
        let mut next = None;
        for &id in layers {
            let Ok(layer) = self.layer(id) else { continue };
            self.owns(id, &layer, window)?;
            let found = layer.windows.lock().as_ref().and_then(|windows| {
                let set = if data { &windows.data } else { &windows.owned };
                set.next_from(window)
            });
            next = match (next, found) {
                (Some(a), Some(b)) => Some(std::cmp::min(a, b)),
                (a, b) => a.or(b),
            };
        }
        Ok(next)
    }

    /// The layer below.
    pub(crate) fn parent(&self, layer: LayerId) -> Result<Option<LayerId>> {
        let _walk = self.structure.read();
        self.layer(layer).map(|layer| layer.parent)
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

    /// Before a commit is applied: the layer has entries in these windows. The caller holds
    /// the structure lock exclusively.
    pub(crate) fn add_windows(&self, touched: Touched) {
        let Touched { layer: id, start, end, has_data } = touched;
        if let Some(layer) = self.layers.get(&id)
            && let Some(windows) = layer.windows.lock().as_mut()
        {
            windows.owned.insert(start, end);
            if has_data {
                windows.data.insert(start, end);
            }
        }
        if end.saturating_sub(start) > DROP_SINGLY_MAX {
            *self.epochs.write().entry(id).or_insert(0) += 1;
            return;
        }
        for window in start..end {
            self.windows.remove(&self.cache_key(id, window));
        }
    }

    /// After a commit is applied: the layer's record changed, or it is gone. The caller holds
    /// the structure lock exclusively.
    pub(crate) fn layer_changed(&self, id: LayerId, record: Option<&LayerRecord>) {
        match record {
            None => {
                self.layers.remove(&id);
                self.epochs.write().remove(&id);
            }
            Some(record) => {
                let fresh = in_memory(record);
                if let Some(old) = self.layers.get(&id) {
                    *fresh.windows.lock() = old.windows.lock().take();
                    self.layers.insert(id, Arc::new(fresh));
                }
            }
        }
    }
}

fn in_memory(record: &LayerRecord) -> Layer {
    Layer {
        parent: record.parent,
        is_open: matches!(record.state, LayerState::Open(_)),
        windows: Mutex::new(None),
    }
}

/// The entries of a layer that meet `[first, end)`, cut to it, in order.
pub(crate) fn runs_between(
    kv: &dyn KvRead,
    layer: LayerId,
    first: u64,
    end: u64,
) -> Result<Vec<Run>> {
    let mut runs = Vec::new();
    // An entry that begins before may reach in.
    if first > 0
        && let Some((key, value)) =
            kv.last_at_or_before(Family::Map, &key::map(layer, first - 1))?
    {
        let (of, start) = split_two("map key", &key)?;
        if of == layer.get() {
            runs.extend(Run::decode(start, &value)?.cut(first, end));
        }
    }
    kv.scan(Family::Map, &key::map(layer, first), &key::map(layer, end), &mut |key, value| {
        let (_, start) = split_two("map key", key)?;
        runs.extend(Run::decode(start, value)?.cut(first, end));
        Ok(ControlFlow::Continue(()))
    })?;
    Ok(runs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn runs() -> impl Strategy<Value = Vec<Run>> {
        prop::collection::vec((0u64..256, 1u64..40, prop::option::of(1u64..9)), 0..12).prop_map(
            |raw| {
                let mut end = 0;
                let mut runs = Vec::new();
                for (gap, count, chunk) in raw {
                    let first = end + gap % 30;
                    let count = count.min(WINDOW_BLOCKS.saturating_sub(first));
                    if count == 0 {
                        break;
                    }
                    let target =
                        chunk.map_or(Target::Hole, |c| Target::Chunks(ChunkId::from_raw(c * 1000)));
                    runs.push(Run { first, count, target });
                    end = first + count;
                }
                runs
            },
        )
    }

    proptest! {
        #[test]
        fn an_overlay_shows_what_is_above_else_what_is_below(below in runs(), above in runs()) {
            let below = Window::default().overlaid(&below);
            let result = below.overlaid(&above);
            let base = below.chunks();
            for (block, chunk) in result.chunks().into_iter().enumerate() {
                let block_number = block as u64;
                let over = above.iter().find(|r| r.first <= block_number && block_number < r.end());
                let expected = match over.map(|r| (r.target, block_number - r.first)) {
                    Some((Target::Hole, _)) => None,
                    Some((Target::Chunks(first), skip)) => Some(first.plus(skip)),
                    None => base[block],
                };
                prop_assert_eq!(chunk, expected, "block {}", block);
            }
            prop_assert!(result.runs().windows(2).all(|pair| pair[0].end() <= pair[1].first));
        }
    }
}
