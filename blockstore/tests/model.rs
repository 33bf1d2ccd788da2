//! Random operations against a plain model in memory: after each sequence every file and
//! snapshot has the model's bytes, special files are what was made, and `check` finds nothing.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

mod common;

use std::collections::BTreeMap;

use common::{Fixture, bytes, content, path};
use proptest::prelude::*;
use slackwater_blockstore::{
    DeviceNumber, ErrorKind, ExtentKind, FileKind, InodeId, Name, SetAttributes, SnapshotId,
    SnapshotRequest, Source, SpecialFile, Stability,
};

const FILES: usize = 5;
const SPECIAL_FILES: usize = 4;
const BYTES_MAX: usize = 3 << 19;

#[derive(Clone, Debug)]
enum Op {
    Write { file: usize, offset: usize, length: usize, seed: u64, stable: bool },
    Truncate { file: usize, size: usize },
    Create { file: usize },
    Remove { file: usize },
    Rename { from: usize, to: usize },
    Commit { file: usize },
    Snapshot { file: usize, becomes_clone: bool },
    Clone { snapshot: usize, file: usize },
    DeleteSnapshot { snapshot: usize },
    Read { file: usize, offset: usize, length: usize },
    Diff { base: usize, target: usize },
    MakeSpecial { slot: usize, special: SpecialFile },
    RemoveSpecial { slot: usize },
    RenameSpecial { from: usize, to: usize },
    Restart,
    Gc,
    Checkpoint,
}

fn position() -> impl Strategy<Value = usize> {
    prop_oneof![
        4 => (0usize..40).prop_map(|block| block * 4096),
        2 => 0usize..200_000,
        2 => (250usize..270).prop_map(|block| block * 4096),
        1 => 0usize..BYTES_MAX,
    ]
}

fn length() -> impl Strategy<Value = usize> {
    prop_oneof![
        4 => (1usize..24).prop_map(|blocks| blocks * 4096),
        3 => 1usize..10_000,
        1 => 1usize..300_000,
    ]
}

