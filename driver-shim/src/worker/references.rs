//! References: made by the appliance, and bound if `trust` verifies them.

use std::collections::HashMap;
use std::time::Instant;

use parking_lot::Mutex;
use slackwater_archive::Reference;
use slackwater_client::types::SnapshotId;

use super::reap::CAPTURE_AGE_MAX;
use super::{Worker, WorkerError};
use crate::trust::{TrustError, reference};

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
    /// A reference to a snapshot. For two minutes this worker binds it although the snapshot is not
    /// published.
    ///
    /// # Errors
    /// As [`Self::reference_to`].
    pub async fn write_reference(&self, snapshot: SnapshotId) -> Result<Reference, WorkerError> {
        let reference = self.reference_to(snapshot).await?;
        self.inner.written.add(snapshot);
        Ok(reference)
    }

    /// The reference to a snapshot, as the appliance makes it.
    ///
    /// # Errors
    /// `UnknownSnapshot`, `Appliance`; `OldAppliance`, `BadMac` if it gives none.
    pub async fn reference_to(&self, snapshot: SnapshotId) -> Result<Reference, WorkerError> {
        let made = match self.client().snapshot_reference(snapshot).await {
            Ok(made) => made,
            Err(error) if error.is_not_found() => return Err(self.unknown(snapshot)),
            // It is there, and was shared with this worker if it was published.
            Err(error) if self.is_out_of_reach(&error) => {
                return Err(TrustError::NotPublished { id: snapshot }.into());
            }
            Err(error) => return Err(self.refused(error)),
        };
        let mac =
            made.mac.parse().map_err(|source| WorkerError::BadMac { id: snapshot, source })?;
        Ok(Reference {
            store_id: made.store_id,
            snapshot_id: uuid::Uuid::from_bytes(*made.snapshot_id.as_bytes()),
            size_bytes: made.size_bytes,
            mac: Some(mac),
        })
    }

    /// The snapshot that a reference in a layer is to be taken for.
    ///
    /// # Errors
    /// `Untrusted`, `UnknownSnapshot`, `Appliance`.
    pub async fn believe(&self, reference: &Reference) -> Result<SnapshotId, WorkerError> {
        self.trust().verify_form(reference, &self.store_id().await?)?;
        let id = reference::snapshot_of(reference);
        reference::verify_mac(reference, self.reference_to(id).await?)?;
        let is_published = self.inner.written.has(id) || self.is_published(id).await?;
        reference::verify_published(id, is_published)?;
        Ok(id)
    }
}

#[cfg(test)]
mod tests {
    use slackwater_client::{Client, RetryPolicy, Token};

    use super::*;
    use crate::worker::reap::tests::{answering, problem, worker, worker_with};
    use crate::worker::state::FileKind;
    use crate::worker::state::failing::FailingDisk;

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

    #[tokio::test]
    async fn why_the_appliance_gives_no_reference() {
        let asked = async |answer: String| {
            let (url, _) = answering(answer, || {}).await;
            let worker = worker(&url, &FailingDisk::new());
            worker.reference_to(SnapshotId::from_bytes([7; 16])).await
        };
        let old = asked(problem(404, "unknown_route")).await.unwrap_err();
        assert!(matches!(old, WorkerError::OldAppliance { .. }), "{old}");
        let unknown = asked(problem(404, "not_found")).await.unwrap_err();
        assert!(matches!(unknown, WorkerError::UnknownSnapshot { .. }), "{unknown}");
        let full = asked(problem(507, "no_space")).await.unwrap_err();
        assert!(matches!(full, WorkerError::Appliance { .. }), "{full}");
        let id = uuid::Uuid::from_bytes([7; 16]);
        let answer = |mac: &str| {
            let body = format!(
                r#"{{"store_id":"store","snapshot_id":"{id}","size_bytes":4096,"mac":"{mac}"}}"#
            );
            let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n";
            format!("{head}content-length: {}\r\n\r\n{body}", body.len())
        };
        let bad = asked(answer("short")).await.unwrap_err();
        assert!(matches!(bad, WorkerError::BadMac { .. }), "{bad}");
        let good = asked(answer(&"07".repeat(32))).await.unwrap();
        assert_eq!((good.snapshot_id, good.size_bytes), (id, 4096));
        assert_eq!(good.mac, Some("07".repeat(32).parse().unwrap()));
    }

    #[tokio::test]
    async fn a_snapshot_that_is_not_shared_is_none_for_a_worker() {
        let credential = format!("slackwater-worker-{}", "5a".repeat(32));
        for (token, is_worker) in [(credential.as_str(), true), ("a-token-0123456789", false)] {
            let (url, _) = answering(problem(403, "forbidden"), || {}).await;
            let client = Client::builder(url).retry(RetryPolicy::never());
            let client = client.token(Token::new(token).unwrap()).build().unwrap();
            let worker = worker_with(client, &FailingDisk::new());
            let id = SnapshotId::from_bytes([7; 16]);
            let unknown = |error: WorkerError| {
                let is_unknown = matches!(error, WorkerError::UnknownSnapshot { .. });
                assert_eq!(is_unknown, is_worker, "{token}: {error}");
            };
            // As of one that was deleted: what falls back to unpacking then, does here as well.
            unknown(worker.look_up(id).await.unwrap_err());
            unknown(worker.publish(id).await.unwrap_err());
            unknown(worker.clone_as(FileKind::Hold, id).await.map(drop).unwrap_err());
            let refused = worker.reference_to(id).await.unwrap_err();
            let is_unpublished = matches!(
                refused,
                WorkerError::Untrusted { source: TrustError::NotPublished { .. } }
            );
            assert_eq!(is_unpublished, is_worker, "{token}: {refused}");
        }
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
