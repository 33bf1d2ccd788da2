//! Runs a tool of e2fsprogs on one file, mostly of the export, with nothing else of this machine in reach. The same
//! program mounts images (`mounter.rs`) and copies to devices (`sparse.rs`), without a sandbox.
//!
//! A container or another worker wrote the file, and the tools parse it byte by byte: what takes
//! one of them over must gain nothing.
//!
//! ```text
//!  daemon --> unshare: namespaces of its own for mounts, network, processes, IPC
//!               '--> `run_tool`, the same program again
//!                      opens the file: no link on the way, a regular file, by descriptor
//!                      root := tmpfs, read-only: /usr, /lib, ... (read-only), /disk = that file
//!                      a session of its own; no capabilities, none by exec, no user namespaces
//!                      '--> exec e2fsck /disk
//! ```
//!
//! The user stays root: another one may not open a file of our FUSE mount. Without capabilities and
//! with such a root it owns nothing but the file. There is no filter of system calls. It can read what
//! the machine has in its folders of programs, and descriptors that the caller of the program left
//! open for children are open here too.
//!
//! The file is opened by a child, because that can hang for as long as the appliance is away.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Write as _};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, fstat, openat, openat2};
use rustix::io::Errno;
use rustix::mount::{
    MountFlags, UnmountFlags, mount, mount_bind, mount_move, mount_remount, unmount,
};
use rustix::process::{
    Resource, Rlimit, Signal, chdir, chroot, pivot_root, set_parent_process_death_signal,
    setrlimit, setsid,
};
use rustix::thread::clear_ambient_capability_set;
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities, set_no_new_privs};

use crate::tools::files_of;
use crate::{Access, AttachError, image, sparse};

/// What the tool has as its file.
pub(crate) const DISK: &str = "/disk";

/// What `run_tool`'s program ends with when the tool did not begin. No tool of e2fsprogs does.
pub(crate) const NOT_BEGUN: u8 = 125;

/// The words between the file and the tool's command line.
const READ_WRITE: &str = "rw";
const READ_ONLY: &str = "ro";

/// Where the new root is put together, in the mount namespace of the tool alone. Every machine with
/// loop devices has it, and the tools need nothing of it.
const BASE: &str = "/sys";

/// The root is a directory of what is mounted there: the kernel lets no process make user
/// namespaces whose root is not that of its mount namespace (user_namespaces(7)). In one it would
/// have all capabilities.
const ROOT: &str = "root";

/// The root is a few names.
const ROOT_OPTIONS: &std::ffi::CStr = c"size=64k,mode=755";

/// Where programs and their libraries are; what is not there is left out.
const PROGRAM_FOLDERS: [&str; 8] =
    ["usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "nix/store"];

/// Settings of `mkfs.ext4`, here none.
pub(crate) const SETTINGS: &str = "/etc/mke2fs.conf";

/// Files without content, below the root. The tools look into the first two for what is mounted,
/// and `resize2fs` fails without.
const EMPTY_FILES: [&str; 3] = ["proc/mounts", "etc/mtab", "etc/mke2fs.conf"];

/// The first program that is ended when the machine runs out of memory (proc(5)). Children of the
/// driver are the last.
const ENDED_FIRST: &str = "1000";

/// Memory of a tool. To make, check and grow an empty disk of 16 TiB takes less. A disk that makes a
/// tool take more cannot be grown.
const ADDRESS_SPACE_BYTES_MAX: u64 = 4 << 30;

/// The words that lead to `run_tool`: the export or another directory, the path below it, and how it is opened. The
/// tool's own words follow.
pub(crate) fn words<'a>(directory: &'a Path, path: &'a str, access: Access) -> [&'a OsStr; 3] {
    let access = match access {
        Access::ReadWrite => READ_WRITE,
        Access::ReadOnly => READ_ONLY,
    };
    [directory.as_os_str(), OsStr::new(path), OsStr::new(access)]
}

