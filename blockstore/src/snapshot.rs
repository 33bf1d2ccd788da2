//! Snapshot and clone: one synced batch each, whatever the size of the file.
//!
//! ```text
//! before          snapshot S of F            clone C of S
//! F -> [open 1]   F -> [open 2]              F -> [open 2]   C -> [open 3]
//!                        |                          |              |
//!                 S -> [frozen 1]            S -> [frozen 1] <-----+
//! ```
//! An open layer that nobody wrote to is not frozen: the snapshot takes the layer below, so
//! that clone, snapshot, clone adds no depth.
//!
//! After a snapshot the file is over the frozen layer as a clone is. So it can be made one by its record alone, where the
//! snapshot is to live as long as the file. It stays one: a call that comes late takes it away from no other snapshot.

mod expiry;

use std::ops::ControlFlow;

use crate::core::Core;
use crate::error::{Error, Result};
use crate::file::attributes_of;
use crate::flush::flush_locked;
use crate::id::{InodeId, LayerId, SnapshotId};
use crate::kv::{Family, prefix_end};
use crate::name::FilePath;
use crate::paths;
use crate::reclaim;
use crate::record::{Body, InodeRecord, LayerRecord, LayerState, SnapshotRecord, key};
use crate::transaction::Transaction;
use crate::types::{
    Attributes, FileInfo, LABEL_BYTES_MAX, LABELS_MAX, LabelChange, Labels,
    SNAPSHOT_NAME_BYTES_MAX, Snapshot, SnapshotFilter, SnapshotRequest,
};
use crate::units::BLOCK_BYTES_U64;

pub(crate) use expiry::{expire_all, expire_some};

/// Snapshots seen as files have inode numbers above this, so that they meet no real inode.
const SNAPSHOT_INODE_FLOOR: u64 = 1 << 48;

/// The snapshot's record.
pub(crate) fn load(core: &Core, id: SnapshotId) -> Result<SnapshotRecord> {
    core.readable()?;
    match core.kv.get(Family::Snapshot, &key::snapshot(id))? {
        Some(bytes) => SnapshotRecord::decode(&bytes),
        None => Err(unknown(id)),
    }
}

fn load_in(txn: &Transaction<'_>, id: SnapshotId) -> Result<SnapshotRecord> {
    match txn.get(Family::Snapshot, &key::snapshot(id))? {
        Some(bytes) => SnapshotRecord::decode(&bytes),
        None => Err(unknown(id)),
    }
}

