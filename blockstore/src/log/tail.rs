//! The open end of a log file: written in whole sectors, past the page cache.
//!
//! ```text
//! sectors |        |        |        |        |        |        |
//! bytes    record|record|rec|ord|0000 00000000 00000000 00000000
//!                            ^      ^                           ^
//!                            |      end of the records          length of the file
//!                            begin of the partial sector: the next append writes it again,
//!                            its old bytes in front
//! ```
//! - Behind the end there are only zeros: padding, and zeros written ahead.
//! - A sync of blocks that were written before needs no change of the file's metadata, and takes
//!   half as long. So small appends find zeros ahead of them; large ones would pay twice.
//! - An append that failed is cut off, durably, before the next: no later append leaves a part
//!   of it behind its own end.

use std::sync::Arc;

use super::AppendError;
use super::sectors::SectorBuffer;
use crate::disk::{Disk, DiskFile, SECTOR_BYTES, SECTOR_BYTES_U64};
use crate::error::Result;

/// Appends of more than this gain nothing from zeros ahead: writing the zeros first would cost
/// more than the metadata does. 32 writers of a block each stay below.
const SMALL_APPEND_BYTES_MAX: u64 = 192 << 10;

/// Zeros written ahead at a time: five appends and more share the price, of under a millisecond.
const ZEROS_BYTES_MAX: u64 = 1 << 20;

/// Zeros ahead take at most this share of what is free: they must not fill a disk.
const ZEROS_FREE_DIVISOR: u64 = 64;

/// Memory that is kept for the next append: the payload of a full group and its records.
const BUFFER_KEPT_BYTES_MAX: usize = 24 << 20;

/// See the module's text.
#[derive(Debug)]
pub(super) struct Tail {
    disk: Arc<dyn Disk>,
    file: Arc<dyn DiskFile>,
    end_bytes: u64,
    /// What lies between the begin of the end's sector and the end.
    partial: Vec<u8>,
    length_bytes: u64,
    /// What small appends added since the last large one.
    small_run_bytes: u64,
    buffer: SectorBuffer,
    zeros: SectorBuffer,
}

/// Where a file ends that recovery found, or that was just made.
#[derive(Debug)]
pub(super) struct End {
    /// Behind the last record.
    pub(super) end_bytes: u64,
    /// See [`Tail`].
    pub(super) partial: Vec<u8>,
    /// At least `end_bytes`; zeros lie between.
    pub(super) length_bytes: u64,
}

impl End {
    /// Behind the first `end` bytes of a file, of which `bytes` has at least these.
    pub(super) fn of(bytes: &[u8], end: usize, length_bytes: u64) -> Self {
        let partial = bytes[end - end % SECTOR_BYTES..end].to_vec();
        Self { end_bytes: count(end), partial, length_bytes }
    }
}

impl Tail {
    pub(super) fn new(disk: Arc<dyn Disk>, file: Arc<dyn DiskFile>, end: End) -> Self {
        Self {
            disk,
            file,
            end_bytes: end.end_bytes,
            partial: end.partial,
            length_bytes: end.length_bytes,
            small_run_bytes: 0,
            buffer: SectorBuffer::default(),
            zeros: SectorBuffer::default(),
        }
    }

    /// Goes on in another file.
    pub(super) fn switch(&mut self, file: Arc<dyn DiskFile>, end: End) {
        self.file = file;
        self.end_bytes = end.end_bytes;
        self.partial = end.partial;
        self.length_bytes = end.length_bytes;
        // The run goes on: the new file gets as many zeros as the old one had.
    }

    /// The end of what is synced.
    pub(super) const fn end_bytes(&self) -> u64 {
        self.end_bytes
    }

    /// What the file takes.
    pub(super) const fn length_bytes(&self) -> u64 {
        self.length_bytes
    }

