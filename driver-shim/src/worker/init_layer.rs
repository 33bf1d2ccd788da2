//! Takes out of a commit what dockerd put into the init layer: Docker's other drivers give what
//! a container changed above its init layer, so a committed image has none of that.
//!
//! Three trees are looked at: the image, the init layer above it, and the container's, which is
//! written. They are clones of each other, so what nobody touched has the same inode and the same
//! time of change in two of them. Only the few paths that dockerd sets up are looked at, so the
//! time does not depend on the size of the image.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, ResolveFlags, Stat, Timespec, Timestamps, UTIME_OMIT, Uid,
};
use rustix::io::Errno;

use super::WorkerError;

/// What dockerd sets up (its daemon/initlayer), and the directories that it thereby changes;
/// those after what is in them.
const PATHS: [&str; 13] = [
    "dev/console",
    "dev/pts",
    "dev/shm",
    "dev",
    "etc/hostname",
    "etc/hosts",
    "etc/mtab",
    "etc/resolv.conf",
    "etc",
    "proc",
    "sys",
    ".dockerenv",
    ROOT,
];

/// The tree itself, which is there also where the image has no content.
const ROOT: &str = ".";

/// Longest file that is copied: these hold a few lines. A longer one fails the commit.
const COPY_BYTES_MAX: u64 = 16 << 20;

/// A directory that links lead out of only in name: they are resolved as if it were the root.
struct Tree {
    root: OwnedFd,
}

/// A name in a tree, which need not exist.
struct Entry<'a> {
    folder: OwnedFd,
    name: &'a str,
}

