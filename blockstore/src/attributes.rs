//! SETATTR, and the truncate in it.
//!
//! A truncate costs the same whatever it cuts off. Where the open layer has many entries behind
//! the new end, it is frozen, and one HOLE run in a new layer hides them; collapse takes them
//! away in the background.

use bytes::Bytes;

use crate::access_times;
use crate::core::Core;
use crate::data::read_committed;
use crate::error::{Error, Result};
use crate::file::{File, attributes_of};
use crate::flush::{Prepared, flush_locked, prepare};
use crate::id::{InodeId, LayerId};
use crate::kind::FileKind;
use crate::layer_write::{Ground, write_blocks};
use crate::mapping;
use crate::reclaim;
use crate::record::{Body, InodeRecord, LayerState, Run, Target};
use crate::rights::Rights;
use crate::snapshot::open_layer;
use crate::time::Timestamp;
use crate::transaction::Transaction;
use crate::types::{Attributes, Change, SetAttributes, SetTime};
use crate::units::{
    BLOCK_BYTES, BLOCK_BYTES_U64, FILE_BYTES_MAX, WINDOW_BLOCKS, block_of, blocks_in,
};

/// Map entries, and blocks, that a truncate removes at once; beyond, it freezes the layer.
const TRUNCATE_ENTRIES_MAX: u64 = 256;

/// Permission bits that can be set.
const MODE_MASK: u32 = 0o7777;

/// Attributes that were asked for, checked.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Requested(SetAttributes);

impl Requested {
    pub(crate) fn new(set: &SetAttributes) -> Result<Self> {
        match set.size_bytes {
            Some(got) if got > FILE_BYTES_MAX => {
                Err(Error::FileTooBig { got, limit: FILE_BYTES_MAX })
            }
            _ => Ok(Self(*set)),
        }
    }

    pub(crate) const fn size_bytes(&self) -> Option<u64> {
        self.0.size_bytes
    }

    /// Sets all but the size.
    pub(crate) fn apply_to(&self, record: &mut InodeRecord, now: Timestamp) {
        let time = |set: SetTime| match set {
            SetTime::Now => now,
            SetTime::To(at) => at,
        };
        record.mode = self.0.mode.map_or(record.mode, |mode| mode & MODE_MASK);
        record.uid = self.0.uid.unwrap_or(record.uid);
        record.gid = self.0.gid.unwrap_or(record.gid);
        record.accessed_at = self.0.accessed_at.map_or(record.accessed_at, time);
        record.modified_at = self.0.modified_at.map_or(record.modified_at, time);
    }
}

pub(crate) fn set_in(
    core: &Core,
    inode: InodeId,
    set: &SetAttributes,
    guard: Option<Timestamp>,
) -> Result<Change> {
    set_judged(core, inode, set, guard, None)
}

pub(crate) fn set_judged(
    core: &Core,
    inode: InodeId,
    set: &SetAttributes,
    guard: Option<Timestamp>,
    judged: Option<Rights>,
) -> Result<Change> {
    let requested = Requested::new(set)?;
    let kind = core.inode(inode)?.kind();
    if kind == FileKind::File {
        return set_file(core, inode, requested, guard, judged);
    }
    if requested.size_bytes().is_some() {
        let what = format!("inode {inode}");
        return Err(Error::WrongKind { what, got: kind, expected: FileKind::File });
    }
    core.commit(move |txn| {
        judged.map_or(Ok(()), |judged| judged.require(txn))?;
        let mut record = txn.inode(inode)?;
        let before = attributes_of(inode, &record);
        check_guard(inode, before.changed_at, guard)?;
        let now = txn.now();
        requested.apply_to(&mut record, now);
        record.changed_at = now;
        txn.put_inode(inode, &record);
        Ok(Change { before, after: attributes_of(inode, &record) })
    })
}

fn check_guard(inode: InodeId, changed_at: Timestamp, guard: Option<Timestamp>) -> Result<()> {
    match guard {
        Some(expected) if expected != changed_at => {
            Err(Error::NotSynchronized { inode: inode.get() })
        }
        _ => Ok(()),
    }
}

