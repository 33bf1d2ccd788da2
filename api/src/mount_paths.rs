//! The secret paths by which callers mount, each for a few minutes.
//!
//! ```text
//! POST /v1/mount-paths by a credential --> EXPORT/.worker/SECRET --> MNT --> handles that only the server can make
//!                      by a token -------> EXPORT/.export/SECRET
//! ```
//! A mount goes on by its handles. The kernel shows the path to all users of the machine (`/proc/mounts`), so after its
//! first use it can be used for some seconds only, from the same address, and, where a kernel mounted from a port that
//! only root opens, from such a port: by what repeats the call, and not by one who has read the path there.
//!
//! Invariants: secrets are kept as hashes, in memory alone, but for answers that are kept for their idempotency key. Each
//! holder has a bounded number of paths; a newer one takes the place of the oldest.

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;

use parking_lot::Mutex;

use crate::token_id::TokenId;
use crate::types::Timestamp;
use crate::worker::{SecretHash, WorkerName};

/// How long a path can be used: enough for a client whose connection breaks in between.
const PATH_SECONDS: u64 = 300;

/// How long a path can be used from its first use on: a client whose connection breaks repeats the call.
const REPEAT_SECONDS: u64 = 5;

const NANOS_PER_SECOND: u64 = 1_000_000_000;

/// Paths of one worker at once: its daemon and the processes that serve its mounts start together at most.
const PATHS_PER_WORKER_MAX: usize = 16;

/// Paths of one token at once, which many machines and people may share. There are 1,024 tokens at most, so all paths
/// take less than 64 MiB.
const PATHS_PER_TOKEN_MAX: usize = 256;

/// The paths that can be used.
#[derive(Default)]
pub struct MountPaths(Mutex<HashMap<SecretHash, Row>>);

/// Who mounts, and until when.
struct Row {
    holder: Holder,
    expires_at: Timestamp,
    /// Who used it first.
    first_user: Option<PathUser>,
    /// The log says already that another one tried to.
    is_logged: bool,
}

/// The other end of a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathUser {
    /// Its address.
    pub address: IpAddr,
    /// It calls from a port that only root opens (below 1024), as far as its machine keeps to that.
    pub has_privileged_port: bool,
}

impl PathUser {
    /// Whether this may be the one that used a path before.
    fn may_be(self, first: Self) -> bool {
        self.address == first.address && (self.has_privileged_port || !first.has_privileged_port)
    }
}

/// Who mounts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Holder {
    /// A worker, and when it was added: one that was revoked and added again is another one.
    Worker(WorkerName, Timestamp),
    /// The bearer of this token.
    Token(TokenId),
}

impl Holder {
    const fn paths_max(&self) -> usize {
        match self {
            Self::Worker(..) => PATHS_PER_WORKER_MAX,
            Self::Token(_) => PATHS_PER_TOKEN_MAX,
        }
    }
}

impl fmt::Debug for MountPaths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MountPaths").field("count", &self.0.lock().len()).finish()
    }
}

impl MountPaths {
    /// Adds the path of a new secret, and forgets those that cannot be used any more. Answers until when it can be used.
    pub(crate) fn add(&self, secret: &str, holder: Holder, now: Timestamp) -> Timestamp {
        let expires_at = after(now, PATH_SECONDS);
        let mut paths = self.0.lock();
        paths.retain(|_, row| row.expires_at > now);
        let of_holder = paths.iter().filter(|(_, row)| row.holder == holder);
        if of_holder.clone().count() >= holder.paths_max() {
            let oldest = of_holder.min_by_key(|(_, row)| row.expires_at).map(|(&secret, _)| secret);
            if let Some(secret) = oldest {
                paths.remove(&secret);
            }
        }
        paths.insert(
            hash(secret.as_bytes()),
            Row { holder, expires_at, first_user: None, is_logged: false },
        );
        expires_at
    }

