//! Every procedure of every program, called by everybody: listed to read and write, listed to
//! read, not listed, from a port that anybody may open, and squashed.

use slackwater_nfs::{NfsOptions, Squash};

use crate::common::client::{Client, Cred, FILE_SYNC, MOUNT, NFS, PORTMAP, proc, write_args};
use crate::common::{Args, Server, SetAttr, root_options, status};

/// NFSv3 has the procedures 0 to 21 (RFC 1813 section 3.3).
const NFS_PROCEDURES: u32 = 22;
/// MOUNT has 0 to 5 (RFC 1813 section 5.2).
const MOUNT_PROCEDURES: u32 = 6;
const MOUNT_MNT: u32 = 1;
/// GETPORT of PORTMAP version 2 (RFC 1833 section 3.2).
const PORTMAP_GETPORT: u32 = 3;
/// Refused by authentication: AUTH_TOOWEAK (RFC 5531 section 9).
const TOO_WEAK: [u32; 3] = [1, 1, 5];

/// A tree that only its owner, root, may look into or change.
struct Tree {
    root: Vec<u8>,
    folder: Vec<u8>,
    file: Vec<u8>,
    link: Vec<u8>,
}

impl Tree {
    async fn make(client: &mut Client) -> Self {
        let root = client.root().await;
        let folder = client.mkdir(&root, b"folder", 0o700).await.unwrap();
        let file = client.create(&folder, b"file").await.unwrap();
        client.setattr(&file, &SetAttr::mode(0o600)).await.unwrap();
        client.write(&file, 0, b"content", FILE_SYNC).await.unwrap();
        for name in [&b"victim"[..], b"old"] {
            client.create(&folder, name).await.unwrap();
        }
        client.mkdir(&folder, b"empty", 0o755).await.unwrap();
        let args = Args::new().place(&folder, b"link").set(&SetAttr::default()).opaque(b"file");
        client.nfs(proc::SYMLINK, &args).await.1.post_op_handle();
        let link = client.lookup(&folder, b"link").await.unwrap();
        Self { root, folder, file, link }
    }

    /// A call of each procedure that root may make, in an order in which all of them succeed.
    fn calls(&self) -> Vec<(u32, Args)> {
        let Self { folder, file, link, .. } = self;
        let place = |name: &[u8]| Args::new().place(folder, name);
        let of = |handle: &[u8]| Args::new().opaque(handle);
        let none = SetAttr::default();
        vec![
            (proc::NULL, Args::new()),
            (proc::GETATTR, of(file)),
            (proc::SETATTR, of(file).set(&SetAttr::size(3)).u32(0)),
            (proc::LOOKUP, place(b"file")),
            (proc::ACCESS, of(file).u32(0x3f)),
            (proc::READLINK, of(link)),
            (proc::READ, of(file).u64(0).u32(100)),
            (proc::WRITE, write_args(file, 0, b"changed", FILE_SYNC)),
            (proc::CREATE, place(b"new").u32(0).set(&none)),
            (proc::MKDIR, place(b"new-folder").set(&none)),
            (proc::SYMLINK, place(b"new-link").set(&none).opaque(b"target")),
            (proc::MKNOD, place(b"pipe").u32(7).set(&none)),
            (proc::REMOVE, place(b"victim")),
            (proc::RMDIR, place(b"empty")),
            (proc::RENAME, place(b"old").place(folder, b"renamed")),
            (proc::LINK, of(file).place(folder, b"second-name")),
            (proc::READDIR, of(folder).u64(0).u64(0).u32(4096)),
            (proc::READDIRPLUS, of(folder).u64(0).u64(0).u32(512).u32(8192)),
            (proc::FSSTAT, of(file)),
            (proc::FSINFO, of(file)),
            (proc::PATHCONF, of(file)),
            (proc::COMMIT, of(file).u64(0).u32(0)),
        ]
    }
}