fn set_file(
    core: &Core,
    inode: InodeId,
    requested: Requested,
    guard: Option<Timestamp>,
    judged: Option<Rights>,
) -> Result<Change> {
    let file = core.file(inode)?;
    let _flush = file.flush.lock();
    let before = file.state.read().attributes(inode);
    check_guard(inode, before.changed_at, guard)?;
    let _aside = requested.size_bytes().map(|size_bytes| Aside::take(core, &file, size_bytes));
    set_committed(core, &file, requested, judged)
}

/// The attributes, and the time of the last write that is not flushed.
fn seen(file: &File) -> (Attributes, Option<Timestamp>) {
    let state = file.state.read();
    (state.attributes(file.inode), state.pending.map(|pending| pending.modified_at))
}

/// The caller holds the flush lock.
fn set_committed(
    core: &Core,
    file: &File,
    requested: Requested,
    judged: Option<Rights>,
) -> Result<Change> {
    let inode = file.inode;
    // What was written before is committed first, so that it cannot undo a size or a time that
    // is set here. Other attributes do not wait for data, nor for room for it.
    if requested.size_bytes().is_some() || requested.0.modified_at.is_some() {
        flush_locked(core, file)?;
    }
    let cut = match requested.size_bytes() {
        Some(size_bytes) => Some(file.unless_deleted(Cut::plan(core, file, size_bytes))?),
        None => None,
    };
    let noted = requested.0.accessed_at.and_then(|_| access_times::take(file));
    let (before, written) = seen(file);
    let shown_at = before.changed_at;
    core.commit(move |txn| {
        judged.map_or(Ok(()), |judged| judged.require(txn))?;
        let mut record = txn.inode(inode)?;
        let now = txn.now();
        if let Some(cut) = cut {
            txn.cuts_file(inode, cut.size_bytes);
            cut.apply(txn, inode, &mut record)?;
            record.modified_at = now;
        }
        requested.apply_to(&mut record, now);
        // The clock may be behind the one of before the last start.
        record.changed_at = now.behind(shown_at);
        txn.put_inode(inode, &record);
        Ok(())
    })
    .inspect_err(|_| access_times::put_back(core, file, noted))?;
    let (after, written_since) = seen(file);
    // What others wrote meanwhile must not look as if it were of this change: the client would take
    // what it has cached for current. It has not seen these attributes, and so drops that.
    let before = if written_since == written { before } else { after };
    Ok(Change { before, after })
}

/// Dirty blocks that a truncate cuts off are set aside, so that a full store need not find room for
/// them first. They can be read until the truncate is done; dropped before it is (it failed, or
/// panicked), this makes them dirty again, but for those written anew meanwhile.
struct Aside<'a> {
    core: &'a Core,
    file: &'a File,
}

impl<'a> Aside<'a> {
    /// The caller holds the flush lock, so nothing else is aside, and what is being flushed was
    /// left by a flush that panicked.
    fn take(core: &'a Core, file: &'a File, size_bytes: u64) -> Self {
        let mut state = file.state.write();
        let first = blocks_in(size_bytes);
        let (mut behind, newer) = (state.flushing.split_off(&first), state.dirty.split_off(&first));
        core.files.sub_dirty(behind.len() + newer.len());
        behind.extend(newer);
        state.aside = behind;
        Self { core, file }
    }
}

impl Drop for Aside<'_> {
    fn drop(&mut self) {
        let mut state = self.file.state.write();
        let blocks = std::mem::take(&mut state.aside);
        if state.deleted || blocks.is_empty() {
            return;
        }
        for (block, bytes) in blocks {
            if let std::collections::btree_map::Entry::Vacant(entry) = state.dirty.entry(block) {
                entry.insert(bytes);
                self.core.files.add_dirty(1);
            }
        }
        state.dirty_since.get_or_insert_with(std::time::Instant::now);
    }
}

/// A change of size, with all that must be looked up before its transaction.
struct Cut {
    size_bytes: u64,
    /// Visible blocks of data that it takes away.
    used_gone: u64,
    /// The block that the new end falls into, zeroed behind it.
    tail: Prepared,
    ground: Ground,
}

