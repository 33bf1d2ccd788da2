//! A repair puts an index right that contradicts itself, and lost blocks go with their files.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

mod common;

use std::sync::Arc;

use common::{Fixture, bytes, content, path};
use slackwater_blockstore::disk::{Disk, Fault, FileName, FileRole, MemoryDisk};
use slackwater_blockstore::kv::{Family, Kv, MemoryKv};
use slackwater_blockstore::{
    BLOCK_BYTES, BLOCK_BYTES_U64, Error, ExtentKind, InodeId, Name, SetAttributes, SnapshotRequest,
    Source, Stability, Store,
};

fn file(fixture: &Fixture, name: &str, blocks: usize) -> InodeId {
    let inode = fixture.store.create_file(&path(name), 0).unwrap().attributes.inode;
    let data = bytes(77, blocks * BLOCK_BYTES);
    fixture.store.write(inode, 0, data, Stability::FileSync).unwrap();
    inode
}

/// Overwrites an entry, and has it repaired.
fn tampered(family: Family, key: &[u8], value: Option<Vec<u8>>) -> Fixture {
    let fixture = Fixture::new();
    let one = file(&fixture, "dir/one", 5);
    file(&fixture, "dir/two", 5);
    let id = fixture.store.snapshot(&path("dir/one"), SnapshotRequest::default()).unwrap().id;
    fixture.store.clone_snapshot(id, &path("clone")).unwrap();
    fixture.store.write(one, 0, bytes(9, BLOCK_BYTES), Stability::FileSync).unwrap();
    fixture.check();
    let before = content(&fixture.store, Source::File(one));
    fixture.kv.tamper(family, key, value);
    assert!(!fixture.store.check(false).unwrap().is_clean(), "{family:?} {key:?}");
    let report = fixture.store.repair().unwrap();
    assert!(report.after.is_clean(), "{family:?} {key:?}: {:#?}", report.after.problems);
    assert!(report.fixes > 0 && !report.before.is_clean());
    assert_eq!(report.lost_blocks, 0);
    let fixture = fixture.restart();
    fixture.check();
    assert_eq!(content(&fixture.store, Source::File(one)), before);
    fixture.store.gc().unwrap();
    fixture.check();
    fixture
}

/// Every entry of these families, deleted in turn: each is told of by others.
#[test]
fn an_entry_that_others_tell_of_comes_back() {
    for family in [Family::Cookie, Family::Child, Family::Refs] {
        let fixture = Fixture::new();
        file(&fixture, "dir/one", 5);
        file(&fixture, "dir/two", 5);
        let id = fixture.store.snapshot(&path("dir/one"), SnapshotRequest::default()).unwrap().id;
        fixture.store.clone_snapshot(id, &path("clone")).unwrap();
        let entries = fixture.kv.entries(family);
        assert!(!entries.is_empty(), "{family:?}");
        for (key, _) in entries {
            tampered(family, &key, None);
        }
    }
}

#[test]
fn a_value_that_cannot_be_decoded_is_replaced_where_others_tell_it() {
    let wrong = Some(vec![9, 9, 9]);
    // Directory 2 is `dir`; its first cookie is 3.
    let cookie = [2_u64.to_be_bytes(), 3_u64.to_be_bytes()].concat();
    tampered(Family::Cookie, &cookie, wrong.clone());
    // A file's name, which its cookie knows.
    let name = [&2_u64.to_be_bytes()[..], b"two"].concat();
    let fixture = tampered(Family::Dirent, &name, wrong.clone());
    let found = fixture.store.resolve(&path("dir/two")).unwrap();
    let expected = bytes(77, 5 * BLOCK_BYTES).to_vec();
    assert_eq!(content(&fixture.store, Source::File(found.inode)), expected);
    assert!(fixture.store.resolve(&path("lost+found")).is_err());
    let page = (1_u64 << 24).to_be_bytes();
    tampered(Family::Refs, &page, wrong.clone());
    tampered(Family::Hash, &[7; 8], Some((1_u64 << 24).to_be_bytes().to_vec()));
    tampered(Family::Hash, &[7; 8], wrong);
}

