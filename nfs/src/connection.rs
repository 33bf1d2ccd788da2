//! One connection: a reader that takes calls and answers what it can from memory, and a writer
//! for replies that the client does not take at once. Both are one task on one reactor.
//!
//! ```text
//! socket -> records -> charge -> plan -+- inline ------ batch --+-> outlet -> socket
//!                                      +- lane (own threads) ---+     +-> writer -> socket
//! ```
//! Replies leave in the order in which calls end, those of one burst together. A reader that
//! waited until they are taken would wait for ever on a client that does the same, so the
//! writer does that. A call in flight holds its charge until its reply is written: when the
//! budget is used up the reader waits, and the socket with it.
//!
//! Invariant: the reader never waits while it holds back replies.

use std::fmt;
use std::io::{self, ErrorKind};
use std::mem;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use rustix::net::sockopt;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::answer;
use crate::budget::{Charge, ConnectionBudget, Purpose};
use crate::crowd::Guest;
use crate::dispatch::{self, Finished, Peer, Plan, Request, Resent};
use crate::greeting::{self, GreetingError, Opened};
use crate::lane_writes::LaneWrite;
use crate::limits;
use crate::outlet::{self, Outgoing, Outlet, Reply, WriteError, outlet};
use crate::pace::Pace;
use crate::procedure::{Lane, NfsProcedure, Procedure};
use crate::record::{Record, RecordError, RecordReader, Source, charge_unless_gone};
use crate::rpc::{self, NotACall, Unrunnable};
use crate::server::Shared;
use crate::transport::ReadHalf;
use crate::xdr::Encoder;

/// What the log says of a client without a certificate.
const PLAIN_TEXT_REFUSED: &str = "calls in plain text are refused, as nfs-tls is `mutual`: the driver needs an api of \
     https, and nfs-certificate with nfs-key; Linux's own client needs xprtsec=mtls";

