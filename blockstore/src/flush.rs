//! From dirty blocks to the layer: zero blocks become holes, the rest is hashed and compressed
//! on the pool, looked up, appended if new, and mapped, all in one commit.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use rayon::prelude::*;

use crate::commit::{Weight, commit};
use crate::core::Core;
use crate::error::Result;
use crate::file::{Blocks, File, Pending};
use crate::id::{ChunkId, LayerId};
use crate::mapping;
use crate::record::{Body, InodeRecord, Run, Target};
use crate::resolve::Window;
use crate::segment_format::{PreparedChunk, is_zero, prepare_block};
use crate::transaction::Transaction;
use crate::units::{BLOCK_BYTES, WINDOW_BLOCKS};

/// Blocks of one commit: 8 MiB, so that others wait for at most that much hashing of look-ups,
/// and a group of two still shares its sync.
const COMMIT_BLOCKS_MAX: usize = 2048;

/// Below this many blocks hashing on the caller's thread beats waking the pool.
const POOL_BLOCKS_MIN: usize = 32;

/// A block made ready: `None` is all zeros.
pub(crate) type Prepared = (u64, Option<PreparedChunk>);

/// For each touched window, what the layers below the file's own layer show there.
pub(crate) type Below = BTreeMap<u64, Arc<Window>>;

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
            return core.committer.healthy();
        }
        let blocks = Arc::new(std::mem::take(&mut state.dirty));
        state.flushing = Some(Arc::clone(&blocks));
        state.dirty_since = None;
        (blocks, state.pending)
    };
    let outcome = commit_blocks(core, file, &blocks, pending);
    let mut state = file.state.write();
    state.flushing = None;
    match &outcome {
        Ok(()) => {
            if state.pending == pending {
                state.pending = None;
            }
            core.files.sub_dirty(blocks.len());
        }
        Err(_) => put_back(core, &mut state, &blocks),
    }
    outcome
}

/// After a failed flush the blocks are dirty again, but for those written anew meanwhile.
fn put_back(core: &Core, state: &mut crate::file::FileState, blocks: &Blocks) {
    if state.deleted {
        core.files.sub_dirty(blocks.len());
        return;
    }
    for (block, bytes) in blocks {
        if state.dirty.contains_key(block) {
            core.files.sub_dirty(1);
        } else {
            state.dirty.insert(*block, bytes.clone());
        }
    }
    state.dirty_since.get_or_insert_with(std::time::Instant::now);
}

fn commit_blocks(
    core: &Core,
    file: &File,
    blocks: &Blocks,
    pending: Option<Pending>,
) -> Result<()> {
    let all: Vec<(u64, Bytes)> = blocks.iter().map(|(b, bytes)| (*b, bytes.clone())).collect();
    if all.is_empty() {
        return commit_part(core, file, Vec::new(), pending);
    }
    for part in all.chunks(COMMIT_BLOCKS_MAX) {
        let prepared = prepare(core, part.to_vec());
        commit_part(core, file, prepared, pending)?;
    }
    Ok(())
}

/// Hashes and compresses, in parallel where it pays.
pub(crate) fn prepare(core: &Core, blocks: Vec<(u64, Bytes)>) -> Vec<Prepared> {
    let compress = core.options.compress;
    let one = |(block, bytes): (u64, Bytes)| {
        debug_assert_eq!(bytes.len(), BLOCK_BYTES, "dirty blocks are whole");
        (block, (!is_zero(&bytes)).then(|| prepare_block(bytes, compress)))
    };
    if blocks.len() < POOL_BLOCKS_MIN {
        return blocks.into_iter().map(one).collect();
    }
    core.pool.install(|| blocks.into_par_iter().map(one).collect())
}

fn commit_part(
    core: &Core,
    file: &File,
    prepared: Vec<Prepared>,
    pending: Option<Pending>,
) -> Result<()> {
    let layer = file.state.read().layer()?;
    let below = below(core, layer, &prepared)?;
    let bytes = prepared.iter().filter_map(|(_, chunk)| Some(chunk.as_ref()?.stored.len())).sum();
    let inode = file.inode;
    let zeros = prepared.iter().filter(|(_, chunk)| chunk.is_none()).count();
    let weight = Weight { bytes, alone: false };
    let dedup = commit(core, weight, move |txn| {
        let mut record = txn.inode(inode)?;
        let dedup = write_blocks(txn, &mut record, prepared, &below)?;
        if let Some(pending) = pending {
            record.size_bytes = pending.size_bytes;
            record.modified_at = record.modified_at.max(pending.modified_at);
            record.changed_at = record.changed_at.max(pending.modified_at);
        }
        txn.put_inode(inode, &record);
        Ok(dedup)
    })?;
    core.tally.dedup_hits.fetch_add(dedup.hits, Ordering::Relaxed);
    core.tally.dedup_misses.fetch_add(dedup.misses, Ordering::Relaxed);
    core.tally.zero_blocks.fetch_add(u64::try_from(zeros).unwrap_or(0), Ordering::Relaxed);
    Ok(())
}

