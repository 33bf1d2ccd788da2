//! What runs beside the clients: committing old dirty blocks and times of last reads, reclaim and collapse, compaction,
//! checkpoints, expiry, hashes of old segments on their way into the index, scrubbing. One thread
//! commits, one cleans, one indexes, one scrubs; all stop within a slice.

use std::collections::HashSet;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::access_times;
use crate::compact::{Refused, checkpoint, compact_once};
use crate::core::{Core, Space};
use crate::error::{Error, Result};
use crate::flush::flush;
use crate::id::SegmentId;
use crate::index_copy;
use crate::progress::Progress;
use crate::reclaim;
use crate::record::SegmentRecord;
use crate::reserve;
use crate::scrub;
use crate::snapshot;
use crate::types::GcReport;

/// How often the committing thread looks for old dirty blocks.
const COMMIT_PERIOD: Duration = Duration::from_millis(200);

/// How often the cleaning thread looks for work.
const CLEAN_PERIOD: Duration = Duration::from_millis(500);

/// How often the indexing thread looks for work.
const SETTLE_PERIOD: Duration = Duration::from_millis(500);

/// Slices in a row before the cleaning thread looks whether it should stop.
const SLICES_AT_ONCE: usize = 16;

/// So many times in a row before other cleaning has its turn: clients may delete faster than a
/// thread reclaims, and the log that slices write must not grow without a checkpoint.
const SLICE_ROUNDS_MAX: usize = 16;

/// The pause between slices, so that clients' commits come first.
const SLICE_PAUSE: Duration = Duration::from_micros(500);

/// Log written since the last checkpoint beyond which the next is made: it bounds the replay
/// after a crash to a second or so.
const CHECKPOINT_BYTES: u64 = 256 << 20;

/// Dirty bytes of a file beyond which it is committed before its age asks for it, so that a
/// stream of writes overlaps with its commits.
pub(crate) const EARLY_COMMIT_BYTES: usize = 4 << 20;

/// A segment of commit records alone that is longer than this is worth sealing.
const RECORDS_BYTES_MAX: u64 = 1 << 20;

/// Tells a thread to stop, and wakes it.
#[derive(Debug, Default)]
pub(crate) struct Bell {
    state: Mutex<BellState>,
    rung: Condvar,
}

#[derive(Debug, Default)]
struct BellState {
    stopped: bool,
    /// There is work before the period is over.
    called: bool,
}

impl Bell {
    /// Sleeps until the period is over or somebody rings; `false` when it is time to stop.
    fn sleep(&self, period: Duration) -> bool {
        let mut state = self.state.lock();
        if !state.stopped && !state.called {
            self.rung.wait_for(&mut state, period);
        }
        state.called = false;
        !state.stopped
    }

    /// Calls the thread to work; if it is working it will look once more.
    pub(crate) fn ring(&self) {
        let mut state = self.state.lock();
        if !state.called {
            state.called = true;
            self.rung.notify_one();
        }
    }

    fn stop(&self) {
        self.state.lock().stopped = true;
        self.rung.notify_all();
    }
}

/// One round of a thread's work.
type Job = fn(&Core, &Bell);

/// The threads.
#[derive(Debug, Default)]
pub(crate) struct Background {
    threads: Mutex<Vec<(Arc<Bell>, JoinHandle<()>)>>,
}

impl Background {
    pub(crate) fn start(&self, core: &Arc<Core>) -> Result<()> {
        let jobs: [(&str, Job, Duration, Arc<Bell>); 4] = [
            ("slackwater-commit", commit_old, COMMIT_PERIOD, Arc::clone(&core.much_dirty)),
            ("slackwater-clean", clean, CLEAN_PERIOD, Arc::default()),
            ("slackwater-index", settle_hashes, SETTLE_PERIOD, Arc::default()),
            ("slackwater-scrub", scrub_slice, scrub::PERIOD, Arc::default()),
        ];
        for (name, job, period, bell) in jobs {
            let core = Arc::downgrade(core);
            let heard = Arc::clone(&bell);
            let thread = std::thread::Builder::new()
                .name(name.to_owned())
                .spawn(move || run(&core, &heard, period, job))
                .map_err(|source| Error::io("start", "a background thread", source))?;
            self.threads.lock().push((bell, thread));
        }
        Ok(())
    }

