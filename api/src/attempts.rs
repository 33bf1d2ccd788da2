//! How often an address may present a wrong token or password.
//!
//! ```text
//! failure:  debt of the address grows by one FAILURE_INTERVAL, and shrinks as time goes by
//! call:     refused unjudged (429) while the debt is above FAILURES_AT_ONCE intervals
//! ```
//!
//! Invariants: what an address may guess is bounded by [`FAILURES_AT_ONCE`] and then one guess
//! a [`FAILURE_INTERVAL`], over however many connections; the table has at most
//! [`ADDRESSES_MAX`] rows; an address without failures costs one look at an empty table.
//! Callers behind one address (a proxy, NAT) are judged together.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::error::ProblemCode;
use crate::failure::Failure;

/// Failures that are judged at once: a handful of clients that were all given the wrong
/// secret, and their users' second and third try.
const FAILURES_AT_ONCE: u32 = 32;

/// One more failure is judged each time this has passed. The shortest token that is let in
/// has 16 characters, and outlasts any number of guesses at this pace; so does any password
/// that is not among the first few that are tried.
const FAILURE_INTERVAL: Duration = Duration::from_secs(1);

/// Addresses that are remembered: 4,096 of 56 bytes or so.
const ADDRESSES_MAX: usize = 4096;

/// Bits of an IPv6 address that name its network: the rest is the client's own choice
/// (RFC 4291 section 2.5.4).
const IPV6_NETWORK_BITS: u32 = 64;

/// The addresses that failed lately, each with the time at which its debt is paid.
#[derive(Debug, Default)]
pub(crate) struct Attempts {
    paid_at: Mutex<HashMap<IpAddr, Instant>>,
}

/// The address that answers for `address`.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let bits = address.to_bits() >> (128 - IPV6_NETWORK_BITS) << (128 - IPV6_NETWORK_BITS);
            Ipv6Addr::from_bits(bits).into()
        }
        address @ IpAddr::V4(_) => address,
    }
}

impl Attempts {
    /// Refuses `peer` while it has failed too often.
    ///
    /// # Errors
    /// `too_many_attempts`, with the seconds after which the next one is judged.
    pub(crate) fn admit(&self, peer: IpAddr, now: Instant) -> Result<(), Failure> {
        let Some(paid_at) = self.paid_at.lock().get(&network(peer)).copied() else {
            return Ok(());
        };
        let limit = FAILURE_INTERVAL * FAILURES_AT_ONCE;
        let over = paid_at.saturating_duration_since(now).saturating_sub(limit);
        if over.is_zero() {
            return Ok(());
        }
        let wait_seconds = u32::try_from(over.as_secs()).unwrap_or(u32::MAX).saturating_add(1);
        let detail = format!(
            "this address has presented too many wrong tokens or passwords; the next one is \
             looked at in {wait_seconds} s"
        );
        Err(Failure::new(ProblemCode::TooManyAttempts, detail).with_retry_after(wait_seconds))
    }

    /// Notes a failure of `peer`.
    pub(crate) fn failed(&self, peer: IpAddr, now: Instant) {
        let mut paid_at = self.paid_at.lock();
        let peer = network(peer);
        if paid_at.len() >= ADDRESSES_MAX && !paid_at.contains_key(&peer) {
            make_room(&mut paid_at, now);
        }
        let debt = paid_at.entry(peer).or_insert(now);
        *debt = (*debt).max(now) + FAILURE_INTERVAL;
    }

    /// Takes back a failure that was noted ahead, as it was none.
    pub(crate) fn forgive(&self, peer: IpAddr) {
        if let Some(paid_at) = self.paid_at.lock().get_mut(&network(peer)) {
            *paid_at -= FAILURE_INTERVAL;
        }
    }
}

/// Forgets who owes nothing any more; if all owe, whoever owes least.
fn make_room(paid_at: &mut HashMap<IpAddr, Instant>, now: Instant) {
    paid_at.retain(|_, paid_at| *paid_at > now);
    if paid_at.len() >= ADDRESSES_MAX
        && let Some(least) = paid_at.iter().min_by_key(|(_, at)| **at).map(|(peer, _)| *peer)
    {
        paid_at.remove(&least);
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn address(number: u32) -> IpAddr {
        Ipv4Addr::from_bits(0x0a00_0000 + number).into()
    }

    #[test]
    fn guesses_are_bounded_at_once_and_over_time() {
        let (attempts, start) = (Attempts::default(), Instant::now());
        let mut judged = 0;
        let tries_at = |now: Instant, judged: &mut u32| {
            for _ in 0..1000 {
                if attempts.admit(address(1), now).is_ok() {
                    attempts.failed(address(1), now);
                    *judged += 1;
                }
            }
        };
        tries_at(start, &mut judged);
        // The debt must be above the limit, so that one more than the limit is judged.
        assert_eq!(judged, FAILURES_AT_ONCE + 1);
        for second in 1..=60 {
            tries_at(start + FAILURE_INTERVAL * second, &mut judged);
        }
        assert_eq!(judged, FAILURES_AT_ONCE + 1 + 60);
        assert!(attempts.admit(address(2), start).is_ok(), "another address is not held to it");
        let refused = attempts.admit(address(1), start + FAILURE_INTERVAL * 60).unwrap_err();
        assert_eq!(refused.code(), ProblemCode::TooManyAttempts);
        let later = start + FAILURE_INTERVAL * (61 + FAILURES_AT_ONCE);
        assert!(attempts.admit(address(1), later).is_ok());
    }

    #[test]
    fn a_success_that_was_charged_ahead_costs_nothing() {
        let (attempts, now) = (Attempts::default(), Instant::now());
        for _ in 0..1000 {
            attempts.admit(address(1), now).unwrap();
            attempts.failed(address(1), now);
            attempts.forgive(address(1));
        }
        assert!(attempts.admit(address(1), now).is_ok());
    }

    #[test]
    fn the_table_is_bounded_and_keeps_who_failed_most() {
        let (attempts, now) = (Attempts::default(), Instant::now());
        for _ in 0..=FAILURES_AT_ONCE {
            attempts.failed(address(0), now);
        }
        let count = u32::try_from(ADDRESSES_MAX).unwrap() * 2;
        (1..=count).for_each(|number| attempts.failed(address(number), now));
        assert_eq!(attempts.paid_at.lock().len(), ADDRESSES_MAX);
        assert!(attempts.admit(address(0), now).is_err(), "nobody is forgotten by being drowned");
        attempts.failed(address(count + 1), now + Duration::from_secs(3600));
        assert_eq!(attempts.paid_at.lock().len(), 1, "who owes nothing is forgotten");
    }

    #[test]
    fn an_address_is_its_network() {
        let same = |one: &str, other: &str| {
            network(one.parse().unwrap()) == network(other.parse().unwrap())
        };
        assert!(same("2001:db8:1:2::1", "2001:db8:1:2:ffff::9"));
        assert!(!same("2001:db8:1:2::1", "2001:db8:1:3::1"));
        assert!(same("::ffff:10.0.0.1", "10.0.0.1"));
        assert!(!same("10.0.0.1", "10.0.0.2"));
    }
}
