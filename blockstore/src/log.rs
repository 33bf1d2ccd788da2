//! The log: the one place that writes while clients wait.
//!
//! ```text
//! append(chunks, batch):  [groups of chunks][commit record]  -> one write, one sync
//! ```
//! Data is never behind what points to it: they are one write. What is not whole after a crash
//! was never acknowledged, and is cut off at recovery (`recovery.rs`). `tail.rs` has how the bytes
//! reach the disk.

mod reader;
mod recovery;
mod sectors;
mod tail;
#[cfg(test)]
mod tests;

use std::sync::Arc;

pub(crate) use recovery::{Recovered, Recovery};
use tail::{End, Tail};

use crate::disk::{Disk, DiskFile, FileName, FileRole};
use crate::error::{Error, Result};
use crate::id::{ChunkId, SegmentId, StoreId};
use crate::kv::Batch;
use crate::record::LogPosition;
use crate::segment_format::{self as format, Directory, GROUP_CHUNKS_MAX, PreparedChunk};
use crate::segments::Segments;
use crate::units::BLOCK_BYTES_U64;

/// Chunks of a segment: it holds fewer blocks than this unless they are tiny. The open segment's
/// directory is in memory, 44 bytes a chunk, and one commit of compaction moves all of them.
const SEGMENT_CHUNKS_MAX: u32 = 1 << 17;

/// What one chunk takes in a file at most, with its share of records: places have 32 bits, and
/// the last group must end below.
const CHUNK_FILE_BYTES: u64 = BLOCK_BYTES_U64 + 64;

/// The open end of the log.
#[derive(Debug)]
pub(crate) struct Log {
    disk: Arc<dyn Disk>,
    segments: Arc<Segments>,
    store: StoreId,
    segment: SegmentId,
    tail: Tail,
    sequence: u64,
    /// The next number of a segment file, of either role.
    next_number: u64,
    /// Bytes that the log files grew by since start.
    written_bytes: u64,
    /// Bytes among these that were given back since: zeros behind the end.
    returned_bytes: u64,
}

/// Why an append failed.
#[derive(Debug)]
pub(crate) enum AppendError {
    /// Nothing of it will be seen; the log goes on.
    Refused(Error),
    /// What is on the medium is unknown: nothing more may be written.
    Fatal(Error),
}

/// A segment that was just sealed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sealed {
    pub(crate) segment: SegmentId,
    pub(crate) directory_offset_bytes: u64,
}

/// The log file of a segment.
pub(crate) const fn log_file(segment: SegmentId) -> FileName {
    FileName { role: FileRole::Log, number: segment }
}

impl Log {
    /// The segment that is appended to.
    pub(crate) const fn segment(&self) -> SegmentId {
        self.segment
    }

    /// The end of what is synced.
    pub(crate) const fn position(&self) -> LogPosition {
        LogPosition {
            segment: self.segment,
            offset_bytes: self.tail.end_bytes(),
            sequence: self.sequence,
        }
    }

    /// Above those of all segment files there are.
    pub(crate) const fn next_number(&self) -> SegmentId {
        SegmentId::new(self.next_number)
    }

    /// A number for a new segment file.
    pub(crate) const fn take_number(&mut self) -> SegmentId {
        let number = SegmentId::new(self.next_number);
        self.next_number += 1;
        number
    }

    /// Bytes that the log files grew by since start.
    pub(crate) const fn written_bytes(&self) -> u64 {
        self.written_bytes
    }

    /// Bytes of the open file behind its records: the appends to come take their place.
    pub(crate) const fn spare_bytes(&self) -> u64 {
        self.tail.length_bytes().saturating_sub(self.tail.end_bytes())
    }

    /// The store's id, for headers of compacted files.
    pub(crate) const fn store(&self) -> StoreId {
        self.store
    }

    /// The id of the next chunk.
    pub(crate) fn next_chunk_index(&self) -> u32 {
        self.segments.chunks(self.segment).unwrap_or(0)
    }

