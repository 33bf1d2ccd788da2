//! What a delete would free: the chunks that nothing else names.
//!
//! ```text
//! delete of       its layer, with no snapshot and no child left, goes with all its entries
//! a file or       the layer below loses a child, and may go with it, and so on down
//! a snapshot      a layer that keeps one child alone loses the entries that the child's hide
//!
//! a chunk goes    if those entries are all that name it: as many as its count (I1)
//! ```
//! The same rules as in `reclaim.rs`, on one moment of the index. Nothing is changed, and nobody waits.
//!
//! Memory is bounded: beyond [`PAGES_MAX`] pages of counts one page in two is looked at, then one in four, and so
//! on, and the sum is multiplied. A page stays or goes with all entries that name its chunks, so a sample is as exact
//! as a whole, of its part.

use std::collections::{BTreeMap, HashMap};
use std::ops::ControlFlow;

use crate::compact::live_bytes;
use crate::core::Core;
use crate::error::{Error, Result};
use crate::id::{ChunkId, LayerId, SegmentId, SnapshotId};
use crate::kv::{Family, KvRead, prefix_end};
use crate::name::FilePath;
use crate::paths;
use crate::record::{
    Body, COUNTS_PER_PAGE, CountPage, InodeRecord, LayerRecord, LayerState, Run, SegmentRecord,
    SnapshotRecord, Target, key, split_two,
};
use crate::store::Store;
use crate::types::{DeletionPolicy, Reclaimable};
use crate::units::BLOCK_BYTES_U64;

/// Pages of counts that are added up at a time: 36 MiB in memory. Of a disk that was written in sequence they cover 32
/// GiB, so most answers are of all blocks.
const PAGES_MAX: usize = 1 << 17;

/// Of all blocks, none.
const NOTHING: Reclaimable = Reclaimable { blocks: 0, bytes: 0, sampled_one_in: 1 };

/// Chunks of a page of counts.
const PAGE_CHUNKS: u64 = COUNTS_PER_PAGE as u64;

/// Spreads the numbers of pages over 64 bits: 2^64 divided by the golden ratio.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

