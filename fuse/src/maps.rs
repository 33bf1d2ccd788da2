//! Block maps by window of 1 MiB: which block of a file has which hash.
//!
//! A map tells what a file was when it was fetched. Who uses it for a file that is written to
//! must know better for what was written since (`WrittenBlocks` in [`crate::file`]), and must
//! verify what comes for a hash; for a snapshot it is true for ever.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use quick_cache::Weighter;
use quick_cache::sync::Cache;
use slackwater_client::types::SnapshotId;
use slackwater_client::{
    BlockHash, ByteRange, Client, ClientError, DataSource, ProblemCode, RetryPolicy,
};
use tokio::time::{Instant, sleep};

use crate::cache::BLOCK_BYTES;
use crate::statistics::Statistics;
use crate::wire::NodeId;

/// Bytes of a window, and blocks in it: a map of it is 8 KiB at most, under 1 % of the bytes
/// that it describes, and one call.
pub(crate) const WINDOW_BYTES: u64 = 1 << 20;
pub(crate) const WINDOW_BLOCKS: u64 = 256;

/// Memory of all windows: maps of at least 7 GiB of data, of much more that is sparse.
const WINDOWS_BYTES_MAX: u64 = 64 << 20;
/// What they are expected to be in number.
const WINDOWS_EXPECTED: usize = 8192;
/// What a window takes beside its hashes.
const WINDOW_OVERHEAD_BYTES: usize = 128;

/// How long no map is asked for after the appliance refused the token: a worker that was revoked would else use up the
/// tries that its address has, also those of a machine beside it that is behind the same address.
const REFUSED_PAUSE: Duration = Duration::from_secs(10);

/// Wait between tries while the REST face is away.
const RETRY_WAIT_MIN: Duration = Duration::from_millis(100);
const RETRY_WAIT_MAX: Duration = Duration::from_secs(2);

/// What a block map is asked for by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum MapSource {
    File(String),
    Snapshot(SnapshotId),
}

/// The map of one window: for each block its hash, or that it is a hole. Blocks behind its end
/// are not known.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Window {
    pub(crate) blocks: Vec<BlockHash>,
}

#[derive(Clone, Debug)]
struct WindowWeighter;

impl Weighter<(NodeId, u64), Arc<Window>> for WindowWeighter {
    fn weight(&self, _: &(NodeId, u64), window: &Arc<Window>) -> u64 {
        let bytes = WINDOW_OVERHEAD_BYTES + window.blocks.capacity() * size_of::<BlockHash>();
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }
}

/// The maps that are known.
#[derive(Debug)]
pub(crate) struct Maps {
    client: Client,
    windows: Cache<(NodeId, u64), Arc<Window>, WindowWeighter>,
    statistics: Arc<Statistics>,
    /// Whether it was told that maps cannot be had.
    is_refusal_told: AtomicBool,
    /// Until when none is asked for.
    paused_until: Mutex<Option<Instant>>,
}

impl Maps {
    pub(crate) fn new(client: &Client, statistics: Arc<Statistics>) -> Self {
        Self {
            client: client.with_retry(RetryPolicy::never()),
            windows: Cache::with_weighter(WINDOWS_EXPECTED, WINDOWS_BYTES_MAX, WindowWeighter),
            statistics,
            is_refusal_told: AtomicBool::new(false),
            paused_until: Mutex::default(),
        }
    }

    /// The map of a window; waits while the appliance is away. An appliance that gives none
    /// makes it an empty one, which nobody remembers.
    pub(crate) async fn window(&self, node: NodeId, source: &MapSource, index: u64) -> Arc<Window> {
        let fetch = self.fetch(source, index);
        let window = self.windows.get_or_insert_async(&(node, index), fetch).await;
        window.unwrap_or_default()
    }

    /// Makes the next one who wants the window fetch it anew.
    pub(crate) fn forget(&self, node: NodeId, index: u64) {
        self.windows.remove(&(node, index));
    }

