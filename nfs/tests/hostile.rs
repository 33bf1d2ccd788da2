//! Hostile input that a generator makes: what the fuzz targets drive for hours, here for seconds,
//! and every input that once found something.
#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

use std::path::Path;

use proptest::collection::vec;
use proptest::prelude::*;
use slackwater_nfs::fuzzing;

/// Drives every input that is kept for the target.
fn replay(target: &str, drive: impl Fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target);
    let mut inputs = 0;
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        println!("{}", path.display());
        drive(&std::fs::read(path).unwrap());
        inputs += 1;
    }
    assert!(inputs > 0, "no inputs in {}", folder.display());
}

#[test]
fn the_inputs_kept_for_nfs_calls_find_nothing() {
    replay("nfs_calls", fuzzing::calls);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn calls_of_any_kind_are_answered_and_leave_a_sound_store(bytes in vec(any::<u8>(), 0..2000)) {
        fuzzing::calls(&bytes);
    }
}

#[test]
fn the_inputs_kept_for_nfs_records_find_nothing() {
    replay("nfs_records", fuzzing::records);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn a_stream_in_any_pieces_gives_the_records_of_its_definition(bytes in vec(any::<u8>(), 0..3000)) {
        fuzzing::records(&bytes);
    }
}
