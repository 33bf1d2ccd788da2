//! READ, WRITE and COMMIT.

use slackwater_nfs::NfsOptions;

use crate::common::client::{
    Cred, DATA_SYNC, FILE_SYNC, NFS, UNSTABLE, call, proc, record, write_args,
};
use crate::common::{Args, Body, Fattr, Server, SetAttr, root_options, status};

const MIB: usize = 1 << 20;

/// Bytes that repeat nowhere near a block boundary.
fn pattern(length: usize, seed: u8) -> Vec<u8> {
    (0..=250).cycle().skip(usize::from(seed)).take(length).collect()
}

#[tokio::test]
async fn what_is_written_is_read_in_any_cut() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let file = client.create(&root, b"file").await.unwrap();
    let data = pattern(3 * MIB + 17, 3);
    for (at, piece) in data.chunks(MIB).enumerate() {
        let offset = u64::try_from(at * MIB).unwrap();
        let wrote = client.write(&file, offset, piece, UNSTABLE).await.unwrap();
        assert_eq!(usize::try_from(wrote.count).unwrap(), piece.len());
    }
    for (offset, count) in [(0, 1), (1, 4096), (4095, 2), (MIB - 1, MIB), (3 * MIB, 100)] {
        let (read, is_end) = client
            .read(&file, u64::try_from(offset).unwrap(), u32::try_from(count).unwrap())
            .await
            .unwrap();
        let end = (offset + count).min(data.len());
        assert_eq!(read, data[offset..end], "{count} bytes at {offset}");
        assert_eq!(is_end, end == data.len());
    }
    client.commit(&file).await.unwrap();
    let (read, _) = client.read(&file, 0, u32::try_from(MIB).unwrap()).await.unwrap();
    assert_eq!(read, data[..MIB]);
    let counters = server.counters();
    assert_eq!(counters.bytes_written, u64::try_from(data.len()).unwrap());
}

#[tokio::test]
async fn a_read_past_the_largest_is_short_and_past_the_end_is_empty() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let file = client.create(&root, b"file").await.unwrap();
    client.setattr(&file, &SetAttr::size(3 << 20)).await.unwrap();
    let (read, is_end) = client.read(&file, 0, u32::MAX).await.unwrap();
    assert_eq!((read.len(), is_end), (MIB, false));
    assert!(read.iter().all(|&byte| byte == 0), "holes read as zeros");
    for offset in [3 << 20, 1 << 40, 1 << 62, u64::MAX] {
        assert_eq!(client.read(&file, offset, 10).await, Ok((vec![], true)), "at {offset}");
    }
    assert_eq!(client.read(&file, 0, 0).await, Ok((vec![], false)));
    assert_eq!(client.read(&root, 0, 10).await, Err(status::ISDIR));
}

#[tokio::test]
async fn a_write_is_as_stable_as_it_was_asked_to_be() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let file = client.create(&root, b"file").await.unwrap();
    let mut last = client.getattr(&file).await.unwrap();
    for stable in [UNSTABLE, DATA_SYNC, FILE_SYNC] {
        let wrote = client.write(&file, 0, b"data", stable).await.unwrap();
        assert!(wrote.committed >= stable);
        let before = wrote.wcc.before.unwrap();
        assert_eq!((before.size, before.mtime, before.ctime), (last.size, last.mtime, last.ctime));
        let after = wrote.wcc.after.unwrap();
        assert!(after.ctime > before.ctime && after.mtime > before.mtime, "times grow strictly");
        assert_eq!(after.size, 4);
        last = client.getattr(&file).await.unwrap();
    }
    let verifier = client.write(&file, 0, b"data", UNSTABLE).await.unwrap().verifier;
    assert_eq!(client.commit(&file).await, Ok(verifier));
}

