//! The values of the index, encode beside decode, and every key in one place.
//!
//! ```text
//! family    key                                   value
//! meta      name                                  see `Counters`, `LogPosition`
//! inode     inode u64                             InodeRecord
//! dirent    directory u64, name                   DirentRecord
//! cookie    directory u64, cookie u64             inode u64, name
//! snapshot  'i', id 16                            SnapshotRecord
//!           'n', name                             id 16
//!           'l', key, 0, value, 0, id 16          -
//!           'p', path, 0, id 16                   -
//! layer     layer u64                             LayerRecord
//! child     parent u64, child u64                 -
//! map       layer u64, first block u64            Run
//! hash      first 8 bytes of a blake3             chunk u64
//! refs      first chunk of 64, u64                CountPage
//! segment   segment u64                           SegmentRecord
//! queue     kind u8, subject                      -
//! ```
//! Integers are big-endian, so that keys sort by number.

#[cfg(test)]
mod bounds;
mod counts;
#[cfg(test)]
pub(crate) mod golden;
pub(crate) mod key;
mod run;

pub(crate) use counts::{COUNTS_PER_PAGE, CountPage};
pub(crate) use run::{Run, Target};

use crate::codec::{Decoder, Encoder};
use crate::error::{Error, Result};
use crate::id::{ChunkId, InodeId, LayerId, SegmentId, SnapshotId};
use crate::kind::{FileKind, SpecialFile};
use crate::time::Timestamp;
use crate::types::{DeletionPolicy, Labels};
use crate::units::{BLOCK_BYTES_U64, FILE_BYTES_MAX};

/// The version byte of all values of format 2, but for lost runs and special files.
const VERSION: u8 = 1;

/// The version byte of inode records of special files: programs from before them refuse it.
const SPECIAL_FILE_VERSION: u8 = 2;

/// Numbers given out, counts of things and sizes in bytes stay below: at a million a second it
/// takes a hundred thousand years to get there.
const NUMBER_MAX: u64 = 1 << 62;

/// Blocks of the largest file.
const FILE_BLOCKS_MAX: u64 = FILE_BYTES_MAX / BLOCK_BYTES_U64;

/// The last logical segment but one that a chunk's id has room for: the id behind the last chunk
/// of a run is a number, too.
const SEGMENT_MAX: u64 = (1 << (u64::BITS - ChunkId::INDEX_BITS)) - 2;

fn two(first: u64, second: u64) -> Vec<u8> {
    let mut key = Vec::with_capacity(16);
    key.extend_from_slice(&first.to_be_bytes());
    key.extend_from_slice(&second.to_be_bytes());
    key
}

/// Reads a key made by [`two`].
pub(crate) fn split_two(what: &'static str, key: &[u8]) -> Result<(u64, u64)> {
    let mut decoder = Decoder::new(what, key);
    let pair = (decoder.bounded(NUMBER_MAX)?, decoder.bounded(NUMBER_MAX)?);
    decoder.end()?;
    Ok(pair)
}

/// Reads the number that a key begins with.
pub(crate) fn number_of(key: &[u8]) -> Result<u64> {
    Decoder::new("key", key).bounded(NUMBER_MAX)
}

/// What an inode is, beyond its attributes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Body {
    /// The open layer that the file writes into.
    File {
        layer: LayerId,
        /// The snapshot that it is a clone of.
        origin: Option<SnapshotId>,
        /// The verifier of an EXCLUSIVE create.
        verifier: Option<u64>,
    },
    /// The parent directory and the next cookie.
    Directory { parent: InodeId, next_cookie: u64 },
    /// The target.
    Symlink { target: Vec<u8> },
    /// A device, a socket or a named pipe.
    Special(SpecialFile),
}

/// An inode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct InodeRecord {
    pub(crate) generation: u32,
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) link_count: u32,
    pub(crate) size_bytes: u64,
    /// Visible blocks that are not holes, those of all layers below included.
    pub(crate) used_blocks: u64,
    pub(crate) accessed_at: Timestamp,
    pub(crate) modified_at: Timestamp,
    pub(crate) changed_at: Timestamp,
    pub(crate) created_at: Timestamp,
    pub(crate) body: Body,
}

