//! Compaction: the live chunks of segments that are mostly dead move into a new file, and the
//! old files go. Chunk ids stay; only the places of the logical segments change.
//!
//! ```text
//! log/5.seg  [a . . b . .]                                 segment 5 -> compacted/9.seg
//! log/7.seg  [. . c . . .]   -->  compacted/9.seg [a b c]  segment 7 -> compacted/9.seg
//! ```
//! Dropping is decided twice: when the live chunks are copied, and in the transaction that
//! moves the segment. A chunk that a writer found by its hash in between stops the move.
//! A log file is only removed when the index is durable behind it: recovery needs it no more; and
//! when a copy of the index is behind it too (`index_copy.rs`).
//! A file that cannot be moved, as over a live chunk that is damaged, is set aside (`aside.rs`), and
//! the others go on.

use std::collections::{BTreeMap, HashSet};
use std::ops::ControlFlow;
use std::sync::atomic::Ordering;
use std::time::Instant;

use bytes::Bytes;

use crate::commit::{Weight, commit};
use crate::core::Core;
use crate::disk::{FileName, FileRole};
use crate::error::{Error, Result};
use crate::id::{ChunkId, ContentHash, SegmentId, StoreId};
use crate::kv::Family;
use crate::record::{CountPage, SegmentRecord, decode_chunk, key};
use crate::reserve;
use crate::segment_format::{self as format, Directory, GROUP_CHUNKS_MAX, Place, PreparedChunk};
use crate::transaction::Transaction;

/// Makes the index durable and notes how far; log files before that may go.
pub(crate) fn checkpoint(core: &Core) -> Result<()> {
    let position = *core.committer.position.lock();
    reserve::space_for_index(core);
    reserve::with_reserve(core, || core.kv.flush())
        .map_err(|error| reserve::full_or(core, error))?;
    core.look_at_index();
    let mut known = core.checkpoint.lock();
    *known = (*known).max(position);
    Ok(())
}

/// The segments of one file.
#[derive(Debug, Default)]
struct Victim {
    segments: BTreeMap<SegmentId, SegmentRecord>,
    /// Chunks that it gave ids to: the entries of its directories.
    entries: u64,
    stored: u64,
    live: u64,
    stored_bytes: u64,
}

impl Victim {
    fn live_bytes(&self) -> u64 {
        live_bytes(self.stored_bytes, self.live, self.stored)
    }
}

/// Bytes of the live chunks of a segment, as if all its chunks were of one size.
pub(crate) fn live_bytes(stored_bytes: u64, live: u64, stored: u64) -> u64 {
    if stored == 0 {
        return 0;
    }
    let bytes = u128::from(stored_bytes) * u128::from(live) / u128::from(stored);
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

/// Files whose live share is under the threshold, the emptiest first.
fn victims(core: &Core) -> Vec<(FileName, Victim)> {
    let segments = core.committer.leader.lock().segments.clone();
    let durable = core.checkpoint.lock().segment;
    let mut files: BTreeMap<FileName, Victim> = BTreeMap::new();
    for (id, record) in segments {
        if record.directory_offset_bytes.is_none()
            || (record.file.role == FileRole::Log && record.file.number >= durable)
        {
            continue;
        }
        let victim = files.entry(record.file).or_default();
        victim.entries += u64::from(record.chunks);
        victim.stored += u64::from(record.stored_chunks);
        victim.live += u64::from(record.live_chunks);
        victim.stored_bytes += record.stored_bytes;
        victim.segments.insert(id, record);
    }
    let threshold = core.options.compaction_live_ratio;
    let mut chosen: Vec<_> = files
        .into_iter()
        .filter(|(_, victim)| {
            #[expect(clippy::cast_precision_loss, reason = "a share; 52 bits are plenty")]
            let live_share = victim.live as f64 / victim.stored.max(1) as f64;
            victim.live == 0 || live_share < threshold
        })
        .collect();
    chosen.sort_by_key(|(_, victim)| victim.live_bytes());
    chosen
}

/// Chunks of the files that one compaction takes: what is dropped of them goes into one commit,
/// and writers wait for it.
const COMPACTION_CHUNKS_MAX: u64 = 1 << 15;

/// Entries in the directories of the segments that one compaction takes: those of dropped chunks stay,
/// so that files in which little is stored may have many. Each takes 90 bytes of memory meanwhile, 24 MiB
/// in all.
const COMPACTION_ENTRIES_MAX: u64 = 1 << 18;

/// What one compaction did.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Compacted {
    pub(crate) files_removed: u64,
    /// Files that stay for a rebuild of the index: see `index_copy.rs`.
    pub(crate) files_retired: u64,
    /// Also by a move that was refused in the end.
    pub(crate) bytes_written: u64,
    pub(crate) bytes_freed: u64,
}

