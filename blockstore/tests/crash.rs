//! Power cuts and failing disks: the cut comes at every call that changes the disk, one after
//! the other, and what was not synced is kept or lost sector by sector at random. After each,
//! the store holds what it acknowledged (I8), snapshots are whole, and `check` finds nothing.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::cast_possible_truncation,
    missing_docs,
    reason = "tests"
)]

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;

use common::{Fixture, assert_sound, bytes, content, open, path};
use slackwater_blockstore::disk::{Disk, Fault, FileRole, MemoryDisk};
use slackwater_blockstore::kv::MemoryKv;
use slackwater_blockstore::{
    Error, ErrorKind, SetAttributes, SnapshotId, SnapshotRequest, Source, Stability, Store,
};

/// A small generator, so that each run is told by one number.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

/// What the store must hold.
#[derive(Clone, Default)]
struct Model {
    files: BTreeMap<u64, Vec<u8>>,
    snapshots: BTreeMap<SnapshotId, Vec<u8>>,
}

fn name(file: u64) -> slackwater_blockstore::FilePath {
    path(&format!("d/f{file}"))
}

/// One operation of the workload, all of them durable when they return. Answers the model
/// after it, whether it succeeded or not.
fn step(store: &Store, model: &Model, random: &mut Random) -> (Model, Result<(), Error>) {
    let mut after = model.clone();
    let file = random.below(4);
    let kind = random.below(100);
    let (offset, length) = (random.below(90_000), random.below(40_000) + 1);
    let seed = random.below(20);
    let pick = random.next();
    let outcome = match (kind, model.files.contains_key(&file)) {
        (_, false) => {
            after.files.insert(file, vec![0; 3000]);
            store.create_file(&name(file), 3000).map(|_| ())
        }
        (0..45, true) => {
            let data = bytes(seed, usize::try_from(length).unwrap());
            let content = after.files.get_mut(&file).unwrap();
            let (start, end) = (offset as usize, (offset + length) as usize);
            content.resize(content.len().max(end), 0);
            content[start..end].copy_from_slice(&data);
            store.resolve(&name(file)).and_then(|found| {
                store.write(found.inode, offset, data, Stability::FileSync).map(|_| ())
            })
        }
        (45..55, true) => {
            after.files.get_mut(&file).unwrap().resize(offset as usize, 0);
            let set = SetAttributes { size_bytes: Some(offset), ..SetAttributes::default() };
            store
                .resolve(&name(file))
                .and_then(|found| store.set_attributes(found.inode, &set, None).map(|_| ()))
        }
        (55..65, true) => {
            let is_clone = store.file_info(&name(file)).unwrap().origin_snapshot.is_some();
            let becomes_clone = !is_clone && seed.is_multiple_of(2);
            let request = SnapshotRequest { becomes_clone, ..SnapshotRequest::default() };
            store.snapshot(&name(file), request).map(|snapshot| {
                after.snapshots.insert(snapshot.id, model.files[&file].clone());
            })
        }
        (65..75, true) => {
            after.files.remove(&file);
            store.remove_path(&name(file))
        }
        (75..85, true) => {
            match model.snapshots.keys().nth(pick as usize % model.snapshots.len().max(1)) {
                Some(id) => {
                    after.snapshots.remove(id);
                    store.delete_snapshot(*id)
                }
                None => Ok(()),
            }
        }
        (85..93, true) => {
            match model.snapshots.iter().nth(pick as usize % model.snapshots.len().max(1)) {
                Some((id, content)) => {
                    let to = 4 + random.below(4);
                    if model.files.contains_key(&to) {
                        return (after, Ok(()));
                    }
                    after.files.insert(to, content.clone());
                    store.clone_snapshot(*id, &name(to)).map(|_| ())
                }
                None => Ok(()),
            }
        }
        (93..97, true) => store.gc().map(|_| ()),
        (_, true) => store.checkpoint(),
    };
    (after, outcome)
}

