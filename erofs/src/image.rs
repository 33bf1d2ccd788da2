//! The writer of an image: contents as they come, and at the end the tree.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;

use crate::area::Area;
use crate::error::{ErofsError, failed};
use crate::format::{BLOCK, BlockAddress, NO_BLOCK, Superblock};
use crate::layout::Layout;
use crate::tree::Tree;

/// Blocks have numbers of 32 bits, of which the last means none.
const BLOCKS_MAX: u64 = u32::MAX as u64;

/// An image's size as messages say it.
const LIMIT_TIB: u64 = (BLOCKS_MAX * BLOCK).div_ceil(1 << 40);

/// Chunks of a sparse file: their map takes 4 bytes each. A file with more has larger ones.
const CHUNKS_MAX: u64 = 1 << 20;

/// The largest file with holes, as on ext4. Its chunks are of 16 MiB.
const SPARSE_BYTES_MAX: u64 = BLOCKS_MAX * BLOCK;

/// In block 0 until the image is whole: a file that an earlier attempt left is not taken for a new one.
const UNFINISHED: &[u8] = b"an unfinished EROFS image";

/// The content of a file in an image: where it is. It is of no use in another image.
#[derive(Debug, PartialEq, Eq)]
pub struct Extent {
    size_bytes: u64,
    blocks: Blocks,
}

/// Where the blocks of a content are.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Blocks {
    /// One behind the other.
    Plain(BlockAddress),
    /// Each chunk for itself, [`NO_BLOCK`] where the file has a hole.
    Chunks {
        /// Binary logarithm of a chunk's blocks.
        block_bits: u8,
        map: Box<[BlockAddress]>,
    },
}

impl Extent {
    /// The size of the file.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    pub(crate) fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    /// What it takes outside of itself.
    pub(crate) fn memory_bytes(&self) -> usize {
        match &self.blocks {
            Blocks::Plain(_) => 0,
            Blocks::Chunks { map, .. } => size_of_val(&**map),
        }
    }
}

/// An image that is being written.
#[derive(Debug)]
pub struct ImageWriter {
    file: File,
    area: Area,
    /// The size of a file that keeps it.
    room_bytes: Option<u64>,
}

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Written {
    /// The size of the image, holes with it.
    pub size_bytes: u64,
    /// Inodes with a name.
    pub inodes: u64,
}

impl ImageWriter {
    /// Begins an image in a new file: an empty one, or one of a size that it keeps and of nothing but
    /// zeros, as a new file of the appliance is. Nothing else than the first block is looked at. Until [`ImageWriter::finish`] it is none that can be mounted.
    ///
    /// # Errors
    /// The file's first block has content, or cannot be read.
    pub fn create(file: File) -> Result<Self, ErofsError> {
        let size_bytes = file.metadata().map_err(failed("look up"))?.len();
        let mut first = vec![0; usize::try_from(size_bytes.min(BLOCK)).unwrap_or_default()];
        file.read_exact_at(&mut first, 0).map_err(failed("read"))?;
        if first.iter().any(|byte| *byte != 0) {
            return Err(ErofsError::NotEmpty { got: size_bytes });
        }
        file.write_all_at(UNFINISHED, 0).map_err(failed("write"))?;
        let room_bytes = (size_bytes > 0).then_some(size_bytes);
        Ok(Self { file, area: Area::new(BlockAddress(1)), room_bytes })
    }

