//! The few NFSv3 calls that end-to-end tests make, as bytes on a socket (RFC 1813, RFC 5531).
//! Every status but success panics.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use super::connect;

pub const NFS: u32 = 100_003;
pub const MOUNT: u32 = 100_005;
const LOOKUP: u32 = 3;
const READ: u32 = 6;
const WRITE: u32 = 7;
const COMMIT: u32 = 21;
const GETATTR: u32 = 1;
const CREATE: u32 = 8;
const REMOVE: u32 = 12;

/// The superuser.
const ROOT: u32 = 0;

/// The status of success (section 2.6).
pub const OK: u32 = 0;

/// Has a server be mounted by address, for tests of what is no question of who mounts.
pub const BY_ADDRESS: [&str; 2] = ["--insecure-address-only", "true"];

/// A file handle.
pub type Handle = Vec<u8>;

/// One connection, one call at a time.
pub struct Client {
    stream: TcpStream,
    xid: u32,
}

impl Client {
    pub fn connect(address: SocketAddr) -> Self {
        Self { stream: connect(address), xid: 0 }
    }

    /// MNT (section 5.2.1): the handle of an export.
    pub fn mount(&mut self, path: &str) -> Handle {
        self.try_mount(path).unwrap_or_else(|status| panic!("MNT: status {status}"))
    }

    /// MNT; the handle, or the status that is not success.
    pub fn try_mount(&mut self, path: &str) -> Result<Handle, u32> {
        let mut reply = self.call(MOUNT, 1, |call| opaque(call, path.as_bytes()));
        match reply.word() {
            OK => Ok(reply.opaque()),
            status => Err(status),
        }
    }

    /// LOOKUP (section 3.3.3).
    pub fn lookup(&mut self, directory: &[u8], name: &str) -> Handle {
        let status = self.try_lookup(directory, name);
        status.unwrap_or_else(|status| panic!("LOOKUP {name}: status {status}"))
    }

    /// LOOKUP; the handle, or the status that is not success.
    pub fn try_lookup(&mut self, directory: &[u8], name: &str) -> Result<Handle, u32> {
        let mut reply = self.call(NFS, LOOKUP, |call| {
            opaque(call, directory);
            opaque(call, name.as_bytes());
        });
        match reply.word() {
            OK => Ok(reply.opaque()),
            status => Err(status),
        }
    }

    /// WRITE (section 3.3.7), unstable.
    pub fn write(&mut self, file: &[u8], offset_bytes: u64, data: &[u8]) {
        assert!(self.try_write(file, offset_bytes, data).is_ok(), "WRITE");
    }

    /// WRITE, unstable; the write verifier, or the status that is not success.
    pub fn try_write(&mut self, file: &[u8], offset_bytes: u64, data: &[u8]) -> Result<u64, u32> {
        let mut reply =
            self.call(NFS, WRITE, |call| write_arguments(call, file, offset_bytes, data));
        reply.check()?;
        reply.skip_wcc();
        assert_eq!(reply.word(), u32::try_from(data.len()).unwrap(), "short WRITE");
        let _stable = reply.word();
        Ok(reply.double())
    }

    /// COMMIT of the whole file; the write verifier, or the status that is not success.
    pub fn try_commit(&mut self, file: &[u8]) -> Result<u64, u32> {
        let mut reply = self.call(NFS, COMMIT, |call| {
            opaque(call, file);
            call.extend([0; 12]);
        });
        reply.check()?;
        reply.skip_wcc();
        Ok(reply.double())
    }

    /// GETATTR (section 3.3.1): its status.
    pub fn getattr(&mut self, file: &[u8]) -> u32 {
        self.call(NFS, GETATTR, |call| opaque(call, file)).word()
    }

    /// CREATE of an empty file (section 3.3.8), unchecked: its status.
    pub fn create(&mut self, directory: &[u8], name: &str) -> u32 {
        let mut reply = self.call(NFS, CREATE, |call| {
            opaque(call, directory);
            opaque(call, name.as_bytes());
            // Unchecked, and no attribute is set.
            call.extend([0; 28]);
        });
        reply.word()
    }

    /// REMOVE (section 3.3.12): its status.
    pub fn remove(&mut self, directory: &[u8], name: &str) -> u32 {
        let mut reply = self.call(NFS, REMOVE, |call| {
            opaque(call, directory);
            opaque(call, name.as_bytes());
        });
        reply.word()
    }

    /// Sends the WRITE that [`Client::try_write`] sent last, once more, as a client does that heard
    /// nothing: with the same transaction id.
    pub fn resend_write(&mut self, xid: u32, file: &[u8], offset_bytes: u64, data: &[u8]) {
        let call = encode(xid, ROOT, (NFS, 3, WRITE), |call| {
            write_arguments(call, file, offset_bytes, data)
        });
        self.stream.write_all(&call).unwrap();
    }

    /// Sends a REMOVE and does not wait for its reply: the server may be killed before that. An error
    /// when the connection is gone.
    pub fn send_remove(&mut self, directory: &[u8], name: &str) -> std::io::Result<()> {
        self.xid += 1;
        let call = encode(self.xid, ROOT, (NFS, 3, REMOVE), |call| {
            opaque(call, directory);
            opaque(call, name.as_bytes());
        });
        self.stream.write_all(&call)
    }

