//! Counters of the front end, and plain numbers of them for the server's metrics page.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::procedure::Procedure;

/// Upper bounds of the latency buckets in microseconds: from an answer out of memory to a
/// stalled disk, about 2.5 times apart. A last bucket holds what is slower.
pub const LATENCY_BOUNDS_MICROSECONDS: [u64; 16] = [
    10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 500_000,
    2_000_000, 10_000_000,
];

const BUCKETS: usize = LATENCY_BOUNDS_MICROSECONDS.len() + 1;

/// Counters of the front end, since it was made.
#[derive(Debug)]
pub struct NfsMetrics {
    procedures: [ProcedureMetrics; Procedure::COUNT],
    pub(crate) bytes_read: Counter,
    pub(crate) bytes_written: Counter,
    pub(crate) connections_accepted: Counter,
    pub(crate) connections_open: Gauge,
    pub(crate) connections_dropped: Counter,
    pub(crate) tls_connections: Counter,
    pub(crate) tls_handshakes_failed: Counter,
    pub(crate) calls_in_flight: Gauge,
    pub(crate) bytes_in_flight: Gauge,
    pub(crate) calls_refused: Counter,
    pub(crate) duplicates_replayed: Counter,
    pub(crate) duplicates_dropped: Counter,
    pub(crate) panics: Counter,
}

#[derive(Debug, Default)]
struct ProcedureMetrics {
    calls: Counter,
    errors: Counter,
    latency_sum_microseconds: Counter,
    latency: [Counter; BUCKETS],
}

/// A number that grows.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    /// Adds to it.
    pub(crate) fn add(&self, amount: u64) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A number that grows and shrinks.
#[derive(Debug, Default)]
pub(crate) struct Gauge(AtomicU64);