    /// Appends what `encode` pushes to the bytes that it is given, and syncs.
    pub(super) fn append<T>(
        &mut self,
        capacity_bytes: usize,
        encode: impl FnOnce(&mut Vec<u8>) -> Result<T>,
    ) -> std::result::Result<T, AppendError> {
        let value = self.write(capacity_bytes, encode)?;
        self.zero_ahead();
        // After a failed sync the kernel may have dropped what it had, and report success on a
        // second try: what is on the medium is unknown.
        self.file.sync().map_err(AppendError::Fatal)?;
        let content = self.buffer.content();
        self.end_bytes = self.written_end_bytes();
        self.partial.clear();
        self.partial.extend_from_slice(&content[content.len() - content.len() % SECTOR_BYTES..]);
        self.buffer.keep_at_most(BUFFER_KEPT_BYTES_MAX);
        Ok(value)
    }

    /// Puts the directory behind the end, and nothing behind the directory. The end stays where
    /// it is, for [`Tail::cut`].
    pub(super) fn seal(&mut self, directory: &[u8]) -> std::result::Result<(), AppendError> {
        self.write(directory.len(), |bytes| {
            bytes.extend_from_slice(directory);
            Ok(())
        })?;
        let end_bytes = self.written_end_bytes();
        if let Err(error) = self.file.truncate(end_bytes) {
            return Err(self.take_back(error));
        }
        self.length_bytes = end_bytes;
        self.file.sync().map_err(AppendError::Fatal)
    }

    /// Takes back what lies behind the end, durably.
    pub(super) fn cut(&mut self) -> Result<()> {
        self.file.truncate(self.end_bytes)?;
        self.file.sync()?;
        self.length_bytes = self.end_bytes;
        Ok(())
    }

    fn write<T>(
        &mut self,
        capacity_bytes: usize,
        encode: impl FnOnce(&mut Vec<u8>) -> Result<T>,
    ) -> std::result::Result<T, AppendError> {
        let bytes = self.buffer.begin(self.partial.len() + capacity_bytes);
        bytes.extend_from_slice(&self.partial);
        let value = encode(bytes).map_err(AppendError::Refused)?;
        self.buffer.finish();
        let start = self.sector_bytes();
        if let Err(error) = self.file.write_sectors_at(start, self.buffer.sectors()) {
            // What was half written must not be taken for a record later.
            return Err(self.take_back(error));
        }
        self.length_bytes = self.length_bytes.max(start + count(self.buffer.sectors().len()));
        Ok(value)
    }

    /// Undoes a write that failed.
    fn take_back(&mut self, error: crate::error::Error) -> AppendError {
        match self.cut() {
            Ok(()) => AppendError::Refused(error),
            Err(_) => AppendError::Fatal(error),
        }
    }

    /// Where the sector begins that holds the end.
    fn sector_bytes(&self) -> u64 {
        self.end_bytes - count(self.partial.len())
    }

    /// Where what was written last ends, without its padding.
    fn written_end_bytes(&self) -> u64 {
        self.sector_bytes() + count(self.buffer.content().len())
    }

    /// Writes zeros for the appends to come, if those of late were small: as many bytes as they
    /// took, so that a store which is hardly written does not grow. The sync to come serves both.
    fn zero_ahead(&mut self) {
        let appended = self.written_end_bytes() - self.end_bytes;
        if appended > SMALL_APPEND_BYTES_MAX {
            self.small_run_bytes = 0;
            return;
        }
        self.small_run_bytes += appended;
        let from = self.sector_bytes() + count(self.buffer.sectors().len());
        if self.length_bytes > from {
            return;
        }
        let free_bytes = self.disk.space().map_or(0, |space| space.available_bytes);
        let wanted = self.small_run_bytes.min(ZEROS_BYTES_MAX).min(free_bytes / ZEROS_FREE_DIVISOR);
        let Ok(bytes) = usize::try_from(wanted / SECTOR_BYTES_U64 * SECTOR_BYTES_U64) else {
            return;
        };
        if bytes == 0 {
            return;
        }
        let zeros = self.zeros.begin(bytes);
        zeros.resize(zeros.len() + bytes, 0);
        self.zeros.finish();
        self.length_bytes = match self.file.write_sectors_at(from, self.zeros.sectors()) {
            Ok(()) => from + count(bytes),
            // The append needs none of them; what was written of them is zeros all the same.
            Err(error) => {
                tracing::debug!(%error, "no zeros ahead of the log");
                self.file.length_bytes().unwrap_or(from)
            }
        };
    }
}

fn count(bytes: usize) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}