impl InodeRecord {
    pub(crate) fn kind(&self) -> FileKind {
        match self.body {
            Body::File { .. } => FileKind::File,
            Body::Directory { .. } => FileKind::Directory,
            Body::Symlink { .. } => FileKind::Symlink,
            Body::Special(special) => FileKind::Special(special),
        }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let is_special = matches!(self.body, Body::Special(_));
        let version = if is_special { SPECIAL_FILE_VERSION } else { VERSION };
        let mut encoder = Encoder::versioned(version);
        encoder
            .u32(self.generation)
            .u32(self.mode)
            .u32(self.uid)
            .u32(self.gid)
            .u32(self.link_count)
            .u64(self.size_bytes)
            .u64(self.used_blocks)
            .u64(self.accessed_at.as_nanos())
            .u64(self.modified_at.as_nanos())
            .u64(self.changed_at.as_nanos())
            .u64(self.created_at.as_nanos());
        match &self.body {
            Body::File { layer, origin, verifier } => {
                encoder.u8(1).u64(layer.get());
                encoder.optional_bytes(origin.as_ref().map(|id| id.as_bytes().as_slice()));
                encoder.optional_bytes(verifier.map(u64::to_be_bytes).as_ref().map(|v| &v[..]));
            }
            Body::Directory { parent, next_cookie } => {
                encoder.u8(2).u64(parent.get()).u64(*next_cookie);
            }
            Body::Symlink { target } => {
                encoder.u8(3).bytes(target);
            }
            Body::Special(special) => special.encode(&mut encoder),
        }
        encoder.finish()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self> {
        const WHAT: &str = "inode record";
        let is_special = bytes.first() == Some(&SPECIAL_FILE_VERSION);
        let version = if is_special { SPECIAL_FILE_VERSION } else { VERSION };
        let mut d = Decoder::versioned(WHAT, bytes, version)?;
        let mut record = Self {
            generation: d.u32()?,
            mode: d.u32()?,
            uid: d.u32()?,
            gid: d.u32()?,
            link_count: d.u32()?,
            size_bytes: d.bounded(FILE_BYTES_MAX)?,
            used_blocks: d.bounded(FILE_BLOCKS_MAX)?,
            accessed_at: Timestamp::from_nanos(d.u64()?),
            modified_at: Timestamp::from_nanos(d.u64()?),
            changed_at: Timestamp::from_nanos(d.u64()?),
            created_at: Timestamp::from_nanos(d.u64()?),
            body: Body::Symlink { target: Vec::new() },
        };
        record.body = if is_special {
            Body::Special(SpecialFile::decode(WHAT, &mut d)?)
        } else {
            Body::decode(WHAT, &mut d)?
        };
        d.end()?;
        Ok(record)
    }
}

impl Body {
    /// That of an inode of version 1.
    fn decode(what: &'static str, d: &mut Decoder<'_>) -> Result<Self> {
        match d.u8()? {
            1 => Ok(Self::File {
                layer: LayerId::new(d.u64()?),
                origin: d.optional_bytes()?.map(|b| snapshot_id(what, b)).transpose()?,
                verifier: match d.optional_bytes()? {
                    None => None,
                    Some(bytes) => Some(Decoder::new(what, bytes).u64()?),
                },
            }),
            2 => Ok(Self::Directory {
                parent: InodeId::new(d.u64()?),
                next_cookie: d.bounded(NUMBER_MAX)?,
            }),
            3 => Ok(Self::Symlink { target: d.bytes()?.to_vec() }),
            got => Err(Error::corrupt(what, format!("kind {got} of version 1, expected 1 to 3"))),
        }
    }
}

fn snapshot_id(what: &'static str, bytes: &[u8]) -> Result<SnapshotId> {
    Decoder::new(what, bytes).array::<16>().map(SnapshotId::from_bytes)
}

/// A directory entry: the inode and its place in the order of READDIR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DirentRecord {
    pub(crate) inode: InodeId,
    pub(crate) cookie: u64,
}

