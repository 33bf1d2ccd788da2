//! What all handlers share, and the one way into the store.
//!
//! ```text
//! handler -> ApiState::call -> semaphore -> blocking thread -> Store
//! ```
//!
//! A store call may wait for the disk, so it never runs on a thread of the runtime. It cannot
//! be called off: one whose caller has gone runs to its end and keeps its permit until then,
//! so the bound on blocked threads holds whatever clients do. A check or a garbage collection,
//! which takes long, is told that its caller left, and ends by itself soon.

use std::fmt;
use std::sync::Arc;

use slackwater_blockstore::{Progress, Result as StoreResult, Store};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::attempts::Attempts;
use crate::audit::recorder::Recorder;
use crate::convert;
use crate::error::ProblemCode;
use crate::failure::Failure;
use crate::idempotency::Replays;
use crate::maintenance::{Maintenance, Waiting};
use crate::metrics::{ApiMetrics, MetricsSource};
use crate::options::ApiOptions;
use crate::routes::vmstore::session::Sessions;

/// The state as handlers take it.
pub(crate) type Shared = Arc<ApiState>;

/// Sums over all entries of a file at once: each may take tens of megabytes of memory, and seconds.
const SUMS_MAX: usize = 1;

/// What all handlers share.
pub(crate) struct ApiState {
    pub(crate) store: Arc<Store>,
    pub(crate) options: ApiOptions,
    pub(crate) metrics: Arc<dyn MetricsSource>,
    pub(crate) api_metrics: ApiMetrics,
    pub(crate) replays: Replays,
    pub(crate) sessions: Sessions,
    pub(crate) attempts: Attempts,
    pub(crate) recorder: Recorder,
    /// Held while publishers of snapshots are looked for and changed.
    pub(crate) publishing: Arc<tokio::sync::Mutex<()>>,
    /// Permits of requests that are carried out or wait.
    pub(crate) requests: Arc<Semaphore>,
    /// Bytes of bodies.
    bodies: Arc<Semaphore>,
    store_calls: Arc<Semaphore>,
    data_streams: Arc<Semaphore>,
    /// The check or garbage collection under way: each loads the whole store, a second one would only slow the first.
    pub(crate) maintenance: Arc<Maintenance>,
    sums: Arc<Semaphore>,
}

impl fmt::Debug for ApiState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiState").field("options", &self.options).finish_non_exhaustive()
    }
}

impl ApiState {
    pub(crate) fn new(
        store: Arc<Store>,
        options: ApiOptions,
        metrics: Arc<dyn MetricsSource>,
    ) -> Shared {
        let mut api_metrics = ApiMetrics::new();
        if let Some(log) = &options.audit {
            api_metrics.register_audit(log);
        }
        Arc::new(Self {
            store,
            metrics,
            api_metrics,
            recorder: Recorder::new(options.audit.clone()),
            publishing: Arc::default(),
            replays: Replays::default(),
            sessions: Sessions::default(),
            attempts: Attempts::default(),
            requests: Arc::new(Semaphore::new(options.requests_max)),
            // The largest body must have room, whatever the options say.
            bodies: Arc::new(Semaphore::new(
                options.bodies_bytes_max.clamp(options.body_bytes_max, Semaphore::MAX_PERMITS),
            )),
            store_calls: Arc::new(Semaphore::new(options.store_calls_max)),
            data_streams: Arc::new(Semaphore::new(options.data_streams_max)),
            maintenance: Arc::default(),
            sums: Arc::new(Semaphore::new(SUMS_MAX)),
            options,
        })
    }

    /// Runs `work` on a blocking thread once it is its turn.
    pub(crate) async fn call<T, W>(&self, work: W) -> Result<T, Failure>
    where
        T: Send + 'static,
        W: FnOnce(&Store) -> StoreResult<T> + Send + 'static,
    {
        let permit = self.turn(&self.store_calls).await?;
        self.run(permit, work).await
    }

