//! Ids of the store: one type each, so that none is taken for another.

use std::fmt;
use std::str::FromStr;

macro_rules! number_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(u64);

        impl $name {
            /// The id with this number.
            #[must_use]
            pub const fn new(number: u64) -> Self {
                Self(number)
            }

            /// The number behind the id.
            #[must_use]
            pub const fn get(self) -> u64 {
                self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    };
}

number_id!(
    /// A file, directory, or what else has names. Numbers count up from 1 and are never used again.
    InodeId
);
number_id!(
    /// A set of blocks that one file changed between two snapshots. Never used again.
    LayerId
);
number_id!(
    /// A logical segment: a set of chunks that were appended together. Never used again.
    SegmentId
);

impl InodeId {
    /// The root directory of the export.
    pub const ROOT: Self = Self(1);
}

/// A chunk: the stored bytes of one distinct block.
///
/// ```text
/// 63                    24 23          0
/// +-----------------------+------------+
/// | logical segment       | index in it|
/// +-----------------------+------------+
/// ```
/// Chunks that were appended together have consecutive ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkId(u64);

impl ChunkId {
    /// Bits of the index; a segment holds fewer chunks than this can count.
    pub const INDEX_BITS: u32 = 24;
    /// Chunks that one logical segment can hold.
    pub const INDEX_LIMIT: u32 = 1 << Self::INDEX_BITS;

    /// The id of chunk `index` of `segment`.
    ///
    /// # Panics
    /// When the index or the segment does not fit: both are bounded where they are given out.
    #[must_use]
    pub fn new(segment: SegmentId, index: u32) -> Self {
        assert!(index < Self::INDEX_LIMIT, "chunk index {index} is over the limit");
        assert!(
            segment.get() < 1 << (64 - Self::INDEX_BITS),
            "segment {segment} is over the limit"
        );
        Self(segment.get() << Self::INDEX_BITS | u64::from(index))
    }

    /// The id whose bits are `raw`, as read from disk.
    #[must_use]
    pub const fn from_raw(raw: u64) -> Self {
        Self(raw)
    }

    /// The bits of the id, as written to disk.
    #[must_use]
    pub const fn raw(self) -> u64 {
        self.0
    }

    /// The logical segment.
    #[must_use]
    pub const fn segment(self) -> SegmentId {
        SegmentId(self.0 >> Self::INDEX_BITS)
    }

    /// The index in the logical segment.
    #[must_use]
    pub const fn index(self) -> u32 {
        // The mask keeps 24 bits, so the conversion loses nothing.
        (self.0 & ((1 << Self::INDEX_BITS) - 1)) as u32
    }

    /// The chunk `count` after this one.
    #[must_use]
    pub const fn plus(self, count: u64) -> Self {
        Self(self.0 + count)
    }
}

impl fmt::Display for ChunkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.segment(), self.index())
    }
}

/// The blake3-256 hash of a block's 4096 bytes: the chunk's name.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ContentHash([u8; 32]);

impl ContentHash {
    /// The hash with these bytes.
    #[must_use]
    pub const fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The hash of `block`.
    #[must_use]
    pub fn of(block: &[u8]) -> Self {
        Self(*blake3::hash(block).as_bytes())
    }

    /// The 32 bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Display for ContentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for ContentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ContentHash({self})")
    }
}

/// An immutable, whole-file, point-in-time image. Random, written as a UUID; clients hold it
/// as a name that is good for ever, on any appliance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SnapshotId(uuid::Uuid);

impl SnapshotId {
    /// A new random id.
    #[must_use]
    pub fn random() -> Self {
        Self(uuid::Uuid::new_v4())
    }

    /// The id with these bytes.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(uuid::Uuid::from_bytes(bytes))
    }

    /// The 16 bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 16] {
        self.0.as_bytes()
    }
}

impl fmt::Display for SnapshotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.as_hyphenated().fmt(f)
    }
}

/// The text is not a snapshot id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a snapshot id is a UUID of 36 characters such as 6f1f3c1e-5d0c-4d55-9d61-2f5b6f0f6c11")]
pub struct SnapshotIdParseError;

impl FromStr for SnapshotId {
    type Err = SnapshotIdParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        // Only the form that Display writes: one snapshot has one spelling.
        if text.len() != 36 || text.bytes().any(|byte| byte.is_ascii_uppercase()) {
            return Err(SnapshotIdParseError);
        }
        uuid::Uuid::try_parse(text).map(Self).map_err(|_| SnapshotIdParseError)
    }
}

/// The identity of one store, given at its creation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StoreId(uuid::Uuid);

impl StoreId {
    /// A new random id.
    #[must_use]
    pub fn random() -> Self {
        Self(uuid::Uuid::new_v4())
    }

    /// The id with these bytes.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(uuid::Uuid::from_bytes(bytes))
    }

    /// The 16 bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 16] {
        self.0.as_bytes()
    }
}

impl fmt::Display for StoreId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.as_hyphenated().fmt(f)
    }
}
