//! The workload: random operations of every kind that changes disk or index, told by one number,
//! and the model that says what the store must hold before and after each.

use std::collections::{BTreeMap, BTreeSet};

use slackwater_blockstore::{
    DeletionPolicy, Error, InodeId, Name, SetAttributes, Snapshot, SnapshotFilter, SnapshotId,
    SnapshotRequest, Source, Stability, Store, Timestamp,
};

use crate::common::{bytes, content, path};

const BLOCK: usize = 4096;

/// Names of files, all in one directory.
const NAMES: u64 = 6;

/// Files are no longer than this, so that a run takes milliseconds.
const FILE_BYTES_MAX: u64 = 120_000;

/// Contents that repeat, so that blocks are shared.
const SEEDS: u64 = 24;

/// A small generator, so that each run is told by one number.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 11
    }

    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

/// What a file holds: the bytes that are stable, then those of each write since. The last is what
/// is read.
#[derive(Clone, Debug)]
struct Content {
    versions: Vec<Vec<u8>>,
    /// The snapshot that it is a clone of.
    origin: Option<usize>,
}

impl Content {
    fn live(&self) -> &Vec<u8> {
        self.versions.last().expect("there is always one")
    }

    /// All that was written is stable.
    fn settle(&mut self) {
        self.versions.drain(..self.versions.len() - 1);
    }

    /// Whether these bytes can be left of the file by a crash: each block is whole, and of one of
    /// the versions.
    fn allows(&self, got: &[u8]) -> bool {
        let zeros = [0; BLOCK];
        self.versions.iter().any(|version| version.len() == got.len())
            && got.chunks(BLOCK).enumerate().all(|(number, block)| {
                self.versions.iter().any(|version| {
                    let start = (number * BLOCK).min(version.len());
                    let known = &version[start..(start + block.len()).min(version.len())];
                    block[..known.len()] == *known
                        && block[known.len()..] == zeros[..block.len() - known.len()]
                })
            })
    }
}

#[derive(Clone, Debug)]
struct SnapshotModel {
    /// It has a name, by which it is found where its id was never told.
    name: String,
    id: Option<SnapshotId>,
    content: Vec<u8>,
    /// The next garbage collection deletes it, unless it has clones.
    expires: bool,
    /// It goes with its last clone.
    goes_with_clones: bool,
    clones: usize,
}

impl SnapshotModel {
    fn find(&self, store: &Store) -> Option<Snapshot> {
        let filter = SnapshotFilter { name: Some(self.name.clone()), ..SnapshotFilter::default() };
        let found = store.list_snapshots(&filter, 2).unwrap().pop()?;
        assert!(self.id.is_none_or(|id| id == found.id), "another snapshot has its name");
        Some(found)
    }
}

/// What the store must hold.
#[derive(Clone, Debug, Default)]
pub(crate) struct Model {
    /// Name to content; two names of one content are hard links.
    names: BTreeMap<u64, usize>,
    contents: BTreeMap<usize, Content>,
    snapshots: BTreeMap<usize, SnapshotModel>,
    next: usize,
}

fn text_of(name: u64) -> String {
    format!("f{name}")
}

fn name_of(name: u64) -> Name {
    Name::new(text_of(name).as_bytes()).unwrap()
}

fn directory(store: &Store) -> Result<InodeId, Error> {
    store.create_directories(&path("d")).map(|found| found.inode)
}

fn inode(store: &Store, name: u64) -> Result<InodeId, Error> {
    store.resolve(&path(&format!("d/{}", text_of(name)))).map(|found| found.inode)
}

impl Model {
    fn add(&mut self, name: u64, bytes: Vec<u8>, origin: Option<usize>) {
        self.next += 1;
        self.contents.insert(self.next, Content { versions: vec![bytes], origin });
        self.names.insert(name, self.next);
    }

