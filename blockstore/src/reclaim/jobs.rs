//! Which layers wait for reclaim and collapse, and how many of them go into one commit.
//!
//! ```text
//! queue    dead: 3 4 9 12 13 ..    collapse: 5 8 ..
//!                  ^ found last: the next look begins here, and goes around
//! one commit   9 12 13 ..          as many as fit into one slice's budget, in the queue's order
//! ```
//! A commit waits for the disk whatever is in it. Clients delete thousands of small files and snapshots
//! in one commit; were each of their layers given one of its own, the queue would grow without end.

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::{Budget, collapse_slice, open_child_owner, reclaim_slice};
use crate::aside::Reached;
use crate::commit::{Weight, commit};
use crate::core::Core;
use crate::error::{Error, Result};
use crate::file::File;
use crate::id::{InodeId, LayerId};
use crate::kv::Family;
use crate::record::key;
use crate::transaction::Transaction;

/// Jobs of one commit: beyond that its wait for the disk no longer counts, and the locks of as many
/// files may be held over it.
const JOBS_AT_ONCE: usize = 64;

/// A piece of work that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Job {
    Reclaim(LayerId),
    Collapse(LayerId),
}

impl Job {
    fn queue_key(self) -> Vec<u8> {
        match self {
            Self::Reclaim(layer) => key::queue_layer(key::QUEUE_DEAD, layer),
            Self::Collapse(layer) => key::queue_layer(key::QUEUE_COLLAPSE, layer),
        }
    }

    pub(crate) const fn layer(self) -> LayerId {
        match self {
            Self::Reclaim(layer) | Self::Collapse(layer) => layer,
        }
    }
}

/// What one commit of cleaning did.
#[derive(Debug, Default)]
pub(crate) struct Worked {
    /// Entries.
    pub(crate) visited: u64,
    /// A job that failed while the store goes on, and is set aside.
    pub(crate) failed: Option<(Job, Error)>,
}

/// Does one slice of the next of the jobs that `may_run` takes; `None` if there is none.
pub(crate) fn work_next(core: &Core, may_run: impl Fn(Job) -> bool) -> Result<Option<Worked>> {
    // Two at once would find the same jobs, and one of them would do nothing.
    let _turn = core.reclaim.lock();
    let jobs = next_jobs(core, may_run)?;
    let Some(&first) = jobs.first() else { return Ok(None) };
    let mut outcome = work(core, &jobs);
    if outcome.is_err() && jobs.len() > 1 {
        core.committer.healthy()?;
        // Any of them may be at fault: each is tried alone, when its turn comes.
        outcome = work(core, &[first]);
    }
    let failed = match outcome {
        Ok(visited) => return Ok(Some(Worked { visited, failed: None })),
        Err(error) => error,
    };
    core.committer.healthy()?;
    core.tally.reclaim_failures.fetch_add(1, Ordering::Relaxed);
    let wait = {
        let mut aside = core.aside.lock();
        aside.note_found(first);
        aside.jobs.note_failure(first, Instant::now())
    };
    tracing::warn!(job = ?first, error = %failed, ?wait, "reclaim failed; the job is set aside");
    Ok(Some(Worked { visited: 0, failed: Some((first, failed)) }))
}

/// The next pieces of work of those that `may_run` takes: from the last one on, and around, so that
/// each has its turn.
fn next_jobs(core: &Core, may_run: impl Fn(Job) -> bool) -> Result<Vec<Job>> {
    // Before the look: a commit in between may add a job behind it.
    let sequence = core.committer.position.lock().sequence;
    if core.aside.lock().empty_at == Some(sequence) {
        return Ok(Vec::new());
    }
    // Of those that failed before.
    let mut waiting = HashSet::new();
    let mut is_empty = true;
    let may_run = |job| {
        is_empty = false;
        let may_run = may_run(job);
        if !may_run && core.aside.lock().jobs.has_failed(job) {
            waiting.insert(job);
        }
        may_run
    };
    let found = next_of_queue(core, may_run)?;
    if found.is_empty() {
        let mut aside = core.aside.lock();
        // All that waits was seen. Any other was taken off the queue by a change of its layer.
        aside.jobs.keep_only(|job| waiting.contains(job));
        aside.empty_at = is_empty.then_some(sequence);
    }
    Ok(found)
}

fn next_of_queue(core: &Core, mut may_run: impl FnMut(Job) -> bool) -> Result<Vec<Job>> {
    let last = core.aside.lock().last().map(Job::queue_key);
    let (first, end) = (vec![key::QUEUE_DEAD], vec![key::QUEUE_COLLAPSE + 1]);
    let middle = last.unwrap_or_else(|| first.clone());
    for (from, to) in [(&middle, &end), (&first, &middle)] {
        let jobs = jobs_between(core, (from, to), &mut may_run)?;
        if !jobs.is_empty() {
            return Ok(jobs);
        }
    }
    Ok(Vec::new())
}

