//! A directory tree that belongs to somebody else: the only way in.
//!
//! Paths are relative to the root and are *resolved*: no component is a symbolic link, `.` or
//! `..`. [`Root::place`] makes such a path of a name from an archive: links in the middle of the
//! name are followed the way a process would that has this directory as its root. Everything else
//! opens resolved paths with `RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS`, so that even a mistake here
//! ends in an error and not outside.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use crate::error::{ArchiveError, failed, shown};
use crate::pax::{Records, Time};

/// Symbolic links followed for one name: the kernel's own limit.
const LINKS_MAX: u32 = 40;

/// Permissions of a directory that an archive uses but does not list.
pub(crate) const IMPLIED_DIRECTORY_MODE: u32 = 0o755;

/// What statfs(2) calls EROFS.
const EROFS_SUPER_MAGIC: u64 = 0xe0f5_e1e2;

/// Bytes of a path that the kernel takes, without the NUL.
const PATH_BYTES_MAX: usize = 4095;

/// How often extended attributes that became longer while they were read are read again.
const XATTR_RETRIES: u32 = 8;

/// Set by the engine for the machine it runs on: it belongs to no layer.
const XATTR_OF_THE_MACHINE: &[u8] = b"security.selinux";

/// The root of a tree.
#[derive(Debug)]
pub(crate) struct Root {
    directory: OwnedFd,
}

/// A name in an open directory.
#[derive(Debug)]
pub(crate) struct Place {
    /// The directory.
    pub(crate) parent: OwnedFd,
    /// The name in it; `.` for the root itself.
    pub(crate) name: OsString,
    /// The resolved path; empty for the root itself.
    pub(crate) path: PathBuf,
}

/// An entry of a directory.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub(crate) name: OsString,
    pub(crate) stat: Stat,
}

