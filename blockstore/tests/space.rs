//! The promise on space, at full size on a real disk: the same gigabyte in ten files is stored
//! once, and after deleting all the data directory is as small as an empty one but for what the
//! open segment may hold. Labels count toward the capacity as data does.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

mod common;

use std::path::Path;
use std::time::{Duration, Instant};

use bytes::Bytes;
use common::{assert_sound, path};
use slackwater_blockstore::{
    ErrorKind, FileKind, LABEL_BYTES_MAX, LABELS_MAX, Options, SetAttributes, SnapshotRequest,
    Stability, Store,
};

const GIB: u64 = 1 << 30;
const PIECE: usize = 1 << 20;

/// Megabytes that neither compress nor repeat, told by their numbers: the same random bytes with
/// a stamp in each block, since making ten gigabytes anew would take most of the test's time.
struct Pieces(Vec<u8>);

impl Pieces {
    fn new() -> Self {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut bytes = Vec::with_capacity(PIECE);
        while bytes.len() < PIECE {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            bytes.extend_from_slice(&state.to_le_bytes());
        }
        Self(bytes)
    }

    fn piece(&self, number: u64) -> Bytes {
        let mut bytes = self.0.clone();
        for block in bytes.chunks_exact_mut(4096) {
            block[..8].copy_from_slice(&number.to_le_bytes());
        }
        Bytes::from(bytes)
    }
}

/// Bytes that a directory takes on the disk.
fn disk_usage(directory: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let entries = std::fs::read_dir(directory).unwrap().map(Result::unwrap);
    entries
        .map(|entry| match entry.metadata() {
            Ok(metadata) if metadata.is_dir() => disk_usage(&entry.path()),
            Ok(metadata) => metadata.blocks() * 512,
            // RocksDB removes files while we look.
            Err(_) => 0,
        })
        .sum()
}

fn fill(store: &Store, name: &str, pieces: &Pieces) {
    let inode = store.create_file(&path(name), GIB).unwrap().attributes.inode;
    for number in 0..GIB / PIECE as u64 {
        let offset = number * PIECE as u64;
        store.write(inode, offset, pieces.piece(number), Stability::Unstable).unwrap();
    }
    store.commit(inode).unwrap();
    assert_eq!(store.attributes(inode).unwrap().used_bytes, GIB);
}

#[test]
fn the_same_gigabyte_ten_times_is_stored_once_and_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let options = Options::new(directory.path());
    let store = Store::open(options).unwrap();
    store.close().unwrap();
    drop(store);
    let empty = disk_usage(directory.path());
    let store = Store::open(Options::new(directory.path())).unwrap();
    let pieces = Pieces::new();
    for number in 0..10 {
        fill(&store, &format!("f{number}"), &pieces);
    }
    let stats = store.stats();
    println!("chunks {} bytes, segments and index {} bytes", stats.chunk_bytes, stats.used_bytes);
    assert!(stats.chunk_bytes <= GIB * 102 / 100, "{} bytes of chunks", stats.chunk_bytes);
    assert_eq!(stats.chunk_count, GIB / 4096);
    assert_eq!(stats.mapped_blocks, 10 * GIB / 4096);

    // Zeros and truncates take nothing.
    let zeros = store.create_file(&path("zeros"), 0).unwrap().attributes.inode;
    for number in 0..64 {
        let offset = number * PIECE as u64;
        store.write(zeros, offset, Bytes::from(vec![0; PIECE]), Stability::Unstable).unwrap();
    }
    let set = SetAttributes { size_bytes: Some(1 << 40), ..SetAttributes::default() };
    store.set_attributes(zeros, &set, None).unwrap();
    assert_eq!(store.attributes(zeros).unwrap().used_bytes, 0);
    assert_eq!(store.stats().chunk_count, GIB / 4096);

    for info in store.list_files("", None, 100).unwrap() {
        assert_eq!(info.attributes.kind, FileKind::File);
        store.remove_path(&info.path).unwrap();
    }
    let report = store.gc().unwrap();
    let stats = store.stats();
    assert_eq!((stats.chunk_count, stats.dead_bytes), (0, 0), "{report:?}");
    assert_sound(&store);
    let segment = store.options().segment_bytes;
    store.close().unwrap();
    drop(store);
    let left = disk_usage(directory.path());
    println!("empty {empty} bytes, after deleting all {left} bytes");
    assert!(left <= empty * 105 / 100 + segment, "{left} bytes, empty {empty}");
}

/// Labels of the largest size, all others than those of another number: letters by chance, which hardly compress.
fn labels(number: u64) -> std::collections::BTreeMap<String, String> {
    let mut state = (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut text = || {
        let mut text = String::with_capacity(LABEL_BYTES_MAX);
        while text.len() < LABEL_BYTES_MAX {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let letters = state.to_le_bytes().map(|byte| char::from(b'0' + byte % 64));
            text.extend(letters);
        }
        text
    };
    (0..LABELS_MAX).map(|_| (text(), text())).collect()
}

#[test]
fn a_flood_of_labels_ends_at_the_capacity() {
    const CAPACITY: u64 = 256 << 20;
    let directory = tempfile::tempdir().unwrap();
    let mut options = Options::new(directory.path());
    options.capacity_bytes = Some(CAPACITY);
    let store = Store::open(options).unwrap();
    store.create_file(&path("file"), 0).unwrap();
    let mut made = Vec::new();
    let refused = loop {
        let number = u64::try_from(made.len()).unwrap();
        let request = SnapshotRequest { labels: labels(number), ..SnapshotRequest::default() };
        match store.snapshot(&path("file"), request) {
            Ok(snapshot) => made.push(snapshot.id),
            Err(error) => break error,
        }
        assert!(number < 4 * CAPACITY / (512 << 10), "four times the capacity was taken");
    };
    assert_eq!(refused.kind(), ErrorKind::NoSpace, "{refused}");
    let stats = store.stats();
    println!("{} snapshots, {} bytes used", made.len(), stats.used_bytes);
    assert!(stats.used_bytes <= CAPACITY * 5 / 4, "{} bytes used", stats.used_bytes);
    // Beyond that is what RocksDB writes at the moment: flushes of what it holds, compactions. What these replace goes
    // when they have ended.
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let on_disk = disk_usage(directory.path());
        if on_disk <= CAPACITY * 3 / 2 {
            break;
        }
        assert!(Instant::now() < deadline, "{on_disk} bytes on the disk");
        std::thread::sleep(Duration::from_millis(20));
    }
    // All can be deleted, and then there is room.
    for id in made {
        store.delete_snapshot(id).unwrap();
    }
    store.gc().unwrap();
    assert_sound(&store);
    let request = SnapshotRequest { labels: labels(0), ..SnapshotRequest::default() };
    store.snapshot(&path("file"), request).unwrap();
}