fn special() -> impl Strategy<Value = SpecialFile> {
    let number = (any::<u32>(), any::<u32>());
    let number = number.prop_map(|(major, minor)| DeviceNumber { major, minor });
    prop_oneof![
        number.clone().prop_map(SpecialFile::BlockDevice),
        number.prop_map(SpecialFile::CharacterDevice),
        Just(SpecialFile::Socket),
        Just(SpecialFile::Fifo),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    let slot = 0..SPECIAL_FILES;
    let file = 0..FILES;
    let snapshot = 0usize..8;
    prop_oneof![
        20 => (file.clone(), position(), length(), 0u64..24, prop::bool::weighted(0.2)).prop_map(
            |(file, offset, length, seed, stable)| Op::Write { file, offset, length, seed, stable }
        ),
        4 => (file.clone(), position()).prop_map(|(file, size)| Op::Truncate { file, size }),
        2 => file.clone().prop_map(|file| Op::Create { file }),
        2 => file.clone().prop_map(|file| Op::Remove { file }),
        1 => (file.clone(), file.clone()).prop_map(|(from, to)| Op::Rename { from, to }),
        3 => file.clone().prop_map(|file| Op::Commit { file }),
        5 => (file.clone(), any::<bool>())
            .prop_map(|(file, becomes_clone)| Op::Snapshot { file, becomes_clone }),
        5 => (snapshot.clone(), file.clone()).prop_map(|(snapshot, file)| Op::Clone { snapshot, file }),
        3 => snapshot.clone().prop_map(|snapshot| Op::DeleteSnapshot { snapshot }),
        6 => (file, position(), length()).prop_map(
            |(file, offset, length)| Op::Read { file, offset, length }
        ),
        2 => (snapshot.clone(), snapshot).prop_map(|(base, target)| Op::Diff { base, target }),
        2 => (slot.clone(), special()).prop_map(|(slot, special)| Op::MakeSpecial { slot, special }),
        1 => slot.clone().prop_map(|slot| Op::RemoveSpecial { slot }),
        1 => (slot.clone(), slot).prop_map(|(from, to)| Op::RenameSpecial { from, to }),
        1 => Just(Op::Restart),
        2 => Just(Op::Gc),
        1 => Just(Op::Checkpoint),
    ]
}

/// The store and what it ought to hold.
struct World {
    fixture: Fixture,
    files: BTreeMap<usize, Vec<u8>>,
    snapshots: Vec<(SnapshotId, Vec<u8>)>,
    special: BTreeMap<usize, SpecialFile>,
}

/// Special files lie in the root, beside the directories of the files.
fn slot_name(slot: usize) -> Name {
    Name::new(format!("special-{slot}").as_bytes()).unwrap()
}

fn name(file: usize) -> slackwater_blockstore::FilePath {
    path(&format!("dir{}/f{file}", file % 2))
}

impl World {
    fn new() -> Self {
        Self {
            fixture: Fixture::new(),
            files: BTreeMap::new(),
            snapshots: Vec::new(),
            special: BTreeMap::new(),
        }
    }

    fn source(&self, file: usize) -> Source {
        Source::File(self.fixture.store.resolve(&name(file)).unwrap().inode)
    }

    fn write(&mut self, file: usize, offset: usize, data: &bytes::Bytes, stable: bool) {
        let Some(model) = self.files.get_mut(&file) else {
            return;
        };
        let end = offset + data.len();
        if model.len() < end {
            model.resize(end, 0);
        }
        model[offset..end].copy_from_slice(data);
        let inode = self.fixture.store.resolve(&name(file)).unwrap().inode;
        let stability = if stable { Stability::FileSync } else { Stability::Unstable };
        let written =
            self.fixture.store.write(inode, offset as u64, data.clone(), stability).unwrap();
        assert!(written.stability >= stability);
        assert_eq!(written.file.after.size_bytes, self.files[&file].len() as u64);
    }

    fn truncate(&mut self, file: usize, size: usize) {
        let Some(model) = self.files.get_mut(&file) else {
            return;
        };
        model.resize(size, 0);
        let inode = self.fixture.store.resolve(&name(file)).unwrap().inode;
        let set = SetAttributes { size_bytes: Some(size as u64), ..SetAttributes::default() };
        let change = self.fixture.store.set_attributes(inode, &set, None).unwrap();
        assert_eq!(change.after.size_bytes, size as u64);
    }

    fn snapshot(&mut self, file: usize, becomes_clone: bool) {
        let Some(model) = self.files.get(&file) else { return };
        let store = &self.fixture.store;
        let origin = || store.file_info(&name(file)).unwrap().origin_snapshot;
        let before = origin();
        let request = SnapshotRequest { becomes_clone, ..SnapshotRequest::default() };
        let taken = store.snapshot(&name(file), request);
        if becomes_clone && before.is_some() {
            assert_eq!(taken.unwrap_err().kind(), ErrorKind::Exists);
            assert_eq!(origin(), before);
            return;
        }
        let snapshot = taken.unwrap();
        assert_eq!(snapshot.size_bytes, model.len() as u64);
        assert_eq!(snapshot.clone_count, u64::from(becomes_clone));
        assert_eq!(origin(), if becomes_clone { Some(snapshot.id) } else { before });
        self.snapshots.push((snapshot.id, model.clone()));
    }

    fn clone_of(&mut self, snapshot: usize, file: usize) {
        let Some((id, model)) = self.snapshots.get(snapshot) else {
            return;
        };
        match self.fixture.store.clone_snapshot(*id, &name(file)) {
            Ok(info) => {
                assert!(!self.files.contains_key(&file));
                assert_eq!(info.attributes.size_bytes, model.len() as u64);
                assert_eq!(info.origin_snapshot, Some(*id));
                self.files.insert(file, model.clone());
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Exists);
                assert!(self.files.contains_key(&file));
            }
        }
    }

    fn read(&self, file: usize, offset: usize, length: usize) {
        let Some(model) = self.files.get(&file) else {
            return;
        };
        let source = self.source(file);
        let reply = self.fixture.store.read(source, offset as u64, length).unwrap();
        let start = offset.min(model.len());
        let end = (offset + length).min(model.len());
        assert_eq!(reply.end_of_file, offset + length >= model.len());
        assert_eq!(reply.length_bytes, end - start);
        assert!(reply.to_vec() == model[start..end], "file {file} at {offset}, {length} bytes");
        if let Some(cached) = self.fixture.store.try_read(source, offset as u64, length) {
            assert!(cached.unwrap().to_vec() == model[start..end]);
        }
    }

    /// Applying the diff to the base gives the target, and it names no block that is equal.
    fn diff(&self, base: usize, target: usize) {
        let (Some(base), Some(target)) = (self.snapshots.get(base), self.snapshots.get(target))
        else {
            return;
        };
        let mut rebuilt = base.1.clone();
        rebuilt.resize(target.1.len(), 0);
        let mut offset = Some(0);
        while let Some(from) = offset {
            let page = self.fixture.store.diff(Some(base.0), target.0, from, 3).unwrap();
            for extent in &page.extents {
                let start = usize::try_from(extent.offset_bytes).unwrap();
                let end = start + usize::try_from(extent.length_bytes).unwrap();
                match extent.kind {
                    ExtentKind::Data => rebuilt[start..end].copy_from_slice(&target.1[start..end]),
                    ExtentKind::Hole => rebuilt[start..end].fill(0),
                }
            }
            offset = page.next_offset_bytes;
            assert!(offset.is_none_or(|next| next > from), "the diff goes on");
        }
        assert!(rebuilt == target.1, "the diff misses something");
    }

    fn make_special(&mut self, slot: usize, special: SpecialFile) {
        let (store, set) = (&self.fixture.store, SetAttributes::default());
        match store.make_special_file(InodeId::ROOT, &slot_name(slot), special, &set) {
            Ok(made) => {
                assert_eq!(made.attributes.kind, FileKind::Special(special));
                assert!(self.special.insert(slot, special).is_none());
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Exists);
                assert!(self.special.contains_key(&slot));
            }
        }
    }

    /// What is in the way is replaced.
    fn rename_special(&mut self, from: usize, to: usize) {
        let [old, new] = [from, to].map(|slot| (InodeId::ROOT, slot_name(slot)));
        let renamed = self.fixture.store.rename(old.0, &old.1, new.0, &new.1);
        assert_eq!(renamed.is_ok(), self.special.contains_key(&from), "{renamed:?}");
        if let Some(special) = self.special.remove(&from) {
            self.special.insert(to, special);
        }
    }

    /// The special files of the root by their names.
    fn listed_special(&self) -> BTreeMap<Vec<u8>, SpecialFile> {
        let page = self.fixture.store.read_directory(InodeId::ROOT, 0, 1000).unwrap();
        assert!(page.end);
        let entries = page.entries.into_iter();
        let special = entries.filter_map(|entry| match entry.attributes.kind {
            FileKind::Special(special) => Some((entry.name.as_bytes().to_vec(), special)),
            _ => None,
        });
        special.collect()
    }

    fn apply(mut self, op: &Op) -> Self {
        match *op {
            Op::Write { file, offset, length, seed, stable } => {
                let length = length.min(BYTES_MAX - offset.min(BYTES_MAX - 1));
                self.write(file, offset, &bytes(seed, length), stable);
            }
            Op::Truncate { file, size } => self.truncate(file, size),
            Op::Create { file } => match self.fixture.store.create_file(&name(file), 5000) {
                Ok(_) => assert!(self.files.insert(file, vec![0; 5000]).is_none()),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Exists);
                    assert!(self.files.contains_key(&file));
                }
            },
            Op::Remove { file } => {
                let removed = self.fixture.store.remove_path(&name(file));
                assert_eq!(removed.is_ok(), self.files.remove(&file).is_some());
            }
            Op::Rename { from, to } => {
                let renamed = self.fixture.store.rename_path(&name(from), &name(to));
                let possible = self.files.contains_key(&from) && !self.files.contains_key(&to);
                assert_eq!(renamed.is_ok(), possible, "{renamed:?}");
                if possible {
                    let moved = self.files.remove(&from).unwrap();
                    self.files.insert(to, moved);
                }
            }
            Op::Commit { file } => {
                if self.files.contains_key(&file) {
                    let Source::File(inode) = self.source(file) else { unreachable!() };
                    self.fixture.store.commit(inode).unwrap();
                }
            }
            Op::Snapshot { file, becomes_clone } => self.snapshot(file, becomes_clone),
            Op::Clone { snapshot, file } => self.clone_of(snapshot, file),
            Op::DeleteSnapshot { snapshot } => {
                if snapshot < self.snapshots.len() {
                    let (id, _) = self.snapshots.remove(snapshot);
                    self.fixture.store.delete_snapshot(id).unwrap();
                }
            }
            Op::Read { file, offset, length } => self.read(file, offset, length),
            Op::Diff { base, target } => self.diff(base, target),
            Op::MakeSpecial { slot, special } => self.make_special(slot, special),
            Op::RemoveSpecial { slot } => {
                let removed = self.fixture.store.remove(InodeId::ROOT, &slot_name(slot));
                assert_eq!(removed.is_ok(), self.special.remove(&slot).is_some());
            }
            Op::RenameSpecial { from, to } => self.rename_special(from, to),
            Op::Restart => self.fixture = self.fixture.restart(),
            Op::Gc => {
                self.fixture.store.gc().unwrap();
            }
            Op::Checkpoint => self.fixture.store.checkpoint().unwrap(),
        }
        self
    }

    fn verify(&self) {
        for (file, model) in &self.files {
            assert_same(
                &content(&self.fixture.store, self.source(*file)),
                model,
                &format!("file {file}"),
            );
        }
        for (id, model) in &self.snapshots {
            assert_same(&content(&self.fixture.store, Source::Snapshot(*id)), model, "snapshot");
        }
        let listed = self.fixture.store.list_files("", None, 1000).unwrap();
        assert_eq!(listed.len(), self.files.len());
        let special = self.special.iter();
        let special =
            special.map(|(slot, special)| (slot_name(*slot).as_bytes().to_vec(), *special));
        assert_eq!(self.listed_special(), special.collect());
        self.fixture.check();
    }

    /// When all is deleted, nothing stays behind.
    fn empty(mut self) {
        for file in self.files.keys() {
            self.fixture.store.remove_path(&name(*file)).unwrap();
        }
        for (id, _) in self.snapshots.drain(..) {
            self.fixture.store.delete_snapshot(id).unwrap();
        }
        for slot in self.special.keys() {
            self.fixture.store.remove(InodeId::ROOT, &slot_name(*slot)).unwrap();
        }
        self.fixture.store.gc().unwrap();
        self.fixture.check();
        let stats = self.fixture.store.stats();
        assert_eq!((stats.chunk_count, stats.mapped_blocks, stats.layer_count), (0, 0, 0));
        assert_eq!(stats.dead_bytes, 0, "compaction took every dead chunk away");
    }
}