impl Root {
    /// Opens the root of a tree.
    pub(crate) fn open(path: &Path) -> Result<Self, ArchiveError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::openat(CWD, path, flags, Mode::empty())
            .map_err(failed("open the directory", path))?;
        Ok(Self { directory })
    }

    fn open_resolved(&self, path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        let resolve =
            ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        rustix::fs::openat2(&self.directory, path, flags, Mode::empty(), resolve)
    }

    /// Whether the tree is an EROFS image, without anything above.
    pub(crate) fn is_erofs(&self) -> Result<bool, ArchiveError> {
        let file_system = rustix::fs::fstatfs(&self.directory);
        let file_system = file_system.map_err(failed("look up", Path::new("/")))?;
        Ok(u64::try_from(file_system.f_type).is_ok_and(|kind| kind == EROFS_SUPER_MAGIC))
    }

    /// Opens a directory by its resolved path.
    pub(crate) fn directory(&self, path: &Path) -> Result<OwnedFd, Errno> {
        self.open_resolved(path, OFlags::RDONLY | OFlags::DIRECTORY)
    }

    /// Opens a regular file by its resolved path. Nothing else is opened, whatever took its place
    /// meanwhile: to open a device can be to do something, and a FIFO has one wait for its other end.
    pub(crate) fn file(&self, path: &Path) -> Result<std::fs::File, Errno> {
        let handle = self.open_resolved(path, OFlags::PATH)?;
        let stat = rustix::fs::fstat(&handle)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(Errno::INVAL);
        }
        let path = format!("/proc/self/fd/{}", handle.as_raw_fd());
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
        Ok(rustix::fs::open(path, flags, Mode::empty())?.into())
    }

    /// The place of a resolved path.
    pub(crate) fn resolved(&self, path: &Path) -> Result<Place, Errno> {
        let (parent, name) = match (path.parent(), path.file_name()) {
            (Some(parent), Some(name)) => (parent, name),
            _ => (Path::new(""), OsStr::new(".")),
        };
        let parent = self.directory(parent)?;
        Ok(Place { parent, name: name.to_owned(), path: path.to_owned() })
    }

    /// What is at a resolved path: nothing also if something on the way there is no directory.
    pub(crate) fn look_up(&self, path: &Path) -> Result<Option<(Place, Stat)>, ArchiveError> {
        match self.resolved(path) {
            Ok(place) => Ok(place.stat()?.map(|stat| (place, stat))),
            Err(Errno::NOENT | Errno::LOOP | Errno::NOTDIR) => Ok(None),
            Err(errno) => Err(failed("open the directory of", path)(errno)),
        }
    }

    /// The place of a name from an archive, cleaned by [`clean`]. Links before the last component
    /// are followed within the root; missing directories are made if `makes_parents`.
    pub(crate) fn place(
        &self,
        member: &str,
        name: &Path,
        makes_parents: bool,
    ) -> Result<Place, ArchiveError> {
        // Mostly there is no link and nothing missing: one call of the kernel.
        match self.resolved(name) {
            Ok(place) => return Ok(place),
            Err(Errno::NOENT | Errno::LOOP | Errno::NOTDIR) => {}
            Err(errno) => return Err(failed("open the directory of", name)(errno)),
        }
        let parent = name.parent().unwrap_or(Path::new(""));
        let resolved = self.follow(member, parent, makes_parents)?;
        let path = resolved.join(name.file_name().unwrap_or_default());
        self.resolved(&path).map_err(failed("open the directory of", &path))
    }

    /// Resolves a path of directories.
    fn follow(
        &self,
        member: &str,
        path: &Path,
        makes_parents: bool,
    ) -> Result<PathBuf, ArchiveError> {
        follow(member, path, |here| {
            let place = self.resolved(here).map_err(failed("open the directory of", here))?;
            let Some(stat) = place.stat()? else {
                if !makes_parents {
                    return Err(missing(member, here));
                }
                let mode = Mode::from_raw_mode(IMPLIED_DIRECTORY_MODE);
                rustix::fs::mkdirat(&place.parent, &place.name, mode)
                    .map_err(failed("make the directory", here))?;
                // Whatever the umask took.
                place.chmod(IMPLIED_DIRECTORY_MODE)?;
                return Ok(Component::Directory);
            };
            Ok(match FileType::from_raw_mode(stat.st_mode) {
                FileType::Directory => Component::Directory,
                FileType::Symlink => Component::Link(place.link_target()?),
                _ => Component::Other,
            })
        })
    }

    /// The names in a directory by its resolved path, in no order: however many they are, they are
    /// not all in memory.
    pub(crate) fn listing(&self, path: &Path) -> Result<Listing, ArchiveError> {
        let open = || -> Result<Listing, Errno> {
            let directory = self.directory(path)?;
            let entries = Dir::read_from(&directory)?;
            Ok(Listing { directory, entries, path: path.to_owned() })
        };
        open().map_err(failed("list the directory", path))
    }

    /// The entries of a directory by its resolved path, in the order of their bytes.
    pub(crate) fn entries(&self, path: &Path) -> Result<Vec<Entry>, ArchiveError> {
        let list = || -> Result<Vec<Entry>, Errno> {
            let directory = self.directory(path)?;
            let mut entries = Vec::new();
            for entry in Dir::read_from(&directory)? {
                let name = OsString::from_vec(entry?.file_name().to_bytes().to_vec());
                if name != "." && name != ".." {
                    let stat = rustix::fs::statat(&directory, &name, AtFlags::SYMLINK_NOFOLLOW)?;
                    entries.push(Entry { name, stat });
                }
            }
            entries.sort_by(|one, other| one.name.cmp(&other.name));
            Ok(entries)
        };
        list().map_err(failed("list the directory", path))
    }
}

/// What is at a path that is being resolved.
pub(crate) enum Component {
    Directory,
    /// A symbolic link, and where it leads.
    Link(OsString),
    Other,
}

/// Resolves a path of directories, component by component; `find` says what is at a path whose
/// parent is resolved.
pub(crate) fn follow(
    member: &str,
    path: &Path,
    mut find: impl FnMut(&Path) -> Result<Component, ArchiveError>,
) -> Result<PathBuf, ArchiveError> {
    let error = |reason: String| ArchiveError::Member { member: member.to_owned(), reason };
    let mut ahead: VecDeque<OsString> = components(path.as_os_str()).collect();
    let mut resolved = PathBuf::new();
    let mut links = 0;
    while let Some(name) = ahead.pop_front() {
        if name == ".." {
            // Above the root is the root, as for a process that lives in it.
            resolved.pop();
            continue;
        }
        let here = resolved.join(&name);
        if here.as_os_str().len() > PATH_BYTES_MAX {
            return Err(error(format!("its path has more than {PATH_BYTES_MAX} bytes")));
        }
        match find(&here)? {
            Component::Directory => resolved = here,
            Component::Link(target) => {
                links += 1;
                if links > LINKS_MAX {
                    return Err(error(format!("more than {LINKS_MAX} links in its path")));
                }
                if target.as_bytes().starts_with(b"/") {
                    resolved.clear();
                }
                for component in components(&target).collect::<Vec<_>>().into_iter().rev() {
                    ahead.push_front(component);
                }
            }
            Component::Other => {
                return Err(error(format!("`{}` is not a directory", here.display())));
            }
        }
    }
    Ok(resolved)
}

