//! Reads and verifies every live chunk, slowly, at most once a day, so that damage is found while a
//! copy of what it hit may still be had.
//!
//! ```text
//! segment by segment, page by page: directory -> live chunks -> checksum, hash
//! ```
//! A slice takes what one second of the configured rate allows, and gives way to compaction and
//! to writers that fill the memory for dirty blocks. The place is kept in the index (`meta`,
//! `scrub`), past the log: if it is lost, a pass begins anew. What is damaged is remembered in
//! memory: `check` tells of it, and new blocks of that content are stored anew.

use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::Mutex;

use crate::check;
use crate::codec::{Decoder, Encoder};
use crate::core::Core;
use crate::counts;
use crate::error::Result;
use crate::id::{ChunkId, ContentHash, SegmentId};
use crate::kv::{Family, Write};
use crate::record::{CountPage, key};
use crate::segment_format::{PAGE_ENTRIES, Place, restore_block};

/// The time that a slice is for.
pub(crate) const PERIOD: Duration = Duration::from_secs(1);

/// Between the end of a pass and the next: a disk does not decay in an hour, and a small store
/// would be read without end.
const REST: Duration = Duration::from_hours(24);

/// Slices after which the place is kept: a restart repeats a minute's work.
const SLICES_A_NOTE: u64 = 60;

/// Times in a pass that the files hit by damage are looked for: each reads all maps.
const SEARCHES_MAX: u64 = 16;

const VERSION: u8 = 1;

/// How far the scrubbing is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    /// The next chunk to look at.
    segment: u64,
    index: u32,
    /// When the last whole pass ended, in seconds since 1970; 0 for never.
    pub(crate) finished_at_seconds: u64,
}

impl Progress {
    /// The last pass ended lately, and no other has begun. A clock that was set back, far, ends the
    /// rest: the next pass sets the time right.
    fn rests(self, now_seconds: u64) -> bool {
        let is_between = (self.segment, self.index) == (0, 0);
        is_between && now_seconds.abs_diff(self.finished_at_seconds) < REST.as_secs()
    }

    pub(crate) const fn segment(self) -> u64 {
        self.segment
    }

    fn encode(self) -> Vec<u8> {
        let mut encoder = Encoder::versioned(VERSION);
        encoder.u64(self.segment).u32(self.index).u64(self.finished_at_seconds).finish()
    }

    fn decode(bytes: &[u8]) -> Result<Self> {
        let mut d = Decoder::versioned("place of the scrub", bytes, VERSION)?;
        let progress = Self { segment: d.u64()?, index: d.u32()?, finished_at_seconds: d.u64()? };
        d.end()?;
        Ok(progress)
    }
}

/// What the thread remembers.
#[derive(Debug, Default)]
pub(crate) struct Scrub {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// `None` until the first slice has read it.
    progress: Option<Progress>,
    slices: u64,
    searches: u64,
}

impl Scrub {
    pub(crate) fn progress(&self) -> Progress {
        self.state.lock().progress.unwrap_or_default()
    }
}

/// One slice; nothing if the rate is 0, if others need the disk more, or between passes.
pub(crate) fn slice(core: &Core) -> Result<()> {
    slice_at(core, core.clock.now().seconds())
}

