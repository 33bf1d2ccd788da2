//! A hostile container on a worker, behind a real bridge and masquerading: the appliance sees the worker's address, which
//! it lists, and lets it reach nothing.
//!
//! The container claims to be any user. It knows the ids, names and paths of all disks, the worker's id, and how handles
//! look; it has no token, no credential and no secret path.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, unreachable_pub, reason = "tests")]

mod common;

#[path = "container/calls.rs"]
mod calls;
#[path = "../../tests/namespace.rs"]
mod namespace;
#[path = "container/network.rs"]
mod network;
#[path = "../../tests/random.rs"]
mod random;

use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::path::PathBuf;

use calls::{Call, Caller, status};
use common::nfs::{BY_ADDRESS, Client, Handle, MOUNT, NFS, opaque};
use common::{Server, connect};
use namespace::Namespace;
use network::{APPLIANCE, Network, WORKER};
use random::Random;
use tempfile::TempDir;

const ADMIN: &str = "admin-0123456789abcdef";
const WORKER_ID: &str = "6f1f3c1e-5d0c-4d55-9d61-2f5b6f0f6c01";
const CREDENTIAL_PREFIX: &str = "slackwater-worker-";

/// What is on the disks, and must not come out.
const SECRET: &[u8] = b"what is on the disk of another container";

const RANDOM_CALLS: usize = 10_000;

/// The name of what calls make and remove.
const MADE: &[u8] = b"made";

/// An appliance in a namespace of its own, with a worker that has mounted, and an administrator's file.
struct Appliance {
    network: Network,
    server: Server,
    _directory: TempDir,
}

/// What the worker has open.
struct Mounted {
    /// The last part of the path.
    secret: String,
    directory: Handle,
    disk: Handle,
}

/// Statuses of a call whose handle is none, or is of what the caller does not reach (RFC 1813 section 2.6).
const BAD_HANDLE: u32 = 10_001;
const STALE: u32 = 70;
const ACCESS: u32 = 13;

impl Appliance {
    fn start(arguments: &[&str]) -> Self {
        let network = Network::new();
        let directory = TempDir::new().unwrap();
        let tokens = directory.path().join("tokens");
        std::fs::write(&tokens, format!("ops admin {ADMIN}\n")).unwrap();
        let listen = format!("{APPLIANCE}:0");
        let data_dir: PathBuf = directory.path().join("store");
        let mut command = network.appliance.command(env!("CARGO_BIN_EXE_slackwaterd"));
        command
            .args(["--nfs-listen", &listen, "--api-listen", &listen, "--squash", "no_root_squash"])
            .args(["--nfs-client", &format!("{WORKER}:rw"), "--insecure-plain-http", "true"])
            .arg("--data-dir")
            .arg(data_dir)
            .arg("--token-file")
            .arg(tokens)
            .args(arguments);
        let server = Server::start_with(&mut command);
        Self { network, server, _directory: directory }
    }

    /// A call of the worker's machine by REST.
    fn rest(&self, method: &str, path: &str, secret: &str, body: &str) -> (u16, String) {
        let api = self.server.api;
        self.network.worker.run(|| rest(api, method, path, Some(secret), body))
    }

