//! Files of settings, tokens, credentials and certificates: read whole, and no more than such a file has.

use std::fs::File;
use std::io::{Error, Read};
use std::path::Path;

/// Longest of them: a bundle of a whole system's authorities has some 200 KiB.
const BYTES_MAX: u64 = 4 << 20;

/// The content of a small file.
///
/// # Errors
/// It cannot be read, or is far too long to be the right one.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    File::open(path)?.take(BYTES_MAX + 1).read_to_end(&mut bytes)?;
    match u64::try_from(bytes.len()).is_ok_and(|length| length <= BYTES_MAX) {
        true => Ok(bytes),
        false => Err(Error::other(format!("over {BYTES_MAX} bytes; is it the right file?"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_end_is_refused() {
        let error = read(Path::new("/dev/zero")).unwrap_err().to_string();
        assert!(error.contains("4194304 bytes"), "{error}");
        assert_eq!(read(Path::new("/dev/null")).unwrap(), b"");
    }
}
