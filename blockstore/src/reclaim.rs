//! What happens to a layer that nothing names any more: reclaim and collapse, in restartable
//! slices whose cost is proportional to the layer's own entries.
//!
//! ```text
//! no snapshot, no child    dead: its entries are released slice by slice, then it is gone
//! no snapshot, one child   collapse: the fewer entries move to the other layer
//!     parent --> child       child has more: parent's entries move down, where not hidden
//!     parent <-- child       child is open and has fewer: its entries move up over parent's
//! no snapshot, more        it stays until all but one child are gone
//! ```
//! Each slice is one transaction that changes no visible byte (I4), so a crash between two
//! slices needs no repair, and the work left is found from the layers themselves.

use std::ops::ControlFlow;

use crate::aside::Reached;
use crate::core::Core;
use crate::error::{Error, Result};
use crate::id::{InodeId, LayerId};
use crate::kv::Family;
use crate::mapping;
use crate::record::{Body, LayerRecord, LayerState, Run, Target, key, split_two};
use crate::transaction::Transaction;

mod jobs;

pub(crate) use jobs::{Job, work_next};

/// Map entries of one slice.
const SLICE_ENTRIES: usize = 512;

/// Chunks that one slice releases: writers wait for a slice, so it stays in the milliseconds.
const SLICE_CHUNKS: u64 = 2048;

/// A layer lost a snapshot or a child: decides what becomes of it.
pub(crate) fn layer_released(txn: &mut Transaction<'_>, id: LayerId) -> Result<()> {
    let mut layer = txn.layer(id)?;
    if layer.state != LayerState::Frozen || layer.snapshots > 0 {
        return Ok(());
    }
    match layer.children {
        0 => {
            layer.state = LayerState::Dead;
            txn.put_layer(id, &layer);
            txn.counters().dead_layers += 1;
            txn.delete(Family::Queue, key::queue_layer(key::QUEUE_COLLAPSE, id));
            txn.put(Family::Queue, key::queue_layer(key::QUEUE_DEAD, id), Vec::new());
        }
        1 => txn.put(Family::Queue, key::queue_layer(key::QUEUE_COLLAPSE, id), Vec::new()),
        _ => {}
    }
    Ok(())
}

/// What a slice did.
#[derive(Clone, Copy, Debug, Default)]
struct Done {
    /// Entries.
    visited: u64,
    /// Where the next slice begins to look: what a layer had before it is deleted, and a scan from
    /// the first block on would step over all of that.
    reached: Reached,
}

/// What one slice, of one layer or of many small ones, may still take.
#[derive(Debug)]
struct Budget {
    entries: usize,
    chunks: u64,
    met: Met,
}

impl Default for Budget {
    fn default() -> Self {
        Self { entries: SLICE_ENTRIES, chunks: SLICE_CHUNKS, met: Met::default() }
    }
}

impl Budget {
    const fn is_used_up(&self) -> bool {
        self.entries == 0 || self.chunks == 0 || self.met.entries == 0 || self.met.chunks == 0
    }
}

/// Entries of a layer in sequence, within the budget of a slice.
struct Slice {
    /// Whole; the last may reach further than the slice.
    entries: Vec<Run>,
    end: u64,
}

impl Slice {
    /// The entries from the block `from` on, or from the first block on if there are none.
    fn read(
        txn: &Transaction<'_>,
        (layer, runs): (LayerId, u64),
        from: u64,
        budget: &mut Budget,
    ) -> Result<Self> {
        let mut found = mapping::runs_from(txn, layer, (from, u64::MAX), budget.entries)?;
        if found.is_empty() && from > 0 {
            found = mapping::runs_from(txn, layer, (0, u64::MAX), budget.entries)?;
        }
        if found.is_empty() && runs > 0 {
            // It would be tried without end.
            let reason = format!("I5: its record tells of {runs} entries, yet it has none");
            return Err(Error::corrupt(format!("layer {layer}"), reason));
        }
        let mut slice = Self { entries: Vec::new(), end: 0 };
        for run in found {
            if budget.chunks == 0 {
                break;
            }
            let room = match run.target {
                Target::Hole | Target::Lost => run.count,
                Target::Chunks(_) => run.count.min(budget.chunks),
            };
            if matches!(run.target, Target::Chunks(_)) {
                budget.chunks -= room;
            }
            slice.end = run.first + room;
            slice.entries.push(run);
        }
        budget.entries = budget.entries.saturating_sub(slice.entries.len());
        Ok(slice)
    }

