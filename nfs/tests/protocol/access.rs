//! Address list, read-only clients, privileged ports and squashing.

use slackwater_nfs::{NfsOptions, Squash};

use crate::common::client::{Cred, FILE_SYNC, MOUNT, NFS, proc};
use crate::common::{Args, Server, SetAttr, root_options, status};

fn clients(rules: &[&str]) -> NfsOptions {
    NfsOptions {
        clients: rules.iter().map(|rule| rule.parse().unwrap()).collect(),
        ..root_options()
    }
}

#[tokio::test]
async fn an_unlisted_address_gets_nothing() {
    let listed = Server::start().await;
    let root = listed.client().await.root().await;
    let server = Server::with(clients(&["10.0.0.0/8:rw"])).await;
    let mut client = server.client().await;
    assert_eq!(client.mount(b"/slackwater").await, Err(status::ACCES));
    for procedure in 1..22 {
        let mut reply = client.reply(NFS, procedure, &Args::new().opaque(&root)).await;
        assert_eq!([reply.u32(), reply.u32(), reply.u32()], [1, 1, 5], "AUTH_TOOWEAK");
    }
    let mut reply = client.reply(MOUNT, 5, &Args::new()).await;
    assert_eq!([reply.u32(), reply.u32(), reply.u32()], [1, 1, 5], "EXPORT");
    client.run(NFS, 0, &Args::new()).await.end();
    client.send(&(8192_u32 | 1 << 31).to_be_bytes()).await;
    assert!(client.is_closed().await, "no large records from strangers");
}

#[tokio::test]
async fn a_read_only_client_changes_nothing() {
    let server = Server::with(clients(&["127.0.0.0/8:rw"])).await;
    let mut client = server.client().await;
    let root = client.root().await;
    let file = client.create(&root, b"file").await.unwrap();
    client.write(&file, 0, b"content", FILE_SYNC).await.unwrap();
    let directory = server.stop().await;
    let server = Server::over_directory(directory, clients(&["127.0.0.0/8:ro"])).await;
    let mut client = server.client().await;
    assert_eq!(client.root().await, root);
    assert_eq!(client.read(&file, 0, 10).await, Ok((b"content".to_vec(), true)));
    assert!(client.lookup(&root, b"file").await.is_ok());
    assert_eq!(client.write(&file, 0, b"x", FILE_SYNC).await.unwrap_err(), status::ROFS);
    assert_eq!(client.setattr(&file, &SetAttr::size(0)).await.unwrap_err(), status::ROFS);
    assert_eq!(client.create(&root, b"new").await, Err(status::ROFS));
    assert_eq!(client.mkdir(&root, b"new", 0o755).await, Err(status::ROFS));
    assert_eq!(client.remove(&root, b"file").await.unwrap_err(), status::ROFS);
    let renamed = client.rename((&root, b"file"), (&root, b"other")).await;
    assert_eq!(renamed.unwrap_err(), status::ROFS);
    let (got, _) = client.nfs(proc::LINK, &Args::new().opaque(&file).place(&root, b"l")).await;
    assert_eq!(got, status::ROFS);
    let (_, mut body) = client.nfs(proc::ACCESS, &Args::new().opaque(&root).u32(0x3f)).await;
    body.post_op();
    assert_eq!(body.u32(), 3, "READ and LOOKUP");
}

#[tokio::test]
async fn a_privileged_port_can_be_required() {
    let options = NfsOptions { require_privileged_port: true, ..root_options() };
    let server = Server::with(options).await;
    // The system gives a client a port above 1023.
    let mut client = server.client().await;
    assert_eq!(client.mount(b"/slackwater").await, Err(status::ACCES));
}

/// Who owns a file that `cred` makes under the squash mode.
async fn owner(squash: Squash, cred: Cred) -> (u32, u32) {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    client.setattr(&root, &SetAttr::mode(0o777)).await.unwrap();
    let options =
        NfsOptions { squash, anonymous_uid: 4242, anonymous_gid: 4343, ..NfsOptions::default() };
    let server = Server::over_directory(server.stop().await, options).await;
    let mut client = server.client().await.with(cred);
    let root = client.root().await;
    let file = client.create(&root, b"file").await.unwrap();
    let attributes = client.getattr(&file).await.unwrap();
    (attributes.uid, attributes.gid)
}

#[tokio::test]
async fn users_are_squashed_as_configured() {
    let (root, user) = (Cred::user(0, 0), Cred::user(1000, 100));
    assert_eq!(owner(Squash::NoRootSquash, root.clone()).await, (0, 0));
    assert_eq!(owner(Squash::NoRootSquash, Cred::None).await, (4242, 4343));
    assert_eq!(owner(Squash::RootSquash, root.clone()).await, (4242, 4343));
    assert_eq!(owner(Squash::RootSquash, user.clone()).await, (1000, 100));
    assert_eq!(owner(Squash::RootSquash, Cred::user(1000, 0)).await, (1000, 4343));
    assert_eq!(owner(Squash::AllSquash, root).await, (4242, 4343));
    assert_eq!(owner(Squash::AllSquash, user).await, (4242, 4343));
}

#[tokio::test]
async fn a_squashed_root_is_nobody() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let secret = client.create(&root, b"secret").await.unwrap();
    client.setattr(&secret, &SetAttr::mode(0o600)).await.unwrap();
    let directory = server.stop().await;
    let server = Server::over_directory(directory, NfsOptions::default()).await;
    let mut client = server.client().await;
    assert_eq!(client.read(&secret, 0, 10).await, Err(status::ACCES));
    assert_eq!(client.create(&root, b"new").await, Err(status::ACCES));
    assert_eq!(client.setattr(&secret, &SetAttr::mode(0o777)).await.unwrap_err(), status::PERM);
}
