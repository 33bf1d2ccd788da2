//! A transaction: changes prepared over the index, seen by what follows in the same commit,
//! and applied all together or not at all.
//!
//! ```text
//! op 1, op 2, ... -> overlay over the index -> one batch + its chunks -> log -> index
//! ```
//! Transactions run one after the other on the thread that leads the commit (`commit.rs`), so
//! none sees another half done. An op that fails is rolled back; its neighbours go on.

use std::collections::{BTreeMap, HashMap};
use std::ops::ControlFlow;

use crate::counts::Counts;
use crate::dedup::{ByPrefix, DedupIndex, prefix};
use crate::error::{Error, Result};
use crate::id::{ChunkId, ContentHash, InodeId, LayerId, SegmentId};
use crate::kv::{Batch, Family, Kv, Write};
use crate::own_runs::OwnWindow;
use crate::record::{Counters, InodeRecord, LayerRecord, SegmentRecord, key};
use crate::segment_format::PreparedChunk;
use crate::segments::Segments;
use crate::time::{Clock, Timestamp};

type Changes = BTreeMap<Vec<u8>, Option<Vec<u8>>>;

/// What a key had in the changes before: nothing, a delete, or a value.
type Before = Option<Option<Vec<u8>>>;

/// References to one chunk above this make the next such block a chunk of its own, long before
/// a count could overflow.
const CHUNK_REFERENCES_MAX: u32 = 1 << 31;

/// Windows of a layer, from `start` up to `end` (left out), whose blocks changed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TouchedWindows {
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// They got data, not only a hole or less than before.
    pub(crate) has_data: bool,
}

/// What became of a layer's map, for the caches.
#[derive(Clone, Debug)]
pub(crate) struct Touched {
    pub(crate) layer: LayerId,
    pub(crate) windows: Vec<TouchedWindows>,
    /// Windows (end left out) in which the layer has no entry any more.
    pub(crate) empty: (u64, u64),
    /// Windows (end left out) that meet or touch an entry that changed.
    pub(crate) stale: Vec<(u64, u64)>,
    /// Windows whose entries are known now, whatever `stale` says.
    pub(crate) known: Vec<(u64, OwnWindow)>,
}

/// What memory has to learn when the commit is applied.
#[derive(Debug, Default)]
pub(crate) struct Effects {
    /// Inodes that changed or (`None`) are gone.
    pub(crate) inodes: BTreeMap<InodeId, Option<InodeRecord>>,
    /// Files whose size was set.
    pub(crate) cuts: BTreeMap<InodeId, u64>,
    /// Layers that changed or are gone.
    pub(crate) layers: BTreeMap<LayerId, Option<LayerRecord>>,
    /// Segments that compaction moved, or (`None`) that are gone.
    pub(crate) segments: BTreeMap<SegmentId, Option<SegmentRecord>>,
    /// Windows of layers whose entries changed.
    pub(crate) windows: Vec<Touched>,
    /// Entries moved between layers, or left a layer that nothing names: a reader that is under
    /// way may hold a layer that no longer shows what it did.
    pub(crate) moves_entries: bool,
    /// A directory got another parent.
    pub(crate) moves_directory: bool,
    /// Chunks that are no longer stored.
    pub(crate) dropped: Vec<(ChunkId, ContentHash)>,
}

/// What a transaction asks for blocks that are stored already.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stored<'a> {
    pub(crate) dedup: &'a DedupIndex,
    pub(crate) segments: &'a Segments,
}

/// The point to which a failed op is rolled back.
#[derive(Debug)]
struct Savepoint {
    counters: Counters,
    undo: usize,
    counts: usize,
    chunks: usize,
    windows: usize,
    cuts: usize,
    room_bytes: u64,
}

