//! Serves the routes on a socket: HTTP/1.1 and HTTP/2, plain or in TLS.
//!
//! ```text
//! accept -> permit -> TLS handshake -> patient stream -> hyper -> router
//!           bounded    bounded time    no stuck peer
//! ```
//! One over the bound takes the place of the oldest that nobody knows ([`crate::crowd`]).
//!
//! Every wait for a peer has an end: for the handshake, for the first bytes, for the head of
//! each request, for a write or, in HTTP/2, some part of an answer to be taken. What waits inside a
//! request is the routes' business.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::http::{Request, Response, StatusCode, Version, header};
use hyper::body::{Frame, Incoming, SizeHint};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio_rustls::TlsAcceptor;
use tower::ServiceExt;

use crate::certificate;
use crate::crowd::{Crowd, Standing, UnderWay};
use crate::patient::Patient;

/// Connections at once. For one more the oldest of which nothing is known is closed; if all are
/// known it waits, and others in the kernel's queue, which is bounded too. Each worker keeps a few
/// open.
const CONNECTIONS_MAX: u32 = 1024;

/// Longest TLS handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Longest wait for the head of a request, the idle time of a kept connection included, and of
/// one of HTTP/2 without a request: longer than the 60 s after which common clients close it, so
/// that they rarely meet a connection that is just being closed.
const HEAD_TIMEOUT: Duration = Duration::from_secs(75);

/// Longest wait for the peer of a connection that is to end to take some part of an answer. Data has
/// a limit of its own; this is for what else fills the windows of HTTP/2, pings aside.
const STUCK_TIMEOUT: Duration = Duration::from_secs(120);

/// HTTP/2 pings a silent peer this often, and drops one that does not answer in time.
const PING_INTERVAL: Duration = Duration::from_secs(30);
const PING_TIMEOUT: Duration = Duration::from_secs(20);

/// Requests at once on one HTTP/2 connection.
const STREAMS_MAX: u32 = 64;

/// Bytes that HTTP/2 peers may send ahead on one stream and on one connection.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 4 << 20;

/// Bytes of the head of a request.
const HEAD_BYTES_MAX: usize = 64 << 10;
const HEAD_BYTES_MAX_U32: u32 = 64 << 10;

/// Longest time that a stop waits for requests under way.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(20);

/// Pause after an accept that failed for want of something (of file descriptors, say), so that
/// the failure does not become a busy loop.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

const _: () = assert!(HEAD_BYTES_MAX == HEAD_BYTES_MAX_U32 as usize);

/// The files that TLS needs, in PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate, and those that lead from it to a root.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// A certificate with those that lead from it to a root, and its private key.
pub type Identity = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

impl TlsFiles {
    /// What the files hold.
    ///
    /// # Errors
    /// A file cannot be read, or holds something else.
    pub fn read(&self) -> Result<Identity, ApiServerError> {
        let certificates = read_certificates(&self.cert)?;
        let key = PrivateKeyDer::from_pem_file(&self.key)
            .map_err(|source| unreadable("private key", &self.key, source))?;
        Ok((certificates, key))
    }

    /// When the first of the certificates ends, in seconds since 1970; none if that cannot be told.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn ends_at_seconds(&self) -> Result<Option<u64>, ApiServerError> {
        let (certificates, _) = self.read()?;
        Ok(certificate::ends_at_seconds(certificates.iter().map(AsRef::as_ref)))
    }

    /// The failure that they do not serve together.
    #[must_use]
    pub fn unusable(&self, source: rustls::Error) -> ApiServerError {
        ApiServerError::Tls { files: self.clone(), source }
    }
}

/// The certificates in a file of PEM; at least one.
///
/// # Errors
/// The file cannot be read, or holds something else.
pub fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, ApiServerError> {
    let certificates = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|source| unreadable("certificate", path, source))?;
    if certificates.is_empty() {
        return Err(ApiServerError::NoCertificate { path: path.to_owned() });
    }
    Ok(certificates)
}

fn unreadable(what: &'static str, path: &Path, source: pem::Error) -> ApiServerError {
    ApiServerError::TlsFile { what, path: path.to_owned(), source }
}