#[test]
fn an_inode_without_a_name_is_found_in_lost_and_found() {
    let name = [&2_u64.to_be_bytes()[..], b"two"].concat();
    let fixture = tampered(Family::Dirent, &name, None);
    let found = fixture.store.resolve(&path("lost+found/inode-4")).unwrap();
    assert_eq!(
        content(&fixture.store, Source::File(found.inode)),
        bytes(77, 5 * BLOCK_BYTES).to_vec()
    );
    assert!(fixture.store.resolve(&path("dir/two")).is_err());
}

#[test]
fn an_entry_without_an_inode_is_dropped() {
    let name = [&2_u64.to_be_bytes()[..], b"ghost"].concat();
    let mut value = vec![1];
    value.extend(999_u64.to_be_bytes());
    value.extend(4_u64.to_be_bytes());
    let fixture = tampered(Family::Dirent, &name, Some(value));
    assert!(fixture.store.resolve(&path("dir/ghost")).is_err());
    assert!(fixture.store.resolve(&path("dir/one")).is_ok());
}

#[test]
fn what_no_repair_solves_is_said_with_the_command_that_does() {
    let fixture = Fixture::new();
    file(&fixture, "one", 2);
    fixture.kv.tamper(Family::Layer, &1_u64.to_be_bytes(), None);
    let report = fixture.store.repair().unwrap();
    assert!(!report.after.is_clean());
    let told = report.after.problems.iter().any(|problem| problem.contains("--rebuild"));
    assert!(told, "{:#?}", report.after.problems);
}

/// What a repair would take away as superfluous, a rebuild brings back, if the repair was not in
/// the log before it.
#[test]
fn a_repair_changes_nothing_while_only_a_rebuild_brings_all_back() {
    let wrong = Some(vec![9, 9, 9]);
    // Directory 2 is `dir`, file 3 is `dir/one`, with layers 1 and 3; all is in segment 1.
    for (family, number, value) in [
        (Family::Inode, 2, wrong.clone()),
        (Family::Inode, 2, None),
        (Family::Inode, 3, wrong.clone()),
        (Family::Inode, 3, None),
        (Family::Layer, 1, wrong.clone()),
        (Family::Layer, 1, None),
        (Family::Segment, 1, wrong.clone()),
        (Family::Segment, 1, None),
    ] {
        let told = format!("{family:?} {number}, {value:?}");
        let fixture = Fixture::new();
        let one = file(&fixture, "dir/one", 5);
        let two = file(&fixture, "dir/two", 3);
        let id = fixture.store.snapshot(&path("dir/one"), SnapshotRequest::default()).unwrap().id;
        fixture.store.write(one, 0, bytes(9, BLOCK_BYTES), Stability::FileSync).unwrap();
        fixture.store.checkpoint().unwrap();
        let sources = [Source::File(one), Source::File(two), Source::Snapshot(id)];
        let before = sources.map(|source| content(&fixture.store, source));
        let key = u64::to_be_bytes(number);
        assert!(fixture.kv.entries(family).iter().any(|(known, _)| *known == key), "{told}");
        fixture.kv.tamper(family, &key, value);
        // Something beside it that a repair would mend.
        let ghost = [1_u64.to_be_bytes(), 99_u64.to_be_bytes()].concat();
        fixture.kv.tamper(Family::Cookie, &ghost, Some(vec![9]));
        let report = fixture.store.repair().unwrap();
        let needs_rebuild = |problem: &String| problem.contains("--rebuild");
        assert!(report.after.problems.iter().any(needs_rebuild), "{told}: {:#?}", report.after);
        assert_eq!((report.fixes, report.lost_blocks), (0, 0), "{told}");
        let sorted = |mut problems: Vec<String>| {
            problems.sort();
            problems
        };
        assert_eq!(sorted(report.after.problems), sorted(report.before.problems), "{told}");
        // A log without an index, as after `--rebuild`.
        drop(fixture.store);
        let (kv, disk) = (Arc::new(MemoryKv::new()), Arc::new(fixture.disk.clone()));
        Store::rebuild_index_with(Arc::clone(&kv) as Arc<dyn Kv>, disk, common::options()).unwrap();
        let fixture = Fixture::open(kv, fixture.disk);
        fixture.check();
        let after = sources.map(|source| content(&fixture.store, source));
        assert!(before == after, "{told}");
        assert!(fixture.store.resolve(&path("dir/one")).is_ok(), "{told}");
    }
}

