//! The credential of this worker on the disk: what its machine shows the appliance, once it joined.
//!
//! ```text
//! credential.joining     what is sent: `for HASH` of the secret that it is exchanged for, and the new credential
//! credential.replacing   the same, where that secret is the credential of now
//! credential             what this worker's processes show
//!
//! exchange:   lock -> credential.joining or .replacing -> the appliance has the hash -> credential -> unlock
//! ```
//! A try that was cut off at any moment is repeated with the same secret, and then sends the same credential, which the
//! appliance answers as before. A new secret has a new credential.
//!
//! Invariant: at every moment one of the files has a credential that the appliance takes. Only the directory's user
//! reads them, and one process at a time changes them.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use slackwater_client::{Client, Credential};

use crate::error::DriverError;

/// The file in the state directory.
const NAME: &str = "credential";

/// What is exchanged for a credential.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// A join token.
    JoinToken,
    /// The credential of now.
    Credential,
}

impl Origin {
    /// The file of an exchange. Each has one of its own: a try to join must not lose a replacement that the appliance
    /// has taken.
    const fn file(self) -> &'static str {
        match self {
            Self::JoinToken => "credential.joining",
            Self::Credential => "credential.replacing",
        }
    }
}

/// The file by which a process changes the others.
const LOCK: &str = "credential.lock";

/// Longest content that is read; an exchange has some 160 bytes.
const BYTES_MAX: u64 = 4096;

/// Age at which a credential is replaced, so that an old backup or image of the machine holds none that counts.
const AGE_MAX: Duration = Duration::from_secs(30 * 24 * 3600);

/// How often its age is looked at.
const LOOK_INTERVAL: Duration = Duration::from_secs(3600);

/// Where the credential of a state directory is, if this worker joined.
#[must_use]
pub fn path(state_dir: &Path) -> PathBuf {
    state_dir.join(NAME)
}

/// The right to change the credential, which one process has at a time.
#[derive(Debug)]
pub(crate) struct Turn {
    state_dir: PathBuf,
    _lock: File,
}

/// The change of a credential.
#[derive(Debug)]
pub(crate) struct Exchange {
    turn: Turn,
    next: Credential,
}

impl Turn {
    /// Takes it; it ends with this process, or when it is dropped.
    ///
    /// # Errors
    /// `CredentialLocked` while another process has it; `Io`.
    pub(crate) fn take(state_dir: &Path) -> Result<Self, DriverError> {
        let lock = take_lock(state_dir)?;
        Ok(Self { state_dir: state_dir.to_owned(), _lock: lock })
    }

    /// Begins to exchange `secret` for another credential: that of an earlier try with the same secret, or a new one.
    /// It is on the disk.
    ///
    /// # Errors
    /// `Io`; `Credential`.
    pub(crate) fn begin(self, origin: Origin, secret: &str) -> Result<Exchange, DriverError> {
        let state_dir = &self.state_dir;
        let path = state_dir.join(origin.file());
        let for_what = format!("for {}", Credential::hash_of(secret));
        let earlier = match read(&path) {
            Ok(text) => earlier_of(&text, &for_what),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => return Err(DriverError::io("read", path)(error)),
        };
        let next = match earlier {
            // Its name may not be on the disk yet, if that try was killed.
            Some(credential) => sync(state_dir).map(|()| credential),
            None => {
                let credential = Credential::generate()?;
                let content = format!("{for_what}\n{}\n", credential.reveal());
                write(state_dir, origin.file(), &content).map(|()| credential)
            }
        };
        let next = next.map_err(DriverError::io("write", path))?;
        Ok(Exchange { turn: self, next })
    }
}

impl Exchange {
    /// The credential that the appliance is to take.
    pub(crate) const fn next(&self) -> &Credential {
        &self.next
    }

    /// Makes it the one that this worker's processes show, once the appliance has taken it.
    pub(crate) fn adopt(self) -> Result<(), DriverError> {
        let (state_dir, content) = (&self.turn.state_dir, format!("{}\n", self.next.reveal()));
        write(state_dir, NAME, &content).map_err(DriverError::io("write", path(state_dir)))
    }
}