    /// A name goes, and with the last one the file, and with the last clone maybe a snapshot.
    fn remove(&mut self, name: u64) {
        let Some(key) = self.names.remove(&name) else { return };
        if self.names.values().any(|other| *other == key) {
            return;
        }
        let origin = self.contents.remove(&key).and_then(|content| content.origin);
        if let Some(origin) = origin
            && let Some(snapshot) = self.snapshots.get_mut(&origin)
        {
            snapshot.clones -= 1;
            if snapshot.clones == 0 && snapshot.goes_with_clones {
                self.snapshots.remove(&origin);
            }
        }
    }

    fn content_of(&mut self, name: u64) -> &mut Content {
        let key = self.names[&name];
        self.contents.get_mut(&key).expect("a name has a content")
    }

    fn nth_snapshot(&self, pick: u64) -> Option<(usize, &SnapshotModel)> {
        let count = u64::try_from(self.snapshots.len()).unwrap();
        let nth = usize::try_from(pick % count.max(1)).unwrap();
        self.snapshots.iter().nth(nth).map(|(key, snapshot)| (*key, snapshot))
    }

    /// What an operation that failed may leave: its own state, with all that was there before as
    /// what a crash may leave of it.
    fn failed(before: &Self, after: &Self, is_done: bool) -> Self {
        let mut model = if is_done { after.clone() } else { before.clone() };
        for (key, content) in &mut model.contents {
            let others = [before.contents.get(key), after.contents.get(key)];
            let mut versions: Vec<Vec<u8>> =
                others.into_iter().flatten().flat_map(|other| other.versions.clone()).collect();
            versions.push(content.live().clone());
            content.versions = versions;
        }
        model
    }

    /// Compares with what the store shows; `allows` says whether a file's bytes will do.
    fn compare(
        &self,
        store: &Store,
        allows: impl Fn(&Content, &[u8]) -> bool,
    ) -> Result<(), String> {
        let listed = store.list_files("", None, 100).unwrap();
        let listed: BTreeSet<String> = listed.iter().map(|info| info.path.to_string()).collect();
        let expected: BTreeSet<String> =
            self.names.keys().map(|name| format!("d/{}", text_of(*name))).collect();
        if listed != expected {
            return Err(format!("files {listed:?}, expected {expected:?}"));
        }
        let mut inodes = BTreeMap::new();
        for (name, key) in &self.names {
            let inode = inode(store, *name).map_err(|error| error.to_string())?;
            if *inodes.entry(*key).or_insert(inode) != inode {
                return Err(format!("f{name} is not the file that it was linked to"));
            }
            if !allows(&self.contents[key], &content(store, Source::File(inode))) {
                return Err(format!("f{name} differs"));
            }
        }
        for snapshot in self.snapshots.values() {
            let SnapshotModel { name, content: expected, clones, .. } = snapshot;
            let info = snapshot.find(store).ok_or_else(|| format!("snapshot {name} is missing"))?;
            if content(store, Source::Snapshot(info.id)) != *expected {
                return Err(format!("snapshot {name} differs"));
            }
            if info.clone_count != u64::try_from(*clones).unwrap() {
                return Err(format!("{} clones, expected {clones}", info.clone_count));
            }
        }
        let count = u64::try_from(self.snapshots.len()).unwrap();
        match store.stats().snapshot_count {
            got if got == count => Ok(()),
            got => Err(format!("{got} snapshots, expected {count}")),
        }
    }

    /// Whether the store shows just this.
    pub(crate) fn shows(&self, store: &Store) -> Result<(), String> {
        self.compare(store, |content, got| content.live() == got)
    }

    /// Whether a crash in the state of this model can have left the store as it is (I8).
    fn survives(&self, store: &Store) -> Result<(), String> {
        self.compare(store, Content::allows)
    }

    /// Deletes a file and a snapshot, which a full disk never refuses.
    pub(crate) fn delete_some(&mut self, store: &Store) {
        if let Some(name) = self.names.keys().next().copied() {
            self.remove(name);
            let into = directory(store).unwrap();
            store.remove(into, &name_of(name)).expect("a delete works on a full disk");
        }
        delete_snapshot(store, self, 0).expect("snapshots can be deleted on a full disk");
    }

