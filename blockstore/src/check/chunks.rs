//! I1, I2, I3 and I6: counts, stored bytes, hashes, segments.

use std::collections::{BTreeMap, HashMap};

use super::layers::Maps;
use super::{Findings, Tables, each, number};
use crate::core::Core;
use crate::error::Result;
use crate::id::{ChunkId, ContentHash, SegmentId};
use crate::kv::{Family, KvRead};
use crate::record::{CountPage, SegmentRecord, Target, decode_chunk, key};
use crate::segment_format::{Directory, restore_block};

/// How often each chunk of a segment is named by the maps.
type Named = BTreeMap<SegmentId, HashMap<u32, u64>>;

pub(super) fn check(
    core: &Core,
    view: &dyn KvRead,
    (tables, maps): (&Tables, &Maps),
    (data, findings): (bool, &mut Findings),
) -> Result<()> {
    let named = named(view, maps, findings)?;
    findings.0.chunks = named.values().map(|s| u64::try_from(s.len()).unwrap_or(0)).sum();
    findings.expect_equal(tables.counters.live_chunks, findings.0.chunks, || {
        "I6: live chunks".to_owned()
    });
    counts(view, &named, findings)?;
    let segments = segments(view, &named, findings)?;
    hashes(core, view, &segments, findings)?;
    for (segment, chunks) in &named {
        stored(core, view, *segment, chunks, (data, findings))?;
    }
    Ok(())
}

fn named(view: &dyn KvRead, maps: &Maps, findings: &mut Findings) -> Result<Named> {
    let mut limits: HashMap<SegmentId, u32> = HashMap::new();
    each(view, Family::Segment, |key, value| {
        limits.insert(SegmentId::new(number(key)?), SegmentRecord::decode(value)?.chunks);
        Ok(())
    })?;
    let mut named = Named::new();
    for run in maps.values().flat_map(BTreeMap::values) {
        let Target::Chunks(first) = run.target else {
            continue;
        };
        // A damaged run may claim millions of chunks: those that cannot be are not gone through.
        let id = first.segment();
        let limit = limits.get(&id).copied().unwrap_or(0);
        let known = u64::from(limit.saturating_sub(first.index()));
        findings.expect(run.count <= known, || {
            format!("I2: a map names chunks of segment {id} that it does not have")
        });
        for step in 0..run.count.min(known) {
            let chunk = first.plus(step);
            let of_segment = named.entry(chunk.segment()).or_default();
            *of_segment.entry(chunk.index()).or_insert(0) += 1;
        }
    }
    Ok(named)
}

fn times(named: &Named, chunk: ChunkId) -> u64 {
    let of_segment = named.get(&chunk.segment());
    of_segment.and_then(|chunks| chunks.get(&chunk.index())).copied().unwrap_or(0)
}

fn counts(view: &dyn KvRead, named: &Named, findings: &mut Findings) -> Result<()> {
    let mut pages: HashMap<ChunkId, CountPage> = HashMap::new();
    each(view, Family::Refs, |key, value| {
        let first = decode_chunk(key)?;
        findings.expect(first == CountPage::first(first), || {
            format!("I1: a page of counts begins with chunk {first}")
        });
        let page = CountPage::decode(value)?;
        for (&count, step) in page.counts().iter().zip(0..) {
            let chunk = first.plus(step);
            // A chunk that was never stored has the count that none has changed.
            let expected = times(named, chunk);
            if count != 1 || expected != 0 {
                findings
                    .expect_equal(count.into(), expected, || format!("I1: count of chunk {chunk}"));
            }
        }
        pages.insert(first, page);
        Ok(())
    })?;
    for (&segment, chunks) in named {
        for (&index, &expected) in chunks {
            let chunk = ChunkId::new(segment, index);
            if !pages.contains_key(&CountPage::first(chunk)) {
                findings.expect_equal(1, expected, || format!("I1: count of chunk {chunk}"));
            }
        }
    }
    unnamed(view, named, &pages, findings)
}

/// A chunk that no map names has a count of zero.
fn unnamed(
    view: &dyn KvRead,
    named: &Named,
    pages: &HashMap<ChunkId, CountPage>,
    findings: &mut Findings,
) -> Result<()> {
    each(view, Family::Segment, |key, value| {
        let id = SegmentId::new(number(key)?);
        for index in 0..SegmentRecord::decode(value)?.chunks {
            let chunk = ChunkId::new(id, index);
            let page = pages.get(&CountPage::first(chunk));
            let count = page.map_or(1, |page| page.get(chunk));
            findings.expect(times(named, chunk) > 0 || count == 0, || {
                format!("I1: nothing names chunk {chunk}, yet its count is {count}")
            });
        }
        Ok(())
    })
}

