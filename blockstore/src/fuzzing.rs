//! What a fuzzer drives, from bytes of its choice: every decoder of what lies on the disk, and
//! whole stores whose files and index were changed behind their back. Only tests and fuzz targets
//! call it; no program does.
//!
//! Checksums keep nearly all damage out, so here they are made right after the change: what is
//! behind them must hold, too. Each function panics where the store breaks a promise; a test and
//! a fuzz target find the same faults from the same bytes.

use std::fmt::Debug;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;

use crate::disk::{Disk, FileName, FileRole, MemoryDisk};
use crate::error::{Error, Result};
use crate::id::{InodeId, SegmentId, StoreId};
use crate::kind::{DeviceNumber, SpecialFile};
use crate::kv::{Family, MemoryKv};
use crate::name::{FilePath, Name};
use crate::options::Options;
use crate::record::{
    CountPage, Counters, DirentRecord, InodeRecord, LayerRecord, LogPosition, Run, SegmentRecord,
    SnapshotRecord, decode_chunk, decode_cookie, encode_cookie, split_two,
};
use crate::segment_format::{self as format, Found};
use crate::store::Store;
use crate::types::{SetAttributes, SnapshotFilter, SnapshotRequest, Source, Stability};
use crate::units::BLOCK_BYTES;

/// The store of whose frames [`frames`] are.
const STORE: StoreId = StoreId::from_bytes([7; 16]);

/// Changes of one store: more only hide each other.
const CHANGES_MAX: usize = 8;

/// What a decoded value is when it is written and read again: itself.
fn again<T: Debug + PartialEq>(
    decode: impl Fn(&[u8]) -> Result<T>,
    encode: impl Fn(&T) -> Vec<u8>,
    bytes: &[u8],
) {
    if let Ok(value) = decode(bytes) {
        match decode(&encode(&value)) {
            Ok(same) => assert_eq!(same, value),
            Err(error) => panic!("{value:?} is refused once written: {error}"),
        }
    }
}

/// A value of the index: the first byte says of which kind. It is refused, or the same once
/// written and read again.
///
/// # Panics
/// Where it is neither.
pub fn values(bytes: &[u8]) {
    let Some((kind, bytes)) = bytes.split_first() else { return };
    match kind % 15 {
        0 => again(InodeRecord::decode, InodeRecord::encode, bytes),
        1 => again(DirentRecord::decode, |record| record.encode(), bytes),
        2 => {
            if let Ok((inode, name)) = decode_cookie(bytes) {
                assert_eq!(encode_cookie(inode, name), bytes);
            }
        }
        3 => again(SnapshotRecord::decode, SnapshotRecord::encode, bytes),
        4 => again(LayerRecord::decode, LayerRecord::encode, bytes),
        5 => run(bytes),
        6 => again(SegmentRecord::decode, SegmentRecord::encode, bytes),
        7 => again(Counters::decode, Counters::encode, bytes),
        8 => again(LogPosition::decode, LogPosition::encode, bytes),
        9 => again(CountPage::decode, |page| page.encode().unwrap_or_default(), bytes),
        10 => drop((decode_chunk(bytes), split_two("key", bytes))),
        11 => {
            let number = SegmentId::new(1);
            let name = FileName { role: FileRole::Log, number };
            let _ = format::decode_file_header(name, bytes);
        }
        12 => drop(format::decode_place_page(&with_crc(bytes))),
        13 => drop(format::decode_hash_page(&with_crc(bytes))),
        _ => {
            let Some((&codec, stored)) = bytes.split_first() else { return };
            let codec =
                if codec.is_multiple_of(2) { format::Codec::Raw } else { format::Codec::Lz4 };
            let stored_bytes = u16::try_from(stored.len()).unwrap_or(u16::MAX);
            let crc = crc32c::crc32c(stored);
            let place = format::Place { offset_bytes: 0, stored_bytes, codec, crc };
            if let Ok(block) = format::restore_block(&place, &Bytes::copy_from_slice(stored)) {
                assert_eq!(block.len(), BLOCK_BYTES, "a block that is not 4096 bytes");
            }
        }
    }
}

fn run(bytes: &[u8]) {
    let Some((first, bytes)) = bytes.split_first_chunk::<8>() else { return };
    let first = u64::from_be_bytes(*first);
    again(|bytes| Run::decode(first, bytes), Run::encode, bytes);
    if let Ok(run) = Run::decode(first, bytes) {
        // Whatever was decoded can be cut and compared.
        let middle = run.first + run.count / 2;
        let (head, tail) = (run.cut(0, middle), run.cut(middle, u64::MAX));
        let blocks = [head, tail].iter().flatten().map(|part| part.count).sum::<u64>();
        assert_eq!(blocks, run.count);
        assert!(run.target.continues(run.count, run.target.skip(run.count)));
    }
}

