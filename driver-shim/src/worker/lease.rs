//! The heartbeat: a small file on the appliance that tells who this worker is and when it was
//! last there, so that what a lost worker left behind can be found and taken back.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use slackwater_client::ClientError;
use slackwater_client::types::Timestamp;

use super::{Worker, now};

/// Time between two heartbeats.
pub const LEASE_INTERVAL: Duration = Duration::from_secs(60);

/// What the file holds, padded with spaces to a fixed size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// The machine's name.
    pub host: String,
    /// Release of the driver.
    pub version: String,
    /// When it was written.
    pub renewed_at: Timestamp,
}

/// Size of the file: more than the longest host name and version take.
pub(super) const LEASE_BYTES: usize = 512;

impl Lease {
    fn of_this_machine() -> Self {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let host = host.trim().chars().take(200).collect();
        Self { host, version: env!("CARGO_PKG_VERSION").to_owned(), renewed_at: now() }
    }

    fn to_bytes(&self) -> Bytes {
        // A struct of strings always has a JSON form.
        let mut bytes = serde_json::to_vec(self).unwrap_or_default();
        bytes.resize(LEASE_BYTES, b' ');
        bytes.into()
    }

    /// Reads what [`Self`] wrote.
    ///
    /// # Errors
    /// If it is something else.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(bytes)
    }
}

impl Worker {
    pub(super) fn start_lease(&self) {
        let inner = Arc::downgrade(&self.inner);
        tokio::spawn(async move {
            while let Some(inner) = inner.upgrade() {
                let worker = Self { inner };
                if let Err(error) = worker.renew_lease().await {
                    tracing::debug!(%error, "the heartbeat did not reach the appliance");
                }
                drop(worker);
                tokio::time::sleep(LEASE_INTERVAL).await;
            }
        });
    }

    async fn renew_lease(&self) -> Result<(), ClientError> {
        let path = format!("workers/{}/lease", self.worker_id());
        let bytes = Lease::of_this_machine().to_bytes();
        match self.client().write_bytes(&path, 0, bytes.clone()).await {
            Err(error) if error.is_not_found() => {
                let size_bytes = u64::try_from(bytes.len()).unwrap_or_default();
                self.client().create_file(&path, size_bytes).await?;
                self.client().write_bytes(&path, 0, bytes).await.map(|_| ())
            }
            outcome => outcome.map(|_| ()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_read_back_and_fits() {
        let lease = Lease::of_this_machine();
        let bytes = lease.to_bytes();
        assert_eq!(bytes.len(), LEASE_BYTES);
        assert_eq!(Lease::from_bytes(&bytes).unwrap(), lease);
        assert!(Lease::from_bytes(b"{}").is_err());
    }
}
