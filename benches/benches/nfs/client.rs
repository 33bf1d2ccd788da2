//! Calls on one connection, up to a depth of them in flight; each answer is checked for success
//! and no further.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use slackwater_benches::wire::reply::Reply;
use slackwater_benches::wire::{Handle, LAST_FRAGMENT, Session};

/// One connection.
pub(crate) struct Client {
    stream: TcpStream,
    xid: u32,
    call: Vec<u8>,
    record: Vec<u8>,
}

impl Client {
    /// Connects; answers also the handles of files and folders at the root.
    pub(crate) fn connect<const COUNT: usize>(
        address: SocketAddr,
        names: [&str; COUNT],
    ) -> (Self, Handle, [Handle; COUNT]) {
        let root = Session::mount(address, "/slackwater").expect("the export");
        let mut session = Session::connect(address).expect("a connection");
        let handles = names.map(|name| session.open(&root, name).expect("a file"));
        let stream = session.into_stream();
        (Self { stream, xid: 0, call: Vec::new(), record: Vec::new() }, root, handles)
    }

    /// One call.
    pub(crate) fn call(&mut self, encode: impl FnOnce(&mut Vec<u8>, u32)) {
        self.send(encode);
        self.receive();
    }

    /// The last word of the latest answer: of READDIRPLUS, whether the directory ends there.
    pub(crate) fn last_word(&self) -> u32 {
        let bytes = self.record.last_chunk().expect("an answer");
        u32::from_be_bytes(*bytes)
    }

    /// That many calls, `depth` of them in flight. `encode` is given the number of the call.
    pub(crate) fn calls(
        &mut self,
        (count, depth): (u64, u64),
        mut encode: impl FnMut(&mut Vec<u8>, u32, u64),
    ) {
        for number in 0..count {
            self.send(|out, xid| encode(out, xid, number));
            if number + 1 >= depth {
                self.receive();
            }
        }
        for _ in 0..count.min(depth - 1) {
            self.receive();
        }
    }

    fn send(&mut self, encode: impl FnOnce(&mut Vec<u8>, u32)) {
        // The server keeps replies by xid: none comes twice.
        self.xid = self.xid.wrapping_add(1);
        self.call.clear();
        encode(&mut self.call, self.xid);
        self.stream.write_all(&self.call).expect("the call was sent");
    }

    /// Takes the next answer, which must be of a success.
    fn receive(&mut self) {
        let mut mark = [0; 4];
        self.stream.read_exact(&mut mark).expect("an answer in time");
        let mark = u32::from_be_bytes(mark);
        assert_ne!(mark & LAST_FRAGMENT, 0, "an answer of several fragments");
        self.record.resize(usize::try_from(mark & !LAST_FRAGMENT).expect("64 bits"), 0);
        self.stream.read_exact(&mut self.record).expect("a whole answer");
        let reply = Reply::parse(&self.record).expect("an answer");
        reply.done("call of a bench").expect("success");
    }
}
