//! I1, I3 and I6: counts, hash entries and segments, for as many segments at a time as the
//! budget holds the counts and hashes of.

use std::ops::ControlFlow;

use super::findings::differs;
use super::stored::Stored;
use super::{Check, EVERYTHING_END, Findings, Fix, each, stored};
use crate::codec::Decoder;
use crate::error::Result;
use crate::id::LayerId;
use crate::id::{ChunkId, SegmentId};
use crate::kv::Family;
use crate::record::{
    CountPage, Run, SegmentRecord, Target, decode_chunk, decode_segment, key, split_two,
};

/// Bytes that one chunk takes while it is counted: its count, and the begin of its hash.
const COUNTED_CHUNK_BYTES: usize = 4 + 8;

/// A segment whose chunks are counted.
pub(super) struct Counted {
    pub(super) id: SegmentId,
    pub(super) record: SegmentRecord,
    /// For each chunk how many map blocks name it.
    pub(super) counts: Vec<u32>,
    /// For each chunk the first bytes of its hash, 0 if it is not stored or they are unknown.
    prefixes: Vec<u64>,
}

/// Segments in order, with nothing of others between them.
type Part = Vec<Counted>;

pub(super) fn check(check: &mut Check<'_>, findings: &mut Findings) -> Result<()> {
    let mut segments: Vec<(SegmentId, SegmentRecord)> = Vec::new();
    each(check.view, Family::Segment, |segment_key, value| {
        let id = decode_segment(segment_key)?;
        match SegmentRecord::decode(value) {
            Ok(record) => segments.push((id, record)),
            Err(error) => findings.rebuild(&format!("I6: segment {id}: {error}")),
        }
        Ok(())
    })?;
    let chunks = segments.iter().map(|(_, record)| u64::from(record.chunks)).sum();
    check.progress.begin("chunks", chunks);
    named_beyond(check, &segments, findings)?;
    let limit = check.at_once(COUNTED_CHUNK_BYTES);
    let mut rest = segments.into_iter().peekable();
    let mut refs_from = Vec::new();
    loop {
        let (mut part, mut chunks) = (Part::new(), 0);
        while let Some((id, record)) = rest.next_if(|(_, record)| {
            chunks += usize::try_from(record.chunks).unwrap_or(usize::MAX);
            chunks <= limit || part.is_empty()
        }) {
            let length = usize::try_from(record.chunks).unwrap_or(0);
            let (counts, prefixes) = (vec![0; length], vec![0; length]);
            part.push(Counted { id, record, counts, prefixes });
        }
        let refs_end = match (rest.peek(), part.last()) {
            (Some(_), Some(last)) => key::refs(ChunkId::new(SegmentId::new(last.id.get() + 1), 0)),
            _ => EVERYTHING_END.to_vec(),
        };
        count(check, &mut part)?;
        pages(check, (&refs_from, &refs_end), &part, findings)?;
        for counted in &mut part {
            live(check, counted, findings);
            let Stored { prefixes } = stored::check(check, counted, findings)?;
            counted.prefixes = prefixes;
        }
        hashes(check, (&refs_from, &refs_end), &part, findings)?;
        if rest.peek().is_none() {
            return Ok(());
        }
        refs_from = refs_end;
    }
}

fn segment_of(part: &[Counted], id: SegmentId) -> Option<usize> {
    part.binary_search_by_key(&id, |counted| counted.id).ok()
}

/// The runs of chunks, over all layers.
fn runs(
    check: &Check<'_>,
    mut visit: impl FnMut(LayerId, Run, ChunkId) -> Result<()>,
) -> Result<()> {
    each(check.view, Family::Map, |map_key, value| {
        let (layer, first) = split_two("map key", map_key)?;
        // One that cannot be decoded was found already.
        match Run::decode(first, value) {
            Ok(run) => match run.target {
                Target::Chunks(chunk) => visit(LayerId::new(layer), run, chunk),
                Target::Hole | Target::Lost => Ok(()),
            },
            Err(_) => Ok(()),
        }
    })
}

