//! Records cut in every way, late and never; what they are charged.
#![allow(clippy::indexing_slicing, reason = "a panic fails the test")]

use super::*;
use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncWriteExt, ReadBuf};

use crate::budget::Budget;
use crate::metrics::NfsMetrics;

/// A time that no record takes whose test does not want it late, also on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

impl Source for tokio::io::DuplexStream {
    fn is_gone(&self) -> bool {
        false
    }
}

fn budget() -> ConnectionBudget {
    Budget::new(limits::IN_FLIGHT_BYTES_DEFAULT, Arc::new(NfsMetrics::new())).connection()
}

fn fragment(bytes: &[u8], is_last: bool) -> Vec<u8> {
    let mark = u32::try_from(bytes.len()).unwrap() | if is_last { LAST_FRAGMENT } else { 0 };
    [&mark.to_be_bytes(), bytes].concat()
}

async fn read_all(stream: &[u8], cuts: &[usize]) -> Result<Vec<Vec<u8>>, RecordError> {
    let (mut client, server) = tokio::io::duplex(64 << 10);
    let mut reader = RecordReader::new(server, BytesMut::new(), limits::FRAME_BYTES_MAX, PATIENCE);
    let (stream, cuts) = (stream.to_vec(), cuts.to_vec());
    let writer = tokio::spawn(async move {
        let mut start = 0;
        for cut in cuts.into_iter().chain([stream.len()]) {
            if client.write_all(&stream[start..cut]).await.is_err() {
                return;
            }
            tokio::task::yield_now().await;
            start = cut;
        }
    });
    let budget = budget();
    let mut records = Vec::new();
    let outcome = loop {
        match reader.next(&budget).await {
            Ok(Some(record)) => records.push(record.bytes.to_vec()),
            Ok(None) => break Ok(records),
            Err(error) => break Err(error),
        }
    };
    drop(reader);
    writer.await.unwrap();
    outcome
}

#[tokio::test]
async fn records_split_at_every_byte_come_out_whole() {
    let stream = [fragment(b"first", true), fragment(b"2", true), fragment(b"third", true)];
    let stream = stream.concat();
    for cut in 0..=stream.len() {
        let records = read_all(&stream, &[cut]).await.unwrap();
        assert_eq!(records, [&b"first"[..], b"2", b"third"], "cut at {cut}");
    }
    let every_byte: Vec<usize> = (0..stream.len()).collect();
    assert_eq!(read_all(&stream, &every_byte).await.unwrap().len(), 3);
}

#[tokio::test]
async fn whole_small_records_are_taken_from_the_buffer() {
    let large = vec![7; limits::FRAME_BYTES_SMALL + 1];
    let records = [
        fragment(b"first", true),
        fragment(b"second", true),
        fragment(&[1; limits::FRAME_BYTES_SMALL - 100], true),
    ];
    let left_to_next =
        [fragment(b"cut", false), fragment(b"", true), fragment(&large, true), vec![0x80, 0]];
    for rest in left_to_next {
        let stream = [records.concat(), rest.clone()].concat();
        let (mut client, server) = tokio::io::duplex(128 << 10);
        client.write_all(&stream).await.unwrap();
        let mut reader =
            RecordReader::new(server, BytesMut::new(), limits::FRAME_BYTES_MAX, PATIENCE);
        let budget = budget();
        assert!(reader.buffered().is_none(), "nothing was read yet");
        for record in &records {
            let taken = match reader.buffered() {
                Some(record) => record,
                None => reader.next(&budget).await.unwrap().unwrap(),
            };
            assert!(taken.bytes == record[MARK_BYTES..]);
        }
        assert!(reader.buffered().is_none(), "{:?}", &rest[..2]);
    }
    let (mut client, server) = tokio::io::duplex(1024);
    client.write_all(&records[..2].concat()).await.unwrap();
    let mut reader = RecordReader::new(server, BytesMut::new(), limits::FRAME_BYTES_MAX, PATIENCE);
    assert_eq!(reader.next(&budget()).await.unwrap().unwrap().bytes, "first");
    assert_eq!(reader.buffered().unwrap().bytes, "second");
}

#[tokio::test]
async fn fragments_are_joined() {
    let stream = [
        fragment(b"ab", false),
        fragment(b"", false),
        fragment(b"cd", false),
        fragment(b"", true),
        fragment(b"ef", true),
    ];
    let stream = stream.concat();
    for cut in 0..=stream.len() {
        let records = read_all(&stream, &[cut]).await.unwrap();
        assert_eq!(records, [&b"abcd"[..], b"ef"], "cut at {cut}");
    }
}

