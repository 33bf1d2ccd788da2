//! Hostile input that a generator makes: what the fuzz targets drive for hours, here for seconds,
//! and every input that once found something.
#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

#[path = "../../fuzz/replay.rs"]
mod replay;

use proptest::collection::vec;
use proptest::prelude::*;
use replay::replay;
use slackwater_nfs::fuzzing;

#[test]
fn the_inputs_kept_for_nfs_calls_find_nothing() {
    replay("nfs_calls", fuzzing::calls);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn calls_of_any_kind_are_answered_and_leave_a_sound_store(bytes in vec(any::<u8>(), 0..2000)) {
        fuzzing::calls(&bytes);
    }
}

proptest! {
    // 48 calls each.
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn a_worker_reaches_nothing_of_others_by_calls_of_any_kind(bytes in vec(any::<u8>(), 0..2000)) {
        fuzzing::worker_calls(&bytes);
    }
}

#[test]
fn the_inputs_kept_for_worker_calls_find_nothing() {
    replay("worker_calls", fuzzing::worker_calls);
}

#[test]
fn the_inputs_kept_for_nfs_records_find_nothing() {
    replay("nfs_records", fuzzing::records);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn a_stream_in_any_pieces_gives_the_records_of_its_definition(bytes in vec(any::<u8>(), 0..3000)) {
        fuzzing::records(&bytes);
    }
}
