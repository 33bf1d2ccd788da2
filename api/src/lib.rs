//! The REST face of the Slackwater appliance.
//!
//! ```text
//! types chain image_name worker change block_map error paths query exposition  what goes over the wire; shared with the client crate
//! certificate                           when certificates end; shared, too
//! ------------------------------------- feature `server` -------------------------------------
//! listen crowd patient                  the socket: TLS, HTTP/1.1 and 2, bounded waits
//! router auth attempts foreign_pages idempotency extract  what happens to a request before its handler
//! tokens workers/ mount_paths scope     the tokens that are taken; the machines that have credentials of their own; what each reaches
//! audit/                                who changed what
//! references reserved publishing        what images hold to stand for snapshots; what only the appliance says; who published
//! routes/ openapi dashboard/            the handlers, and what they say about themselves
//! state maintenance convert failure metrics  the way into the store and back
//! ```
//!
//! Without features the crate is only what both ends share. Feature `server` adds the server:
//! make a [`router`], give it to [`run`].

pub mod block_map;
pub mod certificate;
mod chain;
pub mod change;
pub mod error;
pub mod exposition;
mod image_name;
pub mod paths;
pub mod query;
mod timestamp;
pub mod types;
pub mod worker;

#[cfg(feature = "server")]
mod attempts;
#[cfg(feature = "server")]
pub mod audit;
#[cfg(feature = "server")]
pub mod auth;
#[cfg(feature = "server")]
mod convert;
#[cfg(feature = "server")]
mod crowd;
#[cfg(feature = "server")]
mod dashboard;
#[cfg(feature = "server")]
mod extract;
#[cfg(feature = "server")]
mod failure;
#[cfg(feature = "server")]
mod foreign_pages;
#[cfg(feature = "server")]
#[doc(hidden)]
pub mod fuzzing;
#[cfg(feature = "server")]
mod idempotency;
#[cfg(feature = "server")]
pub mod listen;
#[cfg(feature = "server")]
mod maintenance;
#[cfg(feature = "server")]
pub mod metrics;
#[cfg(feature = "server")]
mod mount_paths;
#[cfg(feature = "server")]
mod openapi;
#[cfg(feature = "server")]
pub mod options;
#[cfg(feature = "server")]
mod patient;
#[cfg(feature = "server")]
mod publishing;
#[cfg(feature = "server")]
mod readable;
#[cfg(feature = "server")]
mod references;
#[cfg(feature = "server")]
mod reserved;
#[cfg(feature = "server")]
mod router;
#[cfg(feature = "server")]
mod routes;
#[cfg(feature = "server")]
mod scope;
#[cfg(feature = "server")]
mod state;
#[cfg(feature = "server")]
mod token_id;
#[cfg(feature = "server")]
pub mod tokens;
#[cfg(feature = "server")]
pub mod workers;

#[cfg(feature = "server")]
pub use audit::{AuditLog, NewChange};
#[cfg(feature = "server")]
pub use auth::{VmstoreCredentials, require_tokens_for};
#[cfg(feature = "server")]
pub use listen::{ApiServerError, TlsFiles, read_certificates, run};
#[cfg(feature = "server")]
pub use metrics::MetricsSource;
#[cfg(feature = "server")]
pub use mount_paths::{Holder, MountPaths, PathUser};
#[cfg(feature = "server")]
pub use options::ApiOptions;
#[cfg(feature = "server")]
pub use readable::worker_reads;
#[cfg(feature = "server")]
pub use references::ReferenceKey;
#[cfg(feature = "server")]
pub use router::{router, router_and_metrics};
#[cfg(feature = "server")]
pub use token_id::TokenId;
#[cfg(feature = "server")]
pub use tokens::{Role, Secret, Token, TokenChanges, Tokens, TokensError};
#[cfg(feature = "server")]
pub use workers::{Workers, WorkersFile};