fn slice_at(core: &Core, now_seconds: u64) -> Result<()> {
    let budget_bytes = core.options.scrub_bytes_per_second;
    let is_busy = core.files.dirty_bytes() > core.budget.dirty_bytes / 2;
    if budget_bytes == 0 || is_busy {
        return Ok(());
    }
    let mut damaged = Vec::new();
    // Only the one thread that scrubs changes the state, and whoever asks for figures waits for
    // no disk.
    let before = core.scrub.state.lock().progress;
    if before.is_some_and(|progress| progress.rests(now_seconds)) {
        return Ok(());
    }
    // A start begins without a rest: what was known to be damaged is to be found again.
    let before = before.map_or_else(|| load(core), Ok)?;
    let after = {
        let Some(_gc) = core.gc.try_lock() else { return Ok(()) };
        let walked = walk(core, before, budget_bytes, &mut damaged)?;
        walked.unwrap_or(Progress { segment: 0, index: 0, finished_at_seconds: now_seconds })
    };
    let is_new_pass = after.finished_at_seconds != before.finished_at_seconds;
    let (is_due, may_search) = {
        let mut state = core.scrub.state.lock();
        state.progress = Some(after);
        state.slices += 1;
        state.searches = if is_new_pass { 0 } else { state.searches };
        let may_search = !damaged.is_empty() && state.searches < SEARCHES_MAX;
        state.searches += u64::from(may_search);
        (is_new_pass || state.slices.is_multiple_of(SLICES_A_NOTE), may_search)
    };
    if is_new_pass {
        tracing::info!("all live chunks were read and verified");
    }
    if is_due {
        store(core, after)?;
    }
    if !may_search {
        return Ok(());
    }
    for hit in check::hits_of(core, damaged)? {
        let snapshot = hit.snapshot.map(|id| id.to_string());
        tracing::error!(
            path = %hit.path, snapshot, offset_bytes = hit.offset_bytes,
            length_bytes = hit.length_bytes, "damaged; write it again, or restore it from a copy"
        );
    }
    Ok(())
}

fn load(core: &Core) -> Result<Progress> {
    let bytes = core.kv.get(Family::Meta, key::META_SCRUB)?;
    // One that cannot be read costs a pass, no more.
    Ok(bytes.as_deref().and_then(|bytes| Progress::decode(bytes).ok()).unwrap_or_default())
}

fn store(core: &Core, progress: Progress) -> Result<()> {
    let (key, value) = (key::META_SCRUB.to_vec(), Some(progress.encode()));
    core.kv.apply(&vec![Write { family: Family::Meta, key, value }])
}

/// Goes on from a place until the budget is used up; `None` when the pass ended.
fn walk(
    core: &Core,
    from: Progress,
    budget_bytes: u64,
    damaged: &mut Vec<ChunkId>,
) -> Result<Option<Progress>> {
    let mut at = from;
    let mut left_bytes = budget_bytes;
    while left_bytes > 0 {
        let Some((segment, chunks)) = next_segment(core, at.segment) else { return Ok(None) };
        if segment.get() != at.segment {
            at = Progress { segment: segment.get(), index: 0, ..at };
        }
        if at.index >= chunks {
            at = Progress { segment: at.segment + 1, index: 0, ..at };
            continue;
        }
        let page = u32::try_from(PAGE_ENTRIES).unwrap_or(u32::MAX);
        let count = (page - at.index % page).min(chunks - at.index);
        let first = ChunkId::new(segment, at.index);
        left_bytes = left_bytes.saturating_sub(verify_page(core, first, count, damaged)?);
        at.index += count;
    }
    Ok(Some(at))
}

/// The first segment from a number on, and the chunks given out in it.
fn next_segment(core: &Core, from: u64) -> Option<(SegmentId, u32)> {
    let leader = core.committer.leader.lock();
    let segments = leader.segments.iter().filter(|(id, _)| id.get() >= from);
    segments.min_by_key(|(id, _)| **id).map(|(id, record)| (*id, record.chunks))
}

