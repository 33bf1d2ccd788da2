//! The names of one layer while its archive is read, and what they hide and add to below.
//!
//! A path is looked for in the layer first, then below, unless something of the layer hides that. What
//! the archive uses and does not list (*implied* directories) has the attributes that it has below.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Stat};
use rustix::io::Errno;
use slackwater_erofs::{Attributes, InodeId, Kind, Time, Tree};

use super::of_image;
use crate::error::{ArchiveError, failed};
use crate::members::Member;
use crate::overlay::{OPAQUE, escaped};
use crate::pax;
use crate::root::{
    Component, IMPLIED_DIRECTORY_MODE, Place, Root, follow, is_directory, missing, modified,
};

/// In the mode of a directory: what is made in it has its group.
const SET_GROUP_ID: u16 = 0o2000;

/// The mark of what is not there any more.
const WHITEOUT: Kind = Kind::CharacterDevice { major: 0, minor: 0 };

/// A name in a directory of the layer.
#[derive(Debug)]
pub(super) struct Spot {
    pub(super) directory: InodeId,
    pub(super) name: Vec<u8>,
    /// The resolved path.
    pub(super) path: PathBuf,
}

impl Spot {
    pub(super) fn directory_path(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new(""))
    }

    /// Another name in the same directory.
    pub(super) fn beside(&self, name: &OsStr) -> Self {
        let path = self.directory_path().join(name);
        Self { directory: self.directory, name: name.as_bytes().to_vec(), path }
    }
}

/// What is at a path.
#[derive(Debug)]
pub(super) enum Seen {
    Own(InodeId),
    Below(Place, Stat),
    Nothing,
}

/// What was looked for, and its resolved path.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) path: PathBuf,
    pub(super) seen: Seen,
}

/// The layer.
#[derive(Debug)]
pub(super) struct Layer {
    tree: Tree,
    below: Option<Root>,
    /// Whether that is an image itself, whose attributes no overlayfs has translated.
    is_below_raw: bool,
    /// Directories that the archive did not list.
    implied: HashSet<InodeId>,
    opaque: HashSet<InodeId>,
    /// Names of what was copied from below for a hard link: the archive did not make them.
    copied: HashSet<(InodeId, Vec<u8>)>,
    /// The copies of files that have several names below, by device and inode there.
    copies: HashMap<(u64, u64), InodeId>,
}

impl Layer {
    /// A layer of nothing over the tree at `below`, with its root's attributes.
    pub(super) fn new(below: Option<&Path>, memory_bytes_max: usize) -> Result<Self, ArchiveError> {
        let below = below.map(Root::open).transpose()?;
        let is_below_raw = below.as_ref().map_or(Ok(false), Root::is_erofs)?;
        let new_tree =
            |root| Tree::new(root, memory_bytes_max).map_err(of_image("the layer's root"));
        let mut layer = Self {
            tree: new_tree(implied_attributes())?,
            below,
            is_below_raw,
            implied: HashSet::new(),
            opaque: HashSet::new(),
            copied: HashSet::new(),
            copies: HashMap::new(),
        };
        if let Some((place, stat)) = layer.below(Path::new(""))? {
            layer.tree = new_tree(layer.attributes_below(&place, &stat)?)?;
        }
        Ok(layer)
    }

    pub(super) fn tree(&self) -> &Tree {
        &self.tree
    }

    pub(super) fn root(&self) -> InodeId {
        self.tree.root()
    }

    /// What the layer itself has at a place, be it a whiteout.
    pub(super) fn own(&self, spot: &Spot) -> Option<InodeId> {
        self.tree.child(spot.directory, &spot.name)
    }

    /// The place of a member. Links before the last component are followed, missing directories are
    /// made, those of below get their place in the layer.
    pub(super) fn spot(&mut self, member: &str, path: &Path) -> Result<Spot, ArchiveError> {
        let parent = path.parent().unwrap_or(Path::new(""));
        let name = path.file_name().unwrap_or_default();
        let spot = |directory, parent: &Path| Spot {
            directory,
            name: name.as_bytes().to_vec(),
            path: parent.join(name),
        };
        // Mostly all of the way is the layer's own, without a link.
        if let Some(directory) = self.own_directory(parent) {
            return Ok(spot(directory, parent));
        }
        let resolved = self.follow(member, parent, true)?;
        Ok(spot(self.directory(member, &resolved)?, &resolved))
    }

