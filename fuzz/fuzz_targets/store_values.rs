//! Values of the index, and pages of segment directories.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| slackwater_blockstore::fuzzing::values(data));
