//! Files: make, list, look at, resize, rename, delete.

use reqwest::Method;
use slackwater_api::paths;
use slackwater_api::query::{DeleteFile, ListFiles};
use slackwater_api::types::{CreateFile, File, FilePage, ImageName, Reclaimable, UpdateFile};

use crate::error::ClientError;
use crate::transport::{Call, Client};

impl Client {
    /// `POST /v1/files`: makes a sparse file, and the directories on the way.
    ///
    /// # Errors
    /// [`ClientError`]; code `exists` if there is something at the path.
    pub async fn create_file(&self, path: &str, size_bytes: u64) -> Result<File, ClientError> {
        let body = CreateFile { path: path.to_owned(), size_bytes };
        self.call(Call::post(paths::FILES, &body)?).await
    }

    /// `GET /v1/files`: a page of files, in order of their paths.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn files(&self, query: &ListFiles) -> Result<FilePage, ClientError> {
        self.call(Call::get(format!("{}{}", paths::FILES, query.encode()))).await
    }

    /// `GET /v1/files/{path}`.
    ///
    /// # Errors
    /// [`ClientError`]; code `not_found`.
    pub async fn file(&self, path: &str) -> Result<File, ClientError> {
        self.call(Call::get(paths::file(path))).await
    }

    /// `PATCH /v1/files/{path}`: gives the file another size. Not sent again once it may have
    /// arrived.
    ///
    /// # Errors
    /// [`ClientError`]; code `not_found`.
    pub async fn resize_file(&self, path: &str, size_bytes: u64) -> Result<File, ClientError> {
        self.update_file(path, &UpdateFile { size_bytes: Some(size_bytes), path: None }).await
    }

    /// `PATCH /v1/files/{path}`: gives the file another path, at which nothing may be. Not sent
    /// again once it may have arrived.
    ///
    /// # Errors
    /// [`ClientError`]; codes `not_found` and `exists`.
    pub async fn rename_file(&self, path: &str, to: &str) -> Result<File, ClientError> {
        self.update_file(path, &UpdateFile { size_bytes: None, path: Some(to.to_owned()) }).await
    }

    /// `GET /v1/files/{path}/reclaimable`: what a delete would free.
    ///
    /// # Errors
    /// [`ClientError`]; codes `not_found`, and `unknown_route` of an older appliance.
    pub async fn file_reclaimable(&self, path: &str) -> Result<Reclaimable, ClientError> {
        self.call(Call::get(paths::file_reclaimable(path))).await
    }

    async fn update_file(&self, path: &str, body: &UpdateFile) -> Result<File, ClientError> {
        self.call(Call::new(Method::PATCH, paths::file(path)).json(body)?).await
    }

    /// `DELETE /v1/files/{path}`: its snapshots stay.
    ///
    /// # Errors
    /// [`ClientError`]; code `not_found`.
    pub async fn delete_file(&self, path: &str) -> Result<(), ClientError> {
        self.delete(paths::file(path)).await
    }

    /// `DELETE /v1/files/{path}?image=NAME`, of `published/SNAPSHOT`: the caller publishes the snapshot no more for that
    /// image.
    ///
    /// # Errors
    /// [`ClientError`]; code `not_found` if it does not.
    pub async fn delete_file_for_image(
        &self,
        path: &str,
        image: &ImageName,
    ) -> Result<(), ClientError> {
        let query = DeleteFile { image: Some(image.clone()) };
        self.delete(format!("{}{}", paths::file(path), query.encode())).await
    }
}
