//! Workers: machines with credentials of their own.

use reqwest::Method;
use slackwater_api::paths;
use slackwater_api::worker::{
    AddWorker, AddedWorker, JoinWorker, ReplaceCredential, SecretHash, Worker, WorkerList,
    WorkerName,
};
use uuid::Uuid;

use crate::error::ClientError;
use crate::transport::{Call, Client};

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
}