    /// The layer's directory at a path, if all of it is directories of the layer.
    fn own_directory(&self, path: &Path) -> Option<InodeId> {
        let own = path.components().try_fold(self.tree.root(), |here, component| {
            self.tree.child(here, component.as_os_str().as_bytes())
        });
        own.filter(|inode| self.tree.is_directory(*inode))
    }

    /// What is at a path. Links before the last component are followed.
    pub(super) fn find(&mut self, member: &str, path: &Path) -> Result<Target, ArchiveError> {
        let parent = path.parent().unwrap_or(Path::new(""));
        let path = self.follow(member, parent, false)?.join(path.file_name().unwrap_or_default());
        let seen = self.seen(&path)?;
        Ok(Target { path, seen })
    }

    fn follow(
        &mut self,
        member: &str,
        path: &Path,
        makes_parents: bool,
    ) -> Result<PathBuf, ArchiveError> {
        follow(member, path, |here| match self.seen(here)? {
            Seen::Own(inode) => Ok(match self.tree.kind(inode) {
                Kind::Directory => Component::Directory,
                Kind::Symlink(target) => Component::Link(OsStr::from_bytes(target).to_owned()),
                _ => Component::Other,
            }),
            Seen::Below(place, stat) => Ok(match FileType::from_raw_mode(stat.st_mode) {
                FileType::Directory => Component::Directory,
                FileType::Symlink => Component::Link(place.link_target()?),
                _ => Component::Other,
            }),
            Seen::Nothing if makes_parents => {
                self.directory(member, here)?;
                Ok(Component::Directory)
            }
            Seen::Nothing => Err(missing(member, here)),
        })
    }

    /// What is at a resolved path.
    fn seen(&self, path: &Path) -> Result<Seen, ArchiveError> {
        let mut here = self.tree.root();
        let mut hides = self.opaque.contains(&here);
        for component in path.components() {
            let Some(child) = self.tree.child(here, component.as_os_str().as_bytes()) else {
                if hides || !self.tree.is_directory(here) {
                    return Ok(Seen::Nothing);
                }
                let below = self.below(path)?;
                return Ok(below.map_or(Seen::Nothing, |(place, stat)| Seen::Below(place, stat)));
            };
            if *self.tree.kind(child) == WHITEOUT {
                return Ok(Seen::Nothing);
            }
            here = child;
            hides |= self.opaque.contains(&here);
        }
        Ok(Seen::Own(here))
    }

    /// What the layers below have at a resolved path, hidden or not.
    fn below(&self, path: &Path) -> Result<Option<(Place, Stat)>, ArchiveError> {
        self.below.as_ref().map_or(Ok(None), |root| root.look_up(path))
    }

    /// What the layers below have at a resolved path, if no directory of this layer on the way there
    /// hides it.
    fn visible_below(&self, path: &Path) -> Result<Option<(Place, Stat)>, ArchiveError> {
        let mut here = Some(self.tree.root());
        let parent = path.parent().unwrap_or(Path::new(""));
        for component in parent.components() {
            let child =
                here.and_then(|here| self.tree.child(here, component.as_os_str().as_bytes()));
            if child
                .is_some_and(|child| self.opaque.contains(&child) || !self.tree.is_directory(child))
            {
                return Ok(None);
            }
            here = child;
        }
        self.below(path)
    }

    /// A regular file of the layers below.
    pub(super) fn file_below(&self, path: &Path) -> Result<File, ArchiveError> {
        let file = self.below.as_ref().map_or(Err(Errno::NOENT), |root| root.file(path));
        file.map_err(failed("read", path))
    }

