//! Reading a log file from front to back with a piece of it in memory.

use std::sync::Arc;

use crate::disk::{DiskFile, SECTOR_BYTES_U64};
use crate::error::Result;
use crate::segment_format::stream::{PIECE_BYTES, ReadAt};

/// One file, and the piece of it that was read last.
#[derive(Debug)]
pub(super) struct FileReader {
    file: Arc<dyn DiskFile>,
    length_bytes: u64,
    /// Where `piece` begins.
    start: u64,
    piece: Vec<u8>,
}

impl FileReader {
    pub(super) fn new(file: Arc<dyn DiskFile>) -> Result<Self> {
        let length_bytes = file.length_bytes()?;
        Ok(Self { file, length_bytes, start: 0, piece: Vec::new() })
    }

    pub(super) fn file(&self) -> &dyn DiskFile {
        self.file.as_ref()
    }

    /// What lies between the begin of the sector that `end` is in, and `end`.
    pub(super) fn sector_before(&mut self, end: u64) -> Result<Vec<u8>> {
        let inside = end % SECTOR_BYTES_U64;
        let bytes = self.bytes(end - inside, usize::try_from(inside).unwrap_or(usize::MAX))?;
        Ok(bytes.unwrap_or_default().to_vec())
    }
}

impl ReadAt for FileReader {
    fn length_bytes(&self) -> u64 {
        self.length_bytes
    }

    fn bytes(&mut self, offset: u64, count: usize) -> Result<Option<&[u8]>> {
        let wanted = u64::try_from(count).unwrap_or(u64::MAX);
        if offset.saturating_add(wanted) > self.length_bytes {
            return Ok(None);
        }
        let held = self.start + u64::try_from(self.piece.len()).unwrap_or(u64::MAX);
        if offset < self.start || offset + wanted > held {
            let left = usize::try_from(self.length_bytes - offset).unwrap_or(usize::MAX);
            self.piece = self.file.read_at(offset, count.max(left.min(PIECE_BYTES)))?;
            self.start = offset;
        }
        let from = usize::try_from(offset - self.start).unwrap_or(usize::MAX);
        Ok(self.piece.get(from..from + count))
    }
}
