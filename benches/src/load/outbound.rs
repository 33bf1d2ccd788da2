//! Calls that wait to be sent: as many as the connection takes go out by one system call, large
//! payloads from where they are.

use std::collections::VecDeque;
use std::io::{ErrorKind, IoSlice, Write};
use std::net::TcpStream;
use std::ops::Range;

/// Pieces that one system call sends at most.
const SLICES_MAX: usize = 32;

/// What waits to be sent.
#[derive(Debug, Default)]
pub(super) struct Outbound {
    /// Heads of calls, and small payloads.
    own: Vec<u8>,
    pieces: VecDeque<Piece>,
}

/// Part of what waits.
#[derive(Clone, Debug)]
enum Piece {
    Own(Range<usize>),
    /// A part of the buffer that payloads come from.
    Fill(Range<usize>),
}

impl Outbound {
    pub(super) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Appends what `encode` does.
    pub(super) fn push(&mut self, encode: impl FnOnce(&mut Vec<u8>)) {
        let start = self.own.len();
        encode(&mut self.own);
        match self.pieces.back_mut() {
            Some(Piece::Own(last)) => last.end = self.own.len(),
            _ => self.pieces.push_back(Piece::Own(start..self.own.len())),
        }
    }

    /// Appends a part of the fill without a copy.
    pub(super) fn push_fill(&mut self, place: Range<usize>) {
        self.pieces.push_back(Piece::Fill(place));
    }

    /// Sends until all is sent or the connection takes no more for now.
    pub(super) fn send(&mut self, mut stream: &TcpStream, fill: &[u8]) -> std::io::Result<()> {
        while !self.pieces.is_empty() {
            let mut slices = [IoSlice::new(&[]); SLICES_MAX];
            for (slice, piece) in slices.iter_mut().zip(&self.pieces) {
                *slice = IoSlice::new(match piece {
                    Piece::Own(place) => &self.own[place.clone()],
                    Piece::Fill(place) => &fill[place.clone()],
                });
            }
            let count = self.pieces.len().min(SLICES_MAX);
            match stream.write_vectored(&slices[..count]) {
                Ok(sent) => self.sent(sent),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        self.own.clear();
        Ok(())
    }

    /// Forgets what was sent.
    fn sent(&mut self, mut bytes: usize) {
        while let Some(piece) = self.pieces.front_mut() {
            let (Piece::Own(place) | Piece::Fill(place)) = piece;
            if place.len() > bytes {
                place.start += bytes;
                return;
            }
            bytes -= place.len();
            self.pieces.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn everything_is_sent_in_order_to_a_slow_receiver() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut receiver, _) = listener.accept().unwrap();
        stream.set_nonblocking(true).unwrap();
        let fill: Vec<u8> = (0..=255).cycle().take(8 << 20).collect();
        let (mut outbound, mut expected) = (Outbound::default(), Vec::new());
        for piece in 0..100_u8 {
            outbound.push(|own| own.extend([piece; 100]));
            outbound.push(|own| own.extend([piece; 3]));
            expected.extend([piece; 103]);
            let place = usize::from(piece) * 50_000..usize::from(piece) * 50_000 + 300_000;
            expected.extend(&fill[place.clone()]);
            outbound.push_fill(place);
        }
        assert_eq!(outbound.pieces.len(), 200, "two heads are one piece");
        outbound.send(&stream, &fill).unwrap();
        assert!(!outbound.is_empty(), "30 MB fit into the buffers of a connection");
        let mut received: Vec<u8> = Vec::new();
        let mut buffer = vec![0; 100_000];
        while received.len() < expected.len() {
            outbound.send(&stream, &fill).unwrap();
            let length = receiver.read(&mut buffer).unwrap();
            received.extend(&buffer[..length]);
        }
        assert!(outbound.is_empty() && outbound.own.is_empty());
        assert!(received == expected);
    }
}
