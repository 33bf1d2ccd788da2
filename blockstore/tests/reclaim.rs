//! What reclaim and collapse ask of the index: writers wait for each slice, so a layer of many
//! entries must not cost more an entry than one of few. Counted, not timed: entries that are looked
//! at, and deleted ones that RocksDB would step over until it has compacted them away.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use slackwater_blockstore::disk::MemoryDisk;
use slackwater_blockstore::kv::{Batch, Family, Kv, KvRead, MemoryKv, Visit};
use slackwater_blockstore::{
    InodeId, Result, SetAttributes, SnapshotRequest, Source, Stability, Store,
};

mod common;

use common::{bytes, content, options, path};

const BLOCK: u64 = 4096;

/// Sixteen slices and more.
const ENTRIES: u64 = 16 * 512 + 1;

/// Steps that an entry may cost: it is read, taken, and looked for in the other layer, before and
/// behind it. With slices that step over all that those before them deleted it would cost eight more.
const STEPS_AN_ENTRY_MAX: u64 = 14;

/// Steps that one may cost that is only taken: less than those eight.
const STEPS_A_DEAD_ENTRY_MAX: u64 = 4;

/// Families of which steps are counted.
const COUNTED: [Family; 3] = [Family::Map, Family::Queue, Family::Child];

/// An index that counts what it is asked for about maps, the queue and the children of layers.
#[derive(Debug, Default)]
struct Counting {
    kv: MemoryKv,
    /// Family by family, as [`COUNTED`] has them.
    deleted: Mutex<[BTreeSet<Vec<u8>>; COUNTED.len()]>,
    steps: [AtomicU64; COUNTED.len()],
}

impl Counting {
    fn count(&self, family: Family, steps: usize) {
        if let Some(at) = COUNTED.iter().position(|&counted| counted == family) {
            self.steps[at].fetch_add(u64::try_from(steps).unwrap(), Ordering::Relaxed);
        }
    }

    fn reset(&self) {
        self.steps.iter().for_each(|steps| steps.store(0, Ordering::Relaxed));
    }

    /// Steps since the last reset, in all families that are counted.
    fn steps(&self) -> u64 {
        COUNTED.into_iter().map(|family| self.steps_of(family)).sum()
    }

    fn steps_of(&self, family: Family) -> u64 {
        let at = COUNTED.iter().position(|&counted| counted == family).unwrap();
        self.steps[at].load(Ordering::Relaxed)
    }

    /// Deleted keys between two, both included.
    fn deleted(&self, family: Family, from: &[u8], to: &[u8]) -> usize {
        let Some(at) = COUNTED.iter().position(|&counted| counted == family && from <= to) else {
            return 0;
        };
        self.deleted.lock().unwrap()[at].range(from.to_vec()..=to.to_vec()).count()
    }
}

impl KvRead for Counting {
    fn get(&self, family: Family, key: &[u8]) -> Result<Option<Vec<u8>>> {
        self.kv.get(family, key)
    }

    fn last_at_or_before(
        &self,
        family: Family,
        (floor, key): (&[u8], &[u8]),
        is_wanted: &dyn Fn(&[u8]) -> bool,
    ) -> Result<Option<(Vec<u8>, Vec<u8>)>> {
        let counted = |key: &[u8]| {
            self.count(family, 1);
            is_wanted(key)
        };
        let found = self.kv.last_at_or_before(family, (floor, key), &counted)?;
        let reached = found.as_ref().map_or(floor, |(key, _)| key.as_slice());
        self.count(family, 1 + self.deleted(family, reached, key));
        Ok(found)
    }

    fn scan(&self, family: Family, from: &[u8], to: &[u8], visit: &mut Visit<'_>) -> Result<()> {
        let mut reached = to.to_vec();
        self.kv.scan(family, from, to, &mut |key, value| {
            self.count(family, 1);
            let goes_on = visit(key, value)?;
            if goes_on == ControlFlow::Break(()) {
                reached = key.to_vec();
            }
            Ok(goes_on)
        })?;
        self.count(family, 1 + self.deleted(family, from, &reached));
        Ok(())
    }
}

impl Kv for Counting {
    fn apply(&self, batch: &Batch) -> Result<()> {
        let mut deleted = self.deleted.lock().unwrap();
        for write in batch {
            let Some(at) = COUNTED.iter().position(|&family| family == write.family) else {
                continue;
            };
            match write.value {
                Some(_) => deleted[at].remove(&write.key),
                None => deleted[at].insert(write.key.clone()),
            };
        }
        self.kv.apply(batch)
    }

    fn flush(&self) -> Result<()> {
        self.kv.flush()
    }

    fn compact(&self) -> Result<()> {
        self.kv.compact()
    }

    fn view(&self) -> Box<dyn KvRead + '_> {
        self.kv.view()
    }

    fn disk_bytes(&self) -> u64 {
        0
    }

    fn memory_bytes(&self) -> u64 {
        0
    }
}

struct Counted {
    kv: Arc<Counting>,
    store: Arc<Store>,
    inode: InodeId,
}

