//! The bytes of a segment file, as FORMAT.md has them: a change that moves one of them is a
//! new format, and fails here first. The checksums and hashes were computed by other programs.

use super::*;
use crate::disk::FileRole;
use crate::error::ErrorKind;
use crate::record::golden::hex;

const SEGMENT: SegmentId = SegmentId::new(0x12);

const HEADER: &str = "534c4b5345473032 000102030405060708090a0b0c0d0e0f 01 00000000000000
    0000000000000012 0000000000000000000000000000000000000000 4f23d913";

/// blake3 of the raw block, and of the block of 0xab.
const RAW_HASH: &str = "dfa3703ee031ecdc4720649f5e52d1b73851a22ac1238627a2bce076fe323a4f";
const PACKED_HASH: &str = "6137ffbadc14cb7467070fc77b4a218c6aebe78a7c1236ffc28ca0d0ec95a6c1";

/// 4096 bytes of 0xab as an lz4 block: one literal, a match of 4090 bytes, five literals.
const PACKED: &str = "1f ab 0100 ffffffffffffffffffffffffffffff f6 50 ababababab";

/// Header and entries of a group of both blocks; their stored bytes follow.
const GROUP: &str = "53574347 00000002 0000000000000012 00000005 0000101a 00000000 e9330ef0
    dfa3703ee031ecdc4720649f5e52d1b73851a22ac1238627a2bce076fe323a4f 1000 00 00 d4da57ac
    6137ffbadc14cb7467070fc77b4a218c6aebe78a7c1236ffc28ca0d0ec95a6c1 001a 01 00 5dd101b4";

/// A put, a put of an empty value, and a delete.
const COMMIT: &str = "5357434d 00000023 0000000000000099 b73caf24
    07 01 0003 00000005 6b6579 76616c7565
    06 01 0001 00000000 63
    09 00 0002 00000000 7879";

const EMPTY_COMMIT: &str = "5357434d 00000000 0000000000000001 014728de";

const DIRECTORY: &str = "53574452 00000002 0000000000000012 00000000 bb319d86";

/// The place of the second chunk alone; the first one was dropped.
const PLACES: &str = "00000000 0000 00 00 00000000 00000060 001a 01 01 5dd101b4";

fn store() -> StoreId {
    StoreId::from_bytes(std::array::from_fn(|position| u8::try_from(position).unwrap()))
}

fn name(role: FileRole, number: u64) -> FileName {
    FileName { role, number: SegmentId::new(number) }
}

/// A block that lz4 gains nothing from, as far as these tests go.
fn raw_block() -> Bytes {
    let byte = |position: u32| (position.wrapping_mul(7) ^ (position >> 8)).to_le_bytes()[0];
    (0..4096).map(byte).collect()
}

fn hash(text: &str) -> ContentHash {
    ContentHash::new(hex(text).try_into().unwrap())
}

fn chunks() -> [PreparedChunk; 2] {
    let packed = Bytes::from(hex(PACKED));
    [
        PreparedChunk {
            hash: hash(RAW_HASH),
            codec: Codec::Raw,
            crc: crc32c::crc32c(&raw_block()),
            stored: raw_block(),
        },
        PreparedChunk {
            hash: hash(PACKED_HASH),
            codec: Codec::Lz4,
            crc: crc32c::crc32c(&packed),
            stored: packed,
        },
    ]
}

fn golden_group() -> Vec<u8> {
    [hex(GROUP), raw_block().to_vec(), hex(PACKED)].concat()
}

fn golden_batch() -> Batch {
    let write = |family, key: &[u8], value: Option<&[u8]>| Write {
        family,
        key: key.to_vec(),
        value: value.map(<[u8]>::to_vec),
    };
    vec![
        write(Family::Map, b"key", Some(b"value")),
        write(Family::Child, b"c", Some(b"")),
        write(Family::Refs, b"xy", None),
    ]
}

/// A page: its entries, zeros up to its size, the checksum.
fn page(entries: &str, body_bytes: usize, crc: &str) -> Vec<u8> {
    let mut page = hex(entries);
    page.resize(body_bytes, 0);
    [page, hex(crc)].concat()
}

fn golden_directory() -> Vec<u8> {
    let places = page(PLACES, 3072, "5fc5106f");
    let hashes = page(&[RAW_HASH, PACKED_HASH].concat(), 8192, "2d294e10");
    [hex(DIRECTORY), places, hashes].concat()
}

