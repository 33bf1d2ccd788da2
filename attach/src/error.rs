//! What can go wrong when a disk is attached, and what to do about it.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;

/// A failed attach, detach or care of one. Its text is what the user of Docker reads.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// The text names no way to attach.
    #[error("`{got}` is no way to attach: write `nfs` or `fuse`")]
    UnknownMethod {
        /// The text.
        got: String,
    },
    /// The kernel or the machine lacks what is needed.
    #[error("{what} is missing on this machine: {advice}")]
    Missing {
        /// What is missing.
        what: String,
        /// What to do.
        advice: String,
    },
    /// A path leads out of the export, or is none.
    #[error("`{got}` is no path of a file below the export ({reason})")]
    Path {
        /// The path.
        got: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The export cannot be mounted.
    #[error(
        "cannot mount {export} of the appliance at {address}: {reason}; see that slackwaterd is running there and lets this machine in (--nfs-client)"
    )]
    Export {
        /// The appliance.
        address: SocketAddr,
        /// The export.
        export: String,
        /// What the kernel or the tool said.
        reason: String,
    },
    /// The appliance gives this machine no path by which it mounts the export.
    #[error("the appliance at {address} gives this machine no path to mount: {reason}")]
    NoPath {
        /// The appliance.
        address: SocketAddr,
        /// What its REST face said.
        reason: String,
    },
    /// The directory of the export shows another appliance, and disks of it are mounted.
    #[error(
        "{got} is mounted where {expected} should be, and disks of it are in use: stop what uses them, or take another state directory"
    )]
    OtherExport {
        /// What is mounted.
        got: String,
        /// What should be.
        expected: String,
    },
    /// The file or snapshot is not on the appliance.
    #[error("the appliance at {address} has no `{path}`")]
    NotFound {
        /// The appliance.
        address: SocketAddr,
        /// The path below the export.
        path: String,
    },
    /// What has the name of a disk on the appliance is no regular file of it.
    #[error(
        "`{path}` of the appliance is not used as a disk: {reason}, expected a regular file; a disk does not become that by itself, look for what replaced it"
    )]
    NotRegular {
        /// The path below the export.
        path: String,
        /// What it is.
        reason: String,
    },
    /// Something else is mounted at the target.
    #[error("{} is taken: {got} is mounted there, not {expected}; unmount it first", target.display())]
    Occupied {
        /// The directory.
        target: PathBuf,
        /// What is there.
        got: String,
        /// What should be there.
        expected: String,
    },
    /// The source is attached in a way that excludes the wanted one.
    #[error("`{path}` is still in use through {}: wait until the containers that use it have ended", through.display())]
    InUse {
        /// The path below the export.
        path: String,
        /// The device that is on it, or the directory at which it is mounted.
        through: PathBuf,
    },
    /// The disk holds no file system that can be mounted.
    #[error(
        "the file system on `{path}` cannot be mounted: {reason}; see `e2fsck` and `slackwater check`"
    )]
    Damaged {
        /// The path below the export.
        path: String,
        /// What the tool said.
        reason: String,
    },
    /// The file or snapshot holds no image that can be mounted.
    #[error(
        "`{path}` holds no EROFS image that can be mounted: {reason}; write it again, or attach it as an ext4 if it is one"
    )]
    BadImage {
        /// The path below the export.
        path: String,
        /// What the tool said.
        reason: String,
    },
    /// An image was not mounted.
    #[error("image `{path}` cannot be mounted: {reason}")]
    Image {
        /// The path below the export.
        path: String,
        /// What the kernel said.
        reason: String,
    },
    /// An image was not unmounted.
    #[error("the image at {} cannot be unmounted: {reason}", target.display())]
    Unmount {
        /// The directory.
        target: PathBuf,
        /// What the kernel said.
        reason: String,
    },
    /// A disk that was not unmounted before, as a snapshot of one that was in use.
    #[error(
        "the journal of `{path}` has to be replayed, as it was in use, and it cannot be written so: attach it with writes, or a clone of it, as of a snapshot (`slackwater-driver attach --clone`)"
    )]
    Journal {
        /// The path below the export.
        path: String,
    },
    /// Writes to a mounted disk did not reach the appliance, and never will. The kernel tells of
    /// that once.
    #[error("what was written last to the disk at {} is lost: {reason}", target.display())]
    LostWrites {
        /// Where it is mounted.
        target: PathBuf,
        /// What the tool said.
        reason: String,
    },
    /// Nothing of ours is mounted there.
    #[error("nothing is mounted at {}", target.display())]
    NotMounted {
        /// The directory.
        target: PathBuf,
    },
    /// Disks are mounted still.
    #[error("{} disks are mounted still, the first at {}: stop what uses them", targets.len(), targets.first().map(|target| target.display().to_string()).unwrap_or_default())]
    Busy {
        /// Where.
        targets: Vec<PathBuf>,
    },
    /// The appliance, or a tool, did not come to an end.
    #[error("{action} was given up after {} seconds: the appliance at {address} does not answer; see that slackwaterd is running there", limit.as_secs())]
    TimedOut {
        /// What was being done.
        action: String,
        /// The appliance.
        address: SocketAddr,
        /// The time that it had.
        limit: Duration,
    },
    /// A tool could not be started.
    #[error("cannot start `{program}` ({source}): install the package {package}")]
    ToolStart {
        /// The tool.
        program: String,
        /// Debian's package of it.
        package: &'static str,
        /// Why.
        source: io::Error,
    },
    /// A tool failed.
    #[error("`{command}` failed ({status}): {reason}")]
    Tool {
        /// The command line.
        command: String,
        /// How it ended.
        status: ExitStatus,
        /// What it said.
        reason: String,
    },
    /// A new file system was not brought to the appliance.
    #[error(
        "the file system that was made for `{path}` cannot be copied to the appliance at {address}: {reason}; see whether it is full (`slackwater stats`), and its log"
    )]
    NotCopied {
        /// The appliance.
        address: SocketAddr,
        /// The path below the export.
        path: String,
        /// What the copying process said.
        reason: String,
    },
    /// A tool was not let at a file, because the file is none that it may have, or because its
    /// sandbox could not be made.
    #[error("a tool cannot work on `{path}`: {reason}")]
    Sandbox {
        /// The path below the export.
        path: String,
        /// Why not.
        reason: String,
    },
    /// A call of the system failed.
    #[error("cannot {action} {}: {source}", path.display())]
    System {
        /// What was being done.
        action: &'static str,
        /// To what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The work ended without a result, as it does when the program stops.
    #[error("attaching was interrupted because the program is stopping")]
    Interrupted,
}