    /// Takes a reply: its transaction id, and the status that its results begin with.
    pub fn take_status(&mut self) -> (u32, u32) {
        let mut reply = self.receive();
        let head: [u32; 6] = std::array::from_fn(|_| reply.word());
        assert_eq!(head[1..], [1, 0, 0, 0, 0], "the call was not accepted");
        (head[0], reply.word())
    }

    /// READ (section 3.3.6).
    pub fn read(&mut self, file: &[u8], offset_bytes: u64, length_bytes: u32) -> Vec<u8> {
        let mut reply = self.call(NFS, READ, |call| {
            opaque(call, file);
            call.extend(offset_bytes.to_be_bytes());
            call.extend(length_bytes.to_be_bytes());
        });
        reply.expect_ok("READ");
        reply.skip_attributes();
        let _count = reply.word();
        let _end = reply.word();
        reply.opaque()
    }

    /// COMMIT (section 3.3.21) of the whole file.
    pub fn commit(&mut self, file: &[u8]) {
        assert!(self.try_commit(file).is_ok(), "COMMIT");
    }

    /// Sends a call as root and takes its reply.
    fn call(
        &mut self,
        program: u32,
        procedure: u32,
        arguments: impl FnOnce(&mut Vec<u8>),
    ) -> Reply {
        self.xid += 1;
        let call = encode(self.xid, ROOT, (program, 3, procedure), arguments);
        self.stream.write_all(&call).unwrap();
        let mut reply = self.receive();
        let head: [u32; 6] = std::array::from_fn(|_| reply.word());
        assert_eq!(head, [self.xid, 1, 0, 0, 0, 0], "the call was not accepted");
        reply
    }

    fn receive(&mut self) -> Reply {
        let mut mark = [0; 4];
        self.stream.read_exact(&mut mark).unwrap();
        let mark = u32::from_be_bytes(mark);
        assert!(mark & 0x8000_0000 != 0, "replies of one fragment are expected");
        let mut bytes = vec![0; usize::try_from(mark & 0x7fff_ffff).unwrap()];
        self.stream.read_exact(&mut bytes).unwrap();
        Reply { bytes, position: 0 }
    }
}

/// A call of program, version and procedure by a user, as a record.
pub fn encode(
    xid: u32,
    uid: u32,
    (program, version, procedure): (u32, u32, u32),
    arguments: impl FnOnce(&mut Vec<u8>),
) -> Vec<u8> {
    let mut call = vec![0; 4];
    for word in [xid, 0, 2, program, version, procedure] {
        call.extend(word.to_be_bytes());
    }
    // AUTH_SYS: stamp, empty machine name, uid, gid, no further groups.
    for word in [1_u32, 20, 0, 0, uid, uid, 0, 0, 0] {
        call.extend(word.to_be_bytes());
    }
    arguments(&mut call);
    let mark = 0x8000_0000 | u32::try_from(call.len() - 4).unwrap();
    call[..4].copy_from_slice(&mark.to_be_bytes());
    call
}

fn write_arguments(call: &mut Vec<u8>, file: &[u8], offset_bytes: u64, data: &[u8]) {
    opaque(call, file);
    call.extend(offset_bytes.to_be_bytes());
    call.extend(u32::try_from(data.len()).unwrap().to_be_bytes());
    call.extend(0_u32.to_be_bytes());
    opaque(call, data);
}

/// A reply that is being decoded.
struct Reply {
    bytes: Vec<u8>,
    position: usize,
}

impl Reply {
    fn take(&mut self, length: usize) -> &[u8] {
        let start = self.position;
        self.position += length;
        &self.bytes[start..self.position]
    }

    fn word(&mut self) -> u32 {
        u32::from_be_bytes(self.take(4).try_into().unwrap())
    }

    fn double(&mut self) -> u64 {
        u64::from_be_bytes(self.take(8).try_into().unwrap())
    }

    /// The status, where it is not success.
    fn check(&mut self) -> Result<(), u32> {
        match self.word() {
            OK => Ok(()),
            status => Err(status),
        }
    }

    fn opaque(&mut self) -> Vec<u8> {
        let length = usize::try_from(self.word()).unwrap();
        let bytes = self.take(length).to_vec();
        self.take(length.next_multiple_of(4) - length);
        bytes
    }

    fn expect_ok(&mut self, what: &str) {
        assert_eq!(self.word(), 0, "status of {what}");
    }

    /// `post_op_attr`: 84 bytes if present (section 2.6).
    fn skip_attributes(&mut self) {
        if self.word() == 1 {
            self.take(84);
        }
    }

    /// `wcc_data`: 24 bytes before, if present, and attributes after.
    fn skip_wcc(&mut self) {
        if self.word() == 1 {
            self.take(24);
        }
        self.skip_attributes();
    }
}

/// Appends variable-length opaque data, padded (RFC 4506 section 4.10).
pub fn opaque(call: &mut Vec<u8>, bytes: &[u8]) {
    call.extend(u32::try_from(bytes.len()).unwrap().to_be_bytes());
    call.extend(bytes);
    call.resize(call.len().next_multiple_of(4), 0);
}
