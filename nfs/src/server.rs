//! The server: what all connections share, the accept loop, and the end.

use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use nfsserve::nfs::nfsstat3;
use slackwater_blockstore::Store;
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::budget::Budget;
use crate::connection;
use crate::crowd::{Crowd, Guest};
use crate::dispatch::Peer;
use crate::duplicate::DuplicateCache;
use crate::error::NfsError;
use crate::handle::{Decoded, HandleCodec};
use crate::lane::Lanes;
use crate::lane_writes::LaneWrites;
use crate::limits::{self, Patience};
use crate::metrics::NfsMetrics;
use crate::mount::MountList;
use crate::options::NfsOptions;
use crate::portmap::Port;
use crate::portmap_udp;
use crate::reactor::{Place, Reactors};
use crate::scope::{MountScope, Mounter};

/// What all connections share.
#[derive(Debug)]
pub(crate) struct Shared {
    /// The store that is served.
    pub(crate) store: Arc<Store>,
    /// The options, which were validated.
    pub(crate) options: NfsOptions,
    /// Makes and checks file handles.
    pub(crate) handles: HandleCodec,
    /// `fsid` of all objects: derived from the store's id, so it survives restarts.
    pub(crate) filesystem_id: u64,
    /// Memory for calls in flight.
    pub(crate) budget: Arc<Budget>,
    /// That of clients that no rule matches.
    pub(crate) refused_budget: Arc<Budget>,
    /// Threads for calls that may wait.
    pub(crate) lanes: Lanes,
    /// WRITEs that those have.
    pub(crate) lane_writes: Arc<LaneWrites>,
    /// Replies kept for resent calls.
    pub(crate) duplicates: Arc<DuplicateCache>,
    /// Who has mounted what.
    pub(crate) mounts: MountList,
    /// Counters.
    pub(crate) metrics: Arc<NfsMetrics>,
    /// How long clients may take.
    pub(crate) patience: Patience,
}

/// Where a server is reached.
#[derive(Debug)]
pub struct Listeners {
    /// NFS, MOUNT and PORTMAP, each of which tells its own port; at least one.
    pub nfs: Vec<TcpListener>,
    /// PORTMAP alone, which tells the port of that of `nfs` with its address, else of the first.
    pub portmap: Option<PortmapListeners>,
}

/// Where PORTMAP alone answers; clients expect one port for both.
#[derive(Debug)]
pub struct PortmapListeners {
    /// By TCP.
    pub tcp: TcpListener,
    /// By UDP, to the clients of [`NfsOptions::clients`].
    pub udp: UdpSocket,
}

impl From<TcpListener> for Listeners {
    fn from(listener: TcpListener) -> Self {
        Self { nfs: vec![listener], portmap: None }
    }
}

/// A listener, and what is served there.
struct Door {
    listener: TcpListener,
    port: Port,
}

/// Where a server takes connections and datagrams.
struct Doors {
    tcp: Vec<Door>,
    udp: Option<(UdpSocket, Port)>,
}

impl Doors {
    fn of(listeners: Listeners) -> Result<Self, NfsError> {
        let port = |listener: &TcpListener| {
            let address = listener.local_addr().map_err(|source| NfsError::Listener { source })?;
            Ok::<_, NfsError>(address.port())
        };
        if listeners.nfs.is_empty() {
            let source = io::Error::new(io::ErrorKind::InvalidInput, "no address for NFS is given");
            return Err(NfsError::Listener { source });
        }
        let mut tcp = Vec::with_capacity(listeners.nfs.len() + 1);
        for listener in listeners.nfs {
            let port = Port::Nfs(port(&listener)?);
            tcp.push(Door { listener, port });
        }
        let Some(portmap) = listeners.portmap else { return Ok(Self { tcp, udp: None }) };
        let own = portmap.tcp.local_addr().map_err(|source| NfsError::Listener { source })?;
        // That of NFS at the same address, if there is one: at another it may not be reached.
        let at = |door: &&Door| door.listener.local_addr().is_ok_and(|nfs| nfs.ip() == own.ip());
        let of_nfs = tcp.iter().find(at).or(tcp.first());
        let nfs = of_nfs.map_or(Ok(own.port()), |door| port(&door.listener))?;
        let port = Port::Portmap { own: own.port(), nfs };
        tcp.push(Door { listener: portmap.tcp, port });
        Ok(Self { tcp, udp: Some((portmap.udp, port)) })
    }
}

