//! The map of a layer, rewritten at random, against a plain list of blocks; and the caches that
//! commits keep, against the index.

use proptest::prelude::*;

use super::*;
use crate::dedup::DedupIndex;
use crate::disk::MemoryDisk;
use crate::id::{ChunkId, InodeId, SegmentId};
use crate::kv::{Kv, KvRead, MemoryKv};
use crate::record::{Counters, LayerState, split_two};
use crate::resolve::Resolver;
use crate::segments::Segments;
use crate::time::Clock;
use crate::transaction::Stored;

/// Four windows, so that runs cross borders and skip a window.
const BLOCKS: u64 = 4 * WINDOW_BLOCKS;

const PARENT: LayerId = LayerId::new(1);
const LAYER: LayerId = LayerId::new(2);

/// What a layer has for a block; `None`: no entry.
type Entries = Vec<Option<Target>>;

/// What happens to a transaction in the end.
#[derive(Clone, Copy, Debug)]
enum Fate {
    Commit,
    RollBack,
    /// The op is kept, and the append of its group fails.
    Fail,
}

#[derive(Clone, Debug)]
enum Step {
    Write(Vec<(u64, Target)>),
    /// As a truncate: what is there goes, a hole takes its place if there is a layer below.
    Hide(u64, u64),
    /// As a repair: all of the layer's own data there is lost.
    Lose(u64, u64),
    /// What was held in memory is lost.
    Restart,
    /// A reader looks at a window.
    Read(u64),
}

struct World {
    kv: Arc<MemoryKv>,
    resolver: Resolver,
    stored: (DedupIndex, Segments),
    clock: Clock,
    counters: Counters,
    below: Option<Entries>,
    own: Entries,
}

fn chunk(number: u64) -> Target {
    Target::Chunks(ChunkId::from_raw((1 << ChunkId::INDEX_BITS) + number))
}

fn is_data(target: Option<Target>) -> bool {
    target.is_some_and(|target| target != Target::Hole)
}

impl World {
    fn new(below: Option<Entries>) -> Self {
        let kv = Arc::new(MemoryKv::new());
        let segments = Segments::new(Arc::new(MemoryDisk::new()), 1 << 20);
        let dedup = DedupIndex::open(kv.as_ref(), &segments, std::iter::empty(), 1 << 20).unwrap();
        let mut world = Self {
            resolver: Resolver::new(Arc::clone(&kv) as Arc<dyn Kv>, 1 << 20),
            kv,
            stored: (dedup, segments),
            clock: Clock::default(),
            counters: Counters::default(),
            own: vec![None; usize::try_from(BLOCKS).unwrap()],
            below: None,
        };
        let record = |state, parent, children| LayerRecord {
            parent,
            state,
            children,
            snapshots: 0,
            runs: 0,
            blocks: 0,
        };
        let open = LayerState::Open(InodeId::new(7));
        let parent = below.is_some().then_some(PARENT);
        let entries = below.clone().unwrap_or_default();
        world.transaction(Fate::Commit, |txn, _| {
            txn.put_layer(PARENT, &record(LayerState::Frozen, None, 1));
            txn.put_layer(LAYER, &record(open, parent, 0));
            for (first, target) in (0..).zip(entries).filter_map(|(b, t)| Some((b, t?))) {
                mapping::place(txn, PARENT, Run { first, count: 1, target }).unwrap();
            }
        });
        world.below = below;
        world
    }