    fn done(&self, reached: Reached) -> Done {
        Done { visited: u64::try_from(self.entries.len()).unwrap_or(u64::MAX), reached }
    }

    /// For layers that nothing moves up into.
    fn done_to(&self, block: u64) -> Done {
        self.done(Reached { block, ..Reached::default() })
    }

    /// What the last slice knew of the layer that entries move up into, if this one goes on there.
    fn behind(&self, from: Reached) -> u64 {
        let goes_on = self.entries.first().is_some_and(|run| run.first >= from.block);
        if goes_on { from.behind } else { 0 }
    }
}

/// The layer, unless another thread has finished with it since it was queued.
fn still_there(txn: &Transaction<'_>, id: LayerId) -> Result<Option<LayerRecord>> {
    let bytes = txn.get(Family::Layer, &key::layer(id))?;
    bytes.map(|bytes| LayerRecord::decode_of(id, &bytes)).transpose()
}

fn reclaim_slice(
    txn: &mut Transaction<'_>,
    id: LayerId,
    from: Reached,
    budget: &mut Budget,
) -> Result<Done> {
    let Some(layer) = still_there(txn, id)? else { return Ok(Done::default()) };
    if layer.state != LayerState::Dead {
        let reason = format!("I5: it is queued as dead, yet it is {:?}", layer.state);
        return Err(Error::corrupt(format!("layer {id}"), reason));
    }
    txn.frees();
    txn.moves_entries();
    let slice = Slice::read(txn, (id, layer.runs), from.block, budget)?;
    if let Some(first) = slice.entries.first() {
        let taken = mapping::take_known(txn, id, (first.first, slice.end), &slice.entries)?;
        mapping::release(txn, &taken)?;
    }
    if txn.layer(id)?.runs == 0 {
        remove_layer(txn, id, key::QUEUE_DEAD)?;
        let counters = txn.counters();
        counters.dead_layers = counters.dead_layers.saturating_sub(1);
        if let Some(parent) = layer.parent {
            txn.delete(Family::Child, key::child(parent, id));
            let mut record = txn.layer(parent)?;
            record.children = record.children.saturating_sub(1);
            txn.put_layer(parent, &record);
            layer_released(txn, parent)?;
        }
    }
    Ok(slice.done_to(slice.end))
}

/// Removes an empty layer's record and its place in the queue.
fn remove_layer(txn: &mut Transaction<'_>, id: LayerId, queue: u8) -> Result<()> {
    txn.delete(Family::Layer, key::layer(id));
    txn.delete(Family::Queue, key::queue_layer(queue, id));
    let counters = txn.counters();
    counters.layers = counters.layers.saturating_sub(1);
    Ok(())
}

/// The only child of a layer. `known`: what it was at the last slice.
fn only_child(
    txn: &Transaction<'_>,
    (parent, record): (LayerId, &LayerRecord),
    known: Option<LayerId>,
) -> Result<Option<LayerId>> {
    if record.children != 1 {
        return Ok(None);
    }
    if let Some(child) = known
        && txn.get(Family::Child, &key::child(parent, child))?.is_some()
    {
        return Ok(known);
    }
    let (from, to) = children(parent);
    let found = txn.range(Family::Child, (&from, &to), 2)?;
    match found.as_slice() {
        [(key, _)] => Ok(Some(LayerId::new(split_two("child key", key)?.1))),
        _ => Ok(None),
    }
}

/// All keys of the layer's children.
fn children(parent: LayerId) -> (Vec<u8>, Vec<u8>) {
    let end = LayerId::new(parent.get() + 1);
    (key::child(parent, LayerId::new(0)), key::child(end, LayerId::new(0)))
}

/// The file whose open layer is the first child of `parent`, or the child that is known.
fn open_child_owner(
    core: &Core,
    parent: LayerId,
    known: Option<LayerId>,
) -> Result<Option<InodeId>> {
    let owner = |child: LayerId| -> Result<Option<InodeId>> {
        let Some(bytes) = core.kv.get(Family::Layer, &key::layer(child))? else { return Ok(None) };
        match LayerRecord::decode(&bytes)?.state {
            LayerState::Open(inode) => Ok(Some(inode)),
            LayerState::Frozen | LayerState::Dead => Ok(None),
        }
    };
    if let Some(child) = known
        && core.kv.get(Family::Child, &key::child(parent, child))?.is_some()
    {
        return owner(child);
    }
    let (from, to) = children(parent);
    let mut first = None;
    core.kv.scan(Family::Child, &from, &to, &mut |entry, _| {
        first = Some(LayerId::new(split_two("child key", entry)?.1));
        Ok(ControlFlow::Break(()))
    })?;
    first.map_or(Ok(None), owner)
}

