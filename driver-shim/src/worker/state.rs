//! The driver's memory: every volume, and every file that it made on the appliance and no volume
//! names (yet, or any more).
//!
//! ```text
//! volumes    engine NUL name -> Volume (JSON)
//! obsolete   uuid            -> what kind of file it is
//! facts      name            -> text (format, worker id, store id, base snapshots, boot id)
//! ```
//!
//! A file is entered as obsolete before it is made, in memory, and taken out in the transaction that makes a volume name
//! it; a volume that lets go of a file enters it in the same transaction. So at every moment each file of this worker is
//! either named by a volume or listed (D1). After a crash a file that was being made is neither: it is found when the
//! appliance's files are compared with the state, and deleted as one that is listed. Reads are answered from memory.
//!
//! One file can have several volumes: the disk with their upper directories. The one that takes new ones is
//! named by a fact, with or without volumes.
//!
//! A change that failed may be on the disk all the same, and a restart would then find other files
//! listed than memory has. So after one the state is *in doubt*: it takes no change, and nothing is
//! deleted by it, until it was read anew.

mod files;
mod format;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, RwLock};
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use slackwater_client::types::SnapshotId;
use uuid::Uuid;

pub(super) use self::files::{FileKind, OwnFile};
use self::files::{files_of, names_file};
use super::error::WorkerError;
use super::volume::{Directory, Engine, Key, LayerKind, Volume};

const VOLUMES: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("volumes");
const OBSOLETE: TableDefinition<'_, &str, &str> = TableDefinition::new("obsolete");
const FACTS: TableDefinition<'_, &str, &str> = TableDefinition::new("facts");

/// The fact that names the disk that takes new upper directories; empty or missing if there is none.
const UPPER_DISK: &str = "upper_disk";

/// Memory of the database's cache: all reads are answered from our own maps.
const CACHE_BYTES: usize = 4 << 20;

/// One change of the state; several are applied as one.
#[derive(Clone, Debug)]
pub(super) enum Change {
    /// The volume is as given; the files that it named before and names no more are obsolete,
    /// those that it names now are not.
    Put(Box<Volume>),
    /// A volume that must not exist before is made.
    Create(Box<Volume>),
    /// The volume is no more; its files are obsolete.
    Delete(Key),
    /// A file is obsolete.
    Obsolete(OwnFile),
    /// An obsolete file is deleted.
    Deleted(OwnFile),
    /// A fact is as given.
    Fact(String, String),
}

impl Change {
    /// This disk takes new upper directories, or none does. The one that did before is obsolete, unless a volume has a
    /// directory on it.
    pub(super) fn upper_disk(name: Option<Uuid>) -> Self {
        let text = name.map_or_else(String::new, |name| name.to_string());
        Self::Fact(UPPER_DISK.to_owned(), text)
    }
}

#[derive(Debug, Default)]
struct Index {
    volumes: BTreeMap<Key, Volume>,
    children: BTreeMap<Key, BTreeSet<Key>>,
    obsolete: BTreeSet<OwnFile>,
    /// Files that are about to be made, in memory alone.
    new: BTreeSet<OwnFile>,
    facts: BTreeMap<String, String>,
}

/// The state of one worker. Methods that change it wait for the disk.
#[derive(Debug)]
pub(super) struct State {
    path: PathBuf,
    database: Database,
    index: RwLock<Index>,
    /// Held over a whole change, so that memory and disk see the same order.
    writing: Mutex<()>,
    /// A change failed: what is on the disk is not known.
    is_in_doubt: AtomicBool,
}

/// A change was asked of a state that is in doubt.
#[derive(Debug, thiserror::Error)]
#[error(
    "an earlier change failed, so that it is not known what is on the disk: restart slackwater-driver"
)]
struct InDoubt;

fn row_key(key: &Key) -> String {
    format!("{}\0{}", key.engine, key.name)
}

impl State {
    /// Opens the state in `path`, made if it is missing.
    ///
    /// # Errors
    /// `State` if another daemon has it open or it cannot be read.
    pub(super) fn open(path: &Path) -> Result<Self, WorkerError> {
        let database =
            redb::Builder::new().set_cache_size(CACHE_BYTES).create(path).map_err(|error| {
                WorkerError::State { path: path.to_owned(), source: format::of_open(error) }
            })?;
        Self::over(database, path)
    }

