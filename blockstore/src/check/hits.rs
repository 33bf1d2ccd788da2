//! Which files and snapshots damaged chunks and lost blocks are seen in.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::ControlFlow;

use super::snapshots::id_in;
use super::used::own_runs;
use super::{Check, Findings, each, layers, number};
use crate::error::Result;
use crate::id::{ChunkId, InodeId, LayerId};
use crate::kv::{Family, KvRead, prefix_end};
use crate::record::{Body, DirentRecord, InodeRecord, Run, SnapshotRecord, Target, key, split_two};
use crate::types::{HITS_MAX, Hit};
use crate::units::BLOCK_BYTES_U64;

/// Runs of bad blocks that are followed up to their files; more are only counted.
const BAD_RUNS_MAX: usize = 1 << 16;

/// Directories on the way up from a file: more only in a circle.
const PATH_DEPTH_MAX: usize = 4096;

/// Blocks that cannot be read.
#[derive(Clone, Copy, Debug)]
struct Bad {
    first: u64,
    end: u64,
    is_lost: bool,
}

type BadRuns = BTreeMap<LayerId, Vec<Bad>>;

pub(super) fn check(check: &Check<'_>, findings: &mut Findings) -> Result<()> {
    let damaged: BTreeSet<ChunkId> = findings.damaged.iter().copied().collect();
    if damaged.is_empty() && findings.report.lost_blocks == 0 {
        return Ok(());
    }
    let bad = bad_runs(check.view, &damaged, findings)?;
    let mut wanted: Vec<(InodeId, Vec<Hit>)> = Vec::new();
    each(check.view, Family::Inode, |inode_key, value| {
        let inode = InodeId::new(number(inode_key)?);
        let Ok(record) = InodeRecord::decode(value) else { return Ok(()) };
        if let Body::File { layer, .. } = record.body {
            let mut hits = seen(check.view, &bad, layer, record.size_bytes)?;
            room(&wanted, &mut hits, findings);
            if !hits.is_empty() {
                wanted.push((inode, hits));
            }
        }
        Ok(())
    })?;
    let paths = paths(check.view, wanted.iter().map(|(inode, _)| *inode).collect())?;
    for (inode, hits) in wanted {
        let path = paths.get(&inode).cloned().unwrap_or_else(|| format!("inode {inode}"));
        let named = hits.into_iter().map(|hit| Hit { path: path.clone(), ..hit });
        findings.report.hits.extend(named);
    }
    each(check.view, Family::Snapshot, |snapshot_key, value| {
        let Some((b'i', id)) = snapshot_key.split_first() else { return Ok(()) };
        let (id, Ok(record)) = (id_in(id)?, SnapshotRecord::decode(value)) else { return Ok(()) };
        for hit in seen(check.view, &bad, record.layer, record.size_bytes)? {
            let path = String::from_utf8_lossy(&record.path).into_owned();
            if findings.report.hits.len() < HITS_MAX {
                findings.report.hits.push(Hit { path, snapshot: Some(id), ..hit });
            } else {
                findings.report.hits_left_out += 1;
            }
        }
        Ok(())
    })
}

/// Cuts hits to what the report has room for.
fn room(wanted: &[(InodeId, Vec<Hit>)], hits: &mut Vec<Hit>, findings: &mut Findings) {
    let taken: usize = wanted.iter().map(|(_, hits)| hits.len()).sum();
    let left = HITS_MAX.saturating_sub(taken);
    let over = u64::try_from(hits.len().saturating_sub(left)).unwrap_or(u64::MAX);
    findings.report.hits_left_out += over;
    hits.truncate(left);
}

fn bad_runs(
    view: &dyn KvRead,
    damaged: &BTreeSet<ChunkId>,
    findings: &mut Findings,
) -> Result<BadRuns> {
    let (mut bad, mut count) = (BadRuns::new(), 0);
    each(view, Family::Map, |map_key, value| {
        let (layer, first) = split_two("map key", map_key)?;
        let Ok(run) = Run::decode(first, value) else { return Ok(()) };
        let parts = parts(&run, damaged).into_iter().filter(|part| part.is_bad);
        for part in parts {
            if count == BAD_RUNS_MAX {
                findings.report.hits_left_out += 1;
                continue;
            }
            count += 1;
            let is_lost = run.target == Target::Lost;
            let found = Bad { first: part.run.first, end: part.run.end(), is_lost };
            bad.entry(LayerId::new(layer)).or_default().push(found);
        }
        Ok(())
    })?;
    Ok(bad)
}

/// A part of a run of which all or nothing can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) run: Run,
    pub(crate) is_bad: bool,
}