/// What keeps the REST face from serving.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ApiServerError {
    /// A file of the certificate cannot be read.
    #[error("{what} {} cannot be read: {source}", path.display())]
    TlsFile {
        /// Certificate or private key.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        source: pem::Error,
    },
    /// The file holds no certificate.
    #[error("{} holds no certificate in PEM", path.display())]
    NoCertificate {
        /// The file.
        path: PathBuf,
    },
    /// The certificate and the key do not serve together.
    #[error("certificate {} and key {} cannot be used: {source}", files.cert.display(), files.key.display())]
    Tls {
        /// The files.
        files: TlsFiles,
        /// Why.
        source: rustls::Error,
    },
}

/// How a request reached the server; an extension of each request that came over a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionInfo {
    /// The client.
    pub peer: SocketAddr,
    /// The connection is encrypted.
    pub tls: bool,
}

/// Serves `router` on `listener` until `shutdown` is ready; then takes no more connections,
/// lets requests under way end within 20 seconds, and returns.
///
/// # Errors
/// Certificate files that cannot be used. A failure of one connection is not one of these.
pub async fn run(
    listener: TcpListener,
    router: Router,
    tls: Option<TlsFiles>,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<(), ApiServerError> {
    run_within(listener, router, tls, Limits::default(), shutdown).await
}

/// The bounds of a server that its tests have smaller.
#[derive(Clone, Copy, Debug)]
struct Limits {
    connections_max: u32,
    /// Time without a request after which a connection ends.
    silence_max: Duration,
    /// Time beyond that which it has to take its answers.
    stuck_max: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections_max: CONNECTIONS_MAX,
            silence_max: HEAD_TIMEOUT,
            stuck_max: STUCK_TIMEOUT,
        }
    }
}