    /// The same, for one step of a transfer: it ends the wait where the step takes too long.
    pub(crate) async fn call_step<T, W>(&self, work: W) -> Result<T, Failure>
    where
        T: Send + 'static,
        W: FnOnce(&Store) -> StoreResult<T> + Send + 'static,
    {
        let limit = self.options.request_timeout;
        match tokio::time::timeout(limit, self.call(work)).await {
            Ok(outcome) => outcome,
            Err(_) => {
                let detail = format!("the disk took longer than {} s", limit.as_secs());
                Err(Failure::new(ProblemCode::Timeout, detail))
            }
        }
    }

    /// The same for a check or a garbage collection, of which one runs at a time. It ends early if this future is dropped.
    pub(crate) async fn call_maintenance<T, W>(
        &self,
        call: &'static str,
        work: W,
    ) -> Result<T, Failure>
    where
        T: Send + 'static,
        W: FnOnce(&Store, &Progress) -> StoreResult<T> + Send + 'static,
    {
        let turn = self.maintenance.begin(call, convert::timestamp(self.store.now()))?;
        let progress = turn.progress();
        let waiting = Waiting::new(call, Arc::clone(&progress));
        let limit = self.options.maintenance_timeout;
        let running = self.run(turn, move |store| work(store, &progress));
        // Here, as a request with an idempotency key goes on when its caller does not wait any more.
        let Ok(outcome) = tokio::time::timeout(limit, running).await else {
            let detail =
                format!("the {call} took longer than {} s, and was ended", limit.as_secs());
            return Err(Failure::new(ProblemCode::Timeout, detail));
        };
        waiting.answered();
        outcome
    }

    /// The same for a sum over all that a file or snapshot has, of which few run at a time.
    pub(crate) async fn call_sum<T, W>(&self, work: W) -> Result<T, Failure>
    where
        T: Send + 'static,
        W: FnOnce(&Store) -> StoreResult<T> + Send + 'static,
    {
        let permit = self.turn(&self.sums).await?;
        self.run(permit, work).await
    }

    /// The right to transfer data, to be held until the transfer ends.
    pub(crate) async fn data_stream(&self) -> Result<OwnedSemaphorePermit, Failure> {
        self.turn(&self.data_streams).await
    }

    /// Memory for a body, to be held as long as what is made of it.
    pub(crate) async fn body_memory(&self, bytes: usize) -> Result<OwnedSemaphorePermit, Failure> {
        let permits = u32::try_from(bytes).unwrap_or(u32::MAX);
        let refused =
            |seconds| format!("no memory for a body of {bytes} bytes came free within {seconds} s");
        self.acquire(&self.bodies, permits, refused).await
    }

    async fn turn(&self, semaphore: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit, Failure> {
        let refused = |seconds| format!("no turn came within {seconds} s, the store is busy");
        self.acquire(semaphore, 1, refused).await
    }

    /// Waits for permits, but no longer than a call may wait; `refused` says after how many seconds.
    async fn acquire(
        &self,
        semaphore: &Arc<Semaphore>,
        permits: u32,
        refused: impl FnOnce(u64) -> String,
    ) -> Result<OwnedSemaphorePermit, Failure> {
        let limit = self.options.queue_timeout;
        let wait = Arc::clone(semaphore).acquire_many_owned(permits);
        match tokio::time::timeout(limit, wait).await {
            Ok(Ok(permit)) => Ok(permit),
            Ok(Err(_)) => Err(Failure::new(ProblemCode::Closed, "the server is stopping")),
            Err(_) => Err(Failure::new(ProblemCode::Overloaded, refused(limit.as_secs()))),
        }
    }

    /// Runs it now; `held` is kept until its end, whatever becomes of the caller.
    async fn run<T, W, H>(&self, held: H, work: W) -> Result<T, Failure>
    where
        T: Send + 'static,
        H: Send + 'static,
        W: FnOnce(&Store) -> StoreResult<T> + Send + 'static,
    {
        let store = Arc::clone(&self.store);
        let task = tokio::task::spawn_blocking(move || {
            let result = work(&store);
            drop(held);
            result
        });
        match task.await {
            Ok(result) => result.map_err(Failure::from),
            Err(error) => {
                tracing::error!(%error, "a store call panicked");
                Err(Failure::new(
                    ProblemCode::Internal,
                    "the store call failed, see the server's log",
                ))
            }
        }
    }
}
