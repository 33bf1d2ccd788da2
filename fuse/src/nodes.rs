//! Inodes of the mount: which number stands for which path and handle.
//!
//! ```text
//! 1 root   2 .slackwater-stats   3... what was looked up, in order of the first look-up
//! ```
//!
//! Invariants: a number is never given twice in one mount; the same path with the same handle
//! keeps its number while the kernel knows it; with another handle (the file was removed and
//! made again) it gets a new one, so that nothing cached of the old file is shown for the new.

use std::collections::HashMap;
use std::str::FromStr;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use rustix::io::Errno;
use slackwater_client::types::SnapshotId;

use crate::file::ServedFile;
use crate::journal::{Journal, NodeState, Record};
use crate::maps::MapSource;
use crate::nfs::{Found, Handle};
use crate::wire::{DirectoryEntry, MODE_DIRECTORY, NodeId};

/// The virtual directory of snapshots in the root.
const SNAPSHOTS: &str = ".snapshot";

/// What a number stands for.
#[derive(Clone, Debug)]
pub(crate) enum Object {
    Directory(Handle),
    File(Arc<ServedFile>),
}

impl Object {
    pub(crate) fn handle(&self) -> &Handle {
        match self {
            Self::Directory(handle) => handle,
            Self::File(file) => &file.handle,
        }
    }
}

#[derive(Debug)]
struct Node {
    path: String,
    object: Object,
    lookups: u64,
}

#[derive(Debug, Default)]
struct Tables {
    nodes: HashMap<NodeId, Node>,
    by_path: HashMap<String, NodeId>,
}

/// All nodes but the two that are always there.
#[derive(Debug)]
pub(crate) struct Nodes {
    tables: Mutex<Tables>,
    /// Locked after the tables, so that records stand in the order of what they tell.
    journal: Arc<Mutex<Journal>>,
}

/// A name, of at most 255 bytes of UTF-8 as the appliance's paths are.
pub(crate) fn checked_name(name: &Bytes) -> Result<&str, Errno> {
    if name.len() > 255 {
        return Err(Errno::NAMETOOLONG);
    }
    str::from_utf8(name).map_err(|_| Errno::NOENT)
}

fn object_of(node: NodeId, path: &str, handle: Handle, is_directory: bool) -> Object {
    if is_directory {
        return Object::Directory(handle);
    }
    let snapshot = path.strip_prefix(SNAPSHOTS).and_then(|rest| rest.strip_prefix('/'));
    let snapshot = snapshot.and_then(|id| SnapshotId::from_str(id).ok());
    let source = snapshot.map_or_else(|| MapSource::File(path.to_owned()), MapSource::Snapshot);
    Object::File(Arc::new(ServedFile::new(node, handle, source)))
}

impl Nodes {
    /// The nodes that the journal tells of.
    pub(crate) fn new(journal: Arc<Mutex<Journal>>) -> Self {
        let mut tables = Tables::default();
        for (&number, state) in &journal.lock().state().nodes {
            let NodeState { path, handle, is_directory, lookups, .. } = state.clone();
            let node = NodeId(number);
            let object = object_of(node, &path, Handle(handle.into()), is_directory);
            // Numbers go up: a path's newest node is the one that stays here.
            tables.by_path.insert(path.clone(), node);
            tables.nodes.insert(node, Node { path, object, lookups });
        }
        Self { tables: Mutex::new(tables), journal }
    }

    /// What the node is, and its path. The root has no node here.
    pub(crate) fn get(&self, node: NodeId) -> Result<(String, Object), Errno> {
        let tables = self.tables.lock();
        let found = tables.nodes.get(&node).ok_or(Errno::STALE)?;
        Ok((found.path.clone(), found.object.clone()))
    }

    pub(crate) fn file(&self, node: NodeId) -> Result<Arc<ServedFile>, Errno> {
        match self.get(node)?.1 {
            Object::File(file) => Ok(file),
            Object::Directory(_) => Err(Errno::ISDIR),
        }
    }

    /// All files.
    pub(crate) fn files(&self) -> Vec<Arc<ServedFile>> {
        let tables = self.tables.lock();
        let file = |node: &Node| match &node.object {
            Object::File(file) => Some(Arc::clone(file)),
            Object::Directory(_) => None,
        };
        tables.nodes.values().filter_map(file).collect()
    }

    /// The node of what was found at `path`, which the kernel is about to be told.
    pub(crate) fn look_up(&self, path: String, found: &Found) -> Result<NodeId, Errno> {
        let is_directory = found.attributes.mode & MODE_DIRECTORY != 0;
        let mut tables = self.tables.lock();
        let known = tables.by_path.get(&path).copied();
        if let Some(node) = known
            && let Some(known) = tables.nodes.get_mut(&node)
            && *known.object.handle() == found.handle
        {
            known.lookups += 1;
            self.append(&Record::Looked { node: node.0, count: 1 })?;
            return Ok(node);
        }
        let node = {
            let mut journal = self.journal.lock();
            let number = journal.state().next_node.max(NodeId::FIRST.0);
            let handle = found.handle.0.to_vec();
            let record = Record::Node { node: number, path: path.clone(), handle, is_directory };
            let looked = Record::Looked { node: number, count: 1 };
            journal.append(&record).and_then(|()| journal.append(&looked)).map_err(refused)?;
            NodeId(number)
        };
        let object = object_of(node, &path, found.handle.clone(), is_directory);
        tables.by_path.insert(path.clone(), node);
        tables.nodes.insert(node, Node { path, object, lookups: 1 });
        Ok(node)
    }