    /// Uses the path of this secret; whose it is, if its time has not passed, and no other has used it.
    #[must_use]
    pub fn take(&self, secret: &[u8], user: PathUser, now: Timestamp) -> Option<Holder> {
        let mut paths = self.0.lock();
        let row = paths.get_mut(&hash(secret)).filter(|row| row.expires_at > now)?;
        let first = *row.first_user.get_or_insert(user);
        if !user.may_be(first) {
            if !std::mem::replace(&mut row.is_logged, true) {
                tracing::warn!(address = %user.address, first_address = %first.address,
                    "refused a secret path that another caller has used: either another user read it there, or that machine has several addresses");
            }
            return None;
        }
        row.expires_at = row.expires_at.min(after(now, REPEAT_SECONDS));
        Some(row.holder.clone())
    }
}

fn after(now: Timestamp, seconds: u64) -> Timestamp {
    Timestamp::from_nanos(now.as_nanos().saturating_add(seconds * NANOS_PER_SECOND))
}

fn hash(secret: &[u8]) -> SecretHash {
    SecretHash::from_bytes(*blake3::hash(secret).as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Timestamp {
        after(Timestamp::from_nanos(0), seconds)
    }

    fn user(last: u8, has_privileged_port: bool) -> PathUser {
        PathUser { address: [10, 0, 0, last].into(), has_privileged_port }
    }

    fn worker(name: &str) -> Holder {
        Holder::Worker(name.parse().unwrap(), at(1))
    }

    #[test]
    fn a_path_is_found_until_its_time_has_passed() {
        let paths = MountPaths::default();
        let expires_at = paths.add("one", worker("a"), at(1));
        assert_eq!(expires_at, at(1 + PATH_SECONDS));
        assert_eq!(paths.take(b"two", user(1, true), at(1)), None);
        assert_eq!(paths.take(b"one", user(1, true), expires_at), None);
        let shortly_before = Timestamp::from_nanos(expires_at.as_nanos() - 1);
        assert_eq!(paths.take(b"one", user(1, true), shortly_before), Some(worker("a")));
        paths.add("two", Holder::Token(TokenId::NONE), expires_at);
        assert_eq!(paths.0.lock().len(), 1, "the first is forgotten");
    }

    #[test]
    fn a_path_that_was_used_can_be_used_a_little_longer() {
        let paths = MountPaths::default();
        paths.add("one", worker("a"), at(0));
        let last = 200 + REPEAT_SECONDS;
        assert!(paths.take(b"one", user(1, true), at(200)).is_some());
        assert!(paths.take(b"one", user(1, true), at(last - 1)).is_some(), "the call again");
        assert!(paths.take(b"one", user(1, true), at(last)).is_none());
    }

    #[test]
    fn a_path_that_was_used_is_for_the_same_caller() {
        let all = [user(1, true), user(1, false), user(2, true), user(2, false)];
        for (first, may_follow) in [
            (user(1, true), [true, false, false, false]),
            // Behind a gateway that changes ports, all come from high ones.
            (user(1, false), [true, true, false, false]),
        ] {
            let paths = MountPaths::default();
            paths.add("one", worker("a"), at(0));
            assert!(paths.take(b"one", first, at(1)).is_some());
            let follows = all.map(|next| paths.take(b"one", next, at(2)).is_some());
            assert_eq!(follows, may_follow, "{first:?}");
            assert!(paths.take(b"one", first, at(3)).is_some(), "others do not end it");
        }
    }

    #[test]
    fn each_holder_has_so_many() {
        for (holder, limit) in [
            (worker("a"), PATHS_PER_WORKER_MAX),
            (Holder::Token(TokenId::NONE), PATHS_PER_TOKEN_MAX),
        ] {
            let paths = MountPaths::default();
            paths.add("of another", worker("b"), at(0));
            for number in 0..=limit {
                let nanos = u64::try_from(number).unwrap();
                paths.add(&number.to_string(), holder.clone(), Timestamp::from_nanos(nanos));
            }
            let is_there =
                |secret: &str| paths.take(secret.as_bytes(), user(1, true), at(1)).is_some();
            assert!(!is_there("0"), "the oldest went");
            assert!((1..=limit).all(|number| is_there(&number.to_string())));
            assert!(is_there("of another"));
        }
    }
}
