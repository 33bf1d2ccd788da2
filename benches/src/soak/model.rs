//! A file as its client must believe it to be (RFC 1813 section 4.8): what the server may hold
//! after it died, and what has to be sent again then.
//!
//! ```text
//! write sent -> answered UNSTABLE, verifier v -> COMMIT answered v -> durable
//!        |              server died: old or new, block by block; sent again
//!        +----> answered FILE_SYNC -------------------------------> durable
//! ```
//! Invariants: of each block the last content that is allowed is the newest; a durable block
//! allows only that. Bytes beyond the size are zeros, and so are blocks beyond the last cell.

use slackwater_benches::wire::WriteVerifier;
use slackwater_benches::wire::reply::WriteReply;
use slackwater_blockstore::{BLOCK_BYTES, BLOCK_BYTES_U64};

use super::matter::{Block, block_of, overlay, shown};

/// How far a block has come on its way to the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    Durable,
    /// Written, and not answered.
    Sent {
        /// Nothing else of this block is under way.
        over_durable: bool,
    },
    /// Answered, to be committed.
    Written(WriteVerifier),
}

/// A block and all that the server may hold in its place.
#[derive(Clone, Debug)]
struct Cell {
    allowed: Vec<Block>,
    standing: Standing,
}

impl Cell {
    fn durable(block: Block) -> Self {
        Self { allowed: vec![block], standing: Standing::Durable }
    }

    fn newest(&self) -> Block {
        self.allowed.last().cloned().flatten()
    }

    fn settle(&mut self) {
        *self = Self::durable(self.newest());
    }
}

/// A file's content at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Image {
    blocks: Vec<Block>,
    size_bytes: u64,
}

impl Image {
    /// What was read of a file of that size.
    pub(super) fn of(size_bytes: u64, bytes: &[u8]) -> Self {
        Self { blocks: bytes.chunks(BLOCK_BYTES).map(block_of).collect(), size_bytes }
    }

    pub(super) const fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn block(&self, index: usize) -> Block {
        self.blocks.get(index).cloned().flatten()
    }

    /// Why the two differ, if they do.
    pub(super) fn difference(&self, got: &Self) -> Option<String> {
        if self.size_bytes != got.size_bytes {
            return Some(format!("{} bytes, expected {}", got.size_bytes, self.size_bytes));
        }
        let count = self.blocks.len().max(got.blocks.len());
        let index = (0..count).find(|&index| self.block(index) != got.block(index))?;
        let (got, expected) = (shown(&got.block(index)), shown(&self.block(index)));
        Some(format!("block {index} is {got}, expected {expected}"))
    }
}

/// The model of one file.
#[derive(Clone, Debug)]
pub(super) struct FileModel {
    cells: Vec<Cell>,
    /// Sizes that the server may have, the newest last.
    sizes: Vec<u64>,
}

impl FileModel {
    /// An empty file.
    pub(super) fn empty() -> Self {
        Self::holding(&Image::default())
    }

    /// A file whose content is durable.
    pub(super) fn holding(image: &Image) -> Self {
        let cells = image.blocks.iter().cloned().map(Cell::durable).collect();
        Self { cells, sizes: vec![image.size_bytes] }
    }

    pub(super) fn size_bytes(&self) -> u64 {
        self.sizes.last().copied().unwrap_or(0)
    }

    /// The newest content: what a read answers.
    pub(super) fn image(&self) -> Image {
        let blocks = self.cells.iter().map(Cell::newest).collect();
        Image { blocks, size_bytes: self.size_bytes() }
    }

    /// Whether nothing waits for a COMMIT.
    pub(super) fn is_durable(&self) -> bool {
        self.cells.iter().all(|cell| cell.standing == Standing::Durable)
    }

    /// A WRITE is about to be sent.
    pub(super) fn write_begins(&mut self, offset_bytes: u64, data: &[u8]) {
        let end_bytes = offset_bytes + data.len() as u64;
        for (index, start, piece) in pieces(offset_bytes, data) {
            if self.cells.len() <= index {
                self.cells.resize_with(index + 1, || Cell::durable(None));
            }
            let cell = &mut self.cells[index];
            let over_durable = cell.standing == Standing::Durable;
            let block = overlay(&cell.newest(), start, piece);
            cell.allowed.retain(|other| *other != block);
            cell.allowed.push(block);
            cell.standing = Standing::Sent { over_durable };
        }
        if end_bytes > self.size_bytes() {
            self.sizes.push(end_bytes);
        }
    }

