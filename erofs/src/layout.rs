//! Where inodes and directories come to lie, and their writing.
//!
//! Inodes stand in the order of a walk by levels: those of one directory one behind the other. What
//! follows an inode (attributes, map, link, end of a directory) stands right behind it.

use std::fs::File;

use crate::area::Area;
use crate::directory::{self, Entry};
use crate::error::ErofsError;
use crate::format::{
    BLOCK, BlockAddress, Data, INODE_BYTES, Nid, ROOT_NID, RawInode, SLOT_BYTES, XATTR_HEADER_BYTES,
};
use crate::image::{Blocks, block};
use crate::tree::{InodeId, Kind, Tree};
use crate::xattr;

/// The longest end of a directory, or link, that follows its inode. It may not cross the end of a
/// block, so longer ones would leave much of a block empty; they get a block of their own.
const INLINE_BYTES_MAX: u64 = 2048;

/// An inode with a name.
#[derive(Debug, Clone, Copy)]
struct Place {
    nid: Nid,
    links: u32,
    /// Of a directory.
    parent: InodeId,
    /// Of what has blocks in the part behind the inodes.
    first_block: BlockAddress,
}

/// The plan of an image's second half.
#[derive(Debug)]
pub(crate) struct Layout<'a> {
    tree: &'a Tree,
    first_inode_block: BlockAddress,
    /// The block behind the inodes.
    first_directory_block: BlockAddress,
    end: BlockAddress,
    order: Vec<InodeId>,
    /// By inode; `None` for what has no name.
    places: Vec<Option<Place>>,
    has_chunks: bool,
}

impl<'a> Layout<'a> {
    /// Finds a place for everything that has a name.
    pub(crate) fn new(tree: &'a Tree, first_inode_block: BlockAddress) -> Result<Self, ErofsError> {
        let mut layout = Self {
            tree,
            first_inode_block,
            first_directory_block: first_inode_block,
            end: first_inode_block,
            order: Vec::new(),
            places: vec![None; tree.inodes()],
            has_chunks: false,
        };
        layout.walk();
        layout.place_inodes()?;
        layout.place_directories()?;
        Ok(layout)
    }

    pub(crate) fn inodes(&self) -> u64 {
        self.order.len() as u64
    }

    pub(crate) fn has_chunks(&self) -> bool {
        self.has_chunks
    }

    /// The block behind the last one.
    pub(crate) fn end(&self) -> BlockAddress {
        self.end
    }

    /// Finds what has a name, and counts the names.
    fn walk(&mut self) {
        self.meet(self.tree.root(), self.tree.root());
        let mut next = 0;
        while let Some(directory) = self.order.get(next).copied() {
            next += 1;
            for (_, child) in self.tree.children(directory) {
                if self.tree.is_directory(child) {
                    // Its `..`.
                    self.add_link(directory);
                    self.meet(child, directory);
                } else if self.places[child.index()].is_some() {
                    self.add_link(child);
                } else {
                    self.meet(child, directory);
                }
            }
        }
    }

    fn meet(&mut self, inode: InodeId, parent: InodeId) {
        // A directory's name in its parent, and its own `.`.
        let links = if self.tree.is_directory(inode) { 2 } else { 1 };
        let place = Place { nid: ROOT_NID, links, parent, first_block: BlockAddress(0) };
        self.places[inode.index()] = Some(place);
        self.order.push(inode);
    }

    fn add_link(&mut self, inode: InodeId) {
        if let Some(place) = &mut self.places[inode.index()] {
            place.links += 1;
        }
    }

    fn place(&self, inode: InodeId) -> Place {
        let root = Place {
            nid: ROOT_NID,
            links: 0,
            parent: self.tree.root(),
            first_block: BlockAddress(0),
        };
        self.places[inode.index()].unwrap_or(root)
    }

    /// What a directory or a symbolic link has as its content, in bytes.
    fn own_bytes(&self, inode: InodeId) -> u64 {
        match self.tree.kind(inode) {
            Kind::Symlink(target) => target.len() as u64,
            Kind::Directory => {
                directory::encoded_bytes(self.names(inode).iter().map(|name| name.0))
            }
            _ => 0,
        }
    }

