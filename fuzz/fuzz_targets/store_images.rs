//! Whole stores, changed behind their back.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| slackwater_blockstore::fuzzing::stores(data));
