//! Changing the map of a layer inside a transaction.
//!
//! Two primitives: [`take`] removes a range, splitting the runs at its edges, and answers what
//! was there; [`place`] fills an empty range. Neither touches a chunk's count: the caller
//! releases what it took and does not put elsewhere (I1). Blocks that a file was written are
//! put in by `layer_write.rs`, many at once.
//!
//! Both look for an entry before the range that reaches in. Who works off a layer from its first
//! block on leaves deleted entries behind, and each look back would step over all of them: such a
//! caller passes the entries that it read already ([`take_known`]), or the block before which nothing
//! that this transaction did not change reaches any further ([`runs_behind`] and the like).

use crate::error::{Error, Result};
use crate::id::LayerId;
use crate::kv::Family;
use crate::own_runs::windows_beside;
use crate::record::{Run, Target, key, split_two};
use crate::transaction::{Touched, TouchedWindows, Transaction};
use crate::units::WINDOW_BLOCKS;

/// Runs that one call looks up; callers bound their ranges so that this is never reached.
const RUNS_MAX: usize = 1 << 22;

fn decode(key: &[u8], value: &[u8]) -> Result<Run> {
    let (_, first) = split_two("map key", key)?;
    Run::decode(first, value)
}

/// The layer's entries that meet `[first, end)`, whole, in order, at most `limit`.
pub(crate) fn runs(
    txn: &Transaction<'_>,
    layer: LayerId,
    range: (u64, u64),
    limit: usize,
) -> Result<Vec<Run>> {
    runs_behind(txn, layer, range, (0, limit))
}

/// As [`runs`], where no unchanged entry that begins before the block `behind` reaches behind it.
pub(crate) fn runs_behind(
    txn: &Transaction<'_>,
    layer: LayerId,
    (first, end): (u64, u64),
    (behind, limit): (u64, usize),
) -> Result<Vec<Run>> {
    let mut found = Vec::new();
    if first > 0 {
        let before = key::map(layer, first - 1);
        let (from, floor) = (key::map(layer, 0), key::map(layer, behind));
        if let Some((key, value)) = txn.last_at_or_before(Family::Map, (&from, &floor), &before)? {
            found.extend(Some(decode(&key, &value)?).filter(|run| run.end() > first));
        }
    }
    found.extend(runs_from(txn, layer, (first, end), limit)?);
    Ok(found)
}

/// The layer's entries that begin in `[first, end)`, whole, in order, at most `limit`.
pub(crate) fn runs_from(
    txn: &Transaction<'_>,
    layer: LayerId,
    (first, end): (u64, u64),
    limit: usize,
) -> Result<Vec<Run>> {
    let (from, to) = (key::map(layer, first), key::map(layer, end));
    let entries = txn.range(Family::Map, (&from, &to), limit)?;
    entries.iter().map(|(key, value)| decode(key, value)).collect()
}

/// The layer's entries that meet or touch a window, whole, in order.
pub(crate) fn beside_window(
    txn: &Transaction<'_>,
    layer: LayerId,
    window: u64,
) -> Result<Vec<Run>> {
    let start = window * WINDOW_BLOCKS;
    runs(txn, layer, (start.saturating_sub(1), start + WINDOW_BLOCKS + 1), RUNS_MAX)
}

/// Removes the range `[first, end)` from the layer's map and answers the runs that were there.
pub(crate) fn take(
    txn: &mut Transaction<'_>,
    layer: LayerId,
    range: (u64, u64),
) -> Result<Vec<Run>> {
    take_behind(txn, layer, range, 0)
}

/// As [`take`], where no unchanged entry that begins before the block `behind` reaches behind it.
pub(crate) fn take_behind(
    txn: &mut Transaction<'_>,
    layer: LayerId,
    range: (u64, u64),
    behind: u64,
) -> Result<Vec<Run>> {
    let known = runs_behind(txn, layer, range, (behind, RUNS_MAX))?;
    take_known(txn, layer, range, &known)
}

