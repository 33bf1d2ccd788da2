//! What differs between two trees, in the words of `docker diff`.
//!
//! Directories are compared by their attributes and not by their times and sizes; one whose
//! children changed counts as modified, but for the root. A file of the same size and time has the
//! same content. Files that are one (hard links) in one tree and not in the other are modified.
//!
//! For an archive that is to make the newer tree this does not do: there directories count as modified by
//! their times, too, but for the root, and a file that was touched and has its size and time still is read.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Stat};

use crate::error::{ArchiveError, failed};
use crate::root::{Entry, Place, Root, is_directory, modified};

/// Memory of the paths that [`changes`] holds: those of a million and more changes, at usual
/// lengths. A container makes as many and as long ones as it likes, and the daemon that is asked
/// for them serves others, too.
pub const PATHS_BYTES_MAX: usize = 256 << 20;

/// Bytes of two files that are compared at once.
const BUFFER_BYTES: usize = 256 << 10;

/// How closely trees are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Closeness {
    /// As `docker diff` does it.
    Shown,
    /// So that nothing of the newer tree is missing.
    Whole,
}

/// What a path takes in memory beside its text.
const PATH_BYTES: usize = 96;

/// How a path changed. The numbers are those of Docker's protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ChangeKind {
    /// It is in both trees.
    Modified = 0,
    /// It is in the newer tree only.
    Added = 1,
    /// It is in the older tree only.
    Deleted = 2,
}

/// A path that changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The path, from `/` of the layer.
    pub path: PathBuf,
    /// How it changed.
    pub kind: ChangeKind,
}

/// What changed from the tree `older` (nothing, if there is none) to the tree `newer`, sorted.
///
/// # Errors
/// A tree cannot be read, or the paths of what changed take too much memory.
pub fn changes(older: Option<&Path>, newer: &Path) -> Result<Vec<Change>, ArchiveError> {
    let older = older.map(Root::open).transpose()?;
    let newer = Root::open(newer)?;
    let found = Comparison::run(Closeness::Shown, PATHS_BYTES_MAX, older.as_ref(), &newer)?;
    let from_root = |(path, kind)| Change { path: Path::new("/").join(path), kind };
    Ok(found.into_iter().map(from_root).collect())
}

/// The paths of the files that are one, by inode.
type Links = HashMap<u64, BTreeSet<PathBuf>>;

/// A comparison under way. Paths are below the root.
pub(crate) struct Comparison<'a> {
    closeness: Closeness,
    older: Option<&'a Root>,
    newer: &'a Root,
    found: BTreeMap<PathBuf, ChangeKind>,
    memory: PathMemory,
    older_links: Links,
    newer_links: Links,
    /// The inode of each path of `older_links`.
    older_inodes: HashMap<PathBuf, u64>,
}

impl<'a> Comparison<'a> {
    /// What changed, by path below the root; paths take at most `bytes_max` of memory.
    pub(crate) fn run(
        closeness: Closeness,
        bytes_max: usize,
        older: Option<&'a Root>,
        newer: &'a Root,
    ) -> Result<BTreeMap<PathBuf, ChangeKind>, ArchiveError> {
        let mut comparison = Self {
            closeness,
            older,
            newer,
            found: BTreeMap::new(),
            memory: PathMemory::new(bytes_max),
            older_links: Links::new(),
            newer_links: Links::new(),
            older_inodes: HashMap::new(),
        };
        // A list of what is to be done and no recursion: a tree may be deep.
        let mut directories = vec![(PathBuf::new(), older.is_some())];
        while let Some((path, is_in_both)) = directories.pop() {
            comparison.memory.release(bytes_of(&path));
            comparison.directory(&path, is_in_both, &mut directories)?;
        }
        comparison.compare_links()?;
        Ok(comparison.found)
    }

