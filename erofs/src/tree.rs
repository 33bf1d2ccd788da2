//! The names and attributes of an image before they are written.

use std::collections::BTreeMap;

use crate::error::{ErofsError, shown};
use crate::image::Extent;
use crate::xattr;

/// Bytes of a name in a directory, as everywhere in Linux.
pub const NAME_BYTES_MAX: usize = 255;

/// Bytes of a symbolic link's target: with a NUL behind it, it has to fit into a page.
pub const SYMLINK_BYTES_MAX: usize = 4095;

/// Permissions with set-user-id, set-group-id and sticky bit.
const MODE_MAX: u16 = 0o7777;

const NANOSECONDS: u32 = 1_000_000_000;

/// Bits of a device's numbers in the kernel.
const MAJOR_MAX: u32 = (1 << 12) - 1;
const MINOR_MAX: u32 = (1 << 20) - 1;

/// What a name takes in its directory beside its bytes: two words in a map that is two thirds full.
const NAME_OVERHEAD_BYTES: usize = 48;

/// What an attribute takes beside its bytes.
const XATTR_OVERHEAD_BYTES: usize = 96;

/// What the first name of a directory takes: maps are made of nodes of eleven places.
const FIRST_NAME_BYTES: usize = 288;

/// Likewise the first attribute of an inode.
const FIRST_XATTR_BYTES: usize = 576;

/// What an inode takes beside its node: its place while the image is written, twice as tables double.
const INODE_OVERHEAD_BYTES: usize = 72 + size_of::<Node>();

/// Extended attributes by their whole name.
pub type Xattrs = BTreeMap<Vec<u8>, Vec<u8>>;

/// A point in time: seconds since 1970, rounded down, and what is left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Time {
    /// Whole seconds; negative before 1970.
    pub seconds: i64,
    /// Less than 1,000,000,000.
    pub nanoseconds: u32,
}

/// What every inode has.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Attributes {
    /// Permissions, set-user-id, set-group-id and sticky bit; not the type.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// When the content changed last. The other times of an inode in an image are the same.
    pub modified: Time,
    /// Extended attributes: `user.`, `trusted.`, `security.`, and POSIX ACLs as `getxattr` gives them.
    pub xattrs: Xattrs,
}

/// What an inode is.
#[derive(Debug, PartialEq, Eq)]
pub enum Kind {
    /// A directory. Its names are given by [`Tree::add`] and [`Tree::link`].
    Directory,
    /// A regular file with a content in the same image.
    File(Extent),
    /// A symbolic link to this target.
    Symlink(Box<[u8]>),
    /// A character device; 0:0 is a whiteout of overlayfs.
    CharacterDevice {
        /// At most 4,095.
        major: u32,
        /// At most 1,048,575.
        minor: u32,
    },
    /// A block device.
    BlockDevice {
        /// At most 4,095.
        major: u32,
        /// At most 1,048,575.
        minor: u32,
    },
    /// A named pipe.
    Fifo,
    /// A socket.
    Socket,
}

/// An inode of a [`Tree`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InodeId(u32);

impl InodeId {
    /// The inode's place in tables of all inodes of its tree.
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

#[derive(Debug)]
struct Node {
    attributes: Attributes,
    kind: Kind,
    children: BTreeMap<Box<[u8]>, InodeId>,
}

/// Directories, their names and what these stand for. An inode may have several names (hard links),
/// a directory has one. What lost its last name is not written.
#[derive(Debug)]
pub struct Tree {
    nodes: Vec<Node>,
    memory_bytes: usize,
    memory_bytes_max: usize,
}

impl Tree {
    /// A tree of a root directory alone. It takes about as much memory as is counted for it, until
    /// `memory_bytes_max`; what was removed counts, too.
    ///
    /// # Errors
    /// Attributes that cannot be kept.
    pub fn new(root: Attributes, memory_bytes_max: usize) -> Result<Self, ErofsError> {
        let mut tree = Self { nodes: Vec::new(), memory_bytes: 0, memory_bytes_max };
        tree.push(root, Kind::Directory)?;
        Ok(tree)
    }

