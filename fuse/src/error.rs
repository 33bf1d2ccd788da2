//! Why the export cannot be served.

use std::io;
use std::path::PathBuf;

/// A failure that ends the serving process; what an appliance or a file answers never does.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The descriptor cannot be read or written.
    #[error("the FUSE descriptor fails ({source}): it must be an open, mounted /dev/fuse")]
    Device {
        /// The system's error.
        source: io::Error,
    },
    /// The kernel speaks an older protocol.
    #[error(
        "the kernel speaks FUSE {got_major}.{got_minor}, expected 7.{expected_minor} or a later 7: run Linux 5.4 or newer"
    )]
    Version {
        /// The kernel's major version.
        got_major: u32,
        /// The kernel's minor version.
        got_minor: u32,
        /// The least minor version that serves.
        expected_minor: u32,
    },
    /// Another process uses the cache directory.
    #[error(
        "the cache directory {path} is in use by another process: give each driver a directory of its own"
    )]
    CacheInUse {
        /// The directory.
        path: PathBuf,
    },
    /// The appliance could not be told from another one.
    #[error("the appliance's certificate cannot be checked: {source}")]
    Trust {
        /// Why.
        source: Box<slackwater_client::ClientError>,
    },
    /// A file of the cache or state directory cannot be used.
    #[error("{path}: {source}; see that the directory exists, is writable and not full")]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Nothing to resume from.
    #[error(
        "{path} does not tell how the export was served before ({got}): the mount cannot be resumed; unmount it and start anew"
    )]
    Journal {
        /// The journal.
        path: PathBuf,
        /// What is wrong with it.
        got: String,
    },
}
