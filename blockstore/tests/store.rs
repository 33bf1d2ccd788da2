//! What the store promises, one promise a test: snapshots and clones in constant work, blocks
//! stored once, holes that take nothing, deletes in proportion to the change, clear errors.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::cast_possible_truncation,
    missing_docs,
    reason = "tests"
)]

mod common;

use std::sync::Arc;

use bytes::Bytes;
use common::{Fixture, assert_sound, bytes, content, options, path};
use slackwater_blockstore::disk::{Disk, FileName, FileRole};
use slackwater_blockstore::kv::{Family, Kv, KvRead};
use slackwater_blockstore::{
    CreateMode, ErrorKind, FilePath, InodeId, Name, Options, SegmentId, SetAttributes, SnapshotId,
    SnapshotRequest, Source, Stability, Store,
};

fn file(store: &Store, name: &str, size: u64) -> InodeId {
    store.create_file(&path(name), size).unwrap().attributes.inode
}

fn write(store: &Store, inode: InodeId, block: u64, data: Bytes) {
    store.write(inode, block * 4096, data, Stability::Unstable).unwrap();
}

fn snapshot(store: &Store, name: &str) -> SnapshotId {
    store.snapshot(&path(name), SnapshotRequest::default()).unwrap().id
}

fn resize(store: &Store, inode: InodeId, size_bytes: u64) {
    let set = SetAttributes { size_bytes: Some(size_bytes), ..SetAttributes::default() };
    store.set_attributes(inode, &set, None).unwrap();
}

/// Index entries of a family.
fn entries(fixture: &Fixture, family: Family) -> usize {
    fixture.kv.entries(family).len()
}

/// A file whose every second block holds data: one extent a block.
fn fragmented(store: &Store, name: &str, extents: u64) -> InodeId {
    let inode = file(store, name, extents * 2 * 4096);
    for extent in 0..extents {
        write(store, inode, extent * 2, bytes(1000 + extent, 4096));
    }
    store.commit(inode).unwrap();
    inode
}

#[test]
fn snapshot_and_clone_append_the_same_bytes_whatever_the_size() {
    let mut costs = Vec::new();
    for (extents, depth) in [(1, 1), (3000, 1), (10, 60)] {
        let fixture = Fixture::new();
        let store = &fixture.store;
        let inode = fragmented(store, "a/base", extents);
        for round in 0..depth {
            write(store, inode, 0, bytes(90_000 + round, 4096));
            snapshot(store, "a/base");
        }
        write(store, inode, 0, bytes(80_000, 4096));
        store.commit(inode).unwrap();
        let before = store.stats();
        let id = snapshot(store, "a/base");
        store.clone_snapshot(id, &path("a/copy")).unwrap();
        let after = store.stats();
        assert_eq!(after.commits - before.commits, 2, "one synced batch each");
        assert_eq!(after.chunk_count, before.chunk_count);
        assert_eq!(after.mapped_blocks, before.mapped_blocks);
        costs.push(after.appended_bytes - before.appended_bytes);
        fixture.check();
    }
    assert!(costs.windows(2).all(|pair| pair[0] == pair[1]), "{costs:?}");
}

#[test]
fn a_clone_of_an_unwritten_clone_adds_no_layer_below() {
    let fixture = Fixture::new();
    let store = &fixture.store;
    fragmented(store, "f", 5);
    let mut id = snapshot(store, "f");
    let layers = store.stats().layer_count;
    for round in 0..20 {
        let clone = format!("c{round}");
        store.clone_snapshot(id, &path(&clone)).unwrap();
        id = snapshot(store, &clone);
    }
    // Each clone has its open layer; no other was made.
    assert_eq!(store.stats().layer_count, layers + 20);
    fixture.check();
}