    /// The kernel forgets `count` look-ups of the node. Gives the file that is thereby gone.
    pub(crate) fn forget(&self, node: NodeId, count: u64) -> Option<Arc<ServedFile>> {
        let mut tables = self.tables.lock();
        let known = tables.nodes.get_mut(&node)?;
        known.lookups = known.lookups.saturating_sub(count);
        let is_gone = known.lookups == 0;
        let gone = if is_gone { tables.nodes.remove(&node) } else { None };
        if let Some(gone) = &gone
            && tables.by_path.get(&gone.path) == Some(&node)
        {
            tables.by_path.remove(&gone.path);
        }
        // If it is not told, a resumed process knows a node more than the kernel does.
        let _ = self.append(&Record::Forgotten { node: node.0, count });
        match gone?.object {
            Object::File(file) => Some(file),
            Object::Directory(_) => None,
        }
    }

    /// What is known of the directory at `path` (without a slash at its end).
    pub(crate) fn entries(&self, path: &str) -> Vec<DirectoryEntry> {
        let tables = self.tables.lock();
        let mut entries = Vec::new();
        for (other, node) in &tables.by_path {
            let (parent, name) = other.rsplit_once('/').unwrap_or(("", other));
            if parent == path {
                let known = tables.nodes.get(node);
                let is_directory =
                    known.is_some_and(|known| matches!(known.object, Object::Directory(_)));
                let name = name.to_owned();
                entries.push(DirectoryEntry { inode: node.0, name, is_directory });
            }
        }
        entries.sort_by(|left, right| left.name.cmp(&right.name));
        entries
    }

    fn append(&self, record: &Record) -> Result<(), Errno> {
        self.journal.lock().append(record).map_err(refused)
    }
}

fn refused(error: std::io::Error) -> Errno {
    tracing::error!(%error, "the state directory cannot be written: no new file is served");
    Errno::IO
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lock::StateLock;
    use crate::wire::{Attributes, MODE_FILE};

    fn locked(folder: &std::path::Path) -> StateLock {
        StateLock::try_take(folder).unwrap().expect("it is locked")
    }

    fn found(handle: &'static str, mode: u32) -> Found {
        let attributes = Attributes { mode, ..Attributes::default() };
        Found { handle: Handle(handle.into()), attributes }
    }

    fn nodes(folder: &std::path::Path) -> Nodes {
        Nodes::new(Arc::new(Mutex::new(Journal::create(locked(folder)).unwrap())))
    }

    #[test]
    fn another_file_at_a_path_is_another_node() {
        let folder = tempfile::tempdir().unwrap();
        let nodes = nodes(folder.path());
        let look = |handle| nodes.look_up("disks/a".into(), &found(handle, MODE_FILE)).unwrap();
        let (first, again, other) = (look("one"), look("one"), look("two"));
        assert_eq!((first, again), (NodeId::FIRST, NodeId::FIRST));
        assert_ne!(first, other);
        assert!(nodes.forget(first, 1).is_none());
        assert!(nodes.get(first).is_ok(), "it was looked up twice");
        let gone = nodes.forget(first, 1).expect("a file is gone");
        assert_eq!(gone.node, first);
        assert_eq!(nodes.get(first).unwrap_err(), Errno::STALE);
        assert_eq!(look("two"), other);
        assert!(nodes.forget(other, 9).is_some());
        assert!(look("one").0 > other.0, "numbers are never given twice");
    }

    #[test]
    fn a_resumed_process_knows_the_same_nodes() {
        let folder = tempfile::tempdir().unwrap();
        let first = nodes(folder.path());
        let snapshot = "0f0e0d0c-0b0a-4908-8706-050403020100";
        let directory = first.look_up(".snapshot".into(), &found("d", MODE_DIRECTORY)).unwrap();
        let path = format!(".snapshot/{snapshot}");
        let file = first.look_up(path.clone(), &found("s", MODE_FILE)).unwrap();
        drop(first);
        let journal = Journal::resume(locked(folder.path())).unwrap();
        let resumed = Nodes::new(Arc::new(Mutex::new(journal)));
        assert!(matches!(resumed.get(directory).unwrap().1, Object::Directory(_)));
        assert_eq!(resumed.get(file).unwrap().0, path);
        let source = resumed.file(file).unwrap().source.clone();
        assert!(matches!(source, MapSource::Snapshot(id) if id.to_string() == snapshot));
        let names: Vec<_> = resumed.entries(".snapshot").into_iter().map(|one| one.name).collect();
        assert_eq!(names, [snapshot]);
        assert_eq!(resumed.entries("").len(), 1);
        assert!(resumed.forget(file, 1).is_some());
        assert_eq!(resumed.files().len(), 0);
    }
}
