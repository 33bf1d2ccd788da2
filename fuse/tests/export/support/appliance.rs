//! A real appliance: a store in a folder of its own, served over NFS and REST on loopback.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use slackwater_api::{ApiOptions, MetricsSource, Token, Tokens};
use slackwater_blockstore::{Options, Store};
use slackwater_client::types::{CreateSnapshot, SnapshotId};
use slackwater_client::{ByteRange, Client, DataSource};
use slackwater_nfs::{NfsMetrics, NfsOptions, Squash};
use slackwater_server::gate::Gate;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

use super::held_port::HeldPort;

/// What all calls carry, whether the appliance asks for tokens or not.
pub const TOKEN: &str = "token-of-tests-0123456789";

/// Longer than any test's store needs to end.
const END_MAX: Duration = Duration::from_secs(60);

#[derive(Debug)]
struct NoMetrics;

impl MetricsSource for NoMetrics {
    fn render(&self) -> String {
        String::new()
    }
}

pub fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// Fields in the order in which they must go: the store before its directory.
pub struct Appliance {
    server: Option<Runtime>,
    pub nfs_address: SocketAddr,
    api_address: SocketAddr,
    pub client: Client,
    /// For the test's own calls.
    pub calls: Runtime,
    data: TempDir,
    _ports: [HeldPort; 2],
}

impl Appliance {
    pub fn start() -> Self {
        let calls = runtime();
        let ports = [HeldPort::new(), HeldPort::new()];
        let [nfs_address, api_address] = ports.each_ref().map(HeldPort::address);
        let data = tempfile::tempdir().unwrap();
        let server = Some(serve(&data, nfs_address, api_address, Vec::new()));
        let token = slackwater_client::Token::new(TOKEN).unwrap();
        let client = Client::builder(format!("http://{api_address}")).token(token);
        let client = client.build().unwrap();
        Self { server, nfs_address, api_address, client, calls, data, _ports: ports }
    }

    /// Ends it without a commit: what was not committed is lost, as when it is killed.
    pub fn crash(&mut self) {
        let Some(server) = self.server.take() else { panic!("it is not running") };
        // The store closes its files when the last who holds it is gone.
        server.shutdown_timeout(END_MAX);
    }

    /// Starts it again, at the same addresses.
    pub fn restart(&mut self) {
        self.restart_for(Vec::new());
    }

    /// Starts it again, and it asks for these tokens from now on.
    pub fn restart_for(&mut self, tokens: Vec<Token>) {
        assert!(self.server.is_none(), "it is running");
        self.server = Some(serve(&self.data, self.nfs_address, self.api_address, tokens));
    }

    /// A file with this content.
    pub fn file(&self, path: &str, content: &[u8]) {
        let size_bytes = u64::try_from(content.len()).unwrap();
        self.calls.block_on(async {
            self.client.create_file(path, size_bytes).await.unwrap();
            for (number, piece) in (0_u64..).zip(content.chunks(4 << 20)) {
                let piece = piece.to_vec().into();
                self.client.write_bytes(path, number * (4 << 20), piece).await.unwrap();
            }
        });
    }

    pub fn empty_file(&self, path: &str, size_bytes: u64) {
        self.calls.block_on(self.client.create_file(path, size_bytes)).unwrap();
    }

    pub fn delete(&self, path: &str) {
        self.calls.block_on(self.client.delete_file(path)).unwrap();
    }

    pub fn snapshot(&self, path: &str) -> SnapshotId {
        let request = CreateSnapshot { path: path.to_owned(), ..CreateSnapshot::default() };
        self.calls.block_on(self.client.create_snapshot(&request)).unwrap().id
    }

    pub fn clone_of(&self, snapshot: SnapshotId, path: &str) {
        self.calls.block_on(self.client.create_clone(snapshot, path)).unwrap();
    }

    /// The bytes of a file as the appliance has them.
    pub fn bytes(&self, path: &str, offset: u64, length: u64) -> Vec<u8> {
        let range = ByteRange::new(offset, length).unwrap();
        let read = self.client.read_bytes(DataSource::File(path), range);
        self.calls.block_on(read).unwrap().to_vec()
    }
}

fn serve(data: &TempDir, nfs: SocketAddr, api: SocketAddr, tokens: Vec<Token>) -> Runtime {
    let mut options = Options::new(data.path());
    options.memory_bytes = 128 << 20;
    // At the first try: a server that was ended has let it go.
    let store = Store::open(options).unwrap();
    let runtime = runtime();
    let bind = |address| runtime.block_on(TcpListener::bind(address)).unwrap();
    let (nfs, api) = (bind(nfs), bind(api));
    let options = ApiOptions { tokens: Tokens::new(tokens).into(), ..ApiOptions::default() };
    // As it is by default: no mount by address.
    let nfs_options = NfsOptions {
        squash: Squash::NoRootSquash,
        mounts_by_address: false,
        gate: Some(Arc::new(Gate::new(&options, &store))),
        ..NfsOptions::default()
    };
    let router = slackwater_api::router(Arc::clone(&store), options, Arc::new(NoMetrics));
    let metrics = Arc::new(NfsMetrics::new());
    runtime.spawn(slackwater_nfs::run(nfs, store, nfs_options, metrics, std::future::pending()));
    runtime.spawn(slackwater_api::run(api, router, None, std::future::pending()));
    runtime
}
