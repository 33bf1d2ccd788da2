//! Mode bits, owners, groups and the sticky bit, on each procedure that asks for them.

use crate::common::client::{Client, Cred, FILE_SYNC, UNSTABLE, proc};
use crate::common::{Args, Server, SetAttr, status};

const ALICE: u32 = 1000;
const BOB: u32 = 1001;
const GROUP: u32 = 500;

async fn user(server: &Server, uid: u32, groups: &[u32]) -> Client {
    let cred = Cred::Sys { uid, gid: uid, groups: groups.to_vec() };
    server.client().await.with(cred)
}

/// A directory of Alice's with this mode, and the two users.
async fn setting(server: &Server, mode: u32) -> (Vec<u8>, Client, Client) {
    let mut root_user = server.client().await;
    let root = root_user.root().await;
    let directory = root_user.mkdir(&root, b"alices", mode).await.unwrap();
    let to_alice = SetAttr { uid: Some(ALICE), gid: Some(GROUP), ..SetAttr::default() };
    root_user.setattr(&directory, &to_alice).await.unwrap();
    (directory, user(server, ALICE, &[GROUP]).await, user(server, BOB, &[]).await)
}

async fn access(client: &mut Client, handle: &[u8]) -> u32 {
    let (got, mut body) = client.nfs(proc::ACCESS, &Args::new().opaque(handle).u32(0x3f)).await;
    assert_eq!(got, status::OK);
    assert!(body.post_op().is_some());
    let granted = body.u32();
    body.end();
    granted
}

#[tokio::test]
async fn a_private_directory_is_closed_to_others() {
    let server = Server::start().await;
    let (directory, mut alice, mut bob) = setting(&server, 0o700).await;
    let file = alice.create(&directory, b"file").await.unwrap();
    assert_eq!(bob.lookup(&directory, b"file").await, Err(status::ACCES));
    assert_eq!(bob.create(&directory, b"x").await, Err(status::ACCES));
    assert_eq!(bob.mkdir(&directory, b"x", 0o755).await, Err(status::ACCES));
    assert_eq!(bob.remove(&directory, b"file").await.unwrap_err(), status::ACCES);
    let renamed = bob.rename((&directory, b"file"), (&directory, b"x")).await;
    assert_eq!(renamed.unwrap_err(), status::ACCES);
    let link = Args::new().opaque(&file).place(&directory, b"x");
    assert_eq!(bob.nfs(proc::LINK, &link).await.0, status::ACCES);
    let list = Args::new().opaque(&directory).u64(0).u64(0).u32(4096);
    assert_eq!(bob.nfs(proc::READDIR, &list).await.0, status::ACCES);
    assert_eq!(access(&mut bob, &directory).await, 0);
    assert_eq!(access(&mut alice, &directory).await, 0x1f);
}

#[tokio::test]
async fn groups_open_what_they_are_given() {
    let server = Server::start().await;
    let (directory, mut alice, mut bob) = setting(&server, 0o770).await;
    let mut carol = user(&server, 1002, &[1, 2, GROUP]).await;
    let file = alice.create(&directory, b"file").await.unwrap();
    alice
        .setattr(&file, &SetAttr { gid: Some(GROUP), mode: Some(0o640), ..SetAttr::default() })
        .await
        .unwrap();
    alice.write(&file, 0, b"content", FILE_SYNC).await.unwrap();
    assert_eq!(carol.read(&file, 0, 7).await, Ok((b"content".to_vec(), true)));
    assert_eq!(carol.write(&file, 0, b"x", FILE_SYNC).await.unwrap_err(), status::ACCES);
    assert!(carol.create(&directory, b"carols").await.is_ok());
    assert_eq!(bob.read(&file, 0, 7).await, Err(status::ACCES), "even with the handle");
    assert_eq!(access(&mut carol, &file).await, 1);
    assert_eq!(access(&mut alice, &file).await, 0xd);
}

#[tokio::test]
async fn the_owner_reaches_his_data_whatever_the_mode() {
    let server = Server::start().await;
    let (directory, mut alice, _) = setting(&server, 0o755).await;
    let file = alice.create(&directory, b"file").await.unwrap();
    alice.setattr(&file, &SetAttr::mode(0)).await.unwrap();
    alice.write(&file, 0, b"content", FILE_SYNC).await.unwrap();
    assert_eq!(alice.read(&file, 0, 7).await, Ok((b"content".to_vec(), true)));
    assert_eq!(access(&mut alice, &file).await, 0, "ACCESS tells what the mode says");
}

#[tokio::test]
async fn a_sticky_directory_keeps_what_others_own() {
    let server = Server::start().await;
    let (directory, mut alice, mut bob) = setting(&server, 0o1777).await;
    let mut carol = user(&server, 1002, &[]).await;
    bob.create(&directory, b"bobs").await.unwrap();
    carol.create(&directory, b"carols").await.unwrap();
    assert_eq!(carol.remove(&directory, b"bobs").await.unwrap_err(), status::ACCES);
    let renamed = carol.rename((&directory, b"bobs"), (&directory, b"x")).await;
    assert_eq!(renamed.unwrap_err(), status::ACCES);
    let over = carol.rename((&directory, b"carols"), (&directory, b"bobs")).await;
    assert_eq!(over.unwrap_err(), status::ACCES, "nor is it replaced");
    assert!(bob.remove(&directory, b"bobs").await.is_ok());
    assert!(alice.remove(&directory, b"carols").await.is_ok(), "the directory's owner");
}

