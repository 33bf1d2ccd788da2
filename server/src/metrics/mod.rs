//! The Prometheus page: what the store, NFS and the process count, in OpenMetrics text.
//!
//! ```text
//! Store::stats -----> store   --+
//! NfsMetrics -------> nfs     --+--> Page::render --> api (/metrics, beside its own counters)
//! /proc/self -------> process --+
//! ```
//!
//! Nothing is counted here: every number is read when the page is asked for, so that only a
//! page that is read costs something. Whether the token files are valid, and when the certificate ends, is set by what
//! reads them.

mod nfs;
mod plain;
mod process;
mod store;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::text::encode_registry;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use slackwater_api::MetricsSource;
use slackwater_blockstore::Store;
use slackwater_nfs::NfsMetrics;

/// The page of one server.
#[derive(Debug)]
pub struct Page {
    registry: Registry,
}

impl Page {
    /// The page of this store and this NFS server.
    #[must_use]
    pub fn new(store: Arc<Store>, nfs: Arc<NfsMetrics>) -> Self {
        let mut registry = Registry::default();
        registry.register(
            "slackwater_build",
            "Version of the server",
            Info::new([("version", env!("CARGO_PKG_VERSION"))]),
        );
        registry.register_collector(Box::new(store::StoreCollector::new(store)));
        registry.register_collector(Box::new(nfs::NfsCollector::new(nfs)));
        registry.register_collector(Box::new(process::ProcessCollector::new()));
        Self { registry }
    }

    /// Adds when the certificate of TLS ends, in seconds since 1970; 0 without one, or if that cannot be told.
    pub fn certificate_ends(&mut self, at_seconds: u64) {
        let ends: Gauge<u64, AtomicU64> = Gauge::default();
        ends.set(at_seconds);
        self.registry.register(
            "slackwater_tls_certificate_expires_at_seconds",
            "When the certificate of TLS ends, as it was read at the start, in seconds since 1970; 0 without TLS, or if it cannot be told",
            ends,
        );
    }

    /// Adds whether the token files can be used, which is for the caller to set.
    #[must_use]
    pub fn token_files(&mut self) -> Gauge {
        let valid = Gauge::default();
        self.registry.register(
            "slackwater_token_files_valid",
            "1 if the tokens that are taken are those of the token files, 0 if these have a fault",
            valid.clone(),
        );
        valid
    }
}

impl MetricsSource for Page {
    fn render(&self) -> String {
        let mut text = String::new();
        if let Err(error) = encode_registry(&mut text, &self.registry) {
            // Writing to a string does not fail: only a collector can, and says nothing more.
            tracing::error!(%error, "the metrics page is cut short");
        }
        text
    }
}
