//! A network that fails in the middle: passes connections on until a number of bytes went to
//! the appliance, then nothing any more.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::Notify;

/// Which direction the budget counts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Counted {
    ToAppliance,
    FromAppliance,
}

pub struct Proxy {
    pub url: String,
    dry: Arc<Notify>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Proxy {
    pub fn start(handle: &Handle, target: &str, counted: Counted, budget_bytes: i64) -> Self {
        let target: SocketAddr = target.strip_prefix("http://").unwrap().parse().unwrap();
        let listener = handle.block_on(TcpListener::bind(("127.0.0.1", 0))).unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let dry = Arc::new(Notify::new());
        let left = Arc::new(AtomicI64::new(budget_bytes));
        let exhausted = Arc::clone(&dry);
        let task = handle.spawn(async move {
            // Ends with the proxy, and with it every connection.
            let mut passing = tokio::task::JoinSet::new();
            loop {
                let (client, _) = listener.accept().await.unwrap();
                let server = TcpStream::connect(target).await.unwrap();
                let (client_in, client_out) = client.into_split();
                let (server_in, server_out) = server.into_split();
                for (from, to, counts) in [
                    (client_in, server_out, counted == Counted::ToAppliance),
                    (server_in, client_out, counted == Counted::FromAppliance),
                ] {
                    let (left, dry) = (Arc::clone(&left), Arc::clone(&exhausted));
                    passing.spawn(pass(from, to, counts.then_some(left), dry));
                }
            }
        });
        Self { url, dry, task }
    }

    /// Waits until the budget is used up.
    pub fn wait_until_dry(&self, handle: &Handle) {
        let wait = async {
            let limit = std::time::Duration::from_secs(60);
            tokio::time::timeout(limit, self.dry.notified()).await
        };
        handle.block_on(wait).expect("the budget lasts longer than the transfer");
    }
}

async fn pass(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    left: Option<Arc<AtomicI64>>,
    dry: Arc<Notify>,
) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(length @ 1..) = from.read(&mut buffer).await {
        if let Some(left) = &left
            && left.fetch_sub(i64::try_from(length).unwrap(), Ordering::Relaxed) <= 0
        {
            // The connection stays open: silence, as from a machine that lost its network.
            dry.notify_one();
            return std::future::pending().await;
        }
        if to.write_all(&buffer[..length]).await.is_err() {
            return;
        }
    }
}