impl DirentRecord {
    pub(crate) fn encode(self) -> Vec<u8> {
        Encoder::versioned(VERSION).u64(self.inode.get()).u64(self.cookie).finish()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self> {
        let mut d = Decoder::versioned("directory entry", bytes, VERSION)?;
        let record = Self { inode: InodeId::new(d.u64()?), cookie: d.u64()? };
        d.end()?;
        Ok(record)
    }
}

/// The value behind a cookie: the same entry, found by its place.
pub(crate) fn encode_cookie(inode: InodeId, name: &[u8]) -> Vec<u8> {
    Encoder::versioned(VERSION).u64(inode.get()).raw(name).finish()
}

/// Reads the value behind a cookie.
pub(crate) fn decode_cookie(bytes: &[u8]) -> Result<(InodeId, &[u8])> {
    let mut d = Decoder::versioned("cookie record", bytes, VERSION)?;
    let inode = InodeId::new(d.u64()?);
    let name = bytes.get(9..).unwrap_or_default();
    Ok((inode, name))
}

/// A snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SnapshotRecord {
    pub(crate) layer: LayerId,
    pub(crate) size_bytes: u64,
    pub(crate) used_blocks: u64,
    pub(crate) created_at: Timestamp,
    pub(crate) clone_count: u64,
    pub(crate) deletion: DeletionPolicy,
    pub(crate) expires_at: Option<Timestamp>,
    pub(crate) path: Vec<u8>,
    pub(crate) name: Option<String>,
    pub(crate) labels: Labels,
}

impl SnapshotRecord {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut encoder = Encoder::versioned(VERSION);
        let expires = self.expires_at.map(|at| at.as_nanos().to_be_bytes());
        encoder
            .u64(self.layer.get())
            .u64(self.size_bytes)
            .u64(self.used_blocks)
            .u64(self.created_at.as_nanos())
            .u64(self.clone_count)
            .u8(match self.deletion {
                DeletionPolicy::Keep => 0,
                DeletionPolicy::OnZeroClones => 1,
            })
            .optional_bytes(expires.as_ref().map(|bytes| &bytes[..]))
            .bytes(&self.path)
            .optional_bytes(self.name.as_deref().map(str::as_bytes));
        for (label, value) in &self.labels {
            encoder.bytes(label.as_bytes()).bytes(value.as_bytes());
        }
        encoder.finish()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self> {
        const WHAT: &str = "snapshot record";
        let mut d = Decoder::versioned(WHAT, bytes, VERSION)?;
        let mut record = Self {
            layer: LayerId::new(d.u64()?),
            size_bytes: d.bounded(FILE_BYTES_MAX)?,
            used_blocks: d.bounded(FILE_BLOCKS_MAX)?,
            created_at: Timestamp::from_nanos(d.u64()?),
            clone_count: d.bounded(NUMBER_MAX)?,
            deletion: match d.u8()? {
                0 => DeletionPolicy::Keep,
                1 => DeletionPolicy::OnZeroClones,
                got => return Err(Error::corrupt(WHAT, format!("deletion policy {got}"))),
            },
            expires_at: None,
            path: Vec::new(),
            name: None,
            labels: Labels::new(),
        };
        if let Some(bytes) = d.optional_bytes()? {
            record.expires_at = Some(Timestamp::from_nanos(Decoder::new(WHAT, bytes).u64()?));
        }
        record.path = d.bytes()?.to_vec();
        if let Some(bytes) = d.optional_bytes()? {
            record.name = Some(String::from_utf8_lossy(bytes).into_owned());
        }
        while !d.is_empty() {
            let label = d.text()?;
            record.labels.insert(label, d.text()?);
        }
        Ok(record)
    }
}

