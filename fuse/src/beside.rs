//! Blocks of a snapshot that come with a missed one, where the appliance is far (`distance.rs`).
//!
//! ```text
//! a place     | . h . . w . . o . . |     w: wanted   h: in the cache   o: a hole, or on its way
//! one READ          '-------'               what lies between these
//! ```
//! Where they are wanted later they are in the cache, or on their way. Of a file that can be written to nothing comes so: its
//! map says what it was. What comes beside is verified and kept on another thread, and no answer waits for that; what the
//! appliance cannot read fails nothing; and a cache that keeps nothing stops it.

use std::collections::VecDeque;
use std::ops::{Range, RangeInclusive};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::spawn_blocking;
use tokio::time::Instant;

use crate::cache::{BLOCK_BYTES, BlockCache, Hash, is_block};
use crate::distance::FARTHER_BYTES;
use crate::export::Export;
use crate::file::ServedFile;
use crate::flights::{Claim, Flights, Ticket};
use crate::maps::{WINDOW_BLOCKS, WINDOW_BYTES};
use crate::read::{BLOCK_BYTES_U64, Fetch, Run, filled_up};
use crate::wire::NodeId;

// Windows of maps are whole places.
const _: () = assert!(WINDOW_BYTES.is_multiple_of(FARTHER_BYTES));

/// Reads that bring more at a time, until that is kept: 8 MiB at most for those of one block, 16 for those of more.
const UNDER_WAY_MAX: usize = 32;

/// Of those of one block, one in so many brings nothing more: its time says whether the appliance is far still.
const ALONE_EVERY: u32 = 16;

/// How long nothing more is fetched after the cache did not keep a block: its disk is full or fails, or it is very small.
const UNKEPT_PAUSE: Duration = Duration::from_secs(60);

/// Ranges that are remembered, of which the appliance cannot read a block.
const UNREADABLE_MAX: usize = 64;

/// What is known of blocks beside.
#[derive(Debug)]
pub(crate) struct Beside {
    under_way: Arc<Semaphore>,
    reads: AtomicU32,
    unkept_until: Arc<Mutex<Option<Instant>>>,
    unreadable: Mutex<VecDeque<(NodeId, RangeInclusive<u64>)>>,
}

impl Default for Beside {
    fn default() -> Self {
        Self {
            under_way: Arc::new(Semaphore::new(UNDER_WAY_MAX)),
            reads: AtomicU32::new(0),
            unkept_until: Arc::default(),
            unreadable: Mutex::default(),
        }
    }
}

impl Beside {
    /// Remembers blocks of which one could not be read with another.
    pub(crate) fn note_unreadable(&self, node: NodeId, blocks: RangeInclusive<u64>) {
        let mut unreadable = self.unreadable.lock();
        unreadable.truncate(UNREADABLE_MAX - 1);
        unreadable.push_front((node, blocks));
    }

    /// Whether nothing of a place is among them.
    fn is_readable(&self, node: NodeId, place: &Range<u64>) -> bool {
        let is_of = |(other, blocks): &(NodeId, RangeInclusive<u64>)| {
            *other == node && *blocks.start() < place.end && place.start <= *blocks.end()
        };
        !self.unreadable.lock().iter().any(is_of)
    }

    /// A turn to bring more with a read, which ends with what this gives. The time of a read of one block tells how far the
    /// appliance is.
    fn begin(&self, is_of_one_block: bool) -> Option<OwnedSemaphorePermit> {
        if self.unkept_until.lock().is_some_and(|until| Instant::now() < until) {
            return None;
        }
        let permit = Arc::clone(&self.under_way).try_acquire_owned().ok()?;
        let is_alone = is_of_one_block
            && self.reads.fetch_add(1, Ordering::Relaxed).is_multiple_of(ALONE_EVERY);
        (!is_alone).then_some(permit)
    }
}

impl Export {
    /// Adds to runs that lie within a place what lies beside them. What was added goes to [`Self::keep_beside`], with the
    /// turn for it.
    pub(crate) async fn widen(
        &self,
        file: &ServedFile,
        runs: &mut [Run],
    ) -> Option<OwnedSemaphorePermit> {
        if runs.is_empty() || file.is_writable() {
            return None;
        }
        let place_blocks = self.distance.bytes_at_once()? / BLOCK_BYTES_U64;
        let cache = self.cache.clone()?;
        let is_of_one_block = matches!(&*runs, [run] if run.fetches.len() == 1);
        let turn = self.beside.begin(is_of_one_block)?;
        let mut all = Vec::new();
        for (index, run) in runs.iter().enumerate() {
            let (wanted, last) = (*run.wanted.start(), *run.wanted.end());
            let first = wanted / place_blocks * place_blocks;
            let place = first..first + place_blocks;
            if place.contains(&last) && self.beside.is_readable(file.node, &place) {
                let before = self.hashes(file, (first..wanted).rev());
                all.push((index, before, self.hashes(file, last + 1..place.end)));
            }
        }
        let flights = self.flights.clone();
        let claims = spawn_blocking(move || {
            let claim = |blocks| claim(&flights, &cache, blocks);
            let both = |(index, before, after)| (index, claim(before), claim(after));
            all.into_iter().map(both).collect::<Vec<_>>()
        });
        for (index, before, after) in claims.await.unwrap_or_default() {
            if let Some(run) = runs.get_mut(index) {
                before.into_iter().for_each(|fetch| run.fetches.push_front(fetch));
                run.fetches.extend(after);
            }
        }
        Some(turn)
    }

