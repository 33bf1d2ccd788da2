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

mod counts;
#[cfg(test)]
pub(crate) mod golden;
pub(crate) mod key;

pub(crate) use counts::CountPage;

use crate::codec::{Decoder, Encoder};
use crate::error::{Error, Result};
use crate::id::{ChunkId, InodeId, LayerId, SegmentId, SnapshotId};
use crate::time::Timestamp;
use crate::types::{DeletionPolicy, FileKind, Labels};

/// The version byte of all values of format 2, but for lost runs.
const VERSION: u8 = 1;

/// The version byte of a run of lost blocks: a program that does not know of them refuses it.
const LOST_RUN_VERSION: u8 = 2;

/// The kind behind the count of a run of that version; there is no other.
const LOST_RUN_KIND: u8 = 1;

/// Bytes of such a run: version, count, kind.
const LOST_RUN_BYTES: usize = 1 + 8 + 1;

fn two(first: u64, second: u64) -> Vec<u8> {
    let mut key = Vec::with_capacity(16);
    key.extend_from_slice(&first.to_be_bytes());
    key.extend_from_slice(&second.to_be_bytes());
    key
}

/// Reads a key made by [`two`].
pub(crate) fn split_two(what: &'static str, key: &[u8]) -> Result<(u64, u64)> {
    let mut decoder = Decoder::new(what, key);
    let pair = (decoder.u64()?, decoder.u64()?);
    decoder.end()?;
    Ok(pair)
}

/// What an inode is, beyond its attributes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Body {
    /// The open layer that the file writes into.
    File {
        layer: LayerId,
        /// The snapshot that it was cloned from.
        origin: Option<SnapshotId>,
        /// The verifier of an EXCLUSIVE create.
        verifier: Option<u64>,
    },
    /// The parent directory and the next cookie.
    Directory { parent: InodeId, next_cookie: u64 },
    /// The target.
    Symlink { target: Vec<u8> },
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
        }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut encoder = Encoder::versioned(VERSION);
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
        }
        encoder.finish()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self> {
        const WHAT: &str = "inode record";
        let mut d = Decoder::versioned(WHAT, bytes, VERSION)?;
        let mut record = Self {
            generation: d.u32()?,
            mode: d.u32()?,
            uid: d.u32()?,
            gid: d.u32()?,
            link_count: d.u32()?,
            size_bytes: d.u64()?,
            used_blocks: d.u64()?,
            accessed_at: Timestamp::from_nanos(d.u64()?),
            modified_at: Timestamp::from_nanos(d.u64()?),
            changed_at: Timestamp::from_nanos(d.u64()?),
            created_at: Timestamp::from_nanos(d.u64()?),
            body: Body::Symlink { target: Vec::new() },
        };
        record.body = match d.u8()? {
            1 => Body::File {
                layer: LayerId::new(d.u64()?),
                origin: d.optional_bytes()?.map(|b| snapshot_id(WHAT, b)).transpose()?,
                verifier: match d.optional_bytes()? {
                    None => None,
                    Some(bytes) => Some(Decoder::new(WHAT, bytes).u64()?),
                },
            },
            2 => Body::Directory { parent: InodeId::new(d.u64()?), next_cookie: d.u64()? },
            3 => Body::Symlink { target: d.bytes()?.to_vec() },
            got => {
                return Err(Error::corrupt(WHAT, format!("kind {got}, expected 1, 2 or 3")));
            }
        };
        d.end()?;
        Ok(record)
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
            size_bytes: d.u64()?,
            used_blocks: d.u64()?,
            created_at: Timestamp::from_nanos(d.u64()?),
            clone_count: d.u64()?,
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
            children: d.u64()?,
            snapshots: d.u64()?,
            runs: d.u64()?,
            blocks: d.u64()?,
        };
        d.end()?;
        Ok(record)
    }
}

/// What a run of blocks maps to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// Zeros, hiding what the layers below have.
    Hole,
    /// Consecutive chunks from this one.
    Chunks(ChunkId),
    /// Data whose stored bytes were damaged, given up by a repair: reading it is an error. It
    /// counts as data wherever blocks are counted, and names no chunk.
    Lost,
}

