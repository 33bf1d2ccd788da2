//! The calls of NFSv3 (RFC 1813) that serving block files takes.
//!
//! Invariant: every one of them can be run twice without harm, so that all of them wait for an
//! appliance that is away and are sent again when it is back. Errors are only what the
//! appliance answered.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use rustix::io::Errno;
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep};

use crate::distance::Distance;
use crate::mount_path::MountPath;
use crate::rpc::{Procedure, RpcClient, RpcError};
use crate::secured::Security;
use crate::statistics::Statistics;
use crate::wire::{Attributes, FileSystemStatus, MODE_DIRECTORY, MODE_FILE, Time};
use crate::xdr::{Decoder, Encoder, Malformed};

const MOUNT_PROGRAM: u32 = 100_005;
const NFS_PROGRAM: u32 = 100_003;
const VERSION: u32 = 3;

const MOUNT: Procedure = Procedure { program: MOUNT_PROGRAM, version: VERSION, number: 1 };

const fn nfs(number: u32) -> Procedure {
    Procedure { program: NFS_PROGRAM, version: VERSION, number }
}

const GET_ATTRIBUTES: Procedure = nfs(1);
const LOOKUP: Procedure = nfs(3);
const READ: Procedure = nfs(6);
const WRITE: Procedure = nfs(7);
const FILE_SYSTEM_STATUS: Procedure = nfs(18);
const COMMIT: Procedure = nfs(21);

/// Times that a path to mount is asked for, if the appliance does not take the one before.
const MOUNT_TRIES: u32 = 3;

/// How long the root is not mounted once more after that was done: a directory that this machine may not search is refused
/// as well, with each handle.
const RENEWAL_PAUSE: Duration = Duration::from_secs(10);

/// Longest handle (RFC 1813 section 2.4).
const HANDLE_BYTES_MAX: usize = 64;
/// Bytes of `fattr3`.
const ATTRIBUTES_BYTES: usize = 84;
/// Bytes of `wcc_attr`.
const ATTRIBUTES_BEFORE_BYTES: usize = 24;
const JUKEBOX: u32 = 10_008;
/// Wait after the appliance asked to come back later (NFS3ERR_JUKEBOX).
const JUKEBOX_WAIT: Duration = Duration::from_millis(500);

/// When a WRITE is durable (RFC 1813 section 3.3.7, `stable_how`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stability {
    /// With a COMMIT.
    Unstable = 0,
    /// When it is answered.
    FileSync = 2,
}

/// What the appliance calls a file. It stays the same when the appliance restarts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Handle(pub(crate) Bytes);

/// Changes when the appliance may have lost what was not committed.
pub(crate) type Verifier = [u8; 8];

/// A file or directory that was looked up.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub(crate) handle: Handle,
    pub(crate) attributes: Attributes,
}

/// The handle by which the export is mounted.
#[derive(Debug, Default)]
struct Root {
    handle: Option<Handle>,
    /// When it was asked for again, as the appliance refused the one before.
    renewed_at: Option<Instant>,
}

/// The appliance's NFS face.
#[derive(Clone, Debug)]
pub(crate) struct Nfs {
    /// Reads do not wait behind syncs: each has a connection of its own.
    reads: RpcClient,
    writes: RpcClient,
    path: MountPath,
    root: Arc<Mutex<Root>>,
    statistics: Arc<Statistics>,
}

impl Nfs {
    pub(crate) fn new(
        address: SocketAddr,
        security: Security,
        path: MountPath,
        statistics: Arc<Statistics>,
        distance: Arc<Distance>,
    ) -> Self {
        let connection = |security, distance| {
            RpcClient::new(address, security, Arc::clone(&statistics), distance)
        };
        Self {
            reads: connection(security.clone(), Some(distance)),
            writes: connection(security, None),
            path,
            root: Arc::default(),
            statistics,
        }
    }

    /// The handle of the export's root, or of what a worker sees as the root.
    async fn root(&self) -> Result<Handle, Errno> {
        let mut root = self.root.lock().await;
        if let Some(handle) = &root.handle {
            return Ok(handle.clone());
        }
        let handle = self.mount().await?;
        root.handle = Some(handle.clone());
        Ok(handle)
    }

    /// Another handle of the root than one that the appliance refused: the token that it was mounted by may be another one
    /// now.
    ///
    /// # Errors
    /// `ACCESS`: another one was asked for a short time ago.
    async fn root_after(&self, refused: &Handle) -> Result<Handle, Errno> {
        {
            let mut root = self.root.lock().await;
            if root.handle.as_ref() == Some(refused) {
                if root.renewed_at.is_some_and(|at| at.elapsed() < RENEWAL_PAUSE) {
                    return Err(Errno::ACCESS);
                }
                *root = Root { handle: None, renewed_at: Some(Instant::now()) };
            }
        }
        self.root().await
    }

