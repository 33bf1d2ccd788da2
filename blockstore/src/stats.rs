//! Counts and sizes of one moment.

use std::sync::atomic::Ordering;

use crate::compact::live_bytes;
use crate::core::Core;
use crate::disk::FileName;
use crate::record::SegmentRecord;
use crate::types::Stats;

/// Sums over all segments.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Summary {
    stored_bytes: u64,
    live_bytes: u64,
    files: u64,
}

/// The sums of now, or of the last time that no commit was under way: callers are async tasks
/// too, and must not wait for a disk that is stuck in a sync.
fn summary(core: &Core) -> Summary {
    let Some(leader) = core.committer.leader.try_lock() else { return *core.summary.lock() };
    let mut files: Vec<FileName> = leader.segments.values().map(|r| r.file).collect();
    files.sort_unstable();
    files.dedup();
    let live_of = |r: &SegmentRecord| {
        live_bytes(r.stored_bytes, r.live_chunks.into(), r.stored_chunks.into())
    };
    let summary = Summary {
        stored_bytes: leader.segments.values().map(|r| r.stored_bytes).sum(),
        live_bytes: leader.segments.values().map(live_of).sum(),
        files: u64::try_from(files.len()).unwrap_or(u64::MAX),
    };
    drop(leader);
    *core.summary.lock() = summary;
    summary
}

pub(crate) fn stats(core: &Core) -> Stats {
    let Summary { stored_bytes: stored, live_bytes: live, files } = summary(core);
    let counters = *core.committer.counters.read();
    let space = core.space();
    let scrub = core.scrub.progress();
    let of = |count: &std::sync::atomic::AtomicU64| count.load(Ordering::Relaxed);
    let dirty_bytes = core.files.dirty_bytes();
    Stats {
        capacity_bytes: space.capacity_bytes,
        used_bytes: space.used_bytes,
        available_bytes: space.room_bytes,
        chunk_bytes: live,
        chunk_count: counters.live_chunks,
        dead_bytes: stored.saturating_sub(live),
        mapped_blocks: counters.mapped_blocks,
        file_count: counters.files,
        inode_count: counters.inodes,
        snapshot_count: counters.snapshots,
        layer_count: counters.layers,
        dead_layer_count: counters.dead_layers,
        segment_count: files,
        dirty_bytes,
        memory_bytes: dirty_bytes
            + core.blocks.weight()
            + core.kv.memory_bytes()
            + core.resolver.memory_bytes()
            + core.segments.memory_bytes()
            + core.dedup.memory_bytes(),
        dedup_hits: of(&core.tally.dedup_hits),
        dedup_misses: of(&core.tally.dedup_misses),
        zero_blocks: of(&core.tally.zero_blocks),
        commits: of(&core.committer.commits),
        appended_bytes: of(&core.committer.appended_bytes),
        segment_read_bytes: core.segments.read_bytes(),
        cache_hits: of(&core.tally.cache_hits),
        cache_misses: of(&core.tally.cache_misses),
        cache_bypassed: of(&core.tally.cache_bypassed),
        reclaimed_entries: of(&core.tally.reclaimed_entries),
        compacted_bytes: of(&core.tally.compacted_bytes),
        scrubbed_bytes: of(&core.tally.scrubbed_bytes),
        scrub_segment: scrub.segment(),
        scrub_finished_at_seconds: scrub.finished_at_seconds,
        damaged_chunks: core.segments.damaged_count(),
        reclaim_failures: of(&core.tally.reclaim_failures),
        reclaim_jobs_set_aside: core.aside.lock().count(),
        poisoned: core.committer.is_poisoned(),
    }
}
