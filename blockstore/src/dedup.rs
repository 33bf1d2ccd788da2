//! Finding blocks that are stored already, by their hash.
//!
//! ```text
//! hash --> the chunk behind the last one found?   duplicates come in runs: no look-up at all
//!      --> recent: chunks of young segments       in memory
//!      --> family `hash`: all older segments      RocksDB; a bloom filter answers most misses
//! ```
//! Commits put nothing into the randomly keyed family: they would pay for it block by block.
//! The hashes of a new chunk are in its segment anyway, so `recent` is made again from there at
//! a start, and older segments go into the family many at once, sorted, in the background. An
//! entry knows eight bytes of the hash; whether the rest fits, the segment's directory says.
//!
//! An answer holds until compaction drops the chunk, which must be dead for that; `drops`
//! changes then, and a transaction whose answers are older looks at each once more.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;

use crate::codec::{Decoder, Encoder};
use crate::error::Result;
use crate::id::{ChunkId, ContentHash, SegmentId};
use crate::kv::{Family, Kv, Write};
use crate::record::{decode_chunk, key};
use crate::segment_format::Directory;
use crate::segments::Segments;

/// Bytes that a recent chunk takes in memory at worst: right after the table has doubled.
pub(crate) const RECENT_CHUNK_BYTES: u64 = 34;

/// Look-ups that one call of the index answers together.
const LOOK_UPS_AT_ONCE: usize = 64;

/// Entries put into the index by one batch: short enough not to hold up commits.
const BATCH_ENTRIES: usize = 4096;

const WATERMARK_VERSION: u8 = 1;

/// Bytes of a hash are as random as any hash of them.
#[derive(Debug, Default)]
pub(crate) struct AsIs(u64);

impl Hasher for AsIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 << 8) | u64::from(byte);
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}

/// Chunks by the first bytes of their hashes.
pub(crate) type ByPrefix = HashMap<u64, ChunkId, BuildHasherDefault<AsIs>>;

/// See the module's text.
#[derive(Debug)]
pub(crate) struct DedupIndex {
    recent: RwLock<ByPrefix>,
    /// Recent chunks beyond which the oldest segments go into the index.
    recent_max: usize,
    /// The first segment whose hashes are not in the index.
    indexed_until: AtomicU64,
    /// No segment from here on has hashes in the index. What was put there before a crash, or by
    /// a round that failed, may be ahead of the mark.
    entered_until: AtomicU64,
    /// How often compaction has dropped chunks.
    drops: AtomicU64,
}

impl DedupIndex {
    /// The index of an open store: reads the hashes of the segments that are not in it.
    pub(crate) fn open(
        kv: &dyn Kv,
        segments: &Segments,
        ids: impl Iterator<Item = SegmentId>,
        memory_bytes: u64,
    ) -> Result<Self> {
        let bytes = kv.get(Family::Meta, key::META_HASHED)?;
        let until = bytes.as_deref().map_or(Ok(0), decode_watermark)?;
        let index = Self {
            recent: RwLock::new(ByPrefix::default()),
            recent_max: usize::try_from(memory_bytes / RECENT_CHUNK_BYTES).unwrap_or(usize::MAX),
            indexed_until: AtomicU64::new(until),
            entered_until: AtomicU64::new(until),
            drops: AtomicU64::new(0),
        };
        let mut ids: Vec<SegmentId> = ids.filter(|id| id.get() >= until).collect();
        ids.sort_unstable();
        let end = ids.last().map_or(until, |id| id.get() + 1);
        index.entered_until.store(end, Ordering::Release);
        let mut seen = Vec::new();
        for id in ids {
            index.recent.write().extend(entries(segments, id));
            // An index that was lost, or less memory than before: there may be far too many.
            if index.is_large() {
                index.settle(kv, segments, seen.clone())?;
                seen.retain(|id: &SegmentId| {
                    id.get() >= index.indexed_until.load(Ordering::Acquire)
                });
            }
            seen.push(id);
        }
        Ok(index)
    }

