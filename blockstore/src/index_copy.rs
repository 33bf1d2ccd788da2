//! A copy of the index beside the log, so that the index can be made anew when it is lost or
//! damaged (`rebuild.rs`): the copy, and what the log says from the copy's position on.
//!
//! ```text
//! log/1 log/2 log/3 log/4 log/5 log/6        compaction moved what lived of 1, 2, 4 and 5
//!              ^ position of the copy        1 and 2 are removed, 4 and 5 are retired:
//! copies/7.idx                               a rebuild needs their commits
//! ```
//! Invariants:
//! - Every log file from the copy's position on is there, whether a segment lies in it or not;
//!   without a copy every log file that ever was, unless the disk was too full.
//! - A copy gets its name when it is whole and synced. An older one, and the retired files before
//!   the new one's position, go after that.
//! - A log file that no segment record names, but the open one, is retired: so a restart finds
//!   them.
//!
//! One copy stays. It is verified by `check`, and written anew when it is damaged; that the index
//! is lost while its copy is damaged takes two faults.

mod format;
#[cfg(test)]
mod golden;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use format::{Header, Reader, Writer};
use parking_lot::Mutex;

use crate::core::Core;
use crate::disk::{Disk, FileName, FileRole};
use crate::error::{Error, Result};
use crate::id::{SegmentId, StoreId};
use crate::kv::{Family, Kv, prefix_end};
use crate::record::{LogPosition, key};
use crate::reserve;

/// Retired files are kept until they take as much as this many segments: a small store would
/// write copies all the time else.
const RETIRED_SEGMENTS_MAX: u64 = 4;

/// And until they take this many times what the copy does. So a copy costs at most a quarter of
/// what it gives back, and what waits is a small share of the data: a copy takes less than 1 % of
/// a store of blocks written in random order, and far less of others.
const RETIRED_COPIES_MAX: u64 = 4;

/// After a copy could not be written, the background waits this long: the next try may have to
/// write all of it again.
const RETRY_PAUSE: Duration = Duration::from_secs(60);

/// A copy that is whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Copy {
    name: FileName,
    position: LogPosition,
    length_bytes: u64,
}

#[derive(Debug, Default)]
struct State {
    current: Option<Copy>,
    /// Log files that only a rebuild needs, with their lengths in bytes.
    retired: BTreeMap<FileName, u64>,
    /// The index could not be made anew from what is there: a copy is due.
    is_lacking: bool,
    /// The last check found that only a rebuild puts the index right: what it would be made from
    /// must not give way to a copy of what is wrong.
    is_index_wrong: bool,
    not_before: Option<Instant>,
}

/// The copy of an open store, and the log files that wait for the next one.
#[derive(Debug, Default)]
pub(crate) struct IndexCopies {
    state: Mutex<State>,
    /// One is written at a time.
    writing: Mutex<()>,
}

/// What a new copy let go.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Renewed {
    pub(crate) files_removed: u64,
    pub(crate) bytes_written: u64,
    pub(crate) bytes_freed: u64,
}

impl IndexCopies {
    /// Finds the copy of `store`, and takes away drafts and older copies. One that cannot be
    /// read stays until there is a new one.
    pub(crate) fn open(disk: &dyn Disk, store: StoreId) -> Result<Self> {
        let mut state = State::default();
        for name in list(disk)?.into_iter().rev() {
            if name.role == FileRole::IndexDraft {
                disk.remove(name)?;
                continue;
            }
            match look_at(disk, name) {
                Ok(copy) if copy.0 == store => {
                    let older = match state.current {
                        Some(known) if known.position >= copy.1.position => Some(copy.1),
                        _ => state.current.replace(copy.1),
                    };
                    if let Some(older) = older {
                        disk.remove(older.name)?;
                    }
                }
                Ok((other, _)) => tracing::warn!(%name, store = %other, "a copy of another store"),
                Err(error) => tracing::warn!(%name, %error, "a copy of the index is damaged"),
            }
        }
        state.is_lacking = is_lacking(&disk.list()?, state.current.as_ref());
        Ok(Self { state: Mutex::new(state), writing: Mutex::new(()) })
    }

    /// Keeps a file that no segment lies in any more, if a rebuild needs it, or a recovery from
    /// the log file `recovered_from` on. If not, it may be removed.
    pub(crate) fn retire(
        &self,
        name: FileName,
        length_bytes: u64,
        recovered_from: SegmentId,
    ) -> bool {
        let mut state = self.state.lock();
        let from = state.current.map_or(SegmentId::new(0), |copy| copy.position.segment);
        let from = from.min(recovered_from);
        let is_needed = name.role == FileRole::Log && name.number >= from;
        if is_needed {
            state.retired.insert(name, length_bytes);
        }
        is_needed
    }

