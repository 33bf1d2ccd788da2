//! The snapshotter plugin of containerd: its snapshots are volumes of the worker.
//!
//! ```text
//! server      the gRPC face: paths, limits, codes
//!    |
//! snapshotter one method a call: Prepare, View, Mounts, Commit, Remove, Stat, Update, List, ...
//!    |    \
//! remote   labels  filter     images that are on the appliance already;  what containerd sends
//!    |   \
//!    |   link_target            what lets containerd unpack a reference
//!    |
//! worker/
//!
//! diff        the layer of what a snapshot has and another has not, written into containerd's content store
//! apply       a layer that containerd has fetched, and the appliance has: compared, not unpacked
//! ```
//!
//! - A name is opaque: it is a key of the worker's volumes and never part of a path.
//! - Prepare and View answer when their directory is mounted; Mounts mounts it again after a
//!   restart of the machine.
//! - A layer's snapshot is shared under its chain id only if every layer below it is true to its
//!   chain id too ([`ChainId`](slackwater_client::types::ChainId)).

mod apply;
mod diff;
pub(crate) mod docker_init;
mod error;
mod filter;
mod labels;
mod link_target;
mod namespaces;
mod own_disk;
pub mod proto;
mod remote;
mod server;
mod snapshotter;

pub use diff::DIFF_SERVICE;
pub use error::{CallError, ServeError};
pub use namespaces::Namespaces;
pub use server::{ContainerdOptions, SERVICE, serve};
