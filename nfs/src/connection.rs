//! One connection: a reader task that takes calls and answers what it can from memory, and a
//! writer task that sends the replies, joined by a bounded queue.
//!
//! ```text
//! socket -> records -> charge -> plan -+- inline ------------+-> queue -> writer -> socket
//!                                      +- lane (own threads) -+
//! ```
//! Replies leave in the order in which calls end. Two tasks, because one that stopped reading
//! while it writes would wait for ever on a client that does the same. A call in flight holds
//! its charge until its reply is written: when the budget is used up the reader waits, and
//! the socket with it.

use std::fmt;
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::sockopt;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::net::tcp::OwnedReadHalf;
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinSet, coop};
use tokio::time::timeout;

use crate::budget::{Charge, ConnectionBudget, Purpose};
use crate::dispatch::{self, Finished, Peer, Plan, Request, Resent};
use crate::limits;
use crate::procedure::{Lane, NfsProcedure, Procedure};
use crate::record::{Record, RecordError, RecordReader};
use crate::rpc::{self, NotACall, Unrunnable};
use crate::server::Shared;
use crate::writer::{self, Reply, WriteError};

/// Why a connection ends.
#[derive(Debug, thiserror::Error)]
enum Ended {
    /// The client closed it.
    #[error("the client closed the connection")]
    ByClient,
    /// The server stops.
    #[error("the server stops")]
    Stopping,
    /// The first call did not come.
    #[error("no call came in {} s", limit.as_secs())]
    Silent {
        /// The time it had.
        limit: Duration,
    },
    /// The stream cannot be cut into records.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// A record is no call.
    #[error(transparent)]
    NotACall(#[from] NotACall),
    /// Replies cannot be sent.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The queue of replies is full, which the budget makes impossible.
    #[error("the queue of {} replies is full", limits::REPLIES_MAX)]
    QueueFull,
}

impl Ended {
    /// Whether this is the usual end of a connection.
    fn is_ordinary(&self) -> bool {
        match self {
            Self::ByClient | Self::Stopping => true,
            // A client that goes away without closing does so by a reset.
            Self::Record(RecordError::Io(error)) => error.kind() == ErrorKind::ConnectionReset,
            _ => false,
        }
    }
}

/// Serves a connection until it ends.
pub(crate) async fn serve(
    shared: Arc<Shared>,
    stream: TcpStream,
    peer: Peer,
    mut stop: watch::Receiver<bool>,
) {
    if let Err(error) = prepare(&stream) {
        tracing::warn!(client = %peer.address, %error, "socket options");
    }
    let (read_half, write_half) = stream.into_split();
    let (replies, queue) = mpsc::channel(limits::REPLIES_MAX);
    // In a set of its own, so that it ends with this task however that ends.
    let mut writer = JoinSet::new();
    writer.spawn(writer::run(write_half, queue, shared.patience.reply));
    let mut reader = Reader::new(Arc::clone(&shared), read_half, peer, replies.clone());
    let ended = tokio::select! {
        ended = reader.run() => ended,
        _ = stop.wait_for(|stop| *stop) => Ended::Stopping,
        ended = writer_end(&mut writer) => ended,
    };
    // Calls in flight hold the queue open; the writer ends after the last of their replies.
    let source = reader.records.into_source();
    drop((reader.replies, replies));
    let ended = match writer.join_next().await {
        Some(Ok(Err(error))) if ended.is_ordinary() => Ended::Write(error),
        _ => ended,
    };
    if matches!(ended, Ended::Stopping) {
        linger(source).await;
    }
    report(&shared, peer, &ended);
}

/// Reads and forgets until the client closes its end, for a bounded time.
async fn linger(mut source: OwnedReadHalf) {
    let forget = async {
        let mut bytes = [0; 4096];
        while source.read(&mut bytes).await.is_ok_and(|count| count > 0) {}
    };
    // Either way the connection ends here.
    let _ = timeout(limits::LINGER, forget).await;
}

/// Why the writer ended before the reader: only a failure makes it.
async fn writer_end(writer: &mut JoinSet<Result<(), WriteError>>) -> Ended {
    match writer.join_next().await {
        Some(Ok(Err(error))) => Ended::Write(error),
        _ => Ended::ByClient,
    }
}

fn report(shared: &Shared, peer: Peer, ended: &Ended) {
    let client = peer.address;
    if ended.is_ordinary() {
        tracing::debug!(%client, reason = %ended, "connection ended");
    } else {
        shared.metrics.connections_dropped.add(1);
        tracing::warn!(%client, reason = %ended, "connection dropped");
    }
}

/// Sets the socket's options: no delay for replies, and questions to an end that went away
/// without a word.
fn prepare(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, limits::KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, limits::KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(stream, limits::KEEPALIVE_PROBES)?;
    Ok(())
}

/// Takes calls from a socket.
struct Reader {
    shared: Arc<Shared>,
    records: RecordReader<OwnedReadHalf>,
    budget: ConnectionBudget,
    peer: Peer,
    replies: mpsc::Sender<Reply>,
}

impl fmt::Debug for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reader").field("peer", &self.peer).finish_non_exhaustive()
    }
}

