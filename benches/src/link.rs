//! A slower network for experiments on one machine: connections are passed on as late, and as slowly, as it would.
//!
//! ```text
//! worker --> 127.0.0.1:8050 --> | read, by rate | wait half a round trip | write | --> 127.0.0.1:8049
//!                               and back, likewise
//! ```
//! All connections share the link: one rate for each direction, in which pieces of all follow each other. A connection
//! begins a round trip after it was accepted, as its handshake would take. What is under way is what the link holds,
//! rate times delay, and a piece of each connection; beyond that senders wait, by TCP. No packet is lost or has a header, no
//! connection begins slowly, and one that is reset ends in order.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::arguments::LinkArguments;
use crate::compare::progress;
use crate::failure::Failure;

/// Bytes that are passed on at a time, for which other connections wait: 0.5 ms at 1 Gbit/s.
const PIECE_BYTES: usize = 64 << 10;

/// Pieces of a connection that are under way in a direction. They may be small.
const PIECES_MAX: usize = 4096;

/// How long before the link is free the next piece is read, so that it is not idle: a sleep ends a little late.
const AHEAD: Duration = Duration::from_millis(1);

/// Connections at a time. Each has five threads.
const CONNECTIONS_MAX: usize = 256;

/// Time for a connection to the target, which is on this machine or near.
const CONNECT_MAX: Duration = Duration::from_secs(10);

/// The pause after a connection could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Passes connections on until this program is ended.
///
/// # Errors
/// An address to listen at is in use, or not of this machine.
pub(crate) fn run(arguments: &LinkArguments) -> Result<(), Failure> {
    let round_trip = Duration::from_millis(arguments.round_trip_ms);
    let link = Arc::new(Link::new(round_trip, arguments.megabits * 1_000_000));
    let mut listeners = Vec::new();
    for pass in &arguments.passes {
        let what = format!("listen at {}", pass.listen);
        let listener = TcpListener::bind(pass.listen).map_err(Failure::on(&what))?;
        let address = listener.local_addr().map_err(Failure::on("ask for an address"))?;
        progress(&format!("passes on from {address} to {}", pass.target));
        listeners.push((listener, pass.target));
    }
    thread::scope(|scope| {
        for (listener, target) in &listeners {
            let link = &link;
            scope.spawn(move || link.serve(listener, *target));
        }
    });
    Ok(())
}

/// The link, which all connections share.
#[derive(Debug)]
struct Link {
    round_trip: Duration,
    to_target: Direction,
    from_target: Direction,
    connections: AtomicUsize,
}

/// One direction of it.
#[derive(Debug)]
struct Direction {
    bits_per_second: u64,
    delay: Duration,
    /// Until when it sends what it was given.
    busy_until: Mutex<Instant>,
}

impl Direction {
    fn new(delay: Duration, bits_per_second: u64) -> Self {
        Self { bits_per_second, delay, busy_until: Mutex::new(Instant::now()) }
    }

    /// When the last of these bytes is sent, if they are given to it at `now`.
    fn sent(&self, now: Instant, bytes: usize) -> Instant {
        let bits = u64::try_from(bytes).unwrap_or(u64::MAX).saturating_mul(8);
        let takes = Duration::from_nanos(bits.saturating_mul(1_000_000_000) / self.bits_per_second);
        let mut busy_until = self.busy_until.lock().unwrap_or_else(PoisonError::into_inner);
        *busy_until = now.max(*busy_until) + takes;
        *busy_until
    }
}

/// Bytes that are under way.
#[derive(Debug)]
struct Piece {
    bytes: Vec<u8>,
    arrives: Instant,
}

