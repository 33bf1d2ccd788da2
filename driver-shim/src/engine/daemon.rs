//! The driver's own daemon, by its control socket.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use axum::body::{Body, BodyDataStream};
use futures_util::StreamExt;
use hyper::Method;
use slackwater_archive::Reference;
use slackwater_client::types::{ChainId, ImageName, SnapshotId};

use super::EngineError;
use super::http::{UnixHttp, encode};
use crate::control::{
    CaptureRequest, Chain, LayerQuery, PublishRequest, PublishedAnswer, UnpublishImageRequest,
    ViewAnswer, ViewRequest,
};
use crate::worker::{Chosen, Engine, SnapshotRef, Unpublished, Volume};

/// What a daemon that lacks something of its answers, or a whole call, has to hear.
const OLD_DAEMON: &str = "it is of an older release than this command, restart it";

/// The daemon of this machine.
#[derive(Clone, Debug)]
pub struct Daemon {
    http: UnixHttp,
}

/// A snapshot that the daemon keeps mounted until this is dropped.
#[derive(Debug)]
pub struct RemoteView {
    path: PathBuf,
    // The daemon lets go of the mount when the connection ends.
    _connection: BodyDataStream,
}

impl RemoteView {
    /// Where it is mounted.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Daemon {
    /// The daemon that listens at `socket`.
    #[must_use]
    pub fn new(socket: &Path) -> Self {
        Self { http: UnixHttp::new(socket, "slackwater-driver") }
    }

    /// What it says of itself.
    ///
    /// # Errors
    /// [`EngineError`].
    pub async fn status(&self) -> Result<serde_json::Value, EngineError> {
        self.http.get("/status").await
    }

    /// All volumes of an engine.
    ///
    /// # Errors
    /// [`EngineError`].
    pub async fn volumes(&self, engine: Engine) -> Result<Vec<Volume>, EngineError> {
        self.http.get(&format!("/volumes?engine={engine}")).await
    }

    /// A volume and what it was made above, from it down, each with its snapshot.
    ///
    /// # Errors
    /// [`EngineError`].
    pub async fn chain(&self, engine: Engine, name: &str) -> Result<Chain, EngineError> {
        self.http.get(&format!("/volumes/{engine}/{}", encode(name))).await
    }

    /// The snapshot of an image's chain id, in a namespace of containerd; of this kind, if one is asked for.
    ///
    /// # Errors
    /// [`EngineError`].
    pub async fn layer(
        &self,
        namespace: &str,
        chain_id: &str,
        query: &LayerQuery,
    ) -> Result<Option<SnapshotRef>, EngineError> {
        let (namespace, chain_id) = (encode(namespace), encode(chain_id));
        let given = [
            ("layers", query.layers.map(|layers| layers.to_string())),
            ("below", query.below.clone()),
        ];
        let query = query_of(given);
        self.http.get(&format!("/layers/{namespace}/{chain_id}?{query}")).await
    }

    /// Takes a snapshot of a container's disk while it runs.
    ///
    /// # Errors
    /// [`EngineError`].
    pub async fn capture(&self, engine: Engine, name: &str) -> Result<SnapshotRef, EngineError> {
        self.http.post("/capture", &CaptureRequest { engine, name: name.to_owned() }).await
    }

    /// Keeps a snapshot for images that refer to it, and for a chain id and by an image's name if they are given.
    ///
    /// # Errors
    /// [`EngineError`].
    pub async fn publish(
        &self,
        snapshot: SnapshotId,
        chain_id: Option<ChainId>,
        image: Option<ImageName>,
    ) -> Result<(), EngineError> {
        self.http.post("/publish", &PublishRequest { snapshot, chain_id, image }).await
    }

    /// Keeps it no more. Returns whether others keep it published, if the appliance says so.
    ///
    /// # Errors
    /// [`EngineError`].
    pub async fn unpublish(&self, snapshot: SnapshotId) -> Result<Option<bool>, EngineError> {
        let request = PublishRequest { snapshot, chain_id: None, image: None };
        self.http.post("/unpublish", &request).await
    }