    async fn mount(&self) -> Result<Handle, Errno> {
        let mut left = MOUNT_TRIES;
        loop {
            left -= 1;
            let path = self.path.get().await?;
            let mut arguments = Encoder::default();
            arguments.opaque(path.as_bytes());
            match call(&self.reads, MOUNT, &arguments, None).await {
                Ok(mut results) => return decoded(results.opaque(HANDLE_BYTES_MAX).map(Handle)),
                // The appliance was away for longer than the path counts, or has forgotten it.
                Err(Errno::ACCESS) if left > 0 && !self.path.is_fixed(&path) => {}
                Err(Errno::ACCESS) => {
                    tracing::error!(
                        "the appliance refuses a mount by the path that it gave: see its log, and there nfs-client and \
                         nfs-tls; where that is `mutual`, nfs-certificate has to be that of this worker, or of no worker where \
                         a token-file is given"
                    );
                    return Err(self.path.refuse(Errno::ACCESS));
                }
                Err(errno) => return Err(errno),
            }
        }
    }

    /// The file or directory of that name in the root.
    pub(crate) async fn lookup_in_root(&self, name: &str) -> Result<Found, Errno> {
        let root = self.root().await?;
        match self.lookup(&root, name).await {
            Err(Errno::ACCESS) => self.lookup(&self.root_after(&root).await?, name).await,
            outcome => outcome,
        }
    }

    pub(crate) async fn lookup(&self, directory: &Handle, name: &str) -> Result<Found, Errno> {
        let mut arguments = with_handle(directory);
        arguments.opaque(name.as_bytes());
        let mut results = call(&self.reads, LOOKUP, &arguments, None).await?;
        let handle = Handle(decoded(results.opaque(HANDLE_BYTES_MAX))?);
        let attributes = match decoded(optional_attributes(&mut results))? {
            Some(attributes) => attributes?,
            None => self.attributes(&handle).await?,
        };
        Ok(Found { handle, attributes })
    }

    pub(crate) async fn attributes(&self, handle: &Handle) -> Result<Attributes, Errno> {
        let arguments = with_handle(handle);
        let mut results = call(&self.reads, GET_ATTRIBUTES, &arguments, None).await?;
        decoded(attributes(&mut results))?
    }

    /// The bytes of the range, fewer only at the end of the file.
    pub(crate) async fn read(
        &self,
        handle: &Handle,
        offset_bytes: u64,
        length_bytes: u32,
    ) -> Result<Bytes, Errno> {
        let (first, mut is_end) = self.read_once(handle, offset_bytes, length_bytes).await?;
        let wanted = usize::try_from(length_bytes).unwrap_or(usize::MAX);
        if is_end || first.len() == wanted {
            return Ok(first);
        }
        let mut all = BytesMut::from(first);
        while !is_end && all.len() < wanted {
            let done = u32::try_from(all.len()).unwrap_or(length_bytes);
            let offset_bytes = offset_bytes.saturating_add(u64::from(done));
            let (more, end) = self.read_once(handle, offset_bytes, length_bytes - done).await?;
            if more.is_empty() && !end {
                // A server that gives nothing and says that there is more.
                return Err(Errno::IO);
            }
            all.extend_from_slice(&more);
            is_end = end;
        }
        Ok(all.freeze())
    }

    async fn read_once(
        &self,
        handle: &Handle,
        offset_bytes: u64,
        length_bytes: u32,
    ) -> Result<(Bytes, bool), Errno> {
        let mut arguments = with_handle(handle);
        arguments.u64(offset_bytes);
        arguments.u32(length_bytes);
        let mut results = call(&self.reads, READ, &arguments, None).await?;
        let (data, is_end) = decoded(read_results(&mut results, length_bytes))?;
        self.statistics.bytes_read_from_appliance.add_length(data.len());
        Ok((data, is_end))
    }

