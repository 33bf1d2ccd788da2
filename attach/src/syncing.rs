//! Syncs of disks, and what those say that were given up.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

use crate::AttachError;
use crate::disk::target_path;
use crate::export::Export;
use crate::kernel::{self, LoopDevice};
use crate::tools::{SYNC, TOOL_TIME_LIMIT, timed_out};

/// A call of `sync`, which goes on by itself and keeps its outcome.
pub(crate) type Syncing = JoinHandle<Result<String, AttachError>>;

impl Export {
    pub(crate) async fn sync(&self, target: &Path) -> Result<(), AttachError> {
        self.sync_within(target, TOOL_TIME_LIMIT).await
    }

    pub(crate) async fn sync_within(
        &self,
        target: &Path,
        limit: Duration,
    ) -> Result<(), AttachError> {
        let target = target_path(target)?;
        let _turn = self.locks.lock(&target).await;
        Self::require_disk(&target)?;
        self.sync_locked(&target, limit).await?;
        if !kernel::is_read_only(&target) {
            return Ok(());
        }
        // A file system that gave up after an error has nothing to sync, and older kernels
        // say that this went well.
        let point = kernel::mounted_at(&target)?.filter(|point| point.read_only);
        // Somebody's remount is no error: all was written before it.
        let is_for_writing =
            |device: LoopDevice| !device.read_only && kernel::has_ext4_errors(&device.device);
        if point.and_then(|point| kernel::loop_device(&point.source)).is_some_and(is_for_writing) {
            let reason = "its file system turned itself read-only after an error".to_owned();
            return Err(AttachError::LostWrites { target, reason });
        }
        Ok(())
    }

    /// Syncs within the limit. As no signal ends a sync that waits for the appliance, one that was
    /// killed would come to its end later, and take along the error that the kernel tells once. So
    /// it goes on, and the next sync fails as it did.
    pub(crate) async fn sync_locked(
        &self,
        target: &Path,
        limit: Duration,
    ) -> Result<(), AttachError> {
        let deadline = Instant::now() + limit;
        let earlier = self.lock_late_syncs().remove(target);
        if let Some(earlier) = earlier {
            match self.await_sync(target, earlier, deadline, limit).await {
                // It was never begun, for want of a permit.
                Err(AttachError::TimedOut { .. })
                    if !self.lock_late_syncs().contains_key(target) => {}
                ended => ended?,
            }
        }
        let call = self.tools.call(SYNC).argument("--file-system").argument(target);
        let syncing = tokio::spawn(call.without_limit().run());
        self.await_sync(target, syncing, deadline, limit).await
    }

    async fn await_sync(
        &self,
        target: &Path,
        mut syncing: Syncing,
        deadline: Instant,
        limit: Duration,
    ) -> Result<(), AttachError> {
        let Ok(ended) = timeout_at(deadline, &mut syncing).await else {
            self.lock_late_syncs().insert(target.to_owned(), syncing);
            let command = format!("sync --file-system {}", target.display());
            return Err(timed_out(&command, self.tools.address(), limit));
        };
        match ended.map_err(|_| AttachError::Interrupted)? {
            Err(error @ AttachError::Tool { .. }) => {
                let (target, reason) = (target.to_owned(), error.to_string());
                Err(AttachError::LostWrites { target, reason })
            }
            other => other.map(drop),
        }
    }

    pub(crate) fn lock_late_syncs(&self) -> MutexGuard<'_, HashMap<PathBuf, Syncing>> {
        self.late_syncs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