fn jobs_between(
    core: &Core,
    (from, to): (&[u8], &[u8]),
    mut may_run: impl FnMut(Job) -> bool,
) -> Result<Vec<Job>> {
    let mut jobs = Vec::new();
    core.kv.scan(Family::Queue, from, to, &mut |key, _| {
        let mut decoder = crate::codec::Decoder::new("queue key", key);
        let kind = decoder.u8()?;
        let layer = LayerId::new(decoder.u64()?);
        let found =
            if kind == key::QUEUE_DEAD { Job::Reclaim(layer) } else { Job::Collapse(layer) };
        if may_run(found) {
            jobs.push(found);
        }
        let is_enough = jobs.len() == JOBS_AT_ONCE;
        Ok(if is_enough { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    })?;
    Ok(jobs)
}

/// A job, and what must not change under it.
struct Prepared {
    job: Job,
    /// The file whose open layer is the only child of the layer that collapses.
    owner: Option<(InodeId, Option<Arc<File>>)>,
}

impl Prepared {
    fn new(core: &Core, job: Job, from: Reached) -> Result<Self> {
        let owner = match job {
            Job::Reclaim(_) => None,
            Job::Collapse(layer) => open_child_owner(core, layer, from.child)?,
        };
        let file = match owner.map(|owner| core.file(owner)) {
            // One that is gone is flushed by nobody.
            None | Some(Err(Error::Stale { .. })) => None,
            Some(found) => Some(found?),
        };
        Ok(Self { job, owner: owner.map(|owner| (owner, file)) })
    }
}

/// Does one slice of these jobs; answers the entries it visited.
fn work(core: &Core, jobs: &[Job]) -> Result<u64> {
    let Some(&first) = jobs.first() else { return Ok(0) };
    // What the last slice noted holds for the job that it ended with, as long as no other had one.
    let from = core.aside.lock().reached(first);
    let mut prepared = vec![Prepared::new(core, first, from)?];
    // A layer that used up a slice is likely to use up this one, too: others would be looked up, and
    // their files kept from being committed, for nothing.
    let others = if from.block > 0 { &[] } else { jobs.get(1..).unwrap_or_default() };
    for &job in others {
        prepared.push(Prepared::new(core, job, Reached::default())?);
    }
    // A flush resolves the layers below its open layer before its transaction: they must not change
    // in between, so collapse next to an open layer takes turns with it.
    let (mut locks, mut ready) = (Vec::new(), Vec::new());
    for (number, Prepared { job, owner }) in prepared.iter().enumerate() {
        if let Some(file) = owner.as_ref().and_then(|(_, file)| file.as_ref()) {
            // Waits for the first alone: who holds another may wait for one that is held here.
            let lock = if number == 0 { Some(file.flush.lock()) } else { file.flush.try_lock() };
            let Some(lock) = lock else { continue };
            locks.push(lock);
        }
        ready.push((*job, owner.as_ref().map(|(owner, _)| *owner)));
    }
    // Collapse moves entries between layers, which other ops of a group would read from the
    // index half moved.
    let weight = Weight { bytes: 0, alone: true };
    let done = commit(core, weight, move |txn| slices(txn, &ready, from))?;
    let mut aside = core.aside.lock();
    for &job in &done.jobs {
        aside.jobs.note_success(job);
        aside.note_found(job);
    }
    if let Some(&job) = done.jobs.last() {
        aside.note_reached(job, done.reached);
    }
    core.tally.reclaimed_entries.fetch_add(done.visited, Ordering::Relaxed);
    Ok(done.visited)
}

/// What [`slices`] did.
struct Slices {
    /// All but the last are done, as far as they can be.
    jobs: Vec<Job>,
    /// Entries.
    visited: u64,
    /// Where the next slice of the last begins.
    reached: Reached,
}

/// Slices of one job after the other, until the budget of one is used up. `from`: where that of the
/// first begins.
fn slices(
    txn: &mut Transaction<'_>,
    jobs: &[(Job, Option<InodeId>)],
    mut from: Reached,
) -> Result<Slices> {
    let mut budget = Budget::default();
    let mut all = Slices { jobs: Vec::new(), visited: 0, reached: Reached::default() };
    for &(job, owner) in jobs {
        let done = match job {
            Job::Reclaim(layer) => reclaim_slice(txn, layer, from, &mut budget)?,
            Job::Collapse(layer) => collapse_slice(txn, layer, (owner, from), &mut budget)?,
        };
        all.jobs.push(job);
        all.visited += done.visited;
        all.reached = done.reached;
        if budget.is_used_up() {
            break;
        }
        from = Reached::default();
    }
    Ok(all)
}

#[cfg(test)]
mod tests;
