//! Archives and recordings that a generator makes: what the fuzz targets drive for hours, here for
//! seconds, and every input that once found something.
#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

#[path = "../../fuzz/replay.rs"]
mod replay;

use std::path::Path;

use proptest::collection::vec;
use proptest::prelude::*;
use replay::replay;
use slackwater_archive::fuzzing;

/// The same, each input with a place where a root may be.
fn replay_in_root(target: &str, drive: impl Fn(&[u8], &Path)) {
    let place = tempfile::tempdir().unwrap();
    replay(target, |bytes| drive(bytes, &place.path().join("layer")));
}

#[test]
fn the_inputs_kept_for_archive_layers_find_nothing() {
    replay_in_root("archive_layers", fuzzing::layers);
}

#[test]
fn the_inputs_kept_for_archive_recordings_find_nothing() {
    replay_in_root("archive_recordings", fuzzing::recordings);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn any_archive_stays_in_its_root_and_is_replayed_exactly(bytes in vec(any::<u8>(), 0..800)) {
        let place = tempfile::tempdir().unwrap();
        fuzzing::layers(&bytes, &place.path().join("layer"));
    }

    #[test]
    fn any_recording_is_replayed_or_refused(bytes in vec(any::<u8>(), 0..400)) {
        let place = tempfile::tempdir().unwrap();
        fuzzing::recordings(&bytes, &place.path().join("layer"));
    }
}