#[tokio::test]
async fn large_records_arrive_whole_in_one_fragment_or_many() {
    let large: Vec<u8> = (0..251).cycle().take(limits::FRAME_BYTES_MAX).collect();
    let whole = fragment(&large, true);
    let after = fragment(b"after", true);
    let records = read_all(&[whole, after.clone()].concat(), &[]).await.unwrap();
    assert_eq!(records, [large.clone(), b"after".to_vec()]);
    let mut pieces: Vec<u8> = large.chunks(9000).flat_map(|piece| fragment(piece, false)).collect();
    pieces.extend(fragment(b"", true));
    pieces.extend(after);
    assert_eq!(read_all(&pieces, &[]).await.unwrap(), [large, b"after".to_vec()]);
}

#[tokio::test]
async fn an_oversized_mark_is_refused_before_its_bytes_come() {
    let mark = (0x7fff_ffff_u32 | LAST_FRAGMENT).to_be_bytes();
    let error = read_all(&mark, &[]).await.unwrap_err();
    assert!(matches!(error, RecordError::TooLong { got: 0x7fff_ffff, .. }), "{error}");
    let one_over = vec![0; limits::FRAME_BYTES_MAX - 1];
    let stream = [fragment(&one_over, false), fragment(b"xy", true)].concat();
    let error = read_all(&stream, &[]).await.unwrap_err();
    assert!(matches!(error, RecordError::TooLong { .. }), "{error}");
}

#[tokio::test]
async fn a_stream_that_ends_inside_a_record_is_an_error() {
    let stream = fragment(b"whole", true);
    for end in 1..stream.len() {
        let error = read_all(&stream[..end], &[]).await.unwrap_err();
        assert!(matches!(error, RecordError::Truncated { .. }), "{end}: {error}");
    }
    let error = read_all(&fragment(b"more follows", false), &[]).await.unwrap_err();
    assert!(matches!(error, RecordError::Truncated { expected: 4 }), "{error}");
    assert_eq!(read_all(&[], &[]).await.unwrap(), Vec::<Vec<u8>>::new());
}

#[tokio::test]
async fn empty_fragments_without_end_are_refused() {
    let stream = fragment(b"", false).repeat(limits::FRAGMENTS_MAX + 1);
    let error = read_all(&stream, &[]).await.unwrap_err();
    assert!(matches!(error, RecordError::Fragments { .. }), "{error}");
    let error = read_all(&fragment(b"", true), &[]).await.unwrap_err();
    assert!(matches!(error, RecordError::Empty), "{error}");
}

#[tokio::test]
async fn a_record_that_stops_arriving_is_given_up() {
    let (mut client, server) = tokio::io::duplex(64);
    let patience = Duration::from_millis(20);
    let mut reader = RecordReader::new(server, BytesMut::new(), limits::FRAME_BYTES_MAX, patience);
    client.write_all(&fragment(b"half", true)[..6]).await.unwrap();
    let error = reader.next(&budget()).await.unwrap_err();
    assert!(matches!(error, RecordError::TooSlow { .. }), "{error}");
}

/// A client whose last `late` parts come late, but at once: the thread sleeps so long before it
/// reads.
struct Late {
    parts: VecDeque<Vec<u8>>,
    late: usize,
    sleep: Duration,
}

impl AsyncRead for Late {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.parts.len() == self.late {
            std::thread::sleep(std::mem::take(&mut self.sleep));
        }
        let Some(part) = self.parts.front_mut() else { return Poll::Ready(Ok(())) };
        let count = part.len().min(buffer.remaining());
        buffer.put_slice(&part[..count]);
        part.drain(..count);
        if part.is_empty() {
            self.parts.pop_front();
        }
        Poll::Ready(Ok(()))
    }
}

impl Source for Late {
    fn is_gone(&self) -> bool {
        false
    }
}

/// What becomes of a record of these parts, the last `late` of which come so late, while others wait
/// for memory.
async fn late_record(parts: &[usize], late: usize, sleep: Duration) -> Result<usize, RecordError> {
    let all = Budget::new(limits::IN_FLIGHT_BYTES_MIN, Arc::new(NfsMetrics::new()));
    let (one, holder, other) = (all.connection(), all.connection(), all.connection());
    let half = usize::try_from(limits::IN_FLIGHT_BYTES_MIN / 2).unwrap();
    let _held = holder.charge(Purpose::Read, half).await;
    let waits = tokio::spawn(async move { drop(other.charge(Purpose::Read, 1).await) });
    while !one.is_wanted() {
        tokio::task::yield_now().await;
    }
    let mut rest = fragment(&vec![7; parts.iter().sum()], true);
    let parts = parts.iter().map(|&length| rest.drain(..length.min(rest.len())).collect());
    let mut parts: VecDeque<Vec<u8>> = parts.collect();
    parts.back_mut().unwrap().extend(rest);
    let source = Late { parts, late, sleep };
    let mut reader = RecordReader::new(source, BytesMut::new(), limits::FRAME_BYTES_MAX, PATIENCE);
    let record = reader.next(&one).await;
    waits.abort();
    Ok(record?.unwrap().bytes.len())
}