    /// The place of the log from which on a rebuild needs all; `None`: from the very first commit.
    pub(crate) fn needed_from(&self) -> Option<LogPosition> {
        self.state.lock().current.map(|copy| copy.position)
    }

    /// A log file that a rebuild needs is damaged or missing: a copy is due.
    pub(crate) fn note_lacking(&self) {
        self.state.lock().is_lacking = true;
    }

    /// Notes whether a check found problems of the index that only a rebuild solves.
    pub(crate) fn note_index(&self, is_wrong: bool) {
        let was_wrong = std::mem::replace(&mut self.state.lock().is_index_wrong, is_wrong);
        if is_wrong && !was_wrong {
            tracing::error!("the index is to be made anew: until then no copy of it is written");
        }
    }

    /// Whether a rebuild would need something that only a new copy can give, or retired files
    /// wait: what a garbage collection puts right.
    pub(crate) fn is_wanted(&self) -> bool {
        let state = self.state.lock();
        !state.is_index_wrong && (state.is_lacking || !state.retired.is_empty())
    }

    /// Whether the background should write a copy now. `is_idle`: no more is going to be retired.
    pub(crate) fn is_due(&self, core: &Core, is_idle: bool) -> bool {
        let room_bytes = core.space().room_bytes;
        let state = self.state.lock();
        if state.is_index_wrong || state.not_before.is_some_and(|time| Instant::now() < time) {
            return false;
        }
        let retired_bytes: u64 = state.retired.values().sum();
        let Some(copy) = state.current else {
            return retired_bytes > 0 || (state.is_lacking && room_bytes > 0);
        };
        let enough = (RETIRED_SEGMENTS_MAX * core.options.segment_bytes)
            .max(RETIRED_COPIES_MAX * copy.length_bytes);
        // What waits would be more than what is left; and it pays for a copy beside the old one.
        let is_short = retired_bytes > room_bytes && retired_bytes >= copy.length_bytes;
        state.is_lacking || retired_bytes >= enough || (is_idle && retired_bytes > 0 && is_short)
    }
}

/// Whether something that a rebuild would need may be gone: a release that knew no copies removed
/// log files, and so does [`abandon`].
fn is_lacking(files: &[FileName], current: Option<&Copy>) -> bool {
    let logs: Vec<u64> = files
        .iter()
        .filter(|name| name.role == FileRole::Log)
        .map(|name| name.number.get())
        .collect();
    let needed = current.map_or(1, |copy| copy.position.segment.get());
    let (Some(&first), Some(&last)) = (logs.iter().min(), logs.iter().max()) else {
        return false;
    };
    if current.is_some() {
        return !logs.contains(&needed);
    }
    // Only compaction, and copies, take numbers from the log and files away.
    let has_gap = u64::try_from(logs.len()).ok() != (last - first).checked_add(1);
    first != needed || has_gap || files.iter().any(|name| name.role == FileRole::Compacted)
}

/// Names of copies and drafts, in order.
fn list(disk: &dyn Disk) -> Result<Vec<FileName>> {
    let is_copy = |role| matches!(role, FileRole::IndexCopy | FileRole::IndexDraft);
    Ok(disk.list()?.into_iter().filter(|name| is_copy(name.role)).collect())
}

/// Whether there is any copy, in whatever state.
pub(crate) fn any(disk: &dyn Disk) -> Result<bool> {
    Ok(list(disk)?.iter().any(|name| name.role == FileRole::IndexCopy))
}

/// What a copy's header says of it.
fn look_at(disk: &dyn Disk, name: FileName) -> Result<(StoreId, Copy)> {
    let file = disk.open(name)?;
    let reader = Reader::begin(file.as_ref(), name)?;
    let Header { store, position } = *reader.header();
    Ok((store, Copy { name, position, length_bytes: reader.length_bytes() }))
}

/// Reads all of a copy; answers how many entries it has.
fn verify(disk: &dyn Disk, name: FileName) -> Result<u64> {
    let file = disk.open(name)?;
    let mut reader = Reader::begin(file.as_ref(), name)?;
    while reader.next_part()?.is_some() {}
    Ok(reader.entries())
}

