//! I5: the layers, their maps, and the blocks that files and snapshots use through them.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::{Findings, Tables, each};
use crate::error::Result;
use crate::id::{InodeId, LayerId};
use crate::kv::{Family, KvRead};
use crate::record::{Body, LayerState, Run, Target, key, split_two};

/// All map entries: by layer, then by first block.
pub(super) type Maps = HashMap<LayerId, BTreeMap<u64, Run>>;

pub(super) fn check(view: &dyn KvRead, tables: &Tables, findings: &mut Findings) -> Result<Maps> {
    let maps = maps(view, tables, findings)?;
    family(view, tables, findings)?;
    owners(tables, findings);
    queues(view, tables, findings)?;
    used(tables, &maps, findings);
    Ok(maps)
}

fn maps(view: &dyn KvRead, tables: &Tables, findings: &mut Findings) -> Result<Maps> {
    let mut maps = Maps::new();
    let mut last: Option<(LayerId, Run)> = None;
    let mut mapped = 0;
    each(view, Family::Map, |key, value| {
        let (layer, first) = split_two("map key", key)?;
        let layer = LayerId::new(layer);
        let run = Run::decode(first, value)?;
        findings.0.runs += 1;
        if matches!(run.target, Target::Chunks(_)) {
            mapped += run.count;
        }
        findings.expect(tables.layers.contains_key(&layer), || {
            format!("I5: entry at block {first} of layer {layer}, which does not exist")
        });
        if let Some((of, before)) = last {
            findings.expect(of != layer || before.end() <= first, || {
                format!("I5: entries of layer {layer} overlap at block {first}")
            });
        }
        last = Some((layer, run));
        maps.entry(layer).or_default().insert(first, run);
        Ok(())
    })?;
    for (id, record) in &tables.layers {
        let (runs, blocks) = maps.get(id).map_or((0, 0), |map| {
            let data = map.values().filter(|run| run.target != Target::Hole);
            (u64::try_from(map.len()).unwrap_or(u64::MAX), data.map(|run| run.count).sum())
        });
        findings.expect_equal(record.runs, runs, || format!("I5: entries of layer {id}"));
        findings.expect_equal(record.blocks, blocks, || format!("I5: blocks of layer {id}"));
    }
    findings.expect_equal(tables.counters.mapped_blocks, mapped, || "I5: mapped blocks".to_owned());
    Ok(maps)
}

/// Parents, children, snapshots.
fn family(view: &dyn KvRead, tables: &Tables, findings: &mut Findings) -> Result<()> {
    let mut children: HashMap<LayerId, u64> = HashMap::new();
    let mut pairs: HashSet<(LayerId, LayerId)> = HashSet::new();
    for (&id, record) in &tables.layers {
        if let Some(parent) = record.parent {
            *children.entry(parent).or_insert(0) += 1;
            pairs.insert((parent, id));
            let state = tables.layers.get(&parent).map(|parent| parent.state);
            findings.expect(state == Some(LayerState::Frozen), || {
                format!("I5: parent {parent} of layer {id} is {state:?}, not frozen")
            });
        }
    }
    let mut stored = 0;
    each(view, Family::Child, |key, _| {
        let (parent, child) = split_two("child key", key)?;
        stored += 1;
        findings.expect(pairs.contains(&(LayerId::new(parent), LayerId::new(child))), || {
            format!("I5: child entry {parent} to {child} matches no layer")
        });
        Ok(())
    })?;
    findings.expect(stored == pairs.len(), || {
        format!("I5: {stored} child entries, {} layers with a parent", pairs.len())
    });
    let mut snapshots: HashMap<LayerId, u64> = HashMap::new();
    for record in tables.snapshots.values() {
        *snapshots.entry(record.layer).or_insert(0) += 1;
    }
    for (id, record) in &tables.layers {
        let of = |counts: &HashMap<LayerId, u64>| counts.get(id).copied().unwrap_or(0);
        findings
            .expect_equal(record.children, of(&children), || format!("I5: children of layer {id}"));
        let expected = of(&snapshots);
        findings
            .expect_equal(record.snapshots, expected, || format!("I5: snapshots of layer {id}"));
    }
    Ok(())
}

/// Files own open layers, snapshots see frozen ones, and no layer is left over.
fn owners(tables: &Tables, findings: &mut Findings) {
    let mut owned: HashMap<LayerId, InodeId> = HashMap::new();
    for (&inode, record) in &tables.inodes {
        if let Body::File { layer, .. } = record.body {
            owned.insert(layer, inode);
            let state = tables.layers.get(&layer).map(|layer| layer.state);
            findings.expect(state == Some(LayerState::Open(inode)), || {
                format!("I5: layer {layer} of file {inode} is {state:?}")
            });
        }
    }
    for (id, record) in &tables.snapshots {
        let state = tables.layers.get(&record.layer).map(|layer| layer.state);
        findings.expect(state == Some(LayerState::Frozen), || {
            format!("I5: layer {} of snapshot {id} is {state:?}", record.layer)
        });
    }
    for (id, record) in &tables.layers {
        if let LayerState::Open(inode) = record.state {
            findings.expect(owned.get(id) == Some(&inode), || {
                format!("I5: open layer {id} belongs to file {inode}, which does not own it")
            });
        }
    }
}