    /// Whether the chunk may be in the index.
    pub(crate) fn is_settled(&self, chunk: ChunkId) -> bool {
        chunk.segment().get() < self.entered_until.load(Ordering::Acquire)
    }

    /// A number that changes whenever compaction has dropped chunks.
    pub(crate) fn drops(&self) -> u64 {
        self.drops.load(Ordering::Acquire)
    }

    /// For each hash the chunk that is stored under it.
    pub(crate) fn find(
        &self,
        kv: &dyn Kv,
        segments: &Segments,
        hashes: &[&ContentHash],
    ) -> Result<Vec<Option<ChunkId>>> {
        let recent: Vec<Option<ChunkId>> = {
            let recent = self.recent.read();
            hashes.iter().map(|hash| recent.get(&prefix(hash)).copied()).collect()
        };
        let mut search =
            Search { kv, segments, hashes, chunks: recent, next: None, waiting: vec![] };
        for position in 0..hashes.len() {
            search.step(position)?;
        }
        search.ask_index()?;
        Ok(search.chunks)
    }

    /// A chunk that was stored lately. For the leader, which alone adds them.
    pub(crate) fn find_recent(&self, segments: &Segments, hash: &ContentHash) -> Option<ChunkId> {
        let chunk = self.recent.read().get(&prefix(hash)).copied()?;
        segments.has(chunk, hash).then_some(chunk)
    }

    /// New chunks, in sequence from `first` on, which are readable from now on.
    pub(crate) fn add<'h>(&self, first: ChunkId, hashes: impl Iterator<Item = &'h ContentHash>) {
        let mut recent = self.recent.write();
        let mut chunk = first;
        for hash in hashes {
            recent.insert(prefix(hash), chunk);
            chunk = chunk.plus(1);
        }
    }

    /// These chunks are no longer stored, and no directory says that they are.
    pub(crate) fn drop_chunks(&self, dropped: &[(ChunkId, ContentHash)]) {
        let mut recent = self.recent.write();
        for (chunk, hash) in dropped {
            if recent.get(&prefix(hash)) == Some(chunk) {
                recent.remove(&prefix(hash));
            }
        }
        self.drops.fetch_add(1, Ordering::AcqRel);
    }

    /// Bytes that recent chunks take in memory, about.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let entry = size_of::<(u64, ChunkId)>() + 1;
        u64::try_from(self.recent.read().capacity() * entry).unwrap_or(u64::MAX)
    }

    /// Whether there are so many recent chunks that some should go into the index.
    pub(crate) fn is_large(&self) -> bool {
        self.recent.read().len() > self.recent_max
    }

    /// Puts the hashes of old segments into the index, until half of what may be recent is left.
    /// `sealed` are the segments that no longer grow. The caller holds compaction off.
    pub(crate) fn settle(
        &self,
        kv: &dyn Kv,
        segments: &Segments,
        mut sealed: Vec<SegmentId>,
    ) -> Result<()> {
        let until = self.indexed_until.load(Ordering::Acquire);
        let mut left = self.recent.read().len();
        sealed.retain(|id| id.get() >= until);
        sealed.sort_unstable();
        let (mut settled, mut behind) = (Vec::new(), until);
        for id in sealed {
            // Down to a half, so that many go at once: sorted, they are cheap to put.
            if left <= self.recent_max / 2 {
                break;
            }
            let of_segment = entries(segments, id);
            left = left.saturating_sub(of_segment.len());
            settled.extend(of_segment);
            behind = id.get() + 1;
        }
        if behind == until {
            return Ok(());
        }
        self.entered_until.fetch_max(behind, Ordering::AcqRel);
        // A newer chunk of the same content comes later, and is the one that stays.
        settled.sort_by_key(|(prefix, _)| *prefix);
        for part in settled.chunks(BATCH_ENTRIES) {
            let put = |(prefix, chunk): &(u64, ChunkId)| Write {
                family: Family::Hash,
                key: prefix.to_be_bytes().to_vec(),
                value: Some(chunk.raw().to_be_bytes().to_vec()),
            };
            kv.apply(&part.iter().map(put).collect())?;
        }
        // Behind its entries: a start that finds the mark finds them.
        let value = Some(encode_watermark(behind));
        let mark = Write { family: Family::Meta, key: key::META_HASHED.to_vec(), value };
        kv.apply(&vec![mark])?;
        let mut recent = self.recent.write();
        for (prefix, chunk) in &settled {
            if recent.get(prefix) == Some(chunk) {
                recent.remove(prefix);
            }
        }
        recent.shrink_to(self.recent_max);
        self.indexed_until.store(behind, Ordering::Release);
        Ok(())
    }
}