    /// How much of a directory or link of this size follows the inode: its end, if that is short.
    /// A link follows only if it fits into one block with its inode and attributes: older kernels
    /// refuse others.
    fn inline_bytes(&self, inode: InodeId, own_bytes: u64) -> u64 {
        let end = own_bytes % BLOCK;
        let before = match self.tree.kind(inode) {
            Kind::Symlink(_) => xattr::encoded_bytes(&self.tree.attributes(inode).xattrs),
            _ => 0,
        };
        let fits = (INODE_BYTES + before) as u64 + end <= BLOCK;
        if end <= INLINE_BYTES_MAX && fits { end } else { 0 }
    }

    /// The names in a directory in their order, with what they stand for.
    fn names(&self, directory: InodeId) -> Vec<(&'a [u8], InodeId)> {
        let tree = self.tree;
        let mut names: Vec<_> = tree.children(directory).collect();
        for own in [(&b"."[..], directory), (b"..", self.place(directory).parent)] {
            let at = names.partition_point(|(name, _)| *name < own.0);
            names.insert(at, own);
        }
        names
    }

    fn place_inodes(&mut self) -> Result<(), ErofsError> {
        let mut offset = ROOT_NID.offset();
        for at in 0..self.order.len() {
            let inode = self.order[at];
            let xattrs = xattr::encoded_bytes(&self.tree.attributes(inode).xattrs);
            let head = (INODE_BYTES + xattrs) as u64;
            let inline = self.inline_bytes(inode, self.own_bytes(inode));
            // What must not cross the end of a block.
            let (before, whole) = match self.tree.kind(inode) {
                Kind::Symlink(_) if inline > 0 => (0, head + inline),
                _ => (head, inline),
            };
            while (offset + before) % BLOCK + whole > BLOCK {
                offset += SLOT_BYTES;
            }
            if let Some(place) = &mut self.places[inode.index()] {
                place.nid = Nid(offset / SLOT_BYTES);
            }
            let map = self.map(inode).map_or(0, |map| size_of_val(map) as u64);
            self.has_chunks |= self.map(inode).is_some();
            offset = (offset + head + inline + map).next_multiple_of(SLOT_BYTES);
        }
        // Some programs read the header of attributes behind the last inode, too, which has none.
        let bytes = offset + XATTR_HEADER_BYTES as u64;
        let blocks = u64::from(self.first_inode_block.0) + bytes.div_ceil(BLOCK);
        self.first_directory_block = block(blocks)?;
        Ok(())
    }

    fn place_directories(&mut self) -> Result<(), ErofsError> {
        let mut next = u64::from(self.first_directory_block.0);
        for at in 0..self.order.len() {
            let inode = self.order[at];
            let bytes = self.own_bytes(inode);
            let blocks = (bytes - self.inline_bytes(inode, bytes)).div_ceil(BLOCK);
            if let Some(place) = &mut self.places[inode.index()] {
                place.first_block = block(next)?;
            }
            next += blocks;
        }
        self.end = block(next)?;
        Ok(())
    }