/// The same of entries that others only hint at: a repair would drop what names them, or count
/// them as never having been.
#[test]
fn a_repair_leaves_to_a_rebuild_what_is_gone_without_a_trace() {
    let gone = |family: Family, key: Vec<u8>| (family, key, None);
    let numbers = |first: u64, second: u64| [first.to_be_bytes(), second.to_be_bytes()].concat();
    // Inode 2 is `empty`, 3 is `link`, 4 is `one`, of layer 1 until its snapshot, then of layer 2.
    let told = ["empty", "link", "snapshot", "map", "map garbage", "name garbage"];
    for (number, told) in told.iter().enumerate() {
        let fixture = Fixture::new();
        let (store, root) = (&fixture.store, InodeId::ROOT);
        let name = |text: &str| Name::new(text.as_bytes()).unwrap();
        store.make_directory(root, &name("empty"), &SetAttributes::default()).unwrap();
        store.make_symlink(root, &name("link"), b"target", &SetAttributes::default()).unwrap();
        let one = file(&fixture, "one", 5);
        let id = store.snapshot(&path("one"), SnapshotRequest::default()).unwrap().id;
        store.write(one, 0, bytes(9, BLOCK_BYTES), Stability::FileSync).unwrap();
        store.checkpoint().unwrap();
        let sources = [Source::File(one), Source::Snapshot(id)];
        let before = sources.map(|source| content(store, source));
        let (family, key, value) = match number {
            0 => gone(Family::Inode, 2_u64.to_be_bytes().to_vec()),
            1 => gone(Family::Inode, 3_u64.to_be_bytes().to_vec()),
            2 => gone(Family::Snapshot, [&b"i"[..], id.as_bytes()].concat()),
            3 => gone(Family::Map, numbers(2, 0)),
            4 => (Family::Map, numbers(2, 0), Some(vec![9, 9])),
            _ => {
                // The first name of the root, whose cookie is gone, too.
                fixture.kv.tamper(Family::Cookie, &numbers(1, 3), None);
                let name = [&1_u64.to_be_bytes()[..], b"empty"].concat();
                (Family::Dirent, name, Some(vec![9, 9]))
            }
        };
        assert!(fixture.kv.entries(family).iter().any(|(known, _)| *known == key), "{told}");
        fixture.kv.tamper(family, &key, value);
        let report = store.repair().unwrap();
        let needs_rebuild = |problem: &String| problem.contains("--rebuild");
        assert!(report.after.problems.iter().any(needs_rebuild), "{told}: {:#?}", report.after);
        assert_eq!((report.fixes, report.lost_blocks), (0, 0), "{told}");
        let (kv, disk) = (Arc::new(MemoryKv::new()), Arc::new(fixture.disk.clone()));
        Store::rebuild_index_with(Arc::clone(&kv) as Arc<dyn Kv>, disk, common::options()).unwrap();
        let whole = Fixture::open(kv, fixture.disk.clone());
        whole.check();
        assert!(before == sources.map(|source| content(&whole.store, source)), "{told}");
        assert!(whole.store.lookup(root, &name("empty")).is_ok(), "{told}");
        assert!(whole.store.lookup(root, &name("link")).is_ok(), "{told}");
        drop(whole);
        // Who has no log to make an index from gives it up.
        let report = fixture.store.repair_giving_up().unwrap();
        assert!(report.after.is_clean(), "{told}: {:#?}", report.after.problems);
    }
}

/// What is known of the blocks behind the overlap must not become zeros.
#[test]
fn of_entries_that_overlap_only_what_two_of_them_say_is_lost() {
    let fixture = Fixture::new();
    let one = file(&fixture, "one", 10);
    let two = fixture.store.create_file(&path("two"), 0).unwrap().attributes.inode;
    fixture.store.write(two, 0, bytes(78, 2 * BLOCK_BYTES), Stability::FileSync).unwrap();
    fixture.store.close().unwrap();
    let entries = fixture.kv.entries(Family::Map);
    assert_eq!(entries.len(), 2, "one for each file");
    // Two blocks inside the ten.
    let inside = [1_u64.to_be_bytes(), 2_u64.to_be_bytes()].concat();
    fixture.kv.tamper(Family::Map, &inside, Some(entries[1].1.clone()));
    let fixture = Fixture::open(fixture.kv, fixture.disk);
    let report = fixture.store.repair().unwrap();
    assert!(report.after.is_clean(), "{:#?}", report.after.problems);
    let fixture = fixture.restart();
    fixture.check();
    let data = bytes(77, 10 * BLOCK_BYTES);
    for block in 0..10 {
        if block == 2 || block == 3 {
            assert_lost(&fixture, Source::File(one), block);
            continue;
        }
        let at = block * BLOCK_BYTES_U64;
        let found = fixture.store.read(Source::File(one), at, BLOCK_BYTES).unwrap().to_vec();
        let start = usize::try_from(at).unwrap();
        assert!(found == data[start..start + BLOCK_BYTES], "block {block}");
    }
    let two = content(&fixture.store, Source::File(two));
    assert_eq!(two, bytes(78, 2 * BLOCK_BYTES).to_vec());
}

