//! Records of a segment file, their checksums right.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| slackwater_blockstore::fuzzing::frames(data));
