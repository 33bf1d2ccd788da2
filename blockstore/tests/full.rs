//! What a full store, and a full disk below it, still take; and reclaim that cannot go on as it
//! would.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

mod common;

use std::sync::Arc;

use common::{Fixture, assert_sound, bytes, content, options, path};
use slackwater_blockstore::disk::{Disk, Fault, MemoryDisk};
use slackwater_blockstore::kv::{Family, MemoryKv};
use slackwater_blockstore::{
    Error, ErrorKind, InodeId, Labels, SetAttributes, SnapshotId, SnapshotRequest, Source,
    Stability, Store,
};

const BLOCK: u64 = 4096;

fn small_store(capacity_bytes: u64) -> (MemoryDisk, Arc<Store>) {
    let mut options = options();
    options.capacity_bytes = Some(capacity_bytes);
    let disk = MemoryDisk::new();
    let kv = Arc::new(MemoryKv::new());
    (disk.clone(), Store::open_with(kv, Arc::new(disk), options).unwrap())
}

fn kind<T: std::fmt::Debug>(outcome: Result<T, Error>) -> ErrorKind {
    outcome.unwrap_err().kind()
}

fn set_size(store: &Store, inode: InodeId, size_bytes: u64) {
    let set = SetAttributes { size_bytes: Some(size_bytes), ..SetAttributes::default() };
    store.set_attributes(inode, &set, None).unwrap();
}

/// Makes files until there is no room; answers how many.
fn make_files(store: &Store) -> u64 {
    for number in 0.. {
        if let Err(error) = store.create_file(&path(&format!("n{number}")), 0) {
            assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
            return number;
        }
    }
    unreachable!("names take room")
}

/// Gives a snapshot this label alone.
fn label(store: &Store, id: SnapshotId, name: &str, value: String) -> Result<(), Error> {
    let labels = Labels::from([(name.to_owned(), value)]);
    store.change_snapshot_labels(id, Box::new(|_| labels)).map(drop)
}

#[test]
fn labels_do_not_eat_the_room_that_deletes_need() {
    // With one log file, which cannot be given back before it is full: no room comes back in between.
    let mut options = options();
    (options.capacity_bytes, options.segment_bytes) = (Some(1 << 20), 1 << 20);
    let kv = Arc::new(MemoryKv::new());
    let store = Store::open_with(kv, Arc::new(MemoryDisk::new()), options).unwrap();
    store.create_file(&path("kept"), 0).unwrap();
    let snapshot = || store.snapshot(&path("kept"), SnapshotRequest::default()).map(|made| made.id);
    let (first, second) = (snapshot().unwrap(), snapshot().unwrap());
    label(&store, first, "long", "x".repeat(100)).unwrap();
    let made = make_files(&store);
    // What is as long or shorter is taken, and what is longer, or more, is not.
    label(&store, first, "more", "y".repeat(100)).unwrap();
    assert_eq!(kind(label(&store, first, "more", "y".repeat(101))), ErrorKind::NoSpace);
    assert_eq!(kind(label(&store, second, "a", String::new())), ErrorKind::NoSpace);
    let many = (0..20).map(|number| (number.to_string(), String::new())).collect::<Labels>();
    let split = store.change_snapshot_labels(first, Box::new(|_| many));
    assert_eq!(kind(split), ErrorKind::NoSpace);
    // Changes that free nothing are refused before those that do, and before none.
    let mut turn = 0;
    let refused = loop {
        turn += 1;
        match label(&store, first, ["odd", "eve"][turn % 2], "z".repeat(100)) {
            Ok(()) => assert!(turn < 10_000, "all were taken"),
            Err(error) => break error,
        }
    };
    assert_eq!(refused.kind(), ErrorKind::NoSpace, "{refused}");
    store.change_snapshot_labels(first, Box::new(|labels| labels)).unwrap();
    store.change_snapshot_labels(first, Box::new(|_| Labels::new())).unwrap();
    // A clone in the place of a file is refused for that, whether there is room or not.
    let exists = store.clone_snapshot(second, &path("kept"));
    assert_eq!(kind(exists), ErrorKind::Exists);
    store.delete_snapshot(first).unwrap();
    for number in 0..made {
        store.remove_path(&path(&format!("n{number}"))).unwrap();
    }
    store.gc().unwrap();
    label(&store, second, "a", "x".repeat(100)).unwrap();
    assert_sound(&store);
}

#[test]
fn names_do_not_eat_the_room_that_deletes_need() {
    let (_, store) = small_store(1 << 20);
    let kept = store.create_file(&path("kept"), 0).unwrap().attributes.inode;
    store.write(kept, 0, bytes(8, 8192), Stability::FileSync).unwrap();
    let id = store.snapshot(&path("kept"), SnapshotRequest::default()).unwrap().id;
    let made = make_files(&store);
    assert!(made > 100, "{made} files");
    assert_eq!(kind(store.create_directories(&path("d"))), ErrorKind::NoSpace);
    assert_eq!(kind(store.clone_snapshot(id, &path("c"))), ErrorKind::NoSpace);
    assert_eq!(kind(store.snapshot(&path("kept"), SnapshotRequest::default())), ErrorKind::NoSpace);
    // What is there already can still be found, renamed and cut.
    store.rename_path(&path("n0"), &path("m0")).unwrap();
    set_size(&store, kept, 5000);
    // Changes that free nothing are refused before deletes are.
    let mut renames = 0;
    let (mut from, mut to) = (path("m0"), path("m1"));
    loop {
        match store.rename_path(&from, &to) {
            Ok(()) => renames += 1,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
                break;
            }
        }
        std::mem::swap(&mut from, &mut to);
    }
    assert!(renames > 10, "{renames}");
    // A truncate frees something, whatever was written behind the new end and is not committed.
    store.write(kept, 3 * BLOCK, bytes(9, 4096), Stability::Unstable).unwrap();
    set_size(&store, kept, 4096);
    store.delete_snapshot(id).unwrap();
    for number in 1..made {
        store.remove_path(&path(&format!("n{number}"))).unwrap();
    }
    store.gc().unwrap();
    assert_sound(&store);
    assert!(make_files(&store) > 100, "the room came back");
}