/// Serves `store` over NFSv3, MOUNT and PORTMAP on `listeners` until `shutdown` completes; then
/// takes no more calls, finishes those in flight within a bounded time, and returns. The store
/// stays open.
///
/// # Errors
/// [`NfsError::Option`] for an option out of its range, [`NfsError::Listener`] for a listener
/// without an address, [`NfsError::Drain`] when calls had to be cut off at the end.
pub async fn run(
    listeners: impl Into<Listeners>,
    store: Arc<Store>,
    options: NfsOptions,
    metrics: Arc<NfsMetrics>,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<(), NfsError> {
    options.validate()?;
    let shared = Shared::new(store, options, metrics, Patience::default());
    Server::new(Arc::new(shared))?.run(listeners.into(), shutdown).await
}

impl Shared {
    /// The shared state of a server, on the runtime of the caller.
    pub(crate) fn new(
        store: Arc<Store>,
        options: NfsOptions,
        metrics: Arc<NfsMetrics>,
        patience: Patience,
    ) -> Self {
        let store_id = store.store_id();
        let (filesystem_id, _) = store_id
            .as_bytes()
            .split_first_chunk()
            .map_or((0, &[][..]), |(first, rest)| (u64::from_be_bytes(*first), rest));
        Self {
            handles: HandleCodec::new(store_id, store.handle_key()),
            filesystem_id,
            budget: Budget::new(options.in_flight_bytes_max, Arc::clone(&metrics)),
            refused_budget: Budget::new(
                limits::IN_FLIGHT_BYTES_REFUSED_CLIENTS,
                Arc::clone(&metrics),
            ),
            lanes: Lanes::new(options.io_threads),
            lane_writes: Arc::default(),
            duplicates: DuplicateCache::new(),
            mounts: MountList::default(),
            metrics,
            patience,
            store,
            options,
        }
    }

    /// What a handle names and how it was mounted, unless its holder may not mount any more, or handles of mounts by
    /// address are not taken.
    pub(crate) fn open_handle(&self, handle: &[u8]) -> Result<Decoded, nfsstat3> {
        let decoded = self.handles.decode(handle).map_err(|_| nfsstat3::NFS3ERR_BADHANDLE)?;
        let is_taken = match decoded.scope {
            Some(scope) => self.is_admitted(scope),
            None => self.options.mounts_by_address,
        };
        if is_taken { Ok(decoded) } else { Err(nfsstat3::NFS3ERR_ACCES) }
    }

    /// Whether what was mounted with this scope may still be reached.
    pub(crate) fn is_admitted(&self, scope: MountScope) -> bool {
        self.options.gate.as_ref().is_some_and(|gate| gate.is_admitted(scope))
    }

    /// What is mounted with this secret.
    pub(crate) fn enter(&self, secret: &[u8], mounter: Mounter) -> Option<MountScope> {
        self.options.gate.as_ref()?.enter(secret, mounter)
    }
}

/// A running server.
pub(crate) struct Server {
    shared: Arc<Shared>,
    connections: JoinSet<()>,
    /// After the connections, which are on their threads.
    reactors: Reactors,
    crowd: Crowd,
    stop: watch::Sender<bool>,
}

/// A connection's place among [`NfsOptions::connections_max`], if it has one, and on a reactor.
struct Slot {
    metrics: Arc<NfsMetrics>,
    guest: Arc<Guest>,
    _place: Place,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.metrics.connections_open.subtract(1);
    }
}

