//! The key that references to snapshots are made with: 32 random bytes in `reference-key` of the data directory.
//!
//! ```text
//! there              read
//! missing            made: reference-key.new -> sync -> rename -> sync of the directory
//! no room for it     none; references are refused until there is
//! ```
//! It is beside the store and not in its index, as images in registries outlive an index that has to be made again from
//! the log. Without it they could not be told from forged ones.
//!
//! Invariant: a key that references are made with is on the disk, and so is its name.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use slackwater_api::ReferenceKey;

use crate::data_file;
use crate::error::ServerError;

pub(crate) const NAME: &str = "reference-key";

/// How often a key is tried again when there was no room for it.
const AGAIN: Duration = Duration::from_secs(10);

/// Puts the key of a data directory that this process has open into `cell`. Where there is no room for one, that
/// is tried again and again beside the servers.
///
/// # Errors
/// The file cannot be read or written, or is no key.
pub(crate) async fn provide(
    data_dir: &Path,
    cell: &Arc<OnceLock<ReferenceKey>>,
) -> Result<(), ServerError> {
    provide_within(data_dir, cell, AGAIN).await
}

async fn provide_within(
    data_dir: &Path,
    cell: &Arc<OnceLock<ReferenceKey>>,
    again: Duration,
) -> Result<(), ServerError> {
    if let Some(key) = load_beside(data_dir).await? {
        let _ = cell.set(key);
        return Ok(());
    }
    tracing::warn!(
        path = %data_dir.join(NAME).display(),
        "no room for the key of references: until there is, images are neither pushed nor pulled by reference"
    );
    let (data_dir, cell) = (data_dir.to_owned(), Arc::clone(cell));
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(again).await;
            match load_beside(&data_dir).await {
                Ok(Some(key)) => {
                    let _ = cell.set(key);
                    return;
                }
                Ok(None) => {}
                Err(error) => tracing::warn!(%error, "references are not made yet"),
            }
        }
    });
    Ok(())
}

/// Beside the runtime: the disk may be slow.
async fn load_beside(data_dir: &Path) -> Result<Option<ReferenceKey>, ServerError> {
    let data_dir = data_dir.to_owned();
    let loading = tokio::task::spawn_blocking(move || load(&data_dir));
    let task = "reading the key of references";
    loading.await.map_err(|source| ServerError::Panicked { task, source })?
}

/// The key; `None` if there is no room for one.
fn load(data_dir: &Path) -> Result<Option<ReferenceKey>, ServerError> {
    let path = data_dir.join(NAME);
    let loaded = match File::open(&path) {
        // The process that made it may have been killed before its name was on the disk.
        Ok(file) => read(file).and_then(|key| data_file::sync(data_dir).map(|()| key)),
        Err(error) if error.kind() == ErrorKind::NotFound => match make(data_dir) {
            Err(error) if data_file::is_full(&error) => return Ok(None),
            made => made,
        },
        Err(error) => Err(error),
    };
    loaded.map(Some).map_err(|source| ServerError::ReferenceKey { path, source })
}

fn read(file: File) -> io::Result<ReferenceKey> {
    let mut bytes = Vec::new();
    file.take(ReferenceKey::BYTES as u64 + 1).read_to_end(&mut bytes)?;
    let got = bytes.len();
    let bytes = bytes.try_into().map_err(|_| {
        let expected = ReferenceKey::BYTES;
        let more = if got > expected { " or more" } else { "" };
        io::Error::new(
            ErrorKind::InvalidData,
            format!(
                "it has {got} bytes{more}, expected {expected}: put the file of a backup there; if there is none, \
                 remove it, and make all images by reference again"
            ),
        )
    })?;
    Ok(ReferenceKey::from_bytes(bytes))
}

fn make(data_dir: &Path) -> io::Result<ReferenceKey> {
    let mut bytes = [0; ReferenceKey::BYTES];
    getrandom::fill(&mut bytes).map_err(|error| io::Error::other(error.to_string()))?;
    data_file::replace(data_dir, NAME, &bytes)?;
    tracing::info!(path = %data_dir.join(NAME).display(), "made a key of references; those of an earlier key count no more");
    Ok(ReferenceKey::from_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::data_file::tests::OneFile;

    #[test]
    fn it_is_made_once_and_stays() {
        let directory = tempfile::tempdir().unwrap();
        // Left by one that was killed, with rights for all.
        let left = directory.path().join("reference-key.new");
        std::fs::write(&left, "half").unwrap();
        assert!(load(directory.path()).unwrap().is_some());
        let made = std::fs::read(directory.path().join(NAME)).unwrap();
        assert_eq!(made.len(), ReferenceKey::BYTES);
        assert_ne!(made, [0; ReferenceKey::BYTES]);
        let mode = directory.path().join(NAME).metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(!left.exists());
        assert!(load(directory.path()).unwrap().is_some());
        assert_eq!(std::fs::read(directory.path().join(NAME)).unwrap(), made);
        let other = tempfile::tempdir().unwrap();
        load(other.path()).unwrap();
        assert_ne!(std::fs::read(other.path().join(NAME)).unwrap(), made);
    }

    #[test]
    fn what_is_no_key_is_an_error_and_left_as_it_is() {
        let cases =
            [(vec![1; 31], "31 bytes,"), (vec![1; 40], "33 bytes or more,"), (vec![], "0 bytes,")];
        for (content, said) in cases {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join(NAME);
            std::fs::write(&path, &content).unwrap();
            let error = load(directory.path()).unwrap_err().to_string();
            assert!(error.contains(said) && error.contains("reference-key"), "{error}");
            assert_eq!(std::fs::read(&path).unwrap(), content);
        }
        let missing = Path::new("/nonexistent/data");
        assert!(matches!(load(missing), Err(ServerError::ReferenceKey { .. })));
    }

    #[tokio::test]
    async fn as_root_a_key_is_made_once_there_is_room() {
        let small = OneFile::new();
        let path = small.path();
        let filler = path.join("filler");
        std::fs::write(&filler, "").unwrap();
        let cell = Arc::default();
        let again = Duration::from_millis(10);
        provide_within(path, &cell, again).await.unwrap();
        assert!(cell.get().is_none() && load(path).unwrap().is_none(), "there is room for a key");
        std::fs::remove_file(&filler).unwrap();
        let made = async {
            while cell.get().is_none() {
                tokio::time::sleep(again).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), made).await.unwrap();
        assert_eq!(std::fs::read(path.join(NAME)).unwrap().len(), ReferenceKey::BYTES);
    }
}
