//! The log: the one place that writes while clients wait.
//!
//! ```text
//! append(chunks, batch):  [groups of chunks][commit record]  -> one write, one sync
//! ```
//! Data is never behind what points to it: they are one write. What is not whole after a crash
//! was never acknowledged, and is cut off at recovery.

use std::sync::Arc;

use crate::disk::{Disk, DiskFile, FileName, FileRole};
use crate::error::{Error, Result};
use crate::id::{ChunkId, SegmentId, StoreId};
use crate::kv::Batch;
use crate::record::LogPosition;
use crate::segment_format::{
    self as format, Directory, FILE_HEADER_BYTES, GROUP_CHUNKS_MAX, PreparedChunk,
};
use crate::segments::Segments;

/// The open end of the log.
#[derive(Debug)]
pub(crate) struct Log {
    disk: Arc<dyn Disk>,
    segments: Arc<Segments>,
    store: StoreId,
    segment: SegmentId,
    file: Arc<dyn DiskFile>,
    tail_bytes: u64,
    sequence: u64,
    /// The next number of a segment file, of either role.
    next_number: u64,
    /// Bytes that the log files grew by since start.
    written_bytes: u64,
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
            offset_bytes: self.tail_bytes,
            sequence: self.sequence,
        }
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
        let mut bytes = Vec::new();
        let mut places = Vec::with_capacity(chunks.len());
        let mut index = self.next_chunk_index();
        for group in chunks.chunks(GROUP_CHUNKS_MAX) {
            let offset = self.tail_bytes + u64::try_from(bytes.len()).unwrap_or(u64::MAX);
            let found = format::encode_group(&mut bytes, offset, (self.segment, index), group)
                .map_err(AppendError::Refused)?;
            index += u32::try_from(group.len()).unwrap_or(u32::MAX);
            places.extend(found);
        }
        format::encode_commit(&mut bytes, self.sequence + 1, batch);
        if let Err(error) = self.file.write_at(self.tail_bytes, &bytes) {
            // What was half written must not be taken for a record later.
            return match self.file.truncate(self.tail_bytes) {
                Ok(()) => Err(AppendError::Refused(error)),
                Err(_) => Err(AppendError::Fatal(error)),
            };
        }
        // After a failed sync the kernel may have dropped the dirty pages and report success
        // on a second try: what is on the medium is unknown.
        self.file.sync().map_err(AppendError::Fatal)?;
        self.tail_bytes += u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        self.written_bytes += u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        self.sequence += 1;
        let hashes = chunks.iter().map(|chunk| chunk.hash).collect();
        self.segments.extend(self.segment, places, hashes);
        Ok(self.position())
    }

    /// Whether the segment has no room for `chunks` more.
    pub(crate) fn is_full(&self, segment_bytes: u64, chunks: usize) -> bool {
        let index = usize::try_from(self.next_chunk_index()).unwrap_or(usize::MAX);
        let limit = usize::try_from(ChunkId::INDEX_LIMIT).unwrap_or(usize::MAX);
        self.tail_bytes >= segment_bytes || index.saturating_add(chunks) > limit
    }

    /// Seals the segment with its directory and goes on in a new one.
    pub(crate) fn roll(&mut self) -> std::result::Result<Sealed, AppendError> {
        let directory = self.segments.directory(self.segment).map_err(AppendError::Refused)?;
        let bytes = format::encode_directory(self.segment, &directory);
        let offset_bytes = self.tail_bytes;
        self.file.write_at(offset_bytes, &bytes).map_err(|error| {
            // The directory is not yet part of the log: cut it off and stay in this segment.
            match self.file.truncate(offset_bytes) {
                Ok(()) => AppendError::Refused(error),
                Err(_) => AppendError::Fatal(error),
            }
        })?;
        self.file.sync().map_err(AppendError::Fatal)?;
        let sealed = Sealed { segment: self.segment, directory_offset_bytes: offset_bytes };
        let next = self.take_number();
        let file = create_log_file(self.disk.as_ref(), self.store, next).map_err(|error| {
            // Stay in this segment: take back the half-made file, then the directory.
            let undone = self.disk.remove(log_file(next)).is_ok()
                && self.file.truncate(offset_bytes).is_ok()
                && self.file.sync().is_ok();
            if undone { AppendError::Refused(error) } else { AppendError::Fatal(error) }
        })?;
        let chunks = u32::try_from(directory.places.len()).unwrap_or(u32::MAX);
        self.segments.put_sealed(self.segment, log_file(self.segment), offset_bytes, chunks);
        self.segments.put_open(next, log_file(next), Directory::default());
        self.segment = next;
        self.file = file;
        self.tail_bytes = u64::try_from(FILE_HEADER_BYTES).unwrap_or(0);
        let grown = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        self.written_bytes += grown.saturating_add(self.tail_bytes);
        Ok(sealed)
    }
}

