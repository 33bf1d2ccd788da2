//! Who may stay: places for connections that have something to say, and a crowd of those that
//! have none yet.
//!
//! ```text
//! accepted -> crowd, at most WITHOUT_PLACE_MAX; the oldest is closed for one more
//!               | a first whole call, from an address that may mount
//!               v
//!             place, of `connections_max`: kept until the connection ends
//! ```
//! A connection whose call waits for a place is of the crowd until it has one; so is one from an
//! address that may not mount, which only gets refusals. So connections that say nothing, however
//! many, keep out nobody who has something to say.
//!
//! Invariant: a guest is asked to leave or has a place, never both (`standing` changes once).

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use crate::limits;

const WAITS: u8 = 0;
const HAS_PLACE: u8 = 1;
const LEAVES: u8 = 2;

/// All connections of a server.
#[derive(Debug)]
pub(crate) struct Crowd {
    places: Arc<Semaphore>,
    /// Those without a place, the oldest first, among entries of those that got one or ended.
    guests: Mutex<VecDeque<Weak<Guest>>>,
    waiting: Arc<AtomicUsize>,
}

/// One connection.
#[derive(Debug)]
pub(crate) struct Guest {
    standing: AtomicU8,
    asked: Notify,
    places: Arc<Semaphore>,
    place: Mutex<Option<OwnedSemaphorePermit>>,
    waiting: Arc<AtomicUsize>,
}

impl Crowd {
    pub(crate) fn new(places: usize) -> Self {
        let places = Arc::new(Semaphore::new(places.min(Semaphore::MAX_PERMITS)));
        Self { places, guests: Mutex::default(), waiting: Arc::default() }
    }

    /// One more without a place; when there are too many of those the oldest has to leave.
    pub(crate) fn admit(&self) -> Arc<Guest> {
        let guest = Arc::new(Guest {
            standing: AtomicU8::new(WAITS),
            asked: Notify::new(),
            places: Arc::clone(&self.places),
            place: Mutex::default(),
            waiting: Arc::clone(&self.waiting),
        });
        let waiting = self.waiting.fetch_add(1, Ordering::Relaxed) + 1;
        let mut guests = self.guests.lock();
        if guests.len() >= 2 * limits::WITHOUT_PLACE_MAX {
            guests.retain(|guest| guest.upgrade().is_some_and(|guest| guest.is_waiting()));
        }
        guests.push_back(Arc::downgrade(&guest));
        if waiting > limits::WITHOUT_PLACE_MAX {
            while let Some(oldest) = guests.pop_front() {
                if oldest.upgrade().is_some_and(|oldest| oldest.ask()) {
                    break;
                }
            }
        }
        guest
    }

    /// Connections without a place that were not asked to leave.
    #[cfg(test)]
    fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }
}

impl Guest {
    /// Whether it has a place.
    pub(crate) fn has_place(&self) -> bool {
        self.standing.load(Ordering::Acquire) == HAS_PLACE
    }

    /// Waits for a place and keeps it; false if it was asked to leave before.
    pub(crate) async fn take_place(&self) -> bool {
        match self.standing.load(Ordering::Acquire) {
            HAS_PLACE => return true,
            LEAVES => return false,
            _ => {}
        }
        let Ok(place) = Arc::clone(&self.places).acquire_owned().await else {
            unreachable!("the semaphore of places is never closed")
        };
        let has_place = self.change_to(HAS_PLACE);
        if has_place {
            *self.place.lock() = Some(place);
        }
        has_place
    }

    /// Completes when it is asked to leave.
    pub(crate) async fn asked(&self) {
        self.asked.notified().await;
    }

    fn ask(&self) -> bool {
        let is_asked = self.change_to(LEAVES);
        if is_asked {
            self.asked.notify_one();
        }
        is_asked
    }

    /// Whether it was waiting, and is not from now on.
    fn change_to(&self, standing: u8) -> bool {
        let changed =
            self.standing.compare_exchange(WAITS, standing, Ordering::AcqRel, Ordering::Acquire);
        if changed.is_ok() {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        }
        changed.is_ok()
    }

    fn is_waiting(&self) -> bool {
        self.standing.load(Ordering::Acquire) == WAITS
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.change_to(LEAVES);
    }
}

#[cfg(test)]
#[allow(clippy::indexing_slicing, reason = "a panic fails the test")]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::time::timeout;

    const MAX: usize = limits::WITHOUT_PLACE_MAX;
    const SOON: Duration = Duration::from_millis(20);

    #[tokio::test]
    async fn the_oldest_without_a_place_leaves_and_those_that_called_stay() {
        let crowd = Crowd::new(10);
        let guests: Vec<_> = (0..MAX).map(|_| crowd.admit()).collect();
        assert!(guests[0].take_place().await && guests[0].take_place().await);
        assert_eq!(crowd.waiting(), MAX - 1);
        let more: Vec<_> = (0..3).map(|_| crowd.admit()).collect();
        assert_eq!(crowd.waiting(), MAX);
        // The first has a place; the two behind it made room.
        for (index, stays) in [(0, true), (1, false), (2, false), (3, true)] {
            assert_eq!(guests[index].take_place().await, stays, "{index}");
        }
        assert!(timeout(SOON, guests[1].asked()).await.is_ok());
        assert!(timeout(SOON, guests[3].asked()).await.is_err());
        assert!(more[2].take_place().await);
    }

    #[tokio::test]
    async fn a_call_waits_for_a_place_and_gets_that_of_one_that_ended() {
        let crowd = Crowd::new(1);
        let (first, second) = (crowd.admit(), crowd.admit());
        assert!(first.take_place().await);
        assert!(timeout(SOON, second.take_place()).await.is_err());
        drop(first);
        assert!(timeout(SOON, second.take_place()).await.unwrap());
    }

    #[test]
    fn those_that_ended_are_forgotten() {
        let crowd = Crowd::new(1);
        let silent = crowd.admit();
        for _ in 0..20 * MAX {
            drop(crowd.admit());
        }
        assert_eq!(crowd.waiting(), 1);
        assert!(crowd.guests.lock().len() <= 2 * MAX);
        assert!(silent.is_waiting());
    }
}
