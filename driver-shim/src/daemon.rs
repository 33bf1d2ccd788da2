//! The life of the daemon.
//!
//! ```text
//! logs -> signals -> lock -> worker (its state; not yet the appliance) -> sockets -> ready
//!                                                     beside it: what the first container needs
//!      signal -> stop accepting -> calls in flight end -> unmount what nothing uses -> exit
//! ```
//!
//! Invariants: the end of the daemon, however it comes, unmounts nothing that is used and ends no process
//! that serves a mount; the next daemon finds them. Starting does not need the appliance: a
//! machine that boots before it serves answers the engines with what is missing, and begins to
//! work when it is there.

use std::fs::File;
use std::future::Future;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use axum::Router;
use sd_notify::NotifyState;
use slackwater_attach::Method;
use slackwater_client::is_readable_on_the_way;
use tokio::net::{TcpListener, UnixListener};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::containerd::ContainerdOptions;
use crate::control::{self, Control};
use crate::docker::GraphDriver;
use crate::engine::docker::Docker;
use crate::error::DriverError;
use crate::settings::Config;
use crate::worker::{Engine, Worker};
use crate::{containerd, credential, docker, private, socket};

/// Time for calls that are under way when the stop begins. What outlives it waits for the
/// appliance; the state says where it was, and the next daemon goes on from there.
const DRAIN_LIMIT: Duration = Duration::from_secs(20);

/// Time to unmount what nothing uses, as the daemon ends. What is not unmounted then, the next daemon finds.
const UNMOUNT_LIMIT: Duration = Duration::from_secs(5);

/// The pause between two tries to make what the first container needs. Not shorter: of a worker that has not joined, each counts
/// as a wrong token of its address, which has one a second.
const AHEAD_PAUSE: Duration = Duration::from_secs(10);

/// How often that is tried: while an appliance starts, and a machine joins.
const AHEAD_TRIES: usize = 60;

/// The file by which a process has the state directory.
const LOCK: &str = "lock";

/// How long the lock is waited for. A process that was killed while it started a tool has left that the lock until the
/// tool runs: a moment, or longer on a busy machine.
const LOCK_WAIT: Duration = Duration::from_secs(2);

/// The pause between two tries.
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// Tells whether the daemon is to stop.
#[derive(Clone, Debug)]
pub struct Stop(watch::Receiver<bool>);

impl Stop {
    /// A stop, and the sender of `true` that asks for it.
    #[must_use]
    pub fn new() -> (watch::Sender<bool>, Self) {
        let (sender, receiver) = watch::channel(false);
        (sender, Self(receiver))
    }

    /// Whether the stop was asked for.
    #[must_use]
    pub fn is_asked(&self) -> bool {
        *self.0.borrow()
    }

    /// Returns once the stop is asked for, or can no longer be.
    pub async fn asked(mut self) {
        // An error means that the sender is gone: nobody runs the daemon any more.
        let _ = self.0.wait_for(|&asked| asked).await;
    }
}

/// Tells what the settings open, with the way out.
fn warn_of_what_is_unsafe(config: &Config) {
    if is_readable_on_the_way(&config.target.api) {
        let api = &config.target.api;
        tracing::warn!(
            api,
            "tokens and credentials are sent unencrypted; use https:// beyond this machine"
        );
    }
    if config.trust.references_without_mac {
        tracing::warn!(
            "insecure-references-without-mac is true: an image or a container that knows the id of a published \
             snapshot becomes it; make images of release 0.2 again by `image convert`, then set it to false"
        );
    }
}

/// Serves the engines until a signal comes.
///
/// # Errors
/// The state directory or a socket is taken, or a part of the daemon failed.
pub async fn run(config: Config) -> Result<(), DriverError> {
    config.require_socket()?;
    if let Some(certificate) = &config.target.certificate {
        certificate.check()?;
    }
    let stop = stop_on_signal()?;
    let _lock = take_directories(&config)?;
    let worker = Worker::open(config.worker_options().await?).await?;
    let mut servers = Servers::start(&config, &worker, &stop).await?;
    if config.target.token_file.is_none() {
        tokio::spawn(credential::keep_fresh(config.target.client()?, config.state_dir.clone()));
    }
    let sockets =
        [(&config.docker_socket, Engine::Docker), (&config.containerd_socket, Engine::Containerd)];
    let served = sockets.into_iter().filter(|(socket, _)| socket.is_some());
    for (_, engine) in served {
        tokio::spawn(make_ahead(worker.clone(), engine));
    }
    warn_of_what_is_unsafe(&config);
    announce(&config, &worker);
    let ended = tokio::select! {
        () = stop.clone().asked() => None,
        ended = servers.tasks.join_next() => ended,
    };
    let outcome = match ended {
        // Asked to stop, a server may end before this task is told of it.
        Some(joined) if !stop.is_asked() => Err(early_end(joined)),
        _ => Ok(()),
    };
    tell(&[NotifyState::Stopping]);
    if !servers.drain(DRAIN_LIMIT).await {
        let limit_seconds = DRAIN_LIMIT.as_secs();
        tracing::warn!(limit_seconds, "calls were still under way; the next start goes on");
        if let Err(error) = &outcome {
            tracing::error!(%error, "stopped");
        }
        // Returning would drop those calls, and with them the notes by which the next process
        // knows what dockerd repeats: this end is as sudden as a kill.
        std::process::exit(i32::from(outcome.is_err()));
    }
    if tokio::time::timeout(UNMOUNT_LIMIT, worker.unmount_all_unused()).await.is_err() {
        let limit_seconds = UNMOUNT_LIMIT.as_secs();
        tracing::warn!(
            limit_seconds,
            "what nothing uses is not unmounted yet; the next start goes on"
        );
    }
    outcome
}