/// Files that could not be moved, and are set aside.
#[derive(Debug)]
pub(crate) struct Refused {
    /// If there are several, any of them may be at fault: each is tried alone next.
    pub(crate) files: Vec<FileName>,
    pub(crate) error: Error,
    /// Bytes that were read, about: what the next try has to wait for.
    pub(crate) cost_bytes: u64,
}

/// Which of the files that were to be moved are at fault.
enum Fault {
    /// None: the disk does not take the new file, or the log the move.
    Elsewhere,
    File(FileName),
    /// Any of them.
    Files,
}

/// Why files were not moved.
struct Failure {
    fault: Fault,
    error: Error,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self { fault: Fault::Elsewhere, error }
    }
}

/// As many files, of those that `may_move` takes, as fill one new one. One that failed before is
/// taken alone, so that it fails alone.
fn choose(core: &Core, may_move: impl Fn(FileName) -> bool) -> Vec<(FileName, Victim)> {
    let victims = victims(core);
    let names: HashSet<FileName> = victims.iter().map(|(name, _)| *name).collect();
    core.aside.lock().files.keep_only(|name| names.contains(name));
    let mut chosen: Vec<(FileName, Victim)> = Vec::new();
    let (mut live_bytes, mut chunks, mut entries) = (0, 0, 0);
    for (name, victim) in victims.into_iter().filter(|(name, _)| may_move(*name)) {
        let is_alone = core.aside.lock().files.has_failed(name);
        if is_alone && !chosen.is_empty() {
            continue;
        }
        live_bytes += victim.live_bytes();
        chunks += victim.stored;
        entries += victim.entries;
        let full = live_bytes > core.options.segment_bytes
            || chunks > COMPACTION_CHUNKS_MAX
            || entries > COMPACTION_ENTRIES_MAX;
        if full && !chosen.is_empty() {
            break;
        }
        chosen.push((name, victim));
        if is_alone {
            break;
        }
    }
    chosen
}

/// Compacts as many files as fill one new one, of those that `may_move` takes. `None`: nothing is
/// worth it. Files that fail while the store goes on are set aside.
pub(crate) fn compact_once(
    core: &Core,
    may_move: impl Fn(FileName) -> bool,
) -> Result<Option<std::result::Result<Compacted, Refused>>> {
    let chosen = choose(core, may_move);
    if chosen.is_empty() {
        return Ok(None);
    }
    let cost_bytes = chosen.iter().map(|(_, victim)| victim.live_bytes()).sum();
    let names: Vec<FileName> = chosen.iter().map(|(name, _)| *name).collect();
    let segments: BTreeMap<SegmentId, SegmentRecord> =
        chosen.into_iter().flat_map(|(_, victim)| victim.segments).collect();
    let outcome = move_away(core, &names, &segments, |core, id| core.segments.directory(id));
    let Failure { fault, error } = match outcome {
        Ok(done) => {
            let mut aside = core.aside.lock();
            names.iter().for_each(|name| aside.files.note_success(*name));
            return Ok(Some(Ok(done)));
        }
        Err(failure) => failure,
    };
    let files = match fault {
        Fault::File(file) => vec![file],
        Fault::Files => names,
        Fault::Elsewhere => return Err(error),
    };
    core.tally.reclaim_failures.fetch_add(1, Ordering::Relaxed);
    let mut aside = core.aside.lock();
    for name in &files {
        let wait = aside.files.note_failure(*name, Instant::now());
        tracing::warn!(%name, %error, ?wait, "a file cannot be compacted; it is set aside");
    }
    Ok(Some(Err(Refused { files, error, cost_bytes })))
}

/// Reads the directory of a segment.
type ReadDirectory = fn(&Core, SegmentId) -> Result<Directory>;

