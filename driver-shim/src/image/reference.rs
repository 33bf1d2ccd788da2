//! Layers that name snapshots.

use slackwater_archive::Reference;
use uuid::Uuid;

use super::digest::Digest;
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
    pub(super) fn new(store_id: &str, snapshot: SnapshotRef) -> Self {
        let snapshot_id = Uuid::from_bytes(*snapshot.id.as_bytes());
        let size_bytes = snapshot.size_bytes;
        let reference = Reference { store_id: store_id.to_owned(), snapshot_id, size_bytes };
        let archive = reference.to_archive();
        let diff_id = Digest::of(&archive);
        let annotation = format!("{store_id}/{}/{size_bytes}", snapshot.id);
        Self { snapshot, archive, diff_id, annotation }
    }
}

/// The digests of the layers, as a configuration lists them.
pub(super) fn diff_ids(layers: &[ReferenceLayer]) -> Vec<String> {
    layers.iter().map(|layer| layer.diff_id.to_string()).collect()
}