/// Cuts a run where it goes from chunks that can be read to damaged ones.
pub(crate) fn parts(run: &Run, damaged: &BTreeSet<ChunkId>) -> Vec<Part> {
    let chunk = match run.target {
        Target::Hole => return Vec::new(),
        Target::Lost => return vec![Part { run: *run, is_bad: true }],
        Target::Chunks(chunk) => chunk,
    };
    let mut parts = Vec::new();
    let mut push = |from: u64, to: u64, is_bad| {
        let part = run.cut(run.first + from, run.first + to);
        parts.extend(part.map(|run| Part { run, is_bad }));
    };
    let mut at = 0;
    for bad in damaged.range(chunk..chunk.plus(run.count)) {
        let step = bad.raw() - chunk.raw();
        push(at, step, false);
        push(step, step + 1, true);
        at = step + 1;
    }
    push(at, run.count, false);
    parts
}

/// What of the bad blocks is seen through a layer, below a size.
fn seen(view: &dyn KvRead, bad: &BadRuns, layer: LayerId, size_bytes: u64) -> Result<Vec<Hit>> {
    let mut above: Vec<LayerId> = Vec::new();
    let (mut next, mut hits) = (Some(layer), Vec::new());
    while let Some(id) = next {
        for found in bad.get(&id).into_iter().flatten() {
            let mut ranges = vec![(found.first, found.end)];
            for upper in &above {
                ranges = uncovered(view, *upper, &ranges)?;
            }
            for (first, end) in ranges {
                let offset_bytes = first.saturating_mul(BLOCK_BYTES_U64);
                let behind = end.saturating_mul(BLOCK_BYTES_U64).min(size_bytes);
                if offset_bytes < behind {
                    hits.push(Hit {
                        path: String::new(),
                        snapshot: None,
                        offset_bytes,
                        length_bytes: behind - offset_bytes,
                        is_lost: found.is_lost,
                    });
                }
            }
        }
        above.push(id);
        let parent = layers::layer(view, id).unwrap_or_default().and_then(|record| record.parent);
        // Any other is told as damage, and may lead round in a circle.
        next = parent.filter(|parent| *parent < id);
    }
    hits.sort_by_key(|hit| hit.offset_bytes);
    hits.dedup_by(|next, before| {
        let joins = before.is_lost == next.is_lost
            && before.offset_bytes + before.length_bytes == next.offset_bytes;
        if joins {
            before.length_bytes += next.length_bytes;
        }
        joins
    });
    Ok(hits)
}

/// What a layer's own entries do not hide of the ranges.
fn uncovered(view: &dyn KvRead, id: LayerId, ranges: &[(u64, u64)]) -> Result<Vec<(u64, u64)>> {
    let mut left = Vec::new();
    for &(first, end) in ranges {
        let mut at = first;
        own_runs(view, id, (first, end), &mut |run| {
            if at < run.first {
                left.push((at, run.first));
            }
            at = at.max(run.end());
            ControlFlow::Continue(())
        })?;
        left.extend((at < end).then_some((at, end)));
    }
    Ok(left)
}

/// The paths of inodes, one each.
fn paths(view: &dyn KvRead, wanted: BTreeSet<InodeId>) -> Result<HashMap<InodeId, String>> {
    let mut paths = HashMap::new();
    if wanted.is_empty() {
        return Ok(paths);
    }
    let mut found: Vec<(InodeId, InodeId, Vec<u8>)> = Vec::new();
    each(view, Family::Dirent, |entry_key, value| {
        let Ok(entry) = DirentRecord::decode(value) else { return Ok(()) };
        if wanted.contains(&entry.inode) {
            let name = entry_key.get(8..).unwrap_or_default().to_vec();
            found.push((entry.inode, InodeId::new(number(entry_key)?), name));
        }
        Ok(())
    })?;
    for (inode, directory, name) in found {
        let mut names = vec![name];
        let mut at = directory;
        while at != InodeId::ROOT && names.len() < PATH_DEPTH_MAX {
            let Some((parent, name)) = name_of(view, at)? else { break };
            names.push(name);
            at = parent;
        }
        names.reverse();
        let path = String::from_utf8_lossy(&names.join(&b'/')).into_owned();
        paths.entry(inode).or_insert(path);
    }
    Ok(paths)
}

/// A directory's parent and its name there.
fn name_of(view: &dyn KvRead, directory: InodeId) -> Result<Option<(InodeId, Vec<u8>)>> {
    let bytes = view.get(Family::Inode, &key::inode(directory))?;
    let Some(Ok(record)) = bytes.as_deref().map(InodeRecord::decode) else { return Ok(None) };
    let Body::Directory { parent, .. } = record.body else { return Ok(None) };
    let prefix = key::dirent(parent, b"");
    let mut name = None;
    view.scan(Family::Dirent, &prefix, &prefix_end(&prefix), &mut |entry_key, value| {
        let is_it = DirentRecord::decode(value).is_ok_and(|entry| entry.inode == directory);
        name = is_it.then(|| entry_key.get(8..).unwrap_or_default().to_vec());
        Ok(if is_it { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    })?;
    Ok(name.map(|name| (parent, name)))
}
