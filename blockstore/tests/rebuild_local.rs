//! The same on a real disk: what becomes of a store whose RocksDB files are lost or damaged.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

mod common;

use std::path::{Path, PathBuf};

use common::{assert_sound, bytes, content, options, path};
use slackwater_blockstore::{Error, ErrorKind, Options, Source, Stability, Store};

const FILE_BYTES: usize = 300_000;

fn local(data_dir: &Path) -> Options {
    Options { data_dir: data_dir.to_path_buf(), ..options() }
}

fn seed(file: u64) -> u64 {
    500 + file
}

/// A store that was compacted and copied, with some log behind the copy.
fn populate(data_dir: &Path) {
    let store = Store::open(local(data_dir)).unwrap();
    for file in 0..4 {
        let inode = store.create_file(&path(&format!("f{file}")), 0).unwrap().attributes.inode;
        for round in 0..2 {
            let data = bytes(seed(file) + 10 * (1 - round), FILE_BYTES);
            store.write(inode, 0, data, Stability::FileSync).unwrap();
        }
        if file == 2 {
            store.gc().unwrap();
        }
    }
    store.close().unwrap();
    let copies = std::fs::read_dir(data_dir.join("copies")).unwrap().count();
    assert_eq!(copies, 1);
    assert!(!data_dir.join("log/0000000000000001.seg").exists(), "the log alone is not enough");
}

fn assert_populated(store: &Store) {
    for file in 0..4 {
        let inode = store.resolve(&path(&format!("f{file}"))).unwrap().inode;
        assert!(content(store, Source::File(inode)) == bytes(seed(file), FILE_BYTES), "f{file}");
    }
    assert_sound(store);
}

/// Files of the index whose names begin or end so.
fn files(data_dir: &Path, part: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(data_dir.join("index")).unwrap();
    let named = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_str().unwrap();
        name.starts_with(part) || name.ends_with(part)
    };
    let found: Vec<_> = entries.map(|entry| entry.unwrap().path()).filter(named).collect();
    assert!(!found.is_empty(), "no {part}");
    found
}

/// The disk had all of the manifest but for a sector that was not synced: what a flush of all families told is then there
/// in part.
#[test]
fn a_manifest_that_a_power_cut_tore_is_no_loss() {
    const SECTOR: usize = 512;
    let directory = tempfile::tempdir().unwrap();
    populate(directory.path());
    let store = Store::open(local(directory.path())).unwrap();
    store.checkpoint().unwrap();
    let [manifest] = &files(directory.path(), "MANIFEST")[..] else { panic!("one manifest") };
    let synced = std::fs::metadata(manifest).unwrap().len();
    let synced = usize::try_from(synced).unwrap();
    // RocksDB removes tables behind a sync of the manifest alone, so after a cut these are there.
    let kept = tempfile::tempdir().unwrap();
    for table in files(directory.path(), ".sst") {
        std::fs::copy(&table, kept.path().join(table.file_name().unwrap())).unwrap();
    }
    for file in 0..4 {
        let inode = store.resolve(&path(&format!("f{file}"))).unwrap().inode;
        store.write(inode, 0, bytes(seed(file), 5000), Stability::FileSync).unwrap();
        let name = path(&format!("more{file}"));
        let inode = store.create_file(&name, 0).unwrap().attributes.inode;
        store.write(inode, 0, bytes(900 + file, 5000), Stability::FileSync).unwrap();
        store.checkpoint().unwrap();
    }
    // As a process that ends without a word.
    drop(store);
    let mut torn = std::fs::read(manifest).unwrap();
    let sector = synced.next_multiple_of(SECTOR)..synced.next_multiple_of(SECTOR) + SECTOR;
    assert!(sector.end < torn.len(), "{} bytes behind {synced}", torn.len());
    torn[sector].fill(0);
    std::fs::write(manifest, &torn).unwrap();
    for table in std::fs::read_dir(kept.path()).unwrap().map(|entry| entry.unwrap().path()) {
        let place = directory.path().join("index").join(table.file_name().unwrap());
        std::fs::copy(table, place).unwrap();
    }
    let store = Store::open(local(directory.path())).unwrap();
    assert_populated(&store);
    for file in 0..4 {
        let inode = store.resolve(&path(&format!("more{file}"))).unwrap().inode;
        assert!(content(&store, Source::File(inode)) == bytes(900 + file, 5000));
    }
    store.close().unwrap();
}

