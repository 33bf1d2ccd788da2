//! A server at several addresses, and the port of PORTMAP.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use slackwater_blockstore::{Options, Store};
use slackwater_nfs::{Listeners, NfsMetrics, PortmapListeners};
use tokio::net::{TcpListener, UdpSocket};
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::common::client::{Client, Cred, MOUNT, NFS, PORTMAP, call, proc};
use crate::common::{Args, root_options};

const GETPORT: u32 = 3;
const DUMP: u32 = 4;
const TCP: u32 = 6;
const UDP: u32 = 17;

/// Longer than any machine needs.
const LIMIT: Duration = Duration::from_secs(60);

async fn listener(address: &str) -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind((address, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

fn getport(program: (u32, u32)) -> Args {
    Args::new().u32(program.0).u32(program.1).u32(TCP).u32(0)
}

async fn port_by_tcp(address: SocketAddr, program: (u32, u32)) -> u32 {
    let mut client = Client::connect(address).await;
    let mut body = client.run(PORTMAP, GETPORT, &getport(program)).await;
    let port = body.u32();
    body.end();
    port
}

#[tokio::test]
async fn all_ports_serve_and_portmap_tells_that_at_its_address() {
    let directory = tempfile::tempdir().unwrap();
    let mut options = Options::new(directory.path());
    options.memory_bytes = Options::MEMORY_BYTES_MIN;
    let store = Store::open(options).unwrap();
    let (first, at_first) = listener("127.0.0.1").await;
    let (second, at_second) = listener("127.0.0.2").await;
    // A port that is free by TCP may not be by UDP; these need not be one here.
    let (tcp, at_portmap) = listener("127.0.0.2").await;
    let udp = UdpSocket::bind("127.0.0.2:0").await.unwrap();
    let at_udp = udp.local_addr().unwrap();
    let portmap = Some(PortmapListeners { tcp, udp });
    let listeners = Listeners { nfs: vec![first, second], portmap };
    let (stop, stopped) = oneshot::channel::<()>();
    let server = tokio::spawn(slackwater_nfs::run(
        listeners,
        Arc::clone(&store),
        root_options(),
        Arc::new(NfsMetrics::new()),
        async { drop(stopped.await) },
    ));

    for program in [NFS, MOUNT, PORTMAP] {
        assert_eq!(port_by_tcp(at_first, program).await, u32::from(at_first.port()));
        assert_eq!(port_by_tcp(at_second, program).await, u32::from(at_second.port()));
        let told = if program == PORTMAP { at_portmap } else { at_second };
        assert_eq!(port_by_tcp(at_portmap, program).await, u32::from(told.port()));
    }
    // One store, and one kind of handles, behind all.
    let mut client = Client::connect(at_first).await;
    let root = client.root().await;
    let file = client.create(&root, b"file").await.unwrap();
    let mut client = Client::connect(at_second).await;
    assert_eq!(client.root().await, root);
    assert_eq!(client.lookup(&root, b"file").await.as_ref(), Ok(&file));
    // PORTMAP's port has nothing else.
    let mut client = Client::connect(at_portmap).await;
    for program in [NFS, MOUNT] {
        let mut reply = client.reply(program, proc::NULL, &Args::new()).await;
        assert_eq!([reply.u32(), reply.u32(), reply.u32(), reply.u32()], [0, 0, 0, 1]);
    }
    let mut mappings = client.run(PORTMAP, DUMP, &Args::new()).await;
    for (program, protocol, port) in [
        (NFS, TCP, at_second),
        (MOUNT, TCP, at_second),
        (PORTMAP, TCP, at_portmap),
        (PORTMAP, UDP, at_portmap),
    ] {
        let told = [(); 5].map(|()| mappings.u32());
        assert_eq!(told, [1, program.0, program.1, protocol, u32::from(port.port())]);
    }
    assert_eq!(mappings.u32(), 0);
    mappings.end();

    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    socket.connect(at_udp).await.unwrap();
    let ask = async |program, procedure, args: &Args| {
        let sent = call(9, program, procedure, &Cred::user(0, 0), args);
        socket.send(&sent).await.unwrap();
        let mut reply = vec![0; 1000];
        let length = timeout(LIMIT, socket.recv(&mut reply)).await.unwrap().unwrap();
        assert!(length <= sent.len(), "no reply is longer than its call");
        reply.truncate(length);
        let words = reply.chunks(4).map(|word| u32::from_be_bytes(word.try_into().unwrap()));
        let words: Vec<_> = words.collect();
        assert_eq!(words[..5], [9, 1, 0, 0, 0], "an accepted call");
        words[5..].to_vec()
    };
    assert_eq!(ask(PORTMAP, GETPORT, &getport(NFS)).await, [0, u32::from(at_second.port())]);
    assert_eq!(ask(PORTMAP, GETPORT, &getport((100_021, 4))).await, [0, 0]);
    let (program_unavailable, procedure_unavailable) = (1, 3);
    assert_eq!(ask(PORTMAP, DUMP, &Args::new()).await, [procedure_unavailable]);
    assert_eq!(ask(NFS, proc::NULL, &Args::new()).await, [program_unavailable]);

    drop(stop);
    timeout(LIMIT, server).await.unwrap().unwrap().unwrap();
    store.close().unwrap();
}
