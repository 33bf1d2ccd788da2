//! What a server is told about how to serve, each bound with its reason.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::audit::AuditLog;
use crate::auth::VmstoreCredentials;
use crate::mount_paths::MountPaths;
use crate::references::ReferenceKey;
use crate::tokens::Tokens;
use crate::workers::Workers;

/// How the REST face serves. `Default` serves everybody without a token, which is for
/// loopback only: see [`crate::auth::require_tokens_for`].
#[derive(Clone, Debug)]
pub struct ApiOptions {
    /// The tokens that are taken, beside the workers' credentials; empty: callers need none. They can be replaced while
    /// the server runs.
    pub tokens: Arc<Tokens>,
    /// The machines that have credentials of their own.
    pub workers: Arc<Workers>,
    /// The secret paths by which callers mount.
    pub mount_paths: Arc<MountPaths>,
    /// Whether NFS offers TLS (RFC 9289), which clients that trust this API are told.
    pub nfs_tls: bool,
    /// Where changes are recorded; `None`: nowhere.
    pub audit: Option<Arc<AuditLog>>,
    /// How long the previous credential still counts after a worker used its new one for the first time: its other
    /// processes read the new one before their next call.
    pub credential_grace: Duration,
    /// Who may log in to the VMstore face; `None`: the face is off.
    pub vmstore: Option<VmstoreCredentials>,
    /// What references to snapshots are made with. As long as it is empty, none is made: a server whose
    /// disk has no room for a key serves without.
    pub reference_key: Arc<OnceLock<ReferenceKey>>,
    /// How long ago something was published last when that ends by itself; `None`: never.
    pub published_age_max: Option<Duration>,
    /// Path under which NFS clients mount the export: shown to users, and stripped from the
    /// paths that VMstore clients send.
    pub export_path: String,
    /// Largest JSON body. A snapshot request with all its labels takes about 600 KiB.
    pub body_bytes_max: usize,
    /// Bytes of all JSON bodies of requests under way; at least one of the largest has room.
    pub bodies_bytes_max: usize,
    /// Longest time of a call, but for data, checks and garbage collections. Clients give up
    /// after about as long.
    pub request_timeout: Duration,
    /// Longest time until a JSON body is there: shorter than [`Self::request_timeout`], so that
    /// a slow body is told from a slow store.
    pub body_timeout: Duration,
    /// Longest time of a check or a garbage collection: these read the whole store.
    pub maintenance_timeout: Duration,
    /// Longest time in which a transfer of data makes no progress.
    pub stall_timeout: Duration,
    /// Longest time that a call waits for its turn when the store is busy; then `overloaded`
    /// is answered, which is better than an answer that nobody waits for any more.
    pub queue_timeout: Duration,
    /// Requests that are carried out or wait, all routes together.
    pub requests_max: usize,
    /// Store calls at once: a bound on blocked threads, well above what the disk can do in
    /// parallel.
    pub store_calls_max: usize,
    /// Transfers of data at once, each holding at most [`Self::STREAM_BYTES_MAX`].
    pub data_streams_max: usize,
}

impl ApiOptions {
    /// Memory that one transfer of data holds: two pieces of one MiB and one being made.
    pub const STREAM_BYTES_MAX: usize = 3 << 20;
}

impl Default for ApiOptions {
    fn default() -> Self {
        Self {
            tokens: Arc::default(),
            workers: Arc::default(),
            mount_paths: Arc::default(),
            nfs_tls: false,
            audit: None,
            credential_grace: Duration::from_secs(60),
            vmstore: None,
            reference_key: Arc::default(),
            published_age_max: None,
            export_path: "/slackwater".to_owned(),
            body_bytes_max: 1 << 20,
            bodies_bytes_max: 32 << 20,
            request_timeout: Duration::from_secs(30),
            body_timeout: Duration::from_secs(20),
            maintenance_timeout: Duration::from_secs(24 * 3600),
            stall_timeout: Duration::from_secs(60),
            queue_timeout: Duration::from_secs(5),
            requests_max: 512,
            store_calls_max: 32,
            data_streams_max: 32,
        }
    }
}
