//! The numbers of NFS: calls, errors and latency of each procedure, and what is under way.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use slackwater_nfs::{
    LATENCY_BOUNDS_MICROSECONDS, NfsMetrics, NfsMetricsSnapshot, ProcedureSnapshot,
};

use super::plain::{counter, encode, gauge};

/// What every name begins with.
const PREFIX: &str = "slackwater_nfs_";

/// Reads the counters of NFS for each page.
#[derive(Debug)]
pub(super) struct NfsCollector {
    metrics: Arc<NfsMetrics>,
}

impl NfsCollector {
    pub(super) const fn new(metrics: Arc<NfsMetrics>) -> Self {
        Self { metrics }
    }
}

impl Collector for NfsCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        encode_snapshot(&mut encoder, self.metrics.snapshot())
    }
}

/// Writes all of `snapshot`. It is taken apart without `..`, so that a number which it gains
/// does not go unnoticed.
fn encode_snapshot(
    encoder: &mut DescriptorEncoder<'_>,
    snapshot: NfsMetricsSnapshot,
) -> fmt::Result {
    let NfsMetricsSnapshot {
        procedures,
        bytes_read,
        bytes_written,
        connections_accepted,
        connections_open,
        connections_dropped,
        tls_connections,
        tls_handshakes_failed,
        calls_in_flight,
        bytes_in_flight,
        calls_refused,
        duplicates_replayed,
        duplicates_dropped,
        panics,
    } = snapshot;
    let numbers = [
        counter("read_bytes", bytes_read, "Payload of READ replies"),
        counter("written_bytes", bytes_written, "Payload of WRITE calls that succeeded"),
        counter("connections_accepted", connections_accepted, "Connections accepted"),
        counter("connections_dropped", connections_dropped, "Connections that the server gave up"),
        counter("tls_connections", tls_connections, "Connections in TLS accepted"),
        counter("tls_handshakes_failed", tls_handshakes_failed, "TLS handshakes that failed"),
        counter("calls_refused", calls_refused, "Calls refused before they ran"),
        counter("duplicates_replayed", duplicates_replayed, "Resent calls answered from memory"),
        counter("duplicates_dropped", duplicates_dropped, "Resent calls still at work, dropped"),
        counter("panics", panics, "Calls that ended in a panic"),
        gauge("connections", connections_open, "Connections open"),
        gauge("calls_in_flight", calls_in_flight, "Calls received and not yet answered"),
        gauge("in_flight_bytes", bytes_in_flight, "Memory charged to calls in flight"),
    ];
    encode(encoder, PREFIX, &numbers)?;
    encode_counts(encoder, "calls", "Calls answered", &procedures, |one| one.calls)?;
    let help = "Calls answered with another status than success";
    encode_counts(encoder, "errors", help, &procedures, |one| one.errors)?;
    encode_latency(encoder, &procedures)
}

/// The labels of a procedure.
fn labels(one: &ProcedureSnapshot) -> [(&'static str, &'static str); 2] {
    [("program", one.program), ("procedure", one.procedure)]
}

/// Writes one count of each procedure.
fn encode_counts(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    procedures: &[ProcedureSnapshot],
    count: impl Fn(&ProcedureSnapshot) -> u64,
) -> fmt::Result {
    let (name, help) = (format!("{PREFIX}{name}"), format!("{help}."));
    let mut family = encoder.encode_descriptor(&name, &help, None, MetricType::Counter)?;
    for one in procedures {
        ConstCounter::new(count(one)).encode(family.encode_family(&labels(one))?)?;
    }
    Ok(())
}

/// Writes the latency of each procedure that was called: the others would be hundreds of
/// lines of zeros.
fn encode_latency(
    encoder: &mut DescriptorEncoder<'_>,
    procedures: &[ProcedureSnapshot],
) -> fmt::Result {
    let name = format!("{PREFIX}latency_seconds");
    let help = "Time from a call's arrival to its reply being ready.";
    let mut family = encoder.encode_descriptor(&name, help, None, MetricType::Histogram)?;
    for one in procedures.iter().filter(|one| one.calls > 0) {
        let bounds = LATENCY_BOUNDS_MICROSECONDS.iter().map(|&bound| seconds(bound));
        let buckets: Vec<_> = bounds.chain([f64::INFINITY]).zip(one.latency_counts).collect();
        // Not `calls`: the counters are not of one moment, and a histogram's count must be
        // the sum of its buckets.
        let count = one.latency_counts.iter().sum();
        let sum_seconds = seconds(one.latency_sum_microseconds);
        family.encode_family(&labels(one))?.encode_histogram::<NoLabelSet>(
            sum_seconds,
            count,
            &buckets,
            None,
        )?;
    }
    Ok(())
}

