//! The procedures that look at and change the namespace: success, main errors, exact results.

use crate::common::client::{FILE_SYNC, UNSTABLE, proc};
use crate::common::wire::Time;
use crate::common::{Args, Server, SetAttr, status};

#[tokio::test]
async fn getattr_shows_the_root() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let attributes = client.getattr(&root).await.unwrap();
    assert_eq!((attributes.kind, attributes.fileid, attributes.rdev), (2, 1, 0));
    assert_eq!(attributes.nlink, 2);
    let file = client.create(&root, b"file").await.unwrap();
    let file = client.getattr(&file).await.unwrap();
    assert_eq!((file.kind, file.mode, file.nlink, file.size), (1, 0o644, 1, 0));
    assert_eq!(file.fsid, attributes.fsid);
    assert_ne!(file.fileid, attributes.fileid);
}

#[tokio::test]
async fn setattr_sets_what_it_is_told_and_honours_its_guard() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let file = client.create(&root, b"file").await.unwrap();
    let before = client.getattr(&file).await.unwrap();
    let set = SetAttr {
        mode: Some(0o600),
        uid: Some(10),
        gid: Some(20),
        size: Some(100),
        atime: Some(Time::To(1, 2)),
        mtime: Some(Time::To(u32::MAX, 999_999_999)),
    };
    let wcc = client.setattr(&file, &set).await.unwrap();
    assert_eq!(wcc.before.map(|before| before.ctime), Some(before.ctime));
    let after = client.getattr(&file).await.unwrap();
    assert_eq!(wcc.after, Some(after));
    assert_eq!((after.mode, after.uid, after.gid, after.size), (0o600, 10, 20, 100));
    assert_eq!((after.atime, after.mtime), ((1, 2), (u32::MAX, 999_999_999)));
    assert!(after.ctime > before.ctime);

    let guarded = |time: (u32, u32)| {
        let args = Args::new().opaque(&file).set(&SetAttr::size(0));
        args.u32(1).u32(time.0).u32(time.1)
    };
    let (got, _) = client.nfs(proc::SETATTR, &guarded(before.ctime)).await;
    assert_eq!(got, status::NOT_SYNC);
    assert_eq!(client.getattr(&file).await.unwrap().size, 100);
    assert_eq!(client.nfs(proc::SETATTR, &guarded((0, 1_000_000_000))).await.0, status::NOT_SYNC);
    assert_eq!(client.nfs(proc::SETATTR, &guarded(after.ctime)).await.0, status::OK);
    assert_eq!(client.getattr(&file).await.unwrap().size, 0);

    let bad_time = SetAttr { mtime: Some(Time::To(0, 1_000_000_000)), ..SetAttr::default() };
    assert_eq!(client.setattr(&file, &bad_time).await.unwrap_err(), status::INVAL);
    let now = SetAttr { mtime: Some(Time::Now), ..SetAttr::default() };
    assert!(client.setattr(&file, &now).await.unwrap().after.unwrap().mtime > before.mtime);
    assert_eq!(client.setattr(&file, &SetAttr::size(u64::MAX)).await.unwrap_err(), status::FBIG);
    assert!(client.setattr(&root, &SetAttr::size(0)).await.is_err());
}

#[tokio::test]
async fn lookup_finds_names_dots_and_nothing_else() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let directory = client.mkdir(&root, b"directory", 0o755).await.unwrap();
    let file = client.create(&directory, b"file").await.unwrap();
    assert_eq!(client.lookup(&directory, b"file").await.as_ref(), Ok(&file));
    assert_eq!(client.lookup(&directory, b".").await.as_ref(), Ok(&directory));
    assert_eq!(client.lookup(&directory, b"..").await.as_ref(), Ok(&root));
    assert_eq!(client.lookup(&root, b"..").await.as_ref(), Ok(&root), "the root is its own parent");
    assert_eq!(client.lookup(&directory, b"none").await, Err(status::NOENT));
    assert_eq!(client.lookup(&file, b"x").await, Err(status::NOTDIR));
    assert_eq!(client.lookup(&directory, b"").await, Err(status::INVAL));
    assert_eq!(client.lookup(&directory, b"a/b").await, Err(status::INVAL));
    assert_eq!(client.lookup(&directory, b"a\0b").await, Err(status::INVAL));
    assert_eq!(client.lookup(&directory, &[b'x'; 256]).await, Err(status::NAMETOOLONG));
}