    fn over(database: Database, path: &Path) -> Result<Self, WorkerError> {
        let path = path.to_owned();
        match Self::load(&database) {
            Ok(index) => Ok(Self {
                path,
                database,
                index: RwLock::new(index),
                writing: Mutex::new(()),
                is_in_doubt: AtomicBool::new(false),
            }),
            Err(source) => Err(WorkerError::State { path, source }),
        }
    }

    fn load(database: &Database) -> Result<Index, Box<dyn std::error::Error + Send + Sync>> {
        let transaction = database.begin_write()?;
        // First of all, and by the same transaction: of another format nothing is understood.
        format::check(&mut transaction.open_table(FACTS)?)?;
        transaction.open_table(VOLUMES)?;
        transaction.open_table(OBSOLETE)?;
        transaction.commit()?;
        let transaction = database.begin_read()?;
        let mut index = Index::default();
        for row in transaction.open_table(VOLUMES)?.iter()? {
            let (name, value) = row?;
            let volume: Volume = serde_json::from_slice(value.value())
                .map_err(|error| format!("volume {}: {error}", name.value().escape_debug()))?;
            index.put(volume);
        }
        for row in transaction.open_table(OBSOLETE)?.iter()? {
            let (name, kind) = row?;
            let kind = FileKind::parse(kind.value())
                .ok_or_else(|| format!("file {}: kind {}", name.value(), kind.value()))?;
            index.obsolete.insert(OwnFile { kind, name: name.value().parse()? });
        }
        for row in transaction.open_table(FACTS)?.iter()? {
            let (name, value) = row?;
            index.facts.insert(name.value().to_owned(), value.value().to_owned());
        }
        Ok(index)
    }

    /// Whether it names no volume and lists no file.
    pub(super) fn is_empty(&self) -> bool {
        let index = self.index.read();
        index.volumes.is_empty() && index.obsolete.is_empty() && index.new.is_empty()
    }

    /// The volume of that name.
    pub(super) fn get(&self, key: &Key) -> Option<Volume> {
        self.index.read().volumes.get(key).cloned()
    }

    /// All volumes of an engine, in order of their names.
    pub(super) fn of_engine(&self, engine: Engine) -> Vec<Volume> {
        let index = self.index.read();
        index.volumes.values().filter(|volume| volume.key.engine == engine).cloned().collect()
    }

    /// The first volume, in order of names, that is as asked for. `is_wanted` must not look at the state.
    pub(super) fn find(&self, mut is_wanted: impl FnMut(&Volume) -> bool) -> Option<Volume> {
        let index = self.index.read();
        index.volumes.values().find(|volume| is_wanted(volume)).cloned()
    }

    /// Every volume that is as asked for.
    pub(super) fn matching(&self, mut is_wanted: impl FnMut(&Volume) -> bool) -> Vec<Volume> {
        let index = self.index.read();
        index.volumes.values().filter(|volume| is_wanted(volume)).cloned().collect()
    }

    /// Whether a volume that is as asked for has this image among those that it reads.
    pub(super) fn reads_image(
        &self,
        id: SnapshotId,
        mut is_wanted: impl FnMut(&Volume) -> bool,
    ) -> bool {
        let index = self.index.read();
        index.volumes.values().any(|volume| is_wanted(volume) && index.has_image(volume, id))
    }

    /// Whether an image is a layer of this worker.
    pub(super) fn has_image(&self, id: SnapshotId) -> bool {
        self.index.read().volumes.values().any(|volume| volume.is_image(id))
    }

    /// The volumes that were made directly above this one.
    pub(super) fn children(&self, key: &Key) -> Vec<Key> {
        let index = self.index.read();
        index.children.get(key).into_iter().flatten().cloned().collect()
    }

    /// The files that no volume names.
    pub(super) fn obsolete(&self) -> Vec<OwnFile> {
        let index = self.index.read();
        index.obsolete.union(&index.new).copied().collect()
    }

