//! Group commit: many ops, one append, one sync, one batch.
//!
//! ```text
//! caller A --op--+
//! caller B --op--+--> queue --> leader: prepare each op over the overlay
//! caller C --op--+              append chunks + batch to the log, sync once
//!   (wait)                      apply to the index and to memory, answer all
//! ```
//! Whoever finds the leader's lock free leads; the others find their verdict when they get the
//! lock. After a failed sync nothing more is written until restart: what is on the medium is
//! unknown (I8).

#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};

use crate::core::Core;
use crate::error::{Error, Result};
use crate::id::{ChunkId, SegmentId};
use crate::kv::{Batch, Family, Write};
use crate::layer_sets::Emptied;
use crate::log::{AppendError, Log, Sealed, log_file};
use crate::record::{Counters, LogPosition, SegmentRecord, key};
use crate::reserve;
use crate::segment_format::PreparedChunk;
use crate::transaction::{Effects, Stored, Transaction};

/// Payload of one group: long enough to share a sync, short enough that nobody waits long.
const GROUP_BYTES_MAX: usize = 16 << 20;

/// Ops of one group, likewise.
const GROUP_OPS_MAX: usize = 1024;

/// Chunks that a group may add at most, for the roll of a segment: payload, and one op more.
const GROUP_CHUNKS_RESERVE: u32 = 16384;

/// After a refused roll the segment grows by this much before the next try: each writes the
/// segment's directory, and takes it back.
const ROLL_RETRY_BYTES: u64 = 4 << 20;

type Work = Box<dyn for<'a> FnOnce(&mut Transaction<'a>) -> Result<()> + Send>;
/// Where a caller finds what became of its op.
type Slot = Arc<Mutex<Option<Result<()>>>>;

/// The leader's end of a slot. One that is dropped unanswered, by a panic, answers for itself:
/// nobody waits for ever.
struct Verdict(Slot);

impl Verdict {
    fn answer(&self, verdict: Result<()>) {
        *self.0.lock() = Some(verdict);
    }
}

impl Drop for Verdict {
    fn drop(&mut self) {
        let reason = || "an operation of the same commit panicked".to_owned();
        self.0.lock().get_or_insert_with(|| Err(Error::Poisoned { reason: reason() }));
    }
}

/// Refuses all further writes if the leader panics: what it had done by then is unknown.
struct PanicGuard<'a>(&'a Committer);

impl Drop for PanicGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let reason = "an operation panicked inside a commit".to_owned();
            self.0.poison.write().get_or_insert(reason);
        }
    }
}

struct Op {
    work: Work,
    bytes: usize,
    alone: bool,
    verdict: Verdict,
}

/// Bytes of log files after which the index is asked how much it takes on the disk: it writes by itself what was
/// applied to it, and labels and names are as large there as in the log.
const INDEX_LOOK_BYTES: u64 = 4 << 20;

/// What one commit costs its group, and whether it may share one.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Weight {
    /// Payload bytes.
    pub(crate) bytes: usize,
    /// Must be the only op of its group: it moves entries between layers, which others of the
    /// group read from the index.
    pub(crate) alone: bool,
}

/// What only the leader touches.
#[derive(Debug)]
pub(crate) struct Leader {
    pub(crate) log: Log,
    pub(crate) counters: Counters,
    pub(crate) segments: HashMap<SegmentId, SegmentRecord>,
    /// Segments whose record is not in the index as it is in memory.
    unsaved: HashSet<SegmentId>,
    /// The open segment is not rolled before it ends here, if there is a choice.
    roll_from_bytes: u64,
}

impl Leader {
    pub(crate) fn new(
        log: Log,
        counters: Counters,
        segments: HashMap<SegmentId, SegmentRecord>,
        sealed: &[Sealed],
    ) -> Self {
        let mut leader =
            Self { log, counters, segments, unsaved: HashSet::new(), roll_from_bytes: 0 };
        for sealed in sealed {
            let known = leader.segments.get(&sealed.segment);
            // What the index knows as sealed may have moved since.
            if known.is_some_and(|record| record.directory_offset_bytes.is_none()) {
                leader.note_sealed(*sealed);
            }
        }
        leader.note_open();
        leader
    }