    /// Keeps the snapshots of an image no more, but for those that other images refer to, too.
    ///
    /// # Errors
    /// [`EngineError`].
    pub async fn unpublish_image(&self, image: ImageName) -> Result<Unpublished, EngineError> {
        self.http.post("/unpublish-image", &UnpublishImageRequest { image }).await
    }

    /// What is kept so.
    ///
    /// # Errors
    /// [`EngineError`].
    pub async fn published(&self, chosen: &Chosen) -> Result<PublishedAnswer, EngineError> {
        let query = [
            ("text", chosen.text.clone()),
            ("by", chosen.by.clone()),
            ("older_than_seconds", chosen.older_than_seconds.map(|seconds| seconds.to_string())),
        ];
        let query = query_of(query);
        self.http.get(&format!("/published?{query}")).await
    }

    /// The reference to a snapshot.
    ///
    /// # Errors
    /// [`EngineError`].
    pub async fn reference(&self, snapshot: SnapshotId) -> Result<Reference, EngineError> {
        self.http.get(&format!("/references/{snapshot}")).await
    }

    /// The snapshot that a reference of an image names.
    ///
    /// # Errors
    /// [`EngineError`]; `Refused` where the reference is not to be trusted.
    pub async fn referenced(&self, reference: &Reference) -> Result<SnapshotRef, EngineError> {
        let found = self.http.post("/references", reference).await;
        match found {
            // A snapshot that is not there has an error in words.
            Err(EngineError::Refused { status: 404 | 405, message, .. }) if message.is_empty() => {
                Err(EngineError::unexpected(self.http.peer(), OLD_DAEMON))
            }
            found => found,
        }
    }

    /// Mounts a snapshot for reading; the image of a layer with these images below it, the highest one first, as one tree.
    ///
    /// # Errors
    /// [`EngineError`]; `NotVisible` where this process does not see the daemon's mounts.
    pub async fn view(
        &self,
        snapshot: SnapshotRef,
        below: &[SnapshotRef],
    ) -> Result<RemoteView, EngineError> {
        let content = self.http.json(&ViewRequest { snapshot, below: Some(below.to_vec()) })?;
        let answer = self.http.open(Method::POST, "/view", Some(content)).await?;
        let mut stream = Body::into_data_stream(answer.into_body());
        let unexpected = |reason: String| EngineError::unexpected(self.http.peer(), reason);
        let first = match stream.next().await {
            Some(Ok(first)) => first,
            Some(Err(error)) => return Err(unexpected(error.to_string())),
            None => return Err(unexpected("no view".to_owned())),
        };
        let answer: ViewAnswer =
            serde_json::from_slice(&first).map_err(|error| unexpected(error.to_string()))?;
        require_visible(&answer)?;
        Ok(RemoteView { path: answer.path, _connection: stream })
    }
}

/// The parameters that are given, as they stand behind a path.
fn query_of<const COUNT: usize>(parameters: [(&str, Option<String>); COUNT]) -> String {
    let given = parameters.into_iter().filter_map(|(name, value)| Some((name, value?)));
    let given = given.map(|(name, value)| format!("{name}={}", encode(&value)));
    given.collect::<Vec<_>>().join("&")
}

/// Refuses a directory that is not the file system which the daemon mounted there: it would be taken for an empty layer.
fn require_visible(view: &ViewAnswer) -> Result<(), EngineError> {
    let Some(expected) = view.device else {
        return Err(EngineError::unexpected("slackwater-driver", OLD_DAEMON));
    };
    let got = std::fs::metadata(&view.path).map(|metadata| metadata.dev());
    match got {
        Ok(device) if device == expected => Ok(()),
        _ => Err(EngineError::NotVisible { path: view.path.clone() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_without_the_mount_is_no_view() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_owned();
        let device = std::fs::metadata(&path).unwrap().dev();
        let refused = |path: &Path, device| {
            require_visible(&ViewAnswer { path: path.to_owned(), device }).unwrap_err().to_string()
        };
        require_visible(&ViewAnswer { path: path.clone(), device: Some(device) }).unwrap();
        for error in
            [refused(&path, Some(device + 1)), refused(&path.join("missing"), Some(device))]
        {
            assert!(error.contains("mount namespace") && error.contains("nsenter"), "{error}");
        }
        assert!(refused(&path, None).contains("restart"));
    }
}
