//! File handles: what a client keeps to name an object, good across restarts of the server.
//!
//! ```text
//! 0         1      2       4            20                            36         48
//! +---------+------+-------+------------+-----------------------------+----------+
//! | version | kind | zeros | store id   | inode (8) generation (4) 0s | MAC      |
//! |         |      |       | or another | or snapshot id (16), or 0s  |          |
//! +---------+------+-------+------------+-----------------------------+----------+
//! version 1: mounted by address, with the store's id; 2: of a worker, with its id; 3: of the export, mounted by a secret
//! path, with the id of who mounted it
//! ```
//! Invariants: nothing in a handle changes when the server restarts; nobody without the
//! store's key can make one (the MAC is blake3 keyed by it, over all bytes before); the parent
//! is not in it, so a rename does not change it.
#![deny(clippy::indexing_slicing)]

use slackwater_blockstore::{InodeId, SnapshotId, StoreId};
use subtle::ConstantTimeEq;
use uuid::Uuid;

use crate::scope::MountScope;

/// Bytes of every handle; RFC 1813 section 2.4 allows 64.
pub(crate) const HANDLE_BYTES: usize = VERSION_BYTES + OWNER_BYTES + OBJECT_BYTES + MAC_BYTES;

const VERSION_BYTES: usize = 4; // version, kind, two zeros
const OWNER_BYTES: usize = 16;
const OBJECT_BYTES: usize = 16;
/// 96 bits: a forger needs 2^95 calls on the average.
const MAC_BYTES: usize = 12;
const SIGNED_BYTES: usize = HANDLE_BYTES - MAC_BYTES;

const _: () = assert!(HANDLE_BYTES == 48);
const _: () = assert!(HANDLE_BYTES <= nfsserve::nfs::NFS3_FHSIZE as usize);

const VERSION_PLAIN: u8 = 1;
const VERSION_WORKER: u8 = 2;
const VERSION_EXPORT: u8 = 3;

const KIND_INODE: u8 = 1;
const KIND_SNAPSHOT_DIRECTORY: u8 = 2;
const KIND_SNAPSHOT: u8 = 3;
const KIND_WORKER_ROOT: u8 = 4;
const KIND_WORKERS_DIRECTORY: u8 = 5;

/// A handle as it goes over the wire.
pub(crate) type Handle = [u8; HANDLE_BYTES];

/// What a handle names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// A file, directory, or what else the namespace has.
    Inode {
        /// Its number.
        inode: InodeId,
        /// Its generation: with another one the handle is stale.
        generation: u32,
    },
    /// The virtual directory `.snapshot`.
    SnapshotDirectory,
    /// A snapshot, as a read-only file in it.
    Snapshot(SnapshotId),
    /// What a worker sees as the root.
    WorkerRoot,
    /// What a worker sees as the directory of all workers.
    WorkersDirectory,
}

/// A handle that was decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Decoded {
    /// What it names.
    pub(crate) target: Target,
    /// How it was mounted; none: by address.
    pub(crate) scope: Option<MountScope>,
}

/// The bytes are no handle of this store: NFS3ERR_BADHANDLE.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the handle was not made by this store")]
pub(crate) struct BadHandle;

/// Makes and checks the handles of one store.
pub(crate) struct HandleCodec {
    store: StoreId,
    key: [u8; 32],
}

impl std::fmt::Debug for HandleCodec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The key stays out of logs.
        f.debug_struct("HandleCodec").field("store", &self.store).finish_non_exhaustive()
    }
}

impl HandleCodec {
    /// The codec of the store with this id and key.
    pub(crate) const fn new(store: StoreId, key: [u8; 32]) -> Self {
        Self { store, key }
    }

    fn mac(&self, signed: &[u8]) -> blake3::Hash {
        blake3::keyed_hash(&self.key, signed)
    }