    /// A fact.
    pub(super) fn fact(&self, name: &str) -> Option<String> {
        self.index.read().facts.get(name).cloned()
    }

    /// Lists a file that is about to be made, until a volume names it. In memory alone: what a crash leaves of it is
    /// found on the appliance.
    ///
    /// # Errors
    /// `State` once a change failed.
    pub(super) fn list(&self, file: OwnFile) -> Result<(), WorkerError> {
        self.require_certain()?;
        self.index.write().new.insert(file);
        Ok(())
    }

    /// Strikes off a file that is gone.
    ///
    /// # Errors
    /// `State`.
    pub(super) fn strike_off(&self, file: OwnFile) -> Result<(), WorkerError> {
        let was_new = self.index.write().new.remove(&file);
        if was_new { Ok(()) } else { self.apply(&[Change::Deleted(file)]) }
    }

    /// Whether the file is named, or listed.
    pub(super) fn knows(&self, file: OwnFile) -> bool {
        let index = self.index.read();
        index.obsolete.contains(&file)
            || index.new.contains(&file)
            || index.upper_disk() == Some(file.name)
            || index.volumes.values().any(|volume| names_file(volume, file))
    }

    /// The disk that takes new upper directories.
    pub(super) fn upper_disk(&self) -> Option<Uuid> {
        self.index.read().upper_disk()
    }

    /// The disks of upper directories.
    pub(super) fn upper_disks(&self) -> BTreeSet<Uuid> {
        self.upper_disks_of(|_, _| true)
    }

    /// Those that several volumes can have a directory on.
    pub(super) fn shared_upper_disks(&self) -> BTreeSet<Uuid> {
        self.upper_disks_of(|volume, one| {
            volume.extra.own_disk().is_none() || volume.given.contains(one)
        })
    }

    fn upper_disks_of(&self, is_wanted: impl Fn(&Volume, &Directory) -> bool) -> BTreeSet<Uuid> {
        let index = self.index.read();
        let of_volume = |volume: &Volume| {
            let wanted = volume.directories().filter(|one| is_wanted(volume, one));
            wanted.map(|one| one.disk).collect::<Vec<_>>()
        };
        index.volumes.values().flat_map(of_volume).chain(index.upper_disk()).collect()
    }

    /// The names of the directories that volumes have, or were given, on a disk.
    pub(super) fn uppers_on(&self, disk: Uuid) -> HashSet<Uuid> {
        let index = self.index.read();
        let all = index.volumes.values().flat_map(Volume::directories);
        all.filter(|one| one.disk == disk).map(|one| one.name).collect()
    }

    /// Applies all changes as one, durably.
    ///
    /// # Errors
    /// `Exists`, `NotFound`, `ParentNotFound` and `HasChildren` before anything is changed;
    /// `State` if the disk fails, and from then on.
    pub(super) fn apply(&self, changes: &[Change]) -> Result<(), WorkerError> {
        let _writing = self.writing.lock();
        let changes = {
            let index = self.index.read();
            index.verify(changes)?;
            index.complete(changes)
        };
        self.commit(changes)
    }

    /// Changes one volume, durably, and gives what it became.
    ///
    /// # Errors
    /// `NotFound`, `State`.
    pub(super) fn update(
        &self,
        key: &Key,
        change: impl FnOnce(&mut Volume),
    ) -> Result<Volume, WorkerError> {
        let _writing = self.writing.lock();
        let mut volume = self.get(key).ok_or_else(|| WorkerError::NotFound { key: key.clone() })?;
        change(&mut volume);
        let changes = self.index.read().complete(&[Change::Put(Box::new(volume.clone()))]);
        self.commit(changes)?;
        Ok(volume)
    }

    /// Changes one volume, and its name with it, durably, and gives what it became.
    ///
    /// # Errors
    /// `NotFound`, `Exists`, `HasChildren`, `State`.
    pub(super) fn rename(
        &self,
        key: &Key,
        change: impl FnOnce(&mut Volume),
    ) -> Result<Volume, WorkerError> {
        let _writing = self.writing.lock();
        let mut volume = self.get(key).ok_or_else(|| WorkerError::NotFound { key: key.clone() })?;
        change(&mut volume);
        let changes = [Change::Delete(key.clone()), Change::Create(Box::new(volume.clone()))];
        let changes = {
            let index = self.index.read();
            index.verify(&changes)?;
            index.complete(&changes)
        };
        self.commit(changes)?;
        Ok(volume)
    }

