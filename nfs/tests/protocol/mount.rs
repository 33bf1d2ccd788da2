//! MOUNT and PORTMAP.

use crate::common::client::{MOUNT, NFS, PORTMAP};
use crate::common::{Args, Server, status};

#[tokio::test]
async fn the_export_and_what_is_below_it_can_be_mounted() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let directory = client.mkdir(&root, b"images", 0o755).await.unwrap();
    let inner = client.mkdir(&directory, b"debian", 0o755).await.unwrap();
    client.create(&directory, b"disk").await.unwrap();
    assert_eq!(client.mount(b"/slackwater/").await.as_ref(), Ok(&root));
    assert_eq!(client.mount(b"//slackwater//images").await, Ok(directory));
    assert_eq!(client.mount(b"/slackwater/images/debian").await, Ok(inner));
    assert_eq!(client.mount(b"/slackwater/images/disk").await, Err(status::NOTDIR));
    assert_eq!(client.mount(b"/slackwater/images/disk/x").await, Err(status::NOTDIR));
    assert_eq!(client.mount(b"/slackwater/none").await, Err(status::NOENT));
    assert_eq!(client.mount(b"/slackwater/images/..").await, Err(status::INVAL));
    assert_eq!(client.mount(b"/slackwater/../etc").await, Err(status::INVAL));
    assert_eq!(client.mount(b"/").await, Err(status::NOENT));
    assert_eq!(client.mount(b"/slackwaterx").await, Err(status::NOENT));
    assert_eq!(client.mount(&[b'/'; 1025]).await, Err(status::NAMETOOLONG));
    let long = [b"/slackwater/".as_slice(), &[b'x'; 256]].concat();
    assert_eq!(client.mount(&long).await, Err(status::NAMETOOLONG));
}

#[tokio::test]
async fn dump_lists_mounts_until_they_are_taken_back() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    client.mkdir(&root, b"a", 0o755).await.unwrap();
    client.mount(b"/slackwater/a").await.unwrap();
    let mut list = async || {
        let mut body = client.run(MOUNT, 2, &Args::new()).await;
        let mut list = Vec::new();
        while body.bool() {
            list.push((body.opaque(), body.opaque()));
        }
        body.end();
        list
    };
    let entry = |path: &[u8]| (b"127.0.0.1".to_vec(), path.to_vec());
    assert_eq!(list().await, [entry(b"/slackwater"), entry(b"/slackwater/a")]);
    client.run(MOUNT, 3, &Args::new().opaque(b"/slackwater")).await.end();
    let mut body = client.run(MOUNT, 2, &Args::new()).await;
    assert!(body.bool());
    assert_eq!((body.opaque(), body.opaque()), entry(b"/slackwater/a"));
    client.run(MOUNT, 4, &Args::new()).await.end();
    let mut body = client.run(MOUNT, 2, &Args::new()).await;
    assert!(!body.bool());
    body.end();
}

#[tokio::test]
async fn export_names_the_path_and_its_clients() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let mut body = client.run(MOUNT, 5, &Args::new()).await;
    assert!(body.bool());
    assert_eq!(body.opaque(), b"/slackwater");
    assert!(body.bool());
    assert_eq!(body.opaque(), b"127.0.0.0/8");
    assert!(body.bool());
    assert_eq!(body.opaque(), b"::1/128");
    assert!(!body.bool() && !body.bool());
    body.end();
}

#[tokio::test]
async fn every_program_is_on_this_port_and_on_tcp_only() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let port = u32::from(server.address.port());
    let mut ask = async |program: (u32, u32), protocol| {
        let args = Args::new().u32(program.0).u32(program.1).u32(protocol).u32(0);
        let mut body = client.run(PORTMAP, 3, &args).await;
        let port = body.u32();
        body.end();
        port
    };
    for program in [NFS, MOUNT, PORTMAP] {
        assert_eq!(ask(program, 6).await, port);
        assert_eq!(ask(program, 17).await, 0, "not on UDP");
    }
    assert_eq!(ask((100_021, 4), 6).await, 0, "no lock manager");
    assert_eq!(ask((100_003, 4), 6).await, 0);
    let mut body = client.run(PORTMAP, 4, &Args::new()).await;
    let mut list = Vec::new();
    while body.bool() {
        list.push([body.u32(), body.u32(), body.u32(), body.u32()]);
    }
    body.end();
    let expected = [[100_003, 3, 6, port], [100_005, 3, 6, port], [100_000, 2, 6, port]];
    assert_eq!(list, expected);
}