/// See the module's text.
pub(crate) struct Transaction<'a> {
    kv: &'a dyn Kv,
    stored: Stored<'a>,
    clock: &'a Clock,
    changes: BTreeMap<Family, Changes>,
    /// What each changed key had in `changes` before, newest last.
    undo: Vec<(Family, Vec<u8>, Before)>,
    counters: Counters,
    counts: Counts,
    chunks: Vec<PreparedChunk>,
    /// `chunks` by their hashes.
    own: ByPrefix,
    /// Chunks that compaction drops.
    dropped: Vec<(ChunkId, ContentHash)>,
    /// The id of the first of `chunks`.
    first_chunk: (SegmentId, u32),
    /// Live chunks gained or lost, by segment; of the group, and of the op under way.
    live: HashMap<SegmentId, i64>,
    live_of_op: HashMap<SegmentId, i64>,
    windows: Vec<Touched>,
    cuts: Vec<(InodeId, u64)>,
    moves_entries: bool,
    moves_directory: bool,
    savepoint: Option<Savepoint>,
    room_bytes: u64,
    /// Whether the op under way, and any of the group, gives room back.
    op_frees: bool,
    group_frees: bool,
}

impl<'a> Transaction<'a> {
    pub(crate) fn new(
        (kv, stored): (&'a dyn Kv, Stored<'a>),
        clock: &'a Clock,
        counters: Counters,
        first_chunk: (SegmentId, u32),
        room_bytes: u64,
    ) -> Self {
        Self {
            kv,
            stored,
            clock,
            changes: BTreeMap::new(),
            undo: Vec::new(),
            counters,
            counts: Counts::default(),
            chunks: Vec::new(),
            own: ByPrefix::default(),
            dropped: Vec::new(),
            first_chunk,
            live: HashMap::new(),
            live_of_op: HashMap::new(),
            windows: Vec::new(),
            cuts: Vec::new(),
            moves_entries: false,
            moves_directory: false,
            savepoint: None,
            room_bytes,
            op_frees: false,
            group_frees: false,
        }
    }

    // ---- ops

    pub(crate) fn begin_op(&mut self) {
        debug_assert!(self.savepoint.is_none(), "ops do not nest");
        self.op_frees = false;
        self.savepoint = Some(Savepoint {
            counters: self.counters,
            undo: self.undo.len(),
            counts: self.counts.changes(),
            chunks: self.chunks.len(),
            windows: self.windows.len(),
            cuts: self.cuts.len(),
            room_bytes: self.room_bytes,
        });
    }

    pub(crate) fn keep_op(&mut self) {
        self.savepoint = None;
        self.group_frees |= self.op_frees;
        for (segment, delta) in self.live_of_op.drain() {
            *self.live.entry(segment).or_insert(0) += delta;
        }
    }

    pub(crate) fn roll_back_op(&mut self) {
        let Some(savepoint) = self.savepoint.take() else {
            return;
        };
        while self.undo.len() > savepoint.undo {
            let Some((family, key, before)) = self.undo.pop() else {
                break;
            };
            let changes = self.changes.entry(family).or_default();
            match before {
                Some(value) => changes.insert(key, value),
                None => changes.remove(&key),
            };
        }
        self.counters = savepoint.counters;
        self.room_bytes = savepoint.room_bytes;
        self.counts.roll_back(savepoint.counts);
        for chunk in self.chunks.drain(savepoint.chunks..) {
            self.own.remove(&prefix(&chunk.hash));
        }
        self.dropped.clear();
        self.windows.truncate(savepoint.windows);
        self.cuts.truncate(savepoint.cuts);
        self.live_of_op.clear();
    }

    // ---- room (see `reserve.rs`)

    /// This op gives room back, sooner or later: it may use the reserve.
    pub(crate) fn frees(&mut self) {
        self.op_frees = true;
    }

    /// Whether an op that was kept gives room back.
    pub(crate) const fn group_frees(&self) -> bool {
        self.group_frees
    }

    /// This op adds something that will stay.
    ///
    /// # Errors
    /// `NoSpace` when only the reserve is left.
    pub(crate) fn grows(&self) -> Result<()> {
        if self.room_bytes == 0 { Err(full()) } else { Ok(()) }
    }

    /// Refuses an op that gives no room back when little is left.
    pub(crate) const fn check_room(&self, is_low: bool) -> Result<()> {
        if is_low && !self.op_frees { Err(full()) } else { Ok(()) }
    }

    /// Nothing was changed.
    pub(crate) fn is_empty(&self) -> bool {
        self.changes.values().all(BTreeMap::is_empty)
            && self.chunks.is_empty()
            && self.counts.changes() == 0
    }

    /// The chunks to append, and live chunks gained or lost by segment.
    pub(crate) fn chunks(&self) -> &[PreparedChunk] {
        &self.chunks
    }