/// Writes what lives of a damaged file anew, and removes the file; answers whether it did. What
/// lives must be readable: a repair has seen to that.
pub(crate) fn renew(core: &Core, name: FileName) -> Result<bool> {
    if name.role == FileRole::Log {
        crate::commit::seal(core, name.number)?;
        checkpoint(core)?;
    }
    let _gc = core.gc.lock();
    let of_file = |(_, record): &(_, SegmentRecord)| record.file == name;
    let segments: BTreeMap<SegmentId, SegmentRecord> = {
        let leader = core.committer.leader.lock();
        leader.segments.iter().map(|(id, record)| (*id, *record)).filter(of_file).collect()
    };
    let what_is_left: ReadDirectory =
        |core, id| Ok(core.segments.directory_that_is_left(core.store, id));
    let done =
        move_away(core, &[name], &segments, what_is_left).map_err(|failure| failure.error)?;
    Ok(done.files_removed + done.files_retired > 0)
}

/// Moves these segments, all that the files hold, and removes the files.
fn move_away(
    core: &Core,
    names: &[FileName],
    segments: &BTreeMap<SegmentId, SegmentRecord>,
    read: ReadDirectory,
) -> std::result::Result<Compacted, Failure> {
    let (moved, bytes_written) = move_segments(core, segments, read)?;
    let mut done = Compacted { bytes_written, ..Compacted::default() };
    if !moved {
        return Ok(done);
    }
    for &name in names {
        // One that a repair takes away may be missing.
        let file = core.segments.open_file(name);
        let length = file.and_then(|file| file.length_bytes()).unwrap_or(0);
        let until = core.checkpoint.lock().segment;
        if core.copies.retire(name, length, until) {
            core.segments.close_file(name);
            done.files_retired += 1;
            continue;
        }
        core.disk.remove(name)?;
        // Behind it: a reader in between would open the file that is going.
        core.segments.close_file(name);
        done.files_removed += 1;
        done.bytes_freed += length;
    }
    core.disk.sync_names()?;
    core.lower_file_bytes(done.bytes_freed);
    core.tally.compacted_bytes.fetch_add(bytes_written, Ordering::Relaxed);
    Ok(done)
}

/// A segment on its way: which chunks are dropped, and where the others will lie.
struct Moving {
    segment: SegmentId,
    record: SegmentRecord,
    dropped: Vec<(ChunkId, ContentHash)>,
    directory: Directory,
}

/// Copies the live chunks of the segments into a new file and moves the segments there.
/// Answers whether it did: not when a dropped chunk came back to life meanwhile; and the bytes
/// that it wrote all the same.
fn move_segments(
    core: &Core,
    segments: &BTreeMap<SegmentId, SegmentRecord>,
    read: ReadDirectory,
) -> std::result::Result<(bool, u64), Failure> {
    let (number, store) = {
        let mut leader = core.committer.leader.lock();
        (leader.log.take_number(), leader.log.store())
    };
    let name = FileName { role: FileRole::Compacted, number };
    let mut bytes = format::encode_file_header(store, name);
    let mut moving = Vec::new();
    for (&segment, &record) in segments {
        let copied = read(core, segment)
            .and_then(|old| copy_live(core, (segment, record), &old, &mut bytes))
            .map_err(|error| Failure { fault: Fault::File(record.file), error })?;
        moving.push(copied);
    }
    let any_live = moving.iter().any(|m| m.directory.places.iter().any(Option::is_some));
    for m in &mut moving {
        let places = || m.directory.places.iter().flatten();
        m.record.stored_bytes = places().map(|place| u64::from(place.stored_bytes)).sum();
        m.record.stored_chunks = u32::try_from(places().count()).unwrap_or(u32::MAX);
        m.record.file = name;
        m.record.directory_offset_bytes = Some(u64::try_from(bytes.len()).unwrap_or(u64::MAX));
        if m.record.stored_chunks > 0 {
            bytes.extend_from_slice(&format::encode_directory(m.segment, &m.directory));
        }
    }
    let written = if any_live { u64::try_from(bytes.len()).unwrap_or(u64::MAX) } else { 0 };
    if any_live {
        reserve::with_reserve(core, || {
            write_file(core, name, &bytes).inspect_err(|_| {
                // Nothing names it yet; what cannot be removed goes at the next start.
                core.segments.close_file(name);
                let _ = core.disk.remove(name);
            })
        })
        .map_err(|error| reserve::full_or(core, error))?;
        core.file_bytes.fetch_add(written, Ordering::Relaxed);
    }
    let weight = Weight { bytes: 0, alone: true };
    let moved = commit(core, weight, move |txn| switch(txn, moving));
    if matches!(moved, Ok(true)) {
        return Ok((true, written));
    }
    // After a failed sync the move may be in the log all the same, and a restart replays it: the
    // file stays, and is removed then if nothing names it.
    if any_live && !core.committer.is_poisoned() {
        core.disk.remove(name)?;
        core.lower_file_bytes(written);
    }
    match moved {
        Ok(moved) => Ok((moved, written)),
        // What the index has of one of them.
        Err(error @ (Error::Corrupt { .. } | Error::Index { .. }))
            if !core.committer.is_poisoned() =>
        {
            Err(Failure { fault: Fault::Files, error })
        }
        Err(error) => Err(error.into()),
    }
}