    /// Changes every volume that is as asked for, as one and durably.
    ///
    /// # Errors
    /// `State`.
    pub(super) fn update_matching(
        &self,
        is_wanted: impl Fn(&Volume) -> bool,
        change: impl Fn(&mut Volume),
    ) -> Result<(), WorkerError> {
        let _writing = self.writing.lock();
        let changed = self.matching(is_wanted).into_iter().map(|mut volume| {
            change(&mut volume);
            Change::Put(Box::new(volume))
        });
        let changed: Vec<_> = changed.collect();
        let changes = self.index.read().complete(&changed);
        self.commit(changes)
    }

    /// Sees that memory has what a restart would find: only then may what it lists be deleted.
    ///
    /// # Errors
    /// `State` once a change failed.
    pub(super) fn require_certain(&self) -> Result<(), WorkerError> {
        if self.is_in_doubt.load(Ordering::Acquire) {
            return Err(self.failed(InDoubt.into()));
        }
        Ok(())
    }

    fn failed(&self, source: Box<dyn std::error::Error + Send + Sync>) -> WorkerError {
        WorkerError::State { path: self.path.clone(), source }
    }

    /// Applies completed changes to the disk, then to memory.
    fn commit(&self, changes: Vec<Change>) -> Result<(), WorkerError> {
        self.require_certain()?;
        if let Err(source) = self.store(&changes) {
            self.is_in_doubt.store(true, Ordering::Release);
            let path = self.path.display();
            tracing::error!(%path, error = %source,
                "a change of the state failed: nothing is changed or deleted until a restart");
            return Err(self.failed(source));
        }
        let mut index = self.index.write();
        for change in changes {
            index.apply(change);
        }
        Ok(())
    }

    fn store(&self, changes: &[Change]) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let transaction = self.database.begin_write()?;
        {
            let mut volumes = transaction.open_table(VOLUMES)?;
            let mut obsolete = transaction.open_table(OBSOLETE)?;
            let mut facts = transaction.open_table(FACTS)?;
            for change in changes {
                match change {
                    Change::Put(volume) | Change::Create(volume) => {
                        if volume.layers == LayerKind::Images {
                            format::note_images(&mut facts)?;
                        }
                        let value = serde_json::to_vec(volume)?;
                        volumes.insert(row_key(&volume.key).as_str(), value.as_slice())?;
                    }
                    Change::Delete(key) => {
                        volumes.remove(row_key(key).as_str())?;
                    }
                    Change::Obsolete(file) => {
                        obsolete.insert(file.name.to_string().as_str(), file.kind.name())?;
                    }
                    Change::Deleted(file) => {
                        obsolete.remove(file.name.to_string().as_str())?;
                    }
                    Change::Fact(name, value) => {
                        facts.insert(name.as_str(), value.as_str())?;
                    }
                }
            }
        }
        transaction.commit()?;
        Ok(())
    }
}

impl Index {
    fn upper_disk(&self) -> Option<Uuid> {
        self.facts.get(UPPER_DISK)?.parse().ok()
    }

    /// Whether an image is the layer of a volume, or of one below it.
    fn has_image(&self, volume: &Volume, id: SnapshotId) -> bool {
        let below = |volume: &&Volume| self.volumes.get(volume.parent.as_ref()?);
        std::iter::successors(Some(volume), below).any(|volume| volume.is_image(id))
    }

    fn put(&mut self, volume: Volume) {
        if let Some(parent) = &volume.parent {
            self.children.entry(parent.clone()).or_default().insert(volume.key.clone());
        }
        self.volumes.insert(volume.key.clone(), volume);
    }