    pub(crate) fn live_deltas(&self) -> &HashMap<SegmentId, i64> {
        &self.live
    }

    /// The batch and the effects; ends the transaction.
    pub(crate) fn finish(self) -> Result<(Batch, Effects, Counters, Vec<PreparedChunk>)> {
        let mut effects = Effects {
            windows: self.windows,
            cuts: self.cuts.into_iter().collect(),
            moves_entries: self.moves_entries,
            moves_directory: self.moves_directory,
            dropped: self.dropped,
            ..Effects::default()
        };
        let mut batch = Batch::new();
        for (family, changes) in self.changes {
            for (key, value) in changes {
                match family {
                    Family::Inode => {
                        let record = value.as_deref().map(InodeRecord::decode).transpose()?;
                        effects.inodes.insert(InodeId::new(number_of(&key)?), record);
                    }
                    Family::Layer => {
                        let record = value.as_deref().map(LayerRecord::decode).transpose()?;
                        effects.layers.insert(LayerId::new(number_of(&key)?), record);
                    }
                    Family::Segment => {
                        let record = value.as_deref().map(SegmentRecord::decode).transpose()?;
                        effects.segments.insert(SegmentId::new(number_of(&key)?), record);
                    }
                    _ => {}
                }
                batch.push(Write { family, key, value });
            }
        }
        self.counts.finish(&mut batch);
        Ok((batch, effects, self.counters, self.chunks))
    }

    // ---- index

    pub(crate) fn get(&self, family: Family, key: &[u8]) -> Result<Option<Vec<u8>>> {
        match self.changes.get(&family).and_then(|changes| changes.get(key)) {
            Some(changed) => Ok(changed.clone()),
            None => self.kv.get(family, key),
        }
    }

    pub(crate) fn put(&mut self, family: Family, key: Vec<u8>, value: Vec<u8>) {
        self.set(family, key, Some(value));
    }

    pub(crate) fn delete(&mut self, family: Family, key: Vec<u8>) {
        self.set(family, key, None);
    }

    fn set(&mut self, family: Family, key: Vec<u8>, value: Option<Vec<u8>>) {
        let before = self.changes.entry(family).or_default().insert(key.clone(), value);
        self.undo.push((family, key, before));
    }

