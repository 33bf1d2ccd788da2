//! Layers that workers have from each other, by chain id.
//!
//! ```text
//! an unpacker commits what it wrote       POST /v1/chains     one snapshot for the chain and this size of disk
//! an image by reference is made           PUT .../chains/ID   a snapshot that there is
//!
//! a layer is wanted                       GET /v1/chains/ID   or the snapshot that the manifest names
//!   one who registered it is trusted, and it is for all, or the registry
//!     lets this worker read its blob?     take it
//!   else                                  unpack
//! ```
//! A chain id says what a layer holds, and nothing proves that a snapshot holds that: it is the word of the worker
//! that unpacked it. The appliance records whose token gave it, and `trusted-makers` says whose word counts.

use std::collections::BTreeSet;
use std::time::Duration;

use slackwater_client::query::AddChain;
use slackwater_client::types::{
    ChainId, Labels, RegisterChain, RegistryBlob, Snapshot, SnapshotId,
};
use slackwater_client::{ClientError, ProblemCode};
use uuid::Uuid;

use super::appliance::is_image_above;
use super::imaging::IMAGE_SIZE_BYTES;
use super::volume::{LayerKind, SnapshotRef, Volume};
use super::{Worker, WorkerError};
use crate::trust::sharing::BelowIs;

/// Time for the questions about one layer, which has a few blobs at most: a pull waits for it.
const PROOF_TIME_MAX: Duration = Duration::from_secs(15);

/// What a disk is registered as.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registration {
    /// The chain.
    pub chain: ChainId,
    /// The blob of a private registry that it was unpacked from: the layer is for those who may read it. Without one
    /// it is for all.
    pub blob: Option<RegistryBlob>,
}

impl Registration {
    pub(super) fn request(&self, path: String, labels: Labels) -> RegisterChain {
        RegisterChain {
            path,
            chain_id: self.chain.clone(),
            blob: self.blob.clone(),
            labels,
            becomes_clone: false,
        }
    }
}

/// The blobs by which a snapshot is restricted, as whatever chain; `None` if it is a chain for all, or none at all.
fn restrictions(snapshot: &Snapshot) -> Option<BTreeSet<RegistryBlob>> {
    let is_open = |chain| !snapshot.restricted_chains.contains_key(chain);
    if snapshot.chains.is_empty() || snapshot.chains.keys().any(is_open) {
        return None;
    }
    Some(snapshot.restricted_chains.values().flatten().cloned().collect())
}

/// Whether a snapshot is not for all.
pub(super) fn is_for_some(snapshot: &Snapshot) -> bool {
    restrictions(snapshot).is_some()
}

impl Worker {
    /// The snapshot that is registered as a chain for disks of the size of this worker's, if one of its makers is
    /// trusted, and the layer is for this worker. An appliance of release 0.2 knows no chains.
    ///
    /// # Errors
    /// `Appliance`.
    pub async fn find_chain(&self, chain: &ChainId) -> Result<Option<SnapshotRef>, WorkerError> {
        self.find_chain_as(chain, LayerKind::Disks, None).await
    }

    /// The same of disks; or of images of the highest layer that were made above layers of the chain `below`.
    ///
    /// # Errors
    /// As [`Self::find_chain`].
    pub async fn find_chain_as(
        &self,
        chain: &ChainId,
        layers: LayerKind,
        below: Option<&str>,
    ) -> Result<Option<SnapshotRef>, WorkerError> {
        let size_bytes = match layers {
            LayerKind::Disks => self.disk_size_bytes(),
            LayerKind::Images => IMAGE_SIZE_BYTES,
        };
        let found = match self.client().chain(chain, size_bytes).await {
            Err(error) if error.is_not_found() || is_unknown_call(&error) => return Ok(None),
            outcome => outcome?,
        };
        if !self.trust().is_chain(&found, chain) {
            let makers = found.chains.get(chain);
            tracing::info!(%chain, snapshot = %found.id, ?makers,
                "the appliance has this layer, but trusted-makers names none who registered it: not taken");
            return Ok(None);
        }
        if layers == LayerKind::Images && !is_image_above(&found, below) {
            tracing::info!(%chain, snapshot = %found.id, below,
                "the appliance has an image of this layer that was made above other layers: not taken");
            return Ok(None);
        }
        let reference = SnapshotRef { id: found.id, size_bytes: found.size_bytes };
        Ok(self.may_have(&found, chain).await.then_some(reference))
    }

