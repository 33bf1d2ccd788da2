//! I2: the directory of a segment, and the bytes of the chunks that blocks name.

use super::chunks::Counted;
use super::{Check, Findings};
use crate::dedup;
use crate::error::{Error, Result};
use crate::id::{ChunkId, ContentHash};
use crate::kv::Family;
use crate::record::{CountPage, key};
use crate::segment_format::{PAGE_ENTRIES, Place, restore_block};
use crate::segments::DAMAGED_MAX;

/// What a segment turned out to hold.
pub(super) struct Stored {
    /// For each chunk the first bytes of its hash, 0 if it is not stored or cannot be told.
    pub(super) prefixes: Vec<u64>,
}

/// Looks at all of a segment. Compaction waits meanwhile: it would take the file away.
pub(super) fn check(
    check: &Check<'_>,
    counted: &Counted,
    findings: &mut Findings,
) -> Result<Stored> {
    let _gc = check.core.gc.lock();
    let mut stored = Stored { prefixes: vec![0; counted.counts.len()] };
    let id = counted.id;
    // Compaction may have removed it since the view was taken, as none of its chunks lived.
    if check.core.kv.get(Family::Segment, &key::segment(id))?.is_none() {
        check.progress.advance(u64::try_from(counted.counts.len()).unwrap_or(0));
        return Ok(stored);
    }
    let mut salvaged = None;
    for (page, counts) in counted.counts.chunks(PAGE_ENTRIES).enumerate() {
        let first = page * PAGE_ENTRIES;
        let index = u32::try_from(first).unwrap_or(u32::MAX);
        let start = ChunkId::new(id, index);
        let count = u64::try_from(counts.len()).unwrap_or(0);
        let entries = check.core.segments.entries(start, count);
        match entries {
            Ok(entries) => {
                let prefixes = stored.prefixes.iter_mut().skip(first);
                for ((place, hash), prefix) in entries.iter().zip(prefixes) {
                    *prefix = if place.is_some() { dedup::prefix(hash) } else { 0 };
                }
                let named = entries.into_iter().zip(counts).zip(0_u64..);
                for ((entry, _), step) in named.filter(|((_, count), _)| **count > 0) {
                    check.progress.point()?;
                    chunk(check, (start.plus(step), entry), findings)?;
                }
            }
            Err(error) => {
                let left = salvaged
                    .get_or_insert_with(|| check.core.segments.salvage(check.core.store, id));
                let entries =
                    check.core.segments.entries_left(start, counts.len(), left).into_iter();
                page_is_damaged(check, (start, counts), (&error, entries), findings)?;
            }
        }
        check.progress.advance(count);
    }
    Ok(stored)
}

/// A part of the directory cannot be read: the groups may tell the same.
fn page_is_damaged(
    check: &Check<'_>,
    (start, counts): (ChunkId, &[u32]),
    (error, left): (&Error, impl Iterator<Item = (Option<Place>, ContentHash)>),
    findings: &mut Findings,
) -> Result<()> {
    let before = findings.report.damaged_chunks;
    for (step, (count, entry)) in (0_u64..).zip(counts.iter().zip(left)) {
        if *count > 0 {
            check.progress.point()?;
            chunk(check, (start.plus(step), entry), findings)?;
        }
    }
    let id = start.segment();
    let problem = format!("I2: directory of segment {id} at chunk {start}: {error}");
    match check.core.segments.file_of(id) {
        // What is damaged becomes lost first; then the rest moves away from the damage.
        Some(file) if findings.report.damaged_chunks == before => {
            findings.wrong(problem, || super::Fix::Move(file));
        }
        _ => findings.follows(problem),
    }
    Ok(())
}

fn damaged(check: &Check<'_>, chunk: ChunkId, findings: &mut Findings) {
    check.core.segments.note_damaged(chunk);
    findings.report.damaged_chunks += 1;
    if findings.damaged.len() < DAMAGED_MAX {
        findings.damaged.push(chunk);
    }
}

/// A named chunk has a place; with data its bytes hash to its name.
fn chunk(
    check: &Check<'_>,
    (chunk, (place, hash)): (ChunkId, (Option<Place>, ContentHash)),
    findings: &mut Findings,
) -> Result<()> {
    let Some(place) = place else {
        // It may have died and been dropped since the view was taken.
        let counts = crate::counts::stored(check.core.kv.as_ref(), CountPage::first(chunk))?;
        if counts.get(chunk) != 0 {
            damaged(check, chunk, findings);
            findings.follows(format!("I2: chunk {chunk} is named, but not stored"));
        }
        return Ok(());
    };
    if !check.data {
        if check.core.segments.is_damaged(chunk) {
            damaged(check, chunk, findings);
            findings.follows(format!("I2: chunk {chunk} was found to be damaged before"));
        }
        return Ok(());
    }
    match verify(check, chunk, &place, &hash) {
        Ok(bytes) => {
            findings.report.data_bytes += bytes;
            check.core.segments.forget_damaged(chunk);
        }
        Err(error) => {
            damaged(check, chunk, findings);
            let file = check.core.segments.file_of(chunk.segment());
            let file = file.map_or_else(String::new, |file| {
                format!(" in {file} at offset {}", place.offset_bytes)
            });
            findings.follows(format!("I2: chunk {chunk}{file}: {error}"));
        }
    }
    Ok(())
}

fn verify(check: &Check<'_>, chunk: ChunkId, place: &Place, hash: &ContentHash) -> Result<u64> {
    let bytes = check.core.segments.stored(chunk, place)?;
    let block = restore_block(place, &bytes)?;
    let got = ContentHash::of(&block);
    if got != *hash {
        return Err(Error::corrupt("its bytes", format!("hash {got}, expected {hash}")));
    }
    Ok(u64::try_from(block.len()).unwrap_or(0))
}
