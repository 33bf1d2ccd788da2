//! Secret paths and workers as NFS asks for them.

use std::sync::Arc;

use slackwater_api::types::Timestamp;
use slackwater_api::{
    ApiOptions, Holder, MountPaths, PathUser, TokenId, Tokens, Workers, worker_reads,
};
use slackwater_blockstore::{Result as StoreResult, SnapshotId, Store};
use slackwater_nfs::{MountGate, MountScope, Mounter};
use uuid::Uuid;

/// The workers, tokens and secret paths of the appliance, by the store's clock.
#[derive(Debug)]
pub struct Gate {
    workers: Arc<Workers>,
    tokens: Arc<Tokens>,
    paths: Arc<MountPaths>,
    store: Arc<Store>,
}

impl Gate {
    /// The gate of the NFS face of this store, beside a REST face with these options.
    #[must_use]
    pub fn new(options: &ApiOptions, store: &Arc<Store>) -> Self {
        Self {
            workers: Arc::clone(&options.workers),
            tokens: Arc::clone(&options.tokens),
            paths: Arc::clone(&options.mount_paths),
            store: Arc::clone(store),
        }
    }
}

impl MountGate for Gate {
    fn enter(&self, secret: &[u8], mounter: Mounter) -> Option<MountScope> {
        let now = Timestamp::from_nanos(self.store.now().as_nanos());
        let Mounter { address, has_privileged_port } = mounter;
        let user = PathUser { address, has_privileged_port };
        let scope = match self.paths.take(secret, user, now)? {
            Holder::Token(token) => MountScope::Export(*token.as_bytes()),
            Holder::Worker(name, added_at) => {
                MountScope::Worker(self.workers.id_of(&name, added_at)?)
            }
        };
        self.is_admitted(scope).then_some(scope)
    }

    fn is_admitted(&self, scope: MountScope) -> bool {
        match scope {
            MountScope::Export(token) => self.tokens.may_mount(TokenId::from_bytes(token)),
            MountScope::Worker(worker_id) => self.workers.is_worker(worker_id),
        }
    }

    fn reads_snapshot(&self, worker_id: Uuid, snapshot: SnapshotId) -> StoreResult<bool> {
        worker_reads(&self.store, worker_id, snapshot)
    }
}
