//! A store of format 2 as it was written once, kept in `fixtures/format-2`: every later version
//! that calls itself format 2 reads it, and writes the same.
//!
//! The fixture is what `populate` below leaves in an empty directory, less `index/`, `lock` and
//! the empty `compacted/`: its log begins at the first segment, so the index is replayed from it.
//! It is never written again; if a test here fails, it is the code that left the format.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

#[path = "../common/mod.rs"]
mod common;
mod reader;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::{assert_sound, bytes, content, path};
use reader::Replayed;
use slackwater_blockstore::{
    CreateMode, DeletionPolicy, Error, ErrorKind, InodeId, Labels, Name, Options, SetAttributes,
    Snapshot, SnapshotFilter, SnapshotRequest, Source, Stability, Store, Timestamp,
};

const FILE_BYTES: usize = 1 << 20;

/// Log files of the fixture; the first one is sealed.
const LOG_FILES: u64 = 2;

/// Seeds of blocks: those under 8 repeat one byte and are packed, the others are raw.
const PACKED: u64 = 3;
const PACKED_IN_CLONE: u64 = 5;
const RAW: [u64; 2] = [100, 101];
const RAW_AFTER_SNAPSHOT: u64 = 102;

/// The year 2500: no sweep of these tests finds it due.
const EXPIRES_AT_NANOS: u64 = 16_725_225_600_000_000_000;

const VERIFIER: u64 = 0xfeed_f00d;

/// Where the clone was cut, inside its third block, before it grew back.
const CUT_BYTES: usize = 2 * 4096 + 100;

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/format-2")
}

fn log_path(data_dir: &Path, number: u64) -> PathBuf {
    data_dir.join(format!("log/{number:016x}.seg"))
}

/// A copy of the fixture that a test may do anything to.
fn copy() -> tempfile::TempDir {
    let target = tempfile::tempdir().unwrap();
    std::fs::create_dir(target.path().join("log")).unwrap();
    std::fs::copy(fixture().join("FORMAT"), target.path().join("FORMAT")).unwrap();
    for number in 1..=LOG_FILES {
        let from = log_path(&fixture(), number);
        std::fs::write(log_path(target.path(), number), std::fs::read(from).unwrap()).unwrap();
    }
    target
}

fn open(data_dir: &Path) -> slackwater_blockstore::Result<Arc<Store>> {
    let mut options = common::options();
    options.data_dir = data_dir.to_path_buf();
    options.segment_bytes = 12 << 10;
    Store::open(options)
}

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

fn write(store: &Store, inode: InodeId, block: u64, seed: u64) {
    store.write(inode, block * 4096, bytes(seed, 4096), Stability::Unstable).unwrap();
}

fn resize(store: &Store, inode: InodeId, size: usize) {
    let size_bytes = Some(u64::try_from(size).unwrap());
    let set = SetAttributes { size_bytes, ..SetAttributes::default() };
    store.set_attributes(inode, &set, None).unwrap();
}

fn labels() -> Labels {
    [("os", "debian"), ("empty", "")].map(|(k, v)| (k.to_owned(), v.to_owned())).into()
}

/// Some of everything that a log can hold.
fn populate(store: &Store) {
    let size_bytes = u64::try_from(FILE_BYTES).unwrap();
    let base = store.create_file(&path("images/base.img"), size_bytes).unwrap().attributes.inode;
    for (block, seed) in [(0, PACKED), (1, RAW[0]), (2, RAW[1]), (200, PACKED)] {
        write(store, base, block, seed);
    }
    store.commit(base).unwrap();
    let images = store.resolve(&path("images")).unwrap().inode;
    store.link(base, images, &name("twin")).unwrap();
    let set = SetAttributes { mode: Some(0o600), uid: Some(1000), ..SetAttributes::default() };
    store.make_symlink(InodeId::ROOT, &name("current"), b"images/base.img", &set).unwrap();
    let gold = SnapshotRequest {
        name: Some("gold".to_owned()),
        labels: labels(),
        deletion: DeletionPolicy::Keep,
        expires_at: Some(Timestamp::from_nanos(EXPIRES_AT_NANOS)),
        becomes_clone: false,
    };
    let gold = store.snapshot(&path("images/base.img"), gold).unwrap().id;
    write(store, base, 3, RAW_AFTER_SNAPSHOT);
    store.commit(base).unwrap();

    let clone = store.clone_snapshot(gold, &path("clones/one.img")).unwrap().attributes.inode;
    write(store, clone, 1, PACKED_IN_CLONE);
    store.commit(clone).unwrap();
    resize(store, clone, CUT_BYTES);
    resize(store, clone, FILE_BYTES);
    let passing =
        SnapshotRequest { deletion: DeletionPolicy::OnZeroClones, ..SnapshotRequest::default() };
    let passing = store.snapshot(&path("clones/one.img"), passing).unwrap().id;
    store.clone_snapshot(passing, &path("clones/two.img")).unwrap();

    let exclusive = CreateMode::Exclusive(VERIFIER);
    let set = SetAttributes::default();
    store.create(InodeId::ROOT, &name("exclusive"), exclusive, &set).unwrap();
    let gone = store.create_file(&path("gone"), 0).unwrap().attributes.inode;
    store.write(gone, 0, bytes(7, 4096), Stability::FileSync).unwrap();
    store.remove_path(&path("gone")).unwrap();
}