impl Store {
    /// What a delete of the file at `path` would free by itself, with the snapshot that goes with its last clone. What
    /// is not committed yet is not counted, and neither is what earlier deletes still free. Proportional to the entries
    /// that it alone has. `is_wanted` is asked all the time; `None` once it says no, which it has to stay with.
    ///
    /// # Errors
    /// `NotFound`, `WrongKind` for what is no file.
    pub fn reclaimable_of_file(
        &self,
        path: &FilePath,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<Option<Reclaimable>> {
        of_file(&self.core, path, &mut Tally::new(PAGES_MAX, is_wanted))
    }

    /// What a delete of the snapshot would free by itself, its clones staying.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn reclaimable_of_snapshot(
        &self,
        id: SnapshotId,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<Option<Reclaimable>> {
        of_snapshot(&self.core, id, &mut Tally::new(PAGES_MAX, is_wanted))
    }
}

fn of_file(core: &Core, path: &FilePath, tally: &mut Tally<'_>) -> Result<Option<Reclaimable>> {
    let inode = paths::resolve_file(core, path)?;
    let view = core.kv.view();
    let view = view.as_ref();
    let gone = || Error::not_found(format!("`{path}`"));
    let bytes = view.get(Family::Inode, &key::inode(inode))?.ok_or_else(gone)?;
    let record = InodeRecord::decode(&bytes)?;
    let Body::File { layer, origin, .. } = record.body else { return Err(gone()) };
    // It has other names, under which it stays.
    if record.link_count > 1 {
        return Ok(Some(NOTHING));
    }
    let mut changes = Changes::default();
    changes.dead.push(layer);
    if let Some(parent) = layer_of(view, layer)?.and_then(|record| record.parent) {
        changes.lost.entry(parent).or_default().children += 1;
    }
    if let Some(origin) = origin
        && let Some(snapshot) = snapshot_of(view, origin)?
        && snapshot.clone_count <= 1
        && snapshot.deletion == DeletionPolicy::OnZeroClones
    {
        changes.lost.entry(snapshot.layer).or_default().snapshots += 1;
    }
    changes.sum(view, tally)
}

fn of_snapshot(core: &Core, id: SnapshotId, tally: &mut Tally<'_>) -> Result<Option<Reclaimable>> {
    core.readable()?;
    let view = core.kv.view();
    let view = view.as_ref();
    let missing = || Error::not_found(format!("snapshot {id}"));
    let snapshot = snapshot_of(view, id)?.ok_or_else(missing)?;
    let mut changes = Changes::default();
    changes.lost.entry(snapshot.layer).or_default().snapshots += 1;
    changes.sum(view, tally)
}

fn layer_of(view: &dyn KvRead, id: LayerId) -> Result<Option<LayerRecord>> {
    let bytes = view.get(Family::Layer, &key::layer(id))?;
    bytes.map(|bytes| LayerRecord::decode_of(id, &bytes)).transpose()
}

fn snapshot_of(view: &dyn KvRead, id: SnapshotId) -> Result<Option<SnapshotRecord>> {
    let bytes = view.get(Family::Snapshot, &key::snapshot(id))?;
    bytes.map(|bytes| SnapshotRecord::decode(&bytes)).transpose()
}

/// What a layer has no more.
#[derive(Clone, Copy, Debug, Default)]
struct Loss {
    children: u64,
    snapshots: u64,
}

/// What becomes of layers.
#[derive(Debug, Default)]
struct Changes {
    /// Those that are still to be looked at.
    lost: BTreeMap<LayerId, Loss>,
    /// Those that go.
    dead: Vec<LayerId>,
    /// Those that stay with one child alone, with that child.
    collapsing: Vec<(LayerId, LayerId)>,
}

impl Changes {
    fn sum(mut self, view: &dyn KvRead, tally: &mut Tally<'_>) -> Result<Option<Reclaimable>> {
        self.follow(view)?;
        let entries = Entries { view, is_wanted: tally.is_wanted };
        for layer in &self.dead {
            entries.visit(*layer, (0, u64::MAX), &mut |run| Ok(tally.add(&run)))?;
        }
        for (layer, _) in &self.collapsing {
            entries.hidden(*layer, &self.above(*layer), &mut |run| Ok(tally.add(&run)))?;
        }
        tally.finish(view)
    }

    /// Parents have lower numbers than their children, so each is looked at after all that it loses.
    fn follow(&mut self, view: &dyn KvRead) -> Result<()> {
        while let Some((id, loss)) = self.lost.pop_last() {
            let Some(layer) = layer_of(view, id)? else { continue };
            if layer.state != LayerState::Frozen || layer.snapshots > loss.snapshots {
                continue;
            }
            match self.children_left(view, (id, &layer), loss)?.as_slice() {
                [] => {
                    self.dead.push(id);
                    if let Some(parent) = layer.parent {
                        self.lost.entry(parent).or_default().children += 1;
                    }
                }
                [child] => self.collapsing.push((id, *child)),
                _ => {}
            }
        }
        Ok(())
    }

    /// The layers that become one with this one, from its child up: one that keeps one child alone may be itself the only
    /// child of another.
    fn above(&self, layer: LayerId) -> Vec<LayerId> {
        let child_of = |layer: LayerId| {
            self.collapsing.iter().find(|(parent, _)| *parent == layer).map(|(_, child)| *child)
        };
        std::iter::successors(child_of(layer), |child| child_of(*child)).collect()
    }

