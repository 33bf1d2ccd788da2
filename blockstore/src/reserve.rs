//! Room for what gives room back: a store that is full can still delete, reclaim and compact.
//!
//! ```text
//! capacity   | used | room for data and names | the reserve                                   | next start |
//!                                             | records that change things | that free things |
//! disk       | segments, index | free   | DATA_DIR/reserve | DATA_DIR/reserve-start | others ... |
//! ```
//! - What adds something (data, names, labels, snapshots, clones) is refused once only the reserve is left;
//!   what changes something in its place (attributes, renames) once half of that is gone; what
//!   frees something never.
//! - The reserve is kept on the disk as a file of allocated, unused blocks, so that it is there
//!   when somebody else fills the disk. It is given back at the first call that the disk refuses
//!   for want of room, and that frees something or keeps the index durable; it is taken again when
//!   there is room.
//! - A start writes before it can free anything: RocksDB its manifest and options, and a long replay
//!   flushes the index. A second file keeps room for that, so that a server that was killed on a disk
//!   without a free byte starts again. While the store runs, calls that free something may use this
//!   room once the reserve is gone, but never its last part ([`Shares::start_least_bytes`]). It is
//!   allocated again as soon as the index is open.

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use parking_lot::RwLockWriteGuard;

use crate::core::{Core, Space};
use crate::disk::Disk;
use crate::error::{Error, Result, says_full};
use crate::kv::{Batch, Kv, RocksKv};

/// The share of the capacity that is kept.
const SHARE_DIVISOR: u64 = 50;

/// A compaction writes up to a segment before it can free one, and the log rolls meanwhile.
const SEGMENTS: u64 = 2;

/// A small store keeps no more than this share, however large its segments may be.
const SHARE_DIVISOR_MIN: u64 = 8;

/// The reserve of a large store: a few segments suffice.
const BYTES_MAX: u64 = 1 << 30;

/// The share of the reserve that is kept for the next start in addition to it.
const START_SHARE_DIVISOR: u64 = 4;

/// Upper limit of it: half of the write buffers of an index with the default memory. They take less
/// room on the disk than in memory.
const START_BYTES_MAX: u64 = 64 << 20;

/// Upper limit of the part that only a start may use: several steps.
const START_LEAST_BYTES_MAX: u64 = 8 << 20;

/// A start frees this much at a time: more than RocksDB writes when it opens an index (options and a
/// log of 300 KiB, a manifest of 100 bytes a table). If another program takes it and the server is
/// killed at that moment, the next start still has the rest.
const START_STEP_BYTES: u64 = 2 << 20;
const _: () = assert!(START_STEP_BYTES > RocksKv::OPEN_BYTES);
const _: () = assert!(START_LEAST_BYTES_MAX >= 4 * START_STEP_BYTES);

/// Room beyond the reserve that must be free before it is taken again, as a multiple of it: it
/// must not take what was just freed from those who waited for it.
const FREE_MULTIPLE: u64 = 2;

/// How long an index without room is waited for: several of its own looks. What it was to apply is
/// durable, so who waited longer than that is told to restart.
const INDEX_PATIENCE: Duration = Duration::from_secs(30);

/// Pause between tries.
const INDEX_RETRY: Duration = Duration::from_millis(100);

/// What a store keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shares {
    /// For what frees something.
    pub(crate) reserve_bytes: u64,
    /// For the next start, in addition.
    pub(crate) start_bytes: u64,
    /// The part of that which nothing but a start uses.
    pub(crate) start_least_bytes: u64,
}

impl Shares {
    /// Those of a store of this capacity.
    pub(crate) fn of(capacity_bytes: u64, segment_bytes: u64) -> Self {
        let of_segments =
            segment_bytes.saturating_mul(SEGMENTS).min(capacity_bytes / SHARE_DIVISOR_MIN);
        let reserve_bytes = (capacity_bytes / SHARE_DIVISOR).max(of_segments).min(BYTES_MAX);
        let start_bytes = (reserve_bytes / START_SHARE_DIVISOR).min(START_BYTES_MAX);
        let start_least_bytes = (start_bytes / 2).min(START_LEAST_BYTES_MAX);
        Self { reserve_bytes, start_bytes, start_least_bytes }
    }
}

/// Takes the reserves if they are not there and there is room for them. A disk that has none to give
/// is no error: the reserve is then what is left free.
pub(crate) fn take(core: &Core) {
    take_for_start(core);
    let space = core.space();
    let (held, wanted) = (core.disk.reserved_bytes(), space.shares.reserve_bytes);
    // What is held beyond what is wanted now was wanted by a larger store, and does no harm.
    let missing = wanted.saturating_sub(held);
    if missing == 0 || !has_plenty(core, &space, missing) {
        return;
    }
    if let Err(error) = core.disk.reserve(wanted) {
        tracing::debug!(%error, "no room is kept for deletes");
    }
}

/// Allocates again what a start freed, as far as there is room: the server may be killed again, and
/// another program may fill the disk.
pub(crate) fn take_again_at_start(disk: &dyn Disk, held_before_bytes: u64) {
    // A disk that does not tell what is free is asked again while the store runs.
    let free_bytes = disk.space().map_or(0, |space| space.available_bytes);
    hold_for_start(disk, held_before_bytes, free_bytes);
}

