//! FUSE export of the appliance: its files, served to the kernel from a worker-local cache that
//! knows blocks by their content.
//!
//! ```text
//! kernel --/dev/fuse--> session --> operations --> read ---> maps ----REST--> appliance
//!                       device                  |   \-----> cache, flights
//!                       wire                    |    \----> nfs -----NFSv3--> appliance  (by mount_path, secured)
//!                                               +-> write ---> kept, nfs
//!                                               +-> nodes ---> journal
//! ```
//!
//! The mount itself is made by the caller, and outlives this process as long as somebody holds
//! the descriptor: a process that dies is followed by one that resumes.
//!
//! # What survives
//! - Death of this process: everything. Reads and writes that were under way are handed out
//!   again by the kernel (Linux 6.9 and later; before, who waits for one of them waits until
//!   the mount is aborted). Uncommitted writes are at the appliance and get committed.
//! - A restart of the appliance: everything. What was not committed is sent again.
//! - Both at once: what was synced. Uncommitted writes are lost, and every later write
//!   and sync of the file says so with an error, for ever.
//!
//! # What is assumed
//! This process is the only writer of the files that it serves; a file is not replaced by
//! another one at the same path while it is open here. Maps are asked for by path; bytes are
//! verified against them, holes cannot be.

mod beside;
mod cache;
mod certificate;
mod device;
mod distance;
mod error;
mod export;
mod file;
mod flights;
mod journal;
mod kept;
mod lock;
mod maps;
mod mount_path;
mod nfs;
mod nodes;
mod operations;
mod read;
mod rpc;
mod secured;
mod session;
mod slots;
mod statistics;
mod wire;
mod write;
mod xdr;

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

pub use cache::CACHE_FILE;
pub use certificate::{WorkerCertificate, WorkerCertificateError};
pub use error::ServeError;

use crate::cache::BlockCache;
use crate::device::Device;
use crate::distance::Distance;
use crate::export::Export;
use crate::journal::Journal;
use crate::lock::StateLock;
use crate::maps::Maps;
use crate::mount_path::MountPath;
use crate::nfs::Nfs;
use crate::secured::Security;
use crate::session::Session;
use crate::statistics::Statistics;

/// What is served, and with what.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// The appliance's REST face: where block maps come from.
    pub client: slackwater_client::Client,
    /// The appliance's NFS face: where bytes come from and go to.
    pub nfs_address: SocketAddr,
    /// What this worker shows to an appliance that asks for a certificate.
    pub certificate: Option<WorkerCertificate>,
    /// The NFS export, such as `/slackwater`. It is mounted by a secret path below, for which `client` asks.
    pub export: String,
    /// Where blocks are kept. No two processes may share it at a time.
    pub cache_directory: PathBuf,
    /// Most bytes of blocks that are kept there; 0 keeps none.
    pub cache_size_bytes: u64,
    /// What a resumed process needs to know is written there, by one process at a time.
    pub state_directory: PathBuf,
}

/// How NFS goes to an appliance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encryption {
    /// In plain text.
    None,
    /// In TLS, by the certificate of the appliance.
    Tls,
    /// In TLS, by that of this worker as well.
    Mutual,
}

/// How NFS goes from here to the appliance at `nfs_address` that `client` knows by REST. Where it asks for a certificate
/// its export is looked at, too, by a path for which `client` asks.
///
/// # Errors
/// No connection, or none that may be used: the certificate cannot be checked, or is another one's. `PermissionDenied`:
/// the appliance refuses that of this worker, or what is mounted by it.
pub async fn encryption(
    client: &slackwater_client::Client,
    nfs_address: SocketAddr,
    export: &str,
    certificate: Option<WorkerCertificate>,
) -> io::Result<Encryption> {
    let security = Security::of(client, nfs_address, certificate).map_err(io::Error::other)?;
    let stream = tokio::net::TcpStream::connect(nfs_address).await?;
    let mut stream = security.begin(stream).await?;
    stream.confirm().await?;
    let is_encrypted = stream.is_encrypted;
    // Its place is for another one.
    drop(stream);
    if !is_encrypted {
        return Ok(Encryption::None);
    }
    if !security.is_certificate_asked_for() {
        return Ok(Encryption::Tls);
    }
    // Without a path it is not the certificate that is refused.
    client.path_to_mount(export).await.map_err(io::Error::other)?;
    let path = MountPath::new(client, export);
    let nfs = Nfs::new(nfs_address, security, path, Arc::default(), Arc::default());
    match nfs.status().await {
        Ok(_) => Ok(Encryption::Mutual),
        Err(rustix::io::Errno::ACCESS) => {
            let reason = "the appliance takes the certificate of this worker, and lets nothing be mounted by it: it has to \
                 be that of this worker's id, or of none where a token-file is given; see nfs-certificate, and the log there";
            Err(io::Error::new(io::ErrorKind::PermissionDenied, reason))
        }
        Err(errno) => Err(errno.into()),
    }
}

/// Serves the mounted export behind `fuse`, a descriptor of `/dev/fuse`, until it is unmounted.
/// Makes the descriptor non-blocking.
///
/// With `resume` an earlier process has served that descriptor and died; this one goes on where
/// that one was, with what it left in the state directory. If that one lives, its end is waited
/// for before anything is touched.
///
/// # Errors
/// [`ServeError`]; an appliance that is away is none, it is waited for.
pub async fn serve(options: ServeOptions, fuse: OwnedFd, resume: bool) -> Result<(), ServeError> {
    let statistics = Arc::new(Statistics::default());
    let lock = StateLock::take(&options.state_directory).await?;
    let journal = if resume { Journal::resume(lock)? } else { Journal::create(lock)? };
    let cache = open_cache(&options, Arc::clone(&statistics)).await?;
    let path = MountPath::new(&options.client, &options.export);
    let security = Security::of(&options.client, options.nfs_address, options.certificate.clone())
        .map_err(|source| ServeError::Trust { source: Box::new(source) })?;
    let distance = Arc::new(Distance::default());
    let nfs = Nfs::new(
        options.nfs_address,
        security,
        path,
        Arc::clone(&statistics),
        Arc::clone(&distance),
    );
    let maps = Maps::new(&options.client, Arc::clone(&statistics), Arc::clone(&distance));
    let export = Export::new(nfs, maps, cache, journal, (statistics, distance));
    let device = Device::new(fuse).map_err(|source| ServeError::Device { source })?;
    let session = Session::new(device, Arc::new(export));
    if resume {
        session.resume().await;
    }
    session.run().await
}

async fn open_cache(
    options: &ServeOptions,
    statistics: Arc<Statistics>,
) -> Result<Option<BlockCache>, ServeError> {
    let (directory, size_bytes) = (options.cache_directory.clone(), options.cache_size_bytes);
    if size_bytes == 0 {
        return Ok(None);
    }
    let path = directory.clone();
    let opening =
        tokio::task::spawn_blocking(move || BlockCache::open(&directory, size_bytes, statistics));
    let opened = opening
        .await
        .map_err(|error| ServeError::File { path, source: std::io::Error::other(error) })?;
    opened.map(Some)
}
