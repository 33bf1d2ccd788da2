//! The life of a READ.
//!
//! ```text
//! blocks --map--> hole: zeros
//!                 hash: in flight? wait | in the cache? take | fetch over NFS, verify, keep
//!                 unknown, or written since: fetch over NFS
//! ```
//!
//! Missing blocks in sequence are fetched by one READ. What the kernel reads ahead it asks for by itself, and only where the
//! access is sequential. So no others come with them, unless the appliance is far (`beside.rs`).
//!
//! A block that is not what its map says means that the map is older than the file: the map is
//! fetched again once, then the file is read as it is. A snapshot cannot change; there it is
//! an error.

use std::collections::{BTreeMap, VecDeque};
use std::ops::RangeInclusive;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use futures_util::future::try_join_all;
use rustix::io::Errno;
use tokio::task::spawn_blocking;

use crate::cache::{BLOCK_BYTES, Hash, is_block};
use crate::export::Export;
use crate::file::ServedFile;
use crate::flights::{Claim, Ticket, landed};
use crate::maps::{WINDOW_BLOCKS, Window};

pub(crate) const BLOCK_BYTES_U64: u64 = 4096;

/// Times that blocks may differ from their map: the second time the map was new.
const MISMATCHES_MAX: u32 = 2;

static ZEROS: [u8; BLOCK_BYTES] = [0; BLOCK_BYTES];

/// Where a block comes from.
#[derive(Debug, PartialEq, Eq)]
enum Want {
    Hole,
    Block(Hash),
    Direct,
}

/// A READ under way.
struct Reading<'f> {
    file: &'f ServedFile,
    /// The first block.
    first: u64,
    /// What is there by now. A block shorter than the others is where the file ends.
    blocks: Vec<Option<Bytes>>,
    mismatches: u32,
}

/// A block to be fetched: for a hash, or as it is.
pub(crate) struct Fetch {
    pub(crate) block: u64,
    pub(crate) ticket: Option<Ticket>,
}

/// Blocks in sequence that one READ fetches.
pub(crate) struct Run {
    pub(crate) fetches: VecDeque<Fetch>,
    /// Those that are wanted. The others lie beside them.
    pub(crate) wanted: RangeInclusive<u64>,
}

impl Run {
    fn new(fetch: Fetch) -> Self {
        Self { wanted: fetch.block..=fetch.block, fetches: [fetch].into() }
    }

    /// The blocks in sequence, as far as they are wanted.
    fn of(fetches: Vec<Fetch>) -> Vec<Self> {
        let mut runs: Vec<Self> = Vec::new();
        for fetch in fetches {
            match runs.last_mut() {
                Some(run) if run.wanted.end() + 1 == fetch.block => {
                    run.wanted = *run.wanted.start()..=fetch.block;
                    run.fetches.push_back(fetch);
                }
                _ => runs.push(Self::new(fetch)),
            }
        }
        runs
    }

    /// All of its blocks.
    fn blocks(&self) -> RangeInclusive<u64> {
        let block = |fetch: Option<&Fetch>| fetch.map(|fetch| fetch.block);
        let first = block(self.fetches.front()).unwrap_or(*self.wanted.start());
        first..=block(self.fetches.back()).unwrap_or(*self.wanted.end())
    }
}

impl Reading<'_> {
    /// The blocks that are not there.
    fn missing(&self) -> Vec<u64> {
        let blocks = (self.first..).zip(&self.blocks);
        blocks.filter(|(_, bytes)| bytes.is_none()).map(|(block, _)| block).collect()
    }

    /// Takes a block of the range.
    fn put(&mut self, block: u64, bytes: Bytes) {
        let index = block.checked_sub(self.first).and_then(|index| usize::try_from(index).ok());
        if let Some(slot) = index.and_then(|index| self.blocks.get_mut(index)) {
            *slot = Some(bytes);
        }
    }

    /// The bytes of the range, as far as the file has them.
    fn assemble(&self, offset: u64, end: u64) -> Vec<Bytes> {
        let mut pieces = Vec::with_capacity(self.blocks.len());
        let mut position = self.first * BLOCK_BYTES_U64;
        for block in self.blocks.iter().flatten() {
            let length = u64::try_from(block.len()).unwrap_or(u64::MAX);
            let (from, to) = (offset.max(position), end.min(position + length));
            if from < to {
                let within = |place: u64| usize::try_from(place - position).unwrap_or(usize::MAX);
                pieces.push(block.slice(within(from)..within(to)));
            }
            if block.len() < BLOCK_BYTES {
                break;
            }
            position += BLOCK_BYTES_U64;
        }
        pieces
    }
}

