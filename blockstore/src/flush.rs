//! From dirty blocks to the layer: zero blocks become holes, the rest is hashed and compressed
//! on the pool, looked up, appended if new, and mapped, all in one commit.

use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, sync_channel};

use bytes::Bytes;
use rayon::prelude::*;

use crate::commit::{Weight, commit};
use crate::core::Core;
use crate::dedup::DedupIndex;
use crate::error::Result;
use crate::file::{Blocks, File, Pending};
use crate::id::{ChunkId, ContentHash};
use crate::kv::Kv;
use crate::layer_write::{Ground, write_blocks};
use crate::record::Target;
use crate::segment_format::{PreparedChunk, is_zero, prepare_block};
use crate::segments::Segments;
use crate::transaction::Transaction;
use crate::units::BLOCK_BYTES;

/// Blocks of one commit: 4 MiB, so that others wait for at most that, its sync is a small part
/// of its time, and hashing overlaps with writing.
const COMMIT_BLOCKS_MAX: usize = 1024;

/// Below this many blocks, of 1.3 us each, hashing on the caller's thread beats waking the pool.
const POOL_BLOCKS_MIN: usize = 128;

/// What a block will read as.
#[derive(Debug)]
pub(crate) enum Content {
    Zeros,
    /// It was found under this chunk.
    Stored {
        chunk: ChunkId,
        hash: ContentHash,
        bytes: Bytes,
    },
    New(PreparedChunk),
}

/// Blocks made ready, in order.
#[derive(Debug, Default)]
pub(crate) struct Prepared {
    pub(crate) blocks: Vec<(u64, Content)>,
    /// `DedupIndex::drops` before they were looked up.
    drops: u64,
}

/// Commits what is dirty now. When this returns, all that was written to the file before the
/// call is durable.
pub(crate) fn flush(core: &Core, file: &File) -> Result<()> {
    let _flush = file.flush.lock();
    flush_locked(core, file)
}

/// The same, for a caller that holds the file's flush lock.
pub(crate) fn flush_locked(core: &Core, file: &File) -> Result<()> {
    let (blocks, pending) = {
        let mut state = file.state.write();
        if state.deleted || !state.is_dirty() {
            // A truncate may have taken the last dirty block.
            core.files.sub_large(&mut state.large_bytes);
            return core.committer.healthy();
        }
        // What a flush left that panicked was acknowledged, too.
        put_back(core, &mut state);
        state.flushing = std::mem::take(&mut state.dirty);
        state.flushing_large_bytes = std::mem::take(&mut state.large_bytes);
        state.dirty_since = None;
        let blocks = state.flushing.iter().map(|(block, bytes)| (*block, bytes.clone()));
        (blocks.collect::<Vec<_>>(), state.pending)
    };
    let outcome = commit_blocks(core, file, blocks, pending);
    let mut state = file.state.write();
    match &outcome {
        Ok(()) => {
            debug_assert!(state.flushing.is_empty(), "every part was committed");
            core.files.sub_large(&mut state.flushing_large_bytes);
            if state.pending == pending {
                state.pending = None;
            }
        }
        Err(_) => put_back(core, &mut state),
    }
    drop(state);
    core.files.note_full(matches!(outcome, Err(crate::Error::NoSpace { .. })));
    file.room.ring();
    outcome
}

/// After a failed flush what was not committed is dirty again, but for what was written anew
/// meanwhile.
fn put_back(core: &Core, state: &mut crate::file::FileState) {
    let blocks = std::mem::take(&mut state.flushing);
    state.large_bytes += std::mem::take(&mut state.flushing_large_bytes);
    if state.deleted {
        core.files.sub_dirty(blocks.len());
        core.files.sub_large(&mut state.large_bytes);
        return;
    }
    for (block, bytes) in blocks {
        match state.dirty.entry(block) {
            Entry::Occupied(_) => core.files.sub_dirty(1),
            Entry::Vacant(entry) => {
                entry.insert(bytes);
            }
        }
    }
    state.dirty_since.get_or_insert_with(std::time::Instant::now);
}