/// What takes the place of entries that overlap may be fewer of them.
#[test]
fn entries_that_overlap_are_counted_when_they_do_no_more() {
    let fixture = Fixture::new();
    let one = file(&fixture, "one", 30);
    let two = fixture.store.create_file(&path("two"), 0).unwrap().attributes.inode;
    fixture.store.write(two, 0, bytes(78, 2 * BLOCK_BYTES), Stability::FileSync).unwrap();
    fixture.store.close().unwrap();
    let entries = fixture.kv.entries(Family::Map);
    for first in [4_u64, 6, 8] {
        let inside = [1_u64.to_be_bytes(), first.to_be_bytes()].concat();
        fixture.kv.tamper(Family::Map, &inside, Some(entries[1].1.clone()));
    }
    let fixture = Fixture::open(fixture.kv, fixture.disk);
    let report = fixture.store.repair().unwrap();
    assert!(report.after.is_clean(), "{:#?}", report.after.problems);
    assert_eq!(report.after.lost_blocks, 6);
    let found = fixture.store.read(Source::File(one), 10 * BLOCK_BYTES_U64, BLOCK_BYTES).unwrap();
    assert_eq!(found.to_vec(), bytes(77, 30 * BLOCK_BYTES)[10 * BLOCK_BYTES..11 * BLOCK_BYTES]);
}

/// Keys that no store has are damage as values are, and end neither a check nor a repair.
#[test]
fn numbers_in_keys_that_no_store_holds_are_told() {
    let [one, most] = [1_u64, u64::MAX].map(u64::to_be_bytes);
    let families =
        [Family::Inode, Family::Layer, Family::Segment, Family::Map, Family::Cookie, Family::Child];
    for family in families {
        let keys = match family {
            Family::Inode | Family::Layer => vec![most.to_vec()],
            Family::Segment => vec![most.to_vec(), (1_u64 << 45).to_be_bytes().to_vec()],
            _ => [[one, most], [most, one], [most, most]].map(|key| key.concat()).to_vec(),
        };
        for key in keys {
            for value in [None, Some(vec![9])] {
                let told = format!("{family:?} {key:?} {value:?}");
                let fixture = Fixture::new();
                file(&fixture, "one", 5);
                fixture.store.snapshot(&path("one"), SnapshotRequest::default()).unwrap();
                let known = fixture.kv.entries(family).into_iter().next();
                let value = value.or_else(|| known.map(|(_, value)| value)).unwrap_or_default();
                fixture.kv.tamper(family, &key, Some(value));
                assert!(!fixture.store.check(true).unwrap().is_clean(), "{told}");
                let report = fixture.store.repair().unwrap();
                assert_eq!(report.lost_blocks, 0, "{told}");
                // What could not be gone through to its end is not counted.
                let counters = || fixture.kv.entries(Family::Meta).remove(0);
                let before = counters();
                assert_eq!(before.0, b"counters");
                fixture.store.repair_giving_up().unwrap();
                assert!(counters() == before, "{told}");
            }
        }
    }
}

/// Layers that lie upon each other in a circle are never gone through to their end.
#[test]
fn layers_in_a_circle_are_told() {
    let (fixture, one) = with_losses();
    let (store, kv) = (&fixture.store, &fixture.kv);
    let layers = kv.entries(Family::Layer);
    assert_eq!(layers.len(), 2, "of the snapshot, and of the file");
    let (key, mut value) = layers[0].clone();
    // Its parent.
    value[1..9].copy_from_slice(&layers[0].0);
    kv.tamper(Family::Layer, &key, Some(value));
    let report = store.check(true).unwrap();
    assert!(report.problems.iter().any(|p| p.contains("--rebuild")), "{:#?}", report.problems);
    let fixture = fixture.restart();
    let error = fixture.store.read(Source::File(one), 0, BLOCK_BYTES).unwrap_err();
    assert!(error.to_string().contains("younger"), "{error}");
}

