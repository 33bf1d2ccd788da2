//! What can go wrong in the store, and the few kinds that a front end tells apart.

use std::io;
use std::path::PathBuf;

use crate::kind::FileKind;

/// The result of a call into the store.
pub type Result<T> = std::result::Result<T, Error>;

/// A failure of the store. [`Error::kind`] sorts it for the front ends.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No such file, directory, snapshot or directory entry.
    #[error("{what} does not exist")]
    NotFound {
        /// What was looked for, in the caller's words.
        what: String,
    },
    /// The file that a handle names was deleted.
    #[error("inode {inode} was deleted")]
    Stale {
        /// The inode's number.
        inode: u64,
    },
    /// The name or path is taken.
    #[error("{what} exists already")]
    Exists {
        /// What is in the way.
        what: String,
    },
    /// The object is not a directory.
    #[error("{what} is not a directory")]
    NotDirectory {
        /// The object.
        what: String,
    },
    /// The object is a directory, and the call is for files.
    #[error("{what} is a directory")]
    IsDirectory {
        /// The object.
        what: String,
    },
    /// The object is of another kind than the call is for (READ of a symbolic link, say).
    #[error("{what} is a {got}, not a {expected}")]
    WrongKind {
        /// The object.
        what: String,
        /// The kind that it is of.
        got: FileKind,
        /// The kind that the call is for.
        expected: FileKind,
    },
    /// The directory has entries.
    #[error("directory {what} is not empty")]
    NotEmpty {
        /// The directory.
        what: String,
    },
    /// The argument has no meaning here; the text says why.
    #[error("{reason}")]
    Invalid {
        /// What is wrong, and what would be right.
        reason: String,
    },
    /// A name over [`crate::NAME_BYTES_MAX`].
    #[error("name of {got} bytes is longer than the limit of {limit}")]
    NameTooLong {
        /// Its length.
        got: usize,
        /// The limit.
        limit: usize,
    },
    /// A size or offset over [`crate::FILE_BYTES_MAX`].
    #[error("file size or offset {got} is over the limit of {limit} bytes")]
    FileTooBig {
        /// What was asked for.
        got: u64,
        /// The limit.
        limit: u64,
    },
    /// More hard links than can be counted.
    #[error("inode {inode} has the largest number of hard links")]
    TooManyLinks {
        /// The inode's number.
        inode: u64,
    },
    /// SETATTR's guard did not match: the object changed since the client looked.
    #[error("inode {inode} changed since its attributes were read")]
    NotSynchronized {
        /// The inode's number.
        inode: u64,
    },
    /// Owner, group, mode or entry are not those that the caller judged: it is to judge anew.
    #[error("who may change inode {inode} changed at the same time")]
    RightsChanged {
        /// The inode's number.
        inode: u64,
    },
    /// The store is full, but for the reserve that lets deletes work.
    #[error(
        "no space: {used_bytes} bytes are used of {capacity_bytes}; delete files or snapshots, or enlarge the store"
    )]
    NoSpace {
        /// Bytes that the store occupies.
        used_bytes: u64,
        /// Bytes that it may occupy.
        capacity_bytes: u64,
    },
    /// The object is in use in a way that forbids the call; trying later can help.
    #[error("{what} is busy: {reason}")]
    Busy {
        /// The object.
        what: String,
        /// Who uses it.
        reason: String,
    },
    /// Stored bytes are not what was written.
    #[error("corrupt data in {place}: {reason}; run `slackwater check`")]
    Corrupt {
        /// File, segment, key or offset.
        place: String,
        /// Got and expected.
        reason: String,
    },
    /// The index is missing, or what is there of it is no database.
    #[error(
        "the index cannot be used: {reason}; stop the server and run `slackwaterd check --rebuild`, which makes it anew from its copy and the log"
    )]
    IndexLost {
        /// What was found.
        reason: String,
    },
    /// A repair gave these blocks up, since their stored bytes were damaged.
    #[error(
        "the data of {what} at offset {offset_bytes} is lost: its stored bytes were damaged; write the whole block again, or restore the file from a copy"
    )]
    Lost {
        /// The file or snapshot.
        what: String,
        /// Where in it, in bytes.
        offset_bytes: u64,
    },
    /// A repair would have to give up what may be whole.
    #[error(
        "the repair stopped: {place} cannot be read ({reason}), which need not mean that it is damaged; put right what keeps it from being read and repair again, or, if a file is gone for good, run `slackwaterd check --repair --give-up`, which gives up what was in it"
    )]
    RepairStopped {
        /// The file or chunk.
        place: String,
        /// What the read said.
        reason: String,
    },
    /// A sync failed earlier: what is on the disk is unknown, so nothing more is written.
    #[error(
        "writes are refused since a sync failed ({reason}); restart the server once the disk is sound"
    )]
    Poisoned {
        /// The failure that did it.
        reason: String,
    },
    /// The caller does not want the result any more.
    #[error("the work was ended before it was done, as its caller left")]
    Cancelled,
    /// The store was closed.
    #[error("the store is closed")]
    Closed,
    /// Another process has the data directory.
    #[error("data directory {} is in use by another process", path.display())]
    Locked {
        /// The data directory.
        path: PathBuf,
    },
    /// The data directory is of another format.
    #[error(
        "the store has format {got}, this program reads format {expected}: {}", format_advice(*got, *expected)
    )]
    Format {
        /// The version found.
        got: u32,
        /// The version known.
        expected: u32,
    },
    /// The operating system failed a call on a file of the store.
    #[error("{action} {place}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file.
        place: String,
        /// The system's error.
        source: io::Error,
    },
    /// RocksDB failed.
    #[error("index: {source}{}", index_advice(.source))]
    Index {
        /// RocksDB's error.
        #[from]
        source: rocksdb::Error,
    },
}