impl Target {
    /// The target of the run's blocks from the `skip`-th on.
    pub(crate) fn skip(self, skip: u64) -> Self {
        match self {
            Self::Hole => Self::Hole,
            Self::Chunks(first) => Self::Chunks(first.plus(skip)),
            Self::Lost => Self::Lost,
        }
    }

    /// Whether `next` continues a run of `count` blocks that begins with this target.
    pub(crate) fn continues(self, count: u64, next: Self) -> bool {
        match (self, next) {
            (Self::Hole, Self::Hole) | (Self::Lost, Self::Lost) => true,
            (Self::Chunks(first), Self::Chunks(second)) => first.plus(count) == second,
            (Self::Hole | Self::Chunks(_) | Self::Lost, _) => false,
        }
    }
}

/// A map entry: `count` blocks from `first`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) first: u64,
    pub(crate) count: u64,
    pub(crate) target: Target,
}

impl Run {
    /// The block behind the run.
    pub(crate) fn end(&self) -> u64 {
        self.first + self.count
    }

    /// The part of the run inside `[first, end)`; `None` when they do not meet.
    pub(crate) fn cut(&self, first: u64, end: u64) -> Option<Self> {
        let from = self.first.max(first);
        let to = self.end().min(end);
        (from < to).then(|| Self {
            first: from,
            count: to - from,
            target: self.target.skip(from - self.first),
        })
    }

    /// The value; the first block is in the key.
    pub(crate) fn encode(&self) -> Vec<u8> {
        match self.target {
            Target::Hole => Encoder::versioned(VERSION).u64(self.count).finish(),
            Target::Chunks(first) => {
                Encoder::versioned(VERSION).u64(self.count).u64(first.raw()).finish()
            }
            Target::Lost => {
                Encoder::versioned(LOST_RUN_VERSION).u64(self.count).u8(LOST_RUN_KIND).finish()
            }
        }
    }

    pub(crate) fn decode(first: u64, bytes: &[u8]) -> Result<Self> {
        const WHAT: &str = "map run";
        let is_lost = bytes.len() == LOST_RUN_BYTES && bytes.first() == Some(&LOST_RUN_VERSION);
        let version = if is_lost { LOST_RUN_VERSION } else { VERSION };
        let mut d = Decoder::versioned(WHAT, bytes, version)?;
        let count = d.u64()?;
        let target = if is_lost {
            let kind = d.u8()?;
            if kind != LOST_RUN_KIND {
                return Err(Error::corrupt(WHAT, format!("kind {kind}, expected {LOST_RUN_KIND}")));
            }
            Target::Lost
        } else if d.is_empty() {
            Target::Hole
        } else {
            Target::Chunks(ChunkId::from_raw(d.u64()?))
        };
        d.end()?;
        if count == 0 || first.checked_add(count).is_none() {
            return Err(Error::corrupt(WHAT, format!("{count} blocks from {first}")));
        }
        Ok(Self { first, count, target })
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
        let number = SegmentId::new(d.u64()?);
        let directory = d.u64()?;
        let record = Self {
            file: FileName { role, number },
            directory_offset_bytes: (directory != 0).then_some(directory),
            chunks: d.u32()?,
            stored_chunks: d.u32()?,
            live_chunks: d.u32()?,
            stored_bytes: d.u64()?,
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
            next_inode: d.u64()?,
            next_layer: d.u64()?,
            files: d.u64()?,
            inodes: d.u64()?,
            snapshots: d.u64()?,
            layers: d.u64()?,
            dead_layers: d.u64()?,
            mapped_blocks: d.u64()?,
            live_chunks: d.u64()?,
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
        let position =
            Self { segment: SegmentId::new(d.u64()?), offset_bytes: d.u64()?, sequence: d.u64()? };
        d.end()?;
        Ok(position)
    }
}

/// Reads a chunk id.
pub(crate) fn decode_chunk(bytes: &[u8]) -> Result<ChunkId> {
    let mut d = Decoder::new("chunk id", bytes);
    let chunk = ChunkId::from_raw(d.u64()?);
    d.end()?;
    Ok(chunk)
}
