//! What a fuzzer drives, from bytes of its choice: archives of layers and recordings. Only
//! tests and fuzz targets call it; no program does.
//!
//! ```text
//! bytes -> members with odd names, links, sizes, records -> recognise, unpack, replay
//! ```
//! Each function panics where this crate breaks a promise; a test and a fuzz target find the
//! same faults from the same bytes.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use arbitrary::{Result as Chosen, Unstructured};

use crate::header::{self, BLOCK_BYTES};
use crate::pax::{self, Records};
use crate::recording::{CHUNK_END, CHUNK_KEPT, CHUNK_RECORDS, MAGIC, RECORD_CONTENT, RECORD_RAW};
use crate::reference::{REFERENCE_LINK, REFERENCE_LINK_TARGET};
use crate::{Recognised, Reference, image, recognise, replay, unpack};

/// Members of one archive: enough that they meet.
const MEMBERS_MAX: usize = 24;

/// Names that mean something together.
const NAMES: [&[u8]; 25] = [
    b"a",
    b"b",
    b"a/b",
    b"a/b/c",
    b"b/c",
    b"./a",
    b"/a",
    b"a/",
    b"",
    b".",
    b"..",
    b"a/..",
    b"../outside/secret",
    b"a/../../outside/secret",
    b".wh.a",
    b".wh..wh..opq",
    b"a/.wh.b",
    b"a/.wh..wh..opq",
    b".wh.",
    b".wh..",
    b".wh...",
    b".wh..wh.plnk/1",
    b".slackwater-reference",
    b"./.slackwater-reference",
    REFERENCE_LINK.as_bytes(),
];

/// Targets of links.
const LINKS: [&[u8]; 11] = [
    b"a",
    b"b",
    b".",
    b"..",
    b"/",
    b"../outside",
    b"../../outside/secret",
    b"/a/b",
    b"a/b",
    b"",
    REFERENCE_LINK_TARGET.as_bytes(),
];

/// Contents of a field that holds a number.
const NUMBERS: [&[u8]; 10] = [
    b"0000644\0",
    b"7777777\0",
    b"",
    b"99999\0",
    b"-1\0",
    b"\x80\0\0\0\0\0\0\x01",
    b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\x80\0\0\0\x7f\xff\xff\xff\xff\xff\xff\xff",
    b"777777777777",
    b"\xbf\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
];

const RECORD_KEYS: [&[u8]; 9] = [
    b"path",
    b"linkpath",
    b"size",
    b"mtime",
    b"uid",
    b"gid",
    b"SCHILY.xattr.user.note",
    b"SCHILY.xattr.trusted.overlay.opaque",
    b"GNU.sparse.major",
];

const RECORD_VALUES: [&[u8]; 11] = [
    b"a",
    b"../outside/secret",
    b"0",
    b"7",
    b"-1",
    b"1.5",
    b"-0.000000001",
    b"9223372036854775807",
    b"18446744073709551616",
    b"-9223372036854775808.1",
    b"",
];

/// One of `all`, or bytes of the fuzzer's own.
fn pick(choices: &mut Unstructured<'_>, all: &[&[u8]]) -> Chosen<Vec<u8>> {
    if choices.ratio(7, 8)? {
        return Ok(choices.choose(all)?.to_vec());
    }
    let length = choices.int_in_range(0..=300)?;
    Ok(choices.bytes(length.min(choices.len()))?.to_vec())
}

/// A header whose checksum is right, if it is to be.
fn header(
    choices: &mut Unstructured<'_>,
    kind: u8,
    size_bytes: usize,
) -> Chosen<[u8; BLOCK_BYTES]> {
    let mut builder = header::Builder::new(kind)
        .text(header::NAME, &pick(choices, &NAMES)?)
        .text(header::LINK, &pick(choices, &LINKS)?)
        .number(header::MODE, 0o644)
        .number(header::SIZE, size_bytes as u64);
    if choices.ratio(1, 8)? {
        let fields =
            [header::MODE, header::UID, header::GID, header::SIZE, header::MTIME, header::MAJOR];
        builder = builder.text(choices.choose(&fields)?.clone(), choices.choose(&NUMBERS)?);
    }
    if kind == b'S' {
        let map = [choices.choose(&NUMBERS)?.to_vec(), b"5\0".to_vec()].concat();
        builder = builder.text(header::SPARSE, &map).text(header::SPARSE_REAL_SIZE, b"1000\0");
    }
    let mut block = builder.finish();
    if choices.ratio(1, 16)? {
        let place = choices.choose_index(BLOCK_BYTES)?;
        block[place] ^= choices.arbitrary::<u8>()?;
    }
    Ok(block)
}