#[test]
fn deleting_a_clone_visits_what_it_changed() {
    let fixture = Fixture::new();
    let store = &fixture.store;
    fragmented(store, "base", 5000);
    let id = snapshot(store, "base");
    let clone = store.clone_snapshot(id, &path("clone")).unwrap().attributes.inode;
    for block in 0..500 {
        write(store, clone, block * 7, bytes(500_000 + block, 4096));
    }
    store.commit(clone).unwrap();
    let chunks = store.stats().chunk_count;
    let before = store.stats();
    store.remove_path(&path("clone")).unwrap();
    let removed = store.stats();
    assert_eq!(removed.commits - before.commits, 1);
    assert!(removed.appended_bytes - before.appended_bytes < 2000, "O(1) for the caller");
    let report = store.gc().unwrap();
    assert!((500..=520).contains(&report.entries), "visited {} entries", report.entries);
    assert_eq!(store.stats().chunk_count, chunks - 500);
    fixture.check();
}

#[test]
fn blocks_are_stored_once_and_zeros_never() {
    let fixture = Fixture::new();
    let store = &fixture.store;
    let data = bytes(77, 1 << 20);
    for number in 0..10 {
        let inode = file(store, &format!("f{number}"), 0);
        store.write(inode, 0, data.clone(), Stability::FileSync).unwrap();
    }
    let stats = store.stats();
    assert_eq!(stats.chunk_count, 256);
    assert_eq!(stats.mapped_blocks, 2560);
    assert!(stats.chunk_bytes <= 1 << 20);
    let zeros = file(store, "zeros", 0);
    store.write(zeros, 0, bytes(0, 1 << 20), Stability::FileSync).unwrap();
    assert_eq!(store.stats().chunk_count, 256);
    assert_eq!(store.attributes(zeros).unwrap().used_bytes, 0);
    assert_eq!(store.attributes(zeros).unwrap().size_bytes, 1 << 20);
    fixture.check();
}

#[test]
fn used_bytes_follow_writes_holes_truncates_and_clones() {
    let fixture = Fixture::new();
    let store = &fixture.store;
    let inode = file(store, "f", 1 << 30);
    let used = |inode| store.attributes(inode).unwrap().used_bytes / 4096;
    assert_eq!(used(inode), 0);
    write(store, inode, 10, bytes(100, 40 * 4096));
    store.commit(inode).unwrap();
    assert_eq!(used(inode), 40);
    write(store, inode, 20, bytes(0, 5 * 4096));
    store.commit(inode).unwrap();
    assert_eq!(used(inode), 35);
    let id = snapshot(store, "f");
    let clone = store.clone_snapshot(id, &path("c")).unwrap();
    assert_eq!((clone.attributes.used_bytes / 4096, clone.unique_bytes), (35, 0));
    let clone = clone.attributes.inode;
    resize(store, clone, 15 * 4096 + 1);
    assert_eq!(used(clone), 6);
    resize(store, clone, 1 << 40);
    assert_eq!(used(clone), 6);
    assert_eq!(used(inode), 35);
    let read = store.read(Source::File(clone), 15 * 4096, 8192).unwrap().to_vec();
    assert_eq!(read[0], bytes(100, 40 * 4096)[5 * 4096]);
    assert!(read[1..].iter().all(|&byte| byte == 0), "zeros behind the old end");
    fixture.check();
}

#[test]
fn a_truncate_of_any_size_is_one_entry() {
    let fixture = Fixture::new();
    let store = &fixture.store;
    let inode = fragmented(store, "f", 2000);
    let id = snapshot(store, "f");
    let before = entries(&fixture, Family::Map);
    resize(store, inode, 0);
    assert_eq!(entries(&fixture, Family::Map), before + 1, "one hole over the snapshot's data");
    // With much in the open layer itself the work goes to the background.
    let other = fragmented(store, "g", 2000);
    let appended = store.stats().appended_bytes;
    resize(store, other, 0);
    assert!(store.stats().appended_bytes - appended < 2000);
    assert!(content(store, Source::File(other)).is_empty());
    resize(store, other, 4_096_000);
    assert!(content(store, Source::File(other)).iter().all(|&byte| byte == 0));
    store.delete_snapshot(id).unwrap();
    store.gc().unwrap();
    assert_eq!(store.stats().chunk_count, 0);
    fixture.check();
}

