//! Map entries: runs of blocks, and what they map to.

use super::{SEGMENT_MAX, VERSION};
use crate::codec::{Decoder, Encoder};
use crate::error::{Error, Result};
use crate::id::ChunkId;

/// What a run of blocks maps to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// Zeros, hiding what the layers below have.
    Hole,
    /// Consecutive chunks from this one.
    Chunks(ChunkId),
}

impl Target {
    /// The target of the run's blocks from the `skip`-th on.
    pub(crate) fn skip(self, skip: u64) -> Self {
        match self {
            Self::Hole => Self::Hole,
            Self::Chunks(first) => Self::Chunks(first.plus(skip)),
        }
    }

    /// Whether `next` continues a run of `count` blocks that begins with this target.
    pub(crate) fn continues(self, count: u64, next: Self) -> bool {
        match (self, next) {
            (Self::Hole, Self::Hole) => true,
            (Self::Chunks(first), Self::Chunks(second)) => first.plus(count) == second,
            (Self::Hole, Self::Chunks(_)) | (Self::Chunks(_), Self::Hole) => false,
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
        let mut encoder = Encoder::versioned(VERSION);
        encoder.u64(self.count);
        if let Target::Chunks(first) = self.target {
            encoder.u64(first.raw());
        }
        encoder.finish()
    }

    pub(crate) fn decode(first: u64, bytes: &[u8]) -> Result<Self> {
        const WHAT: &str = "map run";
        let mut d = Decoder::versioned(WHAT, bytes, VERSION)?;
        let count = d.u64()?;
        let target =
            if d.is_empty() { Target::Hole } else { Target::Chunks(ChunkId::from_raw(d.u64()?)) };
        d.end()?;
        // A run never leaves its segment.
        let is_in_segment = match target {
            Target::Hole => true,
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
