//! What the tests of both plugins stand on: a real appliance on loopback, and workers with a real
//! FUSE attach, loop devices and ext4. Nothing that a test mounts outlives it.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    reason = "tests"
)]

use std::ffi::OsString;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::http::header::CONTENT_LENGTH;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use slackwater_api::types::{CreateSnapshot, Stats, Timestamp};
use slackwater_api::{ApiOptions, MetricsSource, ReferenceKey, Token, Tokens, Workers};
use slackwater_attach::{Method, Options as AttachOptions};
use slackwater_blockstore::{Options, Store};
use slackwater_client::{Client, RetryPolicy};
use slackwater_driver::registry::Registries;
pub use slackwater_driver::trust::Trust;
use slackwater_driver::worker::{LayerKind, Worker, WorkerOptions};
use slackwater_nfs::{NfsMetrics, NfsOptions, Squash};
use slackwater_server::gate::Gate;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::task::JoinHandle;

pub mod content;
#[path = "../../../tests/held_port.rs"]
pub mod held_port;
pub mod registry;
pub mod snapshots;
pub mod tools;

use self::held_port::HeldPort;

/// Disks of tests: large enough for ext4 with a journal.
pub const DISK_BYTES: u64 = 256 << 20;

/// What the appliance makes references with.
const REFERENCE_KEY: [u8; ReferenceKey::BYTES] = [9; ReferenceKey::BYTES];

/// Time from the commit of a layer to its image, where a test does not ask for it: longer than it takes.
const NOT_IMAGED: Duration = Duration::from_secs(24 * 3600);

/// Blocks that a worker of a test keeps.
const CACHE_BYTES: u64 = 64 << 20;

/// Longest time in which the servers of an appliance stop.
const STOP_TIME: Duration = Duration::from_secs(10);

/// Longest time in which a worker that was dropped lets its state go, also on a busy machine.
const LET_GO_TIME: Duration = Duration::from_secs(60);

/// Longest time in which a mount comes free.
const UNMOUNT_TIME: Duration = Duration::from_secs(10);

/// Binds to an address that a server of this process had. A tool that another test begins has a copy of its listener until
/// it is another program.
fn bind_again(address: SocketAddr) -> std::net::TcpListener {
    let deadline = Instant::now() + LET_GO_TIME;
    loop {
        match std::net::TcpListener::bind(address) {
            Err(error) if error.kind() == ErrorKind::AddrInUse && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(5));
            }
            bound => return bound.unwrap(),
        }
    }
}

#[derive(Debug)]
struct NoMetrics;

impl MetricsSource for NoMetrics {
    fn render(&self) -> String {
        String::new()
    }
}

/// A running pair of servers.
struct Servers {
    stop: watch::Sender<bool>,
    tasks: Vec<JoinHandle<()>>,
}

/// A real appliance: a store in a folder of its own, served over REST and NFS, on threads that
/// are not the test's, so that a test may block.
pub struct Appliance {
    pub url: String,
    pub nfs: SocketAddr,
    pub store: Arc<Store>,
    api: SocketAddr,
    runtime: Option<Runtime>,
    servers: Option<Servers>,
    clock_ahead: Duration,
    tokens: Arc<Tokens>,
    workers: Arc<Workers>,
    _data: TempDir,
    _ports: [HeldPort; 2],
}

/// Answers, and tells a time that is ahead. What is to end at a moment by a worker's clock is refused.
async fn answer_ahead(ahead: Duration, request: Request, next: Next) -> Response {
    let is_stats = request.uri().path() == "/v1/stats";
    let is_snapshot = request.method() == "POST" && request.uri().path() == "/v1/snapshots";
    let (head, mut body) = request.into_parts();
    if is_snapshot {
        let bytes = axum::body::to_bytes(body, usize::MAX).await.unwrap();
        let asked: CreateSnapshot = serde_json::from_slice(&bytes).unwrap();
        if asked.expires_at.is_some() {
            return StatusCode::IM_A_TEAPOT.into_response();
        }
        body = Body::from(bytes);
    }
    let response = next.run(Request::from_parts(head, body)).await;
    if !is_stats || !response.status().is_success() {
        return response;
    }
    let (mut head, body) = response.into_parts();
    let body = axum::body::to_bytes(body, usize::MAX).await.unwrap();
    let mut stats: Stats = serde_json::from_slice(&body).unwrap();
    let ahead = u64::try_from(ahead.as_nanos()).unwrap();
    stats.now = stats.now.map(|now| Timestamp::from_nanos(now.as_nanos() + ahead));
    head.headers.remove(CONTENT_LENGTH);
    Response::from_parts(head, Body::from(serde_json::to_vec(&stats).unwrap()))
}

