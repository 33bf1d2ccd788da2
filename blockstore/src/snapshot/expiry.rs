//! Snapshots whose time has come, and that have no clones, are deleted: some at a time.
//!
//! ```text
//! queue   [deleted . . . .][has a clone][due][due] . . . | [not yet] . . .
//!                                        ^ the next sweep begins here, and once one came to the
//!                                          end, at the first again
//! ```
//! "Now" is the time that is believed (`steady.rs`), so a clock that is wrong for a while deletes nothing.
//!
//! A sweep that began at the first key each time would step over all that were deleted, and look again
//! at all that wait for their last clone.

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::{if_there, load, load_in, remove};
use crate::core::Core;
use crate::error::{Error, Result};
use crate::id::SnapshotId;
use crate::kv::Family;
use crate::record::key;
use crate::store::Store;
use crate::time::{self, Timestamp};
use crate::transaction::Transaction;

/// Snapshots that one sweep deletes: in one commit, which others wait for.
const SWEEP_DELETES_MAX: usize = 256;

/// Entries of the queue that one sweep looks at: a look-up each.
const SWEEP_ENTRIES_MAX: usize = 1024;

/// What a sweep found.
#[derive(Debug, Default)]
struct Sweep {
    due: Vec<SnapshotId>,
    failed: Vec<(SnapshotId, Error)>,
    /// Where the next one begins; `None`: this one came to the end.
    next: Option<Vec<u8>>,
}

/// One sweep; the next call goes on behind it. A snapshot that fails is set aside, and holds up no
/// other.
pub(crate) fn expire_some(core: &Core) -> Result<()> {
    let Some(until) = now(core) else {
        return Ok(());
    };
    let from = core.aside.lock().expiry.take();
    let may_try = |id| core.aside.lock().snapshots.is_due(id, Instant::now());
    let (next, _) = sweep(core, (from, until), may_try)?;
    if next.is_none() {
        forget_gone(core);
    }
    core.aside.lock().expiry = next;
    Ok(())
}

/// Deletes all whose time has come by now; answers the first failure of a snapshot.
pub(crate) fn expire_all(core: &Core) -> Result<Option<Error>> {
    let Some(until) = now(core) else {
        return Ok(None);
    };
    let (mut from, mut failure) = (None, None);
    loop {
        let (next, failed) = sweep(core, (from, until), |_| true)?;
        failure = failure.or(failed);
        match next {
            Some(next) => from = Some(next),
            None => return Ok(failure),
        }
    }
}

impl Store {
    /// The moment from which the end of a snapshot counts that is given as a length of time. Unlike [`Store::now`] it goes
    /// back with the machine's clock: what is taken while that is ahead ends late, and nothing else does.
    #[must_use]
    pub fn now_for_ends(&self) -> Timestamp {
        let Core { steady, options, .. } = &*self.core;
        steady.lock().time_for_ends((time::wall(), Instant::now()), options.steady_clock)
    }

    /// The time by which snapshots expire now; none as long as the machine's clock has not run steadily.
    #[must_use]
    pub fn time_for_expiry(&self) -> Option<Timestamp> {
        now(&self.core)
    }
}

/// The time that is believed, if one is.
fn now(core: &Core) -> Option<Timestamp> {
    core.steady.lock().time((time::wall(), Instant::now()), core.options.steady_clock)
}

/// Answers where the next sweep begins, and the first failure of a snapshot.
fn sweep(
    core: &Core,
    (from, until): (Option<Vec<u8>>, Timestamp),
    may_try: impl Fn(SnapshotId) -> bool,
) -> Result<(Option<Vec<u8>>, Option<Error>)> {
    let Sweep { due, mut failed, next } = look(core, (from, until), may_try)?;
    let deleted = delete(core, due.clone());
    if deleted.is_err() {
        core.committer.healthy()?;
        for id in due {
            failed.extend(delete(core, vec![id]).err().map(|error| (id, error)));
        }
    } else if !due.is_empty() {
        let mut aside = core.aside.lock();
        due.iter().for_each(|id| aside.snapshots.note_success(*id));
    }
    if !failed.is_empty() {
        core.committer.healthy()?;
    }
    for (id, error) in &failed {
        core.tally.reclaim_failures.fetch_add(1, Ordering::Relaxed);
        let wait = core.aside.lock().snapshots.note_failure(*id, Instant::now());
        tracing::warn!(snapshot = %id, %error, ?wait, "a snapshot cannot expire; it is set aside");
    }
    Ok((next, failed.into_iter().next().map(|(_, error)| error)))
}

fn look(
    core: &Core,
    (from, until): (Option<Vec<u8>>, Timestamp),
    may_try: impl Fn(SnapshotId) -> bool,
) -> Result<Sweep> {
    let from = from.unwrap_or_else(|| vec![key::QUEUE_EXPIRY]);
    let to = key::queue_expiry(until.as_nanos(), SnapshotId::from_bytes([0xff; 16]));
    let mut found = Sweep::default();
    let mut entries = 0;
    core.kv.scan(Family::Queue, &from, &to, &mut |entry, _| {
        if entries == SWEEP_ENTRIES_MAX || found.due.len() == SWEEP_DELETES_MAX {
            found.next = Some(entry.to_vec());
            return Ok(ControlFlow::Break(()));
        }
        entries += 1;
        let mut decoder = crate::codec::Decoder::new("expiry key", entry);
        let (_kind, _nanos) = (decoder.u8()?, decoder.u64()?);
        let id = SnapshotId::from_bytes(decoder.array()?);
        if may_try(id) {
            match if_there(load(core, id)) {
                Ok(Some(record)) if record.clone_count == 0 => found.due.push(id),
                // Those with clones wait.
                Ok(_) => {}
                Err(error) => found.failed.push((id, error)),
            }
        }
        Ok(ControlFlow::Continue(()))
    })?;
    Ok(found)
}