/// A place among the connections.
struct Place(Arc<Link>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Link {
    fn new(round_trip: Duration, bits_per_second: u64) -> Self {
        let direction = || Direction::new(round_trip / 2, bits_per_second);
        let (to_target, from_target) = (direction(), direction());
        Self { round_trip, to_target, from_target, connections: AtomicUsize::new(0) }
    }

    fn serve(self: &Arc<Self>, listener: &TcpListener, target: SocketAddr) {
        loop {
            match listener.accept() {
                Ok((near, _)) => self.begin(near, target),
                Err(error) => {
                    progress(&format!("cannot accept a connection: {error}"));
                    thread::sleep(ACCEPT_PAUSE);
                }
            }
        }
    }

    /// Passes a connection on. It is closed if there is no place for it, or nothing at the target.
    fn begin(self: &Arc<Self>, near: TcpStream, target: SocketAddr) {
        let before = self.connections.fetch_add(1, Ordering::Relaxed);
        let place = Place(Arc::clone(self));
        if before >= CONNECTIONS_MAX {
            progress(&format!("a connection more than {CONNECTIONS_MAX} is closed"));
            return;
        }
        let begun = thread::Builder::new().spawn(move || {
            if let Err(error) = pass_on(&place.0, &near, target) {
                progress(&format!("a connection to {target} is closed: {error}"));
            }
        });
        if let Err(error) = begun {
            progress(&format!("a connection is closed: {error}"));
        }
    }
}

fn pass_on(link: &Link, near: &TcpStream, target: SocketAddr) -> std::io::Result<()> {
    let far = TcpStream::connect_timeout(&target, CONNECT_MAX)?;
    for end in [near, &far] {
        end.set_nodelay(true)?;
    }
    thread::sleep(link.round_trip);
    thread::scope(|scope| {
        for (from, to, direction) in
            [(near, &far, &link.to_target), (&far, near, &link.from_target)]
        {
            let (queue, arriving) = sync_channel(PIECES_MAX);
            scope.spawn(move || send(from, direction, &queue));
            scope.spawn(move || deliver(to, &arriving));
        }
    });
    Ok(())
}

fn wait_until(moment: Instant) {
    thread::sleep(moment.saturating_duration_since(Instant::now()));
}

/// Gives to the link what comes, to its end.
fn send(mut from: &TcpStream, direction: &Direction, queue: &SyncSender<Piece>) {
    let mut buffer = vec![0; PIECE_BYTES];
    loop {
        let count = match from.read(&mut buffer) {
            Ok(0) => return,
            Ok(count) => count,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(_) => return,
        };
        let sent = direction.sent(Instant::now(), count);
        let piece = Piece { bytes: buffer[..count].to_vec(), arrives: sent + direction.delay };
        if queue.send(piece).is_err() {
            // The other end takes no more: this one is to learn it.
            let _ = from.shutdown(Shutdown::Both);
            return;
        }
        // Others have their turn.
        wait_until(sent - AHEAD);
    }
}

/// Writes what has arrived.
fn deliver(mut to: &TcpStream, arriving: &Receiver<Piece>) {
    for piece in arriving {
        wait_until(piece.arrives);
        if to.write_all(&piece.bytes).is_err() {
            let _ = to.shutdown(Shutdown::Both);
            return;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLISECOND: Duration = Duration::from_millis(1);
    /// Only reached if something hangs.
    const CALL_MAX: Duration = Duration::from_secs(60);

    /// A connection by a link; each of its calls ends.
    fn connect(link: Link, target: SocketAddr) -> TcpStream {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let link = Arc::new(link);
        thread::spawn(move || link.serve(&listener, target));
        let near = TcpStream::connect(address).unwrap();
        near.set_read_timeout(Some(CALL_MAX)).unwrap();
        near.set_write_timeout(Some(CALL_MAX)).unwrap();
        near
    }

    fn listen() -> (TcpListener, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        (listener, address)
    }

    /// Whether the connection has ended.
    fn has_ended(mut near: &TcpStream) -> bool {
        match near.read_to_end(&mut Vec::new()) {
            Ok(count) => count == 0,
            Err(error) => error.kind() == ErrorKind::ConnectionReset,
        }
    }

    #[test]
    fn bytes_of_all_are_sent_one_after_the_other() {
        // 1,000 bytes take a millisecond.
        let direction = Direction::new(Duration::ZERO, 8_000_000);
        let now = Instant::now() + Duration::from_secs(1);
        assert_eq!(direction.sent(now, 1000), now + MILLISECOND);
        assert_eq!(direction.sent(now, 2000), now + 3 * MILLISECOND);
        let later = now + 50 * MILLISECOND;
        assert_eq!(direction.sent(later, 500), later + MILLISECOND / 2);
    }

    #[test]
    fn both_directions_come_whole_and_not_too_early() {
        let (target, address) = listen();
        let begun = Instant::now();
        let mut near = connect(Link::new(20 * MILLISECOND, 80_000_000), address);
        let question: Vec<u8> = (0..1_000_000_u32).map(|n| n.to_le_bytes()[1]).collect();
        let answers = thread::spawn(move || {
            let (mut far, _) = target.accept().unwrap();
            let mut asked = Vec::new();
            far.read_to_end(&mut asked).unwrap();
            far.write_all(&asked[..500_000]).unwrap();
            asked
        });
        near.write_all(&question).unwrap();
        near.shutdown(Shutdown::Write).unwrap();
        let mut answer = Vec::new();
        near.read_to_end(&mut answer).unwrap();
        assert!(answers.join().unwrap() == question && answer == question[..500_000]);
        // The handshake, there and back, and 1.5 MB at 10 MB/s.
        let took = begun.elapsed();
        assert!(took >= 2 * 20 * MILLISECOND + 150 * MILLISECOND, "{took:?}");
    }

    #[test]
    fn what_has_no_target_is_closed() {
        // The port multiplexer's, which nothing serves.
        let near = connect(Link::new(Duration::ZERO, 1_000_000_000), ([127, 0, 0, 1], 1).into());
        assert!(has_ended(&near));
    }

    #[test]
    fn an_end_that_goes_takes_the_other_along() {
        let (target, address) = listen();
        let mut near = connect(Link::new(Duration::ZERO, 1_000_000_000), address);
        near.write_all(b"x").unwrap();
        let (mut far, _) = target.accept().unwrap();
        let mut one = [0];
        far.read_exact(&mut one).unwrap();
        drop(far);
        assert!(has_ended(&near));
        // Until the kernel says that nothing takes it.
        let refused = loop {
            if let Err(error) = near.write_all(&[0; 1 << 16]) {
                break error.kind();
            }
        };
        assert!(matches!(refused, ErrorKind::BrokenPipe | ErrorKind::ConnectionReset), "{refused}");
    }
}
