//! The index is expendable: thrown away at any moment, after any power cut, it is made anew from
//! its copy and the log, and the store holds what it acknowledged. What cannot be made whole is
//! refused, and named.
//!
//! `SLACKWATER_REBUILD_SEEDS=N` tries N seeds instead of a few.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;

use common::{Fixture, assert_sound, bytes, content, open, options, path};
use slackwater_blockstore::disk::{Disk, Fault, FileName, FileRole, MemoryDisk};
use slackwater_blockstore::kv::{Family, Kv, KvFault, MemoryKv};
use slackwater_blockstore::{
    DeviceNumber, Error, ErrorKind, FileKind, FilePath, InodeId, Name, Rebuilt, SegmentId,
    SetAttributes, SnapshotId, SnapshotRequest, Source, SpecialFile, Stability, Store,
};

/// A small generator, so that each run is told by one number.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

#[derive(Clone, Debug, Default)]
struct Model {
    files: BTreeMap<u64, Vec<u8>>,
    snapshots: BTreeMap<SnapshotId, Vec<u8>>,
    /// A device in the root, told by its number.
    device: Option<DeviceNumber>,
    /// How often it was made and removed.
    device_changes: u64,
}

const DEVICE: &str = "device";

/// Makes the device, or removes it.
fn step_device(store: &Store, model: &Model, minor: u32) -> (Model, Result<(), Error>) {
    let (set, name) = (SetAttributes::default(), Name::new(DEVICE.as_bytes()).unwrap());
    let mut after = model.clone();
    after.device_changes += 1;
    let outcome = if after.device.take().is_some() {
        store.remove(InodeId::ROOT, &name).map(drop)
    } else {
        let number = DeviceNumber { major: 7, minor };
        after.device = Some(number);
        let device = SpecialFile::BlockDevice(number);
        store.make_special_file(InodeId::ROOT, &name, device, &set).map(drop)
    };
    (after, outcome)
}

fn name(file: u64) -> FilePath {
    path(&format!("d/f{file}"))
}

fn seeds(default: u64) -> u64 {
    let given = std::env::var("SLACKWATER_REBUILD_SEEDS").ok().and_then(|text| text.parse().ok());
    given.unwrap_or(default)
}

/// One operation, durable when it returns; answers the model after it if it succeeds. Much is
/// overwritten and deleted, so that much is compacted.
fn step(store: &Store, model: &Model, random: &mut Random) -> (Model, Result<(), Error>) {
    let mut after = model.clone();
    let file = random.below(4);
    let (offset, length) = (random.below(60_000), random.below(60_000) + 1);
    let (kind, seed) = (random.below(100), random.below(40));
    let pick = usize::try_from(random.below(1000)).unwrap();
    let some_snapshot = model.snapshots.iter().nth(pick % model.snapshots.len().max(1));
    let outcome = match (kind, model.files.contains_key(&file), some_snapshot) {
        (_, false, _) => {
            after.files.insert(file, vec![0; 3000]);
            store.create_file(&name(file), 3000).map(|_| ())
        }
        (50..60, true, _) => return step_device(store, model, u32::try_from(seed).unwrap()),
        (60..70, true, _) => {
            store.snapshot(&name(file), SnapshotRequest::default()).map(|snapshot| {
                after.snapshots.insert(snapshot.id, model.files[&file].clone());
            })
        }
        (70..76, true, _) => {
            after.files.remove(&file);
            store.remove_path(&name(file))
        }
        (76..82, true, Some((id, _))) => {
            after.snapshots.remove(id);
            store.delete_snapshot(*id)
        }
        (82..88, true, Some((id, content))) if !model.files.contains_key(&(file + 4)) => {
            after.files.insert(file + 4, content.clone());
            store.clone_snapshot(*id, &name(file + 4)).map(|_| ())
        }
        (88..96, true, _) => store.gc().map(|_| ()),
        (96.., true, _) => store.checkpoint(),
        (_, true, _) => {
            let data = bytes(seed, usize::try_from(length).unwrap());
            let start = usize::try_from(offset).unwrap();
            let content = after.files.get_mut(&file).unwrap();
            content.resize(content.len().max(start + data.len()), 0);
            content[start..start + data.len()].copy_from_slice(&data);
            let found = store.resolve(&name(file));
            found.and_then(|found| {
                store.write(found.inode, offset, data, Stability::FileSync).map(|_| ())
            })
        }
    };
    (after, outcome)
}

