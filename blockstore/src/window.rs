//! A window of a file as it reads: the unit in which resolved layers are cached.

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
        let keep = |runs: &mut Vec<Run>, run: Run| match runs.last_mut() {
            Some(last)
                if last.end() == run.first && last.target.continues(last.count, run.target) =>
            {
                last.count += run.count;
            }
            _ => runs.push(run),
        };
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::ChunkId;
    use proptest::prelude::*;

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
    }
}
