//! Block maps by window of 1 MiB: which block of a file has which hash.
//!
//! A map tells what a file was when it was fetched. Who uses it for a file that is written to
//! must know better for what was written since (`WrittenBlocks` in [`crate::file`]), and must
//! verify what comes for a hash; for a snapshot it is true for ever.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use quick_cache::Weighter;
use quick_cache::sync::Cache;
use slackwater_client::types::SnapshotId;
use slackwater_client::{
    BlockHash, BlockMap, ByteRange, Client, ClientError, DataSource, ProblemCode, RetryPolicy,
};
use tokio::time::{Instant, sleep};

use crate::cache::BLOCK_BYTES;
use crate::distance::{Distance, FAR_BYTES};
use crate::statistics::Statistics;
use crate::wire::NodeId;

/// Bytes of a window, and blocks in it: a map of it is 8 KiB at most, under 1 % of the bytes
/// that it describes, and one call; where the appliance is far, a call is for more of them.
pub(crate) const WINDOW_BYTES: u64 = 1 << 20;
pub(crate) const WINDOW_BLOCKS: u64 = 256;

/// Bytes of a window's map at most.
const MAP_BYTES_MAX: u64 = 8 << 10;

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
    distance: Arc<Distance>,
    /// Whether it was told that maps cannot be had.
    is_refusal_told: AtomicBool,
    /// Until when none is asked for.
    paused_until: Mutex<Option<Instant>>,
}

impl Maps {
    pub(crate) fn new(
        client: &Client,
        statistics: Arc<Statistics>,
        distance: Arc<Distance>,
    ) -> Self {
        Self {
            client: client.with_retry(RetryPolicy::never()),
            windows: Cache::with_weighter(WINDOWS_EXPECTED, WINDOWS_BYTES_MAX, WindowWeighter),
            statistics,
            distance,
            is_refusal_told: AtomicBool::new(false),
            paused_until: Mutex::default(),
        }
    }

    /// The map of a window; waits while the appliance is away. An appliance that gives none
    /// makes it an empty one, which nobody remembers.
    pub(crate) async fn window(&self, node: NodeId, source: &MapSource, index: u64) -> Arc<Window> {
        let fetch = self.fetch(node, source, index);
        let window = self.windows.get_or_insert_async(&(node, index), fetch).await;
        window.unwrap_or_default()
    }

    /// Keeps the maps that came together; the one of `index`.
    fn take(&self, node: NodeId, index: u64, together: Range<u64>, map: &BlockMap) -> Arc<Window> {
        let mut asked_for = Arc::default();
        let windows = map.blocks.chunks(usize::try_from(WINDOW_BLOCKS).unwrap_or(usize::MAX));
        for (number, blocks) in together.zip(windows) {
            self.statistics.map_bytes.add_length(blocks.iter().flatten().count() * 32);
            let start = number.saturating_mul(WINDOW_BYTES);
            let bytes = map.size_bytes.saturating_sub(start).min(WINDOW_BYTES);
            let is_whole = u64::try_from(blocks.len() * BLOCK_BYTES).is_ok_and(|has| has >= bytes);
            let window = Arc::new(Window { blocks: blocks.to_vec() });
            if number == index {
                asked_for = window;
            } else if is_whole {
                self.windows.insert((node, number), window);
            }
        }
        asked_for
    }

    /// Makes the next one who wants the window fetch it anew.
    pub(crate) fn forget(&self, node: NodeId, index: u64) {
        self.windows.remove(&(node, index));
    }

    /// The map of a window if it is known. For what is asked beside it, it does not count as used.
    pub(crate) fn known(&self, node: NodeId, index: u64) -> Option<Arc<Window>> {
        self.windows.peek(&(node, index))
    }

    /// The windows whose maps come with that of this one: more where the appliance is far, of a snapshot. What is known of a
    /// file that is written to is better the later it was asked for. Two that are asked for at once may both bring all.
    fn together(&self, source: &MapSource, index: u64) -> Range<u64> {
        let count = match source {
            MapSource::Snapshot(_) if self.distance.is_far() => FAR_BYTES / MAP_BYTES_MAX,
            MapSource::Snapshot(_) | MapSource::File(_) => 1,
        };
        let first = index / count * count;
        first..first.saturating_add(count)
    }

