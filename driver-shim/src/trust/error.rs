//! Why an input of an image is not trusted.

use slackwater_client::types::{ChainId, SnapshotId};

/// Why a reference or an annotation is not taken. The text is what a user of an engine reads.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum TrustError {
    /// It names a snapshot of another appliance.
    #[error(
        "the image refers to the appliance with store id {}, but this worker's appliance has {expected}: pull it on a worker of that appliance, or export it to ordinary layers there",
        got.escape_debug()
    )]
    OtherStore {
        /// The store that is named.
        got: String,
        /// The store of this worker's appliance.
        expected: String,
    },
    /// A reference has no MAC.
    #[error(
        "the image refers to snapshot {id} as release 0.2 did, without a message authentication code (MAC) of the appliance, so anything may have written that reference: make the image again by `slackwater-driver image convert` on a worker that has it, or set insecure-references-without-mac"
    )]
    WithoutMac {
        /// The snapshot.
        id: SnapshotId,
    },
    /// A reference has another MAC or size than the appliance gives it.
    #[error(
        "the image refers to snapshot {id}, but not by a reference of this appliance: it was forged, or the appliance's file reference-key was lost; if it was, make the image again by `slackwater-driver image convert` on a worker that has it"
    )]
    Forged {
        /// The snapshot.
        id: SnapshotId,
    },
    /// It names a snapshot that is not published.
    #[error(
        "the image refers to snapshot {id}, which is not published: what ran in a container may have written that reference; if the image was pushed from a worker, push it there again, or see `slackwater-driver image published`"
    )]
    NotPublished {
        /// The snapshot.
        id: SnapshotId,
    },
    /// An annotation names a snapshot that is not known to be the layer.
    #[error(
        "snapshot {id} is not registered as layer {chain}, or by none whom trusted-makers names"
    )]
    NotThisChain {
        /// The snapshot.
        id: SnapshotId,
        /// The layer.
        chain: ChainId,
    },
    /// An annotation names a layer that is for those who may pull it.
    #[error(
        "snapshot {id} is layer {chain} of a registry that does not let this worker read it: see private-registries"
    )]
    NotForThisWorker {
        /// The snapshot.
        id: SnapshotId,
        /// The layer.
        chain: ChainId,
    },
    /// An annotation gives another size than the snapshot has.
    #[error("snapshot {id} has {expected} bytes, and not {got} as the image says")]
    OtherSize {
        /// The snapshot.
        id: SnapshotId,
        /// What was said.
        got: u64,
        /// What it has.
        expected: u64,
    },
}
