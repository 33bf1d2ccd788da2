//! Who gives way when all places for connections are taken.
//!
//! A connection from an address that may mount, once it has made a call, keeps its place. One
//! that has made none, or whose calls are all refused for its address, has it only as long as
//! nobody else wants it: the oldest of these goes first. So connections that say nothing, however
//! many, keep out nobody who has something to say.
//!
//! Invariant: a guest leaves or keeps its place, never both (`standing` changes once).

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tokio::sync::Notify;

const SILENT: u8 = 0;
const KEEPS: u8 = 1;
const LEAVES: u8 = 2;

/// Entries of guests that ended or keep their place are swept out at this many and one for each
/// guest that does not: few enough to be nothing, many enough that sweeping is rare.
const STALE_MAX: usize = 256;

/// The connections that may have to give way, the oldest first.
#[derive(Debug, Default)]
pub(crate) struct Crowd {
    guests: Mutex<VecDeque<Weak<Guest>>>,
}

/// One connection.
#[derive(Debug, Default)]
pub(crate) struct Guest {
    standing: AtomicU8,
    asked: Notify,
}

impl Crowd {
    /// A guest that has made no call yet.
    pub(crate) fn admit(&self) -> Arc<Guest> {
        let guest = Arc::new(Guest::default());
        let mut guests = self.guests.lock();
        if guests.len() >= STALE_MAX && guests.len() % STALE_MAX == 0 {
            let is_silent =
                |guest: &Weak<Guest>| guest.upgrade().is_some_and(|one| one.is_silent());
            guests.retain(is_silent);
        }
        guests.push_back(Arc::downgrade(&guest));
        guest
    }

    /// Asks the oldest guest that keeps no place to leave; whether there was one.
    pub(crate) fn ask_one(&self) -> bool {
        let mut guests = self.guests.lock();
        while let Some(guest) = guests.pop_front() {
            if guest.upgrade().is_some_and(|guest| guest.leave()) {
                return true;
            }
        }
        false
    }
}

impl Guest {
    /// It made a call that its address allows; false if it was asked to leave before.
    pub(crate) fn keep_place(&self) -> bool {
        matches!(self.change_to(KEEPS), Ok(_) | Err(KEEPS))
    }

    /// Completes when it is asked to leave.
    pub(crate) async fn asked(&self) {
        self.asked.notified().await;
    }

    fn leave(&self) -> bool {
        let is_asked = self.change_to(LEAVES).is_ok();
        if is_asked {
            self.asked.notify_one();
        }
        is_asked
    }

    /// Changes a silent guest; otherwise what it is already.
    fn change_to(&self, standing: u8) -> Result<u8, u8> {
        self.standing.compare_exchange(SILENT, standing, Ordering::AcqRel, Ordering::Acquire)
    }

    fn is_silent(&self) -> bool {
        self.standing.load(Ordering::Acquire) == SILENT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_silent_one_leaves_and_those_that_called_stay() {
        let crowd = Crowd::default();
        let guests: Vec<_> = (0..4).map(|_| crowd.admit()).collect();
        assert!(guests[0].keep_place() && guests[0].keep_place());
        assert!(crowd.ask_one());
        assert!(!guests[1].keep_place(), "it was asked to leave");
        assert!(guests[2].keep_place());
        assert!(crowd.ask_one());
        assert!(!guests[3].keep_place());
        assert!(!crowd.ask_one(), "nobody is left who is silent");
        assert!(guests[0].keep_place() && guests[2].keep_place());
    }

    #[test]
    fn those_that_ended_are_forgotten() {
        let crowd = Crowd::default();
        let silent = crowd.admit();
        for _ in 0..100_000 {
            drop(crowd.admit());
        }
        assert!(crowd.guests.lock().len() <= 2 * STALE_MAX);
        assert!(crowd.ask_one());
        assert!(!silent.keep_place());
    }
}