/// Writes a whole file, durable with its name.
fn write_file(core: &Core, name: FileName, bytes: &[u8]) -> Result<()> {
    let file = core.disk.create(name)?;
    file.write_at(0, bytes)?;
    file.sync()?;
    core.disk.sync_names()
}

/// Appends the live chunks of a segment to the new file's bytes.
fn copy_live(
    core: &Core,
    (segment, record): (SegmentId, SegmentRecord),
    old: &Directory,
    bytes: &mut Vec<u8>,
) -> Result<Moving> {
    let dead = dead_chunks(core, segment)?;
    let mut moving =
        Moving { segment, record, dropped: Vec::new(), directory: Directory::default() };
    moving.directory.hashes.clone_from(&old.hashes);
    moving.directory.places = vec![None; old.places.len()];
    let mut span = Span::default();
    for (position, (place, hash)) in old.places.iter().zip(&old.hashes).enumerate() {
        let index = u32::try_from(position).unwrap_or(u32::MAX);
        let chunk = ChunkId::new(segment, index);
        match (place, dead.contains(&index)) {
            (Some(place), false) => {
                if !span.takes(place) {
                    span.copy(core, segment, (bytes, &mut moving.directory))?;
                }
                span.0.push((index, *place, *hash));
            }
            (None, false) => {
                core.segments.note_damaged(chunk);
                return Err(Error::corrupt(
                    format!("chunk {chunk}"),
                    "I2: it lives, yet it is not stored",
                ));
            }
            (Some(_), true) => moving.dropped.push((chunk, *hash)),
            (None, true) => {}
        }
    }
    span.copy(core, segment, (bytes, &mut moving.directory))?;
    Ok(moving)
}

/// Bytes that one read of the old file takes, dead chunks between live ones included.
const SPAN_BYTES_MAX: u32 = 1 << 20;

/// Live chunks that lie near each other.
#[derive(Default)]
struct Span(Vec<(u32, Place, ContentHash)>);

impl Span {
    /// Whether this chunk, which lies behind, is near enough.
    fn takes(&self, place: &Place) -> bool {
        self.0.len() < GROUP_CHUNKS_MAX
            && self.0.first().is_none_or(|(_, first, _)| {
                let end = place.offset_bytes.saturating_add(place.stored_bytes.into());
                end.saturating_sub(first.offset_bytes) <= SPAN_BYTES_MAX
            })
    }

    /// The chunks' stored bytes by one read; if that fails, one by one, to know which chunk it is.
    fn stored(&self, core: &Core, segment: SegmentId) -> Result<Vec<Bytes>> {
        let places: Vec<Place> = self.0.iter().map(|(_, place, _)| *place).collect();
        core.segments.stored_span(segment, &places).or_else(|_| {
            let single = |(index, place, _): &(u32, Place, ContentHash)| {
                let chunk = ChunkId::new(segment, *index);
                let stored = core.segments.stored(chunk, place);
                stored.inspect_err(|_| _ = core.segments.note_damaged(chunk))
            };
            self.0.iter().map(single).collect()
        })
    }