/// Holds as much for the next start, or as much of it as there is room for.
fn hold_for_start(disk: &dyn Disk, wanted_bytes: u64, free_bytes: u64) {
    let held = disk.reserved_for_start_bytes();
    let missing = wanted_bytes.saturating_sub(held).min(free_bytes);
    // The file system may need a little of what is free for itself.
    for more in [missing, missing / 8 * 7] {
        if more == 0 {
            return;
        }
        match disk.reserve_for_start(held + more) {
            Ok(()) => return,
            Err(error) => tracing::debug!(%error, more, held, "no room for the next start"),
        }
    }
}

/// Logs that a store starts without room, and what that means.
pub(crate) fn warn_if_full(core: &Core) {
    let space = core.space();
    if space.room_bytes == 0 {
        tracing::warn!(
            used_bytes = space.used_bytes,
            capacity_bytes = space.capacity_bytes,
            disk_free_bytes = space.disk_free_bytes,
            "the store is full: it takes deletes, and no data until files or snapshots are deleted or its disk has room again"
        );
    }
}

/// The least part from whatever is free, all of it where there is plenty.
fn take_for_start(core: &Core) {
    let space = core.space();
    let Shares { start_bytes, start_least_bytes, .. } = space.shares;
    let missing = start_bytes.saturating_sub(core.disk.reserved_for_start_bytes());
    let has_plenty = has_plenty(core, &space, missing);
    let wanted = if has_plenty { start_bytes } else { start_least_bytes };
    hold_for_start(core.disk.as_ref(), wanted, space.disk_free_bytes);
}

/// Whether so much can be taken without taking what was just freed from those who waited for it.
fn has_plenty(core: &Core, space: &Space, missing: u64) -> bool {
    space.disk_free_bytes.saturating_sub(core.kv.needed_bytes()) / FREE_MULTIPLE >= missing
}

/// Frees the reserve, or once that is gone the part of the next start's room that may be used while
/// the store runs. Answers whether something was freed.
pub(crate) fn give_back(core: &Core) -> bool {
    let outcome = if core.disk.reserved_bytes() > 0 {
        tracing::warn!("the disk is full: the reserve is given back, for deletes and compaction");
        core.disk.reserve(0)
    } else {
        let least = core.space().shares.start_least_bytes;
        if core.disk.reserved_for_start_bytes() <= least {
            return false;
        }
        tracing::warn!(
            kept_bytes = least,
            "the disk is full and the reserve is used up: a part of the room for the next start is freed for deletes and compaction"
        );
        core.disk.reserve_for_start(least)
    };
    outcome.inspect_err(|error| tracing::warn!(%error, "the reserve cannot be given back")).is_ok()
}

/// Frees the next step of the room for a start, or once that is gone the reserve. Answers whether
/// something was freed.
fn give_back_at_start(disk: &dyn Disk) -> Result<bool> {
    let for_start = disk.reserved_for_start_bytes();
    if for_start > 0 {
        disk.reserve_for_start(for_start.saturating_sub(START_STEP_BYTES))?;
    } else if disk.reserved_bytes() > 0 {
        disk.reserve(0)?;
    } else {
        return Ok(false);
    }
    Ok(true)
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

/// `is_given`: a reserve was given back just now.
fn until_there_is_room<T>(
    disk: &dyn Disk,
    mut is_given: bool,
    mut attempt: impl FnMut() -> Result<T>,
) -> Result<T> {
    let deadline = Instant::now() + INDEX_PATIENCE;
    loop {
        match attempt() {
            Err(error) if is_full(&error) => {
                if give_back_at_start(disk)? {
                    tracing::warn!(%error, "the disk is full: the index gets a part of the room that is kept for a start");
                    is_given = true;
                } else if is_given && Instant::now() < deadline {
                    std::thread::sleep(INDEX_RETRY);
                } else {
                    return Err(error);
                }
            }
            outcome => return outcome,
        }
    }
}

/// Applies a batch to the index of a store that is being opened, which gets what is kept free before
/// its next flush needs it. A short replay needs none: it stays in memory.
pub(crate) fn fill_index(kv: &dyn Kv, disk: &dyn Disk, batch: &Batch) -> Result<()> {
    let needed_bytes = if kv.is_flush_near() { kv.needed_bytes() } else { 0 };
    fill(disk, needed_bytes, || kv.apply(batch))
}

/// Makes a rebuilt index durable; like a start, it may use all that is kept free.
pub(crate) fn flush_new_index(kv: &dyn Kv, disk: &dyn Disk) -> Result<()> {
    fill(disk, kv.needed_bytes(), || kv.flush())
}

fn fill(disk: &dyn Disk, needed_bytes: u64, attempt: impl FnMut() -> Result<()>) -> Result<()> {
    let mut is_given = false;
    while disk.space()?.available_bytes < needed_bytes && give_back_at_start(disk)? {
        is_given = true;
    }
    // A flush in the background may have found no room before that.
    until_there_is_room(disk, is_given, attempt)
}

/// Whether the disk refused a call for want of room.
pub(crate) fn is_full(error: &Error) -> bool {
    match error {
        Error::NoSpace { .. } => true,
        Error::Io { source, .. } => {
            matches!(source.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
        }
        // RocksDB has only words for it: those of the system.
        Error::Index { source } => says_full(source.as_ref()),
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
        self.capacity_bytes.saturating_sub(self.used_bytes) < self.shares.reserve_bytes / 2
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
            assert!(says_full(&text), "{text}");
        }
        assert!(!full(rustix::io::Errno::IO).0);
    }
}