/// Blocks that name chunks which were never stored are lost; of those in a segment without a
/// record nobody can tell.
fn named_beyond(
    check: &Check<'_>,
    segments: &[(SegmentId, SegmentRecord)],
    findings: &mut Findings,
) -> Result<()> {
    runs(check, |layer, run, first| {
        let found = segments.binary_search_by_key(&first.segment(), |(id, _)| *id);
        let record = found.ok().and_then(|at| segments.get(at)).map(|(_, record)| record);
        let chunks = record.map_or(0, |record| record.chunks);
        let known = u64::from(chunks.saturating_sub(first.index())).min(run.count);
        if known < run.count {
            let id = first.segment();
            let lost = Run { target: Target::Lost, ..run };
            let fix = || {
                let parts =
                    [run.cut(run.first, run.first + known), lost.cut(run.first + known, run.end())];
                Fix::Replace(layer, vec![run], parts.into_iter().flatten().collect())
            };
            match record {
                Some(_) => findings.wrong(
                    format!("I2: a map names chunks of segment {id} that it does not have"),
                    fix,
                ),
                None => {
                    let problem =
                        format!("I2: a map names chunks of segment {id}, which is missing");
                    findings.missing(&problem, fix);
                }
            }
        }
        Ok(())
    })
}

fn count(check: &Check<'_>, part: &mut Part) -> Result<()> {
    runs(check, |_, run, first| {
        let Some(at) = segment_of(part, first.segment()) else { return Ok(()) };
        let from = usize::try_from(first.index()).unwrap_or(usize::MAX);
        let length = usize::try_from(run.count).unwrap_or(usize::MAX);
        let counts = part.get_mut(at).map(|counted| counted.counts.iter_mut());
        for count in counts.into_iter().flatten().skip(from).take(length) {
            *count = count.saturating_add(1);
        }
        Ok(())
    })
}

/// I1: the stored pages, and where none is stored, against what was counted.
fn pages(
    check: &Check<'_>,
    (from, to): (&[u8], &[u8]),
    part: &[Counted],
    findings: &mut Findings,
) -> Result<()> {
    // The next chunk of the part that no page has spoken of.
    let mut next = (0, 0);
    check.view.scan(Family::Refs, from, to, &mut |refs_key, value| {
        let first = decode_chunk(refs_key)?;
        let whole = CountPage::first(first) == first;
        match CountPage::decode(value) {
            Ok(page) if whole => {
                silent(part, &mut next, Some(first), findings);
                compare_page(part, &page, first, findings);
            }
            Ok(_) => {
                let problem = format!("I1: a page of counts begins with chunk {first}");
                findings.wrong(problem, || Fix::delete(Family::Refs, refs_key));
            }
            Err(error) => {
                let problem = format!("I1: page of counts of chunk {first}: {error}");
                findings.wrong(problem, || right_page(part, CountPage::first(first)));
            }
        }
        Ok(ControlFlow::Continue(()))
    })?;
    silent(part, &mut next, None, findings);
    Ok(())
}

/// The count that a chunk should have; one that was never given out has none.
fn expected(part: &[Counted], chunk: ChunkId) -> Option<u32> {
    let counted = part.get(segment_of(part, chunk.segment())?)?;
    counted.counts.get(usize::try_from(chunk.index()).ok()?).copied()
}

/// The page that begins with this chunk, as it should be.
fn right_page(part: &[Counted], first: ChunkId) -> Fix {
    let mut page = CountPage::default();
    for step in 0..u64::try_from(page.counts().len()).unwrap_or(0) {
        let chunk = first.plus(step);
        page.set(chunk, expected(part, chunk).unwrap_or(1));
    }
    match page.encode() {
        Some(value) => Fix::put(Family::Refs, key::refs(first), value),
        None => Fix::delete(Family::Refs, &key::refs(first)),
    }
}

