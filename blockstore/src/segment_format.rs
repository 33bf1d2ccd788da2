//! The bytes of a segment file.
//!
//! ```text
//! +--------+-------+-------+--------+-------+--------+-----+-----------+
//! | header | group | group | commit | group | commit | ... | directory |
//! +--------+-------+-------+--------+-------+--------+-----+-----------+
//! header    64: magic 8 | store id 16 | role 1, pad 7 | number 8 | zeros 20 | crc32c 4
//! group     32: magic 4 | chunks 4 | segment 8 | first index 4 | payload bytes 4 | pad 4 | crc32c 4
//!           40 a chunk: blake3 32 | stored bytes 2 | codec 1 | pad 1 | crc32c of stored bytes 4
//!           the stored bytes of all its chunks, one behind the other
//! commit    20: magic 4 | body bytes 4 | sequence 8 | crc32c 4
//!           body: for each write: family 1 | put 1 | key bytes 2 | value bytes 4 | key | value
//! directory 24: magic 4 | chunks 4 | segment 8 | pad 4 | crc32c 4
//!           pages of 256 places, then pages of 256 hashes, each page behind with its crc32c
//! ```
//! A group's chunks lie one behind the other, so that blocks written in sequence are one
//! contiguous read. The crc of a group or commit covers the store's id (so that what another
//! store left in the same blocks of the disk is never taken), the header, and the chunk entries
//! or the body; those of file header and directory cover them alone. Behind the last record lie
//! only zeros.

mod checksum;
#[cfg(test)]
mod golden;
pub(crate) mod stream;
pub(crate) mod walk;

pub(crate) use checksum::make_crc_right;

use bytes::Bytes;

use crate::codec::{Decoder, Encoder};
use crate::disk::FileName;
use crate::error::{Error, Result};
use crate::id::{ContentHash, SegmentId, StoreId};
use crate::kv::{Batch, Family, Write};
use crate::units::BLOCK_BYTES;

/// The last two characters are the format's version.
const FILE_MAGIC: &[u8; 8] = b"SLKSEG02";
const GROUP_MAGIC: u32 = u32::from_be_bytes(*b"SWCG");
const COMMIT_MAGIC: u32 = u32::from_be_bytes(*b"SWCM");
const DIRECTORY_MAGIC: u32 = u32::from_be_bytes(*b"SWDR");

/// Bytes of a file's header.
pub(crate) const FILE_HEADER_BYTES: usize = 8 + 16 + 8 + 8 + 20 + 4;
const GROUP_HEADER_BYTES: usize = 4 + 4 + 8 + 4 + 4 + 4 + 4;
const CHUNK_ENTRY_BYTES: usize = 32 + 2 + 1 + 1 + 4;
const COMMIT_HEADER_BYTES: usize = 4 + 4 + 8 + 4;
const DIRECTORY_HEADER_BYTES: usize = 4 + 4 + 8 + 4 + 4;
const WRITE_HEADER_BYTES: usize = 1 + 1 + 2 + 4;
const CRC_BYTES: usize = 4;

/// Chunks of one group: 16 MiB of payload at most, so that 32-bit sizes hold.
pub(crate) const GROUP_CHUNKS_MAX: usize = 4096;

/// Places, or hashes, of one directory page: those of one window of blocks written in sequence.
pub(crate) const PAGE_ENTRIES: usize = 256;
const PLACE_BYTES: usize = 4 + 2 + 1 + 1 + 4;
const HASH_BYTES: usize = 32;
const PLACE_PAGE_BYTES: usize = PAGE_ENTRIES * PLACE_BYTES + CRC_BYTES;
const HASH_PAGE_BYTES: usize = PAGE_ENTRIES * HASH_BYTES + CRC_BYTES;

const _: () = assert!(FILE_HEADER_BYTES == 64);
const _: () = assert!(GROUP_HEADER_BYTES == 32);
const _: () = assert!(GROUP_CHUNKS_MAX * BLOCK_BYTES <= 16 << 20);

/// How a chunk's bytes are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Codec {
    /// As they are: 4096 bytes.
    Raw,
    /// An lz4 block.
    Lz4,
}

impl Codec {
    const fn number(self) -> u8 {
        match self {
            Self::Raw => 0,
            Self::Lz4 => 1,
        }
    }

