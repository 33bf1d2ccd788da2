//! Takes the snapshot of a disk or an image that is sealed, or finds the one that is registered as its chain.

use std::path::Path;

use slackwater_client::ProblemCode;
use slackwater_client::types::Snapshot;
use uuid::Uuid;

use super::appliance::{existing_id, is_image_above};
use super::chains::Registration;
use super::sealed::Hold;
use super::state::FileKind;
use super::{Worker, WorkerError};

/// How often a snapshot is taken because the one that was registered as its chain went away.
const CHAIN_ATTEMPTS_MAX: u32 = 5;

/// What becomes a snapshot.
pub(super) enum Sealing<'a> {
    /// A disk, mounted there.
    Disk { target: &'a Path, name: Uuid },
    /// An image that is written, above layers of this chain.
    Image { name: Uuid, inodes: u64, below: Option<String> },
}

/// What a call for a snapshot came to.
enum Taken {
    /// A new one, with the file that became its clone.
    New(Snapshot, Option<Uuid>),
    /// There is one that is registered as the chain.
    InTheWay(Snapshot),
}

impl Worker {
    /// A snapshot of the disk or image, and what keeps it. With a chain that is registered: its
    /// snapshot; should that one go away in between, once more.
    pub(super) async fn snapshot_and_hold(
        &self,
        sealing: &Sealing<'_>,
        chain: Option<&Registration>,
    ) -> Result<(Snapshot, Hold), WorkerError> {
        let mut attempt = 1;
        loop {
            let error = match self.take_or_find(sealing, chain).await {
                Ok((snapshot, Some(file))) => return Ok((snapshot, Hold::File(file))),
                Ok((snapshot, None)) => match self.clone_as(FileKind::Hold, snapshot.id).await {
                    Ok(making) => return Ok((snapshot, Hold::Clone(making))),
                    Err(error) => error,
                },
                Err(error) => error,
            };
            let went_away = match &error {
                WorkerError::UnknownSnapshot { .. } => true,
                WorkerError::Appliance { source } => source.code() == Some(ProblemCode::Exists),
                _ => false,
            };
            if !went_away || attempt >= CHAIN_ATTEMPTS_MAX {
                return Err(error);
            }
            attempt += 1;
        }
    }

    /// A new snapshot, or the one that is registered as the chain already, unless none of its makers is
    /// trusted; with the file that is its clone, if that is its own.
    async fn take_or_find(
        &self,
        sealing: &Sealing<'_>,
        chain: Option<&Registration>,
    ) -> Result<(Snapshot, Option<Uuid>), WorkerError> {
        let is_alike = |found: &Snapshot| match sealing {
            Sealing::Disk { .. } => found.size_bytes == self.disk_size_bytes(),
            Sealing::Image { below, .. } => is_image_above(found, below.as_deref()),
        };
        let reason = match (self.take(sealing, chain).await, chain) {
            (Ok(Taken::New(snapshot, file)), _) => return Ok((snapshot, file)),
            (Ok(Taken::InTheWay(found)), Some(registration)) => {
                if self.trust().is_chain(&found, &registration.chain) && is_alike(&found) {
                    self.widen(&found, registration).await;
                    return Ok((found, None));
                }
                let id = found.id;
                format!("snapshot {id} is registered for it, by none whom trusted-makers names")
            }
            (Ok(Taken::InTheWay(found)), None) => return Err(self.unknown(found.id)),
            (Err(error @ WorkerError::OldAppliance { .. }), Some(_)) => error.to_string(),
            (Err(error), _) => return Err(error),
        };
        let chain = chain.map(|registration| registration.chain.as_str());
        tracing::warn!(chain, reason, "this worker keeps the layer for itself");
        match self.take(sealing, None).await? {
            Taken::New(snapshot, file) => Ok((snapshot, file)),
            Taken::InTheWay(found) => Err(self.unknown(found.id)),
        }
    }

    /// Takes a snapshot, and registers it as the chain. An image's file becomes its clone.
    async fn take(
        &self,
        sealing: &Sealing<'_>,
        chain: Option<&Registration>,
    ) -> Result<Taken, WorkerError> {
        let (taken, file) = match sealing {
            Sealing::Disk { target, name } => {
                let taking = self.take_frozen(target, async |inodes| {
                    let taken = match chain {
                        Some(chain) => {
                            self.register(*name, chain, self.labels_of_snapshot(inodes)).await
                        }
                        None => self.take_snapshot(*name, inodes).await,
                    };
                    taken.map_err(|error| self.refused(error))
                });
                (taking.await.map(|(snapshot, _)| snapshot), None)
            }
            Sealing::Image { name, inodes, below } => {
                let labels = self.labels_of_image(*inodes, below.as_deref());
                let taken = self.take_image(*name, chain, labels).await;
                (taken.map_err(|error| self.refused(error)), Some(*name))
            }
        };
        match taken {
            // An older appliance makes no clone of it.
            Ok(snapshot) => {
                let file = file.filter(|_| snapshot.clone_count > 0);
                Ok(Taken::New(snapshot, file))
            }
            Err(WorkerError::Appliance { source }) => {
                let Some(id) = existing_id(&source) else { return Err(source.into()) };
                let found = self.look_up(id).await?;
                // An earlier call was carried out, and its answer lost.
                let is_own =
                    |name: &Uuid| found.path == self.image_path(*name) && found.clone_count > 0;
                match file.filter(is_own) {
                    Some(file) => Ok(Taken::New(found, Some(file))),
                    None => Ok(Taken::InTheWay(found)),
                }
            }
            Err(error) => Err(error),
        }
    }
}
