//! Verifying a segment file record by record, with no more of it in memory than one record, and
//! of a group only its header and entries: the chunks' bytes have checksums of their own.

use super::{
    CHUNK_ENTRY_BYTES, COMMIT_HEADER_BYTES, COMMIT_MAGIC, CRC_BYTES, Codec, DIRECTORY_HEADER_BYTES,
    DIRECTORY_MAGIC, Directory, FILE_HEADER_BYTES, FoundGroup, GROUP_CHUNKS_MAX,
    GROUP_HEADER_BYTES, GROUP_MAGIC, HASH_PAGE_BYTES, PAGE_ENTRIES, PLACE_PAGE_BYTES, Place,
    decode_batch, record_crc,
};
use crate::codec::Decoder;
use crate::disk::DiskFile;
use crate::error::{Error, Result};
use crate::id::{ContentHash, SegmentId, StoreId};

const WHAT: &str = "segment file";

/// A record that is sound, but for the chunks' bytes of a group and the pages of a directory.
#[derive(Debug)]
pub(crate) struct Walked {
    /// The offset behind it, in bytes.
    pub(crate) end: u64,
    pub(crate) is_directory: bool,
    /// The chunks, if it is a group.
    pub(crate) group: Option<FoundGroup>,
    /// Its sequence number, if it is a commit.
    pub(crate) commit: Option<u64>,
}

/// The record at `offset` of a file of this store, which must end by `end`.
pub(crate) fn record(
    file: &dyn DiskFile,
    store: StoreId,
    (offset, end): (u64, u64),
) -> Result<Walked> {
    let magic = read(file, (offset, end), 4)?;
    let magic = Decoder::new(WHAT, &magic).u32()?;
    let (length, group, commit) = match magic {
        GROUP_MAGIC => {
            let (length, group) = group(file, store, (offset, end))?;
            (length, Some(group), None)
        }
        COMMIT_MAGIC => {
            let (length, sequence) = commit(file, store, (offset, end))?;
            (length, None, Some(sequence))
        }
        DIRECTORY_MAGIC => (directory(file, (offset, end))?, None, None),
        got => return Err(Error::corrupt(WHAT, format!("magic {got:08x} is of no record"))),
    };
    let record_end = offset.saturating_add(u64::try_from(length).unwrap_or(u64::MAX));
    if record_end > end {
        let reason = format!("a record ends at {record_end}, the file at {end}");
        return Err(Error::corrupt(WHAT, reason));
    }
    Ok(Walked { end: record_end, is_directory: magic == DIRECTORY_MAGIC, group, commit })
}

fn read(file: &dyn DiskFile, (offset, end): (u64, u64), length: usize) -> Result<Vec<u8>> {
    let wanted = offset.saturating_add(u64::try_from(length).unwrap_or(u64::MAX));
    if wanted > end {
        let reason = format!("a record reaches to {wanted}, the file to {end}");
        return Err(Error::corrupt(WHAT, reason));
    }
    file.read_at(offset, length)
}

fn same_crc(got: u32, expected: u32) -> Result<()> {
    if got == expected {
        return Ok(());
    }
    Err(Error::corrupt(WHAT, format!("crc {got:08x}, expected {expected:08x}")))
}

