//! A file that is served, and what its only writer knows about it.
//!
//! Invariants:
//! - A block is marked as written before its WRITE is sent, and stays so: from then on its
//!   bytes are read over NFS, whatever a block map said before.
//! - The journal names a verifier before a write that was answered with it is answered to the
//!   kernel.
//! - Writes hold `order` shared, whoever sends old ones again holds it alone: what is sent
//!   again can never overtake what is newer.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::RwLock;

use crate::kept::KeptWrites;
use crate::maps::{MapSource, WINDOW_BLOCKS};
use crate::nfs::{Handle, Verifier};
use crate::wire::NodeId;

/// Which blocks were written to, by window: one bit a block.
#[derive(Debug, Default)]
pub(crate) struct WrittenBlocks {
    windows: HashMap<u64, [u64; 4]>,
}

/// The word and the bit of a block in its window.
fn place_of(block: u64) -> (usize, u64) {
    let within = block % WINDOW_BLOCKS;
    (usize::try_from(within / 64).unwrap_or(0), 1 << (within % 64))
}

impl WrittenBlocks {
    /// Marks the blocks from `first` to `last`.
    pub(crate) fn mark(&mut self, first: u64, last: u64) {
        for block in first..=last {
            let (word, bit) = place_of(block);
            let window = self.windows.entry(block / WINDOW_BLOCKS).or_default();
            if let Some(word) = window.get_mut(word) {
                *word |= bit;
            }
        }
    }

    pub(crate) fn contains(&self, block: u64) -> bool {
        let (word, bit) = place_of(block);
        let window = self.windows.get(&(block / WINDOW_BLOCKS));
        window.and_then(|window| window.get(word)).is_some_and(|word| word & bit != 0)
    }
}

/// What changes with each write.
#[derive(Debug, Default)]
pub(crate) struct WriteState {
    pub(crate) written: WrittenBlocks,
    pub(crate) kept: KeptWrites,
    /// The verifiers that the journal names.
    pub(crate) journaled: Vec<Verifier>,
    /// Writes that were answered are lost: no sync may say otherwise.
    pub(crate) is_lost: bool,
}

/// A file that is served.
#[derive(Debug)]
pub(crate) struct ServedFile {
    pub(crate) node: NodeId,
    pub(crate) handle: Handle,
    pub(crate) source: MapSource,
    pub(crate) writes: Mutex<WriteState>,
    pub(crate) order: Arc<RwLock<()>>,
    /// One commit at a time.
    pub(crate) committing: tokio::sync::Mutex<()>,
}

impl ServedFile {
    pub(crate) fn new(node: NodeId, handle: Handle, source: MapSource) -> Self {
        Self {
            node,
            handle,
            source,
            writes: Mutex::default(),
            order: Arc::default(),
            committing: tokio::sync::Mutex::default(),
        }
    }

    /// Whether it can change.
    pub(crate) const fn is_writable(&self) -> bool {
        matches!(self.source, MapSource::File(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_by_block() {
        let mut written = WrittenBlocks::default();
        written.mark(250, 258);
        written.mark(1 << 40, 1 << 40);
        let marked: Vec<u64> = (0..600).filter(|block| written.contains(*block)).collect();
        assert_eq!(marked, (250..=258).collect::<Vec<_>>());
        assert!(written.contains(1 << 40) && !written.contains((1 << 40) + 1));
    }
}