/// The life of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LayerState {
    /// A file writes into it.
    Open(InodeId),
    /// It never changes again, but for collapse, which changes no visible byte.
    Frozen,
    /// Nothing sees it; reclaim takes its entries away.
    Dead,
}

/// A layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LayerRecord {
    pub(crate) parent: Option<LayerId>,
    pub(crate) state: LayerState,
    pub(crate) children: u64,
    pub(crate) snapshots: u64,
    /// Map entries.
    pub(crate) runs: u64,
    /// Blocks that its entries map to chunks.
    pub(crate) blocks: u64,
}

impl LayerRecord {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let (state, owner) = match self.state {
            LayerState::Open(inode) => (1, inode.get()),
            LayerState::Frozen => (2, 0),
            LayerState::Dead => (3, 0),
        };
        Encoder::versioned(VERSION)
            // Layer ids begin at 1, so 0 is "no parent".
            .u64(self.parent.map_or(0, LayerId::get))
            .u8(state)
            .u64(owner)
            .u64(self.children)
            .u64(self.snapshots)
            .u64(self.runs)
            .u64(self.blocks)
            .finish()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self> {
        const WHAT: &str = "layer record";
        let mut d = Decoder::versioned(WHAT, bytes, VERSION)?;
        let parent = d.u64()?;
        let (state, owner) = (d.u8()?, d.u64()?);
        let record = Self {
            parent: (parent != 0).then_some(LayerId::new(parent)),
            state: match state {
                1 => LayerState::Open(InodeId::new(owner)),
                2 => LayerState::Frozen,
                3 => LayerState::Dead,
                got => {
                    return Err(Error::corrupt(WHAT, format!("state {got}, expected 1 to 3")));
                }
            },
            children: d.bounded(NUMBER_MAX)?,
            snapshots: d.bounded(NUMBER_MAX)?,
            // Entries do not overlap, and each maps a block or more of one file.
            runs: d.bounded(FILE_BLOCKS_MAX)?,
            blocks: d.bounded(FILE_BLOCKS_MAX)?,
        };
        d.end()?;
        Ok(record)
    }

    /// The record of this layer.
    ///
    /// # Errors
    /// `Corrupt`, also where its parent is not older than the layer: a walk down would have no end.
    pub(crate) fn decode_of(id: LayerId, bytes: &[u8]) -> Result<Self> {
        let record = Self::decode(bytes)?;
        record.refuse_younger_parent(id)?;
        Ok(record)
    }

    pub(crate) fn refuse_younger_parent(&self, id: LayerId) -> Result<()> {
        match self.parent {
            Some(parent) if parent >= id => {
                let reason = format!("the layer below it is {parent}, itself or a younger one");
                Err(Error::corrupt(format!("layer {id}"), reason))
            }
            _ => Ok(()),
        }
    }
}

/// Where a logical segment lies, and how much of it lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentRecord {
    /// The file that holds it now; its own log file until compaction moves it.
    pub(crate) file: crate::disk::FileName,
    /// The place of its directory in that file; `None` while the log still appends to it.
    pub(crate) directory_offset_bytes: Option<u64>,
    /// Chunks ever given out in it.
    pub(crate) chunks: u32,
    /// Chunks that are stored: all but those that compaction dropped.
    pub(crate) stored_chunks: u32,
    /// Chunks whose count is not 0.
    pub(crate) live_chunks: u32,
    /// Bytes of its frames as stored in `file`, dead ones included.
    pub(crate) stored_bytes: u64,
}

