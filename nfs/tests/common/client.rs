//! The client: one connection, one call at a time unless a test sends by itself.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::server::LIMIT;
use super::wire::{Args, Body, Fattr, SetAttr, Wcc};

/// Procedure numbers of RFC 1813 section 3.3.
pub mod proc {
    pub const NULL: u32 = 0;
    pub const GETATTR: u32 = 1;
    pub const SETATTR: u32 = 2;
    pub const LOOKUP: u32 = 3;
    pub const ACCESS: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const READ: u32 = 6;
    pub const WRITE: u32 = 7;
    pub const CREATE: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const SYMLINK: u32 = 10;
    pub const MKNOD: u32 = 11;
    pub const REMOVE: u32 = 12;
    pub const RMDIR: u32 = 13;
    pub const RENAME: u32 = 14;
    pub const LINK: u32 = 15;
    pub const READDIR: u32 = 16;
    pub const READDIRPLUS: u32 = 17;
    pub const FSSTAT: u32 = 18;
    pub const FSINFO: u32 = 19;
    pub const PATHCONF: u32 = 20;
    pub const COMMIT: u32 = 21;
}

pub const NFS: (u32, u32) = (100_003, 3);
pub const MOUNT: (u32, u32) = (100_005, 3);
pub const PORTMAP: (u32, u32) = (100_000, 2);

pub const UNSTABLE: u32 = 0;
pub const DATA_SYNC: u32 = 1;
pub const FILE_SYNC: u32 = 2;

/// A credential.
#[derive(Clone, Debug)]
pub enum Cred {
    None,
    Sys { uid: u32, gid: u32, groups: Vec<u32> },
}

impl Cred {
    pub fn user(uid: u32, gid: u32) -> Self {
        Self::Sys { uid, gid, groups: Vec::new() }
    }

    pub fn encode(&self, args: Args) -> Args {
        match self {
            Self::None => args.u32(0).u32(0),
            Self::Sys { uid, gid, groups } => {
                let count = u32::try_from(groups.len()).unwrap();
                let body = Args::new().u32(1).opaque(b"test").u32(*uid).u32(*gid).u32(count);
                let body = groups.iter().fold(body, |body, group| body.u32(*group));
                args.u32(1).opaque(&body.0)
            }
        }
    }
}

pub struct Client {
    pub stream: TcpStream,
    pub cred: Cred,
    next_xid: u32,
}

/// A call's bytes without the record mark.
pub fn call(xid: u32, program: (u32, u32), procedure: u32, cred: &Cred, args: &Args) -> Vec<u8> {
    let header = Args::new().u32(xid).u32(0).u32(2).u32(program.0).u32(program.1).u32(procedure);
    let mut call = cred.encode(header).u32(0).u32(0).0;
    call.extend_from_slice(&args.0);
    call
}

/// The bytes as a record of one fragment.
pub fn record(bytes: &[u8]) -> Vec<u8> {
    let mark = u32::try_from(bytes.len()).unwrap() | 1 << 31;
    [&mark.to_be_bytes(), bytes].concat()
}

impl Client {
    pub async fn connect(address: SocketAddr) -> Self {
        let stream = timeout(LIMIT, TcpStream::connect(address)).await.unwrap().unwrap();
        stream.set_nodelay(true).unwrap();
        Self { stream, cred: Cred::user(0, 0), next_xid: 1 }
    }

    /// The same client as another user.
    pub fn with(mut self, cred: Cred) -> Self {
        self.cred = cred;
        self
    }

    pub fn xid(&mut self) -> u32 {
        self.next_xid += 1;
        self.next_xid
    }

    pub async fn send(&mut self, bytes: &[u8]) {
        timeout(LIMIT, self.stream.write_all(bytes)).await.unwrap().unwrap();
    }

    /// The next record; the server sends each in one fragment.
    pub async fn receive(&mut self) -> Vec<u8> {
        let receive = async {
            let mark = self.stream.read_u32().await.unwrap();
            assert_ne!(mark & 1 << 31, 0, "one fragment");
            let length = usize::try_from(mark & !(1 << 31)).unwrap();
            let mut record = vec![0; length];
            self.stream.read_exact(&mut record).await.unwrap();
            record
        };
        timeout(LIMIT, receive).await.expect("a reply in time")
    }

