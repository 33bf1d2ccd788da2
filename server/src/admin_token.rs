//! The token of a server that has no token files: `admin-token` of the data directory, with the secret alone.
//!
//! ```text
//! there              read
//! missing            made: admin-token.new -> sync -> rename -> sync of the directory
//! no room for it     no call is let in by a token; it is made as soon as there is room
//! ```
//! It keeps the other users of this machine out, who reach REST on loopback as the administrator does: the server's user
//! and root alone read it. `slackwater` takes the file as its `--token-file`.
//!
//! Invariant: a token that lets callers in is on the disk, and so is its name.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use slackwater_api::{Role, Secret, Token, Tokens, Workers};

use crate::config::tokens::{self, ADMIN_TOKEN_FILE};
use crate::data_file;
use crate::error::ServerError;
use crate::token_command::new_secret;

/// The name of the token. No worker can have it; a line of a token file can, and a secret in it then goes on.
const TOKEN_NAME: &str = "@local-admin";

/// Longest file: far over any secret that clients send.
const FILE_BYTES_MAX: u64 = 4096;

/// How often it is tried again when there was no room for it.
const AGAIN: Duration = Duration::from_secs(10);

/// The token of the file at `path`, which is made if it is not there, in a directory that is open to this process alone.
/// Where there is no room for it, one that lets no call in; [`provide_later`] goes on then.
///
/// # Errors
/// The file cannot be read or made, or has no secret that can be a token's.
pub(crate) async fn provide(path: &Path) -> Result<(Token, bool), ServerError> {
    if let Some(token) = load_beside(path).await? {
        return Ok((token, true));
    }
    tracing::warn!(
        path = %path.display(),
        "no room for the administrator's token: until there is, REST lets in workers that joined alone"
    );
    let failed = |source| ServerError::AdminToken { path: path.to_owned(), source };
    Ok((token(&new_secret().map_err(failed)?), false))
}

/// Has calls be let in by the token as soon as there is room for it. Tried as long as the runtime lives.
pub(crate) async fn provide_later(path: PathBuf, tokens: Arc<Tokens>, workers: Arc<Workers>) {
    provide_within(&path, &tokens, &workers, AGAIN).await;
}

async fn provide_within(path: &Path, tokens: &Tokens, workers: &Workers, again: Duration) {
    loop {
        tokio::time::sleep(again).await;
        let made = match load_beside(path).await {
            Ok(None) => continue,
            Ok(Some(token)) => {
                tokens.replace(vec![token], workers).map_err(|error| error.to_string())
            }
            Err(error) => Err(error.to_string()),
        };
        match made {
            Ok(_) => return,
            Err(error) => tracing::warn!(error, "the administrator's token is not made yet"),
        }
    }
}

/// Beside the runtime: the disk may be slow.
async fn load_beside(path: &Path) -> Result<Option<Token>, ServerError> {
    let path = path.to_owned();
    let loading = tokio::task::spawn_blocking(move || {
        load(&path).map_err(|source| ServerError::AdminToken { path, source })
    });
    let task = "reading the administrator's token";
    loading.await.map_err(|source| ServerError::Panicked { task, source })?
}

