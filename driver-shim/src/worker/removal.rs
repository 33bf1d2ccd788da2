//! Removing directories of others, whatever they made there.
//!
//! ```text
//!   TOP/NAME/a/b/c   --> TOP/NAME, TOP/NEW (was a) --> TOP/NEW (was b) --> ...
//! ```
//! A directory in it that is not empty is moved beside it, under a new name, and is then one that is to be removed
//! itself. So it costs two descriptors and no recursion, however deep it is, and what a crash leaves is found again.
//!
//! Invariants:
//! - No symbolic link and no mount point is followed: nothing outside of the top directory is opened.
//! - What is moved gets a name that was never used.
//! - What cannot be removed holds up nothing else: a file that is mounted on or in use as swap, or that a program in a
//!   privileged container made immutable.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use uuid::Uuid;

/// Entries that are removed in one go, so that a driver that ends waits for no more: about a tenth of a second where
/// the disk is near.
const REMOVED_AT_ONCE: usize = 16 << 10;

/// How a directory is opened.
const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// More directories than this are not moved up at a time: their names are in memory, and in the top directory.
const MOVED_AT_ONCE: usize = 1024;

/// What is to be removed of a top directory.
#[derive(Debug, Default)]
pub(super) struct Chosen {
    /// These directories.
    pub(super) now: Vec<Uuid>,
    /// Others, but not now.
    pub(super) has_later: bool,
}

/// What one go came to.
#[derive(Debug, Default)]
pub(super) struct Removal {
    /// Entries that are gone.
    pub(super) removed: usize,
    /// There is more to do.
    pub(super) has_more: bool,
    /// Why something could not be removed, if so; the last of several.
    pub(super) failed: Option<io::Error>,
}

/// Directories that are being removed from a top directory.
struct Removing {
    top: OwnedFd,
    /// Entries that may still be looked at in this go.
    budget: usize,
    /// The names of those that are to be removed.
    ahead: Vec<Uuid>,
    removal: Removal,
}

/// Removes directories from a top directory that have a UUID as a name: those that `choose` answers; nothing if there is
/// no such directory. Blocks.
///
/// # Errors
/// The top directory cannot be read, or `choose` fails.
pub(super) fn remove_from(
    top: &Path,
    choose: impl FnOnce(Vec<Uuid>) -> io::Result<Chosen>,
) -> io::Result<Removal> {
    let top = match rustix::fs::openat(CWD, top, DIRECTORY, Mode::empty()) {
        Ok(top) => top,
        Err(Errno::NOENT) => return Ok(Removal::default()),
        Err(errno) => return Err(errno.into()),
    };
    let mut names: Vec<Uuid> = Vec::new();
    for entry in Dir::read_from(&top)? {
        names.extend(Uuid::try_parse_ascii(entry?.file_name().to_bytes()));
    }
    let chosen = choose(names)?;
    let removal = Removal { has_more: chosen.has_later, ..Removal::default() };
    let mut ahead = chosen.now;
    // By chance: were one full of what cannot be removed always the first, others would never have their turn.
    ahead.sort_by_cached_key(|_| Uuid::new_v4());
    let mut removing = Removing { top, budget: REMOVED_AT_ONCE, ahead, removal };
    while let Some(name) = removing.ahead.pop() {
        if removing.budget == 0 {
            removing.removal.has_more = true;
            break;
        }
        if let Err(errno) = removing.remove(&name.to_string()) {
            removing.removal.failed = Some(errno.into());
        }
    }
    Ok(removing.removal)
}

impl Removing {
    /// Removes one directory of the top directory.
    fn remove(&mut self, name: &str) -> Result<(), Errno> {
        let beneath = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
        let directory =
            match rustix::fs::openat2(&self.top, name, DIRECTORY, Mode::empty(), beneath) {
                Ok(directory) => directory,
                Err(Errno::NOENT) => return Ok(()),
                Err(errno) => return Err(errno),
            };
        let mut outcome = Ok(());
        for entry in Dir::read_from(&directory)? {
            if self.budget == 0 {
                self.removal.has_more = true;
                return outcome;
            }
            self.budget -= 1;
            let entry = entry?;
            let entry = entry.file_name();
            if entry == c"." || entry == c".." {
                continue;
            }
            if self.ahead.len() >= MOVED_AT_ONCE {
                self.removal.has_more = true;
                return outcome;
            }
            match self.remove_entry(directory.as_fd(), entry) {
                // What an overlay that has just ended removed itself.
                Ok(()) | Err(Errno::NOENT) => self.removal.removed += 1,
                Err(errno) => outcome = Err(errno),
            }
        }
        outcome?;
        match rustix::fs::unlinkat(&self.top, name, AtFlags::REMOVEDIR) {
            // A listing need not have what changes at the same time.
            Err(Errno::NOTEMPTY) => self.removal.has_more = true,
            Err(Errno::NOENT) => {}
            other => {
                other?;
                self.removal.removed += 1;
            }
        }
        Ok(())
    }