/// One look-up of many hashes.
struct Search<'a> {
    kv: &'a dyn Kv,
    segments: &'a Segments,
    hashes: &'a [&'a ContentHash],
    /// At first what `recent` has; then what was found.
    chunks: Vec<Option<ChunkId>>,
    /// The chunk behind the last one found.
    next: Option<ChunkId>,
    /// Positions that the index has to answer.
    waiting: Vec<usize>,
}

impl Search<'_> {
    fn step(&mut self, position: usize) -> Result<()> {
        let hash = self.hashes[position];
        let recent = self.chunks[position].take();
        for chunk in [self.next, recent].into_iter().flatten() {
            if self.segments.has(chunk, hash) {
                self.chunks[position] = Some(chunk);
                self.next = Some(chunk.plus(1));
                return Ok(());
            }
        }
        self.next = None;
        self.waiting.push(position);
        if self.waiting.len() == LOOK_UPS_AT_ONCE { self.ask_index() } else { Ok(()) }
    }

    fn ask_index(&mut self) -> Result<()> {
        let waiting = std::mem::take(&mut self.waiting);
        if waiting.is_empty() {
            return Ok(());
        }
        let keys: Vec<Vec<u8>> =
            waiting.iter().map(|&at| prefix(self.hashes[at]).to_be_bytes().to_vec()).collect();
        let last = waiting.last().copied();
        for (position, value) in waiting.into_iter().zip(self.kv.get_many(Family::Hash, &keys)?) {
            let Some(value) = value else { continue };
            let chunk = decode_chunk(&value)?;
            if self.segments.has(chunk, self.hashes[position]) {
                self.chunks[position] = Some(chunk);
                if Some(position) == last {
                    self.next = Some(chunk.plus(1));
                }
            }
        }
        Ok(())
    }
}

/// The first eight bytes of a hash.
pub(crate) fn prefix(hash: &ContentHash) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&hash.as_bytes()[..8]);
    u64::from_be_bytes(bytes)
}

/// The stored chunks of a segment with the first bytes of their hashes. A directory that cannot
/// be read only hides them: their content will be stored anew. `check` finds it.
fn entries(segments: &Segments, id: SegmentId) -> Vec<(u64, ChunkId)> {
    let directory = segments.directory(id).unwrap_or_else(|error| {
        tracing::warn!(segment = %id, %error, "a directory is not readable; its blocks are not shared");
        Directory::default()
    });
    let chunks = directory.places.iter().zip(&directory.hashes).zip(0..);
    let stored = chunks.filter(|((place, _), _)| place.is_some());
    stored.map(|((_, hash), index)| (prefix(hash), ChunkId::new(id, index))).collect()
}

fn encode_watermark(until: u64) -> Vec<u8> {
    Encoder::versioned(WATERMARK_VERSION).u64(until).finish()
}

fn decode_watermark(bytes: &[u8]) -> Result<u64> {
    let mut d = Decoder::versioned("mark of hashed segments", bytes, WATERMARK_VERSION)?;
    let until = d.u64()?;
    d.end()?;
    Ok(until)
}

#[cfg(test)]
mod tests;
