//! What runs beside the clients: committing old dirty blocks, reclaim and collapse, compaction,
//! checkpoints, expiry. One thread commits, one cleans; both stop within a slice.

use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::compact::{checkpoint, compact_once};
use crate::core::Core;
use crate::error::{Error, Result};
use crate::flush::flush;
use crate::reclaim;
use crate::snapshot;
use crate::types::GcReport;
use crate::units::BLOCK_BYTES;

/// How often the committing thread looks for old dirty blocks.
const COMMIT_PERIOD: Duration = Duration::from_millis(200);

/// How often the cleaning thread looks for work.
const CLEAN_PERIOD: Duration = Duration::from_millis(500);

/// Slices in a row before the cleaning thread looks whether it should stop.
const SLICES_AT_ONCE: usize = 16;

/// The pause between slices, so that clients' commits come first.
const SLICE_PAUSE: Duration = Duration::from_micros(500);

/// Log written since the last checkpoint beyond which the next is made: it bounds the replay
/// after a crash to a second or so.
const CHECKPOINT_BYTES: u64 = 256 << 20;

/// Dirty bytes of a file beyond which it is committed before its age asks for it, so that a
/// stream of writes overlaps with its commits.
const EARLY_COMMIT_BYTES: usize = 4 << 20;

/// A segment of commit records alone that is longer than this is worth sealing.
const RECORDS_BYTES_MAX: u64 = 1 << 20;

/// Expired snapshots that one sweep deletes.
const EXPIRY_BATCH: usize = 256;

/// Tells threads to stop, and wakes them.
#[derive(Debug, Default)]
struct Bell {
    stopped: Mutex<bool>,
    rung: Condvar,
}

impl Bell {
    /// Sleeps; `false` when it is time to stop.
    fn sleep(&self, period: Duration) -> bool {
        let mut stopped = self.stopped.lock();
        if !*stopped {
            self.rung.wait_for(&mut stopped, period);
        }
        !*stopped
    }

    fn stop(&self) {
        *self.stopped.lock() = true;
        self.rung.notify_all();
    }
}

/// One round of a thread's work.
type Job = fn(&Core, &Bell);

/// The threads.
#[derive(Debug, Default)]
pub(crate) struct Background {
    bell: Arc<Bell>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Background {
    pub(crate) fn start(&self, core: &Arc<Core>) -> Result<()> {
        let jobs: [(&str, Job, Duration); 2] = [
            ("slackwater-commit", commit_old, COMMIT_PERIOD),
            ("slackwater-clean", clean, CLEAN_PERIOD),
        ];
        for (name, job, period) in jobs {
            let core = Arc::downgrade(core);
            let bell = Arc::clone(&self.bell);
            let thread = std::thread::Builder::new()
                .name(name.to_owned())
                .spawn(move || run(&core, &bell, period, job))
                .map_err(|source| Error::io("start", "a background thread", source))?;
            self.threads.lock().push(thread);
        }
        Ok(())
    }

    /// Stops the threads and waits for them.
    pub(crate) fn stop(&self) {
        self.bell.stop();
        for thread in self.threads.lock().drain(..) {
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
            old || state.dirty.len() * BLOCK_BYTES >= EARLY_COMMIT_BYTES
        };
        if due && let Err(error) = flush(core, &file) {
            // The blocks stay dirty, and the client learns of it at its COMMIT.
            tracing::warn!(inode = %file.inode, %error, "a background commit failed");
        }
    }
}

fn clean(core: &Core, bell: &Bell) {
    if let Err(error) = clean_once(core, bell) {
        tracing::warn!(%error, "cleaning failed and will be tried again");
    }
}

fn clean_once(core: &Core, bell: &Bell) -> Result<()> {
    snapshot::expire(core, EXPIRY_BATCH)?;
    loop {
        for _ in 0..SLICES_AT_ONCE {
            let Some(job) = reclaim::next_job(core)? else {
                return compact_some(core, bell);
            };
            reclaim::work(core, job)?;
            std::thread::yield_now();
        }
        if !bell.sleep(SLICE_PAUSE) {
            return Ok(());
        }
    }
}

fn compact_some(core: &Core, bell: &Bell) -> Result<()> {
    let behind = {
        let position = *core.committer.position.lock();
        let known = *core.checkpoint.lock();
        let segments = position.segment.get().saturating_sub(known.segment.get());
        segments * core.options.segment_bytes >= CHECKPOINT_BYTES
    };
    if behind {
        checkpoint(core)?;
    }
    let _gc = core.gc.lock();
    while let Some(done) = compact_once(core)? {
        let rate = core.options.compaction_bytes_per_second.max(1);
        let pause_ms = done.bytes_written.saturating_mul(1000) / rate;
        if !bell.sleep(Duration::from_millis(pause_ms.max(1))) {
            return Ok(());
        }
    }
    Ok(())
}

/// Reclaims, collapses and compacts until nothing is left to do.
pub(crate) fn gc(core: &Core) -> Result<GcReport> {
    core.committer.healthy()?;
    let _gc = core.gc.lock();
    let mut report = GcReport::default();
    let layers_before = core.committer.counters.read().layers;
    snapshot::expire(core, usize::MAX)?;
    while let Some(job) = reclaim::next_job(core)? {
        report.entries += reclaim::work(core, job)?;
    }
    report.layers = layers_before.saturating_sub(core.committer.counters.read().layers);
    // The open segment may hold the dead chunks: seal it, and make the index durable behind it.
    seal(core)?;
    checkpoint(core)?;
    while let Some(done) = compact_once(core)? {
        report.segments += done.files_removed;
        report.freed_bytes += done.bytes_freed.saturating_sub(done.bytes_written);
    }
    core.kv.compact()?;
    checkpoint(core)?;
    Ok(report)
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
