//! Record marking: a stream in pieces.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| slackwater_nfs::fuzzing::records(data));
