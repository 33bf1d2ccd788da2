//! Map entries: runs of blocks, and what they map to.

use super::{SEGMENT_MAX, VERSION};
use crate::codec::{Decoder, Encoder};
use crate::error::{Error, Result};
use crate::id::ChunkId;

/// The version byte of a run of lost blocks: a program that does not know of them refuses it.
const LOST_RUN_VERSION: u8 = 2;

/// The kind behind the count of a run of that version; there is no other.
const LOST_RUN_KIND: u8 = 1;

/// Bytes of such a run: version, count, kind.
const LOST_RUN_BYTES: usize = 1 + 8 + 1;

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
        // A run never leaves its segment.
        let is_in_segment = match target {
            Target::Hole | Target::Lost => true,
            Target::Chunks(chunk) => {
                chunk.segment().get() <= SEGMENT_MAX
                    && u64::from(chunk.index()).saturating_add(count)
                        <= u64::from(ChunkId::INDEX_LIMIT)
            }
        };
        if count == 0 || first.checked_add(count).is_none() || !is_in_segment {
            return Err(Error::corrupt(WHAT, format!("{count} blocks from {first}: {target:?}")));
        }
        Ok(Self { first, count, target })
    }
}
