//! The credentials of this worker for registries: a file of the form of Docker's `config.json`, read each time, so that
//! a log-in counts at once. It may name programs that know them (`credHelpers`, `credsStore`); such a program is run.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use docker_credential::{CredentialRetrievalError, DockerCredential, get_credential_from_reader};
use tokio::sync::Mutex;

use super::{DOCKER_HUB, RegistryError};
use crate::small_file;

/// What Docker calls its own registry in the file.
const DOCKER_HUB_NAME: &str = "https://index.docker.io/v1/";

/// Permission bits by which others than the owner can change a file.
const CHANGING_BITS: u32 = 0o022;

/// What a credential helper writes if it has none (docker-credential-helpers, `credentials.ErrCredentialsNotFound`).
const NOT_FOUND: &str = "credentials not found in native keychain";

/// What one shows a registry.
pub(super) enum Credential {
    Password {
        name: String,
        password: String,
    },
    /// For a token of the service that the registry names.
    IdentityToken(String),
}

/// Where the credentials are.
#[derive(Clone, Debug, Default)]
pub(super) struct Credentials {
    path: Option<PathBuf>,
    /// One is looked up at a time: a program that does not end holds one thread, not one for each pull.
    one: Arc<Mutex<()>>,
}

impl Credentials {
    pub(super) fn new(path: Option<PathBuf>) -> Self {
        Self { path, one: Arc::default() }
    }

    /// What there is for a registry; `None` if there is nothing.
    pub(super) async fn of(&self, host: &str) -> Result<Option<Credential>, RegistryError> {
        let Some(path) = self.path.clone() else { return Ok(None) };
        let name = if host == DOCKER_HUB.0 { DOCKER_HUB_NAME } else { host }.to_owned();
        let lock = Arc::clone(&self.one).lock_owned().await;
        let read = tokio::task::spawn_blocking(move || {
            let _lock = lock;
            read(&path, &name)
        });
        let failed = |reason: String| RegistryError::Credentials {
            host: host.to_owned(),
            path: self.path.clone().unwrap_or_default(),
            reason,
        };
        read.await.unwrap_or_else(|stopped| Err(stopped.to_string())).map_err(failed)
    }
}

fn read(path: &Path, name: &str) -> Result<Option<Credential>, String> {
    let found = std::fs::metadata(path).map_err(|error| error.to_string())?;
    let (mode, owner) = (found.mode() & 0o7777, found.uid());
    let is_ours = owner == 0 || owner == rustix::process::geteuid().as_raw();
    if !is_ours || mode & CHANGING_BITS != 0 {
        return Err(format!(
            "others may change it, and it names programs to run: it is of user {owner} with mode {mode:03o}, expected \
             root or this user, and 600"
        ));
    }
    let bytes = small_file::read(path).map_err(|error| error.to_string())?;
    match get_credential_from_reader(bytes.as_slice(), name) {
        Ok(DockerCredential::UsernamePassword(name, password)) => {
            Ok(Some(Credential::Password { name, password }))
        }
        Ok(DockerCredential::IdentityToken(token)) => Ok(Some(Credential::IdentityToken(token))),
        Err(CredentialRetrievalError::NoCredentialConfigured) => Ok(None),
        Err(CredentialRetrievalError::ConfigReadError) => {
            Err("expected JSON as `docker login` writes it to config.json".to_owned())
        }
        Err(CredentialRetrievalError::HelperFailure { stdout, .. })
            if stdout.contains(NOT_FOUND) =>
        {
            Ok(None)
        }
        // What it wrote may hold a secret.
        Err(CredentialRetrievalError::HelperFailure { helper, .. }) => {
            Err(format!("{helper} failed: run `{helper} get` to see why"))
        }
        Err(error) => Err(error.to_string()),
    }
}
