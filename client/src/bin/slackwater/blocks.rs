//! Bytes seen as the appliance's blocks: which are zeros, what their hashes are, which ranges
//! of them are to be moved.

use std::ops::Range;

use slackwater_client::{BlockHash, ByteRange};

/// Bytes of one block of the appliance, the unit of its maps and holes.
pub(crate) const BLOCK_BYTES: u64 = 4096;

/// Gaps up to this are moved along: cheaper than a request of their own.
pub(crate) const GAP_BYTES: u64 = 64 << 10;

/// The blocks of `bytes`; the last one may be short.
pub(crate) fn blocks(bytes: &[u8]) -> std::slice::Chunks<'_, u8> {
    bytes.chunks(usize::try_from(BLOCK_BYTES).unwrap_or(4096))
}

/// Whether a block reads as zeros.
pub(crate) fn is_zero(block: &[u8]) -> bool {
    block.iter().all(|&byte| byte == 0)
}

/// What the appliance's map says of a block with these bytes: a short last block is hashed with
/// zeros up to a block's length.
pub(crate) fn hash(block: &[u8]) -> BlockHash {
    if is_zero(block) {
        return None;
    }
    let mut hasher = blake3::Hasher::new();
    hasher.update(block);
    let missing = usize::try_from(BLOCK_BYTES).unwrap_or(4096).saturating_sub(block.len());
    hasher.update(&vec![0; missing]);
    Some(*hasher.finalize().as_bytes())
}

/// The byte ranges of the blocks that are wanted, of `length_bytes` bytes in all, those with
/// gaps up to `gap_bytes` as one.
pub(crate) fn runs(
    wanted: impl IntoIterator<Item = bool>,
    length_bytes: u64,
    gap_bytes: u64,
) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    let mut start = 0;
    for is_wanted in wanted {
        let end = (start + BLOCK_BYTES).min(length_bytes);
        if is_wanted && start < end {
            match runs.last_mut() {
                Some(last) if start - last.end <= gap_bytes => last.end = end,
                _ => runs.push(start..end),
            }
        }
        start = end;
    }
    runs
}

/// [`runs`] for requests, where small gaps are moved along.
pub(crate) fn runs_to_move(
    wanted: impl IntoIterator<Item = bool>,
    length_bytes: u64,
) -> Vec<Range<u64>> {
    runs(wanted, length_bytes, GAP_BYTES)
}

/// The range as indices of bytes in memory.
pub(crate) fn indices(range: ByteRange) -> Range<usize> {
    let index = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
    index(range.offset_bytes())..index(range.end_bytes())
}

/// The hashes of a piece of a compared range.
pub(crate) fn hashes_of(
    hashes: &[BlockHash],
    range: ByteRange,
    piece: ByteRange,
) -> Vec<BlockHash> {
    let index = |bytes: u64| usize::try_from(bytes / BLOCK_BYTES).unwrap_or(usize::MAX);
    let first = index(piece.offset_bytes() - range.offset_bytes());
    let count = index(piece.length_bytes().next_multiple_of(BLOCK_BYTES));
    hashes.iter().skip(first).take(count).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transfer::pieces;

    fn range(offset_bytes: u64, length_bytes: u64) -> ByteRange {
        ByteRange::new(offset_bytes, length_bytes).unwrap()
    }

    #[test]
    fn wanted_blocks_become_ranges() {
        let wanted = [true, false, true, true, false, false, true];
        // Seven blocks, the last one of ten bytes.
        let length = 6 * BLOCK_BYTES + 10;
        let blocks = |first: u64, end: u64| first * BLOCK_BYTES..end * BLOCK_BYTES;
        assert_eq!(runs(wanted, length, 0), [blocks(0, 1), blocks(2, 4), 6 * BLOCK_BYTES..length]);
        assert_eq!(runs(wanted, length, BLOCK_BYTES), [blocks(0, 4), 6 * BLOCK_BYTES..length]);
        assert_eq!(runs_to_move(wanted, length), std::slice::from_ref(&(0..length)));
        assert!(runs([false; 3], length, 0).is_empty());
    }

    #[test]
    fn a_short_last_block_is_hashed_with_zeros_after_it() {
        let mut whole = vec![0; 4096];
        whole[..3].copy_from_slice(b"abc");
        assert_eq!(hash(b"abc"), hash(&whole));
        assert_eq!(hash(&whole), Some(*blake3::hash(&whole).as_bytes()));
        assert_eq!(hash(&[0; 4096]), None);
    }

    #[test]
    fn a_piece_has_its_own_hashes() {
        let hashes: Vec<BlockHash> = (0..2048).map(|_| None).chain([Some([1; 32]), None]).collect();
        let whole = range(16 << 20, 2049 * BLOCK_BYTES + 5);
        let all: Vec<ByteRange> = pieces(whole).collect();
        assert_eq!(all.len(), 3);
        assert_eq!(hashes_of(&hashes, whole, all[0]).len(), 1024);
        assert_eq!(hashes_of(&hashes, whole, all[2]), [Some([1; 32]), None]);
    }
}
