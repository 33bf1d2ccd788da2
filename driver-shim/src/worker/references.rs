//! Which references this worker takes for the snapshots that they name.
//!
//! A reference is a few bytes in a layer, and what runs in a container or in a step of a build can
//! write them with any id. So that a snapshot has this id says nothing:
//!
//! ```text
//!  the snapshot is published           someone with the appliance's token gave it to others
//!  this worker has just written it     `docker commit` and builds read a layer's tar and unpack
//!                                      it again at once
//!  anything else                       refused
//! ```
//!
//! A published snapshot can still be named by all who know its id, as if they had pulled it.

use std::collections::HashMap;
use std::time::Instant;

use parking_lot::Mutex;
use slackwater_archive::Reference;
use slackwater_client::types::SnapshotId;

use super::reap::CAPTURE_AGE_MAX;
use super::{Worker, WorkerError};

/// How many references that were not unpacked yet are remembered: far more than an engine commits
/// at once.
const WRITTEN_MAX: usize = 1024;

/// The snapshots of references that this process wrote, with when; the youngest of them.
#[derive(Debug, Default)]
pub(super) struct Written(Mutex<HashMap<SnapshotId, Instant>>);

impl Written {
    fn add(&self, snapshot: SnapshotId) {
        let mut written = self.0.lock();
        written.retain(|_, at| at.elapsed() < CAPTURE_AGE_MAX);
        while written.len() >= WRITTEN_MAX {
            let oldest = written.iter().min_by_key(|(_, at)| **at).map(|(id, _)| *id);
            let Some(oldest) = oldest else { break };
            written.remove(&oldest);
        }
        written.insert(snapshot, Instant::now());
    }

    fn has(&self, snapshot: SnapshotId) -> bool {
        self.0.lock().get(&snapshot).is_some_and(|at| at.elapsed() < CAPTURE_AGE_MAX)
    }
}

impl Worker {
    /// A reference to a snapshot, which this worker takes back for two minutes although it is not
    /// published.
    ///
    /// # Errors
    /// `Appliance`, as long as it was never reached.
    pub async fn write_reference(
        &self,
        snapshot: SnapshotId,
        size_bytes: u64,
    ) -> Result<Reference, WorkerError> {
        let store_id = self.store_id().await?;
        self.inner.written.add(snapshot);
        let snapshot_id = uuid::Uuid::from_bytes(*snapshot.as_bytes());
        Ok(Reference { store_id, snapshot_id, size_bytes })
    }

    /// The snapshot that a reference in a layer is to be taken for.
    ///
    /// # Errors
    /// `OtherStore`, `UnknownSnapshot`; `NotPublished` if anything could have written it; `Appliance`.
    pub async fn believe(&self, reference: &Reference) -> Result<SnapshotId, WorkerError> {
        let expected = self.store_id().await?;
        if reference.store_id != expected {
            return Err(WorkerError::OtherStore { got: reference.store_id.clone(), expected });
        }
        let id = SnapshotId::from_bytes(*reference.snapshot_id.as_bytes());
        if self.inner.written.has(id) || self.is_published(id).await? {
            return Ok(id);
        }
        match self.client().snapshot(id).await {
            Ok(_) => Err(WorkerError::NotPublished { id }),
            Err(error) if error.is_not_found() => Err(self.unknown(id)),
            Err(source) => Err(source.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_youngest_are_remembered() {
        let written = Written::default();
        let id = |number: usize| {
            let number = u128::try_from(number).expect("a usize fits");
            SnapshotId::from_bytes(number.to_le_bytes())
        };
        for number in 0..=WRITTEN_MAX {
            written.add(id(number));
        }
        assert_eq!(written.0.lock().len(), WRITTEN_MAX);
        assert!(!written.has(id(0)) && written.has(id(1)) && written.has(id(WRITTEN_MAX)));
        assert!(!written.has(id(WRITTEN_MAX + 1)));
    }

    #[test]
    fn they_are_forgotten_in_time() {
        let written = Written::default();
        let id = SnapshotId::from_bytes([7; 16]);
        let Some(long_ago) = Instant::now().checked_sub(CAPTURE_AGE_MAX) else { return };
        written.0.lock().insert(id, long_ago);
        assert!(!written.has(id));
        written.add(SnapshotId::from_bytes([8; 16]));
        assert_eq!(written.0.lock().len(), 1);
    }
}