/// Runs until the end or a failure; answers the models before and after the last operation.
fn run(store: &Store, model: Model, random: &mut Random, steps: u64) -> (Model, Model) {
    let mut model = model;
    for _ in 0..steps {
        let (after, outcome) = step(store, &model, random);
        if outcome.is_err() {
            return (model, after);
        }
        model = after;
    }
    (model.clone(), model)
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
    let device = store.resolve(&path(DEVICE)).ok().map(|found| found.kind);
    if device != model.device.map(|number| FileKind::Special(SpecialFile::BlockDevice(number))) {
        return Err(format!("the device is {device:?}, expected {:?}", model.device));
    }
    for (id, expected) in &model.snapshots {
        store.snapshot_info(*id).map_err(|error| error.to_string())?;
        if content(store, Source::Snapshot(*id)) != *expected {
            return Err(format!("snapshot {id} differs"));
        }
    }
    Ok(())
}

/// A new index for what is on the disk.
fn rebuild(disk: &MemoryDisk) -> Result<(Arc<MemoryKv>, Rebuilt), Error> {
    let kv = Arc::new(MemoryKv::new());
    let disk: Arc<dyn Disk> = Arc::new(disk.clone());
    let rebuilt = Store::rebuild_index_with(Arc::clone(&kv) as Arc<dyn Kv>, disk, options())?;
    // What it made is durable.
    Ok((Arc::new(kv.crash()), rebuilt))
}

fn has_copy(disk: &MemoryDisk) -> Option<FileName> {
    disk.list().unwrap().into_iter().find(|name| name.role == FileRole::IndexCopy)
}

#[test]
fn an_index_that_is_thrown_away_at_any_moment_is_made_anew() {
    let (mut copies, mut logs_alone) = (0, 0);
    for seed in 1..=seeds(6) {
        let mut random = Random(seed * 0x9e37_79b9);
        let mut fixture = Fixture::new();
        let mut model = Model::default();
        for round in 0..12 {
            let steps = random.below(30) + 1;
            (model, _) = run(&fixture.store, model, &mut random, steps);
            let context = format!("seed {seed}, round {round}");
            assert_eq!(holds(&fixture.store, &model), Ok(()), "{context}");
            let disk = fixture.disk.crash(|| random.below(2) == 0);
            let (kv, rebuilt) = rebuild(&disk).unwrap_or_else(|e| panic!("{context}: {e}"));
            assert_eq!(rebuilt.copy.is_some(), has_copy(&disk).is_some(), "{context}");
            match rebuilt.copy {
                Some(_) => copies += 1,
                None => logs_alone += 1,
            }
            // It is the same index, but for hashes on their way into it.
            for family in Family::ALL.into_iter().skip(1).filter(|f| *f != Family::Hash) {
                let same = kv.entries(family) == fixture.kv.entries(family);
                assert!(same, "{context}: family {}", family.name());
            }
            fixture = Fixture::open(kv, disk);
            assert_eq!(holds(&fixture.store, &model), Ok(()), "{context}");
            fixture.check();
        }
        assert!(model.device_changes > 1, "seed {seed} makes a device and removes it");
    }
    assert!(copies > 10 && logs_alone > 3, "{copies} from copies, {logs_alone} from logs alone");
}