/// What waits for reclaim or collapse is queued, so nothing is stranded.
fn queues(view: &dyn KvRead, tables: &Tables, findings: &mut Findings) -> Result<()> {
    let mut queued: HashSet<Vec<u8>> = HashSet::new();
    each(view, Family::Queue, |key, _| {
        queued.insert(key.to_vec());
        Ok(())
    })?;
    let mut dead = 0;
    for (&id, record) in &tables.layers {
        let waits = |kind| queued.contains(&key::queue_layer(kind, id));
        match record.state {
            LayerState::Dead => {
                dead += 1;
                findings.expect(waits(key::QUEUE_DEAD), || {
                    format!("I5: dead layer {id} is not queued")
                });
            }
            LayerState::Frozen if record.snapshots == 0 && record.children == 0 => {
                findings.add(format!("I5: layer {id} is frozen, and nothing sees it"));
            }
            LayerState::Frozen if record.snapshots == 0 && record.children == 1 => {
                let child = tables.layers.values().find(|child| child.parent == Some(id));
                let dying = child.is_some_and(|child| child.state == LayerState::Dead);
                findings.expect(dying || waits(key::QUEUE_COLLAPSE), || {
                    format!("I5: layer {id} could collapse and is not queued")
                });
            }
            LayerState::Open(_) | LayerState::Frozen => {}
        }
    }
    findings.expect_equal(tables.counters.dead_layers, dead, || "I5: dead layers".to_owned());
    for (id, record) in &tables.snapshots {
        if let Some(at) = record.expires_at {
            let entry = key::queue_expiry(at.as_nanos(), *id);
            findings.expect(queued.contains(&entry), || format!("I7: snapshot {id} never expires"));
        }
    }
    Ok(())
}

/// The used blocks of files and snapshots, counted through their layers.
fn used(tables: &Tables, maps: &Maps, findings: &mut Findings) {
    let mut known: HashMap<LayerId, u64> = HashMap::new();
    for (inode, record) in &tables.inodes {
        if let Body::File { layer, .. } = record.body {
            let counted = visible(tables, maps, layer, &mut known);
            findings.expect_equal(record.used_blocks, counted, || {
                format!("I5: used blocks of file {inode}")
            });
        }
    }
    for (id, record) in &tables.snapshots {
        let counted = visible(tables, maps, record.layer, &mut known);
        findings.expect_equal(record.used_blocks, counted, || {
            format!("I5: used blocks of snapshot {id}")
        });
    }
}

/// Blocks of data that are seen through a layer.
fn visible(tables: &Tables, maps: &Maps, layer: LayerId, known: &mut HashMap<LayerId, u64>) -> u64 {
    // From the lowest layer whose count is not known up to this one.
    let mut path = Vec::new();
    let mut next = Some(layer);
    while let Some(id) = next.filter(|id| !known.contains_key(id)) {
        path.push(id);
        next = tables.layers.get(&id).and_then(|record| record.parent);
    }
    for id in path.into_iter().rev() {
        let parent = tables.layers.get(&id).and_then(|record| record.parent);
        let mut count = parent.and_then(|parent| known.get(&parent).copied()).unwrap_or(0);
        for run in maps.get(&id).into_iter().flat_map(BTreeMap::values) {
            count = count.saturating_sub(seen_in(tables, maps, parent, (run.first, run.end())));
            if run.target != Target::Hole {
                count += run.count;
            }
        }
        known.insert(id, count);
    }
    known.get(&layer).copied().unwrap_or(0)
}

/// Blocks of data in a range, seen through a layer.
fn seen_in(tables: &Tables, maps: &Maps, layer: Option<LayerId>, range: (u64, u64)) -> u64 {
    let mut ranges = vec![range];
    let mut next = layer;
    let mut seen = 0;
    while let Some(id) = next {
        let mut below = Vec::new();
        for (first, end) in ranges {
            let mut at = first;
            let map = maps.get(&id);
            let before = map.and_then(|map| map.range(..first).next_back());
            let inside = map.into_iter().flat_map(|map| map.range(first..end));
            for part in before.into_iter().chain(inside).filter_map(|(_, run)| run.cut(first, end))
            {
                below.extend((at < part.first).then_some((at, part.first)));
                if part.target != Target::Hole {
                    seen += part.count;
                }
                at = part.end();
            }
            below.extend((at < end).then_some((at, end)));
        }
        ranges = below;
        next = tables.layers.get(&id).and_then(|record| record.parent);
    }
    seen
}