/// Why a connection ends.
#[derive(Debug, thiserror::Error)]
enum Ended {
    /// The client closed it.
    #[error("the client closed the connection")]
    ByClient,
    /// The server stops.
    #[error("the server stops")]
    Stopping,
    /// The socket cannot be watched.
    #[error("socket: {0}")]
    Socket(io::Error),
    /// There are too many connections that have no place.
    #[error("it had no place yet, and too many others that came later have none")]
    GaveWay,
    /// Its first call waits for a place, and others for the memory that the call holds.
    #[error("there was no place for it in {} s, and calls of others wait for the memory that its first call holds", limit.as_secs())]
    NoPlace {
        /// The time it had.
        limit: Duration,
    },
    /// The first call did not come.
    #[error("no call came in {} s", limit.as_secs())]
    Silent {
        /// The time it had.
        limit: Duration,
    },
    /// It did not begin.
    #[error(transparent)]
    Greeting(GreetingError),
    /// The stream cannot be cut into records.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// A record is no call.
    #[error(transparent)]
    NotACall(#[from] NotACall),
    /// Replies cannot be sent.
    #[error(transparent)]
    Write(#[from] WriteError),
}

impl Ended {
    /// Whether this is the usual end of a connection.
    fn is_ordinary(&self) -> bool {
        match self {
            Self::ByClient | Self::Stopping | Self::GaveWay | Self::Silent { .. } => true,
            // In the middle of a call, as one that was killed.
            Self::Record(RecordError::Truncated { .. } | RecordError::Gone) => true,
            Self::Record(RecordError::Io(error))
            | Self::Write(WriteError::Io(error))
            | Self::Greeting(GreetingError::Io(error))
            | Self::Socket(error) => is_gone(error.kind()),
            Self::NoPlace { .. }
            | Self::Greeting(_)
            | Self::Record(_)
            | Self::NotACall(_)
            | Self::Write(_) => false,
        }
    }
}

impl From<GreetingError> for Ended {
    fn from(error: GreetingError) -> Self {
        match error {
            GreetingError::Silent { limit } => Self::Silent { limit },
            error => Self::Greeting(error),
        }
    }
}

/// Whether this is how the system tells that the client is gone, without a close or with calls
/// unanswered.
const fn is_gone(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::ConnectionReset
            | ErrorKind::ConnectionAborted
            | ErrorKind::BrokenPipe
            | ErrorKind::NotConnected
            | ErrorKind::TimedOut
            | ErrorKind::HostUnreachable
            | ErrorKind::NetworkUnreachable
            | ErrorKind::UnexpectedEof
    )
}

/// Serves a connection until it ends.
pub(crate) async fn serve(
    shared: Arc<Shared>,
    stream: TcpStream,
    mut peer: Peer,
    guest: &Guest,
    mut stop: watch::Receiver<bool>,
) {
    // The accepting runtime watches the socket until here, this reactor from here on.
    let stream = match stream.into_std().and_then(TcpStream::from_std) {
        Ok(stream) => stream,
        Err(error) => return report(&shared, peer, &Ended::Socket(error)),
    };
    if let Err(error) = prepare(&stream) {
        tracing::warn!(client = %peer.address, %error, "socket options");
    }
    let opened = tokio::select! {
        opened = open(&shared, stream, &mut peer) => opened,
        () = guest.asked() => Err(Ended::GaveWay),
        _ = stop.wait_for(|stop| *stop) => Err(Ended::Stopping),
    };
    let Opened { source, socket, bytes } = match opened {
        Ok(opened) => opened,
        Err(ended) => return report(&shared, peer, &ended),
    };
    // Who only gets refusals holds no memory that others wait for.
    let budget = match peer.is_served() {
        true => shared.budget.connection(),
        false => shared.refused_budget.connection(),
    };
    let budget = Arc::new(budget);
    let (outlet, writer) = outlet(socket, shared.patience.reply, Arc::clone(&budget));
    let mut writer = pin!(writer.run());
    let mut reader = Reader::new(Arc::clone(&shared), (source, bytes), peer, outlet, budget);
    let (mut ended, written) = tokio::select! {
        ended = reader.run(guest) => (ended, None),
        () = guest.asked() => (Ended::GaveWay, None),
        _ = stop.wait_for(|stop| *stop) => (Ended::Stopping, None),
        // Only a failure ends the writer before the reader.
        written = &mut writer => (Ended::ByClient, Some(written)),
    };
    if !matches!(ended, Ended::Stopping) {
        // From now on this client may write by another connection. A server that stops takes
        // calls by none, and answers all that it took.
        reader.outlet.abandon();
    }
    // Calls in flight hold the outlet open; the writer ends after the last of their replies.
    let source = reader.end();
    let written = match written {
        Some(written) => written,
        // Who has to leave is not waited for: it counts no longer. The writer's end is the socket's.
        None if matches!(ended, Ended::GaveWay) => Ok(()),
        None => tokio::select! {
            written = &mut writer => written,
            () = guest.asked() => {
                ended = Ended::GaveWay;
                Ok(())
            }
        },
    };
    let ended = match written {
        Err(error) if ended.is_ordinary() => Ended::Write(error),
        _ => ended,
    };
    if matches!(ended, Ended::Stopping) {
        linger(source).await;
    }
    report(&shared, peer, &ended);
}

/// The connection, in TLS if its client asks for that, and may.
async fn open(shared: &Shared, stream: TcpStream, peer: &mut Peer) -> Result<Opened, Ended> {
    let Some(offered) = shared.options.tls.as_ref().filter(|_| peer.access.is_some()) else {
        return Ok(Opened::plain(stream, BytesMut::new()));
    };
    let is_own = stream.local_addr().is_ok_and(|own| own.ip().to_canonical() == peer.address);
    let opened = greeting::begin(stream, peer.port, offered, &shared.patience).await;
    match &opened {
        Ok(opened) if opened.is_encrypted() => {
            peer.note_shown(opened.socket.shown(), offered);
            shared.metrics.tls_connections.add(1);
        }
        Ok(opened) if !is_own => {
            let is_refused = peer.note_plain_text(offered);
            // One that says nothing is a port scan, or a look whether the server is there.
            if is_refused && !opened.bytes.is_empty() {
                tracing::warn!(client = %peer.address,
                    "a client in plain text is refused, as nfs-tls is `required`; Linux's own client asks to mount \
                     (MNT) in plain text, also with xprtsec=tls");
            }
        }
        Err(GreetingError::Handshake(_) | GreetingError::TooSlow { .. }) => {
            shared.metrics.tls_handshakes_failed.add(1);
        }
        _ => {}
    }
    Ok(opened?)
}

/// Reads and forgets until the client closes its end, for a bounded time.
async fn linger(mut source: ReadHalf) {
    let forget = async {
        let mut bytes = [0; 4096];
        while source.read(&mut bytes).await.is_ok_and(|count| count > 0) {}
    };
    // Either way the connection ends here.
    let _ = timeout(limits::LINGER, forget).await;
}

fn report(shared: &Shared, peer: Peer, ended: &Ended) {
    let client = peer.address;
    if matches!(ended, Ended::GaveWay) {
        shared.metrics.connections_dropped.add(1);
    }
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
    records: RecordReader<ReadHalf>,
    budget: Arc<ConnectionBudget>,
    peer: Peer,
    outlet: Outlet,
    /// Replies of the burst that is being taken.
    batch: Outgoing,
    /// Bytes that were sent since others had a turn.
    sent_bytes: usize,
    /// Whether the log says why its calls in plain text are refused.
    has_warned: bool,
}

impl fmt::Debug for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reader").field("peer", &self.peer).finish_non_exhaustive()
    }
}