    /// Adds the worker, which joins; its credential.
    fn join(&self) -> String {
        let added = self.rest("POST", "/v1/workers", ADMIN, r#"{"name":"node-7"}"#);
        let join_token = field(&added.1, "join_token");
        let credential = format!("{CREDENTIAL_PREFIX}{}", "5a".repeat(32));
        let hash = blake3::hash(credential.as_bytes()).to_hex();
        let body = format!(r#"{{"worker_id":"{WORKER_ID}","credential_blake3":"{hash}"}}"#);
        let joined = self.rest("POST", "/v1/join", &join_token, &body);
        assert_eq!(joined.0, 200, "{joined:?}");
        credential
    }

    /// The worker mounts by its secret path, and writes its disk.
    fn mount(&self, credential: &str) -> Mounted {
        let (status, body) = self.rest("POST", "/v1/mount-paths", credential, "");
        assert_eq!(status, 201, "{body}");
        let (nfs, path) = (self.server.nfs, field(&body, "path"));
        self.network.worker.run(|| {
            let mut client = Client::connect(nfs);
            let mut at = client.mount(&path);
            for name in ["workers", WORKER_ID, "disks"] {
                at = client.lookup(&at, name);
            }
            let disk = client.lookup(&at, "one");
            client.write(&disk, 0, SECRET);
            client.commit(&disk);
            let secret = path.rsplit('/').next().unwrap().to_owned();
            Mounted { secret, directory: at, disk }
        })
    }

    fn make_files(&self) {
        for path in [format!("workers/{WORKER_ID}/disks/one"), "backups/db".to_owned()] {
            let body = format!(r#"{{"path":"{path}","size_bytes":65536}}"#);
            assert_eq!(self.rest("POST", "/v1/files", ADMIN, &body).0, 201);
        }
    }

    /// All files, their sizes and times, as the administrator sees them.
    fn files(&self) -> String {
        let (status, files) = self.rest("GET", "/v1/files?limit=1000", ADMIN, "");
        assert_eq!(status, 200, "{files}");
        files
    }
}

/// A call by HTTP; status and body.
fn rest(
    api: SocketAddr,
    method: &str,
    path: &str,
    secret: Option<&str>,
    body: &str,
) -> (u16, String) {
    let mut stream = connect(api);
    let bearer =
        secret.map_or(String::new(), |secret| format!("Authorization: Bearer {secret}\r\n"));
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: {api}\r\nConnection: close\r\n{bearer}\
         Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

/// The text of a field of JSON.
fn field(json: &str, name: &str) -> String {
    let (_, rest) = json.split_once(&format!(r#""{name}":""#)).unwrap_or_else(|| panic!("{json}"));
    rest.split('"').next().unwrap().to_owned()
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

/// Paths that a container may try to mount: all that is known, and guesses of what is not.
fn paths() -> Vec<String> {
    let mut paths: Vec<String> =
        ["", "/", "/slackwater", "/slackwater/", "slackwater", "/slackwater/."]
            .map(str::to_owned)
            .to_vec();
    for below in [
        ".export",
        ".worker",
        ".snapshot",
        "workers",
        "backups",
        "../slackwater",
        &format!("workers/{WORKER_ID}"),
        &format!("workers/{WORKER_ID}/disks/one"),
        &format!(".worker/{WORKER_ID}"),
        &format!(".worker/{WORKER_ID}.{}", "0".repeat(64)),
        &format!(".worker/{}", "A".repeat(43)),
        &format!(".export/{}", "A".repeat(43)),
    ] {
        paths.push(format!("/slackwater/{below}"));
    }
    paths
}

/// The handle with one bit changed, each of them; and some that are none.
fn forged(handle: &[u8]) -> Vec<Vec<u8>> {
    let mut forged = vec![Vec::new(), vec![0; handle.len()], vec![0xff; 64]];
    for bit in 0..8 * handle.len() {
        let mut other = handle.to_vec();
        other[bit / 8] ^= 1 << (bit % 8);
        forged.push(other);
    }
    forged
}

/// Calls on handles as RFC 1813 has them: what each procedure begins with is there, so that only the handle is wrong.
fn well_formed(procedure: u32, handle: &[u8]) -> Call {
    let mut arguments = Vec::new();
    opaque(&mut arguments, handle);
    let name = |arguments: &mut Vec<u8>| opaque(arguments, MADE);
    match procedure {
        // SETATTR: nothing to set, no guard.
        2 => arguments.extend([0; 28]),
        3 => opaque(&mut arguments, b"one"),
        12 | 13 => name(&mut arguments),
        // ACCESS: all.
        4 => arguments.extend(63_u32.to_be_bytes()),
        // READ and COMMIT: 4 KiB from the begin.
        6 | 21 => arguments.extend([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 16, 0]),
        7 => {
            arguments.extend([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 2]);
            opaque(&mut arguments, b"evil");
        }
        // CREATE, unchecked; MKDIR.
        8 => {
            name(&mut arguments);
            arguments.extend([0; 28]);
        }
        9 => {
            name(&mut arguments);
            arguments.extend([0; 24]);
        }
        10 => {
            name(&mut arguments);
            arguments.extend([0; 24]);
            opaque(&mut arguments, b"/etc/passwd");
        }
        // MKNOD: a FIFO.
        11 => {
            name(&mut arguments);
            arguments.extend([0, 0, 0, 7]);
            arguments.extend([0; 24]);
        }
        14 => {
            name(&mut arguments);
            opaque(&mut arguments, handle);
            opaque(&mut arguments, MADE);
        }
        15 => {
            opaque(&mut arguments, handle);
            name(&mut arguments);
        }
        // READDIR and READDIRPLUS from the begin.
        16 => arguments.extend([&[0; 16][..], &[0, 0, 16, 0]].concat()),
        17 => arguments.extend([&[0; 16][..], &[0, 0, 16, 0, 0, 0, 16, 0]].concat()),
        _ => {}
    }
    Call { program: NFS, procedure, arguments }
}

/// All that a process with the worker's address tries.
fn attack(nfs: SocketAddr, api: SocketAddr, mounted: &Mounted, random: &mut Random) {
    // DUMP tells that the worker mounts, and not by which path (RFC 1813 section 5.2.2).
    let dump = Call { program: MOUNT, procedure: 2, arguments: Vec::new() };
    let told = Caller::new(nfs, 0, random).send(&dump).unwrap();
    assert!(!contains(&told, mounted.secret.as_bytes()), "{:?}", String::from_utf8_lossy(&told));

    let paths = paths();
    let mut handles = forged(&mounted.directory);
    handles.extend(forged(&mounted.disk));
    for uid in [0, 1000] {
        let mut caller = Caller::new(nfs, uid, random);
        for path in &paths {
            let got = status(&caller.send(&Call::mount(path)).unwrap());
            assert!(got.is_some_and(|got| got != 0), "{path}: {got:?}");
        }
        for handle in &handles {
            for procedure in 1..22 {
                let call = well_formed(procedure, handle);
                let got = status(&caller.send(&call).unwrap());
                let is_refused = got.is_some_and(|got| [BAD_HANDLE, STALE, ACCESS].contains(&got));
                assert!(is_refused, "{call:?}: {got:?}");
            }
        }
    }
    let mut callers = [0, 1000, 65_534].map(|uid| Caller::new(nfs, uid, random));
    for _ in 0..RANDOM_CALLS {
        let call = Call::by_chance(random, &handles, &paths);
        let reply = callers[random.below(3)].send(&call).unwrap_or_default();
        assert!(!contains(&reply, SECRET), "{call:?}");
        assert!(call.is_open() || status(&reply) != Some(0), "{call:?} is carried out");
    }

    for (method, path) in [
        ("GET", "/v1/files"),
        ("GET", "/v1/files/backups%2Fdb/data"),
        ("DELETE", "/v1/files/backups%2Fdb"),
        ("GET", "/v1/snapshots"),
        ("POST", "/v1/snapshots"),
        ("POST", "/v1/clones"),
        ("POST", "/v1/mount-paths"),
        ("GET", "/v1/workers"),
        ("POST", "/v1/workers"),
        ("GET", "/v1/audit"),
        ("GET", "/metrics"),
    ] {
        let (status, body) = rest(api, method, path, None, "");
        assert_eq!(status, 401, "{method} {path}: {body}");
    }
}

/// The calls of [`well_formed`] are carried out with the worker's own handles, where they are for what the handle is of;
/// the others have a status of another kind.
fn assert_calls_succeed(nfs: SocketAddr, mounted: &Mounted, random: &mut Random) {
    let mut caller = Caller::new(nfs, 0, random);
    // In this order: what one makes the next takes away.
    let of_directory = [1, 2, 3, 4, 8, 12, 9, 13, 10, 14, 12, 11, 12, 16, 17, 18, 19, 20];
    for procedure in of_directory {
        let got = status(&caller.send(&well_formed(procedure, &mounted.directory)).unwrap());
        assert_eq!(got, Some(0), "procedure {procedure} of a directory");
    }
    for procedure in [1, 2, 4, 7, 6, 18, 19, 20, 21] {
        let got = status(&caller.send(&well_formed(procedure, &mounted.disk)).unwrap());
        assert_eq!(got, Some(0), "procedure {procedure} of a file");
    }
    for procedure in [5, 15] {
        let got = status(&caller.send(&well_formed(procedure, &mounted.directory)).unwrap());
        let is_refused = got.is_none_or(|got| [0, BAD_HANDLE, STALE, ACCESS].contains(&got));
        assert!(!is_refused, "procedure {procedure}: {got:?}");
    }
}

/// What the container gets where addresses alone let in: the test's own proof that it gets there.
#[test]
fn where_addresses_let_in_a_container_reads_the_disks_of_others() {
    let appliance = Appliance::start(&BY_ADDRESS);
    let credential = appliance.join();
    appliance.make_files();
    appliance.mount(&credential);
    let nfs = appliance.server.nfs;
    let read = appliance.network.container.run(|| {
        let mut client = Client::connect(nfs);
        let mut at = client.mount("/slackwater");
        for name in ["workers", WORKER_ID, "disks", "one"] {
            at = client.lookup(&at, name);
        }
        client.read(&at, 0, 4096)
    });
    assert!(read.starts_with(SECRET));
}

#[test]
fn a_hostile_container_reaches_nothing_from_behind_the_workers_address() {
    let appliance = Appliance::start(&[]);
    let credential = appliance.join();
    appliance.make_files();
    let mounted = appliance.mount(&credential);
    let before = appliance.files();
    let (nfs, api) = (appliance.server.nfs, appliance.server.api);
    let mut random = Random::new();
    let mut attacked = |from: &Namespace| from.run(|| attack(nfs, api, &mounted, &mut random));
    attacked(&appliance.network.container);
    // And a user of the worker itself.
    attacked(&appliance.network.worker);

    assert_eq!(appliance.files(), before, "a file was changed");
    appliance.network.worker.run(|| {
        let mut client = Client::connect(nfs);
        assert!(client.read(&mounted.disk, 0, 4096).starts_with(SECRET), "the worker goes on");
        assert_calls_succeed(nfs, &mounted, &mut random);
    });
    let (status, report) = appliance.rest("POST", "/v1/check", ADMIN, "");
    assert!(status == 200 && report.contains(r#""problems":[]"#), "{status} {report}");
}
