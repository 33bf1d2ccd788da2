//! A real appliance: a store in a folder of its own, served over NFS and REST on loopback.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use rustls::pki_types::CertificateDer;
use slackwater_api::{ApiOptions, MetricsSource, Role, Secret, TlsFiles, Token, Tokens};
use slackwater_blockstore::{Error, Options, Store};
use slackwater_client::types::{CreateSnapshot, SnapshotId};
use slackwater_client::{ByteRange, Client, DataSource};
use slackwater_fuse::WorkerCertificate;
use slackwater_nfs::{NfsMetrics, NfsOptions, NfsTls, Squash, TlsPolicy};
use slackwater_server::gate::Gate;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

use super::held_port::HeldPort;

/// What all calls carry, whether the appliance asks for tokens or not.
pub const TOKEN: &str = "token-of-tests-0123456789";

/// Of a network for documentation (RFC 5737): no machine's own.
pub const ADDRESS_IN_TLS: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));

/// Who may mount there.
const CLIENTS: &str = "192.0.2.0/24:rw";

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
    certificate: Option<Certificate>,
    /// Of NFS, since the last start.
    pub metrics: Arc<NfsMetrics>,
    _ports: Vec<HeldPort>,
}

impl Appliance {
    pub fn start() -> Self {
        let calls = runtime();
        let ports = [HeldPort::new(), HeldPort::new()];
        let [nfs_address, api_address] = ports.each_ref().map(HeldPort::address);
        let data = tempfile::tempdir().unwrap();
        let (server, metrics) = serve(&data, nfs_address, api_address, Vec::new(), None);
        let server = Some(server);
        let token = slackwater_client::Token::new(TOKEN).unwrap();
        let client = Client::builder(format!("http://{api_address}")).token(token);
        let (client, certificate) = (client.build().unwrap(), None);
        let ports = ports.into();
        Self {
            server,
            nfs_address,
            api_address,
            client,
            calls,
            data,
            certificate,
            metrics,
            _ports: ports,
        }
    }

    /// Starts it at [`ADDRESS_IN_TLS`]: REST by https, and NFS for none but those that ask for TLS.
    pub fn start_in_tls() -> Self {
        Self::start_with(Certificate::new)
    }

    /// The same, and NFS for none but those that show a certificate of its authority, as [`Self::worker_certificate`] is.
    pub fn start_with_client_certificates() -> Self {
        Self::start_with(|folder| {
            let authority = Authority::new();
            authority.issue(&worker_files(folder));
            Certificate { authority: Some(authority), ..Certificate::new(folder) }
        })
    }

    fn start_with(certificate: impl FnOnce(&TempDir) -> Certificate) -> Self {
        let calls = runtime();
        // Of a namespace of the test's own.
        let [nfs_address, api_address] =
            [12_049, 18_049].map(|port| SocketAddr::new(ADDRESS_IN_TLS, port));
        let data = tempfile::tempdir().unwrap();
        let certificate = certificate(&data);
        // Calls by a name or address other than loopback's need one.
        let tokens = vec![admin()];
        let (server, metrics) = serve(&data, nfs_address, api_address, tokens, Some(&certificate));
        let server = Some(server);
        let token = slackwater_client::Token::new(TOKEN).unwrap();
        let client = Client::builder(format!("https://{api_address}")).token(token);
        let client = client.ca_certificate(std::fs::read(&certificate.files.cert).unwrap());
        let (client, certificate) = (client.build().unwrap(), Some(certificate));
        let ports = Vec::new();
        Self {
            server,
            nfs_address,
            api_address,
            client,
            calls,
            data,
            certificate,
            metrics,
            _ports: ports,
        }
    }

    /// What a worker shows to it, if it asks for that.
    pub fn worker_certificate(&self) -> Option<WorkerCertificate> {
        self.certificate.as_ref()?.authority.as_ref()?;
        Some(worker_files(&self.data))
    }

    /// Puts another certificate, with another key, into the place of the worker's.
    pub fn renew_worker_certificate(&self) {
        let authority = self.certificate.as_ref().and_then(|made| made.authority.as_ref());
        authority.unwrap().issue(&worker_files(&self.data));
    }

    /// Has another authority from the next start on, of which the worker has a certificate now.
    pub fn replace_authority(&mut self) {
        let authority = Authority::new();
        authority.issue(&worker_files(&self.data));
        self.certificate.as_mut().unwrap().authority = Some(authority);
    }

    /// The same with one of an authority that the appliance does not know.
    pub fn forge_worker_certificate(&self) {
        Authority::new().issue(&worker_files(&self.data));
    }

    /// Ends it without a commit: what was not committed is lost, as when it is killed.
    pub fn crash(&mut self) {
        let Some(server) = self.server.take() else { panic!("it is not running") };
        // The store closes its files when the last who holds it is gone.
        server.shutdown_timeout(END_MAX);
    }

    /// Starts it again, at the same addresses.
    pub fn restart(&mut self) {
        self.restart_for(self.certificate.iter().map(|_| admin()).collect());
    }

