//! Writing blocks into the open layer of a file, window by window.
//!
//! ```text
//! ground (before the transaction)     in the transaction
//! own entries of touched windows  --> copies, changed in memory --> deletes and puts of what
//! what the layers below show there    (split, replaced, joined)     differs, counts released
//! ```
//! The ground is looked up under the flush lock of the file. What is below is frozen and still
//! holds in the transaction. The own entries hold as long as no commit has changed the layer
//! since, which the layer in memory tells, and nothing before in the same transaction has; else
//! they are read again through the transaction.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use crate::core::Core;
use crate::error::{Error, Result};
use crate::flush::{Dedup, Prepared, find_or_add};
use crate::id::LayerId;
use crate::kv::Family;
use crate::mapping;
use crate::own_runs::{OwnWindow, windows_beside};
use crate::record::{Body, InodeRecord, LayerRecord, Run, Target, key};
use crate::resolve::{LayerMoment, Resolver};
use crate::transaction::{Touched, TouchedWindows, Transaction};
use crate::units::WINDOW_BLOCKS;
use crate::window::Window;

/// What the touched windows of a file's open layer hold, and what is seen below them.
#[derive(Debug, Default)]
pub(crate) struct Ground {
    moment: Option<LayerMoment>,
    windows: BTreeMap<u64, GroundWindow>,
}

#[derive(Debug)]
struct GroundWindow {
    own: OwnWindow,
    below: Arc<Window>,
}

impl Ground {
    /// Looks up the windows of these blocks; the caller holds the flush lock of the layer's
    /// file.
    pub(crate) fn look_up(core: &Core, layer: LayerId, prepared: &Prepared) -> Result<Self> {
        Self::of_blocks(&core.resolver, layer, prepared.blocks.iter().map(|(block, _)| *block))
    }

    fn of_blocks(
        resolver: &Resolver,
        layer: LayerId,
        blocks: impl Iterator<Item = u64>,
    ) -> Result<Self> {
        // Before the entries: a change in between outdates them.
        let moment = resolver.moment(layer)?;
        let parent = moment.parent();
        let mut windows = BTreeMap::new();
        for window in blocks.map(|block| block / WINDOW_BLOCKS) {
            if let Entry::Vacant(entry) = windows.entry(window) {
                let own = resolver.own_window(layer, window)?;
                let below = match parent {
                    Some(parent) => resolver.window(parent, window)?,
                    None => Arc::default(),
                };
                entry.insert(GroundWindow { own, below });
            }
        }
        Ok(Self { moment: Some(moment), windows })
    }

    /// The layer's own entries are still those that were looked up.
    fn holds(&self, txn: &Transaction<'_>, layer: LayerId) -> bool {
        !txn.has_changed_layer(layer)
            && self.moment.as_ref().is_some_and(|moment| moment.is_current(layer))
    }
}

/// Writes prepared blocks (in order) into the file's open layer and keeps its count of used
/// blocks. The caller puts the record.
pub(crate) fn write_blocks(
    txn: &mut Transaction<'_>,
    record: &mut InodeRecord,
    prepared: Prepared,
    ground: &Ground,
) -> Result<Dedup> {
    let Body::File { layer, .. } = record.body else {
        return Err(Error::invalid("this inode is not a file"));
    };
    let mut dedup = Dedup::default();
    let targets = find_or_add(txn, prepared, &mut dedup)?;
    let used = write_targets(txn, layer, &targets, ground)?;
    record.used_blocks = record.used_blocks.saturating_add_signed(used);
    Ok(dedup)
}

/// Maps the blocks (in order) in the layer and releases what they named before; answers how
/// many more blocks of data are seen than before.
fn write_targets(
    txn: &mut Transaction<'_>,
    layer: LayerId,
    targets: &[(u64, Target)],
    ground: &Ground,
) -> Result<i64> {
    debug_assert!(targets.is_sorted_by(|a, b| a.0 < b.0), "blocks are in order");
    let record = txn.layer(layer)?;
    let holds = ground.holds(txn, layer);
    let nothing = Arc::new(Window::default());
    let mut edit = Edit { has_below: record.parent.is_some(), ..Edit::default() };
    let mut written: Vec<Written> = Vec::new();
    for part in targets.chunk_by(|a, b| a.0 / WINDOW_BLOCKS == b.0 / WINDOW_BLOCKS) {
        let Some(window) = part.first().map(|(block, _)| block / WINDOW_BLOCKS) else {
            continue;
        };
        let known = ground.windows.get(&window);
        let runs = match known.filter(|_| holds) {
            Some(known) => known.own.to_vec(),
            None => mapping::beside_window(txn, layer, window)?,
        };
        let mut current = Written { window, runs, has_data: false };
        if let Some(before) = written.last() {
            current.follow(before);
        }
        let below = known.map_or(&nothing, |known| &known.below);
        edit.write_window(&mut current, below, part);
        written.push(current);
    }
    let used = edit.used;
    edit.finish(txn, (layer, record), written)?;
    Ok(used)
}