    /// Appends chunks and a commit record, syncs, and answers the position behind them.
    ///
    /// The chunks get the ids from [`Log::next_chunk_index`] on.
    pub(crate) fn append(
        &mut self,
        chunks: &[PreparedChunk],
        batch: &Batch,
    ) -> std::result::Result<LogPosition, AppendError> {
        let (store, segment, sequence) = (self.store, self.segment, self.sequence + 1);
        let mut index = self.next_chunk_index();
        let (end, length) = (self.tail.end_bytes(), self.tail.length_bytes());
        let groups = || chunks.chunks(GROUP_CHUNKS_MAX);
        let size = groups().map(format::group_bytes).sum::<usize>() + format::commit_bytes(batch);
        let outcome = self.tail.append(size, |bytes| {
            let start = bytes.len();
            let mut places = Vec::with_capacity(chunks.len());
            for group in groups() {
                let offset = end + u64::try_from(bytes.len() - start).unwrap_or(u64::MAX);
                places.extend(format::encode_group(bytes, offset, (store, segment, index), group)?);
                index += u32::try_from(group.len()).unwrap_or(u32::MAX);
            }
            format::encode_commit(bytes, (store, sequence), batch);
            Ok(places)
        });
        self.account(length, self.tail.length_bytes());
        let places = outcome?;
        self.sequence = sequence;
        let hashes = chunks.iter().map(|chunk| chunk.hash).collect();
        self.segments.extend(self.segment, places, hashes);
        Ok(self.position())
    }

    /// Notes that the files went from one length to another.
    fn account(&mut self, before_bytes: u64, after_bytes: u64) {
        self.returned_bytes += before_bytes.saturating_sub(after_bytes);
        let grown = after_bytes.saturating_sub(before_bytes);
        let again = grown.min(self.returned_bytes);
        self.returned_bytes -= again;
        self.written_bytes += grown - again;
    }

    /// Whether the segment should be sealed before anything more is appended.
    pub(crate) fn is_full(&self, segment_bytes: u64, chunks: u32) -> bool {
        self.tail.end_bytes() >= segment_bytes
            || self.next_chunk_index() >= SEGMENT_CHUNKS_MAX
            || !self.has_room(chunks)
    }

    /// Whether the format lets the segment take `chunks` more.
    pub(crate) fn has_room(&self, chunks: u32) -> bool {
        let bytes = u64::from(chunks) * CHUNK_FILE_BYTES;
        self.next_chunk_index().saturating_add(chunks) <= ChunkId::INDEX_LIMIT
            && self.tail.end_bytes().saturating_add(bytes) <= u64::from(u32::MAX)
    }

    /// Seals the segment with its directory and goes on in a new one.
    pub(crate) fn roll(&mut self) -> std::result::Result<Sealed, AppendError> {
        let directory = self.segments.directory(self.segment).map_err(AppendError::Refused)?;
        let bytes = format::encode_directory(self.segment, &directory);
        let (offset_bytes, length) = (self.tail.end_bytes(), self.tail.length_bytes());
        let sealed = self.tail.seal(&bytes);
        self.account(length, self.tail.length_bytes());
        sealed?;
        let length = self.tail.length_bytes();
        let next = self.take_number();
        let file =
            create_log_file(self.disk.as_ref(), self.store, next).map_err(|error| {
                match self.stay(next) {
                    Ok(()) => AppendError::Refused(error),
                    Err(_) => AppendError::Fatal(error),
                }
            });
        let (file, end) = match file {
            Ok(made) => made,
            Err(error) => {
                self.account(length, self.tail.length_bytes());
                return Err(error);
            }
        };
        let chunks = u32::try_from(directory.places.len()).unwrap_or(u32::MAX);
        self.segments.put_sealed(self.segment, log_file(self.segment), offset_bytes, chunks);
        self.segments.put_open(next, log_file(next), Directory::default());
        let sealed = Sealed { segment: self.segment, directory_offset_bytes: offset_bytes };
        self.segment = next;
        self.tail.switch(file, end);
        self.account(0, self.tail.length_bytes());
        Ok(sealed)
    }

    /// Takes back a half-made next file, then the directory.
    fn stay(&mut self, next: SegmentId) -> Result<()> {
        self.disk.remove(log_file(next))?;
        // IMPORTANT: before the cut. If a power cut brought the name back behind a file that is
        // not sealed, the log would look damaged.
        self.disk.sync_names()?;
        self.tail.cut()
    }
}

/// Makes a log file with its header, durable under its name.
fn create_log_file(
    disk: &dyn Disk,
    store: StoreId,
    segment: SegmentId,
) -> Result<(Arc<dyn DiskFile>, End)> {
    let name = log_file(segment);
    let file = disk.create(name)?;
    let header = format::encode_file_header(store, name);
    file.write_at(0, &header)?;
    file.sync()?;
    disk.sync_names()?;
    let length_bytes = u64::try_from(header.len()).unwrap_or(u64::MAX);
    Ok((file, End::of(&header, header.len(), length_bytes)))
}
