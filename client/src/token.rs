//! The bearer token: a secret that is never printed.

use std::fmt;

/// Longest token: far more than any real one, so that a wrong file (a key, a log) is refused
/// with a clear error instead of being sent as a header.
pub(crate) const TOKEN_BYTES_MAX: usize = 4096;

/// A bearer token (RFC 6750 section 2.1). `Debug` never shows it.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

/// The text cannot be a bearer token. It is not quoted, since it may be a secret all the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// Nothing but white space.
    #[error("the token is empty")]
    Empty,
    /// Over the limit.
    #[error(
        "the token has {got} bytes, at most {TOKEN_BYTES_MAX} are taken: is it the right file?"
    )]
    TooLong {
        /// Its length in bytes.
        got: usize,
    },
    /// A character that RFC 6750 does not allow.
    #[error(
        "the token holds a space, a line break or another character that no token has (at byte {position})"
    )]
    Character {
        /// Where it is.
        position: usize,
    },
}

impl Token {
    /// The token in `text`; white space around it, such as a file's last line break, is left out.
    ///
    /// # Errors
    /// Text that is no token.
    pub fn new(text: &str) -> Result<Self, TokenError> {
        let text = text.trim();
        if text.is_empty() {
            return Err(TokenError::Empty);
        }
        if text.len() > TOKEN_BYTES_MAX {
            return Err(TokenError::TooLong { got: text.len() });
        }
        match text.bytes().position(|byte| !byte.is_ascii_graphic()) {
            Some(position) => Err(TokenError::Character { position }),
            None => Ok(Self(text.to_owned())),
        }
    }

    /// The secret.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// Whether its text begins so: kinds of tokens are known by that.
    #[must_use]
    pub fn begins_with(&self, prefix: &str) -> bool {
        self.0.starts_with(prefix)
    }

    /// The value of the `Authorization` header.
    pub(crate) fn header(&self) -> String {
        format!("Bearer {}", self.0)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_trimmed_and_never_shown() {
        let token = Token::new(" s3cret\n").unwrap();
        assert_eq!(token.header(), "Bearer s3cret");
        assert!(!format!("{token:?}").contains("s3cret"));
    }

    #[test]
    fn text_that_is_no_token_is_refused_without_quoting_it() {
        assert_eq!(Token::new(" \n"), Err(TokenError::Empty));
        assert_eq!(Token::new("two\nlines"), Err(TokenError::Character { position: 3 }));
        let error = Token::new(&"x".repeat(5000)).unwrap_err();
        assert_eq!(error, TokenError::TooLong { got: 5000 });
        assert!(!Token::new("s3cret s3cret").unwrap_err().to_string().contains("s3cret"));
    }
}