/// Makes a log file with its header, durable under its name.
fn create_log_file(
    disk: &dyn Disk,
    store: StoreId,
    segment: SegmentId,
) -> Result<Arc<dyn DiskFile>> {
    let name = log_file(segment);
    let file = disk.create(name)?;
    file.write_at(0, &format::encode_file_header(store, name))?;
    file.sync()?;
    disk.sync_names()?;
    Ok(file)
}

/// What recovery found.
#[derive(Debug)]
pub(crate) struct Recovered {
    pub(crate) log: Log,
    /// Segments whose directory was found in a file that the index may not know as sealed.
    pub(crate) sealed: Vec<Sealed>,
    /// Commits replayed into the index.
    pub(crate) replayed: u64,
}

/// Recovery of the log from the position that the index holds.
pub(crate) struct Recovery<'a> {
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) segments: Arc<Segments>,
    /// The store that the index is of, if it knows; the first file decides it else.
    pub(crate) store: Option<StoreId>,
    /// `None` for an index that was never flushed.
    pub(crate) position: Option<LogPosition>,
    /// Takes each batch that is not in the index yet, and the position behind it.
    pub(crate) apply: &'a mut dyn FnMut(Batch, LogPosition) -> Result<()>,
}

impl Recovery<'_> {
    /// Replays the log, cuts off what is not whole, and answers its open end.
    pub(crate) fn run(mut self) -> Result<Recovered> {
        let files = self.disk.list()?;
        let last_number = files.iter().map(|name| name.number.get()).max().unwrap_or(0);
        let mut logs: Vec<SegmentId> = files
            .iter()
            .filter(|name| name.role == FileRole::Log)
            .map(|name| name.number)
            .filter(|&number| self.position.is_none_or(|at| number >= at.segment))
            .collect();
        self.drop_headless(&mut logs)?;
        match (self.position, logs.first()) {
            (None, None) => return self.fresh(last_number),
            (Some(at), first) if first != Some(&at.segment) => {
                return Err(Error::corrupt(
                    log_file(at.segment).to_string(),
                    "the log file at which the index stands is missing",
                ));
            }
            (None, Some(first)) if first.get() != 1 => {
                return Err(Error::corrupt(
                    "index",
                    "it is empty, but the log does not begin at its first segment: the index was lost",
                ));
            }
            _ => {}
        }
        let mut recovered = None;
        let mut sealed = Vec::new();
        let mut scan = Scan { sequence: self.position.map_or(0, |at| at.sequence), replayed: 0 };
        for (position, &segment) in logs.iter().enumerate() {
            let is_last = position + 1 == logs.len();
            let end = self.scan_file(segment, is_last, &mut scan)?;
            if let Some(offset) = end.directory_offset_bytes {
                sealed.push(Sealed { segment, directory_offset_bytes: offset });
            }
            recovered = Some((segment, end));
        }
        let Some((segment, end)) = recovered else {
            return Err(Error::corrupt("log", "no log file was found"));
        };
        let mut log = Log {
            segments: Arc::clone(&self.segments),
            store: end.store,
            segment,
            file: self.segments.open_file(log_file(segment))?,
            tail_bytes: end.tail_bytes,
            sequence: scan.sequence,
            next_number: last_number + 1,
            written_bytes: 0,
            disk: self.disk,
        };
        if end.directory_offset_bytes.is_some() {
            // The crash came between the seal and the next file.
            let next = log.take_number();
            log.file = create_log_file(log.disk.as_ref(), log.store, next)?;
            log.segments.put_open(next, log_file(next), Directory::default());
            log.segment = next;
            log.tail_bytes = u64::try_from(FILE_HEADER_BYTES).unwrap_or(0);
        }
        Ok(Recovered { log, sealed, replayed: scan.replayed })
    }

    fn fresh(self, last_number: u64) -> Result<Recovered> {
        let store = StoreId::random();
        let segment = SegmentId::new(last_number + 1);
        let file = create_log_file(self.disk.as_ref(), store, segment)?;
        self.segments.put_open(segment, log_file(segment), Directory::default());
        let log = Log {
            disk: self.disk,
            segments: self.segments,
            store,
            segment,
            file,
            tail_bytes: u64::try_from(FILE_HEADER_BYTES).unwrap_or(0),
            sequence: 0,
            next_number: last_number + 2,
            written_bytes: 0,
        };
        Ok(Recovered { log, sealed: Vec::new(), replayed: 0 })
    }

    fn scan_file(&mut self, segment: SegmentId, is_last: bool, scan: &mut Scan) -> Result<FileEnd> {
        let name = log_file(segment);
        let file = self.segments.open_file(name)?;
        let length = usize::try_from(file.length_bytes()?).unwrap_or(usize::MAX);
        let bytes = file.read_at(0, length)?;
        let store = format::decode_file_header(name, &bytes)?;
        let expected = *self.store.get_or_insert(store);
        if store != expected {
            let reason = format!("it is of store {store}, the others are of store {expected}");
            return Err(Error::corrupt(name.to_string(), reason));
        }
        let start = match self.position {
            Some(at) if at.segment == segment => at.offset_bytes,
            _ => 0,
        };
        let replay_from = usize::try_from(start).unwrap_or(usize::MAX);
        let mut directory = Directory::default();
        // Chunks of groups whose commit has not been seen yet.
        let mut waiting = Directory::default();
        let mut offset = FILE_HEADER_BYTES;
        let mut whole = offset;
        let mut directory_offset_bytes = None;
        while let Some((found, end)) = format::find_record(&bytes, offset, offset >= replay_from)? {
            match found {
                format::Found::Group(group) => {
                    let next = directory.places.len() + waiting.places.len();
                    if group.segment != segment || usize::try_from(group.first_index) != Ok(next) {
                        break;
                    }
                    waiting.places.extend(group.places.into_iter().map(Some));
                    waiting.hashes.extend(group.hashes);
                }
                format::Found::Commit { sequence, batch } => {
                    if offset >= replay_from {
                        if sequence != scan.sequence + 1 {
                            break;
                        }
                        scan.sequence = sequence;
                        scan.replayed += 1;
                        let offset_bytes = u64::try_from(end).unwrap_or(u64::MAX);
                        (self.apply)(batch, LogPosition { segment, offset_bytes, sequence })?;
                    }
                    directory.places.append(&mut waiting.places);
                    directory.hashes.append(&mut waiting.hashes);
                    whole = end;
                }
                format::Found::Directory => {
                    directory_offset_bytes = Some(u64::try_from(offset).unwrap_or(u64::MAX));
                    whole = end;
                    break;
                }
            }
            offset = end;
        }
        let tail_bytes = u64::try_from(whole).unwrap_or(u64::MAX);
        let end = FileEnd { store, tail_bytes, directory_offset_bytes };
        if end.directory_offset_bytes.is_none() {
            if whole < replay_from {
                return Err(Error::corrupt(
                    name.to_string(),
                    format!(
                        "no whole record at {whole}, yet the index holds all up to {replay_from}"
                    ),
                ));
            }
            check_tail(name, &bytes[whole..], is_last, scan.sequence)?;
            cut(name, file.as_ref(), (whole, length))?;
        }
        self.register(segment, directory, &end);
        Ok(end)
    }

    fn register(&self, segment: SegmentId, directory: Directory, end: &FileEnd) {
        match end.directory_offset_bytes {
            Some(offset) => {
                let chunks = u32::try_from(directory.places.len()).unwrap_or(u32::MAX);
                self.segments.put_sealed(segment, log_file(segment), offset, chunks);
            }
            None => self.segments.put_open(segment, log_file(segment), directory),
        }
    }

    /// Removes a last file without a whole header: the crash came while it was made, before
    /// anything was written to it.
    fn drop_headless(&self, logs: &mut Vec<SegmentId>) -> Result<()> {
        let Some(name) = logs.last().map(|&last| log_file(last)) else {
            return Ok(());
        };
        let file = self.segments.open_file(name)?;
        let length = usize::try_from(file.length_bytes()?).unwrap_or(usize::MAX);
        if length > FILE_HEADER_BYTES {
            return Ok(());
        }
        let whole = file.read_at(0, length)?;
        if format::decode_file_header(name, &whole).is_err() {
            tracing::info!(%name, "removing a log file that was never finished");
            self.segments.close_file(name);
            self.disk.remove(name)?;
            self.disk.sync_names()?;
            logs.pop();
        }
        Ok(())
    }
}

