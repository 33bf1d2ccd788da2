//! Unix sockets that only root reaches, and which take the place of what a dead process left.

use std::io;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt};
use std::path::{Path, PathBuf};

use tokio::net::{UnixListener, UnixStream};

/// Only root: whoever reaches a plugin's socket can read and write every container's disk.
const SOCKET_MODE: u32 = 0o600;

/// Of the directories that are made for it: a socket has its mode only a moment after it is made.
const DIRECTORY_MODE: u32 = 0o700;

/// A socket that cannot be listened on.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Somebody listens there.
    #[error(
        "{}: another process listens there; is a second slackwater-driver running?",
        path.display()
    )]
    Taken {
        /// The socket.
        path: PathBuf,
    },
    /// Something else is there.
    #[error("{}: there is something that is not a socket; move it away", path.display())]
    NotSocket {
        /// The path.
        path: PathBuf,
    },
    /// The operating system refuses.
    #[error("listen on {}: {source}", path.display())]
    Io {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Listens at `path`; makes the directories on the way.
///
/// # Errors
/// Somebody listens there, something else is there, or the operating system refuses.
pub async fn listen(path: &Path) -> Result<UnixListener, SocketError> {
    use std::os::unix::fs::FileTypeExt;
    match std::fs::symlink_metadata(path) {
        Ok(data) if !data.file_type().is_socket() => {
            return Err(SocketError::NotSocket { path: path.to_owned() });
        }
        Ok(_) if UnixStream::connect(path).await.is_ok() => {
            return Err(SocketError::Taken { path: path.to_owned() });
        }
        _ => {}
    }
    replace(path)
}

/// Listens at `path` in the place of whoever listens there now.
///
/// The socket gets its mode before it gets its name, so that nobody else ever connects.
///
/// # Errors
/// The operating system refuses.
pub fn replace(path: &Path) -> Result<UnixListener, SocketError> {
    let failed = |source| SocketError::Io { path: path.to_owned(), source };
    if let Some(parent) = path.parent() {
        let mut builder = std::fs::DirBuilder::new();
        builder.recursive(true).mode(DIRECTORY_MODE).create(parent).map_err(failed)?;
    }
    let mut name = path.as_os_str().to_owned();
    // Docker takes every *.sock of its directory for a plugin.
    name.push(format!(".{}", std::process::id()));
    let unfinished = PathBuf::from(name);
    match std::fs::remove_file(&unfinished) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    let listener = UnixListener::bind(&unfinished).map_err(failed)?;
    let mode = std::fs::Permissions::from_mode(SOCKET_MODE);
    let named = std::fs::set_permissions(&unfinished, mode)
        .and_then(|()| std::fs::rename(&unfinished, path));
    if let Err(error) = named {
        // Nothing more can be done about the half-made one.
        let _ = std::fs::remove_file(&unfinished);
        return Err(failed(error));
    }
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_dead_socket_is_replaced_and_a_living_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/plugin.sock");
        let first = listen(&path).await.unwrap();
        let mode_of = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode_of(&path), 0o600);
        assert_eq!(mode_of(path.parent().unwrap()), 0o700);
        assert!(matches!(listen(&path).await, Err(SocketError::Taken { .. })));
        drop(first);
        let _second = listen(&path).await.unwrap();
        assert!(UnixStream::connect(&path).await.is_ok());
        let file = folder.path().join("file");
        std::fs::write(&file, b"mine").unwrap();
        assert!(matches!(listen(&file).await, Err(SocketError::NotSocket { .. })));
        assert_eq!(std::fs::read(&file).unwrap(), b"mine");
    }
}
