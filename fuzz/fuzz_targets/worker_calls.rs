//! Calls of NFS and MOUNT by a worker that mounts by its secret, beside files of others.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| slackwater_nfs::fuzzing::worker_calls(data));
