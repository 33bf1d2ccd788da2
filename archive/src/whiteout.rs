//! Names in a layer that say what of the layers below is not there any more.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::error::{ArchiveError, shown};
use crate::members::Member;

/// What names a removal.
pub(crate) const WHITEOUT_PREFIX: &[u8] = b".wh.";
const METADATA_PREFIX: &[u8] = b".wh..wh.";
/// What removes all else in its directory.
pub(crate) const OPAQUE_NAME: &[u8] = b".wh..wh..opq";

/// What a member's name means.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Meaning {
    /// The member is what is at its name.
    Member,
    /// A note of AUFS, which means nothing.
    Note,
    /// All is removed that the layers below have in the member's directory.
    Opaque,
    /// This name is removed from the member's directory.
    Removes(OsString),
}

impl Meaning {
    /// What the name of a member means; `path` is that name, cleaned.
    pub(crate) fn of(member: &Member, path: &Path) -> Result<Self, ArchiveError> {
        let is_note = path.components().any(|component| {
            let component = component.as_os_str().as_bytes();
            component.starts_with(METADATA_PREFIX) && component != OPAQUE_NAME
        });
        let name = path.file_name().unwrap_or_default().as_bytes();
        if is_note {
            return Ok(Self::Note);
        }
        if name == OPAQUE_NAME {
            return Ok(Self::Opaque);
        }
        match name.strip_prefix(WHITEOUT_PREFIX) {
            None => Ok(Self::Member),
            Some(b"." | b"..") => {
                let name = shown(&member.name);
                Err(ArchiveError::Escapes { member: member.shown(), name })
            }
            Some(b"") => Err(member.error("a whiteout that names nothing")),
            Some(hidden) => Ok(Self::Removes(OsStr::from_bytes(hidden).to_owned())),
        }
    }
}