impl Appliance {
    pub fn start() -> Self {
        Self::start_ahead(Duration::ZERO)
    }

    /// One that asks for these tokens.
    pub fn start_for(tokens: Vec<Token>) -> Self {
        Self::start_as(Duration::ZERO, tokens)
    }

    /// One whose clock is ahead of that of its workers, as it says.
    pub fn start_ahead(clock_ahead: Duration) -> Self {
        Self::start_as(clock_ahead, Vec::new())
    }

    fn start_as(clock_ahead: Duration, tokens: Vec<Token>) -> Self {
        let data = tempfile::tempdir().unwrap();
        let mut options = Options::new(data.path());
        options.memory_bytes = 128 << 20;
        let store = Store::open(options).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let ports = [HeldPort::new(), HeldPort::new()];
        let [nfs, api] = ports.each_ref().map(HeldPort::address);
        let mut appliance = Self {
            url: format!("http://{api}"),
            nfs,
            store,
            api,
            runtime: Some(runtime),
            servers: None,
            clock_ahead,
            tokens: Tokens::new(tokens).into(),
            workers: Arc::default(),
            _data: data,
            _ports: ports,
        };
        appliance.serve();
        appliance
    }

    /// Serves, each time at the same ports.
    pub fn serve(&mut self) {
        // Entered, because a test may be inside a runtime of its own.
        let bind = |address: SocketAddr| {
            let listener = bind_again(address);
            listener.set_nonblocking(true).unwrap();
            let _runtime = self.runtime().enter();
            TcpListener::from_std(listener).unwrap()
        };
        let (api, nfs) = (bind(self.api), bind(self.nfs));
        let (stop, stopped) = watch::channel(false);
        let wait = |mut stopped: watch::Receiver<bool>| async move {
            let _ = stopped.wait_for(|stop| *stop).await;
        };
        let metrics = Arc::new(NoMetrics);
        let reference_key = ReferenceKey::from_bytes(REFERENCE_KEY).into();
        let options = ApiOptions {
            reference_key,
            tokens: Arc::clone(&self.tokens),
            workers: Arc::clone(&self.workers),
            credential_grace: Duration::ZERO,
            ..ApiOptions::default()
        };
        let gate = Arc::new(Gate::new(&options, &self.store));
        let router = slackwater_api::router(Arc::clone(&self.store), options, metrics);
        let ahead = self.clock_ahead;
        let router = router.layer(from_fn(move |request, next| answer_ahead(ahead, request, next)));
        let shutdown = wait(stopped.clone());
        let rest = self.runtime().spawn(async move {
            slackwater_api::run(api, router, None, shutdown).await.unwrap();
        });
        // As it is by default: no mount by address.
        let options = NfsOptions {
            squash: Squash::NoRootSquash,
            mounts_by_address: false,
            gate: Some(gate),
            ..NfsOptions::default()
        };
        let (store, shutdown) = (Arc::clone(&self.store), wait(stopped));
        let export = self.runtime().spawn(async move {
            let metrics = Arc::new(NfsMetrics::new());
            // Calls that are cut off are what a stop in the middle is about.
            let _ = slackwater_nfs::run(nfs, store, options, metrics, shutdown).await;
        });
        self.servers = Some(Servers { stop, tasks: vec![rest, export] });
    }

    /// From the next [`Self::serve`] on it asks for these tokens, and knows no worker without one.
    pub fn ask_for(&mut self, tokens: Vec<Token>) {
        self.tokens = Tokens::new(tokens).into();
    }

    /// Stops serving; the store stays open. [`Self::serve`] goes on.
    pub fn stop(&mut self) {
        let Some(servers) = self.servers.take() else { return };
        let _ = servers.stop.send(true);
        let deadline = Instant::now() + STOP_TIME;
        for task in servers.tasks {
            while !task.is_finished() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(5));
            }
            task.abort();
        }
    }

    fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().unwrap()
    }

    pub fn client(&self) -> Client {
        Client::builder(&self.url).retry(RetryPolicy::never()).build().unwrap()
    }
}

