//! I7 of snapshots: their keys, clones, and when they expire.

use std::collections::HashMap;
use std::ops::ControlFlow;

use super::findings::differs;
use super::{Check, Findings, Fix, behind, each};
use crate::codec::Decoder;
use crate::error::Result;
use crate::id::SnapshotId;
use crate::kv::{Family, KvRead, prefix_end};
use crate::record::{Body, InodeRecord, SnapshotRecord, key};

/// Bytes that one snapshot takes while its clones are counted, about.
const COUNTED_SNAPSHOT_BYTES: usize = 96;

pub(super) fn check(check: &mut Check<'_>, findings: &mut Findings) -> Result<()> {
    keys(check.view, findings)?;
    let mut from = vec![b'i'];
    loop {
        let mut clones: HashMap<SnapshotId, (u64, u64)> = HashMap::new();
        let last = next_part(check, &from, &mut clones, findings)?;
        if clones.is_empty() {
            return Ok(());
        }
        each(check.view, Family::Inode, |_, value| {
            // One that cannot be decoded was found already.
            if let Ok(record) = InodeRecord::decode(value)
                && let Body::File { origin: Some(origin), .. } = record.body
                && let Some((_, counted)) = clones.get_mut(&origin)
            {
                *counted += 1;
            }
            Ok(())
        })?;
        for (id, (stored, counted)) in clones {
            if stored != counted
                && let Some(mut record) = load(check.view, id)?
            {
                let what = differs(&format!("I7: clones of snapshot {id}"), stored, counted);
                findings.wrong(what, || {
                    record.clone_count = counted;
                    Fix::put(Family::Snapshot, key::snapshot(id), record.encode())
                });
            }
        }
        let Some(last) = last else { return Ok(()) };
        from = behind(&last);
    }
}

/// The snapshot; `None` also for one that cannot be decoded.
pub(super) fn load(view: &dyn KvRead, id: SnapshotId) -> Result<Option<SnapshotRecord>> {
    let bytes = view.get(Family::Snapshot, &key::snapshot(id))?;
    Ok(bytes.as_deref().and_then(|bytes| SnapshotRecord::decode(bytes).ok()))
}

pub(super) fn id_in(bytes: &[u8]) -> Result<SnapshotId> {
    Decoder::new("snapshot key", bytes).array().map(SnapshotId::from_bytes)
}

/// The next snapshots with the clones they say they have, as many as the budget holds.
fn next_part(
    check: &mut Check<'_>,
    from: &[u8],
    clones: &mut HashMap<SnapshotId, (u64, u64)>,
    findings: &mut Findings,
) -> Result<Option<Vec<u8>>> {
    let limit = check.at_once(COUNTED_SNAPSHOT_BYTES);
    let (view, counted) = (check.view, &mut check.counted);
    let mut last = None;
    view.scan(Family::Snapshot, from, &prefix_end(b"i"), &mut |snapshot_key, value| {
        let id = id_in(snapshot_key.get(1..).unwrap_or_default())?;
        counted.snapshots += 1;
        match SnapshotRecord::decode(value) {
            Ok(record) => {
                clones.insert(id, (record.clone_count, 0));
                secondary(view, id, &record, findings)?;
            }
            Err(error) => findings.rebuild(&format!("I7: snapshot {id}: {error}")),
        }
        if clones.len() < limit {
            return Ok(ControlFlow::Continue(()));
        }
        last = Some(snapshot_key.to_vec());
        Ok(ControlFlow::Break(()))
    })?;
    Ok(last)
}

/// The other keys of a snapshot, with their values.
fn expected(id: SnapshotId, record: &SnapshotRecord) -> Vec<(Vec<u8>, Vec<u8>)> {
    let with_id = |mut prefix: Vec<u8>| {
        prefix.extend_from_slice(id.as_bytes());
        (prefix, Vec::new())
    };
    let mut keys = vec![with_id(key::snapshot_path_prefix(&record.path))];
    let labels = record.labels.iter();
    keys.extend(labels.map(|(l, v)| with_id(key::snapshot_label_prefix(l, v))));
    let name = record.name.iter();
    keys.extend(name.map(|name| (key::snapshot_name(name), id.as_bytes().to_vec())));
    keys
}

fn secondary(
    view: &dyn KvRead,
    id: SnapshotId,
    record: &SnapshotRecord,
    findings: &mut Findings,
) -> Result<()> {
    for (secondary, value) in expected(id, record) {
        if view.get(Family::Snapshot, &secondary)?.as_ref() != Some(&value) {
            let problem =
                format!("I7: snapshot key `{}` is missing or wrong", secondary.escape_ascii());
            findings.wrong(problem, || Fix::put(Family::Snapshot, secondary, value));
        }
    }
    if let Some(at) = record.expires_at {
        let entry = key::queue_expiry(at.as_nanos(), id);
        if view.get(Family::Queue, &entry)?.is_none() {
            let problem = format!("I7: snapshot {id} never expires");
            findings.wrong(problem, || Fix::put(Family::Queue, entry, Vec::new()));
        }
    }
    Ok(())
}

/// Every other key belongs to a snapshot.
fn keys(view: &dyn KvRead, findings: &mut Findings) -> Result<()> {
    each(view, Family::Snapshot, |found, value| {
        let id = match found.first() {
            Some(b'i') => return Ok(()),
            Some(b'n') => id_in(value),
            _ => id_in(found.get(found.len().saturating_sub(16)..).unwrap_or_default()),
        };
        let owner = match &id {
            Ok(id) => load(view, *id)?.map(|record| expected(*id, &record)),
            Err(_) => None,
        };
        let is_missing = found.first() == Some(&b'p')
            && match &id {
                Ok(id) => view.get(Family::Snapshot, &key::snapshot(*id))?.is_none(),
                Err(_) => false,
            };
        let is_known = owner.is_some_and(|keys| keys.iter().any(|(key, _)| key == found));
        if !is_known {
            let problem =
                format!("I7: snapshot key `{}` belongs to no snapshot", found.escape_ascii());
            let remove = || Fix::delete(Family::Snapshot, found);
            // A snapshot that goes takes this key along: only the log tells what it was.
            if is_missing {
                findings.missing(&problem, remove);
            } else {
                findings.wrong(problem, remove);
            }
        }
        Ok(())
    })
}
