//! What differs between two snapshots: only the windows that a layer between them and their
//! common ancestor has entries in are looked at.

use std::collections::HashSet;
use std::sync::Arc;

use crate::core::Core;
use crate::data;
use crate::error::Result;
use crate::id::{LayerId, SnapshotId};
use crate::record::Target;
use crate::snapshot;
use crate::types::{ChangedExtent, DiffPage, ExtentKind, Source};
use crate::units::{BLOCK_BYTES_U64, WINDOW_BLOCKS, block_of, blocks_in};
use crate::window::Window;

/// One side of a diff.
struct Side {
    id: Option<SnapshotId>,
    size_bytes: u64,
    chain: Vec<LayerId>,
}

fn side(core: &Core, id: Option<SnapshotId>) -> Result<Side> {
    let Some(id) = id else {
        return Ok(Side { id: None, size_bytes: 0, chain: Vec::new() });
    };
    let size_bytes = snapshot::load(core, id)?.size_bytes;
    let chain = data::look(core, Source::Snapshot(id), |layer| core.resolver.chain(layer))?;
    Ok(Side { id: Some(id), size_bytes, chain })
}

/// The layers that only one side has.
fn differing(base: &Side, target: &Side) -> Vec<LayerId> {
    let of_base: HashSet<LayerId> = base.chain.iter().copied().collect();
    let of_target: HashSet<LayerId> = target.chain.iter().copied().collect();
    of_base.symmetric_difference(&of_target).copied().collect()
}

/// Collects changed blocks into extents, up to a limit.
struct Extents {
    found: Vec<ChangedExtent>,
    limit: usize,
    size_bytes: u64,
}

impl Extents {
    /// Adds `count` blocks; `false` when there is no room: the page ends before them.
    fn push(&mut self, block: u64, count: u64, kind: ExtentKind) -> bool {
        let offset_bytes = block * BLOCK_BYTES_U64;
        let behind_bytes = self.size_bytes.min((block + count) * BLOCK_BYTES_U64);
        let length_bytes = behind_bytes.saturating_sub(offset_bytes);
        let full = self.found.len() >= self.limit;
        match self.found.last_mut() {
            Some(last)
                if last.kind == kind && last.offset_bytes + last.length_bytes == offset_bytes =>
            {
                last.length_bytes += length_bytes;
            }
            _ if full => return false,
            _ => self.found.push(ChangedExtent { offset_bytes, length_bytes, kind }),
        }
        true
    }
}

pub(crate) fn diff(
    core: &Core,
    base: Option<SnapshotId>,
    target: SnapshotId,
    offset_bytes: u64,
    limit: usize,
) -> Result<DiffPage> {
    let page = changed(core, (base, target), offset_bytes, limit)?;
    // The layers of one that is gone by now may have shown nothing, or be those of others.
    for id in base.into_iter().chain([target]) {
        snapshot::load(core, id)?;
    }
    Ok(page)
}

/// The same as long as both snapshots are there: a layer of their chains that collapsed has its
/// entries in a neighbour, which is in the same chains.
fn changed(
    core: &Core,
    (base, target): (Option<SnapshotId>, SnapshotId),
    offset_bytes: u64,
    limit: usize,
) -> Result<DiffPage> {
    let base = side(core, base)?;
    let target = side(core, Some(target))?;
    let layers = differing(&base, &target);
    let both: Vec<LayerId> = base.chain.iter().chain(&target.chain).copied().collect();
    let size_bytes = target.size_bytes;
    let mut extents = Extents { found: Vec::new(), limit: limit.max(1), size_bytes };
    let first = block_of(offset_bytes);
    let end = blocks_in(size_bytes);
    let mut window = first / WINDOW_BLOCKS;
    while let Some(found) = core.resolver.next_visible(&layers, &both, window)? {
        let start = found * WINDOW_BLOCKS;
        if start >= end {
            break;
        }
        let before = resolved(core, base.id, found)?;
        let after = resolved(core, target.id, found)?;
        let (stop, base_end) = (end.min(start + WINDOW_BLOCKS), blocks_in(base.size_bytes));
        let mut block = first.max(start);
        while block < stop {
            // Behind the end of the base nothing is known of its blocks: they read as zeros.
            let (old, old_count) = match base_end.checked_sub(block).filter(|left| *left > 0) {
                Some(left) => {
                    let (target, count) = before.at(block - start);
                    (target, count.min(left))
                }
                None => (Target::Hole, stop - block),
            };
            let (new, new_count) = after.at(block - start);
            let count = old_count.min(new_count).min(stop - block);
            let kind = if new == Target::Hole { ExtentKind::Hole } else { ExtentKind::Data };
            // Two runs of chunks in sequence differ everywhere or nowhere. What lost blocks held
            // is not known: they count as changed.
            if (old != new || new == Target::Lost) && !extents.push(block, count, kind) {
                let next_offset_bytes = Some(block * BLOCK_BYTES_U64);
                return Ok(DiffPage { extents: extents.found, next_offset_bytes });
            }
            block += count;
        }
        window = found + 1;
    }
    Ok(DiffPage { extents: extents.found, next_offset_bytes: None })
}

fn resolved(core: &Core, id: Option<SnapshotId>, window: u64) -> Result<Arc<Window>> {
    match id {
        Some(id) => {
            data::look(core, Source::Snapshot(id), |layer| core.resolver.window(layer, window))
        }
        None => Ok(Arc::default()),
    }
}
