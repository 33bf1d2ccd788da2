//! MKNOD, and what the other procedures make of devices, sockets and named pipes.

use slackwater_nfs::{NfsOptions, Squash};

use crate::common::client::{Client, Cred, FILE_SYNC, NFS, proc};
use crate::common::{Args, Server, SetAttr, root_options, status};

const BLOCK_DEVICE: u32 = 3;
const CHARACTER_DEVICE: u32 = 4;
const SOCKET: u32 = 6;
const FIFO: u32 = 7;

/// Each type that MKNOD makes, and what GETATTR says of its numbers (`specdata3` as one number).
const SPECIAL: [(u32, u64); 4] = [
    (BLOCK_DEVICE, 0x0000_0fff_000f_ffff),
    (CHARACTER_DEVICE, 0xffff_ffff_8000_0001),
    (SOCKET, 0),
    (FIFO, 0),
];

fn mknod(directory: &[u8], name: &[u8], (kind, device): (u32, u64), set: &SetAttr) -> Args {
    let args = Args::new().place(directory, name).u32(kind).set(set);
    if matches!(kind, BLOCK_DEVICE | CHARACTER_DEVICE) { args.u64(device) } else { args }
}

/// Makes one of each in the root.
async fn make_all(client: &mut Client, root: &[u8]) -> Vec<Vec<u8>> {
    let mut made = Vec::new();
    for special in SPECIAL {
        let name = format!("special-{}", special.0);
        let set = SetAttr { uid: Some(1000), ..SetAttr::mode(0o640) };
        let args = mknod(root, name.as_bytes(), special, &set);
        made.push(client.make(proc::MKNOD, &args).await.unwrap());
        assert_eq!(client.make(proc::MKNOD, &args).await, Err(status::EXIST));
    }
    made
}

#[tokio::test]
async fn special_files_have_their_type_and_numbers() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let made = make_all(&mut client, &root).await;
    for (handle, (kind, device)) in made.iter().zip(SPECIAL) {
        let told = client.getattr(handle).await.unwrap();
        assert_eq!((told.kind, told.rdev), (kind, device));
        assert_eq!((told.mode, told.uid, told.nlink, told.size, told.used), (0o640, 1000, 1, 0, 0));
        let found = client.lookup(&root, format!("special-{kind}").as_bytes()).await.unwrap();
        assert_eq!(found, *handle);
    }
    // A mode that is not given, and all of it after a restart of the store.
    let plain = mknod(&root, b"plain", (FIFO, 0), &SetAttr::default());
    let plain = client.make(proc::MKNOD, &plain).await.unwrap();
    assert_eq!(client.getattr(&plain).await.unwrap().mode, 0o600);
    let directory = server.stop().await;
    let server = Server::over_directory(directory, root_options()).await;
    let mut client = server.client().await;
    for (handle, (kind, device)) in made.iter().zip(SPECIAL) {
        let told = client.getattr(handle).await.unwrap();
        assert_eq!((told.kind, told.rdev), (kind, device));
    }
}

#[tokio::test]
async fn special_files_are_renamed_linked_and_removed_as_others() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    for (handle, (kind, device)) in make_all(&mut client, &root).await.iter().zip(SPECIAL) {
        let name = format!("special-{kind}").into_bytes();
        client.create(&root, b"file").await.unwrap();
        client.rename((&root, &name), (&root, b"file")).await.unwrap();
        assert_eq!(client.lookup(&root, b"file").await.as_ref(), Ok(handle));
        let link = Args::new().opaque(handle).place(&root, &name);
        assert_eq!(client.nfs(proc::LINK, &link).await.0, status::OK);
        client.setattr(handle, &SetAttr::mode(0o751)).await.unwrap();
        let told = client.getattr(handle).await.unwrap();
        assert_eq!((told.kind, told.rdev, told.mode, told.nlink), (kind, device, 0o751, 2));
        let rmdir = client.unlink(proc::RMDIR, &root, &name).await;
        assert_eq!(rmdir.unwrap_err(), status::NOTDIR);
        client.unlink(proc::REMOVE, &root, &name).await.unwrap();
        client.unlink(proc::REMOVE, &root, b"file").await.unwrap();
        assert_eq!(client.getattr(handle).await, Err(status::STALE));
    }
}

