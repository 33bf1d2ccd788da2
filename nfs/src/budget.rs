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

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

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
    change: Arc<Semaphore>,
    read: Arc<Semaphore>,
}

impl Halves {
    fn new(change_bytes: usize, read_bytes: usize) -> Self {
        Self {
            change: Arc::new(Semaphore::new(change_bytes)),
            read: Arc::new(Semaphore::new(read_bytes)),
        }
    }

    const fn of(&self, purpose: Purpose) -> &Arc<Semaphore> {
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
    metrics: Arc<NfsMetrics>,
}

impl Budget {
    /// A budget of `bytes` in all.
    pub(crate) fn new(bytes: u64, metrics: Arc<NfsMetrics>) -> Arc<Self> {
        let half = usize::try_from(bytes / 2).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS);
        Arc::new(Self { halves: Halves::new(half, half), metrics })
    }

    /// The budget of a new connection within it.
    pub(crate) fn connection(self: &Arc<Self>) -> ConnectionBudget {
        let halves =
            Halves::new(limits::CONNECTION_CHANGE_BYTES_MAX, limits::CONNECTION_READ_BYTES_MAX);
        ConnectionBudget { halves, all: Arc::clone(self) }
    }
}

/// The budget of one connection.
#[derive(Debug)]
pub(crate) struct ConnectionBudget {
    halves: Halves,
    all: Arc<Budget>,
}

/// Bytes charged to a call; given back when dropped.
#[derive(Debug)]
pub(crate) struct Charge {
    bytes: u64,
    metrics: Arc<NfsMetrics>,
    _connection: OwnedSemaphorePermit,
    _all: OwnedSemaphorePermit,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.metrics.bytes_in_flight.subtract(self.bytes);
        self.metrics.calls_in_flight.subtract(1);
    }
}

impl ConnectionBudget {
    /// Waits until `bytes` (raised to [`limits::CALL_BYTES_MIN`]) are free for the purpose.
    pub(crate) async fn charge(&self, purpose: Purpose, bytes: usize) -> Charge {
        let bytes = bytes.max(limits::CALL_BYTES_MIN);
        let permits = u32::try_from(bytes).unwrap_or(u32::MAX);
        // First the own share: who has used that up must not queue for the common one.
        let connection = acquire(self.halves.of(purpose), permits).await;
        let all = acquire(self.all.halves.of(purpose), permits).await;
        let metrics = Arc::clone(&self.all.metrics);
        let bytes = u64::from(permits);
        metrics.bytes_in_flight.add(bytes);
        metrics.calls_in_flight.add(1);
        Charge { bytes, metrics, _connection: connection, _all: all }
    }
}

async fn acquire(semaphore: &Arc<Semaphore>, permits: u32) -> OwnedSemaphorePermit {
    if let Ok(permit) = Arc::clone(semaphore).try_acquire_many_owned(permits) {
        return permit;
    }
    match Arc::clone(semaphore).acquire_many_owned(permits).await {
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
        assert!(charges.len() < limits::REPLIES_MAX);
    }
}