    fn note_sealed(&mut self, sealed: Sealed) {
        if let Some(record) = self.segments.get_mut(&sealed.segment) {
            record.directory_offset_bytes = Some(sealed.directory_offset_bytes);
            self.unsaved.insert(sealed.segment);
        }
    }

    /// The open segment has a record from its first moment on.
    fn note_open(&mut self) {
        let id = self.log.segment();
        self.segments.entry(id).or_insert_with(|| {
            self.unsaved.insert(id);
            SegmentRecord {
                file: log_file(id),
                directory_offset_bytes: None,
                chunks: 0,
                stored_chunks: 0,
                live_chunks: 0,
                stored_bytes: 0,
            }
        });
    }

    /// The writes that bring the index's segment records up to date with what a batch adds.
    fn segment_writes(&self, deltas: &HashMap<SegmentId, i64>, added: &[PreparedChunk]) -> Updates {
        let mut changed: HashMap<SegmentId, SegmentRecord> =
            self.unsaved.iter().filter_map(|id| Some((*id, *self.segments.get(id)?))).collect();
        for (id, delta) in deltas {
            let Some(known) = self.segments.get(id) else {
                continue;
            };
            let record = changed.entry(*id).or_insert(*known);
            let live = i64::from(record.live_chunks) + delta;
            record.live_chunks = u32::try_from(live.max(0)).unwrap_or(u32::MAX);
        }
        if !added.is_empty()
            && let Some(known) = self.segments.get(&self.log.segment())
        {
            let record = changed.entry(self.log.segment()).or_insert(*known);
            let count = u32::try_from(added.len()).unwrap_or(u32::MAX);
            record.chunks += count;
            record.stored_chunks += count;
            let bytes: usize = added.iter().map(|chunk| chunk.stored.len()).sum();
            record.stored_bytes += u64::try_from(bytes).unwrap_or(u64::MAX);
        }
        changed
    }
}

type Updates = HashMap<SegmentId, SegmentRecord>;

/// The queue, the leader's lock, and what is known of the store's health.
pub(crate) struct Committer {
    queue: Mutex<VecDeque<Op>>,
    pub(crate) leader: Mutex<Leader>,
    poison: RwLock<Option<String>>,
    closed: AtomicBool,
    verifier: AtomicU64,
    pub(crate) commits: AtomicU64,
    pub(crate) appended_bytes: AtomicU64,
    /// As of the last commit, for those who do not lead.
    pub(crate) counters: RwLock<Counters>,
    pub(crate) position: Mutex<LogPosition>,
}

impl std::fmt::Debug for Committer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Committer").field("counters", &self.counters).finish_non_exhaustive()
    }
}

impl Committer {
    pub(crate) fn new(leader: Leader) -> Result<Self> {
        let (counters, position) = (leader.counters, leader.log.position());
        Ok(Self {
            queue: Mutex::new(VecDeque::new()),
            leader: Mutex::new(leader),
            poison: RwLock::new(None),
            closed: AtomicBool::new(false),
            verifier: AtomicU64::new(random_u64()?),
            commits: AtomicU64::new(0),
            appended_bytes: AtomicU64::new(0),
            counters: RwLock::new(counters),
            position: Mutex::new(position),
        })
    }

    pub(crate) fn verifier(&self) -> u64 {
        self.verifier.load(Ordering::Acquire)
    }

    pub(crate) fn is_poisoned(&self) -> bool {
        self.poison.read().is_some()
    }

