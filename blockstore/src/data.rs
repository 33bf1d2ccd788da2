//! READ, WRITE and COMMIT of files; READ of snapshots.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use bytes::{Bytes, BytesMut};

use crate::core::{Core, over};
use crate::error::{Error, Result};
use crate::file::{Blocks, File, FileState, Pending};
use crate::flush::{flush, flush_locked};
use crate::id::{ChunkId, InodeId, LayerId};
use crate::record::Target;
use crate::resolve::Window;
use crate::types::{Attributes, BlockMap, Change, ReadReply, Source, Stability, Written};
use crate::units::{
    BLOCK_BYTES, BLOCK_BYTES_U64, FILE_BYTES_MAX, WINDOW_BLOCKS, block_of, blocks_in,
};

/// Dirty bytes of one file beyond which its writers flush it themselves: backpressure that
/// needs no other thread.
const FILE_DIRTY_BYTES_MAX: usize = 16 << 20;

/// Runs longer than this bypass the block cache: the kernel's page cache serves them, and one
/// stream would wash everything else out.
const CACHED_RUN_BLOCKS_MAX: u64 = 16;

/// One page of zeros that every hole shares.
static ZEROS: [u8; 1 << 20] = [0; 1 << 20];

/// Tries to read a range whose map changes under the reader before giving up. Each change is a
/// commit of compaction or collapse with its sync, far slower than a look-up, so one repetition
/// is the rule.
const READ_TRIES: usize = 256;

/// What a range of blocks reads as.
#[derive(Debug)]
enum Piece {
    Zeros(u64),
    Memory(Bytes),
    Chunks(ChunkId, u64),
}

/// Where to read from: the attributes, the layer, and what is not in it yet.
struct View {
    attributes: Attributes,
    layer: LayerId,
    unflushed: Blocks,
}

fn view(core: &Core, source: Source, first: u64, end: u64) -> Result<View> {
    match source {
        Source::File(inode) => {
            let file = core.file(inode)?;
            let state = file.state.read();
            if state.deleted {
                return Err(Error::Stale { inode: inode.get() });
            }
            Ok(View {
                attributes: state.attributes(inode),
                layer: state.layer()?,
                unflushed: state.unflushed_range(first, end),
            })
        }
        Source::Snapshot(id) => {
            let record = crate::snapshot::load(core, id)?;
            let attributes = crate::snapshot::attributes(id, &record);
            Ok(View { attributes, layer: record.layer, unflushed: Blocks::new() })
        }
    }
}

/// Cuts a read to the end of the file: its length and whether it reaches the end.
fn cut(size_bytes: u64, offset_bytes: u64, length_bytes: usize) -> (u64, bool) {
    let wanted = u64::try_from(length_bytes).unwrap_or(u64::MAX);
    let left = size_bytes.saturating_sub(offset_bytes);
    (wanted.min(left), wanted >= left)
}

pub(crate) fn read(
    core: &Core,
    source: Source,
    offset_bytes: u64,
    length_bytes: usize,
) -> Result<ReadReply> {
    for _ in 0..READ_TRIES {
        if let Some(reply) = read_once(core, source, (offset_bytes, length_bytes), true)? {
            return Ok(reply);
        }
    }
    Err(Error::corrupt(
        format!("{source:?} at offset {offset_bytes}"),
        "I2: its map names a chunk that is not stored",
    ))
}

pub(crate) fn try_read(
    core: &Core,
    source: Source,
    offset_bytes: u64,
    length_bytes: usize,
) -> Option<Result<ReadReply>> {
    if let Source::File(inode) = source {
        core.files.get(inode)?;
    }
    read_once(core, source, (offset_bytes, length_bytes), false).transpose()
}