    /// Starts it again, and it asks for these tokens from now on.
    pub fn restart_for(&mut self, tokens: Vec<Token>) {
        assert!(self.server.is_none(), "it is running");
        let (nfs, api) = (self.nfs_address, self.api_address);
        let (server, metrics) = serve(&self.data, nfs, api, tokens, self.certificate.as_ref());
        (self.server, self.metrics) = (Some(server), metrics);
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

    /// Flips a bit of a block on the disk of an appliance that has crashed. Its index is closed in order by then, so that a start
    /// does not read the block.
    pub fn damage(&self, block: &[u8]) {
        assert!(self.server.is_none(), "it is running");
        let mut damaged = 0;
        for entry in std::fs::read_dir(self.data.path().join("log")).unwrap() {
            let path = entry.unwrap().path();
            let mut bytes = std::fs::read(&path).unwrap();
            if let Some(at) = position_of(&bytes, &block[..32]) {
                bytes[at] ^= 1;
                std::fs::write(path, bytes).unwrap();
                damaged += 1;
            }
        }
        assert_eq!(damaged, 1, "it is stored once, as it is");
    }

    /// The bytes of a file as the appliance has them.
    pub fn bytes(&self, path: &str, offset: u64, length: u64) -> Vec<u8> {
        let range = ByteRange::new(offset, length).unwrap();
        let read = self.client.read_bytes(DataSource::File(path), range);
        self.calls.block_on(read).unwrap().to_vec()
    }
}

fn position_of(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes.windows(wanted.len()).position(|window| window == wanted)
}

/// All calls' token, where one is asked for.
fn admin() -> Token {
    Token { name: "ops".to_owned(), role: Role::Admin, secret: Secret::new(TOKEN) }
}

fn worker_files(folder: &TempDir) -> WorkerCertificate {
    let file = |name| folder.path().join(name);
    WorkerCertificate { certificate: file("worker.pem"), key: file("worker-key.pem") }
}

/// An authority by which workers are known.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: CertificateDer<'static>,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap().der().clone();
        Self { issuer: Issuer::new(params, key), certificate }
    }

    fn issue(&self, files: &WorkerCertificate) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec!["node-1.example".to_owned()]).unwrap();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let made = params.signed_by(&key, &self.issuer).unwrap();
        std::fs::write(&files.certificate, made.pem()).unwrap();
        std::fs::write(&files.key, key.serialize_pem()).unwrap();
    }
}

/// The certificate of an appliance, and the authority of those that it asks for.
struct Certificate {
    files: TlsFiles,
    authority: Option<Authority>,
}

impl Certificate {
    fn new(folder: &TempDir) -> Self {
        let made = rcgen::generate_simple_self_signed([ADDRESS_IN_TLS.to_string()]).unwrap();
        let file = |name| folder.path().join(name);
        let files = TlsFiles { cert: file("cert.pem"), key: file("key.pem") };
        std::fs::write(&files.cert, made.cert.pem()).unwrap();
        std::fs::write(&files.key, made.signing_key.serialize_pem()).unwrap();
        Self { files, authority: None }
    }

    fn nfs(&self) -> NfsTls {
        let (certificates, key) = self.files.read().unwrap();
        let policy = match &self.authority {
            Some(authority) => TlsPolicy::Mutual(vec![authority.certificate.clone()]),
            None => TlsPolicy::Required,
        };
        NfsTls::new(certificates, key, policy).unwrap()
    }
}

/// Longest time until a store is free that its server has let go.
const FREE_TIME_MAX: Duration = Duration::from_secs(60);

/// Opens the store. A server that was ended has let it go, but a process that another test starts at this moment has
/// all that this one has open, the lock among it, until it runs its own program.
fn open(options: &Options) -> Arc<Store> {
    let begun = Instant::now();
    loop {
        match Store::open(options.clone()) {
            Err(Error::Locked { .. }) if begun.elapsed() < FREE_TIME_MAX => {
                std::thread::sleep(Duration::from_millis(10));
            }
            opened => return opened.unwrap(),
        }
    }
}

fn serve(
    data: &TempDir,
    nfs: SocketAddr,
    api: SocketAddr,
    tokens: Vec<Token>,
    certificate: Option<&Certificate>,
) -> (Runtime, Arc<NfsMetrics>) {
    let metrics = Arc::new(NfsMetrics::new());
    let mut options = Options::new(data.path());
    options.memory_bytes = 128 << 20;
    let store = open(&options);
    let runtime = runtime();
    let bind = |address| runtime.block_on(TcpListener::bind(address)).unwrap();
    let (nfs, api) = (bind(nfs), bind(api));
    let nfs_tls = certificate.is_some();
    let options =
        ApiOptions { tokens: Tokens::new(tokens).into(), nfs_tls, ..ApiOptions::default() };
    // As it is by default: no mount by address.
    let nfs_options = NfsOptions {
        squash: Squash::NoRootSquash,
        mounts_by_address: false,
        gate: Some(Arc::new(Gate::new(&options, &store))),
        clients: vec![CLIENTS.parse().unwrap(), "127.0.0.0/8:rw".parse().unwrap()],
        tls: certificate.map(Certificate::nfs),
        ..NfsOptions::default()
    };
    let counted = Arc::clone(&metrics);
    let router = slackwater_api::router(Arc::clone(&store), options, Arc::new(NoMetrics));
    let files = certificate.map(|certificate| certificate.files.clone());
    runtime.spawn(slackwater_nfs::run(nfs, store, nfs_options, counted, std::future::pending()));
    runtime.spawn(slackwater_api::run(api, router, files, std::future::pending()));
    (runtime, metrics)
}
