//! Chain ids: how engines name a layer with all that is below it (OCI image specification, "Layer ChainID"). And
//! blobs of registries, by which a layer is kept for those who may pull it.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::types::Labels;

/// The id of a stack of layers: the hash of the hashes of their tars. Whatever has the same
/// chain id has the same content.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "server", schema(value_type = String, examples("sha256:2b2fbdb85bcbb0ac5ab15ee9df1ce3e75f2d4a3a0cb4f2a1a1aa0b3c2c2d5b4e")))]
pub struct ChainId(String);

/// The text is not a chain id.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a chain id is `sha256:` and 64 lower-case hexadecimal digits, got `{}`",
    got.escape_debug()
)]
pub struct ChainIdParseError {
    /// The text, as far as it is shown.
    pub got: String,
}

impl ChainId {
    /// As text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for ChainId {
    type Err = ChainIdParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        match text.strip_prefix("sha256:") {
            Some(digits) if digits.len() == 64 && digits.bytes().all(is_digit) => {
                Ok(Self(text.to_owned()))
            }
            _ => Err(ChainIdParseError { got: text.chars().take(128).collect() }),
        }
    }
}

impl fmt::Display for ChainId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Serialize for ChainId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ChainId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Most bytes of a blob's name. A host name has 253 and a port 6; registries take repositories of at most 255.
const BLOB_BYTES_MAX: usize = 600;

/// A blob of a registry: `HOST/REPOSITORY@sha256:DIGITS`, or `HOST:PORT/...` (OCI distribution specification,
/// "Pulling blobs").
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "server", schema(value_type = String, examples("registry.example.com/team/app@sha256:2b2fbdb85bcbb0ac5ab15ee9df1ce3e75f2d4a3a0cb4f2a1a1aa0b3c2c2d5b4e")))]
pub struct RegistryBlob(String);

/// The text is not the name of a blob.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a blob is HOST/REPOSITORY@sha256: and 64 lower-case hexadecimal digits, of at most {BLOB_BYTES_MAX} bytes, got `{}`",
    got.escape_debug()
)]
pub struct RegistryBlobParseError {
    /// The text, as far as it is shown.
    pub got: String,
}

impl RegistryBlob {
    /// As text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The registry's host, with its port if it names one.
    #[must_use]
    pub fn host(&self) -> &str {
        self.parts().0
    }

    /// The repository in the registry, such as `team/app`.
    #[must_use]
    pub fn repository(&self) -> &str {
        self.parts().1
    }

    /// The blob's digest, `sha256:` and 64 digits.
    #[must_use]
    pub fn digest(&self) -> &str {
        self.parts().2
    }

    fn parts(&self) -> (&str, &str, &str) {
        let (host, rest) = self.0.split_once('/').unwrap_or_default();
        let (repository, digest) = rest.split_once('@').unwrap_or_default();
        (host, repository, digest)
    }
}

/// Whether this is a host name or an address, with or without a port. It becomes part of a URL, so it holds nothing
/// that ends a host there.
fn is_host(text: &str) -> bool {
    let (name, port) = match text.rsplit_once(':') {
        Some((name, port)) if !port.contains(']') => (name, Some(port)),
        _ => (text, None),
    };
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-');
    let is_address = |byte: u8| byte.is_ascii_hexdigit() || byte == b':';
    let is_named = match name.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        Some(inner) => !inner.is_empty() && inner.bytes().all(is_address),
        None => !name.is_empty() && name.bytes().all(is_name),
    };
    is_named && port.is_none_or(|port| port.parse::<u16>().is_ok_and(|port| port > 0))
}

/// Whether this is the name of a repository (OCI distribution specification, "Pulling manifests"): parts of lower-case
/// letters and digits, with dots, hyphens and underscores between them.
fn is_repository(text: &str) -> bool {
    let is_edge = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let is_inner = |byte: u8| is_edge(byte) || matches!(byte, b'.' | b'-' | b'_');
    let is_part = |part: &str| {
        let bytes = part.as_bytes();
        let edges = bytes.first().zip(bytes.last());
        edges.is_some_and(|(&first, &last)| is_edge(first) && is_edge(last))
            && bytes.iter().copied().all(is_inner)
    };
    text.split('/').all(is_part)
}