    /// The children of a layer that stay, two at most: not those that go by this, nor those that are dead and wait for
    /// their reclaim.
    fn children_left(
        &self,
        view: &dyn KvRead,
        (id, layer): (LayerId, &LayerRecord),
        loss: Loss,
    ) -> Result<Vec<LayerId>> {
        let mut left = Vec::new();
        if layer.children <= loss.children {
            return Ok(left);
        }
        let prefix = id.get().to_be_bytes();
        view.scan(Family::Child, &prefix, &prefix_end(&prefix), &mut |child_key, _| {
            let child = LayerId::new(split_two("child key", child_key)?.1);
            let is_alive = |record: &LayerRecord| record.state != LayerState::Dead;
            if !self.dead.contains(&child) && layer_of(view, child)?.as_ref().is_some_and(is_alive)
            {
                left.push(child);
            }
            Ok(if left.len() < 2 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
        })?;
        Ok(left)
    }
}

/// What takes the entries of layers.
type VisitRun<'a> = dyn FnMut(Run) -> Result<ControlFlow<()>> + 'a;

/// The entries of layers, as long as they are wanted: after that none is visited.
struct Entries<'a> {
    view: &'a dyn KvRead,
    is_wanted: &'a dyn Fn() -> bool,
}

impl Entries<'_> {
    /// Visits the parts of a layer's entries that lie in a range, until the visitor breaks.
    fn visit(
        &self,
        layer: LayerId,
        (first, end): (u64, u64),
        visit: &mut VisitRun<'_>,
    ) -> Result<()> {
        let (floor, from, to) = (key::map(layer, 0), key::map(layer, first), key::map(layer, end));
        self.view.scan_reaching(Family::Map, (&floor, &from, &to), &mut |map_key, value| {
            if !(self.is_wanted)() {
                return Ok(ControlFlow::Break(()));
            }
            let run = Run::decode(split_two("map key", map_key)?.1, value)?;
            run.cut(first, end).map_or(Ok(ControlFlow::Continue(())), &mut *visit)
        })
    }

    /// Visits the parts of a layer's entries that entries of the layers above hide, each once.
    fn hidden(&self, lower: LayerId, above: &[LayerId], visit: &mut VisitRun<'_>) -> Result<()> {
        for (at, upper) in above.iter().enumerate() {
            let nearer = above.get(..at).unwrap_or_default();
            self.hidden_by(lower, *upper, &mut |part| {
                for part in self.uncovered(part, nearer)? {
                    if visit(part)?.is_break() {
                        return Ok(ControlFlow::Break(()));
                    }
                }
                Ok(ControlFlow::Continue(()))
            })?;
        }
        Ok(())
    }

    /// What no entry of these layers covers of a part.
    fn uncovered(&self, part: Run, layers: &[LayerId]) -> Result<Vec<Run>> {
        let mut left = vec![part];
        for layer in layers {
            let mut rest = Vec::new();
            for part in left {
                let mut at = part.first;
                self.visit(*layer, (part.first, part.end()), &mut |run| {
                    rest.extend(part.cut(at, run.first));
                    at = run.end();
                    Ok(ControlFlow::Continue(()))
                })?;
                rest.extend(part.cut(at, part.end()));
            }
            left = rest;
        }
        Ok(left)
    }

    /// As [`Self::hidden`] by one layer. Proportional to the entries of the one that has fewer, and to those that they
    /// meet.
    fn hidden_by(&self, lower: LayerId, upper: LayerId, visit: &mut VisitRun<'_>) -> Result<()> {
        let count =
            |layer| layer_of(self.view, layer).map(|record| record.map_or(0, |record| record.runs));
        let goes_by_lower = count(lower)? <= count(upper)?;
        let (outer, inner) = if goes_by_lower { (lower, upper) } else { (upper, lower) };
        self.visit(outer, (0, u64::MAX), &mut |run| {
            let mut flow = ControlFlow::Continue(());
            self.visit(inner, (run.first, run.end()), &mut |other| {
                // Both are cut to the same blocks; those of the lower layer are what is hidden.
                let part =
                    if goes_by_lower { run.cut(other.first, other.end()) } else { Some(other) };
                if let Some(part) = part {
                    flow = visit(part)?;
                }
                Ok(flow)
            })?;
            Ok(flow)
        })
    }
}

