//! Secret paths and workers as NFS asks for them.

use std::sync::Arc;

use slackwater_api::types::Timestamp;
use slackwater_api::{ApiOptions, Mounted, TokenId, Tokens, Workers};
use slackwater_blockstore::Store;
use slackwater_nfs::{MountGate, MountScope};

/// The workers and tokens of the appliance, by the store's clock.
#[derive(Debug)]
pub(crate) struct Gate {
    workers: Arc<Workers>,
    tokens: Arc<Tokens>,
    store: Arc<Store>,
}

impl Gate {
    pub(crate) fn new(options: &ApiOptions, store: &Arc<Store>) -> Self {
        let (workers, tokens) = (Arc::clone(&options.workers), Arc::clone(&options.tokens));
        Self { workers, tokens, store: Arc::clone(store) }
    }
}

impl MountGate for Gate {
    fn enter(&self, secret: &[u8]) -> Option<MountScope> {
        let now = Timestamp::from_nanos(self.store.now().as_nanos());
        let scope = match self.workers.by_mount_secret(secret, now)? {
            Mounted::Export(token) => MountScope::Export(*token.as_bytes()),
            Mounted::Worker(worker_id) => MountScope::Worker(worker_id),
        };
        self.is_admitted(scope).then_some(scope)
    }

    fn is_admitted(&self, scope: MountScope) -> bool {
        match scope {
            MountScope::Export(token) => self.tokens.may_mount(TokenId::from_bytes(token)),
            MountScope::Worker(worker_id) => self.workers.is_worker(worker_id),
        }
    }
}