impl Server {
    /// A server without connections.
    pub(crate) fn new(shared: Arc<Shared>) -> Result<Self, NfsError> {
        Ok(Self {
            crowd: Crowd::new(shared.options.connections_max),
            shared,
            connections: JoinSet::new(),
            reactors: Reactors::start()?,
            stop: watch::Sender::new(false),
        })
    }

    /// Accepts connections until `shutdown` completes, then lets their calls end.
    pub(crate) async fn run(
        mut self,
        listeners: Listeners,
        shutdown: impl Future<Output = ()> + Send,
    ) -> Result<(), NfsError> {
        let doors = Doors::of(listeners)?;
        let shared = Arc::clone(&self.shared);
        let by_udp = async {
            match &doors.udp {
                Some((socket, port)) => portmap_udp::serve(&shared, socket, *port).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = shutdown => {}
            () = self.accept_all(&doors.tcp) => {}
            () = by_udp => {}
        }
        drop(doors);
        self.drain().await
    }

    /// Accepts connections for ever.
    async fn accept_all(&mut self, doors: &[Door]) {
        let mut wait = limits::ACCEPT_WAIT_MIN;
        let mut first = 0;
        loop {
            match accept(doors, &mut first).await {
                Ok((stream, address, port)) => {
                    wait = limits::ACCEPT_WAIT_MIN;
                    let peer = Peer::new(address, port, &self.shared.options);
                    self.reap();
                    self.start(stream, peer);
                }
                Err(error) => {
                    // Out of file descriptors, most likely: others give theirs back.
                    tracing::warn!(%error, wait_milliseconds = wait.as_millis(), "accept");
                    sleep(wait).await;
                    wait = next_wait(wait);
                }
            }
        }
    }

    /// Forgets connections that ended.
    fn reap(&mut self) {
        while let Some(ended) = self.connections.try_join_next() {
            if let Err(error) = ended {
                tracing::error!(%error, "a connection's task failed");
            }
        }
    }

    fn start(&mut self, stream: TcpStream, peer: Peer) {
        let metrics = Arc::clone(&self.shared.metrics);
        metrics.connections_accepted.add(1);
        metrics.connections_open.add(1);
        let place = self.reactors.place();
        let reactor = place.handle.clone();
        let slot = Slot { metrics, guest: self.crowd.admit(), _place: place };
        let (shared, stop) = (Arc::clone(&self.shared), self.stop.subscribe());
        let serve = async move {
            connection::serve(shared, stream, peer, &slot.guest, stop).await;
        };
        self.connections.spawn_on(serve, &reactor);
    }

    /// Has every connection take no more calls, and waits for those in flight.
    async fn drain(mut self) -> Result<(), NfsError> {
        self.stop.send_replace(true);
        let limit = self.shared.patience.drain;
        let all_ended = async { while self.connections.join_next().await.is_some() {} };
        if timeout(limit, all_ended).await.is_ok() {
            return Ok(());
        }
        let connections = self.connections.len();
        // One whose thread hangs in a call is not waited for: the end comes all the same.
        if timeout(limits::CUT_OFF, self.connections.shutdown()).await.is_err() {
            tracing::error!(left = self.connections.len(), "connections could not be cut off");
        }
        Err(NfsError::Drain { connections, waited_seconds: limit.as_secs() })
    }
}

/// The next connection at any of the doors. Each time another one is looked at
/// first, so that a crowd at one keeps nobody out of the others.
async fn accept(doors: &[Door], first: &mut usize) -> io::Result<(TcpStream, SocketAddr, Port)> {
    *first = (*first + 1) % doors.len().max(1);
    let (before, from) = doors.split_at(*first);
    poll_fn(|context| {
        for door in from.iter().chain(before) {
            if let Poll::Ready(accepted) = door.listener.poll_accept(context) {
                return Poll::Ready(accepted.map(|(stream, from)| (stream, from, door.port)));
            }
        }
        Poll::Pending
    })
    .await
}

fn next_wait(wait: Duration) -> Duration {
    (wait * 2).min(limits::ACCEPT_WAIT_MAX)
}

#[cfg(test)]
mod tests;