    fn verify(&self, changes: &[Change]) -> Result<(), WorkerError> {
        for change in changes {
            match change {
                Change::Create(volume) => {
                    if self.volumes.contains_key(&volume.key) {
                        return Err(WorkerError::Exists { key: volume.key.clone() });
                    }
                    if let Some(parent) = &volume.parent
                        && !self.volumes.contains_key(parent)
                    {
                        let (key, parent) = (volume.key.clone(), parent.clone());
                        return Err(WorkerError::ParentNotFound { key, parent });
                    }
                }
                Change::Put(volume) if !self.volumes.contains_key(&volume.key) => {
                    return Err(WorkerError::NotFound { key: volume.key.clone() });
                }
                Change::Delete(key) => {
                    if !self.volumes.contains_key(key) {
                        return Err(WorkerError::NotFound { key: key.clone() });
                    }
                    let children = self.children.get(key).map_or(0, BTreeSet::len);
                    if let Some(child) = self.children.get(key).and_then(BTreeSet::first) {
                        let (key, child) = (key.clone(), child.clone());
                        return Err(WorkerError::HasChildren { key, count: children, child });
                    }
                }
                Change::Put(_) | Change::Obsolete(_) | Change::Deleted(_) | Change::Fact(..) => {}
            }
        }
        Ok(())
    }

    /// The changes, and what they mean for files (D1).
    fn complete(&self, changes: &[Change]) -> Vec<Change> {
        let mut let_go = BTreeSet::new();
        let mut taken = BTreeSet::new();
        for change in changes {
            match change {
                Change::Put(volume) | Change::Create(volume) => {
                    let_go.extend(self.volumes.get(&volume.key).into_iter().flat_map(files_of));
                    taken.extend(files_of(volume));
                }
                Change::Delete(key) => {
                    let_go.extend(self.volumes.get(key).into_iter().flat_map(files_of));
                }
                Change::Fact(name, value) if name == UPPER_DISK => {
                    let disk = |name| OwnFile { kind: FileKind::Disk, name };
                    let_go.extend(self.upper_disk().map(disk));
                    taken.extend(value.parse().ok().map(disk));
                }
                Change::Obsolete(_) | Change::Deleted(_) | Change::Fact(..) => {}
            }
        }
        let_go.retain(|file| taken.contains(file) || !self.is_shared(*file, changes));
        let mut all = changes.to_vec();
        all.extend(let_go.difference(&taken).map(|file| Change::Obsolete(*file)));
        all.extend(taken.difference(&let_go).map(|file| Change::Deleted(*file)));
        all
    }

    /// Whether a file that is let go of stays named: a disk of upper directories, by others than these changes are about.
    fn is_shared(&self, file: OwnFile, changes: &[Change]) -> bool {
        let is_changed = |key: &Key| {
            changes.iter().any(|change| match change {
                Change::Put(volume) | Change::Create(volume) => volume.key == *key,
                Change::Delete(deleted) => deleted == key,
                _ => false,
            })
        };
        let is_given_up = changes
            .iter()
            .any(|change| matches!(change, Change::Fact(name, _) if name == UPPER_DISK));
        let has_file = |volume: &Volume| volume.directories().any(|one| one.disk == file.name);
        file.kind == FileKind::Disk
            && (self.upper_disk() == Some(file.name) && !is_given_up
                || self.volumes.values().any(|volume| has_file(volume) && !is_changed(&volume.key)))
    }

    fn apply(&mut self, change: Change) {
        match change {
            Change::Put(volume) | Change::Create(volume) => self.put(*volume),
            Change::Delete(key) => {
                let parent = self.volumes.remove(&key).and_then(|volume| volume.parent);
                if let Some(parent) = parent
                    && let Some(siblings) = self.children.get_mut(&parent)
                {
                    siblings.remove(&key);
                    if siblings.is_empty() {
                        self.children.remove(&parent);
                    }
                }
            }
            Change::Obsolete(file) => {
                self.new.remove(&file);
                self.obsolete.insert(file);
            }
            Change::Deleted(file) => {
                self.new.remove(&file);
                self.obsolete.remove(&file);
            }
            Change::Fact(name, value) => {
                self.facts.insert(name, value);
            }
        }
    }
}

#[cfg(test)]
pub(super) mod failing;
#[cfg(test)]
mod tests;
