//! The export of an appliance at an address that is not loopback's: NFS in TLS.

use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use crate::support::appliance::{ADDRESS_IN_TLS, Appliance};
use crate::support::mount::{Mount, forget_pages};
use crate::support::namespace::Namespace;
use crate::support::noise;
use slackwater_fuse::{Encryption, WorkerCertificate, encryption};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpSocket;
use tokio::time::timeout;

const SIZE: usize = 8 << 20;

/// Another machine's, as far as the appliance can tell; it lists the address.
const OTHER_MACHINE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);

const NFS: u32 = 100_003;
const MOUNT: u32 = 100_005;

/// A namespace in which the appliance and the other machine have their addresses, and nothing else is.
fn namespace() -> Namespace {
    let namespace = Namespace::new();
    namespace.ip(&format!("address add {ADDRESS_IN_TLS}/32 dev lo"));
    namespace.ip(&format!("address add {OTHER_MACHINE}/32 dev lo"));
    namespace
}

/// What the appliance answers another machine in plain text: the words of the record.
async fn call(nfs: SocketAddr, program: u32, procedure: u32, argument: &[u8]) -> Vec<u32> {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((OTHER_MACHINE, 0).into()).unwrap();
    let mut stream = socket.connect(nfs).await.unwrap();
    let length = u32::try_from(argument.len()).unwrap();
    let padding = vec![0; argument.len().next_multiple_of(4) - argument.len()];
    let words = [9, 0, 2, program, 3, procedure, 0, 0, 0, 0, length];
    let bytes = words.iter().flat_map(|word| word.to_be_bytes());
    let record: Vec<u8> = bytes.chain(argument.iter().copied()).chain(padding).collect();
    stream.write_u32(0x8000_0000 | u32::try_from(record.len()).unwrap()).await.unwrap();
    stream.write_all(&record).await.unwrap();
    let length = stream.read_u32().await.unwrap() & 0xffff;
    let mut reply = vec![0; usize::try_from(length).unwrap()];
    stream.read_exact(&mut reply).await.unwrap();
    reply.chunks(4).map(|word| u32::from_be_bytes(word.try_into().unwrap())).collect()
}

/// Plain text of another machine is refused, whatever it shows.
fn assert_that_plain_text_is_refused(appliance: &Appliance) {
    let (access_denied, too_weak) = (13, 5);
    let refused = async {
        let path = appliance.client.mount_path().await.unwrap();
        assert!(path.nfs_tls);
        let mounted = call(appliance.nfs_address, MOUNT, 1, path.path.as_bytes()).await;
        assert_eq!(mounted, [9, 1, 0, 0, 0, 0, access_denied]);
        let asked = call(appliance.nfs_address, NFS, 1, &[0; 32]).await;
        assert_eq!(asked, [9, 1, 1, 1, too_weak]);
    };
    let bounded = async { timeout(Duration::from_secs(60), refused).await };
    appliance.calls.block_on(bounded).unwrap();
}

/// In plain text another machine may mount, as Linux's client does, and that is of no use to it.
fn assert_that_plain_text_reaches_nothing(appliance: &Appliance) {
    let too_weak = 5;
    let refused = async {
        let path = appliance.client.mount_path().await.unwrap();
        let mounted = call(appliance.nfs_address, MOUNT, 1, path.path.as_bytes()).await;
        let [9, 1, 0, 0, 0, 0, 0, length, ref rest @ ..] = mounted[..] else {
            panic!("not mounted: {mounted:?}")
        };
        let words = &rest[..usize::try_from(length).unwrap() / 4];
        let handle: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
        let asked = call(appliance.nfs_address, NFS, 1, &handle).await;
        assert_eq!(asked, [9, 1, 1, 1, too_weak]);
    };
    let bounded = async { timeout(Duration::from_secs(60), refused).await };
    appliance.calls.block_on(bounded).unwrap();
}

/// How NFS is reached with this certificate; else why not.
fn reached(appliance: &Appliance, shown: Option<WorkerCertificate>) -> Result<Encryption, String> {
    let asked = encryption(&appliance.client, appliance.nfs_address, "/slackwater", shown);
    let bounded = async { timeout(Duration::from_secs(60), asked).await };
    appliance.calls.block_on(bounded).unwrap().map_err(|error| error.to_string())
}

#[test]
fn a_certificate_is_shown_across_restarts_and_renewals() {
    namespace().run(|| {
        let mut appliance = Appliance::start_with_client_certificates();
        assert_that_plain_text_reaches_nothing(&appliance);
        let shown = appliance.worker_certificate();
        assert_eq!(reached(&appliance, shown.clone()), Ok(Encryption::Mutual));
        let without = reached(&appliance, None).unwrap_err();
        assert!(without.contains("asks for a certificate"), "{without}");
        appliance.empty_file("disks/one", 1 << 20);
        let mut model = vec![0; 1 << 20];
        let mount = Mount::new(&appliance);
        let file = mount.open("disks/one");
        for round in 0..3_u64 {
            let changed = noise(round + 1, 64 << 10);
            file.write_all_at(&changed, round << 18).unwrap();
            let at = usize::try_from(round << 18).unwrap();
            model[at..at + changed.len()].copy_from_slice(&changed);
            // What comes next is a new connection, with the files as they are then.
            appliance.crash();
            match round {
                // The certificate that was shown first is worth nothing now.
                0 => appliance.replace_authority(),
                1 => appliance.forge_worker_certificate(),
                _ => {}
            }
            appliance.restart();
            if round == 1 {
                let refused = reached(&appliance, shown.clone()).unwrap_err();
                assert!(refused.contains("refuses the certificate"), "{refused}");
                appliance.renew_worker_certificate();
            }
            file.sync_all().unwrap();
        }
        forget_pages(&file);
        let mut all = vec![0; model.len()];
        file.read_exact_at(&mut all, 0).unwrap();
        assert!(all == model);
        assert!(appliance.bytes("disks/one", 0, 1 << 20) == model);
    });
}

#[test]
fn what_is_written_goes_by_tls_across_restarts_of_both_ends() {
    namespace().run(|| {
        let mut appliance = Appliance::start_in_tls();
        assert_that_plain_text_is_refused(&appliance);
        let mut model = noise(1, SIZE);
        appliance.file("disks/base", &model);
        let snapshot = appliance.snapshot("disks/base");
        appliance.clone_of(snapshot, "disks/one");
        let mut mount = Mount::new(&appliance);
        let file = mount.open("disks/one");
        for round in 0..3 {
            let changed = noise(round + 2, 1 << 20);
            let at = usize::try_from(round).unwrap() * (2 << 20) + 5;
            file.write_all_at(&changed, u64::try_from(at).unwrap()).unwrap();
            model[at..at + changed.len()].copy_from_slice(&changed);
            match round {
                0 => {
                    // Not committed: it is sent again, on a new connection.
                    appliance.crash();
                    appliance.restart();
                }
                1 => {
                    mount.kill();
                    mount.resume();
                }
                _ => {}
            }
            file.sync_all().unwrap();
            forget_pages(&file);
            let mut all = vec![0; SIZE];
            file.read_exact_at(&mut all, 0).unwrap();
            assert!(all == model, "{round}");
            assert!(appliance.metrics.snapshot().tls_connections >= 2, "reads and writes");
        }
        assert!(appliance.bytes("disks/one", 0, u64::try_from(SIZE).unwrap()) == model);
    });
}