/// The error of a member whose path leads through what is not there.
pub(crate) fn missing(member: &str, path: &Path) -> ArchiveError {
    let reason = format!("`{}` does not exist", path.display());
    ArchiveError::Member { member: member.to_owned(), reason }
}

/// A directory that is read entry by entry.
pub(crate) struct Listing {
    directory: OwnedFd,
    entries: Dir,
    path: PathBuf,
}

impl Listing {
    /// The next name, and whether it is of a directory. What was listed may be removed meanwhile.
    pub(crate) fn next(&mut self) -> Result<Option<(OsString, bool)>, ArchiveError> {
        let mut next = || -> Result<Option<(OsString, bool)>, Errno> {
            while let Some(entry) = self.entries.read() {
                let entry = entry?;
                let name = OsString::from_vec(entry.file_name().to_bytes().to_vec());
                if name == "." || name == ".." {
                    continue;
                }
                let kind = match entry.file_type() {
                    // Not every file system tells.
                    FileType::Unknown => {
                        let flags = AtFlags::SYMLINK_NOFOLLOW;
                        let stat = rustix::fs::statat(&self.directory, &name, flags)?;
                        FileType::from_raw_mode(stat.st_mode)
                    }
                    kind => kind,
                };
                return Ok(Some((name, kind == FileType::Directory)));
            }
            Ok(None)
        };
        next().map_err(failed("list the directory", &self.path))
    }
}

impl Place {
    /// The attributes of what is there, if anything is.
    pub(crate) fn stat(&self) -> Result<Option<Stat>, ArchiveError> {
        match rustix::fs::statat(&self.parent, &self.name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(stat)),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(failed("look up", &self.path)(errno)),
        }
    }

    /// Where a symbolic link leads.
    pub(crate) fn link_target(&self) -> Result<OsString, ArchiveError> {
        let target = rustix::fs::readlinkat(&self.parent, &self.name, Vec::new())
            .map_err(failed("read the link", &self.path))?;
        Ok(OsString::from_vec(target.into_bytes()))
    }

    /// Sets the permissions of what is no symbolic link.
    pub(crate) fn chmod(&self, mode: u32) -> Result<(), ArchiveError> {
        let mode = Mode::from_raw_mode(mode);
        rustix::fs::chmodat(&self.parent, &self.name, mode, AtFlags::empty())
            .map_err(failed("set the permissions of", &self.path))
    }

    /// Sets the time of the last change; that of the last read becomes the same.
    pub(crate) fn set_modified(&self, time: Time) -> Result<(), ArchiveError> {
        let time =
            rustix::fs::Timespec { tv_sec: time.seconds, tv_nsec: i64::from(time.nanoseconds) };
        let times = rustix::fs::Timestamps { last_access: time, last_modification: time };
        rustix::fs::utimensat(&self.parent, &self.name, &times, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(failed("set the times of", &self.path))
    }

    /// A path by which the kernel finds this place. The calls for extended attributes take
    /// neither a directory nor a handle of a link or device.
    fn kernel_path(&self) -> PathBuf {
        let directory = PathBuf::from(format!("/proc/self/fd/{}", self.parent.as_raw_fd()));
        directory.join(&self.name)
    }

    /// The extended attributes that belong to the layer.
    pub(crate) fn xattrs(&self) -> Result<Records, ArchiveError> {
        let path = self.kernel_path();
        let read_value = |name: &[u8]| -> Result<Vec<u8>, Errno> {
            let mut value = vec![0; rustix::fs::lgetxattr_query(&path, name)?];
            let length = rustix::fs::lgetxattr(&path, name, &mut value[..])?;
            value.truncate(length);
            Ok(value)
        };
        let read = || -> Result<Records, Errno> {
            let mut names = vec![0; rustix::fs::llistxattr_query(&path)?];
            let length = rustix::fs::llistxattr(&path, &mut names[..])?;
            // Without room for names, the call asks for their length again.
            let names = names.get(..length).ok_or(Errno::RANGE)?;
            let mut xattrs = Records::new();
            for name in names.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
                if name == XATTR_OF_THE_MACHINE {
                    continue;
                }
                match read_value(name) {
                    Ok(value) => drop(xattrs.insert(name.to_vec(), value)),
                    // Removed since it was listed.
                    Err(Errno::NODATA) => {}
                    Err(errno) => return Err(errno),
                }
            }
            Ok(xattrs)
        };
        let mut xattrs = read();
        for _ in 0..XATTR_RETRIES {
            if xattrs != Err(Errno::RANGE) {
                break;
            }
            xattrs = read();
        }
        match xattrs {
            Err(Errno::NOTSUP) => Ok(Records::new()),
            result => result.map_err(failed("read the extended attributes of", &self.path)),
        }
    }

    /// Makes `wanted` the extended attributes.
    pub(crate) fn set_xattrs(&self, wanted: &Records) -> Result<(), ArchiveError> {
        let present = self.xattrs()?;
        let path = self.kernel_path();
        let error = failed("set the extended attributes of", &self.path);
        let write = || -> Result<(), Errno> {
            for name in present.keys().filter(|name| !wanted.contains_key(*name)) {
                rustix::fs::lremovexattr(&path, &name[..])?;
            }
            for (name, value) in
                wanted.iter().filter(|(name, value)| present.get(*name) != Some(value))
            {
                let flags = rustix::fs::XattrFlags::empty();
                rustix::fs::lsetxattr(&path, &name[..], value, flags)?;
            }
            Ok(())
        };
        write().map_err(error)
    }
}