/// Lays the kept parts of a range, which begins at `offset`, over its pieces.
fn lay_over(pieces: Vec<Bytes>, offset: u64, kept: &[(u64, Bytes)]) -> Vec<Bytes> {
    if kept.is_empty() {
        return pieces;
    }
    let mut whole = BytesMut::new();
    pieces.iter().for_each(|piece| whole.extend_from_slice(piece));
    for (start, data) in kept {
        let from = usize::try_from(start - offset).unwrap_or(usize::MAX).min(whole.len());
        let count = data.len().min(whole.len() - from);
        whole[from..from + count].copy_from_slice(&data[..count]);
    }
    vec![whole.freeze()]
}

impl Export {
    /// The bytes of the range in pieces, fewer only at the end of the file.
    pub(crate) async fn read(
        &self,
        file: &ServedFile,
        offset_bytes: u64,
        size_bytes: u32,
    ) -> Result<Vec<Bytes>, Errno> {
        let end = offset_bytes.checked_add(u64::from(size_bytes)).ok_or(Errno::INVAL)?;
        if size_bytes == 0 {
            return Ok(Vec::new());
        }
        // Before anything is fetched: what is committed meanwhile comes from the appliance.
        let kept = file.writes.lock().kept.overlay(offset_bytes, end);
        let first = offset_bytes / BLOCK_BYTES_U64;
        let count = (end - 1) / BLOCK_BYTES_U64 - first + 1;
        let count = usize::try_from(count).map_err(|_| Errno::INVAL)?;
        let mut reading = Reading { file, first, blocks: vec![None; count], mismatches: 0 };
        while reading.blocks.iter().any(Option::is_none) {
            self.read_round(&mut reading).await?;
        }
        Ok(lay_over(reading.assemble(offset_bytes, end), offset_bytes, &kept))
    }

    /// Gets what is missing, but for what turns out to need another round.
    async fn read_round(&self, reading: &mut Reading<'_>) -> Result<(), Errno> {
        let mut fetches = Vec::new();
        let mut awaited = Vec::new();
        for (block, want) in self.plan(reading).await {
            match want {
                Want::Hole => reading.put(block, Bytes::from_static(&ZEROS)),
                Want::Direct => fetches.push(Fetch { block, ticket: None }),
                Want::Block(hash) => match self.flights.claim(hash) {
                    Claim::Fetch(ticket) => fetches.push(Fetch { block, ticket: Some(ticket) }),
                    Claim::Await(landing) => awaited.push((block, landing)),
                },
            }
        }
        let fetches = self.take_from_cache(reading, fetches).await?;
        let mut runs = Run::of(fetches);
        let turn = self.widen(reading.file, &mut runs).await;
        let beside = self.fetch(reading, runs).await?;
        if let Some(turn) = turn {
            self.keep_beside(beside, turn);
        }
        // Only now, with no ticket in hand: so no two wait for each other.
        for (block, landing) in awaited {
            if let Some(bytes) = landed(landing).await {
                reading.put(block, bytes);
            }
        }
        Ok(())
    }

