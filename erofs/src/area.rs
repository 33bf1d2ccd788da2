//! A part of the image that is written from its begin to its end.

use std::fs::File;
use std::os::unix::fs::FileExt;

use crate::error::{ErofsError, failed};
use crate::format::{BLOCK_BYTES, BlockAddress};

/// Bytes that are collected before they are written: what a network file system writes at once.
const BUFFER_BYTES: usize = 1 << 20;

/// So many zeros in a row, at a multiple of their number in the buffer, or at its end, are not
/// written. Fewer cost a write less than the two that the gap would make.
const HOLE_BYTES: usize = 64 << 10;

/// The buffer of a part. Nothing in it reaches the file before [`Area::flush`], but what is over
/// the buffer's size.
#[derive(Debug)]
pub(crate) struct Area {
    /// The byte of the image where the buffer begins.
    start: u64,
    bytes: Vec<u8>,
}

impl Area {
    pub(crate) fn new(first: BlockAddress) -> Self {
        Self { start: first.offset(), bytes: Vec::new() }
    }

    /// The byte of the image where the next one goes.
    pub(crate) fn position(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }

    pub(crate) fn append(&mut self, file: &File, mut bytes: &[u8]) -> Result<(), ErofsError> {
        while !bytes.is_empty() {
            let taken = bytes.len().min(BUFFER_BYTES - self.bytes.len());
            self.bytes.extend_from_slice(&bytes[..taken]);
            bytes = &bytes[taken..];
            if self.bytes.len() == BUFFER_BYTES {
                self.flush(file)?;
            }
        }
        Ok(())
    }

    /// Appends zeros up to a position that is not far away.
    pub(crate) fn fill_to(&mut self, file: &File, position: u64) -> Result<(), ErofsError> {
        const ZEROS: [u8; BLOCK_BYTES] = [0; BLOCK_BYTES];
        while self.position() < position {
            let missing = usize::try_from(position - self.position()).unwrap_or(BLOCK_BYTES);
            self.append(file, &ZEROS[..missing.min(BLOCK_BYTES)])?;
        }
        Ok(())
    }

    /// Appends another part, which begins here, or is written as far as it began here.
    pub(crate) fn append_area(&mut self, file: &File, mut next: Self) -> Result<(), ErofsError> {
        if next.start == self.position() {
            return self.append(file, &next.bytes);
        }
        next.flush(file)
    }

    /// Writes the buffer, but for long zeros, which the file has where nothing was written.
    pub(crate) fn flush(&mut self, file: &File) -> Result<(), ErofsError> {
        static ZEROS: [u8; HOLE_BYTES] = [0; HOLE_BYTES];
        let write = |from: usize, to: usize| {
            let offset = self.start + from as u64;
            file.write_all_at(&self.bytes[from..to], offset).map_err(failed("write"))
        };
        let mut unwritten = 0;
        for from in (0..self.bytes.len()).step_by(HOLE_BYTES) {
            let to = (from + HOLE_BYTES).min(self.bytes.len());
            if self.bytes[from..to] == ZEROS[..to - from] {
                write(unwritten, from)?;
                unwritten = to;
            }
        }
        write(unwritten, self.bytes.len())?;
        self.start = self.position();
        self.bytes.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn parts_that_meet_are_written_together() {
        for length in
            [10, BUFFER_BYTES - 4096, BUFFER_BYTES - 4095, BUFFER_BYTES, BUFFER_BYTES + 10]
        {
            let file = tempfile::tempfile().unwrap();
            let (mut area, mut next) = (Area::new(BlockAddress(0)), Area::new(BlockAddress(1)));
            area.append(&file, &[5; 4096]).unwrap();
            let bytes = vec![7; length];
            next.append(&file, &bytes).unwrap();
            area.append_area(&file, next).unwrap();
            if length == 10 {
                assert_eq!(file.metadata().unwrap().len(), 0, "nothing is written yet");
            }
            area.flush(&file).unwrap();
            let mut got = vec![0; 4096 + length];
            file.read_exact_at(&mut got, 0).unwrap();
            assert!(got[..4096] == [5; 4096] && got[4096..] == bytes, "{length}");
        }
    }

    #[test]
    fn long_zeros_are_left_out_and_all_else_is_where_it_belongs() {
        let file = tempfile::tempfile().unwrap();
        let mut area = Area::new(BlockAddress(2));
        let mut expected = vec![0; 2 * BLOCK_BYTES];
        for (byte, length) in [(1, 5), (0, 3 * BUFFER_BYTES), (2, 1), (0, 100), (3, HOLE_BYTES + 1)]
        {
            let bytes = vec![byte; length];
            area.append(&file, &bytes).unwrap();
            expected.extend_from_slice(&bytes);
            assert_eq!(area.position(), expected.len() as u64);
        }
        area.fill_to(&file, expected.len().next_multiple_of(BLOCK_BYTES) as u64).unwrap();
        area.flush(&file).unwrap();
        expected.resize(expected.len().next_multiple_of(BLOCK_BYTES), 0);
        let mut got = vec![0xff; expected.len()];
        file.read_exact_at(&mut got, 0).unwrap();
        assert!(got == expected, "other bytes");
        assert_eq!(file.metadata().unwrap().len(), expected.len() as u64);
        let allocated = file.metadata().unwrap().blocks() * 512;
        assert!(allocated < 1 << 20, "{allocated} bytes are allocated");
    }
}