    /// Writes all of `data`. The verifier is `None` if it is durable already.
    pub(crate) async fn write(
        &self,
        handle: &Handle,
        offset_bytes: u64,
        data: Bytes,
        stability: Stability,
    ) -> Result<Option<Verifier>, Errno> {
        let mut rest = data;
        let mut offset_bytes = offset_bytes;
        let mut first_verifier = None;
        while !rest.is_empty() {
            let length = u32::try_from(rest.len()).map_err(|_| Errno::INVAL)?;
            let mut arguments = with_handle(handle);
            arguments.u64(offset_bytes);
            arguments.u32(length);
            arguments.u32(stability as u32);
            let mut results = call(&self.writes, WRITE, &arguments, Some(rest.clone())).await?;
            let (count, verifier) = decoded(write_results(&mut results))?;
            if count == 0 || count > length {
                return Err(Errno::IO);
            }
            self.statistics.bytes_written.add(u64::from(count));
            // Of several the first is the safe one: what came under an older verifier than
            // the commit's is sent again as a whole.
            first_verifier = first_verifier.or(verifier);
            offset_bytes += u64::from(count);
            rest = rest.slice(usize::try_from(count).unwrap_or(usize::MAX)..);
        }
        Ok(first_verifier)
    }

    /// Makes durable what was written to the file before.
    pub(crate) async fn commit(&self, handle: &Handle) -> Result<Verifier, Errno> {
        let mut arguments = with_handle(handle);
        let (from_the_start, to_the_end) = (0, 0);
        arguments.u64(from_the_start);
        arguments.u32(to_the_end);
        let mut results = call(&self.writes, COMMIT, &arguments, None).await?;
        self.statistics.commits.add(1);
        decoded(skip_change(&mut results).and_then(|()| results.array()))
    }

    pub(crate) async fn status(&self) -> Result<FileSystemStatus, Errno> {
        let root = self.root().await?;
        match self.status_of(&root).await {
            Err(Errno::ACCESS) => self.status_of(&self.root_after(&root).await?).await,
            outcome => outcome,
        }
    }

    async fn status_of(&self, root: &Handle) -> Result<FileSystemStatus, Errno> {
        let arguments = with_handle(root);
        let mut results = call(&self.reads, FILE_SYSTEM_STATUS, &arguments, None).await?;
        decoded(file_system_status(&mut results))
    }
}

/// Makes the call, and takes the status off its results.
async fn call(
    client: &RpcClient,
    procedure: Procedure,
    arguments: &Encoder,
    payload: Option<Bytes>,
) -> Result<Decoder, Errno> {
    loop {
        let outcome = client.call(procedure, &arguments.bytes, payload.clone()).await;
        let mut results = outcome.map_err(|error| {
            tracing::error!(%error, ?procedure, "the appliance cannot be talked to over NFS");
            match error {
                RpcError::Denied { .. } => Errno::ACCESS,
                RpcError::NotAccepted { .. } | RpcError::Malformed(_) | RpcError::Ended => {
                    Errno::IO
                }
            }
        })?;
        match decoded(results.u32())? {
            0 => return Ok(results),
            JUKEBOX => sleep(JUKEBOX_WAIT).await,
            status => return Err(errno_of(status)),
        }
    }
}

/// The system's number for an `nfsstat3`; those up to 99 are the same by design.
const fn errno_of(status: u32) -> Errno {
    match status {
        1 => Errno::PERM,
        2 => Errno::NOENT,
        13 => Errno::ACCESS,
        20 => Errno::NOTDIR,
        21 => Errno::ISDIR,
        22 => Errno::INVAL,
        27 => Errno::FBIG,
        28 => Errno::NOSPC,
        30 => Errno::ROFS,
        63 => Errno::NAMETOOLONG,
        69 => Errno::DQUOT,
        // A handle that is not one any more is as stale as one can be.
        70 | 10_001 => Errno::STALE,
        10_004 => Errno::OPNOTSUPP,
        _ => Errno::IO,
    }
}

fn decoded<T>(outcome: Result<T, Malformed>) -> Result<T, Errno> {
    outcome.map_err(|error| {
        tracing::error!(%error, "a reply of the appliance cannot be read");
        Errno::IO
    })
}

fn with_handle(handle: &Handle) -> Encoder {
    let mut arguments = Encoder::default();
    arguments.opaque(&handle.0);
    arguments
}

/// `fattr3`. A kind of object that is never served is the inner error.
fn attributes(results: &mut Decoder) -> Result<Result<Attributes, Errno>, Malformed> {
    let kind = results.u32()?;
    let mode = results.u32()? & 0o7777;
    let (links, uid, gid) = (results.u32()?, results.u32()?, results.u32()?);
    let (size_bytes, used_bytes) = (results.u64()?, results.u64()?);
    let _device_and_file_system = (results.u64()?, results.u64()?);
    let inode = results.u64()?;
    let mut time =
        || Ok::<_, Malformed>(Time { seconds: results.u32()?, nanoseconds: results.u32()? });
    let (accessed, modified, changed) = (time()?, time()?, time()?);
    let kind_mode = match kind {
        1 => MODE_FILE,
        2 => MODE_DIRECTORY,
        _ => return Ok(Err(Errno::NOENT)),
    };
    let mode = kind_mode | mode;
    Ok(Ok(Attributes {
        inode,
        size_bytes,
        used_bytes,
        accessed,
        modified,
        changed,
        mode,
        links,
        uid,
        gid,
    }))
}