    /// No op is taken after this.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Whether ops are taken.
    pub(crate) fn healthy(&self) -> Result<()> {
        if let Some(reason) = self.poison.read().clone() {
            return Err(Error::Poisoned { reason });
        }
        if self.is_closed() {
            return Err(Error::Closed);
        }
        Ok(())
    }

    /// Refuses all writes until restart. The verifier changes, so that clients learn that what
    /// they did not commit may be lost (RFC 1813 section 4.8).
    fn poison(&self, error: &Error) -> Error {
        let reason = error.to_string();
        tracing::error!(%reason, "writes are refused from now on");
        self.poison.write().get_or_insert_with(|| reason.clone());
        if let Ok(verifier) = random_u64() {
            self.verifier.store(verifier, Ordering::Release);
        }
        Error::Poisoned { reason }
    }
}

/// 64 random bits from the operating system.
pub(crate) fn random_u64() -> Result<u64> {
    getrandom::u64().map_err(|error| {
        Error::io("read random bytes", "the operating system", std::io::Error::other(error))
    })
}

/// Runs `work` in a transaction and answers its result once it is durable and applied.
pub(crate) fn commit<T: Send + 'static>(
    core: &Core,
    weight: Weight,
    work: impl for<'a> FnOnce(&mut Transaction<'a>) -> Result<T> + Send + 'static,
) -> Result<T> {
    core.committer.healthy()?;
    let output = Arc::new(Mutex::new(None));
    let slot = Arc::clone(&output);
    let verdict: Slot = Arc::new(Mutex::new(None));
    let op = Op {
        work: Box::new(move |txn| {
            *slot.lock() = Some(work(txn)?);
            Ok(())
        }),
        bytes: weight.bytes,
        alone: weight.alone,
        verdict: Verdict(Arc::clone(&verdict)),
    };
    core.committer.queue.lock().push_back(op);
    loop {
        let mut leader = core.committer.leader.lock();
        if let Some(verdict) = verdict.lock().take() {
            drop(leader);
            verdict?;
            let value = output.lock().take();
            return value.ok_or(Error::Closed);
        }
        let group = take_group(&core.committer);
        lead(core, &mut leader, group);
    }
}

fn take_group(committer: &Committer) -> Vec<Op> {
    let mut queue = committer.queue.lock();
    let mut group: Vec<Op> = Vec::new();
    let mut bytes = 0;
    while let Some(op) = queue.pop_front() {
        let fits = bytes + op.bytes <= GROUP_BYTES_MAX && group.len() < GROUP_OPS_MAX && !op.alone;
        if !group.is_empty() && !fits {
            queue.push_front(op);
            break;
        }
        bytes += op.bytes;
        let alone = op.alone;
        group.push(op);
        if alone {
            break;
        }
    }
    group
}

/// Answers every op of the group.
fn lead(core: &Core, leader: &mut Leader, group: Vec<Op>) {
    let _guard = PanicGuard(&core.committer);
    if let Err(error) = core.committer.healthy().and_then(|()| make_room(core, leader)) {
        for op in group {
            op.verdict.answer(Err(again(&error)));
        }
        return;
    }
    let space = core.space();
    let first = (leader.log.segment(), leader.log.next_chunk_index());
    let stored = Stored { dedup: &core.dedup, segments: &core.segments };
    let counters = leader.counters;
    let mut txn = Transaction::new(
        (core.kv.as_ref(), stored),
        &core.clock,
        counters,
        first,
        space.room_bytes,
    );
    let mut accepted = Vec::new();
    for op in group {
        txn.begin_op();
        match (op.work)(&mut txn).and_then(|()| txn.check_room(space.is_low())) {
            Ok(()) => {
                txn.keep_op();
                accepted.push(op.verdict);
            }
            Err(error) => {
                txn.roll_back_op();
                let error = match error {
                    Error::NoSpace { .. } => space.full(),
                    other => other,
                };
                op.verdict.answer(Err(error));
            }
        }
    }
    if accepted.is_empty() {
        return;
    }
    let outcome = if txn.is_empty() {
        Ok(())
    } else {
        // Not before: data that is refused is tried again and again, and the reserve is not for that.
        reserve::space_for_index(core);
        write_group(core, leader, txn)
    };
    for verdict in accepted {
        verdict.answer(match &outcome {
            Ok(()) => Ok(()),
            Err(error) => Err(again(error)),
        });
    }
}

