//! Damage anywhere in the segment files: never wrong bytes, never a panic, `check` names it, and a
//! repair leaves a sound store in which all that was not hit is as it was. Damage anywhere in the
//! index: the same, and a rebuild brings everything back.
//!
//! `SLACKWATER_CORRUPTION_SEEDS` sets how many stores are damaged, `SLACKWATER_CORRUPTION_FIRST`
//! with which seed it begins.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

mod common;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use common::{Fixture, bytes, content, open, path};
use slackwater_blockstore::disk::{Disk, MemoryDisk};
use slackwater_blockstore::kv::MemoryKv;
use slackwater_blockstore::{
    BLOCK_BYTES, BLOCK_BYTES_U64, CheckReport, Error, ErrorKind, SnapshotRequest, Source,
    Stability, Store,
};

/// Stores that a run in CI damages.
const SEEDS: u64 = 60;

/// Small deterministic random numbers.
struct Dice(u64);

impl Dice {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit.max(1)
    }
}

/// A name for what can be read: the path, or the snapshot's id.
type Contents = BTreeMap<String, (Source, Vec<u8>)>;

fn name_of(source: &Source, path: &str) -> String {
    match source {
        Source::File(_) => path.to_owned(),
        Source::Snapshot(id) => id.to_string(),
    }
}

/// Files, snapshots and clones above each other, with compacted segments and open ones, closed.
fn make(dice: &mut Dice) -> (Arc<MemoryKv>, MemoryDisk, Contents) {
    let fixture = Fixture::new();
    let store = &fixture.store;
    let mut sources: Vec<(String, Source)> = Vec::new();
    for file in 0..3 {
        let name = format!("dir/file-{file}");
        let inode = store.create_file(&path(&name), 0).unwrap().attributes.inode;
        sources.push((name, Source::File(inode)));
    }
    for step in 0..24 {
        let (name, source) =
            sources[usize::try_from(dice.below(sources.len() as u64)).unwrap()].clone();
        let Source::File(inode) = source else { continue };
        match dice.below(8) {
            0 => {
                let id = store.snapshot(&path(&name), SnapshotRequest::default()).unwrap().id;
                sources.push((name, Source::Snapshot(id)));
                let clone = format!("clones/{step}");
                let info = store.clone_snapshot(id, &path(&clone)).unwrap();
                sources.push((clone, Source::File(info.attributes.inode)));
            }
            1 => drop(store.gc().unwrap()),
            _ => {
                let at = dice.below(300) * BLOCK_BYTES_U64;
                let length = (1 + dice.below(24)) * BLOCK_BYTES_U64 - dice.below(2) * 100;
                let data = bytes(1 + dice.below(60), usize::try_from(length).unwrap());
                store.write(inode, at, data, Stability::FileSync).unwrap();
            }
        }
    }
    if dice.below(2) == 0 {
        store.gc().unwrap();
    }
    fixture.check();
    let contents = sources
        .iter()
        .map(|(name, source)| (name_of(source, name), (*source, content(store, *source))));
    let contents = contents.collect();
    store.close().unwrap();
    drop(fixture.store);
    (fixture.kv, fixture.disk, contents)
}

/// Damages some segment files, and says how.
fn damage(disk: &MemoryDisk, dice: &mut Dice) -> Vec<String> {
    let names = disk.list().unwrap();
    let mut done = Vec::new();
    for _ in 0..=dice.below(4) {
        let name = names[usize::try_from(dice.below(names.len() as u64)).unwrap()];
        let file = disk.open(name).unwrap();
        let length = file.length_bytes().unwrap();
        if length == 0 {
            continue;
        }
        let at = dice.below(length);
        match dice.below(6) {
            0 => {
                let start = at - at % 512;
                let zeros = vec![0; usize::try_from(512.min(length - start)).unwrap()];
                file.write_at(start, &zeros).unwrap();
                done.push(format!("{name}: sector at {start} zeroed"));
            }
            1 if dice.below(4) == 0 => {
                file.truncate(at).unwrap();
                done.push(format!("{name}: cut from {length} to {at}"));
            }
            _ => {
                let old = file.read_at(at, 1).unwrap();
                file.write_at(at, &[old[0] ^ (1 << dice.below(8))]).unwrap();
                done.push(format!("{name}: bit at {at}"));
            }
        }
    }
    done
}