    fn remove_entry(&mut self, directory: BorrowedFd<'_>, entry: &CStr) -> Result<(), Errno> {
        match rustix::fs::unlinkat(directory, entry, AtFlags::empty()) {
            Err(Errno::ISDIR) => {}
            other => return other,
        }
        match rustix::fs::unlinkat(directory, entry, AtFlags::REMOVEDIR) {
            Err(Errno::NOTEMPTY) => {}
            other => return other,
        }
        let new = Uuid::new_v4();
        rustix::fs::renameat(directory, entry, &self.top, new.to_string())?;
        self.ahead.push(new);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn name(number: u128) -> String {
        Uuid::from_u128(number).to_string()
    }

    #[expect(clippy::unnecessary_wraps, reason = "as it is called")]
    fn all(now: Vec<Uuid>) -> io::Result<Chosen> {
        Ok(Chosen { now, has_later: false })
    }

    fn only(number: u128) -> io::Result<Chosen> {
        all(vec![Uuid::from_u128(number)])
    }

    /// Removes all but these.
    fn remove_all_but(top: &Path, kept: &[Uuid]) {
        loop {
            let removal = remove_from(top, |names| {
                let now = names.into_iter().filter(|name| !kept.contains(name)).collect();
                Ok(Chosen { now, has_later: false })
            });
            let removal = removal.unwrap();
            assert!(removal.failed.is_none(), "{removal:?}");
            if !removal.has_more {
                return;
            }
        }
    }

    fn names(top: &Path) -> Vec<String> {
        let names = fs::read_dir(top).unwrap();
        let mut names: Vec<_> =
            names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn what_is_chosen_goes_with_all_that_is_in_it_and_nothing_else() {
        let top = tempfile::tempdir().unwrap();
        let outside = tempfile::tempdir().unwrap();
        fs::write(outside.path().join("file"), b"x").unwrap();
        let one = top.path().join(name(1));
        for directory in ["upper/a/b/c", "upper/empty", "work/work"] {
            fs::create_dir_all(one.join(directory)).unwrap();
        }
        fs::write(one.join("upper/a/file"), b"x").unwrap();
        fs::write(one.join("upper").join(name(7)), b"x").unwrap();
        symlink(outside.path(), one.join("upper/link")).unwrap();
        symlink(outside.path(), top.path().join(name(3))).unwrap();
        fs::set_permissions(one.join("work/work"), fs::Permissions::from_mode(0o000)).unwrap();
        for kept in [&name(2), "lost+found", "others"] {
            fs::create_dir_all(top.path().join(kept).join("upper/a")).unwrap();
        }
        let removal = remove_from(top.path(), |_| only(3)).unwrap();
        assert!(removal.failed.is_some(), "a link is no directory");
        remove_all_but(top.path(), &[Uuid::from_u128(2), Uuid::from_u128(3)]);
        let mut left = vec![name(2), name(3), "lost+found".to_owned(), "others".to_owned()];
        left.sort();
        assert_eq!(names(top.path()), left);
        assert!(top.path().join(name(2)).join("upper/a").exists());
        assert!(outside.path().join("file").exists());
    }

    #[test]
    fn no_depth_is_too_deep() {
        let top = tempfile::tempdir().unwrap();
        // Deeper than a path can be long, and than a process has descriptors.
        let mut inner = Uuid::new_v4().to_string();
        fs::create_dir(top.path().join(&inner)).unwrap();
        for _ in 0..5000 {
            let outer = Uuid::new_v4().to_string();
            fs::create_dir(top.path().join(&outer)).unwrap();
            fs::rename(top.path().join(&inner), top.path().join(&outer).join("deep")).unwrap();
            inner = outer;
        }
        remove_until_empty(top.path());
        assert!(names(top.path()).is_empty());
    }

    fn remove_until_empty(top: &Path) {
        while !names(top).is_empty() {
            let removal = remove_from(top, all).unwrap();
            assert!(removal.failed.is_none(), "{removal:?}");
        }
    }

    #[test]
    fn a_large_one_is_removed_in_several_goes() {
        let top = tempfile::tempdir().unwrap();
        let large = top.path().join(name(1));
        fs::create_dir(&large).unwrap();
        for number in 0..=REMOVED_AT_ONCE {
            fs::write(large.join(number.to_string()), b"").unwrap();
        }
        let removal = remove_from(top.path(), |_| only(1)).unwrap();
        assert!(removal.has_more && removal.failed.is_none(), "{removal:?}");
        assert!(large.exists());
        remove_until_empty(top.path());
    }

    #[test]
    fn directories_are_moved_up_some_at_a_time() {
        let top = tempfile::tempdir().unwrap();
        for number in 0..3 * MOVED_AT_ONCE {
            let inner = top.path().join(name(1)).join(number.to_string());
            fs::create_dir_all(inner.join("a")).unwrap();
        }
        let mut most = 0;
        while !names(top.path()).is_empty() {
            remove_from(top.path(), all).unwrap();
            most = most.max(names(top.path()).len());
        }
        assert!(most <= MOVED_AT_ONCE + 1, "{most}");
    }

    /// As a file that is mounted on: here one in a directory that nothing can be removed from.
    #[test]
    fn as_root_what_cannot_be_removed_holds_up_nothing_else() {
        let top = tempfile::tempdir().unwrap();
        let one = top.path().join(name(1));
        fs::create_dir(&one).unwrap();
        for number in 0..100 {
            fs::write(one.join(number.to_string()), b"").unwrap();
        }
        fs::create_dir_all(top.path().join(name(2)).join("upper")).unwrap();
        let held = one.join("50");
        rustix::mount::mount_bind(&held, &held).unwrap();
        let removal = remove_from(top.path(), all);
        rustix::mount::unmount(&held, rustix::mount::UnmountFlags::DETACH).unwrap();
        let removal = removal.unwrap();
        let failed = removal.failed.unwrap();
        assert_eq!(failed.raw_os_error(), Some(Errno::BUSY.raw_os_error()), "{failed}");
        assert_eq!(names(top.path()), [name(1)]);
        assert_eq!(names(&one), ["50"]);
        remove_until_empty(top.path());
    }
}
