//! The NFSv3 front end of the Slackwater appliance: NFS version 3, MOUNT version 3 and a small
//! PORTMAP version 2 on one TCP port, over a [`slackwater_blockstore::Store`].
//!
//! # Layout
//! ```text
//! server      what connections share; accept, stop
//! connection  one connection: reader task, writer task      writer    vectored writes
//! record      record marking (RFC 5531)                     rpc       headers of calls and replies
//! dispatch    record -> request -> reply                    procedure the table of procedures
//! budget      memory for calls in flight                    lane      threads for calls that wait
//! auth        credentials, squash                           options   export, address list, bounds
//! permission  mode bits                                     handle    file handles and their MAC
//! duplicate   replies kept for resent calls                 status    store errors -> NFS status
//! mount, portmap, proc/*  the procedures                    xdr       encoding and decoding
//! limits      every bound, with its reason                  metrics   counters
//! error       what ends the front end as a whole
//! ```
//!
//! # Invariants
//! - Nothing a client sends makes the server take memory that is not charged to a budget.
//! - A call that may wait for the disk never runs on a thread that takes calls, and calls that
//!   change something never use up what the others need.
//! - A WRITE is answered with the stability that was reached; the payload is not copied on its
//!   way to the store, nor that of a READ on its way out.
//! - A handle is good for as long as its object lives, across restarts, and cannot be made by
//!   anyone else.
//! - A panic in one call is answered SERVERFAULT and touches no other.

mod auth;
mod budget;
mod connection;
mod dispatch;
mod duplicate;
mod error;
mod handle;
mod lane;
mod limits;
mod metrics;
mod mount;
mod options;
mod permission;
mod portmap;
mod proc;
mod procedure;
mod record;
mod rpc;
mod server;
mod status;
mod writer;
mod xdr;

pub use error::NfsError;
pub use metrics::{LATENCY_BOUNDS_MICROSECONDS, NfsMetrics, NfsMetricsSnapshot, ProcedureSnapshot};
pub use options::{
    ClientAccess, ClientRule, ClientRuleParseError, NfsOptions, Squash, SquashParseError,
};
pub use server::run;
