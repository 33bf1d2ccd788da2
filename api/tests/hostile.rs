//! Hostile input that a generator makes: what the fuzz targets drive for hours, here for seconds,
//! and every input that once found something.
#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

#[path = "../../fuzz/replay.rs"]
mod replay;

use proptest::collection::vec;
use proptest::prelude::*;
use replay::replay;
use slackwater_api::fuzzing;

#[test]
fn the_inputs_kept_for_rest_requests_find_nothing() {
    replay("rest_requests", fuzzing::requests);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn requests_of_any_kind_are_answered_and_leave_a_sound_store(bytes in vec(any::<u8>(), 0..1500)) {
        fuzzing::requests(&bytes);
    }
}