/// The blocks of each source that cannot be read. Whatever can be read is right.
fn unreadable(store: &Store, contents: &Contents, told: &str) -> Vec<(String, u64)> {
    let mut bad = Vec::new();
    for (name, (source, expected)) in contents {
        for (block, expected) in (0_u64..).zip(expected.chunks(BLOCK_BYTES)) {
            match store.read(*source, block * BLOCK_BYTES_U64, expected.len()) {
                Ok(reply) => assert!(reply.to_vec() == expected, "{told}: {name}, block {block}"),
                Err(error) => {
                    assert_named(&error, told);
                    bad.push((name.clone(), block));
                }
            }
        }
    }
    bad
}

/// The error is one of the disk or of the bytes on it, and names a place.
fn assert_named(error: &Error, told: &str) {
    assert!(matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Io), "{told}: {error}");
    let text = error.to_string();
    let places = ["segment", ".seg", "offset", "chunk", "header"];
    assert!(places.iter().any(|place| text.contains(place)), "{told}: {text}");
}

/// Whether the report names the block.
fn is_hit(report: &CheckReport, name: &str, block: u64) -> bool {
    let at = block * BLOCK_BYTES_U64;
    report.hits_left_out > 0
        || report.hits.iter().any(|hit| {
            let of = hit.snapshot.map_or_else(|| hit.path.clone(), |id| id.to_string());
            of == name && (hit.offset_bytes..hit.offset_bytes + hit.length_bytes).contains(&at)
        })
}

/// How a damaged store fared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Refused,
    Unhurt,
    Repaired { lost: bool },
}

fn try_one(seed: u64) -> Fate {
    let mut dice = Dice::new(seed);
    let (kv, disk, contents) = make(&mut dice);
    let told = format!("seed {seed}: {:?}", damage(&disk, &mut dice));
    let store = match open(&kv, &disk) {
        Ok(store) => store,
        Err(error) => {
            assert_named(&error, &told);
            return Fate::Refused;
        }
    };
    let bad = unreadable(&store, &contents, &told);
    let report = store.check(true).unwrap();
    assert!(bad.is_empty() || !report.is_clean(), "{told}: `check` saw nothing");
    if report.is_clean() {
        return Fate::Unhurt;
    }
    let repaired = store.repair().unwrap();
    assert!(repaired.after.is_clean(), "{told}: {:#?}", repaired.after.problems);
    store.close().unwrap();
    drop(store);
    let store = open(&kv, &disk).unwrap_or_else(|error| panic!("{told}: {error}"));
    let after = store.check(true).unwrap();
    assert!(after.is_clean(), "{told}: {:#?}", after.problems);
    let lost = unreadable(&store, &contents, &told);
    for (name, block) in &lost {
        assert!(is_hit(&report, name, *block), "{told}: {name}, block {block} was not told before");
        assert!(is_hit(&after, name, *block), "{told}: {name}, block {block} is not told after");
        assert!(
            bad.contains(&(name.clone(), *block)),
            "{told}: {name}, block {block} was readable"
        );
    }
    heal(&store, &contents, &lost, &told);
    Fate::Repaired { lost: !lost.is_empty() }
}

/// A whole block that is written again can be read again, and the store stays sound, also once
/// everything is collected.
fn heal(store: &Store, contents: &Contents, lost: &[(String, u64)], told: &str) {
    for (name, block) in lost {
        let (source, _) = &contents[name];
        if let Source::File(inode) = source {
            let (at, data) = (block * BLOCK_BYTES_U64, bytes(99, BLOCK_BYTES));
            store.write(*inode, at, data.clone(), Stability::FileSync).unwrap();
            assert_eq!(store.read(*source, at, BLOCK_BYTES).unwrap().to_vec(), data, "{told}");
        }
    }
    store.gc().unwrap();
    let report = store.check(true).unwrap();
    assert!(report.is_clean(), "{told}: {:#?}", report.problems);
}

/// Stores whose index is damaged in a run in CI.
const INDEX_SEEDS: u64 = 12;

