//! Mutual TLS: a worker's secret path and its handles are of use by its certificate alone.

use std::net::SocketAddr;
use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    date_time_ymd,
};
use rustls::ClientConfig;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::version::TLS13;
use slackwater_blockstore::{FilePath, Result as StoreResult, SnapshotId};
use slackwater_nfs::{MountGate, MountScope, Mounter, NfsOptions, NfsTls, TlsPolicy};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;
use uuid::Uuid;

use super::tls::{Pair, handshake_with, trusting, tunnel_with};
use super::workers::all_calls;
use crate::common::client::{Client, Cred, FILE_SYNC, MOUNT, NFS, UNSTABLE, call, proc, record};
use crate::common::server::LIMIT;
use crate::common::{Args, Server, SetAttr, root_options, status};

const OWN: Uuid = Uuid::from_u128(0x1111_1111_1111_4111_8111_1111_1111_1111);
const OTHER: Uuid = Uuid::from_u128(0x2222_2222_2222_4222_8222_2222_2222_2222);
const CUT: usize = 16 << 10;

/// Two workers, whose secrets are their ids, and an administrator.
#[derive(Debug)]
struct Gate;

const EXPORT_SECRET: &[u8] = b"of-an-administrator";
const EXPORT: MountScope = MountScope::Export([7; 16]);

impl MountGate for Gate {
    fn enter(&self, secret: &[u8], _: Mounter) -> Option<MountScope> {
        let workers = [OWN, OTHER].into_iter().find(|id| id.to_string().as_bytes() == secret);
        workers.map(MountScope::Worker).or((secret == EXPORT_SECRET).then_some(EXPORT))
    }

    fn is_admitted(&self, _: MountScope) -> bool {
        true
    }

    fn reads_snapshot(&self, _: Uuid, _: SnapshotId) -> StoreResult<bool> {
        Ok(true)
    }
}

/// An authority, and what it issues.
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

    fn issue(&self, name: &str, change: impl FnOnce(&mut CertificateParams)) -> Pair {
        self.issue_for_all(vec![name.to_owned()], change)
    }

    fn issue_for_all(
        &self,
        names: Vec<String>,
        change: impl FnOnce(&mut CertificateParams),
    ) -> Pair {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(names).unwrap();
        change(&mut params);
        let certificate = params.signed_by(&key, &self.issuer).unwrap().der().clone();
        (certificate, PrivateKeyDer::try_from(key.serialize_der()).unwrap())
    }

    fn issue_to_client(&self, names: Vec<String>) -> Pair {
        self.issue_for_all(names, |params| {
            params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        })
    }
}

/// A server that asks for certificates of its authority.
struct Asking {
    server: Server,
    authority: Authority,
}

impl Asking {
    async fn new() -> Self {
        let authority = Authority::new();
        let (certificate, key) = authority.issue("localhost", |params| {
            params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        });
        let policy = TlsPolicy::Mutual(vec![authority.certificate.clone()]);
        let tls = NfsTls::new(vec![certificate], key, policy).unwrap();
        let options = NfsOptions { tls: Some(tls), gate: Some(Arc::new(Gate)), ..root_options() };
        let server = Server::with(options).await;
        server
            .blocking(|store| {
                for id in [OWN, OTHER] {
                    let path = FilePath::parse(&format!("workers/{id}/disk")).unwrap();
                    store.create_file(&path, 1 << 20).unwrap();
                }
            })
            .await;
        Self { server, authority }
    }

    /// A client that shows this certificate, or none.
    fn config(&self, shown: Option<Pair>) -> Arc<ClientConfig> {
        Arc::new(trusting(&self.authority.certificate, &[&TLS13], b"sunrpc", shown))
    }

    /// Where the server is reached with a certificate of this name.
    async fn by(&self, name: &str) -> SocketAddr {
        self.by_all(vec![name.to_owned()]).await
    }

    /// The same, of all these names.
    async fn by_all(&self, names: Vec<String>) -> SocketAddr {
        let config = self.config(Some(self.authority.issue_to_client(names)));
        tunnel_with(self.server.address, config, CUT).await
    }

    /// Whether a call is answered to one who shows this.
    async fn answers(&self, shown: Option<Pair>) -> bool {
        // In TLS 1.3 a client's handshake is done before the server has looked at its certificate.
        let connected = handshake_with(self.server.address, self.config(shown)).await;
        let Ok(mut stream) = connected else { return false };
        let null = record(&call(3, NFS, 0, &Cred::None, &Args::new()));
        let talk = async {
            stream.write_all(&null).await?;
            stream.flush().await?;
            stream.read_u32().await
        };
        timeout(LIMIT, talk).await.unwrap().is_ok()
    }
}

fn path(id: Uuid) -> Vec<u8> {
    format!("/slackwater/.worker/{id}").into_bytes()
}

async fn home(client: &mut Client, root: &[u8], id: Uuid) -> Vec<u8> {
    let workers = client.lookup(root, b"workers").await.unwrap();
    client.lookup(&workers, id.to_string().as_bytes()).await.unwrap()
}