#[test]
fn after_a_power_cut_at_any_call_the_index_is_made_anew() {
    const STEPS: u64 = 40;
    for seed in 1..=seeds(1) {
        let start = || Random(seed * 0x0123_4567_89ab);
        let calls = {
            let fixture = Fixture::new();
            let (model, _) = run(&fixture.store, Model::default(), &mut start(), STEPS);
            assert!(model.device_changes > 1, "seed {seed} makes a device and removes it");
            assert!(has_copy(&fixture.disk).is_some(), "seed {seed} writes a copy");
            fixture.disk.changes()
        };
        println!("seed {seed}: a power cut at each of {calls} calls");
        for cut in 0..calls {
            let (kv, disk) = (Arc::new(MemoryKv::new()), MemoryDisk::new());
            disk.inject(Fault::PowerCut(cut));
            let Ok(store) = open(&kv, &disk) else { continue };
            let (before, after) = run(&store, Model::default(), &mut start(), STEPS);
            let mut random = Random(seed ^ (cut << 20) | 1);
            let disk = disk.crash(|| random.below(2) == 0);
            let context = format!("seed {seed}, cut {cut}");
            let (new, _) = rebuild(&disk).unwrap_or_else(|error| panic!("{context}: {error}"));
            let store = open(&new, &disk).unwrap_or_else(|error| panic!("{context}: {error}"));
            let verdict = holds(&store, &before).or_else(|first| {
                holds(&store, &after).map_err(|second| format!("{first}; or {second}"))
            });
            assert_eq!(verdict, Ok(()), "{context}");
            assert_sound(&store);
            // It goes on as if nothing had happened, and can be made anew again.
            store.create_file(&path("after"), 1).unwrap();
            store.gc().unwrap();
            assert_sound(&store);
            drop(store);
            if cut % 8 == 0 {
                let (new, _) = rebuild(&disk).unwrap_or_else(|error| panic!("{context}: {error}"));
                assert_sound(&open(&new, &disk).unwrap());
            }
        }
    }
}

/// A store whose first log files are gone: their chunks were overwritten.
fn compacted() -> (Fixture, Model) {
    let fixture = Fixture::new();
    let mut model = Model::default();
    for round in 0..8 {
        for file in 0..3 {
            let data = bytes(100 + round * 3 + file, 90_000);
            let _ = store_file(&fixture.store, file, &data);
            model.files.insert(file, data.to_vec());
        }
        fixture.store.gc().unwrap();
    }
    assert!(has_copy(&fixture.disk).is_some());
    assert!(log_files(&fixture.disk)[0].number.get() > 1);
    (fixture, model)
}

fn store_file(store: &Store, file: u64, data: &bytes::Bytes) -> Result<(), Error> {
    let _ = store.create_file(&name(file), 0);
    let inode = store.resolve(&name(file))?.inode;
    store.write(inode, 0, data.clone(), Stability::FileSync).map(|_| ())
}

fn log_files(disk: &MemoryDisk) -> Vec<FileName> {
    disk.list().unwrap().into_iter().filter(|name| name.role == FileRole::Log).collect()
}

fn length(disk: &MemoryDisk, name: FileName) -> u64 {
    disk.open(name).unwrap().length_bytes().unwrap()
}

#[test]
fn a_damaged_copy_is_never_taken() {
    let (fixture, model) = compacted();
    let copy = has_copy(&fixture.disk).unwrap();
    let bytes = length(&fixture.disk, copy);
    let refused = |disk: &MemoryDisk, what: &str| {
        let error = rebuild(disk).expect_err(what);
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{what}: {error}");
        let text = error.to_string();
        assert!(text.contains(&copy.to_string()), "{what}: {text}");
        assert!(text.contains("log/0000000000000001.seg"), "{what}: {text}");
    };
    for at in (0..bytes).step_by(37) {
        let disk = fixture.disk.crash(|| true);
        disk.flip_bit(copy, usize::try_from(at).unwrap());
        refused(&disk, &format!("byte {at}"));
    }
    for at in (0..bytes).step_by(101) {
        let disk = fixture.disk.crash(|| true);
        disk.open(copy).unwrap().truncate(at).unwrap();
        refused(&disk, &format!("{at} bytes"));
    }
    let disk = fixture.disk.crash(|| true);
    disk.remove(copy).unwrap();
    let error = rebuild(&disk).unwrap_err().to_string();
    assert!(error.contains("there is no copy"), "{error}");
    // As it is, all is there.
    let disk = fixture.disk.crash(|| true);
    let (kv, rebuilt) = rebuild(&disk).unwrap();
    assert_eq!(rebuilt.copy, Some(copy.to_string()));
    let store = open(&kv, &disk).unwrap();
    assert_eq!(holds(&store, &model), Ok(()));
    assert_sound(&store);
}

