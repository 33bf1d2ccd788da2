//! Back to a sound store, offline: what cannot be read is given up, the rest is counted anew.
//! While there is a problem that only a new index solves, nothing is changed.
//!
//! ```text
//! check with what would put it right --> changes, committed in slices --> check again, until
//! nothing is found, or nothing that a change solves
//! ```
//! A block whose chunk is damaged, at a second look too, becomes *lost*, unless its content is stored a second time, as
//! after it was written again. A file with damage in it is written anew without it. Every change
//! is committed as any other is, so a crash leaves a store that can be repaired again.

use std::collections::BTreeSet;
use std::io::ErrorKind;

use crate::check::{self, Findings, Fix, SecondLook, parts};
use crate::commit::{Weight, commit};
use crate::compact;
use crate::core::Core;
use crate::disk::FileName;
use crate::error::{Error, Result};
use crate::id::{ChunkId, ContentHash, InodeId, LayerId, SegmentId};
use crate::index_copy;
use crate::kind::FileKind;
use crate::kv::{Family, Write};
use crate::name::Name;
use crate::namespace;
use crate::paths;
use crate::progress::Progress;
use crate::record::{Body, LayerRecord, Run, Target, key, split_two};
use crate::segment_format::restore_block;
use crate::store::Store;
use crate::transaction::Transaction;
use crate::types::RepairReport;

/// Rounds after which a repair gives up: each solves what follows from the one before, which goes
/// a few steps deep, or 65,536 problems of one kind.
const ROUNDS_MAX: usize = 1000;

/// Changes of one commit.
const SLICE: usize = 256;

/// Where inodes without a name get one.
const LOST_AND_FOUND: &[u8] = b"lost+found";

/// What a repair may give up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GiveUp {
    /// Blocks whose stored bytes the disk cannot read, or reads as something else. What is
    /// missing otherwise may come back: with a folder that is mounted, or by a rebuild.
    Damaged,
    /// Whatever is missing, too.
    Missing,
}

impl Store {
    /// Puts right what [`Store::check`] with data finds, as far as it can: blocks whose stored
    /// bytes are damaged become lost, counts are counted anew, inodes without a name go to
    /// `lost+found`. Only for a store that nobody uses: what is cached is not put right, so close
    /// it afterwards. Reads all that is stored, more than once.
    ///
    /// # Errors
    /// `Busy` for a store with background threads, `RepairStopped` when something cannot be read
    /// that may be whole, and those of a commit.
    pub fn repair(&self) -> Result<RepairReport> {
        repair(&self.core, GiveUp::Damaged)
    }

    /// Like [`Store::repair`], but gives up whatever is missing, too: blocks in segment files that
    /// are gone, and what only a rebuild of the index could restore. For a store that a rebuild
    /// did not help, and files that are gone for good.
    ///
    /// # Errors
    /// As [`Store::repair`]; files that are there and cannot be opened are no missing ones.
    pub fn repair_giving_up(&self) -> Result<RepairReport> {
        repair(&self.core, GiveUp::Missing)
    }
}

/// See the module's text.
pub(crate) fn repair(core: &Core, extent: GiveUp) -> Result<RepairReport> {
    if core.options.background {
        return Err(Error::Busy {
            what: "the store".to_owned(),
            reason: "it is being served; stop the server, then repair".to_owned(),
        });
    }
    core.committer.healthy()?;
    let mut report = RepairReport::default();
    let progress = Progress::default();
    let mut data = true;
    for round in 0..ROUNDS_MAX {
        let mut findings = Findings::with_fixes();
        check::run(core, data, &mut findings, &progress)?;
        if round == 0 {
            report.before = findings.report.clone();
        }
        // What such problems make look superfluous may be what a rebuild brings back, and a change
        // made now would be in the log: the rebuild would make it, too.
        if findings.hopeless > 0 && extent == GiveUp::Damaged {
            break;
        }
        let left_out = findings.report.damaged_chunks;
        // With more damage than one round takes, the next looks for it.
        data = u64::try_from(findings.damaged.len()).is_ok_and(|found| found < left_out);
        let (done, is_progress) = if findings.damaged.is_empty() {
            let done = apply(core, findings)?;
            (done, done > 0)
        } else {
            let damaged = really_damaged(core, &findings.damaged, extent)?;
            let done = give_up(core, &damaged, &mut report)?;
            (done, done > 0 || damaged.len() < findings.damaged.len())
        };
        report.fixes += done;
        if !is_progress {
            break;
        }
    }
    report.after = check::check(core, true, &progress)?;
    compact::checkpoint(core)?;
    Ok(report)
}