async fn disk(client: &mut Client, root: &[u8], id: Uuid) -> Vec<u8> {
    let home = home(client, root, id).await;
    client.lookup(&home, b"disk").await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_reaches_its_files_by_its_certificate() {
    let asking = Asking::new().await;
    let mut client = Client::connect(asking.by(&OWN.to_string()).await).await;
    let root = client.mount(&path(OWN)).await.unwrap();
    let disk = disk(&mut client, &root, OWN).await;
    client.write(&disk, 0, b"mine", UNSTABLE).await.unwrap();
    client.commit(&disk).await.unwrap();
    assert_eq!(client.read(&disk, 0, 4).await, Ok((b"mine".to_vec(), false)));
    assert_eq!(asking.server.counters().tls_handshakes_failed, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_path_and_handles_of_another_worker_are_of_no_use() {
    let asking = Asking::new().await;
    let mut owner = Client::connect(asking.by(&OWN.to_string()).await).await;
    let root = owner.mount(&path(OWN)).await.unwrap();
    let foreign = home(&mut owner, &root, OWN).await;
    let disk = owner.lookup(&foreign, b"disk").await.unwrap();
    owner.write(&disk, 0, b"mine", FILE_SYNC).await.unwrap();
    for names in [vec![OTHER.to_string()], vec!["node-1.example".to_owned()], both_ids()] {
        let mut thief = Client::connect(asking.by_all(names.clone()).await).await;
        assert_eq!(thief.mount(&path(OWN)).await, Err(status::ACCES), "{names:?}");
        for (procedure, args) in all_calls(&root, &foreign, &disk) {
            let (got, _) = thief.nfs(procedure, &args).await;
            assert_eq!(got, status::ACCES, "procedure {procedure}, {names:?}");
        }
    }
    // Beside a handle of its own, in either place.
    let mut thief = Client::connect(asking.by(&OTHER.to_string()).await).await;
    let root = thief.mount(&path(OTHER)).await.unwrap();
    let own = home(&mut thief, &root, OTHER).await;
    let own_disk = thief.lookup(&own, b"disk").await.unwrap();
    for (procedure, args) in [
        (proc::RENAME, Args::new().place(&foreign, b"disk").place(&own, b"taken")),
        (proc::RENAME, Args::new().place(&own, b"disk").place(&foreign, b"given")),
        (proc::LINK, Args::new().opaque(&disk).place(&own, b"taken")),
        (proc::LINK, Args::new().opaque(&own_disk).place(&foreign, b"given")),
    ] {
        let (got, _) = thief.nfs(procedure, &args).await;
        assert_eq!(got, status::ACCES, "procedure {procedure}");
    }
    assert_eq!(owner.read(&disk, 0, 5).await, Ok((b"mine\0".to_vec(), false)));
    assert_eq!(owner.lookup(&foreign, b"given").await, Err(status::NOENT));
}

/// A certificate with the ids of two workers is for neither, nor for the whole export.
fn both_ids() -> Vec<String> {
    vec![OWN.to_string(), OTHER.to_string()]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_answered_to_a_worker_is_not_replayed_to_another() {
    let asking = Asking::new().await;
    let mut owner = Client::connect(asking.by(&OWN.to_string()).await).await;
    let root = owner.mount(&path(OWN)).await.unwrap();
    let home = home(&mut owner, &root, OWN).await;
    let make = Args::new().place(&home, b"folder").set(&SetAttr::mode(0o700));
    let make = record(&call(4_000, NFS, proc::MKDIR, &Cred::user(0, 0), &make));
    owner.send(&make).await;
    let first = owner.receive().await;
    owner.send(&make).await;
    assert_eq!(owner.receive().await, first);
    let mut thief = Client::connect(asking.by(&OTHER.to_string()).await).await;
    thief.send(&make).await;
    let refused = thief.receive().await;
    assert_eq!(refused[24..28], status::ACCES.to_be_bytes());
    assert_eq!(asking.server.counters().duplicates_replayed, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_whole_export_takes_a_certificate_that_names_no_worker() {
    let asking = Asking::new().await;
    let secret = std::str::from_utf8(EXPORT_SECRET).unwrap();
    let by_path = format!("/slackwater/.export/{secret}");
    let mut client = Client::connect(asking.by("node-1.example").await).await;
    let worker = Client::connect(asking.by(&OWN.to_string()).await).await;
    let unclear = Client::connect(asking.by_all(both_ids()).await).await;
    let mut others = [worker, unclear];
    for path in [by_path.as_bytes(), b"/slackwater"] {
        let root = client.mount(path).await.unwrap();
        let disk = disk(&mut client, &root, OWN).await;
        client.getattr(&disk).await.unwrap();
        for other in &mut others {
            assert_eq!(other.mount(path).await, Err(status::ACCES));
            for handle in [&root, &disk] {
                assert_eq!(other.getattr(handle).await.err(), Some(status::ACCES));
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_certificate_of_the_authority_no_call_is_answered() {
    let asking = Asking::new().await;
    let name = OWN.to_string();
    let own = &asking.authority;
    let expired = own.issue(&name, |params| {
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        params.not_before = date_time_ymd(2020, 1, 1);
        params.not_after = date_time_ymd(2021, 1, 1);
    });
    let of_server = own.issue(&name, |params| {
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    });
    let of_other = Authority::new().issue_to_client(vec![name.clone()]);
    assert!(asking.answers(Some(own.issue_to_client(vec![name]))).await);
    for (what, shown) in [
        ("none", None),
        ("expired", Some(expired)),
        ("of a server", Some(of_server)),
        ("of another authority", Some(of_other)),
    ] {
        assert!(!asking.answers(shown).await, "{what}");
    }
    asking.server.wait_until(|counters| counters.tls_handshakes_failed == 4).await;
    assert_eq!(asking.server.counters().tls_connections, 1);
    // This machine goes on in plain text.
    let mut local = asking.server.client().await;
    let root = local.mount(&path(OWN)).await.unwrap();
    disk(&mut local, &root, OWN).await;
    local.run(MOUNT, 0, &Args::new()).await.end();
}