async fn run_within(
    listener: TcpListener,
    router: Router,
    tls: Option<TlsFiles>,
    limits: Limits,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<(), ApiServerError> {
    let acceptor = tls.as_ref().map(tls_acceptor).transpose()?;
    let connections_max = usize::try_from(limits.connections_max).unwrap_or(usize::MAX);
    let permits = Arc::new(Semaphore::new(connections_max));
    let crowd = Crowd::new(connections_max);
    let stop = watch::Sender::new(false);
    let mut shutdown = pin!(shutdown);
    loop {
        let next = async {
            let accepted = listener.accept().await?;
            io::Result::Ok((accepted, permit(&permits, &crowd).await))
        };
        let accepted = tokio::select! {
            () = &mut shutdown => break,
            next = next => next,
        };
        match accepted {
            Ok(((stream, peer), permit)) => {
                let connection = Connection {
                    router: router.clone(),
                    acceptor: acceptor.clone(),
                    peer,
                    standing: crowd.admit(),
                    limits,
                };
                let stop = stop.subscribe();
                tokio::spawn(async move {
                    connection.serve(stream, stop).await;
                    drop(permit);
                });
            }
            Err(error) if is_of_one_connection(&error) => {}
            Err(error) => {
                tracing::warn!(%error, "no connection could be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop(listener);
    stop.send_replace(true);
    // All permits: every connection has ended.
    let ended = permits.acquire_many(limits.connections_max);
    if tokio::time::timeout(DRAIN_TIMEOUT, ended).await.is_err() {
        tracing::warn!(
            seconds = DRAIN_TIMEOUT.as_secs(),
            "requests were still under way at the end of the stop, and are cut off"
        );
    }
    Ok(())
}

/// A place for one more connection, which another one may have to leave.
async fn permit(permits: &Arc<Semaphore>, crowd: &Crowd) -> Option<OwnedSemaphorePermit> {
    if let Ok(permit) = Arc::clone(permits).try_acquire_owned() {
        return Some(permit);
    }
    crowd.make_room();
    // The semaphore is never closed.
    Arc::clone(permits).acquire_owned().await.ok()
}

/// The peer went away before it was accepted; the listener is sound.
fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

fn tls_acceptor(files: &TlsFiles) -> Result<TlsAcceptor, ApiServerError> {
    let (certificates, key) = files.read()?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(certificates, key));
    let mut config = config.map_err(|source| files.unusable(source))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

struct Connection {
    router: Router,
    acceptor: Option<TlsAcceptor>,
    peer: SocketAddr,
    standing: Arc<Standing>,
    limits: Limits,
}

impl Connection {
    /// Serves it until it ends, or has to make room for another one.
    async fn serve(self, stream: TcpStream, stop: watch::Receiver<bool>) {
        let (peer, standing) = (self.peer, Arc::clone(&self.standing));
        tokio::select! {
            () = self.serve_stream(stream, stop) => {}
            () = standing.asked() => {
                tracing::debug!(%peer, "closed for a newer connection: no call told who it is");
            }
            () = standing.was_cut() => {
                tracing::debug!(%peer, "closed: it took nothing of the data that it asked for");
            }
        }
    }

    async fn serve_stream(self, stream: TcpStream, stop: watch::Receiver<bool>) {
        let peer = self.peer;
        // Answers are small and waited for: none is held back to be sent with a later one.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%peer, %error, "the connection went away");
            return;
        }
        let Some(acceptor) = self.acceptor.clone() else {
            return self.serve_http(stream, false, stop).await;
        };
        match tokio::time::timeout(HANDSHAKE_TIMEOUT, acceptor.accept(stream)).await {
            Ok(Ok(stream)) => self.serve_http(stream, true, stop).await,
            Ok(Err(error)) => tracing::debug!(%peer, %error, "the TLS handshake failed"),
            Err(_) => tracing::debug!(%peer, "the TLS handshake took too long"),
        }
    }

    async fn serve_http<S>(self, stream: S, tls: bool, mut stop: watch::Receiver<bool>)
    where
        S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
    {
        let Self { router, peer, standing, limits, .. } = self;
        let info = ConnectionInfo { peer, tls };
        let of_requests = Arc::clone(&standing);
        let service = hyper::service::service_fn(move |request: Request<Incoming>| {
            answer(router.clone(), request, info, Arc::clone(&of_requests))
        });
        let stream = TokioIo::new(Patient::new(stream));
        let mut connection = pin!(http().serve_connection(stream, service).into_owned());
        let ended = tokio::select! {
            ended = connection.as_mut() => ended,
            // HTTP/1 has a limit of its own for this; HTTP/2 would answer pings for ever.
            () = standing.silent_for(limits.silence_max) => {
                connection.as_mut().graceful_shutdown();
                tokio::select! {
                    ended = connection => ended,
                    () = standing.stuck_for(limits.silence_max + limits.stuck_max) => {
                        tracing::debug!(%peer, "closed: it took nothing of its answers");
                        return;
                    }
                }
            }
            () = stopped(&mut stop) => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%peer, error, "the connection ended");
        }
    }
}

/// Completes when the server stops.
async fn stopped(stop: &mut watch::Receiver<bool>) {
    // A sender that is gone stops as well.
    let _ = stop.wait_for(|stop| *stop).await;
}

async fn answer(
    router: Router,
    request: Request<Incoming>,
    info: ConnectionInfo,
    standing: Arc<Standing>,
) -> Result<Response<Body>, Infallible> {
    let _under_way = standing.begin();
    if request.version() < Version::HTTP_2 {
        standing.speaks_http1();
    }
    let mut request = request.map(Body::new);
    request.extensions_mut().insert(info);
    request.extensions_mut().insert(Arc::clone(&standing));
    let mut response = router.oneshot(request).await?;
    if response.status() == StatusCode::NOT_MODIFIED {
        // Axum gives the length of its body, which is none; here it would be taken for that of the file (RFC 9110 section
        // 8.6).
        response.headers_mut().remove(header::CONTENT_LENGTH);
    }
    Ok(response.map(|body| Body::new(Answer { body, standing, owed: None })))
}

/// The body of an answer, of which each part that is asked for tells that the peer takes it.
struct Answer {
    body: Body,
    standing: Arc<Standing>,
    /// The peer waits for a part.
    owed: Option<UnderWay>,
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let owed = self.owed.take().unwrap_or_else(|| self.standing.begin());
        let polled = Pin::new(&mut self.body).poll_frame(context);
        self.owed = polled.is_pending().then_some(owed);
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

fn http() -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(HEAD_BYTES_MAX)
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        .max_concurrent_streams(STREAMS_MAX)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_header_list_size(HEAD_BYTES_MAX_U32);
    builder
}

#[cfg(test)]
mod tests;
