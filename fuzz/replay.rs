//! Replays the inputs that are kept for a fuzz target: shared by the tests of the crates.

use std::path::Path;

/// Drives every input that is kept for the target.
pub(crate) fn replay(target: &str, drive: impl Fn(&[u8])) {
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