    async fn fetch(&self, node: NodeId, source: &MapSource, index: u64) -> Result<Arc<Window>, ()> {
        let mut together = self.together(source, index);
        let data_source = match source {
            MapSource::File(path) => DataSource::File(path),
            MapSource::Snapshot(id) => DataSource::Snapshot(*id),
        };
        if self.paused_until.lock().is_some_and(|until| Instant::now() < until) {
            return Err(());
        }
        let mut wait = RETRY_WAIT_MIN;
        loop {
            let range = ByteRange::new(
                together.start.saturating_mul(WINDOW_BYTES),
                (together.end - together.start).saturating_mul(WINDOW_BYTES),
            );
            let asked = self.client.block_map(data_source, range.ok_or(())?).await;
            let error = match asked {
                Ok(map) if usize::try_from(map.block_bytes) == Ok(BLOCK_BYTES) => {
                    self.is_refusal_told.store(false, Ordering::Relaxed);
                    return Ok(self.take(node, index, together, &map));
                }
                Ok(map) => format!("blocks of {} bytes, expected {BLOCK_BYTES}", map.block_bytes),
                Err(error) if is_passing(&error) => {
                    sleep(wait).await;
                    wait = (wait * 2).min(RETRY_WAIT_MAX);
                    continue;
                }
                Err(error) if error.code() == Some(ProblemCode::Unauthenticated) => {
                    *self.paused_until.lock() = Some(Instant::now() + REFUSED_PAUSE);
                    error.to_string()
                }
                // What is wrong with one of them is not wrong with the others.
                Err(_) if together.end - together.start > 1 => {
                    together = index..index.saturating_add(1);
                    continue;
                }
                Err(error) => error.to_string(),
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
    use crate::distance::tests::far;

    /// An appliance that knows no token; counts what it is asked.
    async fn refusing() -> (String, Arc<AtomicUsize>) {
        let body = r#"{"type":"t","title":"t","status":401,"detail":"d","code":"unauthenticated"}"#;
        let kind = "application/problem+json";
        answering(move |_: &str| ("401 Unauthorized", kind, body.as_bytes().to_vec())).await
    }

    /// An appliance that gives such answers: status, media type, body.
    async fn answering(
        answer: impl Fn(&str) -> (&'static str, &'static str, Vec<u8>) + Send + 'static,
    ) -> (String, Arc<AtomicUsize>) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut request = Vec::new();
                while !request.ends_with(b"\r\n\r\n") {
                    request.push(stream.read_u8().await.unwrap());
                }
                count.fetch_add(1, Ordering::Relaxed);
                let (status, kind, body) = answer(str::from_utf8(&request).unwrap());
                let head = format!(
                    "HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {}\r\n\
                     connection: close\r\n\r\n",
                    body.len()
                );
                stream.write_all(&[head.as_bytes(), &body].concat()).await.unwrap();
            }
        });
        (url, asked)
    }

    const MIB: u64 = 1 << 20;
    const SNAPSHOT: &str = "0b9a5c52-8f5e-4a64-9d2b-3a1d8f0c7e11";

    /// An appliance with a file of 20 MiB and half a block, in which each block has a hash of its own; counts what it is asked.
    async fn mapping() -> (String, Arc<AtomicUsize>) {
        let size_bytes = 20 * MIB + 2048;
        let answer = move |request: &str| {
            let number = |name: &str| -> u64 {
                let (_, rest) = request.split_once(&format!("{name}=")).unwrap();
                rest.split(|next: char| !next.is_ascii_digit()).next().unwrap().parse().unwrap()
            };
            let (offset_bytes, length_bytes) = (number("offset"), number("length"));
            let end = (offset_bytes + length_bytes).min(size_bytes);
            let blocks = offset_bytes / 4096..end.div_ceil(4096);
            let blocks = blocks.map(hash_of).collect();
            let map = BlockMap { block_bytes: 4096, offset_bytes, size_bytes, blocks };
            ("200 OK", "application/octet-stream", map.encode())
        };
        answering(answer).await
    }

    fn hash_of(block: u64) -> BlockHash {
        let mut hash = [0; 32];
        hash[..8].copy_from_slice(&block.to_le_bytes());
        Some(hash)
    }

    #[tokio::test]
    async fn maps_that_lie_together_come_at_once_where_the_appliance_is_far_and_nothing_changes() {
        let (url, asked) = mapping().await;
        let client = Client::builder(url).build().unwrap();
        let (far, near) = (Arc::new(far()), Arc::default());
        let file = MapSource::File("disks/one".to_owned());
        let snapshot = MapSource::Snapshot(SNAPSHOT.parse().unwrap());
        for (distance, source, calls) in
            [(&far, &snapshot, 3), (&far, &file, 21), (&near, &snapshot, 21)]
        {
            let maps = Maps::new(&client, Arc::default(), Arc::clone(distance));
            asked.store(0, Ordering::Relaxed);
            // The last one first, of a part of a block.
            for index in (0..=20).rev().chain(0..=20) {
                let window = maps.window(NodeId(7), source, index).await;
                let blocks = if index == 20 { 1 } else { WINDOW_BLOCKS };
                let first = index * WINDOW_BLOCKS;
                let expected: Vec<_> = (first..first + blocks).map(hash_of).collect();
                assert_eq!(window.blocks, expected, "window {index}");
                assert_eq!(maps.known(NodeId(7), index), Some(window));
            }
            assert_eq!(asked.load(Ordering::Relaxed), calls, "{source:?}");
        }
    }

    #[tokio::test]
    async fn a_worker_that_is_refused_asks_no_more_for_a_while() {
        let (url, asked) = refusing().await;
        let client = Client::builder(url).build().unwrap();
        let maps = Maps::new(&client, Arc::default(), Arc::default());
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
