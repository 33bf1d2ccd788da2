//! I5: the layers, their families and their maps.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use super::findings::differs;
use super::overlaps::Overlaps;
use super::{Check, EVERYTHING_END, Findings, Fix, behind, each, number};
use crate::error::Result;
use crate::id::{InodeId, LayerId};
use crate::kv::{Family, KvRead, Write};
use crate::record::{
    Body, InodeRecord, LayerRecord, LayerState, Run, SnapshotRecord, Target, key, split_two,
};
use crate::units::{BLOCK_BYTES_U64, FILE_BYTES_MAX};

/// Bytes that one layer takes while what names it is counted, about.
const COUNTED_LAYER_BYTES: usize = 192;

/// What the map entries of a layer are called.
const ENTRIES: &str = "entries";

/// A layer, and what was counted of it.
struct Counted {
    record: LayerRecord,
    children: u64,
    snapshots: u64,
    runs: u64,
    blocks: u64,
    /// Where the entries so far end, and whether one began before that.
    end: u64,
    overlap: bool,
}

impl Counted {
    fn of(record: LayerRecord) -> Self {
        Self { record, children: 0, snapshots: 0, runs: 0, blocks: 0, end: 0, overlap: false }
    }

    /// One more entry.
    fn add(&mut self, run: &Run) {
        self.runs += 1;
        self.overlap |= run.first < self.end;
        self.end = self.end.max(run.end());
    }
}

type Part = BTreeMap<LayerId, Counted>;

pub(super) fn check(check: &mut Check<'_>, findings: &mut Findings) -> Result<()> {
    owners(check.view, findings)?;
    child_entries(check.view, findings)?;
    let (mut from, mut map_from) = (Vec::new(), Vec::new());
    loop {
        let (mut part, last) = layers(check, &from, findings)?;
        let map_end = match (&last, part.last_key_value()) {
            (Some(_), Some((layer, _))) => key::map(LayerId::new(layer.get() + 1), 0),
            _ => EVERYTHING_END.to_vec(),
        };
        count_names(check.view, &mut part)?;
        let mapped = entries(check.view, (&map_from, &map_end), &mut part, findings)?;
        check.counted.mapped_blocks += mapped;
        compare(check.view, &part, findings)?;
        let Some(last) = last else { return Ok(()) };
        (from, map_from) = (behind(&last), map_end);
    }
}

pub(super) fn layer(view: &dyn KvRead, id: LayerId) -> Result<Option<LayerRecord>> {
    view.get(Family::Layer, &key::layer(id))?.as_deref().map(LayerRecord::decode).transpose()
}

/// Files own open layers, snapshots see frozen ones.
fn owners(view: &dyn KvRead, findings: &mut Findings) -> Result<()> {
    each(view, Family::Inode, |inode_key, value| {
        let inode = InodeId::new(number(inode_key)?);
        let Ok(record) = InodeRecord::decode(value) else { return Ok(()) };
        if let Body::File { layer: id, .. } = record.body {
            let state = layer(view, id)?.map(|layer| layer.state);
            if state != Some(LayerState::Open(inode)) {
                findings.rebuild(&format!("I5: layer {id} of file {inode} is {state:?}"));
            }
        }
        Ok(())
    })?;
    each(view, Family::Snapshot, |snapshot_key, value| {
        let Some((b'i', _)) = snapshot_key.split_first() else { return Ok(()) };
        let Ok(record) = SnapshotRecord::decode(value) else { return Ok(()) };
        let state = layer(view, record.layer)?.map(|layer| layer.state);
        if state != Some(LayerState::Frozen) {
            findings.rebuild(&format!("I5: layer {} of a snapshot is {state:?}", record.layer));
        }
        Ok(())
    })
}

/// Every child entry matches a layer.
fn child_entries(view: &dyn KvRead, findings: &mut Findings) -> Result<()> {
    each(view, Family::Child, |child_key, _| {
        let (parent, child) = split_two("child key", child_key)?;
        let record = layer(view, LayerId::new(child))?;
        if record.and_then(|record| record.parent) != Some(LayerId::new(parent)) {
            findings.wrong(format!("I5: child entry {parent} to {child} matches no layer"), || {
                Fix::delete(Family::Child, child_key)
            });
        }
        Ok(())
    })
}

