//! Lanes: bounded sets of blocking threads, one for each kind of call that may wait.
//!
//! Calls queue in order of arrival; each holds its charge of the budget, which bounds the
//! queue. A lane's threads are the runtime's blocking threads: they come with the work and
//! end with it.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::runtime::Handle;

use crate::procedure::Lane;

/// A call that is ready to run. It answers by itself and does not panic.
pub(crate) type Job = Box<dyn FnOnce() + Send>;

/// The lanes that have threads.
#[derive(Debug)]
pub(crate) struct Lanes {
    data: Arc<Pool>,
    namespace: Arc<Pool>,
    read: Arc<Pool>,
}

impl Lanes {
    /// Lanes of `threads` each, on the runtime of the caller.
    pub(crate) fn new(threads: usize) -> Self {
        let pool =
            || Arc::new(Pool { runtime: Handle::current(), threads, state: Mutex::default() });
        Self { data: pool(), namespace: pool(), read: pool() }
    }

    /// Has the job run in its lane, once a thread of it is free.
    pub(crate) fn submit(&self, lane: Lane, job: Job) {
        let pool = match lane {
            Lane::Data => &self.data,
            Lane::Namespace => &self.namespace,
            Lane::Read | Lane::Cached | Lane::Inline => &self.read,
        };
        pool.submit(job);
    }
}

struct Pool {
    runtime: Handle,
    threads: usize,
    state: Mutex<State>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.state.lock();
        f.debug_struct("Pool")
            .field("threads", &self.threads)
            .field("running", &state.running)
            .field("waiting", &state.waiting.len())
            .finish_non_exhaustive()
    }
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Job>,
    running: usize,
}

impl Pool {
    fn submit(self: &Arc<Self>, job: Job) {
        {
            let mut state = self.state.lock();
            state.waiting.push_back(job);
            if state.running == self.threads {
                return;
            }
            state.running += 1;
        }
        let pool = Arc::clone(self);
        drop(self.runtime.spawn_blocking(move || pool.work()));
    }

    /// Runs jobs until none waits.
    fn work(&self) {
        while let Some(job) = self.next() {
            // A job answers its own panics; this keeps the lane's thread if one does not.
            if catch_unwind(AssertUnwindSafe(job)).is_err() {
                tracing::error!("a call panicked and was not answered");
            }
        }
    }

    /// The next job. Without one the thread is taken off the count in the same critical
    /// section, so that a job submitted right after finds it gone.
    fn next(&self) -> Option<Job> {
        let mut state = self.state.lock();
        let job = state.waiting.pop_front();
        if job.is_none() {
            state.running -= 1;
        }
        job
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::Duration;

    /// Longer than any job waits for its thread, also on a busy machine.
    const LONG: Duration = Duration::from_secs(60);

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_stalled_lane_does_not_hold_up_another() {
        let lanes = Lanes::new(2);
        let (release, stalled) = mpsc::channel::<()>();
        let stalled = Arc::new(Mutex::new(stalled));
        let (done, finished) = mpsc::channel();
        for _ in 0..100 {
            let (stalled, done) = (Arc::clone(&stalled), done.clone());
            let job = move || {
                let _ = stalled.lock().recv();
                done.send("write").unwrap();
            };
            lanes.submit(Lane::Data, Box::new(job));
        }
        let namespace = done.clone();
        lanes.submit(Lane::Namespace, Box::new(move || namespace.send("mkdir").unwrap()));
        assert_eq!(finished.recv_timeout(LONG), Ok("mkdir"));
        let read = done.clone();
        lanes.submit(Lane::Read, Box::new(move || read.send("read").unwrap()));
        assert_eq!(finished.recv_timeout(LONG), Ok("read"));
        drop(release);
        for _ in 0..100 {
            assert_eq!(finished.recv_timeout(LONG), Ok("write"));
        }
    }

    #[tokio::test]
    async fn no_job_is_left_behind_when_threads_come_and_go() {
        let lanes = Lanes::new(1);
        for round in 0..1000 {
            let (done, finished) = mpsc::channel();
            let other = done.clone();
            lanes.submit(Lane::Read, Box::new(move || done.send(round).unwrap()));
            lanes.submit(Lane::Read, Box::new(move || other.send(round).unwrap()));
            assert_eq!(finished.recv_timeout(LONG), Ok(round));
            assert_eq!(finished.recv_timeout(LONG), Ok(round));
        }
    }

    #[tokio::test]
    async fn a_panic_does_not_cost_the_lane_its_thread() {
        let lanes = Lanes::new(1);
        let (done, finished) = mpsc::channel();
        lanes.submit(Lane::Read, Box::new(|| panic!("a job that breaks its contract")));
        lanes.submit(Lane::Read, Box::new(move || done.send(()).unwrap()));
        assert_eq!(finished.recv_timeout(LONG), Ok(()));
    }
}