    /// The first of these blocks, as far as they are known by their hashes.
    fn hashes(&self, file: &ServedFile, blocks: impl Iterator<Item = u64>) -> Vec<(u64, Hash)> {
        let hash = |block: u64| {
            let window = self.maps.known(file.node, block / WINDOW_BLOCKS)?;
            let within = usize::try_from(block % WINDOW_BLOCKS).ok()?;
            Some((block, (*window.blocks.get(within)?)?))
        };
        blocks.map_while(hash).collect()
    }

    /// Verifies what came beside, and keeps it. Only who wants one of these waits for it.
    pub(crate) fn keep_beside(&self, blocks: Vec<(Ticket, Bytes)>, turn: OwnedSemaphorePermit) {
        let Some(cache) = self.cache.clone().filter(|_| !blocks.is_empty()) else { return };
        let bytes = blocks.iter().map(|(_, bytes)| bytes.len()).sum();
        self.statistics.bytes_read_beside.add_length(bytes);
        let unkept_until = Arc::clone(&self.beside.unkept_until);
        spawn_blocking(move || {
            let _turn = turn;
            for (ticket, bytes) in blocks {
                let block = filled_up(bytes);
                // One that is not what it should be is fetched again by who wants it, and found out there.
                if block.len() == BLOCK_BYTES && is_block(&block, ticket.hash()) {
                    if !cache.insert(ticket.hash(), &block) {
                        *unkept_until.lock() = Some(Instant::now() + UNKEPT_PAUSE);
                    }
                    ticket.land(block);
                }
            }
        });
    }
}

/// The first of these blocks, up to one that is on its way or in the cache. It may wait for the disk.
fn claim(flights: &Flights, cache: &BlockCache, blocks: Vec<(u64, Hash)>) -> Vec<Fetch> {
    let claim = |(block, hash)| match flights.claim(hash) {
        Claim::Fetch(ticket) if !cache.has(&hash) => Some(Fetch { block, ticket: Some(ticket) }),
        _ => None,
    };
    blocks.into_iter().map_while(claim).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn now_and_then_a_read_is_of_the_wanted_blocks_alone() {
        let beside = Beside::default();
        let count = |is_of_one_block| {
            (0..10 * ALONE_EVERY).filter(|_| beside.begin(is_of_one_block).is_none()).count()
        };
        assert_eq!((count(true), count(false)), (10, 0));
    }

    #[test]
    fn no_more_come_at_a_time_and_none_while_the_cache_keeps_nothing() {
        let beside = Beside::default();
        let rights: Vec<_> = (0..100).filter_map(|_| beside.begin(false)).collect();
        assert_eq!(rights.len(), UNDER_WAY_MAX);
        drop(rights);
        assert!(beside.begin(false).is_some());
        *beside.unkept_until.lock() = Some(Instant::now() + UNKEPT_PAUSE);
        assert!(beside.begin(false).is_none());
        *beside.unkept_until.lock() = Some(Instant::now());
        assert!(beside.begin(false).is_some());
    }

    #[test]
    fn the_last_places_that_could_not_be_read_are_remembered() {
        let beside = Beside::default();
        let count = u64::try_from(UNREADABLE_MAX).unwrap();
        let blocks = |place: u64| place * 16 + 3..=place * 16 + 5;
        (0..=count).for_each(|place| beside.note_unreadable(NodeId(3), blocks(place)));
        assert!(
            beside.is_readable(NodeId(3), &(0..16)) && beside.is_readable(NodeId(4), &(16..32))
        );
        for place in 1..=count {
            let (first, last) = (place * 16 + 3, place * 16 + 5);
            for overlapping in [first - 3..first + 1, last..last + 9, first - 9..last + 9] {
                assert!(!beside.is_readable(NodeId(3), &overlapping), "{overlapping:?}");
            }
            assert!(beside.is_readable(NodeId(3), &(last + 1..last + 14)));
        }
    }
}
