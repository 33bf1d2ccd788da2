//! Attaches files and snapshots of the appliance as mounted ext4 file systems.
//!
//! ```text
//!  target directory        ext4, mounted
//!        |
//!    /dev/loopN            autoclear: freed by the kernel with the last mount
//!        |
//!  STATE/export/PATH       kernel NFS mount  or  FUSE mount <- server process <- keeper process
//! ```
//!
//! Nothing here lives in memory alone: what is attached is read from the kernel each time, so a
//! new process goes on where a killed one stopped. The tools that can hang on an appliance that
//! does not answer run as children with a time limit, never on the threads of this process.

mod attach;
mod disk;
mod error;
mod export;
mod file_system;
mod freezing;
mod keeper;
mod kernel;
mod locks;
mod probe;
mod process;
mod serving;
mod syncing;
mod tools;

use std::ffi::OsString;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use uuid::Uuid;

pub use attach::Attach;
pub use error::AttachError;
pub use keeper::keep_serving;
pub use probe::{Finding, Probe};

/// How the export becomes a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Method {
    /// The kernel's NFS client.
    Nfs,
    /// A FUSE file system served by a process of ours.
    Fuse,
}

impl fmt::Display for Method {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Nfs => "nfs",
            Self::Fuse => "fuse",
        })
    }
}

impl FromStr for Method {
    type Err = AttachError;

    fn from_str(text: &str) -> Result<Self, AttachError> {
        match text {
            "nfs" => Ok(Self::Nfs),
            "fuse" => Ok(Self::Fuse),
            _ => Err(AttachError::UnknownMethod { got: text.to_owned() }),
        }
    }
}

/// What is attached, and from where.
#[derive(Debug, Clone)]
pub struct Options {
    /// How; `None` takes NFS where the kernel has it, else FUSE.
    pub method: Option<Method>,
    /// Where the appliance serves NFS and MOUNT.
    pub nfs_address: SocketAddr,
    /// The export, `/slackwater`.
    pub export: String,
    /// Where the export is mounted (`export`) and notes about processes are kept.
    pub state_directory: PathBuf,
    /// The command line of the keeper that serves the export over FUSE, started with the
    /// descriptor of `/dev/fuse` as its standard input. `--resume` is appended when it is started
    /// on a descriptor that has served already.
    pub fuse_program: Vec<OsString>,
}

/// What a mount shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source<'a> {
    /// The file at this path below the export.
    File(&'a str),
    /// The snapshot of this id; read-only.
    Snapshot(Uuid),
}

/// Whether a mount may be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Access {
    /// It may.
    ReadWrite,
    /// It may not, and the loop device below refuses too.
    ReadOnly,
}

/// A mounted disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mounted {
    /// Where.
    pub target: PathBuf,
    /// The path below the export; `.snapshot/ID` for a snapshot.
    pub source: String,
    /// Whether it refuses writes.
    pub read_only: bool,
    /// The device in between.
    pub loop_device: PathBuf,
}