impl Cut {
    /// The caller holds the flush lock and has flushed.
    fn plan(core: &Core, file: &File, size_bytes: u64) -> Result<Self> {
        let (layer, old_bytes, used) = {
            let state = file.state.read();
            state.present(file.inode)?;
            (state.layer()?, state.record.size_bytes, state.record.used_blocks)
        };
        let mut cut =
            Self { size_bytes, used_gone: 0, tail: Prepared::default(), ground: Ground::default() };
        if size_bytes >= old_bytes {
            return Ok(cut);
        }
        cut.used_gone =
            used_gone(core, layer, (blocks_in(size_bytes), blocks_in(old_bytes)), used)?;
        let inside = usize::try_from(size_bytes % BLOCK_BYTES_U64).unwrap_or(0);
        if inside > 0 {
            let block = block_of(size_bytes);
            let mut bytes = read_committed(core, layer, block)?.to_vec();
            bytes[inside..].fill(0);
            debug_assert_eq!(bytes.len(), BLOCK_BYTES, "a block is whole");
            cut.tail = prepare(core, vec![(block, Bytes::from(bytes))])?;
            cut.ground = Ground::look_up(core, layer, &cut.tail)?;
        }
        Ok(cut)
    }

    fn apply(
        self,
        txn: &mut Transaction<'_>,
        inode: InodeId,
        record: &mut InodeRecord,
    ) -> Result<()> {
        let old_end = blocks_in(record.size_bytes);
        let first = blocks_in(self.size_bytes);
        if first < old_end {
            txn.frees();
        }
        record.size_bytes = self.size_bytes;
        write_blocks(txn, record, self.tail, &self.ground)?;
        if first < old_end {
            hide(txn, inode, record, (first, old_end))?;
            record.used_blocks = record.used_blocks.saturating_sub(self.used_gone);
        }
        Ok(())
    }
}

/// Makes `[first, end)` of the file read as zeros.
fn hide(
    txn: &mut Transaction<'_>,
    inode: InodeId,
    record: &mut InodeRecord,
    (first, end): (u64, u64),
) -> Result<()> {
    let Body::File { layer, .. } = &mut record.body else {
        return Ok(());
    };
    let mut open = txn.layer(*layer)?;
    let hole = Run { first, count: end - first, target: Target::Hole };
    if open.runs <= TRUNCATE_ENTRIES_MAX && open.blocks <= TRUNCATE_ENTRIES_MAX {
        let taken = mapping::take(txn, *layer, (first, end))?;
        mapping::release(txn, &taken)?;
        return if open.parent.is_some() { mapping::place(txn, *layer, hole) } else { Ok(()) };
    }
    let frozen = *layer;
    open.state = LayerState::Frozen;
    open.children += 1;
    txn.put_layer(frozen, &open);
    *layer = txn.make_layer(&open_layer(inode, Some(frozen)))?;
    mapping::place(txn, *layer, hole)?;
    // It has no snapshot and one child: collapse takes away what the hole hides.
    reclaim::layer_released(txn, frozen)
}

/// Of `used` visible blocks of data in `[0, old_end)` those from block `first` on. Each window of one side
/// is looked at: of the shorter one, as what was cut off may be nearly all of a disk.
fn used_gone(core: &Core, layer: LayerId, (first, old_end): (u64, u64), used: u64) -> Result<u64> {
    if first == 0 {
        return Ok(used);
    }
    if first <= old_end / 2 {
        return Ok(used.saturating_sub(used_in(core, layer, (0, first))?));
    }
    used_in(core, layer, (first, old_end))
}

/// Visible blocks of data in `[first, end)`.
fn used_in(core: &Core, layer: LayerId, (first, end): (u64, u64)) -> Result<u64> {
    let chain = core.resolver.chain(layer)?;
    let mut used = 0;
    let mut window = first / WINDOW_BLOCKS;
    while let Some(found) = core.resolver.next_visible(&chain, &chain, window)? {
        let start = found * WINDOW_BLOCKS;
        if start >= end {
            break;
        }
        let resolved = core.resolver.window(layer, found)?;
        let (from, to) = (first.saturating_sub(start), (end - start).min(WINDOW_BLOCKS));
        let parts = resolved.runs().iter().filter_map(|run| run.cut(from, to));
        used += parts.map(|part| part.count).sum::<u64>();
        window = found + 1;
    }
    Ok(used)
}

#[cfg(test)]
mod tests;