/// The length of the group and its chunks, once its header and entries are found sound.
fn group(file: &dyn DiskFile, store: StoreId, range: (u64, u64)) -> Result<(usize, FoundGroup)> {
    let header = read(file, range, GROUP_HEADER_BYTES)?;
    let mut d = Decoder::new(WHAT, &header);
    let (_magic, count, segment, first_index) = (d.u32()?, d.u32()?, d.u64()?, d.u32()?);
    let (payload_bytes, _pad, crc) = (d.u32()?, d.u32()?, d.u32()?);
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    if count > GROUP_CHUNKS_MAX {
        return Err(Error::corrupt(WHAT, format!("a group of {count} chunks")));
    }
    let head_bytes = GROUP_HEADER_BYTES + count * CHUNK_ENTRY_BYTES;
    let head = read(file, range, head_bytes)?;
    let (header, entries) = head.split_at(GROUP_HEADER_BYTES);
    same_crc(crc, record_crc(store, &header[..GROUP_HEADER_BYTES - CRC_BYTES], entries))?;
    let segment = SegmentId::new(segment);
    let mut group = FoundGroup { segment, first_index, hashes: vec![], places: vec![] };
    let mut at = range.0 + u64::try_from(head_bytes).unwrap_or(u64::MAX);
    for entry in entries.chunks_exact(CHUNK_ENTRY_BYTES) {
        let mut d = Decoder::new(WHAT, entry);
        let hash = ContentHash::new(d.array()?);
        let (stored_bytes, codec, _pad, crc) = (d.u16()?, d.u8()?, d.u8()?, d.u32()?);
        let (Some(codec), Ok(offset_bytes)) = (Codec::from_number(codec), u32::try_from(at)) else {
            return Err(Error::corrupt(WHAT, format!("codec {codec}, chunk at offset {at}")));
        };
        group.hashes.push(hash);
        group.places.push(Place { offset_bytes, stored_bytes, codec, crc });
        at += u64::from(stored_bytes);
    }
    Ok((head_bytes + usize::try_from(payload_bytes).unwrap_or(usize::MAX), group))
}

/// The directory of a segment, as the groups before the first damage in its file tell.
pub(crate) fn salvage(
    file: &dyn DiskFile,
    store: StoreId,
    (segment, chunks): (SegmentId, u32),
) -> Directory {
    let count = usize::try_from(chunks).unwrap_or(0);
    let mut directory =
        Directory { places: vec![None; count], hashes: vec![ContentHash::new([0; 32]); count] };
    let end = file.length_bytes().unwrap_or(0);
    let mut offset = u64::try_from(FILE_HEADER_BYTES).unwrap_or(u64::MAX);
    while offset < end {
        let Ok(found) = record(file, store, (offset, end)) else { break };
        offset = found.end;
        let Some(group) = found.group.filter(|group| group.segment == segment) else { continue };
        let first = usize::try_from(group.first_index).unwrap_or(usize::MAX);
        let slots = directory.places.iter_mut().zip(&mut directory.hashes).skip(first);
        for ((place, hash), found) in slots.zip(group.places.into_iter().zip(group.hashes)) {
            (*place, *hash) = (Some(found.0), found.1);
        }
    }
    directory
}

/// The length of the commit and its sequence number, once it is found sound.
fn commit(file: &dyn DiskFile, store: StoreId, range: (u64, u64)) -> Result<(usize, u64)> {
    let header = read(file, range, COMMIT_HEADER_BYTES)?;
    let mut d = Decoder::new(WHAT, &header);
    let (_magic, body_bytes, sequence, crc) = (d.u32()?, d.u32()?, d.u64()?, d.u32()?);
    let length = COMMIT_HEADER_BYTES + usize::try_from(body_bytes).unwrap_or(usize::MAX);
    let all = read(file, range, length)?;
    let (header, body) = all.split_at(COMMIT_HEADER_BYTES);
    same_crc(crc, record_crc(store, &header[..COMMIT_HEADER_BYTES - CRC_BYTES], body))?;
    decode_batch(body)?;
    Ok((length, sequence))
}

/// The length of the directory, once its header is found sound.
fn directory(file: &dyn DiskFile, range: (u64, u64)) -> Result<usize> {
    let header = read(file, range, DIRECTORY_HEADER_BYTES)?;
    let mut d = Decoder::new(WHAT, &header);
    let (_magic, chunks, _segment, _pad, crc) = (d.u32()?, d.u32()?, d.u64()?, d.u32()?, d.u32()?);
    same_crc(crc, crc32c::crc32c(&header[..DIRECTORY_HEADER_BYTES - CRC_BYTES]))?;
    let pages = usize::try_from(chunks).unwrap_or(usize::MAX).div_ceil(PAGE_ENTRIES);
    Ok(pages
        .saturating_mul(PLACE_PAGE_BYTES + HASH_PAGE_BYTES)
        .saturating_add(DIRECTORY_HEADER_BYTES))
}
