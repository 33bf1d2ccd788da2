//! Workers: what a mount by a secret path leads to, and what it does not.

use std::sync::{Arc, Mutex};

use slackwater_blockstore::{FilePath, Result as StoreResult, SnapshotId, SnapshotRequest};
use slackwater_nfs::{MountGate, MountScope, Mounter, NfsOptions};
use uuid::Uuid;

use super::directories;
use crate::common::client::{
    Client, Cred, FILE_SYNC, MOUNT, NFS, UNSTABLE, call, proc, record, write_args,
};
use crate::common::{Args, Server, SetAttr, root_options, status};

const SECRET: &[u8] = b"a-secret-that-is-hard-to-guess";
const WORKER: Uuid = Uuid::from_u128(0x1111_1111_1111_4111_8111_1111_1111_1111);
const OTHER: Uuid = Uuid::from_u128(0x2222_2222_2222_4222_8222_2222_2222_2222);

/// One worker, as long as it is one, and the snapshots that it does not read.
#[derive(Debug)]
struct Gate(Mutex<Option<MountScope>>, Mutex<Vec<SnapshotId>>);

impl Gate {
    fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(Some(MountScope::Worker(WORKER))), Mutex::default()))
    }

    fn set(&self, scope: Option<MountScope>) {
        *self.0.lock().unwrap() = scope;
    }

    fn hide(&self, snapshots: Vec<SnapshotId>) {
        *self.1.lock().unwrap() = snapshots;
    }
}

impl MountGate for Gate {
    fn enter(&self, secret: &[u8], mounter: Mounter) -> Option<MountScope> {
        let expected = Mounter { address: [127, 0, 0, 1].into(), has_privileged_port: false };
        assert_eq!(mounter, expected);
        self.0.lock().unwrap().filter(|_| secret == SECRET)
    }

    fn is_admitted(&self, scope: MountScope) -> bool {
        *self.0.lock().unwrap() == Some(scope)
    }

    fn reads_snapshot(&self, worker_id: Uuid, snapshot: SnapshotId) -> StoreResult<bool> {
        assert_eq!(worker_id, WORKER);
        Ok(!self.1.lock().unwrap().contains(&snapshot))
    }
}

fn options(gate: &Arc<Gate>) -> NfsOptions {
    NfsOptions { gate: Some(Arc::<Gate>::clone(gate)), ..root_options() }
}

fn path(below: &str) -> Vec<u8> {
    let secret = std::str::from_utf8(SECRET).unwrap();
    format!("/slackwater/.worker/{secret}{below}").into_bytes()
}

/// Files of the worker, of another one, and of none.
struct Files {
    own: Vec<u8>,
    foreign: Vec<u8>,
}

/// A server with the files, and a client that mounted as the worker.
struct Mounted {
    gate: Arc<Gate>,
    server: Server,
    client: Client,
    /// Of mounts by address.
    files: Files,
    root: Vec<u8>,
    home: Vec<u8>,
}

impl Mounted {
    async fn new() -> Self {
        let gate = Gate::new();
        let server = Server::with(options(&gate)).await;
        let files = files(&server).await;
        let mut client = server.client().await;
        let root = client.mount(&path("")).await.unwrap();
        let home = home(&mut client, &root).await;
        Self { gate, server, client, files, root, home }
    }
}

/// Makes the files; their handles are of the export.
async fn files(server: &Server) -> Files {
    let all =
        [format!("workers/{WORKER}/disk"), format!("workers/{OTHER}/disk"), "disk".to_owned()];
    server
        .blocking(move |store| {
            for path in all {
                store.create_file(&FilePath::parse(&path).unwrap(), 1 << 20).unwrap();
            }
        })
        .await;
    let mut client = server.client().await;
    let mut handles = Vec::new();
    for id in [WORKER, OTHER] {
        let directory = client.mount(format!("/slackwater/workers/{id}").as_bytes()).await.unwrap();
        let file = client.lookup(&directory, b"disk").await.unwrap();
        client.write(&file, 0, id.to_string().as_bytes(), FILE_SYNC).await.unwrap();
        handles.push(file);
    }
    let foreign = handles.pop().unwrap();
    Files { own: handles.pop().unwrap(), foreign }
}