impl Reader {
    fn new(
        shared: Arc<Shared>,
        (source, begun): (ReadHalf, BytesMut),
        peer: Peer,
        outlet: Outlet,
        budget: Arc<ConnectionBudget>,
    ) -> Self {
        let bytes_max = match peer.is_served() {
            true => limits::FRAME_BYTES_MAX,
            false => limits::FRAME_BYTES_REFUSED_CLIENT,
        };
        let records = RecordReader::new(source, begun, bytes_max, shared.patience.record);
        let (batch, sent_bytes, has_warned) = (Outgoing::default(), 0, false);
        Self { shared, records, budget, peer, outlet, batch, sent_bytes, has_warned }
    }

    async fn run(&mut self, guest: &Guest) -> Ended {
        match self.take_calls(guest).await {
            Ok(()) => Ended::ByClient,
            Err(ended) => ended,
        }
    }

    /// Takes no more calls. What is still to be read is in the socket.
    fn end(mut self) -> ReadHalf {
        self.flush();
        self.records.into_source()
    }

    async fn take_calls(&mut self, guest: &Guest) -> Result<(), Ended> {
        let mut next = self.first_record().await?;
        while let Some(record) = next {
            if self.peer.is_served() && !guest.has_place() {
                self.take_place(guest, &record).await?;
            }
            self.take(record).await?;
            while let Some(record) = self.records.buffered() {
                // Many calls may be in the buffer: others on this thread get their turn.
                outlet::take_turns(mem::take(&mut self.sent_bytes)).await;
                self.take(record).await?;
            }
            self.flush();
            outlet::take_turns(mem::take(&mut self.sent_bytes)).await;
            next = self.records.next(&self.budget).await?;
        }
        Ok(())
    }

    async fn first_record(&mut self) -> Result<Option<Record>, Ended> {
        let limit = self.shared.patience.first_call;
        let first = async {
            // No buffer is taken for one that says nothing.
            self.records.begun(limit).await?;
            self.records.first(&self.budget, limit).await
        };
        first.await.map_err(|error| match error {
            RecordError::TooSlow { limit: had } if had == limit => Ended::Silent { limit },
            error => error.into(),
        })
    }

    /// Waits for a place, but no longer than the client is there: what it may have sent again since
    /// must not come after what it sent then. Nor longer than others can do without the memory that
    /// its first call, `record`, holds: those that have places may wait for just that.
    async fn take_place(&self, guest: &Guest, record: &Record) -> Result<(), Ended> {
        let mut waiting = pin!(guest.take_place());
        let mut pace = Pace::new();
        loop {
            let taken = timeout(limits::GONE_PERIOD, &mut waiting).await;
            if self.records.source().is_gone() {
                return Err(RecordError::Gone.into());
            }
            if let Ok(has_place) = taken {
                return if has_place { Ok(()) } else { Err(Ended::GaveWay) };
            }
            if record.charge.is_some()
                && let Some(limit) = pace.broken(&self.budget)
            {
                return Err(Ended::NoPlace { limit });
            }
        }
    }

    async fn take(&mut self, record: Record) -> Result<(), Ended> {
        let Record { bytes, charge } = record;
        match dispatch::plan(&bytes, self.peer, Instant::now()) {
            Plan::Close(why) => Err(why.into()),
            Plan::Answer(reply) => self.refuse(reply, charge).await,
            Plan::AskForCertificate(reply) => {
                self.warn_of_plain_text();
                self.refuse(reply, charge).await
            }
            Plan::Run(request) => {
                drop(bytes);
                self.start(request, charge).await
            }
        }
    }

    async fn refuse(&mut self, reply: Encoder, charge: Option<Charge>) -> Result<(), Ended> {
        self.shared.metrics.calls_refused.add(1);
        let charge = match charge {
            Some(charge) => charge,
            None => self.charge(Purpose::Read, 0).await?,
        };
        self.send(reply.into(), charge);
        Ok(())
    }

