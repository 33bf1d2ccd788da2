//! Layers that workers have from each other, by chain id.
//!
//! ```text
//! an unpacker commits what it wrote       POST /v1/chains     one snapshot for the chain and this size of disk
//! an image by reference is made           PUT .../chains/ID   a snapshot that there is
//!
//! a layer is wanted                       GET /v1/chains/ID   or the snapshot that the manifest names
//!   one who registered it is trusted?     take it
//!   else                                  unpack
//! ```
//! A chain id says what a layer holds, and nothing proves that a snapshot holds that: it is the word of the worker
//! that unpacked it. The appliance records whose token gave it, and `trusted-makers` says whose word counts.

use slackwater_client::types::{ChainId, Labels, RegisterChain, Snapshot, SnapshotId};
use slackwater_client::{ClientError, ProblemCode};
use uuid::Uuid;

use super::appliance::WORKER_LABEL;
use super::volume::SnapshotRef;
use super::{Worker, WorkerError};

impl Worker {
    /// The snapshot that is registered as a chain for disks of the size of this worker's, if one of its makers is
    /// trusted. An appliance of release 0.2 knows no chains.
    ///
    /// # Errors
    /// `Appliance`.
    pub async fn find_chain(&self, chain: &ChainId) -> Result<Option<SnapshotRef>, WorkerError> {
        let found = match self.client().chain(chain, self.disk_size_bytes()).await {
            Err(error) if error.is_not_found() || is_unknown_call(&error) => return Ok(None),
            outcome => outcome?,
        };
        if !self.trust().is_chain(&found, chain) {
            let makers = found.chains.get(chain);
            tracing::info!(%chain, snapshot = %found.id, ?makers,
                "the appliance has this layer, but trusted-makers names none who registered it: not taken");
            return Ok(None);
        }
        Ok(Some(SnapshotRef { id: found.id, size_bytes: found.size_bytes }))
    }

    /// Registers a snapshot as a chain, for those that find it by the annotation of an image.
    ///
    /// # Errors
    /// `UnknownSnapshot`, `Appliance`, `OldAppliance`.
    pub async fn add_chain(&self, id: SnapshotId, chain: &ChainId) -> Result<(), WorkerError> {
        match self.client().add_chain(id, chain).await {
            Ok(_) => Ok(()),
            Err(error) if error.is_not_found() => Err(self.unknown(id)),
            Err(error) => Err(self.refused(error)),
        }
    }

    /// Takes a snapshot of a disk, and registers it as a chain.
    pub(super) async fn register(
        &self,
        disk: Uuid,
        chain: &ChainId,
    ) -> Result<Snapshot, ClientError> {
        let request = RegisterChain {
            path: self.disk_path(disk),
            chain_id: chain.clone(),
            labels: Labels::from([(WORKER_LABEL.to_owned(), self.worker_id().to_string())]),
        };
        self.client().register_chain(&request).await
    }

    /// What to say of a call that failed, maybe because the appliance does not know it.
    pub(super) fn refused(&self, error: ClientError) -> WorkerError {
        if is_unknown_call(&error) {
            return WorkerError::OldAppliance { appliance: self.client().url().to_owned() };
        }
        error.into()
    }
}

/// Whether the appliance does not know the call: it is of an older release.
fn is_unknown_call(error: &ClientError) -> bool {
    error.code() == Some(ProblemCode::UnknownRoute)
}