    /// Begins the content of a file. Zeros are written like all else, but for long ones, for which
    /// the image's file gets a hole; readers of the image see zeros.
    ///
    /// # Errors
    /// The image would be too large, or cannot be written.
    pub fn begin_file(&mut self, size_bytes: u64) -> Result<FileWriter<'_>, ErofsError> {
        let first = self.reserve(size_bytes.div_ceil(BLOCK))?;
        let target = Target::Plain(first);
        Ok(FileWriter { image: self, size_bytes, expected: size_bytes, got: 0, target })
    }

    /// Begins the content of a file of which only `parts` (offset and length in bytes, in order)
    /// exist. What is written is their bytes, one behind the other. In the image the file has holes
    /// between them, as far as whole chunks are free: of 4 KiB, in files of more than 4 GiB of more.
    ///
    /// # Errors
    /// Parts that are not in order or end behind the file; the image would be too large, or cannot be
    /// written.
    pub fn begin_sparse_file(
        &mut self,
        size_bytes: u64,
        parts: &[(u64, u64)],
    ) -> Result<FileWriter<'_>, ErofsError> {
        check_parts(size_bytes, parts)?;
        let block_bits = chunk_block_bits(size_bytes);
        if size_bytes > SPARSE_BYTES_MAX {
            return Err(ErofsError::SparseFile { got: size_bytes, limit: SPARSE_BYTES_MAX });
        }
        let chunk_bytes = BLOCK << block_bits;
        let count = usize::try_from(size_bytes.div_ceil(chunk_bytes)).unwrap_or(usize::MAX);
        let mut map = vec![NO_BLOCK; count];
        let mut chunks = 0_u64;
        for (offset, bytes) in parts.iter().filter(|(_, bytes)| *bytes > 0) {
            let last = usize::try_from((offset + bytes - 1) / chunk_bytes).unwrap_or(usize::MAX);
            let first = usize::try_from(offset / chunk_bytes).unwrap_or(usize::MAX);
            for chunk in map[first..=last].iter_mut().filter(|chunk| **chunk == NO_BLOCK) {
                // The number of the chunk until the blocks are known.
                *chunk = BlockAddress(u32::try_from(chunks).unwrap_or(u32::MAX));
                chunks += 1;
            }
        }
        let start = self.reserve(chunks << block_bits)?;
        // These blocks are written at their places and not in order.
        self.area.flush(&self.file)?;
        let end = u64::from(start.0) + (chunks << block_bits);
        self.area = Area::new(block(end)?);
        for chunk in map.iter_mut().filter(|chunk| **chunk != NO_BLOCK) {
            *chunk = BlockAddress(start.0 + (chunk.0 << block_bits));
        }
        let expected = parts.iter().map(|(_, bytes)| bytes).sum();
        let parts = parts.iter().copied().filter(|(_, bytes)| *bytes > 0).collect();
        let map = map.into_boxed_slice();
        let target = Target::Parts { parts, part: 0, in_part: 0, block_bits, map };
        Ok(FileWriter { image: self, size_bytes, expected, got: 0, target })
    }

    /// The bytes of a content of this image, holes as zeros. The image's file has to be readable.
    ///
    /// # Errors
    /// What is not written yet cannot be written.
    pub fn content<'a>(&'a mut self, extent: &'a Extent) -> Result<impl Read, ErofsError> {
        self.area.flush(&self.file)?;
        Ok(ExtentReader { file: &self.file, extent, at: 0 })
    }

    /// Fills the last block up, and gives the next one, if behind it there is room for these blocks.
    fn reserve(&mut self, blocks: u64) -> Result<BlockAddress, ErofsError> {
        let position = self.area.position().next_multiple_of(BLOCK);
        self.area.fill_to(&self.file, position)?;
        let first = position / BLOCK;
        self.check_room(block(first.saturating_add(blocks))?)?;
        block(first)
    }

    /// Whether an image that ends before this block fits into its file.
    fn check_room(&self, end: BlockAddress) -> Result<(), ErofsError> {
        match self.room_bytes {
            Some(room_bytes) if end.offset() > room_bytes => Err(ErofsError::Room { room_bytes }),
            _ => Ok(()),
        }
    }

    /// Writes the tree and then the superblock, with `uuid` as the image's own, and syncs the file.
    ///
    /// # Errors
    /// The image would be too large, or cannot be written or synced. It is then to be thrown away.
    pub fn finish(mut self, tree: &Tree, uuid: [u8; 16]) -> Result<Written, ErofsError> {
        let first_inode_block = self.reserve(0)?;
        let layout = Layout::new(tree, first_inode_block)?;
        self.check_room(layout.end())?;
        layout.write(&self.file, &mut self.area)?;
        self.area.flush(&self.file)?;
        let superblock = Superblock {
            inodes: layout.inodes(),
            blocks: layout.end().0,
            first_inode_block,
            uuid,
            has_chunks: layout.has_chunks(),
        };
        let size_bytes = layout.end().offset();
        if self.room_bytes.is_none() {
            self.file.set_len(size_bytes).map_err(failed("set the size of"))?;
        }
        self.file.write_all_at(&superblock.encode(), 0).map_err(failed("write"))?;
        self.file.sync_all().map_err(failed("sync"))?;
        Ok(Written { size_bytes, inodes: superblock.inodes })
    }
}

/// A block's number, unless it has none.
pub(crate) fn block(number: u64) -> Result<BlockAddress, ErofsError> {
    let number = u32::try_from(number).ok().filter(|number| u64::from(*number) < BLOCKS_MAX);
    number.map(BlockAddress).ok_or(ErofsError::TooLarge { limit_tib: LIMIT_TIB })
}

/// Whether the parts are in order and lie within the file.
fn check_parts(size_bytes: u64, parts: &[(u64, u64)]) -> Result<(), ErofsError> {
    let mut end = 0;
    for (offset, bytes) in parts {
        let next = offset.checked_add(*bytes).filter(|next| *next <= size_bytes && *offset >= end);
        end = next.ok_or(ErofsError::Part { offset: *offset, bytes: *bytes, size_bytes })?;
    }
    Ok(())
}