    /// The root directory.
    #[must_use]
    pub fn root(&self) -> InodeId {
        InodeId(0)
    }

    /// The number of inodes, those with it that have no name any more.
    pub(crate) fn inodes(&self) -> usize {
        self.nodes.len()
    }

    /// What an inode is.
    ///
    /// # Panics
    /// If `inode` is of another tree.
    #[must_use]
    pub fn kind(&self, inode: InodeId) -> &Kind {
        &self.nodes[inode.index()].kind
    }

    /// Whether an inode is a directory.
    ///
    /// # Panics
    /// If `inode` is of another tree.
    #[must_use]
    pub fn is_directory(&self, inode: InodeId) -> bool {
        *self.kind(inode) == Kind::Directory
    }

    /// The attributes of an inode.
    ///
    /// # Panics
    /// If `inode` is of another tree.
    #[must_use]
    pub fn attributes(&self, inode: InodeId) -> &Attributes {
        &self.nodes[inode.index()].attributes
    }

    /// What `name` stands for in a directory; `None` also if `directory` is none.
    ///
    /// # Panics
    /// If `directory` is of another tree.
    #[must_use]
    pub fn child(&self, directory: InodeId, name: &[u8]) -> Option<InodeId> {
        self.nodes[directory.index()].children.get(name).copied()
    }

    /// The names in a directory in the order of their bytes; none if `directory` is none.
    ///
    /// # Panics
    /// If `directory` is of another tree.
    pub fn children(&self, directory: InodeId) -> impl Iterator<Item = (&[u8], InodeId)> {
        self.nodes[directory.index()].children.iter().map(|(name, inode)| (&**name, *inode))
    }

    /// Makes an inode with a name in a directory.
    ///
    /// # Errors
    /// No name of a file, or one that is there; attributes that cannot be kept; no more memory. The
    /// tree is as before.
    ///
    /// # Panics
    /// If `directory` is of another tree.
    pub fn add(
        &mut self,
        directory: InodeId,
        name: &[u8],
        attributes: Attributes,
        kind: Kind,
    ) -> Result<InodeId, ErofsError> {
        self.check_new_name(directory, name)?;
        let inode = self.push(attributes, kind)?;
        self.insert(directory, name, inode)?;
        Ok(inode)
    }

    /// Gives an inode that is no directory one more name.
    ///
    /// # Errors
    /// No name of a file, or one that is there; a directory; no more memory. The tree is as before.
    ///
    /// # Panics
    /// If `directory` or `inode` is of another tree.
    pub fn link(
        &mut self,
        directory: InodeId,
        name: &[u8],
        inode: InodeId,
    ) -> Result<(), ErofsError> {
        self.check_new_name(directory, name)?;
        if self.is_directory(inode) {
            let reason = "a directory has one name; got a hard link to one";
            return Err(ErofsError::WrongKind { name: shown(name), reason });
        }
        self.insert(directory, name, inode)
    }

    /// Takes a name away, and with a directory's all that is in it. Gives what it stood for.
    ///
    /// # Panics
    /// If `directory` is of another tree.
    pub fn remove(&mut self, directory: InodeId, name: &[u8]) -> Option<InodeId> {
        self.nodes[directory.index()].children.remove(name)
    }

    /// Sets the attributes of an inode.
    ///
    /// # Errors
    /// Attributes that cannot be kept; no more memory. The tree is as before.
    ///
    /// # Panics
    /// If `inode` is of another tree.
    pub fn set_attributes(
        &mut self,
        inode: InodeId,
        attributes: Attributes,
    ) -> Result<(), ErofsError> {
        check_attributes(&attributes, self.kind(inode))?;
        self.take_memory(xattr_memory(&attributes))?;
        self.nodes[inode.index()].attributes = attributes;
        Ok(())
    }

