//! What a container does to its files, chosen at random.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{PermissionsExt, lchown, symlink};
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use rustix::fs::{AtFlags, CWD, FileType, Mode, Timespec, Timestamps, XattrFlags};
use rustix::io::Errno;

use crate::mount;
use crate::support::ops::{DIRECTORIES, LEAVES};

/// A path of a tree: one of [`DIRECTORIES`], or a leaf in it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Spot {
    directory: usize,
    leaf: Option<usize>,
}

impl Spot {
    fn path(self) -> PathBuf {
        let directory = Path::new(DIRECTORIES[self.directory]);
        self.leaf.map_or(directory.to_owned(), |leaf| directory.join(LEAVES[leaf]))
    }

    /// The path below `root`, without links on the way, for whatever is there. No link leads out.
    fn at(self, root: &Path) -> io::Result<PathBuf> {
        let path = root.join(self.path());
        let parent = path.parent().unwrap().canonicalize()?;
        if !parent.starts_with(root) {
            return Err(Errno::NOENT.into());
        }
        Ok(parent.join(path.file_name().unwrap()))
    }

    /// The path below `root`, for something new: what was there is removed.
    fn free(self, root: &Path) -> io::Result<PathBuf> {
        fs::create_dir_all(root.join(self.path()).parent().unwrap())?;
        let path = self.at(root)?;
        match path.symlink_metadata() {
            Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(&path)?,
            Ok(_) => fs::remove_file(&path)?,
            Err(_) => {}
        }
        Ok(path)
    }
}