    /// Whether this worker may have a snapshot as a chain: it is for all, or a registry that `private-registries` lists
    /// lets it read a blob that the layer was unpacked from. A registry that cannot be asked lets nothing.
    pub async fn may_have(&self, snapshot: &Snapshot, chain: &ChainId) -> bool {
        let blobs = match snapshot.restricted_chains.get(chain) {
            Some(blobs) => blobs.clone(),
            None if snapshot.chains.contains_key(chain) => return true,
            // As release 0.2 said it.
            None => match restrictions(snapshot) {
                Some(blobs) => blobs,
                None => return true,
            },
        };
        let listed = blobs.iter().filter(|blob| self.trust().is_private(blob));
        let asked = tokio::time::timeout(PROOF_TIME_MAX, self.may_read_one(listed)).await;
        let may_have = asked.unwrap_or_default();
        if !may_have {
            tracing::info!(%chain, snapshot = %snapshot.id,
                "the appliance has this layer, for those who may pull it: not taken; see private-registries");
        }
        may_have
    }

    async fn may_read_one(&self, blobs: impl Iterator<Item = &RegistryBlob>) -> bool {
        for blob in blobs {
            match self.inner.options.registries.may_read(blob).await {
                Ok(true) => return true,
                Ok(false) => {
                    tracing::info!(%blob, "the registry does not let this worker read the blob");
                }
                Err(error) => tracing::warn!(%blob, %error, "cannot ask the registry of a layer"),
            }
        }
        false
    }

    /// For whom a committed layer is, which has this chain id, and was kept at first if it `was_private`.
    ///
    /// # Errors
    /// `NotFound`, `Appliance`.
    pub(crate) async fn below_is(
        &self,
        layer: &Volume,
        chain: Option<&ChainId>,
        was_private: bool,
    ) -> Result<BelowIs, WorkerError> {
        let Some((snapshot, chain)) = self.layer_of(&layer.key)?.zip(chain) else {
            return Ok(if was_private { BelowIs::Kept } else { BelowIs::ForAll });
        };
        let snapshot = match self.look_up(snapshot.id).await {
            // Its clones outlive it.
            Err(WorkerError::UnknownSnapshot { .. }) => return Ok(BelowIs::Kept),
            outcome => outcome?,
        };
        if let Some(blobs) = snapshot.restricted_chains.get(chain) {
            return Ok(BelowIs::ForReaders(blobs.clone()));
        }
        if snapshot.chains.contains_key(chain) {
            return Ok(BelowIs::ForAll);
        }
        // It was bound by a reference, or is registered by none who is trusted.
        Ok(match restrictions(&snapshot) {
            Some(blobs) => BelowIs::ForReaders(blobs),
            None if was_private => BelowIs::Kept,
            None => BelowIs::ForAll,
        })
    }

    /// Whether a snapshot is not for all.
    ///
    /// # Errors
    /// `UnknownSnapshot`, `Appliance`.
    pub(crate) async fn is_restricted(&self, id: SnapshotId) -> Result<bool, WorkerError> {
        Ok(is_for_some(&self.look_up(id).await?))
    }

    /// Adds to those whom a layer is for those who may read the blob that this worker has unpacked, and compared. Those
    /// of another registry do not make it one for all: the blob need not have come from there.
    pub(super) async fn widen(&self, found: &Snapshot, registration: &Registration) {
        let Registration { chain, blob: Some(blob) } = registration else { return };
        let known = found.restricted_chains.get(chain);
        if known.is_none_or(|known| known.contains(blob)) {
            return;
        }
        let query = AddChain { blob: Some(blob.clone()), is_for_all: false };
        if let Err(error) = self.client().add_chain(found.id, chain, &query).await {
            tracing::warn!(%chain, snapshot = %found.id, %error,
                "others cannot have this layer by the way that this worker pulled it");
        }
    }

    /// Registers a snapshot as a chain, for those that find it by the annotation of an image. For whom the layer is
    /// stays as it was.
    ///
    /// # Errors
    /// `UnknownSnapshot`, `Appliance`, `OldAppliance`.
    pub async fn add_chain(&self, id: SnapshotId, chain: &ChainId) -> Result<(), WorkerError> {
        match self.client().add_chain(id, chain, &AddChain::default()).await {
            Ok(_) => Ok(()),
            Err(error) if error.is_not_found() => Err(self.unknown(id)),
            Err(error) => Err(self.refused(error)),
        }
    }

    /// Takes a snapshot of a disk, and registers it as a chain.
    pub(super) async fn register(
        &self,
        disk: Uuid,
        registration: &Registration,
        labels: Labels,
    ) -> Result<Snapshot, ClientError> {
        self.client().register_chain(&registration.request(self.disk_path(disk), labels)).await
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