#[tokio::test]
async fn a_record_that_came_late_but_whole_is_not_dropped() {
    let record = late_record(&[36 << 10, 4 << 10], 1, limits::PRESSED_TIME).await;
    assert_eq!(record.unwrap(), 40 << 10);
}

/// A client that waits for the window of its connection sends no more until some was read.
#[tokio::test]
async fn a_record_whose_server_was_held_up_is_not_dropped() {
    let sleep = limits::PRESSED_TIME + 2 * limits::LOOK_LATE;
    let record = late_record(&[36 << 10, 2 << 10, 2 << 10], 2, sleep).await;
    assert_eq!(record.unwrap(), 40 << 10);
}

#[tokio::test]
async fn a_large_record_is_charged_when_its_bytes_come_not_by_its_mark() {
    let metrics = Arc::new(NfsMetrics::new());
    let budget = Budget::new(limits::IN_FLIGHT_BYTES_DEFAULT, Arc::clone(&metrics));
    let connection = budget.connection();
    let (mut client, server) = tokio::io::duplex(2 << 20);
    let mut reader = RecordReader::new(
        server,
        BytesMut::new(),
        limits::FRAME_BYTES_MAX,
        Duration::from_millis(20),
    );
    let record = fragment(&vec![7; 1 << 20], true);
    client.write_all(&record[..1000]).await.unwrap();
    assert!(reader.next(&connection).await.is_err());
    assert_eq!(metrics.snapshot().bytes_in_flight, 0);

    let (mut client, server) = tokio::io::duplex(2 << 20);
    let mut reader = RecordReader::new(server, BytesMut::new(), limits::FRAME_BYTES_MAX, PATIENCE);
    client.write_all(&record).await.unwrap();
    let record = reader.next(&connection).await.unwrap().unwrap();
    assert_eq!(metrics.snapshot().bytes_in_flight, 1 << 20);
    drop(record);
    assert_eq!(metrics.snapshot().bytes_in_flight, 0);
}

/// An honest client is not cut off as it connects while others hold all the memory.
#[tokio::test]
async fn the_wait_for_memory_is_not_the_first_calls_slowness() {
    let metrics = Arc::new(NfsMetrics::new());
    let all = Budget::new(limits::IN_FLIGHT_BYTES_MIN, Arc::clone(&metrics));
    let (holder, one) = (all.connection(), all.connection());
    let half = usize::try_from(limits::IN_FLIGHT_BYTES_MIN / 2).unwrap();
    let held = holder.charge(Purpose::Change, half).await;
    let (mut client, server) = tokio::io::duplex(2 << 20);
    let mut reader = RecordReader::new(server, BytesMut::new(), limits::FRAME_BYTES_MAX, PATIENCE);
    let record = fragment(&vec![7; 1 << 20], true);
    client.write_all(&record[..1 << 19]).await.unwrap();
    let within = Duration::from_secs(1);
    let first = tokio::spawn(async move { (reader.first(&one, within).await, reader.patience) });
    while !holder.is_wanted() {
        tokio::task::yield_now().await;
    }
    tokio::time::sleep(within).await;
    drop(held);
    while metrics.snapshot().bytes_in_flight == 0 && !first.is_finished() {
        tokio::task::yield_now().await;
    }
    // Behind what it reads at once.
    tokio::task::yield_now().await;
    client.write_all(&record[1 << 19..]).await.unwrap();
    let (record, patience) = first.await.unwrap();
    assert_eq!(record.unwrap().unwrap().bytes.len(), 1 << 20);
    assert_eq!(patience, PATIENCE, "that of the next ones");
    // One that stops half way, or says nothing, has no more.
    let within = Duration::from_millis(20);
    for sent in [&fragment(b"half", true)[..6], &[]] {
        let (mut client, server) = tokio::io::duplex(64);
        let mut reader =
            RecordReader::new(server, BytesMut::new(), limits::FRAME_BYTES_MAX, PATIENCE);
        client.write_all(sent).await.unwrap();
        let error = reader.first(&holder, within).await.unwrap_err();
        assert!(matches!(error, RecordError::TooSlow { limit } if limit == within), "{error}");
    }
}
