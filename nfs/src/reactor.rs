//! Reactors: threads with a runtime of their own, each of which serves its connections alone.
//!
//! ```text
//! accept (caller's runtime) --least busy--> reactor 0: read -> run -> write, its connections
//!                                           reactor 1: ...
//! ```
//! A call that is answered from memory begins and ends on one thread: waking another one costs
//! more than the call itself. What may wait for the disk goes to a lane (`lane`), never here.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::Instant;

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

use crate::error::NfsError;
use crate::limits;

/// The reactors of a server. Dropping them ends their threads, and every task on them. A thread
/// that hangs in a call is left to itself after [`limits::CUT_OFF`].
#[derive(Debug)]
pub(crate) struct Reactors {
    reactors: Vec<Reactor>,
}

#[derive(Debug)]
struct Reactor {
    handle: Handle,
    places: Arc<AtomicUsize>,
    /// Taken at the end: dropping it tells the thread.
    stop: Option<oneshot::Sender<()>>,
    /// Hung up when the thread's work is over.
    running: Receiver<Infallible>,
    thread: Option<JoinHandle<()>>,
}

/// A connection's place on a reactor.
#[derive(Debug)]
pub(crate) struct Place {
    /// Where its tasks are spawned.
    pub(crate) handle: Handle,
    places: Arc<AtomicUsize>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Reactors {
    /// As many as the machine has processors, within [`limits::REACTORS_MAX`].
    pub(crate) fn start() -> Result<Self, NfsError> {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Self::with(processors.min(limits::REACTORS_MAX))
    }

    fn with(count: usize) -> Result<Self, NfsError> {
        let reactors = (0..count).map(Reactor::start).collect::<io::Result<_>>();
        Ok(Self { reactors: reactors.map_err(|source| NfsError::Reactor { source })? })
    }

    /// A place on the reactor that has the fewest connections.
    pub(crate) fn place(&self) -> Place {
        let load = |reactor: &&Reactor| reactor.places.load(Ordering::Relaxed);
        let Some(least) = self.reactors.iter().min_by_key(load) else {
            unreachable!("there is at least one processor, so at least one reactor")
        };
        least.places.fetch_add(1, Ordering::Relaxed);
        Place { handle: least.handle.clone(), places: Arc::clone(&least.places) }
    }
}

impl Drop for Reactors {
    fn drop(&mut self) {
        // All are told before the first is waited for.
        for reactor in &mut self.reactors {
            reactor.stop.take();
        }
        let deadline = Instant::now() + limits::CUT_OFF;
        for reactor in &mut self.reactors {
            let left = deadline.saturating_duration_since(Instant::now());
            let Some(thread) = reactor.thread.take() else { continue };
            if reactor.running.recv_timeout(left) == Err(RecvTimeoutError::Timeout) {
                tracing::error!("a reactor's thread does not end: a call hangs");
            } else if thread.join().is_err() {
                tracing::error!("a reactor's thread panicked");
            }
        }
    }
}

impl Reactor {
    fn start(number: usize) -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        let (guard, running) = mpsc::channel();
        let work = move || {
            // Either way, told or forgotten, this is the end.
            let _ = runtime.block_on(stopped);
            drop(runtime);
            drop(guard);
        };
        let thread = std::thread::Builder::new().name(format!("nfs-{number}")).spawn(work)?;
        let places = Arc::new(AtomicUsize::new(0));
        Ok(Self { handle, places, stop: Some(stop), running, thread: Some(thread) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;
    use std::thread::{self, ThreadId};

    async fn threads(places: &[Place]) -> HashMap<ThreadId, usize> {
        let mut threads = HashMap::new();
        for place in places {
            let ran_on = place.handle.spawn(async { thread::current().id() }).await.unwrap();
            *threads.entry(ran_on).or_default() += 1;
        }
        threads
    }

    #[tokio::test]
    async fn connections_are_spread_over_the_threads() {
        let reactors = Reactors::with(3).unwrap();
        let mut places: Vec<Place> = (0..6).map(|_| reactors.place()).collect();
        let spread = threads(&places).await;
        assert_eq!(spread.values().copied().collect::<Vec<_>>(), [2, 2, 2]);
        assert!(!spread.contains_key(&thread::current().id()));
        // Those that end make room where they were.
        let left = places.split_off(3);
        drop(places);
        let again: Vec<Place> = (0..3).map(|_| reactors.place()).chain(left).collect();
        assert_eq!(threads(&again).await.values().copied().collect::<Vec<_>>(), [2, 2, 2]);
    }

    #[tokio::test]
    async fn the_end_takes_what_still_runs_with_it() {
        let reactors = Reactors::with(2).unwrap();
        let place = reactors.place();
        let task = place.handle.spawn(std::future::pending::<()>());
        drop(reactors);
        assert!(task.await.unwrap_err().is_cancelled());
    }

    #[tokio::test]
    async fn a_thread_that_hangs_does_not_hold_up_the_end() {
        let reactors = Reactors::with(2).unwrap();
        let (release, hanging) = mpsc::channel::<()>();
        let (begun, has_begun) = oneshot::channel();
        let place = reactors.place();
        place.handle.spawn(async move {
            begun.send(()).unwrap();
            // Until the test lets go.
            let _ = hanging.recv();
        });
        has_begun.await.unwrap();
        drop(reactors);
        // Only now: it did hang until the end.
        drop(release);
    }
}
