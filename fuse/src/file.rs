//! A file that is served, and what its only writer knows about it.
//!
//! Invariants:
//! - A block is marked as written before its WRITE is sent, and stays so: from then on its
//!   bytes are read over NFS, whatever a block map said before.
//! - The journal names a verifier before a write that was answered with it is answered to the
//!   kernel.
//! - Writes hold `order` shared, whoever sends old ones again holds it alone: what is sent
//!   again can never overtake what is newer.
//! - Writes that overlap are sent one after the other, so that what is kept last is what the appliance has.

use std::collections::HashMap;
use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{Notify, RwLock, Semaphore, SemaphorePermit};

use crate::kept::KeptWrites;
use crate::maps::{MapSource, WINDOW_BLOCKS};
use crate::nfs::{Handle, Verifier};
use crate::wire::NodeId;

/// Which blocks were written to, by window: one bit a block.
#[derive(Debug, Default)]
pub(crate) struct WrittenBlocks {
    windows: HashMap<u64, [u64; 4]>,
}

/// The word and the bit of a block in its window.
fn place_of(block: u64) -> (usize, u64) {
    let within = block % WINDOW_BLOCKS;
    (usize::try_from(within / 64).unwrap_or(0), 1 << (within % 64))
}

impl WrittenBlocks {
    /// Marks the blocks from `first` to `last`.
    pub(crate) fn mark(&mut self, first: u64, last: u64) {
        for block in first..=last {
            let (word, bit) = place_of(block);
            let window = self.windows.entry(block / WINDOW_BLOCKS).or_default();
            if let Some(word) = window.get_mut(word) {
                *word |= bit;
            }
        }
    }

    pub(crate) fn contains(&self, block: u64) -> bool {
        let (word, bit) = place_of(block);
        let window = self.windows.get(&(block / WINDOW_BLOCKS));
        window.and_then(|window| window.get(word)).is_some_and(|word| word & bit != 0)
    }
}

/// Writes of one file under way at once: 16 MiB of largest ones, enough for 10 Gbit/s and 10 ms, and a quarter of all calls
/// under way, so that a file which is written as fast as can be leaves room for others.
const WRITES_MAX: usize = 16;

/// The writes of a file that are under way: so many at once, and none that overlaps another. The kernel sends those of a loop
/// device side by side, and a program's direct writes may overlap.
#[derive(Debug)]
pub(crate) struct WritesUnderWay {
    turns: Semaphore,
    ranges: Mutex<Vec<Range<u64>>>,
    ended: Notify,
}

impl Default for WritesUnderWay {
    fn default() -> Self {
        let turns = Semaphore::new(WRITES_MAX);
        Self { turns, ranges: Mutex::default(), ended: Notify::new() }
    }
}

impl WritesUnderWay {
    /// Waits until a write of these bytes may be sent. It is under way for as long as the answer lives.
    pub(crate) async fn begin(&self, range: Range<u64>) -> UnderWay<'_> {
        // An error: it is never closed.
        let turn = self.turns.acquire().await.ok();
        loop {
            let mut ended = pin!(self.ended.notified());
            // From here on an end counts, also one before the wait.
            ended.as_mut().enable();
            if self.take(&range) {
                return UnderWay { writes: self, range, _turn: turn };
            }
            ended.await;
        }
    }

    fn take(&self, range: &Range<u64>) -> bool {
        let mut ranges = self.ranges.lock();
        let is_free = ranges.iter().all(|one| one.end <= range.start || range.end <= one.start);
        if is_free {
            ranges.push(range.clone());
        }
        is_free
    }
}

/// A write that is under way.
#[derive(Debug)]
pub(crate) struct UnderWay<'a> {
    writes: &'a WritesUnderWay,
    range: Range<u64>,
    _turn: Option<SemaphorePermit<'a>>,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        let mut ranges = self.writes.ranges.lock();
        // None other begins where this one does.
        if let Some(index) = ranges.iter().position(|range| *range == self.range) {
            ranges.swap_remove(index);
        }
        drop(ranges);
        self.writes.ended.notify_waiters();
    }
}

