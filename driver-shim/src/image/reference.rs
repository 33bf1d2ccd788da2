//! Layers that name snapshots.

use slackwater_archive::Reference;

use super::digest::Digest;
use crate::engine::EngineError;
use crate::engine::daemon::Daemon;
use crate::worker::SnapshotRef;

/// A layer that names a snapshot.
#[derive(Clone, Debug)]
pub(super) struct ReferenceLayer {
    pub(super) snapshot: SnapshotRef,
    /// Its archive, the same for the same snapshot everywhere.
    pub(super) archive: Vec<u8>,
    /// The digest of the archive.
    pub(super) diff_id: Digest,
    /// What tells the snapshot to a snapshotter before the archive is fetched.
    pub(super) annotation: String,
}

impl ReferenceLayer {
    /// `reference` is the one to `snapshot`.
    pub(super) fn new(reference: &Reference, snapshot: SnapshotRef) -> Self {
        let archive = reference.to_archive();
        let diff_id = Digest::of(&archive);
        let Reference { store_id, snapshot_id, size_bytes, .. } = reference;
        let annotation = format!("{store_id}/{snapshot_id}/{size_bytes}");
        Self { snapshot, archive, diff_id, annotation }
    }
}

/// A layer for each snapshot.
///
/// # Errors
/// The daemon or the appliance does not give a reference.
pub(super) async fn layers(
    daemon: &Daemon,
    snapshots: &[SnapshotRef],
) -> Result<Vec<ReferenceLayer>, EngineError> {
    let mut layers = Vec::with_capacity(snapshots.len());
    for snapshot in snapshots {
        let reference = daemon.reference(snapshot.id).await?;
        layers.push(ReferenceLayer::new(&reference, *snapshot));
    }
    Ok(layers)
}

/// The digests of the layers, as a configuration lists them.
pub(super) fn diff_ids(layers: &[ReferenceLayer]) -> Vec<String> {
    layers.iter().map(|layer| layer.diff_id.to_string()).collect()
}