/// A window under change: the entries that meet or touch it.
struct Written {
    window: u64,
    runs: Vec<Run>,
    has_data: bool,
}

impl Written {
    fn start(&self) -> u64 {
        self.window * WINDOW_BLOCKS
    }

    fn end(&self) -> u64 {
        self.start() + WINDOW_BLOCKS
    }

    /// Takes over what the change of the window before made of the entries that both know.
    fn follow(&mut self, before: &Self) {
        let known_to_both = self.runs.partition_point(|run| run.first <= before.end());
        let start = self.start();
        let shared = before.runs.partition_point(|run| run.end() < start);
        self.runs.splice(..known_to_both, before.runs[shared..].iter().copied());
    }

    /// The same from the window behind, once all are changed.
    fn precede(&mut self, behind: &Self) {
        let known_to_both = self.runs.partition_point(|run| run.end() < behind.start());
        let end = self.end();
        let shared = behind.runs.partition_point(|run| run.first <= end);
        self.runs.splice(known_to_both.., behind.runs[..shared].iter().copied());
    }
}

/// What a write changes of a layer's map.
#[derive(Default)]
struct Edit {
    has_below: bool,
    /// By their first block: the entry before and after.
    changes: BTreeMap<u64, (Option<Run>, Option<Run>)>,
    /// Runs of chunks that are no longer named, once for each block.
    taken: Vec<Run>,
    /// Blocks of data that are seen more than before.
    used: i64,
}

impl Edit {
    fn write_window(&mut self, current: &mut Written, below: &Window, part: &[(u64, Target)]) {
        let mut next: Option<Run> = None;
        for &(block, target) in part {
            match &mut next {
                Some(run) if run.end() == block && run.target.continues(run.count, target) => {
                    run.count += 1;
                }
                _ => {
                    let run = Run { first: block, count: 1, target };
                    if let Some(ready) = next.replace(run) {
                        self.write_run(current, below, ready);
                    }
                }
            }
        }
        if let Some(ready) = next {
            self.write_run(current, below, ready);
        }
    }

    fn write_run(&mut self, current: &mut Written, below: &Window, run: Run) {
        let range = (run.first, run.end());
        let data = visible_data(&current.runs, (below, current.start()), range);
        let seen: u64 = data.iter().map(|(first, end)| end - first).sum();
        self.used -= i64::try_from(seen).unwrap_or(i64::MAX);
        if matches!(run.target, Target::Chunks(_)) {
            self.used += i64::try_from(run.count).unwrap_or(i64::MAX);
            current.has_data = true;
            self.replace(&mut current.runs, range, Some(run));
            return;
        }
        // A hole stays a hole without an entry, and with nothing below no entry is a hole.
        for range in data {
            self.replace(
                &mut current.runs,
                range,
                run.cut(range.0, range.1).filter(|_| self.has_below),
            );
        }
    }

    /// Puts `new`, or nothing, in the place of what the range holds.
    fn replace(&mut self, runs: &mut Vec<Run>, (first, end): (u64, u64), new: Option<Run>) {
        // Those that meet or touch the range.
        let from = runs.partition_point(|run| run.end() < first);
        let to = runs.partition_point(|run| run.first <= end);
        let old = &runs[from..to];
        let mut now: Vec<Run> = Vec::with_capacity(3);
        let heads = old.iter().filter_map(|run| run.cut(run.first, first));
        let tails = old.iter().filter_map(|run| run.cut(end, run.end()));
        for run in heads.chain(new).chain(tails) {
            join(&mut now, run);
        }
        let gone = old.iter().filter_map(|run| run.cut(first, end));
        self.taken.extend(gone.filter(|run| run.target != Target::Hole));
        for run in old {
            let change = self.changes.entry(run.first).or_insert((Some(*run), None));
            change.1 = None;
        }
        for run in &now {
            self.changes.entry(run.first).or_insert((None, None)).1 = Some(*run);
        }
        runs.splice(from..to, now);
    }