/// What is in them, the client's kernel decides.
#[tokio::test]
async fn special_files_hold_no_data() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    for handle in make_all(&mut client, &root).await {
        assert_eq!(client.read(&handle, 0, 10).await, Err(status::INVAL));
        let written = client.write(&handle, 0, b"data", FILE_SYNC).await;
        assert_eq!(written.unwrap_err(), status::INVAL);
        let commit = Args::new().opaque(&handle).u64(0).u32(0);
        assert_eq!(client.nfs(proc::COMMIT, &commit).await.0, status::INVAL);
        let cut = client.setattr(&handle, &SetAttr::size(0)).await;
        assert_eq!(cut.unwrap_err(), status::INVAL);
        let read_link = Args::new().opaque(&handle);
        assert_eq!(client.nfs(proc::READLINK, &read_link).await.0, status::INVAL);
        let inside = client.lookup(&handle, b"x").await;
        assert_eq!(inside, Err(status::NOTDIR));
        // CREATE does not take it for a file.
        let name = client.getattr(&handle).await.unwrap().kind;
        let create = Args::new().place(&root, format!("special-{name}").as_bytes());
        let create = create.u32(0).set(&SetAttr::size(0));
        assert_eq!(client.make(proc::CREATE, &create).await, Err(status::EXIST));
    }
}

/// Writing through them stays on the client; their names and modes do not change.
#[tokio::test]
async fn a_client_that_may_only_read_may_write_through_them() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let made = make_all(&mut client, &root).await;
    let file = client.create(&root, b"file").await.unwrap();
    let read_only =
        NfsOptions { clients: vec!["127.0.0.0/8:ro".parse().unwrap()], ..root_options() };
    let server = Server::over_directory(server.stop().await, read_only).await;
    let mut client = server.client().await;
    let mut granted = async |handle: &[u8]| {
        let access = Args::new().opaque(handle).u32(0x3f);
        let (got, mut body) = client.nfs(proc::ACCESS, &access).await;
        assert_eq!(got, status::OK);
        body.post_op();
        body.u32()
    };
    let (read, modify_and_extend) = (0x01, 0x0c);
    for handle in &made {
        assert_eq!(granted(handle).await & 0x1f, read | modify_and_extend);
    }
    assert_eq!(granted(&file).await & 0x1f, read);
    let removed = client.unlink(proc::REMOVE, &root, b"special-7").await;
    assert_eq!(removed.unwrap_err(), status::ROFS);
}

#[tokio::test]
async fn devices_are_the_superusers_to_make() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let folder = client.mkdir(&root, b"folder", 0o777).await.unwrap();
    let user = Cred::Sys { uid: 1000, gid: 1000, groups: vec![] };
    let mut user = server.client().await.with(user);
    for (kind, device) in SPECIAL {
        let name = format!("special-{kind}").into_bytes();
        let args = mknod(&folder, &name, (kind, device), &SetAttr::mode(0o666));
        let made = user.make(proc::MKNOD, &args).await;
        if matches!(kind, BLOCK_DEVICE | CHARACTER_DEVICE) {
            assert_eq!(made, Err(status::PERM));
            assert_eq!(client.lookup(&folder, &name).await, Err(status::NOENT));
            // A name that is taken is told first, as mknod(2) does.
            client.make(proc::MKNOD, &args).await.unwrap();
            assert_eq!(user.make(proc::MKNOD, &args).await, Err(status::EXIST));
        } else {
            assert_eq!(client.getattr(&made.unwrap()).await.unwrap().uid, 1000);
        }
        // In a directory of another user nothing is made.
        let args = mknod(&root, &name, (kind, device), &SetAttr::mode(0o666));
        assert_eq!(user.make(proc::MKNOD, &args).await, Err(status::ACCES));
    }
}

#[tokio::test]
async fn a_squashed_root_makes_no_devices() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let folder = client.mkdir(&root, b"folder", 0o777).await.unwrap();
    let squashed = NfsOptions { squash: Squash::RootSquash, ..root_options() };
    let server = Server::over_directory(server.stop().await, squashed).await;
    let mut client = server.client().await;
    for (kind, device) in SPECIAL {
        let args = mknod(
            &folder,
            &[b'0' + u8::try_from(kind).unwrap()],
            (kind, device),
            &SetAttr::mode(0o666),
        );
        let made = client.make(proc::MKNOD, &args).await;
        let is_device = matches!(kind, BLOCK_DEVICE | CHARACTER_DEVICE);
        assert_eq!(made.err(), is_device.then_some(status::PERM));
    }
}

#[tokio::test]
async fn other_types_are_not_for_mknod() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let node = |kind| Args::new().place(&root, b"node").u32(kind);
    for kind in [1, 2, 5] {
        assert_eq!(client.make(proc::MKNOD, &node(kind)).await, Err(status::BADTYPE));
    }
    // No type at all, and a device without its numbers: arguments that do not decode.
    for args in [node(0), node(8), node(BLOCK_DEVICE).set(&SetAttr::default()), node(FIFO)] {
        let mut reply = client.reply(NFS, proc::MKNOD, &args).await;
        assert_eq!([reply.u32(), reply.u32(), reply.u32(), reply.u32()], [0, 0, 0, 4]);
    }
    assert_eq!(client.lookup(&root, b"node").await, Err(status::NOENT));
}
