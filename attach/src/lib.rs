//! Attaches files and snapshots of the appliance as mounted file systems: ext4, or EROFS images.
//!
//! ```text
//!  target directory        ext4, mounted
//!        |
//!    /dev/loopN            autoclear: freed by the kernel with the last mount
//!        |
//!  STATE/export/PATH       (an image may be mounted from here, `image.rs`)
//!        |
//!  STATE/export            kernel NFS mount  or  FUSE mount <- server process <- keeper process
//! ```
//!
//! Nothing here lives in memory alone: what is attached is what the kernel says, so a new process goes on where a killed
//! one stopped. The kernel's table of mounts is kept in memory until the kernel says
//! that something was mounted, unmounted or remounted. The tools that can hang on an appliance that
//! does not answer run as children with a time limit, never on the threads of this process; images are mounted and
//! unmounted by one that lives on (`mounter.rs`).

mod attach;
mod disk;
mod error;
mod export;
mod file_system;
mod freezing;
mod image;
mod keeper;
mod kernel;
mod leaving;
mod locks;
mod mounted;
mod mounter;
mod probe;
mod process;
mod sandbox;
mod serving;
mod sparse;
mod syncing;
#[cfg(test)]
#[path = "../tests/support/tool.rs"]
mod test_tool;
mod tools;

use std::ffi::OsString;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::str::FromStr;
use std::sync::Arc;

use uuid::Uuid;

pub use attach::Attach;
pub use error::AttachError;
pub use keeper::keep_serving;
pub use leaving::mounts_end_with_processes;
pub use probe::{Finding, Probe};
pub use sandbox::run_tool;

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

/// By what the appliance lets a mount of the export in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MountedBy {
    /// A secret path of the worker, which leads to its own files.
    Worker,
    /// A secret path of a token, which leads to the whole export.
    Token,
    /// The address of this machine, which leads to the whole export.
    Address,
}

impl fmt::Display for MountedBy {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Worker => "worker",
            Self::Token => "token",
            Self::Address => "address",
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
    /// How; `None` goes on with what is mounted, else takes NFS where the kernel has it, else FUSE.
    pub method: Option<Method>,
    /// Where the appliance serves NFS and MOUNT.
    pub nfs_address: SocketAddr,
    /// The export, `/slackwater`.
    pub export: String,
    /// Gives the path by which the kernel's NFS client mounts it; `None`: the export's own.
    pub mount_path: Option<Arc<dyn PathSource>>,
    /// Where the export is mounted (`export`), notes about processes are kept, and new file systems are made (`new`), which
    /// takes 16 MiB for one of 1 TiB, as long as it takes to copy it.
    pub state_directory: PathBuf,
    /// The command line of the keeper that serves the export over FUSE, started with the
    /// descriptor of `/dev/fuse` as its standard input. `--resume` is appended when it is started
    /// on a descriptor that has served already.
    pub fuse_program: Vec<OsString>,
    /// The command line of a program that calls `run_tool` with the words that are appended: to become a tool
    /// in its sandbox, to mount images, or to copy a new file system.
    pub tool_program: Vec<OsString>,
    /// Where no method is given, and nothing is mounted, take FUSE.
    pub prefers_fuse: bool,
    /// What the files of a disk may do on this machine.
    pub rights: Rights,
    /// Whether the mount namespace of this process can end with its processes, as `mounts_end_with_processes` says. The
    /// processes that serve the export leave it then.
    pub mounts_end: bool,
}

/// Knows the path by which the export is mounted. A secret one counts for a short time.
pub trait PathSource: fmt::Debug + Send + Sync {
    /// The name of the export below which the secret path is now: `.worker`, or `.export`. `None` if that cannot be said.
    fn mounts_below(&self) -> Option<&'static str>;

    /// The path now: that of the export with such a name and a secret below it, or that of the export alone, if the
    /// appliance has no other. Waits while the appliance is away.
    ///
    /// # Errors
    /// Why there is none.
    fn get(&self) -> Pin<Box<dyn Future<Output = Result<String, String>> + Send + '_>>;
}

/// What the files of a mounted disk may do on this machine. Who writes a disk chooses their owners
/// and modes, so a set-user-id program of root may be anybody's. By default they may do nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rights {
    /// Set-user-id and set-group-id bits and file capabilities count (`suid`; else `nosuid`).
    pub set_id: bool,
    /// Device files are devices (`dev`; else `nodev`).
    pub devices: bool,
}

impl Rights {
    /// Those of a container's root. Its users need set-id programs, and it makes device files; the
    /// engine's rules say which of them it may open. Only root may reach such a mount from outside.
    pub const CONTAINER: Self = Self { set_id: true, devices: true };

    /// The options of mount(8).
    fn options(self) -> &'static str {
        match (self.set_id, self.devices) {
            (true, true) => "suid,dev",
            (true, false) => "suid,nodev",
            (false, true) => "nosuid,dev",
            (false, false) => "nosuid,nodev",
        }
    }
}

/// What a mount shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source<'a> {
    /// The file at this path below the export.
    File(&'a str),
    /// The snapshot of this id; read-only.
    Snapshot(Uuid),
}

/// What a file holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileSystem {
    Ext4,
    Erofs,
}

impl FileSystem {
    /// The kernel's name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Erofs => image::FILE_SYSTEM,
        }
    }
}

/// Whether a mount may be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Access {
    /// It may.
    ReadWrite,
    /// It may not, and the loop device below, if there is one, refuses too.
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
    /// The device in between; none if an image is mounted from its file.
    pub loop_device: Option<PathBuf>,
}
