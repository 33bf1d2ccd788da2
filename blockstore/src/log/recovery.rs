//! Reading the log back: what is whole is replayed, what is not is cut off, and what proves that
//! something acknowledged is damaged is refused.

use std::sync::Arc;

use super::reader::FileReader;
use super::tail::{End, Tail};
use super::{Log, Sealed, create_log_file, log_file};
use crate::disk::{Disk, DiskFile, FileName, FileRole};
use crate::error::{Error, Result};
use crate::id::{SegmentId, StoreId};
use crate::kv::Batch;
use crate::open::Opening;
use crate::record::LogPosition;
use crate::segment_format::stream::{self, ReadAt};
use crate::segment_format::{self as format, Directory, FILE_HEADER_BYTES, Found};
use crate::segments::Segments;

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
    /// While the index is made anew, chunks whose stored bytes are damaged do not end the replay
    /// where it is sure that they were acknowledged: reading them will tell. And nothing is cut.
    pub(crate) opening: Opening,
    /// Takes each batch that is not in the index yet, and the position behind it.
    pub(crate) apply: &'a mut dyn FnMut(Batch, LogPosition) -> Result<()>,
}

impl Recovery<'_> {
    /// Replays the log, cuts off what is not whole, and answers its open end.
    pub(crate) fn run(mut self) -> Result<Recovered> {
        // What is seen from here on may be in the page cache only, left by a process that was
        // killed before its sync. It must outlast a power cut before anything is built on it:
        // the names here, the bytes of each file as it is read.
        self.disk.sync_names()?;
        let mut logs: Vec<SegmentId> = self
            .disk
            .list()?
            .iter()
            .filter(|name| name.role == FileRole::Log)
            .map(|name| name.number)
            .filter(|&number| self.position.is_none_or(|at| number >= at.segment))
            .collect();
        self.drop_headless(&mut logs)?;
        // Without the file that was dropped: the log of a new store begins with number 1.
        let numbers = self.disk.list()?.into_iter().map(|name| name.number.get());
        let last_number = numbers.max().unwrap_or(0);
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
            let next = logs.get(position + 1).copied();
            let end = self.scan_file(segment, next, &mut scan)?;
            if let Some(offset) = end.directory_offset_bytes {
                sealed.push(Sealed { segment, directory_offset_bytes: offset });
            }
            recovered = Some((segment, end));
        }
        let Some((segment, end)) = recovered else {
            return Err(Error::corrupt("log", "no log file was found"));
        };
        self.holds_what_was_known(&scan)?;
        let file = self.segments.open_file(log_file(segment))?;
        let mut log = Log {
            segments: Arc::clone(&self.segments),
            store: end.store,
            segment,
            tail: Tail::new(Arc::clone(&self.disk), file, end.tail),
            sequence: scan.sequence,
            next_number: last_number + 1,
            written_bytes: 0,
            returned_bytes: 0,
            disk: self.disk,
        };
        if end.directory_offset_bytes.is_some() {
            // The crash came between the seal and the next file.
            let next = log.take_number();
            let (file, end) = create_log_file(log.disk.as_ref(), log.store, next)?;
            log.segments.put_open(next, log_file(next), Directory::default());
            log.segment = next;
            log.tail.switch(file, end);
        }
        Ok(Recovered { log, sealed, replayed: scan.replayed })
    }

    /// What the index that is to be replaced has, a new one must have, too.
    fn holds_what_was_known(&self, scan: &Scan) -> Result<()> {
        match self.opening {
            Opening::Rebuild { known: Some(known) } if known.sequence > scan.sequence => {
                let (known, last) = (known.sequence, scan.sequence);
                let reason = format!(
                    "it ends with commit {last}, but the folder `index` holds all up to commit \
                     {known}: files of the log are missing or damaged at the end. Bring them back; \
                     or move that folder away, to lose the commits behind {last}"
                );
                Err(Error::corrupt("log", reason))
            }
            _ => Ok(()),
        }
    }

    fn fresh(self, last_number: u64) -> Result<Recovered> {
        if last_number > 0 {
            let reason =
                "there is no log file, yet other files of a store are there: the log was lost";
            return Err(Error::corrupt("log", reason));
        }
        let store = StoreId::random();
        let segment = SegmentId::new(1);
        let (file, end) = create_log_file(self.disk.as_ref(), store, segment)?;
        self.segments.put_open(segment, log_file(segment), Directory::default());
        let log = Log {
            tail: Tail::new(Arc::clone(&self.disk), file, end),
            disk: self.disk,
            segments: self.segments,
            store,
            segment,
            sequence: 0,
            next_number: 2,
            written_bytes: 0,
            returned_bytes: 0,
        };
        Ok(Recovered { log, sealed: Vec::new(), replayed: 0 })
    }

    /// Replays a file, which `next` follows.
    fn scan_file(
        &mut self,
        segment: SegmentId,
        next: Option<SegmentId>,
        scan: &mut Scan,
    ) -> Result<FileEnd> {
        let name = log_file(segment);
        let (mut reader, store) = self.read(name)?;
        let replay_from = match self.position {
            Some(at) if at.segment == segment => at.offset_bytes,
            _ => 0,
        };
        let verify_from = self.verify_from(segment, next, (&mut reader, store), replay_from)?;
        let from = (replay_from, verify_from);
        let mut read = self.read_records(segment, (&mut reader, store), from, scan)?;
        let whole = read.whole;
        if read.directory_offset_bytes.is_none() && whole < replay_from {
            let reason =
                format!("no whole record at {whole}, yet the index holds all up to {replay_from}");
            return Err(Error::corrupt(name.to_string(), reason));
        }
        let mut length = reader.length_bytes();
        // Before the file is cut: the reader reads ahead, up to the length that it knows.
        let partial = reader.sector_before(whole)?;
        if let (None, Some(next)) = (read.directory_offset_bytes, next) {
            self.expect_seal((segment, next), (&mut reader, store), &read, scan)?;
            tracing::warn!(%name, offset = whole, "its directory is damaged: repair the store");
            read.directory_offset_bytes = Some(whole);
        }
        if read.directory_offset_bytes.is_none() {
            check_tail(name, (&mut reader, whole), (store, scan.sequence))?;
            // The padding of the last record, and zeros written ahead, stay for the appends to come.
            if !stream::is_zeros(&mut reader, whole)? {
                if self.opening == Opening::Serve {
                    cut(name, reader.file(), (whole, length))?;
                    length = whole;
                } else {
                    tracing::warn!(
                        %name, from = whole, commit = scan.sequence,
                        "the log ends with this commit: what lies behind it looks like an \
                         unfinished append, and the next start cuts it off"
                    );
                }
            }
        }
        let tail = End { end_bytes: whole, partial, length_bytes: length };
        let end = FileEnd { store, tail, directory_offset_bytes: read.directory_offset_bytes };
        self.register(segment, read.directory, &end);
        Ok(end)
    }

    /// From where on a group is whole only if all its chunks' bytes are.
    fn verify_from(
        &self,
        segment: SegmentId,
        next: Option<SegmentId>,
        (reader, store): (&mut FileReader, StoreId),
        replay_from: u64,
    ) -> Result<u64> {
        let known = match (self.opening, next) {
            (Opening::Serve, _) => return Ok(replay_from),
            (Opening::Rebuild { .. }, Some(_)) => return Ok(u64::MAX),
            (Opening::Rebuild { known }, None) => known,
        };
        let acknowledged = match known {
            Some(at) if at.segment == segment => at.offset_bytes,
            _ => 0,
        };
        Ok(stream::last_append(reader, store)?.max(acknowledged).max(replay_from))
    }

    /// A file without a whole directory that another one follows must have been sealed where its
    /// whole records end: the header of its directory tells, or the first commit of the next file.
    fn expect_seal(
        &self,
        (segment, next): (SegmentId, SegmentId),
        (reader, store): (&mut FileReader, StoreId),
        read: &Records,
        scan: &Scan,
    ) -> Result<()> {
        let known = read.directory.places.len();
        if let Some((of, chunks)) = stream::directory_at(reader, read.whole)?
            && of == segment
            && usize::try_from(chunks) == Ok(known)
        {
            return Ok(());
        }
        let mut next = FileReader::new(self.segments.open_file(log_file(next))?)?;
        if stream::first_commit(&mut next, store)? == Some(scan.sequence + 1) {
            return Ok(());
        }
        let name = log_file(segment).to_string();
        Err(Error::corrupt(name, "it is not sealed, yet the log goes on"))
    }

    /// Goes through the records of a file, and replays the commits from `replay_from` on.
    fn read_records(
        &mut self,
        segment: SegmentId,
        (reader, store): (&mut FileReader, StoreId),
        (replay_from, verify_from): (u64, u64),
        scan: &mut Scan,
    ) -> Result<Records> {
        let mut read = Records {
            directory: Directory::default(),
            whole: count(FILE_HEADER_BYTES),
            directory_offset_bytes: None,
        };
        // Chunks of groups whose commit has not been seen yet.
        let mut waiting = Directory::default();
        let mut offset = read.whole;
        loop {
            let verify = offset >= verify_from;
            let Some((found, end)) = stream::find(reader, store, offset, verify)? else {
                break;
            };
            match found {
                Found::Group(group) => {
                    let next = read.directory.places.len() + waiting.places.len();
                    if group.segment != segment || usize::try_from(group.first_index) != Ok(next) {
                        break;
                    }
                    waiting.places.extend(group.places.into_iter().map(Some));
                    waiting.hashes.extend(group.hashes);
                }
                Found::Commit { sequence, batch } => {
                    if offset >= replay_from {
                        if sequence != scan.sequence + 1 {
                            missing_before(log_file(segment), &read, (scan.sequence, sequence))?;
                            break;
                        }
                        scan.sequence = sequence;
                        scan.replayed += 1;
                        (self.apply)(batch, LogPosition { segment, offset_bytes: end, sequence })?;
                    }
                    read.directory.places.append(&mut waiting.places);
                    read.directory.hashes.append(&mut waiting.hashes);
                    read.whole = end;
                }
                Found::Directory { segment: of, chunks } => {
                    // It does not tell its store: only one that fits the groups is this file's.
                    let known = read.directory.places.len();
                    let fits = of == segment && usize::try_from(chunks) == Ok(known);
                    if !fits || !waiting.places.is_empty() {
                        break;
                    }
                    read.directory_offset_bytes = Some(offset);
                    read.whole = end;
                    break;
                }
            }
            offset = end;
        }
        Ok(read)
    }

    /// A file whose bytes are durable from now on, and of the same store as the others.
    fn read(&mut self, name: FileName) -> Result<(FileReader, StoreId)> {
        let file = self.segments.open_file(name)?;
        file.sync()?;
        let mut reader = FileReader::new(file)?;
        let header_bytes = reader.length_bytes().min(count(FILE_HEADER_BYTES));
        let header = reader.bytes(0, usize::try_from(header_bytes).unwrap_or(usize::MAX))?;
        let store = format::decode_file_header(name, header.unwrap_or_default())?;
        let expected = *self.store.get_or_insert(store);
        if store != expected {
            let reason = format!("it is of store {store}, the others are of store {expected}");
            return Err(Error::corrupt(name.to_string(), reason));
        }
        Ok((reader, store))
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
        // One that the index has commits of was whole once.
        let is_known = |last: &SegmentId| self.position.is_some_and(|at| at.segment == *last);
        let Some(name) = logs.last().filter(|last| !is_known(last)).map(|&last| log_file(last))
        else {
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

/// What the whole records of a file tell.
struct Records {
    directory: Directory,
    /// Where the last of them ends.
    whole: u64,
    directory_offset_bytes: Option<u64>,
}

#[derive(Debug)]
struct FileEnd {
    store: StoreId,
    tail: End,
    directory_offset_bytes: Option<u64>,
}

fn count(bytes: usize) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

/// Cuts off an append that was never synced.
fn cut(name: FileName, file: &dyn DiskFile, (whole, length): (u64, u64)) -> Result<()> {
    tracing::info!(%name, from = whole, bytes = length - whole, "cut an unfinished append");
    file.truncate(whole)?;
    file.sync()
}

/// A file that begins with a later commit than the one that is due: the log files between are
/// gone. Of a later place in the file, what follows tells.
fn missing_before(name: FileName, read: &Records, (last, found): (u64, u64)) -> Result<()> {
    if found <= last || read.whole > count(FILE_HEADER_BYTES) {
        return Ok(());
    }
    let reason = format!(
        "it begins with commit {found}, and commit {last} is the last before it: the log files \
         with what lies between are missing"
    );
    Err(Error::corrupt(name.to_string(), reason))
}

/// What lies behind the last whole record must be zeros, or an append that was never synced.
/// Anything else is damage, and cutting it off would lose acknowledged data in silence.
fn check_tail(
    name: FileName,
    (reader, whole): (&mut FileReader, u64),
    (store, sequence): (StoreId, u64),
) -> Result<()> {
    // An append is one write, begun after the one before it was synced: commit n + 1 may be
    // whole behind torn chunks, but n + 2 proves that n + 1 was acknowledged.
    match stream::commit_behind(reader, whole, store, sequence + 1)? {
        Some(later) => Err(Error::corrupt(
            name.to_string(),
            format!("commit {} is damaged, yet commit {later} follows", sequence + 1),
        )),
        None => Ok(()),
    }
}