fn commit_blocks(
    core: &Core,
    file: &File,
    mut blocks: Vec<(u64, Bytes)>,
    pending: Option<Pending>,
) -> Result<()> {
    let mut next_part = || {
        let count = blocks.len().min(COMMIT_BLOCKS_MAX);
        blocks.drain(..count).collect::<Vec<_>>()
    };
    // Without blocks there still is the change of attributes.
    let first = next_part();
    let mut next = Some((last_of(&first), Preparing::begin(core, first)));
    while let Some((last, preparing)) = next {
        let prepared = preparing.end()?;
        // The next part is hashed while this one is appended and synced.
        let part = next_part();
        next = (!part.is_empty()).then(|| (last_of(&part), Preparing::begin(core, part)));
        commit_part(core, file, prepared, pending)?;
        let mut state = file.state.write();
        // Parts go in order: what comes behind this one is what is left.
        let left = last.map_or_else(Blocks::new, |last| state.flushing.split_off(&(last + 1)));
        let done = std::mem::replace(&mut state.flushing, left);
        drop(state);
        core.files.sub_dirty(done.len());
        file.room.ring();
    }
    Ok(())
}

fn last_of(part: &[(u64, Bytes)]) -> Option<u64> {
    part.last().map(|(block, _)| *block)
}

/// Blocks that are being hashed, compressed and looked up.
enum Preparing {
    Done(Result<Prepared>),
    OnPool(PoolJob),
}

/// A job on the pool. Dropping it waits until the job has ended: a job holds the index open, and a
/// store must be free to be opened again once its last call has returned.
struct PoolJob(Receiver<Result<Prepared>>);

impl Drop for PoolJob {
    fn drop(&mut self) {
        // An error when the answer was received before: the job has ended then, too.
        let _ = self.0.recv();
    }
}

impl Preparing {
    fn begin(core: &Core, blocks: Vec<(u64, Bytes)>) -> Self {
        if blocks.len() < POOL_BLOCKS_MIN {
            return Self::Done(prepare(core, blocks));
        }
        let work = Preparation::of(core);
        let (done, receiver) = sync_channel(1);
        core.pool.spawn(move || {
            let prepared = work.run(blocks);
            // Before the answer: once it is received the store may be dropped, and the index must close.
            drop(work);
            // Fails when the waiting thread panicked.
            let _ = done.send(prepared);
        });
        Self::OnPool(PoolJob(receiver))
    }

    fn end(self) -> Result<Prepared> {
        let gone = |_| {
            let reason = "a thread that hashes blocks panicked".to_owned();
            Err(crate::Error::Poisoned { reason })
        };
        match self {
            Self::Done(prepared) => prepared,
            Self::OnPool(job) => job.0.recv().unwrap_or_else(gone),
        }
    }
}

/// What preparing needs of the store.
struct Preparation {
    kv: Arc<dyn Kv>,
    segments: Arc<Segments>,
    dedup: Arc<DedupIndex>,
    compress: bool,
}

impl Preparation {
    fn of(core: &Core) -> Self {
        Self {
            kv: Arc::clone(&core.kv),
            segments: Arc::clone(&core.segments),
            dedup: Arc::clone(&core.dedup),
            compress: core.options.compress,
        }
    }

    fn run(&self, blocks: Vec<(u64, Bytes)>) -> Result<Prepared> {
        let drops = self.dedup.drops();
        let hashed = in_parallel(blocks, |bytes| {
            debug_assert_eq!(bytes.len(), BLOCK_BYTES, "dirty blocks are whole");
            (!is_zero(&bytes)).then(|| (ContentHash::of(&bytes), bytes))
        });
        let hashes: Vec<_> =
            hashed.iter().filter_map(|(_, chunk)| chunk.as_ref().map(|(hash, _)| hash)).collect();
        let found = self.dedup.find(self.kv.as_ref(), &self.segments, &hashes)?;
        let mut found = found.into_iter();
        let looked_up = |(block, chunk): (u64, Option<(ContentHash, Bytes)>)| {
            let found = chunk.as_ref().and_then(|_| found.next().flatten());
            (block, (chunk, found))
        };
        let looked_up = hashed.into_iter().map(looked_up).collect();
        let blocks = in_parallel(looked_up, |(chunk, found)| match (chunk, found) {
            (None, _) => Content::Zeros,
            (Some((hash, bytes)), Some(chunk)) => Content::Stored { chunk, hash, bytes },
            (Some((hash, bytes)), None) => Content::New(prepare_block(hash, bytes, self.compress)),
        });
        Ok(Prepared { blocks, drops })
    }
}

