//! A worker as the file has it.
//!
//! ```json
//! {"version": 1, "workers": [{
//!   "name": "node-7", "created_at": "2026-11-26T09:00:00.000000000Z",
//!   "join": {"blake3": "...", "expires_at": "2026-11-27T09:00:00.000000000Z", "used_for": "..."},
//!   "worker_id": "6f1f...", "joined_at": "...", "credential": {"blake3": "...", "since": "..."}, "previous": "..."
//! }]}
//! ```

use std::collections::HashSet;
use std::io;

use serde::{Deserialize, Serialize};

use super::error::{WorkersError, WorkersFileError};
use super::{WORKERS_FILE_BYTES_MAX, WORKERS_MAX};
use crate::types::Timestamp;
use crate::worker::{SecretHash, WorkerName};

/// The version that is written, and the only one that is read.
const VERSION: u32 = 1;

/// A worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Record {
    pub(super) name: WorkerName,
    pub(super) created_at: Timestamp,
    pub(super) join: Join,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) worker_id: Option<uuid::Uuid>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) joined_at: Option<Timestamp>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) credential: Option<Credential>,
    /// The previous credential, until the current one was used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) previous: Option<SecretHash>,
}

/// Its join token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Join {
    pub(super) blake3: SecretHash,
    pub(super) expires_at: Timestamp,
    /// The credential that it was exchanged for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) used_for: Option<SecretHash>,
}

/// Its credential.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Credential {
    pub(super) blake3: SecretHash,
    pub(super) since: Timestamp,
}

#[derive(Deserialize)]
struct Version {
    version: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Content<R> {
    version: u32,
    workers: Vec<R>,
}

impl Record {
    /// One that was added now.
    pub(super) fn new(
        name: WorkerName,
        worker_id: Option<uuid::Uuid>,
        created_at: Timestamp,
        join_token: SecretHash,
        expires_at: Timestamp,
    ) -> Self {
        let join = Join { blake3: join_token, expires_at, used_for: None };
        Self {
            name,
            created_at,
            join,
            worker_id,
            joined_at: None,
            credential: None,
            previous: None,
        }
    }

    /// The hashes of all that its machine can present.
    pub(super) fn secrets(&self) -> impl Iterator<Item = SecretHash> {
        let current = self.credential.map(|current| current.blake3);
        [Some(self.join.blake3), current, self.previous].into_iter().flatten()
    }

    /// Whether this is its credential, or the previous one that still counts.
    pub(super) fn has(&self, credential: SecretHash) -> bool {
        self.credential.is_some_and(|current| current.blake3 == credential)
            || self.previous == Some(credential)
    }

    /// Whether the join token is this one, and its time has not passed. [`Self::join`] refuses one that was used.
    pub(super) fn is_invited_by(&self, token: SecretHash, now: Timestamp) -> bool {
        self.join.blake3 == token && now < self.join.expires_at
    }

    /// Takes the credential that a join token is exchanged for.
    pub(super) fn join(
        &mut self,
        join_token: SecretHash,
        worker_id: uuid::Uuid,
        credential: SecretHash,
        now: Timestamp,
    ) -> Result<(), WorkersError> {
        // The worker may have been revoked and added again since the caller was identified.
        if !self.is_invited_by(join_token, now) {
            return Err(WorkersError::Outdated { name: self.name.clone() });
        }
        let is_same = self.join.used_for == Some(credential) && self.worker_id == Some(worker_id);
        match self.joined_at {
            Some(_) if is_same && self.has(credential) => Ok(()),
            Some(joined_at) => {
                Err(WorkersError::JoinTokenUsed { name: self.name.clone(), joined_at })
            }
            None => {
                self.join.used_for = Some(credential);
                self.worker_id = Some(worker_id);
                self.joined_at = Some(now);
                self.credential = Some(Credential { blake3: credential, since: now });
                Ok(())
            }
        }
    }

    /// Replaces the credential for a caller that presented `presented`.
    ///
    /// The previous one replaces none: one that was stolen must not take the worker's place.
    pub(super) fn replace(
        &mut self,
        presented: SecretHash,
        next: SecretHash,
        now: Timestamp,
    ) -> Result<(), WorkersError> {
        let current = self.credential.map(|current| current.blake3);
        if current == Some(next) && self.has(presented) {
            return Ok(());
        }
        if current != Some(presented) {
            return Err(WorkersError::Outdated { name: self.name.clone() });
        }
        if self.previous.is_some() {
            return Err(WorkersError::ReplacedJustNow { name: self.name.clone() });
        }
        self.previous = current;
        self.credential = Some(Credential { blake3: next, since: now });
        Ok(())
    }
}

/// The records of a file.
pub(super) fn read(content: &[u8]) -> Result<Vec<Record>, WorkersFileError> {
    let Version { version } = serde_json::from_slice(content)?;
    if version != VERSION {
        return Err(WorkersFileError::Version { got: version, expected: VERSION });
    }
    let Content::<Record> { workers, .. } = serde_json::from_slice(content)?;
    if workers.len() > WORKERS_MAX {
        return Err(WorkersFileError::TooMany { got: workers.len(), limit: WORKERS_MAX });
    }
    let mut names = HashSet::new();
    match workers.iter().find(|record| !names.insert(&record.name)) {
        Some(twice) => Err(WorkersFileError::Twice { name: twice.name.clone() }),
        None => Ok(workers),
    }
}

/// The file of these records.
pub(super) fn write<'a>(records: impl Iterator<Item = &'a Record>) -> io::Result<Vec<u8>> {
    let content = Content { version: VERSION, workers: records.collect() };
    let bytes = serde_json::to_vec(&content)?;
    // The limits on the parts keep it below; a file over it could not be read again.
    match u64::try_from(bytes.len()) {
        Ok(length) if length <= WORKERS_FILE_BYTES_MAX => Ok(bytes),
        _ => Err(io::Error::other(format!("the file of workers would have {} bytes", bytes.len()))),
    }
}
