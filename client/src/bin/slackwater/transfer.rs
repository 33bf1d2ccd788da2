//! The common engine of import and export: what is to be moved, in which pieces, how much of it
//! at once.
//!
//! ```text
//! planner --work--> jobs (bounded in number) --pieces--> appliance or image
//!    |                |
//!    |                compare: hash the local blocks, move those that differ
//!    where data is: holes of the image, diff of the snapshot, or both sides' block maps
//! ```
//!
//! Invariants: a range is only left out when both sides are known to read the same there; at
//! most [`JOBS_MAX`] pieces of [`PIECE_BYTES`] are in memory; no state is kept between runs: a
//! resumed transfer believes only in equal hashes.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::stream::{self, TryStreamExt};
use indicatif::ProgressBar;
use slackwater_client::query::Diff;
use slackwater_client::types::{DiffExtent, ExtentKind, PAGE_LIMIT_MAX, SnapshotId};
use slackwater_client::{BlockHash, ByteRange, Client, DataSource};

use crate::blocks::{BLOCK_BYTES, GAP_BYTES};
use crate::failure::Failure;
use crate::image::Image;
use crate::size::human;

/// Most bytes of one request: large enough that its cost is in the bytes, small enough that a
/// broken one costs little and [`JOBS_MAX`] of them fit in memory.
pub(crate) const PIECE_BYTES: u64 = 4 << 20;

/// Most bytes of one job.
const SPAN_BYTES: u64 = 16 << 20;

/// Bytes whose map is asked for at once: 2 MiB of hashes at most.
const MAP_BYTES: u64 = 256 << 20;

/// Spans that are looked for in an image before work begins on them.
const PLANNED_SPANS_MAX: usize = 64;

/// Jobs at once unless told otherwise: keeps a fast network and both disks busy.
pub(crate) const JOBS_DEFAULT: u64 = 4;

/// Most jobs at once.
pub(crate) const JOBS_MAX: u64 = 16;

const _: () = assert!(PIECE_BYTES.is_multiple_of(BLOCK_BYTES));
const _: () = assert!(SPAN_BYTES.is_multiple_of(PIECE_BYTES));
const _: () = assert!(MAP_BYTES.is_multiple_of(SPAN_BYTES));

/// What is to be done with a range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Task {
    /// Bring it over.
    Copy,
    /// Make it a hole at the target.
    Clear,
    /// Bring over the blocks whose local bytes do not have these hashes of the appliance's.
    Compare(Vec<BlockHash>),
}

/// A range, what to do with it, and by how much its end brings the whole forward.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Work {
    pub(crate) range: ByteRange,
    pub(crate) task: Task,
    advance_bytes: u64,
}

/// What was moved so far.
#[derive(Debug)]
pub(crate) struct Tally {
    moved_bytes: AtomicU64,
    bar: ProgressBar,
}

impl Tally {
    pub(crate) const fn new(bar: ProgressBar) -> Self {
        Self { moved_bytes: AtomicU64::new(0), bar }
    }

    /// Notes bytes that went over the network, or were made a hole.
    pub(crate) fn moved(&self, bytes: u64) {
        let all = self.moved_bytes.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        self.bar.set_message(human(all));
    }

    /// Notes how far the whole is.
    pub(crate) fn advance(&self, bytes: u64) {
        self.bar.inc(bytes);
    }