impl Drop for Appliance {
    fn drop(&mut self) {
        self.stop();
        let _ = self.store.close();
        // Not waited for: a test may be inside a runtime of its own.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// A machine that runs containers: its directories, its mounts, its worker. Drop it before its
/// appliance.
pub struct Machine {
    pub worker: Worker,
    directory: Option<TempDir>,
    watch: Option<Watch>,
    trust: Trust,
    registries: Registries,
    /// How it keeps layers, and the time until a committed one is an image.
    kept: (LayerKind, Duration),
}

impl Machine {
    pub async fn start(appliance: &Appliance) -> Self {
        Self::start_with(appliance, Trust::default()).await
    }

    pub async fn start_with(appliance: &Appliance, trust: Trust) -> Self {
        Self::start_asking(appliance, trust, Registries::default()).await
    }

    /// One that keeps layers so.
    pub async fn start_keeping(appliance: &Appliance, layers: LayerKind) -> Self {
        Self::start_as(appliance, Trust::default(), Registries::default(), layers).await
    }

    /// One that asks registries with these credentials.
    pub async fn start_asking(appliance: &Appliance, trust: Trust, registries: Registries) -> Self {
        Self::start_as(appliance, trust, registries, LayerKind::default()).await
    }

    async fn start_as(
        appliance: &Appliance,
        trust: Trust,
        registries: Registries,
        layers: LayerKind,
    ) -> Self {
        let directory = tempfile::Builder::new().prefix("slackwater-").tempdir().unwrap();
        let watch = Watch::start(directory.path());
        // From here on a panic unmounts.
        let guard = Mounts { directory: directory.path().to_owned() };
        let kept = (layers, NOT_IMAGED);
        let worker = open_worker(appliance, directory.path(), &trust, &registries, kept).await;
        std::mem::forget(guard);
        Self { worker, directory: Some(directory), watch: Some(watch), trust, registries, kept }
    }

    /// The same machine, which keeps layers so once it is restarted.
    pub fn keeping(mut self, layers: LayerKind) -> Self {
        self.kept.0 = layers;
        self
    }

    /// The same machine, which makes the images of committed layers after this time once it is restarted.
    pub fn imaging_after(mut self, time: Duration) -> Self {
        self.kept.1 = time;
        self
    }

    /// The same machine after its daemon was killed and started again.
    pub async fn restart(self, appliance: &Appliance) -> Self {
        self.begin_again(appliance, async |_| {}).await
    }

    /// The same machine after its power was cut and it was started again: nothing is mounted, and what was not synced is
    /// lost.
    pub async fn reboot(self, appliance: &Appliance) -> Self {
        let cut_power = async |directory: &Path| {
            let state = last_state(&directory.join("state/state.redb")).await;
            abort_exports(directory);
            forget_boot(&state);
        };
        self.begin_again(appliance, cut_power).await
    }

    async fn begin_again(
        mut self,
        appliance: &Appliance,
        between: impl AsyncFnOnce(&Path),
    ) -> Self {
        let directory = self.directory.take().unwrap();
        let watch = self.watch.take();
        let (trust, registries, kept) = (self.trust.clone(), self.registries.clone(), self.kept);
        let guard = Mounts { directory: directory.path().to_owned() };
        drop(self);
        between(directory.path()).await;
        let worker = open_worker(appliance, directory.path(), &trust, &registries, kept).await;
        std::mem::forget(guard);
        Self { worker, directory: Some(directory), watch, trust, registries, kept }
    }

    pub fn path(&self) -> &Path {
        self.directory.as_ref().unwrap().path()
    }
}

/// The state of a worker that was dropped, and works no more.
async fn last_state(path: &Path) -> redb::Database {
    let deadline = Instant::now() + LET_GO_TIME;
    loop {
        match redb::Database::open(path) {
            Ok(database) => return database,
            Err(error) => assert!(Instant::now() < deadline, "the state cannot be opened: {error}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Has a worker's state say that the machine was started another time.
fn forget_boot(state: &redb::Database) {
    let facts: redb::TableDefinition<'_, &str, &str> = redb::TableDefinition::new("facts");
    let transaction = state.begin_write().unwrap();
    let before = {
        let mut table = transaction.open_table(facts).unwrap();
        table.insert("boot_id", "another").unwrap().map(|value| value.value().to_owned())
    };
    assert!(before.is_some_and(|boot| boot.len() == 36), "it had the boot's id");
    transaction.commit().unwrap();
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Not after `restart`, which takes the directory, mounts and all.
        let Some(directory) = self.directory.take() else { return };
        drop(Mounts { directory: directory.path().to_owned() });
        if mounts_below(directory.path()).is_empty() {
            return;
        }
        // Removing it would reach through the mounts.
        let kept = directory.keep();
        if !std::thread::panicking() {
            panic!("mounts are left below {}: {:?}", kept.display(), mounts_below(&kept));
        }
    }
}

/// Ends the mounts below a directory when this process was killed and no guard could. An export
/// whose appliance died with the test would wait for it for ever, and every `sync` of the machine
/// with it.
struct Watch {
    process: Child,
}

impl Watch {
    fn start(directory: &Path) -> Self {
        // The end of its input is the end of this process.
        let script = format!("trap '' HUP INT TERM; read -r line; {ABORT}");
        let mut command = Command::new("sh");
        command.args(["-c", &script, "watch"]).arg(directory).process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        Self { process: command.spawn().unwrap() }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}

/// Unmounts what is below a directory.
struct Mounts {
    directory: PathBuf,
}

impl Drop for Mounts {
    fn drop(&mut self) {
        // The appliance of a test that failed may be away: unmounting would wait for it, for
        // ever, and with it everybody who syncs on this machine.
        if std::thread::panicking() {
            abort_exports(&self.directory);
        }
        let deadline = Instant::now() + UNMOUNT_TIME;
        loop {
            let mounts = mounts_below(&self.directory);
            if mounts.is_empty() {
                return;
            }
            let is_late = Instant::now() > deadline;
            for mount in mounts.iter().rev() {
                let mut command = Command::new("timeout");
                command.args(["10", "umount"]);
                if is_late {
                    command.arg("--lazy");
                }
                let _ = command.arg(mount).stderr(Stdio::null()).status();
            }
            if is_late {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Ends the FUSE connections below a directory, so that what waits for them gets errors, and
/// unmounts all below it.
const ABORT: &str = r#"
    below() { awk -v d="$1/" 'index($5, d) == 1' /proc/self/mountinfo | tac; }
    [ -n "$(below "$1")" ] || exit 0
    mkdir "$1.control" && mount -t fusectl none "$1.control"
    below "$1" | grep ' - fuse' | cut -d' ' -f3 | cut -d: -f2 | while read -r id; do
        echo 1 > "$1.control/$id/abort"
    done
    umount "$1.control" && rmdir "$1.control"
    below "$1" | cut -d' ' -f5 | while read -r point; do umount --lazy "$point"; done
"#;

/// Runs [`ABORT`] for a directory.
pub fn abort_exports(directory: &Path) {
    let _ = Command::new("sh").args(["-c", ABORT, "abort"]).arg(directory).status();
}

/// The mount points below a directory, outer ones first.
pub fn mounts_below(directory: &Path) -> Vec<PathBuf> {
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let points = table.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from);
    points.filter(|point| point.starts_with(directory)).collect()
}

/// The command that serves the export, as the daemon starts it.
fn serve_export(appliance: &Appliance, directory: &Path) -> Vec<OsString> {
    let mut program: Vec<OsString> = vec![env!("CARGO_BIN_EXE_slackwater-driver").into()];
    let mut add = |name: &str, value: OsString| program.extend([name.into(), value]);
    add("serve-export", "--keep".into());
    add("--api", appliance.url.clone().into());
    add("--nfs", appliance.nfs.to_string().into());
    add("--state-dir", directory.join("state").into());
    add("--cache-dir", directory.join("cache").into());
    add("--cache-size", CACHE_BYTES.to_string().into());
    program
}

async fn open_worker(
    appliance: &Appliance,
    directory: &Path,
    trust: &Trust,
    registries: &Registries,
    (layers, imaged_after): (LayerKind, Duration),
) -> Worker {
    let state_directory = directory.join("state");
    for folder in [&state_directory, &directory.join("cache")] {
        std::fs::create_dir_all(folder).unwrap();
    }
    let attach = AttachOptions {
        method: Some(Method::Fuse),
        nfs_address: appliance.nfs,
        export: "/slackwater".to_owned(),
        mount_path: None,
        state_directory: state_directory.clone(),
        fuse_program: serve_export(appliance, directory),
        tool_program: vec![env!("CARGO_BIN_EXE_slackwater-driver").into(), "run-tool".into()],
        prefers_fuse: false,
        rights: slackwater_attach::Rights::CONTAINER,
        mounts_end: false,
    };
    let options = WorkerOptions {
        client: appliance.client(),
        attach,
        state_directory,
        disk_size_bytes: DISK_BYTES,
        layers,
        imaged_after,
        trust: trust.clone(),
        registries: registries.clone(),
    };
    // The state of a worker that was just dropped may still be open for a moment.
    let deadline = Instant::now() + LET_GO_TIME;
    loop {
        match Worker::open(options.clone()).await {
            Ok(worker) => return worker,
            Err(error) => {
                assert!(Instant::now() < deadline, "the worker cannot be opened: {error}")
            }
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The first two numbers of the kernel's release.
pub fn kernel_release() -> (u32, u32) {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(|sign: char| !sign.is_ascii_digit()).map(str::parse);
    (numbers.next().unwrap().unwrap(), numbers.next().unwrap().unwrap())
}
