//! The commit of a container: a snapshot of its disk, without what dockerd put into the init
//! layer. The answer is a reference to it, or what it has and the image has not as an ordinary tar.
//!
//! Nothing holds that snapshot until the layer that a reference is unpacked into does; the worker keeps it for that
//! long. An ordinary tar has a hold while it is read.

use axum::body::Body;

use super::driver::GraphDriver;
use super::error::DockerError;
use super::types::LayerId;
use crate::worker::{Access, Push, SnapshotRef};

impl GraphDriver {
    /// The tar of a reference.
    pub(super) async fn reference(&self, snapshot: SnapshotRef) -> Result<Vec<u8>, DockerError> {
        Ok(self.worker().write_reference(snapshot.id).await?.to_archive())
    }

    /// The tar of what a container is now: another one each time.
    pub(super) async fn commit(&self, id: &LayerId) -> Result<Body, DockerError> {
        let (volume, extra) = self.whole(id)?;
        let captured = if extra.is_shared {
            let snapshot = self.worker().snapshot_of(&id.key()).await?;
            snapshot.ok_or_else(|| DockerError::Contentless { id: id.clone() })?
        } else {
            // With a disk of its own, also if it never wrote: each commit is another snapshot.
            let _pin = self.worker().pin(&id.key(), Access::ReadWrite).await?;
            self.worker().capture(&id.key()).await?
        };
        let below = self.below_container(volume.parent.as_ref()).await?;
        let prepared = self.worker().without_init(captured, below).await?;
        match extra.push.unwrap_or(self.inner.push) {
            Push::References => Ok(Body::from(self.reference(prepared).await?)),
            Push::Ordinary => {
                let held = self.worker().hold(prepared.id).await?;
                self.pack(id, below.image, prepared, Some(held)).await
            }
        }
    }
}
