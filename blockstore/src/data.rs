//! READ of files and snapshots, and the hashes of their blocks.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;

use crate::core::Core;
use crate::error::{Error, Result};
use crate::file::Blocks;
use crate::flush::flush_locked;
use crate::id::{ChunkId, ContentHash, LayerId};
use crate::record::Target;
use crate::types::{Attributes, BlockMap, ReadReply, Source};
use crate::units::{BLOCK_BYTES, BLOCK_BYTES_U64, WINDOW_BLOCKS, block_of, blocks_in};
use crate::window::Window;

/// Runs longer than this bypass the block cache: the kernel's page cache serves them, and one
/// stream would wash everything else out.
const CACHED_RUN_BLOCKS_MAX: u64 = 16;

/// One page of zeros that every hole shares.
static ZEROS: [u8; 1 << 20] = [0; 1 << 20];

/// Tries to read a range whose map changes under the reader before giving up. Each change is a
/// commit of compaction or collapse with its sync, far slower than a look-up, so one repetition
/// is the rule.
const READ_TRIES: usize = 256;

/// A read that may not wait looks into the page cache of the kernel up to this size: a few
/// microseconds of copying, on a thread that serves other connections too.
const PROBE_BYTES_MAX: usize = 64 << 10;

/// What a read may do to find bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Effort {
    /// Wait for the disk.
    Wait,
    /// Ask the kernel for what it has in memory.
    Probe,
    /// Look into the store's own memory.
    Memory,
}