#[test]
fn a_hole_that_reaches_into_the_next_window_hides_after_a_restart() {
    // Found by the model: the set of a layer's windows missed what reaches in from before.
    let fixture = Fixture::new();
    let inode = file(&fixture.store, "f", 0);
    write(&fixture.store, inode, 0, bytes(7000, 300 * 4096));
    let id = snapshot(&fixture.store, "f");
    write(&fixture.store, inode, 5, bytes(7001, 4096));
    resize(&fixture.store, inode, 42 * 4096);
    resize(&fixture.store, inode, 300 * 4096);
    let fixture = fixture.restart();
    let read = fixture.store.read(Source::File(inode), 260 * 4096, 4096).unwrap().to_vec();
    assert!(read.iter().all(|&byte| byte == 0));
    let old = fixture.store.read(Source::Snapshot(id), 260 * 4096, 4096).unwrap().to_vec();
    assert!(old == bytes(7000, 300 * 4096)[260 * 4096..261 * 4096]);
    fixture.check();
}

#[test]
fn a_thousand_snapshots_in_a_row_read_right() {
    let fixture = Fixture::new();
    let store = &fixture.store;
    let inode = file(store, "f", 0);
    let mut ids = Vec::new();
    for round in 0..1000 {
        write(store, inode, round % 50, bytes(3000 + round, 4096));
        ids.push(snapshot(store, "f"));
    }
    let fixture = fixture.restart();
    let first = content(&fixture.store, Source::Snapshot(ids[0]));
    assert!(first == bytes(3000, 4096));
    let last = content(&fixture.store, Source::Snapshot(ids[999]));
    for block in 0..50_usize {
        let expected = bytes(3950 + block as u64, 4096);
        assert!(last[block * 4096..(block + 1) * 4096] == expected, "block {block}");
    }
    for id in &ids {
        fixture.store.delete_snapshot(*id).unwrap();
    }
    fixture.store.gc().unwrap();
    assert_eq!(fixture.store.stats().layer_count, 1, "all collapsed into the file's own");
    assert!(content(&fixture.store, Source::File(inode)) == last);
    fixture.check();
}

#[test]
fn after_deleting_all_the_segments_are_gone() {
    let fixture = Fixture::new();
    let store = &fixture.store;
    let empty = fixture.disk.used_bytes();
    for number in 0..8 {
        let inode = file(store, &format!("f{number}"), 0);
        store.write(inode, 0, bytes(400 + number, 1 << 20), Stability::FileSync).unwrap();
        snapshot(store, &format!("f{number}"));
    }
    assert!(fixture.disk.used_bytes() > 8 << 20);
    for number in 0..8 {
        store.remove_path(&path(&format!("f{number}"))).unwrap();
    }
    for snapshot in store.list_snapshots(&Default::default(), 100).unwrap() {
        store.delete_snapshot(snapshot.id).unwrap();
    }
    let report = store.gc().unwrap();
    assert!(report.freed_bytes > 8 << 20);
    // What is left: the open segment, and the commit records of the deletes themselves.
    let segment = store.options().segment_bytes;
    assert!(fixture.disk.used_bytes() < empty + 3 * segment, "{}", fixture.disk.used_bytes());
    fixture.check();
}