/// `None` when the map was outdated, or when it may not block and would have to.
fn read_once(
    core: &Core,
    source: Source,
    (offset_bytes, length_bytes): (u64, usize),
    may_block: bool,
) -> Result<Option<ReadReply>> {
    let first = block_of(offset_bytes);
    let behind = offset_bytes.saturating_add(u64::try_from(length_bytes).unwrap_or(u64::MAX));
    let moves = core.resolver.moves();
    let view = view(core, source, first, blocks_in(behind))?;
    let (length, end_of_file) = cut(view.attributes.size_bytes, offset_bytes, length_bytes);
    let mut reply = ReadReply {
        pieces: Vec::new(),
        length_bytes: usize::try_from(length).unwrap_or(usize::MAX),
        end_of_file,
        attributes: view.attributes,
    };
    if length == 0 {
        return Ok(Some(reply));
    }
    let end = blocks_in(offset_bytes + length);
    let planned = plan(core, view.layer, &view.unflushed, (first, end), may_block);
    let Some(pieces) = current(core, source, view.layer, planned)? else {
        return Ok(None);
    };
    // Between the two the layer may have lost entries to its neighbour.
    if core.resolver.moves() != moves {
        return Ok(None);
    }
    let mut bytes = Vec::new();
    for piece in pieces {
        if !materialize(core, piece, may_block, &mut bytes)? {
            return Ok(None);
        }
    }
    let skip = usize::try_from(offset_bytes % BLOCK_BYTES_U64).unwrap_or(0);
    reply.pieces = trim(bytes, skip, reply.length_bytes);
    Ok(Some(reply))
}

/// A failure to resolve a layer that collapse has replaced meanwhile is no failure: the caller
/// looks again.
fn current<T>(
    core: &Core,
    source: Source,
    layer: LayerId,
    planned: Result<Option<T>>,
) -> Result<Option<T>> {
    match planned {
        Err(error) if view(core, source, 0, 0)?.layer == layer => Err(error),
        Err(_) => Ok(None),
        found => found,
    }
}

/// What the blocks `[first, end)` read as.
fn plan(
    core: &Core,
    layer: LayerId,
    unflushed: &Blocks,
    (first, end): (u64, u64),
    may_block: bool,
) -> Result<Option<Vec<Piece>>> {
    let mut pieces = Vec::new();
    let mut block = first;
    while block < end {
        let window = block / WINDOW_BLOCKS;
        let start = window * WINDOW_BLOCKS;
        let stop = end.min(start + WINDOW_BLOCKS);
        let in_memory = unflushed.range(block..stop).count();
        let all_unflushed = u64::try_from(in_memory) == Ok(stop - block);
        let resolved: Arc<Window> = if all_unflushed {
            Arc::default()
        } else if may_block {
            core.resolver.window(layer, window)?
        } else {
            match core.resolver.cached(layer, window) {
                Some(found) => found,
                None => return Ok(None),
            }
        };
        let mut at = block;
        for (&at_block, bytes) in unflushed.range(block..stop) {
            stored_pieces(&resolved, start, (at, at_block), &mut pieces);
            pieces.push(Piece::Memory(bytes.clone()));
            at = at_block + 1;
        }
        stored_pieces(&resolved, start, (at, stop), &mut pieces);
        block = stop;
    }
    Ok(Some(pieces))
}

/// The pieces of `[from, to)`, blocks of the file, in a window that begins at `start`.
fn stored_pieces(window: &Window, start: u64, (from, to): (u64, u64), pieces: &mut Vec<Piece>) {
    let mut at = from;
    for run in window.runs() {
        let Some(part) = run.cut(from.saturating_sub(start), to.saturating_sub(start)) else {
            continue;
        };
        let first = part.first + start;
        zeros(first - at, pieces);
        match part.target {
            Target::Hole => zeros(part.count, pieces),
            Target::Chunks(chunk) => pieces.push(Piece::Chunks(chunk, part.count)),
        }
        at = first + part.count;
    }
    zeros(to.saturating_sub(at), pieces);
}

fn zeros(count: u64, pieces: &mut Vec<Piece>) {
    match pieces.last_mut() {
        _ if count == 0 => {}
        Some(Piece::Zeros(before)) => *before += count,
        _ => pieces.push(Piece::Zeros(count)),
    }
}

