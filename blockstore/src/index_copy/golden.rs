//! The bytes of an index copy, as FORMAT.md has them. The checksums were computed by another
//! program.

use super::format::{Header, Reader, Writer, decode_header};
use crate::disk::{Disk, FileName, FileRole, MemoryDisk};
use crate::error::Result;
use crate::id::{SegmentId, StoreId};
use crate::kv::{Batch, Family, Write};
use crate::record::LogPosition;
use crate::record::golden::hex;

const HEADER: &str = "534c4b4944583032 000102030405060708090a0b0c0d0e0f 0000000000000021
    0000000000000012 0000000000000384 0000000000000029 00000000 aa23ae4f";
const PART: &str = "53574950 00000002 0000001a 00000000 ca2de18d
    00 0008 00000002 706f736974696f6e 0102
    06 0002 00000000 aabb";
const END: &str = "53574945 00000001 0000000000000002 8742d40d";
const END_OF_NOTHING: &str = "53574945 00000000 0000000000000000 924772b2";

const NAME: FileName = FileName { role: FileRole::IndexCopy, number: SegmentId::new(0x21) };

fn header() -> Header {
    let store = StoreId::from_bytes(std::array::from_fn(|byte| u8::try_from(byte).unwrap()));
    let position = LogPosition { segment: SegmentId::new(0x12), offset_bytes: 900, sequence: 41 };
    Header { store, position }
}

fn entries() -> Batch {
    let put = |family, key: &[u8], value: &[u8]| Write {
        family,
        key: key.to_vec(),
        value: Some(value.to_vec()),
    };
    vec![put(Family::Meta, b"position", &[1, 2]), put(Family::Child, &[0xaa, 0xbb], &[])]
}

fn written(entries: &Batch) -> Vec<u8> {
    let disk = MemoryDisk::new();
    let file = disk.create(NAME).unwrap();
    let mut writer = Writer::begin(file.as_ref(), NAME, &header()).unwrap();
    for write in entries {
        writer.push(write.family, &write.key, write.value.as_deref().unwrap()).unwrap();
    }
    let length = writer.finish().unwrap();
    assert_eq!(disk.crash(|| false).used_bytes(), 0, "the name is not synced yet");
    disk.sync_names().unwrap();
    let file = disk.crash(|| false).open(NAME).unwrap();
    assert_eq!(file.length_bytes().unwrap(), length, "all of it is synced");
    file.read_at(0, usize::try_from(length).unwrap()).unwrap()
}

fn read(bytes: &[u8]) -> Result<(Header, Batch)> {
    let disk = MemoryDisk::new();
    let file = disk.create(NAME).unwrap();
    file.write_at(0, bytes).unwrap();
    let mut reader = Reader::begin(file.as_ref(), NAME)?;
    let mut all = Batch::new();
    while let Some(part) = reader.next_part()? {
        all.extend(part);
    }
    assert_eq!(usize::try_from(reader.entries()).unwrap(), all.len());
    Ok((*reader.header(), all))
}

#[test]
fn a_copy_has_these_bytes() {
    let golden = [hex(HEADER), hex(PART), hex(END)].concat();
    assert_eq!(written(&entries()), golden);
    assert_eq!(read(&golden).unwrap(), (header(), entries()));
    assert_eq!(decode_header(NAME, &golden).unwrap(), header());
    let empty = [hex(HEADER), hex(END_OF_NOTHING)].concat();
    assert_eq!(written(&Batch::new()), empty);
    assert_eq!(read(&empty).unwrap(), (header(), Batch::new()));
}

#[test]
fn no_prefix_no_flipped_bit_and_no_byte_more_is_taken_for_it() {
    let golden = [hex(HEADER), hex(PART), hex(END)].concat();
    for length in 0..golden.len() {
        assert!(read(&golden[..length]).is_err(), "{length} bytes");
    }
    for bit in 0..golden.len() * 8 {
        let mut flipped = golden.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert!(read(&flipped).is_err(), "bit {bit}");
    }
    assert!(read(&[&golden[..], &[0]].concat()).is_err(), "a byte more");
    // Parts of the same copy, but not all of them, or one twice.
    assert!(read(&[hex(HEADER), hex(END)].concat()).is_err(), "no part");
    assert!(read(&[hex(HEADER), hex(PART), hex(PART), hex(END)].concat()).is_err(), "twice");
    let other = FileName { number: SegmentId::new(0x22), ..NAME };
    assert!(decode_header(other, &golden).is_err(), "under another name");
}

#[test]
fn many_entries_are_many_parts() {
    let entry = |number: u32| Write {
        family: Family::Map,
        key: number.to_be_bytes().to_vec(),
        value: Some(vec![7; 1000]),
    };
    let entries: Batch = (0..5000).map(entry).collect();
    let bytes = written(&entries);
    let parts = bytes.windows(4).filter(|four| *four == b"SWIP").count();
    assert_eq!(parts, 5, "of 1 MiB and one entry at most");
    assert_eq!(read(&bytes).unwrap().1, entries);
}