#[tokio::test]
async fn long_names_and_names_that_are_not_text_are_kept_byte_for_byte() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let longest = [0xff; 255];
    let all_bytes: Vec<u8> = (1..=255).filter(|&byte| byte != b'/').collect();
    for name in [&longest[..], &all_bytes, b"\xc3\x28", b"...", b" ", b"\n"] {
        let file = client.create(&root, name).await.unwrap();
        assert_eq!(client.lookup(&root, name).await.as_ref(), Ok(&file), "{name:?}");
        let other = [b"renamed".as_slice(), &name[..name.len().min(200)]].concat();
        client.rename((&root, name), (&root, &other)).await.unwrap();
        assert_eq!(client.lookup(&root, name).await, Err(status::NOENT));
        client.remove(&root, &other).await.unwrap();
    }
    assert_eq!(client.create(&root, &[b'x'; 256]).await, Err(status::NAMETOOLONG));
    assert_eq!(client.mkdir(&root, &[b'x'; 4096], 0o755).await, Err(status::NAMETOOLONG));
    assert_eq!(client.remove(&root, &[b'x'; 256]).await.unwrap_err(), status::NAMETOOLONG);
    client.create(&root, b"x").await.unwrap();
    let renamed = client.rename((&root, b"x"), (&root, &[b'y'; 256])).await;
    assert_eq!(renamed.unwrap_err(), status::NAMETOOLONG);
}

#[tokio::test]
async fn create_has_three_modes() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let file = client.create(&root, b"file").await.unwrap();
    client.write(&file, 0, b"content", FILE_SYNC).await.unwrap();
    assert_eq!(client.create(&root, b"file").await, Err(status::EXIST), "GUARDED");

    let unchecked = |set: &SetAttr| Args::new().place(&root, b"file").u32(0).set(set);
    let same = client.make(proc::CREATE, &unchecked(&SetAttr::mode(0o777))).await;
    assert_eq!(same.as_ref(), Ok(&file), "UNCHECKED takes what is there");
    assert_eq!(client.getattr(&file).await.unwrap().size, 7);
    let truncated = client.make(proc::CREATE, &unchecked(&SetAttr::size(0))).await;
    assert_eq!(truncated.as_ref(), Ok(&file));
    assert_eq!(client.getattr(&file).await.unwrap().size, 0);

    let exclusive = |verifier| Args::new().place(&root, b"exclusive").u32(2).u64(verifier);
    let first = client.make(proc::CREATE, &exclusive(77)).await.unwrap();
    assert_eq!(client.make(proc::CREATE, &exclusive(77)).await.as_ref(), Ok(&first), "resent");
    assert_eq!(client.make(proc::CREATE, &exclusive(78)).await, Err(status::EXIST));

    for name in [&b"."[..], b".."] {
        assert_eq!(client.create(&root, name).await, Err(status::EXIST));
        assert_eq!(client.mkdir(&root, name, 0o755).await, Err(status::EXIST));
    }
    assert_eq!(client.create(&root, b"").await, Err(status::INVAL));
    assert_eq!(client.create(&file, b"x").await, Err(status::NOTDIR));
    assert_eq!(client.mkdir(&root, b"file", 0o755).await, Err(status::EXIST));
}

/// Who makes a file that is there already is not told an older, smaller one than was acknowledged.
#[tokio::test]
async fn create_of_what_is_there_tells_what_was_written_and_not_committed() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let calls = [
        Args::new().place(&root, b"unchecked").u32(0).set(&SetAttr::default()),
        Args::new().place(&root, b"exclusive").u32(2).u64(77),
    ];
    for create in calls {
        let file = client.make(proc::CREATE, &create).await.unwrap();
        client.write(&file, 0, b"content", UNSTABLE).await.unwrap();
        let (got, mut body) = client.nfs(proc::CREATE, &create).await;
        assert_eq!(got, status::OK);
        assert_eq!(body.post_op_handle().as_ref(), Some(&file));
        let told = body.post_op().unwrap();
        assert_eq!(told.size, 7);
        assert_eq!(Some(told), client.getattr(&file).await.ok());
    }
}