/// A file's content: these blocks, each from its seed, and zeros.
fn blocks(blocks: &[(usize, u64)]) -> Vec<u8> {
    let mut content = vec![0; FILE_BYTES];
    for (block, seed) in blocks {
        content[block * 4096..(block + 1) * 4096].copy_from_slice(&bytes(*seed, 4096));
    }
    content
}

fn gold_content() -> Vec<u8> {
    blocks(&[(0, PACKED), (1, RAW[0]), (2, RAW[1]), (200, PACKED)])
}

fn base_content() -> Vec<u8> {
    blocks(&[(0, PACKED), (1, RAW[0]), (2, RAW[1]), (3, RAW_AFTER_SNAPSHOT), (200, PACKED)])
}

fn clone_content() -> Vec<u8> {
    let mut content = blocks(&[(0, PACKED), (1, PACKED_IN_CLONE), (2, RAW[1])]);
    content[CUT_BYTES..].fill(0);
    content
}

fn snapshots(store: &Store) -> (Snapshot, Snapshot) {
    let mut all = store.list_snapshots(&SnapshotFilter::default(), 10).unwrap();
    assert_eq!(all.len(), 2);
    all.sort_by_key(|snapshot| snapshot.name.is_none());
    let passing = all.pop().unwrap();
    (all.pop().unwrap(), passing)
}

/// The store holds what `populate` made, and nothing else.
fn assert_populated(store: &Store) {
    let files = store.list_files("", None, 100).unwrap();
    let paths: Vec<_> = files.iter().map(|file| file.path.to_string()).collect();
    let expected =
        ["clones/one.img", "clones/two.img", "exclusive", "images/base.img", "images/twin"];
    assert_eq!(paths, expected);
    let of = |text: &str| {
        let found = files.iter().find(|file| file.path == path(text)).unwrap();
        (found, content(store, Source::File(found.attributes.inode)))
    };
    for (text, expected, links, used_blocks) in [
        ("clones/one.img", clone_content(), 1, 3),
        ("clones/two.img", clone_content(), 1, 3),
        ("exclusive", Vec::new(), 1, 0),
        ("images/base.img", base_content(), 2, 5),
        ("images/twin", base_content(), 2, 5),
    ] {
        let (info, got) = of(text);
        assert!(got == expected, "{text} has another content");
        let attributes = info.attributes;
        assert_eq!((attributes.link_count, attributes.used_bytes), (links, used_blocks * 4096));
    }
    let (gold, passing) = snapshots(store);
    assert_eq!((gold.name.as_deref(), gold.labels), (Some("gold"), labels()));
    assert_eq!(gold.expires_at.map(Timestamp::as_nanos), Some(EXPIRES_AT_NANOS));
    assert_eq!((gold.deletion, gold.clone_count), (DeletionPolicy::Keep, 1));
    assert_eq!((gold.path.as_slice(), gold.used_bytes), (&b"images/base.img"[..], 4 * 4096));
    assert!(content(store, Source::Snapshot(gold.id)) == gold_content(), "gold");
    assert_eq!((passing.deletion, passing.clone_count), (DeletionPolicy::OnZeroClones, 1));
    assert_eq!((passing.path.as_slice(), passing.expires_at), (&b"clones/one.img"[..], None));
    assert!(content(store, Source::Snapshot(passing.id)) == clone_content(), "passing");
    assert_eq!(of("clones/one.img").0.origin_snapshot, Some(gold.id));
    assert_eq!(of("clones/two.img").0.origin_snapshot, Some(passing.id));

    let link = store.resolve(&path("current")).unwrap();
    assert_eq!(store.read_link(link.inode).unwrap().0, b"images/base.img");
    assert_eq!((link.mode, link.uid), (0o600, 1000));
    // The verifier is kept: the same CREATE again is answered with the same file.
    let create = |verifier| {
        let mode = CreateMode::Exclusive(verifier);
        store.create(InodeId::ROOT, &name("exclusive"), mode, &SetAttributes::default())
    };
    let exclusive = store.resolve(&path("exclusive")).unwrap().inode;
    assert_eq!(create(VERIFIER).unwrap().attributes.inode, exclusive);
    assert_eq!(create(VERIFIER + 1).unwrap_err().kind(), ErrorKind::Exists);
}