/// What reading the tree as root gives: the names of the folder and the file's content.
async fn seen(client: &mut Client, tree: &Tree) -> (Vec<u32>, Vec<u8>) {
    let args = Args::new().opaque(&tree.folder).u64(0).u64(0).u32(8192);
    let (got, mut names) = client.nfs(proc::READDIR, &args).await;
    assert_eq!(got, status::OK);
    // Its times are not part of what is compared.
    names.post_op();
    let mut words = Vec::new();
    while names.left() > 0 {
        words.push(names.u32());
    }
    (words, client.read(&tree.file, 0, 100).await.unwrap().0)
}

/// Makes the tree, and serves it again with other options.
async fn served_again(options: NfsOptions) -> (Server, Tree) {
    let server = Server::start().await;
    let tree = Tree::make(&mut server.client().await).await;
    (Server::over_directory(server.stop().await, options).await, tree)
}

fn listed(rule: &str) -> NfsOptions {
    NfsOptions { clients: vec![rule.parse().unwrap()], ..root_options() }
}

/// The statuses of all calls of [`Tree::calls`], by procedure.
async fn statuses(client: &mut Client, tree: &Tree) -> Vec<u32> {
    let mut statuses = Vec::new();
    for (procedure, args) in tree.calls() {
        assert_eq!(usize::try_from(procedure).unwrap(), statuses.len(), "in order, none missing");
        statuses.push(match procedure {
            proc::NULL => {
                client.run(NFS, procedure, &args).await.end();
                status::OK
            }
            _ => client.nfs(procedure, &args).await.0,
        });
    }
    assert_eq!(statuses.len(), usize::try_from(NFS_PROCEDURES).unwrap());
    statuses
}

/// Procedures that a client which may only read has no use for. COMMIT only makes sure of what
/// others changed, and costs the disk a sync.
const CHANGING: [u32; 11] = [
    proc::SETATTR,
    proc::WRITE,
    proc::CREATE,
    proc::MKDIR,
    proc::SYMLINK,
    proc::MKNOD,
    proc::REMOVE,
    proc::RMDIR,
    proc::RENAME,
    proc::LINK,
    proc::COMMIT,
];

#[tokio::test]
async fn who_is_listed_to_write_may_call_everything() {
    let (server, tree) = served_again(listed("127.0.0.0/8:rw")).await;
    let mut client = server.client().await;
    let before = seen(&mut client, &tree).await;
    for (procedure, got) in (0..).zip(statuses(&mut client, &tree).await) {
        assert_eq!(got, status::OK, "procedure {procedure}");
    }
    let after = seen(&mut client, &tree).await;
    assert!(before.0 != after.0 && before.1 != after.1, "the calls do change the tree");
}

#[tokio::test]
async fn who_is_listed_to_read_changes_nothing_by_any_procedure() {
    let (server, tree) = served_again(listed("127.0.0.0/8:ro")).await;
    let mut client = server.client().await;
    let before = seen(&mut client, &tree).await;
    for (procedure, got) in (0..).zip(statuses(&mut client, &tree).await) {
        let changes = CHANGING.contains(&procedure);
        let expected = if changes { status::ROFS } else { status::OK };
        assert_eq!(got, expected, "procedure {procedure}");
    }
    // Writes that could be gathered, and the wrong order of a write behind a commit.
    for stable in 0..=FILE_SYNC {
        let (got, _) = client.nfs(proc::WRITE, &write_args(&tree.file, 0, b"x", stable)).await;
        assert_eq!(got, status::ROFS, "stable {stable}");
    }
    assert_eq!(seen(&mut client, &tree).await, before);
}

/// Calls everything as one who is refused, with handles that are right.
async fn assert_refused(server: &Server, tree: &Tree) {
    let mut client = server.client().await;
    for (procedure, args) in tree.calls() {
        if procedure == proc::NULL {
            client.run(NFS, procedure, &args).await.end();
            continue;
        }
        let mut reply = client.reply(NFS, procedure, &args).await;
        assert_eq!([reply.u32(), reply.u32(), reply.u32()], TOO_WEAK, "procedure {procedure}");
        reply.end();
    }
    for procedure in 0..MOUNT_PROCEDURES {
        let args = Args::new().opaque(b"/slackwater");
        match procedure {
            0 => client.run(MOUNT, procedure, &Args::new()).await.end(),
            MOUNT_MNT => {
                let mut reply = client.run(MOUNT, procedure, &args).await;
                assert_eq!(reply.u32(), status::ACCES);
                reply.end();
            }
            _ => {
                let mut reply = client.reply(MOUNT, procedure, &args).await;
                let got = [reply.u32(), reply.u32(), reply.u32()];
                assert_eq!(got, TOO_WEAK, "MOUNT procedure {procedure}");
            }
        }
    }
    // Where the programs are is no secret: they are on the port that was asked.
    let args = Args::new().u32(NFS.0).u32(NFS.1).u32(6).u32(0);
    let port = client.run(PORTMAP, PORTMAP_GETPORT, &args).await.u32();
    assert_eq!(port, u32::from(server.address.port()));
}

