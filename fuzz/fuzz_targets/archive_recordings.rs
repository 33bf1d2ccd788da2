//! Recordings, replayed.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| slackwater_archive::fuzzing::recordings(data, &folder()));

/// A folder of this process alone.
fn folder() -> std::path::PathBuf {
    std::env::temp_dir().join(format!("slackwater-fuzz-{}", std::process::id()))
}