    /// A garbage collection removes the snapshots whose time is over.
    pub(crate) fn expire(&mut self) {
        self.snapshots.retain(|_, snapshot| !snapshot.expires || snapshot.clones > 0);
    }

    /// The files hold what they are found to hold, and it is stable.
    pub(crate) fn adopt(&mut self, store: &Store) {
        for (name, key) in &self.names {
            let found = content(store, Source::File(inode(store, *name).unwrap()));
            self.contents.get_mut(key).unwrap().versions = vec![found];
        }
        for snapshot in self.snapshots.values_mut() {
            snapshot.id = snapshot.find(store).map(|found| found.id);
        }
    }
}

/// The states around the last operation: where it was cut off, either may be found.
#[derive(Clone, Debug, Default)]
pub(crate) struct Around {
    pub(crate) before: Model,
    pub(crate) after: Model,
}

impl Around {
    /// What the store, which goes on after a failure, shows now: one of the two.
    pub(crate) fn after_failure(&self, store: &Store) -> Model {
        match (self.after.shows(store), self.before.shows(store)) {
            (Ok(()), _) => Model::failed(&self.before, &self.after, true),
            (_, Ok(())) => Model::failed(&self.before, &self.after, false),
            (Err(after), Err(before)) => panic!("neither before ({before}) nor after ({after})"),
        }
    }

    /// What a store that was opened after a crash holds: one of the two, all that was
    /// acknowledged in it.
    pub(crate) fn after_crash(&self, store: &Store) -> Model {
        let candidates = [
            Model::failed(&self.before, &self.after, true),
            Model::failed(&self.before, &self.after, false),
        ];
        let mut verdicts = Vec::new();
        for mut model in candidates {
            match model.survives(store) {
                Ok(()) => {
                    model.adopt(store);
                    return model;
                }
                Err(verdict) => verdicts.push(verdict),
            }
        }
        panic!("acknowledged, and not there: after {}, before {}", verdicts[0], verdicts[1])
    }
}

/// One operation. Answers the model after it, and whether it succeeded.
pub(crate) fn step(
    store: &Store,
    model: &Model,
    random: &mut Random,
) -> (Model, Result<(), Error>) {
    let mut after = model.clone();
    let (name, kind, pick) = (random.below(NAMES), random.below(100), random.next());
    let outcome = match (kind, model.names.contains_key(&name)) {
        (0..80, false) => create(store, &mut after, name, pick),
        (0..45, true) => write(store, &mut after, name, random),
        (45..50, true) => inode(store, name).and_then(|inode| store.commit(inode)).map(|_| {
            after.content_of(name).settle();
        }),
        (50..57, true) => truncate(store, &mut after, name, random.below(FILE_BYTES_MAX)),
        (57..66, true) => snapshot(store, &mut after, name, pick),
        (66..74, true) => {
            after.remove(name);
            directory(store).and_then(|inode| store.remove(inode, &name_of(name)).map(|_| ()))
        }
        (74..80, true) => rename_or_link(store, &mut after, name, pick),
        (80..86, _) => delete_snapshot(store, &mut after, pick),
        (86..95, _) => {
            after.expire();
            store.gc().map(|_| ())
        }
        (_, _) => store.checkpoint(),
    };
    (after, outcome)
}

/// A file, or a clone of a snapshot.
fn create(store: &Store, after: &mut Model, name: u64, pick: u64) -> Result<(), Error> {
    let whole = path(&format!("d/{}", text_of(name)));
    let chosen = after
        .nth_snapshot(pick)
        .and_then(|(key, found)| Some((key, found.id?, found.content.clone())));
    match chosen.filter(|_| !pick.is_multiple_of(3)) {
        Some((key, id, content)) => {
            after.add(name, content, Some(key));
            if let Some(snapshot) = after.snapshots.get_mut(&key) {
                snapshot.clones += 1;
            }
            store.clone_snapshot(id, &whole).map(|_| ())
        }
        None => {
            after.add(name, vec![0; 3000], None);
            store.create_file(&whole, 3000).map(|_| ())
        }
    }
}

