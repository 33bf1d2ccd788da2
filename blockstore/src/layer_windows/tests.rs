//! What is read of a layer, against a plain list of its runs.

use std::collections::BTreeSet;

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{TestCaseError, TestRunner};

use super::*;
use crate::id::ChunkId;
use crate::kv::{Kv, MemoryKv, RocksKv, Write};

/// Disjoint runs in order; some touch, some are holes over many windows.
fn runs() -> impl Strategy<Value = Vec<Run>> {
    let run = (0u64..700, 1u64..600, any::<bool>(), 0u64..12);
    prop::collection::vec(run, 0..40).prop_map(|parts| {
        let mut end = 0;
        let mut runs = Vec::new();
        for (number, (gap, count, is_chunks, stretch)) in (1u64..).zip(parts) {
            // Half of the runs begin where the one before ended.
            let first = end + gap.saturating_sub(350);
            let (count, target) = if is_chunks {
                (count, Target::Chunks(ChunkId::from_raw(number << 24)))
            } else {
                (count << stretch, Target::Hole)
            };
            runs.push(Run { first, count, target });
            end = first + count;
        }
        runs
    })
}

fn fill(kv: &dyn Kv, layer: LayerId, runs: &[Run]) {
    let write = |layer: LayerId, run: &Run| Write {
        family: Family::Map,
        key: key::map(layer, run.first),
        value: Some(run.encode()),
    };
    let mut batch: Vec<Write> = runs.iter().map(|run| write(layer, run)).collect();
    // The layers beside have entries of their own.
    let other = Run { first: 3, count: 1 << 30, target: Target::Hole };
    for number in [layer.get() - 1, layer.get() + 1] {
        batch.push(write(LayerId::new(number), &other));
    }
    kv.apply(&batch).unwrap();
}

fn meets(run: &Run, window: u64) -> bool {
    run.first < (window + 1) * WINDOW_BLOCKS && window * WINDOW_BLOCKS < run.end()
}

fn check(
    kv: &dyn KvRead,
    layer: LayerId,
    runs: &[Run],
    runs_max: usize,
) -> std::result::Result<(), TestCaseError> {
    let loaded = Loaded::read_listing(kv, layer, (runs_max, usize::MAX)).unwrap();
    let behind = runs.last().map_or(2, |run| run.end() / WINDOW_BLOCKS + 2).min(20_000);
    for window in 0..behind {
        let owned = runs.iter().any(|run| meets(run, window));
        let has_data = runs.iter().any(|run| run.target != Target::Hole && meets(run, window));
        prop_assert_eq!(loaded.windows.owned.contains(window), owned, "window {}", window);
        prop_assert!(!has_data || loaded.windows.data.contains(window), "data of {}", window);
    }
    let beside = |run: &&Run| windows_beside(run).1 - windows_beside(run).0 <= LISTED_WINDOWS_MAX;
    let expected: BTreeSet<u64> = runs
        .iter()
        .filter(beside)
        .flat_map(|run| windows_beside(run).0..windows_beside(run).1)
        .collect();
    let listed: BTreeSet<u64> = loaded.lists.iter().map(|(window, _)| *window).collect();
    let expected = if runs.len() <= runs_max { expected } else { BTreeSet::new() };
    prop_assert_eq!(listed, expected);
    for (window, list) in &loaded.lists {
        let (start, end) = (window * WINDOW_BLOCKS, (window + 1) * WINDOW_BLOCKS);
        let touching = runs.iter().filter(|run| run.end() >= start && run.first <= end);
        let touching: Vec<Run> = touching.copied().collect();
        prop_assert_eq!(list.as_ref(), &touching, "window {}", window);
    }
    Ok(())
}

proptest! {
    #[test]
    fn windows_and_lists_are_those_of_the_map(runs in runs(), runs_max in 0usize..60) {
        let layer = LayerId::new(7);
        let memory = MemoryKv::new();
        fill(&memory, layer, &runs);
        check(&memory, layer, &runs, runs_max)?;
    }
}

#[test]
fn they_are_the_same_from_rocksdb() {
    let directory = tempfile::tempdir().unwrap();
    let rocks = RocksKv::open(directory.path(), 16 << 20).unwrap();
    let mut runner = TestRunner::deterministic();
    for number in 1..60 {
        let runs = runs().new_tree(&mut runner).unwrap().current();
        // Every second layer: those between hold what must not be seen.
        let layer = LayerId::new(number * 4);
        fill(&rocks, layer, &runs);
        if number % 2 == 0 {
            rocks.flush().unwrap();
        }
        for runs_max in [0, 5, 1000] {
            check(&rocks, layer, &runs, runs_max).unwrap();
        }
    }
}
