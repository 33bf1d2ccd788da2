//! Requests through the REST router.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| slackwater_api::fuzzing::requests(data));