    /// The directory at a resolved path, which the layer gets if it has none there.
    fn directory(&mut self, member: &str, path: &Path) -> Result<InodeId, ArchiveError> {
        let mut here = self.tree.root();
        let mut at = PathBuf::new();
        for component in path.components() {
            let name = component.as_os_str().as_bytes();
            at.push(component);
            let own = self.tree.child(here, name);
            if let Some(child) = own.filter(|child| self.tree.is_directory(*child)) {
                here = child;
                continue;
            }
            let below = self.visible_below(&at)?;
            let below = below.filter(|(_, stat)| own.is_none() && is_directory(stat));
            let attributes = match below {
                Some((place, stat)) => self.attributes_below(&place, &stat)?,
                None => self.attributes_in(here),
            };
            // A whiteout: nothing else than one stands in the way of what `follow` let pass.
            self.tree.remove(here, name);
            let added = self.tree.add(here, name, attributes, Kind::Directory);
            here = added.map_err(of_image(member))?;
            self.implied.insert(here);
            if own.is_some() {
                self.hide_below(here, &at)?;
            }
        }
        Ok(here)
    }

    /// Gives the layer an inode at a place where it has none.
    pub(super) fn add(
        &mut self,
        member: &str,
        spot: &Spot,
        attributes: Attributes,
        kind: Kind,
    ) -> Result<InodeId, ArchiveError> {
        let added = self.tree.add(spot.directory, &spot.name, attributes, kind);
        added.map_err(of_image(member))
    }

    /// The attributes of what is below, as an image keeps them.
    pub(super) fn attributes_below(
        &self,
        place: &Place,
        stat: &Stat,
    ) -> Result<Attributes, ArchiveError> {
        let xattrs = place.xattrs()?;
        Ok(Attributes {
            mode: u16::try_from(stat.st_mode & 0o7777).unwrap_or_default(),
            uid: stat.st_uid,
            gid: stat.st_gid,
            modified: time(modified(stat)),
            xattrs: if self.is_below_raw { xattrs } else { escaped(xattrs) },
        })
    }

    /// The attributes of a new directory that the archive does not list: its group is that of its
    /// parent, if that says so.
    fn attributes_in(&self, parent: InodeId) -> Attributes {
        let above = self.tree.attributes(parent);
        let gid = if above.mode & SET_GROUP_ID == 0 { 0 } else { above.gid };
        Attributes { gid, ..implied_attributes() }
    }

    /// The copy that this layer has of a file below.
    pub(super) fn copy_of(&self, stat: &Stat) -> Option<InodeId> {
        self.copies.get(&(stat.st_dev, stat.st_ino)).copied()
    }

    /// Notes that what is at a place was copied from below.
    pub(super) fn note_copy(&mut self, spot: &Spot, stat: &Stat, inode: InodeId) {
        self.copied.insert((spot.directory, spot.name.clone()));
        if stat.st_nlink > 1 {
            self.copies.insert((stat.st_dev, stat.st_ino), inode);
        }
    }

    /// Gives an inode one more name.
    pub(super) fn link(
        &mut self,
        member: &str,
        spot: &Spot,
        inode: InodeId,
    ) -> Result<(), ArchiveError> {
        self.tree.link(spot.directory, &spot.name, inode).map_err(of_image(member))
    }

    /// Takes a name of the layer away.
    pub(super) fn remove(&mut self, spot: &Spot) {
        self.tree.remove(spot.directory, &spot.name);
        self.copied.remove(&(spot.directory, spot.name.clone()));
    }

    /// Sets what the archive lists for a directory that the layer has.
    pub(super) fn set_attributes(
        &mut self,
        member: &Member,
        inode: InodeId,
        attributes: Attributes,
    ) -> Result<(), ArchiveError> {
        self.implied.remove(&inode);
        self.tree.set_attributes(inode, attributes).map_err(of_image(member.shown()))
    }

    /// Hides the directory that is below one of the layer.
    pub(super) fn hide_below(&mut self, inode: InodeId, path: &Path) -> Result<(), ArchiveError> {
        if self.visible_below(path)?.is_some_and(|(_, stat)| is_directory(&stat)) {
            self.opaque.insert(inode);
        }
        Ok(())
    }