    /// Compares the entries of a directory.
    fn directory(
        &mut self,
        path: &Path,
        is_in_both: bool,
        directories: &mut Vec<(PathBuf, bool)>,
    ) -> Result<(), ArchiveError> {
        let older = self.older.filter(|_| is_in_both).map(|root| root.entries(path)).transpose()?;
        let older = older.unwrap_or_default().into_iter();
        let mut older: HashMap<OsString, Stat> =
            older.map(|entry| (entry.name, entry.stat)).collect();
        for Entry { name, stat } in self.newer.entries(path)? {
            let here = path.join(&name);
            let before = older.remove(&name);
            match &before {
                None => self.mark(&here, ChangeKind::Added)?,
                Some(before) => {
                    if note_link(&mut self.older_links, &here, before) {
                        self.memory.take(2 * bytes_of(&here))?;
                        self.older_inodes.insert(here.clone(), before.st_ino);
                    }
                    if self.differs(&here, before, &stat)? {
                        self.mark(&here, ChangeKind::Modified)?;
                    }
                }
            }
            if note_link(&mut self.newer_links, &here, &stat) {
                self.memory.take(bytes_of(&here))?;
            }
            if is_directory(&stat) {
                self.memory.take(bytes_of(&here))?;
                directories.push((here, before.as_ref().is_some_and(is_directory)));
            }
        }
        for name in older.into_keys() {
            self.mark(&path.join(name), ChangeKind::Deleted)?;
        }
        Ok(())
    }

    /// Takes a change in, and with it the directories it is in.
    fn mark(&mut self, path: &Path, kind: ChangeKind) -> Result<(), ArchiveError> {
        self.insert(path, kind)?;
        let parents = path.ancestors().skip(1).filter(|parent| !parent.as_os_str().is_empty());
        for parent in parents {
            if self.found.contains_key(parent) {
                // With all of its own.
                return Ok(());
            }
            self.insert(parent, ChangeKind::Modified)?;
        }
        Ok(())
    }

    fn insert(&mut self, path: &Path, kind: ChangeKind) -> Result<(), ArchiveError> {
        self.memory.take(bytes_of(path))?;
        self.found.insert(path.to_owned(), kind);
        Ok(())
    }

    /// Whether something is not what it was.
    fn differs(&self, path: &Path, older: &Stat, newer: &Stat) -> Result<bool, ArchiveError> {
        let state = |stat: &Stat| {
            let changed = (stat.st_ctime, stat.st_ctime_nsec);
            (attributes(stat), stat.st_ino, changed, stat.st_size, modified(stat))
        };
        if state(older) == state(newer) {
            // The newer disk is a clone of the older, and nobody touched the inode since.
            return Ok(false);
        }
        if attributes(older) != attributes(newer) {
            return Ok(true);
        }
        let is_whole = self.closeness == Closeness::Whole;
        let is_same_content = (older.st_size, modified(older)) == (newer.st_size, modified(newer));
        if !is_directory(newer) && !is_same_content {
            return Ok(true);
        }
        if is_directory(newer) && is_whole && modified(older) != modified(newer) {
            return Ok(true);
        }
        let Some(older_root) = self.older else {
            return Ok(true);
        };
        let before = older_root.resolved(path).map_err(failed("open the parent of", path))?;
        let after = self.newer.resolved(path).map_err(failed("open the parent of", path))?;
        if FileType::from_raw_mode(newer.st_mode) == FileType::Symlink
            && before.link_target()? != after.link_target()?
        {
            return Ok(true);
        }
        if before.xattrs()? != after.xattrs()? {
            return Ok(true);
        }
        let is_file = FileType::from_raw_mode(newer.st_mode) == FileType::RegularFile;
        Ok(is_whole && is_file && !has_same_bytes(older_root, self.newer, path)?)
    }

    /// Finds files that became one, or ceased to be. Only paths of both trees are in the older
    /// links, so that a link which was deleted makes no difference to the others.
    fn compare_links(&mut self) -> Result<(), ArchiveError> {
        let nothing = BTreeSet::new();
        let mut linked = HashSet::new();
        let mut differing = Vec::new();
        for group in self.newer_links.values() {
            for path in group {
                linked.insert(path);
                let inode = self.older_inodes.get(path);
                let before = inode.and_then(|inode| self.older_links.get(inode));
                let before = before.unwrap_or(&nothing);
                if group != before && (group.len() > 1 || before.len() > 1) {
                    differing.push(path.clone());
                }
            }
        }
        for group in self.older_links.values().filter(|group| group.len() > 1) {
            differing.extend(group.iter().filter(|path| !linked.contains(path)).cloned());
        }
        for path in differing {
            if !self.found.contains_key(&path) {
                self.mark(&path, ChangeKind::Modified)?;
            }
        }
        Ok(())
    }

