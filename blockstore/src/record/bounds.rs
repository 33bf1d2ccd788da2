//! Numbers that no store holds are refused where they are read: what is counted on from them, or
//! added to them, does not overflow.

use super::{Counters, LogPosition, NUMBER_MAX, Run, SEGMENT_MAX, decode_segment};
use crate::id::ChunkId;

/// The value with the u64 at `at` replaced.
fn with(value: &[u8], at: usize, number: u64) -> Vec<u8> {
    let mut value = value.to_vec();
    value[at..at + 8].copy_from_slice(&number.to_be_bytes());
    value
}

#[test]
fn counters_and_positions_are_bounded() {
    let counters = Counters::default().encode();
    for at in (1..counters.len()).step_by(8) {
        assert!(Counters::decode(&with(&counters, at, NUMBER_MAX)).is_ok(), "byte {at}");
        for number in [NUMBER_MAX + 1, u64::MAX] {
            assert!(Counters::decode(&with(&counters, at, number)).is_err(), "byte {at}");
        }
    }
    let mut position = vec![1];
    position.extend([0; 24]);
    assert!(LogPosition::decode(&with(&position, 1, SEGMENT_MAX)).is_ok());
    for (at, number) in [(1, SEGMENT_MAX + 1), (9, u64::MAX), (17, u64::MAX)] {
        assert!(LogPosition::decode(&with(&position, at, number)).is_err(), "byte {at}");
    }
}

#[test]
fn a_segment_has_a_number_that_chunk_ids_have_room_for() {
    let segment = decode_segment(&SEGMENT_MAX.to_be_bytes()).unwrap();
    assert_eq!(ChunkId::new(segment, 0).segment(), segment);
    assert!(decode_segment(&(SEGMENT_MAX + 1).to_be_bytes()).is_err());
    assert!(decode_segment(&[0; 9]).is_err());
}

#[test]
fn a_run_stays_in_its_segment() {
    let run = |first: u64, count: u64, chunk: Option<u64>| {
        let mut value = vec![1];
        value.extend(count.to_be_bytes());
        value.extend(chunk.iter().flat_map(|chunk| chunk.to_be_bytes()));
        Run::decode(first, &value)
    };
    let limit = u64::from(ChunkId::INDEX_LIMIT);
    assert!(run(0, limit, Some(limit * 7)).is_ok());
    assert!(run(0, 1, Some((SEGMENT_MAX << ChunkId::INDEX_BITS) + limit - 1)).is_ok());
    for (count, chunk) in [(limit + 1, limit * 7), (2, limit - 1), (1, u64::MAX), (u64::MAX, 0)] {
        assert!(run(0, count, Some(chunk)).is_err(), "{count} from {chunk}");
    }
    for (first, count) in [(u64::MAX, 1), (0, 0), (1, u64::MAX)] {
        assert!(run(first, count, None).is_err(), "{count} from {first}");
    }
}
