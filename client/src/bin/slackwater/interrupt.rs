//! Ctrl-C and SIGTERM: the command ends, and says how to go on.

use std::sync::Mutex;

use tokio::signal::unix::{SignalKind, signal as listen};

use crate::failure::Exit;

/// What to tell the user if the command is interrupted now.
#[derive(Debug, Default)]
pub(crate) struct Notice(Mutex<Option<String>>);

impl Notice {
    /// From now on an interrupted command ends with this advice.
    pub(crate) fn set(&self, resume: String) {
        if let Ok(mut slot) = self.0.lock() {
            *slot = Some(resume);
        }
    }

    pub(crate) fn take(&self) -> Option<String> {
        self.0.lock().ok().and_then(|mut slot| slot.take())
    }
}

/// Waits for a signal that asks the command to end.
pub(crate) async fn signal() -> Exit {
    // Where a signal cannot be listened for, its default action ends the process.
    let (Ok(mut interrupt), Ok(mut terminate)) =
        (listen(SignalKind::interrupt()), listen(SignalKind::terminate()))
    else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = interrupt.recv() => Exit::Interrupted,
        _ = terminate.recv() => Exit::Terminated,
    }
}