/// Those chunks that a second look finds damaged, too.
fn really_damaged(core: &Core, found: &[ChunkId], extent: GiveUp) -> Result<BTreeSet<ChunkId>> {
    let found: BTreeSet<ChunkId> = found.iter().copied().collect();
    let ids: BTreeSet<SegmentId> = found.iter().map(|chunk| chunk.segment()).collect();
    let files: BTreeSet<FileName> =
        ids.into_iter().filter_map(|id| core.segments.file_of(id)).collect();
    let mut missing = BTreeSet::new();
    for name in files {
        match core.disk.open(name) {
            Ok(_) => {}
            Err(Error::Io { source, .. })
                if source.kind() == ErrorKind::NotFound && extent == GiveUp::Missing =>
            {
                missing.insert(name);
            }
            Err(error) => return Err(stopped(name.to_string(), &error)),
        }
    }
    let mut look = SecondLook::new(core);
    let mut damaged = BTreeSet::new();
    for chunk in found {
        let file = core.segments.file_of(chunk.segment());
        let is_missing = file.is_some_and(|name| missing.contains(&name));
        if is_missing
            || look.is_damaged(chunk).map_err(|error| stopped(format!("chunk {chunk}"), &error))?
        {
            damaged.insert(chunk);
        } else {
            core.segments.forget_damaged(chunk);
        }
    }
    Ok(damaged)
}

fn stopped(place: String, error: &Error) -> Error {
    Error::RepairStopped { place, reason: error.to_string() }
}

/// Makes the changes of a round, and answers how many.
fn apply(core: &Core, findings: Findings) -> Result<u64> {
    let (mut changes, mut moves, mut copies) = (Vec::new(), Vec::new(), false);
    for fix in findings.fixes.unwrap_or_default() {
        match fix {
            Fix::Move(name) => moves.push(name),
            Fix::CopyIndex => copies = true,
            other => changes.push(other),
        }
    }
    let mut done = 0;
    if changes.is_empty() {
        // Counts are right now, as moving needs them.
        moves.dedup();
        for name in moves {
            done += u64::from(compact::renew(core, name)?);
        }
        if copies || done > 0 {
            // A log file with damage in it is of no use to a rebuild: a copy makes it dispensable.
            index_copy::renew(core, &mut |_| true)?;
            done += 1;
        }
        return Ok(done);
    }
    // The counters first: to give an inode a name may make `lost+found`, with a number from them.
    changes.sort_by_key(|fix| !matches!(fix, Fix::Counters(_)));
    while !changes.is_empty() {
        let rest = changes.split_off(changes.len().min(SLICE));
        let slice = std::mem::replace(&mut changes, rest);
        done += u64::try_from(slice.len()).unwrap_or(0);
        commit(core, Weight { bytes: 0, alone: true }, move |txn| {
            // A store that is full must not stay damaged: what is added is little.
            txn.frees();
            slice.into_iter().try_for_each(|fix| make(txn, fix))
        })?;
    }
    Ok(done)
}

fn make(txn: &mut Transaction<'_>, fix: Fix) -> Result<()> {
    match fix {
        Fix::Write(writes) => {
            for Write { family, key, value } in writes {
                match value {
                    Some(value) => txn.put(family, key, value),
                    None => txn.delete(family, key),
                }
            }
            Ok(())
        }
        Fix::Replace(layer, old, new) => replace(txn, layer, &old, &new),
        Fix::Adopt(inode) => adopt(txn, inode),
        Fix::Counters(counters) => {
            *txn.counters() = counters;
            // A transaction that changes nothing else would not be written.
            txn.put(Family::Meta, key::META_COUNTERS.to_vec(), counters.encode());
            Ok(())
        }
        Fix::Move(_) | Fix::CopyIndex => Ok(()),
    }
}

/// Puts runs of the same blocks in the place of others, and keeps the layer's count of entries.
fn replace(txn: &mut Transaction<'_>, layer: LayerId, old: &[Run], new: &[Run]) -> Result<()> {
    for run in old {
        txn.delete(Family::Map, key::map(layer, run.first));
    }
    for run in new {
        txn.put(Family::Map, key::map(layer, run.first), run.encode());
    }
    if let Some(bytes) = txn.get(Family::Layer, &key::layer(layer))? {
        let mut record = LayerRecord::decode(&bytes)?;
        let count = |runs: &[Run]| u64::try_from(runs.len()).unwrap_or(0);
        record.runs = (record.runs + count(new)).saturating_sub(count(old));
        txn.put_layer(layer, &record);
    }
    Ok(())
}

/// Gives an inode a name in `lost+found`.
fn adopt(txn: &mut Transaction<'_>, inode: InodeId) -> Result<()> {
    let folder = Name::new(LOST_AND_FOUND)?;
    let directory = match paths::entry_in(txn, InodeId::ROOT, &folder)? {
        // In the reserve, if need be.
        None => namespace::new_directory(txn, InodeId::ROOT, &folder)?,
        Some(_) => paths::directories_or_make(txn, &[folder])?,
    };
    let name = Name::new(format!("inode-{inode}").as_bytes())?;
    let mut record = txn.inode(inode)?;
    let is_directory = record.kind() == FileKind::Directory;
    if let Body::Directory { parent, .. } = &mut record.body {
        *parent = directory;
        txn.put_inode(inode, &record);
    }
    if paths::entry_in(txn, directory, &name)?.is_some() {
        return Err(Error::exists(format!("lost+found/inode-{inode}")));
    }
    paths::enter(txn, directory, &name, inode, is_directory)
}

