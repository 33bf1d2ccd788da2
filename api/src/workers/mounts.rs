//! The secret paths by which callers mount, each for a few minutes.
//!
//! ```text
//! POST /v1/mount-paths by a credential --> EXPORT/.worker/SECRET --> MNT --> handles that only the server can make
//!                      by a token -------> EXPORT/.export/SECRET
//! ```
//! What a mount goes on with is the handle. The kernel shows the path to all users of the machine (`/proc/mounts`): it is of
//! no use some seconds after it was used.
//!
//! Invariants: secrets are kept as hashes, in memory alone, but for answers that are kept for their idempotency key. A
//! caller has a bounded number that can be used; a newer one takes the place of the oldest.

use std::collections::HashMap;

use parking_lot::Mutex;

use crate::token_id::TokenId;
use crate::types::Timestamp;
use crate::worker::{SecretHash, WorkerName};

/// How long a path can be used: enough for a client whose connection breaks in between.
pub(crate) const PATH_SECONDS: u64 = 300;

/// How long a path can be used from when it was used first: a client whose connection breaks repeats the call.
const REPEAT_SECONDS: u64 = 5;

const NANOS_PER_SECOND: u64 = 1_000_000_000;

/// Paths of one worker at once: its daemon and the processes that serve its mounts start together at most.
const PATHS_PER_WORKER_MAX: usize = 16;

/// Paths of one token at once, which many machines and people may share.
const PATHS_PER_TOKEN_MAX: usize = 1024;

/// The paths that can be used.
#[derive(Default)]
pub(super) struct Mounts(Mutex<HashMap<SecretHash, MountPath>>);

/// For whom, and until when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MountPath {
    pub(super) holder: Holder,
    pub(super) expires_at: Timestamp,
}

/// Who mounts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Holder {
    /// A worker, and when it was added: one that is revoked and added again is another one.
    Worker(WorkerName, Timestamp),
    /// The bearer of this token.
    Token(TokenId),
}

impl Mounts {
    /// Adds a path, and forgets those that cannot be used any more.
    pub(super) fn add(&self, secret: SecretHash, path: MountPath, now: Timestamp) {
        let mut paths = self.0.lock();
        paths.retain(|_, path| path.expires_at > now);
        let of_holder = paths.iter().filter(|(_, other)| other.holder == path.holder);
        let limit = match path.holder {
            Holder::Worker(..) => PATHS_PER_WORKER_MAX,
            Holder::Token(_) => PATHS_PER_TOKEN_MAX,
        };
        if of_holder.clone().count() >= limit {
            let oldest =
                of_holder.min_by_key(|(_, path)| path.expires_at).map(|(&secret, _)| secret);
            if let Some(secret) = oldest {
                paths.remove(&secret);
            }
        }
        paths.insert(secret, path);
    }

    /// Uses the path with this secret, if its time has not passed.
    pub(super) fn take(&self, secret: SecretHash, now: Timestamp) -> Option<MountPath> {
        let mut paths = self.0.lock();
        let path = paths.get_mut(&secret).filter(|path| path.expires_at > now)?;
        let soon = now.as_nanos().saturating_add(REPEAT_SECONDS * NANOS_PER_SECOND);
        path.expires_at = path.expires_at.min(Timestamp::from_nanos(soon));
        Some(path.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(number: u8) -> SecretHash {
        SecretHash::from_bytes([number; SecretHash::BYTES])
    }

    fn path(worker: &str, expires_at: u64) -> MountPath {
        let holder = Holder::Worker(worker.parse().unwrap(), Timestamp::from_nanos(1));
        MountPath { holder, expires_at: Timestamp::from_nanos(expires_at) }
    }

    #[test]
    fn a_path_is_found_until_its_time_has_passed() {
        let mounts = Mounts::default();
        let at = Timestamp::from_nanos;
        mounts.add(secret(1), path("a", 10), at(1));
        assert_eq!(mounts.take(secret(1), at(9)), Some(path("a", 10)));
        assert_eq!(mounts.take(secret(1), at(10)), None);
        assert_eq!(mounts.take(secret(2), at(9)), None);
        mounts.add(secret(2), path("b", 20), at(10));
        assert_eq!(mounts.0.lock().len(), 1, "the first is forgotten");
    }

    #[test]
    fn a_path_that_was_used_can_be_used_a_little_longer() {
        let mounts = Mounts::default();
        let at = |seconds: u64| Timestamp::from_nanos(seconds * NANOS_PER_SECOND);
        mounts.add(secret(1), path("a", at(300).as_nanos()), at(0));
        assert!(mounts.take(secret(1), at(200)).is_some());
        assert!(mounts.take(secret(1), at(204)).is_some(), "the call again");
        assert!(mounts.take(secret(1), at(205)).is_none());
    }

    #[test]
    fn each_caller_has_so_many() {
        let mounts = Mounts::default();
        let at = Timestamp::from_nanos;
        mounts.add(secret(200), path("b", 5), at(1));
        let count = u8::try_from(PATHS_PER_WORKER_MAX).unwrap();
        for number in 0..=count {
            mounts.add(secret(number), path("a", 100 + u64::from(number)), at(1));
        }
        assert_eq!(mounts.take(secret(0), at(1)), None, "the oldest went");
        assert!((1..=count).all(|number| mounts.take(secret(number), at(1)).is_some()));
        assert!(mounts.take(secret(200), at(1)).is_some(), "not one of another worker");
    }
}