/// Makes what the first container of an engine would wait for, as soon as the appliance answers. Without it that waits, and
/// says what is wrong.
async fn make_ahead(worker: Worker, engine: Engine) {
    for _ in 0..AHEAD_TRIES {
        match worker.have_empty_disk(engine).await {
            Ok(()) => return,
            Err(error) => tracing::debug!(%error, "the empty disk is made later"),
        }
        tokio::time::sleep(AHEAD_PAUSE).await;
    }
}

/// Takes the directories of these settings for this process.
///
/// # Errors
/// As [`lock`]; the directory of cached blocks can be reached by other users.
pub fn take_directories(config: &Config) -> Result<File, DriverError> {
    let locked = lock(&config.state_dir)?;
    if config.attach.method() != Some(Method::Nfs) {
        private::take(&config.cache_dir, slackwater_fuse::CACHE_FILE)?;
    }
    Ok(locked)
}

/// Takes the state directory for this process; the lock goes with it, however it ends. Waits for [`LOCK_WAIT`] at most.
///
/// # Errors
/// Another process has it; other users can reach it, and it may be theirs.
pub fn lock(state_dir: &Path) -> Result<File, DriverError> {
    lock_within(state_dir, LOCK_WAIT)
}

fn lock_within(state_dir: &Path, limit: Duration) -> Result<File, DriverError> {
    // Every container's disk is mounted below it.
    private::take(state_dir, LOCK)?;
    let path = state_dir.join(LOCK);
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .map_err(DriverError::io("open", &path))?;
    let begun = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(std::fs::TryLockError::WouldBlock) if begun.elapsed() < limit => {
                std::thread::sleep(LOCK_PAUSE);
            }
            Err(std::fs::TryLockError::WouldBlock) => {
                return Err(DriverError::Locked { path: state_dir.to_owned() });
            }
            Err(std::fs::TryLockError::Error(source)) => {
                return Err(DriverError::Io { action: "lock", path, source });
            }
        }
    }
}

/// What serves the sockets.
struct Servers {
    tasks: JoinSet<Ended>,
}