    /// Where the missing blocks come from.
    async fn plan(&self, reading: &Reading<'_>) -> Vec<(u64, Want)> {
        let file = reading.file;
        let missing = reading.missing();
        let is_direct = file.is_writable() && reading.mismatches >= MISMATCHES_MAX;
        if is_direct {
            return missing.into_iter().map(|block| (block, Want::Direct)).collect();
        }
        let mut needed: Vec<u64> = {
            let writes = file.writes.lock();
            let unmarked = missing.iter().filter(|block| !writes.written.contains(**block));
            unmarked.map(|block| block / WINDOW_BLOCKS).collect()
        };
        needed.dedup();
        let mut windows: BTreeMap<u64, Arc<Window>> = BTreeMap::new();
        for index in needed {
            windows.insert(index, self.maps.window(file.node, &file.source, index).await);
        }
        // Looked at again, behind the map: what was written since it was fetched is marked.
        let writes = file.writes.lock();
        let want = |block: u64| {
            if writes.written.contains(block) {
                return (block, Want::Direct);
            }
            let within = usize::try_from(block % WINDOW_BLOCKS).unwrap_or(usize::MAX);
            let window = windows.get(&(block / WINDOW_BLOCKS));
            let want = match window.and_then(|window| window.blocks.get(within)) {
                None => Want::Direct,
                Some(None) => Want::Hole,
                Some(Some(hash)) => Want::Block(*hash),
            };
            (block, want)
        };
        missing.into_iter().map(want).collect()
    }

    /// Takes what the cache has; gives what it does not have.
    async fn take_from_cache(
        &self,
        reading: &mut Reading<'_>,
        fetches: Vec<Fetch>,
    ) -> Result<Vec<Fetch>, Errno> {
        let Some(cache) = self.cache.as_ref().filter(|_| !fetches.is_empty()) else {
            return Ok(fetches);
        };
        let tickets = fetches.iter().filter_map(|fetch| fetch.ticket.as_ref());
        let hashes: Vec<Hash> = tickets.map(|ticket| *ticket.hash()).collect();
        let cache = Arc::clone(cache);
        let mut found =
            spawn_blocking(move || cache.get(&hashes)).await.map_err(panicked)?.into_iter();
        let mut rest = Vec::new();
        for mut fetch in fetches {
            let Some(ticket) = fetch.ticket.take() else {
                rest.push(fetch);
                continue;
            };
            if let Some(block) = found.next().flatten() {
                reading.put(fetch.block, block.clone());
                ticket.land(block);
            } else {
                rest.push(Fetch { ticket: Some(ticket), ..fetch });
            }
        }
        Ok(rest)
    }

    /// Fetches blocks over NFS. What came beside the wanted ones, not verified.
    async fn fetch(
        &self,
        reading: &mut Reading<'_>,
        runs: Vec<Run>,
    ) -> Result<Vec<(Ticket, Bytes)>, Errno> {
        let read = try_join_all(runs.iter().map(|run| self.read_run(reading.file, run))).await?;
        let (mut to_verify, mut beside) = (Vec::new(), Vec::new());
        for (run, (blocks, data)) in runs.into_iter().zip(read) {
            for Fetch { block, ticket } in run.fetches {
                // One that was not read after all is fetched by who wants it.
                if !blocks.contains(&block) {
                    continue;
                }
                let number = usize::try_from(block - blocks.start()).unwrap_or(usize::MAX);
                let from = number.saturating_mul(BLOCK_BYTES).min(data.len());
                let bytes = data.slice(from..(from + BLOCK_BYTES).min(data.len()));
                match ticket {
                    Some(ticket) if run.wanted.contains(&block) => {
                        to_verify.push((block, ticket, bytes));
                    }
                    Some(ticket) => beside.push((ticket, bytes)),
                    None => reading.put(block, bytes),
                }
            }
        }
        self.verify(reading, to_verify).await?;
        Ok(beside)
    }

    /// Reads the blocks of a run; which, and their bytes. A block that is not wanted fails no read.
    async fn read_run(
        &self,
        file: &ServedFile,
        run: &Run,
    ) -> Result<(RangeInclusive<u64>, Bytes), Errno> {
        let read = async |blocks: &RangeInclusive<u64>| {
            let count = blocks.end() - blocks.start() + 1;
            let length = u32::try_from(count * BLOCK_BYTES_U64).unwrap_or(u32::MAX);
            self.nfs.read(&file.handle, blocks.start() * BLOCK_BYTES_U64, length).await
        };
        let all = run.blocks();
        match read(&all).await {
            Ok(data) => Ok((all, data)),
            Err(Errno::IO) if all != run.wanted => {
                let data = read(&run.wanted).await?;
                self.beside.note_unreadable(file.node, all);
                Ok((run.wanted.clone(), data))
            }
            Err(error) => Err(error),
        }
    }

