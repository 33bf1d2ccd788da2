//! The `Authorization` header of calls: none, of one token, or of the token that a file holds.
//!
//! A file is looked at before each call, and read again once it is another one: a process that goes on for months
//! sends the new token as soon as it was written. That look is one `stat` of a local file. Of several files the first
//! that is there counts.

use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use reqwest::header::HeaderValue;

use crate::error::ClientError;
use crate::token::{TOKEN_BYTES_MAX, Token, TokenError};

/// What is sent with each call.
pub(crate) enum Authorization {
    None,
    /// Marked as sensitive, so that no debug output shows it.
    Fixed(HeaderValue),
    InFiles(TokenFiles),
}

/// A token in one of these files.
pub(crate) struct TokenFiles {
    paths: Vec<PathBuf>,
    read: Mutex<Option<Content>>,
}

/// What a file held.
struct Content {
    version: Version,
    value: HeaderValue,
}

/// By what a file that was replaced or written is known: device, inode, length, time of the last change.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Version(u64, u64, u64, i64, i64);

impl Version {
    fn of(found: &Metadata) -> Self {
        Self(found.dev(), found.ino(), found.len(), found.ctime(), found.ctime_nsec())
    }
}

impl Authorization {
    /// That of this token.
    pub(crate) fn fixed(token: &Token) -> Result<Self, ClientError> {
        Ok(Self::Fixed(header(token)?))
    }

    /// That of the token that is in the first of these files that is there at the time of a call; without any, none.
    pub(crate) fn in_files(paths: Vec<PathBuf>) -> Self {
        Self::InFiles(TokenFiles { paths, read: Mutex::default() })
    }

    /// The value of the header now.
    ///
    /// # Errors
    /// `TokenFile`: the file cannot be read, or holds no token, and no earlier one is known.
    pub(crate) fn value(&self) -> Result<Option<HeaderValue>, ClientError> {
        match self {
            Self::None => Ok(None),
            Self::Fixed(value) => Ok(Some(value.clone())),
            Self::InFiles(files) => files.value(),
        }
    }

    /// Whether calls may carry a token.
    pub(crate) fn is_some(&self) -> bool {
        !matches!(self, Self::None)
    }
}

impl TokenFiles {
    fn value(&self) -> Result<Option<HeaderValue>, ClientError> {
        for path in &self.paths {
            match std::fs::metadata(path) {
                Ok(found) => return self.value_of(path, Version::of(&found)).map(Some),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(source) => return Err(ClientError::TokenFile { path: path.clone(), source }),
            }
        }
        // One that is just being replaced; the appliance refuses it if it is to count no more.
        let read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(read.as_ref().map(|earlier| earlier.value.clone()))
    }

    fn value_of(&self, path: &Path, version: Version) -> Result<HeaderValue, ClientError> {
        // Only assignments are made under the lock: one that panicked left it whole.
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(content) = read.as_ref().filter(|content| content.version == version) {
            return Ok(content.value.clone());
        }
        match (read_header(path), read.as_ref()) {
            (Ok((version, value)), _) => {
                *read = Some(Content { version, value: value.clone() });
                Ok(value)
            }
            // One that is just being written, in place: the next call reads it again.
            (Err(_), Some(earlier)) => Ok(earlier.value.clone()),
            (Err(source), None) => Err(ClientError::TokenFile { path: path.to_owned(), source }),
        }
    }
}

/// The header of the token that a file holds, and the version that was read.
fn read_header(path: &Path) -> io::Result<(Version, HeaderValue)> {
    let invalid = |error| io::Error::new(io::ErrorKind::InvalidData, error);
    let (version, text) = read_token(path)?;
    let token = Token::new(&text).map_err(invalid)?;
    Ok((version, header(&token).map_err(invalid)?))
}

/// The content of a file that is to hold a token, and the version that was read.
fn read_token(path: &Path) -> io::Result<(Version, String)> {
    let file = File::open(path)?;
    let version = Version::of(&file.metadata()?);
    let mut text = String::new();
    // One more than the longest, which is refused as too long.
    let limit = u64::try_from(TOKEN_BYTES_MAX).unwrap_or(u64::MAX).saturating_add(1);
    file.take(limit).read_to_string(&mut text)?;
    Ok((version, text))
}

fn header(token: &Token) -> Result<HeaderValue, TokenError> {
    // A token's characters are all allowed in a header; the error cannot happen.
    let mut value = HeaderValue::from_str(&token.header())
        .map_err(|_| TokenError::Character { position: 0 })?;
    value.set_sensitive(true);
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(authorization: &Authorization) -> Option<String> {
        authorization.value().unwrap().map(|value| value.to_str().unwrap().to_owned())
    }

    #[test]
    fn a_file_is_read_again_when_it_is_another_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        let authorization = Authorization::in_files(vec![path.clone()]);
        assert_eq!(text(&authorization), None);
        for token in ["first", "other", "longer-than-before"] {
            let new = folder.path().join("new");
            std::fs::write(&new, format!("{token}\n")).unwrap();
            std::fs::rename(&new, &path).unwrap();
            assert_eq!(text(&authorization), Some(format!("Bearer {token}")));
            assert_eq!(text(&authorization), Some(format!("Bearer {token}")));
        }
        std::fs::write(&path, "").unwrap();
        assert_eq!(text(&authorization).as_deref(), Some("Bearer longer-than-before"));
        std::fs::write(&path, "in-place").unwrap();
        assert_eq!(text(&authorization).as_deref(), Some("Bearer in-place"));
        // While it is away, such as between a delete and a write.
        std::fs::remove_file(&path).unwrap();
        assert_eq!(text(&authorization).as_deref(), Some("Bearer in-place"));
    }

    #[test]
    fn the_first_file_that_is_there_counts() {
        let folder = tempfile::tempdir().unwrap();
        let [first, second] = ["first", "second"].map(|name| folder.path().join(name));
        let authorization = Authorization::in_files(vec![first.clone(), second.clone()]);
        std::fs::write(&second, "s").unwrap();
        assert_eq!(text(&authorization).as_deref(), Some("Bearer s"));
        std::fs::write(&first, "f").unwrap();
        assert_eq!(text(&authorization).as_deref(), Some("Bearer f"));
        std::fs::remove_file(&first).unwrap();
        assert_eq!(text(&authorization).as_deref(), Some("Bearer s"));
    }

    #[test]
    fn a_file_that_holds_no_token_is_an_error_that_does_not_show_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        let authorization = Authorization::in_files(vec![path.clone()]);
        let long = vec![b'x'; TOKEN_BYTES_MAX + 5];
        for content in [&b""[..], b"s3cret s3cret", b"s3cret\xff", &long] {
            std::fs::write(&path, content).unwrap();
            let error = authorization.value().unwrap_err().to_string();
            assert!(error.contains("token") && !error.contains("s3cret"), "{error}");
        }
        let folder = Authorization::in_files(vec![folder.path().to_owned()]);
        assert!(matches!(folder.value(), Err(ClientError::TokenFile { .. })));
    }
}
