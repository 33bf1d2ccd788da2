//! Finding records in a file that is not read whole: with one record of it in memory, or one
//! piece where it is only searched.
//!
//! What claims to be a long record is believed only once its checksum says so, piece by piece: a
//! torn append may be full of what looks like the begin of one.

use std::ops::RangeInclusive;

use super::{
    CHUNK_ENTRY_BYTES, COMMIT_HEADER_BYTES, COMMIT_MAGIC, CRC_BYTES, DIRECTORY_HEADER_BYTES,
    DIRECTORY_MAGIC, FILE_HEADER_BYTES, Found, GROUP_CHUNKS_MAX, GROUP_HEADER_BYTES, GROUP_MAGIC,
    HASH_PAGE_BYTES, PAGE_ENTRIES, PLACE_PAGE_BYTES, page_body, record_at, record_crc,
};
use crate::codec::Decoder;
use crate::error::Result;
use crate::id::{SegmentId, StoreId};
use crate::units::BLOCK_BYTES;

/// Bytes that are read or searched at a time.
pub(crate) const PIECE_BYTES: usize = 1 << 20;

/// A record up to this length is read without being believed: two groups of the largest size.
const UNPROVEN_BYTES_MAX: u64 = 32 << 20;

/// Bytes that are checked in search of a commit though they are of none: a fraction of a second.
const COMMIT_SEARCH_BYTES_MAX: u64 = 1 << 30;

/// Bytes that are read on demand.
pub(crate) trait ReadAt {
    /// How many there are.
    fn length_bytes(&self) -> u64;

    /// `count` bytes at `offset`; `None` where they end before.
    fn bytes(&mut self, offset: u64, count: usize) -> Result<Option<&[u8]>>;
}

impl ReadAt for &[u8] {
    fn length_bytes(&self) -> u64 {
        length(self.len())
    }

    fn bytes(&mut self, offset: u64, count: usize) -> Result<Option<&[u8]>> {
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        Ok(self.get(start..start.saturating_add(count)))
    }
}

