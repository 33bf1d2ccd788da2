//! When an experiment must end: on a signal, or when its time is over.
//!
//! Signals only set a mark, which every loop looks at, so that whatever was mounted or started
//! is undone on the way out like after any other failure.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::signal::unix::{SignalKind, signal};

use crate::failure::Failure;

/// Time between two looks whether to go on.
const STEP: Duration = Duration::from_millis(100);

/// Tells whether to go on.
#[derive(Clone, Debug)]
pub(crate) struct Stop {
    is_interrupted: Arc<AtomicBool>,
    deadline: Instant,
    limit: Duration,
}

impl Stop {
    /// Listens for signals from now on, and lets pass that much time.
    ///
    /// # Errors
    /// The operating system refuses a thread or the handlers.
    pub(crate) fn listen(limit: Duration) -> Result<Self, Failure> {
        let stop = Self {
            is_interrupted: Arc::new(AtomicBool::new(false)),
            deadline: Instant::now() + limit,
            limit,
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(Failure::on("start a runtime"))?;
        let handlers = {
            let _context = runtime.enter();
            let listen = |kind| signal(kind).map_err(Failure::on("listen for signals"));
            let interrupt = listen(SignalKind::interrupt())?;
            (interrupt, listen(SignalKind::terminate())?, listen(SignalKind::hangup())?)
        };
        let mark = Arc::clone(&stop.is_interrupted);
        std::thread::Builder::new()
            .name("signals".to_owned())
            .spawn(move || {
                let (mut interrupt, mut terminate, mut hangup) = handlers;
                runtime.block_on(async {
                    tokio::select! {
                        _ = interrupt.recv() => {}
                        _ = terminate.recv() => {}
                        _ = hangup.recv() => {}
                    }
                });
                mark.store(true, Ordering::Relaxed);
                // It may be closed; what is ended and removed is so all the same.
                let _ = writeln!(
                    std::io::stderr(),
                    "slackwater-bench: stopping; what it started and made is ended and removed first"
                );
                // The runtime lives on: without it a second signal would end the process
                // before all is undone.
                std::thread::park();
            })
            .map_err(Failure::on("start a thread"))?;
        Ok(stop)
    }

    /// Lets time pass, unless the experiment must end.
    pub(crate) fn pause(&self, time: Duration) -> Result<(), Failure> {
        let end = Instant::now() + time;
        while Instant::now() < end {
            self.check()?;
            std::thread::sleep(STEP);
        }
        Ok(())
    }

    /// An error once the experiment must end.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        if self.is_interrupted.load(Ordering::Relaxed) {
            return Err(Failure::Interrupted);
        }
        if Instant::now() >= self.deadline {
            return Err(Failure::TooLong { limit_seconds: self.limit.as_secs() });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_runs_out() {
        let stop = Stop::listen(Duration::from_secs(3600)).unwrap();
        assert!(stop.check().is_ok());
        stop.is_interrupted.store(true, Ordering::Relaxed);
        assert!(matches!(stop.check(), Err(Failure::Interrupted)));
        let stop = Stop::listen(Duration::ZERO).unwrap();
        assert!(matches!(stop.check(), Err(Failure::TooLong { limit_seconds: 0 })));
    }
}