impl Counted {
    /// A file with room for entries in every second block.
    fn new() -> Self {
        let kv = Arc::new(Counting::default());
        let mut options = options();
        options.segment_bytes = 64 << 20;
        let index: Arc<dyn Kv> = Arc::clone(&kv) as Arc<dyn Kv>;
        let store = Store::open_with(index, Arc::new(MemoryDisk::new()), options).unwrap();
        let inode = store.create_file(&path("f"), 2 * ENTRIES * BLOCK).unwrap();
        Self { kv, store, inode: inode.attributes.inode }
    }

    /// Writes every second block, each an entry of its own.
    fn scatter(&self, seed: u64) {
        self.scatter_first(seed, ENTRIES);
    }

    fn scatter_first(&self, seed: u64, count: u64) {
        for number in 0..count {
            let data = bytes(seed + number % 5, 4096);
            self.store.write(self.inode, number * 2 * BLOCK, data, Stability::Unstable).unwrap();
        }
        self.store.commit(self.inode).unwrap();
    }

    /// Makes every second block a hole, each but the last few an entry of its own.
    fn scatter_holes(&self, count: u64) {
        for number in 0..count {
            let zeros = bytes(0, 4096);
            self.store.write(self.inode, number * 2 * BLOCK, zeros, Stability::Unstable).unwrap();
        }
        self.store.commit(self.inode).unwrap();
    }

    /// Works off what waits, and answers the steps that this took for each entry.
    fn steps_an_entry(&self) -> u64 {
        self.kv.reset();
        let before = self.store.stats().reclaimed_entries;
        self.store.gc().unwrap();
        let entries = self.store.stats().reclaimed_entries - before;
        assert!(entries + 8 > ENTRIES, "{entries} entries: else the test tries nothing");
        self.kv.steps() / entries
    }

    fn assert_sound(&self) {
        common::assert_sound(&self.store);
    }
}

#[test]
fn a_dead_layer_of_many_entries_is_reclaimed_at_a_fixed_cost_each() {
    let counted = Counted::new();
    counted.scatter(40);
    counted.store.remove_path(&path("f")).unwrap();
    let steps = counted.steps_an_entry();
    assert!(steps <= STEPS_A_DEAD_ENTRY_MAX, "{steps} steps an entry");
    assert_eq!(counted.store.stats().mapped_blocks, 0);
    counted.assert_sound();
}

#[test]
fn entries_move_down_at_a_fixed_cost_each() {
    let counted = Counted::new();
    let store = &counted.store;
    counted.scatter(40);
    let first = store.snapshot(&path("f"), SnapshotRequest::default()).unwrap().id;
    // The open layer has more entries: those of the snapshot's layer go to it.
    counted.scatter(50);
    store.write(counted.inode, BLOCK, bytes(60, 4096), Stability::FileSync).unwrap();
    let expected = content(store, Source::File(counted.inode));
    store.delete_snapshot(first).unwrap();
    let steps = counted.steps_an_entry();
    assert!(steps <= STEPS_AN_ENTRY_MAX, "{steps} steps an entry");
    assert_eq!(store.stats().layer_count, 1);
    assert!(content(store, Source::File(counted.inode)) == expected);
    counted.assert_sound();
}

#[test]
fn entries_move_up_at_a_fixed_cost_each_even_holes_that_leave_nothing() {
    let counted = Counted::new();
    let store = &counted.store;
    counted.scatter(40);
    let first = store.snapshot(&path("f"), SnapshotRequest::default()).unwrap().id;
    counted.scatter_holes(ENTRIES - 4);
    let expected = content(store, Source::File(counted.inode));
    store.delete_snapshot(first).unwrap();
    let steps = counted.steps_an_entry();
    assert!(steps <= STEPS_AN_ENTRY_MAX, "{steps} steps an entry");
    assert_eq!((store.stats().layer_count, store.stats().mapped_blocks), (1, 4));
    assert!(content(store, Source::File(counted.inode)) == expected);
    counted.assert_sound();
}

