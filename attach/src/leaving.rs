//! How the keeper and the server of a FUSE export leave the mount namespace of the disks, where that ends with its
//! processes, as in a container.
//!
//! ```text
//! mount namespace of the container      one of their own, without the disks
//!   daemon, engine, containers            keeper, server: /dev/fuse
//!   ext4 on a loop device on the export
//! ```
//!
//! The last process of a mount namespace unmounts, as it ends, what is mounted there. When all processes of a container
//! are killed at once, that may be one that holds `/dev/fuse`. To unmount an ext4 is to write to the export, which no
//! process serves any more. The kernel would end the connection, and with it the wait, when the last descriptor of
//! `/dev/fuse` is closed; but that process closes its own only after it has unmounted (`task_work_run` of Linux: the
//! newest first). It would wait for itself until the machine is started again. So none that holds `/dev/fuse` stays in
//! such a namespace but for the moment in which a keeper is started. The daemon has to, so it holds none: it asks the
//! server for a copy when it has to start another keeper.
//!
//! A machine's own namespace lasts as long as the machine. There they stay, and the daemon keeps a copy of its own.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::mount::{MountPropagationFlags, UnmountFlags};

use crate::kernel::{self, MountPoint};
use crate::tools::UNSHARE;
use crate::{AttachError, keeper, serving};

/// The process namespace of the machine itself (Linux, `PROC_PID_INIT_INO`).
const MACHINE: &str = "pid:[4026531836]";

/// Gives a keeper the mount namespace that it has left, as the kernel names it.
const LEFT_VARIABLE: &str = "SLACKWATER_LEFT_MOUNTS";

/// What names of loop devices begin with.
const LOOP_DEVICES: &[u8] = b"/dev/loop";

/// Where this process's mount namespace has its name.
const OWN_MOUNTS: &str = "/proc/self/ns/mnt";

/// What a server needs of the machine besides the files that it is given: what Linux itself shows, and folders in which
/// others keep what they answer for it, such as names.
const NEEDED: [&str; 7] = ["/dev", "/lib", "/lib64", "/proc", "/run", "/sys", "/var"];

/// It needs these with all that is mounted in them, such as a container's `/etc/resolv.conf`, and roots of certificates.
const NEEDED_WHOLE: [&str; 2] = ["/etc", "/usr"];

/// Where roots of certificates are instead, if it is given: files and folders, with `:` between them.
const ROOTS: [&str; 2] = ["SSL_CERT_FILE", "SSL_CERT_DIR"];

/// Whether the mount namespace of this process can end before the machine does: it is not that of the machine's first
/// process. What cannot be looked at counts as such.
#[must_use]
pub fn mounts_end_with_processes() -> bool {
    let name = |path: &str| fs::read_link(path).ok();
    let is_machine = name("/proc/self/ns/pid").is_some_and(|space| space == Path::new(MACHINE));
    let own = name(OWN_MOUNTS);
    !(is_machine && own.is_some() && own == name("/proc/1/ns/mnt"))
}

/// The command of a keeper, which leaves the mount namespace of this process for a copy of it, if it has to.
pub(crate) fn keeper_command(program: &[OsString], leaves: bool) -> io::Result<Command> {
    let mut plain = keeper::command_of(program)?;
    if !leaves {
        plain.env_remove(LEFT_VARIABLE);
        return Ok(plain);
    }
    let mut command = Command::new(UNSHARE.program);
    command.args(["--mount", "--propagation", "private", "--"]).args(program);
    command.env(LEFT_VARIABLE, fs::read_link(OWN_MOUNTS)?);
    Ok(command)
}

/// In a keeper that was to leave a mount namespace: lets go of all that is mounted in its copy but on the way to a
/// path of `words` or of what each process needs.
///
/// # Errors
/// It is in no copy, or a disk or an export is still mounted in it.
pub(crate) fn let_go<'a>(words: impl Iterator<Item = &'a OsStr>) -> Result<(), AttachError> {
    let Some(left) = std::env::var_os(LEFT_VARIABLE) else { return Ok(()) };
    let own = fs::read_link(OWN_MOUNTS).map_err(failed("look at", OWN_MOUNTS))?;
    if own == Path::new(&left) || !mounts_end_with_processes() {
        // What is unmounted here would be gone for all.
        let got = own.display();
        let text = format!("the mount namespace is {got}; expected a copy of {}", left.display());
        return Err(failed("leave", OWN_MOUNTS)(io::Error::other(text)));
    }
    // `unshare` has done so, whichever program that was.
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", private)
        .map_err(|error| failed("change", "/")(error.into()))?;
    let kept = kept(words).map_err(failed("look at", "the files of the keeper"))?;
    let is_kept = |point: &MountPoint| {
        NEEDED_WHOLE.iter().any(|path| point.target.starts_with(path))
            || kept.iter().any(|path| path.starts_with(&point.target))
    };
    // Not by links, which would lead to mounts that stay. What was mounted last may lie on what was mounted before.
    let flags = UnmountFlags::DETACH | UnmountFlags::NOFOLLOW;
    for point in kernel::mount_points()?.iter().rev().filter(|point| !is_kept(point)) {
        if let Err(error) = rustix::mount::unmount(&point.target, flags) {
            tracing::debug!(%error, target = %point.target.display(), "it stays mounted here");
        }
    }
    let is_disk = |point: &MountPoint| {
        let is_on_loop = point.source.as_os_str().as_bytes().starts_with(LOOP_DEVICES);
        (is_on_loop || point.kind == serving::FILE_SYSTEM) && !is_kept(point)
    };
    match kernel::mount_points()?.into_iter().find(is_disk) {
        None => Ok(()),
        Some(point) => Err(failed("let go of", point.target)(io::Error::other("it stays mounted"))),
    }
}

/// The paths whose mounts stay, also as they are without links.
fn kept<'a>(words: impl Iterator<Item = &'a OsStr>) -> io::Result<Vec<PathBuf>> {
    let directory = std::env::current_dir()?;
    let mut kept: Vec<PathBuf> = NEEDED.iter().map(PathBuf::from).collect();
    kept.extend(words.map(|word| directory.join(word)));
    for roots in ROOTS.iter().filter_map(std::env::var_os) {
        kept.extend(std::env::split_paths(&roots));
    }
    kept.push(std::env::current_exe()?);
    kept.push(directory);
    let resolved: Vec<_> = kept.iter().filter_map(|path| fs::canonicalize(path).ok()).collect();
    kept.extend(resolved);
    Ok(kept)
}

fn failed(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> AttachError {
    let path = path.into();
    move |source| AttachError::System { action, path, source }
}
