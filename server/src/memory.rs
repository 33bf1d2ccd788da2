//! How the memory of the process is shared out.
//!
//! ```text
//! | process |   REST in flight    |    NFS in flight    | caches and buffers of the store |
//! |  64 MiB | 1/16, 24 to 128 MiB | 1/16, 16 to 256 MiB |            the rest             |
//! ```
//!
//! Invariant: the four shares add up to the budget.

use slackwater_api::ApiOptions;
use slackwater_blockstore::Options;

/// What the process takes whatever it does: code, runtime, stacks of threads, read buffers of
/// connections (16 MiB for the default number of them; in TLS up to three times as much), sessions, the replies kept for calls
/// that are sent again, and what the allocator keeps back.
pub const PROCESS_BYTES: u64 = 64 << 20;

/// Smallest share of REST: six transfers of data at once, and their requests' bodies.
pub const API_BYTES_MIN: u64 = 24 << 20;

/// Largest share of REST: bulk data goes over NFS, and more than 32 transfers at once gain
/// nothing on one disk.
pub const API_BYTES_MAX: u64 = 128 << 20;

/// Smallest share of NFS: sixteen of the largest calls (1 MiB) at once, enough that one
/// client's default queue keeps moving.
pub const NFS_BYTES_MIN: u64 = 16 << 20;

/// Largest share of NFS: at 1 GB/s it is a quarter of a second of data under way, past which
/// a longer queue adds waiting and no speed.
pub const NFS_BYTES_MAX: u64 = 256 << 20;

/// The shares of both servers are the budget divided by this, within their bounds: most of
/// the memory serves better as a cache.
const DIVISOR: u64 = 16;

/// The smallest budget that the server starts with.
pub const BUDGET_BYTES_MIN: u64 =
    PROCESS_BYTES + API_BYTES_MIN + NFS_BYTES_MIN + Options::MEMORY_BYTES_MIN;

// At the smallest budget both servers take their minimum, so that the store gets its own.
const _: () = assert!(BUDGET_BYTES_MIN / DIVISOR <= NFS_BYTES_MIN);
const _: () = assert!(BUDGET_BYTES_MIN / DIVISOR <= API_BYTES_MIN);
const _: () = assert!(NFS_BYTES_MIN <= NFS_BYTES_MAX);
const _: () = assert!(API_BYTES_MIN <= API_BYTES_MAX);

/// The shares of one budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Transfers and bodies of REST in flight.
    pub api_bytes: u64,
    /// Calls and replies of NFS in flight.
    pub nfs_bytes: u64,
    /// Caches and buffers of the store.
    pub store_bytes: u64,
}

impl MemoryPlan {
    /// Shares out `budget_bytes`; `None` under [`BUDGET_BYTES_MIN`].
    #[must_use]
    pub fn new(budget_bytes: u64) -> Option<Self> {
        if budget_bytes < BUDGET_BYTES_MIN {
            return None;
        }
        let api_bytes = (budget_bytes / DIVISOR).clamp(API_BYTES_MIN, API_BYTES_MAX);
        let nfs_bytes = (budget_bytes / DIVISOR).clamp(NFS_BYTES_MIN, NFS_BYTES_MAX);
        Some(Self {
            api_bytes,
            nfs_bytes,
            store_bytes: budget_bytes - PROCESS_BYTES - api_bytes - nfs_bytes,
        })
    }

    /// Bytes of bodies of REST requests: what transfers of data leave.
    #[must_use]
    pub fn api_bodies_bytes(&self) -> usize {
        usize::try_from(self.api_bytes - self.api_bytes / 4 * 3).unwrap_or(usize::MAX)
    }

    /// Transfers of data over REST that fit into three quarters of its share; bodies of
    /// other requests have the rest.
    #[must_use]
    pub fn api_data_streams(&self) -> usize {
        let for_streams = self.api_bytes / 4 * 3;
        usize::try_from(for_streams)
            .map_or(usize::MAX, |bytes| bytes / ApiOptions::STREAM_BYTES_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_add_up_at_every_size() {
        for budget_bytes in
            [BUDGET_BYTES_MIN, BUDGET_BYTES_MIN + 1, 512 << 20, 1 << 30, 3 << 30, 1 << 40]
        {
            let plan = MemoryPlan::new(budget_bytes).unwrap();
            let sum = PROCESS_BYTES + plan.api_bytes + plan.nfs_bytes + plan.store_bytes;
            assert_eq!(sum, budget_bytes);
            assert!(plan.store_bytes >= Options::MEMORY_BYTES_MIN);
            assert!((NFS_BYTES_MIN..=NFS_BYTES_MAX).contains(&plan.nfs_bytes));
            assert!((API_BYTES_MIN..=API_BYTES_MAX).contains(&plan.api_bytes));
            assert!((6..=32).contains(&plan.api_data_streams()));
            assert!((6 << 20..=32 << 20).contains(&plan.api_bodies_bytes()));
        }
        assert_eq!(MemoryPlan::new(BUDGET_BYTES_MIN - 1), None);
    }
}
