//! The NFSv3 front end of the Slackwater appliance: NFS version 3, MOUNT version 3 and a small
//! PORTMAP version 2 on each TCP port that it is given, over a [`slackwater_blockstore::Store`].
//!
//! # Layout
//! ```text
//! server      what connections share; accept, stop          reactor   threads of connections
//! connection  one connection: calls taken and run           outlet    replies sent
//! greeting    how it begins: in plain text, or in TLS       tls       what is sent and received in TLS
//! transport   the two ends of a connection                  client_certificate  who it is with, in mutual TLS
//! record      record marking (RFC 5531)                     rpc       headers of calls and replies
//! dispatch    record -> request -> reply                    answer    replies of lanes
//! procedure   the table of procedures
//! budget      memory for calls in flight                    lane      threads for calls that wait
//! lane_writes files with WRITEs in a lane
//! auth        credentials, squash                           options   export, address list, bounds
//! permission  mode bits                                     handle    file handles and their MAC
//! duplicate   replies kept for resent calls                 status    store errors -> NFS status
//! mount, portmap, proc/*  the procedures                    xdr       encoding and decoding
//! portmap_udp PORTMAP by UDP
//! scope       what a mount by a secret path reaches
//! limits      every bound, with its reason                  metrics   counters
//! error       what ends the front end as a whole
//! ```
//!
//! # Invariants
//! - Nothing a client sends makes the server take memory that is not charged to a budget.
//! - A call that may wait for a sync, for room in memory or for data on the disk never runs on a
//!   thread that takes calls. What LOOKUP, GETATTR and their like do not find in memory they do
//!   read from the index there: its blocks are in its own cache, but for the coldest. Calls that
//!   change something never use up what the others need.
//! - A WRITE is answered with the stability that was reached, and comes after those of its file
//!   that wait. A large payload is not copied on its way to the store, nor is that of a READ on
//!   its way out.
//! - A handle is good for as long as its object lives, across restarts, and cannot be made by
//!   anyone else. One of a worker's mount leads to what it reaches alone, and is good until the
//!   worker is revoked; one of a token's, until the token is gone.
//! - A panic in one call is answered SERVERFAULT and touches no other.

mod answer;
mod auth;
mod budget;
mod client_certificate;
mod connection;
mod crowd;
mod dispatch;
mod duplicate;
mod error;
#[doc(hidden)]
pub mod fuzzing;
mod greeting;
mod handle;
mod lane;
mod lane_writes;
mod limits;
mod metrics;
mod mount;
mod options;
mod outlet;
mod pace;
mod permission;
mod portmap;
mod portmap_udp;
mod proc;
mod procedure;
mod reactor;
mod record;
mod rpc;
mod scope;
mod server;
mod status;
mod tls;
mod transport;
mod xdr;

pub use error::NfsError;
pub use metrics::{LATENCY_BOUNDS_MICROSECONDS, NfsMetrics, NfsMetricsSnapshot, ProcedureSnapshot};
pub use options::{
    ClientAccess, ClientRule, ClientRuleParseError, NfsOptions, Squash, SquashParseError,
};
pub use scope::{MountGate, MountScope, Mounter};
pub use server::{Listeners, PortmapListeners, run};
pub use tls::{NfsTls, NfsTlsError, TlsPolicy};
