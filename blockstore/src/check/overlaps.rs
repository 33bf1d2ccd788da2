//! Entries of one layer that overlap, and what takes their place: what one of them alone says
//! stays, what two say is lost.

use super::{Findings, Fix};
use crate::id::LayerId;
use crate::record::{Run, Target};

/// Entries that are taken apart together, in one commit: with more than these the layer has not
/// one wrong entry, but is nothing of what it was.
const TOGETHER_MAX: usize = 1024;

/// Goes over the entries of layers in order of their keys.
#[derive(Debug, Default)]
pub(super) struct Overlaps {
    layer: Option<LayerId>,
    /// Each begins before one of those before it ends.
    together: Vec<Run>,
    end: u64,
    /// There were more than [`TOGETHER_MAX`].
    is_too_many: bool,
}

impl Overlaps {
    /// The next entry.
    pub(super) fn add(&mut self, layer: LayerId, run: Run, findings: &mut Findings) {
        if self.layer != Some(layer) || self.end <= run.first {
            self.finish(findings);
            self.layer = Some(layer);
        }
        self.end = self.end.max(run.end());
        if self.together.len() < TOGETHER_MAX {
            self.together.push(run);
        } else {
            self.is_too_many = true;
        }
    }

    /// No entry overlaps those that came.
    pub(super) fn finish(&mut self, findings: &mut Findings) {
        let Self { layer, together, is_too_many, .. } = std::mem::take(self);
        let (Some(layer), [_, second, ..]) = (layer, together.as_slice()) else { return };
        let (count, block) = (together.len(), second.first);
        let problem =
            format!("I5: {count} entries of layer {layer} overlap, from block {block} on");
        if is_too_many {
            findings.rebuild(&problem);
        } else {
            findings.wrong(problem, || {
                let apart = apart(&together);
                Fix::Replace(layer, together, apart)
            });
        }
    }
}

/// The same blocks in entries that do not overlap.
fn apart(together: &[Run]) -> Vec<Run> {
    let mut done = Vec::new();
    // From the begin of the last entry on, one behind the other: what it covers, and at most one
    // more that reaches further.
    let mut open: Vec<Run> = Vec::new();
    for run in together {
        let reach = open.last().map_or(run.first, Run::end);
        let mut next = Vec::new();
        for piece in open {
            push(&mut done, piece.cut(0, run.first));
            let both = piece.cut(run.first, run.end());
            push(&mut next, both.map(|both| Run { target: Target::Lost, ..both }));
            push(&mut next, piece.cut(run.end(), u64::MAX));
        }
        push(&mut next, run.cut(reach, u64::MAX));
        open = next;
    }
    open.into_iter().for_each(|piece| push(&mut done, Some(piece)));
    done
}

fn push(runs: &mut Vec<Run>, run: Option<Run>) {
    let Some(run) = run else { return };
    match runs.last_mut() {
        Some(last) if last.target == Target::Lost && run.target == Target::Lost => {
            last.count += run.count;
        }
        _ => runs.push(run),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{ChunkId, SegmentId};

    fn run(first: u64, end: u64, index: u32) -> Run {
        let target = Target::Chunks(ChunkId::new(SegmentId::new(1), index));
        Run { first, count: end - first, target }
    }

    fn lost(first: u64, end: u64) -> Run {
        Run { first, count: end - first, target: Target::Lost }
    }

    #[test]
    fn what_one_entry_alone_says_stays() {
        // One inside another: the outer one goes on behind it.
        let (outer, inner) = (run(0, 100, 500), run(10, 20, 0));
        assert_eq!(apart(&[outer, inner]), [run(0, 10, 500), lost(10, 20), run(20, 100, 520)]);
        // One that reaches beyond the other.
        let behind = run(90, 120, 700);
        assert_eq!(apart(&[outer, behind]), [run(0, 90, 500), lost(90, 100), run(100, 120, 710)]);
        // Where the inner one ends the next begins, whose key the rest of the outer one must not take.
        let next = run(20, 30, 40);
        let expected = [run(0, 10, 500), lost(10, 30), run(30, 100, 530)];
        assert_eq!(apart(&[outer, inner, next]), expected);
        // Three over each other.
        let third = run(15, 110, 800);
        let expected = [run(0, 10, 500), lost(10, 100), run(100, 110, 885)];
        assert_eq!(apart(&[outer, inner, third]), expected);
        // Both end at the same block.
        assert_eq!(apart(&[outer, run(50, 100, 0)]), [run(0, 50, 500), lost(50, 100)]);
    }

    #[test]
    fn only_what_overlaps_is_touched() {
        let mut findings = Findings::with_fixes();
        let mut overlaps = Overlaps::default();
        let layer = LayerId::new(7);
        for run in [run(0, 10, 0), run(10, 20, 50), run(15, 17, 90), run(20, 30, 100)] {
            overlaps.add(layer, run, &mut findings);
        }
        // Of another layer.
        overlaps.add(LayerId::new(8), run(25, 40, 200), &mut findings);
        overlaps.finish(&mut findings);
        let fixes = findings.fixes.unwrap_or_default();
        let [Fix::Replace(of, old, new)] = fixes.as_slice() else { panic!("{fixes:?}") };
        assert_eq!((*of, old.as_slice()), (layer, [run(10, 20, 50), run(15, 17, 90)].as_slice()));
        assert_eq!(new.as_slice(), [run(10, 15, 50), lost(15, 17), run(17, 20, 57)]);
    }

    #[test]
    fn too_many_are_a_matter_of_a_rebuild() {
        let mut findings = Findings::with_fixes();
        let mut overlaps = Overlaps::default();
        let layer = LayerId::new(7);
        overlaps.add(layer, run(0, 1 << 20, 0), &mut findings);
        (1..=TOGETHER_MAX).for_each(|block| {
            let block = u64::try_from(block).unwrap_or(0);
            overlaps.add(layer, run(block, block + 1, 0), &mut findings);
        });
        overlaps.finish(&mut findings);
        assert_eq!((findings.hopeless, findings.fixes.map(|fixes| fixes.len())), (1, Some(0)));
    }
}