/// The directory of the worker, from the root of its mount.
async fn home(client: &mut Client, root: &[u8]) -> Vec<u8> {
    let workers = client.lookup(root, b"workers").await.unwrap();
    client.lookup(&workers, WORKER.to_string().as_bytes()).await.unwrap()
}

#[tokio::test]
async fn a_worker_reads_and_changes_its_own_files() {
    let Mounted { server, mut client, root, home, .. } = Mounted::new().await;
    assert_eq!(client.mount(&path(&format!("/workers/{WORKER}"))).await.as_ref(), Ok(&home));
    let disk = client.lookup(&home, b"disk").await.unwrap();
    assert_eq!(client.read(&disk, 0, 36).await, Ok((WORKER.to_string().into_bytes(), false)));
    client.write(&disk, 0, b"mine", UNSTABLE).await.unwrap();
    client.commit(&disk).await.unwrap();
    client.setattr(&disk, &SetAttr::size(4)).await.unwrap();
    let folder = client.mkdir(&home, b"folder", 0o755).await.unwrap();
    let file = client.create(&folder, b"file").await.unwrap();
    client.write(&file, 0, b"new", FILE_SYNC).await.unwrap();
    client.rename((&folder, b"file"), (&home, b"moved")).await.unwrap();
    assert_eq!(client.lookup(&home, b"moved").await, Ok(file));
    client.remove(&home, b"moved").await.unwrap();
    client.unlink(proc::RMDIR, &home, b"folder").await.unwrap();
    assert_eq!(client.lookup(&home, b"..").await, client.lookup(&root, b"workers").await);
    // Handles are good across restarts.
    let server = server.restart().await;
    let mut client = server.client().await;
    assert_eq!(client.read(&disk, 0, 10).await, Ok((b"mine".to_vec(), true)));
    assert_eq!(client.lookup(&home, b"disk").await, Ok(disk));
}

#[tokio::test]
async fn a_worker_sees_no_files_of_others() {
    let Mounted { mut client, root, home, server: _server, .. } = Mounted::new().await;
    let workers = client.lookup(&root, b"workers").await.unwrap();
    let other = OTHER.to_string();
    for name in [b"disk".as_slice(), b".worker", b"none", WORKER.to_string().as_bytes()] {
        assert_eq!(client.lookup(&root, name).await, Err(status::NOENT));
    }
    for name in [other.as_bytes(), b"disk", b".snapshot", b"workers"] {
        assert_eq!(client.lookup(&workers, name).await, Err(status::NOENT));
    }
    assert_eq!(client.lookup(&root, b"..").await.as_ref(), Ok(&root));
    assert_eq!(client.lookup(&workers, b"..").await.as_ref(), Ok(&root));
    for below in ["/disk", &format!("/workers/{other}"), "/workers/..", "/.worker"] {
        let got = client.mount(&path(below)).await.unwrap_err();
        assert!([status::NOENT, status::INVAL].contains(&got), "{below}: {got}");
    }
    for (directory, names) in [
        (&root, [b".".to_vec(), b"..".to_vec(), b"workers".to_vec()]),
        (&workers, [b".".to_vec(), b"..".to_vec(), WORKER.to_string().into_bytes()]),
    ] {
        for is_plus in [false, true] {
            let entries = directories::all(&mut client, directory, is_plus, 4096).await;
            let found: Vec<_> = entries.iter().map(|entry| entry.name.clone()).collect();
            assert_eq!(found, names);
            if is_plus {
                let handle = entries[2].handle.clone();
                assert_eq!(handle, client.lookup(directory, &names[2]).await.ok());
            }
        }
    }
    // Nothing is made or removed where others have theirs.
    for directory in [&root, &workers] {
        assert_eq!(client.create(directory, b"x").await, Err(status::ACCES));
        assert_eq!(client.mkdir(directory, b"x", 0o755).await, Err(status::ACCES));
        assert_eq!(client.remove(directory, b"disk").await.unwrap_err(), status::ACCES);
        let own = WORKER.to_string();
        for name in [other.as_bytes(), own.as_bytes()] {
            let removed = client.unlink(proc::RMDIR, directory, name).await;
            assert_eq!(removed.unwrap_err(), status::ACCES);
        }
        let refused = client.setattr(directory, &SetAttr::mode(0o777)).await;
        assert_eq!(refused.unwrap_err(), status::ACCES);
        let (_, mut body) =
            client.nfs(proc::ACCESS, &Args::new().opaque(directory).u32(0x3f)).await;
        body.post_op();
        assert_eq!(body.u32(), 3, "reading and looking up only");
    }
    let disk = client.lookup(&home, b"disk").await.unwrap();
    for directory in [&root, &workers] {
        let place = || Args::new().place(directory, b"x");
        for (procedure, args) in [
            (proc::SYMLINK, place().set(&SetAttr::default()).opaque(b"disk")),
            (proc::MKNOD, place().u32(7).set(&SetAttr::default())),
            (proc::LINK, Args::new().opaque(&disk).place(directory, b"x")),
            (proc::RENAME, Args::new().place(directory, b"workers").place(directory, b"x")),
        ] {
            let (got, _) = client.nfs(procedure, &args).await;
            assert_eq!(got, status::ACCES, "procedure {procedure}");
        }
        assert_eq!(client.read(directory, 0, 10).await, Err(status::ISDIR));
    }
    let moved = client.rename((&home, b"disk"), (&workers, b"disk")).await;
    assert_eq!(moved.unwrap_err(), status::ACCES);
    let moved = client.rename((&workers, other.as_bytes()), (&home, b"taken")).await;
    assert_eq!(moved.unwrap_err(), status::ACCES);
}

