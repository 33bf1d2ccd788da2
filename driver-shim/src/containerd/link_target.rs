//! The file that the hard link in a reference names, while containerd unpacks.
//!
//! No engine without the driver can make that link, as no layer has a file of that name. containerd unpacks layers itself,
//! also where the driver runs, and only at Commit is it known what it unpacked:
//!
//! ```text
//! Prepare of an unpacker    the file is made
//! Commit    a reference     the snapshot that it names is adopted; the disk goes, and the file with it
//!           a layer         the file is removed
//!           a layer that has a link to the file   refused, as every other engine does; unless the layer hides or
//!                                                 replaces the file
//! ```
//!
//! - The file holds the snapshot's key, whose random part no image knows. A file of that name with other content is
//!   the layer's own, and stays.
//! - The times of the root directory are what they would be without the file.

use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat, Timespec, Timestamps};
use rustix::io::Errno;
use slackwater_archive::{REFERENCE_LINK, REFERENCE_LINK_TARGET};

use crate::worker::Key;

/// Makes the file in the root directory of a snapshot that a layer is about to be unpacked into. What has that name
/// already stays.
pub(super) fn make(root: &Path, key: &Key) -> std::io::Result<()> {
    let root = open_root(root)?;
    let times = times(&root)?;
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
    match rustix::fs::openat(&root, REFERENCE_LINK_TARGET, flags, Mode::RUSR) {
        Ok(file) => std::fs::File::from(file).write_all(key.name.as_bytes())?,
        Err(Errno::EXIST) => return Ok(()),
        Err(error) => return Err(error.into()),
    }
    Ok(rustix::fs::futimens(&root, &times)?)
}

/// What there is after an unpack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    /// The file as it was made, and not another one of its name.
    pub(super) is_own: bool,
    /// Something is a link to the file; or the name of a reference's link and the name of the file are one inode.
    pub(super) is_linked: bool,
}

/// Looks for the file of the snapshot with this key.
pub(super) fn find(root: &Path, key: &Key) -> std::io::Result<Found> {
    let root = open_root(root)?;
    // Looked at before it is opened, as opening a device is an action; and never through a link.
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let open = |name| match rustix::fs::openat(&root, name, flags, Mode::empty()) {
        Ok(place) => Ok(Some((rustix::fs::fstat(&place)?, place))),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(std::io::Error::from(error)),
    };
    let Some((stat, place)) = open(REFERENCE_LINK_TARGET)? else { return Ok(Found::default()) };
    let is_own = holds(&place, &stat, key.name.as_bytes())?;
    let is_same = open(REFERENCE_LINK)?.is_some_and(|(link, _)| link.st_ino == stat.st_ino);
    Ok(Found { is_own, is_linked: is_same || (is_own && stat.st_nlink > 1) })
}

/// Whether this is a file with that content.
fn holds(place: &OwnedFd, stat: &Stat, expected: &[u8]) -> std::io::Result<bool> {
    let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    if !is_file || u64::try_from(stat.st_size) != Ok(expected.len() as u64) {
        return Ok(false);
    }
    let file = std::fs::File::open(format!("/proc/self/fd/{}", place.as_raw_fd()))?;
    let mut content = Vec::with_capacity(expected.len());
    file.take(expected.len() as u64).read_to_end(&mut content)?;
    Ok(content == expected)
}

/// Removes the file, which was found; another call may be faster.
pub(super) fn remove(root: &Path) -> std::io::Result<()> {
    let root = open_root(root)?;
    let times = times(&root)?;
    match rustix::fs::unlinkat(&root, REFERENCE_LINK_TARGET, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(rustix::fs::futimens(&root, &times)?),
        Err(error) => Err(error.into()),
    }
}

fn open_root(root: &Path) -> std::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::open(root, flags, Mode::empty())?)
}

fn times(root: &OwnedFd) -> std::io::Result<Timestamps> {
    let stat = rustix::fs::fstat(root)?;
    let time =
        |seconds: i64, nanos: u64| Timespec { tv_sec: seconds, tv_nsec: nanos.cast_signed() };
    Ok(Timestamps {
        last_access: time(stat.st_atime, stat.st_atime_nsec),
        last_modification: time(stat.st_mtime, stat.st_mtime_nsec),
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, symlink};
    use std::time::{Duration, SystemTime};

    use super::*;

    const NOTHING: Found = Found { is_own: false, is_linked: false };
    const ALONE: Found = Found { is_own: true, is_linked: false };
    const LINKED: Found = Found { is_own: true, is_linked: true };

    fn key() -> Key {
        Key::containerd("x/1/extract-775838128-m-A0 sha256:00".to_owned())
    }

    /// A root directory with an old time, and where the file is.
    fn root() -> (tempfile::TempDir, std::path::PathBuf) {
        let root = tempfile::tempdir().unwrap();
        let past = SystemTime::UNIX_EPOCH + Duration::new(1_000_000_000, 123_456_789);
        fs::File::open(root.path()).unwrap().set_modified(past).unwrap();
        let file = root.path().join(REFERENCE_LINK_TARGET);
        (root, file)
    }

    #[test]
    fn it_leaves_the_root_as_it_was() {
        let (root, file) = root();
        let modified = || {
            let metadata = fs::metadata(root.path()).unwrap();
            (metadata.mtime(), metadata.mtime_nsec())
        };
        let before = modified();
        assert_eq!(find(root.path(), &key()).unwrap(), NOTHING);
        make(root.path(), &key()).unwrap();
        assert_eq!((find(root.path(), &key()).unwrap(), modified()), (ALONE, before));
        fs::hard_link(&file, root.path().join("link")).unwrap();
        assert_eq!(find(root.path(), &key()).unwrap(), LINKED);
        fs::remove_file(root.path().join("link")).unwrap();
        fs::File::open(root.path())
            .unwrap()
            .set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(7))
            .unwrap();
        remove(root.path()).unwrap();
        assert_eq!((find(root.path(), &key()).unwrap(), modified()), (NOTHING, (7, 0)));
        remove(root.path()).unwrap();
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_a_layer_has_under_its_name_is_not_taken_for_it() {
        let (root, file) = root();
        let other = Key::containerd("x/1/extract-775838129-m-A0 sha256:00".to_owned());
        make(root.path(), &other).unwrap();
        make(root.path(), &key()).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), other.name, "written over");
        let link = root.path().join(REFERENCE_LINK);
        fs::hard_link(&file, &link).unwrap();
        let found = find(root.path(), &key()).unwrap();
        assert_eq!(found, Found { is_own: false, is_linked: true });
        fs::remove_file(&link).unwrap();
        assert_eq!(find(root.path(), &key()).unwrap(), NOTHING);
        fs::remove_file(&file).unwrap();
        let elsewhere = root.path().join("elsewhere");
        fs::write(&elsewhere, &key().name).unwrap();
        symlink(&elsewhere, &file).unwrap();
        assert_eq!(find(root.path(), &key()).unwrap(), NOTHING);
        fs::remove_file(&file).unwrap();
        fs::create_dir(&file).unwrap();
        assert_eq!(find(root.path(), &key()).unwrap(), NOTHING);
        fs::remove_dir(&file).unwrap();
        // It has no writer: to open it would not end.
        rustix::fs::mknodat(rustix::fs::CWD, &file, FileType::Fifo, Mode::RUSR, 0).unwrap();
        assert_eq!(find(root.path(), &key()).unwrap(), NOTHING);
    }
}
