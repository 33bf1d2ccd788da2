//! Which connections stay when there are too many.
//!
//! ```text
//! accepted -> stranger: the oldest is closed for one more over the bound
//!               | a call that its token, its session, or a server without tokens allows
//!               v
//!             known: stays; ends by itself when it says nothing for long
//! ```
//! So connections that say nothing, or ask for nothing but the open routes, keep out nobody.
//!
//! Invariant: a connection is asked to leave or is known, never both (`rank` changes once).

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

const STRANGER: u8 = 0;
const KNOWN: u8 = 1;
const LEAVES: u8 = 2;

/// The connections of a server that may have to leave.
#[derive(Debug)]
pub(crate) struct Crowd {
    connections_max: usize,
    /// The oldest first, among entries of those that became known or ended.
    strangers: Mutex<VecDeque<Weak<Standing>>>,
}

impl Crowd {
    /// The crowd of a server that has at most so many connections.
    pub(crate) fn new(connections_max: usize) -> Self {
        Self { connections_max, strangers: Mutex::default() }
    }

    /// One more connection, of which nothing is known.
    pub(crate) fn admit(&self) -> Arc<Standing> {
        let standing = Arc::new(Standing::new());
        let mut strangers = self.strangers.lock();
        if strangers.len() >= 2 * self.connections_max {
            strangers.retain(|one| one.upgrade().is_some_and(|one| one.is_stranger()));
        }
        strangers.push_back(Arc::downgrade(&standing));
        standing
    }

    /// Asks the oldest stranger to leave, if there is one.
    pub(crate) fn make_room(&self) {
        let mut strangers = self.strangers.lock();
        while let Some(oldest) = strangers.pop_front() {
            if oldest.upgrade().is_some_and(|oldest| oldest.ask()) {
                return;
            }
        }
    }
}

/// What is known of one connection; an extension of each of its requests.
#[derive(Debug)]
pub(crate) struct Standing {
    rank: AtomicU8,
    asked: Notify,
    cut: Notify,
    activity: Mutex<Activity>,
    ended: Notify,
}

#[derive(Debug)]
struct Activity {
    /// Requests, and parts of answers, that the peer waits for.
    requests: usize,
    /// When the last one ended, or the connection began.
    since: Instant,
    /// It speaks HTTP/1, where a peer that takes nothing is left by its stream.
    is_http1: bool,
}

impl Standing {
    fn new() -> Self {
        Self {
            rank: AtomicU8::new(STRANGER),
            asked: Notify::new(),
            cut: Notify::new(),
            activity: Mutex::new(Activity { requests: 0, since: Instant::now(), is_http1: false }),
            ended: Notify::new(),
        }
    }

    /// Notes that a call was allowed that not everybody may make.
    pub(crate) fn make_known(&self) {
        self.change_to(KNOWN);
    }

    /// Completes when it is asked to leave.
    pub(crate) async fn asked(&self) {
        self.asked.notified().await;
    }

    /// Has it end, whoever it is: it does not take what it asked for.
    pub(crate) fn cut(&self) {
        self.cut.notify_one();
    }

    /// Completes when it is to end so.
    pub(crate) async fn was_cut(&self) {
        self.cut.notified().await;
    }

    /// Notes a request, or a part of an answer, that the peer waits for, until what is given back is
    /// dropped.
    pub(crate) fn begin(self: &Arc<Self>) -> UnderWay {
        self.activity.lock().requests += 1;
        UnderWay(Arc::clone(self))
    }

    /// Notes that it speaks HTTP/1.
    pub(crate) fn speaks_http1(&self) {
        self.activity.lock().is_http1 = true;
    }

    /// Completes when the peer waited for nothing for so long, and took nothing.
    pub(crate) async fn silent_for(&self, limit: Duration) {
        loop {
            let end = {
                let activity = self.activity.lock();
                (activity.requests == 0).then(|| activity.since + limit)
            };
            match end {
                Some(end) if end <= Instant::now() => return,
                Some(end) => sleep_until(end).await,
                None => self.ended.notified().await,
            }
        }
    }

    /// The same, but for HTTP/1, which is never stuck by this measure.
    pub(crate) async fn stuck_for(&self, limit: Duration) {
        self.silent_for(limit).await;
        if self.activity.lock().is_http1 {
            std::future::pending().await
        }
    }

    fn is_stranger(&self) -> bool {
        self.rank.load(Ordering::Acquire) == STRANGER
    }

    fn ask(&self) -> bool {
        let is_asked = self.change_to(LEAVES);
        if is_asked {
            self.asked.notify_one();
        }
        is_asked
    }

    /// Whether it was a stranger, and is not from now on.
    fn change_to(&self, rank: u8) -> bool {
        let (success, failure) = (Ordering::AcqRel, Ordering::Acquire);
        self.rank.compare_exchange(STRANGER, rank, success, failure).is_ok()
    }
}

/// A request under way.
#[derive(Debug)]
pub(crate) struct UnderWay(Arc<Standing>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        let mut activity = self.0.activity.lock();
        activity.requests -= 1;
        activity.since = Instant::now();
        drop(activity);
        self.0.ended.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_stranger_leaves_and_the_known_stay() {
        let crowd = Crowd::new(4);
        let all: Vec<_> = (0..4).map(|_| crowd.admit()).collect();
        all[0].make_known();
        crowd.make_room();
        let ranks = || all.iter().map(|one| one.rank.load(Ordering::Acquire)).collect::<Vec<_>>();
        assert_eq!(ranks(), [KNOWN, LEAVES, STRANGER, STRANGER]);
        all[1].make_known();
        assert_eq!(ranks()[1], LEAVES, "too late");
        for _ in 0..10 {
            crowd.make_room();
        }
        assert_eq!(ranks(), [KNOWN, LEAVES, LEAVES, LEAVES]);
    }

    #[test]
    fn those_that_ended_are_forgotten() {
        let crowd = Crowd::new(4);
        let first = crowd.admit();
        for _ in 0..1000 {
            drop(crowd.admit());
        }
        assert!(crowd.strangers.lock().len() <= 8);
        crowd.make_room();
        assert!(!first.is_stranger());
    }

    #[tokio::test]
    async fn a_request_under_way_is_no_silence() {
        let standing = Arc::new(Standing::new());
        let under_way = standing.begin();
        let silent = standing.silent_for(Duration::ZERO);
        tokio::pin!(silent);
        assert!(futures_util::FutureExt::now_or_never(&mut silent).is_none());
        drop(under_way);
        silent.await;
    }
}