    fn from_number(number: u8) -> Option<Self> {
        match number {
            0 => Some(Self::Raw),
            1 => Some(Self::Lz4),
            _ => None,
        }
    }
}

/// A block made ready to be stored.
#[derive(Clone, Debug)]
pub(crate) struct PreparedChunk {
    pub(crate) hash: ContentHash,
    pub(crate) codec: Codec,
    pub(crate) crc: u32,
    pub(crate) stored: Bytes,
}

/// Where a chunk's stored bytes lie in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) offset_bytes: u32,
    pub(crate) stored_bytes: u16,
    pub(crate) codec: Codec,
    pub(crate) crc: u32,
}

/// The directory of a logical segment: a place and a hash a chunk; no place where compaction
/// dropped the chunk.
#[derive(Clone, Debug, Default)]
pub(crate) struct Directory {
    pub(crate) places: Vec<Option<Place>>,
    pub(crate) hashes: Vec<ContentHash>,
}

fn number_u32(count: usize) -> u32 {
    match u32::try_from(count) {
        Ok(number) => number,
        Err(_) => panic!("{count} does not fit the 32 bits that the format gives it"),
    }
}

pub(crate) fn encode_file_header(store: StoreId, name: FileName) -> Vec<u8> {
    let mut encoder = Encoder::new();
    encoder.raw(FILE_MAGIC).raw(store.as_bytes()).u8(name.role.number()).raw(&[0; 7]);
    let mut bytes = encoder.u64(name.number.get()).raw(&[0; 20]).finish();
    let crc = crc32c::crc32c(&bytes);
    bytes.extend_from_slice(&crc.to_be_bytes());
    bytes
}

/// Checks a file's header and answers the store that it belongs to.
pub(crate) fn decode_file_header(name: FileName, bytes: &[u8]) -> Result<StoreId> {
    let fail = |reason: String| Error::corrupt(format!("header of {name}"), reason);
    let Some((body, crc)) = bytes.get(..FILE_HEADER_BYTES).and_then(<[u8]>::split_last_chunk::<4>)
    else {
        return Err(fail(format!("{} bytes, expected {FILE_HEADER_BYTES}", bytes.len())));
    };
    let mut d = Decoder::new("segment header", body);
    let magic = d.take(8)?;
    if magic != FILE_MAGIC {
        let (got, expected) = (magic.escape_ascii(), FILE_MAGIC.escape_ascii());
        return Err(fail(format!("magic {got}, expected {expected}")));
    }
    let (got, expected) = (u32::from_be_bytes(*crc), crc32c::crc32c(body));
    if got != expected {
        return Err(fail(format!("crc {got:08x}, expected {expected:08x}")));
    }
    let store = StoreId::from_bytes(d.array()?);
    let role = d.u8()?;
    let _padding = d.take(7)?;
    if role != name.role.number() {
        return Err(fail(format!("role {role}, expected {}", name.role.number())));
    }
    let number = d.u64()?;
    if number != name.number.get() {
        return Err(fail(format!("number {number}, expected {}", name.number)));
    }
    Ok(store)
}

/// The checksum of a group or commit: of the store's id, the header, and what is behind it.
fn record_crc(store: StoreId, header: &[u8], behind: &[u8]) -> u32 {
    let header = crc32c::crc32c_append(crc32c::crc32c(store.as_bytes()), header);
    crc32c::crc32c_append(header, behind)
}

/// Puts the checksum of the record from `start` on between its header and what is behind.
fn put_crc(out: &mut [u8], store: StoreId, (start, header_bytes): (usize, usize)) {
    let (header, behind) = out[start..].split_at_mut(header_bytes);
    let (header, crc_place) = header.split_at_mut(header_bytes - CRC_BYTES);
    crc_place.copy_from_slice(&record_crc(store, header, behind).to_be_bytes());
}

/// The bytes that [`encode_group`] appends.
pub(crate) fn group_bytes(chunks: &[PreparedChunk]) -> usize {
    let of_chunk = |chunk: &PreparedChunk| CHUNK_ENTRY_BYTES + chunk.stored.len();
    GROUP_HEADER_BYTES + chunks.iter().map(of_chunk).sum::<usize>()
}

