//! What can end the NFS front end as a whole. Failures of one connection are logged, failures
//! of one call are answered with a status.

use std::io;

/// The front end cannot start or go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NfsError {
    /// An option is out of its range.
    #[error("{field} is `{got}`, expected {expected}")]
    Option {
        /// The option.
        field: &'static str,
        /// Its value.
        got: String,
        /// What is right.
        expected: &'static str,
    },
    /// The listener has no local address.
    #[error("the NFS listener has no address: {source}")]
    Listener {
        /// The system's error.
        source: io::Error,
    },
    /// The threads that serve connections cannot be started.
    #[error("threads for NFS connections: {source}; raise the limit of threads of the process")]
    Reactor {
        /// The system's error.
        source: io::Error,
    },
    /// Calls were still running when the time for the end was over; they are cut off.
    #[error(
        "{connections} connections had calls in flight {waited_seconds} s after the server was told to stop"
    )]
    Drain {
        /// Connections that were cut off.
        connections: usize,
        /// The time that they were given.
        waited_seconds: u64,
    },
}
