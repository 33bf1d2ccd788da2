//! Many callers of the REST face at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use slackwater_client::ClientError;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use crate::failure::Failure;
use crate::stop::Stop;

/// Callers at once.
pub(crate) const CALLERS: u64 = 8;

/// One thread that makes calls and drives their connections: no sample holds the waking of
/// another thread of this program.
pub(crate) fn runtime() -> Result<Runtime, Failure> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(Failure::on("start a runtime"))
}

/// Makes the calls `0..count`, by [`CALLERS`] callers who each take the next one, and answers how
/// long each took, in order of the calls.
pub(crate) fn call_all<F>(
    runtime: &Runtime,
    count: u64,
    stop: &Stop,
    call: impl Fn(u64) -> F + Clone + Send + 'static,
) -> Result<Vec<Duration>, Failure>
where
    F: Future<Output = Result<(), ClientError>> + Send,
{
    let next = Arc::new(AtomicU64::new(0));
    let mut timed = runtime.block_on(async {
        let mut callers = JoinSet::new();
        for _ in 0..CALLERS {
            let (next, stop, call) = (Arc::clone(&next), stop.clone(), call.clone());
            callers.spawn(async move {
                let mut timed = Vec::new();
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    if index >= count {
                        return Ok(timed);
                    }
                    stop.check()?;
                    let start = Instant::now();
                    call(index).await?;
                    timed.push((index, start.elapsed()));
                }
            });
        }
        let mut all = Vec::new();
        // Dropping the others ends them when one failed.
        while let Some(joined) = callers.join_next().await {
            let timed: Result<Vec<(u64, Duration)>, Failure> = match joined {
                Ok(timed) => timed,
                Err(error) => Err(Failure::Unfit(format!("a caller ended: {error}"))),
            };
            all.extend(timed?);
        }
        Ok::<_, Failure>(all)
    })?;
    timed.sort_unstable();
    Ok(timed.into_iter().map(|(_, elapsed)| elapsed).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_call_is_made_once_and_answered_in_order() {
        let stop = Stop::listen(Duration::from_secs(60)).unwrap();
        let (sum, ended) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let total = Arc::clone(&sum);
        let timed = call_all(&runtime().unwrap(), 20, &stop, move |index| {
            total.fetch_add(index, Ordering::Relaxed);
            let ended = Arc::clone(&ended);
            async move {
                tokio::time::sleep(Duration::from_millis(1)).await;
                if index > 0 {
                    ended.fetch_add(1, Ordering::Relaxed);
                    return Ok(());
                }
                // The longest of all, however long the others take.
                while ended.load(Ordering::Relaxed) < 19 {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                tokio::time::sleep(Duration::from_millis(200)).await;
                Ok(())
            }
        })
        .unwrap();
        assert_eq!(timed.len(), 20);
        assert_eq!(sum.load(Ordering::Relaxed), 190);
        assert!(timed[0] >= Duration::from_millis(200));
        assert!(timed[1..].iter().all(|elapsed| *elapsed < timed[0]));
    }

    #[test]
    fn a_time_that_is_over_ends_the_calls() {
        let stop = Stop::listen(Duration::ZERO).unwrap();
        let outcome = call_all(&runtime().unwrap(), 20, &stop, |_| async { Ok(()) });
        assert!(matches!(outcome, Err(Failure::TooLong { .. })));
    }
}