    pub(crate) fn moved_bytes(&self) -> u64 {
        self.moved_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

/// Finds the work of a transfer, a part at a time.
#[derive(Debug)]
pub(crate) struct Planner {
    source: Plan,
    queue: VecDeque<Work>,
    /// All before this is planned.
    planned_bytes: u64,
    is_done: bool,
}

/// Where work is looked for.
#[derive(Debug)]
pub(crate) enum Plan {
    /// The ranges of an image that may hold data.
    Data(Arc<Image>),
    /// What differs between two snapshots.
    Diff { client: Client, id: SnapshotId, query: Diff },
    /// Everything, by the appliance's block map, but for what is a hole on both sides.
    Compare { client: Client, remote: Remote, image: Arc<Image> },
}

/// The appliance's side of a comparison.
#[derive(Clone, Debug)]
pub(crate) enum Remote {
    File(String),
    Snapshot(SnapshotId),
}

impl Remote {
    pub(crate) fn source(&self) -> DataSource<'_> {
        match self {
            Self::File(path) => DataSource::File(path),
            Self::Snapshot(id) => DataSource::Snapshot(*id),
        }
    }
}

impl Plan {
    /// The diff of a snapshot to an older one, or to an empty file.
    pub(crate) fn diff(client: Client, id: SnapshotId, base: Option<SnapshotId>) -> Self {
        Self::Diff { client, id, query: Diff { base, limit: Some(PAGE_LIMIT_MAX), after: None } }
    }
}

impl Planner {
    pub(crate) fn new(source: Plan) -> Self {
        Self { source, queue: VecDeque::new(), planned_bytes: 0, is_done: false }
    }

    /// Does all work by `job`, `jobs` of them at once; the first failure ends it.
    pub(crate) async fn run<F>(
        self,
        jobs: u64,
        tally: &Tally,
        job: impl Fn(Work) -> F,
    ) -> Result<(), Failure>
    where
        F: Future<Output = Result<(), Failure>>,
    {
        let works = stream::try_unfold(self, async |mut planner| {
            Ok::<_, Failure>(planner.next().await?.map(|work| (work, planner)))
        });
        let jobs = usize::try_from(jobs.clamp(1, JOBS_MAX)).unwrap_or(1);
        works
            .map_ok(|work| {
                let advance_bytes = work.advance_bytes;
                let running = job(work);
                async move { running.await.map(|()| advance_bytes) }
            })
            .try_buffer_unordered(jobs)
            .try_for_each(async |advance_bytes| {
                tally.advance(advance_bytes);
                Ok(())
            })
            .await
    }

    async fn next(&mut self) -> Result<Option<Work>, Failure> {
        while self.queue.is_empty() && !self.is_done {
            self.refill().await?;
        }
        Ok(self.queue.pop_front())
    }

    async fn refill(&mut self) -> Result<(), Failure> {
        match &mut self.source {
            Plan::Data(image) => {
                let (image, from) = (Arc::clone(image), self.planned_bytes);
                let found = blocking(move || find_data(&image, from)).await?;
                self.is_done = found.is_empty();
                found.into_iter().for_each(|range| self.push(range, Task::Copy));
            }
            Plan::Diff { client, id, query } => {
                let page = client.diff(*id, query).await?;
                query.after = page.next;
                self.is_done = query.after.is_none();
                coalesce(&page.items).into_iter().for_each(|(range, task)| self.push(range, task));
            }
            Plan::Compare { client, remote, image } => {
                let found = compare_next(client, remote, image, self.planned_bytes).await?;
                match found {
                    None => self.is_done = true,
                    Some((works, end_bytes)) => {
                        works.into_iter().for_each(|(range, task)| self.push(range, task));
                        self.planned_bytes = self.planned_bytes.max(end_bytes);
                    }
                }
            }
        }
        Ok(())
    }

