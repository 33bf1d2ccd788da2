//! What the benches share: how long criterion measures, and an appliance to measure.
#![allow(dead_code, unreachable_pub, reason = "each bench uses a part of it")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use criterion::Criterion;
use slackwater_api::{ApiOptions, MetricsSource};
use slackwater_blockstore::{FilePath, Options, Store};
use slackwater_client::{Client, RetryPolicy};
use slackwater_nfs::{NfsMetrics, NfsOptions, Squash};
use slackwater_server::gate::Gate;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

/// Threads that serve: the machine of the figures has two cores.
const SERVER_THREADS: usize = 2;

/// Memory of the store that is served.
const MEMORY_BYTES: u64 = 256 << 20;

/// Longest time in which the servers end.
const STOP_TIME: Duration = Duration::from_secs(5);

/// Criterion, short enough that all benches together take less than five minutes.
pub fn criterion() -> Criterion {
    Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .nresamples(10_000)
        .without_plots()
        .configure_from_args()
}

/// The sum of what `count` calls say that they took: what they do besides is not measured.
pub fn timed(count: u64, mut once: impl FnMut(u64) -> Duration) -> Duration {
    (0..count).map(&mut once).sum()
}

/// A path of the store.
pub fn path(text: &str) -> FilePath {
    FilePath::parse(text).expect("a path")
}

#[derive(Debug)]
struct NoMetrics;

impl MetricsSource for NoMetrics {
    fn render(&self) -> String {
        String::new()
    }
}

/// A store in a folder of its own, served over NFS and REST by threads of this process.
pub struct Appliance {
    pub store: Arc<Store>,
    pub nfs: SocketAddr,
    pub url: String,
    runtime: Option<Runtime>,
    _folder: TempDir,
}

impl Appliance {
    pub fn start() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let options = Options { memory_bytes: MEMORY_BYTES, ..Options::new(folder.path()) };
        let store = Store::open(options).expect("a store");
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(SERVER_THREADS)
            .enable_all()
            .build()
            .expect("a runtime");
        let listen = || runtime.block_on(TcpListener::bind("127.0.0.1:0")).expect("a port");
        let (nfs, rest) = (listen(), listen());
        let nfs_address = nfs.local_addr().expect("an address");
        let url = format!("http://{}", rest.local_addr().expect("an address"));
        let api_options = ApiOptions::default();
        let options = NfsOptions {
            squash: Squash::NoRootSquash,
            gate: Some(Arc::new(Gate::new(&api_options, &store))),
            ..NfsOptions::default()
        };
        let (served, metrics) = (Arc::clone(&store), Arc::new(NfsMetrics::new()));
        let forever = std::future::pending;
        runtime.spawn(slackwater_nfs::run(nfs, served, options, metrics, forever()));
        let served = Arc::clone(&store);
        let router = slackwater_api::router(served, api_options, Arc::new(NoMetrics));
        runtime.spawn(slackwater_api::run(rest, router, None, forever()));
        Self { store, nfs: nfs_address, url, runtime: Some(runtime), _folder: folder }
    }

    /// A client that sends no call twice: a sample is one call.
    pub fn client(&self) -> Client {
        Client::builder(&self.url).retry(RetryPolicy::never()).build().expect("a client")
    }
}

impl Drop for Appliance {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(STOP_TIME);
        }
    }
}