fn holds(store: &Store, model: &Model) -> Result<(), String> {
    let listed = store.list_files("", None, 100).unwrap();
    if listed.len() != model.files.len() {
        return Err(format!("{} files, expected {}", listed.len(), model.files.len()));
    }
    for (file, expected) in &model.files {
        let found = store.resolve(&name(*file)).map_err(|error| error.to_string())?;
        if content(store, Source::File(found.inode)) != *expected {
            return Err(format!("file {file} differs"));
        }
    }
    for (id, expected) in &model.snapshots {
        store.snapshot_info(*id).map_err(|error| error.to_string())?;
        if content(store, Source::Snapshot(*id)) != *expected {
            return Err(format!("snapshot {id} differs"));
        }
    }
    Ok(())
}

/// Runs the workload until it fails or ends; answers the models before and after the last op.
fn run(store: &Store, seed: u64, steps: u64) -> (Model, Model, Option<Error>) {
    let mut random = Random(seed);
    let mut model = Model::default();
    for _ in 0..steps {
        let (after, outcome) = step(store, &model, &mut random);
        if let Err(error) = outcome {
            return (model, after, Some(error));
        }
        model = after;
    }
    (model.clone(), model, None)
}

const STEPS: u64 = 45;

fn changes_of(seed: u64) -> u64 {
    let fixture = Fixture::new();
    let (_, _, error) = run(&fixture.store, seed, STEPS);
    assert!(error.is_none(), "{error:?}");
    fixture.disk.changes()
}

fn cut_everywhere(seed: u64) {
    for cut in 0..changes_of(seed) {
        let kv = Arc::new(MemoryKv::new());
        let disk = MemoryDisk::new();
        disk.inject(Fault::PowerCut(cut));
        // A cut while the store is made leaves an empty store or none.
        let (before, after) = match open(&kv, &disk) {
            Ok(store) => {
                let (before, after, _) = run(&store, seed, STEPS);
                (before, after)
            }
            Err(_) => (Model::default(), Model::default()),
        };
        let mut random = Random(seed ^ (cut << 20) | 1);
        let survived = disk.crash(|| random.below(2) == 0);
        let kv = Arc::new(kv.crash());
        let context = format!("seed {seed}, cut {cut}");
        let store = open(&kv, &survived).unwrap_or_else(|error| panic!("{context}: {error}"));
        let verdict = holds(&store, &before).or_else(|first| {
            holds(&store, &after).map_err(|second| format!("{first}; or {second}"))
        });
        assert_eq!(verdict, Ok(()), "{context}");
        assert_sound(&store);
        // It goes on as if nothing had happened.
        store.create_file(&path("after"), 1).unwrap();
        store.gc().unwrap();
        assert_sound(&store);
    }
}

#[test]
fn a_power_cut_at_any_call_loses_nothing_acknowledged() {
    for seed in [11, 29, 3] {
        cut_everywhere(seed);
    }
}

#[test]
fn a_failed_sync_poisons_until_restart() {
    let seed = 17;
    let total = {
        let fixture = Fixture::new();
        run(&fixture.store, seed, STEPS);
        fixture.disk.syncs()
    };
    for nth in 4..total {
        let fixture = Fixture::new();
        let verifier = fixture.store.write_verifier();
        fixture.disk.inject(Fault::Sync(nth.saturating_sub(4)));
        let (before, after, error) = run(&fixture.store, seed, STEPS);
        let Some(error) = error else { continue };
        if error.kind() != ErrorKind::Poisoned {
            // The sync of a compacted file: nothing was acknowledged, and the store goes on.
            assert_eq!(error.kind(), ErrorKind::Io, "{error}");
            fixture.check();
            continue;
        }
        assert_ne!(fixture.store.write_verifier(), verifier, "clients must learn of it");
        let refused = fixture.store.create_file(&path("x"), 1).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Poisoned);
        // Reads go on; they may show what the failed op left dirty.
        holds(&fixture.store, &before).or_else(|_| holds(&fixture.store, &after)).unwrap();
        // Whether the last op survived is open: its sync failed.
        let mut random = Random(nth | 1);
        let survived = fixture.disk.crash(|| random.below(2) == 0);
        let kv = Arc::new(fixture.kv.crash());
        let store = open(&kv, &survived).unwrap();
        holds(&store, &before).or_else(|_| holds(&store, &after)).unwrap();
        assert_sound(&store);
    }
}

