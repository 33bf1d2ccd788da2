//! Faults that a review and a stress test found, each with the test that showed it.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use common::{Fixture, assert_sound, bytes, content, options, path};
use slackwater_blockstore::disk::{Disk, Fault, FileRole, MemoryDisk};
use slackwater_blockstore::kv::{Kv, KvFault, MemoryKv};
use slackwater_blockstore::{
    DeletionPolicy, ErrorKind, InodeId, Options, SetAttributes, SnapshotFilter, SnapshotRequest,
    Source, Stability, Store,
};

fn set_size(store: &Store, inode: InodeId, size_bytes: u64) {
    let set = SetAttributes { size_bytes: Some(size_bytes), ..SetAttributes::default() };
    store.set_attributes(inode, &set, None).unwrap();
}

fn write(store: &Store, inode: InodeId, block: u64, data: Bytes) {
    store.write(inode, block * 4096, data, Stability::Unstable).unwrap();
}

fn block(file: u64, number: u64) -> Bytes {
    let generation = if number < 30 { 5000 } else { 100 };
    bytes(generation + file * 100 + number, 4096)
}

/// Six files, most of whose segments are worth compacting.
fn worn() -> Fixture {
    let fixture = Fixture::new();
    for file in 0..6 {
        let made = fixture.store.create_file(&path(&format!("f{file}")), 0).unwrap();
        let inode = made.attributes.inode;
        let old = (0..40).map(|number| (number, bytes(100 + file * 100 + number, 4096)));
        for (number, data) in old.chain((0..30).map(|number| (number, block(file, number)))) {
            fixture.store.write(inode, number * 4096, data, Stability::FileSync).unwrap();
        }
    }
    fixture
}

/// A sync that fails in the commit of a compaction leaves the commit on the disk or not; both
/// must find their chunks after the restart.
#[test]
fn a_failed_sync_of_a_compaction_loses_nothing() {
    for syncs in 0.. {
        let fixture = worn();
        fixture.disk.inject(Fault::Sync(syncs));
        let done = fixture.store.gc().is_ok();
        let Fixture { kv, disk, store } = fixture;
        drop(store);
        disk.inject(Fault::Sync(u64::MAX));
        let fixture = Fixture::open(Arc::new(kv.crash()), disk);
        fixture.check();
        for file in 0..6 {
            let inode = fixture.store.resolve(&path(&format!("f{file}"))).unwrap().inode;
            for number in 0..40 {
                let read = fixture.store.read(Source::File(inode), number * 4096, 4096).unwrap();
                assert!(read.to_vec() == block(file, number), "sync {syncs}, f{file} {number}");
            }
        }
        if done {
            assert!(syncs > 0, "no sync failed");
            return;
        }
    }
}

/// A compaction that finds the disk full takes its half-written file away.
#[test]
fn a_compaction_on_a_full_disk_leaves_no_file() {
    let fixture = worn();
    for _ in 0..3 {
        // No room was kept, either.
        fixture.disk.reserve(0).unwrap();
        fixture.disk.reserve_for_start(0).unwrap();
        fixture.disk.inject(Fault::NoSpace(0));
        fixture.store.gc().unwrap_err();
    }
    let files = fixture.disk.list().unwrap();
    let compacted = files.iter().filter(|name| name.role == FileRole::Compacted).count();
    assert_eq!(compacted, 0, "half-written files stay");
}

/// Rewriting scattered blocks, each a run of its own, costs in proportion to their number.
#[test]
fn rewriting_scattered_blocks_is_not_quadratic() {
    let fixture = Fixture::new();
    let inode = fixture.store.create_file(&path("f"), 0).unwrap().attributes.inode;
    let mut took = [Duration::ZERO; 6];
    for (round, took) in (0..).zip(&mut took) {
        for number in 0..2000 {
            write(&fixture.store, inode, number * 2, bytes(round * 10_000 + number + 8, 4096));
        }
        let start = Instant::now();
        fixture.store.commit(inode).unwrap();
        *took = start.elapsed();
    }
    // The first time there is nothing to look up. Quadratic, each later one took hundreds of times
    // as long. The least of them tells: a busy machine may hold up any.
    let [new, later @ ..] = took;
    let again = later.into_iter().min().unwrap();
    assert!(again < new * 20, "2000 scattered blocks took {new:?}, then {again:?}");
}

/// A hole over 64 TiB is one entry; neither truncate nor diff visits its windows one by one.
#[test]
fn a_huge_hole_costs_nothing() {
    let fixture = Fixture::new();
    let store = &fixture.store;
    let (name, huge) = (path("f"), 1 << 42);
    let inode = store.create_file(&name, huge).unwrap().attributes.inode;
    write(store, inode, 0, bytes(9, 8192));
    let base = store.snapshot(&name, SnapshotRequest::default()).unwrap().id;
    set_size(store, inode, 4096);
    let (mut diff, mut both) = (Duration::MAX, Duration::MAX);
    // The least of some tries tells: a busy machine may hold up any.
    for _ in 0..5 {
        set_size(store, inode, huge);
        let target = store.snapshot(&name, SnapshotRequest::default()).unwrap().id;
        let start = Instant::now();
        store.diff(Some(base), target, 0, 100).unwrap();
        diff = diff.min(start.elapsed());
        set_size(store, inode, 4096);
        both = both.min(start.elapsed());
    }
    assert!(diff < Duration::from_millis(500), "diff took {diff:?}");
    assert!(both < Duration::from_secs(1), "diff and truncate took {both:?}");
}

