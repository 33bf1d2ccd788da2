//! What is written: blocks of many kinds, many of them twice.

use std::sync::Arc;

use slackwater_benches::{Content, mix};
use slackwater_blockstore::BLOCK_BYTES;

use super::chance::Chance;

/// A block as a client knows it; `None` is all zeros.
pub(super) type Block = Option<Arc<[u8]>>;

/// Blocks that all writers draw from, so that the store finds duplicates among them.
const SHARED_BLOCKS: u64 = 64;

/// How often, of a hundred blocks.
const ZEROS_PERCENT: u64 = 10;
const SHARED_PERCENT: u64 = 30;
const COMPRESSIBLE_PERCENT: u64 = 15;

/// Bytes of a block that compresses which are repeated.
const REPEATED_BYTES: usize = 64;

/// Makes the bytes of writes.
#[derive(Clone, Debug)]
pub(super) struct Matter {
    shared: Arc<[u8]>,
    content: Content,
}

impl Matter {
    /// `seed` is the writer's own, `shared_seed` that of all.
    pub(super) fn new(shared_seed: u64, seed: u64) -> Self {
        let shared = Content::new(shared_seed).blocks(SHARED_BLOCKS).as_ref().into();
        Self { shared, content: Content::new(mix(seed)) }
    }

    /// That many blocks of bytes.
    pub(super) fn blocks(&mut self, count: usize, chance: &mut Chance) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(count * BLOCK_BYTES);
        for _ in 0..count {
            self.put_block(&mut bytes, chance);
        }
        bytes
    }

    fn put_block(&mut self, bytes: &mut Vec<u8>, chance: &mut Chance) {
        let kind = chance.below(100);
        if kind < ZEROS_PERCENT {
            bytes.resize(bytes.len() + BLOCK_BYTES, 0);
        } else if kind < ZEROS_PERCENT + SHARED_PERCENT {
            let start = chance.index(self.shared.len() / BLOCK_BYTES) * BLOCK_BYTES;
            bytes.extend(&self.shared[start..start + BLOCK_BYTES]);
        } else {
            let own = self.content.blocks(1);
            if kind < ZEROS_PERCENT + SHARED_PERCENT + COMPRESSIBLE_PERCENT {
                bytes.extend(own[..REPEATED_BYTES].repeat(BLOCK_BYTES / REPEATED_BYTES));
            } else {
                bytes.extend(own);
            }
        }
    }
}

/// The block of these bytes, filled up with zeros.
pub(super) fn block_of(bytes: &[u8]) -> Block {
    if bytes.iter().all(|&byte| byte == 0) {
        return None;
    }
    let mut whole = bytes.to_vec();
    whole.resize(BLOCK_BYTES, 0);
    Some(whole.into())
}

/// The block after a write of `bytes` at `start` within it.
pub(super) fn overlay(block: &Block, start: usize, bytes: &[u8]) -> Block {
    let mut whole = block.as_ref().map_or_else(|| vec![0; BLOCK_BYTES], |block| block.to_vec());
    whole[start..start + bytes.len()].copy_from_slice(bytes);
    block_of(&whole)
}

/// A block in few words.
pub(super) fn shown(block: &Block) -> String {
    match block {
        None => "zeros".to_owned(),
        Some(bytes) => bytes[..8].iter().map(|byte| format!("{byte:02x}")).collect(),
    }
}