/// Reads the copy of an open store, if there is one: what is wrong with it, if anything is. The
/// next one is due then.
pub(crate) fn check(core: &Core) -> Option<Error> {
    let copy = core.copies.state.lock().current?;
    let error = verify(core.disk.as_ref(), copy.name).err()?;
    let mut state = core.copies.state.lock();
    // Not if another one was written meanwhile, and this one removed.
    (state.current == Some(copy)).then(|| {
        state.is_lacking = true;
        error
    })
}

/// A copy that was put into an empty index.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Loaded {
    pub(crate) name: FileName,
    pub(crate) entries: u64,
}

/// Puts the newest whole copy of `store` into an empty index. `Err`: why each one that is there
/// is of no use; empty if there is none.
pub(crate) fn load(
    kv: &dyn Kv,
    disk: &dyn Disk,
    store: Option<StoreId>,
) -> Result<std::result::Result<Loaded, Vec<String>>> {
    let (mut copies, mut faults) = (Vec::new(), Vec::new());
    for name in list(disk)?.into_iter().filter(|name| name.role == FileRole::IndexCopy) {
        match look_at(disk, name) {
            Ok((of, copy)) if store.is_none_or(|store| store == of) => copies.push(copy),
            Ok((of, _)) => faults.push(format!("{name} is of store {of}")),
            Err(error) => faults.push(error.to_string()),
        }
    }
    copies.sort_by_key(|copy| std::cmp::Reverse(copy.position));
    for Copy { name, position, length_bytes } in copies {
        tracing::info!(%name, length_bytes, commit = position.sequence, "reading a copy of the index");
        // All of it first: entries of a damaged one must not mix with those of another.
        match verify(disk, name) {
            Ok(entries) => {
                let file = disk.open(name)?;
                let mut reader = Reader::begin(file.as_ref(), name)?;
                while let Some(batch) = reader.next_part()? {
                    reserve::fill_index(kv, disk, &batch)?;
                }
                return Ok(Ok(Loaded { name, entries }));
            }
            Err(error) => {
                tracing::warn!(%name, %error, "the copy is damaged");
                faults.push(error.to_string());
            }
        }
    }
    Ok(Err(faults))
}

/// Writes a copy of this moment, and removes what it makes dispensable. `go_on` hears of bytes
/// that were written, may take its time, and answers whether to go on; if not, nothing is changed.
///
/// On a disk too full for it, the old copy and the retired files go first, if they are worth more
/// than the copy takes: for that moment the index could not be made anew.
pub(crate) fn renew(core: &Core, go_on: &mut dyn FnMut(u64) -> bool) -> Result<Renewed> {
    let _writing = core.copies.writing.lock();
    let outcome = match reserve::with_reserve(core, || write(core, go_on)) {
        Err(error) if reserve::is_full(&error) && is_worth_the_room(core) => {
            tracing::warn!(%error, "no room for a copy of the index: old log files go before it is written");
            let freed = abandon(core)?;
            write(core, go_on).map(|copy| (copy, freed))
        }
        outcome => outcome.map(|copy| (copy, Renewed::default())),
    };
    let renewed = outcome.and_then(|(copy, freed)| {
        let Some(copy) = copy else { return Ok(freed) };
        let mut renewed = adopt(core, copy)?;
        renewed.files_removed += freed.files_removed;
        renewed.bytes_freed += freed.bytes_freed;
        Ok(renewed)
    });
    renewed.inspect_err(|_| {
        core.copies.state.lock().not_before = Instant::now().checked_add(RETRY_PAUSE);
    })
}

fn is_worth_the_room(core: &Core) -> bool {
    let state = core.copies.state.lock();
    let retired_bytes: u64 = state.retired.values().sum();
    retired_bytes > 0 && retired_bytes >= state.current.map_or(0, |copy| copy.length_bytes)
}

/// Writes a copy under the name of a draft, and gives it its own once it is durable.
fn write(core: &Core, go_on: &mut dyn FnMut(u64) -> bool) -> Result<Option<Copy>> {
    let view = core.kv.view();
    let Some(position) = view.get(Family::Meta, key::META_POSITION)? else { return Ok(None) };
    let position = LogPosition::decode(&position)?;
    let number = core.committer.leader.lock().log.take_number();
    let name = FileName { role: FileRole::IndexCopy, number };
    let draft = FileName { role: FileRole::IndexDraft, number };
    let header = Header { store: core.store, position };
    let outcome = write_draft(core, view.as_ref(), (draft, name, &header), go_on);
    let Ok(Some(length_bytes)) = outcome else {
        // What cannot be removed goes at the next start.
        let _ = core.disk.remove(draft);
        return outcome.map(|_| None);
    };
    core.file_bytes.fetch_add(length_bytes, Ordering::Relaxed);
    let named = core
        .disk
        .sync_names()
        .and_then(|()| core.disk.rename(draft, name))
        .and_then(|()| core.disk.sync_names());
    if let Err(error) = named {
        // Whichever name it has now: what cannot be removed, a start takes or removes.
        if core.disk.remove(draft).and(core.disk.remove(name)).is_ok() {
            core.lower_file_bytes(length_bytes);
        }
        return Err(error);
    }
    Ok(Some(Copy { name, position, length_bytes }))
}

