//! Calls of NFS, MOUNT and PORTMAP against a live store.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| slackwater_nfs::fuzzing::calls(data));
