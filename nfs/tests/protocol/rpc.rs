//! RPC and record marking on a socket: what is refused, and how.

use crate::common::client::{Cred, MOUNT, NFS, PORTMAP, call, proc, record};
use crate::common::{Args, Body, Server, SetAttr};

/// The words after xid and type of a reply.
fn words(mut body: Body) -> Vec<u32> {
    let mut words = Vec::new();
    while body.left() > 0 {
        words.push(body.u32());
    }
    words
}

#[tokio::test]
async fn null_of_every_program_answers() {
    let server = Server::start().await;
    for cred in [Cred::None, Cred::user(0, 0)] {
        let mut client = server.client().await.with(cred);
        for program in [NFS, MOUNT, PORTMAP] {
            client.run(program, 0, &Args::new()).await.end();
        }
    }
}

#[tokio::test]
async fn unknown_programs_versions_and_procedures_are_told_apart() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let none = Args::new();
    let mut answer =
        async |program, procedure| words(client.reply(program, procedure, &none).await);
    assert_eq!(answer((100_227, 3), 0).await, [0, 0, 0, 1], "NFS_ACL: PROG_UNAVAIL");
    assert_eq!(answer((100_003, 4), 0).await, [0, 0, 0, 2, 3, 3], "NFSv4: PROG_MISMATCH");
    assert_eq!(answer((100_005, 1), 0).await, [0, 0, 0, 2, 3, 3]);
    assert_eq!(answer((100_000, 3), 0).await, [0, 0, 0, 2, 2, 2]);
    assert_eq!(answer(NFS, 22).await, [0, 0, 0, 3], "PROC_UNAVAIL");
    assert_eq!(answer(MOUNT, 6).await, [0, 0, 0, 3]);
    assert_eq!(answer(PORTMAP, 1).await, [0, 0, 0, 3], "nobody registers here");
    assert_eq!(server.counters().calls_refused, 7);
}

#[tokio::test]
async fn wrong_rpc_versions_and_credentials_are_denied() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let mut answer = async |call: Args| {
        client.send(&record(&call.0)).await;
        words(Body::new(client.receive().await))
    };
    let header = |version| Args::new().u32(9).u32(0).u32(version).u32(NFS.0).u32(3).u32(1);
    assert_eq!(answer(header(3).u32(0).u32(0).u32(0).u32(0)).await, [9, 1, 1, 0, 2, 2]);
    assert_eq!(answer(header(2).u32(6).u32(0).u32(0).u32(0)).await, [9, 1, 1, 1, 1], "RPCSEC_GSS");
    assert_eq!(answer(header(2).u32(0).u32(401)).await, [9, 1, 1, 1, 1], "body too long");
    assert_eq!(answer(header(2).u32(0).u32(0).u32(0).u32(404)).await, [9, 1, 1, 1, 3]);
    let groups = Args::new().u32(0).opaque(b"m").u32(0).u32(0).u32(17);
    let groups = (0..17).fold(groups, |groups, group| groups.u32(group));
    let call = header(2).u32(1).opaque(&groups.0).u32(0).u32(0);
    assert_eq!(answer(call).await, [9, 1, 1, 1, 1], "17 groups");
}

#[tokio::test]
async fn arguments_cut_anywhere_are_garbage_and_harm_nothing() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let whole = Args::new().place(&root, b"name");
    for procedure in [proc::GETATTR, proc::LOOKUP, proc::CREATE, proc::WRITE, proc::RENAME] {
        let shortest = if procedure == proc::GETATTR { 52 } else { whole.0.len() };
        for length in 0..shortest {
            let cut = Args(whole.0[..length].to_vec());
            let reply = words(client.reply(NFS, procedure, &cut).await);
            assert_eq!(reply, [0, 0, 0, 4], "procedure {procedure}, {length} bytes");
        }
    }
    assert!(client.getattr(&root).await.is_ok());
}

#[tokio::test]
async fn a_call_arrives_split_at_every_byte() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let bytes = record(&call(5, NFS, proc::GETATTR, &Cred::user(0, 0), &Args::new().opaque(&root)));
    for cut in 1..bytes.len() {
        client.send(&bytes[..cut]).await;
        tokio::task::yield_now().await;
        client.send(&bytes[cut..]).await;
        let mut reply = Body::new(client.receive().await);
        assert_eq!(reply.u32(), 5, "cut at {cut}");
    }
}

#[tokio::test]
async fn a_call_arrives_in_several_fragments() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let bytes = call(5, NFS, proc::GETATTR, &Cred::user(0, 0), &Args::new().opaque(&root));
    for size in [1, 7, 40] {
        let mut stream = Vec::new();
        for piece in bytes.chunks(size) {
            stream.extend_from_slice(&u32::try_from(piece.len()).unwrap().to_be_bytes());
            stream.extend_from_slice(piece);
        }
        stream.extend_from_slice(&(1_u32 << 31).to_be_bytes());
        client.send(&stream).await;
        let mut reply = Body::new(client.receive().await);
        assert_eq!((reply.u32(), reply.u32()), (5, 1));
    }
}

