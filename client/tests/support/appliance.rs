//! A real appliance for a test: a store in a folder of its own, served on loopback.

use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

use slackwater_api::{ApiOptions, MetricsSource, TlsFiles};
use slackwater_blockstore::{Options, Store};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;

/// Longest time in which the servers of an appliance stop, also on a busy machine.
const STOP_TIME: Duration = Duration::from_secs(60);

/// Longest time of one run of the command in a test.
const COMMAND_SECONDS_MAX: u64 = 120;

#[derive(Debug)]
struct NoMetrics;

impl MetricsSource for NoMetrics {
    fn render(&self) -> String {
        String::new()
    }
}

pub struct Appliance {
    pub url: String,
    pub store: Arc<Store>,
    /// For the test's own files.
    pub folder: TempDir,
    pub runtime: Runtime,
    stop: Option<oneshot::Sender<()>>,
    server: Option<tokio::task::JoinHandle<()>>,
    _data: TempDir,
}

impl Appliance {
    pub fn start() -> Self {
        Self::with(ApiOptions::default(), None)
    }

    pub fn with(options: ApiOptions, tls: Option<TlsFiles>) -> Self {
        let data = tempfile::tempdir().unwrap();
        let mut store_options = Options::new(data.path());
        store_options.memory_bytes = 128 << 20;
        let store = Store::open(store_options).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind(("127.0.0.1", 0))).unwrap();
        let scheme = if tls.is_some() { "https" } else { "http" };
        let url = format!("{scheme}://{}", listener.local_addr().unwrap());
        let router = slackwater_api::router(Arc::clone(&store), options, Arc::new(NoMetrics));
        let (stop, stopped) = oneshot::channel::<()>();
        let server = runtime.spawn(async move {
            let shutdown = async move {
                let _ = stopped.await;
            };
            slackwater_api::run(listener, router, tls, shutdown).await.unwrap();
        });
        let folder = tempfile::tempdir().unwrap();
        Self { url, store, folder, runtime, stop: Some(stop), server: Some(server), _data: data }
    }

    /// A path in the test's folder.
    pub fn local(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().to_owned()
    }

    /// The command, to be run against this appliance.
    pub fn command(&self, arguments: &[&str]) -> Command {
        command(&self.url, arguments)
    }

    pub fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// Runs the command, which must succeed, and gives its standard output.
    pub fn ok(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    /// The same with `--json`, read.
    pub fn json(&self, arguments: &[&str]) -> serde_json::Value {
        let stdout = self.ok(&[&["--json"], arguments].concat());
        serde_json::from_str(&stdout).unwrap_or_else(|error| panic!("{error}: {stdout}"))
    }

    /// Runs the command, which must fail with this exit code, and gives its standard error.
    pub fn fails(&self, code: i32, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stderr}");
        assert!(!stderr.is_empty(), "{arguments:?} fails without a word");
        stderr
    }
}

impl Drop for Appliance {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        if let Some(server) = self.server.take() {
            let bounded = async { tokio::time::timeout(STOP_TIME, server).await };
            self.runtime.block_on(bounded).expect("the server does not stop").unwrap();
        }
        let _ = self.store.close();
    }
}

/// The command against the appliance at `url`, without anything of the tester's environment.
pub fn command(url: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_slackwater"));
    command
        .arg("--api")
        .arg(url)
        .args(arguments)
        .env_clear()
        .env("SLACKWATER_TIMEOUT", COMMAND_SECONDS_MAX.to_string())
        .stdin(Stdio::null());
    command
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Bytes that cannot be compressed or deduplicated, the same for the same seed.
pub fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}
