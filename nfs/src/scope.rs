//! What a handle leads to: all of the store, or what one worker reaches.
//!
//! ```text
//! MNT EXPORT/.worker/SECRET --WorkerGate::enter--> handle of the worker's root, with its scope
//!
//! worker's root -+- .snapshot/ID         all snapshots, read-only
//!                +- workers -- ID -+- ... its own files
//! ```
//! A handle with a scope leads to handles of the same scope alone. The root and `workers` are not the store's directories
//! of these names but views of them with what belongs to the worker, so that nothing that is renamed or made there leads
//! anywhere else.
//!
//! Invariants: the scope is in the handle, under its MAC. Each call asks whether the worker is still one. A call whose
//! handles are of two scopes is refused.

use std::fmt;

use uuid::Uuid;

/// The name below the export under which workers mount.
pub(crate) const MOUNT_NAME: &[u8] = b".worker";

/// The directory that has the files of workers, by their ids.
pub(crate) const WORKERS_NAME: &[u8] = b"workers";

/// What the worker with this id reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WorkerScope {
    /// Its id, which is the name of the directory of its files.
    pub worker_id: Uuid,
}

impl WorkerScope {
    /// That of the worker whose id has these bytes.
    pub(crate) const fn of(worker_id: [u8; 16]) -> Self {
        Self { worker_id: Uuid::from_bytes(worker_id) }
    }

    /// The name of the directory of its files, below [`WORKERS_NAME`].
    pub(crate) fn directory_name(self) -> String {
        self.worker_id.hyphenated().to_string()
    }
}

/// Knows the workers. Asked on threads that take calls: it does not wait for the disk.
pub trait WorkerGate: fmt::Debug + Send + Sync {
    /// The worker that mounts with this secret, if it may now.
    fn enter(&self, secret: &[u8]) -> Option<WorkerScope>;

    /// Whether this is still a worker.
    fn is_admitted(&self, scope: WorkerScope) -> bool;
}