#[tokio::test]
async fn symlinks_keep_their_target() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let long = [b't'; 4095];
    for (name, target) in [(&b"short"[..], &b"../\xff target"[..]), (b"long", &long)] {
        let args = Args::new().place(&root, name).set(&SetAttr::default()).opaque(target);
        let link = client.make(proc::SYMLINK, &args).await.unwrap();
        let attributes = client.getattr(&link).await.unwrap();
        assert_eq!((attributes.kind, attributes.mode), (5, 0o777));
        let (got, mut body) = client.nfs(proc::READLINK, &Args::new().opaque(&link)).await;
        assert_eq!(got, status::OK);
        assert_eq!(body.post_op(), Some(attributes));
        assert_eq!(body.opaque(), target);
        body.end();
        assert_eq!(client.read(&link, 0, 10).await, Err(status::INVAL));
        assert_eq!(client.make(proc::SYMLINK, &args).await, Err(status::EXIST));
    }
    let symlink =
        |target: &[u8]| Args::new().place(&root, b"bad").set(&SetAttr::default()).opaque(target);
    let too_long = client.make(proc::SYMLINK, &symlink(&[b't'; 4096])).await;
    assert_eq!(too_long, Err(status::NAMETOOLONG));
    assert_eq!(client.make(proc::SYMLINK, &symlink(b"")).await, Err(status::INVAL));
    let (got, _) = client.nfs(proc::READLINK, &Args::new().opaque(&root)).await;
    assert_eq!(got, status::INVAL, "no symbolic link");
}

#[tokio::test]
async fn remove_and_rmdir_take_their_own_kind() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let directory = client.mkdir(&root, b"directory", 0o755).await.unwrap();
    assert_eq!(client.getattr(&root).await.unwrap().nlink, 3);
    client.create(&directory, b"file").await.unwrap();
    let remove = proc::REMOVE;
    let rmdir = proc::RMDIR;
    let mut status_of = async |procedure, place: &[u8], name: &[u8]| {
        client.unlink(procedure, place, name).await.map(|wcc| wcc.before.is_some())
    };
    assert_eq!(status_of(remove, &root, b"directory").await, Err(status::ISDIR));
    assert_eq!(status_of(rmdir, &root, b"directory").await, Err(status::NOTEMPTY));
    assert_eq!(status_of(rmdir, &directory, b"file").await, Err(status::NOTDIR));
    assert_eq!(status_of(remove, &directory, b"none").await, Err(status::NOENT));
    assert_eq!(status_of(rmdir, &directory, b"none").await, Err(status::NOENT));
    assert_eq!(status_of(rmdir, &directory, b".").await, Err(status::INVAL));
    assert_eq!(status_of(rmdir, &directory, b"..").await, Err(status::EXIST));
    assert_eq!(status_of(remove, &directory, b"..").await, Err(status::ISDIR));
    assert_eq!(status_of(remove, &directory, b"file").await, Ok(true));
    assert_eq!(status_of(rmdir, &root, b"directory").await, Ok(true));
    assert_eq!(client.getattr(&root).await.unwrap().nlink, 2);
}