/// Runs that name damaged chunks, with their layers.
type BadRuns = Vec<(LayerId, Run)>;

/// Makes blocks lost whose chunks are damaged, or maps them to another chunk of the same content.
fn give_up(core: &Core, damaged: &BTreeSet<ChunkId>, report: &mut RepairReport) -> Result<u64> {
    let mut done = 0;
    let mut from = Vec::new();
    loop {
        let (slice, next) = bad_runs(core, damaged, &from)?;
        for (layer, run) in slice {
            let new = without_damage(core, &run, damaged)?;
            for part in &new {
                match part.target {
                    Target::Lost => report.lost_blocks += part.count,
                    Target::Chunks(chunk) if run_names(&run, part) != Some(chunk) => {
                        report.healed_blocks += part.count;
                    }
                    Target::Chunks(_) | Target::Hole => {}
                }
            }
            done += 1;
            commit(core, Weight { bytes: 0, alone: true }, move |txn| {
                txn.frees();
                exchange(txn, layer, run, &new)
            })?;
        }
        match next {
            Some(next) => from = next,
            None => return Ok(done),
        }
    }
}

/// The chunk that the run names where the part begins.
fn run_names(run: &Run, part: &Run) -> Option<ChunkId> {
    match run.target.skip(part.first - run.first) {
        Target::Chunks(chunk) => Some(chunk),
        Target::Hole | Target::Lost => None,
    }
}

/// The next runs that name damaged chunks, and where to go on.
fn bad_runs(
    core: &Core,
    damaged: &BTreeSet<ChunkId>,
    from: &[u8],
) -> Result<(BadRuns, Option<Vec<u8>>)> {
    let (mut found, mut next) = (BadRuns::new(), None);
    core.kv.scan(
        Family::Map,
        from,
        &crate::kv::prefix_end(&[0xff; 8]),
        &mut |map_key, value| {
            let (layer, first) = split_two("map key", map_key)?;
            if found.len() == SLICE {
                next = Some(map_key.to_vec());
                return Ok(std::ops::ControlFlow::Break(()));
            }
            if let Ok(run) = Run::decode(first, value)
                && let Target::Chunks(chunk) = run.target
                && damaged.range(chunk..chunk.plus(run.count)).next().is_some()
            {
                found.push((LayerId::new(layer), run));
            }
            Ok(std::ops::ControlFlow::Continue(()))
        },
    )?;
    Ok((found, next))
}

/// The run in parts that can be read, or are lost.
fn without_damage(core: &Core, run: &Run, damaged: &BTreeSet<ChunkId>) -> Result<Vec<Run>> {
    let mut new: Vec<Run> = Vec::new();
    for part in parts(run, damaged) {
        let target = match part.run.target {
            Target::Chunks(chunk) if part.is_bad => {
                same_content(core, chunk)?.map_or(Target::Lost, Target::Chunks)
            }
            other => other,
        };
        match new.last_mut() {
            Some(last) if last.target.continues(last.count, target) => {
                last.count += part.run.count;
            }
            _ => new.push(Run { target, ..part.run }),
        }
    }
    Ok(new)
}

/// Another chunk of the content that a damaged one should have, if its hash is known and such a
/// chunk can be read.
fn same_content(core: &Core, damaged: ChunkId) -> Result<Option<ChunkId>> {
    let Some((_, hash)) =
        core.segments.entries(damaged, 1).ok().and_then(|entries| entries.into_iter().next())
    else {
        return Ok(None);
    };
    let found = core.dedup.find(core.kv.as_ref(), &core.segments, &[&hash])?;
    let other = found.into_iter().flatten().find(|chunk| *chunk != damaged);
    Ok(other.filter(|chunk| is_readable(core, *chunk, &hash)))
}

fn is_readable(core: &Core, chunk: ChunkId, hash: &ContentHash) -> bool {
    let Ok(entries) = core.segments.entries(chunk, 1) else { return false };
    let Some((Some(place), _)) = entries.into_iter().next() else { return false };
    let stored = core.segments.stored(chunk, &place);
    let block = stored.and_then(|stored| restore_block(&place, &stored));
    block.is_ok_and(|block| ContentHash::of(&block) == *hash)
}

/// Replaces a run, and keeps the counts of the chunks that it named and names.
fn exchange(txn: &mut Transaction<'_>, layer: LayerId, old: Run, new: &[Run]) -> Result<()> {
    for part in new {
        let before = run_names(&old, part);
        let now = match part.target {
            Target::Chunks(chunk) => Some(chunk),
            Target::Hole | Target::Lost => None,
        };
        if before == now {
            continue;
        }
        for step in 0..part.count {
            if let Some(chunk) = before.map(|chunk| chunk.plus(step))
                // Counts may be wrong: a later round sets them right.
                && txn.count(chunk)? > 0
            {
                txn.release(chunk)?;
            }
            if let Some(chunk) = now {
                txn.retain(chunk.plus(step))?;
            }
        }
    }
    replace(txn, layer, &[old], new)
}