fn spoil(path: &Path) {
    let mut bytes = std::fs::read(path).unwrap();
    for at in (0..bytes.len()).step_by(50) {
        bytes[at] ^= 0x5a;
    }
    std::fs::write(path, bytes).unwrap();
}

/// Opening is refused with the command to give, and giving it makes the store whole.
fn healed(what: &str, damage: impl Fn(&Path)) {
    let directory = tempfile::tempdir().unwrap();
    populate(directory.path());
    damage(directory.path());
    let had_index = directory.path().join("index").exists();
    let error = Store::open(local(directory.path())).expect_err(what);
    assert!(matches!(error, Error::IndexLost { .. }), "{what}: {error}");
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.to_string().contains("slackwaterd check --rebuild"), "{what}: {error}");
    let rebuilt = Store::rebuild_index(&local(directory.path())).unwrap();
    assert!(rebuilt.copy.is_some() && rebuilt.replayed_commits > 0, "{what}: {rebuilt:?}");
    if had_index {
        let aside = directory.path().join("index.damaged-1");
        assert_eq!(rebuilt.set_aside.as_deref(), Some(aside.as_path()), "{what}");
        assert!(aside.is_dir());
    }
    let store = Store::open(local(directory.path())).unwrap();
    assert_populated(&store);
    store.close().unwrap();
}

#[test]
fn an_index_of_which_files_are_gone_or_damaged_is_refused_and_made_anew() {
    healed("no CURRENT", |dir| std::fs::remove_file(dir.join("index/CURRENT")).unwrap());
    healed("CURRENT is garbage", |dir| spoil(&dir.join("index/CURRENT")));
    healed("no MANIFEST", |dir| std::fs::remove_file(&files(dir, "MANIFEST")[0]).unwrap());
    healed("MANIFEST is garbage", |dir| spoil(&files(dir, "MANIFEST")[0]));
    healed("tables are gone", |dir| {
        files(dir, ".sst").iter().for_each(|path| std::fs::remove_file(path).unwrap());
    });
    healed("tables are garbage", |dir| files(dir, ".sst").iter().for_each(|path| spoil(path)));
}

#[test]
fn an_index_that_is_gone_is_made_anew() {
    let directory = tempfile::tempdir().unwrap();
    populate(directory.path());
    std::fs::remove_dir_all(directory.path().join("index")).unwrap();
    let error = Store::open(local(directory.path())).unwrap_err();
    assert!(matches!(error, Error::IndexLost { .. }), "{error}");
    // The open that was refused left a folder; it goes aside as any other.
    let rebuilt = Store::rebuild_index(&local(directory.path())).unwrap();
    assert!(rebuilt.copy.is_some());
    assert_populated(&Store::open(local(directory.path())).unwrap());
}

#[test]
fn an_index_without_fault_is_made_anew_all_the_same_and_a_second_one_aside() {
    let directory = tempfile::tempdir().unwrap();
    populate(directory.path());
    for number in 1..3 {
        let rebuilt = Store::rebuild_index(&local(directory.path())).unwrap();
        let aside = directory.path().join(format!("index.damaged-{number}"));
        assert_eq!(rebuilt.set_aside, Some(aside));
        let store = Store::open(local(directory.path())).unwrap();
        assert_populated(&store);
        store.close().unwrap();
    }
    let store = Store::open(local(directory.path())).unwrap();
    let error = Store::rebuild_index(&local(directory.path())).unwrap_err();
    assert!(matches!(error, Error::Locked { .. }), "{error}");
    drop(store);
}