/// Appends the piece's bytes; `false` when the map was outdated, or it would block and may not.
fn materialize(core: &Core, piece: Piece, may_block: bool, out: &mut Vec<Bytes>) -> Result<bool> {
    match piece {
        Piece::Memory(bytes) => out.push(bytes),
        Piece::Zeros(count) => {
            let mut left = count.saturating_mul(BLOCK_BYTES_U64);
            while left > 0 {
                let part = usize::try_from(left).unwrap_or(usize::MAX).min(ZEROS.len());
                out.push(Bytes::from_static(&ZEROS[..part]));
                left -= u64::try_from(part).unwrap_or(left);
            }
        }
        Piece::Chunks(first, count) if count > CACHED_RUN_BLOCKS_MAX => {
            if !may_block {
                return Ok(false);
            }
            match core.segments.read(first, count)? {
                Some(pieces) => out.extend(pieces),
                None => return Ok(false),
            }
        }
        Piece::Chunks(first, count) => return through_cache(core, first, count, may_block, out),
    }
    Ok(true)
}

fn through_cache(
    core: &Core,
    first: ChunkId,
    count: u64,
    may_block: bool,
    out: &mut Vec<Bytes>,
) -> Result<bool> {
    let found: Vec<Option<Bytes>> =
        (0..count).map(|step| core.blocks.get(&first.plus(step))).collect();
    let missing = found.iter().filter(|block| block.is_none()).count();
    let hits = found.len() - missing;
    core.tally.cache_hits.fetch_add(u64::try_from(hits).unwrap_or(0), Ordering::Relaxed);
    if missing == 0 {
        out.extend(found.into_iter().flatten());
        return Ok(true);
    }
    if !may_block {
        return Ok(false);
    }
    core.tally.cache_misses.fetch_add(u64::try_from(missing).unwrap_or(0), Ordering::Relaxed);
    let Some(pieces) = core.segments.read(first, count)? else {
        return Ok(false);
    };
    let mut chunk = first;
    for piece in &pieces {
        for block in piece.chunks(BLOCK_BYTES) {
            // A copy, so that one cached block does not keep a whole piece in memory.
            core.blocks.insert(chunk, Bytes::copy_from_slice(block));
            chunk = chunk.plus(1);
        }
    }
    out.extend(pieces);
    Ok(true)
}

/// Cuts the pieces to `length` bytes behind the first `skip`.
fn trim(pieces: Vec<Bytes>, skip: usize, length: usize) -> Vec<Bytes> {
    let (mut skip, mut left) = (skip, length);
    let mut kept = Vec::with_capacity(pieces.len());
    for mut piece in pieces {
        let dropped = skip.min(piece.len());
        piece = piece.split_off(dropped);
        skip -= dropped;
        piece.truncate(left);
        left -= piece.len();
        if !piece.is_empty() {
            kept.push(piece);
        }
    }
    debug_assert_eq!(left, 0, "the pieces cover the range");
    kept
}

pub(crate) fn write(
    core: &Core,
    inode: InodeId,
    offset_bytes: u64,
    data: Bytes,
    stability: Stability,
) -> Result<Written> {
    core.committer.healthy()?;
    let length = u64::try_from(data.len()).unwrap_or(u64::MAX);
    let end = offset_bytes.checked_add(length).filter(|end| *end <= FILE_BYTES_MAX);
    if end.is_none() {
        let got = offset_bytes.saturating_add(length);
        return Err(Error::FileTooBig { got, limit: FILE_BYTES_MAX });
    }
    // Taken before the data: if a sync fails in between, the client sees an old verifier and
    // sends again (RFC 1813 section 4.8).
    let verifier = core.committer.verifier();
    let file = core.file(inode)?;
    let change = dirty(core, &file, offset_bytes, &data)?;
    // After the data, not before it: a client that hears nothing for long sends the same write
    // again, and one that waited here in between would put its old bytes over newer ones. Over
    // the budget by what the callers bring at once, which the lanes of NFS and REST bound.
    if over(core.files.dirty_bytes(), core.budget.dirty_bytes) {
        flush_fullest(core, &file)?;
    }
    let too_dirty = file.state.read().dirty.len() * BLOCK_BYTES > FILE_DIRTY_BYTES_MAX;
    if stability == Stability::Unstable && !too_dirty {
        return Ok(Written { file: change, stability, verifier });
    }
    flush(core, &file)?;
    let after = file.state.read().attributes(inode);
    let file = Change { before: change.before, after };
    Ok(Written { file, stability: Stability::FileSync, verifier })
}