    /// Whether the attributes of the roots themselves differ.
    pub(crate) fn root_differs(older: Option<&Root>, newer: &Root) -> Result<bool, ArchiveError> {
        let Some(older) = older else {
            return Ok(true);
        };
        let place = |root: &Root| {
            root.resolved(Path::new("")).map_err(failed("open the root", Path::new("/")))
        };
        let (older, newer) = (place(older)?, place(newer)?);
        let of = |place: &Place| Ok((place.stat()?.as_ref().map(attributes), place.xattrs()?));
        Ok(of(&older)? != of(&newer)?)
    }
}

/// The memory that paths take.
#[derive(Debug)]
pub(crate) struct PathMemory {
    bytes: usize,
    bytes_max: usize,
}

impl PathMemory {
    /// No path yet, and at most this for all that come.
    pub(crate) fn new(bytes_max: usize) -> Self {
        Self { bytes: 0, bytes_max }
    }

    /// Counts memory that paths take.
    pub(crate) fn take(&mut self, bytes: usize) -> Result<(), ArchiveError> {
        self.bytes = self.bytes.saturating_add(bytes);
        if self.bytes > self.bytes_max {
            return Err(ArchiveError::Changes { limit_mib: self.bytes_max >> 20 });
        }
        Ok(())
    }

    /// Counts memory that paths take no more.
    pub(crate) fn release(&mut self, bytes: usize) {
        self.bytes = self.bytes.saturating_sub(bytes);
    }
}

/// What is compared of everything.
pub(crate) fn attributes(stat: &Stat) -> (u32, u32, u32, u64) {
    let is_device = matches!(
        FileType::from_raw_mode(stat.st_mode),
        FileType::CharacterDevice | FileType::BlockDevice
    );
    (stat.st_mode, stat.st_uid, stat.st_gid, if is_device { stat.st_rdev } else { 0 })
}

/// Whether a file has the same content in two trees.
fn has_same_bytes(older: &Root, newer: &Root, path: &Path) -> Result<bool, ArchiveError> {
    let open = |root: &Root| root.file(path).map_err(failed("open", path));
    let (mut older, mut newer) = (open(older)?, open(newer)?);
    let mut buffers = (Vec::new(), Vec::new());
    loop {
        for (file, buffer) in [(&mut older, &mut buffers.0), (&mut newer, &mut buffers.1)] {
            buffer.clear();
            let read = file.by_ref().take(BUFFER_BYTES as u64).read_to_end(buffer);
            read.map_err(failed("read", path))?;
        }
        if buffers.0 != buffers.1 {
            return Ok(false);
        }
        if buffers.0.is_empty() {
            return Ok(true);
        }
    }
}

/// What a path takes in memory.
pub(crate) fn bytes_of(path: &Path) -> usize {
    PATH_BYTES + path.as_os_str().len()
}

/// Notes a path if its file has several; whether it has.
fn note_link(links: &mut Links, path: &Path, stat: &Stat) -> bool {
    let has_several = !is_directory(stat) && stat.st_nlink > 1;
    if has_several {
        links.entry(stat.st_ino).or_default().insert(path.to_owned());
    }
    has_several
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_take_no_more_memory_than_they_are_given() {
        let folder = tempfile::tempdir().unwrap();
        let [older, newer] = ["older", "newer"].map(|name| folder.path().join(name));
        std::fs::create_dir_all(older.join("both")).unwrap();
        std::fs::create_dir_all(newer.join("both/new")).unwrap();
        std::fs::write(newer.join("both/one"), "").unwrap();
        std::fs::hard_link(newer.join("both/one"), newer.join("both/two")).unwrap();
        let [older, newer] = [older, newer].map(|path| Root::open(&path).unwrap());
        let run = |bytes_max, older| Comparison::run(Closeness::Shown, bytes_max, older, &newer);
        // `both`, what is new in it, and each of the links once more.
        let bytes =
            |names: &[&str]| -> usize { names.iter().map(|name| bytes_of(Path::new(name))).sum() };
        let two = ["both/one", "both/two"];
        let needed = bytes(&["both", "both/new", "both/new"]) + 2 * bytes(&two);
        assert_eq!(run(needed, Some(&older)).unwrap().len(), 4);
        let error = run(needed - 1, Some(&older)).unwrap_err();
        assert!(matches!(error, ArchiveError::Changes { .. }), "{error}");
        assert_eq!(run(needed, None).unwrap().len(), 4, "nothing stays of what was looked at");
    }
}