/// Readers of a file whose lower layer collapses in several slices see its bytes all the time.
#[test]
fn readers_during_a_collapse_see_no_holes() {
    let store = {
        let mut options = Options::new("unused");
        options.background = false;
        options.compress = false;
        let kv: Arc<dyn Kv> = Arc::new(MemoryKv::new());
        Store::open_with(kv, Arc::new(MemoryDisk::new()), options).unwrap()
    };
    let data: Vec<Bytes> = (0..40).map(|part| bytes(part + 8, 1 << 20)).collect();
    let fill = |name: &str| {
        let inode = store.create_file(&path(name), 0).unwrap().attributes.inode;
        for (part, data) in (0..).zip(&data) {
            write(&store, inode, part * 256, data.clone());
        }
        store.commit(inode).unwrap();
        inode
    };
    fill("keeps the chunks");
    let (current, stop, wrong) = (AtomicU64::new(0), AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for reader in 0..12_u64 {
            let (store, data, current, stop, wrong) = (&store, &data, &current, &stop, &wrong);
            scope.spawn(move || {
                let mut random = reader;
                while !stop.load(Ordering::SeqCst) {
                    random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                    let (part, inside) = ((random >> 33) % 6, (random >> 45) % 200 * 4096);
                    let source = Source::File(InodeId::new(current.load(Ordering::SeqCst)));
                    if let Ok(read) = store.read(source, (part << 20) + inside, 4096) {
                        let at = usize::try_from(inside).unwrap();
                        let expected = &data[usize::try_from(part).unwrap()][at..at + 4096];
                        wrong.fetch_add(u64::from(read.to_vec() != expected), Ordering::SeqCst);
                    }
                }
            });
        }
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(15) && wrong.load(Ordering::SeqCst) == 0 {
            let inode = fill("x");
            current.store(inode.get(), Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(5));
            // Freezes the layer, which then collapses.
            set_size(&store, inode, 36 << 20);
            store.gc().unwrap();
            current.store(0, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(50));
            store.remove_path(&path("x")).unwrap();
        }
        stop.store(true, Ordering::SeqCst);
    });
    assert_eq!(wrong.load(Ordering::SeqCst), 0, "reads of bytes that nobody wrote");
}

/// A file whose dirty blocks no longer fit can still be cut.
#[test]
fn a_truncate_works_when_the_store_is_full() {
    let mut options = options();
    options.capacity_bytes = Some(8 << 20);
    let store =
        Store::open_with(Arc::new(MemoryKv::new()), Arc::new(MemoryDisk::new()), options).unwrap();
    let inode = store.create_file(&path("f"), 0).unwrap().attributes.inode;
    for part in 0..12 {
        write(&store, inode, part * 256, bytes(part + 8, 1 << 20));
    }
    store.commit(inode).unwrap_err();
    set_size(&store, inode, 0);
    store.commit(inode).unwrap();
    assert_sound(&store);
}

/// What lists, compares or counts clones says so when it cannot read the index: it does not leave
/// out what it did not see.
#[test]
fn an_index_that_cannot_be_read_leaves_nothing_out() {
    let fixture = Fixture::new();
    let store = &fixture.store;
    let inode = store.create_file(&path("d/f"), 0).unwrap().attributes.inode;
    let snapshot = |deletion| {
        let request = SnapshotRequest { deletion, ..SnapshotRequest::default() };
        store.snapshot(&path("d/f"), request).unwrap().id
    };
    write(store, inode, 0, bytes(8, 40_960));
    let base = snapshot(DeletionPolicy::Keep);
    // More than one layer of changes.
    for block in [3, 700] {
        write(store, inode, block, bytes(20 + block, 8192));
        snapshot(DeletionPolicy::Keep);
    }
    let target = snapshot(DeletionPolicy::OnZeroClones);
    store.clone_snapshot(target, &path("d/c")).unwrap();
    store.create_file(&path("d/g"), 0).unwrap();
    let ask = |store: &Store| -> slackwater_blockstore::Result<_> {
        let files = store.list_files("", None, 100)?.len();
        let snapshots = store.list_snapshots(&SnapshotFilter::default(), 100)?.len();
        let changed = store.diff(Some(base), target, 0, 100)?.extents;
        store.remove_path(&path("d/c"))?;
        Ok((files, snapshots, changed))
    };
    store.checkpoint().unwrap();
    let copy = || Fixture::open(Arc::new(fixture.kv.crash()), fixture.disk.crash(|| true));
    let expected = ask(&copy().store).unwrap();
    assert_eq!((expected.0, expected.1), (3, 4));
    assert_eq!(expected.2.len(), 2);
    for reads in 0.. {
        let copy = copy();
        copy.kv.inject(KvFault::Read(reads));
        let answer = ask(&copy.store);
        if copy.kv.disarm() {
            assert!(reads > 20, "the reads were not reached");
            return;
        }
        match answer {
            Ok(answer) => assert_eq!(answer, expected, "read {reads}"),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Io, "read {reads}: {error}"),
        }
        // The snapshot goes with its clone, or both are still there.
        let has_clone = copy.store.resolve(&path("d/c")).is_ok();
        assert_eq!(copy.store.snapshot_info(target).is_ok(), has_clone, "read {reads}");
        copy.check();
    }
}