/// A file of ten blocks whose blocks 3 and 4 are lost, in a snapshot and its clone, too.
fn with_losses() -> (Fixture, InodeId) {
    let fixture = Fixture::new();
    let one = file(&fixture, "one", 10);
    fixture.store.snapshot(&path("one"), SnapshotRequest::default()).unwrap();
    fixture.store.close().unwrap();
    let name = fixture.disk.list().unwrap()[0];
    let log = fixture.disk.open(name).unwrap();
    let all = log.read_at(0, usize::try_from(log.length_bytes().unwrap()).unwrap()).unwrap();
    let data = bytes(77, 10 * BLOCK_BYTES);
    for block in [3, 4] {
        let of_block = &data[block * BLOCK_BYTES..][..BLOCK_BYTES];
        let at = all.windows(BLOCK_BYTES).position(|found| found == of_block).unwrap();
        log.write_at(u64::try_from(at + 5).unwrap(), &[of_block[5] ^ 64]).unwrap();
    }
    let fixture = Fixture::open(fixture.kv, fixture.disk);
    let report = fixture.store.repair().unwrap();
    assert!(report.after.is_clean(), "{:#?}", report.after.problems);
    assert_eq!((report.lost_blocks, report.after.lost_blocks), (2, 2));
    let (told, after) = (&report.before.hits, &report.after.hits);
    assert_eq!((told.len(), after.len()), (2, 2), "the file and the snapshot");
    assert!(told.iter().all(|hit| !hit.is_lost) && after.iter().all(|hit| hit.is_lost));
    for hit in told.iter().chain(after) {
        assert_eq!((hit.path.as_str(), hit.offset_bytes, hit.length_bytes), ("one", 12288, 8192));
    }
    (fixture.restart(), one)
}

/// A read that fails once tells nothing of the bytes.
#[test]
fn nothing_is_given_up_after_one_failed_read() {
    for number in 0.. {
        assert!(number < 1000, "a repair reads less than that");
        let fixture = Fixture::new();
        let one = file(&fixture, "one", 10);
        let fixture = fixture.restart();
        fixture.disk.inject(Fault::Read(number));
        let outcome = fixture.store.repair();
        if fixture.disk.disarm() {
            break;
        }
        if let Ok(report) = outcome {
            assert_eq!(report.lost_blocks, 0, "read {number}");
        }
        let fixture = fixture.restart();
        fixture.check();
        let found = content(&fixture.store, Source::File(one));
        assert!(found == bytes(77, 10 * BLOCK_BYTES), "read {number}");
    }
}

