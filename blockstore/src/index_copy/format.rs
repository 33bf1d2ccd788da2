//! The bytes of an index copy.
//!
//! ```text
//! | header | part 0 | part 1 | ... | end |
//! header  64: magic 8 | store id 16 | number 8 | position: segment 8, offset 8, sequence 8
//!             | zeros 4 | crc32c 4
//! part    20: magic 4 | entries 4 | body bytes 4 | number of the part 4 | crc32c 4
//!             body: for each entry: family 1 | key bytes 2 | value bytes 4 | key | value
//! end     20: magic 4 | parts 4 | entries 8 | crc32c 4
//! ```
//! The checksum of a part or of the end covers the 64 bytes of the header too: bytes of another
//! copy, of this store or another, are never taken for it. A copy is whole if it ends with an end
//! that counts what is before it.

use crate::codec::{Decoder, Encoder};
use crate::disk::{DiskFile, FileName};
use crate::error::{Error, Result};
use crate::id::{SegmentId, StoreId};
use crate::kv::{Batch, Family, Write};
use crate::record::LogPosition;

/// The last two characters are the format's version.
const MAGIC: &[u8; 8] = b"SLKIDX02";
const PART_MAGIC: u32 = u32::from_be_bytes(*b"SWIP");
const END_MAGIC: u32 = u32::from_be_bytes(*b"SWIE");

pub(crate) const HEADER_BYTES: usize = 8 + 16 + 8 + 24 + 4 + 4;
const RECORD_HEADER_BYTES: usize = 4 + 4 + 4 + 4 + 4;
const CRC_BYTES: usize = 4;

/// A part is ended by the entry that makes it this long: one write, and one batch when read.
const PART_BYTES: usize = 1 << 20;

/// The longest body of a part: a part, and the longest entry that there may be with room to spare.
const BODY_BYTES_MAX: usize = 16 << 20;

/// What is written between two syncs: a sync of gigabytes at once would hold up the log's.
const UNSYNCED_BYTES_MAX: u64 = 16 << 20;

const _: () = assert!(HEADER_BYTES == 64);

/// What a copy is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) store: StoreId,
    /// All of the log up to here is in the copy, and nothing behind.
    pub(crate) position: LogPosition,
}

fn number(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

fn encode_header(name: FileName, header: &Header) -> Vec<u8> {
    let mut encoder = Encoder::new();
    encoder.raw(MAGIC).raw(header.store.as_bytes()).u64(name.number.get());
    let at = header.position;
    let mut bytes =
        encoder.u64(at.segment.get()).u64(at.offset_bytes).u64(at.sequence).u32(0).finish();
    let crc = crc32c::crc32c(&bytes);
    bytes.extend_from_slice(&crc.to_be_bytes());
    bytes
}

/// Reads the header of a file that must be the copy of this name.
pub(crate) fn decode_header(name: FileName, bytes: &[u8]) -> Result<Header> {
    let fail = |reason: String| Error::corrupt(format!("header of {name}"), reason);
    let Some((body, crc)) = bytes.get(..HEADER_BYTES).and_then(<[u8]>::split_last_chunk::<4>)
    else {
        return Err(fail(format!("{} bytes, expected {HEADER_BYTES}", bytes.len())));
    };
    let mut d = Decoder::new("header of an index copy", body);
    let magic = d.take(MAGIC.len())?;
    if magic != MAGIC {
        let (got, expected) = (magic.escape_ascii(), MAGIC.escape_ascii());
        return Err(fail(format!("magic {got}, expected {expected}")));
    }
    let (got, expected) = (u32::from_be_bytes(*crc), crc32c::crc32c(body));
    if got != expected {
        return Err(fail(format!("crc {got:08x}, expected {expected:08x}")));
    }
    let (store, got) = (StoreId::from_bytes(d.array()?), d.u64()?);
    if got != name.number.get() {
        return Err(fail(format!("number {got}, expected {}", name.number)));
    }
    let segment = SegmentId::new(d.u64()?);
    let position = LogPosition { segment, offset_bytes: d.u64()?, sequence: d.u64()? };
    Ok(Header { store, position })
}

/// Writes a copy, part by part.
pub(crate) struct Writer<'a> {
    file: &'a dyn DiskFile,
    /// The checksum of the header: all others go on from it.
    seed: u32,
    length_bytes: u64,
    unsynced_bytes: u64,
    body: Vec<u8>,
    body_entries: u32,
    parts: u32,
    entries: u64,
}

