//! Memory of large reads, used again.
//!
//! A reply of a megabyte that is read from the disk needs a megabyte of memory until it is sent.
//! Taken from the system each time, the kernel zeroes it page by page before the read fills it,
//! which costs about as much as the read from the page cache itself.

use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;

/// Reads from this size on: smaller ones are served by the allocator from memory it has.
const LARGE_BYTES: usize = 128 << 10;

/// Pieces that are kept: as many large reads as two cores carry out at once, and those that are
/// being sent meanwhile.
const KEPT_MAX: usize = 8;

/// Larger pieces are not kept: reads are bounded by what one READ may ask for.
const KEPT_BYTES_MAX: usize = 2 << 20;

/// The memory that is free.
#[derive(Debug, Default)]
pub(crate) struct LargeReads {
    free: Mutex<Vec<Vec<u8>>>,
}

impl LargeReads {
    /// Empty memory for a read of `length` bytes: the smallest that suffices, else any.
    pub(crate) fn take(&self, length: usize) -> Vec<u8> {
        let kept = if length < LARGE_BYTES { None } else { self.take_kept(length) };
        let mut memory = kept.unwrap_or_default();
        memory.reserve_exact(length);
        memory
    }

    fn take_kept(&self, length: usize) -> Option<Vec<u8>> {
        let mut free = self.free.lock();
        let sizes = free.iter().map(Vec::capacity).enumerate();
        let best = sizes.min_by_key(|(_, size)| (*size < length, *size))?;
        Some(free.swap_remove(best.0))
    }

    /// What was read; its memory comes back once nobody has it any more.
    pub(crate) fn lend(self: &Arc<Self>, bytes: Vec<u8>) -> Bytes {
        if bytes.len() < LARGE_BYTES {
            return Bytes::from(bytes);
        }
        Bytes::from_owner(Lent { bytes, home: Arc::clone(self) })
    }

    fn give_back(&self, mut memory: Vec<u8>) {
        memory.clear();
        let mut free = self.free.lock();
        if free.len() < KEPT_MAX && memory.capacity() <= KEPT_BYTES_MAX {
            free.push(memory);
        }
    }
}

/// Memory that goes home when it is dropped.
struct Lent {
    bytes: Vec<u8>,
    home: Arc<LargeReads>,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.home.give_back(std::mem::take(&mut self.bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_used_again_only_once_nobody_reads_it() {
        let reads = Arc::new(LargeReads::default());
        let mut memory = reads.take(LARGE_BYTES);
        memory.resize(LARGE_BYTES, 7);
        let address = memory.as_ptr().addr();
        let whole = reads.lend(memory);
        let part = whole.slice(10..20);
        drop(whole);
        let other = reads.take(LARGE_BYTES);
        assert_ne!(other.as_ptr().addr(), address, "a part of it is still read");
        assert!(part.iter().all(|&byte| byte == 7));
        drop(part);
        let again = reads.take(LARGE_BYTES);
        assert_eq!((again.as_ptr().addr(), again.len()), (address, 0));
    }

    #[test]
    fn a_read_takes_the_smallest_memory_that_suffices() {
        let reads = Arc::new(LargeReads::default());
        let lent: Vec<Bytes> =
            [4, 1, 2].map(|times| reads.lend(vec![1; times * LARGE_BYTES])).into();
        drop(lent);
        assert_eq!(reads.take(2 * LARGE_BYTES).capacity(), 2 * LARGE_BYTES);
        assert_eq!(reads.take(2 * LARGE_BYTES).capacity(), 4 * LARGE_BYTES);
        assert_eq!(reads.take(2 * LARGE_BYTES).capacity(), 2 * LARGE_BYTES);
        assert_eq!(reads.free.lock().len(), 0);
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let reads = Arc::new(LargeReads::default());
        let lent: Vec<Bytes> =
            (0..2 * KEPT_MAX).map(|_| reads.lend(vec![1; LARGE_BYTES])).collect();
        drop(lent);
        drop(reads.lend(vec![1; KEPT_BYTES_MAX + 1]));
        assert_eq!(reads.free.lock().len(), KEPT_MAX);
        assert!(reads.free.lock().iter().all(|memory| memory.capacity() <= KEPT_BYTES_MAX));
        // Small reads take none of it.
        drop(reads.lend(reads.take(LARGE_BYTES - 1)));
        assert_eq!(reads.free.lock().len(), KEPT_MAX);
    }
}