fn optional_attributes(
    results: &mut Decoder,
) -> Result<Option<Result<Attributes, Errno>>, Malformed> {
    if results.bool()? { attributes(results).map(Some) } else { Ok(None) }
}

fn skip_attributes(results: &mut Decoder) -> Result<(), Malformed> {
    if results.bool()? { results.skip(ATTRIBUTES_BYTES) } else { Ok(()) }
}

/// `wcc_data`.
fn skip_change(results: &mut Decoder) -> Result<(), Malformed> {
    if results.bool()? {
        results.skip(ATTRIBUTES_BEFORE_BYTES)?;
    }
    skip_attributes(results)
}

fn read_results(results: &mut Decoder, length_bytes: u32) -> Result<(Bytes, bool), Malformed> {
    skip_attributes(results)?;
    let count = results.u32()?;
    let is_end = results.bool()?;
    let data = results.opaque(usize::try_from(length_bytes).unwrap_or(usize::MAX))?;
    if usize::try_from(count) == Ok(data.len()) { Ok((data, is_end)) } else { Err(Malformed) }
}

fn write_results(results: &mut Decoder) -> Result<(u32, Option<Verifier>), Malformed> {
    skip_change(results)?;
    let count = results.u32()?;
    let is_unstable = results.u32()? == Stability::Unstable as u32;
    let verifier = results.array()?;
    Ok((count, is_unstable.then_some(verifier)))
}

fn file_system_status(results: &mut Decoder) -> Result<FileSystemStatus, Malformed> {
    skip_attributes(results)?;
    Ok(FileSystemStatus {
        total_bytes: results.u64()?,
        free_bytes: results.u64()?,
        available_bytes: results.u64()?,
        files: results.u64()?,
        free_files: results.u64()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoder(words: &[u32]) -> Decoder {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
        Decoder::new(bytes.into())
    }

    const FILE: [u32; 21] =
        [1, 0o644, 1, 0, 7, 1, 4096, 0, 512, 0, 0, 0, 9, 0, 42, 100, 1, 200, 2, 300, 3];

    #[test]
    fn attributes_in_golden_words() {
        let got = attributes(&mut decoder(&FILE)).unwrap().unwrap();
        let time = |seconds, nanoseconds| Time { seconds, nanoseconds };
        let expected = Attributes {
            inode: 42,
            size_bytes: (1 << 32) + 4096,
            used_bytes: 512,
            accessed: time(100, 1),
            modified: time(200, 2),
            changed: time(300, 3),
            mode: MODE_FILE | 0o644,
            links: 1,
            uid: 0,
            gid: 7,
        };
        assert_eq!(got, expected);
        assert_eq!(FILE.len() * 4, ATTRIBUTES_BYTES);
        let socket = [[6].as_slice(), &FILE[1..]].concat();
        assert_eq!(attributes(&mut decoder(&socket)).unwrap(), Err(Errno::NOENT));
    }

    #[test]
    fn data_must_be_as_long_as_it_claims() {
        let words = [&[1], &FILE[..], &[4, 1, 4, 0x6162_6364]].concat();
        let (data, is_end) = read_results(&mut decoder(&words), 4).unwrap();
        assert_eq!((&data[..], is_end), (&b"abcd"[..], true));
        assert_eq!(read_results(&mut decoder(&words), 3), Err(Malformed), "more than asked for");
        assert_eq!(read_results(&mut decoder(&[0, 3, 1, 4, 0]), 4), Err(Malformed));
    }

    #[test]
    fn only_unstable_writes_have_a_verifier() {
        let before = [1, 0, 0, 0, 0, 0, 0];
        let words = |stable| [&before[..], &[1], &FILE[..], &[8, stable, 0, 5]].concat();
        let unstable = write_results(&mut decoder(&words(0))).unwrap();
        assert_eq!(unstable, (8, Some([0, 0, 0, 0, 0, 0, 0, 5])));
        assert_eq!(write_results(&mut decoder(&words(2))).unwrap(), (8, None));
    }

    #[test]
    fn real_errors_keep_their_meaning() {
        for (status, errno) in [
            (28, Errno::NOSPC),
            (70, Errno::STALE),
            (5, Errno::IO),
            (30, Errno::ROFS),
            (10_001, Errno::STALE),
            (10_006, Errno::IO),
        ] {
            assert_eq!(errno_of(status), errno, "{status}");
        }
    }
}
