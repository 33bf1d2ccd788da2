//! WRITE: data becomes dirty blocks of its file, in memory.
//!
//! Writers never wait for room before their data is taken, only after: see [`write`].

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};

use crate::background::EARLY_COMMIT_BYTES;
use crate::core::{Core, over};
use crate::data::read_committed;
use crate::error::{Error, Result};
use crate::file::{File, FileState, Pending};
use crate::flush::{flush, flush_locked};
use crate::id::InodeId;
use crate::store::Store;
use crate::types::{Attributes, Change, Stability, Written};
use crate::units::{BLOCK_BYTES, BLOCK_BYTES_U64, FILE_BYTES_MAX, block_of, blocks_in};

/// Unflushed bytes of one file beyond which its writers wait: enough for a part that is being
/// written, one that is being hashed, and one that comes in.
const FILE_DIRTY_BYTES_MAX: usize = 24 << 20;

/// Writes of more than this hold the memory that they came in as long as one block of them is
/// dirty; callers bring smaller ones in memory of their own size.
const SMALL_WRITE_BYTES_MAX: usize = 16 << 10;

/// How often a writer that waits for room looks whether it has to make it itself.
const ROOM_PERIOD: Duration = Duration::from_millis(50);

impl Store {
    /// Like [`Store::write`], for a caller that may give up while the store waits for the disk, and
    /// write the same, or something newer, by another way. `is_given_up` is asked in the moment in which
    /// the data would be taken: nothing is written then.
    ///
    /// # Errors
    /// As [`Store::write`], and `Busy` for a write that was given up.
    pub fn write_unless(
        &self,
        inode: InodeId,
        offset_bytes: u64,
        data: Bytes,
        stability: Stability,
        is_given_up: &dyn Fn() -> bool,
    ) -> Result<Written> {
        write_unless(&self.core, inode, (offset_bytes, data), stability, is_given_up)
    }
}

pub(crate) fn write(
    core: &Core,
    inode: InodeId,
    offset_bytes: u64,
    data: Bytes,
    stability: Stability,
) -> Result<Written> {
    write_unless(core, inode, (offset_bytes, data), stability, &|| false)
}

fn write_unless(
    core: &Core,
    inode: InodeId,
    (offset_bytes, data): (u64, Bytes),
    stability: Stability,
    is_given_up: &dyn Fn() -> bool,
) -> Result<Written> {
    core.committer.healthy()?;
    let length = u64::try_from(data.len()).unwrap_or(u64::MAX);
    let end = offset_bytes.checked_add(length).filter(|end| *end <= FILE_BYTES_MAX);
    if end.is_none() {
        let got = offset_bytes.saturating_add(length);
        return Err(Error::FileTooBig { got, limit: FILE_BYTES_MAX });
    }
    // Taken before the data: if a sync fails in between, the client sees an old verifier and
    // sends again (RFC 1813 section 4.8).
    let verifier = core.committer.verifier();
    let file = core.file(inode)?;
    if core.files.is_full() && over(core.files.held_bytes(), core.budget.dirty_bytes) {
        // What is dirty stays so until there is room: taking more would only fill the memory.
        return Err(core.space().full());
    }
    let change = dirty(core, &file, (offset_bytes, &data), is_given_up)?;
    // After the data, not before it: a client that hears nothing for long sends the same write
    // again, and one that waited here in between would put its old bytes over newer ones. Over
    // the budget by what the callers bring at once, which the lanes of NFS and REST bound.
    if over(core.files.held_bytes(), core.budget.dirty_bytes) {
        flush_fullest(core, &file)?;
    }
    if stability == Stability::Unstable {
        make_room(core, &file)?;
        return Ok(Written { file: change, stability, verifier });
    }
    flush(core, &file)?;
    // What others wrote meanwhile is no part of this change: its client would take what it has
    // cached for current.
    let used_bytes = file.state.read().attributes(inode).used_bytes;
    let file = Change { after: Attributes { used_bytes, ..change.after }, ..change };
    Ok(Written { file, stability: Stability::FileSync, verifier })
}

/// Waits until the file has no more unflushed bytes than it may: flushes them, or waits for who
/// does. Backpressure that needs no other thread, and lets a stream of writes go on as soon as
/// the first part of what it brought is committed.
fn make_room(core: &Core, file: &File) -> Result<()> {
    let unflushed = || file.state.read().unflushed_bytes();
    let before = unflushed();
    if before >= EARLY_COMMIT_BYTES {
        core.much_dirty.ring();
    }
    while unflushed() > FILE_DIRTY_BYTES_MAX {
        core.committer.healthy()?;
        match file.flush.try_lock() {
            Some(_flush) => flush_locked(core, file)?,
            None => file.room.wait(ROOM_PERIOD, || unflushed() > FILE_DIRTY_BYTES_MAX),
        }
    }
    Ok(())
}

/// Takes unstable data of whole blocks, or of blocks that are in memory, without waiting for
/// anything; `None` when it would have to.
pub(crate) fn try_write(
    core: &Core,
    inode: InodeId,
    offset_bytes: u64,
    data: &Bytes,
) -> Option<Result<Written>> {
    if let Err(error) = core.committer.healthy() {
        return Some(Err(error));
    }
    let length = u64::try_from(data.len()).ok()?;
    let end = offset_bytes.checked_add(length).filter(|end| *end <= FILE_BYTES_MAX)?;
    if over(core.files.held_bytes().saturating_add(length), core.budget.dirty_bytes) {
        return None;
    }
    let verifier = core.committer.verifier();
    let file = core.files.get(inode)?;
    let (change, dirty_bytes) = {
        let mut state = file.state.try_write()?;
        let dirty_bytes = state.unflushed_bytes() + data.len();
        let known =
            |block: u64| state.unflushed(block).is_some() || block >= blocks_in(state.size_bytes());
        if dirty_bytes > FILE_DIRTY_BYTES_MAX
            || !partial_blocks(offset_bytes, end).into_iter().flatten().all(known)
        {
            return None;
        }
        (put_dirty(core, &file, &mut state, (offset_bytes, data), &[]), dirty_bytes)
    };
    if dirty_bytes >= EARLY_COMMIT_BYTES {
        core.much_dirty.ring();
    }
    Some(change.map(|file| Written { file, stability: Stability::Unstable, verifier }))
}