#[test]
fn a_torn_append_behind_a_long_log_is_cut_off() {
    use std::io::Write as _;
    let directory = tempfile::tempdir().unwrap();
    let opened = || {
        let mut options = Options::new(directory.path());
        options.background = false;
        Store::open(options).unwrap()
    };
    let store = opened();
    let inode = store.create_file(&path("f"), 0).unwrap().attributes.inode;
    // Longer than the piece of a file that recovery holds in memory.
    let data = bytes(7, 3 << 20);
    store.write(inode, 0, data.clone(), Stability::FileSync).unwrap();
    drop(store);
    let log = directory.path().join("log/0000000000000001.seg");
    let mut file = std::fs::OpenOptions::new().append(true).open(log).unwrap();
    file.write_all(&vec![0xab; 3 << 20]).unwrap();
    drop(file);
    let store = opened();
    let reply = store.read(Source::File(inode), 0, data.len()).unwrap();
    assert!(reply.pieces.concat() == data);
    assert_sound(&store);
}

#[test]
fn each_block_that_is_read_counts_once() {
    let fixture = Fixture::new();
    let inode = fixture.store.create_file(&path("f"), 0).unwrap().attributes.inode;
    let distinct: Vec<_> = (1..=64).flat_map(|seed| bytes(seed, 4096)).collect();
    fixture.store.write(inode, 0, distinct.into(), Stability::FileSync).unwrap();
    let fixture = fixture.restart();
    let counts = || {
        let stats = fixture.store.stats();
        (stats.cache_hits, stats.cache_misses, stats.cache_bypassed)
    };
    let read = |blocks: usize| fixture.store.read(Source::File(inode), 0, blocks * 4096).unwrap();
    read(64);
    assert_eq!(counts(), (0, 0, 64), "a long run goes past the cache");
    read(3);
    assert_eq!(counts(), (0, 3, 64));
    read(3);
    assert_eq!(counts(), (3, 3, 64));
}

#[test]
fn a_file_that_becomes_the_clone_keeps_its_snapshot() {
    let fixture = Fixture::new();
    let store = &fixture.store;
    let inode = store.create_file(&path("f"), 8192).unwrap().attributes.inode;
    store.write(inode, 0, bytes(1, 4096), Stability::FileSync).unwrap();
    let take = |becomes_clone| {
        let deletion = DeletionPolicy::OnZeroClones;
        let request = SnapshotRequest { deletion, becomes_clone, ..SnapshotRequest::default() };
        store.snapshot(&path("f"), request)
    };
    let origin = || store.file_info(&path("f")).unwrap().origin_snapshot;
    let before = store.stats();
    let first = take(true).unwrap();
    let after = store.stats();
    assert_eq!(after.commits - before.commits, 1, "one synced batch");
    assert_eq!((after.file_count, after.layer_count), (before.file_count, before.layer_count + 1));
    assert_eq!((first.clone_count, origin()), (1, Some(first.id)));
    // What is written now is not in it.
    store.write(inode, 0, bytes(9, 4096), Stability::FileSync).unwrap();
    assert_eq!(content(store, Source::Snapshot(first.id))[..4096], bytes(1, 4096)[..]);
    // It stays its clone, whatever comes later.
    let second = take(false).unwrap();
    assert_eq!((second.clone_count, origin()), (0, Some(first.id)));
    let refused = take(true).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Exists);
    assert!(refused.to_string().contains(&first.id.to_string()), "{refused}");
    assert_eq!(store.snapshot_info(first.id).unwrap().clone_count, 1);
    // The snapshot goes with its last clone.
    store.clone_snapshot(first.id, &path("c")).unwrap();
    store.remove_path(&path("f")).unwrap();
    assert_eq!(store.snapshot_info(first.id).unwrap().clone_count, 1);
    store.remove_path(&path("c")).unwrap();
    assert_eq!(store.snapshot_info(first.id).unwrap_err().kind(), ErrorKind::NotFound);
    store.gc().unwrap();
    fixture.check();
}