    /// Stops the threads and waits for them.
    pub(crate) fn stop(&self) {
        let threads = std::mem::take(&mut *self.threads.lock());
        for (bell, _) in &threads {
            bell.stop();
        }
        for (_, thread) in threads {
            if thread.join().is_err() {
                tracing::error!("a background thread had panicked");
            }
        }
    }
}

fn run(core: &Weak<Core>, bell: &Bell, period: Duration, job: Job) {
    while bell.sleep(period) {
        let Some(core) = core.upgrade() else { return };
        if core.committer.healthy().is_ok() {
            job(&core, bell);
        }
    }
}

fn commit_old(core: &Core, _bell: &Bell) {
    let now = Instant::now();
    for file in core.files.all() {
        let due = {
            let state = file.state.read();
            let old = state
                .dirty_since
                .is_some_and(|since| now.duration_since(since) >= core.options.dirty_age);
            old || (state.is_dirty() && state.unflushed_bytes() >= EARLY_COMMIT_BYTES)
        };
        if due && let Err(error) = flush(core, &file) {
            // The blocks stay dirty, and the client learns of it at its COMMIT.
            tracing::warn!(inode = %file.inode, %error, "a background commit failed");
        }
    }
    access_times::commit_due(core, access_times::WAIT);
}

fn scrub_slice(core: &Core, _bell: &Bell) {
    if let Err(error) = scrub::slice(core) {
        tracing::warn!(%error, "scrubbing failed and will be tried again");
    }
}

fn settle_hashes(core: &Core, _bell: &Bell) {
    if let Err(error) = settle(core) {
        tracing::warn!(%error, "hashes could not be indexed, and stay in memory");
    }
}

/// Puts hashes of old segments into the index, if too many are in memory.
pub(crate) fn settle(core: &Core) -> Result<()> {
    if !core.dedup.is_large() {
        return Ok(());
    }
    // Compaction would drop chunks, and segments, while they are entered.
    let _gc = core.gc.lock();
    let sealed: Vec<SegmentId> = {
        let leader = core.committer.leader.lock();
        let is_sealed = |record: &SegmentRecord| record.directory_offset_bytes.is_some();
        leader.segments.iter().filter(|(_, record)| is_sealed(record)).map(|(id, _)| *id).collect()
    };
    core.dedup
        .settle(core.kv.as_ref(), &core.segments, sealed)
        .map_err(|error| reserve::full_or(core, error))
}

fn clean(core: &Core, bell: &Bell) {
    if let Err(error) = clean_once(core, bell) {
        tracing::warn!(%error, "cleaning failed and will be tried again");
    }
}

/// What a turn of cleaning left to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Left {
    Nothing,
    /// Reclaim has more to do, and waits for its next turn alone.
    More,
    /// It is time to stop.
    Stop,
}

/// Reclaims and compacts by turns as long as that is worth it.
fn clean_once(core: &Core, bell: &Bell) -> Result<()> {
    loop {
        let left = keep_up(core, bell)?;
        if left == Left::Stop {
            return Ok(());
        }
        // Not held from one to the next: others wait for it, and the pauses are long.
        let attempt = {
            let _gc = core.gc.lock();
            compact_once(core, |name| core.aside.lock().files.is_due(name, Instant::now()))?
        };
        let Some(attempt) = attempt else {
            copy_index(core, bell, left == Left::Nothing)?;
            if left == Left::Nothing {
                return Ok(());
            }
            continue;
        };
        // What failed was told, and waits; it was read all the same.
        let cost_bytes =
            attempt.map_or_else(|refused| refused.cost_bytes, |done| done.bytes_written);
        copy_index(core, bell, false)?;
        if !pause_for(core, bell, cost_bytes) {
            return Ok(());
        }
    }
}

