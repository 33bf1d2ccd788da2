//! A secret that cannot be printed by accident.

use std::fmt;
use std::str::FromStr;

use serde::de::{Deserialize, Deserializer, Error};
use serde::ser::{Serialize, Serializer};

/// What is shown in a secret's place.
pub const REDACTED: &str = "<redacted>";

/// A password or token. `Debug` and serialization show [`REDACTED`] only; whoever needs the
/// text says so by [`Secret::reveal`].
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// A secret of this text.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl FromStr for Secret {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self::new(text))
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(REDACTED)
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(REDACTED)
    }
}

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // The error of a wrong type would show the value: a password without its quotes.
        String::deserialize(deserializer)
            .map(Self)
            .map_err(|_| D::Error::custom("expected a text in quotes"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_of_the_wrong_type_is_not_shown() {
        let value = toml::Value::Integer(12345678);
        let error = value.try_into::<Secret>().unwrap_err().to_string();
        assert!(error.contains("quotes"), "{error}");
        assert!(!error.contains("123"), "{error}");
    }

    #[test]
    fn is_never_shown() {
        let secret = Secret::new("hunter2-hunter2");
        assert_eq!(format!("{secret:?}"), REDACTED);
        let shown = toml::Value::try_from(&secret).unwrap();
        assert_eq!(shown.as_str(), Some(REDACTED));
        assert_eq!(secret.reveal(), "hunter2-hunter2");
    }
}