#[test]
fn the_store_of_the_fixture_opens_holds_what_it_held_and_is_sound() {
    let data_dir = copy();
    let store = open(data_dir.path()).unwrap();
    assert_sound(&store);
    assert_populated(&store);
    let store_id = store.store_id();
    let header = std::fs::read(log_path(&fixture(), 1)).unwrap();
    assert_eq!(store_id.as_bytes(), &header[8..24]);
    assert_eq!(store.stats().dead_layer_count, 1, "the layer of the file that was removed");
    store.close().unwrap();
    drop(store);

    // Once more from the index, and on through reclaim and compaction.
    let store = open(data_dir.path()).unwrap();
    assert_eq!(store.store_id(), store_id);
    assert_populated(&store);
    assert!(store.gc().unwrap().layers >= 1);
    assert_sound(&store);
    assert_populated(&store);
    write(&store, store.resolve(&path("clones/two.img")).unwrap().inode, 9, 200);
    store.close().unwrap();
    drop(store);
    assert_sound(&open(data_dir.path()).unwrap());
}

#[test]
fn the_same_calls_write_the_same_records_today() {
    let data_dir = tempfile::tempdir().unwrap();
    let store = open(data_dir.path()).unwrap();
    populate(&store);
    store.close().unwrap();
    drop(store);
    let format = |data_dir: &Path| std::fs::read(data_dir.join("FORMAT")).unwrap();
    assert_eq!(format(data_dir.path()), b"slackwater 2\n");
    assert_eq!(format(&fixture()), b"slackwater 2\n");
    assert!(!log_path(data_dir.path(), LOG_FILES + 1).exists());
    for number in 1..=LOG_FILES {
        let shape = |data_dir: &Path| {
            reader::shape(&reader::read_log_file(&log_path(data_dir, number), number))
        };
        assert_eq!(shape(data_dir.path()), shape(&fixture()), "log file {number}");
    }
    for entry in ["lock", "index", "log", "compacted"] {
        assert!(data_dir.path().join(entry).exists(), "{entry}");
    }
}

#[test]
fn a_reader_made_from_the_document_finds_every_byte() {
    let replayed = Replayed::read(&fixture(), LOG_FILES);
    assert!(replayed.file("images/base.img") == base_content());
    assert!(replayed.file("images/twin") == base_content());
    assert!(replayed.file("clones/one.img") == clone_content());
    assert!(replayed.file("clones/two.img") == clone_content());
    assert!(replayed.snapshot("gold") == gold_content());
    assert!(replayed.file("exclusive").is_empty());
}

/// After a garbage collection the copy of the index has what the index had, in the bytes that the
/// document says.
#[test]
fn a_reader_made_from_the_document_reads_the_copy_of_the_index() {
    let data_dir = copy();
    let store = open(data_dir.path()).unwrap();
    store.gc().unwrap();
    store.close().unwrap();
    let store_id = store.store_id();
    drop(store);
    let copies: Vec<_> = std::fs::read_dir(data_dir.path().join("copies")).unwrap().collect();
    let [copy] = copies.as_slice() else { panic!("{copies:?}") };
    let path = copy.as_ref().unwrap().path();
    assert_eq!(path.extension().unwrap(), "idx");
    let copy = reader::read_index_copy(&path, store_id.as_bytes());
    let position = [&[1][..], &copy.0.map(u64::to_be_bytes).concat()].concat();
    assert!(copy.1.contains(&(0, b"position".to_vec(), position)), "{:?}", copy.0);
    assert!(copy.1.iter().all(|(family, key, _)| *family != 8 && key != b"hashed"));
    // Every log file from the position on is there.
    let (segment, sequence) = (copy.0[0], copy.0[2]);
    assert!(log_path(data_dir.path(), segment).exists());
    assert!(sequence > Replayed::read(&fixture(), LOG_FILES).commits);
    let from_copy = Replayed::entries_of_copy(&copy);
    let names = from_copy.names_in_root();
    assert_eq!(names, ["clones", "current", "exclusive", "images"]);
}