/// Appends a group to `out`, which will lie at `offset_bytes` of the file, and answers the
/// places of its chunks.
pub(crate) fn encode_group(
    out: &mut Vec<u8>,
    offset_bytes: u64,
    (store, segment, first_index): (StoreId, SegmentId, u32),
    chunks: &[PreparedChunk],
) -> Result<Vec<Place>> {
    let payload: usize = chunks.iter().map(|chunk| chunk.stored.len()).sum();
    let start = out.len();
    out.extend_from_slice(&GROUP_MAGIC.to_be_bytes());
    out.extend_from_slice(&number_u32(chunks.len()).to_be_bytes());
    out.extend_from_slice(&segment.get().to_be_bytes());
    out.extend_from_slice(&first_index.to_be_bytes());
    out.extend_from_slice(&number_u32(payload).to_be_bytes());
    out.extend_from_slice(&[0; 4 + CRC_BYTES]);
    let payload_start = GROUP_HEADER_BYTES + chunks.len() * CHUNK_ENTRY_BYTES;
    let mut position = offset_bytes + u64::try_from(payload_start).unwrap_or(u64::MAX);
    let mut places = Vec::with_capacity(chunks.len());
    for chunk in chunks {
        let stored_bytes = u16::try_from(chunk.stored.len())
            .map_err(|_| Error::invalid("a chunk is stored in at most 4096 bytes"))?;
        out.extend_from_slice(chunk.hash.as_bytes());
        out.extend_from_slice(&stored_bytes.to_be_bytes());
        out.extend_from_slice(&[chunk.codec.number(), 0]);
        out.extend_from_slice(&chunk.crc.to_be_bytes());
        let offset_bytes = u32::try_from(position)
            .map_err(|_| Error::invalid("a segment file is smaller than 4 GiB"))?;
        places.push(Place { offset_bytes, stored_bytes, codec: chunk.codec, crc: chunk.crc });
        position += u64::from(stored_bytes);
    }
    put_crc(out, store, (start, GROUP_HEADER_BYTES));
    for chunk in chunks {
        out.extend_from_slice(&chunk.stored);
    }
    Ok(places)
}

/// The bytes that [`encode_commit`] appends.
pub(crate) fn commit_bytes(batch: &Batch) -> usize {
    COMMIT_HEADER_BYTES + body_bytes(batch)
}

fn body_bytes(batch: &Batch) -> usize {
    let of_write = |write: &Write| {
        WRITE_HEADER_BYTES + write.key.len() + write.value.as_ref().map_or(0, Vec::len)
    };
    batch.iter().map(of_write).sum()
}

/// Appends a commit record.
pub(crate) fn encode_commit(out: &mut Vec<u8>, (store, sequence): (StoreId, u64), batch: &Batch) {
    let start = out.len();
    out.extend_from_slice(&COMMIT_MAGIC.to_be_bytes());
    out.extend_from_slice(&number_u32(body_bytes(batch)).to_be_bytes());
    out.extend_from_slice(&sequence.to_be_bytes());
    out.extend_from_slice(&[0; CRC_BYTES]);
    for write in batch {
        let value = write.value.as_deref().unwrap_or_default();
        let key_bytes = u16::try_from(write.key.len()).unwrap_or(u16::MAX);
        assert_eq!(usize::from(key_bytes), write.key.len(), "keys are under 64 KiB");
        out.extend_from_slice(&[write.family.number(), u8::from(write.value.is_some())]);
        out.extend_from_slice(&key_bytes.to_be_bytes());
        out.extend_from_slice(&number_u32(value.len()).to_be_bytes());
        out.extend_from_slice(&write.key);
        out.extend_from_slice(value);
    }
    put_crc(out, store, (start, COMMIT_HEADER_BYTES));
}

fn decode_batch(body: &[u8]) -> Result<Batch> {
    const WHAT: &str = "commit record";
    let mut d = Decoder::new(WHAT, body);
    let mut batch = Batch::new();
    while !d.is_empty() {
        let number = d.u8()?;
        let family = Family::from_number(number)
            .ok_or_else(|| Error::corrupt(WHAT, format!("unknown family {number}")))?;
        let put = d.u8()? != 0;
        let (key_bytes, value_bytes) = (d.u16()?, d.u32()?);
        let key = d.take(usize::from(key_bytes))?.to_vec();
        let value = d.take(usize::try_from(value_bytes).unwrap_or(usize::MAX))?;
        batch.push(Write { family, key, value: put.then(|| value.to_vec()) });
    }
    Ok(batch)
}

