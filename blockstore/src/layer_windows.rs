//! Which windows a layer has entries in, and, of a layer with few entries, the entries too: read
//! from the index when a layer is first met.
//!
//! ```text
//! map of the layer   [run][run] . . . [run] . [ hole of any length ] . [run]
//! owned windows       1 1 1          1         1 1 1 1 1 1 1 1         1
//! ```
//! A layer is read entry by entry up to [`LISTED_RUNS_MAX`]; one that has more is walked window
//! by window, with one look-up for each window that has entries. So a chain of many small layers,
//! as containers and commits leave them, costs one short scan a layer, not one a layer and window.

use crate::error::{Error, Result};
use crate::id::LayerId;
use crate::kv::{Family, KvRead, Step};
use crate::own_runs::{OwnWindow, windows_beside};
use crate::record::{Run, Target, key, split_two};
use crate::units::WINDOW_BLOCKS;
use crate::window_set::WindowSet;

/// A layer with at most so many entries is read whole: that costs about as much as 20 look-ups
/// of single windows.
pub(crate) const LISTED_RUNS_MAX: usize = 1024;

/// A run over more windows than this is a hole (of chunks a run ends with its segment, or soon):
/// its inside is not listed, and need not be, as nothing is seen there.
const LISTED_WINDOWS_MAX: u64 = 64;

/// The windows that a layer has entries in.
#[derive(Debug, Default)]
pub(crate) struct Windows {
    /// With any entry.
    pub(crate) owned: WindowSet,
    /// With data, as far as is known: the inside of a long hole is left out, so that nobody
    /// walks through it window by window.
    pub(crate) data: WindowSet,
}

impl Windows {
    pub(crate) fn bound(&mut self, ranges_max: usize) {
        self.owned.bound(ranges_max);
        self.data.bound(ranges_max);
    }

    pub(crate) fn join(&mut self, other: Self) {
        self.owned.join(other.owned);
        self.data.join(other.data);
    }

    /// Adds a run, and answers the window behind it. In the first and the last window of a hole
    /// there may be data beside it.
    fn add(&mut self, run: &Run) -> u64 {
        let (start, behind) = (run.first / WINDOW_BLOCKS, run.end().div_ceil(WINDOW_BLOCKS));
        self.owned.insert(start, behind);
        match run.target {
            Target::Chunks(_) | Target::Lost => self.data.insert(start, behind),
            Target::Hole => {
                self.data.insert(start, start + 1);
                self.data.insert(behind - 1, behind);
            }
        }
        behind
    }
}

/// What was read of a layer.
#[derive(Debug, Default)]
pub(crate) struct Loaded {
    pub(crate) windows: Windows,
    /// Of a layer with few entries, the lists of the windows that these meet or touch.
    pub(crate) lists: Vec<(u64, OwnWindow)>,
}

impl Loaded {
    /// `ranges_max`: of each set of windows; see [`WindowSet::bound`].
    pub(crate) fn read(kv: &dyn KvRead, layer: LayerId, ranges_max: usize) -> Result<Self> {
        Self::read_listing(kv, layer, (LISTED_RUNS_MAX, ranges_max))
    }

    fn read_listing(
        kv: &dyn KvRead,
        layer: LayerId,
        (runs_max, ranges_max): (usize, usize),
    ) -> Result<Self> {
        let mut windows = Windows::default();
        let mut runs = Vec::new();
        let mut is_whole = true;
        // From here on nothing was looked at.
        let mut from = 0;
        let (floor, end) = (key::map(layer, 0), key::map(LayerId::new(layer.get() + 1), 0));
        kv.scan_skipping(Family::Map, (&floor, &floor, &end), &mut |key, value| {
            let (_, first) = split_two("map key", key)?;
            let run = Run::decode(first, value)?;
            if run.end() <= from {
                return Ok(Step::Next);
            }
            if runs.last().is_some_and(|before: &Run| before.end() > run.first) {
                let reason = format!("block {first} is mapped twice");
                return Err(Error::corrupt(format!("map of layer {layer}"), reason));
            }
            let behind = windows.add(&run);
            windows.bound(ranges_max);
            if is_whole && runs.len() < runs_max {
                runs.push(run);
                return Ok(Step::Next);
            }
            is_whole = false;
            // What else begins in these windows adds nothing, but by reaching further, and
            // then it is the last before the next window.
            from = behind.saturating_mul(WINDOW_BLOCKS);
            Ok(Step::Reach(key::map(layer, from)))
        })?;
        let lists = if is_whole { lists(&runs) } else { Vec::new() };
        Ok(Self { windows, lists })
    }
}

/// The lists of the windows that the runs, all that a layer has, meet or touch.
fn lists(runs: &[Run]) -> Vec<(u64, OwnWindow)> {
    let spans = runs.iter().map(windows_beside);
    let short = spans.filter(|(start, end)| end - start <= LISTED_WINDOWS_MAX);
    // The runs are in order, and so are their spans, which overlap.
    let mut listed = 0;
    let windows = short.flat_map(|(start, end)| {
        let fresh = start.max(listed)..end;
        listed = end;
        fresh
    });
    let list = |window: u64| {
        let (start, end) = (window * WINDOW_BLOCKS, (window + 1) * WINDOW_BLOCKS);
        let first = runs.partition_point(|run| run.end() < start);
        let behind = runs.partition_point(|run| run.first <= end);
        (window, OwnWindow::from(&runs[first..behind]))
    };
    windows.map(list).collect()
}

#[cfg(test)]
mod tests;