#[tokio::test]
async fn handles_of_a_worker_and_of_the_export_do_not_mix() {
    let Mounted { mut client, files, home, server: _server, .. } = Mounted::new().await;
    let plain_root = client.root().await;
    let moved = client.rename((&plain_root, b"disk"), (&home, b"taken")).await;
    assert_eq!(moved.unwrap_err(), status::ACCES);
    let moved = client.rename((&home, b"disk"), (&plain_root, b"given")).await;
    assert_eq!(moved.unwrap_err(), status::ACCES);
    for (file, directory) in [(&files.foreign, &home), (&files.own, &home)] {
        let args = Args::new().opaque(file).place(directory, b"link");
        let (got, _) = client.nfs(proc::LINK, &args).await;
        assert_eq!(got, status::ACCES);
    }
    // The handle of the export with the worker's scope in front of it.
    let forged = [&home[..20], &files.foreign[20..]].concat();
    assert_eq!(client.getattr(&forged).await.unwrap_err(), status::BADHANDLE);
}

#[tokio::test]
async fn the_snapshots_that_it_reads_are_there_and_none_is_changed() {
    let gate = Gate::new();
    let server = Server::with(options(&gate)).await;
    files(&server).await;
    let foreign = FilePath::parse(&format!("workers/{OTHER}/disk")).unwrap();
    let taken = server
        .blocking(move |store| store.snapshot(&foreign, SnapshotRequest::default()).unwrap())
        .await;
    let mut client = server.client().await;
    let root = client.mount(&path("")).await.unwrap();
    let directory = client.lookup(&root, b".snapshot").await.unwrap();
    assert_eq!(client.lookup(&directory, b"..").await, Ok(root));
    let id = taken.id.to_string();
    let image = client.lookup(&directory, id.as_bytes()).await.unwrap();
    assert_eq!(client.mount(&path(&format!("/.snapshot/{id}"))).await.as_ref(), Ok(&image));
    assert_eq!(client.read(&image, 0, 36).await, Ok((OTHER.to_string().into_bytes(), false)));
    assert_eq!(client.write(&image, 0, b"x", FILE_SYNC).await.unwrap_err(), status::ROFS);
    gate.hide(vec![taken.id]);
    assert_eq!(client.lookup(&directory, id.as_bytes()).await, Err(status::ACCES));
    let mounted = client.mount(&path(&format!("/.snapshot/{id}"))).await;
    assert_eq!(mounted, Err(status::ACCES));
    // What was looked up is like an open file.
    assert_eq!(client.read(&image, 0, 1).await.map(|(data, _)| data.len()), Ok(1));
    gate.set(None);
    assert_eq!(client.read(&image, 0, 36).await, Err(status::ACCES));
}

