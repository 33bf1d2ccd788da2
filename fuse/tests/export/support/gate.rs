//! A network between the mount and the appliance that can be stopped, or is long: bytes wait until it is
//! opened again, or for their way.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::watch;

use super::appliance::runtime;

/// How long bytes are on their way, at least: so long that a busy machine makes no difference to what comes at once.
const ONE_WAY: Duration = Duration::from_millis(3);

pub struct Gate {
    pub address: SocketAddr,
    is_open: watch::Sender<bool>,
    _runtime: Runtime,
}

impl Gate {
    pub fn before(target: SocketAddr) -> Self {
        Self::new(target, Duration::ZERO)
    }

    /// One behind which the appliance is far: no call takes less than twice [`ONE_WAY`].
    pub fn far(target: SocketAddr) -> Self {
        Self::new(target, ONE_WAY)
    }

    fn new(target: SocketAddr, one_way: Duration) -> Self {
        let runtime = runtime();
        let listener = runtime.block_on(TcpListener::bind(("127.0.0.1", 0))).unwrap();
        let address = listener.local_addr().unwrap();
        let (is_open, opened) = watch::channel(true);
        runtime.spawn(async move {
            loop {
                let (client, _) = listener.accept().await.unwrap();
                let Ok(server) = TcpStream::connect(target).await else { continue };
                let (client_in, client_out) = client.into_split();
                let (server_in, server_out) = server.into_split();
                for (from, to) in [(client_in, server_out), (server_in, client_out)] {
                    tokio::spawn(pass(from, to, opened.clone(), one_way));
                }
            }
        });
        Self { address, is_open, _runtime: runtime }
    }

    pub fn close(&self) {
        self.is_open.send_replace(false);
    }

    pub fn open(&self) {
        self.is_open.send_replace(true);
    }
}

async fn pass(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut opened: watch::Receiver<bool>,
    one_way: Duration,
) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(length @ 1..) = from.read(&mut buffer).await {
        if !one_way.is_zero() {
            tokio::time::sleep(one_way).await;
        }
        if opened.wait_for(|is_open| *is_open).await.is_err()
            || to.write_all(&buffer[..length]).await.is_err()
        {
            return;
        }
    }
}