/// Longest write that is taken for a commit record: the largest block of ext4.
const RECORD_BYTES_MAX: u64 = 64 << 10;

/// Syncs after a wrong guess behind which none is made.
const PAUSE_SYNCS: u32 = 16;

/// Which write is most likely a journal's commit record, behind which the next sync comes at once:
///
/// ```text
/// ext4 (jbd2)   blocks of the journal | sync | one block behind them | sync | blocks of the journal ...
///                             last_end ^       ^ expected_at: the record
/// ```
/// That is a guess, which costs or saves time and nothing else. None is made where something else is uncommitted: the next
/// sync has to commit that in any case.
#[derive(Debug, Default)]
pub(crate) struct CommitRecord {
    /// Where the last write since the last sync ended.
    last_end: Option<u64>,
    expected_at: Option<u64>,
    /// Where the write ended that was taken for a record since the last sync.
    taken_end: Option<u64>,
    /// So many syncs more no guess is made.
    pause_syncs: u32,
}

impl CommitRecord {
    /// Notes a write. Answers whether it is taken for a record.
    pub(crate) fn note_write(&mut self, write: &Range<u64>, is_all_committed: bool) -> bool {
        // A stream of small writes, with a sync now and then.
        if self.taken_end == Some(write.start) {
            self.pause_syncs = PAUSE_SYNCS;
        }
        let is_record = self.expected_at == Some(write.start)
            && self.last_end.is_none()
            && is_all_committed
            && write.end.saturating_sub(write.start) <= RECORD_BYTES_MAX;
        if is_record {
            (self.expected_at, self.taken_end) = (None, Some(write.end));
        } else {
            self.last_end = Some(write.end);
        }
        is_record
    }

    /// Notes a sync.
    pub(crate) fn note_sync(&mut self) {
        // What follows a record is the next transaction.
        self.taken_end = None;
        if let Some(end) = self.last_end.take() {
            self.expected_at = (self.pause_syncs == 0).then_some(end);
            self.pause_syncs = self.pause_syncs.saturating_sub(1);
        }
    }
}

/// What changes with each write.
#[derive(Debug, Default)]
pub(crate) struct WriteState {
    pub(crate) written: WrittenBlocks,
    pub(crate) kept: KeptWrites,
    /// The verifiers that the journal names.
    pub(crate) journaled: Vec<Verifier>,
    pub(crate) commit_record: CommitRecord,
    /// Writes that were answered are lost: no sync may say otherwise.
    pub(crate) is_lost: bool,
}

/// A file that is served.
#[derive(Debug)]
pub(crate) struct ServedFile {
    pub(crate) node: NodeId,
    pub(crate) handle: Handle,
    pub(crate) source: MapSource,
    pub(crate) writes: Mutex<WriteState>,
    pub(crate) under_way: WritesUnderWay,
    pub(crate) order: Arc<RwLock<()>>,
    /// One commit at a time: the watermark of what is kept, up to which all is committed.
    pub(crate) committing: tokio::sync::Mutex<u64>,
}

impl ServedFile {
    pub(crate) fn new(node: NodeId, handle: Handle, source: MapSource) -> Self {
        Self {
            node,
            handle,
            source,
            writes: Mutex::default(),
            under_way: WritesUnderWay::default(),
            order: Arc::default(),
            committing: tokio::sync::Mutex::default(),
        }
    }