/// A call of each procedure, on the root of a mount, a directory, and the file `disk` in that.
pub(super) fn all_calls(root: &[u8], home: &[u8], disk: &[u8]) -> Vec<(u32, Args)> {
    let place = |name: &[u8]| Args::new().place(home, name);
    let of = |handle: &[u8]| Args::new().opaque(handle);
    let none = SetAttr::default();
    vec![
        (proc::GETATTR, of(disk)),
        (proc::SETATTR, of(disk).set(&SetAttr::size(3)).u32(0)),
        (proc::LOOKUP, place(b"disk")),
        (proc::ACCESS, of(disk).u32(0x3f)),
        (proc::READLINK, of(disk)),
        (proc::READ, of(disk).u64(0).u32(100)),
        (proc::WRITE, write_args(disk, 0, b"after", FILE_SYNC)),
        (proc::WRITE, write_args(disk, 0, b"after", UNSTABLE)),
        (proc::CREATE, place(b"new").u32(0).set(&none)),
        (proc::MKDIR, place(b"new").set(&none)),
        (proc::SYMLINK, place(b"new").set(&none).opaque(b"disk")),
        (proc::MKNOD, place(b"new").u32(7).set(&none)),
        (proc::REMOVE, place(b"disk")),
        (proc::RMDIR, place(b"disk")),
        (proc::RENAME, place(b"disk").place(home, b"new")),
        (proc::LINK, of(disk).place(home, b"new")),
        (proc::READDIR, of(home).u64(0).u64(0).u32(4096)),
        (proc::READDIRPLUS, of(home).u64(0).u64(0).u32(1024).u32(4096)),
        (proc::FSSTAT, of(root)),
        (proc::FSINFO, of(root)),
        (proc::PATHCONF, of(root)),
        (proc::COMMIT, of(disk).u64(0).u32(0)),
    ]
}

#[tokio::test]
async fn a_worker_that_is_revoked_is_refused_from_then_on() {
    let Mounted { gate, mut client, root, home, server: _server, .. } = Mounted::new().await;
    let disk = client.lookup(&home, b"disk").await.unwrap();
    client.write(&disk, 0, b"before", UNSTABLE).await.unwrap();
    // Also if there is another one.
    for now in [None, Some(MountScope::Worker(OTHER))] {
        gate.set(now);
        for (procedure, args) in all_calls(&root, &home, &disk) {
            let (got, _) = client.nfs(procedure, &args).await;
            assert_eq!(got, status::ACCES, "procedure {procedure}, {now:?}");
        }
    }
    gate.set(None);
    assert_eq!(client.mount(&path("")).await, Err(status::ACCES));
    // It goes on when it is added again with its id.
    gate.set(Some(MountScope::Worker(WORKER)));
    assert_eq!(client.read(&disk, 0, 6).await, Ok((b"before".to_vec(), false)));
}

/// The paths that DUMP lists.
async fn mounts(client: &mut Client) -> Vec<Vec<u8>> {
    let mut body = client.run(MOUNT, 2, &Args::new()).await;
    let mut list = Vec::new();
    while body.bool() {
        body.opaque();
        list.push(body.opaque());
    }
    list
}

#[tokio::test]
async fn a_wrong_secret_leads_nowhere_and_no_list_shows_the_right_one() {
    let gate = Gate::new();
    let server = Server::with(options(&gate)).await;
    files(&server).await;
    let mut client = server.client().await;
    for wrong in
        ["", "/", "/x", "/a-secret-that-is-hard-to-gues", "/a-secret-that-is-hard-to-guess2"]
    {
        let path = format!("/slackwater/.worker{wrong}");
        assert_eq!(client.mount(path.as_bytes()).await, Err(status::ACCES), "{wrong}");
    }
    client.mount(&path("")).await.unwrap();
    client.mount(&path("/workers")).await.unwrap();
    let is_listed = |list: &[Vec<u8>]| list.contains(&b"/slackwater/.worker".to_vec());
    let is_shown = |list: &[Vec<u8>]| {
        list.iter().any(|path| path.windows(SECRET.len()).any(|part| part == SECRET))
    };
    let list = mounts(&mut client).await;
    assert!(is_listed(&list) && !is_shown(&list), "{list:?}");
    client.run(MOUNT, 3, &Args::new().opaque(&path(""))).await.end();
    let list = mounts(&mut client).await;
    assert!(!is_listed(&list) && !is_shown(&list), "{list:?}");
    // A server without workers has no such paths.
    let server = Server::start().await;
    let mut client = server.client().await;
    assert_eq!(client.mount(&path("")).await, Err(status::ACCES));
}