    fn push(&mut self, range: ByteRange, task: Task) {
        let advance_bytes = range.end_bytes().saturating_sub(self.planned_bytes);
        self.planned_bytes = self.planned_bytes.max(range.end_bytes());
        self.queue.push_back(Work { range, task, advance_bytes });
    }
}

/// The next spans of the image that may hold data, from `from_bytes` on.
fn find_data(image: &Image, from_bytes: u64) -> Result<Vec<ByteRange>, Failure> {
    let mut spans = Vec::new();
    let mut from_bytes = from_bytes;
    while spans.len() < PLANNED_SPANS_MAX {
        let Some(data) = image.data_from(from_bytes)? else {
            break;
        };
        // Whole blocks, so that no two requests write parts of one block at once.
        let start = (data.start - data.start % BLOCK_BYTES).max(from_bytes);
        let end = data.end.next_multiple_of(BLOCK_BYTES).min(image.size_bytes());
        let Some(span) = ByteRange::new(start, (end - start).min(SPAN_BYTES)) else {
            break;
        };
        from_bytes = span.end_bytes();
        spans.push(span);
    }
    Ok(spans)
}

/// Copies over small gaps in one, splits what is large, keeps holes as they are.
pub(crate) fn coalesce(extents: &[DiffExtent]) -> Vec<(ByteRange, Task)> {
    let mut works: Vec<(ByteRange, Task)> = Vec::new();
    let mut open: Option<Range<u64>> = None;
    for extent in extents {
        let range = extent.offset_bytes..extent.offset_bytes.saturating_add(extent.length_bytes);
        if extent.kind == ExtentKind::Hole {
            works.extend(
                ByteRange::new(range.start, extent.length_bytes).map(|range| (range, Task::Clear)),
            );
            continue;
        }
        match &mut open {
            // What lies between is copied as the snapshot has it, so this is right for any gap.
            Some(last) if range.start.saturating_sub(last.end) <= GAP_BYTES => last.end = range.end,
            _ => works.extend(open.replace(range).into_iter().flat_map(copies)),
        }
    }
    works.extend(open.into_iter().flat_map(copies));
    works
}

fn copies(range: Range<u64>) -> impl Iterator<Item = (ByteRange, Task)> {
    split(range.start, range.end, SPAN_BYTES).map(|range| (range, Task::Copy))
}

/// Cuts from `start` to `end` into ranges of `step` bytes, counted from `start`.
fn split(start: u64, end: u64, step: u64) -> impl Iterator<Item = ByteRange> {
    let mut next = start;
    std::iter::from_fn(move || {
        let range = ByteRange::new(next, end.saturating_sub(next).min(step))?;
        next = range.end_bytes();
        Some(range)
    })
}

/// The pieces of a range.
pub(crate) fn pieces(range: ByteRange) -> impl Iterator<Item = ByteRange> {
    split(range.offset_bytes(), range.end_bytes(), PIECE_BYTES)
}

/// The comparisons of the next part of the image, and where it ends.
async fn compare_next(
    client: &Client,
    remote: &Remote,
    image: &Arc<Image>,
    from_bytes: u64,
) -> Result<Option<(Vec<(ByteRange, Task)>, u64)>, Failure> {
    let left = image.size_bytes().saturating_sub(from_bytes);
    let Some(range) = ByteRange::new(from_bytes, left.min(MAP_BYTES)) else {
        return Ok(None);
    };
    let map = client.block_map(remote.source(), range).await?;
    if u64::from(map.block_bytes) != BLOCK_BYTES || map.size_bytes != image.size_bytes() {
        return Err(Failure::Conflict(format!(
            "the appliance has {} in blocks of {} bytes, expected {} in blocks of {BLOCK_BYTES}: \
             was it resized meanwhile?",
            human(map.size_bytes),
            map.block_bytes,
            human(image.size_bytes())
        )));
    }
    let blocks = u64::try_from(map.blocks.len()).unwrap_or(u64::MAX);
    let end_bytes =
        from_bytes.saturating_add(blocks.saturating_mul(BLOCK_BYTES)).min(range.end_bytes());
    if end_bytes <= from_bytes {
        return Err(Failure::Other(format!("the appliance's block map ends at {from_bytes}")));
    }
    let image = Arc::clone(image);
    let works = blocking(move || comparisons(&image, from_bytes..end_bytes, &map.blocks)).await?;
    Ok(Some((works, end_bytes)))
}

/// The spans of `part` that are not holes on both sides, with their hashes.
fn comparisons(
    image: &Image,
    part: Range<u64>,
    hashes: &[BlockHash],
) -> Result<Vec<(ByteRange, Task)>, Failure> {
    let span_blocks = usize::try_from(SPAN_BYTES / BLOCK_BYTES).unwrap_or(usize::MAX);
    let mut works = Vec::new();
    for (range, hashes) in split(part.start, part.end, SPAN_BYTES).zip(hashes.chunks(span_blocks)) {
        let is_hole_there = hashes.iter().all(Option::is_none);
        let is_hole_here = || -> Result<bool, Failure> {
            let data = image.data_from(range.offset_bytes())?;
            Ok(data.is_none_or(|data| data.start >= range.end_bytes()))
        };
        if !is_hole_there || !is_hole_here()? {
            works.push((range, Task::Compare(hashes.to_vec())));
        }
    }
    Ok(works)
}

/// Runs file work or hashing where it may block.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let joined = tokio::task::spawn_blocking(work).await;
    joined.unwrap_or_else(|error| {
        Err(Failure::Other(format!("a part of the transfer failed: {error}")))
    })
}