fn delete(core: &Core, due: Vec<SnapshotId>) -> Result<()> {
    if due.is_empty() {
        return Ok(());
    }
    core.commit(move |txn| {
        txn.frees();
        due.into_iter().try_for_each(|id| delete_in(txn, id))
    })
}

fn delete_in(txn: &mut Transaction<'_>, id: SnapshotId) -> Result<()> {
    // It may have been cloned or deleted since.
    match if_there(load_in(txn, id))?.filter(|record| record.clone_count == 0) {
        Some(record) => remove(txn, id, &record),
        None => Ok(()),
    }
}

/// Snapshots that were deleted otherwise do not stay set aside.
fn forget_gone(core: &Core) {
    let failed = core.aside.lock().snapshots.all();
    let is_there = |id: &SnapshotId| !matches!(load(core, *id), Err(Error::NotFound { .. }));
    let left: HashSet<SnapshotId> = failed.into_iter().filter(is_there).collect();
    core.aside.lock().snapshots.keep_only(|id| left.contains(id));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use crate::name::FilePath;
    use crate::snapshot;
    use crate::testing::{World, options};
    use crate::types::SnapshotRequest;

    /// A snapshot of a file that is in the world already.
    fn take(world: &World, expires_at: Timestamp) -> SnapshotId {
        let request = SnapshotRequest { expires_at: Some(expires_at), ..Default::default() };
        let path = FilePath::parse("f").unwrap();
        snapshot::create(&world.core, &path, request).unwrap().id
    }

    fn count(world: &World) -> u64 {
        crate::stats::stats(&world.core).snapshot_count
    }

    #[test]
    fn a_sweep_takes_some_and_the_next_goes_on_behind_them() {
        let world = World::new(options(1 << 20), None);
        world.create("f");
        for number in 0..SWEEP_DELETES_MAX + 10 {
            take(&world, Timestamp::from_nanos(1000 + u64::try_from(number).unwrap()));
        }
        let young = take(&world, Timestamp::new(1 << 33, 0).unwrap());
        expire_some(&world.core).unwrap();
        assert_eq!(count(&world), 11, "a bounded number at once");
        let next = world.core.aside.lock().expiry.clone();
        let first = world.kv.entries(Family::Queue).first().map(|(key, _)| key.clone());
        assert_eq!(next, first, "no deleted key is stepped over");
        // One that is due before those waits for the next round.
        take(&world, Timestamp::from_nanos(1));
        expire_some(&world.core).unwrap();
        assert_eq!(count(&world), 2);
        expire_some(&world.core).unwrap();
        assert_eq!(count(&world), 1);
        snapshot::load(&world.core, young).unwrap();
        world.check();
    }

    #[test]
    fn a_sweep_does_not_look_at_all_that_wait_for_their_last_clone() {
        let world = World::new(options(1 << 20), None);
        world.create("f");
        for number in 0..=SWEEP_ENTRIES_MAX {
            let id = take(&world, Timestamp::from_nanos(1000 + u64::try_from(number).unwrap()));
            let clone = FilePath::parse(&format!("clones/{number}")).unwrap();
            snapshot::clone(&world.core, id, &clone).unwrap();
        }
        let free = take(&world, Timestamp::from_nanos(1 << 40));
        expire_some(&world.core).unwrap();
        snapshot::load(&world.core, free).unwrap();
        expire_some(&world.core).unwrap();
        let error = snapshot::load(&world.core, free).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "it had its turn");
        assert!(world.core.aside.lock().expiry.is_none());
    }

    #[test]
    fn a_snapshot_that_cannot_expire_holds_up_no_other() {
        let world = World::new(options(1 << 20), None);
        let inode = world.create("f");
        let ids = [1, 2, 3].map(|nanos| {
            world.put(inode, 0, &[nanos]);
            take(&world, Timestamp::from_nanos(nanos))
        });
        // Of one the record is damaged, of another the layer's.
        let layer = snapshot::load(&world.core, ids[1]).unwrap().layer;
        let damaged =
            [(Family::Snapshot, key::snapshot(ids[0])), (Family::Layer, key::layer(layer))];
        let sound = damaged.each_ref().map(|(family, key)| {
            let value = crate::kv::KvRead::get(world.kv.as_ref(), *family, key).unwrap();
            world.kv.tamper(*family, key, Some(vec![0xff]));
            value
        });
        expire_some(&world.core).unwrap();
        let error = snapshot::load(&world.core, ids[2]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        assert_eq!(world.core.aside.lock().count(), 2);
        let error = crate::background::gc(&world.core).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        for ((family, key), value) in damaged.into_iter().zip(sound) {
            world.kv.tamper(family, &key, value);
        }
        // One goes by another way.
        snapshot::delete(&world.core, ids[0]).unwrap();
        expire_all(&world.core).unwrap();
        expire_some(&world.core).unwrap();
        assert_eq!((count(&world), world.core.aside.lock().count()), (0, 0));
        crate::background::gc(&world.core).unwrap();
        world.check();
    }
}