    fn check_new_name(&self, directory: InodeId, name: &[u8]) -> Result<(), ErofsError> {
        let refused = |reason| Err(ErofsError::Name { name: shown(name), reason });
        if name.is_empty() || name == b"." || name == b".." {
            return refused("it is empty, `.` or `..`");
        }
        if name.len() > NAME_BYTES_MAX {
            return refused("it has more than 255 bytes");
        }
        if name.contains(&b'/') || name.contains(&0) {
            return refused("it holds a slash or a NUL");
        }
        if !self.is_directory(directory) {
            let reason = "expected a directory to put it into, got something else";
            return Err(ErofsError::WrongKind { name: shown(name), reason });
        }
        match self.child(directory, name) {
            Some(_) => Err(ErofsError::Exists { name: shown(name) }),
            None => Ok(()),
        }
    }

    fn insert(
        &mut self,
        directory: InodeId,
        name: &[u8],
        inode: InodeId,
    ) -> Result<(), ErofsError> {
        let is_first = self.nodes[directory.index()].children.is_empty();
        let first = if is_first { FIRST_NAME_BYTES } else { 0 };
        self.take_memory(first + NAME_OVERHEAD_BYTES + name.len())?;
        self.nodes[directory.index()].children.insert(name.into(), inode);
        Ok(())
    }

    fn push(&mut self, attributes: Attributes, kind: Kind) -> Result<InodeId, ErofsError> {
        check_attributes(&attributes, &kind)?;
        check_kind(&kind)?;
        let content = match &kind {
            Kind::File(extent) => extent.memory_bytes(),
            Kind::Symlink(target) => target.len(),
            _ => 0,
        };
        let own = size_of::<Node>() + INODE_OVERHEAD_BYTES;
        self.take_memory(own + content + xattr_memory(&attributes))?;
        let limit_mib = self.memory_bytes_max >> 20;
        let inode =
            u32::try_from(self.nodes.len()).map_err(|_| ErofsError::Memory { limit_mib })?;
        self.nodes.push(Node { attributes, kind, children: BTreeMap::new() });
        Ok(InodeId(inode))
    }

    fn take_memory(&mut self, bytes: usize) -> Result<(), ErofsError> {
        if bytes > self.memory_bytes_max - self.memory_bytes {
            return Err(ErofsError::Memory { limit_mib: self.memory_bytes_max >> 20 });
        }
        self.memory_bytes += bytes;
        Ok(())
    }
}

fn xattr_memory(attributes: &Attributes) -> usize {
    let first = if attributes.xattrs.is_empty() { 0 } else { FIRST_XATTR_BYTES };
    let each = attributes.xattrs.iter();
    let each = each.map(|(name, value)| XATTR_OVERHEAD_BYTES + name.len() + value.len());
    first + each.sum::<usize>()
}

fn check_attributes(attributes: &Attributes, kind: &Kind) -> Result<(), ErofsError> {
    if attributes.mode > MODE_MAX {
        let (got, expected) = (format!("{:#o}", attributes.mode), "it may be at most 0o7777");
        return Err(ErofsError::OutOfRange { what: "the mode", got, expected });
    }
    if attributes.modified.nanoseconds >= NANOSECONDS {
        let got = attributes.modified.nanoseconds.to_string();
        let expected = "it has to be less than 1,000,000,000";
        return Err(ErofsError::OutOfRange { what: "the part of a second", got, expected });
    }
    xattr::check(&attributes.xattrs, kind)
}

fn check_kind(kind: &Kind) -> Result<(), ErofsError> {
    match kind {
        Kind::Symlink(target)
            if target.is_empty() || target.len() > SYMLINK_BYTES_MAX || target.contains(&0) =>
        {
            let got = format!("`{}` of {} bytes", shown(target), target.len());
            let expected = "it has to have 1 to 4,095 bytes and no NUL";
            Err(ErofsError::OutOfRange { what: "the target of a symbolic link", got, expected })
        }
        Kind::CharacterDevice { major, minor } | Kind::BlockDevice { major, minor }
            if *major > MAJOR_MAX || *minor > MINOR_MAX =>
        {
            let got = format!("{major}:{minor}");
            let expected = "it may be at most 4095:1048575";
            Err(ErofsError::OutOfRange { what: "the number of a device", got, expected })
        }
        _ => Ok(()),
    }
}