/// The name of a part, and how it ended.
type Ended = (&'static str, Result<(), String>);

impl Servers {
    /// Binds every socket before the first one is served.
    async fn start(config: &Config, worker: &Worker, stop: &Stop) -> Result<Self, DriverError> {
        let control = socket::listen(&config.control_socket).await?;
        let docker = listen_if_asked(config.docker_socket.as_deref()).await?;
        let containerd = listen_if_asked(config.containerd_socket.as_deref()).await?;
        let metrics = match config.metrics_listen {
            Some(address) => Some(TcpListener::bind(address).await.map_err(|error| {
                DriverError::Start(format!("metrics-listen {address}: {error}"))
            })?),
            None => None,
        };
        let mut tasks = JoinSet::new();
        let state = Control::new(worker.clone(), config.clone(), stop.clone());
        tasks.spawn(serve_http("commands", control, control::router(state), stop.clone().asked()));
        if let Some(listener) = metrics {
            let state = Control::new(worker.clone(), config.clone(), stop.clone());
            let served = axum::serve(listener, control::metrics_router(state));
            let served = served.with_graceful_shutdown(stop.clone().asked());
            tasks
                .spawn(async move { ("metrics", served.await.map_err(|error| error.to_string())) });
        }
        if let Some(listener) = docker {
            let driver = GraphDriver::new(worker.clone(), config.push);
            let driver = driver.named_by(Docker::new(&config.docker_api)?);
            let router = docker::router(driver);
            tasks.spawn(serve_http("Docker", listener, router, stop.clone().asked()));
        }
        if let Some(listener) = containerd {
            let (worker, stop) = (worker.clone(), stop.clone());
            let options = ContainerdOptions {
                api: config.containerd_api.clone(),
                without_blobs: config.layers_without_blobs.clone(),
            };
            tasks.spawn(async move {
                let served = containerd::serve(worker, options, listener, stop.asked()).await;
                ("containerd", served.map_err(|error| error.to_string()))
            });
        }
        Ok(Self { tasks })
    }

    /// Waits for what still runs; whether all of it ended in time.
    async fn drain(&mut self, limit: Duration) -> bool {
        let drained = async {
            while let Some(joined) = self.tasks.join_next().await {
                match joined {
                    Ok((part, Ok(()))) => tracing::info!(part, "drained"),
                    Ok((part, Err(error))) => tracing::warn!(part, error, "did not drain"),
                    Err(error) => tracing::error!(%error, "panicked while draining"),
                }
            }
        };
        tokio::time::timeout(limit, drained).await.is_ok()
    }
}

async fn listen_if_asked(path: Option<&Path>) -> Result<Option<UnixListener>, DriverError> {
    match path {
        Some(path) => Ok(Some(socket::listen(path).await?)),
        None => Ok(None),
    }
}

async fn serve_http(
    part: &'static str,
    listener: UnixListener,
    router: Router,
    stop: impl Future<Output = ()> + Send + 'static,
) -> Ended {
    let served = axum::serve(listener, router).with_graceful_shutdown(stop).await;
    (part, served.map_err(|error| error.to_string()))
}

/// The failure that an end before the stop is, whatever the part says.
fn early_end(joined: Result<Ended, tokio::task::JoinError>) -> DriverError {
    match joined {
        Ok((part, outcome)) => {
            let reason = outcome.err().unwrap_or_else(|| "without a reason".to_owned());
            DriverError::Ended { part, reason }
        }
        Err(error) => DriverError::Ended { part: "a socket", reason: error.to_string() },
    }
}

/// Says that the sockets are served: to scripts, to the log, to systemd.
fn announce(config: &Config, worker: &Worker) {
    let mut stdout = std::io::stdout().lock();
    // Standard output may be closed, and the daemon serves all the same.
    let _ = writeln!(stdout, "ready");
    let _ = stdout.flush();
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        worker = %worker.worker_id(),
        api = config.target.api,
        nfs = config.target.nfs,
        state_dir = %config.state_dir.display(),
        layers = %config.layers,
        docker = ?config.docker_socket,
        containerd = ?config.containerd_socket,
        "ready"
    );
    tell(&[NotifyState::Ready]);
}

/// Tells the state to the service manager, if there is one.
fn tell(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!(%error, "systemd could not be told the state");
    }
}

/// Receives signals from now on: the first stops gracefully, a second one at once.
fn stop_on_signal() -> Result<Stop, DriverError> {
    let failed = |error: std::io::Error| DriverError::Start(format!("no signals: {error}"));
    let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
    let mut hangup = signal(SignalKind::hangup()).map_err(failed)?;
    let (sender, stop) = Stop::new();
    tokio::spawn(async move {
        for is_first in [true, false] {
            let name = tokio::select! {
                _ = terminate.recv() => "SIGTERM",
                _ = interrupt.recv() => "SIGINT",
                _ = hangup.recv() => "SIGHUP",
            };
            if is_first {
                tracing::info!(signal = name, "stopping; what is in use stays mounted");
                // An error means that the daemon is ending already.
                let _ = sender.send(true);
            } else {
                tracing::warn!(signal = name, "stopped at once");
                std::process::exit(1);
            }
        }
    });
    Ok(stop)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[tokio::test]
    async fn a_drain_tells_whether_every_call_ended() {
        let mut servers = Servers { tasks: JoinSet::new() };
        servers.tasks.spawn(async { ("quick", Ok(())) });
        assert!(servers.drain(DRAIN_LIMIT).await);
        servers.tasks.spawn(std::future::pending());
        assert!(!servers.drain(Duration::from_millis(10)).await);
    }

    #[test]
    fn a_state_directory_has_one_process() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        let first = lock(&state).unwrap();
        assert_eq!(std::fs::metadata(&state).unwrap().permissions().mode() & 0o777, 0o700);
        let refused = lock_within(&state, Duration::ZERO);
        assert!(matches!(refused, Err(DriverError::Locked { .. })));
        drop(first);
        lock(&state).unwrap();
    }

    #[test]
    fn a_lock_that_is_let_go_in_a_moment_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        let first = lock(&state).unwrap();
        let (is_waiting, waits) = std::sync::mpsc::channel();
        let second = std::thread::spawn(move || {
            is_waiting.send(()).unwrap();
            // Far more than the moment below, however busy the machine is.
            lock_within(&state, Duration::from_secs(60)).map(drop)
        });
        waits.recv().unwrap();
        std::thread::sleep(2 * LOCK_PAUSE);
        drop(first);
        second.join().unwrap().unwrap();
    }
}