    /// Hides all that is below in a directory, and takes away what only served to show it.
    pub(super) fn clear(
        &mut self,
        member: &str,
        directory: InodeId,
        path: &Path,
    ) -> Result<(), ArchiveError> {
        self.prune(directory);
        if directory != self.tree.root() {
            return self.hide_below(directory, path);
        }
        // overlayfs does not look whether a root is opaque.
        let Some(below) = &self.below else { return Ok(()) };
        let mut names = Vec::new();
        let mut listing = below.listing(Path::new(""))?;
        while let Some((name, _)) = listing.next()? {
            names.push(name);
        }
        for name in names {
            let spot =
                Spot { directory, name: name.as_bytes().to_vec(), path: PathBuf::from(&name) };
            match self.own(&spot) {
                Some(inode) if self.tree.is_directory(inode) => {
                    self.hide_below(inode, &spot.path)?;
                }
                Some(_) => {}
                None => self.mark_gone(member, &spot)?,
            }
        }
        Ok(())
    }

    /// Removes what is below at a place. What the archive made itself stays.
    pub(super) fn white_out(&mut self, member: &str, spot: &Spot) -> Result<(), ArchiveError> {
        if let Some(inode) = self.own(spot) {
            let is_own = if self.tree.is_directory(inode) {
                self.clear(member, inode, &spot.path)?;
                let is_empty = self.tree.children(inode).next().is_none();
                !is_empty || !self.implied.contains(&inode)
            } else {
                !self.copied.contains(&(spot.directory, spot.name.clone()))
            };
            if is_own {
                return Ok(());
            }
            self.remove(spot);
        }
        match self.visible_below(&spot.path)? {
            Some(_) => self.mark_gone(member, spot),
            None => Ok(()),
        }
    }

    fn mark_gone(&mut self, member: &str, spot: &Spot) -> Result<(), ArchiveError> {
        self.add(member, spot, Attributes::default(), WHITEOUT).map(|_| ())
    }

    /// Takes away, below a directory, whiteouts, copies, and implied directories that hold nothing.
    fn prune(&mut self, directory: InodeId) {
        let mut directories = vec![(directory, Vec::new(), directory)];
        let mut next = 0;
        while let Some((_, _, here)) = directories.get(next) {
            let here = *here;
            next += 1;
            let mut gone = Vec::new();
            for (name, child) in self.tree.children(here) {
                let kind = self.tree.kind(child);
                let is_copy = || self.copied.contains(&(here, name.to_vec()));
                if *kind == Kind::Directory {
                    directories.push((here, name.to_vec(), child));
                } else if *kind == WHITEOUT || (!self.copied.is_empty() && is_copy()) {
                    gone.push(name.to_vec());
                }
            }
            for name in gone {
                self.tree.remove(here, &name);
                self.copied.remove(&(here, name));
            }
        }
        // Children stand behind their parents.
        for (parent, name, child) in directories.iter().skip(1).rev() {
            let is_empty = self.tree.children(*child).next().is_none();
            if is_empty && self.implied.contains(child) {
                self.tree.remove(*parent, name);
            }
        }
    }

    /// The tree with overlayfs' marks.
    pub(super) fn finish(mut self) -> Result<Tree, ArchiveError> {
        for inode in self.opaque {
            let mut attributes = self.tree.attributes(inode).clone();
            attributes.xattrs.insert(OPAQUE.0.to_vec(), OPAQUE.1.to_vec());
            let set = self.tree.set_attributes(inode, attributes);
            set.map_err(of_image("the mark of an opaque directory"))?;
        }
        Ok(self.tree)
    }
}

/// What a directory has that neither the archive lists nor a layer below has. Its time is always the
/// same, so that the image is.
fn implied_attributes() -> Attributes {
    let mode = u16::try_from(IMPLIED_DIRECTORY_MODE).unwrap_or_default();
    Attributes { mode, ..Attributes::default() }
}

pub(super) fn time(time: pax::Time) -> Time {
    Time { seconds: time.seconds, nanoseconds: time.nanoseconds }
}