/// A folder that is not mounted is no reason to give up what is in it.
#[test]
fn a_missing_file_stops_a_repair_until_it_is_given_up() {
    for comes_back in [true, false] {
        let fixture = Fixture::new();
        let one = file(&fixture, "one", 10);
        // Half of the first segment dies, the rest moves into a file of its own.
        for block in 0..8 {
            let data = bytes(20 + block, BLOCK_BYTES);
            fixture.store.write(one, block * BLOCK_BYTES_U64, data, Stability::FileSync).unwrap();
        }
        fixture.store.gc().unwrap();
        let three = fixture.store.create_file(&path("three"), 0).unwrap().attributes.inode;
        let data = bytes(80, 20 * BLOCK_BYTES);
        fixture.store.write(three, 0, data.clone(), Stability::FileSync).unwrap();
        let before = content(&fixture.store, Source::File(one));
        fixture.store.close().unwrap();
        let is_compacted = |name: &FileName| name.role == FileRole::Compacted;
        let name = fixture.disk.list().unwrap().into_iter().find(is_compacted).unwrap();
        let gone = fixture.disk.open(name).unwrap();
        let all = gone.read_at(0, usize::try_from(gone.length_bytes().unwrap()).unwrap()).unwrap();
        fixture.disk.remove(name).unwrap();
        let fixture = Fixture::open(fixture.kv, fixture.disk);
        let error = fixture.store.repair().unwrap_err();
        assert!(matches!(error, Error::RepairStopped { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains(&name.to_string()) && text.contains("--give-up"), "{text}");
        assert_eq!(fixture.store.check(false).unwrap().lost_blocks, 0);
        if comes_back {
            fixture.store.close().unwrap();
            let file = fixture.disk.create(name).unwrap();
            file.write_at(0, &all).unwrap();
            file.sync().unwrap();
            fixture.disk.sync_names().unwrap();
            let fixture = Fixture::open(fixture.kv, fixture.disk);
            assert_eq!(fixture.store.repair().unwrap().lost_blocks, 0);
            let fixture = fixture.restart();
            fixture.check();
            assert!(content(&fixture.store, Source::File(one)) == before);
        } else {
            let report = fixture.store.repair_giving_up().unwrap();
            assert!(report.after.is_clean(), "{:#?}", report.after.problems);
            assert!(report.lost_blocks > 0);
            let fixture = fixture.restart();
            fixture.check();
            assert!(content(&fixture.store, Source::File(three)) == data);
        }
    }
}

/// Where a rebuild does not help, the way out is to give up what it could restore.
#[test]
fn what_only_a_rebuild_could_restore_can_be_given_up() {
    let fixture = Fixture::new();
    file(&fixture, "one", 2);
    fixture.kv.tamper(Family::Inode, &2_u64.to_be_bytes(), None);
    assert!(!fixture.store.repair().unwrap().after.is_clean());
    let report = fixture.store.repair_giving_up().unwrap();
    assert!(report.after.is_clean(), "{:#?}", report.after.problems);
}

/// What makes a full store sound adds next to nothing, and must not wait for room.
#[test]
fn a_full_store_is_repaired() {
    let mut options = common::options();
    options.capacity_bytes = Some(1 << 20);
    let (kv, disk) = (Arc::new(MemoryKv::new()), MemoryDisk::new());
    let index = Arc::clone(&kv) as Arc<dyn Kv>;
    let store = Store::open_with(index, Arc::new(disk.clone()), options).unwrap();
    let inode = store.create_file(&path("one"), 0).unwrap().attributes.inode;
    store.write(inode, 0, bytes(77, 10 * BLOCK_BYTES), Stability::FileSync).unwrap();
    store.create_file(&path("old"), 0).unwrap();
    let full = |number: u64| store.create_file(&path(&format!("n{number}")), 0).is_err();
    assert!((0..10_000).any(full), "names take room");
    // Changes in place are refused behind names.
    let rename = |number: u64| {
        let (from, to) = if number.is_multiple_of(2) { ("old", "new") } else { ("new", "old") };
        store.rename_path(&path(from), &path(to)).is_err()
    };
    assert!((0..10_000).any(rename), "so do renames");
    // An entry too many, alone: what is beside it in a commit may be what frees.
    let ghost = || kv.tamper(Family::Hash, &[7; 8], Some((1_u64 << 24).to_be_bytes().to_vec()));
    ghost();
    let report = store.repair().unwrap();
    assert!(report.fixes == 1 && report.after.is_clean(), "{:#?}", report.after.problems);
    // An inode without a name, a count that is wrong, a chunk that is damaged.
    let name = [&1_u64.to_be_bytes()[..], b"n0"].concat();
    kv.tamper(Family::Dirent, &name, None);
    ghost();
    let log = disk.open(disk.list().unwrap()[0]).unwrap();
    let all = log.read_at(0, usize::try_from(log.length_bytes().unwrap()).unwrap()).unwrap();
    let data = bytes(77, BLOCK_BYTES);
    let at = all.windows(BLOCK_BYTES).position(|found| found == data).unwrap();
    log.write_at(u64::try_from(at + 5).unwrap(), &[data[5] ^ 64]).unwrap();
    let report = store.repair().unwrap();
    assert!(report.after.is_clean(), "{:#?}", report.after.problems);
    assert_eq!(report.lost_blocks, 1);
    let found = store.list_files("lost+found/", None, 9).unwrap();
    assert_eq!(found.len(), 1);
    store.close().unwrap();
}

fn assert_lost(fixture: &Fixture, source: Source, block: u64) {
    let error = fixture.store.read(source, block * BLOCK_BYTES_U64, BLOCK_BYTES).unwrap_err();
    let Error::Lost { offset_bytes, .. } = error else { panic!("{error}") };
    assert_eq!(offset_bytes, block * BLOCK_BYTES_U64);
}

#[test]
fn lost_blocks_are_errors_until_they_are_written_whole() {
    let (fixture, one) = with_losses();
    let store = &fixture.store;
    let data = bytes(77, 10 * BLOCK_BYTES);
    assert_eq!(store.attributes(one).unwrap().used_bytes, 10 * BLOCK_BYTES_U64);
    for block in [3, 4] {
        assert_lost(&fixture, Source::File(one), block);
    }
    assert!(store.read(Source::File(one), 0, 10 * BLOCK_BYTES).is_err());
    let before = store.read(Source::File(one), 0, 3 * BLOCK_BYTES).unwrap().to_vec();
    assert_eq!(before, data[..3 * BLOCK_BYTES]);
    // A part of a block cannot be completed.
    let part = store.write(one, 3 * BLOCK_BYTES_U64 + 7, bytes(9, 10), Stability::FileSync);
    assert!(matches!(part, Err(Error::Lost { .. })), "{part:?}");
    let whole = bytes(9, BLOCK_BYTES);
    store.write(one, 3 * BLOCK_BYTES_U64, whole.clone(), Stability::FileSync).unwrap();
    let now = store.read(Source::File(one), 3 * BLOCK_BYTES_U64, BLOCK_BYTES).unwrap();
    assert_eq!(now.to_vec(), whole);
    assert_lost(&fixture, Source::File(one), 4);
    fixture.check();
    // What is cut off is lost no more.
    let size = SetAttributes { size_bytes: Some(4 * BLOCK_BYTES_U64), ..SetAttributes::default() };
    store.set_attributes(one, &size, None).unwrap();
    let size = SetAttributes { size_bytes: Some(10 * BLOCK_BYTES_U64), ..SetAttributes::default() };
    store.set_attributes(one, &size, None).unwrap();
    let tail = store.read(Source::File(one), 4 * BLOCK_BYTES_U64, BLOCK_BYTES).unwrap();
    assert_eq!(tail.to_vec(), vec![0; BLOCK_BYTES]);
    fixture.check();
}

#[test]
fn lost_blocks_go_with_snapshots_clones_diffs_maps_and_collapse() {
    let (fixture, one) = with_losses();
    let store = &fixture.store;
    let first = store.list_snapshots(&Default::default(), 9).unwrap()[0].id;
    assert_lost(&fixture, Source::Snapshot(first), 4);
    store.clone_snapshot(first, &path("two")).unwrap();
    let two = store.resolve(&path("two")).unwrap().inode;
    assert_lost(&fixture, Source::File(two), 3);
    // They are data of which nobody knows whether they changed, and no hole.
    store.write(one, 0, bytes(9, BLOCK_BYTES), Stability::FileSync).unwrap();
    let second = store.snapshot(&path("one"), SnapshotRequest::default()).unwrap().id;
    let diff = store.diff(Some(first), second, 0, 99).unwrap().extents;
    let at: Vec<_> = diff.iter().map(|extent| (extent.offset_bytes, extent.length_bytes)).collect();
    assert_eq!(at, [(0, 4096), (12288, 8192)]);
    assert!(diff.iter().all(|extent| extent.kind == ExtentKind::Data));
    let map = store.block_map(Source::Snapshot(first), 0, 10 * BLOCK_BYTES_U64).unwrap();
    assert!(map.iter().all(Option::is_some));
    assert!([3, 4].iter().all(|at| map[*at].unwrap().as_bytes() == &[0xff; 32]));
    // The layers below go: their entries move, lost ones too.
    store.delete_snapshot(second).unwrap();
    store.remove_path(&path("two")).unwrap();
    store.delete_snapshot(first).unwrap();
    store.gc().unwrap();
    fixture.check();
    assert_lost(&fixture, Source::File(one), 3);
    let report = store.check(true).unwrap();
    assert_eq!((report.lost_blocks, report.layers, report.hits.len()), (2, 1, 1));
    store.remove_path(&path("one")).unwrap();
    store.gc().unwrap();
    assert_eq!(store.check(true).unwrap().lost_blocks, 0);
}

#[test]
fn a_store_that_is_served_is_not_repaired() {
    let directory = tempfile::tempdir().unwrap();
    let mut options = common::options();
    options.data_dir = directory.path().to_path_buf();
    options.background = true;
    let store = slackwater_blockstore::Store::open(options).unwrap();
    assert!(matches!(store.repair(), Err(Error::Busy { .. })));
    store.close().unwrap();
}
