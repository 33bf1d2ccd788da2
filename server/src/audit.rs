//! The audit log of a data directory: `audit/`, which the REST face writes, and the server about itself.

use std::path::Path;
use std::sync::Arc;

use slackwater_api::types::Timestamp;
use slackwater_api::{AuditLog, NewChange, TokenChanges};
use slackwater_blockstore::Store;

use crate::error::ServerError;

const NAME: &str = "audit";

/// The log of a data directory that this process has open.
///
/// # Errors
/// The system gives no thread.
pub(crate) fn open(data_dir: &Path) -> Result<Arc<AuditLog>, ServerError> {
    AuditLog::open(data_dir.join(NAME)).map(Arc::new).map_err(ServerError::Runtime)
}

/// Records that the server serves.
pub(crate) fn started(log: &AuditLog, store: &Store) {
    let version = format!("version {}", env!("CARGO_PKG_VERSION"));
    drop(log.append(NewChange::of_appliance(now(store), "start", Some(version))));
}

/// Writes to the disk what was recorded. What comes afterwards is lost.
pub(crate) async fn close(log: Arc<AuditLog>) {
    if let Err(error) = tokio::task::spawn_blocking(move || log.close()).await {
        tracing::error!(%error, "closing the audit log panicked");
    }
}

/// Records what a change of the token files brought.
pub(crate) fn tokens_changed(log: &AuditLog, store: &Store, changes: &TokenChanges) {
    let TokenChanges { added, changed, removed } = changes;
    let about = [("added", added), ("changed", changed), ("removed", removed)]
        .into_iter()
        .filter(|(_, names)| !names.is_empty())
        .map(|(what, names)| format!("{what} {}", names.join(", ")))
        .collect::<Vec<_>>()
        .join("; ");
    drop(log.append(NewChange::of_appliance(now(store), "token files", Some(about))));
}

fn now(store: &Store) -> Timestamp {
    Timestamp::from_nanos(store.now().as_nanos())
}
