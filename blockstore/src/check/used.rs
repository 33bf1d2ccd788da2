//! I5: the blocks that files and snapshots use, counted through their layers.
//!
//! A layer shows what the one below shows, less what its own entries hide there, and the data of
//! its own entries. Parents have lower numbers than their children, so one walk in order suffices.

use std::collections::HashMap;
use std::ops::ControlFlow;

use super::findings::differs;
use super::{Check, Findings, Fix, each, number};
use crate::error::Result;
use crate::id::{InodeId, LayerId};
use crate::kv::{Family, KvRead};
use crate::record::{
    Body, InodeRecord, LayerRecord, LayerState, Run, SnapshotRecord, Target, key, split_two,
};
use crate::units::WINDOW_BLOCKS;

/// Entries that are looked at below together.
const TOGETHER: usize = 256;

pub(super) fn check(check: &Check<'_>, findings: &mut Findings) -> Result<()> {
    let view = check.view;
    let mut shown: HashMap<LayerId, (Option<LayerId>, u64)> = HashMap::new();
    each(view, Family::Layer, |layer_key, value| {
        let id = LayerId::new(number(layer_key)?);
        let Ok(record) = LayerRecord::decode(value) else { return Ok(()) };
        if record.state == LayerState::Dead {
            return Ok(());
        }
        let below = match record.parent {
            None => Some(0),
            Some(parent) => shown.get(&parent).map(|(_, blocks)| *blocks),
        };
        // Without the layers below, which was said, nothing can be counted.
        let Some(below) = below else { return Ok(()) };
        shown.insert(id, (record.parent, 0));
        let blocks = visible(view, id, below, &shown)?;
        shown.insert(id, (record.parent, blocks));
        if let LayerState::Open(inode) = record.state {
            of_file(view, (inode, id), blocks, findings)?;
            shown.remove(&id);
        }
        Ok(())
    })?;
    each(view, Family::Snapshot, |snapshot_key, value| {
        let Some((b'i', _)) = snapshot_key.split_first() else { return Ok(()) };
        let Ok(mut record) = SnapshotRecord::decode(value) else { return Ok(()) };
        if let Some((_, blocks)) = shown.get(&record.layer)
            && record.used_blocks != *blocks
        {
            let what = format!("I5: used blocks of a snapshot of layer {}", record.layer);
            findings.wrong(differs(&what, record.used_blocks, *blocks), || {
                record.used_blocks = *blocks;
                Fix::put(Family::Snapshot, snapshot_key.to_vec(), record.encode())
            });
        }
        Ok(())
    })
}

fn of_file(
    view: &dyn KvRead,
    (inode, of): (InodeId, LayerId),
    blocks: u64,
    findings: &mut Findings,
) -> Result<()> {
    let stored = view.get(Family::Inode, &key::inode(inode))?;
    let Some(Ok(mut record)) = stored.as_deref().map(InodeRecord::decode) else { return Ok(()) };
    let owns = matches!(record.body, Body::File { layer, .. } if layer == of);
    if owns && record.used_blocks != blocks {
        let what = format!("I5: used blocks of file {inode}");
        findings.wrong(differs(&what, record.used_blocks, blocks), || {
            record.used_blocks = blocks;
            Fix::put(Family::Inode, key::inode(inode), record.encode())
        });
    }
    Ok(())
}

