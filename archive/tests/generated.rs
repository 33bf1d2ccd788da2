//! Archives and recordings that a generator makes: what the fuzz targets drive for hours, here for
//! seconds, and every input that once found something.
#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

use std::path::Path;

use proptest::collection::vec;
use proptest::prelude::*;
use slackwater_archive::fuzzing;

/// Drives every input that is kept for the target.
fn replay(target: &str, drive: impl Fn(&[u8], &Path)) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target);
    let place = tempfile::tempdir().unwrap();
    let mut inputs = 0;
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        println!("{}", path.display());
        drive(&std::fs::read(path).unwrap(), &place.path().join("layer"));
        inputs += 1;
    }
    assert!(inputs > 0, "no inputs in {}", folder.display());
}

#[test]
fn the_inputs_kept_for_archive_layers_find_nothing() {
    replay("archive_layers", fuzzing::layers);
}

#[test]
fn the_inputs_kept_for_archive_recordings_find_nothing() {
    replay("archive_recordings", fuzzing::recordings);
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