impl FromStr for RegistryBlob {
    type Err = RegistryBlobParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let blob = Self(text.to_owned());
        let (host, repository, digest) = blob.parts();
        let is_right = text.len() <= BLOB_BYTES_MAX
            && is_host(host)
            && is_repository(repository)
            // A digest has the form of a chain id.
            && digest.parse::<ChainId>().is_ok();
        match is_right {
            true => Ok(blob),
            false => Err(RegistryBlobParseError { got: text.chars().take(128).collect() }),
        }
    }
}

impl fmt::Display for RegistryBlob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Serialize for RegistryBlob {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for RegistryBlob {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Takes a snapshot of a file, and registers it as what a chain id names. It lives until its last clone is
/// deleted, or for an hour if it never has one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct RegisterChain {
    /// The file's path.
    pub path: String,
    /// The chain id. There is one snapshot for each chain id and size: the second request is refused with
    /// code `exists`, and the problem carries the id of the first snapshot.
    pub chain_id: ChainId,
    /// Labels, as of any snapshot.
    #[serde(default, skip_serializing_if = "std::collections::BTreeMap::is_empty")]
    pub labels: Labels,
    /// The layer is for those alone who may read this blob of a registry, out of which it was unpacked. Without
    /// one it is for all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blob: Option<RegistryBlob>,
    /// As of `CreateSnapshot`. Where the chain is registered, the problem carries the id of its snapshot.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub becomes_clone: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_id_has_one_form() {
        let text = |digit: char| format!("sha256:{}", digit.to_string().repeat(64));
        assert_eq!(text('a').parse::<ChainId>().unwrap().as_str(), text('a'));
        let long = format!("{}0", text('a'));
        for bad in ["", "sha256:", "sha256:00", &text('g'), &text('A'), &long] {
            let error = bad.parse::<ChainId>().unwrap_err();
            assert!(error.to_string().contains(&format!("`{bad}`")), "{error}");
        }
        let json = format!("\"{}\"", text('1'));
        let chain: ChainId = serde_json::from_str(&json).unwrap();
        assert_eq!(serde_json::to_string(&chain).unwrap(), json);
        assert!(serde_json::from_str::<ChainId>("\"sha256:0\"").is_err());
    }

    #[test]
    fn a_blob_has_a_host_a_repository_and_a_digest() {
        let digest = format!("sha256:{}", "a".repeat(64));
        for (host, repository) in [
            ("docker.io", "library/busybox"),
            ("127.0.0.1:5000", "a"),
            ("[::1]:5000", "a/b-c/d.e__f"),
            ("localhost", "a"),
            ("registry.example.com:443", "0/1"),
        ] {
            let text = format!("{host}/{repository}@{digest}");
            let blob: RegistryBlob = text.parse().unwrap();
            assert_eq!((blob.host(), blob.repository()), (host, repository));
            assert_eq!((blob.digest(), blob.as_str()), (digest.as_str(), text.as_str()));
        }
        let long = format!("a/{}", "b".repeat(600));
        for bad in [
            "",
            "a",
            "a/",
            "/a",
            "a/b/",
            "a//b",
            "a/B",
            "a/../b",
            "a/.b",
            "a/b_",
            "a b/c",
            "a@b/c",
            "a/b?c",
            "a#b/c",
            "a:0/b",
            "a:99999/b",
            "a:/b",
            "[]/b",
            "[::1/b",
            "user:pass@a/b",
            "a/b%2f",
            &long,
        ] {
            let text = format!("{bad}@{digest}");
            let error = text.parse::<RegistryBlob>().unwrap_err();
            assert!(error.to_string().contains("HOST/REPOSITORY@sha256:"), "{error}");
        }
        for bad in ["a/b", "a/b@", "a/b@sha256:0", "a/b:latest", &format!("a/b@{digest}@{digest}")]
        {
            assert!(bad.parse::<RegistryBlob>().is_err(), "{bad}");
        }
    }
}