/// Does the same with each block, in parallel where it pays.
fn in_parallel<A: Send, B: Send>(
    blocks: Vec<(u64, A)>,
    one: impl Fn(A) -> B + Send + Sync,
) -> Vec<(u64, B)> {
    let both = |(block, content)| (block, one(content));
    if blocks.len() < POOL_BLOCKS_MIN {
        return blocks.into_iter().map(both).collect();
    }
    blocks.into_par_iter().with_min_len(POOL_BLOCKS_MIN).map(both).collect()
}

/// Hashes, looks up and compresses, on this thread.
pub(crate) fn prepare(core: &Core, blocks: Vec<(u64, Bytes)>) -> Result<Prepared> {
    Preparation::of(core).run(blocks)
}

fn commit_part(
    core: &Core,
    file: &File,
    prepared: Prepared,
    pending: Option<Pending>,
) -> Result<()> {
    let layer = file.state.read().layer()?;
    let ground = file.unless_deleted(Ground::look_up(core, layer, &prepared))?;
    let (mut bytes, mut zeros) = (0, 0);
    for (_, content) in &prepared.blocks {
        match content {
            Content::Zeros => zeros += 1,
            Content::Stored { .. } => {}
            Content::New(chunk) => bytes += chunk.stored.len(),
        }
    }
    let inode = file.inode;
    // Or nothing but attributes: those of what a truncate cuts off.
    let adds_nothing = zeros == prepared.blocks.len();
    let weight = Weight { bytes, alone: false };
    let dedup = commit(core, weight, move |txn| {
        if adds_nothing {
            txn.frees();
        } else {
            txn.grows()?;
        }
        let mut record = txn.inode(inode)?;
        let dedup = write_blocks(txn, &mut record, prepared, &ground)?;
        if let Some(pending) = pending {
            record.size_bytes = pending.size_bytes;
            record.modified_at = pending.modified_at;
            record.changed_at = record.changed_at.max(pending.changed_at);
        }
        txn.put_inode(inode, &record);
        Ok(dedup)
    })?;
    core.tally.dedup_hits.fetch_add(dedup.hits, Ordering::Relaxed);
    core.tally.dedup_misses.fetch_add(dedup.misses, Ordering::Relaxed);
    let zeros = u64::try_from(zeros).unwrap_or(u64::MAX);
    core.tally.zero_blocks.fetch_add(zeros, Ordering::Relaxed);
    Ok(())
}

/// Blocks found stored already, and new ones.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Dedup {
    pub(crate) hits: u64,
    pub(crate) misses: u64,
}

/// For each block its chunk, found by its hash or added; counts already include the new name.
pub(crate) fn find_or_add(
    txn: &mut Transaction<'_>,
    prepared: Prepared,
    dedup: &mut Dedup,
) -> Result<Vec<(u64, Target)>> {
    let mut targets = Vec::with_capacity(prepared.blocks.len());
    for (block, content) in prepared.blocks {
        let (stored, new) = match content {
            Content::Zeros => {
                targets.push((block, Target::Hole));
                continue;
            }
            Content::Stored { chunk, hash, bytes } => {
                let stored = txn.is_stored(chunk, &hash, prepared.drops).then_some(chunk);
                (stored, Err((hash, bytes)))
            }
            // The same block may have come earlier in this commit, or since the look-up.
            Content::New(chunk) => (txn.find_new(&chunk.hash), Ok(chunk)),
        };
        let id = match stored {
            Some(stored) if txn.retain(stored)? => {
                dedup.hits += 1;
                stored
            }
            _ => {
                dedup.misses += 1;
                // What was not expected to be new was not compressed: rare, and no harm.
                txn.add_chunk(
                    new.unwrap_or_else(|(hash, bytes)| prepare_block(hash, bytes, false)),
                )?
            }
        };
        targets.push((block, Target::Chunks(id)));
    }
    Ok(targets)
}

#[cfg(test)]
mod tests;