/// Flips bits, zeroes a sector or cuts off the end of some of RocksDB's files.
fn damage_index(index: &Path, dice: &mut Dice) -> Vec<String> {
    let mut files: Vec<_> =
        std::fs::read_dir(index).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| std::fs::metadata(path).unwrap().len() > 0);
    files.sort();
    let mut done = Vec::new();
    for _ in 0..=dice.below(3) {
        let path = &files[usize::try_from(dice.below(files.len() as u64)).unwrap()];
        let mut all = std::fs::read(path).unwrap();
        let at = usize::try_from(dice.below(all.len() as u64)).unwrap();
        match dice.below(5) {
            0 => {
                let end = all.len().min(at + 512);
                all[at..end].fill(0);
            }
            1 => all.truncate(at),
            _ => all[at] ^= 1 << dice.below(8),
        }
        std::fs::write(path, all).unwrap();
        done.push(format!("{} at {at}", path.display()));
    }
    done
}

/// Whether the damage was noticed.
fn try_index(seed: u64) -> bool {
    let mut dice = Dice::new(seed);
    let directory = tempfile::tempdir().unwrap();
    let mut options = common::options();
    options.data_dir = directory.path().to_path_buf();
    let store = Store::open(options.clone()).unwrap();
    let mut sources = Vec::new();
    for file in 0..20 {
        let name = format!("dir/file-{file}");
        let inode = store.create_file(&path(&name), 0).unwrap().attributes.inode;
        let data = bytes(10 + dice.below(9), (1 + file) * BLOCK_BYTES);
        store.write(inode, 0, data, Stability::FileSync).unwrap();
        sources.push((name.clone(), Source::File(inode)));
        let id = store.snapshot(&path(&name), SnapshotRequest::default()).unwrap().id;
        sources.push((name, Source::Snapshot(id)));
        store.write(inode, 0, bytes(30 + dice.below(9), BLOCK_BYTES), Stability::FileSync).unwrap();
        if dice.below(8) == 0 {
            store.gc().unwrap();
        }
    }
    let contents: Contents = sources
        .iter()
        .map(|(name, source)| (name_of(source, name), (*source, content(&store, *source))))
        .collect();
    store.close().unwrap();
    drop(store);
    let told =
        format!("seed {seed}: {:?}", damage_index(&directory.path().join("index"), &mut dice));
    let noticed = match Store::open(options.clone()) {
        Ok(store) => {
            let mut failed = false;
            for (name, (source, expected)) in &contents {
                match store.read(*source, 0, expected.len()) {
                    Ok(reply) => assert!(reply.to_vec() == *expected, "{told}: {name}"),
                    Err(_) => failed = true,
                }
            }
            let is_clean = store.check(true).is_ok_and(|report| report.is_clean());
            assert!(!failed || !is_clean, "{told}: `check` saw nothing");
            let _ = store.close();
            !is_clean
        }
        Err(error) => {
            assert!(matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Io), "{told}: {error}");
            true
        }
    };
    Store::rebuild_index(&options).unwrap_or_else(|error| panic!("{told}: {error}"));
    let store = Store::open(options).unwrap_or_else(|error| panic!("{told}: {error}"));
    common::assert_sound(&store);
    assert_eq!(unreadable(&store, &contents, &told), [], "{told}");
    store.close().unwrap();
    noticed
}

#[test]
fn a_damaged_index_never_gives_wrong_bytes_and_a_rebuild_brings_all_back() {
    let first = number("SLACKWATER_CORRUPTION_FIRST").unwrap_or(1);
    let seeds = number("SLACKWATER_CORRUPTION_INDEX_SEEDS").unwrap_or(INDEX_SEEDS);
    let noticed = (first..first + seeds).filter(|seed| try_index(*seed)).count();
    println!("{seeds} indexes: the damage of {noticed} was noticed before the rebuild");
    assert!(noticed > 0, "else the test does not try what it says");
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap())
}

#[test]
fn damaged_segments_never_give_wrong_bytes_and_a_repair_keeps_the_rest() {
    let first = number("SLACKWATER_CORRUPTION_FIRST").unwrap_or(1);
    let seeds = number("SLACKWATER_CORRUPTION_SEEDS").unwrap_or(SEEDS);
    let mut fates = [0_u64; 4];
    for seed in first..first + seeds {
        let slot = match try_one(seed) {
            Fate::Refused => 0,
            Fate::Unhurt => 1,
            Fate::Repaired { lost: false } => 2,
            Fate::Repaired { lost: true } => 3,
        };
        fates[slot] += 1;
    }
    let [refused, unhurt, whole, lost] = fates;
    println!(
        "{seeds} stores: {refused} refused, {unhurt} unhurt, {whole} repaired whole, {lost} with losses"
    );
    // Else the test does not try what it says.
    assert!(whole > 0 && lost > 0, "{fates:?}");
}
