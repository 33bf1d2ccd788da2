//! References: what an image holds to stand for a snapshot, so that those who pull it get that snapshot.
//!
//! An id is no secret: a container sees those of its neighbours. So a reference carries a message authentication
//! code (MAC) that only the appliance can make, and a worker binds none without it.
//!
//! ```text
//! MAC = BLAKE3 with the key of the data directory, of
//!       "slackwater reference 2\n" | store id 16 | snapshot id 16 | size in bytes, u64, little endian
//! ```
//! It is the same for ever, so that the same snapshot always gives the same bytes (FORMAT.md, "A reference").

use std::fmt;
use std::sync::{Arc, OnceLock};

use slackwater_blockstore::{SnapshotId, StoreId};

/// The first bytes of what the MAC covers: another version of references has other ones.
const DOMAIN: &[u8; 23] = b"slackwater reference 2\n";

/// The key that references are made with. Its `Debug` form shows nothing.
#[derive(Clone)]
pub struct ReferenceKey([u8; Self::BYTES]);

impl ReferenceKey {
    /// Bytes of a key.
    pub const BYTES: usize = 32;

    /// The key with these bytes, which must be random and secret.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    /// The MAC of a reference to that snapshot, in hexadecimal digits.
    pub(crate) fn mac(&self, store: StoreId, snapshot: SnapshotId, size_bytes: u64) -> String {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(DOMAIN).update(store.as_bytes()).update(snapshot.as_bytes());
        hasher.update(&size_bytes.to_le_bytes());
        hasher.finalize().to_hex().to_string()
    }
}

impl From<ReferenceKey> for Arc<OnceLock<ReferenceKey>> {
    fn from(key: ReferenceKey) -> Self {
        Self::new(OnceLock::from(key))
    }
}

impl fmt::Debug for ReferenceKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReferenceKey(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mac_never_changes_and_every_part_counts() {
        let (store, snapshot) = (StoreId::from_bytes([1; 16]), SnapshotId::from_bytes([2; 16]));
        let key = ReferenceKey::from_bytes([3; 32]);
        let mac = key.mac(store, snapshot, 4096);
        assert_eq!(mac, "6948009428bd911b5e8086ed1852614a61225511c2c8203b681dfdec0d662895");
        let others = [
            key.mac(StoreId::from_bytes([0; 16]), snapshot, 4096),
            key.mac(store, SnapshotId::from_bytes([0; 16]), 4096),
            key.mac(store, snapshot, 4097),
            ReferenceKey::from_bytes([0; 32]).mac(store, snapshot, 4096),
        ];
        assert!(!others.contains(&mac), "{others:?}");
        assert_eq!(format!("{key:?}"), "ReferenceKey(..)");
    }
}
