//! The life of the server.
//!
//! ```text
//! logs -> signals -> bind all addresses -> open the store -> token, key of references, workers -> serve -> ready
//!      signal, or a server that fails -> stop accepting -> drain -> close the store -> close the audit log
//! ```
//!
//! Invariants: no data is touched before all addresses are bound. The store is closed on
//! every way out on which it was opened, after all servers have let go of it.

use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use slackwater_api::{ApiOptions, AuditLog, Tokens, Workers};
use slackwater_blockstore::Store;
use slackwater_nfs::{NfsMetrics, NfsTls};
use tokio::sync::watch;
use tokio::task::{JoinError, JoinSet};

use crate::config::Config;
use crate::error::ServerError;
use crate::gate::Gate;
use crate::listen::{self, Addresses, Listeners};
use crate::metrics::Page;
use crate::signals::{self, Stop};
use crate::token_files::TokenFiles;
use crate::welcome::Welcome;
use crate::{
    admin_token, audit, data_dir, logs, open_files, options, reference_key, systemd, workers,
};

/// Time for calls that are under way when the stop begins. The servers bound their own
/// drain below this; what outlives it waits for a disk that does not answer, and the client
/// will send it again to the next server.
const DRAIN_LIMIT: Duration = Duration::from_secs(30);

/// A certificate with less time left is told of at the start; the alerts of deploy/prometheus are for less.
const CERTIFICATE_DAYS_MIN: u64 = 30;

const SECONDS_A_DAY: u64 = 24 * 60 * 60;

/// Time for threads that still run after the store was closed; nothing that matters is left.
const RUNTIME_END_LIMIT: Duration = Duration::from_secs(1);

/// Serves until a signal comes.
///
/// # Errors
/// The server could not be started, failed, or could not close the store.
pub fn run(config: Config) -> Result<(), ServerError> {
    logs::start(&config.log, config.log_format).map_err(ServerError::Logs)?;
    config.findings.iter().for_each(|finding| tracing::warn!("{finding}"));
    open_files::raise_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_name("slackwaterd")
        .build()
        .map_err(ServerError::Runtime)?;
    let outcome = runtime.block_on(start(config));
    runtime.shutdown_timeout(RUNTIME_END_LIMIT);
    outcome
}

/// Binds, opens, serves, closes.
async fn start(config: Config) -> Result<(), ServerError> {
    let stop = signals::stop_on_signal()?;
    let listeners = listen::bind(&config).await?;
    let store = open(&config).await?;
    let log = match audit::open(&config.data_dir) {
        Ok(log) => log,
        Err(error) => {
            close(store).await?;
            return Err(error);
        }
    };
    let served = serve(config, listeners, &store, &log, stop).await;
    let closed = close(store).await;
    // Last, as calls that were not waited for end with the store.
    audit::close(log).await;
    // The first failure is the cause; the second is at most its consequence.
    served.and(closed)
}

/// Serves until the stop.
async fn serve(
    mut config: Config,
    listeners: Listeners,
    store: &Arc<Store>,
    log: &Arc<AuditLog>,
    stop: Stop,
) -> Result<(), ServerError> {
    let mut without_room = None;
    if let Some(path) = &config.admin_token_file {
        let (token, is_made) = admin_token::provide(path).await?;
        config.tokens.push(token);
        without_room = (!is_made).then(|| path.clone());
    }
    let config = &config;
    let api_options = options::api(config, &store.handle_key());
    reference_key::provide(&config.data_dir, &api_options.reference_key).await?;
    let workers = workers(config, &api_options.tokens).await?;
    let api_options =
        ApiOptions { workers: Arc::new(workers), audit: Some(Arc::clone(log)), ..api_options };
    if let Some(path) = without_room {
        let (tokens, workers) = (Arc::clone(&api_options.tokens), Arc::clone(&api_options.workers));
        tokio::spawn(admin_token::provide_later(path, tokens, workers));
    }
    let nfs_tls = options::nfs_tls(config)?;
    let addresses = listeners.addresses.clone();
    audit::started(log, store);
    let servers = Servers::start(config, listeners, store, api_options, nfs_tls);
    announce(config, &addresses, store);
    servers.run(stop).await
}

