//! A window of a file as it reads: the unit in which resolved layers are cached.
//!
//! One list of entries goes over a window as an overlay, run by run. The lists of many layers are
//! laid under each other block by block, from the highest down, until no block is open
//! ([`Canvas`]).

use crate::record::{Run, Target};
use crate::units::WINDOW_BLOCKS;

/// A window with all layers resolved: runs of chunks and of lost blocks in order; what is between
/// them is zeros.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Window {
    /// `first` counts from the window's start.
    runs: Vec<Run>,
}

impl Window {
    /// The runs, first blocks counted from the window's start; holes are left out.
    pub(crate) fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Bytes that the runs take in memory.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let bytes = self.runs.capacity() * size_of::<Run>();
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }

    /// The parts of the runs in `[first, end)`, counted from the window's start.
    pub(crate) fn data_in(&self, first: u64, end: u64) -> impl Iterator<Item = Run> {
        let reaching = self.runs.partition_point(|run| run.end() <= first);
        self.runs[reaching..].iter().map_while(move |run| run.cut(first, end))
    }

    /// What a block is, and for how many blocks from there on that goes on: chunks in sequence,
    /// lost blocks, or zeros.
    pub(crate) fn at(&self, block: u64) -> (Target, u64) {
        match self.data_in(block, WINDOW_BLOCKS).next() {
            Some(run) if run.first == block => (run.target, run.count),
            Some(run) => (Target::Hole, run.first - block),
            None => (Target::Hole, WINDOW_BLOCKS.saturating_sub(block)),
        }
    }

    /// For each block of the window what it is, but for zeros.
    #[cfg(test)]
    pub(crate) fn targets(&self) -> Vec<Option<Target>> {
        let mut targets = vec![None; usize::try_from(WINDOW_BLOCKS).unwrap_or(0)];
        for run in &self.runs {
            for step in 0..run.count {
                if let Some(slot) =
                    usize::try_from(run.first + step).ok().and_then(|i| targets.get_mut(i))
                {
                    *slot = Some(run.target.skip(step));
                }
            }
        }
        targets
    }

    /// This window with `own` entries (in window coordinates, in order, disjoint) over it.
    pub(crate) fn overlaid(&self, own: &[Run]) -> Self {
        let mut runs: Vec<Run> = Vec::with_capacity(self.runs.len() + own.len());
        let mut below = self.runs.iter();
        let mut current = below.next().copied();
        let mut covered = 0;
        let end_of_window = Run { first: WINDOW_BLOCKS, count: 1, target: Target::Hole };
        for over in own.iter().chain([&end_of_window]) {
            // What lies below and before this entry shows through.
            while let Some(run) = current {
                if let Some(part) = run.cut(covered, over.first) {
                    keep(&mut runs, part);
                }
                if run.end() > over.first {
                    break;
                }
                current = below.next().copied();
            }
            if over.first < WINDOW_BLOCKS && over.target != Target::Hole {
                keep(&mut runs, *over);
            }
            covered = over.end();
        }
        Self { runs }
    }
}

/// The blocks of a window while its layers are walked from the highest down: the first that has
/// an entry for a block decides what the block is.
#[derive(Debug)]
pub(crate) struct Canvas {
    /// The window's first block in the file.
    start: u64,
    blocks: [Option<Target>; WINDOW_BLOCKS as usize],
    open: usize,
}

impl Canvas {
    pub(crate) fn new(window: u64) -> Self {
        let blocks = [None; WINDOW_BLOCKS as usize];
        Self { start: window * WINDOW_BLOCKS, open: blocks.len(), blocks }
    }

    /// No layer further down can be seen.
    pub(crate) fn is_full(&self) -> bool {
        self.open == 0
    }

    /// No layer had an entry yet.
    pub(crate) fn is_blank(&self) -> bool {
        self.open == self.blocks.len()
    }

    /// Lays the entries of a layer under what is there: whole, in the file's coordinates.
    pub(crate) fn add(&mut self, entries: &[Run]) {
        let (start, end) = (self.start, self.start + WINDOW_BLOCKS);
        for run in entries.iter().filter_map(|run| run.cut(start, end)) {
            self.lay(Run { first: run.first - start, ..run });
        }
    }