/// The record at `offset`, as recovery finds it.
fn find_record(
    mut bytes: &[u8],
    store: StoreId,
    offset: usize,
    verify: bool,
) -> Result<Option<(Found, usize)>> {
    let found = stream::find(&mut bytes, store, u64::try_from(offset).unwrap(), verify)?;
    Ok(found.map(|(found, end)| (found, usize::try_from(end).unwrap())))
}

fn is_found(bytes: &[u8], verify: bool) -> bool {
    find_record(bytes, store(), 0, verify).unwrap().is_some()
}

/// No prefix of the record is a record, and no flipped bit of its first `covered` bytes is
/// taken for it.
fn assert_whole(record: &[u8], covered: usize) {
    assert!(is_found(record, true));
    for length in 0..record.len() {
        assert!(!is_found(&record[..length], true), "{length} bytes of {}", record.len());
    }
    for bit in 0..covered * 8 {
        let mut flipped = record.to_vec();
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert!(!is_found(&flipped, true), "bit {bit} is flipped, and nothing noticed");
    }
}

#[test]
fn file_headers() {
    let log = name(FileRole::Log, 0x12);
    let golden = hex(HEADER);
    assert_eq!(encode_file_header(store(), log), golden);
    assert_eq!(golden.len(), FILE_HEADER_BYTES);
    assert_eq!(decode_file_header(log, &golden).unwrap(), store());
    let compacted = hex("534c4b5345473032 000102030405060708090a0b0c0d0e0f 02 00000000000000
        0000000000000013 0000000000000000000000000000000000000000 167c683a");
    assert_eq!(encode_file_header(store(), name(FileRole::Compacted, 0x13)), compacted);

    for length in 0..golden.len() {
        let error = decode_file_header(log, &golden[..length]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{length} bytes");
    }
    for bit in 0..golden.len() * 8 {
        let mut flipped = golden.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert!(decode_file_header(log, &flipped).is_err(), "bit {bit}");
    }
    let error = decode_file_header(name(FileRole::Log, 0x13), &golden).unwrap_err();
    assert!(error.to_string().contains("number 18, expected 19"), "{error}");
}

#[test]
fn a_file_of_another_version_is_refused_even_with_a_good_checksum() {
    for version in [*b"00", *b"01", *b"03", *b"99"] {
        let mut other = hex(HEADER);
        other[6..8].copy_from_slice(&version);
        let crc = crc32c::crc32c(&other[..60]);
        other[60..].copy_from_slice(&crc.to_be_bytes());
        let error = decode_file_header(name(FileRole::Log, 0x12), &other).unwrap_err();
        assert!(error.to_string().contains("expected SLKSEG02"), "{error}");
    }
}

#[test]
fn groups_of_raw_and_lz4_chunks() {
    let mut out = Vec::new();
    let places = encode_group(&mut out, 64, (store(), SEGMENT, 5), &chunks()).unwrap();
    let golden = golden_group();
    assert_eq!(out, golden);
    // The file header, then 32 bytes of group header and 40 for each of two chunks.
    let place = |offset_bytes, chunk: &PreparedChunk| Place {
        offset_bytes,
        stored_bytes: u16::try_from(chunk.stored.len()).unwrap(),
        codec: chunk.codec,
        crc: chunk.crc,
    };
    let expected = [place(64 + 112, &chunks()[0]), place(64 + 112 + 4096, &chunks()[1])];
    assert_eq!(places, expected);

    let bytes = [&[0; 64][..], &golden].concat();
    let (found, end) = find_record(&bytes, store(), 64, true).unwrap().unwrap();
    let Found::Group(group) = found else { panic!("{found:?}") };
    assert_eq!(end, bytes.len());
    assert_eq!((group.segment, group.first_index), (SEGMENT, 5));
    assert_eq!(group.hashes, [hash(RAW_HASH), hash(PACKED_HASH)]);
    assert_eq!(group.places, expected);
}

#[test]
fn a_group_proves_itself_whole() {
    let golden = golden_group();
    // Every bit of headers and entries, and of the packed payload; of the raw one a sample,
    // since its 32768 bits are all alike.
    assert_whole(&golden, 112);
    for position in [112, 113, 2000, 112 + 4095, 112 + 4096, golden.len() - 1] {
        for bit in 0..8 {
            let mut flipped = golden.clone();
            flipped[position] ^= 1 << bit;
            assert!(!is_found(&flipped, true), "byte {position}");
            assert!(is_found(&flipped, false), "payload is verified only when asked for");
        }
    }
}

#[test]
fn chunks_are_restored_and_prove_themselves() {
    let [raw, packed] = chunks();
    for (chunk, block) in [(&raw, raw_block()), (&packed, Bytes::from(vec![0xab; 4096]))] {
        let place = Place {
            offset_bytes: 0,
            stored_bytes: u16::try_from(chunk.stored.len()).unwrap(),
            codec: chunk.codec,
            crc: chunk.crc,
        };
        let restored = restore_block(&place, &chunk.stored).unwrap();
        assert_eq!(restored, block);
        assert_eq!(ContentHash::of(&restored), chunk.hash, "the hash is of the block's bytes");
        for length in 0..chunk.stored.len() {
            assert!(restore_block(&place, &chunk.stored.slice(..length)).is_err());
        }
        let cut = chunk.stored.slice(..chunk.stored.len() - 1);
        let fitting = Place { crc: crc32c::crc32c(&cut), ..place };
        assert!(restore_block(&fitting, &cut).is_err(), "a block of 4095 bytes");
    }
}

#[test]
fn a_block_is_packed_where_that_saves_an_eighth() {
    let prepare = |compress| {
        let block = Bytes::from(vec![0xab; 4096]);
        prepare_block(ContentHash::of(&block), block, compress)
    };
    assert_eq!(prepare(true).codec, Codec::Lz4);
    let plain = prepare(false);
    assert_eq!((plain.codec, plain.stored.len()), (Codec::Raw, 4096));
    assert_eq!(plain.hash, hash(PACKED_HASH));
}

#[test]
fn commit_records() {
    let mut out = Vec::new();
    encode_commit(&mut out, (store(), 0x99), &golden_batch());
    let golden = hex(COMMIT);
    assert_eq!(out, golden);
    let (found, end) = find_record(&golden, store(), 0, true).unwrap().unwrap();
    let Found::Commit { sequence, batch } = found else { panic!("{found:?}") };
    assert_eq!((sequence, batch, end), (0x99, golden_batch(), golden.len()));
    assert_whole(&golden, golden.len());

    let mut out = Vec::new();
    encode_commit(&mut out, (store(), 1), &Batch::new());
    assert_eq!(out, hex(EMPTY_COMMIT));
    assert_whole(&out, out.len());
}

#[test]
fn a_commit_record_with_a_good_checksum_and_bad_content_is_corrupt() {
    for (body, why) in [
        ("0c 01 0000 00000000", "an unknown family"),
        ("00 01 0001 00000000", "a key behind the end"),
        ("00 01 0000 ffffffff", "a value behind the end"),
        ("00 01 0000", "a write cut short"),
    ] {
        let body = hex(body);
        let mut header = hex("5357434d");
        header.extend_from_slice(&u32::try_from(body.len()).unwrap().to_be_bytes());
        header.extend_from_slice(&1_u64.to_be_bytes());
        let crc = crc32c::crc32c(&[store().as_bytes(), &header[..], &body].concat());
        let record = [&header[..], &crc.to_be_bytes(), &body].concat();
        let error = find_record(&record, store(), 0, true).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{why}");
    }
}

fn behind(mut bytes: &[u8], sequence: u64) -> Option<u64> {
    stream::commit_behind(&mut bytes, 0, store(), sequence).unwrap()
}

#[test]
fn a_later_commit_is_found_in_any_bytes() {
    let commit = |sequence| {
        let mut out = Vec::new();
        encode_commit(&mut out, (store(), sequence), &golden_batch());
        out
    };
    let torn = &commit(9)[..30];
    let bytes = [b"SWCMSWCM", &commit(3)[..], b"?", &commit(7), b"!", torn, b"SWCM"].concat();
    assert_eq!(behind(&bytes, 2), Some(7));
    assert_eq!(behind(&bytes, 6), Some(7));
    assert_eq!(behind(&bytes, 7), None, "it is the one that is damaged");
    assert_eq!(behind(&bytes[..bytes.len() - 60], 2), Some(3));
    // Bytes of some other time: so many commits do not fit in between.
    assert_eq!(behind(&commit(5000), 2), None);
    assert_eq!(behind(torn, 2), None);
}

/// Each of a million starts claims half of the bytes: checked one by one they take hours.
#[test]
fn bytes_full_of_starts_of_commits_are_searched_in_time() {
    for sequence in [u64::MAX, 5] {
        let body_bytes = u32::try_from(8 << 20).unwrap();
        let mut start = COMMIT_MAGIC.to_be_bytes().to_vec();
        start.extend_from_slice(&body_bytes.to_be_bytes());
        start.extend_from_slice(&sequence.to_be_bytes());
        let mut bytes = start.repeat((16 << 20) / 16);
        let begin = std::time::Instant::now();
        assert_eq!(behind(&bytes, 2), None);
        assert!(begin.elapsed().as_secs() < 60, "{:?}", begin.elapsed());
        encode_commit(&mut bytes, (store(), 4), &golden_batch());
        assert_eq!(behind(&bytes, 2), Some(4), "behind all of it");
    }
}

#[test]
fn records_of_another_store_are_no_records() {
    let other = StoreId::from_bytes([7; 16]);
    for record in [golden_group(), hex(COMMIT), hex(EMPTY_COMMIT)] {
        assert!(find_record(&record, store(), 0, true).unwrap().is_some());
        assert!(find_record(&record, other, 0, true).unwrap().is_none());
    }
}

#[test]
fn the_bytes_of_a_record_are_known_before_it_is_made() {
    assert_eq!(group_bytes(&chunks()), golden_group().len());
    assert_eq!(commit_bytes(&golden_batch()), hex(COMMIT).len());
    assert_eq!(commit_bytes(&Batch::new()), hex(EMPTY_COMMIT).len());
}

#[test]
fn directories() {
    let place = Place {
        offset_bytes: 0x60,
        stored_bytes: 26,
        codec: Codec::Lz4,
        crc: crc32c::crc32c(&hex(PACKED)),
    };
    let directory = Directory {
        places: vec![None, Some(place)],
        hashes: vec![hash(RAW_HASH), hash(PACKED_HASH)],
    };
    let golden = golden_directory();
    assert_eq!(encode_directory(SEGMENT, &directory), golden);
    assert_eq!(golden.len(), 24 + 3076 + 8196);
    let (found, end) = find_record(&golden, store(), 0, true).unwrap().unwrap();
    assert!(matches!(found, Found::Directory { segment: SEGMENT, chunks: 2 }), "{found:?}");
    assert_eq!(end, golden.len());
    assert_whole(&golden, 24);

    let places = decode_place_page(&golden[24..24 + 3076]).unwrap();
    assert_eq!(places.len(), 256);
    assert_eq!(places[..2], directory.places);
    assert!(places[2..].iter().all(Option::is_none));
    let hashes = decode_hash_page(&golden[24 + 3076..]).unwrap();
    assert_eq!(hashes[..2], directory.hashes);
    assert_eq!(place_page(1000, 2), (1000 + 24 + 2 * 3076, 3076));
    assert_eq!(hash_page(1000, 257, 1), (1000 + 24 + 2 * 3076 + 8196, 8196));
}

#[test]
fn directory_pages_prove_themselves() {
    let golden = golden_directory();
    let (places, hashes) = golden[24..].split_at(3076);
    let samples = |page: &[u8]| (0..48).chain(page.len() - 8..page.len()).collect::<Vec<_>>();
    for position in samples(places) {
        let mut flipped = places.to_vec();
        flipped[position] ^= 0x10;
        assert!(decode_place_page(&flipped).is_err(), "byte {position}");
    }
    for position in samples(hashes) {
        let mut flipped = hashes.to_vec();
        flipped[position] ^= 0x10;
        assert!(decode_hash_page(&flipped).is_err(), "byte {position}");
    }
    for length in 0..places.len() {
        // Four zeros are the checksum of nothing, and so a page of no entry; a reader asks for
        // pages of their full length.
        let is_nothing = places[..length] == [0; 4];
        assert_eq!(decode_place_page(&places[..length]).is_ok(), is_nothing, "{length} bytes");
        assert!(decode_hash_page(&hashes[..length]).is_err(), "{length} bytes");
    }
    let mut unknown_codec = places[..3072].to_vec();
    unknown_codec[12 + 6] = 2;
    let crc = crc32c::crc32c(&unknown_codec);
    unknown_codec.extend_from_slice(&crc.to_be_bytes());
    assert!(decode_place_page(&unknown_codec).is_err(), "codec 2");
}

#[test]
fn other_magics_are_no_records() {
    for magic in [*b"SWCG", *b"SWCM", *b"SWDR"] {
        assert!(!is_found(&magic, true), "a magic alone");
    }
    for bytes in [&b""[..], &[0; 64], &[0xff; 64], b"SWCH and more bytes of whatever it may be"] {
        assert!(!is_found(bytes, true));
    }
}