/// Binary logarithm of the blocks in a chunk of a file: as small as the map's limit lets it be.
fn chunk_block_bits(size_bytes: u64) -> u8 {
    let mut bits = 0;
    while size_bytes.div_ceil(BLOCK << bits) > CHUNKS_MAX {
        bits += 1;
    }
    bits
}

/// Reads a content again.
struct ExtentReader<'a> {
    file: &'a File,
    extent: &'a Extent,
    at: u64,
}

impl Read for ExtentReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.extent.size_bytes - self.at;
        let (offset, room) = match &self.extent.blocks {
            Blocks::Plain(first) => (Some(first.offset() + self.at), left),
            Blocks::Chunks { block_bits, map } => {
                let chunk_bytes = BLOCK << *block_bits;
                let (chunk, in_chunk) = (self.at / chunk_bytes, self.at % chunk_bytes);
                let chunk = map.get(usize::try_from(chunk).unwrap_or(usize::MAX));
                let chunk = chunk.filter(|chunk| **chunk != NO_BLOCK);
                (chunk.map(|chunk| chunk.offset() + in_chunk), left.min(chunk_bytes - in_chunk))
            }
        };
        let length = buffer.len().min(usize::try_from(room).unwrap_or(usize::MAX));
        let length = match offset {
            Some(offset) => match self.file.read_at(&mut buffer[..length], offset)? {
                // Zeros at the end that are not written (area.rs).
                0 => zeros(&mut buffer[..length]),
                read => read,
            },
            None => zeros(&mut buffer[..length]),
        };
        self.at += length as u64;
        Ok(length)
    }
}

fn zeros(buffer: &mut [u8]) -> usize {
    buffer.fill(0);
    buffer.len()
}

/// Takes the content of one file. Dropped before [`FileWriter::finish`], it leaves blocks behind
/// that no file has.
#[derive(Debug)]
pub struct FileWriter<'a> {
    image: &'a mut ImageWriter,
    size_bytes: u64,
    /// Bytes that will come.
    expected: u64,
    got: u64,
    target: Target,
}

#[derive(Debug)]
enum Target {
    Plain(BlockAddress),
    Parts {
        /// Those that have bytes.
        parts: Vec<(u64, u64)>,
        /// The part where the next byte goes, and how many it has already.
        part: usize,
        in_part: u64,
        block_bits: u8,
        map: Box<[BlockAddress]>,
    },
}

impl FileWriter<'_> {
    /// The next bytes.
    ///
    /// # Errors
    /// More bytes than were announced; the image cannot be written.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), ErofsError> {
        let length = bytes.len() as u64;
        if length > self.expected - self.got {
            return Err(ErofsError::Content { expected: self.expected, got: self.expected + 1 });
        }
        self.got += length;
        match &mut self.target {
            Target::Plain(_) => self.image.area.append(&self.image.file, bytes),
            Target::Parts { parts, part, in_part, block_bits, map } => {
                let mut rest = bytes;
                while !rest.is_empty() {
                    let (start, part_bytes) = parts[*part];
                    let offset = start + *in_part;
                    let chunk_bytes = BLOCK << *block_bits;
                    let in_chunk = offset % chunk_bytes;
                    let room = (part_bytes - *in_part).min(chunk_bytes - in_chunk);
                    let taken = rest.len().min(usize::try_from(room).unwrap_or(usize::MAX));
                    let chunk = usize::try_from(offset / chunk_bytes).unwrap_or(usize::MAX);
                    let at = map[chunk].offset() + in_chunk;
                    let written = self.image.file.write_all_at(&rest[..taken], at);
                    written.map_err(failed("write"))?;
                    rest = &rest[taken..];
                    *in_part += taken as u64;
                    if *in_part == part_bytes {
                        (*part, *in_part) = (*part + 1, 0);
                    }
                }
                Ok(())
            }
        }
    }

    /// Ends the content.
    ///
    /// # Errors
    /// Fewer bytes came than were announced.
    pub fn finish(self) -> Result<Extent, ErofsError> {
        if self.got != self.expected {
            return Err(ErofsError::Content { expected: self.expected, got: self.got });
        }
        let blocks = match self.target {
            Target::Plain(first) => Blocks::Plain(first),
            Target::Parts { block_bits, map, .. } => Blocks::Chunks { block_bits, map },
        };
        Ok(Extent { size_bytes: self.size_bytes, blocks })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_as_small_as_their_number_allows() {
        let limit = CHUNKS_MAX * BLOCK;
        let cases =
            [(0, 0), (1, 0), (limit, 0), (limit + 1, 1), (2 * limit, 1), (2 * limit + 1, 2)];
        for (size_bytes, bits) in cases {
            assert_eq!(chunk_block_bits(size_bytes), bits, "{size_bytes}");
        }
        assert_eq!(chunk_block_bits(SPARSE_BYTES_MAX), 12);
    }
}
