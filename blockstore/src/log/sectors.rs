//! Bytes on their way to the disk in whole sectors, at an address that direct writes take.

use crate::disk::SECTOR_BYTES;

/// Room is made in steps of this, so that appends that grow little by little seldom make it anew.
const CAPACITY_STEP_BYTES: usize = 256 << 10;

/// A buffer that is filled like a `Vec` and written in whole sectors.
///
/// It is kept from write to write: the first touch of new memory costs more than filling it.
#[derive(Debug, Default)]
pub(super) struct SectorBuffer {
    /// `start` bytes that mean nothing, the content, the padding.
    bytes: Vec<u8>,
    start: usize,
    content_bytes: usize,
}

impl SectorBuffer {
    /// Empties it and makes room; what is pushed to the answer is the content.
    pub(super) fn begin(&mut self, capacity_bytes: usize) -> &mut Vec<u8> {
        self.bytes.clear();
        let needed = capacity_bytes.next_multiple_of(SECTOR_BYTES) + SECTOR_BYTES;
        if self.bytes.capacity() < needed {
            // The old memory goes first.
            self.bytes = Vec::new();
            self.bytes = Vec::with_capacity(needed.next_multiple_of(CAPACITY_STEP_BYTES));
        }
        self.start = padding(self.bytes.as_ptr().addr());
        self.bytes.resize(self.start, 0);
        &mut self.bytes
    }

    /// Ends the content: pads it with zeros to whole sectors.
    pub(super) fn finish(&mut self) {
        self.content_bytes = self.bytes.len() - self.start;
        let padded = self.start + self.content_bytes.next_multiple_of(SECTOR_BYTES);
        self.bytes.resize(padded, 0);
        let start = padding(self.bytes.as_ptr().addr());
        if start != self.start {
            // It outgrew the capacity that was asked for, and moved.
            let sectors = self.sectors().to_vec();
            let content_bytes = self.content_bytes;
            self.begin(sectors.len()).extend_from_slice(&sectors);
            self.content_bytes = content_bytes;
        }
    }

    /// What was pushed.
    pub(super) fn content(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.content_bytes]
    }

    /// What was pushed and its padding.
    pub(super) fn sectors(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    /// Gives back the memory if it is more than this.
    pub(super) fn keep_at_most(&mut self, bytes: usize) {
        if self.bytes.capacity() > bytes {
            *self = Self::default();
        }
    }
}

/// Bytes from `position` to the next sector.
fn padding(position: usize) -> usize {
    position.next_multiple_of(SECTOR_BYTES) - position
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_of_any_length_begins_at_a_sector_and_is_padded_with_zeros() {
        let mut buffer = SectorBuffer::default();
        for length in [0, 1, 4095, 4096, 4097, 100_000, 5, 3 << 20] {
            for capacity in [0, 1, length, length + 9000] {
                let content: Vec<u8> =
                    (0..length).map(|n| u8::try_from(n % 251 + 1).unwrap()).collect();
                buffer.begin(capacity).extend_from_slice(&content);
                buffer.finish();
                assert_eq!(buffer.content(), content, "{length} bytes, room for {capacity}");
                let sectors = buffer.sectors();
                assert_eq!(sectors.as_ptr().addr() % SECTOR_BYTES, 0);
                assert_eq!(sectors.len(), length.next_multiple_of(SECTOR_BYTES));
                assert!(sectors[length..].iter().all(|&byte| byte == 0));
            }
        }
    }

    #[test]
    fn a_large_buffer_is_given_back_and_a_small_one_kept() {
        let mut buffer = SectorBuffer::default();
        buffer.begin(1 << 20).push(7);
        buffer.finish();
        buffer.keep_at_most(2 << 20);
        assert_eq!(buffer.content(), [7]);
        buffer.keep_at_most(1 << 19);
        assert!(buffer.content().is_empty());
    }
}
