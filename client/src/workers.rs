//! Workers: machines with credentials of their own.

use std::time::Duration;

use reqwest::Method;
use slackwater_api::error::ProblemCode;
use slackwater_api::paths;
use slackwater_api::worker::{
    AddWorker, AddedWorker, EXPORT_MOUNTS, JoinWorker, MountPath, ReplaceCredential, SecretHash,
    WORKER_MOUNTS, Worker, WorkerList, WorkerName,
};
use uuid::Uuid;

use crate::error::ClientError;
use crate::retry::RetryPolicy;
use crate::transport::{Call, Client};

/// Wait between tries for a path to mount while the appliance is away.
const MOUNT_WAIT_MIN: Duration = Duration::from_millis(100);
const MOUNT_WAIT_MAX: Duration = Duration::from_secs(2);

impl Client {
    /// `GET /v1/workers`: all workers, in order of their names.
    ///
    /// # Errors
    /// [`ClientError`]; code `forbidden` without the role admin.
    pub async fn workers(&self) -> Result<Vec<Worker>, ClientError> {
        Ok(self.call::<WorkerList>(Call::get(paths::WORKERS)).await?.workers)
    }

    /// `GET /v1/workers/{name}`.
    ///
    /// # Errors
    /// [`ClientError`]; codes `not_found`, and `forbidden` without the role admin.
    pub async fn worker(&self, name: &WorkerName) -> Result<Worker, ClientError> {
        self.call(Call::get(paths::worker(name))).await
    }

    /// `POST /v1/workers`: adds a worker, and makes the token by which its machine joins.
    ///
    /// # Errors
    /// [`ClientError`]; codes `exists`, `invalid_value`, and `forbidden` without the role admin.
    pub async fn add_worker(&self, request: &AddWorker) -> Result<AddedWorker, ClientError> {
        self.call(Call::post(paths::WORKERS, request)?).await
    }

    /// `DELETE /v1/workers/{name}`: the worker's credential is refused from then on.
    ///
    /// # Errors
    /// [`ClientError`]; codes `not_found`, and `forbidden` without the role admin. With `io` and `no_space` it is
    /// revoked until the appliance restarts.
    pub async fn revoke_worker(&self, name: &WorkerName) -> Result<(), ClientError> {
        self.delete(paths::worker(name)).await
    }

    /// `POST /v1/join`, by a client whose token is a join token: this machine becomes the worker that the token was
    /// made for, and has the credential with this hash from then on. Safe to repeat with the same id and hash.
    ///
    /// # Errors
    /// [`ClientError`]; codes `unauthenticated` if the join token is not known, was used or has expired, and `exists`
    /// if another worker has the id.
    pub async fn join(
        &self,
        worker_id: Uuid,
        credential: SecretHash,
    ) -> Result<Worker, ClientError> {
        let request = JoinWorker { worker_id, credential_blake3: credential };
        self.call(Call::post(paths::JOIN, &request)?).await
    }

    /// `PUT /v1/credential`, by a client whose token is a worker's credential: it has the one with this hash from then
    /// on. The previous one counts until the new one was used, and a minute more.
    ///
    /// # Errors
    /// [`ClientError`]; code `unauthenticated` for another token than a worker's credential.
    pub async fn replace_credential(&self, next: SecretHash) -> Result<Worker, ClientError> {
        let request = ReplaceCredential { credential_blake3: next };
        self.call(Call::new(Method::PUT, paths::CREDENTIAL.to_owned()).json(&request)?).await
    }

    /// `POST /v1/mount-paths`: a path by which the caller mounts, for some minutes. A worker mounts what it reaches, the
    /// bearer of a token the whole export.
    ///
    /// # Errors
    /// [`ClientError`]; codes `forbidden` for a token of the role read-only, and `unauthenticated`.
    pub async fn mount_path(&self) -> Result<MountPath, ClientError> {
        // Without an idempotency key: another path does as well, and the appliance keeps no answer with a secret.
        self.call(Call::new(Method::POST, paths::MOUNT_PATHS.to_owned())).await
    }

    /// The name below the export under which this client's machine mounts: `.worker` with a worker's credential, else
    /// `.export`.
    ///
    /// # Errors
    /// `TokenFile`: the file of the credential or token cannot be read.
    pub fn mounts_below(&self) -> Result<&'static str, ClientError> {
        Ok(if self.has_credential()? { WORKER_MOUNTS } else { EXPORT_MOUNTS })
    }

    /// The path by which this client's machine mounts `export`: a secret one, or that of the export itself where the
    /// appliance has no secret paths (release 0.2), and goes by the address. Waits while the appliance is away.
    ///
    /// # Errors
    /// As of [`Self::mount_path`]; `TokenFile`: the file of the credential or token cannot be read; `Protocol`: the
    /// appliance's export is another one.
    pub async fn path_to_mount(&self, export: &str) -> Result<String, ClientError> {
        let client = self.with_retry(RetryPolicy::never());
        let mut wait = MOUNT_WAIT_MIN;
        loop {
            match client.mount_path().await {
                Ok(made) => return self.below(export, made.path),
                Err(error) if error.is_passing() => {
                    tokio::time::sleep(wait.max(error.retry_after().unwrap_or_default())).await;
                    wait = (wait * 2).min(MOUNT_WAIT_MAX);
                }
                // A worker that joined never mounts by its address.
                Err(error)
                    if error.code() == Some(ProblemCode::UnknownRoute)
                        && !self.has_credential()? =>
                {
                    return Ok(export.to_owned());
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// The path, if it is of this export.
    fn below(&self, export: &str, path: String) -> Result<String, ClientError> {
        let export_path = export.trim_end_matches('/');
        let names = path.strip_prefix(export_path).unwrap_or_default();
        let is_below = |mounts| names.starts_with(&format!("/{mounts}/"));
        // Either, as the machine may have joined in between.
        if [WORKER_MOUNTS, EXPORT_MOUNTS].into_iter().any(is_below) {
            return Ok(path);
        }
        // Without the path, which is a secret.
        Err(ClientError::Protocol {
            method: "POST".to_owned(),
            url: format!("{}{}", self.url(), paths::MOUNT_PATHS),
            got: "a path of another export".to_owned(),
            expected: format!("one below {export}, the driver's `export-path`"),
        })
    }
}
