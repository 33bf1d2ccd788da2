//! The budget of calls in flight: bytes that requests and replies may hold, per connection
//! and in all.
//!
//! ```text
//!              all connections          one connection
//! changes      half of the budget       CONNECTION_CHANGE_BYTES_MAX
//! the rest     the other half           CONNECTION_READ_BYTES_MAX
//! ```
//! A call is charged before it is run and the charge goes with it until its reply is written
//! to the socket. Two halves, so that WRITEs that wait for a stalled disk leave reads and
//! metadata their own. Who finds the budget used up waits, without reading his socket: the
//! client then feels it as a slow network, never as an error.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::{Semaphore, SemaphorePermit};

use crate::limits;
use crate::metrics::NfsMetrics;

/// Which half of the budget a call is charged to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// It changes something.
    Change,
    /// It does not.
    Read,
}

/// The two halves of a budget.
#[derive(Debug)]
struct Halves {
    change: Semaphore,
    read: Semaphore,
}

impl Halves {
    fn new(change_bytes: usize, read_bytes: usize) -> Self {
        Self { change: Semaphore::new(change_bytes), read: Semaphore::new(read_bytes) }
    }

    const fn of(&self, purpose: Purpose) -> &Semaphore {
        match purpose {
            Purpose::Change => &self.change,
            Purpose::Read => &self.read,
        }
    }
}

/// The budget of all connections.
#[derive(Debug)]
pub(crate) struct Budget {
    halves: Halves,
    /// Calls that wait for what others hold.
    waiting: AtomicUsize,
    metrics: Arc<NfsMetrics>,
}

impl Budget {
    /// A budget of `bytes` in all.
    pub(crate) fn new(bytes: u64, metrics: Arc<NfsMetrics>) -> Arc<Self> {
        let half = usize::try_from(bytes / 2).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS);
        let waiting = AtomicUsize::new(0);
        Arc::new(Self { halves: Halves::new(half, half), waiting, metrics })
    }

    /// The budget of a new connection within it.
    pub(crate) fn connection(self: &Arc<Self>) -> ConnectionBudget {
        let halves =
            Halves::new(limits::CONNECTION_CHANGE_BYTES_MAX, limits::CONNECTION_READ_BYTES_MAX);
        let (waiting, all) = (AtomicUsize::new(0), Arc::clone(self));
        ConnectionBudget(Arc::new(Shares { halves, waiting, all }))
    }
}

/// The budget of one connection.
#[derive(Debug)]
pub(crate) struct ConnectionBudget(Arc<Shares>);

/// What a call is charged to.
#[derive(Debug)]
struct Shares {
    halves: Halves,
    /// Of [`Budget::waiting`], those of this connection.
    waiting: AtomicUsize,
    all: Arc<Budget>,
}

/// A call that waits for what others hold.
struct Waiting<'a>(&'a Shares);