#[test]
fn compaction_moves_chunks_that_are_still_read() {
    let fixture = Fixture::new();
    let store = &fixture.store;
    let keep = file(store, "keep", 0);
    let drop = file(store, "drop", 0);
    for block in 0..200 {
        write(store, keep, block, bytes(10_000 + block, 4096));
        write(store, drop, block, bytes(20_000 + block, 4 * 4096));
        store.commit(keep).unwrap();
        store.commit(drop).unwrap();
    }
    let expected = content(store, Source::File(keep));
    store.remove_path(&path("drop")).unwrap();
    let report = store.gc().unwrap();
    assert!(report.segments > 3 && report.freed_bytes > 1 << 20, "{report:?}");
    assert!(content(store, Source::File(keep)) == expected);
    // What was dropped is stored anew, what was kept is found.
    let misses = store.stats().dedup_misses;
    let again = file(store, "again", 0);
    store.write(again, 0, bytes(10_000, 4096), Stability::FileSync).unwrap();
    store.write(again, 4096, bytes(20_000, 4096), Stability::FileSync).unwrap();
    assert_eq!(store.stats().dedup_misses, misses + 1);
    fixture.check();
    let fixture = fixture.restart();
    assert!(content(&fixture.store, Source::File(keep)) == expected);
    fixture.check();
}

#[test]
fn a_full_store_says_so_and_deletes_still_work() {
    let fixture = Fixture::new();
    fixture.disk.set_capacity(4 << 20);
    let store = &fixture.store;
    let mut full = None;
    for number in 0..200 {
        let inode = file(store, &format!("f{number}"), 0);
        let data = bytes(900 + number, 256 << 10);
        if let Err(error) = store.write(inode, 0, data, Stability::FileSync) {
            full = Some((inode, error));
            break;
        }
    }
    let (inode, error) = full.expect("the store fills up");
    assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
    fixture.check();
    assert_eq!(store.commit(inode).unwrap_err().kind(), ErrorKind::NoSpace);
    for number in 0..10 {
        store.remove_path(&path(&format!("f{number}"))).unwrap();
    }
    store.gc().unwrap();
    store.commit(inode).expect("there is room again");
    fixture.check();
}

#[test]
fn bad_requests_get_precise_errors() {
    let fixture = Fixture::new();
    let store = &fixture.store;
    let inode = file(store, "f", 0);
    let kind = |error: slackwater_blockstore::Error| error.kind();
    let unknown = SnapshotId::random();
    assert_eq!(kind(store.clone_snapshot(unknown, &path("c")).unwrap_err()), ErrorKind::NotFound);
    assert_eq!(kind(store.delete_snapshot(unknown).unwrap_err()), ErrorKind::NotFound);
    assert_eq!(kind(store.create_file(&path("f"), 0).unwrap_err()), ErrorKind::Exists);
    assert_eq!(kind(store.create_file(&path("f/g"), 0).unwrap_err()), ErrorKind::NotDirectory);
    let huge = store.create_file(&path("huge"), u64::MAX).unwrap_err();
    assert_eq!(kind(huge), ErrorKind::FileTooBig);
    let far = store.write(inode, u64::MAX - 5, bytes(1, 10), Stability::Unstable).unwrap_err();
    assert_eq!(kind(far), ErrorKind::FileTooBig);
    let id = snapshot(store, "f");
    assert_eq!(kind(store.clone_snapshot(id, &path("f")).unwrap_err()), ErrorKind::Exists);
    let named = SnapshotRequest { name: Some("v1".into()), ..SnapshotRequest::default() };
    store.snapshot(&path("f"), named.clone()).unwrap();
    assert_eq!(kind(store.snapshot(&path("f"), named).unwrap_err()), ErrorKind::Exists);
    store.create_directories(&path("d/e")).unwrap();
    assert_eq!(
        kind(store.snapshot(&path("d"), Default::default()).unwrap_err()),
        ErrorKind::WrongKind
    );
    assert_eq!(kind(store.remove_path(&path("d")).unwrap_err()), ErrorKind::NotEmpty);
    let directory = store.resolve(&path("d")).unwrap().inode;
    assert_eq!(kind(store.commit(directory).unwrap_err()), ErrorKind::IsDirectory);
    let below = store.resolve(&path("d/e")).unwrap().inode;
    let name = Name::new(b"d").unwrap();
    let cycle = store.rename(InodeId::ROOT, &name, below, &name).unwrap_err();
    assert_eq!(kind(cycle), ErrorKind::Invalid);
    store.remove_path(&path("f")).unwrap();
    assert_eq!(kind(store.attributes(inode).unwrap_err()), ErrorKind::Stale);
    assert_eq!(kind(store.read(Source::File(inode), 0, 1).unwrap_err()), ErrorKind::Stale);
    let late = store.write(inode, 0, bytes(1, 1), Stability::Unstable).unwrap_err();
    assert_eq!(kind(late), ErrorKind::Stale);
    fixture.check();
}

