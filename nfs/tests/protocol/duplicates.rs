//! Resent calls.

use crate::common::client::{Cred, NFS, call, proc, record};
use crate::common::{Args, Body, Client, Server, SetAttr, status};

/// Sends the call and answers the reply's bytes.
async fn exchange(client: &mut Client, call: &[u8]) -> Vec<u8> {
    client.send(&record(call)).await;
    client.receive().await
}

fn status_of(reply: &[u8]) -> u32 {
    let mut body = Body::new(reply.to_vec());
    let header: Vec<u32> = (0..6).map(|_| body.u32()).collect();
    assert_eq!(header[1..], [1, 0, 0, 0, 0], "an accepted reply");
    body.u32()
}

#[tokio::test]
async fn a_resent_call_gets_the_first_reply_from_any_connection() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    client.create(&root, b"victim").await.unwrap();
    client.create(&root, b"moving").await.unwrap();
    let root_user = Cred::user(0, 0);
    let file = client.create(&root, b"linked").await.unwrap();
    let place = |name: &[u8]| Args::new().place(&root, name);
    let set = SetAttr::mode(0o700);
    let calls = [
        (proc::REMOVE, place(b"victim")),
        (proc::MKDIR, place(b"directory").set(&set)),
        (proc::RMDIR, place(b"directory")),
        (proc::CREATE, place(b"created").u32(1).set(&set)),
        (proc::SYMLINK, place(b"symlink").set(&set).opaque(b"target")),
        (proc::MKNOD, place(b"pipe").u32(7).set(&set)),
        (proc::RENAME, place(b"moving").place(&root, b"moved")),
        (proc::LINK, Args::new().opaque(&file).place(&root, b"link")),
        (proc::SETATTR, Args::new().opaque(&file).set(&SetAttr::size(10)).u32(0)),
    ];
    for (number, (procedure, args)) in (1000..).zip(&calls) {
        let bytes = call(number, NFS, *procedure, &root_user, args);
        let first = exchange(&mut client, &bytes).await;
        assert_eq!(status_of(&first), status::OK, "procedure {procedure}");
        assert_eq!(exchange(&mut client, &bytes).await, first, "procedure {procedure}");
        let mut other = server.client().await;
        assert_eq!(exchange(&mut other, &bytes).await, first, "over another connection");
        // The same with a new transaction id is a new call, and meets what the first left.
        let again = call(number + 5000, NFS, *procedure, &root_user, args);
        let second = status_of(&exchange(&mut client, &again).await);
        let expected = match *procedure {
            proc::REMOVE | proc::RMDIR | proc::RENAME => status::NOENT,
            proc::SETATTR => status::OK,
            _ => status::EXIST,
        };
        assert_eq!(second, expected, "procedure {procedure}");
    }
    assert_eq!(server.counters().duplicates_replayed, 18);
}

#[tokio::test]
async fn a_failure_is_replayed_too() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let bytes = call(7, NFS, proc::REMOVE, &Cred::user(0, 0), &Args::new().place(&root, b"later"));
    let first = exchange(&mut client, &bytes).await;
    assert_eq!(status_of(&first), status::NOENT);
    client.create(&root, b"later").await.unwrap();
    assert_eq!(exchange(&mut client, &bytes).await, first);
    assert!(client.lookup(&root, b"later").await.is_ok(), "it was not run again");
}

#[tokio::test]
async fn calls_that_may_be_run_again_are_not_kept() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let lookup = call(7, NFS, proc::LOOKUP, &Cred::user(0, 0), &Args::new().place(&root, b"file"));
    assert_eq!(status_of(&exchange(&mut client, &lookup).await), status::NOENT);
    client.create(&root, b"file").await.unwrap();
    assert_eq!(status_of(&exchange(&mut client, &lookup).await), status::OK);
    assert_eq!(server.counters().duplicates_replayed, 0);
}

#[tokio::test]
async fn copies_sent_together_are_run_once() {
    const CALLS: u32 = 50;
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let mut stream = Vec::new();
    for number in 0..CALLS {
        let name = format!("directory-{number}");
        let args = Args::new().place(&root, name.as_bytes()).set(&SetAttr::mode(0o755));
        let bytes = call(10_000 + number, NFS, proc::MKDIR, &Cred::user(0, 0), &args);
        stream.extend(record(&bytes));
        stream.extend(record(&bytes));
    }
    client.send(&stream).await;
    // Each copy is dropped or answered again; once all are counted, so are the replies.
    server
        .wait_until(|counters| {
            counters.duplicates_dropped + counters.duplicates_replayed == u64::from(CALLS)
        })
        .await;
    let replies = u64::from(CALLS) + server.counters().duplicates_replayed;
    for _ in 0..replies {
        assert_eq!(status_of(&client.receive().await), status::OK);
    }
    assert!(client.getattr(&root).await.is_ok(), "no reply is left over");
}
