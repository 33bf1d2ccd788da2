//! Small files that the server writes, such as those of the data directory beside the store's own.
//!
//! ```text
//! replace    NAME.new -> sync -> rename to NAME -> sync of the directory
//! ```
//! Invariant: a crash leaves the content before or the one after, and what was acknowledged is on the disk. Only the
//! server's user reads those of the data directory.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Gives the file `name` of the directory this content.
///
/// # Errors
/// The disk is full or failed. The content is the old one, or the new one if only the last step failed.
pub(crate) fn replace(directory: &Path, name: &str, content: &[u8]) -> io::Result<()> {
    replace_with(directory, name, content, |_| Ok(()))
}

/// The same for a file with other rights, which it has from the first moment on.
///
/// # Errors
/// As of [`replace`]; or the rights cannot be given.
pub(crate) fn replace_with(
    directory: &Path,
    name: &str,
    content: &[u8],
    give_rights: impl FnOnce(&File) -> io::Result<()>,
) -> io::Result<()> {
    let new = directory.join(format!("{name}.new"));
    // One that was left may have the rights of another program.
    match std::fs::remove_file(&new) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    write_new(&new, content, give_rights)?;
    std::fs::rename(&new, directory.join(name))?;
    sync(directory)
}

/// Gives the file at `path`, which is there, this content; its owner, group and mode stay (not what ACLs say). Where the
/// path is a symbolic link, that stays, too. The new content is first in a file of the name with the process id, which is
/// not there afterwards.
///
/// # Errors
/// As of [`replace`]; or the file cannot be given to its owner.
pub(crate) fn replace_alike(path: &Path, content: &[u8]) -> io::Result<()> {
    let path = std::fs::canonicalize(path)?;
    let before = path.metadata()?;
    let directory = path.parent().ok_or(ErrorKind::IsADirectory)?;
    let mut name = path.file_name().ok_or(ErrorKind::IsADirectory)?.to_owned();
    name.push(format!(".new-{}", std::process::id()));
    let new = directory.join(name);
    let give_rights = |file: &File| {
        let made = file.metadata()?;
        if (made.uid(), made.gid()) != (before.uid(), before.gid()) {
            std::os::unix::fs::fchown(file, Some(before.uid()), Some(before.gid()))?;
        }
        file.set_permissions(before.permissions())
    };
    let replaced =
        write_new(&new, content, give_rights).and_then(|()| std::fs::rename(&new, &path));
    if let Err(error) = replaced {
        // One of another program was not made here, and is left.
        if error.kind() != ErrorKind::AlreadyExists {
            let _ = std::fs::remove_file(&new);
        }
        return Err(error);
    }
    sync(directory)
}

fn write_new(
    path: &Path,
    content: &[u8],
    give_rights: impl FnOnce(&File) -> io::Result<()>,
) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(content)?;
    give_rights(&file)?;
    file.sync_all()
}

/// Makes the names in a directory survive a power cut.
pub(crate) fn sync(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

/// Whether a file could not be made because there is no room for it.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A file system with room for one file; unmounted when dropped.
    pub(crate) struct OneFile(tempfile::TempDir);

    impl OneFile {
        pub(crate) fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let mut command = std::process::Command::new("mount");
            // Its root is the other inode.
            command.args(["-t", "tmpfs", "-o", "nr_inodes=2", "none"]).arg(directory.path());
            assert!(command.status().unwrap().success());
            Self(directory)
        }

        pub(crate) fn path(&self) -> &Path {
            self.0.path()
        }
    }

    impl Drop for OneFile {
        fn drop(&mut self) {
            let mut command = std::process::Command::new("umount");
            let _ = command.arg("--lazy").arg(self.0.path()).status();
        }
    }

    #[test]
    fn a_file_is_replaced_as_a_whole_and_is_its_users_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("name");
        std::fs::write(&path, "before, and longer").unwrap();
        std::fs::write(directory.path().join("name.new"), "left by a crash").unwrap();
        replace(directory.path(), "name", b"after").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"after");
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn where_it_cannot_be_made_the_old_content_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("name");
        std::fs::write(&path, "before").unwrap();
        // A directory is not removed by what removes files.
        std::fs::create_dir(directory.path().join("name.new")).unwrap();
        replace(directory.path(), "name", b"after").unwrap_err();
        assert_eq!(std::fs::read(&path).unwrap(), b"before");
    }

    #[test]
    fn a_full_disk_is_told_from_a_faulty_one() {
        let error = |number| io::Error::from_raw_os_error(number);
        // ENOSPC, EDQUOT, EIO, EROFS.
        let found = [28, 122, 5, 30].map(|number| is_full(&error(number)));
        assert_eq!(found, [true, true, false, false]);
    }
}