/// Reads the files of TLS, as a start does.
///
/// # Errors
/// One cannot be read or used.
pub fn check_tls(config: &Config) -> Result<(), ServerError> {
    if let Some(files) = options::tls(config) {
        files.read().map_err(ServerError::Api)?;
    }
    options::nfs_tls(config).map(drop)
}

/// Opens the store, which may take seconds after a crash, beside the runtime.
async fn open(config: &Config) -> Result<Arc<Store>, ServerError> {
    let options = options::store(config);
    data_dir::require_own(config)?;
    let data_dir = config.data_dir.clone();
    let opening = tokio::task::spawn_blocking(move || Store::open(options));
    opening
        .await
        .map_err(|source| ServerError::Panicked { task: "opening the store", source })?
        .map_err(|source| ServerError::Open { data_dir, source })
}

/// Reads the workers, beside the runtime.
async fn workers(config: &Config, tokens: &Arc<Tokens>) -> Result<Workers, ServerError> {
    let (data_dir, tokens) = (config.data_dir.clone(), Arc::clone(tokens));
    tokio::task::spawn_blocking(move || workers::open(&data_dir, &tokens))
        .await
        .map_err(|source| ServerError::Panicked { task: "reading the workers", source })?
}

/// Commits and closes the store. Takes as long as the disk needs: cut short, the next start
/// would have to replay the log. A second signal cuts it short all the same.
async fn close(store: Arc<Store>) -> Result<(), ServerError> {
    tokio::task::spawn_blocking(move || store.close())
        .await
        .map_err(|source| ServerError::Panicked { task: "closing the store", source })?
        .map_err(ServerError::Close)?;
    tracing::info!("closed");
    Ok(())
}

/// Says that the server is ready: to people and scripts, to the log, to systemd.
fn announce(config: &Config, addresses: &Addresses, store: &Arc<Store>) {
    let stats = store.stats();
    let mut stdout = std::io::stdout().lock();
    // Standard output may be closed, and the server serves all the same.
    let _ = write!(stdout, "{}", Welcome::new(config, addresses));
    let _ = stdout.flush();
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        store = %store.store_id(),
        data_dir = %config.data_dir.display(),
        nfs = %addresses.nfs_text(),
        portmap = addresses.portmap.map(tracing::field::display),
        api = %addresses.api,
        metrics = addresses.metrics.map(tracing::field::display),
        files = stats.file_count,
        snapshots = stats.snapshot_count,
        used_bytes = stats.used_bytes,
        "ready"
    );
    systemd::ready(&format!("NFS on {}, REST on {}", addresses.nfs_text(), addresses.api));
}

/// The servers that run.
struct Servers {
    tasks: JoinSet<Ended>,
    stop: watch::Sender<bool>,
}