/// What the C library says of ENOSPC and EDQUOT.
const FULL_TEXTS: [&str; 2] = ["No space left on device", "Disk quota exceeded"];

/// Whether a text tells of a full disk in the system's words.
pub(crate) fn says_full(text: &str) -> bool {
    FULL_TEXTS.iter().any(|full| text.contains(full))
}

/// What to do about a database that reads what was not written, or found no room.
fn index_advice(source: &rocksdb::Error) -> &'static str {
    match source.kind() {
        rocksdb::ErrorKind::Corruption => {
            "; stop the server and run `slackwaterd check --rebuild`, which makes the index anew"
        }
        _ if says_full(source.as_ref()) => {
            "; the disk is full: make room on it, and start the server again if it has stopped"
        }
        _ => "",
    }
}

/// The kinds that front ends tell apart. Not `non_exhaustive`, so that a new kind fails to
/// compile in each front end until it has a status there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// Nothing of that name.
    NotFound,
    /// The object was deleted under its handle.
    Stale,
    /// The name is taken.
    Exists,
    /// Not a directory.
    NotDirectory,
    /// A directory.
    IsDirectory,
    /// Of another kind than the call is for.
    WrongKind,
    /// Not empty.
    NotEmpty,
    /// An argument without meaning.
    Invalid,
    /// A name over the limit.
    NameTooLong,
    /// A size over the limit.
    FileTooBig,
    /// Too many hard links.
    TooManyLinks,
    /// A guard did not match.
    NotSynchronized,
    /// Full.
    NoSpace,
    /// In use; try later.
    Busy,
    /// Stored bytes are wrong.
    Corrupt,
    /// Writes are refused until restart.
    Poisoned,
    /// The caller left.
    Cancelled,
    /// The store is closed.
    Closed,
    /// The disk or the index failed.
    Io,
}

/// What to do with a store of another format.
fn format_advice(got: u32, expected: u32) -> &'static str {
    if got > expected {
        "a newer release wrote it; install that release or a newer one"
    } else {
        "serve it with the release that wrote it; `slackwater export` there and `slackwater \
         import` here move a disk"
    }
}

impl Error {
    /// The kind that a front end translates into its own status.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NotFound { .. } => ErrorKind::NotFound,
            Self::Stale { .. } => ErrorKind::Stale,
            Self::Exists { .. } => ErrorKind::Exists,
            Self::NotDirectory { .. } => ErrorKind::NotDirectory,
            Self::IsDirectory { .. } => ErrorKind::IsDirectory,
            Self::WrongKind { .. } => ErrorKind::WrongKind,
            Self::NotEmpty { .. } => ErrorKind::NotEmpty,
            Self::Invalid { .. } => ErrorKind::Invalid,
            Self::NameTooLong { .. } => ErrorKind::NameTooLong,
            Self::FileTooBig { .. } => ErrorKind::FileTooBig,
            Self::TooManyLinks { .. } => ErrorKind::TooManyLinks,
            Self::NotSynchronized { .. } => ErrorKind::NotSynchronized,
            Self::NoSpace { .. } => ErrorKind::NoSpace,
            Self::Busy { .. } | Self::RightsChanged { .. } => ErrorKind::Busy,
            Self::Corrupt { .. }
            | Self::Lost { .. }
            | Self::Format { .. }
            | Self::IndexLost { .. } => ErrorKind::Corrupt,
            Self::Poisoned { .. } => ErrorKind::Poisoned,
            Self::Cancelled => ErrorKind::Cancelled,
            Self::Closed | Self::Locked { .. } => ErrorKind::Closed,
            Self::Io { .. } | Self::Index { .. } | Self::RepairStopped { .. } => ErrorKind::Io,
        }
    }

    pub(crate) fn io(action: &'static str, place: impl Into<String>, source: io::Error) -> Self {
        Self::Io { action, place: place.into(), source }
    }

    pub(crate) fn corrupt(place: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Corrupt { place: place.into(), reason: reason.into() }
    }

    pub(crate) fn invalid(reason: impl Into<String>) -> Self {
        Self::Invalid { reason: reason.into() }
    }

    pub(crate) fn not_found(what: impl Into<String>) -> Self {
        Self::NotFound { what: what.into() }
    }

    pub(crate) fn exists(what: impl Into<String>) -> Self {
        Self::Exists { what: what.into() }
    }
}