/// What a range of blocks reads as.
#[derive(Debug)]
enum Piece {
    Zeros(u64),
    Memory(Bytes),
    Chunks(ChunkId, u64),
    /// Lost blocks, from this block of the file on.
    Lost(u64),
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
        if let Some(reply) = read_once(core, source, (offset_bytes, length_bytes), Effort::Wait)? {
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
    let effort = if length_bytes <= PROBE_BYTES_MAX { Effort::Probe } else { Effort::Memory };
    read_once(core, source, (offset_bytes, length_bytes), effort).transpose()
}

/// `None` when the map was outdated, or when more effort is needed.
fn read_once(
    core: &Core,
    source: Source,
    (offset_bytes, length_bytes): (u64, usize),
    effort: Effort,
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
    let planned = plan(core, view.layer, &view.unflushed, (first, end), effort);
    let Some(pieces) = current(core, source, view.layer, planned)? else {
        return Ok(None);
    };
    // Between the two the layer may have lost entries to its neighbour.
    if core.resolver.moves() != moves {
        return Ok(None);
    }
    let mut bytes = Vec::new();
    for piece in pieces {
        if !materialize(core, piece, effort, &mut bytes).map_err(|error| of(source, error))? {
            return Ok(None);
        }
    }
    let skip = usize::try_from(offset_bytes % BLOCK_BYTES_U64).unwrap_or(0);
    reply.pieces = trim(bytes, skip, reply.length_bytes);
    Ok(Some(reply))
}

/// Says in what lost blocks are.
fn of(source: Source, error: Error) -> Error {
    let what = match source {
        Source::File(inode) => format!("inode {inode}"),
        Source::Snapshot(id) => format!("snapshot {id}"),
    };
    match error {
        Error::Lost { offset_bytes, .. } => Error::Lost { what, offset_bytes },
        other => other,
    }
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
    effort: Effort,
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
        } else if effort == Effort::Wait {
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
            Target::Lost => pieces.push(Piece::Lost(first)),
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

/// Appends the piece's bytes; `false` when the map was outdated, or more effort is needed.
fn materialize(core: &Core, piece: Piece, effort: Effort, out: &mut Vec<Bytes>) -> Result<bool> {
    match piece {
        Piece::Memory(bytes) => out.push(bytes),
        Piece::Lost(block) => {
            let offset_bytes = block.saturating_mul(BLOCK_BYTES_U64);
            return Err(Error::Lost { what: "a layer".to_owned(), offset_bytes });
        }
        Piece::Zeros(count) => {
            let mut left = count.saturating_mul(BLOCK_BYTES_U64);
            while left > 0 {
                let part = usize::try_from(left).unwrap_or(usize::MAX).min(ZEROS.len());
                out.push(Bytes::from_static(&ZEROS[..part]));
                left -= u64::try_from(part).unwrap_or(left);
            }
        }
        Piece::Chunks(first, count) if count > CACHED_RUN_BLOCKS_MAX => {
            if effort != Effort::Wait {
                return Ok(false);
            }
            let Some(pieces) = core.segments.read(first, count)? else {
                return Ok(false);
            };
            core.tally.cache_bypassed.fetch_add(count, Ordering::Relaxed);
            out.extend(pieces);
        }
        Piece::Chunks(first, count) => return through_cache(core, (first, count), effort, out),
    }
    Ok(true)
}

fn through_cache(
    core: &Core,
    (first, count): (ChunkId, u64),
    effort: Effort,
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
    let read = match effort {
        Effort::Wait => core.segments.read(first, count)?,
        Effort::Probe => core.segments.try_read(first, count),
        Effort::Memory => None,
    };
    let Some(pieces) = read else {
        return Ok(false);
    };
    core.tally.cache_misses.fetch_add(u64::try_from(missing).unwrap_or(0), Ordering::Relaxed);
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

/// A block as committed, whatever is dirty above it.
pub(crate) fn read_committed(core: &Core, layer: LayerId, block: u64) -> Result<Bytes> {
    for _ in 0..READ_TRIES {
        let range = (block, block + 1);
        let pieces = plan(core, layer, &Blocks::new(), range, Effort::Wait)?.unwrap_or_default();
        let mut bytes = Vec::new();
        let mut current = true;
        for piece in pieces {
            current &= materialize(core, piece, Effort::Wait, &mut bytes)?;
        }
        if let (true, [bytes]) = (current, bytes.as_slice()) {
            return Ok(bytes.clone());
        }
    }
    Err(Error::corrupt(format!("layer {layer}, block {block}"), "I2: its chunk is not stored"))
}

/// The hash that a block map gives lost blocks: none has it, so whoever goes by the map neither
/// takes them for a hole nor finds them elsewhere, and reads them.
const LOST_BLOCK_HASH: ContentHash = ContentHash::new([0xff; 32]);

/// Looks at the layer of a file or snapshot, and again when entries moved between layers, or left
/// one that nothing names, meanwhile: what was seen then need not be what the source shows. A
/// source that is gone is an error.
pub(crate) fn look<T>(core: &Core, source: Source, at: impl Fn(LayerId) -> Result<T>) -> Result<T> {
    for _ in 0..READ_TRIES {
        let moves = core.resolver.moves();
        let layer = view(core, source, 0, 0)?.layer;
        let found = at(layer);
        // A layer that was replaced is no failure.
        let is_current = found.is_ok() || view(core, source, 0, 0)?.layer == layer;
        if is_current && core.resolver.moves() == moves {
            return found;
        }
    }
    Err(Error::Busy {
        what: format!("{source:?}"),
        reason: "layers below it change all the time; try again".to_owned(),
    })
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
        let hashes = look(core, source, |layer| window_hashes(core, layer, window))?;
        let start = usize::try_from(block % WINDOW_BLOCKS).unwrap_or(0);
        let count = usize::try_from(stop - block).unwrap_or(0);
        map.extend_from_slice(&hashes[start..start + count]);
        block = stop;
    }
    Ok(map)
}

/// For each block of a window its hash.
fn window_hashes(core: &Core, layer: LayerId, window: u64) -> Result<BlockMap> {
    let mut hashes = vec![None; usize::try_from(WINDOW_BLOCKS).unwrap_or(0)];
    for run in core.resolver.window(layer, window)?.runs() {
        let from = usize::try_from(run.first).unwrap_or(usize::MAX);
        let found = match run.target {
            Target::Hole => continue,
            Target::Chunks(chunk) => hashes_of(core, chunk, run.count)?,
            Target::Lost => vec![LOST_BLOCK_HASH; usize::try_from(run.count).unwrap_or(0)],
        };
        for (slot, hash) in hashes.iter_mut().skip(from).zip(found) {
            *slot = Some(hash);
        }
    }
    Ok(hashes)
}

/// The hashes of `count` chunks of one segment.
fn hashes_of(core: &Core, first: ChunkId, count: u64) -> Result<Vec<ContentHash>> {
    loop {
        let file = core.segments.file_of(first.segment());
        match core.segments.hashes(first, count) {
            // Compaction removed the file meanwhile: the new one has the directory.
            Err(_) if core.segments.file_of(first.segment()) != file => {}
            outcome => return outcome,
        }
    }
}

#[cfg(test)]
mod tests;

#[cfg(test)]
mod vanishing;