fn segments(
    view: &dyn KvRead,
    named: &Named,
    findings: &mut Findings,
) -> Result<BTreeMap<SegmentId, SegmentRecord>> {
    let mut records = BTreeMap::new();
    each(view, Family::Segment, |key, value| {
        let id = SegmentId::new(number(key)?);
        let record = SegmentRecord::decode(value)?;
        let live = named.get(&id).map_or(0, |chunks| u64::try_from(chunks.len()).unwrap_or(0));
        findings.expect_equal(record.live_chunks.into(), live, || {
            format!("I6: live chunks of segment {id}")
        });
        records.insert(id, record);
        Ok(())
    })?;
    Ok(records)
}

/// The directory of a segment; an unreadable one is a finding, not a failure.
fn directory(core: &Core, id: SegmentId, findings: &mut Findings) -> Directory {
    core.segments.directory(id).unwrap_or_else(|error| {
        findings.add(format!("I2: directory of segment {id}: {error}"));
        Directory::default()
    })
}

fn hashes(
    core: &Core,
    view: &dyn KvRead,
    segments: &BTreeMap<SegmentId, SegmentRecord>,
    findings: &mut Findings,
) -> Result<()> {
    let mut by_segment: BTreeMap<SegmentId, Vec<([u8; 8], ChunkId)>> = BTreeMap::new();
    each(view, Family::Hash, |key, value| {
        let hash = crate::codec::Decoder::new("hash key", key).array::<8>()?;
        let chunk = decode_chunk(value)?;
        by_segment.entry(chunk.segment()).or_default().push((hash, chunk));
        Ok(())
    })?;
    for (segment, entries) in by_segment {
        if !segments.contains_key(&segment) {
            findings.add(format!(
                "I3: {} hashes name segment {segment}, which does not exist",
                entries.len()
            ));
            continue;
        }
        let directory = directory(core, segment, findings);
        for (hash, chunk) in entries {
            let position = usize::try_from(chunk.index()).unwrap_or(usize::MAX);
            let is_stored = directory.places.get(position).is_some_and(Option::is_some);
            let found = directory.hashes.get(position);
            let fits = is_stored && found.is_some_and(|found| found.as_bytes().starts_with(&hash));
            // Compaction may have dropped it since the view was taken, and another have come.
            let now = core.kv.get(Family::Hash, &hash)?;
            if !fits && now.as_deref().map(decode_chunk).transpose()? == Some(chunk) {
                let hash = u64::from_be_bytes(hash);
                findings.add(format!(
                    "I3: hash {hash:016x} names chunk {chunk}, which is not stored so"
                ));
            }
        }
    }
    Ok(())
}

/// I2: every named chunk has a place; with `data` its bytes hash to its name.
fn stored(
    core: &Core,
    view: &dyn KvRead,
    segment: SegmentId,
    named: &HashMap<u32, u64>,
    (data, findings): (bool, &mut Findings),
) -> Result<()> {
    let directory = directory(core, segment, findings);
    let mut indexes: Vec<u32> = named.keys().copied().collect();
    indexes.sort_unstable();
    for index in indexes {
        let chunk = ChunkId::new(segment, index);
        let position = usize::try_from(index).unwrap_or(usize::MAX);
        let place = directory.places.get(position).copied().flatten();
        let (Some(place), Some(hash)) = (place, directory.hashes.get(position)) else {
            // It may have died and been dropped since the view was taken.
            let counts = crate::counts::stored(core.kv.as_ref(), CountPage::first(chunk))?;
            let now_dead = counts.get(chunk) == 0
                || view.get(Family::Segment, &key::segment(segment))?
                    != core.kv.get(Family::Segment, &key::segment(segment))?;
            findings.expect(now_dead, || format!("I2: chunk {chunk} is named, but not stored"));
            continue;
        };
        if !data {
            continue;
        }
        let block =
            core.segments.stored(chunk, &place).and_then(|bytes| restore_block(&place, &bytes));
        match block {
            Ok(block) => {
                findings.0.data_bytes += u64::try_from(block.len()).unwrap_or(0);
                let got = ContentHash::of(&block);
                findings.expect(got == *hash, || {
                    format!("I2: chunk {chunk} has hash {got}, expected {hash}")
                });
            }
            Err(error) => findings.add(format!("I2: chunk {chunk}: {error}")),
        }
    }
    Ok(())
}