/// Seals `segment` if it is still the open one, and enters that into the index.
pub(crate) fn seal(core: &Core, segment: SegmentId) -> Result<()> {
    {
        let mut leader = core.committer.leader.lock();
        core.committer.healthy()?;
        if leader.log.segment() == segment {
            reserve::with_reserve(core, || roll(core, &mut leader))?;
        }
    }
    // Any commit takes the records of sealed segments along; counters are in each.
    commit(core, Weight::default(), |txn| {
        txn.frees();
        let counters = txn.counters().encode();
        txn.put(Family::Meta, key::META_COUNTERS.to_vec(), counters);
        Ok(())
    })
}

/// Rolls the log if its segment is full. A roll that is refused, as by a full disk, is tried
/// again later as long as the segment can take more: what gives bytes back must go on.
fn make_room(core: &Core, leader: &mut Leader) -> Result<()> {
    if !leader.log.is_full(core.options.segment_bytes, GROUP_CHUNKS_RESERVE) {
        return Ok(());
    }
    let (has_room, end_bytes) =
        (leader.log.has_room(GROUP_CHUNKS_RESERVE), leader.log.position().offset_bytes);
    if has_room && end_bytes < leader.roll_from_bytes {
        return Ok(());
    }
    match roll(core, leader) {
        Err(error) if has_room && !matches!(error, Error::Poisoned { .. }) => {
            let segment = leader.log.segment();
            tracing::warn!(%segment, %error, "no new log file; the full one is written on");
            leader.roll_from_bytes = end_bytes + ROLL_RETRY_BYTES;
            Ok(())
        }
        outcome => outcome,
    }
}

fn roll(core: &Core, leader: &mut Leader) -> Result<()> {
    let before = leader.log.written_bytes();
    let outcome = leader.log.roll();
    // Of a failed one too: the log takes what it gave back as written already.
    core.file_bytes.fetch_add(leader.log.written_bytes() - before, Ordering::Relaxed);
    core.spare_bytes.store(leader.log.spare_bytes(), Ordering::Relaxed);
    match outcome {
        Ok(sealed) => {
            leader.roll_from_bytes = 0;
            leader.note_sealed(sealed);
            leader.note_open();
            Ok(())
        }
        Err(AppendError::Refused(error)) => Err(reserve::full_or(core, error)),
        Err(AppendError::Fatal(error)) => Err(core.committer.poison(&error)),
    }
}