    fn transaction(&mut self, fate: Fate, work: impl FnOnce(&mut Transaction<'_>, &Resolver)) {
        let stored = Stored { dedup: &self.stored.0, segments: &self.stored.1 };
        let first = (SegmentId::new(2), 0);
        let on = (self.kv.as_ref() as &dyn Kv, stored);
        let mut txn = Transaction::new(on, &self.clock, self.counters, first, u64::MAX);
        txn.begin_op();
        work(&mut txn, &self.resolver);
        match fate {
            Fate::RollBack => {
                txn.roll_back_op();
                assert!(txn.is_empty(), "all is taken back");
                return;
            }
            Fate::Fail => return,
            Fate::Commit => txn.keep_op(),
        }
        let (batch, effects, counters, _) = txn.finish().unwrap();
        let _moment = self.resolver.structure.write();
        self.kv.apply(&batch).unwrap();
        self.counters = counters;
        for touched in effects.windows {
            self.resolver.add_windows(touched);
        }
        for (layer, record) in effects.layers {
            self.resolver.layer_changed(layer, record.as_ref());
        }
    }

    fn seen(&self, block: usize) -> Option<Target> {
        let below = || self.below.as_ref().and_then(|below| below[block]);
        self.own[block].or_else(below).filter(|target| *target != Target::Hole)
    }

    fn step(&mut self, step: &Step, fate: Fate, twice: bool) {
        match step {
            Step::Restart => {
                self.resolver = Resolver::new(Arc::clone(&self.kv) as Arc<dyn Kv>, 1 << 20);
            }
            Step::Read(window) => {
                self.resolver.window(LAYER, *window).unwrap();
            }
            Step::Write(targets) => self.write(targets, fate, twice),
            Step::Hide(first, end) => self.hide((*first, *end), fate),
            Step::Lose(first, end) => self.lose((*first, *end), fate),
        }
    }

    fn write(&mut self, targets: &[(u64, Target)], fate: Fate, twice: bool) {
        let seen = |world: &Self| (0..world.own.len()).filter(|b| world.seen(*b).is_some()).count();
        let (before, own) = (seen(self), self.own.clone());
        for (block, target) in targets {
            let at = usize::try_from(*block).unwrap();
            match target {
                Target::Chunks(_) => self.own[at] = Some(*target),
                Target::Hole if self.seen(at).is_none() => {}
                Target::Hole => self.own[at] = self.below.is_some().then_some(Target::Hole),
                Target::Lost => panic!("nobody writes lost blocks"),
            }
        }
        let more = i64::try_from(seen(self)).unwrap() - i64::try_from(before).unwrap();
        let blocks: Vec<u64> = targets.iter().map(|(block, _)| *block).collect();
        let ground = Ground::of_blocks(&self.resolver, LAYER, blocks.iter().copied()).unwrap();
        self.transaction(fate, |txn, _| {
            // The second time nothing changes, and the layer is no longer as it was looked up.
            for (round, expected) in [(0, more), (1, 0)].into_iter().take(1 + usize::from(twice)) {
                for (_, target) in targets {
                    if let Target::Chunks(chunk) = target {
                        txn.retain(*chunk).unwrap();
                    }
                }
                let used = write_targets(txn, LAYER, targets, &ground).unwrap();
                assert_eq!(used, expected, "round {round}");
            }
        });
        if !matches!(fate, Fate::Commit) {
            self.own = own;
        }
    }

    fn lose(&mut self, (first, end): (u64, u64), fate: Fate) {
        self.transaction(fate, |txn, _| {
            for run in mapping::take(txn, LAYER, (first, end)).unwrap() {
                mapping::release(txn, &[run]).unwrap();
                let is_hole = run.target == Target::Hole;
                let target = if is_hole { Target::Hole } else { Target::Lost };
                mapping::place(txn, LAYER, Run { target, ..run }).unwrap();
            }
        });
        if matches!(fate, Fate::Commit) {
            let range = usize::try_from(first).unwrap()..usize::try_from(end).unwrap();
            for target in self.own[range].iter_mut().filter(|target| is_data(**target)) {
                *target = Some(Target::Lost);
            }
        }
    }

    fn hide(&mut self, (first, end): (u64, u64), fate: Fate) {
        let below = self.below.is_some();
        self.transaction(fate, |txn, _| {
            let taken = mapping::take(txn, LAYER, (first, end)).unwrap();
            mapping::release(txn, &taken).unwrap();
            if below {
                let hole = Run { first, count: end - first, target: Target::Hole };
                mapping::place(txn, LAYER, hole).unwrap();
            }
        });
        if matches!(fate, Fate::Commit) {
            let range = usize::try_from(first).unwrap()..usize::try_from(end).unwrap();
            self.own[range].fill(below.then_some(Target::Hole));
        }
    }

    /// The index holds the model, in as few entries as can be, and no cache says otherwise.
    fn check(&self) {
        let mut expected: Vec<Run> = Vec::new();
        for (first, target) in (0..).zip(&self.own).filter_map(|(b, t)| Some((b, (*t)?))) {
            join(&mut expected, Run { first, count: 1, target });
        }
        let mut stored: Vec<Run> = Vec::new();
        let (from, to) = (key::map(LAYER, 0), key::map(LAYER, u64::MAX));
        let visit = &mut |key: &[u8], value: &[u8]| {
            stored.push(Run::decode(split_two("map key", key)?.1, value)?);
            Ok(std::ops::ControlFlow::Continue(()))
        };
        self.kv.scan(Family::Map, &from, &to, visit).unwrap();
        assert_eq!(stored, expected);
        let record = self.kv.get(Family::Layer, &key::layer(LAYER)).unwrap().unwrap();
        let record = LayerRecord::decode(&record).unwrap();
        assert_eq!(record.runs, u64::try_from(stored.len()).unwrap());
        let blocks = |entries: &Entries| entries.iter().filter(|t| is_data(**t)).count();
        assert_eq!(record.blocks, u64::try_from(blocks(&self.own)).unwrap());
        let all = blocks(&self.own) + self.below.as_ref().map_or(0, blocks);
        assert_eq!(self.counters.mapped_blocks, u64::try_from(all).unwrap());
        for window in 0..BLOCKS / WINDOW_BLOCKS {
            let (start, end) = (window * WINDOW_BLOCKS, (window + 1) * WINDOW_BLOCKS);
            let beside = stored.iter().filter(|run| run.end() >= start && run.first <= end);
            let beside: Vec<Run> = beside.copied().collect();
            assert_eq!(*self.resolver.own_window(LAYER, window).unwrap(), beside, "{window}");
            if let Some(resolved) = self.resolver.cached(LAYER, window) {
                let first = usize::try_from(start).unwrap();
                for (block, target) in (first..).zip(resolved.targets()) {
                    assert_eq!(target, self.seen(block), "block {block}");
                }
            }
        }
    }
}

/// Blocks in order: a few stretches, each of chunks in sequence, of one chunk, or of zeros.
fn targets() -> impl Strategy<Value = Vec<(u64, Target)>> {
    let stretch = (0..BLOCKS, 1..40_u64, 0..6_u64, prop::bool::weighted(0.2));
    // Near a border more often than chance would have it.
    let border = (1..4_u64, 0..8_u64).prop_map(|(window, back)| window * WINDOW_BLOCKS - back);
    let first = prop_oneof![stretch.clone().prop_map(|s| s.0), border];
    prop::collection::vec((first, stretch), 1..6).prop_map(|stretches| {
        let mut blocks = BTreeMap::new();
        for (first, (_, count, kind, all)) in stretches {
            let count = if all { WINDOW_BLOCKS + 9 } else { count };
            for block in first..(first + count).min(BLOCKS) {
                let target = match kind {
                    0 | 1 => Target::Hole,
                    2 => chunk(5),
                    // As if stored in the order of the file: stretches continue each other.
                    3 | 4 => chunk(10_000 + block),
                    _ => chunk(first * 100 + (block - first)),
                };
                blocks.insert(block, target);
            }
        }
        blocks.into_iter().collect()
    })
}

fn steps() -> impl Strategy<Value = Vec<(Step, Fate, bool)>> {
    let step = prop_oneof![
        8 => targets().prop_map(Step::Write),
        1 => (0..BLOCKS, 1..BLOCKS).prop_map(|(first, count)| {
            Step::Hide(first, (first + count).min(BLOCKS))
        }),
        1 => (0..BLOCKS, 1..BLOCKS).prop_map(|(first, count)| {
            Step::Lose(first, (first + count).min(BLOCKS))
        }),
        1 => Just(Step::Restart),
        2 => (0..BLOCKS / WINDOW_BLOCKS).prop_map(Step::Read),
    ];
    let fate =
        prop_oneof![6 => Just(Fate::Commit), 1 => Just(Fate::RollBack), 1 => Just(Fate::Fail)];
    prop::collection::vec((step, fate, prop::bool::weighted(0.2)), 1..14)
}

fn below() -> impl Strategy<Value = Option<Entries>> {
    let of_targets = |targets: Vec<(u64, Target)>| {
        let mut entries = vec![None; usize::try_from(BLOCKS).unwrap()];
        for (block, target) in targets.into_iter().filter(|(_, t)| *t != Target::Hole) {
            // Some of what is below is lost.
            let lost = block % 16 == 3;
            let target = if lost { Target::Lost } else { target };
            entries[usize::try_from(block).unwrap()] = Some(target);
        }
        entries
    };
    prop::option::of(targets().prop_map(of_targets))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn a_layer_agrees_with_a_list_of_blocks(below in below(), steps in steps()) {
        let mut world = World::new(below);
        for (step, fate, twice) in &steps {
            world.step(step, *fate, *twice);
            world.check();
        }
    }
}
