//! What a commit or a build made as an ordinary tar, where that is asked for: any engine unpacks it.
//!
//! ```text
//!   commit     the container's snapshot, and what the image has not  --> tar; dockerd unpacks it into a new layer
//!   BuildKit   the layer's snapshot, and what its parent has not     --> recording --> tar, each time the same
//! ```
//! What differs is found by inode and times: all names of two mounted snapshots are listed, and what differs is read.

use std::io;

use axum::body::Body;
use slackwater_archive::PATHS_BYTES_MAX;
use tokio::task::spawn_blocking;

use super::driver::GraphDriver;
use super::error::DockerError;
use super::layers::archive_error;
use super::stream;
use super::types::LayerId;
use crate::worker::{Archive, Held, Key, SnapshotRef, View};

impl GraphDriver {
    /// The tar of what `newer` has and `older` has not. `held` keeps `newer` until the tar was read, if nothing else does.
    pub(super) async fn pack(
        &self,
        id: &LayerId,
        older: Option<SnapshotRef>,
        newer: SnapshotRef,
        held: Option<Held>,
    ) -> Result<Body, DockerError> {
        let (older, newer) = self.views(older, newer).await?;
        let id = id.clone();
        let paths = (older.as_ref().map(|older| older.path().to_owned()), newer.path().to_owned());
        stream::body((held, older, newer), move |mut out| {
            let (older, newer) = (paths.0.as_deref(), &paths.1);
            let packed = slackwater_archive::pack(older, newer, &mut out, None, PATHS_BYTES_MAX);
            packed.map(drop).map_err(archive_error(&id))
        })
        .await
    }

    /// Records the tar of what a layer has and its parent has not: that is the layer's from now on.
    pub(super) async fn record(
        &self,
        id: &LayerId,
        parent: Option<&Key>,
        layer: SnapshotRef,
    ) -> Result<(), DockerError> {
        let recorded = match self.write_recording(id, parent, layer).await {
            Ok(()) => self.finish(id, Archive::Recording(id.recording())).await,
            Err(error) => Err(error),
        };
        // Also where the layer was removed before this was done.
        recorded.inspect_err(|_| self.remove_recording(id))
    }

    async fn write_recording(
        &self,
        id: &LayerId,
        parent: Option<&Key>,
        layer: SnapshotRef,
    ) -> Result<(), DockerError> {
        let below = self.snapshot_below(parent).await?;
        let (older, newer) = self.views(below, layer).await?;
        let recording = self.worker().recordings_directory().join(id.recording());
        let packed = spawn_blocking(move || {
            let older = older.as_ref().map(|older| older.path());
            let (newer, recording) = (newer.path(), Some(&*recording));
            slackwater_archive::pack(older, newer, &mut io::sink(), recording, PATHS_BYTES_MAX)
        });
        packed.await?.map(drop).map_err(archive_error(id))
    }

    /// The snapshot of a parent. What has something above it does not change any more: it becomes one.
    pub(super) async fn snapshot_below(
        &self,
        parent: Option<&Key>,
    ) -> Result<Option<SnapshotRef>, DockerError> {
        let Some(parent) = parent else { return Ok(None) };
        match self.worker().snapshot_of(parent).await? {
            Some(snapshot) => Ok(Some(snapshot)),
            None => Ok(Some(self.worker().seal(parent, None).await?)),
        }
    }

    async fn views(
        &self,
        older: Option<SnapshotRef>,
        newer: SnapshotRef,
    ) -> Result<(Option<View>, View), DockerError> {
        let older = match older {
            Some(older) => Some(self.worker().view(older).await?),
            None => None,
        };
        Ok((older, self.worker().view(newer).await?))
    }
}