/// Blocks of data that are seen through a layer, of which `below` are seen through its parent.
fn visible(
    view: &dyn KvRead,
    id: LayerId,
    below: u64,
    layers: &HashMap<LayerId, (Option<LayerId>, u64)>,
) -> Result<u64> {
    let parent = layers.get(&id).and_then(|(parent, _)| *parent);
    let mut blocks = below;
    let mut together: Vec<Run> = Vec::new();
    let (from, to) = (key::map(id, 0), key::map(LayerId::new(id.get() + 1), 0));
    view.scan(Family::Map, &from, &to, &mut |map_key, value| {
        let (_, first) = split_two("map key", map_key)?;
        let Ok(run) = Run::decode(first, value) else { return Ok(ControlFlow::Continue(())) };
        let is_near = together.last().is_none_or(|last| {
            last.first / WINDOW_BLOCKS == run.first / WINDOW_BLOCKS && last.end() <= run.first
        });
        if !is_near || together.len() == TOGETHER {
            blocks = blocks.saturating_sub(seen_in(view, layers, parent, &together)?);
            together.clear();
        }
        if run.target != Target::Hole {
            blocks += run.count;
        }
        together.push(run);
        Ok(ControlFlow::Continue(()))
    })?;
    Ok(blocks.saturating_sub(seen_in(view, layers, parent, &together)?))
}

/// Ranges of blocks, in order.
type Ranges = Vec<(u64, u64)>;

/// Blocks of data in these ranges, in order, seen through a layer.
fn seen_in(
    view: &dyn KvRead,
    layers: &HashMap<LayerId, (Option<LayerId>, u64)>,
    layer: Option<LayerId>,
    hidden: &[Run],
) -> Result<u64> {
    let ranges: Ranges = hidden.iter().map(|run| (run.first, run.end())).collect();
    let mut waiting: Vec<(Option<LayerId>, Ranges)> = vec![(layer, ranges)];
    let mut seen = 0;
    while let Some((layer, ranges)) = waiting.pop() {
        let Some(id) = layer.filter(|_| !ranges.is_empty()) else { continue };
        let covered = cover(view, id, &ranges)?;
        seen += covered.seen;
        waiting.push((layer, covered.rest));
        waiting.push((layers.get(&id).and_then(|(parent, _)| *parent), covered.below));
    }
    Ok(seen)
}

/// What a layer's entries make of ranges.
#[derive(Default)]
struct Covered {
    /// Blocks of data that they show.
    seen: u64,
    /// What they leave open.
    below: Ranges,
    /// What was not looked at, since there were too many entries before.
    rest: Ranges,
}

fn cover(view: &dyn KvRead, id: LayerId, ranges: &[(u64, u64)]) -> Result<Covered> {
    let mut covered = Covered::default();
    let (Some((start, _)), Some((_, end))) = (ranges.first(), ranges.last()) else {
        return Ok(covered);
    };
    let mut runs = Vec::new();
    let mut until = *end;
    own_runs(view, id, (*start, *end), &mut |run| {
        runs.push(run);
        if runs.len() < TOGETHER * 4 {
            return ControlFlow::Continue(());
        }
        until = run.end().min(*end);
        ControlFlow::Break(())
    })?;
    for &(first, end) in ranges {
        covered.rest.extend((until < end).then_some((first.max(until), end)));
        let end = end.min(until);
        let mut at = first;
        let reaching = runs.partition_point(|run| run.end() <= first);
        for part in runs[reaching..].iter().map_while(|run| run.cut(first, end)) {
            covered.below.extend((at < part.first).then_some((at, part.first)));
            covered.seen += if part.target == Target::Hole { 0 } else { part.count };
            at = part.end();
        }
        covered.below.extend((at < end).then_some((at, end)));
    }
    Ok(covered)
}

/// Visits the entries of a layer that meet a range, until the visitor breaks.
pub(super) fn own_runs(
    view: &dyn KvRead,
    id: LayerId,
    (start, end): (u64, u64),
    visit: &mut dyn FnMut(Run) -> ControlFlow<()>,
) -> Result<()> {
    let (floor, from, to) = (key::map(id, 0), key::map(id, start), key::map(id, end));
    view.scan_reaching(Family::Map, (&floor, &from, &to), &mut |map_key, value| {
        let (_, first) = split_two("map key", map_key)?;
        // One that cannot be decoded was found already.
        match Run::decode(first, value) {
            Ok(run) if run.end() > start => Ok(visit(run)),
            _ => Ok(ControlFlow::Continue(())),
        }
    })
}
