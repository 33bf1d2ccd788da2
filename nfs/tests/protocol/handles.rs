//! File handles: forged, stale, and over a restart.

use crate::common::client::{FILE_SYNC, proc};
use crate::common::{Args, Server, status};

#[tokio::test]
async fn a_forged_handle_is_bad_for_every_procedure() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    assert!(root.len() <= 48);
    let mut flipped = root.clone();
    *flipped.last_mut().unwrap() ^= 1;
    let mut other_inode = root.clone();
    other_inode[27] ^= 2;
    let short = root[..root.len() - 4].to_vec();
    for forged in [flipped, other_inode, short, vec![0; root.len()], vec![0; 64], vec![]] {
        let place = Args::new().place(&forged, b"x");
        let no_set = [0_u32; 6];
        let set = |args: Args| no_set.iter().fold(args, |args, word| args.u32(*word));
        let calls = [
            (proc::GETATTR, Args::new().opaque(&forged)),
            (proc::SETATTR, set(Args::new().opaque(&forged)).u32(0)),
            (proc::LOOKUP, place.clone()),
            (proc::ACCESS, Args::new().opaque(&forged).u32(63)),
            (proc::READLINK, Args::new().opaque(&forged)),
            (proc::READ, Args::new().opaque(&forged).u64(0).u32(1)),
            (proc::WRITE, Args::new().opaque(&forged).u64(0).u32(1).u32(0).opaque(b"x")),
            (proc::CREATE, set(place.clone().u32(0))),
            (proc::MKDIR, set(place.clone())),
            (proc::SYMLINK, set(place.clone()).opaque(b"target")),
            (proc::MKNOD, set(place.clone().u32(7))),
            (proc::REMOVE, place.clone()),
            (proc::RMDIR, place.clone()),
            (proc::RENAME, place.clone().place(&root, b"y")),
            (proc::LINK, Args::new().opaque(&forged).place(&root, b"y")),
            (proc::READDIR, Args::new().opaque(&forged).u64(0).u64(0).u32(4096)),
            (proc::READDIRPLUS, Args::new().opaque(&forged).u64(0).u64(0).u32(512).u32(4096)),
            (proc::FSSTAT, Args::new().opaque(&forged)),
            (proc::FSINFO, Args::new().opaque(&forged)),
            (proc::PATHCONF, Args::new().opaque(&forged)),
            (proc::COMMIT, Args::new().opaque(&forged).u64(0).u32(0)),
        ];
        for (procedure, args) in calls {
            let (got, _) = client.nfs(procedure, &args).await;
            assert_eq!(got, status::BADHANDLE, "procedure {procedure}, {} bytes", forged.len());
        }
    }
}

#[tokio::test]
async fn a_handle_over_the_limit_of_the_protocol_is_garbage() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let args = Args::new().opaque(&[0; 65]);
    let mut reply = client.reply(crate::common::client::NFS, proc::GETATTR, &args).await;
    assert_eq!([reply.u32(), reply.u32(), reply.u32(), reply.u32()], [0, 0, 0, 4]);
}

#[tokio::test]
async fn the_handle_of_a_deleted_file_is_stale() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let file = client.create(&root, b"file").await.unwrap();
    client.remove(&root, b"file").await.unwrap();
    // Another file of the same name is another file.
    let second = client.create(&root, b"file").await.unwrap();
    assert_ne!(file, second);
    assert_eq!(client.getattr(&file).await, Err(status::STALE));
    assert_eq!(client.read(&file, 0, 10).await, Err(status::STALE));
    assert_eq!(client.write(&file, 0, b"x", FILE_SYNC).await.unwrap_err(), status::STALE);
    assert_eq!(client.commit(&file).await, Err(status::STALE));
    let directory = client.mkdir(&root, b"directory", 0o755).await.unwrap();
    client.unlink(proc::RMDIR, &root, b"directory").await.unwrap();
    assert_eq!(client.lookup(&directory, b"x").await, Err(status::STALE));
    assert_eq!(client.create(&directory, b"x").await, Err(status::STALE));
    assert!(client.getattr(&second).await.is_ok());
}

#[tokio::test]
async fn handles_outlive_the_server_and_renames() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let file = client.create(&root, b"before").await.unwrap();
    client.write(&file, 0, b"content", FILE_SYNC).await.unwrap();
    let attributes = client.getattr(&file).await.unwrap();
    let server = server.restart().await;
    let mut client = server.client().await;
    assert_eq!(client.getattr(&file).await, Ok(attributes));
    assert_eq!(client.root().await, root);
    client.rename((&root, b"before"), (&root, b"after")).await.unwrap();
    assert_eq!(client.read(&file, 0, 100).await, Ok((b"content".to_vec(), true)));
    assert_eq!(client.lookup(&root, b"after").await, Ok(file));
}

#[tokio::test]
async fn the_handle_of_another_store_is_bad() {
    let (one, other) = (Server::start().await, Server::start().await);
    let handle = one.client().await.root().await;
    assert_eq!(other.client().await.getattr(&handle).await, Err(status::BADHANDLE));
}