#[test]
fn of_two_copies_the_newer_whole_one_is_taken_and_an_older_alone_is_not_enough() {
    let (fixture, _) = compacted();
    let old = has_copy(&fixture.disk).unwrap();
    let file = fixture.disk.open(old).unwrap();
    let old_bytes = file.read_at(0, usize::try_from(length(&fixture.disk, old)).unwrap()).unwrap();
    for round in 0..3 {
        store_file(&fixture.store, 0, &bytes(200 + round, 120_000)).unwrap();
        fixture.store.gc().unwrap();
    }
    let new = has_copy(&fixture.disk).unwrap();
    assert_ne!(old, new);
    let put_back = |disk: &MemoryDisk| {
        let file = disk.create(old).unwrap();
        file.write_at(0, &old_bytes).unwrap();
        file.sync().unwrap();
        disk.sync_names().unwrap();
    };
    let both = fixture.disk.crash(|| true);
    put_back(&both);
    let (kv, rebuilt) = rebuild(&both).unwrap();
    assert_eq!(rebuilt.copy, Some(new.to_string()));
    assert_sound(&open(&kv, &both).unwrap());
    assert_eq!(has_copy(&both), Some(new), "a start takes the older one away");

    let alone = fixture.disk.crash(|| true);
    alone.remove(new).unwrap();
    put_back(&alone);
    let error = rebuild(&alone).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.to_string().contains("missing"), "{error}");
}

#[test]
fn a_log_file_that_is_missing_is_named() {
    let fixture = Fixture::new();
    for round in 0..6 {
        store_file(&fixture.store, round, &bytes(300 + round, 80_000)).unwrap();
    }
    let logs = log_files(&fixture.disk);
    assert!(logs.len() >= 5);
    let disk = fixture.disk.crash(|| true);
    disk.remove(logs[2]).unwrap();
    for result in [rebuild(&disk).map(|_| ()), open(&Arc::new(MemoryKv::new()), &disk).map(|_| ())]
    {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        let text = error.to_string();
        assert!(text.contains(&logs[3].to_string()), "{text}");
        assert!(text.contains("begins with commit"), "{text}");
    }
}

#[test]
fn a_damaged_chunk_stops_no_rebuild_and_is_told_when_it_is_read() {
    let fixture = Fixture::new();
    for file in 0..4 {
        store_file(&fixture.store, file, &bytes(400 + file, 80_000)).unwrap();
    }
    let disk = fixture.disk.crash(|| true);
    // In the middle of the first file's blocks, far from any record's header.
    disk.flip_bit(log_files(&disk)[0], 40_000);
    let strict = open(&Arc::new(MemoryKv::new()), &disk).unwrap_err();
    assert_eq!(strict.kind(), ErrorKind::Corrupt, "a start without an index believes nothing");
    let (kv, _) = rebuild(&disk).unwrap();
    let store = open(&kv, &disk).unwrap();
    let report = store.check(true).unwrap();
    assert!(!report.is_clean());
    let damaged = Source::File(store.resolve(&name(0)).unwrap().inode);
    assert_eq!(store.read(damaged, 0, 80_000).unwrap_err().kind(), ErrorKind::Corrupt);
    let sound = Source::File(store.resolve(&name(1)).unwrap().inode);
    assert!(content(&store, sound) == bytes(401, 80_000));
}

#[test]
fn an_index_that_is_lost_is_not_taken_for_a_new_store() {
    let (fixture, _) = compacted();
    let disk = fixture.disk.crash(|| true);
    let before = disk.list().unwrap();
    let error = open(&Arc::new(MemoryKv::new()), &disk).unwrap_err();
    assert!(matches!(error, Error::IndexLost { .. }), "{error}");
    assert!(error.to_string().contains("slackwaterd check --rebuild"), "{error}");
    assert_eq!(disk.list().unwrap(), before);
}