/// The next layers, as many as the budget holds, and the last key if there may be more.
fn layers(
    check: &mut Check<'_>,
    from: &[u8],
    findings: &mut Findings,
) -> Result<(Part, Option<Vec<u8>>)> {
    let limit = check.at_once(COUNTED_LAYER_BYTES);
    let (mut part, mut last) = (Part::new(), None);
    let counters = &mut check.counted;
    check.view.scan(Family::Layer, from, &EVERYTHING_END, &mut |layer_key, value| {
        let id = LayerId::new(number(layer_key)?);
        findings.report.layers += 1;
        counters.layers += 1;
        counters.next_layer = counters.next_layer.max(id.get() + 1);
        match LayerRecord::decode(value) {
            Ok(record) => {
                counters.dead_layers += u64::from(record.state == LayerState::Dead);
                part.insert(id, Counted::of(record));
            }
            Err(error) => findings.rebuild(&format!("I5: layer {id}: {error}")),
        }
        if part.len() < limit {
            return Ok(ControlFlow::Continue(()));
        }
        last = Some(layer_key.to_vec());
        Ok(ControlFlow::Break(()))
    })?;
    Ok((part, last))
}

/// Counts the children and snapshots of these layers.
fn count_names(view: &dyn KvRead, part: &mut Part) -> Result<()> {
    each(view, Family::Layer, |_, value| {
        let Ok(record) = LayerRecord::decode(value) else { return Ok(()) };
        if let Some(counted) = record.parent.and_then(|parent| part.get_mut(&parent)) {
            counted.children += 1;
        }
        Ok(())
    })?;
    each(view, Family::Snapshot, |snapshot_key, value| {
        let Some((b'i', _)) = snapshot_key.split_first() else { return Ok(()) };
        let Ok(record) = SnapshotRecord::decode(value) else { return Ok(()) };
        if let Some(counted) = part.get_mut(&record.layer) {
            counted.snapshots += 1;
        }
        Ok(())
    })
}

/// Walks the map entries of a range of keys; answers the blocks of data in them.
fn entries(
    view: &dyn KvRead,
    (from, to): (&[u8], &[u8]),
    part: &mut Part,
    findings: &mut Findings,
) -> Result<u64> {
    let mut overlaps = Overlaps::default();
    let mut mapped = 0;
    view.scan(Family::Map, from, to, &mut |map_key, value| {
        let (id, first) = split_two("map key", map_key)?;
        let id = LayerId::new(id);
        findings.report.runs += 1;
        let run = match Run::decode(first, value) {
            Ok(run) => run,
            Err(error) => {
                let lost = undecodable(view, id, first)?;
                let problem = format!("I5: entry at block {first} of layer {id}: {error}");
                findings
                    .missing(&problem, || Fix::put(Family::Map, map_key.to_vec(), lost.encode()));
                if let Some(counted) = part.get_mut(&id) {
                    counted.add(&lost);
                }
                // Nothing may be put over it either.
                overlaps.add(id, lost, findings);
                return Ok(ControlFlow::Continue(()));
            }
        };
        let Some(counted) = part.get_mut(&id) else {
            findings.wrong(
                format!("I5: entry at block {first} of layer {id}, which does not exist"),
                || Fix::delete(Family::Map, map_key),
            );
            return Ok(ControlFlow::Continue(()));
        };
        let blocks = if run.target == Target::Hole { 0 } else { run.count };
        mapped += blocks;
        counted.add(&run);
        counted.blocks += blocks;
        if run.target == Target::Lost {
            findings.report.lost_blocks += run.count;
        }
        overlaps.add(id, run, findings);
        Ok(ControlFlow::Continue(()))
    })?;
    overlaps.finish(findings);
    Ok(mapped)
}

/// What takes the place of an entry that cannot be decoded: all that it may have held is lost.
fn undecodable(view: &dyn KvRead, layer: LayerId, first: u64) -> Result<Run> {
    let mut end = FILE_BYTES_MAX / BLOCK_BYTES_U64;
    let (from, to) = (key::map(layer, first + 1), key::map(LayerId::new(layer.get() + 1), 0));
    view.scan(Family::Map, &from, &to, &mut |next, _| {
        end = split_two("map key", next)?.1;
        Ok(ControlFlow::Break(()))
    })?;
    Ok(Run { first, count: end.saturating_sub(first).max(1), target: Target::Lost })
}