impl<'a> Waiting<'a> {
    fn new(shares: &'a Shares) -> Self {
        shares.waiting.fetch_add(1, Ordering::Relaxed);
        shares.all.waiting.fetch_add(1, Ordering::Relaxed);
        Self(shares)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.all.waiting.fetch_sub(1, Ordering::Relaxed);
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Bytes charged to a call; given back when dropped.
#[derive(Debug)]
pub(crate) struct Charge {
    permits: u32,
    purpose: Purpose,
    shares: Arc<Shares>,
}

impl Charge {
    /// The charge that the two permits become.
    fn new(
        shares: &Arc<Shares>,
        purpose: Purpose,
        permits: u32,
        [connection, all]: [SemaphorePermit<'_>; 2],
    ) -> Self {
        connection.forget();
        all.forget();
        let metrics = &shares.all.metrics;
        metrics.bytes_in_flight.add(u64::from(permits));
        metrics.calls_in_flight.add(1);
        Self { permits, purpose, shares: Arc::clone(shares) }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let Shares { halves, all, .. } = &*self.shares;
        all.metrics.bytes_in_flight.subtract(u64::from(self.permits));
        all.metrics.calls_in_flight.subtract(1);
        let permits = usize::try_from(self.permits).unwrap_or_default();
        halves.of(self.purpose).add_permits(permits);
        all.halves.of(self.purpose).add_permits(permits);
    }
}

impl ConnectionBudget {
    /// Waits until `bytes` (raised to [`limits::CALL_BYTES_MIN`]) are free for the purpose.
    pub(crate) async fn charge(&self, purpose: Purpose, bytes: usize) -> Charge {
        let (shares, permits) = (&self.0, permits(bytes));
        // First the own share: who has used that up must not queue for the common one.
        let connection = acquire(shares.halves.of(purpose), permits).await;
        let common = shares.all.halves.of(purpose);
        let all = match common.try_acquire_many(permits) {
            Ok(all) => all,
            Err(_) => {
                let _waiting = Waiting::new(shares);
                acquire(common, permits).await
            }
        };
        Charge::new(shares, purpose, permits, [connection, all])
    }

    /// Whether calls of other connections wait for memory: who holds some is to be quick.
    pub(crate) fn is_wanted(&self) -> bool {
        let own = self.0.waiting.load(Ordering::Relaxed);
        self.0.all.waiting.load(Ordering::Relaxed) > own
    }

    /// The same if so many are free now.
    pub(crate) fn try_charge(&self, purpose: Purpose, bytes: usize) -> Option<Charge> {
        let (shares, permits) = (&self.0, permits(bytes));
        let connection = shares.halves.of(purpose).try_acquire_many(permits).ok()?;
        let all = shares.all.halves.of(purpose).try_acquire_many(permits).ok()?;
        Some(Charge::new(shares, purpose, permits, [connection, all]))
    }
}

fn permits(bytes: usize) -> u32 {
    u32::try_from(bytes.max(limits::CALL_BYTES_MIN)).unwrap_or(u32::MAX)
}

async fn acquire(semaphore: &Semaphore, permits: u32) -> SemaphorePermit<'_> {
    match semaphore.acquire_many(permits).await {
        Ok(permit) => permit,
        Err(_) => unreachable!("the semaphores of the budget are never closed"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::time::timeout;

    const SOON: Duration = Duration::from_millis(20);

    fn budget() -> (Arc<Budget>, Arc<NfsMetrics>) {
        let metrics = Arc::new(NfsMetrics::new());
        (Budget::new(limits::IN_FLIGHT_BYTES_MIN, Arc::clone(&metrics)), metrics)
    }

    #[tokio::test]
    async fn a_used_up_budget_makes_calls_wait_until_one_ends() {
        let (budget, metrics) = budget();
        let (one, other) = (budget.connection(), budget.connection());
        let half = usize::try_from(limits::IN_FLIGHT_BYTES_MIN / 2).unwrap();
        let first = one.charge(Purpose::Change, half).await;
        assert!(timeout(SOON, other.charge(Purpose::Change, 1)).await.is_err());
        drop(first);
        assert!(timeout(SOON, other.charge(Purpose::Change, 1)).await.is_ok());
        let snapshot = metrics.snapshot();
        assert_eq!((snapshot.bytes_in_flight, snapshot.calls_in_flight), (0, 0));
    }

    #[tokio::test]
    async fn who_waits_is_seen_by_the_others() {
        let (budget, _) = budget();
        let (one, other) = (budget.connection(), budget.connection());
        let half = usize::try_from(limits::IN_FLIGHT_BYTES_MIN / 2).unwrap();
        let first = one.charge(Purpose::Change, half).await;
        assert!(!one.is_wanted() && !other.is_wanted());
        let waits = tokio::spawn(async move {
            let _charge = other.charge(Purpose::Change, 1).await;
            other
        });
        while !one.is_wanted() {
            tokio::task::yield_now().await;
        }
        drop(first);
        let other = waits.await.unwrap();
        assert!(!one.is_wanted() && !other.is_wanted());
        // One that waits for itself presses nobody.
        let _all = one.charge(Purpose::Change, half).await;
        assert!(timeout(SOON, one.charge(Purpose::Change, 1)).await.is_err());
        let again = one.charge(Purpose::Change, 1);
        tokio::pin!(again);
        assert!(timeout(SOON, &mut again).await.is_err());
        assert!(!one.is_wanted() && other.is_wanted());
    }

    #[tokio::test]
    async fn waiting_changes_leave_reads_their_half() {
        let (budget, metrics) = budget();
        let connection = budget.connection();
        let half = usize::try_from(limits::IN_FLIGHT_BYTES_MIN / 2).unwrap();
        let _stalled = connection.charge(Purpose::Change, half).await;
        let read = timeout(SOON, connection.charge(Purpose::Read, 1)).await;
        assert!(read.is_ok());
        assert_eq!(metrics.snapshot().calls_in_flight, 2);
    }

    #[tokio::test]
    async fn the_smallest_charge_bounds_the_calls_of_a_connection() {
        let metrics = Arc::new(NfsMetrics::new());
        let connection = Budget::new(u64::MAX, metrics).connection();
        let mut charges = Vec::new();
        while let Ok(charge) = timeout(SOON, connection.charge(Purpose::Read, 0)).await {
            charges.push(charge);
        }
        assert_eq!(charges.len(), limits::CONNECTION_READ_BYTES_MAX / limits::CALL_BYTES_MIN);
        assert!(connection.try_charge(Purpose::Read, 0).is_none());
        charges.pop();
        assert!(connection.try_charge(Purpose::Read, 0).is_some());
    }
}