#[test]
fn what_cannot_be_made_anew_leaves_the_index_as_it_was() {
    let directory = tempfile::tempdir().unwrap();
    populate(directory.path());
    for entry in std::fs::read_dir(directory.path().join("copies")).unwrap() {
        spoil(&entry.unwrap().path());
    }
    let error = Store::rebuild_index(&local(directory.path())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert!(!directory.path().join("index.damaged-1").exists());
    assert!(!directory.path().join("index.new").exists());
    // It was sound all the while, and the next garbage collection writes another copy.
    let store = Store::open(local(directory.path())).unwrap();
    store.gc().unwrap();
    assert_populated(&store);
    store.close().unwrap();
    drop(store);
    assert!(Store::rebuild_index(&local(directory.path())).unwrap().copy.is_some());
}

/// It may take as much as the index.
#[test]
fn what_a_rebuild_that_was_cut_off_leaves_goes_with_the_next_start() {
    let directory = tempfile::tempdir().unwrap();
    populate(directory.path());
    let left = directory.path().join("index.new");
    std::fs::create_dir(&left).unwrap();
    std::fs::write(left.join("000001.sst"), [7; 1000]).unwrap();
    let store = Store::open(local(directory.path())).unwrap();
    assert!(!left.exists());
    assert_populated(&store);
}

/// The last log file that has commits.
fn last_log(data_dir: &Path) -> PathBuf {
    let entries = std::fs::read_dir(data_dir.join("log")).unwrap();
    let mut logs: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    logs.sort();
    logs.pop().unwrap()
}

/// Where these bytes lie in a file.
fn position_of(path: &Path, wanted: &[u8]) -> usize {
    let log = std::fs::read(path).unwrap();
    log.windows(wanted.len()).rposition(|found| found == wanted).expect("the chunk is in it")
}

/// A store whose last commit has data, with its index behind all of it.
fn with_last_write(data_dir: &Path) -> bytes::Bytes {
    populate(data_dir);
    let store = Store::open(local(data_dir)).unwrap();
    let inode = store.resolve(&path("f1")).unwrap().inode;
    let data = bytes(900, 5 * 4096);
    store.write(inode, 0, data.clone(), Stability::FileSync).unwrap();
    store.close().unwrap();
    data
}

/// Without the old index the damage would look like an append that was never acknowledged.
#[test]
fn what_the_old_index_has_is_never_taken_for_an_unfinished_append() {
    let directory = tempfile::tempdir().unwrap();
    let data = with_last_write(directory.path());
    let log = last_log(directory.path());
    let at = position_of(&log, &data[3 * 4096..4 * 4096]);
    let mut damaged = std::fs::read(&log).unwrap();
    damaged[at + 7] ^= 1;
    std::fs::write(&log, damaged).unwrap();
    Store::rebuild_index(&local(directory.path())).unwrap();
    let store = Store::open(local(directory.path())).unwrap();
    let file = Source::File(store.resolve(&path("f1")).unwrap().inode);
    assert_eq!(store.read(file, 0, 3 * 4096).unwrap().to_vec(), data[..3 * 4096]);
    assert_eq!(store.read(file, 3 * 4096, 4096).unwrap_err().kind(), ErrorKind::Corrupt);
    assert_eq!(store.read(file, 4 * 4096, 4096).unwrap().to_vec(), data[4 * 4096..]);
}

#[test]
fn a_log_that_has_less_than_the_old_index_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let data = with_last_write(directory.path());
    let log = last_log(directory.path());
    let whole = std::fs::read(&log).unwrap();
    let at = position_of(&log, &data[..4096]);
    std::fs::write(&log, &whole[..at]).unwrap();
    let error = Store::rebuild_index(&local(directory.path())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.to_string().contains("move that folder away"), "{error}");
    assert_eq!(std::fs::read(&log).unwrap().len(), at, "and nothing is cut");
    // Brought back, all is there.
    std::fs::write(&log, &whole).unwrap();
    let store = Store::open(local(directory.path())).unwrap();
    let file = Source::File(store.resolve(&path("f1")).unwrap().inode);
    assert_eq!(store.read(file, 0, 5 * 4096).unwrap().to_vec(), data);
    store.close().unwrap();
    drop(store);
    // Whoever moves the old index away goes on with what is there.
    std::fs::write(&log, &whole[..at]).unwrap();
    std::fs::rename(directory.path().join("index"), directory.path().join("index.old")).unwrap();
    Store::rebuild_index(&local(directory.path())).unwrap();
    assert_populated(&Store::open(local(directory.path())).unwrap());
}
