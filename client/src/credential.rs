//! The credential of a worker: a secret that its machine makes for itself. The appliance has its hash alone.

use std::fmt;

use slackwater_api::worker::{CREDENTIAL_PREFIX, SecretHash};

/// Random bytes of a credential.
const RANDOM_BYTES: usize = 32;

/// A worker's credential. `Debug` never shows it.
#[derive(Clone, PartialEq, Eq)]
pub struct Credential(String);

/// A credential that cannot be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CredentialError {
    /// The system gave no random bytes.
    #[error("the system gave no random bytes: {reason}")]
    NoRandom {
        /// Why not.
        reason: String,
    },
    /// The text is no credential. It is not quoted, since it may be a secret all the same.
    #[error(
        "expected the credential of a worker, `{CREDENTIAL_PREFIX}` and 64 hexadecimal digits, got {got} other \
         characters"
    )]
    Text {
        /// Their number.
        got: usize,
    },
}

impl Credential {
    /// A new one.
    ///
    /// # Errors
    /// `NoRandom`.
    pub fn generate() -> Result<Self, CredentialError> {
        let mut bytes = [0; RANDOM_BYTES];
        getrandom::fill(&mut bytes)
            .map_err(|error| CredentialError::NoRandom { reason: error.to_string() })?;
        Ok(Self(format!("{CREDENTIAL_PREFIX}{}", blake3::Hash::from_bytes(bytes).to_hex())))
    }

    /// The one in `text`; white space around it is left out.
    ///
    /// # Errors
    /// `Text`.
    pub fn parse(text: &str) -> Result<Self, CredentialError> {
        let text = text.trim();
        let is_random = |digits: &str| blake3::Hash::from_hex(digits).is_ok();
        if text.strip_prefix(CREDENTIAL_PREFIX).is_some_and(is_random) {
            return Ok(Self(text.to_owned()));
        }
        Err(CredentialError::Text { got: text.chars().count() })
    }

    /// The secret, to be kept in a file that the worker's root alone can read.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// What the appliance is to know of it.
    #[must_use]
    pub fn hash(&self) -> SecretHash {
        SecretHash::from_bytes(*blake3::hash(self.0.as_bytes()).as_bytes())
    }

    /// By what a secret is known again that is not to be kept: its BLAKE3 hash as hexadecimal digits.
    #[must_use]
    pub fn hash_of(secret: &str) -> String {
        blake3::hash(secret.as_bytes()).to_hex().to_string()
    }
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credential(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_another_one_and_is_read_again() {
        let (one, other) = (Credential::generate().unwrap(), Credential::generate().unwrap());
        assert!(one != other && one.hash() != other.hash());
        assert_eq!(Credential::parse(&format!(" {}\n", one.reveal())).unwrap(), one);
        assert!(crate::Token::new(one.reveal()).is_ok());
        assert_eq!(format!("{one:?}"), "Credential(..)");
    }

    #[test]
    fn other_text_is_refused_without_quoting_it() {
        let good = Credential::generate().unwrap();
        for bad in ["", "s3cret", &good.reveal()[1..], &good.reveal()[..80], CREDENTIAL_PREFIX] {
            let error = Credential::parse(bad).unwrap_err().to_string();
            assert!(error.contains("hexadecimal") && !error.contains("s3cret"), "{error}");
        }
    }
}
