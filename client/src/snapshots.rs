//! Snapshots and clones: take, list, look at, label, delete, compare, clone.

use reqwest::Method;
use slackwater_api::paths;
use slackwater_api::query::{AddChain, Diff, ListSnapshots};
use slackwater_api::types::{
    ChainId, CreateClone, CreateSnapshot, DiffPage, File, ImageName, Labels, Reclaimable,
    RegisterChain, Snapshot, SnapshotId, SnapshotPage, SnapshotReference, UpdateSnapshot,
};

use crate::error::ClientError;
use crate::transport::{Call, Client};

impl Client {
    /// `POST /v1/snapshots`: takes a snapshot.
    ///
    /// # Errors
    /// [`ClientError`]; code `not_found` without the file, `exists` if the name is taken, and
    /// then the error carries the snapshot that holds it.
    pub async fn create_snapshot(&self, body: &CreateSnapshot) -> Result<Snapshot, ClientError> {
        self.call(Call::post(paths::SNAPSHOTS, body)?).await
    }

    /// `GET /v1/snapshots`: a page of snapshots, in order of their ids.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn snapshots(&self, query: &ListSnapshots) -> Result<SnapshotPage, ClientError> {
        self.call(Call::get(format!("{}{}", paths::SNAPSHOTS, query.encode()))).await
    }

    /// `GET /v1/snapshots/{id}`.
    ///
    /// # Errors
    /// [`ClientError`]; code `not_found`.
    pub async fn snapshot(&self, id: SnapshotId) -> Result<Snapshot, ClientError> {
        self.call(Call::get(paths::snapshot(id))).await
    }

    /// `PATCH /v1/snapshots/{id}`: replaces all its labels. Not sent again once it may have
    /// arrived.
    ///
    /// # Errors
    /// [`ClientError`]; codes `not_found`, and `no_space` if a full store would have to take more.
    pub async fn set_snapshot_labels(
        &self,
        id: SnapshotId,
        labels: Labels,
    ) -> Result<Snapshot, ClientError> {
        let call = Call::new(Method::PATCH, paths::snapshot(id));
        self.call(call.json(&UpdateSnapshot { labels })?).await
    }

    /// `DELETE /v1/snapshots/{id}`: its clones stay.
    ///
    /// # Errors
    /// [`ClientError`]; code `not_found`.
    pub async fn delete_snapshot(&self, id: SnapshotId) -> Result<(), ClientError> {
        self.delete(paths::snapshot(id)).await
    }

    /// `GET /v1/snapshots/{id}/diff`: a page of what differs, in order of offset.
    ///
    /// # Errors
    /// [`ClientError`]; code `not_found`.
    pub async fn diff(&self, id: SnapshotId, query: &Diff) -> Result<DiffPage, ClientError> {
        self.call(Call::get(format!("{}{}", paths::snapshot_diff(id), query.encode()))).await
    }

    /// `GET /v1/snapshots/{id}/reclaimable`: what a delete would free.
    ///
    /// # Errors
    /// [`ClientError`]; codes `not_found`, and `unknown_route` of an older appliance.
    pub async fn snapshot_reclaimable(&self, id: SnapshotId) -> Result<Reclaimable, ClientError> {
        self.call(Call::get(paths::snapshot_reclaimable(id))).await
    }

    /// `GET /v1/snapshots/{id}/reference`: what an image holds to stand for the snapshot.
    ///
    /// # Errors
    /// [`ClientError`]; code `not_found`, `no_space` if the server has no key, `unknown_route` of
    /// one of release 0.2.
    pub async fn snapshot_reference(
        &self,
        id: SnapshotId,
    ) -> Result<SnapshotReference, ClientError> {
        self.call(Call::get(paths::snapshot_reference(id))).await
    }

    /// `POST /v1/chains`: takes a snapshot and registers it as a chain.
    ///
    /// # Errors
    /// [`ClientError`]; code `not_found` without the file, `exists` if another is registered for this chain and
    /// size, and then the error carries its snapshot; `unknown_route` of a server of release 0.2.
    pub async fn register_chain(&self, body: &RegisterChain) -> Result<Snapshot, ClientError> {
        self.call(Call::post(paths::CHAINS, body)?).await
    }

    /// `GET /v1/chains/{chain_id}/{size_bytes}`: the snapshot that is registered for a chain.
    ///
    /// # Errors
    /// [`ClientError`]; code `not_found`, `unknown_route` of a server of release 0.2.
    pub async fn chain(&self, chain: &ChainId, size_bytes: u64) -> Result<Snapshot, ClientError> {
        self.call(Call::get(paths::chain(chain, size_bytes))).await
    }

    /// `PUT /v1/snapshots/{id}/chains/{chain_id}`: registers a snapshot as a chain, too, and says for
    /// whom the layer is.
    ///
    /// # Errors
    /// [`ClientError`]; codes `not_found`, `no_space`, and `unknown_route` of a server of release 0.2.
    pub async fn add_chain(
        &self,
        id: SnapshotId,
        chain: &ChainId,
        query: &AddChain,
    ) -> Result<Snapshot, ClientError> {
        let path = format!("{}{}", paths::snapshot_chain(id, chain), query.encode());
        self.call(Call::new(Method::PUT, path)).await
    }

    /// `POST /v1/clones`: makes a writable file with the snapshot's content.
    ///
    /// # Errors
    /// [`ClientError`]; code `not_found` without the snapshot, `exists` if there is something
    /// at the path.
    pub async fn create_clone(
        &self,
        snapshot_id: SnapshotId,
        path: &str,
    ) -> Result<File, ClientError> {
        self.clone_for_image(snapshot_id, path, None).await
    }

    /// The same at `published/SNAPSHOT`, so that the snapshot is kept for an image that refers to it.
    ///
    /// # Errors
    /// As [`Self::create_clone`]: the image is noted also where `exists` is answered; code `invalid_value` from an
    /// appliance of release 0.2, if an image is given.
    pub async fn clone_for_image(
        &self,
        snapshot_id: SnapshotId,
        path: &str,
        image: Option<&ImageName>,
    ) -> Result<File, ClientError> {
        let body = CreateClone { snapshot_id, path: path.to_owned(), image: image.cloned() };
        self.call(Call::post(paths::CLONES, &body)?).await
    }
}
