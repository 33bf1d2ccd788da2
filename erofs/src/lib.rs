//! Writes an EROFS image in one pass: contents as they come, then the inodes, then the superblock.
//!
//! EROFS is Linux' read-only file system (`Documentation/filesystems/erofs.rst`, `fs/erofs/erofs_fs.h`
//! of Linux 6.18). A kernel mounts such an image from a file, since 6.12 without a loop device. What
//! is written here is its plain form: no compression, blocks of 4 KiB.
//!
//! ```text
//!  contents -----> ImageWriter::begin_file ---> Extent --+
//!                        |                               v
//!                        |            names, attributes, Extents: Tree
//!                        v                               v
//!  +------------+-----------------+------------------------------+-------------------------+
//!  | superblock | blocks of files | inodes, xattrs, chunk maps,  | blocks of directories   |
//!  | block 0    | in their order  | links, ends of directories   | that need more than one |
//!  +------------+-----------------+------------------------------+-------------------------+
//!   last          first             then                           then
//! ```
//!
//! - A content begins at a block of its own, so that equal contents are equal blocks, whatever
//!   stands before them: a store that keeps equal blocks once keeps them once.
//! - Inodes lie together: who lists a tree reads 64 bytes a file, and none of the contents.
//! - Long zeros are not written: the image is a sparse file. What a sparse file leaves out has
//!   no blocks in the image either (`SEEK_HOLE` finds it).
//!
//! Invariants:
//! - The same calls write the same bytes: no clock, no random number, no order of a hash table.
//! - The superblock is written last. Without it no kernel mounts the image.
//! - What no kernel would give back as it was put in is refused when it is put in.
//! - Memory is that of the tree, which has a limit, of two buffers, and of the largest directory.

mod acl;
mod area;
mod directory;
mod error;
mod format;
mod image;
mod layout;
mod tree;
mod xattr;

pub use acl::PosixAcl;
pub use error::ErofsError;
pub use format::BLOCK_BYTES;
pub use image::{Extent, FileWriter, ImageWriter, Written};
pub use tree::{Attributes, InodeId, Kind, NAME_BYTES_MAX, SYMLINK_BYTES_MAX, Time, Tree, Xattrs};