/// A record that may be gone by now. An index that cannot be read does not say that it is.
fn if_there(loaded: Result<SnapshotRecord>) -> Result<Option<SnapshotRecord>> {
    match loaded {
        Ok(record) => Ok(Some(record)),
        Err(Error::NotFound { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

fn unknown(id: SnapshotId) -> Error {
    Error::not_found(format!("snapshot {id}"))
}

/// The snapshot seen as a read-only file.
pub(crate) fn attributes(id: SnapshotId, record: &SnapshotRecord) -> Attributes {
    let mut low = [0; 8];
    low.copy_from_slice(&id.as_bytes()[8..]);
    let inode = SNAPSHOT_INODE_FLOOR | (u64::from_be_bytes(low) & (SNAPSHOT_INODE_FLOOR - 1));
    let seen = InodeRecord {
        generation: 0,
        mode: 0o444,
        uid: 0,
        gid: 0,
        link_count: 1,
        size_bytes: record.size_bytes,
        used_blocks: record.used_blocks,
        accessed_at: record.created_at,
        modified_at: record.created_at,
        changed_at: record.created_at,
        created_at: record.created_at,
        body: Body::File { layer: record.layer, origin: None, verifier: None },
    };
    attributes_of(InodeId::new(inode), &seen)
}

pub(crate) fn describe(id: SnapshotId, record: SnapshotRecord) -> Snapshot {
    Snapshot {
        id,
        path: record.path,
        name: record.name,
        labels: record.labels,
        size_bytes: record.size_bytes,
        used_bytes: record.used_blocks * BLOCK_BYTES_U64,
        created_at: record.created_at,
        clone_count: record.clone_count,
        deletion: record.deletion,
        expires_at: record.expires_at,
    }
}

/// What the labels take in the index, by measure: each has a key of its own there.
fn bytes_of(labels: &Labels) -> usize {
    const KEY_BYTES: usize = 32;
    labels.iter().map(|(label, value)| KEY_BYTES + label.len() + value.len()).sum()
}

/// Those labels that the others have not, or not with the same value.
fn differing<'a>(
    labels: &'a Labels,
    others: &'a Labels,
) -> impl Iterator<Item = (&'a String, &'a String)> {
    labels.iter().filter(|(label, value)| others.get(*label) != Some(value))
}

fn check_labels(labels: &Labels) -> Result<()> {
    if labels.len() > LABELS_MAX {
        return Err(Error::invalid(format!(
            "{} labels, a snapshot carries at most {LABELS_MAX}",
            labels.len()
        )));
    }
    for (label, value) in labels {
        let longest = label.len().max(value.len());
        if label.is_empty() || longest > LABEL_BYTES_MAX {
            return Err(Error::invalid(format!(
                "label of {longest} bytes; key and value have 1 (value: 0) to {LABEL_BYTES_MAX}"
            )));
        }
        if label.contains('\0') || value.contains('\0') {
            return Err(Error::invalid("a label holds no NUL byte"));
        }
    }
    Ok(())
}

fn check_request(request: &SnapshotRequest) -> Result<()> {
    check_labels(&request.labels)?;
    match &request.name {
        Some(name) if name.is_empty() || name.len() > SNAPSHOT_NAME_BYTES_MAX => {
            Err(Error::invalid(format!(
                "snapshot name of {} bytes, expected 1 to {SNAPSHOT_NAME_BYTES_MAX}",
                name.len()
            )))
        }
        _ => Ok(()),
    }
}

fn label_key(label: &str, value: &str, id: SnapshotId) -> Vec<u8> {
    let mut key = key::snapshot_label_prefix(label, value);
    key.extend_from_slice(id.as_bytes());
    key
}

fn path_key(path: &[u8], id: SnapshotId) -> Vec<u8> {
    let mut key = key::snapshot_path_prefix(path);
    key.extend_from_slice(id.as_bytes());
    key
}

/// Takes a snapshot of the file at `path`: all that was written to it before this call.
pub(crate) fn create(core: &Core, path: &FilePath, request: SnapshotRequest) -> Result<Snapshot> {
    check_request(&request)?;
    let inode = paths::resolve_file(core, path)?;
    let file = core.file(inode)?;
    // Held until the snapshot stands: what is written meanwhile is not part of it.
    let _flush = file.flush.lock();
    flush_locked(core, &file)?;
    let id = SnapshotId::random();
    let path = path.to_bytes();
    let record = core.commit(move |txn| {
        let mut file = txn.inode(inode)?;
        let layer = freeze(txn, inode, &mut file)?;
        let clone_count = match request.becomes_clone {
            true => become_clone(&mut file, id)?,
            false => 0,
        };
        txn.put_inode(inode, &file);
        let record = SnapshotRecord {
            layer,
            size_bytes: file.size_bytes,
            used_blocks: file.used_blocks,
            created_at: txn.now(),
            clone_count,
            deletion: request.deletion,
            expires_at: request.expires_at,
            path,
            name: request.name,
            labels: request.labels,
        };
        insert(txn, id, &record)?;
        Ok(record)
    })?;
    Ok(describe(id, record))
}

/// Makes a file that is no clone that of the snapshot that is taken of it, which then has so many clones.
fn become_clone(file: &mut InodeRecord, snapshot: SnapshotId) -> Result<u64> {
    let Body::File { origin, .. } = &mut file.body else {
        return Err(Error::invalid("only files are clones"));
    };
    match origin {
        Some(before) => {
            Err(Error::exists(format!("snapshot {before}, of which the file is a clone,")))
        }
        None => {
            *origin = Some(snapshot);
            Ok(1)
        }
    }
}

/// Freezes the file's open layer, unless it has no entry and there is one below, and answers
/// the frozen layer, which has one snapshot more.
fn freeze(txn: &mut Transaction<'_>, inode: InodeId, file: &mut InodeRecord) -> Result<LayerId> {
    let Body::File { layer: open, .. } = &mut file.body else {
        return Err(Error::invalid("only files have snapshots"));
    };
    let mut record = txn.layer(*open)?;
    if let (0, Some(below)) = (record.runs, record.parent) {
        let mut frozen = txn.layer(below)?;
        frozen.snapshots += 1;
        txn.put_layer(below, &frozen);
        return Ok(below);
    }
    let frozen = *open;
    record.state = LayerState::Frozen;
    record.snapshots += 1;
    record.children += 1;
    txn.put_layer(frozen, &record);
    *open = txn.make_layer(&open_layer(inode, Some(frozen)))?;
    Ok(frozen)
}

/// A new, empty open layer.
pub(crate) const fn open_layer(owner: InodeId, parent: Option<LayerId>) -> LayerRecord {
    LayerRecord {
        parent,
        state: LayerState::Open(owner),
        children: 0,
        snapshots: 0,
        runs: 0,
        blocks: 0,
    }
}

fn insert(txn: &mut Transaction<'_>, id: SnapshotId, record: &SnapshotRecord) -> Result<()> {
    txn.grows()?;
    if let Some(name) = &record.name {
        let name_key = key::snapshot_name(name);
        if txn.get(Family::Snapshot, &name_key)?.is_some() {
            return Err(Error::exists(format!("a snapshot named `{name}`")));
        }
        txn.put(Family::Snapshot, name_key, id.as_bytes().to_vec());
    }
    for (label, value) in &record.labels {
        txn.put(Family::Snapshot, label_key(label, value, id), Vec::new());
    }
    txn.put(Family::Snapshot, path_key(&record.path, id), Vec::new());
    if let Some(at) = record.expires_at {
        txn.put(Family::Queue, key::queue_expiry(at.as_nanos(), id), Vec::new());
    }
    txn.put(Family::Snapshot, key::snapshot(id), record.encode());
    txn.counters().snapshots += 1;
    Ok(())
}

pub(crate) fn change_labels(core: &Core, id: SnapshotId, change: LabelChange) -> Result<Snapshot> {
    let record = core.commit(move |txn| {
        let mut record = load_in(txn, id)?;
        let labels = change(record.labels.clone());
        check_labels(&labels)?;
        let gone: Vec<_> = differing(&record.labels, &labels).collect();
        let new: Vec<_> = differing(&labels, &record.labels).collect();
        if bytes_of(&labels) > bytes_of(&record.labels) {
            txn.grows()?;
        } else if new.is_empty() {
            txn.frees();
        }
        for (label, value) in &gone {
            txn.delete(Family::Snapshot, label_key(label, value, id));
        }
        for (label, value) in &new {
            txn.put(Family::Snapshot, label_key(label, value, id), Vec::new());
        }
        if !gone.is_empty() || !new.is_empty() {
            record.labels = labels;
            txn.put(Family::Snapshot, key::snapshot(id), record.encode());
        }
        Ok(record)
    })?;
    Ok(describe(id, record))
}

pub(crate) fn delete(core: &Core, id: SnapshotId) -> Result<()> {
    core.commit(move |txn| {
        let record = load_in(txn, id)?;
        remove(txn, id, &record)
    })
}

/// Deletes a snapshot inside a transaction; clones keep their layers.
pub(crate) fn remove(
    txn: &mut Transaction<'_>,
    id: SnapshotId,
    record: &SnapshotRecord,
) -> Result<()> {
    txn.frees();
    if let Some(name) = &record.name {
        txn.delete(Family::Snapshot, key::snapshot_name(name));
    }
    for (label, value) in &record.labels {
        txn.delete(Family::Snapshot, label_key(label, value, id));
    }
    txn.delete(Family::Snapshot, path_key(&record.path, id));
    if let Some(at) = record.expires_at {
        txn.delete(Family::Queue, key::queue_expiry(at.as_nanos(), id));
    }
    txn.delete(Family::Snapshot, key::snapshot(id));
    let counters = txn.counters();
    counters.snapshots = counters.snapshots.saturating_sub(1);
    let mut layer = txn.layer(record.layer)?;
    layer.snapshots = layer.snapshots.saturating_sub(1);
    txn.put_layer(record.layer, &layer);
    reclaim::layer_released(txn, record.layer)
}

/// Makes a writable file at `path` with the snapshot's content.
pub(crate) fn clone(core: &Core, id: SnapshotId, path: &FilePath) -> Result<FileInfo> {
    let generation = paths::random_generation()?;
    let wanted = path.clone();
    let (inode, record) = core.commit(move |txn| {
        let mut snapshot = load_in(txn, id)?;
        let (directory, name) = paths::parent_or_make(txn, &wanted)?;
        paths::refuse_existing(txn, directory, &name, &wanted)?;
        // After what tells that it is there: publishing again is no growth.
        txn.grows()?;
        let inode = txn.take_inode()?;
        let mut frozen = txn.layer(snapshot.layer)?;
        frozen.children += 1;
        txn.put_layer(snapshot.layer, &frozen);
        let layer = txn.make_layer(&open_layer(inode, Some(snapshot.layer)))?;
        snapshot.clone_count += 1;
        txn.put(Family::Snapshot, key::snapshot(id), snapshot.encode());
        let now = txn.now();
        let record = InodeRecord {
            generation,
            mode: 0o644,
            uid: 0,
            gid: 0,
            link_count: 1,
            size_bytes: snapshot.size_bytes,
            used_blocks: snapshot.used_blocks,
            accessed_at: now,
            modified_at: now,
            changed_at: now,
            created_at: now,
            body: Body::File { layer, origin: Some(id), verifier: None },
        };
        txn.put_inode(inode, &record);
        txn.counters().files += 1;
        paths::enter(txn, directory, &name, inode, false)?;
        Ok((inode, record))
    })?;
    Ok(paths::made(path, inode, &record, Some(id)))
}

/// A clone is gone: its snapshot counts one fewer, and may go with the last one.
pub(crate) fn clone_deleted(txn: &mut Transaction<'_>, origin: SnapshotId) -> Result<()> {
    // The snapshot may have been deleted before its clones.
    let Some(mut record) = if_there(load_in(txn, origin))? else {
        return Ok(());
    };
    record.clone_count = record.clone_count.saturating_sub(1);
    txn.put(Family::Snapshot, key::snapshot(origin), record.encode());
    if record.clone_count == 0 && record.deletion == crate::DeletionPolicy::OnZeroClones {
        remove(txn, origin, &record)?;
    }
    Ok(())
}

/// Snapshots in order of id.
pub(crate) fn list(core: &Core, filter: &SnapshotFilter, limit: usize) -> Result<Vec<Snapshot>> {
    let prefix = if let Some(name) = &filter.name {
        let found = core.kv.get(Family::Snapshot, &key::snapshot_name(name))?;
        let Some(bytes) = found else {
            return Ok(Vec::new());
        };
        let id = crate::codec::Decoder::new("snapshot name", &bytes).array()?;
        let id = SnapshotId::from_bytes(id);
        let record = load(core, id)?;
        let fits = matches(filter, id, &record);
        return Ok(if fits { vec![describe(id, record)] } else { Vec::new() });
    } else if let Some((label, value)) = filter.labels.iter().next() {
        key::snapshot_label_prefix(label, value)
    } else if let Some(path) = &filter.path {
        key::snapshot_path_prefix(path)
    } else {
        vec![b'i']
    };
    let mut from = prefix.clone();
    if let Some(after) = filter.after {
        from.extend_from_slice(after.as_bytes());
    }
    let mut found = Vec::new();
    core.kv.scan(Family::Snapshot, &from, &prefix_end(&prefix), &mut |key, _| {
        let Some(bytes) = key.get(prefix.len()..).and_then(|id| <[u8; 16]>::try_from(id).ok())
        else {
            // A longer path or value that begins with this prefix and has a NUL cannot exist.
            return Ok(ControlFlow::Continue(()));
        };
        let id = SnapshotId::from_bytes(bytes);
        // It may have been deleted since the scan began.
        if let Some(record) = if_there(load(core, id))?
            && matches(filter, id, &record)
        {
            found.push(describe(id, record));
        }
        Ok(if found.len() < limit { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
    })?;
    Ok(found)
}

fn matches(filter: &SnapshotFilter, id: SnapshotId, record: &SnapshotRecord) -> bool {
    filter.after.is_none_or(|after| id > after)
        && filter.path.as_ref().is_none_or(|path| *path == record.path)
        && filter.labels.iter().all(|(label, value)| record.labels.get(label) == Some(value))
}