/// Equal bytes, or the place where they differ: whole files are too long to print.
fn assert_same(got: &[u8], expected: &[u8], what: &str) {
    assert_eq!(got.len(), expected.len(), "length of {what}");
    if let Some(at) = got.iter().zip(expected).position(|(got, expected)| got != expected) {
        panic!("{what} differs at {at}: got {}, expected {}", got[at], expected[at]);
    }
}

fn run(ops: &[Op]) {
    let mut world = World::new();
    for (step, op) in ops.iter().enumerate() {
        world = world.apply(op);
        if step % 97 == 96 {
            world.verify();
        }
    }
    world.verify();
    world.empty();
}

fn cases(default: u32) -> ProptestConfig {
    let cases = std::env::var("SLACKWATER_MODEL_CASES").ok().and_then(|text| text.parse().ok());
    ProptestConfig {
        cases: cases.unwrap_or(default),
        max_shrink_iters: 4000,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(cases(48))]
    #[test]
    fn short_sequences_agree_with_the_model(ops in prop::collection::vec(op(), 1..150)) {
        run(&ops);
    }
}

proptest! {
    #![proptest_config(cases(2))]
    #[test]
    fn thousands_of_steps_agree_with_the_model(ops in prop::collection::vec(op(), 3000..3200)) {
        run(&ops);
    }
}
