//! Reads that may not wait, on real files.

use std::path::Path;

use super::*;
use crate::disk::{Disk, FileName, FileRole, LocalDisk};
use crate::id::SegmentId;
use crate::{FilePath, Options, Stability, Store};

const BLOCKS: usize = 8;

fn open(directory: &Path) -> Arc<Store> {
    let mut options = Options::new(directory);
    options.background = false;
    options.memory_bytes = Options::MEMORY_BYTES_MIN;
    Store::open(options).unwrap()
}

/// Numbers the blocks, and makes them differ.
fn content() -> Vec<u8> {
    (0..BLOCKS * BLOCK_BYTES)
        .map(|at| u8::try_from((at / BLOCK_BYTES + at % 251) % 256).unwrap())
        .collect()
}

fn joined(reply: &ReadReply) -> Vec<u8> {
    reply.pieces.concat()
}

/// Whether reads from the page cache work on the file system of the directory.
fn is_probed(directory: &Path) -> bool {
    let disk = LocalDisk::open(directory).unwrap();
    let name = FileName { role: FileRole::Compacted, number: SegmentId::new(u64::MAX) };
    let file = disk.create(name).unwrap();
    file.write_at(0, b"probe").unwrap();
    let found = file.try_read_at(0, 5);
    disk.remove(name).unwrap();
    found.is_some()
}

#[test]
fn a_read_that_may_not_wait_takes_what_the_kernel_has_and_verifies_it() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    let path = FilePath::parse("f").unwrap();
    let inode = store.create_file(&path, 0).unwrap().attributes.inode;
    store.write(inode, 0, Bytes::from(content()), Stability::FileSync).unwrap();
    store.close().unwrap();
    drop(store);
    let store = open(directory.path());
    let source = Source::File(inode);
    assert!(store.try_read(source, 0, BLOCK_BYTES).is_none(), "the map was not read yet");
    // Puts the map, the directory's page and the file's pages into memory, and block 0 into the
    // block cache.
    let first = store.read(source, 0, BLOCK_BYTES).unwrap();
    assert!(joined(&first) == content()[..BLOCK_BYTES]);
    // By another way than the store's: the blocks get into the page cache, not into its own.
    let log = directory.path().join("log/0000000000000001.seg");
    let mut bytes = std::fs::read(&log).unwrap();
    if is_probed(directory.path()) {
        let reply = store.try_read(source, 3 * BLOCK_BYTES_U64, BLOCK_BYTES).unwrap().unwrap();
        assert!(joined(&reply) == content()[3 * BLOCK_BYTES..4 * BLOCK_BYTES]);
    }
    // Damaged below the store: what may not wait finds nothing, what may says what is wrong.
    let wanted = &content()[5 * BLOCK_BYTES..6 * BLOCK_BYTES];
    let at = bytes.windows(BLOCK_BYTES).position(|part| part == wanted).unwrap();
    bytes[at + 100] ^= 1;
    std::fs::write(&log, &bytes).unwrap();
    assert!(store.try_read(source, 5 * BLOCK_BYTES_U64, BLOCK_BYTES).is_none());
    let error = store.read(source, 5 * BLOCK_BYTES_U64, BLOCK_BYTES).unwrap_err();
    assert!(error.to_string().contains("log/0000000000000001.seg"), "{error}");
}