fn member(choices: &mut Unstructured<'_>, archive: &mut Vec<u8>) -> Chosen<()> {
    let kind = *choices.choose(b"00000555512223467xxLKgS\0V")?;
    let content = match kind {
        b'x' | b'g' => {
            let mut records = Records::new();
            for _ in 0..choices.int_in_range(0..=3)? {
                records.insert(pick(choices, &RECORD_KEYS)?, pick(choices, &RECORD_VALUES)?);
            }
            pax::compose(&records)
        }
        b'L' | b'K' => pick(choices, &NAMES)?,
        b'0' | b'S' => {
            let texts: [&[u8]; 5] = [
                b"",
                b"hello",
                &[7; 600],
                b"{\"slackwater\":1,\"store_id\":\"s\",\"snapshot_id\":\"01234567-89ab-cdef-0123-456789abcdef\",\"size_bytes\":1}",
                b"{\"slackwater\":2,\"store_id\":\"s\",\"snapshot_id\":\"01234567-89ab-cdef-0123-456789abcdef\",\"size_bytes\":1,\"mac\":\"0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef\"}",
            ];
            pick(choices, &texts)?
        }
        _ => Vec::new(),
    };
    archive.extend_from_slice(&header(choices, kind, content.len())?);
    archive.extend_from_slice(&content);
    archive.resize(archive.len().next_multiple_of(BLOCK_BYTES), 0);
    Ok(())
}

/// The archive that these bytes choose; any bytes choose one.
#[must_use]
pub fn archive(bytes: &[u8]) -> Vec<u8> {
    let mut choices = Unstructured::new(bytes);
    let mut archive = Vec::new();
    for _ in 0..MEMBERS_MAX {
        if choices.is_empty() || member(&mut choices, &mut archive).is_err() {
            break;
        }
    }
    archive.resize(archive.len() + 2 * BLOCK_BYTES, 0);
    // Some are cut off, or go on.
    match choices.arbitrary::<u8>() {
        Ok(cut @ 1..=30) => archive.truncate(archive.len() / 31 * usize::from(cut)),
        Ok(31) => archive.extend_from_slice(choices.take_rest()),
        _ => {}
    }
    archive
}

/// What the file beside the root holds: no name that an input can choose has it, and it is no longer than
/// what is read of a file that a recording says to have five bytes.
const OUTSIDE: &[u8] = b"hidden";

/// A directory for one layer, beside what no layer may touch.
struct Place {
    folder: PathBuf,
    outside: (i64, i64, u64, usize),
}

impl Place {
    fn new(folder: &Path) -> std::io::Result<Self> {
        let _ = std::fs::remove_dir_all(folder);
        std::fs::create_dir_all(folder.join("root"))?;
        std::fs::create_dir(folder.join("outside"))?;
        std::fs::write(folder.join("outside/secret"), OUTSIDE)?;
        let mut place = Self { folder: folder.to_owned(), outside: (0, 0, 0, 0) };
        place.outside = place.look_outside()?;
        Ok(place)
    }

    fn look_outside(&self) -> std::io::Result<(i64, i64, u64, usize)> {
        let secret = self.folder.join("outside/secret").symlink_metadata()?;
        let names = std::fs::read_dir(self.folder.join("outside"))?.count();
        Ok((secret.ctime(), secret.ctime_nsec(), secret.nlink(), names))
    }
}

fn sound<T>(outcome: std::io::Result<T>) -> T {
    match outcome {
        Ok(value) => value,
        Err(error) => panic!("a place for a layer: {error}"),
    }
}

/// The archive that `bytes` choose, unpacked below `folder`, which is emptied first. Nothing
/// beside its root changes; what is unpacked is replayed byte for byte; what is recognised as no
/// reference comes out as it went in. An image of it is written, or an error, also above what was
/// unpacked.
///
/// # Panics
/// Where one of these does not hold, or the file system fails.
pub fn layers(bytes: &[u8], folder: &Path) {
    let archive = archive(bytes);
    match recognise(&archive[..]) {
        Ok(Recognised::Reference(reference)) => check_reference(&reference),
        Ok(Recognised::Ordinary(mut stream)) => {
            let mut same = Vec::new();
            sound(stream.read_to_end(&mut same));
            assert_eq!(same, archive, "an ordinary archive came out otherwise");
        }
        Err(_) => {}
    }
    let place = sound(Place::new(folder));
    let (root, recording) = (folder.join("root"), folder.join("recording"));
    let unpacked = unpack(&archive[..], &root, Some(&recording));
    assert_eq!(sound(place.look_outside()), place.outside, "the outside was touched");
    assert_eq!(unpacked.is_ok(), recording.exists(), "a recording stands for what was unpacked");
    if unpacked.is_ok() {
        let mut same = Vec::new();
        if let Err(error) = replay(&recording, &root, &mut same) {
            panic!("what was unpacked cannot be replayed: {error}");
        }
        assert!(same == archive, "the replay is another archive");
    }
    for below in [None, Some(&*root)] {
        let target = sound(
            File::options().read(true).write(true).create_new(true).open(folder.join("image")),
        );
        let imaged = image(&archive[..], below, target, Some(&folder.join("image-recording")));
        assert_eq!(imaged.is_ok(), folder.join("image-recording").exists());
        sound(std::fs::remove_file(folder.join("image")));
        let _ = std::fs::remove_file(folder.join("image-recording"));
    }
    assert_eq!(sound(place.look_outside()), place.outside, "the outside was touched");
}