impl Tree {
    fn open(path: &Path) -> Result<Self, Errno> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self { root: rustix::fs::open(path, flags, Mode::empty())? })
    }

    /// The entry of that path; none if what should be its directory is none.
    fn entry<'a>(&self, path: &'a str) -> Result<Option<Entry<'a>>, Errno> {
        let (folder, name) = path.rsplit_once('/').unwrap_or((".", path));
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        match rustix::fs::openat2(&self.root, folder, flags, Mode::empty(), resolve) {
            Ok(folder) => Ok(Some(Entry { folder, name })),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn stat(&self, path: &str) -> Result<Option<Stat>, Errno> {
        let Some(entry) = self.entry(path)? else {
            return Ok(None);
        };
        match rustix::fs::statat(&entry.folder, entry.name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(stat)),
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

fn is_directory(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Directory
}

/// Whether nobody touched it since the trees parted.
fn is_untouched(one: &Stat, other: &Stat) -> bool {
    let identity = |stat: &Stat| (stat.st_ino, stat.st_mode, stat.st_ctime, stat.st_ctime_nsec);
    identity(one) == identity(other)
}

/// Whether a directory has the attributes that it had; what is in it does not count.
fn has_same_attributes(one: &Stat, other: &Stat) -> bool {
    let attributes = |stat: &Stat| (stat.st_mode, stat.st_uid, stat.st_gid);
    attributes(one) == attributes(other)
}

/// What a path is in the three trees, before anything is changed.
struct States {
    path: &'static str,
    image: Option<Stat>,
    init: Option<Stat>,
    container: Option<Stat>,
}

/// Makes `container` at those paths what `image` is, where it is what `init` is. An image
/// without content is `None`.
pub(super) fn restore(
    image: Option<&Path>,
    init: &Path,
    container: &Path,
) -> Result<(), WorkerError> {
    let failed = |path: &str, error: Errno| WorkerError::InitLayer {
        path: path.to_owned(),
        source: error.into(),
    };
    let open = |path| Tree::open(path).map_err(|error| failed(ROOT, error));
    let image = image.map(open).transpose()?;
    let (init, container) = (open(init)?, open(container)?);
    let look = |path| {
        let image = match &image {
            Some(image) => image.stat(path)?,
            None => None,
        };
        let (init, container) = (init.stat(path)?, container.stat(path)?);
        Ok(States { path, image, init, container })
    };
    let all: Result<Vec<_>, _> =
        PATHS.iter().map(|path| look(path).map_err(|error| failed(path, error))).collect();
    for states in all? {
        restore_path(image.as_ref(), &container, &states)
            .map_err(|error| failed(states.path, error))?;
    }
    Ok(())
}

fn restore_path(image: Option<&Tree>, container: &Tree, states: &States) -> Result<(), Errno> {
    let (Some(init_stat), Some(own_stat)) = (&states.init, &states.container) else {
        return Ok(());
    };
    if states.image.as_ref().is_some_and(|image| is_untouched(image, init_stat)) {
        return Ok(());
    }
    let Some(entry) = container.entry(states.path)? else {
        return Ok(());
    };
    if let Some(image_stat) = states.image.as_ref().filter(|image| is_directory(image)) {
        let is_time_kept = (own_stat.st_mtime, own_stat.st_mtime_nsec)
            == (init_stat.st_mtime, init_stat.st_mtime_nsec);
        if is_directory(own_stat) && is_time_kept {
            set_time(&entry.folder, entry.name, image_stat)?;
        }
        return Ok(());
    }
    if states.path == ROOT {
        return Ok(());
    }
    if is_directory(own_stat) {
        if !is_directory(init_stat) || !has_same_attributes(init_stat, own_stat) {
            return Ok(());
        }
        match rustix::fs::unlinkat(&entry.folder, entry.name, AtFlags::REMOVEDIR) {
            Ok(()) => {}
            // The container put something into it: then it is the container's.
            Err(Errno::NOTEMPTY | Errno::EXIST) => return Ok(()),
            Err(error) => return Err(error),
        }
    } else {
        if !is_untouched(init_stat, own_stat) {
            return Ok(());
        }
        rustix::fs::unlinkat(&entry.folder, entry.name, AtFlags::empty())?;
    }
    match (image, &states.image) {
        (Some(image), Some(stat)) => match image.entry(states.path)? {
            Some(from) => copy(&from, stat, &entry),
            None => Ok(()),
        },
        _ => Ok(()),
    }
}

/// Copies what is no directory, with all that Docker keeps of it.
fn copy(from: &Entry<'_>, stat: &Stat, to: &Entry<'_>) -> Result<(), Errno> {
    let mode = Mode::from_raw_mode(stat.st_mode);
    let owner = (Some(Uid::from_raw(stat.st_uid)), Some(Gid::from_raw(stat.st_gid)));
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => copy_content(from, to)?,
        FileType::Symlink => {
            let target = rustix::fs::readlinkat(&from.folder, from.name, Vec::new())?;
            rustix::fs::symlinkat(target, &to.folder, to.name)?;
        }
        other => rustix::fs::mknodat(&to.folder, to.name, other, mode, stat.st_rdev)?,
    }
    rustix::fs::chownat(&to.folder, to.name, owner.0, owner.1, AtFlags::SYMLINK_NOFOLLOW)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Symlink {
        rustix::fs::chmodat(&to.folder, to.name, mode, AtFlags::empty())?;
    }
    set_time(&to.folder, to.name, stat)
}

fn copy_content(from: &Entry<'_>, to: &Entry<'_>) -> Result<(), Errno> {
    let flags = OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let source =
        rustix::fs::openat(&from.folder, from.name, flags | OFlags::RDONLY, Mode::empty())?;
    let create = flags | OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
    let target = rustix::fs::openat(&to.folder, to.name, create, Mode::RUSR | Mode::WUSR)?;
    // One byte more shows that there is more: a part is never given for the whole.
    let mut reader = std::io::Read::take(std::fs::File::from(source), COPY_BYTES_MAX + 1);
    let mut writer = std::fs::File::from(target);
    let copied_bytes = std::io::copy(&mut reader, &mut writer)
        .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    if copied_bytes > COPY_BYTES_MAX {
        return Err(Errno::FBIG);
    }
    copy_attributes(&reader.into_inner(), &writer)
}

/// Copies the extended attributes.
fn copy_attributes(from: &std::fs::File, to: &std::fs::File) -> Result<(), Errno> {
    // As long as the kernel lets a list of names, or a value, be.
    let mut names = vec![0; 64 << 10];
    let length = rustix::fs::flistxattr(from, &mut names[..])?;
    let mut value = vec![0; 64 << 10];
    for name in names[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let length = rustix::fs::fgetxattr(from, name, &mut value[..])?;
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::fsetxattr(to, name, &value[..length], flags)?;
    }
    Ok(())
}

fn set_time(folder: impl AsFd, name: &str, stat: &Stat) -> Result<(), Errno> {
    let omit = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
    let nanos = i64::try_from(stat.st_mtime_nsec).unwrap_or(0);
    let modified = Timespec { tv_sec: stat.st_mtime, tv_nsec: nanos };
    let times = Timestamps { last_access: omit, last_modification: modified };
    rustix::fs::utimensat(folder, name, &times, AtFlags::SYMLINK_NOFOLLOW)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::process::Command;

    /// A copy whose files are the same inodes, as those of a clone are.
    fn clone(from: &Path, to: &Path) {
        let done = Command::new("cp").arg("--archive").arg("--link").args([from, to]).status();
        assert!(done.unwrap().success());
    }

    fn write(root: &Path, name: &str, content: &str) {
        fs::create_dir_all(root.join(name).parent().unwrap()).unwrap();
        // Never into an inode that another tree has, too.
        let _ = fs::remove_file(root.join(name));
        fs::write(root.join(name), content).unwrap();
    }

    fn set_mode(path: &Path, mode: u32) {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_part_of_a_long_file_is_never_given_for_the_whole() {
        let folder = tempfile::tempdir().unwrap();
        let trees = ["image", "init", "container"].map(|name| folder.path().join(name));
        let [image, init, container] = &trees;
        write(image, "etc/hosts", "a start");
        let hosts = fs::File::options().write(true).open(image.join("etc/hosts")).unwrap();
        hosts.set_len(COPY_BYTES_MAX).unwrap();
        clone(image, init);
        write(init, "etc/hosts", "");
        clone(init, container);
        restore(Some(image), init, container).unwrap();
        let length = fs::metadata(container.join("etc/hosts")).unwrap().len();
        assert_eq!(length, COPY_BYTES_MAX);

        hosts.set_len(COPY_BYTES_MAX + 1).unwrap();
        fs::remove_dir_all(container).unwrap();
        clone(init, container);
        let error = restore(Some(image), init, container).unwrap_err().to_string();
        assert!(error.contains("etc/hosts"), "{error}");
    }

    #[test]
    fn as_root_what_dockerd_put_there_goes_and_what_the_container_did_stays() {
        use std::os::unix::fs::{MetadataExt, chown, symlink};
        let folder = tempfile::tempdir().unwrap();
        let tree = |name| folder.path().join(name);
        let (image, init, container) = (tree("image"), tree("init"), tree("container"));
        write(&image, "etc/hosts", "127.0.0.1 image\n");
        chown(image.join("etc/hosts"), Some(7), Some(8)).unwrap();
        set_mode(&image.join("etc/hosts"), 0o4640);
        let hosts = fs::File::open(image.join("etc/hosts")).unwrap();
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::fsetxattr(&hosts, "trusted.note", b"kept", flags).unwrap();
        symlink("../run/resolv.conf", image.join("etc/resolv.conf")).unwrap();
        write(&image, "etc/hostname", "unchanged\n");
        write(&image, "usr/tool", "tool");
        let image_time = fs::metadata(image.join("etc")).unwrap().mtime_nsec();

        clone(&image, &init);
        for name in ["etc/hosts", "etc/resolv.conf", "dev/console", ".dockerenv", "proc/x"] {
            write(&init, name, "");
        }
        fs::remove_file(init.join("proc/x")).unwrap();
        fs::create_dir_all(init.join("dev/pts")).unwrap();
        fs::create_dir_all(init.join("sys")).unwrap();
        symlink("/proc/mounts", init.join("etc/mtab")).unwrap();

        clone(&init, &container);
        write(&container, ".dockerenv", "written by the container");
        write(&container, "sys/left", "by the container");
        fs::remove_file(container.join("usr/tool")).unwrap();
        restore(Some(&image), &init, &container).unwrap();

        let read = |name: &str| fs::read_to_string(container.join(name)).unwrap();
        assert_eq!(read("etc/hosts"), "127.0.0.1 image\n");
        let restored = fs::metadata(container.join("etc/hosts")).unwrap();
        let original = fs::metadata(image.join("etc/hosts")).unwrap();
        let kept = |data: &fs::Metadata| {
            (data.mode(), data.uid(), data.gid(), data.mtime(), data.mtime_nsec())
        };
        assert_eq!(kept(&restored), kept(&original));
        assert_eq!(restored.mode() & 0o7777, 0o4640);
        let hosts = fs::File::open(container.join("etc/hosts")).unwrap();
        let mut note = [0; 16];
        let length = rustix::fs::fgetxattr(&hosts, "trusted.note", &mut note[..]).unwrap();
        assert_eq!(&note[..length], b"kept");
        let link = fs::read_link(container.join("etc/resolv.conf")).unwrap();
        assert_eq!(link, Path::new("../run/resolv.conf"));
        assert_eq!(read("etc/hostname"), "unchanged\n");
        assert_eq!(fs::metadata(container.join("etc")).unwrap().mtime_nsec(), image_time);
        for name in ["dev", "proc", "etc/mtab", "usr/tool"] {
            assert!(fs::symlink_metadata(container.join(name)).is_err(), "{name}");
        }
        assert_eq!(read(".dockerenv"), "written by the container");
        assert_eq!(read("sys/left"), "by the container");
    }

    #[test]
    fn links_lead_nowhere_else() {
        let folder = tempfile::tempdir().unwrap();
        let tree = |name| folder.path().join(name);
        let (init, container, outside) = (tree("init"), tree("container"), tree("outside"));
        write(&outside, "hosts", "mine");
        for root in [&init, &container] {
            fs::create_dir(root).unwrap();
            std::os::unix::fs::symlink(&outside, root.join("etc")).unwrap();
        }
        restore(None, &init, &container).unwrap();
        assert_eq!(fs::read_to_string(outside.join("hosts")).unwrap(), "mine");
    }
}