#[tokio::test]
async fn rename_moves_replaces_and_refuses() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let one = client.mkdir(&root, b"one", 0o755).await.unwrap();
    let two = client.mkdir(&root, b"two", 0o755).await.unwrap();
    let file = client.create(&one, b"file").await.unwrap();
    let (from, to) = client.rename((&one, b"file"), (&two, b"moved")).await.unwrap();
    assert!(from.before.is_some() && to.before.is_some());
    assert_eq!(client.lookup(&two, b"moved").await.as_ref(), Ok(&file));
    assert_eq!(client.lookup(&one, b"file").await, Err(status::NOENT));
    let victim = client.create(&two, b"victim").await.unwrap();
    client.rename((&two, b"moved"), (&two, b"victim")).await.unwrap();
    assert_eq!(client.lookup(&two, b"victim").await, Ok(file));
    assert_eq!(client.getattr(&victim).await, Err(status::STALE), "it was replaced");
    let mut status_of =
        async |from: (&[u8], &[u8]), to: (&[u8], &[u8])| client.rename(from, to).await.map(drop);
    assert_eq!(status_of((&two, b"none"), (&one, b"x")).await, Err(status::NOENT));
    assert_eq!(status_of((&root, b"one"), (&one, b"inside")).await, Err(status::INVAL));
    assert_eq!(status_of((&root, b"one"), (&two, b"victim")).await, Err(status::NOTDIR));
    assert_eq!(status_of((&two, b"victim"), (&root, b"one")).await, Err(status::ISDIR));
    assert_eq!(status_of((&root, b"one"), (&root, b"two")).await, Err(status::NOTEMPTY));
    assert_eq!(status_of((&root, b"."), (&root, b"x")).await, Err(status::INVAL));
    assert_eq!(status_of((&root, b"one"), (&root, b"..")).await, Err(status::INVAL));
    assert_eq!(status_of((&two, b"victim"), (&two, b"victim")).await, Ok(()));
    assert_eq!(status_of((&root, b"two"), (&one, b"below")).await, Ok(()));
    assert_eq!(client.lookup(&two, b"..").await, Ok(one), "a moved directory has a new parent");
}

#[tokio::test]
async fn link_gives_a_file_a_second_name() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let file = client.create(&root, b"file").await.unwrap();
    let directory = client.mkdir(&root, b"directory", 0o755).await.unwrap();
    let args = |object: &[u8], name: &[u8]| Args::new().opaque(object).place(&directory, name);
    let (got, mut body) = client.nfs(proc::LINK, &args(&file, b"second")).await;
    assert_eq!(got, status::OK);
    assert_eq!(body.post_op().unwrap().nlink, 2);
    assert!(body.wcc().before.is_some());
    body.end();
    assert_eq!(client.lookup(&directory, b"second").await.as_ref(), Ok(&file));
    for (object, name, expected) in [
        (&file, &b"second"[..], status::EXIST),
        (&directory, b"loop", status::PERM),
        (&file, b".", status::EXIST),
    ] {
        let (got, mut body) = client.nfs(proc::LINK, &args(object, name)).await;
        assert_eq!(got, expected);
        body.post_op();
        body.wcc();
        body.end();
    }
    client.remove(&root, b"file").await.unwrap();
    assert_eq!(client.getattr(&file).await.unwrap().nlink, 1);
}

#[tokio::test]
async fn the_file_system_describes_itself() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let args = Args::new().opaque(&root);
    let (got, mut body) = client.nfs(proc::FSINFO, &args).await;
    assert_eq!(got, status::OK);
    assert!(body.post_op().is_some());
    let mib = 1 << 20;
    let sizes: Vec<u32> = (0..7).map(|_| body.u32()).collect();
    assert_eq!(sizes, [mib, mib, 4096, mib, mib, 4096, 64 << 10]);
    assert_eq!(body.u64(), 1 << 62, "maxfilesize");
    assert_eq!((body.u32(), body.u32()), (0, 1), "time_delta");
    assert_eq!(body.u32(), 0x1b, "LINK, SYMLINK, HOMOGENEOUS, CANSETTIME");
    body.end();

    let (got, mut body) = client.nfs(proc::PATHCONF, &args).await;
    assert_eq!(got, status::OK);
    assert!(body.post_op().is_some());
    assert_eq!((body.u32(), body.u32()), (65_000, 255));
    let flags = [body.bool(), body.bool(), body.bool(), body.bool()];
    assert_eq!(flags, [true, true, false, true]);
    body.end();

    let (got, mut body) = client.nfs(proc::FSSTAT, &args).await;
    assert_eq!(got, status::OK);
    assert!(body.post_op().is_some());
    let [total, free, available] = [body.u64(), body.u64(), body.u64()];
    assert!(total > 0 && free <= total && available <= free, "{total} {free} {available}");
    let [files, files_free, files_available] = [body.u64(), body.u64(), body.u64()];
    assert!(files > files_free && files_free == files_available && files_free > 1_000_000);
    assert_eq!(body.u32(), 0);
    body.end();
}
