//! The binary block map of a file or snapshot: for each block its hash, or that it is a hole.
//!
//! A worker asks for it before it asks for bytes, to know which blocks it holds already.
//! Numbers are big-endian.
//!
//! ```text
//! byte 0   4          8                 16                24                32
//!      | "SWM1" | block bytes | offset of first block | number of blocks | file size | runs ...
//!
//! run: | kind (1) | blocks (4) | hashes (32 each; of data runs only) |
//!        0 hole, 1 data
//! ```
//!
//! Runs follow each other without gaps, each of at least one block, and sum up to the number
//! of blocks. A hash is the BLAKE3-256 of the block's bytes; a last block that the end of the
//! file cuts is hashed with zeros up to the block's length. An answer covers at most
//! [`BLOCKS_MAX`] blocks: one who asked for more goes on where it ends.

/// Bytes of the header.
pub const HEADER_BYTES: usize = 32;

/// First bytes of a map, the last one being the version of the format.
pub const MAGIC: [u8; 4] = *b"SWM1";

/// Media type of a block map.
pub const MEDIA_TYPE: &str = "application/octet-stream";

/// Bytes of a hash.
pub const HASH_BYTES: usize = 32;

/// Most blocks in one answer: 256 MiB of file in 2 MiB of answer, so that the maps that are
/// under way at once stay a small part of the memory budget.
pub const BLOCKS_MAX: u64 = 1 << 16;

/// Bytes of the kind and length of a run.
const RUN_HEADER_BYTES: usize = 5;
const KIND_HOLE: u8 = 0;
const KIND_DATA: u8 = 1;

/// The BLAKE3-256 hash of one block, or `None` for a hole.
pub type BlockHash = Option<[u8; HASH_BYTES]>;

/// A block map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockMap {
    /// Bytes of one block.
    pub block_bytes: u32,
    /// Where the first block begins in the file.
    pub offset_bytes: u64,
    /// The file's size.
    pub size_bytes: u64,
    /// For each block its hash, or `None` for a hole.
    pub blocks: Vec<BlockHash>,
}

/// Bytes that are no block map.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BlockMapError {
    /// The map ends inside its header or inside a run.
    #[error("the block map ends after {got} bytes, {expected} were expected")]
    Truncated {
        /// Bytes that are there.
        got: usize,
        /// Bytes that should be, at least.
        expected: usize,
    },
    /// Other bytes, or a newer format.
    #[error("the block map begins with {got:?}, expected {expected:?}", expected = MAGIC)]
    Magic {
        /// The first four bytes.
        got: [u8; 4],
    },
    /// A run of an unknown kind.
    #[error("a run of the block map has kind {got}, expected 0 or 1")]
    Kind {
        /// The kind.
        got: u8,
    },
    /// The header and the runs disagree, or the map is over the limit.
    #[error("the block map holds {got} blocks, {expected} were announced, the limit is {limit}", limit = BLOCKS_MAX)]
    Count {
        /// Blocks of the runs so far.
        got: u64,
        /// Blocks that the header announced.
        expected: u64,
    },
    /// Bytes after the last run.
    #[error("{got} bytes follow the last run of the block map")]
    Trailing {
        /// How many.
        got: usize,
    },
}