/// The truncate itself leaves one entry, a hole over nothing; what it hides goes slice by slice, and
/// nothing takes its place.
#[test]
fn what_a_truncate_cut_off_goes_at_a_fixed_cost_each() {
    // So many slices that one look back over all before would show.
    const CUT_OFF: u64 = 4 * ENTRIES;
    const WINDOWS: u64 = 2 * CUT_OFF / 256;
    let counted = Counted::new();
    let store = &counted.store;
    counted.scatter_first(40, CUT_OFF);
    // One more: slices do not end where windows do.
    store.write(counted.inode, BLOCK, bytes(60, 4096), Stability::FileSync).unwrap();
    // One block of each window.
    let look = |window| store.read(Source::File(counted.inode), window * 256 * BLOCK, 4096);
    let looked_at =
        || -> Vec<Vec<u8>> { (0..WINDOWS).map(|window| look(window).unwrap().to_vec()).collect() };
    assert!(looked_at().iter().all(|bytes| bytes.iter().any(|&byte| byte != 0)));
    let set = SetAttributes { size_bytes: Some(0), ..SetAttributes::default() };
    store.set_attributes(counted.inode, &set, None).unwrap();
    assert_eq!(store.stats().layer_count, 2, "else the test tries nothing");
    counted.kv.reset();
    store.gc().unwrap();
    let steps = counted.kv.steps() / CUT_OFF;
    assert_eq!((store.stats().layer_count, store.stats().mapped_blocks), (1, 0));
    assert!(steps <= STEPS_A_DEAD_ENTRY_MAX, "{steps} steps an entry");
    // Read again as zeros, by one who looks only where the map may have something.
    let longer = SetAttributes { size_bytes: Some(2 * CUT_OFF * BLOCK), ..set };
    store.set_attributes(counted.inode, &longer, None).unwrap();
    counted.kv.reset();
    assert!(looked_at().iter().all(|bytes| bytes.iter().all(|&byte| byte == 0)));
    let steps = counted.kv.steps() / WINDOWS;
    assert!(steps <= 256, "{steps} steps a window of 256 blocks");
    // Written anew, by one who looks at what is left of the map.
    counted.scatter(50);
    let expected = bytes(52, 4096);
    let read = content(store, Source::File(counted.inode));
    assert!(read[4 * 4096..5 * 4096] == expected && read[5 * 4096..6 * 4096] == [0; 4096]);
    counted.assert_sound();
}

/// As the layer of an image does of which many containers were made, and one is left.
#[test]
fn a_layer_that_had_many_children_collapses_at_a_fixed_cost_an_entry() {
    // Each slice that steps over all of them would cost as much as its entries are allowed to.
    const CHILDREN: u64 = 4 * 512;
    let counted = Counted::new();
    let store = &counted.store;
    counted.scatter(40);
    let image = store.snapshot(&path("f"), SnapshotRequest::default()).unwrap().id;
    counted.scatter(50);
    for _ in 0..CHILDREN {
        store.clone_snapshot(image, &path("container")).unwrap();
        store.remove_path(&path("container")).unwrap();
    }
    store.gc().unwrap();
    store.write(counted.inode, BLOCK, bytes(60, 4096), Stability::FileSync).unwrap();
    store.delete_snapshot(image).unwrap();
    counted.steps_an_entry();
    let steps = counted.kv.steps_of(Family::Child);
    assert_eq!(store.stats().layer_count, 1);
    assert!(steps <= 4 * CHILDREN, "{steps} steps over {CHILDREN} children");
    counted.assert_sound();
}

/// Blocks written once more move up between the rest of a long run, and join it: it begins far before
/// a slice and reaches over its end.
#[test]
fn what_moves_up_joins_runs_that_reach_over_the_end_of_a_slice() {
    const LONG: u64 = 2 * 3 * 512;
    let counted = Counted::new();
    let store = &counted.store;
    let all: Vec<u8> = (0..LONG).flat_map(|block| bytes(100 + block, 4096)).collect();
    store.write(counted.inode, 0, all.into(), Stability::FileSync).unwrap();
    // The lower layer has more entries, else it moved.
    for number in 0..LONG {
        let (at, data) = ((LONG + 2 * number) * BLOCK, bytes(40 + number % 5, 4096));
        store.write(counted.inode, at, data, Stability::Unstable).unwrap();
    }
    let first = store.snapshot(&path("f"), SnapshotRequest::default()).unwrap().id;
    for block in (0..LONG).step_by(2) {
        let same = bytes(100 + block, 4096);
        store.write(counted.inode, block * BLOCK, same, Stability::Unstable).unwrap();
    }
    store.commit(counted.inode).unwrap();
    let expected = content(store, Source::File(counted.inode));
    store.delete_snapshot(first).unwrap();
    store.gc().unwrap();
    assert_eq!(store.stats().layer_count, 1);
    assert!(store.stats().reclaimed_entries >= LONG / 2, "else the test tries nothing");
    assert!(content(store, Source::File(counted.inode)) == expected);
    counted.assert_sound();
}

#[test]
fn each_of_many_dead_layers_is_found_at_a_fixed_cost() {
    const LAYERS: u64 = 1500;
    let kv = Arc::new(Counting::default());
    let index: Arc<dyn Kv> = Arc::clone(&kv) as Arc<dyn Kv>;
    let store = Store::open_with(index, Arc::new(MemoryDisk::new()), options()).unwrap();
    for number in 0..LAYERS {
        let path = path(&format!("f{number}"));
        let inode = store.create_file(&path, BLOCK).unwrap().attributes.inode;
        store.write(inode, 0, bytes(70, 4096), Stability::Unstable).unwrap();
    }
    store.commit_all().unwrap();
    for number in 0..LAYERS {
        store.remove_path(&path(&format!("f{number}"))).unwrap();
    }
    kv.reset();
    store.gc().unwrap();
    let steps = kv.steps() / LAYERS;
    assert_eq!(store.stats().layer_count, 0);
    assert!(steps <= STEPS_AN_ENTRY_MAX, "{steps} steps a layer");
    common::assert_sound(&store);
}