/// The token; `None` if there is no room for one.
fn load(path: &Path) -> io::Result<Option<Token>> {
    let directory = path.parent().ok_or(ErrorKind::IsADirectory)?;
    match std::fs::symlink_metadata(path) {
        // A pipe would be waited for.
        Ok(found) if !found.is_file() => Err(bad("it is no regular file")),
        Ok(_) => {
            let token = read(path)?;
            // The process that made it may have been killed before its name was on the disk.
            data_file::sync(directory)?;
            Ok(Some(token))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => match make(path, directory) {
            Err(error) if data_file::is_full(&error) => Ok(None),
            made => made.map(Some),
        },
        Err(error) => Err(error),
    }
}

fn read(path: &Path) -> io::Result<Token> {
    let mut bytes = Vec::new();
    File::open(path)?.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    let text = String::from_utf8(bytes).map_err(|_| bad("it is no text"))?;
    if u64::try_from(text.len()).is_ok_and(|length| length > FILE_BYTES_MAX) {
        return Err(bad(&format!("it has more than {FILE_BYTES_MAX} bytes")));
    }
    let secret = text.trim();
    // As a client takes the file.
    tokens::plain(secret).map_err(|reason| bad(&reason))?;
    Ok(token(secret))
}

fn bad(reason: &str) -> io::Error {
    let advice = "remove the file, and a start makes another one";
    io::Error::new(ErrorKind::InvalidData, format!("{reason}; {advice}"))
}

/// Makes the file with a new secret.
fn make(path: &Path, directory: &Path) -> io::Result<Token> {
    let secret = new_secret()?;
    data_file::replace(directory, ADMIN_TOKEN_FILE, format!("{secret}\n").as_bytes())?;
    tracing::info!(path = %path.display(), "made the administrator's token of this machine");
    Ok(token(&secret))
}

fn token(secret: &str) -> Token {
    Token { name: TOKEN_NAME.to_owned(), role: Role::Admin, secret: Secret::new(secret) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use slackwater_api::worker::WorkerName;

    use super::*;
    use crate::data_file::tests::OneFile;

    fn load_in(directory: &Path) -> Token {
        load(&directory.join(ADMIN_TOKEN_FILE)).unwrap().unwrap()
    }

    #[test]
    fn it_is_made_once_and_is_its_users_alone() {
        let directory = tempfile::tempdir().unwrap();
        let made = load_in(directory.path());
        let path = directory.path().join(ADMIN_TOKEN_FILE);
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        let secret = std::fs::read_to_string(&path).unwrap();
        assert_eq!(made.secret.hash(), Secret::new(secret.trim_end()).hash());
        assert_eq!((made.role, secret.lines().count()), (Role::Admin, 1));
        let hash = |directory| load_in(directory).secret.hash();
        assert_eq!(hash(directory.path()), made.secret.hash(), "the same again");
        let other = tempfile::tempdir().unwrap();
        assert_ne!(hash(other.path()), made.secret.hash());
        std::fs::remove_file(&path).unwrap();
        assert_ne!(hash(directory.path()), made.secret.hash(), "another one");
    }

    #[test]
    fn what_is_no_secret_is_an_error_with_the_way_out_and_left_as_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(ADMIN_TOKEN_FILE);
        let hash = format!(" blake3:{}\n", "5a".repeat(32));
        let with_note = "0123456789abcdef\n# a note\n";
        let guessed = "aaaaaaaaaaaaaaaaaaaa\n";
        for content in
            ["", "\n", "short\n", guessed, "0123456789abcdef 0123456789abcdef", &hash, with_note]
        {
            std::fs::write(&path, content).unwrap();
            let error = load(&path).unwrap_err().to_string();
            assert!(error.contains("remove the file"), "{error}");
            assert!(!error.contains("0123456789"), "{error}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), content);
        }
        for content in [vec![b'a'; 1 << 20], vec![0xff; 20]] {
            std::fs::write(&path, content).unwrap();
            assert!(load(&path).unwrap_err().to_string().contains("remove the file"));
        }
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
        assert!(load(&path).unwrap_err().to_string().contains("no regular file"));
    }

    #[tokio::test]
    async fn where_it_cannot_be_made_the_way_out_is_told() {
        let error = provide(Path::new("/nonexistent/admin-token")).await.unwrap_err().to_string();
        assert!(error.contains("--token-file"), "{error}");
    }

    #[test]
    fn no_worker_can_have_its_name() {
        assert!(TOKEN_NAME.parse::<WorkerName>().is_err());
    }

    #[tokio::test]
    async fn as_root_it_lets_in_once_there_is_room_for_it() {
        let small = OneFile::new();
        let path = small.path().join(ADMIN_TOKEN_FILE);
        let filler = small.path().join("filler");
        std::fs::write(&filler, "").unwrap();
        let (token, is_made) = provide(&path).await.unwrap();
        assert!(!is_made && !path.exists());
        let tokens = Tokens::new(vec![token]);
        let workers = Workers::default();
        std::fs::remove_file(&filler).unwrap();
        let made = provide_within(&path, &tokens, &workers, Duration::from_millis(10));
        tokio::time::timeout(Duration::from_secs(60), made).await.unwrap();
        let made = load(&path).unwrap().unwrap();
        assert!(tokens.replace(vec![made], &workers).unwrap().is_empty(), "another one is taken");
    }
}