/// What opening answers after `damage` was done to a copy; the log is as long as before then.
fn refused(damage: impl Fn(&Path)) -> Error {
    let data_dir = copy();
    damage(data_dir.path());
    let lengths = || {
        let length = |number| std::fs::metadata(log_path(data_dir.path(), number)).ok();
        (1..=LOG_FILES).map(|n| length(n).map(|m| m.len())).collect::<Vec<_>>()
    };
    let before = lengths();
    let error = open(data_dir.path()).unwrap_err();
    assert_eq!(lengths(), before, "what cannot be read is left as it is");
    error
}

fn flip(path: &Path, offset: usize) {
    let mut bytes = std::fs::read(path).unwrap();
    bytes[offset] ^= 0x01;
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn damage_and_other_formats_are_refused_and_left_alone() {
    for text in ["slackwater 1\n", "slackwater 3\n", "slackwater 0\n", "slackwater 4294967295\n"] {
        let error = refused(|dir| std::fs::write(dir.join("FORMAT"), text).unwrap());
        assert!(matches!(error, Error::Format { expected: 2, .. }), "{text}: {error}");
    }
    let corrupt = |damage: &dyn Fn(&Path), what: &str| {
        let error = refused(damage);
        assert!(matches!(error, Error::Corrupt { .. }), "{what}: {error}");
    };
    for text in ["", "slackwater\n", "slackwater one\n", "freshwater 1\n"] {
        corrupt(&|dir| std::fs::write(dir.join("FORMAT"), text).unwrap(), text);
    }
    corrupt(&|dir| std::fs::remove_file(dir.join("FORMAT")).unwrap(), "no FORMAT");
    corrupt(&|dir| std::fs::remove_file(log_path(dir, 1)).unwrap(), "no first segment");
    for number in 1..=LOG_FILES {
        // The header, the first record behind it, and one in the middle of the log.
        for offset in [3, 20, 33, 64 + 5, 64 + 30, 2000] {
            let what = format!("byte {offset} of log file {number}");
            corrupt(&|dir| flip(&log_path(dir, number), offset), &what);
        }
    }
}

#[test]
fn an_append_cut_short_is_as_if_it_had_never_been() {
    let full = Replayed::read(&fixture(), LOG_FILES).commits;
    for cut_bytes in [1, 30, 100] {
        let data_dir = copy();
        let last = log_path(data_dir.path(), LOG_FILES);
        let bytes = std::fs::read(&last).unwrap();
        // Behind the last record there are zeros.
        let end = 1 + bytes.iter().rposition(|&byte| byte != 0).unwrap();
        std::fs::write(&last, &bytes[..end - cut_bytes]).unwrap();
        let store = open(data_dir.path()).unwrap();
        assert_sound(&store);
        // The last commit removed this file.
        let gone = store.resolve(&path("gone")).unwrap().inode;
        assert!(content(&store, Source::File(gone)) == bytes_of_gone());
        drop(store);
        assert_eq!(Replayed::read(data_dir.path(), LOG_FILES).commits, full - 1);
    }
}

fn bytes_of_gone() -> Vec<u8> {
    bytes(7, 4096).to_vec()
}

#[test]
fn the_fixture_is_small_and_has_no_index() {
    let mut total = 0;
    for number in 1..=LOG_FILES {
        total += std::fs::metadata(log_path(&fixture(), number)).unwrap().len();
    }
    assert!(total < 64 << 10, "{total} bytes");
    let mut entries: Vec<_> = std::fs::read_dir(fixture())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    entries.sort_unstable();
    assert_eq!(entries, ["FORMAT", "log"]);
    assert_eq!(std::fs::read_dir(fixture().join("log")).unwrap().count(), 2);
    assert!(Options::new("x").segment_bytes > 12 << 10, "no segment of a real store is so small");
}