#[tokio::test]
async fn a_write_that_makes_no_sense_is_refused() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let file = client.create(&root, b"file").await.unwrap();
    let args = Args::new().opaque(&file).u64(0).u32(5).u32(0).opaque(b"four");
    assert_eq!(client.nfs(proc::WRITE, &args).await.0, status::INVAL, "count and length differ");
    assert_eq!(client.write(&file, u64::MAX, b"x", UNSTABLE).await.unwrap_err(), status::FBIG);
    assert_eq!(client.write(&file, 1 << 62, b"x", UNSTABLE).await.unwrap_err(), status::FBIG);
    assert_eq!(client.write(&root, 0, b"x", UNSTABLE).await.unwrap_err(), status::ISDIR);
    let mut reply = client
        .reply(NFS, proc::WRITE, &Args::new().opaque(&file).u64(0).u32(1).u32(3).opaque(b"x"))
        .await;
    assert_eq!([reply.u32(), reply.u32(), reply.u32(), reply.u32()], [0, 0, 0, 4], "stable_how 3");
    let before = client.getattr(&file).await.unwrap();
    let wrote = client.write(&file, 100, b"", FILE_SYNC).await.unwrap();
    assert_eq!((wrote.count, wrote.committed), (0, FILE_SYNC));
    assert_eq!(client.getattr(&file).await.unwrap(), before, "no bytes change nothing");
}

#[tokio::test]
async fn an_old_verifier_tells_of_a_restart() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let file = client.create(&root, b"file").await.unwrap();
    let verifier = client.write(&file, 0, b"data", UNSTABLE).await.unwrap().verifier;
    let server = server.restart().await;
    let mut client = server.client().await;
    let after = client.commit(&file).await.unwrap();
    assert_ne!(verifier, after, "the client must send its data again");
    assert_eq!(client.write(&file, 0, b"data", UNSTABLE).await.unwrap().verifier, after);
    assert_eq!(client.commit(&file).await, Ok(after));
    assert_eq!(client.read(&file, 0, 10).await, Ok((b"data".to_vec(), true)));
}

#[tokio::test]
async fn two_thousand_writes_are_in_flight_on_one_connection() {
    const WRITES: u32 = 2000;
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let file = client.create(&root, b"file").await.unwrap();
    let block = |number: u32| pattern(4096, number.to_be_bytes()[3]);
    let mut stream = Vec::new();
    for number in 0..WRITES {
        let args = write_args(&file, u64::from(number) * 4096, &block(number), UNSTABLE);
        stream.extend(record(&call(number, NFS, proc::WRITE, &Cred::user(0, 0), &args)));
    }
    // All are sent before a reply is read.
    client.send(&stream).await;
    let mut answered = vec![false; usize::try_from(WRITES).unwrap()];
    for _ in 0..WRITES {
        let mut reply = Body::new(client.receive().await);
        let xid = usize::try_from(reply.u32()).unwrap();
        assert!(!std::mem::replace(&mut answered[xid], true), "one reply to each");
        let header: Vec<u32> = (0..5).map(|_| reply.u32()).collect();
        assert_eq!(header, [1, 0, 0, 0, 0]);
        assert_eq!(reply.u32(), status::OK);
    }
    assert!(answered.into_iter().all(|answered| answered));
    client.commit(&file).await.unwrap();
    for number in (0..WRITES).step_by(97) {
        let (read, _) = client.read(&file, u64::from(number) * 4096, 4096).await.unwrap();
        assert_eq!(read, block(number), "block {number}");
    }
    assert_eq!(client.getattr(&file).await.unwrap().size, u64::from(WRITES) * 4096);
    server
        .wait_until(|counters| (counters.calls_in_flight, counters.bytes_in_flight) == (0, 0))
        .await;
}

#[tokio::test]
async fn used_bytes_follow_data_and_holes() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let file = client.create(&root, b"file").await.unwrap();
    client.setattr(&file, &SetAttr::size(1 << 40)).await.unwrap();
    let attributes = client.getattr(&file).await.unwrap();
    assert_eq!((attributes.size, attributes.used), (1 << 40, 0));
    client.write(&file, 1 << 30, &pattern(64 << 10, 1), FILE_SYNC).await.unwrap();
    assert_eq!(client.getattr(&file).await.unwrap().used, 64 << 10);
    client.write(&file, 1 << 30, &vec![0; 64 << 10], FILE_SYNC).await.unwrap();
    assert_eq!(client.getattr(&file).await.unwrap().used, 0, "zeros take no space");
}

