//! Clients that must not hurt others: they say nothing, read or send a byte at a time, or go away
//! in the middle.
//!
//! Invariant: none of them answers for what it sees; whatever the server does to them is right,
//! as long as the good clients get their answers.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use serde::Serialize;
use slackwater_benches::wire::{Handle, LAST_FRAGMENT, Session, call, random_xid};

use super::target::EXPORT;

/// The slow ones move a byte in this time.
const BYTE_TIME: Duration = Duration::from_secs(1);

/// A connection that cannot be had in this time is tried again later.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);

/// READs that are asked for and not read, each of as many bytes as a READ has at most.
const READS: u32 = 64;
const READ_BYTES: u32 = 1 << 20;

/// What is sent of a WRITE of 1 MiB before it stops or trickles: enough for the server to have
/// set memory aside.
const RECORD_BYTES: u32 = 1 << 20;
const SENT_BYTES: usize = 100 << 10;

/// Between two connections of one who vanishes.
const PAUSE: Duration = Duration::from_millis(20);

/// How often those that say nothing begin again, once all are connected.
const SILENCE: Duration = Duration::from_secs(10);

/// What the hostile clients did.
#[derive(Debug, Default)]
pub(super) struct Done {
    pub(super) silent: AtomicU64,
    pub(super) slow_readers: AtomicU64,
    pub(super) slow_senders: AtomicU64,
    pub(super) vanished: AtomicU64,
}

/// The same as figures: connections of each kind.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Figures {
    silent: u64,
    slow_readers: u64,
    slow_senders: u64,
    vanished: u64,
}

impl Done {
    pub(super) fn figures(&self) -> Figures {
        let figure = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Figures {
            silent: figure(&self.silent),
            slow_readers: figure(&self.slow_readers),
            slow_senders: figure(&self.slow_senders),
            vanished: figure(&self.vanished),
        }
    }
}

/// Where they connect, and until when.
#[derive(Debug)]
pub(super) struct Scene<'a> {
    pub(super) nfs: SocketAddr,
    pub(super) api: SocketAddr,
    pub(super) is_over: &'a AtomicBool,
    pub(super) done: &'a Done,
}

impl Scene<'_> {
    fn over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    /// Waits, but not beyond the end.
    fn wait(&self, time: Duration) {
        let mut left = time;
        while !self.over() && !left.is_zero() {
            let step = left.min(Duration::from_millis(100));
            std::thread::sleep(step);
            left -= step;
        }
    }

    /// Opens that many connections to both faces, says nothing, and begins again after a while.
    pub(super) fn be_silent(&self, count: u32) {
        while !self.over() {
            let mut held = Vec::new();
            for number in 0..count {
                if self.over() {
                    return;
                }
                let address = if number % 4 == 3 { self.api } else { self.nfs };
                if let Ok(stream) = TcpStream::connect_timeout(&address, CONNECT_LIMIT) {
                    self.done.silent.fetch_add(1, Ordering::Relaxed);
                    held.push(stream);
                }
            }
            self.wait(SILENCE);
        }
    }

    /// Asks for far more than it reads.
    pub(super) fn read_slowly(&self) {
        while !self.over() {
            if let Some(mut stream) = self.ask_for_much() {
                self.done.slow_readers.fetch_add(1, Ordering::Relaxed);
                while !self.over() && matches!(stream.read(&mut [0]), Ok(1)) {
                    self.wait(BYTE_TIME);
                }
            }
            self.wait(PAUSE);
        }
    }

    fn ask_for_much(&self) -> Option<TcpStream> {
        let root = Session::mount(self.nfs, EXPORT).ok()?;
        let mut session = Session::connect(self.nfs).ok()?;
        let file = session.open(&root, "hostile").ok()?;
        session.set_size(&file, u64::from(READ_BYTES)).ok()?;
        let mut stream = session.into_stream();
        let mut calls = Vec::new();
        for number in 0..READS {
            call::read(&mut calls, random_xid().wrapping_add(number), &file, 0, READ_BYTES);
        }
        stream.write_all(&calls).ok()?;
        Some(stream)
    }

    /// Sends a WRITE of which the end comes a byte at a time.
    pub(super) fn send_slowly(&self) {
        while !self.over() {
            if let Some(mut stream) = self.begin_write() {
                self.done.slow_senders.fetch_add(1, Ordering::Relaxed);
                while !self.over() && stream.write_all(&[0]).is_ok() {
                    self.wait(BYTE_TIME);
                }
            }
            self.wait(PAUSE);
        }
    }

    /// Goes away in the middle of a WRITE, again and again.
    pub(super) fn vanish(&self) {
        while !self.over() {
            if self.begin_write().is_some() {
                self.done.vanished.fetch_add(1, Ordering::Relaxed);
            }
            self.wait(PAUSE);
        }
    }

    /// A connection with the beginning of a record.
    fn begin_write(&self) -> Option<TcpStream> {
        let mut stream = TcpStream::connect_timeout(&self.nfs, CONNECT_LIMIT).ok()?;
        stream.write_all(&(LAST_FRAGMENT | RECORD_BYTES).to_be_bytes()).ok()?;
        stream.write_all(&vec![0; SENT_BYTES]).ok()?;
        Some(stream)
    }
}

/// One call of a client that has just come: the time until it has its answer.
pub(super) fn knock(nfs: SocketAddr) -> Result<Handle, slackwater_benches::wire::WireError> {
    let root = Session::mount(nfs, EXPORT)?;
    let mut session = Session::connect(nfs)?;
    session.size(&root)?;
    Ok(root)
}
