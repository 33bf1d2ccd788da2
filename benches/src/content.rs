//! Bytes to fill files with.

use bytes::{BufMut, Bytes, BytesMut};
use slackwater_blockstore::BLOCK_BYTES;

/// A source of blocks, each unlike every other and without any pattern to compress. Two sources
/// of one seed give the same blocks.
#[derive(Clone, Debug)]
pub struct Content {
    state: u64,
}

impl Content {
    /// A source; other seeds give other blocks.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// That many blocks of data.
    pub fn blocks(&mut self, count: u64) -> Bytes {
        let mut bytes = BytesMut::new();
        for _ in 0..count {
            self.put_block(&mut bytes);
        }
        bytes.freeze()
    }

    /// That many blocks of data, each followed by a block of zeros.
    pub fn alternating(&mut self, count: u64) -> Bytes {
        let mut bytes = BytesMut::new();
        for _ in 0..count {
            self.put_block(&mut bytes);
            bytes.put_bytes(0, BLOCK_BYTES);
        }
        bytes.freeze()
    }

    fn put_block(&mut self, bytes: &mut BytesMut) {
        bytes.reserve(BLOCK_BYTES);
        for _ in 0..BLOCK_BYTES / size_of::<u64>() {
            bytes.put_u64(self.next());
        }
    }

    const fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(GOLDEN_GAMMA);
        mix(self.state)
    }
}

/// The step between two states of SplitMix64 (Steele, Lea and Flood, 2014).
const GOLDEN_GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// SplitMix64's word of a state: every state gives a word of its own, and neighbours have
/// nothing in common.
#[must_use]
pub const fn mix(state: u64) -> u64 {
    let mut word = state;
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_block_comes_twice_and_none_is_zeros() {
        let bytes = Content::new(1).blocks(1000);
        assert_eq!(bytes.len(), 1000 * BLOCK_BYTES);
        let distinct: HashSet<&[u8]> = bytes.chunks(BLOCK_BYTES).collect();
        assert_eq!(distinct.len(), 1000);
        assert!(!distinct.contains(&[0; BLOCK_BYTES][..]));
        assert_eq!(Content::new(1).blocks(1000), bytes);
        assert_ne!(Content::new(2).blocks(1000), bytes);
    }

    #[test]
    fn every_second_block_is_zeros() {
        let bytes = Content::new(1).alternating(10);
        assert_eq!(bytes.len(), 20 * BLOCK_BYTES);
        for (index, block) in bytes.chunks(BLOCK_BYTES).enumerate() {
            assert_eq!(block.iter().all(|&byte| byte == 0), index % 2 == 1, "block {index}");
        }
    }
}