/// The bytes with their checksum behind.
fn with_crc(bytes: &[u8]) -> Vec<u8> {
    [bytes, &crc32c::crc32c(bytes).to_be_bytes()].concat()
}

/// The record at `offset` and where it ends, as recovery finds it.
fn find_record(mut bytes: &[u8], offset: usize, verify: bool) -> Result<Option<(Found, usize)>> {
    let offset = u64::try_from(offset).unwrap_or(u64::MAX);
    let found = format::stream::find(&mut bytes, STORE, offset, verify)?;
    Ok(found.map(|(found, end)| (found, usize::try_from(end).unwrap_or(usize::MAX))))
}

/// A segment file of any bytes behind its header, the checksums of its records made right: it is
/// read record by record up to the first that is none.
///
/// # Panics
/// Where a record does not end behind its begin, and inside the file.
pub fn frames(bytes: &[u8]) {
    let mut file = bytes.to_vec();
    let mut offset = 0;
    while offset < file.len() {
        if let Some(rest) = file.get_mut(offset..) {
            format::make_crc_right(rest, STORE);
        }
        for verify in [false, true] {
            if let Ok(Some((_, end))) = find_record(&file, offset, verify) {
                assert!(end > offset && end <= file.len(), "a record from {offset} to {end}");
            }
        }
        match find_record(&file, offset, false) {
            Ok(Some((_, end))) => offset = end,
            Ok(None) | Err(_) => break,
        }
    }
    let sequence = bytes.first().map_or(0, |first| u64::from(*first));
    for sequence in [sequence, u64::MAX - sequence] {
        let _ = format::stream::commit_behind(&mut file.as_slice(), 0, STORE, sequence);
    }
}

fn options() -> Options {
    let mut options = Options::new("unused");
    options.memory_bytes = Options::MEMORY_BYTES_MIN;
    options.hash_threads = 1;
    options.background = false;
    options.steady_clock = Duration::ZERO;
    options.segment_bytes = 1 << 16;
    options
}

/// The content of a block of the store that [`stores`] changes.
fn content(number: u8) -> Vec<u8> {
    // Every other one compresses.
    let byte = |at: usize| {
        let low = u8::try_from(at % 251).unwrap_or_default();
        if number.is_multiple_of(2) { number } else { low.wrapping_mul(low).wrapping_add(number) }
    };
    (0..BLOCK_BYTES).map(byte).collect()
}

/// A store with files, directories, special files, a snapshot, a clone, and more than one segment.
fn sound() -> Result<(MemoryKv, MemoryDisk)> {
    let (kv, disk) = (Arc::new(MemoryKv::new()), MemoryDisk::new());
    let store = Store::open_with(Arc::clone(&kv) as _, Arc::new(disk.clone()), options())?;
    let path = |text: &str| FilePath::parse(text);
    let file = store.create_file(&path("images/base")?, 1 << 20)?.attributes.inode;
    for number in 0..24 {
        let block = Bytes::from(content(number));
        store.write(file, u64::from(number) * 8192, block, Stability::FileSync)?;
    }
    let snapshot = store.snapshot(&path("images/base")?, SnapshotRequest::default())?;
    let clone = store.clone_snapshot(snapshot.id, &path("disks/one")?)?.attributes.inode;
    store.write(clone, 4096, Bytes::from(content(99)), Stability::FileSync)?;
    store.write(file, 0, Bytes::from(content(77)), Stability::FileSync)?;
    let device = SpecialFile::BlockDevice(DeviceNumber { major: 7, minor: 1 });
    for (name, special) in [(b"pipe", SpecialFile::Fifo), (b"loop", device)] {
        let set = SetAttributes::default();
        store.make_special_file(InodeId::ROOT, &Name::new(name)?, special, &set)?;
    }
    store.checkpoint()?;
    // The log goes on behind what the index has.
    store.create_directories(&path("late/one")?)?;
    store.write(clone, 40_960, Bytes::from(content(55)), Stability::FileSync)?;
    drop(store);
    Ok((kv.crash(), disk.crash(|| true)))
}