fn length(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

/// What the header of a record says.
enum Claim {
    /// A group or commit of this many bytes.
    Record(u64),
    /// A directory, whose header is whole.
    Directory { segment: SegmentId, chunks: u32 },
}

/// The record at `offset` and the offset behind it; `None` when there is no whole one.
pub(crate) fn find(
    source: &mut impl ReadAt,
    store: StoreId,
    offset: u64,
    verify_payload: bool,
) -> Result<Option<(Found, u64)>> {
    let left = source.length_bytes().saturating_sub(offset);
    let head_bytes = usize::try_from(left).unwrap_or(usize::MAX).min(GROUP_HEADER_BYTES);
    let Some(claim) = source.bytes(offset, head_bytes)?.and_then(claim) else {
        return Ok(None);
    };
    let bytes = match claim {
        Claim::Directory { segment, chunks } => {
            let end = directory_end(source, offset, chunks)?;
            return Ok(end.map(|end| (Found::Directory { segment, chunks }, end)));
        }
        Claim::Record(bytes) => bytes,
    };
    if bytes > left || (bytes > UNPROVEN_BYTES_MAX && commit_at(source, store, offset)?.is_none()) {
        return Ok(None);
    }
    let Some(record) = source.bytes(offset, usize::try_from(bytes).unwrap_or(usize::MAX))? else {
        return Ok(None);
    };
    let start = usize::try_from(offset).unwrap_or(usize::MAX);
    let found = record_at(record, store, start, verify_payload)?;
    Ok(found.map(|(found, end)| (found, length(end))))
}

/// What a record that begins so claims to be.
fn claim(head: &[u8]) -> Option<Claim> {
    let mut d = Decoder::new("record header", head);
    match d.u32().ok()? {
        GROUP_MAGIC => {
            let (chunks, _segment, _first) = (d.u32().ok()?, d.u64().ok()?, d.u32().ok()?);
            let (chunks, payload) = (usize::try_from(chunks).ok()?, d.u32().ok()?);
            // Each chunk is stored in a block at most.
            if chunks > GROUP_CHUNKS_MAX || usize::try_from(payload).ok()? > chunks * BLOCK_BYTES {
                return None;
            }
            let entries = length(GROUP_HEADER_BYTES + chunks * CHUNK_ENTRY_BYTES);
            Some(Claim::Record(entries + u64::from(payload)))
        }
        COMMIT_MAGIC => Some(Claim::Record(length(COMMIT_HEADER_BYTES) + u64::from(d.u32().ok()?))),
        DIRECTORY_MAGIC => {
            let (chunks, segment, _pad) = (d.u32().ok()?, d.u64().ok()?, d.u32().ok()?);
            let covered = head.get(..DIRECTORY_HEADER_BYTES - CRC_BYTES)?;
            (d.u32().ok()? == crc32c::crc32c(covered))
                .then_some(Claim::Directory { segment: SegmentId::new(segment), chunks })
        }
        _ => None,
    }
}

/// Where the directory ends, if all its pages are whole.
fn directory_end(source: &mut impl ReadAt, offset: u64, chunks: u32) -> Result<Option<u64>> {
    let pages = usize::try_from(chunks).unwrap_or(usize::MAX).div_ceil(PAGE_ENTRIES);
    let mut end = offset + length(DIRECTORY_HEADER_BYTES);
    for page_bytes in [PLACE_PAGE_BYTES, HASH_PAGE_BYTES] {
        for _ in 0..pages {
            match source.bytes(end, page_bytes)? {
                Some(page) if page_body("segment directory", page).is_ok() => {}
                _ => return Ok(None),
            }
            end += length(page_bytes);
        }
    }
    Ok(Some(end))
}

/// Where the group at `offset` ends, if its header and its entries are whole: its stored bytes may
/// be damaged, or reach behind the end of the file.
fn group_end(source: &mut impl ReadAt, store: StoreId, offset: u64) -> Result<Option<u64>> {
    let Some(header) = source.bytes(offset, GROUP_HEADER_BYTES)? else { return Ok(None) };
    let mut d = Decoder::new("group header", header);
    let (magic, chunks, _segment, _first) = (d.u32()?, d.u32()?, d.u64()?, d.u32()?);
    let (payload_bytes, _pad, crc) = (d.u32()?, d.u32()?, d.u32()?);
    let chunks = usize::try_from(chunks).unwrap_or(usize::MAX);
    if magic != GROUP_MAGIC || chunks > GROUP_CHUNKS_MAX {
        return Ok(None);
    }
    let head_bytes = GROUP_HEADER_BYTES + chunks * CHUNK_ENTRY_BYTES;
    let Some(head) = source.bytes(offset, head_bytes)? else { return Ok(None) };
    let (header, entries) = head.split_at(GROUP_HEADER_BYTES);
    let is_whole = crc == record_crc(store, &header[..GROUP_HEADER_BYTES - CRC_BYTES], entries);
    Ok(is_whole.then(|| offset + length(head_bytes) + u64::from(payload_bytes)))
}

/// The sequence number of the commit that lies here, and where it ends, if its checksum matches.
fn commit_at(source: &mut impl ReadAt, store: StoreId, offset: u64) -> Result<Option<(u64, u64)>> {
    let Some(head) = source.bytes(offset, COMMIT_HEADER_BYTES)? else { return Ok(None) };
    let (covered, stored) = head.split_at(COMMIT_HEADER_BYTES - CRC_BYTES);
    let (mut d, stored) = (Decoder::new("commit header", covered), stored.to_vec());
    let (magic, body_bytes, sequence) = (d.u32()?, d.u32()?, d.u64()?);
    if magic != COMMIT_MAGIC {
        return Ok(None);
    }
    let crc = crc32c::crc32c_append(crc32c::crc32c(store.as_bytes()), covered);
    let begin = offset + length(COMMIT_HEADER_BYTES);
    let end = begin + u64::from(body_bytes);
    let crc = crc_behind(source, crc, (begin, end))?;
    Ok(crc.is_some_and(|crc| stored == crc.to_be_bytes()).then_some((sequence, end)))
}

/// A checksum that goes on over a range of bytes; `None` where they end before.
fn crc_behind(
    source: &mut impl ReadAt,
    mut crc: u32,
    (mut at, end): (u64, u64),
) -> Result<Option<u32>> {
    while at < end {
        let count = usize::try_from(end - at).unwrap_or(usize::MAX).min(PIECE_BYTES);
        let Some(piece) = source.bytes(at, count)? else { return Ok(None) };
        crc = crc32c::crc32c_append(crc, piece);
        at += length(count);
    }
    Ok(Some(crc))
}

/// Whether the commit that begins with these bytes, and has a body of so many, is whole. What of it
/// lies behind them is read from `behind` on: the same piece serves all commits that reach there.
fn is_commit(
    source: &mut impl ReadAt,
    store: StoreId,
    (begins, behind): (&[u8], u64),
    body_bytes: u64,
) -> Result<bool> {
    let Some((head, body)) = begins.split_at_checked(COMMIT_HEADER_BYTES) else {
        return Ok(false);
    };
    let (covered, stored) = head.split_at(COMMIT_HEADER_BYTES - CRC_BYTES);
    let here = body.len().min(usize::try_from(body_bytes).unwrap_or(usize::MAX));
    let crc = record_crc(store, covered, &body[..here]);
    let crc = crc_behind(source, crc, (behind, behind + (body_bytes - length(here))))?;
    Ok(crc.is_some_and(|crc| stored == crc.to_be_bytes()))
}

/// The commits from `offset` on, as long as record follows record, until `visit` answers `false`;
/// answers where that ends. Stored bytes of chunks are passed over: they are whatever a client
/// wrote, and may look like records.
fn walk_commits(
    source: &mut impl ReadAt,
    store: StoreId,
    offset: u64,
    mut visit: impl FnMut(u64, u64) -> bool,
) -> Result<u64> {
    let mut at = offset;
    loop {
        if let Some(end) = group_end(source, store, at)? {
            at = end;
            continue;
        }
        match commit_at(source, store, at)? {
            Some((sequence, end)) if visit(sequence, end) => at = end,
            _ => return Ok(at),
        }
    }
}

/// The sequence number of the first commit of a log file.
pub(crate) fn first_commit(source: &mut impl ReadAt, store: StoreId) -> Result<Option<u64>> {
    let mut first = None;
    walk_commits(source, store, length(FILE_HEADER_BYTES), |sequence, _| {
        first = Some(sequence);
        false
    })?;
    Ok(first)
}

/// Where the last append of a log file begins, as far as it tells: all before it was acknowledged,
/// since an append is begun only after the one before it was synced.
pub(crate) fn last_append(source: &mut impl ReadAt, store: StoreId) -> Result<u64> {
    let begin = length(FILE_HEADER_BYTES);
    // Of the last two commits.
    let (mut before, mut last) = (begin, None);
    walk_commits(source, store, begin, |sequence, end| {
        if let Some((expected, at)) = last {
            if sequence != expected {
                return false;
            }
            before = at;
        }
        last = Some((sequence.saturating_add(1), end));
        true
    })?;
    match last {
        Some((_, end)) if !is_zeros(source, end)? => Ok(end),
        _ => Ok(before),
    }
}

/// Whether nothing was written from here on.
pub(crate) fn is_zeros(source: &mut impl ReadAt, from: u64) -> Result<bool> {
    let mut at = from;
    while at < source.length_bytes() {
        let left = usize::try_from(source.length_bytes() - at).unwrap_or(usize::MAX);
        let piece = source.bytes(at, left.min(PIECE_BYTES))?.unwrap_or_default();
        if piece.iter().any(|&byte| byte != 0) {
            return Ok(false);
        }
        at += length(piece.len());
    }
    Ok(true)
}

/// The segment and the number of chunks of the directory whose header is whole here.
pub(crate) fn directory_at(
    source: &mut impl ReadAt,
    offset: u64,
) -> Result<Option<(SegmentId, u32)>> {
    Ok(match source.bytes(offset, DIRECTORY_HEADER_BYTES)?.and_then(claim) {
        Some(Claim::Directory { segment, chunks }) => Some((segment, chunks)),
        _ => None,
    })
}

/// The sequence number of a commit of the store behind commit `sequence`, if one proves that this
/// one was synced. That one, damaged or torn, belongs to the append that begins at `from`.
///
/// What lies where a record ends is a record that the store wrote, and proves it; so does any byte
/// behind that commit, since the next append was begun then. Where the records end before it,
/// because a header is damaged, the rest is searched byte by byte, the bytes of clients with it. If
/// commit `sequence` is whole and ends what was written, it is the end of a torn append, and no
/// commit before it is one of the store's.
pub(crate) fn commit_behind(
    source: &mut impl ReadAt,
    from: u64,
    store: StoreId,
    sequence: u64,
) -> Result<Option<u64>> {
    let total = source.length_bytes().saturating_sub(from);
    // As many as there is room for: others are bytes of some other time.
    let last = sequence.saturating_add(total / length(COMMIT_HEADER_BYTES));
    let (mut later, mut passed) = (None, None);
    let lost = walk_commits(source, store, from, |found, end| {
        if found == sequence {
            passed.get_or_insert(end);
        }
        later = Some(found).filter(|found| (*found > sequence) && *found <= last);
        found == sequence
    })?;
    match (later, passed) {
        (Some(found), _) => Ok(Some(found)),
        (None, Some(end)) => {
            let is_last = is_zeros(source, end)?;
            Ok((!is_last).then(|| sequence.saturating_add(1)))
        }
        (None, None) => search_commits(source, lost, store, (sequence, sequence..=last)),
    }
}

/// From the end on: in an append that was torn, the payload may be full of what looks like the
/// begin of a long record. Such bytes cost at most [`COMMIT_SEARCH_BYTES_MAX`].
fn search_commits(
    source: &mut impl ReadAt,
    from: u64,
    store: StoreId,
    (sequence, plausible): (u64, RangeInclusive<u64>),
) -> Result<Option<u64>> {
    let end = source.length_bytes();
    let total = end.saturating_sub(from);
    // Records do not overlap, so true ones take no more than the length.
    let mut budget_bytes = total.saturating_add(COMMIT_SEARCH_BYTES_MAX);
    // Behind the last byte that is not zero.
    let mut written_end = None;
    let mut behind = end;
    while behind > from {
        let begin = behind.saturating_sub(length(PIECE_BYTES)).max(from);
        // A header that begins in this piece may end behind it.
        let reach = (behind + length(COMMIT_HEADER_BYTES)).min(end);
        let count = usize::try_from(reach - begin).unwrap_or(usize::MAX);
        let Some(piece) = source.bytes(begin, count)?.map(<[u8]>::to_vec) else { return Ok(None) };
        let starts = usize::try_from(behind - begin).unwrap_or(usize::MAX);
        let last_byte = || piece.iter().rposition(|&byte| byte != 0);
        written_end = written_end.or_else(|| Some(begin + length(last_byte()? + 1)));
        for (start, body_bytes, found) in claimed_commits(&piece, starts) {
            let found_end = begin + length(start) + length(COMMIT_HEADER_BYTES) + body_bytes;
            let ends_all = written_end.is_some_and(|written| found_end >= written);
            if !plausible.contains(&found) || found_end > end || (found == sequence && !ends_all) {
                continue;
            }
            let Some(left) = budget_bytes.checked_sub(body_bytes) else { return Ok(None) };
            budget_bytes = left;
            if is_commit(source, store, (&piece[start..], reach), body_bytes)? {
                return Ok(Some(found).filter(|found| *found > sequence));
            }
        }
        behind = begin;
    }
    Ok(None)
}

/// What looks like the begin of a commit in the first `starts` bytes, the last one first: where,
/// the bytes of its body, and its sequence number.
fn claimed_commits(piece: &[u8], starts: usize) -> Vec<(usize, u64, u64)> {
    let magic = COMMIT_MAGIC.to_be_bytes();
    let windows = piece.windows(COMMIT_HEADER_BYTES).enumerate().take(starts);
    let begins = windows.filter(|(_, header)| header.starts_with(&magic));
    let mut claimed: Vec<_> = begins
        .filter_map(|(start, header)| {
            let mut d = Decoder::new("commit header", &header[4..]);
            Some((start, u64::from(d.u32().ok()?), d.u64().ok()?))
        })
        .collect();
    claimed.reverse();
    claimed
}
