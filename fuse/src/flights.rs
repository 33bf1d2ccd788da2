//! Blocks that are on their way: who misses one that another reader fetches waits for that.
//!
//! Invariant: a block has one fetcher at a time, and its ticket goes with it: landed or not,
//! those who wait go on. A fetcher looks into the cache once it has the ticket, and lands only
//! what is in the cache, so no block is fetched twice because two looked at the wrong moments.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::cache::Hash;

type Landing = watch::Receiver<Option<Bytes>>;

/// All that are on their way.
#[derive(Clone, Debug, Default)]
pub(crate) struct Flights {
    blocks: Arc<Mutex<HashMap<Hash, Landing>>>,
}

/// The right and the duty to fetch a block.
#[derive(Debug)]
pub(crate) struct Ticket {
    hash: Hash,
    flights: Flights,
    landing: watch::Sender<Option<Bytes>>,
}

/// What a reader does about a block.
#[derive(Debug)]
pub(crate) enum Claim {
    Fetch(Ticket),
    Await(Landing),
}

impl Flights {
    pub(crate) fn claim(&self, hash: Hash) -> Claim {
        match self.blocks.lock().entry(hash) {
            Entry::Occupied(entry) => Claim::Await(entry.get().clone()),
            Entry::Vacant(entry) => {
                let (landing, receiver) = watch::channel(None);
                entry.insert(receiver);
                Claim::Fetch(Ticket { hash, flights: self.clone(), landing })
            }
        }
    }
}

impl Ticket {
    pub(crate) const fn hash(&self) -> &Hash {
        &self.hash
    }

    /// Gives the block to all who wait for it.
    pub(crate) fn land(self, block: Bytes) {
        self.landing.send_replace(Some(block));
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.flights.blocks.lock().remove(&self.hash);
    }
}

/// The block once it landed; `None` if its fetcher failed.
pub(crate) async fn landed(mut landing: Landing) -> Option<Bytes> {
    // An error means that the sender is gone; it may have sent before.
    let _ = landing.wait_for(Option::is_some).await;
    landing.borrow().clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_fetches_and_all_have_it() {
        let flights = Flights::default();
        let Claim::Fetch(ticket) = flights.claim([7; 32]) else { panic!("nobody fetches") };
        let Claim::Await(waiting) = flights.claim([7; 32]) else { panic!("two fetch") };
        assert!(matches!(flights.claim([8; 32]), Claim::Fetch(_)));
        ticket.land("block".into());
        assert_eq!(landed(waiting).await.unwrap(), "block");
        assert!(flights.blocks.lock().is_empty());
    }

    #[tokio::test]
    async fn a_fetch_that_fails_is_taken_over() {
        let flights = Flights::default();
        let Claim::Fetch(ticket) = flights.claim([7; 32]) else { panic!("nobody fetches") };
        let Claim::Await(waiting) = flights.claim([7; 32]) else { panic!("two fetch") };
        drop(ticket);
        assert_eq!(landed(waiting).await, None);
        assert!(matches!(flights.claim([7; 32]), Claim::Fetch(_)));
    }
}
