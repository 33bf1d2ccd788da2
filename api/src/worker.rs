//! What the calls about workers carry: names, join tokens, credentials.
//!
//! ```text
//! admin   POST /v1/workers {name}                         -> join token, shown once
//! worker  POST /v1/join {worker_id, hash}  + join token   -> the hash is that of its credential
//! worker  PUT /v1/credential {hash}        + credential   -> the hash is that of its next credential
//! worker  POST /v1/mount-paths             + credential   -> a secret path to mount by, for minutes (or + token)
//! ```
//! A worker makes its credential itself and tells the appliance its hash, so that no answer holds it, a call whose
//! answer was lost can be sent again, and nothing but the worker's own file needs to be kept secret.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::types::Timestamp;

/// What a join token begins with. Random text follows.
pub const JOIN_TOKEN_PREFIX: &str = "slackwater-join-";

/// What a worker's credential begins with. Random text follows.
pub const CREDENTIAL_PREFIX: &str = "slackwater-worker-";

/// Longest name: that of a node of Kubernetes and of a host in DNS (RFC 1035 section 2.3.4).
pub const WORKER_NAME_BYTES_MAX: usize = 253;

/// How long a join token can be used where the request does not say.
pub const JOIN_TOKEN_SECONDS_DEFAULT: u64 = 24 * 3600;

/// Longest time that one can be used: what is not used within a month was forgotten.
pub const JOIN_TOKEN_SECONDS_MAX: u64 = 30 * 24 * 3600;

/// The name of a worker, as an administrator gives it: lower-case letters, digits, `.` and `-`, with a letter or a
/// digit at each end, as hosts and the nodes of Kubernetes are named.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "server", schema(value_type = String, examples("node-7")))]
pub struct WorkerName(String);

/// The text is not the name of a worker.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a worker's name is 1 to {WORKER_NAME_BYTES_MAX} lower-case letters, digits, `.` and `-`, with a letter or a \
     digit at each end, such as node-7; got `{}`", got.escape_debug()
)]
pub struct WorkerNameError {
    /// The text, as far as it is shown.
    pub got: String,
}

impl WorkerName {
    /// As text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for WorkerName {
    type Err = WorkerNameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is_end = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        let bytes = text.as_bytes();
        let ends = bytes.first().is_some_and(is_end) && bytes.last().is_some_and(is_end);
        let is_inner = |byte: &u8| is_end(byte) || matches!(byte, b'.' | b'-');
        if ends && bytes.len() <= WORKER_NAME_BYTES_MAX && bytes.iter().all(is_inner) {
            return Ok(Self(text.to_owned()));
        }
        Err(WorkerNameError { got: text.chars().take(64).collect() })
    }
}

impl fmt::Display for WorkerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Serialize for WorkerName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for WorkerName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// The BLAKE3 hash of a secret: 64 lower-case hexadecimal digits in JSON. `Debug` does not show it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "server", schema(value_type = String, min_length = 64, max_length = 64, pattern = "^[0-9a-f]{64}$"))]
pub struct SecretHash([u8; Self::BYTES]);

/// The text is not the hash of a secret. It is not shown: it may be the secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the hash of a secret is its BLAKE3 hash as 64 lower-case hexadecimal digits, got {got} characters{}",
    if *got == 64 { " with others among them" } else { "" }
)]
pub struct SecretHashParseError {
    /// Length of the text in bytes.
    pub got: usize,
}

impl SecretHash {
    /// Its length.
    pub const BYTES: usize = 32;

    /// The hash with these bytes.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    /// The bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }
}

impl fmt::Debug for SecretHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretHash(..)")
    }
}

impl FromStr for SecretHash {
    type Err = SecretHashParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refused = SecretHashParseError { got: text.len() };
        let (digits, rest) = text.as_bytes().as_chunks::<2>();
        if digits.len() != Self::BYTES || !rest.is_empty() {
            return Err(refused);
        }
        let mut bytes = [0; Self::BYTES];
        for (byte, [high, low]) in bytes.iter_mut().zip(digits) {
            *byte =
                digit(*high).zip(digit(*low)).map(|(high, low)| high << 4 | low).ok_or(refused)?;
        }
        Ok(Self(bytes))
    }
}

/// The value of a lower-case hexadecimal digit.
fn digit(byte: u8) -> Option<u8> {
    match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    }
}

impl Serialize for SecretHash {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let text: String = self.0.iter().map(|byte| format!("{byte:02x}")).collect();
        serializer.serialize_str(&text)
    }
}

