//! The owner of a data directory: what root makes in it while the server is stopped is given to that owner, who could not
//! open the store else.
//!
//! ```text
//! data directory          of the user that the service runs as
//!   index/, segments, ... of root, if `slackwaterd check` by root made them --> of that user
//! ```
//! Invariants: what lies outside of the directory keeps its owner, whatever its owner puts there. No link is followed, and a
//! file is given only by a descriptor of it, if it has one name alone.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Gid, Mode, OFlags, Stat, Uid};
use rustix::process::geteuid;

/// Directories inside each other: a store has four.
const DEPTH_MAX: usize = 16;

/// How a directory is opened, to be read.
const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// Gives what root has in the data directory to the directory's owner. Nothing happens if this process is not root's, or
/// the directory is.
///
/// # Errors
/// The system refuses it: the rest is root's still.
pub(crate) fn give_to_owner(data_dir: &Path) -> io::Result<()> {
    let directory = rustix::fs::openat(CWD, data_dir, DIRECTORY, Mode::empty())?;
    let owner = rustix::fs::fstat(&directory)?;
    if !geteuid().is_root() || owner.st_uid == 0 {
        return Ok(());
    }
    give_all(&directory, &owner, DEPTH_MAX)
}

fn give_all(directory: &OwnedFd, owner: &Stat, depth: usize) -> io::Result<()> {
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        if name != c"." && name != c".." {
            give_one(directory, name, owner, depth)?;
        }
    }
    Ok(())
}

fn give_one(directory: &OwnedFd, name: &CStr, owner: &Stat, depth: usize) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let entry = rustix::fs::openat(directory, name, flags, Mode::empty())?;
    let found = rustix::fs::fstat(&entry)?;
    let is_given = match FileType::from_raw_mode(found.st_mode) {
        FileType::Directory if depth > 0 => {
            let inner = rustix::fs::openat(&entry, c".", DIRECTORY, Mode::empty())?;
            give_all(&inner, owner, depth - 1)?;
            true
        }
        // One with another name may be a file of the machine.
        FileType::RegularFile => found.st_nlink == 1,
        _ => false,
    };
    if is_given && found.st_uid == 0 {
        give(entry.as_fd(), owner)?;
    }
    Ok(())
}

fn give(entry: impl AsFd, owner: &Stat) -> io::Result<()> {
    let (user, group) = (Uid::from_raw(owner.st_uid), Gid::from_raw(owner.st_gid));
    Ok(rustix::fs::chownat(entry, c"", Some(user), Some(group), AtFlags::EMPTY_PATH)?)
}
