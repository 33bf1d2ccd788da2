//! Work of cleaning that failed: jobs of reclaim, files that compaction could not move, and snapshots
//! that could not expire. What always fails, as over a chunk that is damaged, waits longer each time,
//! and holds up none of what is behind it.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::{Duration, Instant};

use crate::disk::FileName;
use crate::id::{LayerId, SnapshotId};
use crate::reclaim::Job;

/// The wait after the first failure: what passes by itself has passed then.
const WAIT_MIN: Duration = Duration::from_secs(1);

/// Longest wait: somebody may have mended what was wrong.
const WAIT_MAX: Duration = Duration::from_secs(300);

/// What cleaning remembers.
#[derive(Debug, Default)]
pub(crate) struct Cleaning {
    pub(crate) jobs: Aside<Job>,
    pub(crate) files: Aside<FileName>,
    pub(crate) snapshots: Aside<SnapshotId>,
    /// Where the next sweep over the snapshots that expire begins, if not at the first.
    pub(crate) expiry: Option<Vec<u8>>,
    /// Where the last slice stopped.
    reached: Option<(Job, Reached)>,
    /// The job that was worked on last.
    last: Option<Job>,
    /// The queue was empty behind the commit of this number. A look into it steps over the deleted keys
    /// of all jobs that are done, as long as the index keeps them.
    pub(crate) empty_at: Option<u64>,
}

impl Cleaning {
    /// How much waits.
    pub(crate) fn count(&self) -> u64 {
        let count = self.jobs.0.len() + self.files.0.len() + self.snapshots.0.len();
        u64::try_from(count).unwrap_or(u64::MAX)
    }

    /// Where the next look into the queue begins: before it lie the deleted keys of the jobs that are
    /// done, which a look from the first key on would step over each time.
    pub(crate) fn last(&self) -> Option<Job> {
        self.last
    }

    pub(crate) fn note_found(&mut self, job: Job) {
        self.last = Some(job);
    }

    /// Where the next slice of the job begins, if the last one was the same job's.
    pub(crate) fn reached(&self, job: Job) -> Reached {
        self.reached.filter(|(of, _)| *of == job).map_or_else(Reached::default, |(_, at)| at)
    }

    pub(crate) fn note_reached(&mut self, job: Job, at: Reached) {
        self.reached = Some((job, at));
    }
}

/// Where a slice stopped working its layer off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reached {
    /// The block where the next slice begins to look: only a hint.
    pub(crate) block: u64,
    /// Entries moved up into a layer of which no entry that begins before this block reaches behind
    /// it. That holds until a slice of another job, as nothing but slices changes frozen layers.
    pub(crate) behind: u64,
    /// The only child of the layer that collapses, as far as is known: before it lie the deleted keys of
    /// all the children that the layer had.
    pub(crate) child: Option<LayerId>,
}

/// Work of one kind. See the module's text.
#[derive(Debug)]
pub(crate) struct Aside<W>(HashMap<W, Waiting>);

impl<W> Default for Aside<W> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

#[derive(Clone, Copy, Debug)]
struct Waiting {
    wait: Duration,
    until: Instant,
}

impl<W: Copy + Eq + Hash> Aside<W> {
    /// Whether the work may be tried.
    pub(crate) fn is_due(&self, work: W, now: Instant) -> bool {
        self.0.get(&work).is_none_or(|waiting| waiting.until <= now)
    }

    /// It failed when it was last tried.
    pub(crate) fn has_failed(&self, work: W) -> bool {
        self.0.contains_key(&work)
    }

    /// The work failed; answers how long it waits now.
    pub(crate) fn note_failure(&mut self, work: W, now: Instant) -> Duration {
        let before = self.0.get(&work).map(|waiting| waiting.wait);
        let wait = before.map_or(WAIT_MIN, |wait| wait.saturating_mul(2).min(WAIT_MAX));
        self.0.insert(work, Waiting { wait, until: now + wait });
        wait
    }

    /// The work went well.
    pub(crate) fn note_success(&mut self, work: W) {
        self.0.remove(&work);
    }

    /// All that failed.
    pub(crate) fn all(&self) -> Vec<W> {
        self.0.keys().copied().collect()
    }

    /// Forgets all other work: it is no longer to be done.
    pub(crate) fn keep_only(&mut self, is_left: impl Fn(&W) -> bool) {
        self.0.retain(|work, _| is_left(work));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_that_fails_waits_longer_each_time_and_others_do_not() {
        let mut all = Cleaning::default();
        let aside = &mut all.jobs;
        let (job, other) = (Job::Reclaim(LayerId::new(7)), Job::Collapse(LayerId::new(7)));
        let mut now = Instant::now();
        assert!(aside.is_due(job, now));
        let mut waits = Vec::new();
        for _ in 0..12 {
            let wait = aside.note_failure(job, now);
            assert!(!aside.is_due(job, now) && aside.is_due(other, now));
            assert!(aside.is_due(job, now + wait));
            now += wait;
            waits.push(wait);
        }
        assert_eq!((waits[0], waits[1]), (WAIT_MIN, WAIT_MIN * 2));
        assert_eq!(waits[11], WAIT_MAX);
        assert!(aside.has_failed(job) && !aside.has_failed(other));
        aside.note_success(job);
        assert!(!aside.has_failed(job));
        assert_eq!(aside.note_failure(job, now), WAIT_MIN);
        aside.note_failure(other, now);
        aside.keep_only(|work| *work == other);
        assert!(!aside.has_failed(job) && aside.has_failed(other));
        let number = crate::id::SegmentId::new(3);
        all.files.note_failure(FileName { role: crate::disk::FileRole::Log, number }, now);
        assert_eq!(all.count(), 2);
    }
}