/// One change of a file or of an entry of the index.
fn change(kv: &MemoryKv, disk: &MemoryDisk, choices: &mut &[u8]) -> Result<()> {
    let mut byte = || {
        let first = choices.split_first();
        first.map_or(0, |(&first, rest)| {
            *choices = rest;
            first
        })
    };
    let (kind, index) = (byte(), usize::from(byte()));
    let at = usize::from(u16::from_be_bytes([byte(), byte()]));
    let new = byte();
    if kind.is_multiple_of(4) {
        let names = disk.list()?;
        let Some(name) = names.get(index % names.len().max(1)) else { return Ok(()) };
        let file = disk.open(*name)?;
        let length = file.length_bytes()?;
        let at = u64::try_from(at).unwrap_or_default() % length.max(1);
        if kind.is_multiple_of(8) {
            return file.write_at(at, &[new]).and_then(|()| file.sync());
        }
        return file.truncate(at).and_then(|()| file.sync());
    }
    let Some(family) = Family::ALL.get(index % Family::ALL.len()).copied() else { return Ok(()) };
    let entries = kv.entries(family);
    let Some((key, value)) = entries.get(usize::from(byte()) % entries.len().max(1)) else {
        return Ok(());
    };
    let (mut key, mut value) = (key.clone(), value.clone());
    let changed = if kind % 16 == 1 { &mut key } else { &mut value };
    let position = at % changed.len().max(1);
    match (kind / 4 % 4, changed.get_mut(position)) {
        (0, Some(place)) => *place ^= new.max(1),
        (1, Some(place)) => *place = if new.is_multiple_of(2) { 0xff } else { 0 },
        (2, _) => changed.truncate(position),
        (3, _) => changed.splice(position.., [0xff; 8]).for_each(drop),
        _ => {}
    }
    kv.tamper(family, &key, (kind % 16 != 2).then_some(value));
    Ok(())
}

/// Everything that a store can be asked.
fn use_store(store: &Store) -> Result<()> {
    let mut outcomes: Vec<Result<()>> = Vec::new();
    let all = 1 << 20;
    let mut sources = Vec::new();
    outcomes.push(store.read_directory(InodeId::ROOT, 0, 100).map(drop));
    for file in store.list_files("", None, 100).unwrap_or_default() {
        sources.push(Source::File(file.attributes.inode));
    }
    let snapshots = store.list_snapshots(&SnapshotFilter::default(), 100).unwrap_or_default();
    sources.extend(snapshots.iter().map(|snapshot| Source::Snapshot(snapshot.id)));
    for source in sources {
        outcomes.push(store.read(source, 0, all).map(drop));
        outcomes.push(store.block_map(source, 0, 1 << 20).map(drop));
        if let Source::File(inode) = source {
            let block = Bytes::from(content(33));
            outcomes.push(store.write(inode, 8192, block, Stability::FileSync).map(drop));
        }
    }
    for snapshot in &snapshots {
        outcomes.push(store.diff(None, snapshot.id, 0, 100).map(drop));
        let path = FilePath::parse("disks/again")?;
        outcomes.push(store.clone_snapshot(snapshot.id, &path).map(drop));
        outcomes.push(store.remove_path(&path));
    }
    outcomes.push(store.check(true).map(drop));
    let old = FilePath::parse("images/base")?;
    outcomes.push(store.rename_path(&old, &FilePath::parse("images/other")?));
    outcomes.push(store.remove_path(&FilePath::parse("disks/one")?));
    for snapshot in &snapshots {
        outcomes.push(store.delete_snapshot(snapshot.id));
    }
    outcomes.push(store.gc().map(drop));
    outcomes.push(store.check(true).map(drop));
    outcomes.push(store.close());
    outcomes.into_iter().collect()
}

/// A store whose files and index entries were changed: it is refused, or every call on it
/// answers, if only with an error.
///
/// # Panics
/// Where a call does.
pub fn stores(bytes: &[u8]) {
    static SOUND: OnceLock<std::result::Result<(MemoryKv, MemoryDisk), Error>> = OnceLock::new();
    let (kv, disk) = match SOUND.get_or_init(sound) {
        Ok((kv, disk)) => (Arc::new(kv.crash()), disk.crash(|| true)),
        Err(error) => panic!("a sound store: {error}"),
    };
    let mut choices = bytes;
    for _ in 0..CHANGES_MAX {
        if choices.is_empty() {
            break;
        }
        if let Err(error) = change(&kv, &disk, &mut choices) {
            panic!("a change behind the store's back: {error}");
        }
    }
    if let Ok(store) = Store::open_with(kv, Arc::new(disk), options()) {
        let outcome = use_store(&store);
        assert!(!bytes.is_empty() || outcome.is_ok(), "an unchanged store: {outcome:?}");
    }
}