impl BlockMap {
    /// The bytes of the map.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let data_blocks = self.blocks.iter().flatten().count();
        let mut bytes =
            Vec::with_capacity(HEADER_BYTES + RUN_HEADER_BYTES + data_blocks * HASH_BYTES);
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&self.block_bytes.to_be_bytes());
        bytes.extend_from_slice(&self.offset_bytes.to_be_bytes());
        let count = u64::try_from(self.blocks.len()).unwrap_or(u64::MAX);
        bytes.extend_from_slice(&count.to_be_bytes());
        bytes.extend_from_slice(&self.size_bytes.to_be_bytes());
        for run in self.blocks.chunk_by(|left, right| left.is_some() == right.is_some()) {
            let is_data = run.first().is_some_and(Option::is_some);
            bytes.push(if is_data { KIND_DATA } else { KIND_HOLE });
            let length = u32::try_from(run.len()).unwrap_or(u32::MAX);
            bytes.extend_from_slice(&length.to_be_bytes());
            run.iter().flatten().for_each(|hash| bytes.extend_from_slice(hash));
        }
        bytes
    }

    /// The map that these bytes are.
    ///
    /// # Errors
    /// Anything that [`Self::encode`] would not have written for at most [`BLOCKS_MAX`] blocks.
    pub fn decode(bytes: &[u8]) -> Result<Self, BlockMapError> {
        let mut reader = Reader { bytes, position: 0 };
        let magic = reader.take::<4>()?;
        if magic != MAGIC {
            return Err(BlockMapError::Magic { got: magic });
        }
        let block_bytes = u32::from_be_bytes(reader.take()?);
        let offset_bytes = u64::from_be_bytes(reader.take()?);
        let expected = u64::from_be_bytes(reader.take()?);
        let size_bytes = u64::from_be_bytes(reader.take()?);
        // Nothing is allocated for a count that was only announced.
        let mut blocks = Vec::new();
        let mut got = 0_u64;
        while got < expected {
            let [kind] = reader.take()?;
            let length = u32::from_be_bytes(reader.take()?);
            got = got.saturating_add(u64::from(length));
            if length == 0 || got > expected || got > BLOCKS_MAX {
                return Err(BlockMapError::Count { got, expected });
            }
            for _ in 0..length {
                blocks.push(match kind {
                    KIND_HOLE => None,
                    KIND_DATA => Some(reader.take()?),
                    _ => return Err(BlockMapError::Kind { got: kind }),
                });
            }
        }
        match bytes.len() - reader.position {
            0 => Ok(Self { block_bytes, offset_bytes, size_bytes, blocks }),
            got => Err(BlockMapError::Trailing { got }),
        }
    }
}

/// A position in untrusted bytes.
struct Reader<'a> {
    bytes: &'a [u8],
    position: usize,
}

impl Reader<'_> {
    fn take<const LENGTH: usize>(&mut self) -> Result<[u8; LENGTH], BlockMapError> {
        let rest = self.bytes.get(self.position..).unwrap_or_default();
        let taken = rest.first_chunk::<LENGTH>().ok_or(BlockMapError::Truncated {
            got: self.bytes.len(),
            expected: self.position + LENGTH,
        })?;
        self.position += LENGTH;
        Ok(*taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map() -> BlockMap {
        BlockMap {
            block_bytes: 4096,
            offset_bytes: 8192,
            size_bytes: 1 << 40,
            blocks: vec![None, None, Some([1; 32]), Some([2; 32]), None],
        }
    }

    #[test]
    fn a_map_has_these_bytes() {
        let mut expected = b"SWM1\0\0\x10\0".to_vec();
        expected.extend_from_slice(b"\0\0\0\0\0\0\x20\0\0\0\0\0\0\0\0\x05\0\0\x01\0\0\0\0\0");
        expected.extend_from_slice(b"\0\0\0\0\x02\x01\0\0\0\x02");
        expected.extend_from_slice(&[1; 32]);
        expected.extend_from_slice(&[2; 32]);
        expected.extend_from_slice(b"\0\0\0\0\x01");
        assert_eq!(map().encode(), expected);
        assert_eq!(BlockMap::decode(&expected), Ok(map()));
        let empty = BlockMap { blocks: vec![], ..map() };
        assert_eq!(BlockMap::decode(&empty.encode()), Ok(empty));
    }

    #[test]
    fn a_cut_map_is_refused_at_every_byte() {
        let bytes = map().encode();
        for length in 0..bytes.len() {
            let error = BlockMap::decode(&bytes[..length]).unwrap_err();
            assert!(matches!(error, BlockMapError::Truncated { .. }), "{length}: {error}");
        }
    }

    #[test]
    fn lies_are_refused() {
        let good = map().encode();
        let changed = |position: usize, value: u8| {
            let mut bytes = good.clone();
            bytes[position] = value;
            BlockMap::decode(&bytes).unwrap_err()
        };
        assert!(matches!(changed(3, b'2'), BlockMapError::Magic { .. }));
        assert_eq!(changed(HEADER_BYTES, 7), BlockMapError::Kind { got: 7 });
        // A run of 2^24 holes must not allocate: over the limit.
        assert!(matches!(changed(HEADER_BYTES + 1, 1), BlockMapError::Count { .. }));
        assert!(matches!(changed(HEADER_BYTES + 4, 0), BlockMapError::Count { got: 0, .. }));
        let mut long = good.clone();
        long.push(0);
        assert_eq!(BlockMap::decode(&long), Err(BlockMapError::Trailing { got: 1 }));
    }
}