impl Gauge {
    /// Adds to it.
    pub(crate) fn add(&self, amount: u64) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }

    /// Takes back what was added.
    pub(crate) fn subtract(&self, amount: u64) {
        self.0.fetch_sub(amount, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Default for NfsMetrics {
    fn default() -> Self {
        Self {
            procedures: std::array::from_fn(|_| ProcedureMetrics::default()),
            bytes_read: Counter::default(),
            bytes_written: Counter::default(),
            connections_accepted: Counter::default(),
            connections_open: Gauge::default(),
            connections_dropped: Counter::default(),
            tls_connections: Counter::default(),
            tls_handshakes_failed: Counter::default(),
            calls_in_flight: Gauge::default(),
            bytes_in_flight: Gauge::default(),
            calls_refused: Counter::default(),
            duplicates_replayed: Counter::default(),
            duplicates_dropped: Counter::default(),
            panics: Counter::default(),
        }
    }
}

impl NfsMetrics {
    /// Counters at zero.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Counts a call that was answered after `latency`.
    pub(crate) fn record(&self, procedure: Procedure, latency: Duration, is_error: bool) {
        let Some(metrics) = self.procedures.get(procedure.index()) else {
            return;
        };
        metrics.calls.add(1);
        if is_error {
            metrics.errors.add(1);
        }
        let microseconds = u64::try_from(latency.as_micros()).unwrap_or(u64::MAX);
        metrics.latency_sum_microseconds.add(microseconds);
        let bucket = LATENCY_BOUNDS_MICROSECONDS.partition_point(|&bound| bound < microseconds);
        if let Some(bucket) = metrics.latency.get(bucket) {
            bucket.add(1);
        }
    }

    /// The numbers as of now; each is exact, but they are not of one moment.
    #[must_use]
    pub fn snapshot(&self) -> NfsMetricsSnapshot {
        NfsMetricsSnapshot {
            procedures: Procedure::all()
                .zip(&self.procedures)
                .map(|(procedure, metrics)| metrics.snapshot(procedure))
                .collect(),
            bytes_read: self.bytes_read.get(),
            bytes_written: self.bytes_written.get(),
            connections_accepted: self.connections_accepted.get(),
            connections_open: self.connections_open.get(),
            connections_dropped: self.connections_dropped.get(),
            tls_connections: self.tls_connections.get(),
            tls_handshakes_failed: self.tls_handshakes_failed.get(),
            calls_in_flight: self.calls_in_flight.get(),
            bytes_in_flight: self.bytes_in_flight.get(),
            calls_refused: self.calls_refused.get(),
            duplicates_replayed: self.duplicates_replayed.get(),
            duplicates_dropped: self.duplicates_dropped.get(),
            panics: self.panics.get(),
        }
    }
}

impl ProcedureMetrics {
    fn snapshot(&self, procedure: Procedure) -> ProcedureSnapshot {
        ProcedureSnapshot {
            program: procedure.program(),
            procedure: procedure.name(),
            calls: self.calls.get(),
            errors: self.errors.get(),
            latency_sum_microseconds: self.latency_sum_microseconds.get(),
            latency_counts: std::array::from_fn(|bucket| {
                self.latency.get(bucket).map_or(0, Counter::get)
            }),
        }
    }
}

/// Plain numbers of [`NfsMetrics`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NfsMetricsSnapshot {
    /// One for each procedure of the three programs.
    pub procedures: Vec<ProcedureSnapshot>,
    /// Payload bytes of READ replies.
    pub bytes_read: u64,
    /// Payload bytes of WRITE calls that succeeded.
    pub bytes_written: u64,
    /// Connections accepted.
    pub connections_accepted: u64,
    /// Connections open now.
    pub connections_open: u64,
    /// Connections that the server gave up: broken records, or a client that takes no replies.
    pub connections_dropped: u64,
    /// Connections whose client asked for TLS, and got it.
    pub tls_connections: u64,
    /// TLS handshakes that failed, or did not end in time.
    pub tls_handshakes_failed: u64,
    /// Calls received and not yet answered, now.
    pub calls_in_flight: u64,
    /// Bytes that those calls are charged, now.
    pub bytes_in_flight: u64,
    /// Calls refused before they ran: unknown programs and procedures, credentials, addresses, no certificate.
    pub calls_refused: u64,
    /// Resent calls that were answered with the first reply.
    pub duplicates_replayed: u64,
    /// Resent calls that were dropped, the first being still at work.
    pub duplicates_dropped: u64,
    /// Calls that ended in a panic, and were answered SERVERFAULT.
    pub panics: u64,
}

/// Plain numbers of one procedure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcedureSnapshot {
    /// `nfs`, `mount` or `portmap`.
    pub program: &'static str,
    /// Its name in the RFC, such as `GETATTR`.
    pub procedure: &'static str,
    /// Calls answered.
    pub calls: u64,
    /// Those of them with another status than success.
    pub errors: u64,
    /// Sum of the times from a call's arrival to its reply being ready to be sent.
    pub latency_sum_microseconds: u64,
    /// Calls of each bucket (not cumulative): those above the bound before it and up to its
    /// own of [`LATENCY_BOUNDS_MICROSECONDS`]; the last holds what is slower than all.
    pub latency_counts: [u64; LATENCY_BOUNDS_MICROSECONDS.len() + 1],
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::procedure::NfsProcedure;

    #[test]
    fn calls_fall_into_their_buckets() {
        let metrics = NfsMetrics::new();
        let read = Procedure::Nfs(NfsProcedure::Read);
        for microseconds in [0, 10, 11, 10_000_000, 10_000_001, u64::MAX / 2] {
            metrics.record(read, Duration::from_micros(microseconds), microseconds == 11);
        }
        let snapshot = metrics.snapshot();
        assert_eq!(snapshot.procedures.len(), Procedure::COUNT);
        let read = snapshot.procedures.iter().find(|one| one.procedure == "READ").unwrap();
        assert_eq!((read.program, read.calls, read.errors), ("nfs", 6, 1));
        let mut expected = [0; LATENCY_BOUNDS_MICROSECONDS.len() + 1];
        (expected[0], expected[1], expected[15], expected[16]) = (2, 1, 1, 2);
        assert_eq!(read.latency_counts, expected);
    }
}