#[test]
fn a_short_or_refused_write_fails_one_call_and_harms_nothing() {
    let seed = 23;
    let total = changes_of(seed);
    for (nth, full) in (0..total).flat_map(|nth| [(nth, false), (nth, true)]) {
        let fixture = Fixture::new();
        fixture.disk.inject(if full { Fault::NoSpace(nth) } else { Fault::ShortWrite(nth) });
        let (before, _, error) = run(&fixture.store, seed, STEPS);
        let Some(error) = error else { continue };
        let expected = if full { ErrorKind::NoSpace } else { ErrorKind::Io };
        let of_compaction = error.kind() == ErrorKind::Io;
        assert!(error.kind() == expected || of_compaction, "write {nth}: {error}");
        // A FileSync WRITE that failed leaves its data dirty, to be committed later: commit it,
        // or compare without it.
        let store = &fixture.store;
        store.commit_all().unwrap();
        store.create_file(&path("other"), 1).unwrap();
        store.remove_path(&path("other")).unwrap();
        for (id, content_before) in &before.snapshots {
            if store.snapshot_info(*id).is_ok() {
                assert!(content(store, Source::Snapshot(*id)) == *content_before, "write {nth}");
            }
        }
        fixture.check();
        let fixture = fixture.restart();
        fixture.check();
    }
}

#[test]
fn unstable_writes_survive_a_crash_once_committed() {
    let fixture = Fixture::new();
    let inode = fixture.store.create_file(&path("f"), 0).unwrap().attributes.inode;
    let committed = bytes(50, 300_000);
    let written = fixture.store.write(inode, 0, committed.clone(), Stability::Unstable).unwrap();
    assert_eq!(written.stability, Stability::Unstable);
    let (_, verifier) = fixture.store.commit(inode).unwrap();
    assert_eq!(verifier, written.verifier, "the same life of the server");
    fixture.store.write(inode, 0, bytes(51, 4096), Stability::Unstable).unwrap();
    let disk = fixture.disk.crash(|| false);
    let kv = Arc::new(fixture.kv.crash());
    let store = open(&kv, &disk).unwrap();
    assert_ne!(store.write_verifier(), verifier, "clients send again what they did not commit");
    assert!(content(&store, Source::File(inode)) == committed);
    assert_sound(&store);
}

#[test]
fn damage_in_the_middle_of_the_log_is_refused_not_cut_off() {
    let fixture = Fixture::new();
    let inode = fixture.store.create_file(&path("f"), 0).unwrap().attributes.inode;
    for block in 0..6 {
        let data = bytes(100 + block, 4096);
        fixture.store.write(inode, block * 4096, data, Stability::FileSync).unwrap();
    }
    let kv = Arc::new(fixture.kv.crash());
    let disk = fixture.disk.crash(|| true);
    let name = slackwater_blockstore::disk::Disk::list(&disk).unwrap()[0];
    // Far enough from the end that whole, later commits follow.
    disk.flip_bit(name, 6000);
    let error = open(&kv, &disk).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
}

#[test]
fn damage_before_the_position_of_the_index_is_refused_not_cut_off() {
    let fixture = Fixture::new();
    let inode = fixture.store.create_file(&path("f"), 0).unwrap().attributes.inode;
    for block in 0..6 {
        let data = bytes(100 + block, 4096);
        fixture.store.write(inode, block * 4096, data, Stability::FileSync).unwrap();
    }
    // The index is durable up to the end of the log, so nothing will be replayed.
    let fixture = fixture.restart();
    fixture.store.close().unwrap();
    let name = Disk::list(&fixture.disk).unwrap()[0];
    let file = Disk::open(&fixture.disk, name).unwrap();
    let length = file.length_bytes().unwrap();
    let log = file.read_at(0, usize::try_from(length).unwrap()).unwrap();
    let end = log.iter().rposition(|&byte| byte != 0).unwrap();
    assert!(end + 1 < log.len(), "zeros lie behind the last record");
    // In the last commit record, whose crc covers it.
    fixture.disk.flip_bit(name, end - 10);
    let error = open(&fixture.kv, &fixture.disk).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert_eq!(Disk::open(&fixture.disk, name).unwrap().length_bytes().unwrap(), length);
}

