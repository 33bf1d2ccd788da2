//! Layers that take long to read, what all sets take, and windows of layers that are gone.

use super::*;
use crate::id::{ChunkId, InodeId};
use crate::kv::{MemoryKv, Write};
use crate::record::Target;
use crate::testing::hooked::{During, Hook, hooked_kv};
use crate::transaction::TouchedWindows;

const LAYER: LayerId = LayerId::new(7);

/// The first block of a window becomes a chunk.
fn run(window: u64) -> Run {
    let target = Target::Chunks(ChunkId::from_raw((window + 1) << 24));
    Run { first: window * WINDOW_BLOCKS, count: 1, target }
}

fn put_run(layer: LayerId, window: u64) -> Write {
    let run = run(window);
    Write { family: Family::Map, key: key::map(layer, run.first), value: Some(run.encode()) }
}

/// A layer with an entry in every third window.
fn fill(kv: &dyn Kv, layer: LayerId, state: LayerState, runs: u64) {
    let record = LayerRecord { parent: None, state, children: 0, snapshots: 0, runs, blocks: runs };
    let (key, value) = (key::layer(layer), Some(record.encode()));
    let mut batch = vec![Write { family: Family::Layer, key, value }];
    batch.extend((0..runs).map(|number| put_run(layer, number * 3)));
    kv.apply(&batch).unwrap();
}

fn has_data(resolver: &Resolver, layer: LayerId, window: u64) -> bool {
    let found = resolver.window(layer, window).unwrap();
    let expected = Run { first: 0, ..run(window) };
    assert!(found.runs().is_empty() || found.runs() == [expected], "window {window}");
    !found.runs().is_empty()
}

/// A commit that puts an entry into a window of a layer, as far as memory hears of it.
fn commit_run(kv: &dyn Kv, resolver: &Resolver, window: u64) {
    let _moment = resolver.structure.try_write().expect("a commit waits for nobody");
    kv.apply(&vec![put_run(LAYER, window)]).unwrap();
    let windows = vec![TouchedWindows { start: window, end: window + 1, has_data: true }];
    let stale = vec![(window.saturating_sub(1), window + 2)];
    let (empty, known) = ((0, 0), Vec::new());
    resolver.add_windows(Touched { layer: LAYER, windows, empty, stale, known });
}

#[test]
fn commits_do_not_wait_while_a_large_layer_is_read_and_are_seen_behind_it() {
    let runs = u64::try_from(LISTED_RUNS_MAX).unwrap() + 100;
    for state in [LayerState::Frozen, LayerState::Open(InodeId::new(9))] {
        let (kv, hook) = (Arc::new(MemoryKv::new()), Hook::default());
        fill(kv.as_ref(), LAYER, state, runs);
        let resolver = Arc::new(Resolver::new(hooked_kv(Arc::clone(&kv), &hook), 1 << 20));
        let (late, committed) = (runs * 3 + 100, Arc::new(AtomicBool::new(false)));
        let (of_kv, of_resolver) = (Arc::clone(&kv), Arc::clone(&resolver));
        let done = Arc::clone(&committed);
        let being_read = Arc::new(RwLock::new(None));
        let begun = Arc::clone(&being_read);
        hook.set(During::View, move || {
            *begun.write() = Some(of_resolver.sets.begin(LAYER));
            commit_run(of_kv.as_ref(), &of_resolver, late);
            done.store(true, Ordering::Release);
        });
        assert!(has_data(&resolver, LAYER, 300));
        assert!(committed.load(Ordering::Acquire), "the layer was read from a moment");
        let (begun, set) = (being_read.write().take().unwrap(), resolver.sets.get(LAYER).unwrap());
        assert!(Arc::ptr_eq(&begun, &set), "it was not read once more, under the lock");
        for window in [0, 3, (runs - 1) * 3, late] {
            assert!(has_data(&resolver, LAYER, window), "window {window}, {state:?}");
        }
        assert!(!has_data(&resolver, LAYER, 301));
        assert_eq!(resolver.next_owned(&[LAYER], runs * 3, true).unwrap(), Some(late));
    }
}

/// A set that is forgotten while it is read, so that nobody adds to it, is read once more.
#[test]
fn a_set_that_is_pushed_out_while_it_is_read_lacks_nothing() {
    let runs = u64::try_from(LISTED_RUNS_MAX).unwrap() + 100;
    let (kv, hook) = (Arc::new(MemoryKv::new()), Hook::default());
    fill(kv.as_ref(), LAYER, LayerState::Frozen, runs);
    let resolver = Arc::new(Resolver::new(hooked_kv(Arc::clone(&kv), &hook), 1 << 20));
    let late = runs * 3 + 100;
    let (of_kv, of_resolver) = (Arc::clone(&kv), Arc::clone(&resolver));
    hook.set(During::View, move || {
        of_resolver.sets.remove(LAYER);
        commit_run(of_kv.as_ref(), &of_resolver, late);
    });
    assert!(has_data(&resolver, LAYER, 0));
    assert!(!hook.is_set());
    assert!(has_data(&resolver, LAYER, late));
}