    /// That WRITE was answered.
    pub(super) fn write_ends(&mut self, offset_bytes: u64, data: &[u8], reply: WriteReply) {
        for (index, _, piece) in pieces(offset_bytes, data) {
            let cell = &mut self.cells[index];
            let is_whole = piece.len() == BLOCK_BYTES;
            match cell.standing {
                Standing::Sent { over_durable }
                    if reply.is_durable && (over_durable || is_whole) =>
                {
                    cell.settle();
                }
                _ => cell.standing = Standing::Written(reply.verifier),
            }
        }
        if reply.is_durable {
            let end_bytes = offset_bytes + data.len() as u64;
            self.sizes.retain(|&size| size >= end_bytes);
        }
    }

    /// A COMMIT was answered with this verifier. False if some WRITE was answered with another:
    /// then nothing is taken for durable.
    pub(super) fn committed(&mut self, verifier: WriteVerifier) -> bool {
        let is_kept = |cell: &Cell| match cell.standing {
            Standing::Durable => true,
            Standing::Written(other) => other == verifier,
            Standing::Sent { .. } => false,
        };
        if !self.cells.iter().all(is_kept) {
            return false;
        }
        self.cells.iter_mut().for_each(Cell::settle);
        self.sizes = vec![self.size_bytes()];
        true
    }

    /// The size was set, which is durable. Only of a file that is durable.
    pub(super) fn resized(&mut self, size_bytes: u64) {
        debug_assert!(self.is_durable(), "a client commits first");
        let (last, rest) = place_of(size_bytes);
        self.cells.truncate(if rest == 0 { last } else { last + 1 });
        if rest > 0
            && let Some(cell) = self.cells.get_mut(last)
        {
            *cell = Cell::durable(overlay(&cell.newest(), rest, &vec![0; BLOCK_BYTES - rest]));
        }
        self.sizes = vec![size_bytes];
    }

    /// What a server that died meanwhile holds now. From here on it, and what is sent again, is
    /// all that is allowed.
    ///
    /// # Errors
    /// What is not allowed, in words.
    pub(super) fn observe(&mut self, got: &Image) -> Result<(), String> {
        if !self.sizes.contains(&got.size_bytes) {
            return Err(format!("{} bytes, allowed are {:?}", got.size_bytes, self.sizes));
        }
        let count = self.cells.len().max(got.blocks.len());
        self.cells.resize_with(count, || Cell::durable(None));
        for (index, cell) in self.cells.iter_mut().enumerate() {
            let block = got.block(index);
            if !cell.allowed.contains(&block) {
                let allowed: Vec<_> = cell.allowed.iter().map(shown).collect();
                let (standing, block) = (cell.standing, shown(&block));
                return Err(format!(
                    "block {index} is {block}, allowed are {allowed:?} ({standing:?})"
                ));
            }
            let newest = cell.newest();
            cell.allowed = if block == newest { vec![newest] } else { vec![block, newest] };
        }
        let newest = self.size_bytes();
        self.sizes = vec![got.size_bytes];
        if newest != got.size_bytes {
            self.sizes.push(newest);
        }
        Ok(())
    }

    /// What has to be sent again: offset and bytes of each block that is not durable.
    pub(super) fn lost(&self) -> Vec<(u64, Vec<u8>)> {
        let size_bytes = self.size_bytes();
        let mut lost = Vec::new();
        for (index, cell) in self.cells.iter().enumerate() {
            let offset_bytes = index as u64 * BLOCK_BYTES_U64;
            let left = size_bytes.saturating_sub(offset_bytes).min(BLOCK_BYTES_U64);
            if cell.standing != Standing::Durable && left > 0 {
                let mut bytes =
                    cell.newest().map_or_else(|| vec![0; BLOCK_BYTES], |all| all.to_vec());
                bytes.truncate(usize::try_from(left).unwrap_or(BLOCK_BYTES));
                lost.push((offset_bytes, bytes));
            }
        }
        lost
    }
}

/// The block that holds a byte, and the byte's place in it.
fn place_of(offset_bytes: u64) -> (usize, usize) {
    let index = usize::try_from(offset_bytes / BLOCK_BYTES_U64).unwrap_or(usize::MAX);
    (index, usize::try_from(offset_bytes % BLOCK_BYTES_U64).unwrap_or(0))
}

/// The parts of a write: block, place within it, bytes.
fn pieces(offset_bytes: u64, data: &[u8]) -> Vec<(usize, usize, &[u8])> {
    let (mut index, mut start) = place_of(offset_bytes);
    let mut rest = data;
    let mut pieces = Vec::new();
    while !rest.is_empty() {
        let (piece, others) = rest.split_at(rest.len().min(BLOCK_BYTES - start));
        pieces.push((index, start, piece));
        (index, start, rest) = (index + 1, 0, others);
    }
    pieces
}

#[cfg(test)]
mod tests;