/// Becomes a tool of e2fsprogs that has one file of the export and nothing else. `arguments` are
/// the words that were appended to `Options::tool_program`. It is called in namespaces of its own,
/// which `unshare` made. It returns only if that failed: the reason is on standard error, and the
/// process is to end with the answer as its status.
///
/// With the word `mount-images` alone it mounts images, as it is asked to by its standard input, a socket, until that
/// is closed. With the word `copy-data`, the path of a loop device and that of the file below it, it copies there what its
/// standard input holds. Either way it is called in the namespaces of its caller.
pub fn run_tool(arguments: &[OsString]) -> u8 {
    match arguments {
        [only] if only == image::MOUNT_IMAGES => return image::serve(),
        [first, device, file] if first == sparse::COPY_DATA => {
            return sparse::serve_copy(Path::new(device), Path::new(file));
        }
        _ => {}
    }
    let error = become_tool(arguments);
    // A standard error that is closed takes no words; the status says enough.
    let _ = writeln!(io::stderr(), "{error}");
    NOT_BEGUN
}

fn become_tool(arguments: &[OsString]) -> AttachError {
    let [export, path, access, tool, words @ ..] = arguments else {
        return AttachError::Path {
            got: format!("{arguments:?}"),
            reason: "expected a directory, a path below it, `rw` or `ro`, and a command line",
        };
    };
    let access = if access == READ_ONLY { Access::ReadOnly } else { Access::ReadWrite };
    let not_started = |source| AttachError::ToolStart {
        program: tool.to_string_lossy().into_owned(),
        package: "e2fsprogs",
        source,
    };
    let Some(program) = program(tool) else {
        return not_started(io::Error::new(
            io::ErrorKind::NotFound,
            format!("it is in none of /{}", PROGRAM_FOLDERS.join(", /")),
        ));
    };
    let prepared = open(Path::new(export), Path::new(path)).and_then(|file| {
        enter_root(file.as_fd(), access)?;
        give_up_rights()
    });
    match prepared {
        // The name that it is called by tells it what to do: mkfs.ext4 is mke2fs.
        Ok(()) => not_started(Command::new(program).arg0(tool).args(words).exec()),
        Err(error) => error,
    }
}

/// The file of a program that a sandbox has: the first of that name in the search path that lies,
/// links resolved, in a folder of programs.
pub(crate) fn program(name: &OsStr) -> Option<PathBuf> {
    let mut files = files_of(name).filter_map(|path| path.canonicalize().ok());
    let is_visible = |path: &PathBuf| {
        PROGRAM_FOLDERS.iter().any(|folder| path.starts_with(Path::new("/").join(folder)))
    };
    files.find(is_visible)
}