impl Reader {
    fn new(
        shared: Arc<Shared>,
        source: OwnedReadHalf,
        peer: Peer,
        replies: mpsc::Sender<Reply>,
    ) -> Self {
        let bytes_max = match peer.access {
            Some(_) => limits::FRAME_BYTES_MAX,
            None => limits::FRAME_BYTES_REFUSED_CLIENT,
        };
        let records = RecordReader::new(source, bytes_max, shared.patience.record);
        let budget = shared.budget.connection();
        Self { shared, records, budget, peer, replies }
    }

    async fn run(&mut self) -> Ended {
        match self.take_calls().await {
            Ok(()) => Ended::ByClient,
            Err(ended) => ended,
        }
    }

    async fn take_calls(&mut self) -> Result<(), Ended> {
        let limit = self.shared.patience.first_call;
        let first = timeout(limit, self.records.next(&self.budget));
        let mut next = first.await.map_err(|_| Ended::Silent { limit })??;
        while let Some(record) = next {
            self.take(record).await?;
            // Many calls may be in the buffer: others on this thread get their turn.
            coop::consume_budget().await;
            next = self.records.next(&self.budget).await?;
        }
        Ok(())
    }

    async fn take(&mut self, record: Record) -> Result<(), Ended> {
        let Record { bytes, charge } = record;
        match dispatch::plan(&bytes, self.peer, Instant::now()) {
            Plan::Close(why) => Err(why.into()),
            Plan::Answer(reply) => {
                self.shared.metrics.calls_refused.add(1);
                let charge = match charge {
                    Some(charge) => charge,
                    None => self.budget.charge(Purpose::Read, 0).await,
                };
                self.send(reply.into(), charge)
            }
            Plan::Run(request) => {
                drop(bytes);
                self.start(request, charge).await
            }
        }
    }

    async fn start(
        &mut self,
        mut request: Box<Request>,
        charge: Option<Charge>,
    ) -> Result<(), Ended> {
        let is_write = request.procedure == Procedure::Nfs(NfsProcedure::Write);
        let charge = match charge {
            Some(charge) if is_write => charge,
            Some(charge) => {
                // No other call is that large.
                let reply = rpc::unrunnable(request.xid, Unrunnable::GarbageArguments);
                return self.send(reply.into(), charge);
            }
            None => self.budget.charge(purpose(&request), request.charged_bytes()).await,
        };
        match request.check_resent(&self.shared) {
            Resent::No => {}
            Resent::Drop => return Ok(()),
            Resent::Replay(head) => {
                return self.send(Finished { head, pieces: Vec::new() }, charge);
            }
        }
        match request.lane() {
            Lane::Inline | Lane::Cached => match request.execute_inline(&self.shared) {
                Ok(finished) => self.send(finished, charge),
                Err(request) => {
                    self.submit(request, charge);
                    Ok(())
                }
            },
            Lane::Data | Lane::Namespace | Lane::Read => {
                self.submit(request, charge);
                Ok(())
            }
        }
    }

    /// Has the request run by its lane's threads, and its reply sent from there.
    fn submit(&self, request: Box<Request>, charge: Charge) {
        let (shared, replies) = (Arc::clone(&self.shared), self.replies.clone());
        let lane = request.lane();
        let job = move || {
            // A client whose connection is gone has sent its writes again on another, and may
            // have sent newer ones since: what waited here must not come after those. Changes of
            // names are carried out all the same; the duplicate-request cache knows them.
            if lane == Lane::Data && replies.is_closed() {
                return;
            }
            let finished = request.execute(&shared);
            if let Err(error) = replies.try_send(Reply { finished, charge }) {
                // The connection ended meanwhile; the client sends the call again on another.
                tracing::debug!(%error, "a reply has nowhere to go");
            }
        };
        self.shared.lanes.submit(lane, Box::new(job));
    }

    fn send(&self, finished: Finished, charge: Charge) -> Result<(), Ended> {
        match self.replies.try_send(Reply { finished, charge }) {
            Ok(()) => Ok(()),
            // The writer failed: this task is told why in the same moment.
            Err(mpsc::error::TrySendError::Closed(_)) => Ok(()),
            Err(mpsc::error::TrySendError::Full(_)) => Err(Ended::QueueFull),
        }
    }
}

fn purpose(request: &Request) -> Purpose {
    match request.lane() {
        Lane::Data | Lane::Namespace => Purpose::Change,
        Lane::Inline | Lane::Cached | Lane::Read => Purpose::Read,
    }
}
