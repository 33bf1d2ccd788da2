//! The duplicate-request cache: a call that a client sends again, because its connection
//! broke before the reply came, must not be run again if a second run answers otherwise (a
//! REMOVE would say that the name does not exist).
//!
//! ```text
//! new call -> in progress -> done, reply kept -> forgotten by count, bytes or age
//!              same call: dropped   same call: reply sent again
//! ```
//! Only calls that are not idempotent come here, so the others cost nothing. The key holds
//! what makes two calls the same: the client's address (not its port: a reconnect brings a new
//! one), the user, the transaction id, the procedure, the length of the arguments, and a hash of them, whose key this
//! process makes: no client can choose arguments that are taken for those of another call.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher as _, RandomState};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use parking_lot::Mutex;

use crate::auth::Claim;
use crate::limits;
use crate::procedure::NfsProcedure;
use crate::rpc::Xid;
use crate::scope::MountScope;

/// What makes two calls the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct DuplicateKey {
    client: IpAddr,
    claim: Claim,
    xid: Xid,
    procedure: NfsProcedure,
    arguments: Arguments,
    scope: Option<MountScope>,
}

/// What is kept of a call's arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Arguments {
    length: usize,
    hash: u64,
}

impl DuplicateKey {
    /// The key of a call with these arguments, the first of which is a handle of this scope.
    pub(crate) const fn new(
        client: IpAddr,
        claim: Claim,
        xid: Xid,
        procedure: NfsProcedure,
        arguments: Arguments,
        scope: Option<MountScope>,
    ) -> Self {
        Self { client, claim, xid, procedure, arguments, scope }
    }
}

/// What to do with a call.
#[derive(Debug)]
pub(crate) enum Seen {
    /// Run it, and give the ticket its reply.
    New(Ticket),
    /// Drop it: the first one is still being run and will be answered.
    InProgress,
    /// Send this reply again.
    Done(Bytes),
}

/// The cache. Sharded by transaction id, so that connections rarely meet at a lock.
#[derive(Debug)]
pub(crate) struct DuplicateCache {
    shards: [Mutex<Shard>; SHARDS],
    /// Keyed at random.
    hasher: RandomState,
}

const SHARDS: usize = 16;

/// The bounds of one shard.
const SHARD_ENTRIES_MAX: usize = limits::DUPLICATES_MAX / SHARDS;
const SHARD_BYTES_MAX: usize = limits::DUPLICATES_BYTES_MAX / SHARDS;

#[derive(Debug, Default)]
struct Shard {
    /// `None`: in progress. Those are bounded by the calls in flight.
    entries: HashMap<DuplicateKey, Option<Bytes>>,
    /// Done calls, oldest first; each is in `entries`.
    done: VecDeque<(Instant, DuplicateKey)>,
    bytes: usize,
}

/// A call in progress. Dropped without a reply it forgets the call: it was not run, so a
/// resent one may be.
#[derive(Debug)]
pub(crate) struct Ticket {
    cache: Arc<DuplicateCache>,
    key: DuplicateKey,
    is_finished: bool,
}

impl DuplicateCache {
    /// An empty cache.
    pub(crate) fn new() -> Arc<Self> {
        let shards = std::array::from_fn(|_| Mutex::default());
        Arc::new(Self { shards, hasher: RandomState::new() })
    }

    /// What a key has of these arguments.
    pub(crate) fn arguments(&self, arguments: &[u8]) -> Arguments {
        Arguments { length: arguments.len(), hash: self.hasher.hash_one(arguments) }
    }

    fn shard(&self, key: &DuplicateKey) -> &Mutex<Shard> {
        // Clients count their ids up, so the low bits spread them.
        let index = usize::try_from(key.xid.0).unwrap_or_default() % SHARDS;
        self.shards.get(index).unwrap_or(&self.shards[0])
    }

    /// Looks the call up, and marks it as in progress when it is new.
    pub(crate) fn begin(self: &Arc<Self>, key: DuplicateKey, now: Instant) -> Seen {
        let mut shard = self.shard(&key).lock();
        shard.forget_old(now);
        match shard.entries.get(&key) {
            Some(Some(reply)) => Seen::Done(reply.clone()),
            Some(None) => Seen::InProgress,
            None => {
                shard.entries.insert(key, None);
                Seen::New(Ticket { cache: Arc::clone(self), key, is_finished: false })
            }
        }
    }
}

impl Shard {
    fn forget_old(&mut self, now: Instant) {
        while let Some((since, _)) = self.done.front()
            && now.saturating_duration_since(*since) > limits::DUPLICATES_AGE
        {
            self.forget_oldest();
        }
    }

    fn forget_oldest(&mut self) {
        let Some((_, key)) = self.done.pop_front() else {
            return;
        };
        if let Some(Some(reply)) = self.entries.remove(&key) {
            self.bytes -= reply.len();
        }
    }