/// The components of a path, `.` and empty ones left out.
fn components(path: &OsStr) -> impl Iterator<Item = OsString> {
    let parts = path.as_bytes().split(|byte| *byte == b'/');
    let parts = parts.filter(|part| !part.is_empty() && *part != b".");
    parts.map(|part| OsStr::from_bytes(part).to_owned())
}

/// A name from an archive as a path below the root: `.`, and `..` within the name, taken out as
/// other engines do. A name that leads above the root is refused.
pub(crate) fn clean(member: &str, name: &[u8]) -> Result<PathBuf, ArchiveError> {
    let mut path = PathBuf::new();
    for component in components(OsStr::from_bytes(name)) {
        if component != ".." {
            path.push(component);
        } else if !path.pop() {
            return Err(ArchiveError::Escapes { member: member.to_owned(), name: shown(name) });
        }
    }
    Ok(path)
}

/// The time of the last change.
pub(crate) fn modified(stat: &Stat) -> Time {
    Time {
        seconds: stat.st_mtime,
        nanoseconds: u32::try_from(stat.st_mtime_nsec).unwrap_or_default(),
    }
}

/// The size.
pub(crate) fn size_bytes(stat: &Stat) -> u64 {
    u64::try_from(stat.st_size).unwrap_or_default()
}

/// Whether it is a directory.
pub(crate) fn is_directory(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Directory
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn what_is_no_regular_file_is_not_even_opened() {
        let folder = tempfile::tempdir().unwrap();
        // To open a socket is ENXIO, as with a device that has no driver.
        let _socket = UnixListener::bind(folder.path().join("socket")).unwrap();
        rustix::fs::mknodat(CWD, folder.path().join("fifo"), FileType::Fifo, Mode::RUSR, 0)
            .unwrap();
        std::fs::create_dir(folder.path().join("directory")).unwrap();
        std::fs::write(folder.path().join("file"), "content").unwrap();
        std::os::unix::fs::symlink("file", folder.path().join("link")).unwrap();
        let root = Root::open(folder.path()).unwrap();
        for name in ["socket", "fifo", "directory", "link"] {
            assert_eq!(root.file(Path::new(name)).unwrap_err(), Errno::INVAL, "{name}");
        }
        let file = root.file(Path::new("file")).unwrap();
        assert_eq!(std::io::read_to_string(file).unwrap(), "content");
    }
}
