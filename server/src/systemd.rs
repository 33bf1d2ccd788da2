//! What systemd is told (sd_notify(3)); without systemd nothing happens.

use std::sync::Arc;
use std::time::Duration;

use sd_notify::NotifyState;
use slackwater_blockstore::Store;

/// The store is open and both servers accept.
pub(crate) fn ready(status: &str) {
    tell(&[NotifyState::Ready, NotifyState::Status(status)]);
}

/// The stop has begun.
pub(crate) fn stopping() {
    tell(&[NotifyState::Stopping]);
}

/// Tells the state to the service manager, if there is one.
fn tell(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!(%error, "systemd could not be told the state");
    }
}

/// Feeds systemd's watchdog while the runtime turns and the store answers; returns at once
/// when no watchdog was asked for (`WatchdogSec=`).
pub(crate) async fn feed_watchdog(store: Arc<Store>) {
    let Some(limit) = sd_notify::watchdog_enabled() else {
        return;
    };
    // Half of the limit, as sd_watchdog_enabled(3) advises.
    let mut ticks = tokio::time::interval((limit / 2).max(Duration::from_millis(1)));
    loop {
        ticks.tick().await;
        let store = Arc::clone(&store);
        // Statistics are in memory: a store that does not give them hangs on a lock, and the
        // watchdog is left to bite.
        if tokio::task::spawn_blocking(move || store.stats()).await.is_ok() {
            tell(&[NotifyState::Watchdog]);
        }
    }
}