#[test]
fn a_torn_seal_is_no_seal() {
    let fixture = Fixture::new();
    let inode = fixture.store.create_file(&path("f"), 0).unwrap().attributes.inode;
    let data = bytes(100, 200 << 10);
    fixture.store.write(inode, 0, data.clone(), Stability::FileSync).unwrap();
    let logs = Disk::list(&fixture.disk).unwrap();
    assert_eq!(logs.len(), 1, "one append fills the segment");
    fixture.store.create_file(&path("next"), 0).unwrap();
    let disk = fixture.disk.crash(|| true);
    let logs = Disk::list(&disk).unwrap();
    assert_eq!(logs.len(), 2, "the next commit sealed it");
    // The crash came before the new file was made, and a sector of the directory was lost.
    Disk::remove(&disk, logs[1]).unwrap();
    let file = Disk::open(&disk, logs[0]).unwrap();
    let log = file.read_at(0, usize::try_from(file.length_bytes().unwrap()).unwrap()).unwrap();
    let directory = log.windows(4).rposition(|four| four == b"SWDR").unwrap();
    disk.flip_bit(logs[0], directory + 100);
    let kv = Arc::new(fixture.kv.crash());
    let store = open(&kv, &disk).unwrap();
    assert!(content(&store, Source::File(inode)) == data);
    assert_sound(&store);
    store.create_file(&path("again"), 0).unwrap();
    assert_sound(&store);
}

/// The first start was cut off, and the second too: what the third serves outlasts a power cut
/// before the index was ever flushed.
#[test]
fn two_power_cuts_while_a_store_is_made_are_survived() {
    let calls = Fixture::new().disk.changes() + 1;
    for (first, second, pattern) in (0..calls)
        .flat_map(|first| (0..calls).map(move |second| (first, second)))
        .flat_map(|(first, second)| (1..5).map(move |pattern| (first, second, pattern)))
    {
        let mut random = Random(pattern * 0x9e37_79b9 + first * 64 + second);
        let context = format!("cuts {first} and {second}, pattern {pattern}");
        let (mut kv, mut disk) = (Arc::new(MemoryKv::new()), MemoryDisk::new());
        for cut in [first, second] {
            disk.inject(Fault::PowerCut(cut));
            drop(open(&kv, &disk));
            disk = disk.crash(|| random.below(2) == 0);
            kv = Arc::new(kv.crash());
        }
        let store = open(&kv, &disk).unwrap_or_else(|error| panic!("{context}: {error}"));
        store.create_file(&path("f"), 1).unwrap();
        drop(store);
        let (kv, disk) = (Arc::new(kv.crash()), disk.crash(|| random.below(2) == 0));
        let store = open(&kv, &disk).unwrap_or_else(|error| panic!("{context}: {error}"));
        store.resolve(&path("f")).unwrap_or_else(|error| panic!("{context}: {error}"));
        assert_sound(&store);
    }
}

/// Its index and its log are gone, and what is left is not to be taken for rubbish.
#[test]
fn a_store_whose_log_is_lost_is_not_taken_for_a_new_one() {
    let fixture = Fixture::new();
    for round in 0..4 {
        let inode = fixture.store.create_file(&path(&format!("f{round}")), 0).unwrap();
        let data = bytes(100 + round, 90_000);
        let inode = inode.attributes.inode;
        fixture.store.write(inode, 0, data, Stability::FileSync).unwrap();
        fixture.store.write(inode, 0, bytes(8, 50_000), Stability::FileSync).unwrap();
    }
    fixture.store.gc().unwrap();
    let disk = fixture.disk.crash(|| true);
    for name in Disk::list(&disk).unwrap() {
        if name.role != FileRole::Compacted {
            Disk::remove(&disk, name).unwrap();
        }
    }
    let left = Disk::list(&disk).unwrap();
    assert!(!left.is_empty());
    let error = open(&Arc::new(MemoryKv::new()), &disk).unwrap_err();
    assert!(error.to_string().contains("the log was lost"), "{error}");
    assert_eq!(Disk::list(&disk).unwrap(), left);
}
