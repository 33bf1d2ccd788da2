//! SIGTERM, SIGINT and SIGHUP: the first stops gracefully, a second one at once.
//!
//! SIGHUP stops too, as it does by default: it comes when the terminal of a server in the
//! foreground is closed.

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

use crate::error::{EXIT_FAILURE, ServerError};

/// Tells whether the server is to stop.
#[derive(Clone, Debug)]
pub(crate) struct Stop(watch::Receiver<bool>);

impl Stop {
    /// A stop, and the sender of `true` that asks for it.
    pub(crate) fn new() -> (watch::Sender<bool>, Self) {
        let (sender, receiver) = watch::channel(false);
        (sender, Self(receiver))
    }

    /// Returns once the stop is asked for, or can no longer be.
    pub(crate) async fn asked(mut self) {
        // An error means that the sender is gone: nobody runs the server any more.
        let _ = self.0.wait_for(|&asked| asked).await;
    }
}

/// Receives signals from now on.
///
/// # Errors
/// The operating system refuses the handlers.
pub(crate) fn stop_on_signal() -> Result<Stop, ServerError> {
    let mut signals = Signals::new().map_err(ServerError::Signals)?;
    let (sender, stop) = Stop::new();
    tokio::spawn(async move {
        let name = signals.next().await;
        tracing::info!(signal = name, "stopping; a second signal stops at once");
        // An error means that nobody waits any more: the server is ending already.
        let _ = sender.send(true);
        let name = signals.next().await;
        tracing::error!(signal = name, "stopped at once: writes that were not committed are lost");
        std::process::exit(EXIT_FAILURE.into());
    });
    Ok(stop)
}

/// The signals that stop.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// The name of the next one.
    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
            _ = self.hangup.recv() => "SIGHUP",
        }
    }
}