/// Over the budget, a writer flushes its own file; if that has little, the file with most.
fn flush_fullest(core: &Core, own: &Arc<File>) -> Result<()> {
    let dirty = |file: &File| file.state.read().dirty.len();
    let sized = core.files.all().into_iter().map(|file| (dirty(&file), file));
    let own_blocks = dirty(own);
    match sized.max_by_key(|(blocks, _)| *blocks) {
        Some((blocks, file)) if blocks > own_blocks => {
            // Its owner learns of a failure at COMMIT; this writer is only helping.
            match flush(core, &file) {
                Ok(()) | Err(Error::Stale { .. }) => Ok(()),
                Err(error) => Err(error),
            }
        }
        _ => flush(core, own),
    }
}

/// Puts data into the file's dirty blocks.
fn dirty(core: &Core, file: &File, offset_bytes: u64, data: &Bytes) -> Result<Change> {
    let behind = offset_bytes + u64::try_from(data.len()).unwrap_or(0);
    {
        let mut state = file.state.write();
        let known =
            |block: u64| state.unflushed(block).is_some() || block >= blocks_in(state.size_bytes());
        let partial_known = partial_blocks(offset_bytes, behind).into_iter().flatten().all(known);
        if partial_known {
            return put_dirty(core, file, &mut state, (offset_bytes, data), &[]);
        }
    }
    // A partial block that is only in the layer: nobody may change the layer between reading it
    // and making it dirty.
    let _flush = file.flush.lock();
    let layer = {
        let state = file.state.read();
        state.present(file.inode)?;
        state.layer()?
    };
    let mut committed = Vec::new();
    for block in partial_blocks(offset_bytes, behind).into_iter().flatten() {
        committed.push((block, read_committed(core, layer, block)?));
    }
    let mut state = file.state.write();
    put_dirty(core, file, &mut state, (offset_bytes, data), &committed)
}

/// The first and the last block of a range, where it covers only part of them.
fn partial_blocks(offset_bytes: u64, behind: u64) -> [Option<u64>; 2] {
    if offset_bytes == behind {
        return [None, None];
    }
    let first = block_of(offset_bytes);
    let last = block_of(behind - 1);
    let head = !offset_bytes.is_multiple_of(BLOCK_BYTES_U64)
        || (first == last && !behind.is_multiple_of(BLOCK_BYTES_U64));
    let tail = !behind.is_multiple_of(BLOCK_BYTES_U64) && last != first;
    [head.then_some(first), tail.then_some(last)]
}

/// A block as committed, whatever is dirty above it.
pub(crate) fn read_committed(core: &Core, layer: LayerId, block: u64) -> Result<Bytes> {
    for _ in 0..READ_TRIES {
        let range = (block, block + 1);
        let pieces = plan(core, layer, &Blocks::new(), range, true)?.unwrap_or_default();
        let mut bytes = Vec::new();
        let mut current = true;
        for piece in pieces {
            current &= materialize(core, piece, true, &mut bytes)?;
        }
        if let (true, [bytes]) = (current, bytes.as_slice()) {
            return Ok(bytes.clone());
        }
    }
    Err(Error::corrupt(format!("layer {layer}, block {block}"), "I2: its chunk is not stored"))
}

