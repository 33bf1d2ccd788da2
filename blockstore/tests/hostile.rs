//! Hostile input that a generator makes: what the fuzz targets drive for hours, here for seconds,
//! and every input that once found something.
#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

#[path = "../../fuzz/replay.rs"]
mod replay;

use proptest::collection::vec;
use proptest::prelude::*;
use replay::replay;
use slackwater_blockstore::fuzzing;

#[test]
fn the_inputs_kept_for_store_values_find_nothing() {
    replay("store_values", fuzzing::values);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2048))]

    #[test]
    fn any_value_is_refused_or_the_same_once_written_again(bytes in vec(any::<u8>(), 0..400)) {
        fuzzing::values(&bytes);
    }
}

#[test]
fn the_inputs_kept_for_store_frames_find_nothing() {
    replay("store_frames", fuzzing::frames);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn records_of_any_bytes_end_behind_their_begin(bytes in vec(any::<u8>(), 0..3000)) {
        fuzzing::frames(&bytes);
    }
}

#[test]
fn the_inputs_kept_for_store_images_find_nothing() {
    replay("store_images", fuzzing::stores);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn a_store_that_was_changed_answers_or_refuses(bytes in vec(any::<u8>(), 0..64)) {
        fuzzing::stores(&bytes);
    }
}