#[test]
fn exclusive_create_can_be_repeated() {
    let fixture = Fixture::new();
    let store = &fixture.store;
    let name = Name::new(b"x").unwrap();
    let create = |mode| store.create(InodeId::ROOT, &name, mode, &SetAttributes::default());
    let first = create(CreateMode::Exclusive(42)).unwrap();
    let again = create(CreateMode::Exclusive(42)).unwrap();
    assert_eq!(first.attributes.inode, again.attributes.inode);
    assert_eq!(create(CreateMode::Exclusive(43)).unwrap_err().kind(), ErrorKind::Exists);
    assert_eq!(create(CreateMode::Guarded).unwrap_err().kind(), ErrorKind::Exists);
    let taken = create(CreateMode::Unchecked).unwrap();
    assert_eq!(taken.attributes.inode, first.attributes.inode);
    fixture.check();
}

#[test]
fn a_guarded_setattr_refuses_a_changed_object() {
    let fixture = Fixture::new();
    let store = &fixture.store;
    let inode = file(store, "f", 0);
    let seen = store.attributes(inode).unwrap().changed_at;
    let set = SetAttributes { mode: Some(0o600), ..SetAttributes::default() };
    store.set_attributes(inode, &set, Some(seen)).unwrap();
    let error = store.set_attributes(inode, &set, Some(seen)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotSynchronized);
}

#[test]
fn a_flipped_bit_is_an_error_that_names_the_place_never_wrong_bytes() {
    let fixture = Fixture::new();
    let inode = file(&fixture.store, "f", 0);
    fixture.store.write(inode, 0, bytes(600, 64 << 10), Stability::FileSync).unwrap();
    let fixture = fixture.restart();
    let name = FileName { role: FileRole::Log, number: SegmentId::new(1) };
    fixture.disk.flip_bit(name, 20_000);
    let error = fixture.store.read(Source::File(inode), 0, 64 << 10).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.to_string().contains("log/0000000000000001.seg"), "{error}");
    let report = fixture.store.check(true).unwrap();
    assert!(report.problems.iter().any(|p| p.starts_with("I2")), "{:?}", report.problems);
}

#[test]
fn check_finds_every_kind_of_damage_in_the_index() {
    let damage: [(Family, &str); 6] = [
        (Family::Refs, "I1"),
        (Family::Segment, "I2"),
        (Family::Layer, "I5"),
        (Family::Cookie, "I7"),
        (Family::Child, "I5"),
        (Family::Inode, "I7"),
    ];
    for (family, invariant) in damage {
        let fixture = Fixture::new();
        let store = &fixture.store;
        let inode = file(store, "f", 0);
        store.write(inode, 0, bytes(5, 8192), Stability::FileSync).unwrap();
        let id = snapshot(store, "f");
        store.clone_snapshot(id, &path("c")).unwrap();
        fixture.check();
        let (key, _) = fixture.kv.entries(family).pop().unwrap();
        fixture.kv.tamper(family, &key, None);
        let report = store.check(false).unwrap();
        let found = report.problems.iter().any(|problem| problem.starts_with(invariant));
        assert!(found, "{family:?}: {:?}", report.problems);
    }
}

