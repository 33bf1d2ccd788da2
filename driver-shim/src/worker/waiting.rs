//! Work on a disk that is mounted, which waits in the kernel while the appliance is away.
//!
//! ```text
//! work ----------- done -------------> its outcome
//!   | takes long
//!   +--> is the appliance there? ----> no: why not. The work ends by itself later.
//!   ^        yes |
//!   +------------+
//! ```
//! - What was begun keeps its turn and all that it uses until it has ended, also where its caller has left.
//! - An appliance that answers, if only that it is busy, is waited for.

use std::io;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use slackwater_client::RetryPolicy;
use tokio::sync::Semaphore;
use tokio::time::sleep;

use super::keyed::KeyedLocks;
use super::layers::on_disk;
use super::{Worker, WorkerError};

/// How much such work there is at once. Each takes a thread for as long as the appliance is away.
const WORK_MAX: usize = 16;

/// How long such work may take before the appliance is asked whether it is there. Mostly it takes less than a millisecond.
const ASKED_AFTER: Duration = Duration::from_secs(1);

/// How it is asked: twice, as it may be restarted at that moment.
const ASKED: RetryPolicy = RetryPolicy {
    attempts_max: 2,
    delay_first: Duration::from_secs(1),
    delay_max: Duration::from_secs(1),
};

/// Longest time between two questions.
const PAUSE_MAX: Duration = Duration::from_secs(8);

/// The turns of such work.
#[derive(Debug)]
pub(super) struct DiskWork {
    turns: Arc<Semaphore>,
    /// One at a time in each directory.
    directories: KeyedLocks<PathBuf>,
}

impl Default for DiskWork {
    fn default() -> Self {
        Self { turns: Arc::new(Semaphore::new(WORK_MAX)), directories: KeyedLocks::default() }
    }
}

impl Worker {
    /// Works in a directory of a disk for as long as the appliance answers. The work has to bear that it is done later, and
    /// once more.
    ///
    /// # Errors
    /// `Local`; `Appliance` without an answer.
    pub(crate) async fn work_on_disk<T: Send + 'static>(
        &self,
        directory: PathBuf,
        work: impl FnOnce(&Path) -> io::Result<T> + Send + 'static,
    ) -> Result<T, WorkerError> {
        let turns = &self.inner.disk_work;
        // The second of two to end, the work and who waits for it, sees that the other has.
        let (reap, one_ended) = (Arc::clone(&self.inner.reap), Arc::new(AtomicBool::new(false)));
        let (reap_later, other_ended) = (Arc::clone(&reap), Arc::clone(&one_ended));
        let done = async {
            let directory_turn = turns.directories.lock(&directory).await;
            // An error: the driver ends.
            let turn = Arc::clone(&turns.turns).acquire_owned().await;
            on_disk(directory, move |directory| {
                let _turns = (directory_turn, turn);
                let done = work(directory);
                if other_ended.swap(true, Ordering::AcqRel) {
                    // Mostly nothing names what was made.
                    reap_later.notify_one();
                }
                done
            })
            .await
        };
        let ask = || async {
            match self.client().with_retry(ASKED).readyz().await {
                Err(error) if error.is_without_answer() => Err(error),
                _ => Ok(()),
            }
        };
        let answer = while_it_answers(done, ASKED_AFTER, ask).await;
        if answer.is_err() && one_ended.swap(true, Ordering::AcqRel) {
            reap.notify_one();
        }
        answer?
    }
}

/// Waits for work, and asks from time to time whether the appliance is there. If it is not, the work is not waited for any
/// more, and the error is why.
async fn while_it_answers<T, E, F>(
    work: impl Future<Output = T>,
    mut pause: Duration,
    ask: impl Fn() -> F,
) -> Result<T, E>
where
    F: Future<Output = Result<(), E>>,
{
    let mut work = pin!(work);
    loop {
        let answer = async {
            sleep(pause).await;
            ask().await
        };
        tokio::select! {
            biased;
            done = &mut work => return Ok(done),
            answer = answer => answer?,
        }
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tokio::sync::Notify;

    use super::*;

    /// Work that is done once the appliance was asked so often, which answers until it was asked so often: the outcome, and
    /// how often it was asked.
    async fn tried(done_after: u32, away_after: u32) -> (Result<(), u32>, u32) {
        let (asked, done) = (Cell::new(0), Notify::new());
        let work = async {
            if done_after > 0 {
                done.notified().await;
            }
        };
        let outcome = while_it_answers(work, Duration::from_millis(1), || {
            asked.set(asked.get() + 1);
            if asked.get() == done_after {
                done.notify_one();
            }
            std::future::ready(if asked.get() > away_after { Err(asked.get()) } else { Ok(()) })
        });
        (outcome.await, asked.get())
    }

    #[tokio::test]
    async fn work_is_waited_for_as_long_as_the_appliance_answers() {
        assert_eq!(tried(0, 0).await, (Ok(()), 0), "what is done at once asks nothing");
        assert_eq!(tried(4, 4).await, (Ok(()), 4));
        assert_eq!(tried(4, 2).await, (Err(3), 3));
    }

    #[tokio::test]
    async fn work_that_ends_while_the_appliance_is_asked_is_done() {
        let done = Notify::new();
        let outcome = while_it_answers(done.notified(), Duration::from_millis(1), || async {
            done.notify_one();
            // An answer that does not come.
            std::future::pending::<Result<(), ()>>().await
        });
        assert_eq!(outcome.await, Ok(()));
    }
}