impl<'de> Deserialize<'de> for SecretHash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// A machine that may use the appliance by a credential of its own, or was invited to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
pub struct Worker {
    /// Its name.
    pub name: WorkerName,
    /// The id that its driver has, which is the name of its directory below `workers/`. Before it joined, the one that it
    /// was added with, if any.
    pub worker_id: Option<uuid::Uuid>,
    /// When it was added.
    pub created_at: Timestamp,
    /// Until when its join token can be used; none once it joined.
    pub join_token_expires_at: Option<Timestamp>,
    /// When it joined.
    pub joined_at: Option<Timestamp>,
    /// Since when it has the credential that it has.
    pub credential_since: Option<Timestamp>,
    /// When its last call came since the server started.
    pub last_seen_at: Option<Timestamp>,
}

/// All workers, in order of their names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
pub struct WorkerList {
    /// The workers.
    pub workers: Vec<Worker>,
}

/// Adds a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct AddWorker {
    /// Its name: no other worker and no token of the server's configuration has it.
    pub name: WorkerName,
    /// How long the join token can be used; a day if it is left out, 30 days at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "server", schema(minimum = 1, maximum = 2_592_000))]
    pub join_token_seconds: Option<u64>,
    /// The id that the machine's driver has, where the appliance has files or snapshots of it already: another machine
    /// cannot join by the token then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker_id: Option<uuid::Uuid>,
}

/// A worker that was added, and the token by which its machine joins.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
pub struct AddedWorker {
    /// The worker.
    pub worker: Worker,
    /// The join token, which is shown this once and opens the join call alone.
    pub join_token: String,
}

impl fmt::Debug for AddedWorker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AddedWorker").field("worker", &self.worker).finish_non_exhaustive()
    }
}

/// Joins: the bearer of a join token becomes the worker that it was made for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct JoinWorker {
    /// The id that the worker's driver has.
    pub worker_id: uuid::Uuid,
    /// The hash of the credential that the worker made for itself: `slackwater-worker-` and 64 random hexadecimal
    /// digits.
    pub credential_blake3: SecretHash,
}

/// Replaces the caller's credential.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ReplaceCredential {
    /// The hash of the credential that it has from now on.
    pub credential_blake3: SecretHash,
}

/// The name below the export under which workers mount by secret paths.
pub const WORKER_MOUNTS: &str = ".worker";

/// The name below the export under which bearers of tokens mount all of it by secret paths.
pub const EXPORT_MOUNTS: &str = ".export";

/// A path by which the caller mounts.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
pub struct MountPath {
    /// The path that is mounted: the export's, `.worker` or `.export`, and a secret.
    pub path: String,
    /// Until when.
    pub expires_at: Timestamp,
    /// Whether NFS offers TLS (RFC 9289). A client that trusts this answer, as it came by https, takes no NFS in plain
    /// text then: who can change what is on the way could have made it believe that there is none.
    #[serde(default)]
    pub nfs_tls: bool,
}

impl fmt::Debug for MountPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MountPath").field("expires_at", &self.expires_at).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_hosts() {
        let longest = "a".repeat(WORKER_NAME_BYTES_MAX);
        for good in ["a", "7", "node-7", "ip-10-0-0-1.eu-west-1.compute.internal", "a..b", &longest]
        {
            assert_eq!(good.parse::<WorkerName>().unwrap().as_str(), good);
        }
        let long = format!("{longest}a");
        for bad in ["", "-a", "a-", ".a", "a.", "A", "a b", "a_b", "a\n", "\u{e9}", "a/b", &long] {
            let error = bad.parse::<WorkerName>().unwrap_err().to_string();
            assert!(error.contains("node-7") && error.len() < 400, "{error}");
        }
        assert!(serde_json::from_str::<WorkerName>("\"A\"").is_err());
    }

    #[test]
    fn a_hash_has_one_form_and_is_not_shown() {
        let text = "00ff".repeat(16);
        let hash: SecretHash = text.parse().unwrap();
        assert_eq!(hash.as_bytes()[..4], [0, 255, 0, 255]);
        assert_eq!(serde_json::to_string(&hash).unwrap(), format!("\"{text}\""));
        assert_eq!(serde_json::from_str::<SecretHash>(&format!("\"{text}\"")).unwrap(), hash);
        assert_eq!(format!("{hash:?}"), "SecretHash(..)");
        let upper = text.to_uppercase();
        for bad in
            ["", "00", &text[1..], &format!("{text}0"), &upper, &text.replace("ff", "\u{e9}")]
        {
            let error = bad.parse::<SecretHash>().unwrap_err().to_string();
            assert!(
                error.contains("BLAKE3") && (bad.is_empty() || !error.contains(bad)),
                "{error}"
            );
        }
    }

    #[test]
    fn a_join_token_is_not_shown() {
        let added = AddedWorker {
            worker: Worker {
                name: "a".parse().unwrap(),
                worker_id: None,
                created_at: Timestamp::from_nanos(1),
                join_token_expires_at: None,
                joined_at: None,
                credential_since: None,
                last_seen_at: None,
            },
            join_token: "s3cret".to_owned(),
        };
        assert!(!format!("{added:?}").contains("s3cret"));
    }
}
