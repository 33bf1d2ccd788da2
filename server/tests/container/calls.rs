//! What a hostile container sends: calls of NFS, MOUNT and PORTMAP as bytes, chosen or by chance.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};

use crate::common::connect;
use crate::common::nfs::{MOUNT, NFS, encode, opaque};
use crate::random::Random;

const PORTMAP: u32 = 100_000;

/// Largest reply that is read: a READ or READDIRPLUS of one MiB and more.
const REPLY_BYTES_MAX: usize = 4 << 20;

/// A call: program, procedure, arguments.
#[derive(Clone, Debug)]
pub struct Call {
    pub program: u32,
    pub procedure: u32,
    pub arguments: Vec<u8>,
}

impl Call {
    /// MNT (RFC 1813 section 5.2.1).
    pub fn mount(path: &str) -> Self {
        let mut arguments = Vec::new();
        opaque(&mut arguments, path.as_bytes());
        Self { program: MOUNT, procedure: 1, arguments }
    }

    /// Any call on one of these handles, with one of these names, or on neither.
    pub fn by_chance(random: &mut Random, handles: &[Vec<u8>], names: &[String]) -> Self {
        let (program, procedures) = *random.pick(&[(NFS, 22), (NFS, 22), (MOUNT, 6), (PORTMAP, 5)]);
        let procedure = u32::try_from(random.below(procedures)).unwrap();
        let mut arguments = Vec::new();
        for _ in 0..random.below(5) {
            match random.below(5) {
                0 | 1 => opaque(&mut arguments, random.pick(handles).as_slice()),
                2 => opaque(&mut arguments, random.pick(names).as_bytes()),
                3 => arguments.extend(u32::try_from(random.below(4)).unwrap().to_be_bytes()),
                _ => {
                    let length = 4 * random.below(20);
                    arguments.extend(random.bytes(length));
                }
            }
        }
        Self { program, procedure, arguments }
    }

    /// Whether it is for all who reach the server: NULL, lists of exports and ports, and taking its own lines off the list
    /// of mounts.
    pub fn is_open(&self) -> bool {
        self.procedure == 0
            || self.program == PORTMAP
            || self.program == MOUNT && [2, 3, 4, 5].contains(&self.procedure)
    }
}

/// A connection that is made again when the server ends it.
pub struct Caller {
    address: SocketAddr,
    stream: Option<TcpStream>,
    xid: u32,
    uid: u32,
}

impl Caller {
    /// One that claims to be this user. The first transaction id is one that no other caller has used: what was answered
    /// is not answered from memory.
    pub fn new(address: SocketAddr, uid: u32, random: &mut Random) -> Self {
        let xid = u32::try_from(random.draw() >> 33).unwrap();
        Self { address, stream: None, xid, uid }
    }

    /// Sends a call; the reply behind its transaction id, or nothing if the server ends the connection.
    pub fn send(&mut self, call: &Call) -> Option<Vec<u8>> {
        self.xid += 1;
        let version = if call.program == PORTMAP { 2 } else { 3 };
        let procedure = (call.program, version, call.procedure);
        let record = encode(self.xid, self.uid, procedure, |to| to.extend(&call.arguments));
        let mut stream = self.stream.take().unwrap_or_else(|| connect(self.address));
        let ended = |error: &std::io::Error| {
            let kinds = [ErrorKind::WouldBlock, ErrorKind::TimedOut];
            assert!(!kinds.contains(&error.kind()), "{call:?} is never answered");
        };
        stream.write_all(&record).inspect_err(ended).ok()?;
        let mut head = [0; 8];
        stream.read_exact(&mut head).inspect_err(ended).ok()?;
        let mark = u32::from_be_bytes(head[..4].try_into().unwrap());
        assert_eq!(head[4..], self.xid.to_be_bytes());
        let length = usize::try_from(mark & 0x7fff_ffff).unwrap() - 4;
        assert!(mark & 0x8000_0000 != 0 && length < REPLY_BYTES_MAX, "{mark:x}");
        let mut reply = vec![0; length];
        stream.read_exact(&mut reply).unwrap();
        self.stream = Some(stream);
        Some(reply)
    }
}

/// The status that the results begin with, if the call was accepted and carried out (RFC 5531 section 9).
pub fn status(reply: &[u8]) -> Option<u32> {
    let words: Vec<u32> =
        reply.chunks_exact(4).map(|word| u32::from_be_bytes(word.try_into().unwrap())).collect();
    // REPLY, MSG_ACCEPTED, a verifier of nothing, SUCCESS.
    matches!(words.get(..5), Some([1, 0, 0, 0, 0])).then(|| words.get(5).copied())?
}