/// Answers the file's length; `None` when it was told to stop.
fn write_draft(
    core: &Core,
    view: &dyn crate::kv::KvRead,
    (draft, name, header): (FileName, FileName, &Header),
    go_on: &mut dyn FnMut(u64) -> bool,
) -> Result<Option<u64>> {
    let file = core.disk.create(draft)?;
    let mut writer = Writer::begin(file.as_ref(), name, header)?;
    let mut is_stopped = false;
    // The hashes are in the segments: a start finds them there.
    for family in Family::ALL.into_iter().filter(|family| *family != Family::Hash) {
        view.scan(family, &[], &prefix_end(&[0xff; 8]), &mut |key, value| {
            if (family, key) == (Family::Meta, key::META_HASHED) {
                return Ok(ControlFlow::Continue(()));
            }
            let written = writer.push(family, key, value)?;
            is_stopped = written > 0 && !go_on(written);
            Ok(if is_stopped { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        })?;
        if is_stopped {
            return Ok(None);
        }
    }
    writer.finish().map(Some)
}

/// Takes the new copy for the one that counts, and removes what it makes dispensable.
fn adopt(core: &Core, copy: Copy) -> Result<Renewed> {
    let old = {
        let mut state = core.copies.state.lock();
        state.is_lacking = false;
        state.not_before = None;
        state.current.replace(copy)
    };
    tracing::info!(name = %copy.name, length_bytes = copy.length_bytes, "copied the index");
    let mut renewed = Renewed { bytes_written: copy.length_bytes, ..Renewed::default() };
    if let Some(old) = old {
        core.disk.remove(old.name)?;
        core.lower_file_bytes(old.length_bytes);
    }
    remove_useless(core, copy.name)?;
    remove_retired(core, copy.position.segment, &mut renewed)?;
    Ok(renewed)
}

/// Removes copies whose header is damaged: nothing knows them, and none is as good as the new one.
/// Those of another store are somebody's mistake, and not ours to remove.
fn remove_useless(core: &Core, current: FileName) -> Result<()> {
    for name in list(core.disk.as_ref())? {
        let is_other = name.role == FileRole::IndexCopy && name != current;
        if is_other && look_at(core.disk.as_ref(), name).map_or(true, |(of, _)| of == core.store) {
            let length_bytes = core.disk.open(name).and_then(|file| file.length_bytes());
            core.disk.remove(name)?;
            core.lower_file_bytes(length_bytes.unwrap_or(0));
        }
    }
    Ok(())
}

/// Makes room without a copy.
fn abandon(core: &Core) -> Result<Renewed> {
    let old = {
        let mut state = core.copies.state.lock();
        state.is_lacking = true;
        state.current.take()
    };
    let mut freed = Renewed::default();
    if let Some(old) = old {
        core.disk.remove(old.name)?;
        core.lower_file_bytes(old.length_bytes);
    }
    remove_retired(core, SegmentId::new(u64::MAX), &mut freed)?;
    Ok(freed)
}

/// Removes the retired files before `until` that recovery does not need either.
fn remove_retired(core: &Core, until: SegmentId, renewed: &mut Renewed) -> Result<()> {
    let until = until.min(core.checkpoint.lock().segment);
    let names: Vec<FileName> = {
        let state = core.copies.state.lock();
        state.retired.keys().copied().filter(|name| name.number < until).collect()
    };
    for name in names {
        // Before it goes: a check that does not find it looks here why.
        let length_bytes = core.copies.state.lock().retired.remove(&name).unwrap_or(0);
        if let Err(error) = core.disk.remove(name) {
            core.copies.state.lock().retired.insert(name, length_bytes);
            return Err(error);
        }
        // Behind it: a reader in between would open the file that is going.
        core.segments.close_file(name);
        core.lower_file_bytes(length_bytes);
        renewed.files_removed += 1;
        renewed.bytes_freed += length_bytes;
    }
    core.disk.sync_names()
}