/// What must not wait until all is compacted, which can take hours: snapshots that expire, reclaim
/// and collapse, checkpoints.
fn keep_up(core: &Core, bell: &Bell) -> Result<Left> {
    // What the index says of all else may be readable all the same.
    if let Err(error) = snapshot::expire_some(core) {
        core.committer.healthy()?;
        tracing::warn!(%error, "no snapshot expires, and it will be tried again");
    }
    let left = reclaim_some(core, bell)?;
    if left == Left::Stop {
        return Ok(left);
    }
    // It compacts by itself, too.
    core.look_at_index();
    reserve::take(core);
    let behind = {
        let position = *core.committer.position.lock();
        let known = *core.checkpoint.lock();
        let segments = position.segment.get().saturating_sub(known.segment.get());
        // Log files go only when the index is durable behind them. A store that is short of room may
        // never write as much as the bound.
        segments * core.options.segment_bytes >= CHECKPOINT_BYTES
            || (segments > 0 && !has_room(&core.space()))
    };
    if behind {
        checkpoint(core)?;
    }
    Ok(left)
}

/// Works off the queue of dead and collapsing layers, for one turn.
fn reclaim_some(core: &Core, bell: &Bell) -> Result<Left> {
    for _ in 0..SLICE_ROUNDS_MAX {
        for _ in 0..SLICES_AT_ONCE {
            let may_run = |job| core.aside.lock().jobs.is_due(job, Instant::now());
            // What failed was told, and waits; the others go on.
            if reclaim::work_next(core, may_run)?.is_none() {
                return Ok(Left::Nothing);
            }
            std::thread::yield_now();
        }
        if !bell.sleep(SLICE_PAUSE) {
            return Ok(Left::Stop);
        }
    }
    Ok(Left::More)
}

/// Pauses for as long as the rate of compaction asks for, and keeps up meanwhile; `false` when it is
/// time to stop.
fn pause_for(core: &Core, bell: &Bell, written_bytes: u64) -> bool {
    let pause_ms = written_bytes.saturating_mul(1000) / compaction_rate(core).max(1);
    let mut left = Duration::from_millis(pause_ms.max(1));
    let mut period = CLEAN_PERIOD;
    loop {
        let begun = Instant::now();
        if !bell.sleep(left.min(period)) {
            return false;
        }
        if left <= period {
            return true;
        }
        period = match keep_up(core, bell) {
            Ok(Left::Nothing) => CLEAN_PERIOD,
            Ok(Left::More) => SLICE_PAUSE,
            Ok(Left::Stop) => return false,
            Err(error) => {
                tracing::warn!(%error, "cleaning failed and will be tried again");
                CLEAN_PERIOD
            }
        };
        left = left.saturating_sub(begun.elapsed());
    }
}

/// Writes a copy of the index if that is due, so that retired log files can go.
fn copy_index(core: &Core, bell: &Bell, is_idle: bool) -> Result<()> {
    if core.copies.is_due(core, is_idle) {
        checkpoint(core)?;
        index_copy::renew(core, &mut |written_bytes| pause_for(core, bell, written_bytes))?;
    }
    Ok(())
}

/// Room that is left, as a share of the capacity, above which compaction takes its time: the
/// longer segments wait, the less in them lives, and the less there is to copy.
const ROOM_DIVISOR: u64 = 4;

/// By how much compaction is slower while there is such room.
const UNHURRIED_DIVISOR: u64 = 4;

fn compaction_rate(core: &Core) -> u64 {
    let rate = core.options.compaction_bytes_per_second;
    if has_room(&core.space()) { rate / UNHURRIED_DIVISOR } else { rate }
}

const fn has_room(space: &Space) -> bool {
    space.room_bytes >= space.capacity_bytes / ROOM_DIVISOR
}

/// Moves in a row that writers may stop, by writing again what was about to be dropped, before
/// a garbage collection leaves the rest to the background.
const REFUSED_MOVES_MAX: usize = 8;

/// [`gc_watched`] for one who waits to its end.
pub(crate) fn gc(core: &Core) -> Result<GcReport> {
    gc_watched(core, &Progress::default())
}

