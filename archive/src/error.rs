//! What can go wrong with a layer archive, said so that its user knows what to do.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use slackwater_erofs::ErofsError;

/// A failure of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArchiveError {
    /// The stream that the archive comes from failed.
    #[error("reading the archive failed: {source}")]
    Read {
        /// The cause.
        source: io::Error,
    },
    /// The stream that an archive goes to failed.
    #[error("writing the archive failed: {source}")]
    Write {
        /// The cause.
        source: io::Error,
    },
    /// The file system refused.
    #[error("cannot {action} `{}`: {source}", shown_path(path))]
    File {
        /// What was tried.
        action: &'static str,
        /// The path, below the root where it is one of a tree.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The archive ends too early: a transfer was cut off.
    #[error(
        "the archive is truncated: it ends at byte {offset}, before its end marker; fetch it again"
    )]
    Truncated {
        /// How many bytes there were.
        offset: u64,
    },
    /// The bytes are no tar header.
    #[error("the archive is corrupt or no tar archive: {reason} in the header at byte {offset}")]
    BadHeader {
        /// Where the header begins.
        offset: u64,
        /// What is wrong.
        reason: String,
    },
    /// A member's name or hard link leads above the root of the layer.
    #[error("member `{member}`: the name `{name}` leads out of the layer; refusing it")]
    Escapes {
        /// The member.
        member: String,
        /// The name that escapes: the member's own, or its link's.
        name: String,
    },
    /// More members than are remembered.
    #[error("the layer has more than {limit} members; split it into several layers")]
    Members {
        /// The limit.
        limit: u64,
    },
    /// More directories than are remembered.
    #[error(
        "the paths of the layer's directories take more than {limit_mib} MiB; split it into several layers"
    )]
    Directories {
        /// The limit.
        limit_mib: usize,
    },
    /// More changed than can be listed.
    #[error(
        "so much changed that the paths take more than {limit_mib} MiB: too much to be listed or packed"
    )]
    Changes {
        /// The limit.
        limit_mib: usize,
    },
    /// A member that cannot be made.
    #[error("member `{member}`: {reason}")]
    Member {
        /// The member.
        member: String,
        /// What is wrong with it, and what would be right.
        reason: String,
    },
    /// A member that an image of its layer cannot hold, or an image that cannot be written.
    #[error("`{member}` cannot be put into the layer's image: {source}")]
    Image {
        /// The member, or the image itself.
        member: String,
        /// The cause.
        source: ErofsError,
    },
    /// The file cannot be put into a layer.
    #[error("`{}` cannot be packed: {reason}", shown_path(path))]
    Unpackable {
        /// The path below the root.
        path: PathBuf,
        /// Why not.
        reason: &'static str,
    },
    /// A file changed while it was read.
    #[error(
        "`{}` had {expected} bytes and ended after {got}: it changed while it was packed; pause the container",
        shown_path(path)
    )]
    Changed {
        /// The path below the root.
        path: PathBuf,
        /// The size that its header says.
        expected: u64,
        /// What could be read.
        got: u64,
    },
    /// A file is not what it was when its layer was recorded.
    #[error("`{}` is not what was unpacked or built: expected {expected}, got {got}", path.display())]
    ContentDiffers {
        /// The path below the root.
        path: PathBuf,
        /// Size and hash at that time.
        expected: String,
        /// Size and hash now.
        got: String,
    },
    /// The recording of an archive cannot be used.
    #[error("the recording `{}` is damaged: {reason}; pull or build the image again", path.display())]
    BadRecording {
        /// The recording.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The reference cannot be read.
    #[error("the layer's reference to a snapshot is not valid: {reason}")]
    BadReference {
        /// What is wrong.
        reason: String,
    },
    /// A reference is followed by more members.
    #[error(
        "the layer's reference to a snapshot is followed by `{member}`; only its own link may follow"
    )]
    ReferenceNotAlone {
        /// The next member.
        member: String,
    },
}

/// Turns the failure of `action` on `path` into an error.
pub(crate) fn failed<E: Into<io::Error>>(
    action: &'static str,
    path: &Path,
) -> impl FnOnce(E) -> ArchiveError {
    move |source| ArchiveError::File { action, path: path.to_owned(), source: source.into() }
}

/// The failure of packing what was listed and is not there any more.
pub(crate) fn vanished(path: &Path) -> ArchiveError {
    let reason = "it vanished while it was packed; pause the container";
    failed("pack", path)(io::Error::new(io::ErrorKind::NotFound, reason))
}

/// A path for a message, as [`shown`]; containers name files as they like. The root is `/`.
fn shown_path(path: &Path) -> String {
    if path.as_os_str().is_empty() { "/".to_owned() } else { shown(path.as_os_str().as_bytes()) }
}

/// Bytes of a name that an error message shows.
const SHOWN_BYTES_MAX: usize = 200;

/// A name from an archive for a message: readable, and never overlong.
pub(crate) fn shown(name: &[u8]) -> String {
    let end = name.len().min(SHOWN_BYTES_MAX);
    let text = name[..end].escape_ascii().to_string();
    if end < name.len() { format!("{text}...") } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_in_messages_are_of_one_line_not_too_long_and_never_empty() {
        let reason = "reason";
        let unpackable = |path: &str| ArchiveError::Unpackable { path: path.into(), reason };
        assert_eq!(unpackable("a\n\x1b[2J").to_string(), r"`a\n\x1b[2J` cannot be packed: reason");
        assert_eq!(unpackable("").to_string(), "`/` cannot be packed: reason");
        assert!(unpackable(&"x/".repeat(2_000)).to_string().len() < 300);
        let error = failed("open", Path::new("\r"))(io::Error::other("cause"));
        assert_eq!(error.to_string(), r"cannot open `\r`: cause");
        let error = ArchiveError::Changed { path: "a\tb".into(), expected: 2, got: 1 }.to_string();
        assert!(error.starts_with(r"`a\tb` had 2 bytes") && error.ends_with("pause the container"));
    }
}
