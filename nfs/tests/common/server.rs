//! A server on a port of its own over a store in a directory of its own.

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use slackwater_blockstore::{Options, Store};
use slackwater_nfs::{NfsError, NfsMetrics, NfsMetricsSnapshot, NfsOptions, Squash};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

use super::Client;

/// Longer than anything a test waits for, short enough to end one that hangs.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Fields in the order in which they must go: the store before its directory.
pub struct Server {
    running: Running,
    pub address: SocketAddr,
    pub metrics: Arc<NfsMetrics>,
    pub store: Arc<Store>,
    options: NfsOptions,
    directory: Option<TempDir>,
}

/// The server's threads: a runtime of its own, so that a test's end can wait for them.
struct Running(Option<(oneshot::Sender<()>, Ended)>);

type Ended = JoinHandle<Result<(), NfsError>>;

impl Drop for Running {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.0.take() {
            drop(stop);
            // A server that had to cut off a client is no failure of the test that ended.
            drop(thread.join());
        }
    }
}

/// Options under which the test's root is root.
pub fn root_options() -> NfsOptions {
    NfsOptions { squash: Squash::NoRootSquash, ..NfsOptions::default() }
}

impl Server {
    pub async fn start() -> Self {
        Self::with(root_options()).await
    }

    pub async fn with(options: NfsOptions) -> Self {
        Self::over_directory(tempfile::tempdir().unwrap(), options).await
    }

    /// Starts a server over the store that is in the directory.
    pub async fn over_directory(directory: TempDir, options: NfsOptions) -> Self {
        let path = directory.path().to_owned();
        let open = move || Store::open(Options::new(path)).unwrap();
        let store = tokio::task::spawn_blocking(open).await.unwrap();
        let server = Self::over_store(store, options);
        Self { directory: Some(directory), ..server }
    }

    /// Starts a server over the store.
    pub fn over_store(store: Arc<Store>, options: NfsOptions) -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let metrics = Arc::new(NfsMetrics::new());
        let (stop, stopped) = oneshot::channel();
        let (served, counters) = (Arc::clone(&store), Arc::clone(&metrics));
        let of_thread = options.clone();
        let thread = std::thread::spawn(move || {
            let mut builder = tokio::runtime::Builder::new_multi_thread();
            let runtime = builder.worker_threads(2).enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = TcpListener::from_std(listener).unwrap();
                let shutdown = async { drop(stopped.await) };
                slackwater_nfs::run(listener, served, of_thread, counters, shutdown).await
            })
        });
        let running = Running(Some((stop, thread)));
        Self { running, address, metrics, store, options, directory: None }
    }

    /// Stops the server as its own end would, and closes the store.
    pub async fn stop(mut self) -> TempDir {
        self.end().await.unwrap();
        self.blocking(|store| store.close().unwrap()).await;
        self.directory.take().unwrap()
    }

    /// Stops the server and leaves the store as it is.
    pub async fn end(&mut self) -> Result<(), NfsError> {
        let (stop, thread) = self.running.0.take().unwrap();
        drop(stop);
        tokio::task::spawn_blocking(move || thread.join().unwrap()).await.unwrap()
    }

    /// Stops the server and starts another one over the same store.
    pub async fn restart(self) -> Self {
        let options = self.options.clone();
        let directory = self.stop().await;
        Self::over_directory(directory, options).await
    }

    /// A client that is root on a new connection.
    pub async fn client(&self) -> Client {
        Client::connect(self.address).await
    }

    /// Runs `work` with the store where it may block.
    pub async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Store) -> T + Send + 'static,
    ) -> T {
        let store = Arc::clone(&self.store);
        tokio::task::spawn_blocking(move || work(&store)).await.unwrap()
    }

    pub fn counters(&self) -> NfsMetricsSnapshot {
        self.metrics.snapshot()
    }

    /// Waits until the counters are as they should become.
    pub async fn wait_until(&self, reached: impl Fn(&NfsMetricsSnapshot) -> bool) {
        let deadline = Instant::now() + LIMIT;
        loop {
            let counters = self.counters();
            if reached(&counters) {
                return;
            }
            assert!(Instant::now() < deadline, "{counters:?}");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}