/// The text as a shell takes it for one word.
pub(crate) fn shell_word(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:@%".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(offset_blocks: u64, length_blocks: u64, kind: ExtentKind) -> DiffExtent {
        DiffExtent {
            offset_bytes: offset_blocks * BLOCK_BYTES,
            length_bytes: length_blocks * BLOCK_BYTES,
            kind,
        }
    }

    fn range(offset_bytes: u64, length_bytes: u64) -> ByteRange {
        ByteRange::new(offset_bytes, length_bytes).unwrap()
    }

    #[test]
    fn near_extents_are_one_copy_and_large_ones_several() {
        let extents = [
            extent(0, 1, ExtentKind::Data),
            extent(4, 1, ExtentKind::Data),
            extent(5, 2, ExtentKind::Hole),
            extent(1000, 5000, ExtentKind::Data),
        ];
        assert_eq!(
            coalesce(&extents),
            [
                (range(5 * BLOCK_BYTES, 2 * BLOCK_BYTES), Task::Clear),
                (range(0, 5 * BLOCK_BYTES), Task::Copy),
                (range(1000 * BLOCK_BYTES, SPAN_BYTES), Task::Copy),
                (range(1000 * BLOCK_BYTES + SPAN_BYTES, 904 * BLOCK_BYTES), Task::Copy),
            ]
        );
        assert!(coalesce(&[]).is_empty());
    }

    #[test]
    fn data_of_an_image_is_found_in_whole_blocks() {
        let directory = tempfile::tempdir().unwrap();
        let image = Image::create(&directory.path().join("a"), (1 << 30) + 5).unwrap();
        assert!(find_data(&image, 0).unwrap().is_empty());
        image.write((100 << 20) + 5, b"x").unwrap();
        image.write((1 << 30) + 4, b"y").unwrap();
        let found = find_data(&image, 0).unwrap();
        assert!(found.iter().all(|range| range.offset_bytes().is_multiple_of(BLOCK_BYTES)));
        let holds = |at: u64| found.iter().any(|r| (r.offset_bytes()..r.end_bytes()).contains(&at));
        assert!(holds((100 << 20) + 5) && holds((1 << 30) + 4) && !holds(50 << 20));
        assert_eq!(found.last().unwrap().end_bytes(), (1 << 30) + 5);
        assert!(found.iter().map(|range| range.length_bytes()).sum::<u64>() < 1 << 20);
    }

    #[test]
    fn only_holes_on_both_sides_are_passed_over() {
        let directory = tempfile::tempdir().unwrap();
        let image = Image::create(&directory.path().join("a"), 3 * SPAN_BYTES).unwrap();
        image.write(SPAN_BYTES + 5, b"x").unwrap();
        let span_blocks = usize::try_from(SPAN_BYTES / BLOCK_BYTES).unwrap();
        let mut hashes = vec![None; 3 * span_blocks];
        hashes[2 * span_blocks + 7] = Some([1; 32]);
        let found = comparisons(&image, 0..3 * SPAN_BYTES, &hashes).unwrap();
        let offsets: Vec<u64> = found.iter().map(|(range, _)| range.offset_bytes()).collect();
        assert_eq!(offsets, [SPAN_BYTES, 2 * SPAN_BYTES]);
    }

    #[test]
    fn words_survive_a_shell() {
        assert_eq!(shell_word("images/a.img"), "images/a.img");
        assert_eq!(shell_word("it's here"), r"'it'\''s here'");
        assert_eq!(shell_word(""), "''");
    }
}
