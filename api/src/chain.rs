//! Chain ids: how engines name a layer with all that is below it (OCI image specification, "Layer ChainID").

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
}