    async fn fetch(&self, source: &MapSource, index: u64) -> Result<Arc<Window>, ()> {
        let offset_bytes = index.saturating_mul(WINDOW_BYTES);
        let range = ByteRange::new(offset_bytes, WINDOW_BYTES).ok_or(())?;
        let data_source = match source {
            MapSource::File(path) => DataSource::File(path),
            MapSource::Snapshot(id) => DataSource::Snapshot(*id),
        };
        if self.paused_until.lock().is_some_and(|until| Instant::now() < until) {
            return Err(());
        }
        let mut wait = RETRY_WAIT_MIN;
        loop {
            let error = match self.client.block_map(data_source, range).await {
                Ok(map) if usize::try_from(map.block_bytes) == Ok(BLOCK_BYTES) => {
                    let mut blocks = map.blocks;
                    blocks.truncate(usize::try_from(WINDOW_BLOCKS).unwrap_or(usize::MAX));
                    self.statistics.map_bytes.add_length(blocks.iter().flatten().count() * 32);
                    self.is_refusal_told.store(false, Ordering::Relaxed);
                    return Ok(Arc::new(Window { blocks }));
                }
                Ok(map) => format!("blocks of {} bytes, expected {BLOCK_BYTES}", map.block_bytes),
                Err(error) if is_passing(&error) => {
                    sleep(wait).await;
                    wait = (wait * 2).min(RETRY_WAIT_MAX);
                    continue;
                }
                Err(error) => {
                    if error.code() == Some(ProblemCode::Unauthenticated) {
                        *self.paused_until.lock() = Some(Instant::now() + REFUSED_PAUSE);
                    }
                    error.to_string()
                }
            };
            if !self.is_refusal_told.swap(true, Ordering::Relaxed) {
                tracing::warn!(
                    error,
                    ?source,
                    "no block map: the file is read over NFS alone, and nothing of it is cached"
                );
            }
            return Err(());
        }
    }
}

/// Whether the appliance is only away or busy.
fn is_passing(error: &ClientError) -> bool {
    match error {
        ClientError::Unreachable { .. }
        | ClientError::Lost { .. }
        | ClientError::Timeout { .. } => true,
        ClientError::Api { code: ProblemCode::Poisoned, .. } => false,
        ClientError::Api { status, .. } => matches!(status, 408 | 429 | 502..=504),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    /// An appliance that knows no token; counts what it is asked.
    async fn refusing() -> (String, Arc<AtomicUsize>) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        tokio::spawn(async move {
            let body =
                r#"{"type":"t","title":"t","status":401,"detail":"d","code":"unauthenticated"}"#;
            let answer = format!(
                "HTTP/1.1 401 Unauthorized\r\ncontent-type: application/problem+json\r\n\
                 content-length: {}\r\nconnection: close\r\n\r\n{body}",
                body.len()
            );
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut request = Vec::new();
                while !request.ends_with(b"\r\n\r\n") {
                    request.push(stream.read_u8().await.unwrap());
                }
                count.fetch_add(1, Ordering::Relaxed);
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
        });
        (url, asked)
    }

    #[tokio::test]
    async fn a_worker_that_is_refused_asks_no_more_for_a_while() {
        let (url, asked) = refusing().await;
        let client = Client::builder(url).build().unwrap();
        let maps = Maps::new(&client, Arc::default());
        let source = MapSource::File("workers/a/disks/b".to_owned());
        let window = async |index| maps.window(NodeId(7), &source, index).await;
        assert!(window(0).await.blocks.is_empty());
        // Longer than it is, so that a slow machine counts the same.
        let until = maps.paused_until.lock().replace(Instant::now() + Duration::from_secs(3600));
        assert!(until.is_some());
        for index in 0..5 {
            assert!(window(index).await.blocks.is_empty());
        }
        assert_eq!(asked.load(Ordering::Relaxed), 1);
        *maps.paused_until.lock() = Some(Instant::now());
        window(0).await;
        assert_eq!(asked.load(Ordering::Relaxed), 2);
    }
}