/// Verifies the live chunks of a page; answers the bytes that this cost.
fn verify_page(core: &Core, first: ChunkId, count: u32, damaged: &mut Vec<ChunkId>) -> Result<u64> {
    // A page is read in any case.
    let mut cost_bytes = 1;
    let entries = core.segments.entries(first, count.into());
    let mut page =
        (CountPage::first(first), counts::stored(core.kv.as_ref(), CountPage::first(first))?);
    for step in 0..count {
        let chunk = first.plus(step.into());
        if page.0 != CountPage::first(chunk) {
            page = (
                CountPage::first(chunk),
                counts::stored(core.kv.as_ref(), CountPage::first(chunk))?,
            );
        }
        if page.1.get(chunk) == 0 {
            core.segments.note_dead(chunk);
            continue;
        }
        let at = usize::try_from(step).unwrap_or(usize::MAX);
        let entry = entries.as_ref().ok().and_then(|entries| entries.get(at));
        let problem = match (entry, &entries) {
            (Some((Some(place), hash)), _) => {
                cost_bytes += u64::from(place.stored_bytes);
                verify(core, chunk, place, hash).err()
            }
            (_, Err(error)) => Some(error.to_string()),
            _ => Some("it is not stored".to_owned()),
        };
        match problem {
            None => core.segments.forget_damaged(chunk),
            Some(problem) => {
                if core.segments.note_damaged(chunk) {
                    let file = core.segments.file_of(chunk.segment()).map(|file| file.to_string());
                    tracing::error!(%chunk, file, %problem, "a chunk is damaged");
                    damaged.push(chunk);
                }
            }
        }
    }
    core.tally.scrubbed_bytes.fetch_add(cost_bytes, Ordering::Relaxed);
    Ok(cost_bytes)
}