    /// The handle of `target` with this scope, or of a mount by address.
    pub(crate) fn encode(&self, target: Target, scope: Option<MountScope>) -> Handle {
        let (kind, object) = encode_target(target);
        let (version, owner) = match &scope {
            None => (VERSION_PLAIN, self.store.as_bytes()),
            Some(MountScope::Export(holder)) => (VERSION_EXPORT, holder),
            Some(MountScope::Worker(worker_id)) => (VERSION_WORKER, worker_id.as_bytes()),
        };
        let mut handle = [0; HANDLE_BYTES];
        let (signed, mac_room) = handle.split_at_mut(SIGNED_BYTES);
        let bytes = [version, kind, 0, 0].into_iter().chain(*owner).chain(object);
        signed.iter_mut().zip(bytes).for_each(|(place, byte)| *place = byte);
        let mac = self.mac(signed);
        mac_room.iter_mut().zip(mac.as_bytes()).for_each(|(place, byte)| *place = *byte);
        handle
    }

    /// What the handle names, and whose it is.
    pub(crate) fn decode(&self, bytes: &[u8]) -> Result<Decoded, BadHandle> {
        let handle: &Handle = bytes.try_into().map_err(|_| BadHandle)?;
        let (signed, mac) = handle.split_at(SIGNED_BYTES);
        let expected = self.mac(signed);
        let expected = expected.as_bytes().get(..MAC_BYTES).ok_or(BadHandle)?;
        // In constant time, so that the time of an answer does not tell how much of a guess
        // was right.
        if !bool::from(mac.ct_eq(expected)) {
            return Err(BadHandle);
        }
        let (head, rest) = signed.split_first_chunk::<VERSION_BYTES>().ok_or(BadHandle)?;
        let (owner, object) = rest.split_first_chunk::<OWNER_BYTES>().ok_or(BadHandle)?;
        let object: &[u8; OBJECT_BYTES] = object.try_into().map_err(|_| BadHandle)?;
        let (kind, scope) = match *head {
            [VERSION_PLAIN, kind, 0, 0] if owner == self.store.as_bytes() => (kind, None),
            [VERSION_EXPORT, kind, 0, 0] => (kind, Some(MountScope::Export(*owner))),
            [VERSION_WORKER, kind, 0, 0] => {
                (kind, Some(MountScope::Worker(Uuid::from_bytes(*owner))))
            }
            _ => return Err(BadHandle),
        };
        let is_of_worker = matches!(scope, Some(MountScope::Worker(_)));
        let target = decode_target(kind, object, is_of_worker).ok_or(BadHandle)?;
        Ok(Decoded { target, scope })
    }
}

/// The scope that a handle says it has: what it says is true only if the handle decodes.
pub(crate) fn claimed_scope(bytes: &[u8]) -> Option<MountScope> {
    let (head, rest) = bytes.split_first_chunk::<VERSION_BYTES>()?;
    let owner = rest.first_chunk::<OWNER_BYTES>()?;
    match head.first() {
        Some(&VERSION_EXPORT) => Some(MountScope::Export(*owner)),
        Some(&VERSION_WORKER) => Some(MountScope::Worker(Uuid::from_bytes(*owner))),
        _ => None,
    }
}

fn encode_target(target: Target) -> (u8, [u8; OBJECT_BYTES]) {
    match target {
        Target::Inode { inode, generation } => {
            let mut object = [0; OBJECT_BYTES];
            let number = inode.get().to_be_bytes().into_iter();
            let bytes = number.chain(generation.to_be_bytes());
            object.iter_mut().zip(bytes).for_each(|(place, byte)| *place = byte);
            (KIND_INODE, object)
        }
        Target::SnapshotDirectory => (KIND_SNAPSHOT_DIRECTORY, [0; OBJECT_BYTES]),
        Target::Snapshot(id) => (KIND_SNAPSHOT, *id.as_bytes()),
        Target::WorkerRoot => (KIND_WORKER_ROOT, [0; OBJECT_BYTES]),
        Target::WorkersDirectory => (KIND_WORKERS_DIRECTORY, [0; OBJECT_BYTES]),
    }
}

fn decode_target(kind: u8, object: &[u8; OBJECT_BYTES], is_of_worker: bool) -> Option<Target> {
    match kind {
        KIND_INODE => {
            let (number, rest) = object.split_first_chunk::<8>()?;
            let generation = rest.first_chunk::<4>()?;
            Some(Target::Inode {
                inode: InodeId::new(u64::from_be_bytes(*number)),
                generation: u32::from_be_bytes(*generation),
            })
        }
        KIND_SNAPSHOT_DIRECTORY => Some(Target::SnapshotDirectory),
        KIND_SNAPSHOT => Some(Target::Snapshot(SnapshotId::from_bytes(*object))),
        KIND_WORKER_ROOT if is_of_worker => Some(Target::WorkerRoot),
        KIND_WORKERS_DIRECTORY if is_of_worker => Some(Target::WorkersDirectory),
        _ => None,
    }
}