#[derive(Debug)]
struct Scan {
    sequence: u64,
    replayed: u64,
}

#[derive(Debug)]
struct FileEnd {
    store: StoreId,
    tail_bytes: u64,
    directory_offset_bytes: Option<u64>,
}

/// Cuts off what lies behind the last whole record, if anything does.
fn cut(name: FileName, file: &dyn DiskFile, (whole, length): (usize, usize)) -> Result<()> {
    if whole == length {
        return Ok(());
    }
    tracing::info!(%name, from = whole, bytes = length - whole, "cut an unfinished append");
    file.truncate(u64::try_from(whole).unwrap_or(u64::MAX))?;
    file.sync()
}

/// What lies behind the last whole record must be an append that was never synced. Anything
/// else is damage, and cutting it off would lose acknowledged data in silence.
fn check_tail(name: FileName, tail: &[u8], is_last: bool, sequence: u64) -> Result<()> {
    if !is_last {
        return Err(Error::corrupt(name.to_string(), "it is not sealed, yet the log goes on"));
    }
    // An append is one write, begun after the one before it was synced: commit n + 1 may be
    // whole behind torn chunks, but n + 2 proves that n + 1 was acknowledged.
    match format::highest_commit(tail) {
        Some(later) if later > sequence + 1 => Err(Error::corrupt(
            name.to_string(),
            format!("commit {} is damaged, yet commit {later} follows", sequence + 1),
        )),
        _ => Ok(()),
    }
}
