//! What can go wrong with an image.

use std::io;

/// A failure of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ErofsError {
    /// The image's file cannot be read or written.
    #[error("cannot {action} the image: {source}")]
    File {
        /// What was tried.
        action: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// The file for an image has content.
    #[error(
        "the file for the image, of {got} bytes, has content; an image is written into a new file"
    )]
    NotEmpty {
        /// Its size.
        got: u64,
    },
    /// The file for an image has a size that it keeps, and the image is larger.
    #[error("the image does not fit into its file of {room_bytes} bytes; make a larger one")]
    Room {
        /// The size of the file.
        room_bytes: u64,
    },
    /// A name that no directory can hold.
    #[error("`{name}` is no name of a file: {reason}")]
    Name {
        /// The name, shortened.
        name: String,
        /// What is wrong.
        reason: &'static str,
    },
    /// A directory has the name already.
    #[error("the directory has `{name}` already; remove that first")]
    Exists {
        /// The name, shortened.
        name: String,
    },
    /// Something else than a directory stands where one is needed, or the other way round.
    #[error("`{name}`: {reason}")]
    WrongKind {
        /// The name, shortened.
        name: String,
        /// What was expected and what was got.
        reason: &'static str,
    },
    /// An attribute that the file system cannot hold.
    #[error("the extended attribute `{name}` cannot be kept: {reason}")]
    Xattr {
        /// Its name, shortened.
        name: String,
        /// Why not.
        reason: &'static str,
    },
    /// A symbolic link's target, a time or a device's number that the file system cannot hold.
    #[error("{what} is {got}; {expected}")]
    OutOfRange {
        /// What it is.
        what: &'static str,
        /// What it was.
        got: String,
        /// What it may be.
        expected: &'static str,
    },
    /// More or less content came than was said.
    #[error("a file of {expected} bytes got {got}")]
    Content {
        /// The size that was said.
        expected: u64,
        /// The bytes that came; one more than said if there were more.
        got: u64,
    },
    /// The map of a sparse file is not in order, or leads beyond the file.
    #[error(
        "a part of a sparse file at {offset} with {bytes} bytes overlaps another or ends behind the file's {size_bytes}"
    )]
    Part {
        /// Where the part begins.
        offset: u64,
        /// How long it is.
        bytes: u64,
        /// The size of the file.
        size_bytes: u64,
    },
    /// A sparse file that no map of chunks reaches over.
    #[error("a sparse file has {got} bytes; an image can hold one of at most {limit}")]
    SparseFile {
        /// Its size.
        got: u64,
        /// The largest.
        limit: u64,
    },
    /// The contents have more blocks than an image can address.
    #[error("the image would have more than {limit_tib} TiB; split what it holds")]
    TooLarge {
        /// The limit.
        limit_tib: u64,
    },
    /// The tree takes more memory than its limit.
    #[error("the tree takes more than {limit_mib} MiB of memory; split what it holds")]
    Memory {
        /// The limit.
        limit_mib: usize,
    },
}

/// Turns the failure of `action` on the image into an error.
pub(crate) fn failed(action: &'static str) -> impl FnOnce(io::Error) -> ErofsError {
    move |source| ErofsError::File { action, source }
}

/// Bytes of a name that an error message shows.
const SHOWN_BYTES_MAX: usize = 200;

/// A name for a message: readable, and never overlong.
pub(crate) fn shown(name: &[u8]) -> String {
    let end = name.len().min(SHOWN_BYTES_MAX);
    let text = name[..end].escape_ascii().to_string();
    if end < name.len() { format!("{text}...") } else { text }
}
