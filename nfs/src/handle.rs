//! File handles: what a client keeps to name an object, good across restarts of the server.
//!
//! ```text
//! 0         1      2       4            20                            36         48
//! +---------+------+-------+------------+-----------------------------+----------+
//! | version | kind | zeros | store id   | inode (8) generation (4) 0s | MAC      |
//! |         |      |       |            | or snapshot id (16), or 0s  |          |
//! +---------+------+-------+------------+-----------------------------+----------+
//! ```
//! Invariants: nothing in a handle changes when the server restarts; nobody without the
//! store's key can make one (the MAC is blake3 keyed by it, over all bytes before); the parent
//! is not in it, so a rename does not change it.
#![deny(clippy::indexing_slicing)]

use slackwater_blockstore::{InodeId, SnapshotId, StoreId};
use subtle::ConstantTimeEq;

/// Bytes of every handle; RFC 1813 section 2.4 allows 64.
pub(crate) const HANDLE_BYTES: usize = VERSION_BYTES + STORE_BYTES + OBJECT_BYTES + MAC_BYTES;

const VERSION_BYTES: usize = 4; // version, kind, two zeros
const STORE_BYTES: usize = 16;
const OBJECT_BYTES: usize = 16;
/// 96 bits: a forger needs 2^95 calls on the average.
const MAC_BYTES: usize = 12;
const SIGNED_BYTES: usize = HANDLE_BYTES - MAC_BYTES;

const _: () = assert!(HANDLE_BYTES == 48);
const _: () = assert!(HANDLE_BYTES <= nfsserve::nfs::NFS3_FHSIZE as usize);

const VERSION: u8 = 1;
const KIND_INODE: u8 = 1;
const KIND_SNAPSHOT_DIRECTORY: u8 = 2;
const KIND_SNAPSHOT: u8 = 3;

/// A handle as it goes over the wire.
pub(crate) type Handle = [u8; HANDLE_BYTES];

/// What a handle names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// A file, directory or symbolic link of the namespace.
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

    /// The handle of `target`.
    pub(crate) fn encode(&self, target: Target) -> Handle {
        let (kind, object) = match target {
            Target::Inode { inode, generation } => {
                let mut object = [0; OBJECT_BYTES];
                let number = inode.get().to_be_bytes().into_iter();
                let bytes = number.chain(generation.to_be_bytes());
                object.iter_mut().zip(bytes).for_each(|(place, byte)| *place = byte);
                (KIND_INODE, object)
            }
            Target::SnapshotDirectory => (KIND_SNAPSHOT_DIRECTORY, [0; OBJECT_BYTES]),
            Target::Snapshot(id) => (KIND_SNAPSHOT, *id.as_bytes()),
        };
        let mut handle = [0; HANDLE_BYTES];
        let (signed, mac_room) = handle.split_at_mut(SIGNED_BYTES);
        let head = [VERSION, kind, 0, 0].into_iter();
        let bytes = head.chain(*self.store.as_bytes()).chain(object);
        signed.iter_mut().zip(bytes).for_each(|(place, byte)| *place = byte);
        let mac = self.mac(signed);
        mac_room.iter_mut().zip(mac.as_bytes()).for_each(|(place, byte)| *place = *byte);
        handle
    }

    /// What the handle names.
    pub(crate) fn decode(&self, bytes: &[u8]) -> Result<Target, BadHandle> {
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
        let (store, object) = rest.split_first_chunk::<STORE_BYTES>().ok_or(BadHandle)?;
        if store != self.store.as_bytes() {
            return Err(BadHandle);
        }
        let object: &[u8; OBJECT_BYTES] = object.try_into().map_err(|_| BadHandle)?;
        match *head {
            [VERSION, KIND_INODE, 0, 0] => decode_inode(object),
            [VERSION, KIND_SNAPSHOT_DIRECTORY, 0, 0] => Ok(Target::SnapshotDirectory),
            [VERSION, KIND_SNAPSHOT, 0, 0] => Ok(Target::Snapshot(SnapshotId::from_bytes(*object))),
            _ => Err(BadHandle),
        }
    }
}

fn decode_inode(object: &[u8; OBJECT_BYTES]) -> Result<Target, BadHandle> {
    let (number, rest) = object.split_first_chunk::<8>().ok_or(BadHandle)?;
    let generation = rest.first_chunk::<4>().ok_or(BadHandle)?;
    Ok(Target::Inode {
        inode: InodeId::new(u64::from_be_bytes(*number)),
        generation: u32::from_be_bytes(*generation),
    })
}

#[cfg(test)]
#[allow(clippy::indexing_slicing, reason = "a panic fails the test")]
mod tests {
    use super::*;

    fn codec(store: u8, key: u8) -> HandleCodec {
        HandleCodec::new(StoreId::from_bytes([store; 16]), [key; 32])
    }

    fn targets() -> [Target; 3] {
        [
            Target::Inode { inode: InodeId::new(0x0102_0304_0506), generation: 0xdead_beef },
            Target::SnapshotDirectory,
            Target::Snapshot(SnapshotId::from_bytes([7; 16])),
        ]
    }

    #[test]
    fn a_handle_names_what_it_was_made_for() {
        for target in targets() {
            // A new codec stands for a restarted server.
            let handle = codec(1, 2).encode(target);
            assert_eq!(codec(1, 2).decode(&handle), Ok(target));
        }
    }

    #[test]
    fn a_change_of_any_bit_is_noticed() {
        let codec = codec(1, 2);
        for target in targets() {
            let handle = codec.encode(target);
            for bit in 0..HANDLE_BYTES * 8 {
                let mut forged = handle;
                forged[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(codec.decode(&forged), Err(BadHandle), "bit {bit}");
            }
        }
    }

    #[test]
    fn handles_of_other_lengths_stores_and_keys_are_refused() {
        let handle = codec(1, 2).encode(Target::SnapshotDirectory);
        for length in 0..HANDLE_BYTES {
            assert_eq!(codec(1, 2).decode(&handle[..length]), Err(BadHandle));
        }
        assert_eq!(codec(1, 2).decode(&[handle.as_slice(), &[0]].concat()), Err(BadHandle));
        assert_eq!(codec(1, 3).decode(&handle), Err(BadHandle));
        assert_eq!(codec(2, 2).decode(&handle), Err(BadHandle));
    }

    #[test]
    fn the_layout_is_fixed() {
        let handle = codec(0xaa, 2).encode(targets()[0]);
        let mut expected = vec![1, 1, 0, 0];
        expected.extend([0xaa; 16]);
        expected.extend([0, 0, 1, 2, 3, 4, 5, 6, 0xde, 0xad, 0xbe, 0xef, 0, 0, 0, 0]);
        assert_eq!(handle[..SIGNED_BYTES], expected);
    }
}