#[tokio::test]
async fn the_counts_of_calls_and_errors_are_kept() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    client.lookup(&root, b"none").await.unwrap_err();
    client.lookup(&root, b".").await.unwrap();
    let counters = server.counters();
    let of = |program, name| {
        let found = |one: &&slackwater_nfs::ProcedureSnapshot| {
            one.program == program && one.procedure == name
        };
        let one = counters.procedures.iter().find(found).unwrap();
        assert_eq!(one.latency_counts.iter().sum::<u64>(), one.calls);
        (one.calls, one.errors)
    };
    assert_eq!(of("nfs", "LOOKUP"), (2, 1));
    assert_eq!(of("mount", "MNT"), (1, 0));
    assert_eq!(of("nfs", "READ"), (0, 0));
    assert_eq!((counters.connections_accepted, counters.connections_open), (1, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_largest_file_is_cut_and_grown_at_once() {
    use slackwater_blockstore::{FilePath, SnapshotRequest};
    /// Work for each block would take years, and a busy machine with a slow disk some seconds.
    const SOON: std::time::Duration = std::time::Duration::from_secs(30);
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let mut file = client.create(&root, b"file").await.unwrap();
    for is_clone in [false, true] {
        if is_clone {
            let taken = server.blocking(|store| {
                let path = |text| FilePath::parse(text).unwrap();
                let taken = store.snapshot(&path("file"), SnapshotRequest::default()).unwrap();
                store.clone_snapshot(taken.id, &path("clone")).unwrap();
            });
            taken.await;
            file = client.lookup(&root, b"clone").await.unwrap();
        }
        for size in [1 << 62, (1 << 60) + 5, 1 << 62, 1 << 61, 12_345, 1 << 62] {
            let set = SetAttr::size(size);
            let set = tokio::time::timeout(SOON, client.setattr(&file, &set)).await;
            set.expect("in time, whatever the size").unwrap();
            if size > 4096 {
                for offset in [0, size / 2, size - 4096] {
                    let write = client.write(&file, offset, &[1; 4096], FILE_SYNC);
                    tokio::time::timeout(SOON, write).await.expect("in time").unwrap();
                }
            }
            assert_eq!(client.getattr(&file).await.unwrap().size, size);
        }
    }
    for name in [&b"clone"[..], b"file"] {
        tokio::time::timeout(SOON, client.remove(&root, name)).await.expect("in time").unwrap();
    }
}

/// As with `relatime`: not by each read, and not by who may only read.
#[tokio::test]
async fn a_read_behind_a_change_moves_the_time_of_access() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let file = client.create(&root, b"file").await.unwrap();
    client.write(&file, 0, b"content", FILE_SYNC).await.unwrap();
    let before = client.getattr(&file).await.unwrap();
    assert!(before.atime < before.mtime);
    let told = {
        let (got, mut body) =
            client.nfs(proc::READ, &Args::new().opaque(&file).u64(0).u32(10)).await;
        assert_eq!(got, status::OK);
        body.post_op().unwrap()
    };
    assert!(told.atime > before.ctime);
    assert_eq!(Fattr { atime: before.atime, ..told }, before, "nothing else changes");
    client.read(&file, 0, 10).await.unwrap();
    assert_eq!(client.getattr(&file).await.unwrap(), told);
    // It is kept, and a client that may only read leaves it.
    client.write(&file, 0, b"changed", FILE_SYNC).await.unwrap();
    let read_only =
        NfsOptions { clients: vec!["127.0.0.0/8:ro".parse().unwrap()], ..root_options() };
    let server = Server::over_directory(server.stop().await, read_only).await;
    let mut client = server.client().await;
    client.read(&file, 0, 10).await.unwrap();
    assert_eq!(client.getattr(&file).await.unwrap().atime, told.atime);
}