    /// Writes what differs, and tells the caches.
    fn finish(
        self,
        txn: &mut Transaction<'_>,
        (layer, mut record): (LayerId, LayerRecord),
        mut written: Vec<Written>,
    ) -> Result<()> {
        mapping::release(txn, &self.taken)?;
        let mut stale: Vec<(u64, u64)> = Vec::new();
        let (mut blocks_gone, mut blocks_new) = (0, 0);
        let differing = self.changes.into_iter().filter(|(_, (old, new))| old != new);
        for (first, (old, new)) in differing {
            match new {
                Some(new) => txn.put(Family::Map, key::map(layer, first), new.encode()),
                None => txn.delete(Family::Map, key::map(layer, first)),
            }
            record.runs += u64::from(new.is_some());
            record.runs = record.runs.saturating_sub(u64::from(old.is_some()));
            blocks_gone += old.map_or(0, data_blocks);
            blocks_new += new.map_or(0, data_blocks);
            for run in old.iter().chain(&new) {
                add_stale(&mut stale, windows_beside(run));
            }
        }
        if stale.is_empty() {
            return Ok(());
        }
        record.blocks = (record.blocks + blocks_new).saturating_sub(blocks_gone);
        txn.put_layer(layer, &record);
        let counters = txn.counters();
        counters.mapped_blocks = (counters.mapped_blocks + blocks_new).saturating_sub(blocks_gone);
        for index in (1..written.len()).rev() {
            if let [before, behind] = &mut written[index - 1..=index] {
                before.precede(behind);
            }
        }
        txn.touch_windows(touched(layer, written, stale));
        Ok(())
    }
}

fn touched(layer: LayerId, written: Vec<Written>, stale: Vec<(u64, u64)>) -> Touched {
    let mut windows: Vec<TouchedWindows> = Vec::new();
    for Written { window, has_data, .. } in &written {
        match windows.last_mut() {
            Some(last) if last.end == *window && last.has_data == *has_data => last.end += 1,
            _ => windows.push(TouchedWindows {
                start: *window,
                end: window + 1,
                has_data: *has_data,
            }),
        }
    }
    let known = written.into_iter().map(|part| (part.window, part.runs.into())).collect();
    Touched { layer, windows, empty: (0, 0), stale, known }
}

fn data_blocks(run: Run) -> u64 {
    if run.target == Target::Hole { 0 } else { run.count }
}

/// Adds a run behind the others, joined to the last if it continues it.
fn join(runs: &mut Vec<Run>, run: Run) {
    match runs.last_mut() {
        Some(last) if last.end() == run.first && last.target.continues(last.count, run.target) => {
            last.count += run.count;
        }
        _ => runs.push(run),
    }
}

/// Adds a range that begins no earlier than those before. Ranges that only touch stay apart: as
/// one they could be so long that all of the layer is dropped.
fn add_stale(stale: &mut Vec<(u64, u64)>, (start, end): (u64, u64)) {
    match stale.last_mut() {
        Some(last) if last.0 <= start && start < last.1 => last.1 = last.1.max(end),
        _ => stale.push((start, end)),
    }
}

/// The parts of `[first, end)` that read as data: own entries over the window below, which
/// begins at block `start`.
fn visible_data(
    own: &[Run],
    (below, start): (&Window, u64),
    (first, end): (u64, u64),
) -> Vec<(u64, u64)> {
    let mut parts = Vec::new();
    let show_below = |parts: &mut Vec<(u64, u64)>, (from, to): (u64, u64)| {
        let found = below.data_in(from - start, to - start);
        parts.extend(found.map(|run| (run.first + start, run.end() + start)));
    };
    let mut at = first;
    let reaching = own.partition_point(|run| run.end() <= first);
    for part in own[reaching..].iter().map_while(|run| run.cut(first, end)) {
        show_below(&mut parts, (at, part.first));
        if part.target != Target::Hole {
            parts.push((part.first, part.end()));
        }
        at = part.end();
    }
    show_below(&mut parts, (at, end));
    parts
}

#[cfg(test)]
mod tests;