/// `locked`: the owner of the open child whose flush lock the caller holds.
fn collapse_slice(
    txn: &mut Transaction<'_>,
    parent: LayerId,
    (locked, from): (Option<InodeId>, Reached),
    budget: &mut Budget,
) -> Result<Done> {
    let Some(record) = still_there(txn, parent)? else { return Ok(Done::default()) };
    txn.frees();
    let wanted = record.state == LayerState::Frozen && record.snapshots == 0;
    let child = if wanted { only_child(txn, (parent, &record), from.child)? } else { None };
    let Some(child) = child else {
        // It got a snapshot or another child since: it stays, or waits elsewhere.
        txn.delete(Family::Queue, key::queue_layer(key::QUEUE_COLLAPSE, parent));
        return Ok(Done::default());
    };
    txn.moves_entries();
    let of_child = txn.layer(child)?;
    if of_child.parent != Some(parent) {
        let got = of_child.parent.map_or("none".to_owned(), |parent| parent.to_string());
        let reason = format!("I5: its parent is {got}, yet layer {parent} has it as a child");
        return Err(Error::corrupt(format!("layer {child}"), reason));
    }
    let mut done = match of_child.state {
        LayerState::Dead => {
            // Reclaim takes the child first; then this layer has none and dies itself.
            txn.delete(Family::Queue, key::queue_layer(key::QUEUE_COLLAPSE, parent));
            Ok(Done::default())
        }
        // The file came after the caller looked: the next slice holds its lock.
        LayerState::Open(owner) if locked != Some(owner) => Ok(Done::default()),
        LayerState::Open(owner) if of_child.runs < record.runs => {
            let slice = Slice::read(txn, (child, of_child.runs), from.block, budget)?;
            move_up(txn, (parent, record), (child, owner), (&slice, from, &mut budget.met))
        }
        LayerState::Open(_) | LayerState::Frozen => {
            let slice = Slice::read(txn, (parent, record.runs), from.block, budget)?;
            move_down(txn, (parent, record), child, (&slice, &mut budget.met))
        }
    }?;
    done.reached.child = Some(child);
    Ok(done)
}

/// Moves entries of the parent into the child where the child has none, and releases the rest.
fn move_down(
    txn: &mut Transaction<'_>,
    (parent, record): (LayerId, LayerRecord),
    child: LayerId,
    (slice, met): (&Slice, &mut Met),
) -> Result<Done> {
    let mut reached = slice.end;
    for run in &slice.entries {
        let behind = run.end().min(slice.end);
        let end = met.end_of(txn, child, (run.first, behind), 0)?;
        for part in mapping::take_known(txn, parent, (run.first, end), &[*run])? {
            let over = mapping::runs(txn, child, (part.first, part.end()), usize::MAX)?;
            let mut at = part.first;
            for hiding in over {
                if let Some(hidden) = part.cut(hiding.first, hiding.end()) {
                    show(txn, child, part.cut(at, hidden.first), record.parent)?;
                    mapping::release(txn, &[hidden])?;
                    at = hidden.end();
                }
            }
            show(txn, child, part.cut(at, part.end()), record.parent)?;
        }
        if end < behind {
            reached = end;
            break;
        }
    }
    if txn.layer(parent)?.runs == 0 {
        // The child takes the parent's place.
        let mut of_child = txn.layer(child)?;
        of_child.parent = record.parent;
        txn.put_layer(child, &of_child);
        txn.delete(Family::Child, key::child(parent, child));
        if let Some(grandparent) = record.parent {
            txn.delete(Family::Child, key::child(grandparent, parent));
            txn.put(Family::Child, key::child(grandparent, child), Vec::new());
        }
        remove_layer(txn, parent, key::QUEUE_COLLAPSE)?;
    }
    Ok(slice.done_to(reached))
}