/// How often entries that go name each chunk.
struct Tally<'a> {
    /// By the first chunk of each page.
    pages: HashMap<ChunkId, Box<[u32; COUNTS_PER_PAGE]>>,
    pages_max: usize,
    /// One page in two to the power of this is looked at.
    halvings: u32,
    is_wanted: &'a dyn Fn() -> bool,
}

impl<'a> Tally<'a> {
    fn new(pages_max: usize, is_wanted: &'a dyn Fn() -> bool) -> Self {
        Self { pages: HashMap::new(), pages_max, halvings: 0, is_wanted }
    }

    fn add(&mut self, run: &Run) -> ControlFlow<()> {
        let Target::Chunks(first) = run.target else { return ControlFlow::Continue(()) };
        let mut done = 0;
        while done < run.count {
            if !(self.is_wanted)() {
                return ControlFlow::Break(());
            }
            let chunk = first.plus(done);
            let page = CountPage::first(chunk);
            let skipped = chunk.raw() - page.raw();
            let named = (PAGE_CHUNKS - skipped).min(run.count - done);
            done += named;
            if is_looked_at(page, self.halvings) {
                let counts =
                    self.pages.entry(page).or_insert_with(|| Box::new([0; COUNTS_PER_PAGE]));
                for slot in skipped..skipped + named {
                    if let Some(count) =
                        usize::try_from(slot).ok().and_then(|at| counts.get_mut(at))
                    {
                        *count = count.saturating_add(1);
                    }
                }
                self.make_room();
            }
        }
        ControlFlow::Continue(())
    }

    fn make_room(&mut self) {
        while self.pages.len() > self.pages_max {
            self.halvings += 1;
            self.pages.retain(|page, _| is_looked_at(*page, self.halvings));
        }
    }

    fn finish(&mut self, view: &dyn KvRead) -> Result<Option<Reclaimable>> {
        let mut freed: BTreeMap<SegmentId, u64> = BTreeMap::new();
        for (page, named) in &self.pages {
            if !(self.is_wanted)() {
                return Ok(None);
            }
            let stored = view.get(Family::Refs, &key::refs(*page))?;
            let counts = stored
                .map_or_else(|| Ok(CountPage::default()), |bytes| CountPage::decode(&bytes))?;
            let pairs = named.iter().zip(counts.counts());
            let blocks = pairs.filter(|(named, count)| **named > 0 && named >= count).count();
            if blocks > 0 {
                *freed.entry(page.segment()).or_default() +=
                    u64::try_from(blocks).unwrap_or(u64::MAX);
            }
        }
        if !(self.is_wanted)() {
            return Ok(None);
        }
        let mut sum = Reclaimable { sampled_one_in: 1 << self.halvings, ..NOTHING };
        for (segment, blocks) in freed {
            sum.blocks += blocks;
            sum.bytes += bytes_of(view, segment, blocks)?;
        }
        sum.blocks = sum.blocks.saturating_mul(sum.sampled_one_in);
        sum.bytes = sum.bytes.saturating_mul(sum.sampled_one_in);
        Ok(Some(sum))
    }
}

/// Whether a page is in the sample: those of a smaller sample are in every larger one.
fn is_looked_at(page: ChunkId, halvings: u32) -> bool {
    let spread = (page.raw() / PAGE_CHUNKS).wrapping_mul(SPREAD);
    spread.checked_shr(u64::BITS - halvings).unwrap_or(0) == 0
}

/// What so many blocks of a segment take, as if all of it were of one size, as compaction and the figures of the store
/// have it.
fn bytes_of(view: &dyn KvRead, segment: SegmentId, blocks: u64) -> Result<u64> {
    match view.get(Family::Segment, &key::segment(segment))? {
        Some(bytes) => {
            let record = SegmentRecord::decode(&bytes)?;
            Ok(live_bytes(record.stored_bytes, blocks, record.stored_chunks.into()))
        }
        None => Ok(blocks.saturating_mul(BLOCK_BYTES_U64)),
    }
}

#[cfg(test)]
mod tests;