impl<'a> Writer<'a> {
    pub(crate) fn begin(file: &'a dyn DiskFile, name: FileName, header: &Header) -> Result<Self> {
        let bytes = encode_header(name, header);
        let mut writer = Self {
            file,
            seed: crc32c::crc32c(&bytes),
            length_bytes: 0,
            unsynced_bytes: 0,
            body: Vec::new(),
            body_entries: 0,
            parts: 0,
            entries: 0,
        };
        writer.write(&bytes)?;
        Ok(writer)
    }

    /// Adds an entry; answers how many bytes that made to be written.
    pub(crate) fn push(&mut self, family: Family, key: &[u8], value: &[u8]) -> Result<u64> {
        let (Ok(key_bytes), Ok(value_bytes)) =
            (u16::try_from(key.len()), u32::try_from(value.len()))
        else {
            return Err(Error::invalid("an entry of the index is too long to be copied"));
        };
        self.body.push(family.number());
        self.body.extend_from_slice(&key_bytes.to_be_bytes());
        self.body.extend_from_slice(&value_bytes.to_be_bytes());
        self.body.extend_from_slice(key);
        self.body.extend_from_slice(value);
        self.body_entries += 1;
        if self.body.len() < PART_BYTES { Ok(0) } else { self.end_part() }
    }

    /// Writes the last part and the end, and makes all of it durable. Answers the file's length.
    pub(crate) fn finish(mut self) -> Result<u64> {
        if self.body_entries > 0 {
            self.end_part()?;
        }
        let mut end = Encoder::new().u32(END_MAGIC).u32(self.parts).u64(self.entries).finish();
        let crc = crc32c::crc32c_append(self.seed, &end);
        end.extend_from_slice(&crc.to_be_bytes());
        self.write(&end)?;
        self.file.sync()?;
        Ok(self.length_bytes)
    }

    fn end_part(&mut self) -> Result<u64> {
        let body_bytes = u32::try_from(self.body.len()).unwrap_or(u32::MAX);
        let mut bytes = Encoder::new()
            .u32(PART_MAGIC)
            .u32(self.body_entries)
            .u32(body_bytes)
            .u32(self.parts)
            .finish();
        let crc = crc32c::crc32c_append(crc32c::crc32c_append(self.seed, &bytes), &self.body);
        bytes.extend_from_slice(&crc.to_be_bytes());
        bytes.append(&mut self.body);
        self.parts += 1;
        self.entries += u64::from(std::mem::take(&mut self.body_entries));
        self.write(&bytes)?;
        Ok(number(bytes.len()))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_at(self.length_bytes, bytes)?;
        self.length_bytes += number(bytes.len());
        self.unsynced_bytes += number(bytes.len());
        if self.unsynced_bytes >= UNSYNCED_BYTES_MAX {
            self.file.sync()?;
            self.unsynced_bytes = 0;
        }
        Ok(())
    }
}

/// Reads a copy, part by part, and believes nothing that its checksums do not say.
pub(crate) struct Reader<'a> {
    file: &'a dyn DiskFile,
    name: FileName,
    header: Header,
    seed: u32,
    offset_bytes: u64,
    length_bytes: u64,
    parts: u32,
    entries: u64,
}

impl<'a> Reader<'a> {
    pub(crate) fn begin(file: &'a dyn DiskFile, name: FileName) -> Result<Self> {
        let length_bytes = file.length_bytes()?;
        let count = length_bytes.min(number(HEADER_BYTES));
        let bytes = file.read_at(0, usize::try_from(count).unwrap_or(HEADER_BYTES))?;
        let header = decode_header(name, &bytes)?;
        let (seed, offset_bytes) = (crc32c::crc32c(&bytes), number(HEADER_BYTES));
        Ok(Self { file, name, header, seed, offset_bytes, length_bytes, parts: 0, entries: 0 })
    }

