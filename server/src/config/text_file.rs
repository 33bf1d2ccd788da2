//! Small text files that the configuration names.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use super::error::ConfigError;

/// Longest file that is read: far over any real configuration or token list, and small
/// enough that a disk image named by mistake does no harm.
pub const FILE_BYTES_MAX: u64 = 1 << 20;

/// The text of a file.
///
/// # Errors
/// The file cannot be read, is longer than [`FILE_BYTES_MAX`], or is not UTF-8.
pub(crate) fn read_text(path: &Path) -> Result<String, ConfigError> {
    let unreadable = |source| ConfigError::Unreadable { path: path.to_owned(), source };
    let file = File::open(path).map_err(unreadable)?;
    let mut bytes = Vec::new();
    let length_bytes = file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if u64::try_from(length_bytes).is_ok_and(|length| length > FILE_BYTES_MAX) {
        return Err(ConfigError::FileTooLarge { path: path.to_owned(), limit: FILE_BYTES_MAX });
    }
    String::from_utf8(bytes).map_err(|error| ConfigError::NotText {
        path: path.to_owned(),
        valid_bytes: error.utf8_error().valid_up_to(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_what_is_no_small_text() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        assert!(matches!(read_text(&path), Err(ConfigError::Unreadable { .. })));
        assert!(matches!(read_text(directory.path()), Err(ConfigError::Unreadable { .. })));
        std::fs::write(&path, b"ok\xff").unwrap();
        assert!(matches!(read_text(&path), Err(ConfigError::NotText { valid_bytes: 2, .. })));
        let limit = usize::try_from(FILE_BYTES_MAX).unwrap();
        std::fs::write(&path, vec![b'x'; limit]).unwrap();
        assert_eq!(read_text(&path).unwrap().len(), limit);
        std::fs::write(&path, vec![b'x'; limit + 1]).unwrap();
        assert!(matches!(read_text(&path), Err(ConfigError::FileTooLarge { .. })));
    }
}