    /// Appends the chunks to the new file's bytes, those in sequence as one group.
    fn copy(
        &mut self,
        core: &Core,
        segment: SegmentId,
        (bytes, directory): (&mut Vec<u8>, &mut Directory),
    ) -> Result<()> {
        let stored = self.stored(core, segment)?;
        let mut group: Vec<PreparedChunk> = Vec::new();
        let mut next = 0;
        for ((index, place, hash), stored) in self.0.drain(..).zip(stored) {
            if index != next {
                write_group((core.store, segment), next, &mut group, (bytes, directory))?;
            }
            let chunk = ChunkId::new(segment, index);
            let loaded = load(chunk, &place, hash, stored);
            group.push(loaded.inspect_err(|_| _ = core.segments.note_damaged(chunk))?);
            core.segments.forget_damaged(chunk);
            next = index + 1;
        }
        write_group((core.store, segment), next, &mut group, (bytes, directory))
    }
}

/// A chunk as stored, verified against its hash: compaction must not launder damage.
fn load(chunk: ChunkId, place: &Place, hash: ContentHash, stored: Bytes) -> Result<PreparedChunk> {
    let corrupt = |reason: String| Error::corrupt(format!("chunk {chunk}"), reason);
    let block = format::restore_block(place, &stored).map_err(|error| match error {
        Error::Corrupt { reason, .. } => corrupt(reason),
        other => other,
    })?;
    let got = ContentHash::of(&block);
    if got != hash {
        return Err(corrupt(format!("I2: hash {got}, expected {hash}")));
    }
    Ok(PreparedChunk { hash, codec: place.codec, crc: place.crc, stored })
}

/// Appends chunks in sequence, the last of which comes before the index `behind`.
fn write_group(
    (store, segment): (StoreId, SegmentId),
    behind: u32,
    group: &mut Vec<PreparedChunk>,
    (bytes, directory): (&mut Vec<u8>, &mut Directory),
) -> Result<()> {
    if group.is_empty() {
        return Ok(());
    }
    let offset = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
    let first = behind - u32::try_from(group.len()).unwrap_or(0);
    let start = usize::try_from(first).unwrap_or(usize::MAX);
    let places = format::encode_group(bytes, offset, (store, segment, first), group)?;
    for (slot, place) in directory.places.iter_mut().skip(start).zip(places) {
        *slot = Some(place);
    }
    group.clear();
    Ok(())
}

/// Indexes of the chunks of a segment that nothing names.
fn dead_chunks(core: &Core, segment: SegmentId) -> Result<HashSet<u32>> {
    let from = key::refs(ChunkId::new(segment, 0));
    let to = key::refs(ChunkId::new(SegmentId::new(segment.get() + 1), 0));
    let mut dead = HashSet::new();
    core.kv.scan(Family::Refs, &from, &to, &mut |key, value| {
        let first = decode_chunk(key)?;
        for (count, step) in CountPage::decode(value)?.counts().iter().zip(0..) {
            if *count == 0 {
                dead.insert(first.plus(step).index());
            }
        }
        Ok(ControlFlow::Continue(()))
    })?;
    Ok(dead)
}

/// Moves the segments, unless a dropped chunk lives again; answers whether it did.
fn switch(txn: &mut Transaction<'_>, moving: Vec<Moving>) -> Result<bool> {
    txn.frees();
    for m in &moving {
        for (chunk, _) in &m.dropped {
            if txn.count(*chunk)? != 0 {
                return Ok(false);
            }
        }
    }
    for m in moving {
        for (chunk, hash) in &m.dropped {
            txn.drop_chunk(*chunk, *hash);
        }
        let gone = m.directory.places.iter().all(Option::is_none);
        if gone {
            drop_counts(txn, m.segment)?;
            txn.delete(Family::Segment, key::segment(m.segment));
            continue;
        }
        let current = txn.get(Family::Segment, &key::segment(m.segment))?;
        let mut record = match current {
            Some(bytes) => SegmentRecord::decode(&bytes)?,
            None => m.record,
        };
        record.file = m.record.file;
        record.directory_offset_bytes = m.record.directory_offset_bytes;
        record.stored_bytes = m.record.stored_bytes;
        record.stored_chunks = m.record.stored_chunks;
        txn.put(Family::Segment, key::segment(m.segment), record.encode());
    }
    Ok(true)
}

/// A segment that goes takes all its zero counts along.
fn drop_counts(txn: &mut Transaction<'_>, segment: SegmentId) -> Result<()> {
    let from = key::refs(ChunkId::new(segment, 0));
    let to = key::refs(ChunkId::new(SegmentId::new(segment.get() + 1), 0));
    for (key, _) in txn.range(Family::Refs, (&from, &to), usize::MAX)? {
        txn.delete(Family::Refs, key);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