/// Where the last directory of a file begins.
fn directory_of(disk: &MemoryDisk, name: FileName) -> usize {
    let log = disk.open(name).unwrap().read_at(0, usize::try_from(length(disk, name)).unwrap());
    log.unwrap().windows(4).rposition(|four| four == b"SWDR").unwrap()
}

/// A directory says again what the groups before it say.
#[test]
fn a_damaged_directory_in_the_midst_of_the_log_stops_nothing() {
    let fixture = Fixture::new();
    for file in 0..4 {
        store_file(&fixture.store, file, &bytes(400 + file, 80_000)).unwrap();
    }
    // Its magic, its count, a place, a hash; of a middle file, and of the last but one.
    for (from_end, at) in
        [3, 2].into_iter().flat_map(|log| [0, 6, 40, 24 + 3076].map(|at| (log, at)))
    {
        let disk = fixture.disk.crash(|| true);
        let logs = log_files(&disk);
        let log = logs[logs.len() - from_end];
        disk.flip_bit(log, directory_of(&disk, log) + at);
        let context = format!("{log}, byte {at} of its directory");
        let (new, _) = rebuild(&disk).unwrap_or_else(|error| panic!("{context}: {error}"));
        for kv in [new, Arc::new(MemoryKv::new())] {
            let disk = disk.crash(|| true);
            let store = open(&kv, &disk).unwrap_or_else(|error| panic!("{context}: {error}"));
            let report = store.repair().unwrap();
            assert!(report.after.is_clean(), "{context}: {:#?}", report.after.problems);
            assert_eq!(report.lost_blocks, 0, "{context}");
            store.close().unwrap();
            drop(store);
            let store = open(&kv, &disk).unwrap();
            for file in 0..4 {
                let found = store.resolve(&name(file)).unwrap().inode;
                assert!(content(&store, Source::File(found)) == bytes(400 + file, 80_000));
            }
            assert_sound(&store);
        }
    }
}

/// Commits that are missing behind it are no damaged directory.
#[test]
fn a_file_that_ends_early_in_the_midst_of_the_log_is_refused() {
    let fixture = Fixture::new();
    for file in 0..4 {
        store_file(&fixture.store, file, &bytes(400 + file, 80_000)).unwrap();
    }
    let disk = fixture.disk.crash(|| true);
    let name = log_files(&disk)[1];
    let log = disk.open(name).unwrap().read_at(0, usize::try_from(length(&disk, name)).unwrap());
    let last_commit = log.unwrap().windows(4).rposition(|four| four == b"SWCM").unwrap();
    disk.flip_bit(name, last_commit + 10);
    for result in [rebuild(&disk).map(|_| ()), open(&Arc::new(MemoryKv::new()), &disk).map(|_| ())]
    {
        let error = result.unwrap_err();
        assert!(error.to_string().contains("not sealed"), "{error}");
    }
}

/// A later commit proves that the one with the damaged chunk was acknowledged.
#[test]
fn a_damaged_chunk_of_the_last_log_file_stops_no_rebuild() {
    let fixture = Fixture::new();
    store_file(&fixture.store, 0, &bytes(400, 20_000)).unwrap();
    store_file(&fixture.store, 1, &bytes(401, 20_000)).unwrap();
    let disk = fixture.disk.crash(|| true);
    assert_eq!(log_files(&disk).len(), 1);
    disk.flip_bit(log_files(&disk)[0], 10_000);
    let strict = open(&Arc::new(MemoryKv::new()), &disk).unwrap_err();
    assert_eq!(strict.kind(), ErrorKind::Corrupt);
    let (kv, _) = rebuild(&disk).unwrap();
    let store = open(&kv, &disk).unwrap();
    let damaged = Source::File(store.resolve(&name(0)).unwrap().inode);
    assert_eq!(store.read(damaged, 0, 20_000).unwrap_err().kind(), ErrorKind::Corrupt);
    let sound = Source::File(store.resolve(&name(1)).unwrap().inode);
    assert!(content(&store, sound) == bytes(401, 20_000));
}

