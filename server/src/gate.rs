//! The workers as NFS asks for them.

use std::sync::Arc;

use slackwater_api::Workers;
use slackwater_api::types::Timestamp;
use slackwater_blockstore::Store;
use slackwater_nfs::{WorkerGate, WorkerScope};

/// The workers of the appliance, by the store's clock.
#[derive(Debug)]
pub(crate) struct Gate {
    workers: Arc<Workers>,
    store: Arc<Store>,
}

impl Gate {
    pub(crate) const fn new(workers: Arc<Workers>, store: Arc<Store>) -> Self {
        Self { workers, store }
    }
}

impl WorkerGate for Gate {
    fn enter(&self, secret: &[u8]) -> Option<WorkerScope> {
        let now = Timestamp::from_nanos(self.store.now().as_nanos());
        self.workers.by_mount_secret(secret, now).map(|worker_id| WorkerScope { worker_id })
    }

    fn is_admitted(&self, scope: WorkerScope) -> bool {
        self.workers.is_worker(scope.worker_id)
    }
}