    /// Whether the server closed the connection.
    pub async fn is_closed(&mut self) -> bool {
        let mut rest = Vec::new();
        let read = timeout(LIMIT, self.stream.read_to_end(&mut rest)).await;
        // A reset is a close too: bytes that the server did not read were on their way.
        read.is_ok_and(|read| read.is_err() || rest.is_empty())
    }

    /// Sends a call and takes the reply up to its accept status, which must be success.
    pub async fn run(&mut self, program: (u32, u32), procedure: u32, args: &Args) -> Body {
        let mut reply = self.reply(program, procedure, args).await;
        assert_eq!(reply.u32(), 0, "accepted");
        assert_eq!((reply.u32(), reply.u32()), (0, 0), "no verifier");
        assert_eq!(reply.u32(), 0, "success");
        reply
    }

    /// Sends a call and takes the reply up to its kind.
    pub async fn reply(&mut self, program: (u32, u32), procedure: u32, args: &Args) -> Body {
        let xid = self.xid();
        let bytes = call(xid, program, procedure, &self.cred, args);
        self.send(&record(&bytes)).await;
        let mut reply = Body::new(self.receive().await);
        assert_eq!((reply.u32(), reply.u32()), (xid, 1), "xid and type of the reply");
        reply
    }

    /// Runs an NFS procedure and takes its status.
    pub async fn nfs(&mut self, procedure: u32, args: &Args) -> (u32, Body) {
        let mut body = self.run(NFS, procedure, args).await;
        let status = body.u32();
        (status, body)
    }

    /// Mounts the path.
    pub async fn mount(&mut self, path: &[u8]) -> Result<Vec<u8>, u32> {
        let mut body = self.run(MOUNT, 1, &Args::new().opaque(path)).await;
        match body.u32() {
            0 => {
                let handle = body.opaque();
                assert_eq!((body.u32(), body.u32()), (1, 1), "AUTH_SYS");
                body.end();
                Ok(handle)
            }
            status => {
                body.end();
                Err(status)
            }
        }
    }

    /// The root directory.
    pub async fn root(&mut self) -> Vec<u8> {
        self.mount(b"/slackwater").await.unwrap()
    }

    pub async fn getattr(&mut self, handle: &[u8]) -> Result<Fattr, u32> {
        match self.nfs(proc::GETATTR, &Args::new().opaque(handle)).await {
            (0, mut body) => {
                let attributes = body.fattr();
                body.end();
                Ok(attributes)
            }
            (status, body) => {
                body.end();
                Err(status)
            }
        }
    }

    pub async fn lookup(&mut self, directory: &[u8], name: &[u8]) -> Result<Vec<u8>, u32> {
        match self.nfs(proc::LOOKUP, &Args::new().place(directory, name)).await {
            (0, mut body) => {
                let handle = body.opaque();
                assert!(body.post_op().is_some() && body.post_op().is_some());
                body.end();
                Ok(handle)
            }
            (status, mut body) => {
                body.post_op();
                body.end();
                Err(status)
            }
        }
    }

    /// SETATTR without a guard.
    pub async fn setattr(&mut self, handle: &[u8], set: &SetAttr) -> Result<Wcc, u32> {
        let args = Args::new().opaque(handle).set(set).u32(0);
        let (status, body) = self.nfs(proc::SETATTR, &args).await;
        changed(status, body)
    }

    /// Results of CREATE, MKDIR, SYMLINK or MKNOD: the handle.
    pub async fn make(&mut self, procedure: u32, args: &Args) -> Result<Vec<u8>, u32> {
        match self.nfs(procedure, args).await {
            (0, mut body) => {
                let handle = body.post_op_handle().unwrap();
                assert!(body.post_op().is_some());
                let wcc = body.wcc();
                assert!(wcc.before.is_some() && wcc.after.is_some());
                body.end();
                Ok(handle)
            }
            (status, mut body) => {
                body.wcc();
                body.end();
                Err(status)
            }
        }
    }