#[test]
fn snapshots_expire_and_go_with_their_last_clone() {
    use slackwater_blockstore::{DeletionPolicy, Timestamp};
    let fixture = Fixture::new();
    let store = &fixture.store;
    file(store, "f", 100);
    let request = SnapshotRequest { deletion: DeletionPolicy::OnZeroClones, ..Default::default() };
    let id = store.snapshot(&path("f"), request).unwrap().id;
    store.clone_snapshot(id, &path("c1")).unwrap();
    store.clone_snapshot(id, &path("c2")).unwrap();
    store.remove_path(&path("c1")).unwrap();
    assert_eq!(store.snapshot_info(id).unwrap().clone_count, 1);
    store.remove_path(&path("c2")).unwrap();
    assert_eq!(store.snapshot_info(id).unwrap_err().kind(), ErrorKind::NotFound);
    let expires_at = Some(Timestamp::from_nanos(1));
    let old = SnapshotRequest { expires_at, ..Default::default() };
    let old = store.snapshot(&path("f"), old).unwrap().id;
    let later = Timestamp::new(1 << 33, 0);
    let young = SnapshotRequest { expires_at: later, ..Default::default() };
    let young = store.snapshot(&path("f"), young).unwrap().id;
    store.gc().unwrap();
    assert_eq!(store.snapshot_info(old).unwrap_err().kind(), ErrorKind::NotFound);
    store.snapshot_info(young).unwrap();
    fixture.check();
}

#[test]
fn no_snapshot_expires_by_a_clock_that_may_be_wrong() {
    use slackwater_blockstore::Timestamp;
    let fixture = Fixture::new();
    file(&fixture.store, "f", 100);
    let request =
        SnapshotRequest { expires_at: Some(Timestamp::from_nanos(1)), ..Default::default() };
    let id = fixture.store.snapshot(&path("f"), request).unwrap().id;
    fixture.store.close().unwrap();
    let (kv, disk): (Arc<dyn Kv>, Arc<dyn Disk>) = (fixture.kv, Arc::new(fixture.disk));
    let steady_clock = Options::new("unused").steady_clock;
    let store = Store::open_with(kv, disk, Options { steady_clock, ..options() }).unwrap();
    store.gc().unwrap();
    store.snapshot_info(id).unwrap();
}

#[test]
fn a_large_directory_is_read_in_pages_while_it_changes() {
    let fixture = Fixture::new();
    let store = &fixture.store;
    for number in 0..3000 {
        file(store, &format!("f{number}"), 0);
    }
    let mut seen = Vec::new();
    let mut cookie = 0;
    loop {
        let page = store.read_directory(InodeId::ROOT, cookie, 100).unwrap();
        seen.extend(page.entries.iter().map(|entry| entry.name.to_string()));
        let Some(last) = page.entries.last() else { break };
        cookie = last.cookie;
        // One that was listed goes, one is added: neither shifts the others.
        let listed = page.entries[0].name.clone();
        store.remove(InodeId::ROOT, &listed).unwrap();
        file(store, &format!("new{cookie}"), 0);
        if page.end {
            break;
        }
    }
    let mut distinct = seen.clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), seen.len(), "nothing is listed twice");
    let old = seen.iter().filter(|name| name.starts_with('f')).count();
    assert_eq!(old, 3000, "nothing is missed");
    fixture.check();
}

#[test]
fn files_are_listed_in_pages_by_prefix() {
    let fixture = Fixture::new();
    let store = &fixture.store;
    for name in ["a/1", "a/2/x", "a/2/y", "a/3", "ab", "b/1"] {
        file(store, name, 0);
    }
    let list = |prefix: &str, after: Option<&str>, limit| -> Vec<String> {
        let after = after.map(path);
        let found = store.list_files(prefix, after.as_ref(), limit).unwrap();
        found.iter().map(|info| info.path.to_string()).collect()
    };
    assert_eq!(list("", None, 100), ["a/1", "a/2/x", "a/2/y", "a/3", "ab", "b/1"]);
    assert_eq!(list("a", None, 3), ["a/1", "a/2/x", "a/2/y"]);
    assert_eq!(list("a", Some("a/2/y"), 3), ["a/3", "ab"]);
    assert_eq!(list("a/2", None, 9), ["a/2/x", "a/2/y"]);
    assert_eq!(list("", Some("a/2/x"), 2), ["a/2/y", "a/3"]);
    assert_eq!(list("", Some("a/2/gone"), 1), ["a/2/x"]);
}

