//! What a handle leads to, by how it was mounted.
//!
//! ```text
//! MNT EXPORT                    by address    handles without a scope: all of the store
//! MNT EXPORT/.export/SECRET  \ MountGate::enter --> handles with a scope: all of the store
//! MNT EXPORT/.worker/SECRET  /                                          what one worker reaches
//!
//! worker's root -+- .snapshot/ID         the snapshots that it reads, read-only
//!                +- workers -- ID -+- ... its own files
//! ```
//! A handle with a scope leads to handles of the same scope alone. A worker's root and `workers` are not the store's
//! directories of these names but views of them with what belongs to the worker, so that nothing that is renamed or made
//! there leads anywhere else.
//!
//! Invariants: the scope is in the handle, under its MAC. Each call asks whether its holder may still mount. A call whose
//! handles are of two scopes is refused.

use std::fmt;
use std::net::IpAddr;

use slackwater_blockstore::{Result as StoreResult, SnapshotId};
use uuid::Uuid;

/// The name below the export under which workers mount.
pub(crate) const WORKER_MOUNTS: &[u8] = b".worker";

/// The name below the export under which those who may reach all of it mount.
pub(crate) const EXPORT_MOUNTS: &[u8] = b".export";

/// The directory that has the files of workers, by their ids.
pub(crate) const WORKERS_NAME: &[u8] = b"workers";

/// What a mount by a secret path reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MountScope {
    /// All of the store, for the holder with this id.
    Export([u8; 16]),
    /// The files of the worker with this id, which is the name of their directory, and the snapshots that it reads.
    Worker(Uuid),
}

impl MountScope {
    /// The name below the export under which it is mounted.
    pub(crate) const fn mounts(self) -> &'static [u8] {
        match self {
            Self::Export(_) => EXPORT_MOUNTS,
            Self::Worker(_) => WORKER_MOUNTS,
        }
    }
}

/// The other end of a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mounter {
    /// Its address; one of IPv4 in that form.
    pub address: IpAddr,
    /// It calls from a port that only root opens (below 1024), as far as its machine keeps to that.
    pub has_privileged_port: bool,
}

/// Knows the secret paths, and who may mount. Asked on threads that take calls: it does not wait for the disk.
pub trait MountGate: fmt::Debug + Send + Sync {
    /// What this mounter mounts with this secret, if anything may be now. The secret counts as used, whatever becomes
    /// of it.
    fn enter(&self, secret: &[u8], mounter: Mounter) -> Option<MountScope>;

    /// Whether what was mounted with this scope may still be reached.
    fn is_admitted(&self, scope: MountScope) -> bool;

    /// Whether the worker with this id reads the snapshot. Asked when the snapshot is looked up: its handle is good from
    /// then on. May wait for the disk.
    ///
    /// # Errors
    /// The store's, also if there is no such snapshot.
    fn reads_snapshot(&self, worker_id: Uuid, snapshot: SnapshotId) -> StoreResult<bool>;
}