    /// What is seen, with the window of all layers further down under it.
    pub(crate) fn over(mut self, below: &Window) -> Window {
        below.runs.iter().for_each(|run| self.lay(*run));
        let mut runs = Vec::new();
        for (first, target) in (0..).zip(self.blocks) {
            if let Some(target) = target.filter(|target| *target != Target::Hole) {
                keep(&mut runs, Run { first, count: 1, target });
            }
        }
        Window { runs }
    }

    fn lay(&mut self, run: Run) {
        let blocks = usize::try_from(run.first).ok().and_then(|first| self.blocks.get_mut(first..));
        for (step, block) in (0..run.count).zip(blocks.unwrap_or_default()) {
            if block.is_none() {
                *block = Some(run.target.skip(step));
                self.open -= 1;
            }
        }
    }
}

/// Adds a run behind the others; what goes on with the last becomes part of it.
fn keep(runs: &mut Vec<Run>, run: Run) {
    match runs.last_mut() {
        Some(last) if last.end() == run.first && last.target.continues(last.count, run.target) => {
            last.count += run.count;
        }
        _ => runs.push(run),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::ChunkId;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn runs() -> impl Strategy<Value = Vec<Run>> {
        prop::collection::vec((0u64..256, 1u64..40, prop::option::of(1u64..10)), 0..12).prop_map(
            |raw| {
                let mut end = 0;
                let mut runs = Vec::new();
                for (gap, count, chunk) in raw {
                    let first = end + gap % 30;
                    let count = count.min(WINDOW_BLOCKS.saturating_sub(first));
                    if count == 0 {
                        break;
                    }
                    let target = match chunk {
                        None => Target::Hole,
                        Some(9) => Target::Lost,
                        Some(c) => Target::Chunks(ChunkId::from_raw(c * 1000)),
                    };
                    runs.push(Run { first, count, target });
                    end = first + count;
                }
                runs
            },
        )
    }

    /// The same entries in a file, where the window begins at `start`: the outer ones, if they
    /// are chunks at its edges, are parts of longer ones.
    fn reaching_out(runs: Vec<Run>, start: u64) -> Vec<Run> {
        let in_file = |run: Run| match run.target {
            Target::Chunks(chunk) if run.first == 0 && start > 0 => Run {
                first: start - 5,
                count: run.count + 5,
                target: Target::Chunks(ChunkId::from_raw(chunk.raw() - 5)),
            },
            _ => {
                let over = if run.end() == WINDOW_BLOCKS { 7 } else { 0 };
                Run { first: start + run.first, count: run.count + over, ..run }
            }
        };
        runs.into_iter().map(in_file).collect()
    }

    proptest! {
        #[test]
        fn an_overlay_shows_what_is_above_else_what_is_below(below in runs(), above in runs()) {
            let below = Window::default().overlaid(&below);
            let result = below.overlaid(&above);
            let base = below.targets();
            for (block, target) in result.targets().into_iter().enumerate() {
                let block_number = block as u64;
                let over = above.iter().find(|r| r.first <= block_number && block_number < r.end());
                let expected = match over.map(|r| (r.target, block_number - r.first)) {
                    Some((Target::Hole, _)) => None,
                    Some((target, skip)) => Some(target.skip(skip)),
                    None => base[block],
                };
                prop_assert_eq!(target, expected, "block {}", block);
            }
            prop_assert!(result.runs().windows(2).all(|pair| pair[0].end() <= pair[1].first));
        }

        #[test]
        fn many_layers_at_once_show_what_they_show_one_by_one(
            below in runs(),
            layers in prop::collection::vec(runs(), 0..6),
            window in 0u64..3,
        ) {
            let below = Window::default().overlaid(&below);
            let expected = layers.iter().fold(below.clone(), |window, own| window.overlaid(own));
            let mut canvas = Canvas::new(window);
            let mut decided = BTreeSet::new();
            for own in layers.into_iter().rev() {
                decided.extend(own.iter().flat_map(|run| run.first..run.end()));
                canvas.add(&reaching_out(own, window * WINDOW_BLOCKS));
                prop_assert_eq!(canvas.is_full(), decided.len() == 256);
            }
            prop_assert_eq!(canvas.over(&below), expected);
        }
    }
}