    /// Whether it can change.
    pub(crate) const fn is_writable(&self) -> bool {
        matches!(self.source, MapSource::File(_))
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn writes_that_overlap_wait_for_each_other_and_others_do_not() {
        let writes = WritesUnderWay::default();
        let is_free = |range: Range<u64>| writes.begin(range).now_or_never().is_some();
        let first = writes.begin(10..20).await;
        for (start, end, expected) in
            [(0, 10, true), (20, 30, true), (19, 20, false), (0, 11, false), (12, 13, false)]
        {
            assert_eq!(is_free(start..end), expected, "{start}..{end}");
        }
        // Two wait for the first, and then one for the other.
        let (mut second, mut third) =
            (Box::pin(writes.begin(0..15)), Box::pin(writes.begin(5..40)));
        assert!(second.as_mut().now_or_never().is_none());
        assert!(third.as_mut().now_or_never().is_none());
        drop(first);
        let one = tokio::select! { one = &mut second => one, one = &mut third => one };
        assert!(!is_free(7..8));
        drop(one);
        drop((second, third));
        assert!(is_free(0..100) && writes.ranges.lock().is_empty());
    }

    #[tokio::test]
    async fn so_many_writes_of_a_file_are_under_way_at_once() {
        let writes = WritesUnderWay::default();
        let mut under_way = Vec::new();
        for number in 0..16 {
            under_way.push(writes.begin(number..number + 1).now_or_never().unwrap());
        }
        let more = writes.begin(100..101);
        assert!(writes.begin(200..201).now_or_never().is_none());
        under_way.pop();
        drop(more.await);
        assert!(writes.begin(200..201).now_or_never().is_some());
    }

    /// Notes a write while all others are committed.
    fn is_record(record: &mut CommitRecord, write: Range<u64>) -> bool {
        record.note_write(&write, true)
    }

    #[test]
    fn the_block_behind_those_that_were_synced_is_taken_for_a_commit_record() {
        let mut record = CommitRecord::default();
        assert!(!is_record(&mut record, 0..4096));
        assert!(!is_record(&mut record, 4096..12_288), "nothing was synced");
        record.note_sync();
        assert!(is_record(&mut record, 12_288..16_384));
        // The sync of the record itself, and the next transaction.
        record.note_sync();
        assert!(!is_record(&mut record, 16_384..20_480));
        assert!(!is_record(&mut record, 20_480..24_576));
        record.note_sync();
        // A sync of nothing new.
        record.note_sync();
        assert!(is_record(&mut record, 24_576..28_672));
        record.note_sync();
        // The journal goes on at its start.
        assert!(!is_record(&mut record, 28_672..32_768));
        record.note_sync();
        assert!(!is_record(&mut record, 0..4096));
        // A long one is a stream.
        record.note_sync();
        assert!(!is_record(&mut record, 4096..4097 + RECORD_BYTES_MAX));
        record.note_sync();
        let start = 4097 + RECORD_BYTES_MAX;
        assert!(is_record(&mut record, start..start + RECORD_BYTES_MAX));
    }

    #[test]
    fn no_record_is_looked_for_behind_what_others_write() {
        let mut record = CommitRecord::default();
        for start in [0, 1 << 20, 2 << 20] {
            // Data, blocks of the journal; another program's data; the record.
            assert!(!is_record(&mut record, start..start + 4096));
            record.note_sync();
            assert!(!is_record(&mut record, (1 << 30) + start..(1 << 30) + start + 4096));
            assert!(!is_record(&mut record, start + 4096..start + 8192));
            record.note_sync();
            // Data once more: the next transaction is not taken for the record that was missed.
            assert!(!is_record(&mut record, (1 << 31) + start..(1 << 31) + start + 4096));
            assert!(!is_record(&mut record, start + 8192..start + 12_288));
            record.note_sync();
            assert!(!record.note_write(&(start + 12_288..start + 16_384), false), "not committed");
            record.note_sync();
            assert!(is_record(&mut record, start + 16_384..start + 20_480));
            record.note_sync();
        }
    }

    #[test]
    fn a_stream_that_is_synced_now_and_then_is_left_alone() {
        let mut record = CommitRecord::default();
        let (mut end, mut taken) = (0, 0);
        for _ in 0..2 * (PAUSE_SYNCS + 1) {
            for _ in 0..3 {
                taken += u32::from(is_record(&mut record, end..end + 4096));
                end += 4096;
            }
            record.note_sync();
        }
        assert_eq!(taken, 2);
    }

    #[test]
    fn marks_are_by_block() {
        let mut written = WrittenBlocks::default();
        written.mark(250, 258);
        written.mark(1 << 40, 1 << 40);
        let marked: Vec<u64> = (0..600).filter(|block| written.contains(*block)).collect();
        assert_eq!(marked, (250..=258).collect::<Vec<_>>());
        assert!(written.contains(1 << 40) && !written.contains((1 << 40) + 1));
    }
}
