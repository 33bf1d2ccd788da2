//! Keys of every family; the table stands in `record.rs`.

use super::two;
use crate::id::{ChunkId, ContentHash, InodeId, LayerId, SegmentId, SnapshotId};

pub(crate) const META_STORE: &[u8] = b"store";
pub(crate) const META_COUNTERS: &[u8] = b"counters";
pub(crate) const META_POSITION: &[u8] = b"position";
pub(crate) const META_HASHED: &[u8] = b"hashed";
pub(crate) const META_SCRUB: &[u8] = b"scrub";

pub(crate) fn inode(inode: InodeId) -> Vec<u8> {
    inode.get().to_be_bytes().to_vec()
}

pub(crate) fn dirent(directory: InodeId, name: &[u8]) -> Vec<u8> {
    let mut key = directory.get().to_be_bytes().to_vec();
    key.extend_from_slice(name);
    key
}

pub(crate) fn cookie(directory: InodeId, cookie: u64) -> Vec<u8> {
    two(directory.get(), cookie)
}

pub(crate) fn snapshot(id: SnapshotId) -> Vec<u8> {
    let mut key = vec![b'i'];
    key.extend_from_slice(id.as_bytes());
    key
}

pub(crate) fn snapshot_name(name: &str) -> Vec<u8> {
    let mut key = vec![b'n'];
    key.extend_from_slice(name.as_bytes());
    key
}

/// All snapshots with this label; the id follows.
pub(crate) fn snapshot_label_prefix(label: &str, value: &str) -> Vec<u8> {
    let mut key = vec![b'l'];
    key.extend_from_slice(label.as_bytes());
    key.push(0);
    key.extend_from_slice(value.as_bytes());
    key.push(0);
    key
}

/// All snapshots taken at this path; the id follows.
pub(crate) fn snapshot_path_prefix(path: &[u8]) -> Vec<u8> {
    let mut key = vec![b'p'];
    key.extend_from_slice(path);
    key.push(0);
    key
}

pub(crate) fn layer(layer: LayerId) -> Vec<u8> {
    layer.get().to_be_bytes().to_vec()
}

pub(crate) fn child(parent: LayerId, child: LayerId) -> Vec<u8> {
    two(parent.get(), child.get())
}

pub(crate) fn map(layer: LayerId, block: u64) -> Vec<u8> {
    two(layer.get(), block)
}

/// The first eight bytes of a hash.
pub(crate) fn hash(hash: &ContentHash) -> Vec<u8> {
    hash.as_bytes()[..8].to_vec()
}

/// The page of counts that begins with this chunk.
pub(crate) fn refs(first: ChunkId) -> Vec<u8> {
    first.raw().to_be_bytes().to_vec()
}

pub(crate) fn segment(segment: SegmentId) -> Vec<u8> {
    segment.get().to_be_bytes().to_vec()
}

pub(crate) const QUEUE_DEAD: u8 = 1;
pub(crate) const QUEUE_COLLAPSE: u8 = 2;
pub(crate) const QUEUE_EXPIRY: u8 = 3;

pub(crate) fn queue_layer(kind: u8, layer: LayerId) -> Vec<u8> {
    let mut key = vec![kind];
    key.extend_from_slice(&layer.get().to_be_bytes());
    key
}

/// Sorted by time, so that a sweep stops at the first that is not due.
pub(crate) fn queue_expiry(nanos: u64, id: SnapshotId) -> Vec<u8> {
    let mut key = vec![QUEUE_EXPIRY];
    key.extend_from_slice(&nanos.to_be_bytes());
    key.extend_from_slice(id.as_bytes());
    key
}
