//! Room for what gives room back: a store that is full can still delete, reclaim and compact.
//!
//! ```text
//! capacity   | used | room for data and names | the reserve                                   |
//!                                             | records that change things | that free things |
//! disk       | segments, index | free                          | DATA_DIR/reserve | others ... |
//! ```
//! - What adds something (data, names, snapshots, clones) is refused once only the reserve is left;
//!   what changes something in its place (attributes, renames) once half of that is gone; what
//!   frees something never.
//! - The reserve is kept on the disk as a file of allocated, unused blocks, so that it is there
//!   when somebody else fills the disk. It is given back at the first call that the disk refuses
//!   for want of room, and that frees something or keeps the index durable; it is taken again when
//!   there is room.

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use parking_lot::RwLockWriteGuard;

use crate::core::{Core, Space};
use crate::disk::Disk;
use crate::error::{Error, Result};
use crate::kv::{Batch, Kv};

/// The share of the capacity that is kept.
const SHARE_DIVISOR: u64 = 50;

/// A compaction writes up to a segment before it can free one, and the log rolls meanwhile.
const SEGMENTS: u64 = 2;

/// A small store keeps no more than this share, however large its segments may be.
const SHARE_DIVISOR_MIN: u64 = 8;

/// The reserve of a large store: a few segments suffice.
const BYTES_MAX: u64 = 1 << 30;

/// Room beyond the reserve that must be free before it is taken again, as a multiple of it: it
/// must not take what was just freed from those who waited for it.
const FREE_MULTIPLE: u64 = 2;

/// How long an index without room is waited for: several of its own looks. What it was to apply is
/// durable, so who waited longer than that is told to restart.
const INDEX_PATIENCE: Duration = Duration::from_secs(30);

/// What the C library says of ENOSPC and EDQUOT.
const FULL_TEXTS: [&str; 2] = ["No space left on device", "Disk quota exceeded"];

/// Pause between tries.
const INDEX_RETRY: Duration = Duration::from_millis(100);

/// What a store of this capacity keeps.
pub(crate) fn wanted_bytes(capacity_bytes: u64, segment_bytes: u64) -> u64 {
    let of_segments =
        segment_bytes.saturating_mul(SEGMENTS).min(capacity_bytes / SHARE_DIVISOR_MIN);
    (capacity_bytes / SHARE_DIVISOR).max(of_segments).min(BYTES_MAX)
}

/// Takes the reserve if it is not there and there is room for it. A disk that has none to give
/// is no error: the reserve is then what is left free.
pub(crate) fn take(core: &Core) {
    let space = core.space();
    let (held, wanted) = (core.disk.reserved_bytes(), space.reserve_bytes);
    // What is held beyond what is wanted now was wanted by a larger store, and does no harm.
    let missing = wanted.saturating_sub(held);
    let free = space.disk_free_bytes.saturating_sub(core.kv.needed_bytes());
    if missing == 0 || free / FREE_MULTIPLE < missing {
        return;
    }
    if let Err(error) = core.disk.reserve(wanted) {
        tracing::debug!(%error, "no room is kept for deletes");
    }
}

/// Gives the reserve to the disk; answers whether there was one.
pub(crate) fn give_back(core: &Core) -> bool {
    if core.disk.reserved_bytes() == 0 {
        return false;
    }
    tracing::warn!("the disk is full: the reserve is given back, for deletes and compaction");
    match core.disk.reserve(0) {
        Ok(()) => true,
        Err(error) => {
            tracing::warn!(%error, "the reserve cannot be given back");
            false
        }
    }
}

/// How full the store is, once the index has the room that its next flush needs: it gets the reserve
/// before it fails. RocksDB that found no room takes nothing for as long as less than all its write
/// buffers is free, which may be more than the reserve.
pub(crate) fn space_for_index(core: &Core) -> Space {
    let space = core.space();
    if space.disk_free_bytes < core.kv.needed_bytes() && give_back(core) {
        return core.space();
    }
    space
}

/// Applies a durable batch to the index and answers the structure lock, held exclusively. An index
/// that found no room all the same takes nothing, and RocksDB looks every few seconds whether there is
/// some: it is waited for.
pub(crate) fn apply_to_index<'a>(
    core: &'a Core,
    batch: &Batch,
) -> Result<RwLockWriteGuard<'a, ()>> {
    let deadline = Instant::now() + INDEX_PATIENCE;
    loop {
        let moment = core.resolver.structure.write();
        match core.kv.apply(batch) {
            Ok(()) => return Ok(moment),
            Err(error) if is_full(&error) && Instant::now() < deadline => {
                // Readers go on meanwhile.
                drop(moment);
                if !give_back(core) {
                    std::thread::sleep(INDEX_RETRY);
                }
            }
            Err(error) => return Err(error),
        }
    }
}

