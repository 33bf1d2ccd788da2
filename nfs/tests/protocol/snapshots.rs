//! The virtual directory `.snapshot`.

use slackwater_blockstore::{FilePath, SnapshotRequest};

use crate::common::client::{FILE_SYNC, proc};
use crate::common::{Args, Server, SetAttr, status};

const NAME: &[u8] = b".snapshot";

/// A file with content, a snapshot of it, and other content after.
async fn snapshot(server: &Server, root: &[u8]) -> String {
    let mut client = server.client().await;
    let file = client.create(root, b"disk").await.unwrap();
    client.write(&file, 0, b"at the snapshot", FILE_SYNC).await.unwrap();
    let path = FilePath::parse("disk").unwrap();
    let taken = server
        .blocking(move |store| store.snapshot(&path, SnapshotRequest::default()).unwrap())
        .await;
    client.write(&file, 0, b"after the snapshot", FILE_SYNC).await.unwrap();
    taken.id.to_string()
}

#[tokio::test]
async fn a_snapshot_is_read_by_its_id_and_never_changes() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let id = snapshot(&server, &root).await;
    let directory = client.lookup(&root, NAME).await.unwrap();
    let attributes = client.getattr(&directory).await.unwrap();
    assert_eq!((attributes.kind, attributes.mode), (2, 0o555));
    let image = client.lookup(&directory, id.as_bytes()).await.unwrap();
    let attributes = client.getattr(&image).await.unwrap();
    assert_eq!((attributes.kind, attributes.mode, attributes.size), (1, 0o444, 15));
    assert!(attributes.fileid > 1 << 48);
    assert_eq!(client.read(&image, 0, 100).await, Ok((b"at the snapshot".to_vec(), true)));
    assert_eq!(client.write(&image, 0, b"x", FILE_SYNC).await.unwrap_err(), status::ROFS);
    assert_eq!(client.setattr(&image, &SetAttr::size(0)).await.unwrap_err(), status::ROFS);
    assert_eq!(client.commit(&image).await, Err(status::ROFS));
    let (_, mut body) = client.nfs(proc::ACCESS, &Args::new().opaque(&image).u32(0x3f)).await;
    body.post_op();
    assert_eq!(body.u32(), 1, "reading only");
    assert_eq!(client.lookup(&image, b"x").await, Err(status::NOTDIR));
    let server = server.restart().await;
    let mut client = server.client().await;
    assert_eq!(client.read(&image, 3, 3).await, Ok((b"the".to_vec(), false)));
}

#[tokio::test]
async fn other_names_than_ids_do_not_exist_in_it() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let id = snapshot(&server, &root).await;
    let directory = client.lookup(&root, NAME).await.unwrap();
    let unknown = "6f1f3c1e-5d0c-4d55-9d61-2f5b6f0f6c11";
    let upper = id.to_uppercase();
    for name in [unknown, "disk", "x", &upper, "\u{e9}"] {
        assert_eq!(client.lookup(&directory, name.as_bytes()).await, Err(status::NOENT), "{name}");
    }
    assert_eq!(client.lookup(&directory, b"\xff").await, Err(status::NOENT));
    assert_eq!(client.lookup(&directory, &[b'x'; 256]).await, Err(status::NAMETOOLONG));
    assert_eq!(client.lookup(&directory, b".").await.as_ref(), Ok(&directory));
    assert_eq!(client.lookup(&directory, b"..").await, Ok(root));
}

#[tokio::test]
async fn it_is_not_listed_and_lists_nothing() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    snapshot(&server, &root).await;
    let directory = client.lookup(&root, NAME).await.unwrap();
    let mut names = async |handle: &[u8]| {
        let args = Args::new().opaque(handle).u64(0).u64(0).u32(4096);
        let (got, mut body) = client.nfs(proc::READDIR, &args).await;
        assert_eq!(got, status::OK);
        body.post_op();
        body.u64();
        let mut names = Vec::new();
        while body.bool() {
            body.u64();
            names.push(String::from_utf8(body.opaque()).unwrap());
            body.u64();
        }
        assert!(body.bool());
        names
    };
    assert_eq!(names(&root).await, [".", "..", "disk"]);
    assert_eq!(names(&directory).await, [".", ".."]);
}

#[tokio::test]
async fn nobody_makes_or_removes_it() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let id = snapshot(&server, &root).await;
    let disk = client.lookup(&root, b"disk").await.unwrap();
    assert_eq!(client.create(&root, NAME).await, Err(status::EXIST));
    assert_eq!(client.mkdir(&root, NAME, 0o755).await, Err(status::EXIST));
    let args = Args::new().place(&root, NAME).set(&SetAttr::default()).opaque(b"target");
    assert_eq!(client.make(proc::SYMLINK, &args).await, Err(status::EXIST));
    let renamed = client.rename((&root, b"disk"), (&root, NAME)).await;
    assert_eq!(renamed.unwrap_err(), status::EXIST);
    let renamed = client.rename((&root, NAME), (&root, b"x")).await;
    assert_eq!(renamed.unwrap_err(), status::ACCES);
    let (got, _) = client.nfs(proc::LINK, &Args::new().opaque(&disk).place(&root, NAME)).await;
    assert_eq!(got, status::EXIST);
    assert_eq!(client.remove(&root, NAME).await.unwrap_err(), status::ACCES);
    assert_eq!(client.unlink(proc::RMDIR, &root, NAME).await.unwrap_err(), status::ACCES);
    let directory = client.lookup(&root, NAME).await.unwrap();
    assert_eq!(client.create(&directory, b"x").await, Err(status::ROFS));
    assert_eq!(client.remove(&directory, id.as_bytes()).await.unwrap_err(), status::ROFS);
    let renamed = client.rename((&root, b"disk"), (&directory, b"x")).await;
    assert_eq!(renamed.unwrap_err(), status::ROFS);
    // Elsewhere the name is one like any other.
    let below = client.mkdir(&root, b"below", 0o755).await.unwrap();
    assert!(client.mkdir(&below, NAME, 0o755).await.is_ok());
}

#[tokio::test]
async fn it_and_its_files_can_be_mounted() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let id = snapshot(&server, &root).await;
    let directory = client.mount(b"/slackwater/.snapshot").await.unwrap();
    assert_eq!(client.lookup(&root, NAME).await.as_ref(), Ok(&directory));
    let path = format!("/slackwater/.snapshot/{id}");
    let image = client.mount(path.as_bytes()).await.unwrap();
    assert_eq!(client.lookup(&directory, id.as_bytes()).await, Ok(image));
    assert_eq!(client.mount(format!("{path}/x").as_bytes()).await, Err(status::NOTDIR));
    assert_eq!(client.mount(b"/slackwater/.snapshot/none").await, Err(status::NOENT));
}

#[tokio::test]
async fn the_handle_of_a_deleted_snapshot_is_stale() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let id = snapshot(&server, &root).await;
    let directory = client.lookup(&root, NAME).await.unwrap();
    let image = client.lookup(&directory, id.as_bytes()).await.unwrap();
    let parsed = id.parse().unwrap();
    server.blocking(move |store| store.delete_snapshot(parsed).unwrap()).await;
    assert_eq!(client.getattr(&image).await, Err(status::STALE));
    assert_eq!(client.read(&image, 0, 10).await, Err(status::STALE));
    assert_eq!(client.lookup(&directory, id.as_bytes()).await, Err(status::NOENT));
}