/// Makes the blocks of a range dirty; `committed` holds the partial ones that are in no memory.
fn put_dirty(
    core: &Core,
    file: &File,
    state: &mut FileState,
    (offset_bytes, data): (u64, &Bytes),
    committed: &[(u64, Bytes)],
) -> Result<Change> {
    if state.deleted {
        return Err(Error::Stale { inode: file.inode.get() });
    }
    let before = state.attributes(file.inode);
    let mut at = 0;
    while at < data.len() {
        let position = offset_bytes + u64::try_from(at).unwrap_or(0);
        let block = block_of(position);
        let inside = usize::try_from(position % BLOCK_BYTES_U64).unwrap_or(0);
        let part = (BLOCK_BYTES - inside).min(data.len() - at);
        let bytes = if part == BLOCK_BYTES {
            data.slice(at..at + part)
        } else {
            let base = state
                .unflushed(block)
                .or_else(|| committed.iter().find(|(b, _)| *b == block).map(|(_, bytes)| bytes));
            let mut patched = BytesMut::zeroed(BLOCK_BYTES);
            if let Some(base) = base {
                patched.copy_from_slice(base);
            }
            patched[inside..inside + part].copy_from_slice(&data[at..at + part]);
            patched.freeze()
        };
        if state.dirty.insert(block, bytes).is_none() {
            core.files.add_dirty(1);
        }
        at += part;
    }
    let end = offset_bytes + u64::try_from(data.len()).unwrap_or(0);
    state.pending = Some(Pending {
        size_bytes: if data.is_empty() { before.size_bytes } else { before.size_bytes.max(end) },
        modified_at: core.clock.now(),
    });
    state.dirty_since.get_or_insert_with(Instant::now);
    Ok(Change { before, after: state.attributes(file.inode) })
}

pub(crate) fn commit_file(core: &Core, inode: InodeId) -> Result<(Change, u64)> {
    core.committer.healthy()?;
    let verifier = core.committer.verifier();
    let file = core.file(inode)?;
    let before = file.state.read().attributes(inode);
    flush(core, &file)?;
    let after = file.state.read().attributes(inode);
    Ok((Change { before, after }, verifier))
}

pub(crate) fn commit_all(core: &Core) -> Result<()> {
    // Every file has its turn, also behind one that fails.
    let outcomes = core.files.all().into_iter().map(|file| flush(core, &file));
    outcomes.fold(Ok(()), Result::and)
}

/// For each block of the range its hash.
pub(crate) fn block_map(
    core: &Core,
    source: Source,
    offset_bytes: u64,
    length_bytes: u64,
) -> Result<BlockMap> {
    let file = match source {
        Source::File(inode) => Some(core.file(inode)?),
        Source::Snapshot(_) => None,
    };
    // Held to the end, so that the map is of one moment.
    let _flush = file.as_ref().map(|file| file.flush.lock());
    if let Some(file) = &file {
        flush_locked(core, file)?;
    }
    let view = view(core, source, 0, 0)?;
    let first = block_of(offset_bytes);
    let behind = offset_bytes.saturating_add(length_bytes).min(view.attributes.size_bytes);
    let mut map = BlockMap::new();
    let mut block = first;
    while block < blocks_in(behind) {
        let window = block / WINDOW_BLOCKS;
        let stop = blocks_in(behind).min((window + 1) * WINDOW_BLOCKS);
        let resolved = core.resolver.window(view.layer, window)?;
        let mut hashes = vec![None; usize::try_from(WINDOW_BLOCKS).unwrap_or(0)];
        for run in resolved.runs() {
            let Target::Chunks(chunk) = run.target else {
                continue;
            };
            let from = usize::try_from(run.first).unwrap_or(usize::MAX);
            let found = core.segments.hashes(chunk, run.count)?;
            for (slot, hash) in hashes.iter_mut().skip(from).zip(found) {
                *slot = Some(hash);
            }
        }
        let start = usize::try_from(block % WINDOW_BLOCKS).unwrap_or(0);
        let count = usize::try_from(stop - block).unwrap_or(0);
        map.extend_from_slice(&hashes[start..start + count]);
        block = stop;
    }
    Ok(map)
}
