//! The answer of a call that a lane runs: given once, whatever becomes of the call.
//!
//! ```text
//! lane thread: WRITE ... -> runs it ---------------------------------> reply
//!              COMMIT    -> store: its file is committed by one thread -> that thread -> reply
//! ```
//! Invariant: a call that was taken is answered, SERVERFAULT if it panics or is dropped.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use slackwater_blockstore::{CommitDuty, Committed};

use crate::dispatch::{Finished, Request};
use crate::procedure::Lane;
use crate::server::Shared;

/// Sends a reply.
pub(crate) type Answer = Box<dyn FnOnce(Finished) + Send>;

/// A request, and where its reply goes.
struct Unanswered {
    shared: Arc<Shared>,
    /// Present until it is answered.
    call: Option<(Request, Answer)>,
}

/// Runs the request where it may wait for the disk. Its reply goes to `answer`: from this
/// thread, or for a COMMIT from the one that is committing the file already.
pub(crate) fn execute(request: Request, shared: &Arc<Shared>, answer: Answer) {
    let file = request.committed_file(shared);
    let unanswered = Unanswered { shared: Arc::clone(shared), call: Some((request, answer)) };
    let Some(file) = file else {
        return unanswered.finish(Request::execute);
    };
    let duty = shared.store.commit_then(file, move |outcome| {
        unanswered.finish(|request, shared| request.committed(shared, file, outcome));
    });
    if let Some(duty) = duty {
        go_on(shared, duty);
    }
}

/// Has the lane go on with the commits of a file to which more callers came meanwhile: behind
/// what waits already, so that the commits of one file do not keep a thread of the lane.
fn go_on(shared: &Arc<Shared>, duty: CommitDuty) {
    let of_job = Arc::clone(shared);
    let job = move || {
        if let Some(duty) = of_job.store.serve_commits(duty) {
            go_on(&of_job, duty);
        }
    };
    shared.lanes.submit(Lane::Data, Box::new(job));
}

/// As [`execute`] for a COMMIT whose file another thread is committing; what was given comes back
/// otherwise. Does not wait.
pub(crate) fn join(
    request: Box<Request>,
    shared: &Arc<Shared>,
    answer: Answer,
) -> Result<(), (Box<Request>, Answer)> {
    let Some(file) = request.committed_file(shared) else { return Err((request, answer)) };
    let mut call = Some((request, answer));
    let mut done = || -> Committed {
        let call = call.take().map(|(request, answer)| (*request, answer));
        let unanswered = Unanswered { shared: Arc::clone(shared), call };
        Box::new(move |outcome| {
            unanswered.finish(|request, shared| request.committed(shared, file, outcome));
        })
    };
    shared.store.join_commit(file, &mut done);
    call.map_or(Ok(()), Err)
}

impl Unanswered {
    fn finish(mut self, run: impl FnOnce(Request, &Shared) -> Finished) {
        self.answer(run);
    }

    fn answer(&mut self, run: impl FnOnce(Request, &Shared) -> Finished) {
        let Some((request, answer)) = self.call.take() else { return };
        // The request goes with a panic, so its reply is made before.
        let failed = request.failed();
        let finished = catch_unwind(AssertUnwindSafe(|| run(request, &self.shared)));
        answer(finished.unwrap_or_else(|_| {
            self.shared.metrics.panics.add(1);
            tracing::error!("a call panicked while it was answered");
            failed.into()
        }));
    }
}

impl Drop for Unanswered {
    fn drop(&mut self) {
        self.answer(Request::fail);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::Instant;

    use bytes::Bytes;
    use slackwater_blockstore::{Options, Store};

    use crate::client_certificate::Shown;
    use crate::dispatch::{self, Peer, Plan};
    use crate::limits::Patience;
    use crate::metrics::NfsMetrics;
    use crate::options::{ClientAccess, NfsOptions};

    /// What the client gets for a call of which `treat` is the fate.
    fn answered(treat: impl FnOnce(Unanswered)) -> (Vec<u8>, u64) {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(Options::new(directory.path())).unwrap();
        let metrics = Arc::new(NfsMetrics::new());
        let options = NfsOptions::default();
        let shared = Arc::new(Shared::new(store, options, metrics, Patience::default()));
        let words: [u32; 10] = [7, 0, 2, 100_003, 3, 21, 0, 0, 0, 0];
        let frame: Bytes = words.iter().flat_map(|word| word.to_be_bytes()).collect();
        let access = Some(ClientAccess::ReadWrite);
        let peer = Peer {
            address: "10.0.0.1".parse().unwrap(),
            has_privileged_port: false,
            access,
            port: crate::portmap::Port::Nfs(2049),
            shown: Shown::NotAsked,
        };
        let Plan::Run(request) = dispatch::plan(&frame, peer, Instant::now()) else {
            panic!("refused")
        };
        let (told, answers) = mpsc::channel();
        let answer: Answer = Box::new(move |finished| told.send(finished.head).unwrap());
        treat(Unanswered { shared: Arc::clone(&shared), call: Some((*request, answer)) });
        let head = answers.try_recv().unwrap();
        assert!(answers.try_recv().is_err(), "one answer");
        shared.store.close().unwrap();
        (head, shared.metrics.snapshot().panics)
    }

    #[tokio::test]
    async fn a_call_that_is_dropped_is_answered() {
        let (head, _) = answered(drop);
        assert_eq!(head[4..8], 7_u32.to_be_bytes());
        assert_eq!(head[28..32], 10006_u32.to_be_bytes());
    }

    #[tokio::test]
    async fn a_call_that_panics_outside_its_procedure_is_answered() {
        let (head, panics) = answered(|call| call.finish(|_, _| panic!("of a test")));
        assert_eq!(head[4..8], 7_u32.to_be_bytes());
        assert_eq!(head[28..32], 10006_u32.to_be_bytes());
        assert_eq!(panics, 1);
    }
}