/// As [`take`], of the entries that meet the range, which the caller has read.
pub(crate) fn take_known(
    txn: &mut Transaction<'_>,
    layer: LayerId,
    (first, end): (u64, u64),
    known: &[Run],
) -> Result<Vec<Run>> {
    let mut taken = Vec::new();
    let mut runs_delta: i64 = 0;
    let mut blocks_gone = 0;
    let mut stale: Option<(u64, u64)> = None;
    for run in known {
        let Some(part) = run.cut(first, end) else {
            continue;
        };
        txn.delete(Family::Map, key::map(layer, run.first));
        runs_delta -= 1;
        let (start, behind) = windows_beside(run);
        stale = Some((stale.map_or(start, |(first, _)| first), behind));
        let rests = [run.cut(run.first, first), run.cut(end, run.end())];
        for rest in rests.into_iter().flatten() {
            txn.put(Family::Map, key::map(layer, rest.first), rest.encode());
            runs_delta += 1;
        }
        if part.target != Target::Hole {
            blocks_gone += part.count;
        }
        taken.push(part);
    }
    if let (Some(head), Some(tail), Some(stale)) = (taken.first(), taken.last(), stale) {
        let mut record = txn.layer(layer)?;
        record.runs = record.runs.saturating_add_signed(runs_delta);
        record.blocks = record.blocks.saturating_sub(blocks_gone);
        txn.put_layer(layer, &record);
        let counters = txn.counters();
        counters.mapped_blocks = counters.mapped_blocks.saturating_sub(blocks_gone);
        let empty = (first.div_ceil(WINDOW_BLOCKS), end / WINDOW_BLOCKS);
        touch(txn, layer, (head.first, tail.end()), (false, empty, stale));
    }
    Ok(taken)
}

/// Puts a run where the layer's map has nothing, joining it to its neighbours if it continues
/// them.
pub(crate) fn place(txn: &mut Transaction<'_>, layer: LayerId, run: Run) -> Result<()> {
    place_behind(txn, layer, run, 0)
}

/// As [`place`], where no unchanged entry that begins before the block `behind` reaches behind it.
pub(crate) fn place_behind(
    txn: &mut Transaction<'_>,
    layer: LayerId,
    run: Run,
    behind: u64,
) -> Result<()> {
    let mut joined = run;
    let mut runs_delta: i64 = 1;
    let (start, end) = (run.first.saturating_sub(1), run.end().saturating_add(1));
    for other in runs_behind(txn, layer, (start, end), (behind, RUNS_MAX))? {
        if other.end() == run.first && other.target.continues(other.count, run.target) {
            txn.delete(Family::Map, key::map(layer, other.first));
            joined = Run { first: other.first, count: other.count + joined.count, ..other };
            runs_delta -= 1;
        } else if other.first == run.end() && run.target.continues(run.count, other.target) {
            txn.delete(Family::Map, key::map(layer, other.first));
            joined.count += other.count;
            runs_delta -= 1;
        } else if other.cut(run.first, run.end()).is_some() {
            return Err(Error::corrupt(
                format!("map of layer {layer}"),
                format!("blocks {} to {} are mapped already", run.first, run.end()),
            ));
        }
    }
    txn.put(Family::Map, key::map(layer, joined.first), joined.encode());
    let blocks = if run.target == Target::Hole { 0 } else { run.count };
    let mut record = txn.layer(layer)?;
    record.runs = record.runs.saturating_add_signed(runs_delta);
    record.blocks += blocks;
    txn.put_layer(layer, &record);
    txn.counters().mapped_blocks += blocks;
    touch(txn, layer, (run.first, run.end()), (blocks > 0, (0, 0), windows_beside(&joined)));
    Ok(())
}

fn touch(
    txn: &mut Transaction<'_>,
    layer: LayerId,
    (first, end): (u64, u64),
    (has_data, empty, stale): (bool, (u64, u64), (u64, u64)),
) {
    let (start, end) = (first / WINDOW_BLOCKS, end.div_ceil(WINDOW_BLOCKS));
    let windows = vec![TouchedWindows { start, end, has_data }];
    txn.touch_windows(Touched { layer, windows, empty, stale: vec![stale], known: Vec::new() });
}

/// Releases every chunk that the runs name.
pub(crate) fn release(txn: &mut Transaction<'_>, taken: &[Run]) -> Result<()> {
    for run in taken {
        if let Target::Chunks(first) = run.target {
            txn.release_run(first, run.count)?;
        }
    }
    Ok(())
}
