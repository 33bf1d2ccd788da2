//! One call after the other on one connection, waiting for each answer, or several at once.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use super::reply::Reply;
use super::{Handle, LAST_FRAGMENT, WireError, call};

/// Longest answer: a READ of 1 MiB with what is around it.
const REPLY_BYTES_MAX: usize = (1 << 20) + 4096;

/// Longest wait for a connection, and for more of an answer: a busy disk takes seconds, that of an
/// emulated machine several times as many.
const PATIENCE: Duration = Duration::from_secs(180);

/// A connection to an NFS server.
#[derive(Debug)]
pub struct Session {
    stream: TcpStream,
    xid: u32,
    out: Vec<u8>,
    record: Vec<u8>,
}

impl Session {
    /// Connects.
    ///
    /// # Errors
    /// No server is there.
    pub fn connect(address: SocketAddr) -> Result<Self, WireError> {
        let connect = || {
            let stream = TcpStream::connect_timeout(&address, PATIENCE)?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.set_write_timeout(Some(PATIENCE))?;
            Ok(stream)
        };
        let stream = connect().map_err(|source| WireError::Connect { address, source })?;
        Ok(Self { stream, xid: random_xid(), out: Vec::new(), record: Vec::new() })
    }

    /// The handle of an export's root, from the MOUNT server at that address.
    ///
    /// # Errors
    /// The server's, or those of the connection; so with all others.
    pub fn mount(address: SocketAddr, export: &str) -> Result<Handle, WireError> {
        let mut session = Self::connect(address)?;
        session.call(|out, xid| call::mount(out, xid, export))?.mount()
    }

    /// The handle of a file, which is made if it is not there.
    ///
    /// # Errors
    /// As [`Session::mount`].
    pub fn open(&mut self, directory: &Handle, name: &str) -> Result<Handle, WireError> {
        let found = self.call(|out, xid| call::lookup(out, xid, directory, name))?.lookup()?;
        if let Some(file) = found {
            return Ok(file);
        }
        let made =
            self.call(|out, xid| call::create(out, xid, directory, name))?.create("CREATE")?;
        if let Some(file) = made {
            return Ok(file);
        }
        let found = self.call(|out, xid| call::lookup(out, xid, directory, name))?.lookup()?;
        found.ok_or(WireError::Truncated { what: "handle" })
    }

    /// The handle of a directory, which is made if it is not there.
    ///
    /// # Errors
    /// As [`Session::mount`].
    pub fn open_directory(&mut self, parent: &Handle, name: &str) -> Result<Handle, WireError> {
        let found = self.call(|out, xid| call::lookup(out, xid, parent, name))?.lookup()?;
        if let Some(directory) = found {
            return Ok(directory);
        }
        self.call(|out, xid| call::make_directory(out, xid, parent, name))?.create("MKDIR")?;
        let found = self.call(|out, xid| call::lookup(out, xid, parent, name))?.lookup()?;
        found.ok_or(WireError::Truncated { what: "handle" })
    }

    /// The size of a file.
    ///
    /// # Errors
    /// As [`Session::mount`].
    pub fn size(&mut self, file: &Handle) -> Result<u64, WireError> {
        self.call(|out, xid| call::get_attributes(out, xid, file))?.size()
    }

    /// Gives a file a size.
    ///
    /// # Errors
    /// As [`Session::mount`].
    pub fn set_size(&mut self, file: &Handle, size_bytes: u64) -> Result<(), WireError> {
        self.call(|out, xid| call::set_size(out, xid, file, size_bytes))?.done("SETATTR")
    }

    /// Removes a file.
    ///
    /// # Errors
    /// As [`Session::mount`].
    pub fn remove(&mut self, directory: &Handle, name: &str) -> Result<(), WireError> {
        self.call(|out, xid| call::remove(out, xid, directory, name))?.done("REMOVE")
    }

    /// Sends what `encode` appends for the call of the given number, and waits for the answer.
    ///
    /// # Errors
    /// As [`Session::mount`].
    pub fn call(&mut self, encode: impl FnOnce(&mut Vec<u8>, u32)) -> Result<Reply<'_>, WireError> {
        let xid = self.send(encode)?;
        let reply = self.receive()?;
        if reply.xid != xid {
            let (got, expected) = (u64::from(reply.xid), u64::from(xid));
            return Err(WireError::Unexpected { what: "xid", got, expected });
        }
        Ok(reply)
    }

    /// Sends what `encode` appends, and answers its number without waiting for the answer.
    ///
    /// # Errors
    /// Those of the connection.
    pub fn send(&mut self, encode: impl FnOnce(&mut Vec<u8>, u32)) -> Result<u32, WireError> {
        self.xid = self.xid.wrapping_add(1);
        self.out.clear();
        encode(&mut self.out, self.xid);
        self.stream.write_all(&self.out).map_err(silence_or)?;
        Ok(self.xid)
    }

    /// The next answer, to whichever of the calls that were sent.
    ///
    /// # Errors
    /// As [`Session::mount`].
    pub fn receive(&mut self) -> Result<Reply<'_>, WireError> {
        self.receive_record()?;
        Reply::parse(&self.record)
    }

    /// The connection, on which nothing is under way.
    #[must_use]
    pub fn into_stream(self) -> TcpStream {
        self.stream
    }

    /// Reads one record, of any number of fragments.
    fn receive_record(&mut self) -> Result<(), WireError> {
        self.record.clear();
        loop {
            let mut mark = [0; 4];
            self.stream.read_exact(&mut mark).map_err(silence_or)?;
            let mark = u32::from_be_bytes(mark);
            let length = usize::try_from(mark & !LAST_FRAGMENT).unwrap_or(usize::MAX >> 1);
            let start = self.record.len();
            if start + length > REPLY_BYTES_MAX {
                let (got, expected) = ((start + length) as u64, REPLY_BYTES_MAX as u64);
                return Err(WireError::Unexpected { what: "length", got, expected });
            }
            self.record.resize(start + length, 0);
            self.stream.read_exact(&mut self.record[start..]).map_err(silence_or)?;
            if mark & LAST_FRAGMENT != 0 {
                return Ok(());
            }
        }
    }
}

/// The error of a stream: that of one who gave up waiting is told as such.
fn silence_or(error: std::io::Error) -> WireError {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => WireError::Silent { patience: PATIENCE },
        _ => error.into(),
    }
}

/// Where the xids of a connection begin. A server may take a call for one sent again, and give
/// no answer or an old one, if an earlier connection from the same port had the same xids.
#[must_use]
pub fn random_xid() -> u32 {
    // The standard library's only source of chance.
    let word = RandomState::new().build_hasher().finish().to_be_bytes();
    u32::from_be_bytes([word[0], word[1], word[2], word[3]])
}
