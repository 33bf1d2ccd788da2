//! Directories that only this process's user reaches: everything below them is other people's
//! disks.
//!
//! ```text
//!  not there                           made, with mode 700
//!  there, for the owner alone          taken
//!  there, for others too:
//!     empty, or of an earlier driver   closed to others, and logged
//!     anything else                    refused: it may be /tmp
//! ```

use std::fs::{self, DirBuilder, Metadata, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::Path;

use rustix::process::geteuid;

use crate::error::DriverError;

const MODE: u32 = 0o700;

/// Permission bits with which others reach a directory.
const OTHERS: u32 = 0o077;

/// The bit of directories that are meant for several users, such as /tmp.
const STICKY: u32 = 0o1000;

/// Makes a directory for this user alone, or takes one that is so. One that others reach is closed
/// to them if it is empty, or holds `mark`, a file that earlier drivers left there.
///
/// # Errors
/// `Exposed` if it belongs to another user, or others reach it and it may be somebody else's; `Io`.
pub(crate) fn take(directory: &Path, mark: &str) -> Result<(), DriverError> {
    let made = DirBuilder::new().recursive(true).mode(MODE).create(directory);
    made.map_err(DriverError::io("make", directory))?;
    let found = fs::metadata(directory).map_err(DriverError::io("look at", directory))?;
    let is_own = found.uid() == geteuid().as_raw();
    if is_own && found.mode() & OTHERS == 0 {
        return Ok(());
    }
    let is_ours = is_own && found.mode() & STICKY == 0;
    if !is_ours || !is_marked(directory, mark).map_err(DriverError::io("list", directory))? {
        return Err(DriverError::Exposed {
            path: directory.to_owned(),
            mode: permissions(&found),
            owner: found.uid(),
        });
    }
    fs::set_permissions(directory, Permissions::from_mode(MODE))
        .map_err(DriverError::io("change the mode of", directory))?;
    tracing::info!(
        directory = %directory.display(),
        mode = format_args!("{:03o}", permissions(&found)),
        "other users of this machine could reach the directory: its mode is 700 now"
    );
    Ok(())
}

fn permissions(found: &Metadata) -> u32 {
    found.mode() & 0o7777
}

/// Whether a directory is empty, or holds the mark.
fn is_marked(directory: &Path, mark: &str) -> io::Result<bool> {
    let is_empty = fs::read_dir(directory)?.next().transpose()?.is_none();
    match fs::symlink_metadata(directory.join(mark)) {
        Ok(found) => Ok(is_empty || (found.is_file() && found.uid() == geteuid().as_raw())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(is_empty),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(directory: &Path) -> u32 {
        permissions(&fs::metadata(directory).unwrap())
    }

    fn set_mode(directory: &Path, mode: u32) {
        fs::set_permissions(directory, Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_new_directory_is_for_its_owner_alone_and_so_are_those_above_it() {
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path().join("a/b");
        take(&directory, "mark").unwrap();
        take(&directory, "mark").unwrap();
        assert_eq!((mode(&directory), mode(&folder.path().join("a"))), (0o700, 0o700));
    }

    #[test]
    fn one_that_is_empty_or_ours_is_closed_to_others() {
        let folder = tempfile::tempdir().unwrap();
        for content in [None, Some("mark")] {
            if let Some(name) = content {
                fs::write(folder.path().join(name), "").unwrap();
            }
            for others in [0o755, 0o750, 0o701, 0o2770] {
                set_mode(folder.path(), others);
                take(folder.path(), "mark").unwrap();
                assert_eq!(mode(folder.path()) & 0o777, 0o700, "{others:o}");
            }
        }
    }

    #[test]
    fn one_that_may_be_somebody_elses_is_refused_and_stays_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        set_mode(folder.path(), 0o1777);
        let error = take(folder.path(), "mark").unwrap_err().to_string();
        assert!(error.contains("mode 1777"), "{error}");
        set_mode(folder.path(), 0o755);
        fs::write(folder.path().join("letter"), "").unwrap();
        let error = take(folder.path(), "mark").unwrap_err().to_string();
        assert!(error.contains("mode 755") && error.contains("chmod 700"), "{error}");
        // As /run has a directory of that name, which is no driver's.
        fs::create_dir(folder.path().join("mark")).unwrap();
        take(folder.path(), "mark").unwrap_err();
        fs::remove_dir(folder.path().join("mark")).unwrap();
        std::os::unix::fs::symlink("letter", folder.path().join("mark")).unwrap();
        take(folder.path(), "mark").unwrap_err();
        assert_eq!(mode(folder.path()), 0o755);
    }

    #[test]
    fn as_root_one_of_another_user_is_refused_whatever_its_mode() {
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path().join("his");
        DirBuilder::new().mode(0o700).create(&directory).unwrap();
        std::os::unix::fs::chown(&directory, Some(1000), None).unwrap();
        let error = take(&directory, "mark").unwrap_err().to_string();
        assert!(error.contains("user 1000"), "{error}");
    }
}