/// What is stored of the layers against what was counted.
fn compare(view: &dyn KvRead, part: &Part, findings: &mut Findings) -> Result<()> {
    for (&id, counted) in part {
        let record = counted.record;
        if let Some(parent) = record.parent {
            let state = layer(view, parent)?.map(|parent| parent.state);
            if state != Some(LayerState::Frozen) {
                findings.rebuild(&format!(
                    "I5: parent {parent} of layer {id} is {state:?}, not frozen"
                ));
            }
            if parent >= id {
                findings.rebuild(&format!("I5: parent {parent} of layer {id} is younger"));
            }
            let entry = key::child(parent, id);
            if view.get(Family::Child, &entry)?.is_none() {
                let problem = format!("I5: layer {id} has no child entry below {parent}");
                findings.wrong(problem, || Fix::put(Family::Child, entry, Vec::new()));
            }
        }
        if counted.overlap {
            // That was told. Its entries are replaced, and the next round counts them.
            continue;
        }
        let right = LayerRecord {
            children: counted.children,
            snapshots: counted.snapshots,
            runs: counted.runs,
            blocks: counted.blocks,
            ..record
        };
        for (what, got, expected) in [
            ("children", record.children, right.children),
            ("snapshots", record.snapshots, right.snapshots),
            (ENTRIES, record.runs, right.runs),
            ("blocks", record.blocks, right.blocks),
        ] {
            let fix = || Fix::put(Family::Layer, key::layer(id), right.encode());
            let problem = || differs(&format!("I5: {what} of layer {id}"), got, expected);
            // Where an entry is gone, other bytes would be read without an error: the log has it.
            if what == ENTRIES && got > expected {
                findings.missing(&problem(), fix);
            } else if got != expected {
                findings.wrong(problem(), fix);
            }
        }
        // With wrong counts the next round decides.
        if record == right {
            fate(view, (id, &record), findings)?;
        }
    }
    Ok(())
}

/// What nothing sees is dead, and what waits for reclaim or collapse is queued.
fn fate(
    view: &dyn KvRead,
    (id, record): (LayerId, &LayerRecord),
    findings: &mut Findings,
) -> Result<()> {
    let queue = |kind| key::queue_layer(kind, id);
    let put = |family, key, value| Write { family, key, value: Some(value) };
    let enqueue = |kind| put(Family::Queue, queue(kind), Vec::new());
    let waits = |kind| Ok::<_, crate::Error>(view.get(Family::Queue, &queue(kind))?.is_some());
    let die = || {
        let dead = LayerRecord { state: LayerState::Dead, ..*record };
        let record = put(Family::Layer, key::layer(id), dead.encode());
        Fix::Write(vec![record, enqueue(key::QUEUE_DEAD)])
    };
    match record.state {
        LayerState::Open(inode) => {
            let owner = view.get(Family::Inode, &key::inode(inode))?;
            let Some(owner) = owner.as_deref().map(InodeRecord::decode) else {
                // A file that goes takes its layer along: only the log tells what it was.
                let problem = format!("I5: file {inode} of open layer {id} is missing");
                findings.missing(&problem, die);
                return Ok(());
            };
            // One that cannot be decoded was found, and may own it.
            let owns = owner.map_or(
                true,
                |record| matches!(record.body, Body::File { layer, .. } if layer == id),
            );
            if !owns {
                let problem =
                    format!("I5: open layer {id} belongs to file {inode}, which does not own it");
                findings.wrong(problem, die);
            }
        }
        LayerState::Dead if !waits(key::QUEUE_DEAD)? => {
            findings.wrong(format!("I5: dead layer {id} is not queued"), || {
                Fix::Write(vec![enqueue(key::QUEUE_DEAD)])
            });
        }
        LayerState::Frozen if record.snapshots == 0 && record.children == 0 => {
            findings.wrong(format!("I5: layer {id} is frozen, and nothing sees it"), die);
        }
        LayerState::Frozen if record.snapshots == 0 && record.children == 1 => {
            let dying = only_child(view, id)?.is_some_and(|child| child.state == LayerState::Dead);
            if !dying && !waits(key::QUEUE_COLLAPSE)? {
                let problem = format!("I5: layer {id} could collapse and is not queued");
                findings.wrong(problem, || Fix::Write(vec![enqueue(key::QUEUE_COLLAPSE)]));
            }
        }
        LayerState::Dead | LayerState::Frozen => {}
    }
    Ok(())
}

fn only_child(view: &dyn KvRead, parent: LayerId) -> Result<Option<LayerRecord>> {
    let mut child = None;
    let prefix = parent.get().to_be_bytes();
    view.scan(Family::Child, &prefix, &crate::kv::prefix_end(&prefix), &mut |child_key, _| {
        child = layer(view, LayerId::new(split_two("child key", child_key)?.1))?;
        Ok(ControlFlow::Break(()))
    })?;
    Ok(child)
}