#[test]
fn the_sets_of_many_scattered_layers_take_no_more_than_their_share() {
    const MEMORY_BYTES: u64 = 4 << 20;
    let (layers, runs) = (100, 2000);
    let kv = Arc::new(MemoryKv::new());
    for number in 1..=layers {
        fill(kv.as_ref(), LayerId::new(number), LayerState::Frozen, runs);
    }
    let resolver = Resolver::new(kv, MEMORY_BYTES);
    for number in 1..=layers {
        assert!(has_data(&resolver, LayerId::new(number), 3));
        let taken = resolver.sets.memory_bytes();
        assert!(taken <= MEMORY_BYTES / SETS_DIVISOR, "{taken} bytes");
        assert!(resolver.memory_bytes() <= MEMORY_BYTES + layers * LAYER_MEMORY_BYTES);
    }
    let taken = resolver.sets.memory_bytes();
    assert!(taken > MEMORY_BYTES / SETS_DIVISOR / 2, "{taken} bytes: else none is kept");
    // Those that were pushed out are read again.
    for number in 1..=layers {
        let layer = LayerId::new(number);
        assert!(has_data(&resolver, layer, (runs - 1) * 3) && !has_data(&resolver, layer, 4));
    }
}

#[test]
fn a_set_of_more_ranges_than_one_layer_may_have_lacks_no_window() {
    let kv = Arc::new(MemoryKv::new());
    let runs = 20_000;
    fill(kv.as_ref(), LAYER, LayerState::Frozen, runs);
    let resolver = Resolver::new(kv, 1 << 20);
    assert!((0..runs).all(|number| has_data(&resolver, LAYER, number * 3)));
    assert!((0..runs).all(|number| !has_data(&resolver, LAYER, number * 3 + 1)));
    let taken = resolver.sets.memory_bytes();
    assert!(taken > 0 && taken <= (1 << 20) / SETS_DIVISOR, "{taken} bytes");
    assert!(resolver.sets.get(LAYER).is_some(), "it stays");
}

#[test]
fn a_set_that_commits_let_grow_stays_bounded_and_lacks_no_window() {
    let kv = Arc::new(MemoryKv::new());
    fill(kv.as_ref(), LAYER, LayerState::Open(InodeId::new(9)), 1);
    let resolver = Resolver::new(Arc::clone(&kv) as Arc<dyn Kv>, 1 << 20);
    assert!(has_data(&resolver, LAYER, 0));
    let runs = 5000;
    for number in 1..runs {
        commit_run(kv.as_ref(), &resolver, number * 3);
        let set = resolver.sets.get(LAYER).expect("it stays");
        assert!(set.owns(number * 3) && set.next_from(number * 3, true) == Some(number * 3));
    }
    let taken = resolver.sets.memory_bytes();
    assert!(taken <= (1 << 20) / SETS_DIVISOR, "{taken} bytes");
    assert!((0..runs).all(|number| has_data(&resolver, LAYER, number * 3)));
}

/// The collapse of an open layer that was cut: its old windows lie in the cache under an epoch that
/// ended, and a reader may still hold the layer's number.
#[test]
fn old_windows_of_a_layer_that_is_gone_do_not_come_to_light() {
    let kv = Arc::new(MemoryKv::new());
    fill(kv.as_ref(), LAYER, LayerState::Open(InodeId::new(9)), 1);
    let resolver = Resolver::new(kv, 1 << 20);
    assert!(has_data(&resolver, LAYER, 0));
    assert!(resolver.cached(LAYER, 0).is_some());
    let windows = vec![TouchedWindows { start: 0, end: DROP_SINGLY_MAX + 1, has_data: false }];
    let (stale, known) = (vec![(0, 100)], Vec::new());
    let cut = Touched { layer: LAYER, windows, empty: (0, 0), stale, known };
    resolver.add_windows(cut);
    assert!(resolver.cached(LAYER, 0).is_none());
    // As a commit does it: a reader that begins here has the layer's number still.
    resolver.note_move();
    let moves = resolver.moves();
    resolver.layer_changed(LAYER, None);
    assert!(resolver.cached(LAYER, 0).is_none());
    resolver.forget(&[LAYER]);
    assert_ne!(resolver.moves(), moves, "what it may find from here on, it does not keep");
}

/// As a slice of collapse moves entries up: the open layer's windows are named until those of the
/// layer below are dropped.
#[test]
fn windows_that_a_commit_empties_are_named_until_it_is_applied() {
    let kv = Arc::new(MemoryKv::new());
    let runs = 10;
    fill(kv.as_ref(), LAYER, LayerState::Open(InodeId::new(9)), runs);
    let resolver = Resolver::new(Arc::clone(&kv) as Arc<dyn Kv>, 1 << 20);
    assert!(has_data(&resolver, LAYER, 3));
    let touched = |(start, end): (u64, u64), empty| {
        let windows = vec![TouchedWindows { start, end, has_data: false }];
        Touched { layer: LAYER, windows, empty, stale: vec![(0, 100)], known: Vec::new() }
    };
    // All goes, but that in one window something takes the place of what went.
    let mut emptied = Emptied::default();
    for change in [touched((6, 7), (0, 0)), touched((0, 30), (0, 30)), touched((9, 10), (0, 0))] {
        emptied.note(&change);
        resolver.add_windows(change);
    }
    assert!(resolver.sets.get(LAYER).unwrap().owns(3));
    resolver.drop_empty(&emptied);
    let set = resolver.sets.get(LAYER).unwrap();
    let owned: Vec<u64> = (0..40).filter(|window| set.owns(*window)).collect();
    assert_eq!(owned, [9]);
    assert_eq!((set.next_from(0, true), set.next_from(10, true)), (Some(9), None));
    assert_eq!((set.reaching_from(9), set.reaching_from(10), set.reaching_from(20)), (9, 9, 20));
}