/// Opens a regular file of the export, by a path of which no part is a link.
pub(crate) fn open(export: &Path, path: &Path) -> Result<OwnedFd, AttachError> {
    let system = |action, path: &Path| {
        let path = path.to_owned();
        move |errno: Errno| AttachError::System { action, path, source: errno.into() }
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = openat(CWD, export, flags, Mode::empty()).map_err(system("open", export))?;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let not_regular = |reason: &str| AttachError::NotRegular {
        path: path.display().to_string(),
        reason: reason.to_owned(),
    };
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let opened = openat2(&folder, path, flags, Mode::empty(), resolve);
    let file = opened.map_err(|errno| match errno {
        Errno::LOOP => not_regular("a part of its path is a symbolic link"),
        other => system("open", path)(other),
    })?;
    let found = fstat(&file).map_err(system("look at", path))?;
    match FileType::from_raw_mode(found.st_mode) {
        FileType::RegularFile => Ok(file),
        FileType::Directory => Err(not_regular("it is a directory")),
        _ => Err(not_regular("it is a special file")),
    }
}

/// Makes a root of the programs and the file, and leaves the machine's own.
fn enter_root(file: BorrowedFd<'_>, access: Access) -> Result<(), AttachError> {
    let base = Path::new(BASE);
    let made = fs::write("/proc/self/oom_score_adj", ENDED_FIRST)
        .and_then(|()| make_root(base, file, access))
        .and_then(|()| leave_for(base));
    made.map_err(|source| AttachError::System {
        action: "make a root for a tool at",
        path: base.to_owned(),
        source,
    })
}

fn make_root(base: &Path, file: BorrowedFd<'_>, access: Access) -> io::Result<()> {
    let closed = MountFlags::NOSUID | MountFlags::NODEV;
    mount("none", base, "tmpfs", closed | MountFlags::NOEXEC, ROOT_OPTIONS)?;
    let root = &base.join(ROOT);
    fs::create_dir(root)?;
    for name in PROGRAM_FOLDERS {
        let (from, to) = (Path::new("/").join(name), root.join(name));
        let Ok(found) = fs::symlink_metadata(&from) else {
            continue;
        };
        if found.is_symlink() {
            std::os::unix::fs::symlink(fs::read_link(&from)?, &to)?;
        } else {
            fs::create_dir_all(&to)?;
            bind(&from, &to, closed | MountFlags::RDONLY)?;
        }
    }
    for name in EMPTY_FILES {
        let path = root.join(name);
        path.parent().map_or(Ok(()), fs::create_dir_all)?;
        fs::File::create_new(path)?;
    }
    let disk = root.join(DISK.trim_start_matches('/'));
    fs::File::create_new(&disk)?;
    // The descriptor's own name: what lies at the path by now does not matter.
    let opened = format!("/proc/self/fd/{}", file.as_raw_fd());
    let flags = match access {
        Access::ReadWrite => closed | MountFlags::NOEXEC,
        Access::ReadOnly => closed | MountFlags::NOEXEC | MountFlags::RDONLY,
    };
    bind(Path::new(&opened), &disk, flags)?;
    let flags = MountFlags::BIND | MountFlags::RDONLY | closed | MountFlags::NOEXEC;
    Ok(mount_remount(base, flags, c"")?)
}

/// The first call takes no flags, the second changes this mount only.
fn bind(from: &Path, to: &Path, flags: MountFlags) -> io::Result<()> {
    mount_bind(from, to)?;
    Ok(mount_remount(to, MountFlags::BIND | flags, c"")?)
}

/// Leaves the machine's root for good.
fn leave_for(base: &Path) -> io::Result<()> {
    chdir(base)?;
    match pivot_root(".", ".") {
        // The same place for both: the old root lies on the new one, and is taken off
        // (pivot_root(2)).
        Ok(()) => unmount(".", UnmountFlags::DETACH)?,
        // A machine that runs on its initramfs: that root cannot be taken off. The new one covers
        // it, and who has no capability does not leave it.
        Err(Errno::INVAL) => {
            mount_move(".", "/")?;
            chroot(".")?;
        }
        Err(other) => return Err(other.into()),
    }
    chdir("/")?;
    chroot(ROOT)?;
    Ok(chdir("/")?)
}

/// From here on the process is root in name alone.
fn give_up_rights() -> Result<(), AttachError> {
    let limit = |bytes| Rlimit { current: Some(bytes), maximum: Some(bytes) };
    let none = CapabilitySet::empty();
    let give_up = || {
        // A signal to the process group would reach that of the caller, namespace or not.
        setsid()?;
        setrlimit(Resource::As, limit(ADDRESS_SPACE_BYTES_MAX))?;
        setrlimit(Resource::Core, limit(0))?;
        // Before the sets: exec of a program by root would fill them again.
        set_no_new_privs(true)?;
        clear_ambient_capability_set()?;
        set_capabilities(
            None,
            CapabilitySets { effective: none, permitted: none, inheritable: none },
        )?;
        // `unshare` asked for it too, but that holds for the first thread alone.
        set_parent_process_death_signal(Some(Signal::KILL))
    };
    give_up().map_err(|errno: Errno| AttachError::System {
        action: "give up the rights of",
        path: "/proc/self".into(),
        source: errno.into(),
    })
}

#[cfg(test)]
mod tests;
