//! What is written: a buffer without any pattern, in which every block gets a stamp of its own
//! when it is sent. So making data costs next to nothing, and no block comes twice.

use std::ops::Range;

use bytes::Bytes;
use slackwater_benches::{Content, mix};
use slackwater_blockstore::{BLOCK_BYTES, BLOCK_BYTES_U64};

/// Length of the buffer: far beyond the processor's caches, as data that arrives would be.
pub(super) const FILL_BYTES: usize = 16 << 20;

/// Set in the number of a block of random writes: these count on, whatever their place.
const RUNNING: u64 = 1 << 63;

/// The buffer.
#[derive(Debug)]
pub(super) struct Fill {
    bytes: Vec<u8>,
    stamp: u64,
}

impl Fill {
    pub(super) fn new(seed: u64) -> Self {
        let pattern: Bytes = Content::new(0).blocks(FILL_BYTES as u64 / BLOCK_BYTES_U64);
        Self { bytes: pattern.to_vec(), stamp: mix(seed) }
    }

    /// The whole buffer.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Stamps what belongs to a place of a file, and tells where it is in the buffer.
    pub(super) fn place(&mut self, offset_bytes: u64, length: usize) -> Range<usize> {
        self.stamped(offset_bytes, length, offset_bytes / BLOCK_BYTES_U64)
    }

    /// As [`Fill::place`], but of the write of that count: never the same bytes again.
    pub(super) fn unique(&mut self, offset_bytes: u64, length: usize, count: u64) -> Range<usize> {
        let blocks = (length / BLOCK_BYTES) as u64;
        self.stamped(offset_bytes, length, RUNNING | (count * blocks))
    }

    /// Whether these bytes are what belongs to the place.
    pub(super) fn is_at(&mut self, offset_bytes: u64, bytes: &[u8]) -> bool {
        let place = self.place(offset_bytes, bytes.len());
        self.bytes[place] == *bytes
    }

    /// Stamps the blocks with numbers from `first` on. Offsets are multiples of the length, and
    /// the buffer's length is one, so the place does not go beyond its end.
    fn stamped(&mut self, offset_bytes: u64, length: usize, first: u64) -> Range<usize> {
        let start = usize::try_from(offset_bytes % FILL_BYTES as u64).unwrap_or(0);
        let place = start..start + length;
        for (number, block) in (first..).zip(self.bytes[place.clone()].chunks_mut(BLOCK_BYTES)) {
            let stamp = mix(self.stamp.wrapping_add(number)).to_be_bytes();
            block[..stamp.len()].copy_from_slice(&stamp);
        }
        place
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn one_seed_gives_the_same_bytes_and_others_share_no_block() {
        let mut fill = Fill::new(1);
        let place = fill.place(17 << 20, 1 << 20);
        let bytes = fill.bytes()[place].to_vec();
        assert!(Fill::new(1).is_at(17 << 20, &bytes));
        assert!(!Fill::new(1).is_at(1 << 20, &bytes));
        assert!(!Fill::new(2).is_at(17 << 20, &bytes));
        let mut blocks = HashSet::new();
        for (seed, megabyte) in [(1, 0_u64), (1, 1), (1, 16), (1, 17), (2, 0), (2, 16)] {
            let mut fill = Fill::new(seed);
            let place = fill.place(megabyte << 20, 1 << 20);
            for block in fill.bytes()[place].chunks(BLOCK_BYTES) {
                assert!(blocks.insert(block.to_vec()), "seed {seed}, MiB {megabyte}");
            }
        }
    }

    #[test]
    fn a_place_that_is_written_again_is_written_with_other_bytes() {
        let mut fill = Fill::new(1);
        let mut blocks = HashSet::new();
        for count in 0..1000 {
            let place = fill.unique(0, BLOCK_BYTES, count);
            assert!(blocks.insert(fill.bytes()[place].to_vec()), "{count}");
        }
    }
}
