//! Names of directory entries, and paths made of them.

use std::fmt;

use crate::error::{Error, Result};
use crate::units::NAME_BYTES_MAX;

/// The name of a directory entry: 1 to 255 bytes, no `/`, no NUL, neither `.` nor `..`.
/// Need not be UTF-8 (RFC 1813 section 3.2 leaves the character set to the client).
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(Box<[u8]>);

impl Name {
    /// The name with these bytes.
    ///
    /// # Errors
    /// `NameTooLong`; `Invalid` for an empty name, `.`, `..`, and names with `/` or NUL.
    pub fn new(bytes: &[u8]) -> Result<Self> {
        if bytes.len() > NAME_BYTES_MAX {
            return Err(Error::NameTooLong { got: bytes.len(), limit: NAME_BYTES_MAX });
        }
        if bytes.is_empty() {
            return Err(Error::invalid("a name has at least one byte"));
        }
        if bytes == b"." || bytes == b".." {
            return Err(Error::invalid("`.` and `..` are no names of entries"));
        }
        if bytes.iter().any(|&byte| byte == b'/' || byte == 0) {
            return Err(Error::invalid("a name holds no `/` and no NUL byte"));
        }
        Ok(Self(bytes.into()))
    }

    /// The bytes of the name.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.escape_ascii())
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}

/// A path from the root of the export, such as `images/debian.img`: one name or more, joined
/// by `/`, with no leading or trailing `/`, no empty part, no `.` and no `..`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FilePath(Vec<Name>);

/// Longest path in bytes, Linux's `PATH_MAX`.
pub const PATH_BYTES_MAX: usize = 4096;

impl FilePath {
    /// The path with this text. One leading `/` is forgiven.
    ///
    /// # Errors
    /// `NameTooLong`, or `Invalid` with the part that is wrong.
    pub fn parse(text: &str) -> Result<Self> {
        let bytes = text.strip_prefix('/').unwrap_or(text).as_bytes();
        if bytes.len() > PATH_BYTES_MAX {
            return Err(Error::NameTooLong { got: bytes.len(), limit: PATH_BYTES_MAX });
        }
        let names = bytes
            .split(|&byte| byte == b'/')
            .map(|part| match Name::new(part) {
                Err(Error::Invalid { reason }) => {
                    Err(Error::invalid(format!("path `{}`: {reason}", text.escape_debug())))
                }
                other => other,
            })
            .collect::<Result<Vec<_>>>()?;
        Ok(Self(names))
    }

    /// The path made of `names`.
    ///
    /// # Errors
    /// `Invalid` without a name.
    pub fn from_names(names: Vec<Name>) -> Result<Self> {
        if names.is_empty() {
            return Err(Error::invalid("a path has at least one name"));
        }
        Ok(Self(names))
    }

    /// The names from the root down; never empty.
    #[must_use]
    pub fn names(&self) -> &[Name] {
        &self.0
    }

    /// The directories of the path, and the last name.
    #[must_use]
    pub fn split(&self) -> (&[Name], &Name) {
        match self.0.split_last() {
            Some((last, directories)) => (directories, last),
            None => unreachable!("a path has at least one name"),
        }
    }

    /// The path's bytes, as stored and compared: names joined by `/`.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        self.0.iter().map(Name::as_bytes).collect::<Vec<_>>().join(&b'/')
    }
}

impl fmt::Display for FilePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, name) in self.0.iter().enumerate() {
            if position > 0 {
                f.write_str("/")?;
            }
            match std::str::from_utf8(name.as_bytes()) {
                Ok(text) => f.write_str(text)?,
                Err(_) => write!(f, "{name}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    #[test]
    fn names_that_escape_a_directory_are_refused() {
        for bad in [&b""[..], b".", b"..", b"a/b", b"a\0b"] {
            assert_eq!(Name::new(bad).unwrap_err().kind(), ErrorKind::Invalid, "{bad:?}");
        }
        assert_eq!(Name::new(&[b'x'; 256]).unwrap_err().kind(), ErrorKind::NameTooLong);
        assert_eq!(Name::new(&[0xff; 255]).unwrap().as_bytes(), &[0xff; 255]);
    }

    #[test]
    fn paths_are_split_and_joined() {
        let path = FilePath::parse("/a/b.img").unwrap();
        assert_eq!(path.to_string(), "a/b.img");
        assert_eq!(path.to_bytes(), b"a/b.img");
        assert_eq!(path.split().1.as_bytes(), b"b.img");
        for bad in ["", "/", "a//b", "a/", "../a", "a/../b", "a/./b"] {
            assert_eq!(FilePath::parse(bad).unwrap_err().kind(), ErrorKind::Invalid, "{bad:?}");
        }
    }
}