/// An administrator moves directories about. What the worker sees stays its own.
#[tokio::test]
async fn what_is_moved_into_the_place_of_workers_leads_nowhere_else() {
    let Mounted { mut client, root, home, server: _server, .. } = Mounted::new().await;
    let workers = client.lookup(&root, b"workers").await.unwrap();
    let folder = client.mkdir(&home, b"folder", 0o755).await.unwrap();
    let plain_root = client.root().await;
    client.rename((&plain_root, b"workers"), (&plain_root, b"old")).await.unwrap();
    // A directory with other files has the name now, and none of it is the worker's.
    let other = client.mkdir(&plain_root, b"workers", 0o755).await.unwrap();
    client.create(&other, b"disk").await.unwrap();
    assert_eq!(client.lookup(&workers, b"disk").await, Err(status::NOENT));
    assert_eq!(client.lookup(&workers, WORKER.to_string().as_bytes()).await, Err(status::NOENT));
    let entries = directories::all(&mut client, &workers, true, 4096).await;
    assert_eq!(entries.len(), 2, "{entries:?}");
    // What it has a handle of is still its own, and leads no further up.
    assert!(client.lookup(&home, b"folder").await.is_ok());
    for directory in [&home, &folder] {
        assert!(client.lookup(directory, b"..").await.is_err());
        // It is listed all the same, and `..` as itself.
        let entries = directories::all(&mut client, directory, true, 4096).await;
        assert_eq!(entries[1].handle.as_ref(), Some(directory));
    }
    // A file, and a symbolic link, are no directory of workers.
    client.remove(&other, b"disk").await.unwrap();
    client.unlink(proc::RMDIR, &plain_root, b"workers").await.unwrap();
    let args = Args::new().place(&plain_root, b"workers").set(&SetAttr::default()).opaque(b"old");
    assert_eq!(client.nfs(proc::SYMLINK, &args).await.0, status::OK);
    assert_eq!(client.lookup(&workers, WORKER.to_string().as_bytes()).await, Err(status::NOENT));
}

#[tokio::test]
async fn a_reply_from_before_the_revocation_is_not_sent_again() {
    let Mounted { gate, mut client, home, server: _server, .. } = Mounted::new().await;
    let args = Args::new().place(&home, b"new").u32(1).set(&SetAttr::default());
    let create = call(4711, NFS, proc::CREATE, &Cred::user(0, 0), &args);
    client.send(&record(&create)).await;
    let first = client.receive().await;
    client.send(&record(&create)).await;
    assert_eq!(client.receive().await, first, "the reply is kept");
    gate.set(None);
    client.send(&record(&create)).await;
    let late = client.receive().await;
    assert_ne!(late, first);
    assert_eq!(late[24..28], status::ACCES.to_be_bytes());
}

#[tokio::test]
async fn a_worker_that_is_listed_to_read_changes_nothing() {
    let gate = Gate::new();
    let server = Server::with(options(&gate)).await;
    files(&server).await;
    let clients = vec!["127.0.0.0/8:ro".parse().unwrap()];
    let directory = server.stop().await;
    let read_only = NfsOptions { clients, ..options(&gate) };
    let server = Server::over_directory(directory, read_only).await;
    let mut client = server.client().await;
    let root = client.mount(&path("")).await.unwrap();
    let home = home(&mut client, &root).await;
    let disk = client.lookup(&home, b"disk").await.unwrap();
    assert!(client.read(&disk, 0, 10).await.is_ok());
    assert_eq!(client.write(&disk, 0, b"x", FILE_SYNC).await.unwrap_err(), status::ROFS);
    assert_eq!(client.create(&home, b"x").await, Err(status::ROFS));
}

