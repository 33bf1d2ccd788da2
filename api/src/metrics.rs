//! What the REST face counts about itself, and where the rest of `/metrics` comes from.

use std::fmt;
use std::time::Duration;

use axum::http::{Method, StatusCode};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::audit::AuditLog;

/// The last line of a page in OpenMetrics' text format.
const END: &str = "# EOF\n";

/// Upper bounds of the latency classes in seconds: from a call answered from memory to the
/// limit of a request.
const LATENCY_BOUNDS_SECONDS: [f64; 10] =
    [0.000_1, 0.000_3, 0.001, 0.003, 0.01, 0.03, 0.1, 1.0, 10.0, 30.0];

/// Gives the metrics of the other parts of the server.
pub trait MetricsSource: fmt::Debug + Send + Sync + 'static {
    /// Metrics in OpenMetrics' text format, with or without the closing `# EOF`. Must not
    /// block on the disk.
    fn render(&self) -> String;
}

/// One series: a route as it is mounted (never a concrete path, so that their number is
/// bounded), a method, a status.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Answered {
    method: &'static str,
    route: String,
    status: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Timed {
    method: &'static str,
    route: String,
}

/// Counts of the REST face.
#[derive(Debug)]
pub struct ApiMetrics {
    registry: Registry,
    requests: Family<Answered, Counter>,
    latencies: Family<Timed, Histogram, fn() -> Histogram>,
}

impl Default for ApiMetrics {
    fn default() -> Self {
        Self::new()
    }
}

impl ApiMetrics {
    /// Counts that begin at nothing.
    #[must_use]
    pub fn new() -> Self {
        let requests = Family::default();
        let latencies: Family<Timed, Histogram, fn() -> Histogram> =
            Family::new_with_constructor(|| Histogram::new(LATENCY_BOUNDS_SECONDS));
        let mut registry = Registry::default();
        registry.register(
            "slackwater_api_requests",
            "Requests answered, by route, method and status",
            requests.clone(),
        );
        registry.register(
            "slackwater_api_request_seconds",
            "Time until the head of the answer, by route and method",
            latencies.clone(),
        );
        Self { registry, requests, latencies }
    }

    /// Adds what an audit log counts.
    pub(crate) fn register_audit(&mut self, log: &AuditLog) {
        self.registry.register(
            "slackwater_audit_changes",
            "Changes that were written to the audit log",
            log.counts().written.clone(),
        );
        self.registry.register(
            "slackwater_audit_lost_changes",
            "Changes that could not be written to the audit log",
            log.counts().lost.clone(),
        );
    }

    /// Counts one answer.
    pub(crate) fn count(&self, method: &Method, route: &str, status: StatusCode, taken: Duration) {
        let method = method_label(method);
        let route = route.to_owned();
        self.latencies
            .get_or_create(&Timed { method, route: route.clone() })
            .observe(taken.as_secs_f64());
        self.requests.get_or_create(&Answered { method, route, status: status.as_u16() }).inc();
    }

    /// The counts, after the metrics of the other parts.
    pub(crate) fn render_after(&self, others: &str) -> String {
        let mut page = others.strip_suffix(END).unwrap_or(others).to_owned();
        if !page.is_empty() && !page.ends_with('\n') {
            page.push('\n');
        }
        // Writing into a String cannot fail; a value that could not be written is left out.
        if encode(&mut page, &self.registry).is_err() {
            page.push_str(END);
        }
        page
    }
}

/// The method, or `other` for names that a client made up.
fn method_label(method: &Method) -> &'static str {
    [
        (&Method::GET, "GET"),
        (&Method::HEAD, "HEAD"),
        (&Method::POST, "POST"),
        (&Method::PUT, "PUT"),
        (&Method::PATCH, "PATCH"),
        (&Method::DELETE, "DELETE"),
        (&Method::OPTIONS, "OPTIONS"),
    ]
    .into_iter()
    .find_map(|(known, label)| (known == method).then_some(label))
    .unwrap_or("other")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_page_holds_all_and_ends_once() {
        let metrics = ApiMetrics::new();
        let route = "/v1/files/{path}";
        metrics.count(&Method::GET, route, StatusCode::OK, Duration::from_millis(2));
        metrics.count(&Method::GET, route, StatusCode::OK, Duration::from_millis(2));
        let made_up = Method::from_bytes(b"BREW").unwrap();
        metrics.count(&made_up, "unmatched", StatusCode::NOT_FOUND, Duration::ZERO);
        let page = metrics.render_after("other_metric 1\n# EOF\n");
        assert!(page.starts_with("other_metric 1\n"));
        assert!(page.ends_with(END));
        assert_eq!(page.matches("# EOF").count(), 1);
        let line = r#"slackwater_api_requests_total{method="GET",route="/v1/files/{path}",status="200"} 2"#;
        assert!(page.contains(line), "{page}");
        assert!(page.contains(r#"{method="other",route="unmatched",status="404"} 1"#), "{page}");
        assert!(page.contains("slackwater_api_request_seconds_bucket"), "{page}");
    }
}