fn check_reference(reference: &Reference) {
    match recognise(&reference.to_archive()[..]) {
        Ok(Recognised::Reference(same)) => assert_eq!(&same, reference),
        other => panic!("{reference:?} is not recognised once written: {other:?}"),
    }
}

/// The recording that `bytes` choose, replayed over a tree below `folder`: an error, or an
/// archive, and nothing beside the root is read.
///
/// # Panics
/// Where the file system fails.
pub fn recordings(bytes: &[u8], folder: &Path) {
    let mut recording = MAGIC.to_vec();
    let mut choices = Unstructured::new(bytes);
    while !choices.is_empty() && chunk(&mut choices, &mut recording).is_ok() {}
    let place = sound(Place::new(folder));
    sound(std::fs::write(folder.join("root/a"), "hello"));
    sound(std::os::unix::fs::symlink("../outside/secret", folder.join("root/b")));
    let path = folder.join("recording");
    sound(std::fs::write(&path, recording));
    let mut out = Vec::new();
    let _ = replay(&path, &folder.join("root"), &mut out);
    assert!(!out.windows(OUTSIDE.len()).any(|bytes| bytes == OUTSIDE), "the outside was read");
    assert_eq!(sound(place.look_outside()), place.outside);
}

fn chunk(choices: &mut Unstructured<'_>, recording: &mut Vec<u8>) -> Chosen<()> {
    let kind = *choices.choose(&[CHUNK_RECORDS, CHUNK_RECORDS, CHUNK_KEPT, CHUNK_END, 0])?;
    let mut content = Vec::new();
    match kind {
        CHUNK_RECORDS => {
            for _ in 0..choices.int_in_range(0..=3)? {
                record(choices, &mut content)?;
            }
        }
        CHUNK_KEPT => {
            content.extend_from_slice(&choices.int_in_range(0_u64..=2)?.to_le_bytes());
            content.extend_from_slice(b"kept");
        }
        CHUNK_END => {
            content.extend_from_slice(&choices.arbitrary::<u64>()?.to_le_bytes());
            content.extend_from_slice(blake3::hash(b"").as_bytes());
        }
        _ => {}
    }
    if choices.ratio(1, 8)? {
        let length = choices.choose_index(content.len() + 1)?;
        content.truncate(length);
    }
    let stored = lz4_flex::block::compress(&content);
    let mut lengths = [content.len(), stored.len()].map(|length| length as u64);
    if choices.ratio(1, 8)? {
        lengths[usize::from(choices.arbitrary::<bool>()?)] =
            *choices.choose(&[0, 1, 1 << 20, (1 << 20) + 1, 1 << 21, u64::from(u32::MAX)])?;
    }
    recording.push(kind);
    for length in lengths {
        recording.extend_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes());
    }
    recording.extend_from_slice(&stored);
    Ok(())
}

fn record(choices: &mut Unstructured<'_>, content: &mut Vec<u8>) -> Chosen<()> {
    if choices.ratio(1, 2)? {
        let bytes = pick(choices, &NAMES)?;
        let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let length = if choices.ratio(1, 8)? { u32::MAX } else { length };
        content.push(RECORD_RAW);
        content.extend_from_slice(&length.to_le_bytes());
        content.extend_from_slice(&bytes);
        return Ok(());
    }
    let path = pick(choices, &NAMES)?;
    let hash = *choices.choose(&[blake3::hash(b"hello"), blake3::hash(b"kept")])?;
    content.push(RECORD_CONTENT);
    content.extend_from_slice(&choices.choose(&[5, 4, 0, u64::MAX])?.to_le_bytes());
    content.extend_from_slice(hash.as_bytes());
    content.extend_from_slice(&u16::try_from(path.len()).unwrap_or(u16::MAX).to_le_bytes());
    content.extend_from_slice(&path);
    Ok(())
}