/// Over the budget, a writer flushes its own file; if that has little, the file with most.
fn flush_fullest(core: &Core, own: &Arc<File>) -> Result<()> {
    let dirty = |file: &File| file.state.read().dirty_bytes();
    let sized = core.files.all().into_iter().map(|file| (dirty(&file), file));
    let own_bytes = dirty(own);
    match sized.max_by_key(|(bytes, _)| *bytes) {
        Some((bytes, file)) if bytes > own_bytes => {
            // Its owner learns of a failure at COMMIT; this writer is only helping.
            match flush(core, &file) {
                Ok(()) | Err(Error::Stale { .. }) => Ok(()),
                Err(error) => Err(error),
            }
        }
        _ => flush(core, own),
    }
}

/// Puts data into the file's dirty blocks, unless that was given up meanwhile.
fn dirty(
    core: &Core,
    file: &File,
    (offset_bytes, data): (u64, &Bytes),
    is_given_up: &dyn Fn() -> bool,
) -> Result<Change> {
    let behind = offset_bytes + u64::try_from(data.len()).unwrap_or(0);
    {
        let mut state = file.state.write();
        let known =
            |block: u64| state.unflushed(block).is_some() || block >= blocks_in(state.size_bytes());
        let partial_known = partial_blocks(offset_bytes, behind).into_iter().flatten().all(known);
        if partial_known {
            refuse_given_up(file, is_given_up)?;
            return put_dirty(core, file, &mut state, (offset_bytes, data), &[]);
        }
    }
    // A partial block that is only in the layer: nobody may change the layer between reading it
    // and making it dirty.
    let _flush = file.flush.lock();
    let layer = {
        let state = file.state.read();
        state.present(file.inode)?;
        state.layer()?
    };
    let mut committed = Vec::new();
    for block in partial_blocks(offset_bytes, behind).into_iter().flatten() {
        committed.push((block, file.unless_deleted(read_committed(core, layer, block))?));
    }
    let mut state = file.state.write();
    refuse_given_up(file, is_given_up)?;
    put_dirty(core, file, &mut state, (offset_bytes, data), &committed)
}

/// A flush may have been waited for, for as long as the disk took. Who gave up meanwhile may have sent
/// the same again and something newer since, and that may have waited for nothing: it must stay.
fn refuse_given_up(file: &File, is_given_up: &dyn Fn() -> bool) -> Result<()> {
    if is_given_up() {
        let (what, reason) = (format!("inode {}", file.inode), "the write was given up".to_owned());
        return Err(Error::Busy { what, reason });
    }
    Ok(())
}

/// The first and the last block of a range, where it covers only part of them.
fn partial_blocks(offset_bytes: u64, behind: u64) -> [Option<u64>; 2] {
    if offset_bytes == behind {
        return [None, None];
    }
    let first = block_of(offset_bytes);
    let last = block_of(behind - 1);
    let head = !offset_bytes.is_multiple_of(BLOCK_BYTES_U64)
        || (first == last && !behind.is_multiple_of(BLOCK_BYTES_U64));
    let tail = !behind.is_multiple_of(BLOCK_BYTES_U64) && last != first;
    [head.then_some(first), tail.then_some(last)]
}

/// Makes the blocks of a range dirty; `committed` holds the partial ones that are in no memory.
fn put_dirty(
    core: &Core,
    file: &File,
    state: &mut FileState,
    (offset_bytes, data): (u64, &Bytes),
    committed: &[(u64, Bytes)],
) -> Result<Change> {
    if state.deleted {
        return Err(Error::Stale { inode: file.inode.get() });
    }
    let before = state.attributes(file.inode);
    if data.len() > SMALL_WRITE_BYTES_MAX {
        core.files.add_large(&mut state.large_bytes, data.len());
    }
    let mut at = 0;
    while at < data.len() {
        let position = offset_bytes + u64::try_from(at).unwrap_or(0);
        let block = block_of(position);
        let inside = usize::try_from(position % BLOCK_BYTES_U64).unwrap_or(0);
        let part = (BLOCK_BYTES - inside).min(data.len() - at);
        let bytes = if part == BLOCK_BYTES {
            data.slice(at..at + part)
        } else {
            let base = state
                .unflushed(block)
                .or_else(|| committed.iter().find(|(b, _)| *b == block).map(|(_, bytes)| bytes));
            let mut patched = BytesMut::zeroed(BLOCK_BYTES);
            if let Some(base) = base {
                patched.copy_from_slice(base);
            }
            patched[inside..inside + part].copy_from_slice(&data[at..at + part]);
            patched.freeze()
        };
        if state.dirty.insert(block, bytes).is_none() {
            core.files.add_dirty(1);
        }
        at += part;
    }
    let end = offset_bytes + u64::try_from(data.len()).unwrap_or(0);
    let now = core.clock.now();
    state.pending = Some(Pending {
        size_bytes: if data.is_empty() { before.size_bytes } else { before.size_bytes.max(end) },
        modified_at: now,
        changed_at: now.behind(before.changed_at),
    });
    state.dirty_since.get_or_insert_with(Instant::now);
    Ok(Change { before, after: state.attributes(file.inode) })
}

#[cfg(test)]
mod tests;