/// Chunks from `next` up to `until`, which no page speaks of, have a count of one.
fn silent(
    part: &[Counted],
    next: &mut (usize, usize),
    until: Option<ChunkId>,
    findings: &mut Findings,
) {
    while let Some(counted) = part.get(next.0) {
        let length = counted.counts.len();
        let end = match until {
            Some(chunk) if chunk.segment() < counted.id => return,
            Some(chunk) if chunk.segment() == counted.id => {
                usize::try_from(chunk.index()).unwrap_or(usize::MAX).min(length)
            }
            _ => length,
        };
        let counts = counted.counts.iter().enumerate().take(end).skip(next.1);
        for (index, count) in counts.filter(|(_, count)| **count != 1) {
            let index = u32::try_from(index).unwrap_or(u32::MAX);
            let chunk = ChunkId::new(counted.id, index);
            let what = differs(&format!("I1: count of chunk {chunk}"), 1, u64::from(*count));
            findings.wrong(what, || right_page(part, CountPage::first(chunk)));
        }
        next.1 = next.1.max(end);
        if until.is_some_and(|chunk| chunk.segment() == counted.id) {
            // The page itself comes now.
            next.1 = (next.1 + CountPage::default().counts().len()).min(length);
            return;
        }
        *next = (next.0 + 1, 0);
    }
}

fn compare_page(part: &[Counted], page: &CountPage, first: ChunkId, findings: &mut Findings) {
    for (&count, step) in page.counts().iter().zip(0..) {
        let chunk = first.plus(step);
        let expected = expected(part, chunk);
        // A chunk that was never stored has the count that none has changed.
        let fits = match expected {
            Some(expected) => expected == count,
            None => count <= 1,
        };
        if !fits {
            let right = expected.unwrap_or(0).into();
            let what = differs(&format!("I1: count of chunk {chunk}"), count.into(), right);
            findings.wrong(what, || right_page(part, first));
        }
    }
}

/// I6: live chunks.
fn live(check: &mut Check<'_>, counted: &Counted, findings: &mut Findings) {
    let live = counted.counts.iter().filter(|count| **count > 0).count();
    let live = u32::try_from(live).unwrap_or(u32::MAX);
    check.counted.live_chunks += u64::from(live);
    findings.report.chunks += u64::from(live);
    let (id, record) = (counted.id, counted.record);
    if record.live_chunks != live {
        let what = format!("I6: live chunks of segment {id}");
        findings.wrong(differs(&what, record.live_chunks.into(), live.into()), || {
            let right = SegmentRecord { live_chunks: live, ..record };
            Fix::put(Family::Segment, key::segment(id), right.encode())
        });
    }
}

/// I3: the entries that name chunks of this part, or of segments between it and the one before.
fn hashes(
    check: &Check<'_>,
    (from, to): (&[u8], &[u8]),
    part: &[Counted],
    findings: &mut Findings,
) -> Result<()> {
    each(check.view, Family::Hash, |hash_key, value| {
        if value < from || value >= to {
            return Ok(());
        }
        let remove = || Fix::delete(Family::Hash, hash_key);
        let (Ok(prefix), Ok(chunk)) =
            (Decoder::new("hash key", hash_key).u64(), decode_chunk(value))
        else {
            let problem = format!("I3: hash `{}` cannot be read", hash_key.escape_ascii());
            findings.wrong(problem, remove);
            return Ok(());
        };
        let known = segment_of(part, chunk.segment()).and_then(|at| part.get(at));
        let index = usize::try_from(chunk.index()).unwrap_or(usize::MAX);
        let found = known.and_then(|counted| counted.prefixes.get(index));
        if found == Some(&prefix) {
            return Ok(());
        }
        // Compaction may have dropped it since the view was taken, and another have come.
        let now = check.core.kv.get(Family::Hash, hash_key)?;
        if now.as_deref().map(decode_chunk).transpose()? == Some(chunk) {
            let problem =
                format!("I3: hash {prefix:016x} names chunk {chunk}, which is not stored so");
            findings.wrong(problem, remove);
        }
        Ok(())
    })
}