/// Somebody else has taken the last byte of the disk.
#[test]
fn a_disk_without_a_free_byte_takes_deletes() {
    let (disk, store) = small_store(4 << 20);
    assert!(disk.reserved_bytes() > 0, "room is kept");
    for number in 0..4 {
        let inode = store.create_file(&path(&format!("f{number}")), 0).unwrap().attributes.inode;
        let data = bytes(10 + number, 400_000);
        store.write(inode, 0, data, Stability::FileSync).unwrap();
    }
    let id = store.snapshot(&path("f1"), SnapshotRequest::default()).unwrap().id;
    disk.inject(Fault::Full(0));
    let inode = store.resolve(&path("f0")).unwrap().inode;
    // The call that the disk becomes full in may still find room that was the log's already.
    let _ = store.write(inode, 0, bytes(50, 300_000), Stability::FileSync);
    let refused = store.write(inode, 0, bytes(51, 300_000), Stability::FileSync);
    assert_eq!(kind(refused), ErrorKind::NoSpace);
    // What the refused write gave back takes a few names.
    assert!(make_files(&store) < 100);
    for number in 1..4 {
        store.remove_path(&path(&format!("f{number}"))).unwrap();
    }
    store.delete_snapshot(id).unwrap();
    store.gc().unwrap();
    store.write(inode, 0, bytes(52, 300_000), Stability::FileSync).expect("room came back");
    assert_sound(&store);
    store.gc().unwrap();
    assert!(disk.reserved_bytes() > 0, "room is kept again");
}

/// A hole over all of a disk meets thousands of entries of the layer that it moves to.
#[test]
fn a_hole_over_many_entries_collapses_in_slices() {
    const ENTRIES: u64 = 4000;
    for hole_is_above in [false, true] {
        let fixture = Fixture::new();
        let store = &fixture.store;
        let (name, size) = (path("f"), 2 * ENTRIES * BLOCK);
        let inode = store.create_file(&name, size).unwrap().attributes.inode;
        let scatter = |seed: u64| {
            for number in 0..ENTRIES {
                let data = bytes(seed + number % 5, 4096);
                store.write(inode, number * 2 * BLOCK, data, Stability::Unstable).unwrap();
            }
            store.commit(inode).unwrap();
        };
        let hole = || {
            set_size(store, inode, 0);
            set_size(store, inode, size);
        };
        let snapshot = || store.snapshot(&name, SnapshotRequest::default()).unwrap().id;
        store.write(inode, 0, bytes(30, 8192), Stability::FileSync).unwrap();
        let below = snapshot();
        // The layer that goes, and the one that it goes to.
        let goes = if hole_is_above {
            scatter(40);
            let goes = snapshot();
            hole();
            goes
        } else {
            hole();
            let goes = snapshot();
            scatter(40);
            goes
        };
        let expected = content(store, Source::File(inode));
        let before = store.stats().commits;
        store.delete_snapshot(goes).unwrap();
        store.gc().unwrap();
        // One of 512 entries each.
        let commits = store.stats().commits - before;
        assert!(commits > ENTRIES / 512, "{commits} commits, hole above: {hole_is_above}");
        assert!(content(store, Source::File(inode)) == expected);
        assert_eq!(store.stats().layer_count, 2, "it did collapse");
        store.delete_snapshot(below).unwrap();
        store.gc().unwrap();
        fixture.check();
    }
}

/// One job of reclaim that always fails holds up none of the others.
#[test]
fn a_reclaim_that_fails_is_set_aside() {
    let fixture = Fixture::new();
    let store = &fixture.store;
    for name in ["damaged", "sound"] {
        let inode = store.create_file(&path(name), 0).unwrap().attributes.inode;
        let data = bytes(if name == "sound" { 60 } else { 70 }, 40_960);
        store.write(inode, 0, data, Stability::FileSync).unwrap();
    }
    let (key, value) = fixture.kv.entries(Family::Map)[0].clone();
    fixture.kv.tamper(Family::Map, &key, Some(vec![0xff]));
    // In the order in which they are queued.
    store.remove_path(&path("damaged")).unwrap();
    store.remove_path(&path("sound")).unwrap();
    for failures in 1..3 {
        assert_eq!(kind(store.gc()), ErrorKind::Corrupt);
        let stats = store.stats();
        assert_eq!((stats.reclaim_failures, stats.reclaim_jobs_set_aside), (failures, 1));
        assert_eq!(stats.mapped_blocks, 10, "the sound one was reclaimed");
    }
    fixture.kv.tamper(Family::Map, &key, Some(value));
    store.gc().unwrap();
    let stats = store.stats();
    assert_eq!((stats.reclaim_failures, stats.reclaim_jobs_set_aside), (2, 0));
    assert_eq!((stats.mapped_blocks, stats.chunk_count), (0, 0));
    fixture.check();
}