#[test]
fn a_rebuild_cuts_nothing_off() {
    let fixture = Fixture::new();
    store_file(&fixture.store, 0, &bytes(400, 20_000)).unwrap();
    fixture.disk.inject(Fault::Sync(0));
    store_file(&fixture.store, 0, &bytes(401, 20_000)).unwrap_err();
    // All of it but the end.
    let mut sectors = 0;
    let disk = fixture.disk.crash(|| {
        sectors += 1;
        sectors < 20
    });
    let log = log_files(&disk)[0];
    let before = length(&disk, log);
    let (kv, _) = rebuild(&disk).unwrap();
    assert_eq!(length(&disk, log), before);
    let store = open(&kv, &disk).unwrap();
    assert!(length(&disk, log) < before, "a start does");
    assert!(
        content(&store, Source::File(store.resolve(&name(0)).unwrap().inode)) == bytes(400, 20_000)
    );
    assert_sound(&store);
}

#[test]
fn a_damaged_copy_is_in_nobodys_way_while_the_log_has_all() {
    let fixture = Fixture::new();
    for file in 0..4 {
        store_file(&fixture.store, file, &bytes(400 + file, 80_000)).unwrap();
    }
    let disk = fixture.disk.crash(|| true);
    let damaged = FileName { role: FileRole::IndexCopy, number: SegmentId::new(1000) };
    disk.create(damaged).unwrap().write_at(0, &[7; 100]).unwrap();
    let error = open(&Arc::new(MemoryKv::new()), &disk).unwrap_err();
    assert!(matches!(error, Error::IndexLost { .. }), "{error}");
    let (kv, rebuilt) = rebuild(&disk).unwrap();
    assert_eq!(rebuilt.copy, None);
    assert_sound(&open(&kv, &disk).unwrap());

    let disk = fixture.disk.crash(|| true);
    disk.create(damaged).unwrap().write_at(0, &[7; 100]).unwrap();
    let gone = log_files(&disk)[1];
    disk.remove(gone).unwrap();
    let text = rebuild(&disk).unwrap_err().to_string();
    assert!(text.contains("missing") && text.contains(&damaged.to_string()), "{text}");
}

/// The disk is full but for one of the reserves while an index is filled.
#[test]
fn a_replay_gets_the_reserve() {
    let (fixture, _) = compacted();
    // What the index has not flushed, so that a start replays something.
    for file in 0..20 {
        fixture.store.create_file(&path(&format!("late{file}")), 0).unwrap();
    }
    for is_for_start in [false, true] {
        replay_without_room(&fixture, is_for_start);
    }
}

fn replay_without_room(fixture: &Fixture, is_for_start: bool) {
    let is_given_back =
        |disk: &MemoryDisk| disk.reserved_bytes() == 0 && disk.reserved_for_start_bytes() == 0;
    let (mut starts, mut rebuilds) = (0, 0);
    for nth in 0..40 {
        let full = |disk: &MemoryDisk, kv: &MemoryKv| {
            disk.reserve(if is_for_start { 0 } else { 1 << 20 }).unwrap();
            disk.reserve_for_start(if is_for_start { 1 << 20 } else { 0 }).unwrap();
            kv.inject(KvFault::NoSpace(nth));
        };
        let (kv, disk) = (Arc::new(MemoryKv::new()), fixture.disk.crash(|| true));
        full(&disk, &kv);
        let (index, medium): (Arc<dyn Kv>, Arc<dyn Disk>) = (kv.clone(), Arc::new(disk.clone()));
        Store::rebuild_index_with(index, medium, options()).unwrap();
        rebuilds += u64::from(!kv.disarm() && is_given_back(&disk));

        let (kv, disk) = (Arc::new(fixture.kv.crash()), fixture.disk.crash(|| true));
        full(&disk, &kv);
        assert_sound(&open(&kv, &disk).unwrap());
        // A start takes it again as soon as there is room.
        starts += u64::from(!kv.disarm());
    }
    assert!(rebuilds > 3, "{rebuilds}");
    assert!(starts > 0);
    println!("{starts} starts, {rebuilds} rebuilds without room");
}