    /// Takes the blocks that have their hash and keeps them in the cache.
    async fn verify(
        &self,
        reading: &mut Reading<'_>,
        blocks: Vec<(u64, Ticket, Bytes)>,
    ) -> Result<(), Errno> {
        if blocks.is_empty() {
            return Ok(());
        }
        let cache = self.cache.clone();
        let verified = spawn_blocking(move || {
            let verify = |(block, ticket, bytes): (u64, Ticket, Bytes)| {
                let bytes = filled_up(bytes);
                let is_good = is_block(&bytes, ticket.hash());
                if is_good {
                    if let Some(cache) = &cache {
                        cache.insert(ticket.hash(), &bytes);
                    }
                    ticket.land(bytes.clone());
                }
                (block, is_good.then_some(bytes))
            };
            blocks.into_iter().map(verify).collect::<Vec<_>>()
        });
        let mut is_stale = false;
        for (block, bytes) in verified.await.map_err(panicked)? {
            if let Some(bytes) = bytes {
                reading.put(block, bytes);
            } else {
                is_stale = true;
                self.maps.forget(reading.file.node, block / WINDOW_BLOCKS);
            }
        }
        if is_stale {
            reading.mismatches += 1;
            self.statistics.maps_stale.add(1);
        }
        if reading.mismatches >= MISMATCHES_MAX && !reading.file.is_writable() {
            tracing::error!(
                source = ?reading.file.source, block = reading.first,
                "the appliance gives other bytes than the snapshot's map names; \
                 run `slackwater check --data` on it"
            );
            return Err(Errno::IO);
        }
        Ok(())
    }
}

/// The last block of a file is hashed with zeros up to a block's length.
pub(crate) fn filled_up(block: Bytes) -> Bytes {
    if block.is_empty() || block.len() >= BLOCK_BYTES {
        return block;
    }
    let mut whole = BytesMut::from(block);
    whole.resize(BLOCK_BYTES, 0);
    whole.freeze()
}

fn panicked(error: tokio::task::JoinError) -> Errno {
    tracing::error!(%error, "reading the cache failed");
    Errno::IO
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::maps::MapSource;
    use crate::nfs::Handle;
    use crate::wire::NodeId;

    #[test]
    fn pieces_are_cut_to_the_range_and_end_with_the_file() {
        let handle = Handle(Bytes::new());
        let file = ServedFile::new(NodeId(3), handle, MapSource::File("f".into()));
        let whole = |value: u8| Some(Bytes::from(vec![value; BLOCK_BYTES]));
        let tail = Some(Bytes::from_static(b"tail"));
        let blocks = vec![whole(1), tail, whole(3)];
        let reading = Reading { file: &file, first: 2, blocks, mismatches: 0 };
        let pieces = reading.assemble(2 * 4096 + 4094, 5 * 4096);
        assert_eq!(pieces, [&[1_u8, 1][..], b"tail"]);
        assert_eq!(reading.assemble(2 * 4096 + 1, 2 * 4096 + 3), [&[1_u8, 1][..]]);
        assert!(reading.assemble(3 * 4096 + 4, 4 * 4096).is_empty());
    }

    #[test]
    fn kept_bytes_lie_over_the_appliances() {
        let pieces = vec![Bytes::from_static(b"abc"), Bytes::from_static(b"def")];
        let kept = [(11, Bytes::from_static(b"XYZ")), (15, Bytes::from_static(b"long"))];
        assert_eq!(lay_over(pieces.clone(), 10, &kept), ["aXYZel"]);
        assert_eq!(lay_over(pieces.clone(), 10, &[]), pieces);
    }
}