fn write_group(core: &Core, leader: &mut Leader, txn: Transaction<'_>) -> Result<()> {
    let mut updates = leader.segment_writes(txn.live_deltas(), txn.chunks());
    let may_use_reserve = txn.group_frees();
    let (mut batch, effects, counters, chunks) = txn.finish()?;
    // What compaction moved, its own op wrote.
    updates.retain(|id, _| !effects.segments.contains_key(id));
    for (id, record) in &updates {
        batch.push(put(Family::Segment, key::segment(*id), record.encode()));
    }
    batch.push(put(Family::Meta, key::META_COUNTERS.to_vec(), counters.encode()));
    let (end_bytes, written_bytes) =
        (leader.log.position().offset_bytes, leader.log.written_bytes());
    let first = ChunkId::new(leader.log.segment(), leader.log.next_chunk_index());
    let mut outcome = leader.log.append(&chunks, &batch);
    if let Err(AppendError::Refused(error)) = &outcome
        && reserve::is_full(error)
        && may_use_reserve
        && reserve::give_back(core)
    {
        outcome = leader.log.append(&chunks, &batch);
    }
    // The file grows by whole sectors, and by zeros for appends to come; by a failed one too:
    // the log takes what it gave back as written already.
    let appended = leader.log.written_bytes() - written_bytes;
    let before = core.file_bytes.fetch_add(appended, Ordering::Relaxed);
    if before / INDEX_LOOK_BYTES != before.saturating_add(appended) / INDEX_LOOK_BYTES {
        core.look_at_index();
    }
    core.spare_bytes.store(leader.log.spare_bytes(), Ordering::Relaxed);
    let position = match outcome {
        Ok(position) => position,
        Err(AppendError::Refused(error)) => return Err(reserve::full_or(core, error)),
        Err(AppendError::Fatal(error)) => return Err(core.committer.poison(&error)),
    };
    let appended = position.offset_bytes - end_bytes;
    core.committer.appended_bytes.fetch_add(appended, Ordering::Relaxed);
    core.committer.commits.fetch_add(1, Ordering::Relaxed);
    batch.push(put(Family::Meta, key::META_POSITION.to_vec(), position.encode()));
    let moved = effects.segments.clone();
    apply(core, &batch, effects).map_err(|error| core.committer.poison(&error))?;
    core.dedup.add(first, chunks.iter().map(|chunk| &chunk.hash));
    leader.counters = counters;
    leader.segments.extend(updates);
    for (id, record) in moved {
        match record {
            Some(record) => leader.segments.insert(id, record),
            None => leader.segments.remove(&id),
        };
    }
    leader.unsaved.clear();
    *core.committer.counters.write() = counters;
    *core.committer.position.lock() = position;
    Ok(())
}

fn put(family: Family, key: Vec<u8>, value: Vec<u8>) -> Write {
    Write { family, key, value: Some(value) }
}

/// Makes a durable batch visible, to the index and to memory at one moment.
fn apply(core: &Core, batch: &Batch, effects: Effects) -> Result<()> {
    let _moment = reserve::apply_to_index(core, batch)?;
    for (segment, record) in effects.segments {
        match record.map(|record| (record, record.directory_offset_bytes)) {
            Some((record, Some(offset))) => {
                core.segments.put_sealed(segment, record.file, offset, record.chunks);
            }
            Some((_, None)) => {}
            None => core.segments.remove(segment),
        }
    }
    if !effects.dropped.is_empty() {
        core.dedup.drop_chunks(&effects.dropped);
        effects.dropped.iter().for_each(|(chunk, _)| core.segments.forget_damaged(*chunk));
    }
    let mut emptied = Emptied::default();
    for touched in effects.windows {
        emptied.note(&touched);
        core.resolver.add_windows(touched);
    }
    if effects.moves_entries {
        core.resolver.note_move();
    }
    if effects.moves_directory {
        core.directory_moves.fetch_add(1, Ordering::AcqRel);
    }
    let mut gone = Vec::new();
    for (layer, record) in effects.layers {
        core.resolver.layer_changed(layer, record.as_ref());
        gone.extend(record.is_none().then_some(layer));
    }
    for (inode, record) in effects.inodes {
        let cut_bytes = effects.cuts.get(&inode).copied();
        core.files.inode_changed(inode, record, cut_bytes);
    }
    core.resolver.forget(&gone);
    core.resolver.drop_empty(&emptied);
    Ok(())
}

/// The same error for another who waited for the same commit.
pub(crate) fn again(error: &Error) -> Error {
    match error {
        Error::Poisoned { reason } => Error::Poisoned { reason: reason.clone() },
        Error::NoSpace { used_bytes, capacity_bytes } => {
            Error::NoSpace { used_bytes: *used_bytes, capacity_bytes: *capacity_bytes }
        }
        Error::Closed => Error::Closed,
        Error::Corrupt { place, reason } => Error::corrupt(place.clone(), reason.clone()),
        other => Error::io("commit", "the log", std::io::Error::other(other.to_string())),
    }
}
