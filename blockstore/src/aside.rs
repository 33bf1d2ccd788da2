//! Jobs of reclaim that failed. One that always fails, as over a chunk that is damaged, waits longer
//! each time, and holds up none of those behind it.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::reclaim::Job;

/// The wait after the first failure: what passes by itself has passed then.
const WAIT_MIN: Duration = Duration::from_secs(1);

/// Longest wait: somebody may have mended what was wrong.
const WAIT_MAX: Duration = Duration::from_secs(300);

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct Aside(HashMap<Job, Waiting>);

#[derive(Clone, Copy, Debug)]
struct Waiting {
    wait: Duration,
    until: Instant,
}

impl Aside {
    /// Whether the job may be tried.
    pub(crate) fn is_due(&self, job: Job, now: Instant) -> bool {
        self.0.get(&job).is_none_or(|waiting| waiting.until <= now)
    }

    /// The job failed; answers how long it waits now.
    pub(crate) fn note_failure(&mut self, job: Job, now: Instant) -> Duration {
        let before = self.0.get(&job).map(|waiting| waiting.wait);
        let wait = before.map_or(WAIT_MIN, |wait| wait.saturating_mul(2).min(WAIT_MAX));
        self.0.insert(job, Waiting { wait, until: now + wait });
        wait
    }

    /// The job went well.
    pub(crate) fn note_success(&mut self, job: Job) {
        self.0.remove(&job);
    }

    /// How many wait.
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::LayerId;

    #[test]
    fn a_job_that_fails_waits_longer_each_time_and_others_do_not() {
        let mut aside = Aside::default();
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
        assert_eq!(aside.count(), 1);
        aside.note_success(job);
        assert_eq!(aside.count(), 0);
        assert_eq!(aside.note_failure(job, now), WAIT_MIN);
    }
}