impl SegmentRecord {
    pub(crate) fn encode(&self) -> Vec<u8> {
        Encoder::versioned(VERSION)
            .u8(self.file.role.number())
            .u64(self.file.number.get())
            .u64(self.directory_offset_bytes.unwrap_or(0))
            .u32(self.chunks)
            .u32(self.stored_chunks)
            .u32(self.live_chunks)
            .u64(self.stored_bytes)
            .finish()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self> {
        use crate::disk::{FileName, FileRole};
        const WHAT: &str = "segment record";
        let mut d = Decoder::versioned(WHAT, bytes, VERSION)?;
        let role = match d.u8()? {
            1 => FileRole::Log,
            2 => FileRole::Compacted,
            got => {
                return Err(Error::corrupt(WHAT, format!("file role {got}, expected 1 or 2")));
            }
        };
        let number = SegmentId::new(d.bounded(SEGMENT_MAX)?);
        let directory = d.bounded(NUMBER_MAX)?;
        let record = Self {
            file: FileName { role, number },
            directory_offset_bytes: (directory != 0).then_some(directory),
            chunks: d.bounded_u32(ChunkId::INDEX_LIMIT)?,
            stored_chunks: d.u32()?,
            live_chunks: d.u32()?,
            stored_bytes: d.bounded(NUMBER_MAX)?,
        };
        d.end()?;
        Ok(record)
    }
}

/// Numbers given out, and totals, kept in every commit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counters {
    pub(crate) next_inode: u64,
    pub(crate) next_layer: u64,
    pub(crate) files: u64,
    pub(crate) inodes: u64,
    pub(crate) snapshots: u64,
    pub(crate) layers: u64,
    pub(crate) dead_layers: u64,
    pub(crate) mapped_blocks: u64,
    pub(crate) live_chunks: u64,
}

impl Counters {
    pub(crate) fn encode(&self) -> Vec<u8> {
        Encoder::versioned(VERSION)
            .u64(self.next_inode)
            .u64(self.next_layer)
            .u64(self.files)
            .u64(self.inodes)
            .u64(self.snapshots)
            .u64(self.layers)
            .u64(self.dead_layers)
            .u64(self.mapped_blocks)
            .u64(self.live_chunks)
            .finish()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self> {
        let mut d = Decoder::versioned("counters", bytes, VERSION)?;
        let counters = Self {
            next_inode: d.bounded(NUMBER_MAX)?,
            next_layer: d.bounded(NUMBER_MAX)?,
            files: d.bounded(NUMBER_MAX)?,
            inodes: d.bounded(NUMBER_MAX)?,
            snapshots: d.bounded(NUMBER_MAX)?,
            layers: d.bounded(NUMBER_MAX)?,
            dead_layers: d.bounded(NUMBER_MAX)?,
            mapped_blocks: d.bounded(NUMBER_MAX)?,
            live_chunks: d.bounded(NUMBER_MAX)?,
        };
        d.end()?;
        Ok(counters)
    }
}

/// A place in the log: all before it is in the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LogPosition {
    pub(crate) segment: SegmentId,
    pub(crate) offset_bytes: u64,
    /// The sequence number of the last commit before it.
    pub(crate) sequence: u64,
}

impl LogPosition {
    pub(crate) fn encode(&self) -> Vec<u8> {
        Encoder::versioned(VERSION)
            .u64(self.segment.get())
            .u64(self.offset_bytes)
            .u64(self.sequence)
            .finish()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self> {
        let mut d = Decoder::versioned("log position", bytes, VERSION)?;
        let position = Self {
            segment: SegmentId::new(d.bounded(SEGMENT_MAX)?),
            offset_bytes: d.bounded(NUMBER_MAX)?,
            sequence: d.bounded(NUMBER_MAX)?,
        };
        d.end()?;
        Ok(position)
    }
}

/// Reads the number of a logical segment.
pub(crate) fn decode_segment(bytes: &[u8]) -> Result<SegmentId> {
    let mut d = Decoder::new("segment key", bytes);
    let segment = SegmentId::new(d.bounded(SEGMENT_MAX)?);
    d.end()?;
    Ok(segment)
}

/// Reads a chunk id.
pub(crate) fn decode_chunk(bytes: &[u8]) -> Result<ChunkId> {
    let mut d = Decoder::new("chunk id", bytes);
    let chunk = ChunkId::from_raw(d.u64()?);
    d.end()?;
    Ok(chunk)
}