    /// Says once why calls are refused to a client that may mount.
    fn warn_of_plain_text(&mut self) {
        if !mem::replace(&mut self.has_warned, true) {
            tracing::warn!(client = %self.peer.address, "{PLAIN_TEXT_REFUSED}");
        }
    }

    async fn charge(&mut self, purpose: Purpose, bytes: usize) -> Result<Charge, Ended> {
        if let Some(charge) = self.budget.try_charge(purpose, bytes) {
            return Ok(charge);
        }
        // The replies that are held back are charged, too.
        self.flush();
        Ok(charge_unless_gone(self.records.source(), &self.budget, purpose, bytes).await?)
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
                self.send(reply.into(), charge);
                return Ok(());
            }
            None => self.charge(purpose(&request), request.charged_bytes()).await?,
        };
        self.check_presence(&request)?;
        match request.check_resent(&self.shared) {
            Resent::No => {}
            Resent::Drop => return Ok(()),
            Resent::Replay(head) => {
                let finished = Finished { head: head.to_vec(), pieces: Vec::new() };
                self.send(finished, charge);
                return Ok(());
            }
        }
        // A WRITE must not overtake one that came before it and waits, by whichever connection:
        // both may be of the same bytes, and a client that did not wait for the first, or lost
        // its connection meanwhile, would find them out of order always, not by chance.
        let may_run = match request.lane() {
            Lane::Inline | Lane::Cached => true,
            Lane::Data => !is_write || !self.would_overtake(&request),
            Lane::Namespace | Lane::Read => false,
        };
        if !may_run {
            self.submit(request, charge, is_write);
            return Ok(());
        }
        match request.execute_inline(&self.shared) {
            Ok(finished) => self.send(finished, charge),
            Err(request) => self.submit(request, charge, is_write),
        }
        Ok(())
    }

    /// Refuses to begin a change of a client that has left. Its call may have lain in the socket for
    /// long, as while this thread waited for the disk: the client has then sent it again by another
    /// connection, and other changes since, which this one would undo. The duplicate-request cache
    /// knows no WRITE, and of the others it forgets. A COMMIT undoes nothing.
    fn check_presence(&self, request: &Request) -> Result<(), Ended> {
        let changes = purpose(request) == Purpose::Change
            && request.procedure != Procedure::Nfs(NfsProcedure::Commit);
        if changes && self.records.source().is_gone() {
            return Err(RecordError::Gone.into());
        }
        Ok(())
    }

    fn would_overtake(&self, write: &Request) -> bool {
        let writes = &self.shared.lane_writes;
        !writes.is_empty() && write.file(&self.shared).is_some_and(|file| writes.contains(file))
    }

    /// Has the request run by its lane's threads, and its reply sent from there. A COMMIT that
    /// another thread will carry out along with its own needs none.
    fn submit(&self, mut request: Box<Request>, charge: Charge, is_write: bool) {
        request.detach();
        let (shared, outlet) = (Arc::clone(&self.shared), self.outlet.clone());
        if is_write {
            request.may_outlast(&outlet);
        }
        let lane = request.lane();
        let file = if is_write { request.file(&shared) } else { None };
        let write = file.map(|file| LaneWrite::new(&shared.lane_writes, file));
        let send = {
            let outlet = outlet.clone();
            move |finished| {
                drop(write);
                outlet.send_one(Reply::new(finished, charge));
            }
        };
        let Err((request, send)) = answer::join(request, &shared, Box::new(send)) else { return };
        let job = move || {
            // A client whose connection is gone has sent its writes again on another, and may
            // have sent newer ones since: what waited here must not come after those, nor what is
            // yet to wait for a flush of its file (`Call::is_given_up`). Changes of names are carried
            // out all the same; the duplicate-request cache knows them.
            if lane == Lane::Data && outlet.is_abandoned() {
                return;
            }
            answer::execute(*request, &shared, send);
        };
        self.shared.lanes.submit(lane, Box::new(job));
    }

    /// Sends a reply, soon: with those of the calls that came along with its own.
    fn send(&mut self, finished: Finished, charge: Charge) {
        let reply = Reply::new(finished, charge);
        self.sent_bytes += reply.length();
        self.batch.push(reply);
        if self.batch.is_batch() {
            self.flush();
        }
    }

    fn flush(&mut self) {
        self.outlet.send(&mut self.batch);
    }
}

fn purpose(request: &Request) -> Purpose {
    match request.lane() {
        Lane::Data | Lane::Namespace => Purpose::Change,
        Lane::Inline | Lane::Cached | Lane::Read => Purpose::Read,
    }
}