#[test]
fn the_data_directory_is_locked_and_stamped() {
    let directory = tempfile::tempdir().unwrap();
    let options = Options { background: false, ..Options::new(directory.path()) };
    let store = Store::open(options.clone()).unwrap();
    let id = store.store_id();
    let locked = Store::open(options.clone()).unwrap_err();
    assert!(locked.to_string().contains("in use by another process"), "{locked}");
    let inode = file(&store, "f", 0);
    store.write(inode, 0, bytes(9, 100_000), Stability::FileSync).unwrap();
    // Without close: the index was never flushed, the log has all.
    drop(store);
    let store = Store::open(options.clone()).unwrap();
    assert_eq!(store.store_id(), id);
    assert!(content(&store, Source::File(inode)) == bytes(9, 100_000));
    assert_sound(&store);
    store.close().unwrap();
    assert_eq!(store.create_file(&path("x"), 0).unwrap_err().kind(), ErrorKind::Closed);
    drop(store);
    let format = directory.path().join("FORMAT");
    std::fs::write(&format, "slackwater 3\n").unwrap();
    let newer = Store::open(options.clone()).unwrap_err();
    assert!(newer.to_string().contains("format 3, this program reads format 2"), "{newer}");
    std::fs::write(&format, "else\n").unwrap();
    assert_eq!(Store::open(options.clone()).unwrap_err().kind(), ErrorKind::Corrupt);
    std::fs::write(&format, "slackwater 2\n").unwrap();
    assert_sound(&Store::open(options).unwrap());
}

#[test]
fn a_store_whose_index_was_lost_is_not_opened_as_an_empty_one() {
    let fixture = Fixture::new();
    let inode = file(&fixture.store, "f", 0);
    for round in 0..40 {
        fixture.store.write(inode, 0, bytes(60 + round, 64 << 10), Stability::FileSync).unwrap();
    }
    fixture.store.gc().unwrap();
    fixture.store.close().unwrap();
    assert!(fixture.disk.list().unwrap().iter().all(|name| name.number.get() > 1));
    let empty = std::sync::Arc::new(slackwater_blockstore::kv::MemoryKv::new());
    let error = common::open(&empty, &fixture.disk).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.to_string().contains("index was lost"), "{error}");
    assert!(fixture.kv.get(Family::Meta, b"store").unwrap().is_some());
}

/// NFS clients make directories as deep as they like; a listing that went down by calling itself
/// took the whole process with it.
#[test]
fn a_listing_ends_however_deep_directories_are() {
    let fixture = Fixture::new();
    let store = &fixture.store;
    let names = |depth: usize| vec![Name::new(b"d").unwrap(); depth];
    store.create_directories(&FilePath::from_names(names(20_000)).unwrap()).unwrap();
    // The longest path that a call can name, and one that none can.
    for depth in [2048, 2049] {
        let mut path = names(depth);
        path[depth - 1] = Name::new(b"f").unwrap();
        store.create_file(&FilePath::from_names(path).unwrap(), 0).unwrap();
    }
    file(store, "last", 0);
    let listed = store.list_files("", None, 10).unwrap();
    let found: Vec<String> = listed.iter().map(|info| info.path.to_string()).collect();
    assert_eq!(found, ["d/".repeat(2047) + "f", "last".to_owned()]);
    let after = FilePath::parse(&found[0]).unwrap();
    let rest = store.list_files("", Some(&after), 10).unwrap();
    assert_eq!(rest.len(), 1);
}