    /// The map of a sparse file.
    fn map(&self, inode: InodeId) -> Option<&'a [BlockAddress]> {
        match self.tree.kind(inode) {
            Kind::File(extent) => match extent.blocks() {
                Blocks::Chunks { map, .. } if !map.is_empty() => Some(map),
                _ => None,
            },
            _ => None,
        }
    }

    /// Writes the inodes and the directories behind what is in the area, which ends where they begin. Some may be in it
    /// still, to be flushed.
    pub(crate) fn write(&self, file: &File, inodes: &mut Area) -> Result<(), ErofsError> {
        let mut directories = Area::new(self.first_directory_block);
        let start = self.first_inode_block.offset();
        let mut head = Vec::new();
        for (at, inode) in self.order.iter().copied().enumerate() {
            let place = self.place(inode);
            let own = self.own(inode);
            let inline = self.inline_bytes(inode, own.len() as u64);
            let inline = usize::try_from(inline).unwrap_or(own.len());
            let (in_blocks, behind_inode) = own.split_at(own.len() - inline);
            head.clear();
            head.extend_from_slice(&self.raw_inode(inode, at, own.len() as u64).encode());
            xattr::encode(&self.tree.attributes(inode).xattrs, &mut head);
            head.extend_from_slice(behind_inode);
            for chunk in self.map(inode).unwrap_or_default() {
                head.extend_from_slice(&chunk.0.to_le_bytes());
            }
            inodes.fill_to(file, start + place.nid.offset())?;
            inodes.append(file, &head)?;
            if !in_blocks.is_empty() {
                directories.append(file, in_blocks)?;
                let end = directories.position().next_multiple_of(BLOCK);
                directories.fill_to(file, end)?;
            }
        }
        inodes.fill_to(file, self.first_directory_block.offset())?;
        inodes.append_area(file, directories)
    }

    /// The content of a directory or symbolic link.
    fn own(&self, inode: InodeId) -> Vec<u8> {
        match self.tree.kind(inode) {
            Kind::Symlink(target) => target.to_vec(),
            Kind::Directory => {
                let names = self.names(inode);
                let entry = |(name, child): &(&'a [u8], InodeId)| Entry {
                    name,
                    nid: self.place(*child).nid,
                    file_type: kind_bits(self.tree.kind(*child)).file_type,
                };
                directory::encode(&names.iter().map(entry).collect::<Vec<_>>())
            }
            _ => Vec::new(),
        }
    }

    fn raw_inode(&self, inode: InodeId, at: usize, own_bytes: u64) -> RawInode {
        let place = self.place(inode);
        let attributes = self.tree.attributes(inode);
        let kind = self.tree.kind(inode);
        let (data, size_bytes) = match kind {
            Kind::Directory | Kind::Symlink(_) if self.inline_bytes(inode, own_bytes) > 0 => {
                (Data::Inline(place.first_block), own_bytes)
            }
            Kind::Directory | Kind::Symlink(_) => (Data::Plain(place.first_block), own_bytes),
            Kind::File(extent) => match extent.blocks() {
                Blocks::Chunks { block_bits, map } if !map.is_empty() => {
                    (Data::Chunks { block_bits: *block_bits }, extent.size_bytes())
                }
                Blocks::Chunks { .. } => (Data::Plain(BlockAddress(0)), 0),
                Blocks::Plain(first) => (Data::Plain(*first), extent.size_bytes()),
            },
            Kind::CharacterDevice { major, minor } | Kind::BlockDevice { major, minor } => {
                (Data::Device(device_number(*major, *minor)), 0)
            }
            Kind::Fifo | Kind::Socket => (Data::Device(0), 0),
        };
        RawInode {
            data,
            xattr_bytes: xattr::encoded_bytes(&attributes.xattrs),
            mode: kind_bits(kind).mode | attributes.mode,
            size_bytes,
            // From 1 on, as there are fewer than 2^32 inodes. 64-bit kernels show the nid instead.
            number: u32::try_from(at + 1).unwrap_or(u32::MAX),
            uid: attributes.uid,
            gid: attributes.gid,
            modified_seconds: attributes.modified.seconds,
            modified_nanoseconds: attributes.modified.nanoseconds,
            links: place.links,
        }
    }
}

/// `new_encode_dev` of the kernel.
fn device_number(major: u32, minor: u32) -> u32 {
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}

/// The type of an inode in its mode (`S_IF...`), and in its directory's entry (`FT_...`).
struct KindBits {
    mode: u16,
    file_type: u8,
}

fn kind_bits(kind: &Kind) -> KindBits {
    let (mode, file_type) = match kind {
        Kind::File(_) => (0o100_000, 1),
        Kind::Directory => (0o040_000, 2),
        Kind::CharacterDevice { .. } => (0o020_000, 3),
        Kind::BlockDevice { .. } => (0o060_000, 4),
        Kind::Fifo => (0o010_000, 5),
        Kind::Socket => (0o140_000, 6),
        Kind::Symlink(_) => (0o120_000, 7),
    };
    KindBits { mode, file_type }
}