/// Resolves the windows of the layers below. They are frozen, so what is found here still holds
/// in the transaction; only the open layer changes, and the caller holds its file's flush lock.
pub(crate) fn below(core: &Core, layer: LayerId, prepared: &[Prepared]) -> Result<Below> {
    let mut below = Below::new();
    let Some(parent) = core.resolver.parent(layer)? else {
        return Ok(below);
    };
    for (block, _) in prepared {
        let window = block / WINDOW_BLOCKS;
        if let std::collections::btree_map::Entry::Vacant(entry) = below.entry(window) {
            entry.insert(core.resolver.window(parent, window)?);
        }
    }
    Ok(below)
}

/// Blocks found stored already, and new ones.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Dedup {
    pub(crate) hits: u64,
    pub(crate) misses: u64,
}

/// Writes prepared blocks (in order) into the file's open layer and keeps its count of used
/// blocks. The caller puts the record.
pub(crate) fn write_blocks(
    txn: &mut Transaction<'_>,
    record: &mut InodeRecord,
    prepared: Vec<Prepared>,
    below: &Below,
) -> Result<Dedup> {
    let Body::File { layer, .. } = record.body else {
        return Err(crate::Error::invalid("this inode is not a file"));
    };
    let mut dedup = Dedup::default();
    let visible = Visible::load(txn, layer, &prepared, below)?;
    let mut runs: Vec<Run> = Vec::new();
    for (block, target) in find_or_add(txn, prepared, &mut dedup)? {
        match (visible.is_data(block), target) {
            // A hole stays a hole without an entry.
            (false, Target::Hole) => continue,
            (true, Target::Hole) => record.used_blocks = record.used_blocks.saturating_sub(1),
            (false, Target::Chunks(_)) => record.used_blocks += 1,
            (true, Target::Chunks(_)) => {}
        }
        match runs.last_mut() {
            Some(last) if last.end() == block && last.target.continues(last.count, target) => {
                last.count += 1;
            }
            _ => runs.push(Run { first: block, count: 1, target }),
        }
    }
    let has_below = txn.layer(layer)?.parent.is_some();
    for run in runs {
        let taken = mapping::take(txn, layer, (run.first, run.end()))?;
        mapping::release(txn, &taken)?;
        // With nothing below, no entry is a hole.
        if has_below || run.target != Target::Hole {
            mapping::place(txn, layer, run)?;
        }
    }
    Ok(dedup)
}

/// Which of the blocks to be written hold data now.
struct Visible {
    own: BTreeMap<u64, Run>,
    below: BTreeMap<u64, Vec<Option<ChunkId>>>,
}

impl Visible {
    fn load(
        txn: &Transaction<'_>,
        layer: LayerId,
        prepared: &[Prepared],
        below: &Below,
    ) -> Result<Self> {
        let mut own = BTreeMap::new();
        let mut seen = None;
        for (block, _) in prepared {
            let window = block / WINDOW_BLOCKS;
            if seen.replace(window) == Some(window) {
                continue;
            }
            let start = window * WINDOW_BLOCKS;
            let limit = usize::try_from(WINDOW_BLOCKS).unwrap_or(usize::MAX);
            for run in mapping::runs(txn, layer, (start, start + WINDOW_BLOCKS), limit)? {
                own.insert(run.first, run);
            }
        }
        let below = below.iter().map(|(window, found)| (*window, found.chunks())).collect();
        Ok(Self { own, below })
    }

    fn is_data(&self, block: u64) -> bool {
        let own = self.own.range(..=block).next_back().map(|(_, run)| run);
        if let Some(run) = own.filter(|run| block < run.end()) {
            return run.target != Target::Hole;
        }
        let inside = usize::try_from(block % WINDOW_BLOCKS).unwrap_or(0);
        let window = self.below.get(&(block / WINDOW_BLOCKS));
        window.and_then(|chunks| chunks.get(inside)).is_some_and(Option::is_some)
    }
}

/// For each block its chunk, found by its hash or added; counts already include the new name.
fn find_or_add(
    txn: &mut Transaction<'_>,
    prepared: Vec<Prepared>,
    dedup: &mut Dedup,
) -> Result<Vec<(u64, Target)>> {
    let hashes = prepared
        .iter()
        .filter_map(|(_, chunk)| Some(chunk.as_ref()?.hash.as_bytes().to_vec()))
        .collect();
    let mut found = txn.find_chunks(hashes)?.into_iter();
    let mut targets = Vec::with_capacity(prepared.len());
    for (block, chunk) in prepared {
        let Some(chunk) = chunk else {
            targets.push((block, Target::Hole));
            continue;
        };
        let stored = match found.next().flatten() {
            Some(stored) => Some(stored),
            // The same block may have come earlier in this commit.
            None => txn.own_chunk(chunk.hash.as_bytes())?,
        };
        let id = match stored {
            Some(stored) if txn.retain(stored)? => {
                dedup.hits += 1;
                stored
            }
            _ => {
                dedup.misses += 1;
                txn.add_chunk(chunk)?
            }
        };
        targets.push((block, Target::Chunks(id)));
    }
    Ok(targets)
}
