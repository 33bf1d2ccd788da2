//! Why a call has no result.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

/// Why a call has no result.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// No connection.
    #[error("cannot connect to {address}: {source}; does the server run there?")]
    Connect {
        /// Where to.
        address: SocketAddr,
        /// Why not.
        source: io::Error,
    },
    /// The connection broke.
    #[error("cannot talk to the NFS server: {0}")]
    Stream(#[from] io::Error),
    /// No answer came.
    #[error("the server gave no answer for {} s", patience.as_secs())]
    Silent {
        /// How long it was waited for.
        patience: Duration,
    },
    /// The server refused the call as such.
    #[error("the server refused the RPC call: {what} is {got}, expected {expected}")]
    Refused {
        /// Which word of the answer.
        what: &'static str,
        /// Its value.
        got: u32,
        /// The value that means success.
        expected: u32,
    },
    /// The server answered with an error.
    #[error("{procedure} was answered with NFS status {status}")]
    Status {
        /// The procedure.
        procedure: &'static str,
        /// As RFC 1813 numbers them.
        status: u32,
    },
    /// An answer is shorter than what it must hold.
    #[error("an answer ended within its {what}")]
    Truncated {
        /// What was to come.
        what: &'static str,
    },
    /// A number in an answer is not what was to come.
    #[error("an answer has {got} as its {what}, expected {expected}")]
    Unexpected {
        /// Which number.
        what: &'static str,
        /// It.
        got: u64,
        /// What was to come, or the most.
        expected: u64,
    },
}