    pub(crate) const fn header(&self) -> &Header {
        &self.header
    }

    /// Entries handed out so far.
    pub(crate) const fn entries(&self) -> u64 {
        self.entries
    }

    pub(crate) const fn length_bytes(&self) -> u64 {
        self.length_bytes
    }

    /// The entries of the next part, as puts; `None` behind the last, at an end that fits.
    pub(crate) fn next_part(&mut self) -> Result<Option<Batch>> {
        let header = self.take(RECORD_HEADER_BYTES)?;
        let (covered, crc) = header.split_at(RECORD_HEADER_BYTES - CRC_BYTES);
        let crc = Decoder::new("checksum of an index copy", crc).u32()?;
        let mut d = Decoder::new("record of an index copy", covered);
        match d.u32()? {
            END_MAGIC => {
                let (parts, entries) = (d.u32()?, d.u64()?);
                self.expect_crc(crc, crc32c::crc32c_append(self.seed, covered))?;
                if (parts, entries) != (self.parts, self.entries) {
                    let (got, has) = (self.entries, self.parts);
                    let reason =
                        format!("{got} entries in {has} parts, expected {entries} in {parts}");
                    return Err(self.corrupt(reason));
                }
                if self.offset_bytes != self.length_bytes {
                    return Err(self.corrupt(format!("the file goes on to {}", self.length_bytes)));
                }
                Ok(None)
            }
            PART_MAGIC => {
                let (entries, body_bytes, part) = (d.u32()?, d.u32()?, d.u32()?);
                let body_bytes = usize::try_from(body_bytes).unwrap_or(usize::MAX);
                if part != self.parts || body_bytes > BODY_BYTES_MAX {
                    let expected = self.parts;
                    let reason =
                        format!("part {part} of {body_bytes} bytes, expected part {expected}");
                    return Err(self.corrupt(reason));
                }
                let body = self.take(body_bytes)?;
                let sum = crc32c::crc32c_append(self.seed, covered);
                self.expect_crc(crc, crc32c::crc32c_append(sum, &body))?;
                let batch = decode_body(&body)?;
                if number(batch.len()) != u64::from(entries) {
                    let reason = format!("{} entries in a part, expected {entries}", batch.len());
                    return Err(self.corrupt(reason));
                }
                self.parts += 1;
                self.entries += u64::from(entries);
                Ok(Some(batch))
            }
            got => Err(self.corrupt(format!("magic {got:08x} is of no record"))),
        }
    }

    fn take(&mut self, count: usize) -> Result<Vec<u8>> {
        if self.offset_bytes.saturating_add(number(count)) > self.length_bytes {
            let reason = format!("{count} bytes expected, the file ends at {}", self.length_bytes);
            return Err(self.corrupt(reason));
        }
        let bytes = self.file.read_at(self.offset_bytes, count)?;
        self.offset_bytes += number(count);
        Ok(bytes)
    }

    fn expect_crc(&self, got: u32, expected: u32) -> Result<()> {
        if got == expected {
            return Ok(());
        }
        Err(self.corrupt(format!("crc {got:08x}, expected {expected:08x}")))
    }

    fn corrupt(&self, reason: String) -> Error {
        Error::corrupt(format!("{} before offset {}", self.name, self.offset_bytes), reason)
    }
}

fn decode_body(body: &[u8]) -> Result<Batch> {
    const WHAT: &str = "part of an index copy";
    let mut d = Decoder::new(WHAT, body);
    let mut batch = Batch::new();
    while !d.is_empty() {
        let (family, key_bytes, value_bytes) = (d.u8()?, d.u16()?, d.u32()?);
        let family = Family::from_number(family)
            .ok_or_else(|| Error::corrupt(WHAT, format!("unknown family {family}")))?;
        let key = d.take(usize::from(key_bytes))?.to_vec();
        let value = d.take(usize::try_from(value_bytes).unwrap_or(usize::MAX))?.to_vec();
        batch.push(Write { family, key, value: Some(value) });
    }
    Ok(batch)
}