    fn keep(&mut self, key: DuplicateKey, reply: Bytes, now: Instant) {
        self.bytes += reply.len();
        self.entries.insert(key, Some(reply));
        self.done.push_back((now, key));
        while self.done.len() > SHARD_ENTRIES_MAX || self.bytes > SHARD_BYTES_MAX {
            self.forget_oldest();
        }
    }
}

impl Ticket {
    /// The call was run and this is its reply.
    pub(crate) fn finish(mut self, reply: Bytes, now: Instant) {
        self.is_finished = true;
        self.cache.shard(&self.key).lock().keep(self.key, reply, now);
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.is_finished {
            self.cache.shard(&self.key).lock().entries.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;
    use std::time::Duration;

    fn key(cache: &DuplicateCache, xid: u32, arguments: &[u8]) -> DuplicateKey {
        let (client, procedure) = (IpAddr::V4(Ipv4Addr::LOCALHOST), NfsProcedure::Remove);
        let arguments = cache.arguments(arguments);
        DuplicateKey::new(client, Claim::Nobody, Xid(xid), procedure, arguments, None)
    }

    #[test]
    fn another_process_has_another_key() {
        let [one, two] = [DuplicateCache::new(), DuplicateCache::new()];
        assert_eq!(key(&one, 1, b"a"), key(&one, 1, b"a"));
        assert_ne!(one.arguments(b"a"), two.arguments(b"a"));
        assert_ne!(one.arguments(b"a"), one.arguments(b"b"));
    }

    fn finish(cache: &Arc<DuplicateCache>, key: DuplicateKey, reply: Bytes, now: Instant) {
        match cache.begin(key, now) {
            Seen::New(ticket) => ticket.finish(reply, now),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_call_is_run_once_and_its_reply_sent_again() {
        let (cache, now) = (DuplicateCache::new(), Instant::now());
        let Seen::New(ticket) = cache.begin(key(&cache, 1, b"a"), now) else { panic!("not new") };
        assert!(matches!(cache.begin(key(&cache, 1, b"a"), now), Seen::InProgress));
        ticket.finish(Bytes::from_static(b"reply"), now);
        for _ in 0..2 {
            let Seen::Done(reply) = cache.begin(key(&cache, 1, b"a"), now) else {
                panic!("not done")
            };
            assert_eq!(reply, "reply");
        }
    }

    #[test]
    fn calls_that_differ_in_anything_are_not_the_same() {
        let (cache, now) = (DuplicateCache::new(), Instant::now());
        let first = key(&cache, 1, b"a");
        finish(&cache, first, Bytes::new(), now);
        let others = [
            key(&cache, 1, b"b"),
            key(&cache, 1, b"aa"),
            key(&cache, 2, b"a"),
            DuplicateKey { client: "127.0.0.2".parse().unwrap(), ..first },
            DuplicateKey { procedure: NfsProcedure::RemoveDirectory, ..first },
            DuplicateKey { claim: Claim::User(crate::auth::Credentials::new(1, 1, &[])), ..first },
        ];
        for other in others {
            assert!(matches!(cache.begin(other, now), Seen::New(_)), "{other:?}");
        }
    }

    #[test]
    fn a_call_that_was_not_run_is_forgotten() {
        let (cache, now) = (DuplicateCache::new(), Instant::now());
        drop(cache.begin(key(&cache, 1, b"a"), now));
        assert!(matches!(cache.begin(key(&cache, 1, b"a"), now), Seen::New(_)));
    }

    #[test]
    fn replies_are_forgotten_with_age() {
        let (cache, now) = (DuplicateCache::new(), Instant::now());
        finish(&cache, key(&cache, 1, b"a"), Bytes::new(), now);
        let later = now + limits::DUPLICATES_AGE;
        assert!(matches!(cache.begin(key(&cache, 1, b"a"), later), Seen::Done(_)));
        let too_late = later + Duration::from_secs(1);
        assert!(matches!(cache.begin(key(&cache, 1, b"a"), too_late), Seen::New(_)));
    }

    #[test]
    fn the_oldest_go_when_there_are_too_many_or_they_are_too_large() {
        let (cache, now) = (DuplicateCache::new(), Instant::now());
        let xid = |call: usize| u32::try_from(call * SHARDS).unwrap();
        for call in 0..=SHARD_ENTRIES_MAX {
            finish(&cache, key(&cache, xid(call), b""), Bytes::new(), now);
        }
        assert!(matches!(cache.begin(key(&cache, xid(1), b""), now), Seen::Done(_)));
        assert!(matches!(cache.begin(key(&cache, xid(0), b""), now), Seen::New(_)));

        let cache = DuplicateCache::new();
        let reply = Bytes::from(vec![0; SHARD_BYTES_MAX / 2]);
        for call in 0..3 {
            finish(&cache, key(&cache, xid(call), b""), reply.clone(), now);
        }
        assert!(matches!(cache.begin(key(&cache, xid(0), b""), now), Seen::New(_)));
        assert!(matches!(cache.begin(key(&cache, xid(2), b""), now), Seen::Done(_)));
    }
}