/// Deeper than `..` is followed.
#[tokio::test]
async fn deep_directories_are_listed_and_removed() {
    let Mounted { mut client, home, server: _server, .. } = Mounted::new().await;
    let mut chain = vec![home];
    for _ in 0..140 {
        let deeper = client.mkdir(chain.last().unwrap(), b"d", 0o755).await.unwrap();
        chain.push(deeper);
    }
    let deepest = chain.pop().unwrap();
    assert_eq!(directories::all(&mut client, &deepest, true, 4096).await.len(), 2);
    assert_eq!(client.lookup(&chain[3], b"..").await.as_ref(), Ok(&chain[2]));
    for directory in chain.iter().rev() {
        client.unlink(proc::RMDIR, directory, b"d").await.unwrap();
    }
}

#[tokio::test]
async fn without_mounts_by_address_all_mount_by_secret_paths() {
    let Mounted { gate, server, mut client, files, root, home } = Mounted::new().await;
    let plain_root = client.root().await;
    let directory = server.stop().await;
    let workers_only = NfsOptions { mounts_by_address: false, ..options(&gate) };
    let server = Server::over_directory(directory, workers_only).await;
    let mut client = server.client().await;
    for path in ["/slackwater", "/slackwater/workers", "/slackwater/none", "/slackwater/.snapshot"]
    {
        assert_eq!(client.mount(path.as_bytes()).await, Err(status::ACCES), "{path}");
    }
    // Handles of the export from before lead nowhere, those of the worker do.
    assert_eq!(client.lookup(&plain_root, b"workers").await, Err(status::ACCES));
    for file in [&files.own, &files.foreign] {
        assert_eq!(client.getattr(file).await.unwrap_err(), status::ACCES);
        let written = client.write(file, 0, b"x", FILE_SYNC).await;
        assert_eq!(written.unwrap_err(), status::ACCES);
    }
    let disk = client.lookup(&home, b"disk").await.unwrap();
    client.write(&disk, 0, b"mine", FILE_SYNC).await.unwrap();
    assert_eq!(client.mount(&path("")).await, Ok(root));
}

#[tokio::test]
async fn a_secret_path_of_the_export_leads_to_all_of_it() {
    let gate = Gate::new();
    let server = Server::with(options(&gate)).await;
    files(&server).await;
    let administrator = Some(MountScope::Export([7; 16]));
    gate.set(administrator);
    let whole = |below: &str| {
        let path = String::from_utf8(path(below)).unwrap();
        path.replace(".worker", ".export").into_bytes()
    };
    let directory = server.stop().await;
    let by_path = NfsOptions { mounts_by_address: false, ..options(&gate) };
    let server = Server::over_directory(directory, by_path).await;
    let mut client = server.client().await;
    // A worker's path is another one.
    assert_eq!(client.mount(&path("")).await, Err(status::ACCES));
    let root = client.mount(&whole("")).await.unwrap();
    let disk = client.lookup(&root, b"disk").await.unwrap();
    client.write(&disk, 0, b"all", FILE_SYNC).await.unwrap();
    let other = client.mount(&whole(&format!("/workers/{OTHER}"))).await.unwrap();
    let up = client.lookup(&other, b"..").await.unwrap();
    assert_eq!(client.lookup(&up, b"..").await.as_ref(), Ok(&root));
    assert_eq!(directories::all(&mut client, &root, true, 4096).await.len(), 4);
    let is_shown = |list: &[Vec<u8>]| {
        list.iter().any(|path| path.windows(SECRET.len()).any(|part| part == SECRET))
    };
    let list = mounts(&mut client).await;
    assert!(list.contains(&b"/slackwater/.export".to_vec()) && !is_shown(&list), "{list:?}");
    client.run(MOUNT, 3, &Args::new().opaque(&whole(""))).await.end();
    let list = mounts(&mut client).await;
    assert!(!list.contains(&b"/slackwater/.export".to_vec()) && !is_shown(&list), "{list:?}");
    // A handle of one holder is none of another.
    let forged = [&disk[..4], &[8; 16], &disk[20..]].concat();
    assert_eq!(client.getattr(&forged).await.unwrap_err(), status::BADHANDLE);
    // Handles outlive a restart, but not their holder.
    let server = server.restart().await;
    let mut client = server.client().await;
    assert_eq!(client.read(&disk, 0, 3).await, Ok((b"all".to_vec(), false)));
    for other in [None, Some(MountScope::Export([8; 16]))] {
        gate.set(other);
        assert_eq!(client.read(&disk, 0, 3).await, Err(status::ACCES));
    }
}