/// A group as found in a file.
#[derive(Debug)]
pub(crate) struct FoundGroup {
    pub(crate) segment: SegmentId,
    pub(crate) first_index: u32,
    pub(crate) hashes: Vec<ContentHash>,
    pub(crate) places: Vec<Place>,
}

/// A record as found in a file.
#[derive(Debug)]
pub(crate) enum Found {
    /// Chunks; their stored bytes were verified if that was asked for.
    Group(FoundGroup),
    /// A commit.
    Commit { sequence: u64, batch: Batch },
    /// The directory: nothing follows in a log file.
    Directory { segment: SegmentId, chunks: u32 },
}

/// Reads the record that `rest` begins with, at `offset` of the file, and answers it and the offset
/// behind it. `None` when there is no whole record: the end of the log, or bytes that were never
/// synced.
fn record_at(
    rest: &[u8],
    store: StoreId,
    offset: usize,
    verify_payload: bool,
) -> Result<Option<(Found, usize)>> {
    let Some(magic) = rest.first_chunk::<4>() else {
        return Ok(None);
    };
    match u32::from_be_bytes(*magic) {
        GROUP_MAGIC => find_group(rest, store, (offset, verify_payload)),
        COMMIT_MAGIC => find_commit(rest, store, offset),
        DIRECTORY_MAGIC => find_directory(rest, offset),
        _ => Ok(None),
    }
}

fn find_group(
    rest: &[u8],
    store: StoreId,
    (offset, verify): (usize, bool),
) -> Result<Option<(Found, usize)>> {
    let Some((header, behind)) = rest.split_at_checked(GROUP_HEADER_BYTES) else {
        return Ok(None);
    };
    let mut d = Decoder::new("group header", header);
    let (_magic, count, segment) = (d.u32()?, d.u32()?, d.u64()?);
    let (first_index, payload_bytes, _pad, crc) = (d.u32()?, d.u32()?, d.u32()?, d.u32()?);
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    if count > GROUP_CHUNKS_MAX {
        return Ok(None);
    }
    let Some((entries, behind)) = behind.split_at_checked(count * CHUNK_ENTRY_BYTES) else {
        return Ok(None);
    };
    let covered = &header[..GROUP_HEADER_BYTES - CRC_BYTES];
    if crc != record_crc(store, covered, entries) {
        return Ok(None);
    }
    let payload_bytes = usize::try_from(payload_bytes).unwrap_or(usize::MAX);
    let Some(payload) = behind.get(..payload_bytes) else {
        return Ok(None);
    };
    let payload_start = offset + GROUP_HEADER_BYTES + entries.len();
    let mut group = FoundGroup {
        segment: SegmentId::new(segment),
        first_index,
        hashes: Vec::with_capacity(count),
        places: Vec::with_capacity(count),
    };
    let mut position = 0;
    for entry in entries.chunks_exact(CHUNK_ENTRY_BYTES) {
        let mut d = Decoder::new("chunk entry", entry);
        let hash = ContentHash::new(d.array()?);
        let (stored_bytes, codec, _pad, crc) = (d.u16()?, d.u8()?, d.u8()?, d.u32()?);
        let end = position + usize::from(stored_bytes);
        let (Some(codec), Some(stored)) = (Codec::from_number(codec), payload.get(position..end))
        else {
            return Ok(None);
        };
        if verify && crc32c::crc32c(stored) != crc {
            return Ok(None);
        }
        let Ok(offset_bytes) = u32::try_from(payload_start + position) else {
            return Err(Error::corrupt("group", "a chunk lies at or behind 4 GiB of its file"));
        };
        group.hashes.push(hash);
        group.places.push(Place { offset_bytes, stored_bytes, codec, crc });
        position = end;
    }
    Ok(Some((Found::Group(group), payload_start + payload_bytes)))
}

fn find_commit(rest: &[u8], store: StoreId, offset: usize) -> Result<Option<(Found, usize)>> {
    let Some((header, behind)) = rest.split_at_checked(COMMIT_HEADER_BYTES) else {
        return Ok(None);
    };
    let mut d = Decoder::new("commit header", header);
    let (_magic, body_bytes, sequence, crc) = (d.u32()?, d.u32()?, d.u64()?, d.u32()?);
    let body_bytes = usize::try_from(body_bytes).unwrap_or(usize::MAX);
    let Some(body) = behind.get(..body_bytes) else {
        return Ok(None);
    };
    let covered = &header[..COMMIT_HEADER_BYTES - CRC_BYTES];
    if crc != record_crc(store, covered, body) {
        return Ok(None);
    }
    let batch = decode_batch(body)?;
    Ok(Some((Found::Commit { sequence, batch }, offset + COMMIT_HEADER_BYTES + body_bytes)))
}