/// What a slice may still meet in the layer that the entries move to: one entry, a hole over all of
/// a disk say, may meet millions.
#[derive(Debug)]
struct Met {
    entries: usize,
    chunks: u64,
}

impl Default for Met {
    fn default() -> Self {
        Self { entries: SLICE_ENTRIES, chunks: SLICE_CHUNKS }
    }
}

impl Met {
    /// How far the blocks `[first, end)` may move: to their end, or to where they would meet too
    /// much. That is behind the first block for the first of a slice. `behind`: see
    /// [`mapping::runs_behind`].
    fn end_of(
        &mut self,
        txn: &Transaction<'_>,
        other: LayerId,
        (first, end): (u64, u64),
        behind: u64,
    ) -> Result<u64> {
        let limit = self.entries + 1;
        let met = mapping::runs_behind(txn, other, (first, end), (behind, limit))?;
        for part in met.iter().filter_map(|met| met.cut(first, end)) {
            let Some(entries) = self.entries.checked_sub(1) else { return Ok(part.first) };
            self.entries = entries;
            if matches!(part.target, Target::Chunks(_)) {
                let chunks = self.chunks.min(part.count);
                self.chunks -= chunks;
                if chunks < part.count {
                    return Ok(part.first + chunks);
                }
            }
        }
        Ok(end)
    }
}

/// Puts what shows through into the child. A hole over nothing needs no entry.
fn show(
    txn: &mut Transaction<'_>,
    child: LayerId,
    part: Option<Run>,
    below: Option<LayerId>,
) -> Result<()> {
    match part.filter(|run| is_shown(run, below)) {
        Some(run) => mapping::place(txn, child, run),
        None => Ok(()),
    }
}

fn is_shown(run: &Run, below: Option<LayerId>) -> bool {
    run.target != Target::Hole || below.is_some()
}

/// Moves entries of the open child over those of its parent, which then takes its place.
fn move_up(
    txn: &mut Transaction<'_>,
    (parent, record): (LayerId, LayerRecord),
    (child, owner): (LayerId, InodeId),
    (slice, from, met): (&Slice, Reached, &mut Met),
) -> Result<Done> {
    let mut reached = slice.end;
    // Nothing of the parent reaches behind this block from before it: what did is taken.
    let mut behind = slice.behind(from);
    for run in &slice.entries {
        let end_of_run = run.end().min(slice.end);
        let end = met.end_of(txn, parent, (run.first, end_of_run), behind)?;
        for part in mapping::take_known(txn, child, (run.first, end), &[*run])? {
            let hidden = mapping::take_behind(txn, parent, (part.first, part.end()), behind)?;
            mapping::release(txn, &hidden)?;
            if is_shown(&part, record.parent) {
                mapping::place_behind(txn, parent, part, behind)?;
            }
            behind = part.end();
        }
        if end < end_of_run {
            reached = end;
            break;
        }
    }
    if txn.layer(child)?.runs == 0 {
        let mut file = txn.inode(owner)?;
        if let Body::File { layer, .. } = &mut file.body {
            *layer = parent;
        }
        txn.put_inode(owner, &file);
        let mut of_parent = txn.layer(parent)?;
        of_parent.state = LayerState::Open(owner);
        of_parent.children = 0;
        txn.put_layer(parent, &of_parent);
        txn.delete(Family::Child, key::child(parent, child));
        txn.delete(Family::Queue, key::queue_layer(key::QUEUE_COLLAPSE, parent));
        txn.delete(Family::Layer, key::layer(child));
        let counters = txn.counters();
        counters.layers = counters.layers.saturating_sub(1);
        // From now on the file's writes change it.
        return Ok(slice.done(Reached::default()));
    }
    Ok(slice.done(reached_in(txn, parent, (reached, behind))?))
}

/// All before `block` moved up into the parent, of which no unchanged entry that begins before `behind`
/// reaches behind it. Without this each slice would look back over all that those before it deleted.
fn reached_in(
    txn: &Transaction<'_>,
    parent: LayerId,
    (block, behind): (u64, u64),
) -> Result<Reached> {
    // One that ends there may be continued.
    let beside = (block.saturating_sub(1), block.saturating_add(1));
    let met = mapping::runs_behind(txn, parent, beside, (behind, 1))?;
    let reaching = met.first().map_or(block, |run| run.first.min(block));
    Ok(Reached { block, behind: reaching, child: None })
}