/// Tries, and with the reserve of a store that is being opened if there was no room: for up to
/// [`INDEX_PATIENCE`], as an index that found none looks for some every few seconds only.
pub(crate) fn or_give_back<T>(disk: &dyn Disk, attempt: impl FnMut() -> Result<T>) -> Result<T> {
    until_there_is_room(disk, false, attempt)
}

/// `is_given`: the reserve was given back just now.
fn until_there_is_room<T>(
    disk: &dyn Disk,
    mut is_given: bool,
    mut attempt: impl FnMut() -> Result<T>,
) -> Result<T> {
    let deadline = Instant::now() + INDEX_PATIENCE;
    loop {
        match attempt() {
            Err(error) if is_full(&error) && disk.reserved_bytes() > 0 => {
                tracing::warn!(%error, "the disk is full: the reserve is given back, for the index");
                disk.reserve(0)?;
                is_given = true;
            }
            Err(error) if is_full(&error) && is_given && Instant::now() < deadline => {
                std::thread::sleep(INDEX_RETRY);
            }
            outcome => return outcome,
        }
    }
}

/// Applies a batch to the index of a store that is being opened, which gets the reserve before its
/// next flush needs it.
pub(crate) fn fill_index(kv: &dyn Kv, disk: &dyn Disk, batch: &Batch) -> Result<()> {
    fill(disk, kv.needed_bytes(), || kv.apply(batch))
}

fn fill(disk: &dyn Disk, needed_bytes: u64, attempt: impl FnMut() -> Result<()>) -> Result<()> {
    let is_short = disk.reserved_bytes() > 0 && disk.space()?.available_bytes < needed_bytes;
    if is_short {
        disk.reserve(0)?;
    }
    // A flush in the background may have found no room before that.
    until_there_is_room(disk, is_short, attempt)
}

/// Whether the disk refused a call for want of room.
pub(crate) fn is_full(error: &Error) -> bool {
    match error {
        Error::NoSpace { .. } => true,
        Error::Io { source, .. } => {
            matches!(source.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
        }
        // RocksDB has only words for it: those of the system.
        Error::Index { source } => FULL_TEXTS.iter().any(|text| source.as_ref().contains(text)),
        _ => false,
    }
}

/// Tries, and once more with the reserve if there was no room. For what frees something.
pub(crate) fn with_reserve<T>(core: &Core, mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
    match attempt() {
        Err(error) if is_full(&error) && give_back(core) => attempt(),
        outcome => outcome,
    }
}

/// An error that means "full" is told as such.
pub(crate) fn full_or(core: &Core, error: Error) -> Error {
    if is_full(&error) { core.space().full() } else { error }
}

impl Space {
    /// Whether less than half of the reserve is left: only what frees something may go on.
    pub(crate) const fn is_low(&self) -> bool {
        self.capacity_bytes.saturating_sub(self.used_bytes) < self.reserve_bytes / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::MemoryDisk;

    #[test]
    fn an_index_that_found_no_room_before_it_got_the_reserve_is_waited_for() {
        let disk = MemoryDisk::new();
        disk.set_capacity(1 << 20);
        disk.reserve(1 << 19).unwrap();
        let mut tries = 0;
        let attempt = || {
            tries += 1;
            match tries {
                // What it noted in the background.
                1 => Err(Error::io("flush", "the index", ErrorKind::StorageFull.into())),
                _ => Ok(()),
            }
        };
        fill(&disk, 1 << 20, attempt).unwrap();
        assert_eq!((tries, disk.reserved_bytes()), (2, 0));
    }

    #[test]
    fn a_quota_that_is_used_up_is_a_full_disk() {
        let full = |errno: rustix::io::Errno| {
            let source = std::io::Error::from_raw_os_error(errno.raw_os_error());
            (is_full(&Error::io("write", "f", source)), errno.to_string())
        };
        for errno in [rustix::io::Errno::NOSPC, rustix::io::Errno::DQUOT] {
            let (is_full, text) = full(errno);
            assert!(is_full, "{text}");
            assert!(FULL_TEXTS.iter().any(|known| text.contains(known)), "{text}");
        }
        assert!(!full(rustix::io::Errno::IO).0);
    }
}