fn find_directory(rest: &[u8], offset: usize) -> Result<Option<(Found, usize)>> {
    let Some(header) = rest.get(..DIRECTORY_HEADER_BYTES) else {
        return Ok(None);
    };
    let mut d = Decoder::new("directory header", header);
    let (_magic, chunks, segment, _pad, crc) = (d.u32()?, d.u32()?, d.u64()?, d.u32()?, d.u32()?);
    let covered = &header[..DIRECTORY_HEADER_BYTES - CRC_BYTES];
    let pages = usize::try_from(chunks).unwrap_or(usize::MAX).div_ceil(PAGE_ENTRIES);
    let length = pages
        .saturating_mul(PLACE_PAGE_BYTES + HASH_PAGE_BYTES)
        .saturating_add(DIRECTORY_HEADER_BYTES);
    let Some(body) = rest.get(DIRECTORY_HEADER_BYTES..length) else { return Ok(None) };
    let (places, hashes) = body.split_at(pages * PLACE_PAGE_BYTES);
    let page_is_whole = |page: &[u8]| page_body("segment directory", page).is_ok();
    let whole = crc == crc32c::crc32c(covered)
        && places.chunks(PLACE_PAGE_BYTES).all(page_is_whole)
        && hashes.chunks(HASH_PAGE_BYTES).all(page_is_whole);
    // One that was not synced whole is no directory: the chunks are all in the groups before it.
    let found = Found::Directory { segment: SegmentId::new(segment), chunks };
    Ok(whole.then_some((found, offset + length)))
}

/// The directory record of `segment`.
pub(crate) fn encode_directory(segment: SegmentId, directory: &Directory) -> Vec<u8> {
    let chunks = number_u32(directory.places.len());
    let mut header = Encoder::new();
    let header = header.u32(DIRECTORY_MAGIC).u32(chunks).u64(segment.get()).u32(0).finish();
    let mut out = header.clone();
    out.extend_from_slice(&crc32c::crc32c(&header).to_be_bytes());
    for page in directory.places.chunks(PAGE_ENTRIES) {
        let mut encoder = Encoder::new();
        for place in page {
            match place {
                Some(p) => {
                    encoder.u32(p.offset_bytes).u16(p.stored_bytes).u8(p.codec.number()).u8(1);
                    encoder.u32(p.crc);
                }
                None => {
                    encoder.raw(&[0; PLACE_BYTES]);
                }
            }
        }
        push_page(&mut out, encoder.finish(), PLACE_PAGE_BYTES);
    }
    for page in directory.hashes.chunks(PAGE_ENTRIES) {
        let bytes = page.iter().flat_map(|hash| *hash.as_bytes()).collect();
        push_page(&mut out, bytes, HASH_PAGE_BYTES);
    }
    out
}

fn push_page(out: &mut Vec<u8>, mut page: Vec<u8>, page_bytes: usize) {
    page.resize(page_bytes - CRC_BYTES, 0);
    out.extend_from_slice(&page);
    out.extend_from_slice(&crc32c::crc32c(&page).to_be_bytes());
}

/// Offset in the file, and length, of the `page`-th page of places.
pub(crate) fn place_page(directory_offset_bytes: u64, page: usize) -> (u64, usize) {
    let skip = DIRECTORY_HEADER_BYTES + page * PLACE_PAGE_BYTES;
    (directory_offset_bytes + u64::try_from(skip).unwrap_or(u64::MAX), PLACE_PAGE_BYTES)
}

/// Offset in the file, and length, of the `page`-th page of hashes.
pub(crate) fn hash_page(directory_offset_bytes: u64, chunks: u32, page: usize) -> (u64, usize) {
    let pages = usize::try_from(chunks).unwrap_or(usize::MAX).div_ceil(PAGE_ENTRIES);
    let skip = DIRECTORY_HEADER_BYTES + pages * PLACE_PAGE_BYTES + page * HASH_PAGE_BYTES;
    (directory_offset_bytes + u64::try_from(skip).unwrap_or(u64::MAX), HASH_PAGE_BYTES)
}