/// Reclaims, collapses, puts hashes into the index and compacts until nothing is left to do of what
/// is there at the beginning. What fails holds up nothing else; the first such failure is the answer.
pub(crate) fn gc_watched(core: &Core, progress: &Progress) -> Result<GcReport> {
    core.committer.healthy()?;
    let used_bytes_before = core.space().used_bytes;
    let mut report = GcReport { used_bytes_before, ..GcReport::default() };
    let layers_before = core.committer.counters.read().layers;
    let failure = snapshot::expire_all(core).unwrap_or_else(Some);
    core.committer.healthy()?;
    let failure = failure.or(reclaim_all(core, &mut report, progress)?);
    report.layers = layers_before.saturating_sub(core.committer.counters.read().layers);
    // The open segment may hold the dead chunks: seal it, and make the index durable behind it.
    seal(core)?;
    checkpoint(core)?;
    settle(core)?;
    let failure = failure.or(compact_all(core, &mut report, progress)?);
    progress.point()?;
    progress.begin("index", 0);
    core.kv.compact()?;
    checkpoint(core)?;
    if core.copies.is_wanted() {
        let renewed = index_copy::renew(core, &mut |_| true)?;
        report.segments += renewed.files_removed;
        report.freed_bytes += renewed.bytes_freed.saturating_sub(renewed.bytes_written);
    }
    reserve::take(core);
    report.used_bytes = core.space().used_bytes;
    failure.map_or(Ok(report), Err)
}

/// Compacts until none of the files that there are is worth it, as [`reclaim_all`] does with layers;
/// answers the first failure of a file.
fn compact_all(core: &Core, report: &mut GcReport, progress: &Progress) -> Result<Option<Error>> {
    progress.begin("compaction", 0);
    let next = core.committer.leader.lock().log.next_number();
    let mut failed = HashSet::new();
    let mut failure = None;
    let mut refused = 0;
    while refused < REFUSED_MOVES_MAX {
        progress.point()?;
        // Not held from one to the next: hashes go into the index in between.
        let attempt = {
            let _gc = core.gc.lock();
            compact_once(core, |name| name.number < next && !failed.contains(&name))?
        };
        match attempt {
            None => break,
            Some(Ok(done)) => {
                let moved = done.files_removed + done.files_retired > 0;
                refused = if moved { 0 } else { refused + 1 };
                progress.advance(done.files_removed + done.files_retired);
                report.segments += done.files_removed;
                report.freed_bytes += done.bytes_freed.saturating_sub(done.bytes_written);
            }
            // Of several each is tried alone next.
            Some(Err(Refused { files, error, .. })) => {
                if let [file] = files.as_slice() {
                    failed.insert(*file);
                    failure.get_or_insert(error);
                }
            }
        }
    }
    Ok(failure)
}

/// Works off the queue of dead and collapsing layers, each job until it is done or has failed;
/// answers the first failure. Layers that clients make meanwhile are left to cleaning, else this had
/// no end under a steady load.
fn reclaim_all(core: &Core, report: &mut GcReport, progress: &Progress) -> Result<Option<Error>> {
    progress.begin("reclaim", 0);
    let next = core.committer.counters.read().next_layer;
    let mut failed = HashSet::new();
    let mut failure = None;
    loop {
        progress.point()?;
        let may_run = |job: reclaim::Job| job.layer().get() < next && !failed.contains(&job);
        match reclaim::work_next(core, may_run)? {
            None => return Ok(failure),
            Some(worked) => {
                progress.advance(worked.visited);
                report.entries += worked.visited;
                if let Some((job, error)) = worked.failed {
                    failed.insert(job);
                    failure.get_or_insert(error);
                }
            }
        }
    }
}

/// Seals the open segment if it holds anything dead, and enters that into the index.
fn seal(core: &Core) -> Result<()> {
    let segment = {
        let leader = core.committer.leader.lock();
        let id = leader.log.segment();
        let record = leader.segments.get(&id).copied();
        let long = leader.log.position().offset_bytes > RECORDS_BYTES_MAX;
        let wasteful = |r: &crate::record::SegmentRecord| {
            r.live_chunks < r.stored_chunks || (r.live_chunks == 0 && long)
        };
        record.filter(wasteful).map(|_| id)
    };
    match segment {
        Some(segment) => crate::commit::seal(core, segment),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