/// Whole or partial blocks, stable or not.
fn write(store: &Store, after: &mut Model, name: u64, random: &mut Random) -> Result<(), Error> {
    let (mut offset, mut length) = (random.below(80_000), random.below(40_000) + 1);
    if random.below(2) == 0 {
        offset -= offset % 4096;
        length = length.next_multiple_of(4096);
    }
    let data = bytes(random.below(SEEDS), usize::try_from(length).unwrap());
    let (start, end) =
        (usize::try_from(offset).unwrap(), usize::try_from(offset + length).unwrap());
    let content = after.content_of(name);
    let mut new = content.live().clone();
    new.resize(new.len().max(end), 0);
    new[start..end].copy_from_slice(&data);
    content.versions.push(new);
    let is_stable = random.below(3) > 0;
    if is_stable {
        content.settle();
    }
    let stability = if is_stable { Stability::FileSync } else { Stability::Unstable };
    let inode = inode(store, name)?;
    store.write(inode, offset, data, stability).map(|_| ())
}

fn truncate(store: &Store, after: &mut Model, name: u64, size: u64) -> Result<(), Error> {
    let content = after.content_of(name);
    content.settle();
    content.versions[0].resize(usize::try_from(size).unwrap(), 0);
    let set = SetAttributes { size_bytes: Some(size), ..SetAttributes::default() };
    inode(store, name).and_then(|inode| store.set_attributes(inode, &set, None).map(|_| ()))
}

/// One that stays, one that expires, or one that goes with its last clone.
fn snapshot(store: &Store, after: &mut Model, name: u64, pick: u64) -> Result<(), Error> {
    let (expires, goes_with_clones) = (pick % 4 == 1, pick % 4 == 2);
    let request = SnapshotRequest {
        expires_at: expires.then(|| Timestamp::from_nanos(1)),
        deletion: if goes_with_clones {
            DeletionPolicy::OnZeroClones
        } else {
            DeletionPolicy::Keep
        },
        ..SnapshotRequest::default()
    };
    let content = after.content_of(name);
    content.settle();
    let content = content.live().clone();
    after.next += 1;
    let key = after.next;
    let (snapshot, id) = (format!("s{key}"), None);
    let request = SnapshotRequest { name: Some(snapshot.clone()), ..request };
    let model = SnapshotModel { name: snapshot, id, content, expires, goes_with_clones, clones: 0 };
    after.snapshots.insert(key, model);
    let made = store.snapshot(&path(&format!("d/{}", text_of(name))), request)?;
    after.snapshots.get_mut(&key).unwrap().id = Some(made.id);
    Ok(())
}

fn rename_or_link(store: &Store, after: &mut Model, name: u64, pick: u64) -> Result<(), Error> {
    let other = (name + 1 + pick % (NAMES - 1)) % NAMES;
    let is_taken = after.names.contains_key(&other);
    let key = after.names[&name];
    let into = directory(store)?;
    if pick & 8 == 0 && !is_taken {
        after.names.insert(other, key);
        return store.link(inode(store, name)?, into, &name_of(other)).map(|_| ());
    }
    // Names of one file: nothing is renamed (RFC 1813 section 3.3.14).
    if after.names.get(&other) != Some(&key) {
        after.remove(other);
        after.names.insert(other, key);
        after.names.remove(&name);
    }
    store.rename(into, &name_of(name), into, &name_of(other)).map(|_| ())
}

fn delete_snapshot(store: &Store, after: &mut Model, pick: u64) -> Result<(), Error> {
    let chosen = after.nth_snapshot(pick).and_then(|(key, found)| Some((key, found.id?)));
    let Some((key, id)) = chosen else {
        return Ok(());
    };
    after.snapshots.remove(&key);
    store.delete_snapshot(id)
}