/// What a container does.
#[derive(Debug, Clone)]
pub(crate) enum Edit {
    /// A file: an old one is overwritten, something else gives way.
    Write(Spot, Vec<u8>),
    Append(Spot),
    MakeDirectory(Spot),
    /// A directory with something in it, where possibly another was.
    NewTree(Spot),
    Remove(Spot),
    Rename(Spot, Spot),
    Link(Spot, Spot),
    Symlink(Spot, &'static str),
    Special(Spot, FileType),
    /// A file by a directory, and the other way round.
    Replace(Spot),
    Mode(Spot, u32),
    Owner(Spot, u32),
    Touch(Spot),
    Attribute(Spot, &'static str),
    NoAttribute(Spot, &'static str),
    Root(u32),
}

fn spot() -> impl Strategy<Value = Spot> {
    let leaf = prop::option::weighted(0.6, 0..LEAVES.len());
    (0..DIRECTORIES.len(), leaf).prop_map(|(directory, leaf)| Spot { directory, leaf })
}

/// The names of attributes that a user of an overlay can set.
pub(crate) fn attribute_names() -> Vec<&'static str> {
    let mut names = vec!["user.one", "trusted.note", "user.overlay.opaque"];
    if mount::kernel() >= (6, 7) {
        // Before, overlayfs refuses attributes with its own prefix.
        names.push("trusted.overlay.opaque");
    }
    names
}

pub(crate) fn edit() -> impl Strategy<Value = Edit> {
    let kinds =
        [FileType::Fifo, FileType::BlockDevice, FileType::CharacterDevice, FileType::Socket];
    let kind = prop::sample::select(kinds.to_vec());
    let mode = || prop::sample::select(vec![0o600, 0o4755, 0o1777, 0o2770, 0o755]);
    let target = prop::sample::select(vec!["y", "c", "b", "/nowhere"]);
    let name = prop::sample::select(attribute_names());
    let content = prop::collection::vec(any::<u8>(), 0..40);
    prop_oneof![
        4 => (spot(), content).prop_map(|(spot, content)| Edit::Write(spot, content)),
        2 => spot().prop_map(Edit::Append),
        2 => spot().prop_map(Edit::MakeDirectory),
        3 => spot().prop_map(Edit::NewTree),
        3 => spot().prop_map(Edit::Remove),
        5 => (spot(), spot()).prop_map(|(from, to)| Edit::Rename(from, to)),
        2 => (spot(), spot()).prop_map(|(from, to)| Edit::Link(from, to)),
        1 => (spot(), target).prop_map(|(spot, target)| Edit::Symlink(spot, target)),
        1 => (spot(), kind).prop_map(|(spot, kind)| Edit::Special(spot, kind)),
        2 => spot().prop_map(Edit::Replace),
        1 => (spot(), mode()).prop_map(|(spot, mode)| Edit::Mode(spot, mode)),
        1 => (spot(), any::<u32>()).prop_map(|(spot, owner)| Edit::Owner(spot, owner >> 1)),
        1 => spot().prop_map(Edit::Touch),
        2 => (spot(), name.clone()).prop_map(|(spot, name)| Edit::Attribute(spot, name)),
        2 => (spot(), name).prop_map(|(spot, name)| Edit::NoAttribute(spot, name)),
        1 => mode().prop_map(Edit::Root),
    ]
}

/// Gives a file a time that no other has, before and after 1970, with nanoseconds.
pub(crate) fn stamp(path: &Path, clock: &mut i64) -> io::Result<()> {
    *clock += 1;
    let time = Timespec { tv_sec: *clock - 5, tv_nsec: *clock * 1_000_003 % 1_000_000_000 };
    let times = Timestamps { last_access: time, last_modification: time };
    Ok(rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW)?)
}

pub(crate) fn make_node(path: &Path, kind: FileType, device: u64) -> io::Result<()> {
    Ok(rustix::fs::mknodat(CWD, path, kind, Mode::from_raw_mode(0o640), device)?)
}

pub(crate) fn set_attribute(path: &Path, name: &str, value: &[u8]) -> io::Result<()> {
    Ok(rustix::fs::lsetxattr(path, name, value, XattrFlags::empty())?)
}

/// An edit is not for what stands there.
const UNFIT: Errno = Errno::OPNOTSUPP;

fn apply(root: &Path, edit: &Edit, clock: &mut i64) -> io::Result<()> {
    match edit {
        Edit::Write(spot, content) => {
            let is_file = |path: &PathBuf| path.symlink_metadata().is_ok_and(|at| at.is_file());
            let mut file = match spot.at(root).ok().filter(is_file) {
                // Without O_CREAT: `fs.protected_regular` refuses that for another owner's file in a sticky directory, also to root.
                Some(old) => File::options().write(true).truncate(true).open(old)?,
                None => File::create(spot.free(root)?)?,
            };
            file.write_all(content)
        }
        Edit::Append(spot) => {
            let path = spot.at(root)?;
            if !path.symlink_metadata()?.is_file() {
                return Err(UNFIT.into());
            }
            File::options().append(true).open(path)?.write_all(b"more")
        }
        Edit::MakeDirectory(spot) => fs::create_dir_all(root.join(spot.path())),
        Edit::NewTree(spot) => {
            let path = spot.free(root)?;
            fs::create_dir_all(path.join("c/d"))?;
            fs::write(path.join("c/x"), "new")
        }
        Edit::Remove(spot) => spot.free(root).map(|_| ()),
        Edit::Rename(from, to) => fs::rename(from.at(root)?, to.at(root)?),
        Edit::Link(from, to) => fs::hard_link(from.at(root)?, to.at(root)?),
        Edit::Symlink(spot, target) => symlink(target, spot.free(root)?),
        Edit::Special(spot, kind) => {
            let device = rustix::fs::makedev(259, 300_000);
            let is_device = matches!(kind, FileType::BlockDevice | FileType::CharacterDevice);
            make_node(&spot.free(root)?, *kind, if is_device { device } else { 0 })
        }
        Edit::Replace(spot) => {
            let was_directory = spot.at(root)?.symlink_metadata()?.is_dir();
            let path = spot.free(root)?;
            if was_directory { fs::write(path, "file") } else { fs::create_dir(path) }
        }
        Edit::Mode(spot, mode) => {
            let path = spot.at(root)?;
            if path.symlink_metadata()?.is_symlink() {
                return Err(UNFIT.into());
            }
            fs::set_permissions(path, fs::Permissions::from_mode(*mode))
        }
        Edit::Owner(spot, owner) => lchown(spot.at(root)?, Some(*owner), Some(owner / 2)),
        Edit::Touch(spot) => stamp(&spot.at(root)?, clock),
        Edit::Attribute(spot, name) => set_attribute(&spot.at(root)?, name, b"a=b\n\0c"),
        Edit::NoAttribute(spot, name) => Ok(rustix::fs::lremovexattr(spot.at(root)?, *name)?),
        Edit::Root(mode) => {
            set_attribute(root, "user.root", b"1")?;
            fs::set_permissions(root, fs::Permissions::from_mode(*mode))
        }
    }
}

/// Why there is no way to what an edit changes.
const WAY: &[Errno] = &[Errno::NOENT, Errno::NOTDIR, Errno::LOOP];

/// Why no way to it can be made: files and links that lead nowhere stay.
const NEW_WAY: &[Errno] = &[Errno::EXIST, Errno::NOTDIR, Errno::LOOP];

/// The name of an edit's kind, and why it may fail: on its way, and there.
fn kind(edit: &Edit) -> (&'static str, &'static [Errno], &'static [Errno]) {
    match edit {
        Edit::Write(..) => ("write", NEW_WAY, &[]),
        Edit::Append(..) => ("append", WAY, &[UNFIT]),
        Edit::MakeDirectory(..) => ("make directory", NEW_WAY, &[]),
        Edit::NewTree(..) => ("new tree", NEW_WAY, &[]),
        Edit::Remove(..) => ("remove", NEW_WAY, &[]),
        // Directories of below cannot be renamed, nor any into itself.
        Edit::Rename(..) => (
            "rename",
            WAY,
            &[Errno::XDEV, Errno::INVAL, Errno::ISDIR, Errno::NOTEMPTY, Errno::EXIST],
        ),
        // Directories have no links.
        Edit::Link(..) => ("link", WAY, &[Errno::EXIST, Errno::PERM]),
        Edit::Symlink(..) => ("symlink", NEW_WAY, &[]),
        Edit::Special(..) => ("special", NEW_WAY, &[]),
        Edit::Replace(..) => ("replace", NEW_WAY, &[Errno::NOENT]),
        Edit::Mode(..) => ("mode", WAY, &[UNFIT]),
        Edit::Owner(..) => ("owner", WAY, &[]),
        Edit::Touch(..) => ("touch", WAY, &[]),
        // Links and devices have no `user.` attributes.
        Edit::Attribute(..) => ("attribute", WAY, &[Errno::PERM]),
        Edit::NoAttribute(..) => ("no attribute", WAY, &[Errno::PERM, Errno::NODATA]),
        Edit::Root(..) => ("root", &[], &[]),
    }
}

/// How many edits of each kind were made.
pub(crate) type Counts = BTreeMap<&'static str, u64>;

/// Edits, counted; those that cannot be made where they stand are left out.
pub(crate) fn apply_all(root: &Path, edits: &[Edit], made: &mut Counts) {
    let root = &root.canonicalize().unwrap();
    let mut clock = 0;
    for edit in edits {
        let (kind, on_its_way, there) = kind(edit);
        let made = made.entry(kind).or_default();
        match apply(root, edit, &mut clock) {
            Ok(()) => *made += 1,
            Err(error) => {
                let errno = Errno::from_io_error(&error);
                let is_expected = errno
                    .is_some_and(|errno| on_its_way.contains(&errno) || there.contains(&errno));
                assert!(is_expected, "{edit:?}: {error}");
            }
        }
    }
}
