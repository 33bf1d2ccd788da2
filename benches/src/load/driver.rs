//! Drives all connections from one thread: waits, receives, sends.

use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use slackwater_benches::wire::Handle;

use crate::failure::Failure;
use crate::stop::Stop;

use super::inbound::{HEAD_BYTES, Inbound};
use super::lane::{Lane, Shared};
use super::tally::Measured;
use super::{Amount, CommitPace, Load};

/// What is received by one system call at most. Small enough to stay in the processor's caches.
const RECEIVE_BYTES: usize = 256 << 10;

/// How often it is looked whether to end while nothing arrives.
const POLL_NANOSECONDS: i64 = 50_000_000;

/// Longest time without any answer.
const PATIENCE: Duration = Duration::from_secs(60);

/// Time between two COMMITs of [`CommitPace::EverySecond`].
const COMMIT_PAUSE: Duration = Duration::from_secs(1);

/// All connections of a run.
#[derive(Debug)]
pub(super) struct Driver<'a> {
    connections: Vec<Connection>,
    shared: Shared<'a>,
    scratch: Vec<u8>,
    /// When an answer came last.
    heard: Instant,
}

#[derive(Debug)]
struct Connection {
    stream: TcpStream,
    inbound: Inbound,
    lane: Lane,
}

impl<'a> Driver<'a> {
    /// A driver of connections that have the file of their handle to work on.
    pub(super) fn new(load: &'a Load, streams: Vec<(TcpStream, Handle)>) -> Result<Self, Failure> {
        let head_bytes = if load.is_verified { HEAD_BYTES + load.block_bytes } else { HEAD_BYTES };
        let now = Instant::now();
        let mut connections = Vec::new();
        for (number, (stream, file)) in (0..).zip(streams) {
            stream.set_nonblocking(true).map_err(Failure::on("set up a connection"))?;
            let (inbound, lane) = (Inbound::new(head_bytes), Lane::new(load, number, file, now));
            connections.push(Connection { stream, inbound, lane });
        }
        let (shared, scratch) = (Shared::new(load), vec![0; RECEIVE_BYTES]);
        Ok(Self { connections, shared, scratch, heard: now })
    }

    /// Does all of the work.
    pub(super) fn run(mut self, stop: &Stop) -> Result<Measured, Failure> {
        let start = Instant::now();
        self.heard = start;
        if let Amount::Time(time) = self.shared.load.amount {
            self.shared.deadline = Some(start + time);
        }
        for connection in &mut self.connections {
            connection.lane.begin_all(&mut self.shared, start);
        }
        let mut committed = start;
        while !self.is_idle() {
            self.turn(stop)?;
            let is_paced = self.shared.load.commit == CommitPace::EverySecond;
            if is_paced && self.is_unstable() && self.heard - committed >= COMMIT_PAUSE {
                committed = self.heard;
                self.flush();
            }
        }
        if self.is_unstable() {
            self.flush();
            while !self.is_idle() {
                self.turn(stop)?;
            }
        }
        Ok(self.shared.tally.measured(self.shared.load.block_bytes, start.elapsed()))
    }

    fn is_idle(&self) -> bool {
        self.connections.iter().all(|connection| connection.lane.is_idle())
    }

    /// Whether something was written that only a COMMIT makes durable.
    fn is_unstable(&self) -> bool {
        self.connections.iter().any(|connection| connection.lane.is_unstable)
    }

    /// One COMMIT of the file, on one connection.
    fn flush(&mut self) {
        if let Some(connection) = self.connections.first_mut() {
            connection.lane.flush(self.heard);
        }
    }

    /// Sends what can be sent, waits, and takes what has come.
    fn turn(&mut self, stop: &Stop) -> Result<(), Failure> {
        stop.check()?;
        let fill = self.shared.fill.as_ref().map_or(&[][..], |fill| fill.bytes());
        for Connection { stream, lane, .. } in &mut self.connections {
            lane.outbound.send(stream, fill).map_err(Failure::on("send calls"))?;
        }
        let ready = wait(&self.connections)?;
        let now = Instant::now();
        if now - self.heard > PATIENCE {
            let what = format!("the server gave no answer for {} s", PATIENCE.as_secs());
            return Err(Failure::Unfit(what));
        }
        for index in ready {
            self.receive(index)?;
        }
        Ok(())
    }

    /// Takes what has come on one connection.
    fn receive(&mut self, index: usize) -> Result<(), Failure> {
        let Self { connections, shared, scratch, heard } = self;
        let Connection { stream, inbound, lane } = &mut connections[index];
        let length = match stream.read(scratch) {
            Ok(0) => return Err(Failure::Unfit("the server closed a connection".to_owned())),
            Ok(length) => length,
            Err(error) if is_nothing(error.kind()) => return Ok(()),
            Err(error) => return Err(Failure::on("receive answers")(error)),
        };
        let now = Instant::now();
        *heard = now;
        inbound.take(&scratch[..length], |head, record_bytes| {
            lane.answer((head, record_bytes), shared, now)
        })
    }
}

fn is_nothing(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

/// Waits until something can be done; answers on which connections something has come.
fn wait(connections: &[Connection]) -> Result<Vec<usize>, Failure> {
    let with_interest = connections.iter().map(|Connection { stream, lane, .. }| {
        let is_sent = lane.outbound.is_empty();
        let write = if is_sent { PollFlags::empty() } else { PollFlags::OUT };
        PollFd::new(stream, PollFlags::IN | write)
    });
    let mut descriptors: Vec<_> = with_interest.collect();
    let timeout = Timespec { tv_sec: 0, tv_nsec: POLL_NANOSECONDS };
    match poll(&mut descriptors, Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(error) => return Err(Failure::on("wait for answers")(error.into())),
    }
    let incoming = PollFlags::IN | PollFlags::HUP | PollFlags::ERR;
    let ready = descriptors.iter().enumerate();
    let ready = ready.filter(|(_, descriptor)| descriptor.revents().intersects(incoming));
    Ok(ready.map(|(index, _)| index).collect())
}