#[tokio::test]
async fn an_oversized_record_closes_its_connection_only() {
    let server = Server::start().await;
    let mut other = server.client().await;
    let root = other.root().await;
    for mark in [0x7fff_ffff_u32 | 1 << 31, 0x7fff_ffff, (1 << 20) + 4097] {
        let mut client = server.client().await;
        client.send(&mark.to_be_bytes()).await;
        assert!(client.is_closed().await, "mark {mark:#x}");
    }
    assert!(other.getattr(&root).await.is_ok());
    // A connection is counted a moment after it is closed.
    server.wait_until(|counters| counters.connections_dropped == 3).await;
}

#[tokio::test]
async fn what_is_no_call_closes_the_connection() {
    let server = Server::start().await;
    let reply = Args::new().u32(1).u32(1).u32(0).u32(0).u32(0).u32(0);
    for bytes in [reply.0, b"GET / HTTP/1.1\r\n".to_vec(), vec![0; 4], vec![]] {
        let mut client = server.client().await;
        client.send(&record(&bytes)).await;
        assert!(client.is_closed().await, "{bytes:?}");
    }
}

#[tokio::test]
async fn a_large_record_that_is_no_write_is_garbage() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let args = Args::new().place(&root, &vec![b'x'; 100_000]);
    assert_eq!(words(client.reply(NFS, proc::LOOKUP, &args).await), [0, 0, 0, 4]);
    assert!(client.getattr(&root).await.is_ok());
}

#[tokio::test]
async fn a_reply_comes_to_each_of_many_calls_in_one_packet() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let args = Args::new().opaque(&root);
    let stream: Vec<u8> = (0..1000)
        .flat_map(|xid| record(&call(xid, NFS, proc::GETATTR, &Cred::user(0, 0), &args)))
        .collect();
    client.send(&stream).await;
    let mut seen = Vec::new();
    for _ in 0..1000 {
        seen.push(Body::new(client.receive().await).u32());
    }
    seen.sort_unstable();
    assert_eq!(seen, (0..1000).collect::<Vec<_>>());
}

/// Numbers that look random and are the same on each run (xorshift).
struct Noise(u64);

impl Noise {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % u64::try_from(limit).unwrap()).unwrap()
    }
}

/// A valid call of each procedure on the root directory and a file.
fn valid_calls(root: &[u8], file: &[u8]) -> Vec<(u32, Args)> {
    let place = || Args::new().place(root, b"name");
    let set = SetAttr { uid: Some(1), ..SetAttr::size(9000) };
    let handle = || Args::new().opaque(file);
    vec![
        (proc::GETATTR, handle()),
        (proc::SETATTR, handle().set(&set).u32(1).u64(7)),
        (proc::LOOKUP, place()),
        (proc::ACCESS, handle().u32(63)),
        (proc::READLINK, handle()),
        (proc::READ, handle().u64(4000).u32(5000)),
        (proc::WRITE, handle().u64(4000).u32(7).u32(0).opaque(b"written")),
        (proc::CREATE, place().u32(0).set(&set)),
        (proc::MKDIR, place().set(&set)),
        (proc::SYMLINK, place().set(&set).opaque(b"target")),
        (proc::MKNOD, place().u32(7).set(&set)),
        (proc::REMOVE, place()),
        (proc::RMDIR, place()),
        (proc::RENAME, place().place(root, b"other")),
        (proc::LINK, handle().place(root, b"link")),
        (proc::READDIR, Args::new().opaque(root).u64(0).u64(0).u32(4096)),
        (proc::READDIRPLUS, Args::new().opaque(root).u64(0).u64(0).u32(512).u32(4096)),
        (proc::FSSTAT, handle()),
        (proc::FSINFO, handle()),
        (proc::PATHCONF, handle()),
        (proc::COMMIT, handle().u64(0).u32(0)),
    ]
}

#[tokio::test]
async fn calls_with_random_damage_never_panic_the_server() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let file = client.create(&root, b"file").await.unwrap();
    let calls = valid_calls(&root, &file);
    let mut noise = Noise(0x5eed_5eed_5eed_5eed);
    for round in 0..4000 {
        let (procedure, args) = &calls[round % calls.len()];
        let mut bytes = call(client.xid(), NFS, *procedure, &client.cred, args);
        // The damage spares xid, type and handle (which would only be found bad).
        let start = if noise.below(4) == 0 { 8 } else { bytes.len() - args.0.len() + 52 };
        for _ in 0..=noise.below(3) {
            let at = start + noise.below((bytes.len() - start).max(1));
            if let Some(byte) = bytes.get_mut(at) {
                *byte = [0, 1, 0x7f, 0x80, 0xff][noise.below(5)];
            }
        }
        if noise.below(8) == 0 {
            // A header that is cut short closes the connection, which others test.
            let shortest = start.max(24);
            bytes.truncate(shortest + noise.below((bytes.len() - shortest).max(1)));
        }
        client.send(&record(&bytes)).await;
        let mut reply = Body::new(client.receive().await);
        reply.u32();
        assert_eq!(reply.u32(), 1, "a reply to round {round}");
    }
    assert_eq!(server.counters().panics, 0);
    assert!(server.client().await.getattr(&root).await.is_ok());
}