fn page_body<'a>(what: &'static str, bytes: &'a [u8]) -> Result<&'a [u8]> {
    let Some((body, crc)) = bytes.split_last_chunk::<4>() else {
        return Err(Error::corrupt(what, "page is cut off"));
    };
    let (got, expected) = (u32::from_be_bytes(*crc), crc32c::crc32c(body));
    if got != expected {
        return Err(Error::corrupt(what, format!("crc {got:08x}, expected {expected:08x}")));
    }
    Ok(body)
}

/// Reads a page of places.
pub(crate) fn decode_place_page(bytes: &[u8]) -> Result<Vec<Option<Place>>> {
    const WHAT: &str = "segment directory";
    page_body(WHAT, bytes)?
        .chunks_exact(PLACE_BYTES)
        .map(|entry| {
            let mut d = Decoder::new(WHAT, entry);
            let (offset_bytes, stored_bytes, codec) = (d.u32()?, d.u16()?, d.u8()?);
            let (present, crc) = (d.u8()?, d.u32()?);
            let codec = Codec::from_number(codec)
                .ok_or_else(|| Error::corrupt(WHAT, format!("unknown codec {codec}")))?;
            let place = Place { offset_bytes, stored_bytes, codec, crc };
            Ok((present != 0).then_some(place))
        })
        .collect()
}

/// Reads a page of hashes.
pub(crate) fn decode_hash_page(bytes: &[u8]) -> Result<Vec<ContentHash>> {
    let body = page_body("segment directory", bytes)?;
    body.chunks_exact(HASH_BYTES)
        .map(|hash| Decoder::new("chunk hash", hash).array().map(ContentHash::new))
        .collect()
}

/// The block behind stored bytes, verified against `place`.
pub(crate) fn restore_block(place: &Place, stored: &Bytes) -> Result<Bytes> {
    const WHAT: &str = "chunk";
    let crc = crc32c::crc32c(stored);
    if crc != place.crc {
        return Err(Error::corrupt(WHAT, format!("crc {crc:08x}, expected {:08x}", place.crc)));
    }
    match place.codec {
        Codec::Raw if stored.len() == BLOCK_BYTES => Ok(stored.clone()),
        Codec::Raw => Err(Error::corrupt(WHAT, format!("{} raw bytes", stored.len()))),
        Codec::Lz4 => {
            let mut block = vec![0; BLOCK_BYTES];
            match lz4_flex::block::decompress_into(stored, &mut block) {
                Ok(BLOCK_BYTES) => Ok(Bytes::from(block)),
                Ok(got) => Err(Error::corrupt(WHAT, format!("{got} bytes after lz4"))),
                Err(error) => Err(Error::corrupt(WHAT, format!("lz4: {error}"))),
            }
        }
    }
}

/// Makes a block ready to be stored: compressed where that saves at least one eighth.
pub(crate) fn prepare_block(hash: ContentHash, block: Bytes, compress: bool) -> PreparedChunk {
    let mut codec = Codec::Raw;
    let mut stored = block;
    if compress && looks_compressible(&stored) {
        let packed = lz4_flex::block::compress(&stored);
        if packed.len() <= BLOCK_BYTES - BLOCK_BYTES / 8 {
            codec = Codec::Lz4;
            stored = Bytes::from(packed);
        }
    }
    PreparedChunk { hash, codec, crc: crc32c::crc32c(&stored), stored }
}

/// A cheap guess that spares random bytes the compressor: of 64 bytes taken across the block,
/// random ones repeat about 7 times (64 * 63 / 2 / 256); text and machine code far more.
fn looks_compressible(block: &[u8]) -> bool {
    const SAMPLES: usize = 64;
    const REPEATS_OF_RANDOM_MAX: usize = 14;
    let mut seen = [false; 256];
    let repeats = block
        .iter()
        .step_by(BLOCK_BYTES / SAMPLES)
        .filter(|&&byte| std::mem::replace(&mut seen[usize::from(byte)], true))
        .count();
    repeats > REPEATS_OF_RANDOM_MAX
}

/// Whether every byte is zero.
pub(crate) fn is_zero(block: &[u8]) -> bool {
    let (words, rest) = block.as_chunks::<16>();
    rest.iter().all(|&byte| byte == 0) && words.iter().all(|word| *word == [0; 16])
}