/// The name of a server, and how it ended.
type Ended = (&'static str, Result<(), ServerError>);

impl Servers {
    /// Starts the servers, and feeds systemd's watchdog if there is one.
    fn start(
        config: &Config,
        listeners: Listeners,
        store: &Arc<Store>,
        api_options: ApiOptions,
        nfs_tls: Option<NfsTls>,
    ) -> Self {
        let nfs_metrics = Arc::new(NfsMetrics::default());
        let mut page = Page::new(Arc::clone(store), Arc::clone(&nfs_metrics));
        page.certificate_ends(certificate_ends(config));
        let gate = Gate::new(&api_options, store);
        follow_token_files(config, &api_options, store, &mut page);
        let (router, metrics) =
            slackwater_api::router_and_metrics(Arc::clone(store), api_options, Arc::new(page));
        let tls = options::tls(config);

        let nfs_options = options::nfs(config, Arc::new(gate), nfs_tls);
        let (sender, stop) = Stop::new();
        let nfs_stop = stop.clone().asked();
        let nfs_store = Arc::clone(store);
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let served =
                slackwater_nfs::run(listeners.nfs, nfs_store, nfs_options, nfs_metrics, nfs_stop);
            ("NFS", served.await.map_err(ServerError::Nfs))
        });
        if let Some(listener) = listeners.metrics {
            let metrics_stop = stop.clone().asked();
            tasks.spawn(async move {
                let served = slackwater_api::run(listener, metrics, None, metrics_stop);
                ("metrics", served.await.map_err(ServerError::Api))
            });
        }
        tasks.spawn(async move {
            let served = slackwater_api::run(listeners.api, router, tls, stop.asked());
            ("REST", served.await.map_err(ServerError::Api))
        });
        tokio::spawn(systemd::feed_watchdog(Arc::clone(store)));
        Self { tasks, stop: sender }
    }

    /// Serves until the stop is asked for or a server ends, then drains all.
    async fn run(mut self, stop: Stop) -> Result<(), ServerError> {
        let outcome = tokio::select! {
            Some(joined) = self.tasks.join_next() => Err(early_end(joined)),
            () = stop.asked() => Ok(()),
        };
        systemd::stopping();
        // An error means that all servers have ended already.
        let _ = self.stop.send(true);
        if tokio::time::timeout(DRAIN_LIMIT, self.drain()).await.is_err() {
            let limit_seconds = DRAIN_LIMIT.as_secs();
            tracing::warn!(limit_seconds, "calls were still under way; they are dropped");
        }
        outcome
    }

    /// Waits for what still runs. How it ends no longer decides how the process ends: each
    /// acknowledged write is in the store, and the store is closed next.
    async fn drain(&mut self) {
        while let Some(joined) = self.tasks.join_next().await {
            match joined {
                Ok((server, Ok(()))) => tracing::info!(server, "drained"),
                Ok((_, Err(error))) => tracing::warn!(%error, "a server did not drain"),
                Err(error) => tracing::error!(%error, "a server panicked while it drained"),
            }
        }
    }
}

/// When the certificate of TLS ends, in seconds since 1970; 0 without one, or if that cannot be told. Says so if it is soon.
fn certificate_ends(config: &Config) -> u64 {
    // Files that cannot be read end the start where they are used.
    let files = options::tls(config);
    let ends = files.as_ref().and_then(|files| files.ends_at_seconds().ok().flatten());
    let Some(certificate) = files.as_ref().map(|files| files.cert.display()) else { return 0 };
    let Some(ends) = ends else {
        tracing::warn!(%certificate, "when the certificate of TLS ends cannot be told");
        return 0;
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let days = ends.saturating_sub(now) / SECONDS_A_DAY;
    if ends <= now {
        tracing::error!(%certificate, "the certificate of TLS, or one behind it in the file, has ended, and clients may refuse it: make another one and restart");
    } else if days < CERTIFICATE_DAYS_MIN {
        tracing::warn!(%certificate, days, "the certificate of TLS ends soon: make another one and restart");
    }
    ends
}

/// Reads the token files again when they change, if there are any.
fn follow_token_files(config: &Config, options: &ApiOptions, store: &Arc<Store>, page: &mut Page) {
    if config.token_files.is_empty() {
        return;
    }
    let (tokens, workers) = (Arc::clone(&options.tokens), Arc::clone(&options.workers));
    let mut files = TokenFiles::new(&config.token_files, tokens, workers, page.token_files());
    if let Some(log) = options.audit.clone() {
        let store = Arc::clone(store);
        files = files.telling(move |changes| audit::tokens_changed(&log, &store, changes));
    }
    tokio::spawn(files.follow());
}

/// The failure that an end before the stop is, whatever the server says.
fn early_end(joined: Result<Ended, JoinError>) -> ServerError {
    match joined {
        Ok((server, Ok(()))) => ServerError::Ended { server },
        Ok((_, Err(error))) => error,
        Err(source) => ServerError::Panicked { task: "a server", source },
    }
}