/// Takes away the credential of another worker, such as the one of a machine that this one is a copy of; whether there
/// was one.
pub(crate) fn discard(state_dir: &Path) -> io::Result<bool> {
    let mut was_there = false;
    for name in [NAME, Origin::JoinToken.file(), Origin::Credential.file()] {
        match fs::remove_file(state_dir.join(name)) {
            Ok(()) => was_there = true,
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    sync(state_dir)?;
    Ok(was_there)
}

/// Replaces the credential whenever it is old.
pub(crate) async fn keep_fresh(client: Client, state_dir: PathBuf) {
    loop {
        match is_old(&path(&state_dir)) {
            Ok(false) => {}
            Ok(true) => match replace(&client, &state_dir).await {
                Ok(()) => tracing::info!("the credential was old and is replaced"),
                Err(error) => tracing::warn!(%error, "the credential is old and not replaced yet"),
            },
            // This worker did not join, or not yet.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => tracing::warn!(%error, "the credential cannot be looked at"),
        }
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}

/// Replaces the credential with another one, which `client`, whose credential it is, tells the appliance.
async fn replace(client: &Client, state_dir: &Path) -> Result<(), DriverError> {
    let turn = Turn::take(state_dir)?;
    let current = read(&path(state_dir)).map_err(DriverError::io("read", path(state_dir)))?;
    let exchange = turn.begin(Origin::Credential, current.trim())?;
    client.replace_credential(exchange.next().hash()).await?;
    exchange.adopt()
}

fn is_old(path: &Path) -> io::Result<bool> {
    let written = fs::metadata(path)?.modified()?;
    // A clock that was set back makes none old.
    Ok(SystemTime::now().duration_since(written).is_ok_and(|age| age > AGE_MAX))
}

/// The credential of an exchange's file, if it was made for this secret.
fn earlier_of(text: &str, for_what: &str) -> Option<Credential> {
    let (origin, credential) = text.split_once('\n')?;
    if origin != for_what {
        return None;
    }
    Credential::parse(credential).ok()
}

fn take_lock(state_dir: &Path) -> Result<File, DriverError> {
    let path = state_dir.join(LOCK);
    let mut options = OpenOptions::new();
    let file = options.create(true).truncate(false).write(true).mode(0o600).open(&path);
    let file = file.map_err(DriverError::io("open", &path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(fs::TryLockError::WouldBlock) => Err(DriverError::CredentialLocked { path }),
        Err(fs::TryLockError::Error(source)) => Err(DriverError::io("lock", path)(source)),
    }
}

fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(BYTES_MAX).read_to_string(&mut text)?;
    Ok(text)
}

/// Gives a file this content, as a whole and on the disk.
fn write(directory: &Path, name: &str, content: &str) -> io::Result<()> {
    let new = directory.join(format!("{name}.new"));
    // One that was left may be half written, or have other rights.
    match fs::remove_file(&new) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
    file.write_all(content.as_bytes())?;
    file.sync_all()?;
    fs::rename(&new, directory.join(name))?;
    sync(directory)
}

fn sync(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn begin(directory: &Path, secret: &str) -> Exchange {
        Turn::take(directory).unwrap().begin(Origin::JoinToken, secret).unwrap()
    }

    fn exchange_of(origin: Origin, directory: &Path) -> PathBuf {
        directory.join(origin.file())
    }

    #[test]
    fn a_try_that_was_cut_off_is_repeated_with_the_same_credential() {
        let folder = tempfile::tempdir().unwrap();
        let first = begin(folder.path(), "token").next().clone();
        // Killed before it was sent, after it was sent, and while it was adopted.
        assert_eq!(begin(folder.path(), "token").next(), &first);
        fs::write(folder.path().join("credential.new"), "half of").unwrap();
        fs::write(folder.path().join("credential.joining.new"), "half of").unwrap();
        let exchange = begin(folder.path(), "token");
        assert_eq!(exchange.next(), &first);
        exchange.adopt().unwrap();
        let adopted = read(&path(folder.path())).unwrap();
        assert_eq!(adopted.trim(), first.reveal());
        // Killed after that.
        assert_eq!(begin(folder.path(), "token").next(), &first);
        for file in [path(folder.path()), exchange_of(Origin::JoinToken, folder.path())] {
            let mode = fs::metadata(&file).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{}", file.display());
        }
    }

    #[test]
    fn another_secret_has_another_credential() {
        let folder = tempfile::tempdir().unwrap();
        let first = begin(folder.path(), "token").next().clone();
        let second = begin(folder.path(), "other").next().clone();
        assert_ne!(first, second);
        for damaged in ["", "for", &format!("for {}\n", Credential::hash_of("other")), "x\ny\nz"] {
            fs::write(exchange_of(Origin::JoinToken, folder.path()), damaged).unwrap();
            assert_ne!(begin(folder.path(), "other").next(), &second, "{damaged}");
        }
        let text = fs::read_to_string(exchange_of(Origin::JoinToken, folder.path())).unwrap();
        assert!(!text.contains("other"), "the secret before is not kept: {text}");
    }

    #[test]
    fn a_try_to_join_keeps_a_replacement_that_was_sent() {
        let folder = tempfile::tempdir().unwrap();
        let replace = || {
            let turn = Turn::take(folder.path()).unwrap();
            turn.begin(Origin::Credential, "now").unwrap().next().clone()
        };
        let sent = replace();
        begin(folder.path(), "token");
        assert_eq!(replace(), sent);
    }

    #[test]
    fn one_process_at_a_time_changes_it() {
        let folder = tempfile::tempdir().unwrap();
        let held = begin(folder.path(), "token");
        let refused = Turn::take(folder.path()).unwrap_err().to_string();
        assert!(refused.contains("try again"), "{refused}");
        drop(held);
        begin(folder.path(), "token");
    }

    #[test]
    fn a_copy_has_none() {
        let folder = tempfile::tempdir().unwrap();
        assert!(!discard(folder.path()).unwrap());
        begin(folder.path(), "token").adopt().unwrap();
        assert!(discard(folder.path()).unwrap());
        assert!(!path(folder.path()).exists());
        assert!(!exchange_of(Origin::JoinToken, folder.path()).exists());
    }
}