#[tokio::test]
async fn who_is_not_listed_is_refused_by_every_procedure() {
    let (server, tree) = served_again(listed("10.0.0.0/8:rw")).await;
    assert_refused(&server, &tree).await;
    let server = Server::over_directory(server.stop().await, root_options()).await;
    let mut client = server.client().await;
    assert_eq!(seen(&mut client, &tree).await.1, b"content");
}

#[tokio::test]
async fn a_port_that_anybody_may_open_is_refused_by_every_procedure() {
    let options = NfsOptions { require_privileged_port: true, ..root_options() };
    let (server, tree) = served_again(options).await;
    // The system gives a client a port above 1023.
    assert_refused(&server, &tree).await;
}

/// What a user without rights gets from each procedure on the tree of [`Tree::make`].
fn expected_of_a_stranger(procedure: u32) -> u32 {
    match procedure {
        // Attributes, a link's target and figures are told to whoever has a handle, and what
        // ACCESS grants is in its results. COMMIT asks for no rights: the writes that it makes
        // durable were allowed when they came.
        proc::NULL
        | proc::GETATTR
        | proc::ACCESS
        | proc::READLINK
        | proc::FSSTAT
        | proc::FSINFO
        | proc::PATHCONF
        | proc::COMMIT => status::OK,
        _ => status::ACCES,
    }
}

#[tokio::test]
async fn a_squashed_user_is_a_stranger_to_every_procedure() {
    for squash in [Squash::RootSquash, Squash::AllSquash] {
        let (server, tree) = served_again(NfsOptions { squash, ..root_options() }).await;
        for cred in [Cred::user(0, 0), Cred::None] {
            let mut client = server.client().await.with(cred.clone());
            for (procedure, got) in (0..).zip(statuses(&mut client, &tree).await) {
                let expected = expected_of_a_stranger(procedure);
                assert_eq!(got, expected, "{squash}, {cred:?}: procedure {procedure}");
            }
            let args = Args::new().opaque(&tree.file).u32(0x3f);
            let (_, mut body) = client.nfs(proc::ACCESS, &args).await;
            body.post_op();
            assert_eq!(body.u32(), 0, "ACCESS grants nothing");
        }
        let server = Server::over_directory(server.stop().await, root_options()).await;
        assert_eq!(seen(&mut server.client().await, &tree).await.1, b"content");
    }
}

#[tokio::test]
async fn all_users_are_squashed_where_it_is_asked_for() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let tree = Tree::make(&mut client).await;
    let owner = SetAttr { uid: Some(1000), gid: Some(1000), ..SetAttr::default() };
    for handle in [&tree.folder, &tree.file, &tree.link] {
        client.setattr(handle, &owner).await.unwrap();
    }
    let options = NfsOptions { squash: Squash::AllSquash, ..root_options() };
    let server = Server::over_directory(server.stop().await, options).await;
    let mut client = server.client().await.with(Cred::user(1000, 1000));
    for (procedure, got) in (0..).zip(statuses(&mut client, &tree).await) {
        assert_eq!(got, expected_of_a_stranger(procedure), "procedure {procedure}");
    }
    // The same user, not squashed, is the owner.
    let options = NfsOptions { squash: Squash::RootSquash, ..root_options() };
    let server = Server::over_directory(server.stop().await, options).await;
    let mut client = server.client().await.with(Cred::user(1000, 1000));
    assert!(client.lookup(&tree.root, b"folder").await.is_ok());
    assert_eq!(client.read(&tree.file, 0, 100).await.unwrap().0, b"content");
}