    /// CREATE, GUARDED.
    pub async fn create(&mut self, directory: &[u8], name: &[u8]) -> Result<Vec<u8>, u32> {
        let args = Args::new().place(directory, name).u32(1).set(&SetAttr::mode(0o644));
        self.make(proc::CREATE, &args).await
    }

    pub async fn mkdir(
        &mut self,
        directory: &[u8],
        name: &[u8],
        mode: u32,
    ) -> Result<Vec<u8>, u32> {
        let args = Args::new().place(directory, name).set(&SetAttr::mode(mode));
        self.make(proc::MKDIR, &args).await
    }

    /// REMOVE or RMDIR.
    pub async fn unlink(
        &mut self,
        procedure: u32,
        directory: &[u8],
        name: &[u8],
    ) -> Result<Wcc, u32> {
        let (status, body) = self.nfs(procedure, &Args::new().place(directory, name)).await;
        changed(status, body)
    }

    pub async fn remove(&mut self, directory: &[u8], name: &[u8]) -> Result<Wcc, u32> {
        self.unlink(proc::REMOVE, directory, name).await
    }

    pub async fn rename(
        &mut self,
        from: (&[u8], &[u8]),
        to: (&[u8], &[u8]),
    ) -> Result<(Wcc, Wcc), u32> {
        let args = Args::new().place(from.0, from.1).place(to.0, to.1);
        let (status, mut body) = self.nfs(proc::RENAME, &args).await;
        let sides = (body.wcc(), body.wcc());
        body.end();
        if status == 0 { Ok(sides) } else { Err(status) }
    }

    pub async fn write(
        &mut self,
        handle: &[u8],
        offset: u64,
        data: &[u8],
        stable: u32,
    ) -> Result<Wrote, u32> {
        let (status, mut body) =
            self.nfs(proc::WRITE, &write_args(handle, offset, data, stable)).await;
        let wcc = body.wcc();
        if status != 0 {
            body.end();
            return Err(status);
        }
        let wrote = Wrote { wcc, count: body.u32(), committed: body.u32(), verifier: body.u64() };
        body.end();
        Ok(wrote)
    }

    /// The verifier that COMMIT answers.
    pub async fn commit(&mut self, handle: &[u8]) -> Result<u64, u32> {
        let (status, mut body) =
            self.nfs(proc::COMMIT, &Args::new().opaque(handle).u64(0).u32(0)).await;
        body.wcc();
        if status != 0 {
            body.end();
            return Err(status);
        }
        let verifier = body.u64();
        body.end();
        Ok(verifier)
    }

    /// The bytes, and whether the end of the file was reached.
    pub async fn read(
        &mut self,
        handle: &[u8],
        offset: u64,
        count: u32,
    ) -> Result<(Vec<u8>, bool), u32> {
        let args = Args::new().opaque(handle).u64(offset).u32(count);
        let (status, mut body) = self.nfs(proc::READ, &args).await;
        let attributes = body.post_op();
        if status != 0 {
            body.end();
            return Err(status);
        }
        assert!(attributes.is_some());
        let (count, is_end) = (body.u32(), body.bool());
        let data = body.opaque();
        assert_eq!(usize::try_from(count).unwrap(), data.len());
        body.end();
        Ok((data, is_end))
    }
}

/// What WRITE answers.
#[derive(Clone, Copy, Debug)]
pub struct Wrote {
    pub wcc: Wcc,
    pub count: u32,
    pub committed: u32,
    pub verifier: u64,
}

/// Arguments of WRITE.
pub fn write_args(handle: &[u8], offset: u64, data: &[u8], stable: u32) -> Args {
    let count = u32::try_from(data.len()).unwrap();
    Args::new().opaque(handle).u64(offset).u32(count).u32(stable).opaque(data)
}

/// Results that are a status and `wcc_data`.
fn changed(status: u32, mut body: Body) -> Result<Wcc, u32> {
    let wcc = body.wcc();
    body.end();
    if status == 0 { Ok(wcc) } else { Err(status) }
}