/// Microseconds in the unit that Prometheus asks for.
fn seconds(microseconds: u64) -> f64 {
    Duration::from_micros(microseconds).as_secs_f64()
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode_registry;
    use prometheus_client::registry::Registry;

    use super::*;

    fn procedure(name: &'static str, calls: u64) -> ProcedureSnapshot {
        let mut latency_counts = [0; LATENCY_BOUNDS_MICROSECONDS.len() + 1];
        latency_counts[0] = calls;
        if calls > 0 {
            latency_counts[LATENCY_BOUNDS_MICROSECONDS.len()] = 1;
        }
        ProcedureSnapshot {
            program: "nfs",
            procedure: name,
            calls,
            errors: calls / 2,
            latency_sum_microseconds: calls * 250_000,
            latency_counts,
        }
    }

    #[derive(Debug)]
    struct Fixed(NfsMetricsSnapshot);

    impl Collector for Fixed {
        fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
            encode_snapshot(&mut encoder, self.0.clone())
        }
    }

    fn page() -> String {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(Fixed(NfsMetricsSnapshot {
            procedures: vec![procedure("READ", 6), procedure("LINK", 0)],
            bytes_read: 101,
            bytes_written: 102,
            connections_accepted: 103,
            connections_open: 104,
            connections_dropped: 105,
            calls_in_flight: 106,
            bytes_in_flight: 107,
            calls_refused: 108,
            duplicates_replayed: 109,
            duplicates_dropped: 110,
            panics: 111,
            tls_connections: 112,
            tls_handshakes_failed: 113,
        })));
        let mut page = String::new();
        encode_registry(&mut page, &registry).unwrap();
        page
    }

    #[test]
    fn every_number_is_on_the_page() {
        let page = page();
        for line in [
            "slackwater_nfs_read_bytes_total 101",
            "slackwater_nfs_written_bytes_total 102",
            "slackwater_nfs_connections_accepted_total 103",
            "slackwater_nfs_connections 104",
            "slackwater_nfs_connections_dropped_total 105",
            "slackwater_nfs_calls_in_flight 106",
            "slackwater_nfs_in_flight_bytes 107",
            "slackwater_nfs_calls_refused_total 108",
            "slackwater_nfs_duplicates_replayed_total 109",
            "slackwater_nfs_duplicates_dropped_total 110",
            "slackwater_nfs_panics_total 111",
            "slackwater_nfs_tls_connections_total 112",
            "slackwater_nfs_tls_handshakes_failed_total 113",
            "slackwater_nfs_calls_total{program=\"nfs\",procedure=\"READ\"} 6",
            "slackwater_nfs_calls_total{program=\"nfs\",procedure=\"LINK\"} 0",
            "slackwater_nfs_errors_total{program=\"nfs\",procedure=\"READ\"} 3",
        ] {
            assert!(page.lines().any(|found| found == line), "{line} is not in:\n{page}");
        }
    }

    #[test]
    fn latency_is_a_cumulative_histogram_in_seconds() {
        let page = page();
        let read = "program=\"nfs\",procedure=\"READ\"";
        let value = |name: &str, bound: &str| -> f64 {
            let name = format!("slackwater_nfs_latency_seconds_{name}{{");
            let line = page
                .lines()
                .filter(|line| line.starts_with(&name) && line.contains(read))
                .find(|line| line.contains(bound))
                .unwrap_or_else(|| panic!("{name} {bound} is not in:\n{page}"));
            line.rsplit(' ').next().unwrap().parse().unwrap()
        };
        let near = |got: f64, expected: f64| (got - expected).abs() < 1e-9;
        assert!(near(value("count", ""), 7.0));
        assert!(near(value("sum", ""), 1.5));
        assert!(near(value("bucket", "le=\"10.0\""), 6.0));
        assert!(near(value("bucket", "le=\"+Inf\""), 7.0));
        assert!(!page.contains("latency_seconds_count{program=\"nfs\",procedure=\"LINK\"}"));
    }
}