#[cfg(test)]
#[allow(clippy::indexing_slicing, reason = "a panic fails the test")]
mod tests {
    use super::*;

    fn codec(store: u8, key: u8) -> HandleCodec {
        HandleCodec::new(StoreId::from_bytes([store; 16]), [key; 32])
    }

    fn scope(worker: u8) -> Option<MountScope> {
        Some(MountScope::Worker(Uuid::from_bytes([worker; 16])))
    }

    fn decoded() -> Vec<Decoded> {
        let inode =
            Target::Inode { inode: InodeId::new(0x0102_0304_0506), generation: 0xdead_beef };
        let snapshot = Target::Snapshot(SnapshotId::from_bytes([7; 16]));
        let plain = [inode, Target::SnapshotDirectory, snapshot];
        let of_worker = plain.into_iter().chain([Target::WorkerRoot, Target::WorkersDirectory]);
        let of_export =
            plain.map(|target| Decoded { target, scope: Some(MountScope::Export([5; 16])) });
        plain
            .map(|target| Decoded { target, scope: None })
            .into_iter()
            .chain(of_export)
            .chain(of_worker.map(|target| Decoded { target, scope: scope(3) }))
            .collect()
    }

    #[test]
    fn a_handle_names_what_it_was_made_for() {
        for decoded in decoded() {
            // A new codec stands for a restarted server.
            let handle = codec(1, 2).encode(decoded.target, decoded.scope);
            assert_eq!(codec(1, 2).decode(&handle), Ok(decoded));
            assert_eq!(claimed_scope(&handle), decoded.scope);
        }
    }

    #[test]
    fn a_change_of_any_bit_is_noticed() {
        let codec = codec(1, 2);
        for decoded in decoded() {
            let handle = codec.encode(decoded.target, decoded.scope);
            for bit in 0..handle.len() * 8 {
                let mut forged = handle;
                forged[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(codec.decode(&forged), Err(BadHandle), "bit {bit}");
            }
        }
    }

    #[test]
    fn handles_of_other_lengths_stores_and_keys_are_refused() {
        for Decoded { target, scope } in decoded() {
            let handle = codec(1, 2).encode(target, scope);
            for length in 0..handle.len() {
                assert_eq!(codec(1, 2).decode(&handle[..length]), Err(BadHandle));
                claimed_scope(&handle[..length]);
            }
            assert_eq!(codec(1, 2).decode(&[handle.as_slice(), &[0]].concat()), Err(BadHandle));
            assert_eq!(codec(1, 3).decode(&handle), Err(BadHandle));
        }
        let handle = codec(1, 2).encode(Target::SnapshotDirectory, None);
        assert_eq!(codec(2, 2).decode(&handle), Err(BadHandle));
    }

    #[test]
    fn the_views_of_a_worker_are_of_a_worker() {
        for target in [Target::WorkerRoot, Target::WorkersDirectory] {
            for scope in [None, Some(MountScope::Export([5; 16]))] {
                let handle = codec(1, 2).encode(target, scope);
                assert_eq!(codec(1, 2).decode(&handle), Err(BadHandle));
            }
        }
    }

    #[test]
    fn the_layout_is_fixed() {
        let target = decoded()[0].target;
        let object = [0, 0, 1, 2, 3, 4, 5, 6, 0xde, 0xad, 0xbe, 0xef, 0, 0, 0, 0];
        let handle = codec(0xaa, 2).encode(target, None);
        let expected = [&[1, 1, 0, 0][..], &[0xaa; 16], &object].concat();
        assert_eq!(handle[..SIGNED_BYTES], expected);
        for (version, scope) in [(2, scope(0xbb)), (3, Some(MountScope::Export([0xbb; 16])))] {
            let handle = codec(0xaa, 2).encode(target, scope);
            let expected = [&[version, 1, 0, 0][..], &[0xbb; 16], &object].concat();
            assert_eq!(handle[..SIGNED_BYTES], expected);
        }
    }
}