fn verify(
    core: &Core,
    chunk: ChunkId,
    place: &Place,
    hash: &ContentHash,
) -> std::result::Result<(), String> {
    let stored = core.segments.stored(chunk, place).map_err(|error| error.to_string())?;
    let block = restore_block(place, &stored).map_err(|error| error.to_string())?;
    let got = ContentHash::of(&block);
    if got == *hash { Ok(()) } else { Err(format!("hash {got}, expected {hash}")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::Disk as _;
    use crate::testing::{World, options};

    /// A world that scrubs a page a slice.
    fn slow() -> World {
        let mut options = options(1 << 20);
        options.scrub_bytes_per_second = 1;
        World::new(options, None)
    }

    /// Flips a bit of a stored chunk.
    fn damage(world: &World, chunk: ChunkId) {
        let place = world.core.segments.entries(chunk, 1).unwrap()[0].0.unwrap();
        let name = world.core.segments.file_of(chunk.segment()).unwrap();
        let file = world.disk.open(name).unwrap();
        let at = u64::from(place.offset_bytes);
        let byte = file.read_at(at, 1).unwrap()[0];
        file.write_at(at, &[byte ^ 1]).unwrap();
        file.sync().unwrap();
    }

    fn scrubbed_bytes(world: &World) -> u64 {
        crate::stats::stats(&world.core).scrubbed_bytes
    }

    /// Slices until the next pass ends, a rest after the last.
    fn pass(world: &World) -> usize {
        let last = world.core.scrub.progress().finished_at_seconds;
        let now_seconds = last.max(world.core.clock.now().seconds()) + REST.as_secs();
        let slices = (1..1000).find(|_| {
            slice_at(&world.core, now_seconds).unwrap();
            world.core.scrub.progress().segment == 0
        });
        slices.unwrap()
    }

    #[test]
    fn damage_is_found_and_a_block_of_that_content_is_stored_anew() {
        let world = slow();
        let (one, two) = (world.create("one"), world.create("two"));
        world.put(one, 0, &(1..=600).collect::<Vec<u64>>());
        assert_eq!(pass(&world), 4, "three pages, and the end");
        assert_eq!(crate::stats::stats(&world.core).damaged_chunks, 0);
        let chunk = ChunkId::new(SegmentId::new(1), 300);
        damage(&world, chunk);
        pass(&world);
        assert_eq!(crate::stats::stats(&world.core).damaged_chunks, 1);
        let report =
            check::check(&world.core, false, &crate::progress::Progress::default()).unwrap();
        assert_eq!((report.hits.len(), report.hits[0].path.as_str()), (1, "one"));
        assert_eq!((report.hits[0].offset_bytes, report.hits[0].length_bytes), (300 * 4096, 4096));
        // The block in the chunk before it is shared, the damaged one is not.
        let before = world.hits_and_misses();
        world.put(two, 0, &[300, 301]);
        assert_eq!(world.hits_and_misses(), (before.0 + 1, before.1 + 1));
        assert_eq!(world.content(two), crate::testing::blocks(&[300, 301]));
        let error = crate::data::read(&world.core, crate::Source::File(one), 0, 301 * 4096);
        assert!(error.unwrap_err().to_string().contains("chunk 1/300"));
        // The content that was stored anew heals the file that was hit.
        let report = crate::repair::repair(&world.core, crate::repair::GiveUp::Damaged).unwrap();
        assert_eq!((report.healed_blocks, report.lost_blocks), (1, 0));
        assert!(report.after.is_clean(), "{:#?}", report.after.problems);
        let world = world.restart();
        let all: Vec<u64> = (1..=600).collect();
        assert!(world.content(one) == crate::testing::blocks(&all));
    }

    #[test]
    fn damage_that_nothing_names_does_not_count_and_is_not_shared() {
        let world = slow();
        let file = world.create("one");
        world.put(file, 0, &(1..=600).collect::<Vec<u64>>());
        let chunk = ChunkId::new(SegmentId::new(1), 300);
        damage(&world, chunk);
        pass(&world);
        let damaged = || crate::stats::stats(&world.core).damaged_chunks;
        assert_eq!(damaged(), 1);
        // Healed by another content; what is damaged is stored until it is compacted.
        world.put(file, 300, &[1000]);
        pass(&world);
        assert_eq!(damaged(), 0);
        let misses = world.hits_and_misses().1;
        world.put(file, 301, &[301]);
        assert_eq!(world.hits_and_misses().1, misses + 1, "it is not brought back to life");
        assert!(world.core.segments.is_damaged(chunk));
        crate::background::gc(&world.core).unwrap();
        assert!(!world.core.segments.is_damaged(chunk), "its place is for another");
        world.check();
    }

    #[test]
    fn the_place_survives_a_restart_and_a_pass_tells_when_it_ended() {
        let world = slow();
        let file = world.create("one");
        world.put(file, 0, &(1..=600).collect::<Vec<u64>>());
        pass(&world);
        let ended = world.core.scrub.progress();
        assert!(ended.finished_at_seconds > 0);
        let world = world.restart();
        assert_eq!(world.core.scrub.progress(), Progress::default());
        slice(&world.core).unwrap();
        let now = world.core.scrub.progress();
        assert_eq!(now, Progress { segment: 1, index: 256, ..ended }, "a start does not rest");
        assert_eq!(Progress::decode(&now.encode()).unwrap(), now);
    }

    #[test]
    fn a_day_lies_between_passes_and_none_inside_one() {
        let world = slow();
        let file = world.create("one");
        world.put(file, 0, &(1..=600).collect::<Vec<u64>>());
        pass(&world);
        let (ended, read_bytes) = (world.core.scrub.progress(), scrubbed_bytes(&world));
        let day = ended.finished_at_seconds..ended.finished_at_seconds + REST.as_secs();
        for now_seconds in [day.start, day.end - 1] {
            slice_at(&world.core, now_seconds).unwrap();
            assert_eq!(world.core.scrub.progress(), ended);
        }
        assert_eq!(scrubbed_bytes(&world), read_bytes);
        slice_at(&world.core, day.end).unwrap();
        slice_at(&world.core, day.end).unwrap();
        assert_eq!(world.core.scrub.progress(), Progress { segment: 1, index: 512, ..ended });
        // A clock that was wrong does not keep the next pass away.
        assert!(!ended.rests(ended.finished_at_seconds - REST.as_secs()));
    }

    #[test]
    fn nothing_is_read_at_a_rate_of_zero_or_next_to_compaction() {
        let world = slow();
        let file = world.create("one");
        world.put(file, 0, &[1]);
        let busy = world.core.gc.lock();
        slice(&world.core).unwrap();
        assert_eq!(world.core.scrub.progress().segment, 0);
        drop(busy);
        slice(&world.core).unwrap();
        assert_eq!(world.core.scrub.progress().segment, 1);
        let world = World::new(crate::testing::options(1 << 20), None);
        assert_eq!(world.core.options.scrub_bytes_per_second, 0);
        slice(&world.core).unwrap();
        assert_eq!(scrubbed_bytes(&world), 0);
    }
}