#[tokio::test]
async fn attributes_are_their_owners() {
    let server = Server::start().await;
    let (directory, mut alice, mut bob) = setting(&server, 0o777).await;
    let file = alice.create(&directory, b"file").await.unwrap();
    let set = |uid, gid| SetAttr { uid, gid, ..SetAttr::default() };
    assert_eq!(bob.setattr(&file, &SetAttr::mode(0o777)).await.unwrap_err(), status::PERM);
    assert_eq!(bob.setattr(&file, &SetAttr::size(0)).await.unwrap_err(), status::ACCES);
    assert_eq!(bob.setattr(&file, &set(Some(BOB), None)).await.unwrap_err(), status::PERM);
    assert_eq!(alice.setattr(&file, &set(Some(BOB), None)).await.unwrap_err(), status::PERM);
    assert_eq!(alice.setattr(&file, &set(None, Some(77))).await.unwrap_err(), status::PERM);
    assert!(alice.setattr(&file, &set(Some(ALICE), Some(GROUP))).await.is_ok());
    assert!(alice.setattr(&file, &SetAttr::mode(0o666)).await.is_ok());
    let before = bob.getattr(&file).await.unwrap();
    assert!(bob.setattr(&file, &SetAttr::size(10)).await.is_ok());
    assert!(bob.getattr(&file).await.unwrap().mtime > before.mtime);
}

#[tokio::test]
async fn a_new_object_is_its_makers_and_not_whom_he_names() {
    let server = Server::start().await;
    let (directory, _, mut bob) = setting(&server, 0o777).await;
    let named = SetAttr { uid: Some(0), gid: Some(0), mode: Some(0o600), ..SetAttr::default() };
    let args = Args::new().place(&directory, b"file").u32(1).set(&named);
    let file = bob.make(proc::CREATE, &args).await.unwrap();
    let attributes = bob.getattr(&file).await.unwrap();
    assert_eq!((attributes.uid, attributes.gid, attributes.mode), (BOB, BOB, 0o600));
}

#[tokio::test]
async fn an_unchecked_create_truncates_only_what_the_caller_may_write() {
    let server = Server::start().await;
    let (directory, mut alice, mut bob) = setting(&server, 0o777).await;
    let file = alice.create(&directory, b"file").await.unwrap();
    alice.write(&file, 0, b"content", FILE_SYNC).await.unwrap();
    let args = Args::new().place(&directory, b"file").u32(0).set(&SetAttr::size(0));
    assert_eq!(bob.make(proc::CREATE, &args).await, Err(status::ACCES));
    assert_eq!(alice.getattr(&file).await.unwrap().size, 7);
    assert!(alice.make(proc::CREATE, &args).await.is_ok());
    assert_eq!(alice.getattr(&file).await.unwrap().size, 0);
}

#[tokio::test]
async fn set_id_bits_do_not_survive_what_others_than_root_do_to_a_file() {
    let server = Server::start().await;
    let mut root = server.client().await;
    let (directory, mut alice, mut bob) = setting(&server, 0o777).await;
    let file = alice.create(&directory, b"program").await.unwrap();
    let create = Args::new().place(&directory, b"program").u32(0).set(&SetAttr::size(0));
    let owner = |uid| SetAttr { uid: Some(uid), ..SetAttr::default() };
    for mode in [0o6777, 0o4777, 0o2777] {
        for act in ["write", "size", "create", "own write", "chown"] {
            root.setattr(&file, &owner(ALICE)).await.unwrap();
            root.setattr(&file, &SetAttr::mode(mode)).await.unwrap();
            assert_eq!(root.getattr(&file).await.unwrap().mode, mode, "{act}");
            match act {
                "write" => drop(bob.write(&file, 0, b"x", FILE_SYNC).await.unwrap()),
                "size" => drop(bob.setattr(&file, &SetAttr::size(3)).await.unwrap()),
                "create" => drop(bob.make(proc::CREATE, &create).await.unwrap()),
                "own write" => drop(alice.write(&file, 0, b"x", UNSTABLE).await.unwrap()),
                _ => drop(root.setattr(&file, &owner(BOB)).await.unwrap()),
            }
            assert_eq!(root.getattr(&file).await.unwrap().mode, 0o777, "{act} {mode:o}");
        }
        root.setattr(&file, &SetAttr::mode(mode)).await.unwrap();
        root.write(&file, 0, b"x", FILE_SYNC).await.unwrap();
        root.setattr(&file, &SetAttr::size(3)).await.unwrap();
        assert_eq!(root.getattr(&file).await.unwrap().mode, mode, "root's own changes");
    }
}

#[tokio::test]
async fn a_directory_that_moves_is_written_by_who_moves_it() {
    let server = Server::start().await;
    let (directory, mut alice, mut bob) = setting(&server, 0o777).await;
    let one = bob.mkdir(&directory, b"one", 0o777).await.unwrap();
    alice.mkdir(&directory, b"alices", 0o755).await.unwrap();
    let moved = bob.rename((&directory, b"alices"), (&one, b"x")).await;
    assert_eq!(moved.unwrap_err(), status::ACCES, "its `..` would change");
    assert!(bob.rename((&directory, b"alices"), (&directory, b"y")).await.is_ok());
}