    /// At most `limit` entries from `from` up to `to` (left out), in order.
    pub(crate) fn range(
        &self,
        family: Family,
        (from, to): (&[u8], &[u8]),
        limit: usize,
    ) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
        let mut merged = BTreeMap::new();
        let changes = self.changes.get(&family);
        let deleted = |key: &[u8]| changes.is_some_and(|changes| changes.contains_key(key));
        self.kv.scan(family, from, to, &mut |key, value| {
            if !deleted(key) {
                merged.insert(key.to_vec(), value.to_vec());
            }
            Ok(if merged.len() < limit {
                ControlFlow::Continue(())
            } else {
                ControlFlow::Break(())
            })
        })?;
        if let Some(changes) = changes
            && from < to
        {
            let inside = changes
                .range::<[u8], _>((std::ops::Bound::Included(from), std::ops::Bound::Excluded(to)));
            for (key, value) in inside.filter_map(|(key, value)| Some((key, value.as_ref()?))) {
                merged.insert(key.clone(), value.clone());
            }
        }
        Ok(merged.into_iter().take(limit).collect())
    }

    /// The last entry at or before `key` that is not before `from`. Those before `floor` that this
    /// transaction did not change are left out: the caller knows that they do not matter.
    pub(crate) fn last_at_or_before(
        &self,
        family: Family,
        (from, floor): (&[u8], &[u8]),
        key: &[u8],
    ) -> Result<Option<(Vec<u8>, Vec<u8>)>> {
        let changes = self.changes.get(&family);
        let changed = changes.and_then(|changes| {
            let mut inside = changes.range::<[u8], _>((
                std::ops::Bound::Included(from),
                std::ops::Bound::Included(key),
            ));
            inside.rfind(|(_, value)| value.is_some())
        });
        // Below, what this transaction changed was deleted, or already seen above; and only what
        // is behind the entry found there can be nearer to `key`.
        let is_unchanged = |key: &[u8]| !changes.is_some_and(|changes| changes.contains_key(key));
        let nearest = changed.map_or(from, |(key, _)| key.as_slice());
        let bounds = (nearest.max(floor), key);
        let stored = if bounds.0 > key {
            None
        } else {
            self.kv.last_at_or_before(family, bounds, &is_unchanged)?
        };
        Ok(match (stored, changed) {
            (Some(stored), _) => Some(stored),
            (None, Some((key, value))) => value.clone().map(|value| (key.clone(), value)),
            (None, None) => None,
        })
    }

    // ---- numbers and time

    pub(crate) fn now(&self) -> Timestamp {
        self.clock.now()
    }

    pub(crate) fn counters(&mut self) -> &mut Counters {
        &mut self.counters
    }

    /// The number of a new inode. The caller puts the inode's record.
    ///
    /// # Errors
    /// `Corrupt` when the counters were damaged and an inode has the number.
    pub(crate) fn take_inode(&mut self) -> Result<InodeId> {
        let inode = InodeId::new(self.counters.next_inode);
        self.refuse_used(Family::Inode, &key::inode(inode), inode.get())?;
        self.counters.next_inode += 1;
        self.counters.inodes += 1;
        Ok(inode)
    }

    /// A number is given out once: with damaged counters, a new record would replace an existing one.
    fn refuse_used(&self, family: Family, key: &[u8], number: u64) -> Result<()> {
        if number != 0 && self.get(family, key)?.is_none() {
            return Ok(());
        }
        let what = if family == Family::Layer { "layer" } else { "inode" };
        let reason = format!("the next {what} would be {number}, which is not free");
        Err(Error::corrupt("the store's counters", reason))
    }

    /// A new layer with this record.
    ///
    /// # Errors
    /// `Corrupt` when the counters were damaged, and a layer has the number or the parent a greater one.
    pub(crate) fn make_layer(&mut self, record: &LayerRecord) -> Result<LayerId> {
        let layer = LayerId::new(self.counters.next_layer);
        self.refuse_used(Family::Layer, &key::layer(layer), layer.get())?;
        record.refuse_younger_parent(layer)?;
        self.counters.next_layer += 1;
        self.counters.layers += 1;
        self.put_layer(layer, record);
        if let Some(parent) = record.parent {
            self.put(Family::Child, key::child(parent, layer), Vec::new());
        }
        Ok(layer)
    }

    // ---- typed records

    /// The inode; `Stale` when it is gone.
    pub(crate) fn inode(&self, inode: InodeId) -> Result<InodeRecord> {
        match self.get(Family::Inode, &key::inode(inode))? {
            Some(bytes) => InodeRecord::decode(&bytes),
            None => Err(Error::Stale { inode: inode.get() }),
        }
    }

    pub(crate) fn put_inode(&mut self, inode: InodeId, record: &InodeRecord) {
        self.put(Family::Inode, key::inode(inode), record.encode());
    }

    pub(crate) fn layer(&self, layer: LayerId) -> Result<LayerRecord> {
        match self.get(Family::Layer, &key::layer(layer))? {
            Some(bytes) => LayerRecord::decode_of(layer, &bytes),
            None => Err(Error::corrupt(
                format!("layer {layer}"),
                "a file, snapshot or layer names it, yet it does not exist",
            )),
        }
    }

    pub(crate) fn put_layer(&mut self, layer: LayerId, record: &LayerRecord) {
        self.put(Family::Layer, key::layer(layer), record.encode());
    }

    /// Something of the layer changed in this transaction: its record, and so maybe its map.
    pub(crate) fn has_changed_layer(&self, layer: LayerId) -> bool {
        let changes = self.changes.get(&Family::Layer);
        changes.is_some_and(|changes| changes.contains_key(&key::layer(layer)))
    }

    /// The layer's entries in these windows changed.
    pub(crate) fn touch_windows(&mut self, touched: Touched) {
        self.windows.push(touched);
    }

    /// This op sets the size of a file: what of it is dirty behind the new end goes with the commit.
    pub(crate) fn cuts_file(&mut self, inode: InodeId, size_bytes: u64) {
        self.cuts.push((inode, size_bytes));
    }

    /// This op takes entries out of layers that readers may still look at.
    pub(crate) fn moves_entries(&mut self) {
        self.moves_entries = true;
    }

    /// This op gives a directory another parent.
    pub(crate) fn moves_directory(&mut self) {
        self.moves_directory = true;
    }

    /// An op of this commit does, or would have if it had not failed.
    pub(crate) const fn has_moved_directory(&self) -> bool {
        self.moves_directory
    }

    // ---- chunks (I1: a chunk's count equals the map blocks naming it)

    /// Whether this chunk, found at a time when `drops` was as given, is stored, and not known to
    /// be damaged.
    pub(crate) fn is_stored(&self, chunk: ChunkId, hash: &ContentHash, drops: u64) -> bool {
        let Stored { dedup, segments } = self.stored;
        !segments.is_damaged(chunk) && (drops == dedup.drops() || segments.has(chunk, hash))
    }

    /// A chunk of this hash that this transaction stores, or another did lately.
    pub(crate) fn find_new(&self, hash: &ContentHash) -> Option<ChunkId> {
        let own = self.own.get(&prefix(hash)).filter(|id| {
            let position = usize::try_from(id.index() - self.first_chunk.1).ok();
            position.and_then(|at| self.chunks.get(at)).is_some_and(|chunk| chunk.hash == *hash)
        });
        own.copied().or_else(|| self.stored.dedup.find_recent(self.stored.segments, hash))
    }

    /// Stores a new chunk with a count of one.
    ///
    /// # Errors
    /// `NoSpace` when the store is full.
    pub(crate) fn add_chunk(&mut self, chunk: PreparedChunk) -> Result<ChunkId> {
        let bytes = u64::try_from(chunk.stored.len()).unwrap_or(u64::MAX);
        self.room_bytes = match self.room_bytes.checked_sub(bytes) {
            Some(left) => left,
            None if self.op_frees => 0,
            None => return Err(full()),
        };
        let (segment, first) = self.first_chunk;
        let index = u32::try_from(self.chunks.len()).unwrap_or(u32::MAX);
        let id = ChunkId::new(segment, first + index);
        self.own.insert(prefix(&chunk.hash), id);
        self.chunks.push(chunk);
        self.now_live(id, 1);
        Ok(id)
    }

    fn now_live(&mut self, chunk: ChunkId, delta: i64) {
        *self.live_of_op.entry(chunk.segment()).or_insert(0) += delta;
        self.counters.live_chunks = self.counters.live_chunks.saturating_add_signed(delta);
    }

    pub(crate) fn count(&mut self, chunk: ChunkId) -> Result<u32> {
        self.counts.get(self.kv, chunk)
    }

    /// One more block names the chunk; `false` when it has too many already.
    pub(crate) fn retain(&mut self, chunk: ChunkId) -> Result<bool> {
        let count = self.count(chunk)?;
        if count >= CHUNK_REFERENCES_MAX {
            return Ok(false);
        }
        if count == 0 {
            // Dead, yet still stored: it lives again.
            self.now_live(chunk, 1);
        }
        self.counts.set(self.kv, chunk, count + 1)?;
        Ok(true)
    }

    /// One block fewer names the chunk.
    pub(crate) fn release(&mut self, chunk: ChunkId) -> Result<()> {
        let count = self.count(chunk)?;
        let Some(less) = count.checked_sub(1) else {
            return Err(Error::corrupt(format!("chunk {chunk}"), "I1: released once too often"));
        };
        if less == 0 {
            self.now_live(chunk, -1);
        }
        self.counts.set(self.kv, chunk, less)
    }

    /// One block fewer names each of `count` chunks in sequence.
    pub(crate) fn release_run(&mut self, first: ChunkId, count: u64) -> Result<()> {
        (0..count).try_for_each(|step| self.release(first.plus(step)))
    }

    /// Compaction stores the dead chunk no longer.
    pub(crate) fn drop_chunk(&mut self, chunk: ChunkId, hash: ContentHash) {
        // Whatever the entry names by now: what replaced it may not be durable yet, and after a
        // crash this chunk would be named again. A chunk that is forgotten costs space alone.
        if self.stored.dedup.is_settled(chunk) {
            self.delete(Family::Hash, key::hash(&hash));
        }
        self.dropped.push((chunk, hash));
    }
}

/// The leader, which knows the numbers, fills them in.
const fn full() -> Error {
    Error::NoSpace { used_bytes: 0, capacity_bytes: 0 }
}

fn number_of(key: &[u8]) -> Result<u64> {
    crate::codec::Decoder::new("key", key).u64()
}

#[cfg(test)]
mod numbers;
