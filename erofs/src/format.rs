//! The form on the disk: superblock and inodes (`fs/erofs/erofs_fs.h`), all numbers little-endian.
//!
//! ```text
//! superblock, 128 bytes at 1024          extended inode, 64 bytes
//!    0  u32  magic                          0  u16  format: 1 | layout << 1
//!    4  u32  checksum, crc32c of            2  u16  units of 4 bytes of inline xattrs
//!            the rest of the block          4  u16  mode
//!    8  u32  compatible features            6  u16  reserved
//!   12  u8   log2 of the block's size       8  u64  size
//!   13  u8   more slots of itself          16  u32  first block, or device, or chunk format
//!   14  u16  nid of the root               20  u32  number
//!   16  u64  number of inodes              24  u32  owner
//!   24  u64  time of the image             28  u32  group
//!   32  u32  its nanoseconds               32  u64  time of the last change
//!   36  u32  blocks                        40  u32  its nanoseconds
//!   40  u32  first block of inodes         44  u32  links
//!   44  u32  first block of shared xattrs  48       reserved
//!   48       uuid (16), volume name (16)
//!   80  u32  incompatible features
//!   84       not used here
//! ```
//! A **nid** is an inode's place: its distance from the first block of inodes in units of 32 bytes.

/// Bytes of a block. Every kernel takes 4 KiB; other sizes, only newer ones.
pub const BLOCK_BYTES: usize = 4096;

pub(crate) const BLOCK_BITS: u8 = 12;

/// [`BLOCK_BYTES`] as sizes of files are counted.
pub(crate) const BLOCK: u64 = BLOCK_BYTES as u64;

/// Where the superblock begins in its block.
const SUPERBLOCK_OFFSET: usize = 1024;

const MAGIC: u32 = 0xe0f5_e1e2;

/// The checksum counts.
const COMPAT_CHECKSUM: u32 = 0x1;

/// The inodes' times are those of the last change.
const COMPAT_MTIME: u32 = 0x2;

/// There are inodes with chunks.
const INCOMPAT_CHUNKED_FILE: u32 = 0x4;

/// The unit of nids.
pub(crate) const SLOT_BYTES: u64 = 32;

/// Bytes of an inode without what follows it.
pub(crate) const INODE_BYTES: usize = 64;

/// Bytes of a unit in which the inline attributes are counted.
pub(crate) const XATTR_UNIT_BYTES: usize = 4;

/// Bytes before the inline attributes.
pub(crate) const XATTR_HEADER_BYTES: usize = 12;

/// A block of the image, counted from its begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct BlockAddress(pub(crate) u32);

/// Stands in a map for a chunk that is not there.
pub(crate) const NO_BLOCK: BlockAddress = BlockAddress(u32::MAX);

impl BlockAddress {
    /// The byte of the image where the block begins.
    pub(crate) fn offset(self) -> u64 {
        u64::from(self.0) * BLOCK
    }
}

/// An inode's place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Nid(pub(crate) u64);

impl Nid {
    /// Its distance from the first inode block in bytes.
    pub(crate) fn offset(self) -> u64 {
        self.0 * SLOT_BYTES
    }
}

/// The root's place. Its field has 16 bits, so it comes first; not 0, which some programs take for
/// the number of a file that was removed.
pub(crate) const ROOT_NID: Nid = Nid(1);

/// Where the content of an inode is, and the field that says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Data {
    /// In blocks from here on, the last one filled up with zeros.
    Plain(BlockAddress),
    /// In blocks from here on, but for the end, which follows the inode.
    Inline(BlockAddress),
    /// In chunks of this size; their map follows the inode.
    Chunks {
        /// Binary logarithm of a chunk's blocks.
        block_bits: u8,
    },
    /// A device's number as the kernel encodes it, or 0.
    Device(u32),
}

impl Data {
    fn layout(self) -> u16 {
        match self {
            Self::Plain(_) | Self::Device(_) => 0,
            Self::Inline(_) => 2,
            Self::Chunks { .. } => 4,
        }
    }

    fn field(self) -> u32 {
        match self {
            Self::Plain(block) | Self::Inline(block) => block.0,
            // Bits 0 to 4; bit 5 would mean a map of 8 bytes an entry.
            Self::Chunks { block_bits } => u32::from(block_bits),
            Self::Device(number) => number,
        }
    }
}

/// An inode as it is written.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RawInode {
    pub(crate) data: Data,
    /// Bytes of its inline attributes, the header with them; a multiple of the unit, or 0.
    pub(crate) xattr_bytes: usize,
    /// Type and permissions.
    pub(crate) mode: u16,
    pub(crate) size_bytes: u64,
    pub(crate) number: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) modified_seconds: i64,
    pub(crate) modified_nanoseconds: u32,
    pub(crate) links: u32,
}

impl RawInode {
    pub(crate) fn encode(&self) -> [u8; INODE_BYTES] {
        let xattr_units = match self.xattr_bytes {
            0 => 0,
            bytes => (bytes - XATTR_HEADER_BYTES) / XATTR_UNIT_BYTES + 1,
        };
        let mut bytes = [0; INODE_BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &(1 | self.data.layout() << 1).to_le_bytes());
        put(2, &u16::try_from(xattr_units).unwrap_or(u16::MAX).to_le_bytes());
        put(4, &self.mode.to_le_bytes());
        put(8, &self.size_bytes.to_le_bytes());
        put(16, &self.data.field().to_le_bytes());
        put(20, &self.number.to_le_bytes());
        put(24, &self.uid.to_le_bytes());
        put(28, &self.gid.to_le_bytes());
        put(32, &self.modified_seconds.to_le_bytes());
        put(40, &self.modified_nanoseconds.to_le_bytes());
        put(44, &self.links.to_le_bytes());
        bytes
    }
}

/// What the superblock says of an image.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Superblock {
    pub(crate) inodes: u64,
    pub(crate) blocks: u32,
    pub(crate) first_inode_block: BlockAddress,
    pub(crate) uuid: [u8; 16],
    pub(crate) has_chunks: bool,
}

impl Superblock {
    /// The whole block 0.
    pub(crate) fn encode(&self) -> [u8; BLOCK_BYTES] {
        let mut block = [0; BLOCK_BYTES];
        let fields = &mut block[SUPERBLOCK_OFFSET..];
        let mut put = |at: usize, field: &[u8]| fields[at..at + field.len()].copy_from_slice(field);
        put(0, &MAGIC.to_le_bytes());
        put(8, &(COMPAT_CHECKSUM | COMPAT_MTIME).to_le_bytes());
        put(12, &[BLOCK_BITS]);
        put(14, &u16::try_from(ROOT_NID.0).unwrap_or_default().to_le_bytes());
        put(16, &self.inodes.to_le_bytes());
        put(36, &self.blocks.to_le_bytes());
        put(40, &self.first_inode_block.0.to_le_bytes());
        put(48, &self.uuid);
        put(80, &(if self.has_chunks { INCOMPAT_CHUNKED_FILE } else { 0 }).to_le_bytes());
        // The kernel leaves out the inversion at the end.
        let checksum = !crc32c::crc32c(&block[SUPERBLOCK_OFFSET..]);
        block[SUPERBLOCK_OFFSET + 4..SUPERBLOCK_OFFSET + 8]
            .copy_from_slice(&checksum.to_le_bytes());
        block
    }
}
