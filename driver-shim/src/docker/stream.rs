//! A body as a blocking reader, and a blocking writer as a body.

use std::io::{self, Read, Write};
use std::time::Duration;

use axum::body::{Body, BodyDataStream};
use bytes::{Buf, Bytes, BytesMut};
use futures_util::{StreamExt, stream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// Pieces of a body in flight between the socket and the thread that works on them; hyper's are
/// of up to 400 KiB, so a stream has a few MiB.
const PIECES_MAX: usize = 8;

/// Bytes of one piece that is written: large enough that handing over costs little.
const PIECE_BYTES: usize = 128 << 10;

/// Time to read the rest of a body that is not wanted: dockerd takes an answer before the end of
/// what it sends for a broken connection, and sends the rest again.
const DRAIN_TIME_MAX: Duration = Duration::from_secs(60);

/// The beginning of a body.
pub(super) struct Beginning {
    pub(super) bytes: Bytes,
    /// What follows, unless the body ended.
    pub(super) rest: Option<BodyDataStream>,
}

/// Reads a body until it ends, or more than `bytes_max` of it were read.
pub(super) async fn read_beginning(body: Body, bytes_max: usize) -> Result<Beginning, axum::Error> {
    let mut rest = body.into_data_stream();
    let mut bytes = BytesMut::new();
    while bytes.len() <= bytes_max {
        match rest.next().await {
            Some(piece) => bytes.extend_from_slice(&piece?),
            None => return Ok(Beginning { bytes: bytes.freeze(), rest: None }),
        }
    }
    Ok(Beginning { bytes: bytes.freeze(), rest: Some(rest) })
}

/// Reads the pieces that a task takes from a body.
pub(super) struct BodyReader {
    pieces: mpsc::Receiver<io::Result<Bytes>>,
    current: Bytes,
}

impl Read for BodyReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.current.is_empty() {
            match self.pieces.blocking_recv() {
                Some(piece) => self.current = piece?,
                None => return Ok(0),
            }
        }
        let length = buffer.len().min(self.current.len());
        self.current.copy_to_slice(&mut buffer[..length]);
        Ok(length)
    }
}

/// A reader of a body, for another thread, and a task that ends with the body, which is read to
/// its end also when the reader is dropped before.
pub(super) fn reader(beginning: Beginning) -> (BodyReader, JoinHandle<()>) {
    let (sender, pieces) = mpsc::channel(PIECES_MAX);
    let feeding = tokio::spawn(async move {
        let Some(mut rest) = beginning.rest else { return };
        while let Some(piece) = rest.next().await {
            if sender.send(piece.map_err(io::Error::other)).await.is_err() {
                return drain(rest).await;
            }
        }
    });
    (BodyReader { pieces, current: beginning.bytes }, feeding)
}

/// Reads a body to its end, for nothing.
pub(super) async fn drain(mut body: BodyDataStream) {
    let to_end = async { while let Some(Ok(_)) = body.next().await {} };
    if tokio::time::timeout(DRAIN_TIME_MAX, to_end).await.is_err() {
        tracing::warn!("gave up reading the rest of a layer that cannot be unpacked");
    }
}

/// Writes pieces for a body.
struct BodyWriter {
    pieces: mpsc::Sender<io::Result<Bytes>>,
    current: BytesMut,
}

impl BodyWriter {
    fn send(&mut self) -> io::Result<()> {
        if self.current.is_empty() {
            return Ok(());
        }
        let piece = self.current.split().freeze();
        self.pieces.blocking_send(Ok(piece)).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

impl Write for BodyWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.current.extend_from_slice(bytes);
        if self.current.len() >= PIECE_BYTES {
            self.send()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.send()
    }
}

/// A body of what `write` writes on another thread. An error before the first piece is the
/// caller's to answer; one behind it breaks the connection, so that nobody takes the part for
/// the whole.
///
/// `guard` is held until `write` ended.
pub(super) async fn body<E, G>(
    guard: G,
    write: impl FnOnce(&mut dyn Write) -> Result<(), E> + Send + 'static,
) -> Result<Body, E>
where
    E: std::fmt::Display + Send + 'static,
    E: From<tokio::task::JoinError>,
    G: Send + 'static,
{
    let (sender, mut pieces) = mpsc::channel(PIECES_MAX);
    let late = sender.clone();
    let written = tokio::task::spawn_blocking(move || {
        let mut writer = BodyWriter { pieces: sender, current: BytesMut::new() };
        write(&mut writer)?;
        // Whoever reads has gone if this fails.
        let _ = writer.flush();
        Ok(())
    });
    let finished = tokio::spawn(async move {
        let outcome = written.await.map_err(E::from).and_then(|outcome| outcome);
        drop(guard);
        if let Err(error) = &outcome {
            let error = io::Error::other(error.to_string());
            let _ = late.send(Err(error)).await;
        }
        outcome
    });
    match pieces.recv().await {
        Some(Ok(first)) => {
            let rest = stream::poll_fn(move |context| pieces.poll_recv(context));
            Ok(Body::from_stream(stream::iter([Ok(first)]).chain(rest)))
        }
        // The first piece is an error, or there is none at all: the outcome says which.
        Some(Err(_)) | None => {
            drop(pieces);
            finished.await.map_err(E::from).and_then(|outcome| outcome).map(|()| Body::empty())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::docker::DockerError;

    fn pieces(count: usize) -> Body {
        let piece = Bytes::from(vec![7; 1000]);
        Body::from_stream(stream::iter(std::iter::repeat_n(piece, count).map(Ok::<_, io::Error>)))
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_body_is_read_whole_by_a_thread() {
        for count in [0, 1, 100] {
            let beginning = read_beginning(pieces(count), 10_000).await.unwrap();
            assert_eq!(beginning.rest.is_none(), count < 11);
            let (mut reader, feeding) = reader(beginning);
            let read = tokio::task::spawn_blocking(move || {
                let mut bytes = Vec::new();
                reader.read_to_end(&mut bytes).map(|_| bytes)
            });
            assert_eq!(read.await.unwrap().unwrap().len(), count * 1000);
            feeding.await.unwrap();
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_cut_body_is_an_error_and_not_an_end() {
        let cut = stream::iter([Ok(Bytes::from(vec![7; 20])), Err(io::Error::other("cut"))]);
        let beginning = read_beginning(Body::from_stream(cut), 10).await.unwrap();
        let (mut reader, _feeding) = reader(beginning);
        let read = tokio::task::spawn_blocking(move || reader.read_to_end(&mut Vec::new()));
        assert_eq!(read.await.unwrap().unwrap_err().to_string(), "cut");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn an_early_failure_is_returned_and_a_late_one_breaks_the_body() {
        let failed =
            || DockerError::Request { source: serde_json::from_str::<u8>("x").unwrap_err() };
        assert!(body((), move |_| Err::<(), _>(failed())).await.is_err());
        let late = body((), move |out| {
            out.write_all(&vec![1; 3 * PIECE_BYTES]).unwrap();
            Err::<(), _>(failed())
        });
        let late = late.await.unwrap();
        assert!(axum::body::to_bytes(late, usize::MAX).await.is_err());
        let whole = body((), |out| {
            out.write_all(&vec![1; 3 * PIECE_BYTES + 1]).unwrap();
            Ok::<(), DockerError>(())
        });
        let whole = axum::body::to_bytes(whole.await.unwrap(), usize::MAX).await.unwrap();
        assert_eq!(whole.len(), 3 * PIECE_BYTES + 1);
    }
}
