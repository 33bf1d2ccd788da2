//! A port of loopback for the tests of several crates, which include this file as a module.
#![allow(dead_code, unreachable_pub, reason = "each test uses a part")]

use std::net::SocketAddr;

use tokio::net::TcpSocket;

/// A port that is kept for as long as this lives. The socket is bound and never listens: no other
/// program gets the port, and connections to it are refused. A server that sets `SO_REUSEADDR`, as
/// tokio's and the standard library's listeners do, may listen there.
pub struct HeldPort(TcpSocket);

impl HeldPort {
    pub fn new() -> Self {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        // After the bind, which fails if the port is in use.
        socket.set_reuseaddr(true).unwrap();
        Self(socket)
    }

    pub fn address(&self) -> SocketAddr {
        self.0.local_addr().unwrap()
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address())
    }
}
