//! Whether the appliance is far: then more is fetched at once.
//!
//! A file system asks for one block at a time where it looks for names and attributes, and each that the worker does not
//! hold is a call. Where the appliance is far, fetching what lies beside it takes little longer than it alone, and saves
//! calls (`beside.rs`, `maps.rs`). Where it is near, nothing more is fetched.
//!
//! ```text
//! times of calls   | 16 of them: the shortest | 16: the shortest | 7 so far |
//!                                 '-------------- the shorter counts; at first that of 4 calls
//! ```
//! Only calls count that were alone on their connection and had a short answer (`rpc.rs`), and of these the shortest: what
//! waits behind others says nothing of the way. A near appliance whose disk takes as long for each of them counts as far.

use std::time::Duration;

use parking_lot::Mutex;

/// Calls of which the shortest counts.
const CALLS: u32 = 16;

/// So many have to be made before anything is known. A worker that has just started makes few calls by themselves, and what is
/// thought to be far by mistake costs little until the next call tells otherwise.
const FIRST_CALLS: u32 = 4;

/// A call that takes less is one in the same data centre, or on the same machine. At 1 Gbit/s 128 KiB are transferred in
/// that time.
const FAR: Duration = Duration::from_millis(1);

/// What is fetched at once where the appliance is far. At 1 Gbit/s it takes half as long as the shortest call there. It is as
/// much as the appliance reads from its memory without another thread.
pub(crate) const FAR_BYTES: u64 = 64 << 10;

/// A call that takes as long is one to another site, or to a slow disk.
const FARTHER: Duration = Duration::from_millis(4);

/// What is fetched at once there, again in half the time of the shortest call at 1 Gbit/s. The appliance reads as much on another
/// thread, past its cache of blocks.
pub(crate) const FARTHER_BYTES: u64 = 256 << 10;

/// The times of calls.
#[derive(Debug, Default)]
pub(crate) struct Distance(Mutex<Times>);

#[derive(Debug, Default)]
struct Times {
    /// The shortest of the last [`CALLS`]; `None` if there were not as many.
    before: Option<Duration>,
    /// The shortest since.
    now: Option<Duration>,
    count: u32,
}

impl Distance {
    /// Takes note of how long a call took.
    pub(crate) fn note(&self, elapsed: Duration) {
        let mut times = self.0.lock();
        let shortest = times.now.map_or(elapsed, |now| now.min(elapsed));
        *times = match times.count + 1 {
            CALLS => Times { before: Some(shortest), now: None, count: 0 },
            count => Times { now: Some(shortest), count, ..*times },
        };
    }

    /// Whether the appliance is far, as far as that is known.
    pub(crate) fn is_far(&self) -> bool {
        self.bytes_at_once().is_some()
    }

    /// What is to be fetched at once, if the appliance is far.
    pub(crate) fn bytes_at_once(&self) -> Option<u64> {
        let times = self.0.lock();
        let shortest = times.now.into_iter().chain(times.before).min();
        let is_known = times.before.is_some() || times.count >= FIRST_CALLS;
        let shortest = shortest.filter(|shortest| is_known && *shortest >= FAR)?;
        Some(if shortest >= FARTHER { FARTHER_BYTES } else { FAR_BYTES })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    fn is_far(calls: impl IntoIterator<Item = u64>) -> bool {
        let distance = Distance::default();
        calls.into_iter().for_each(|micros| distance.note(Duration::from_micros(micros)));
        distance.is_far()
    }

    /// One that is far.
    pub(crate) fn far() -> Distance {
        let distance = Distance::default();
        (0..CALLS).for_each(|_| distance.note(FAR));
        distance
    }

    const ALL: usize = CALLS as usize;

    #[test]
    fn more_comes_at_once_the_farther_it_is() {
        let bytes_at_once = |micros: u64| {
            let distance = Distance::default();
            (0..CALLS).for_each(|_| distance.note(Duration::from_micros(micros)));
            distance.bytes_at_once()
        };
        assert_eq!(bytes_at_once(999), None);
        assert_eq!((bytes_at_once(1000), bytes_at_once(3999)), (Some(FAR_BYTES), Some(FAR_BYTES)));
        assert_eq!(bytes_at_once(4000), Some(FARTHER_BYTES));
    }

    #[test]
    fn nothing_is_known_before_so_many_calls() {
        let distance = Distance::default();
        let known_after = (1_u32..).take_while(|_| {
            distance.note(Duration::from_micros(5000));
            !distance.is_far()
        });
        assert_eq!(known_after.last(), Some(FIRST_CALLS - 1));
        assert!((0..3 * CALLS).all(|_| {
            distance.note(Duration::from_micros(5000));
            distance.is_far()
        }));
        assert!(far().is_far());
        assert!(!is_far([999; ALL]));
    }

    #[test]
    fn the_shortest_of_the_last_calls_counts() {
        // Near, with a moment in which all took long.
        assert!(!is_far([vec![9000; ALL - 1], vec![100], vec![9000; ALL - 1]].concat()));
        // Near, and far from then on.
        assert!(is_far([vec![100; ALL], vec![5000; ALL]].concat()));
        // The other way one call tells.
        assert!(!is_far([vec![5000; ALL], vec![100]].concat()));
    }
}
