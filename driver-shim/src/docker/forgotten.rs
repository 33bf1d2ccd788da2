//! What dockerd has forgotten. A call that it repeats after the driver was killed can be one of
//! which there is no note (see repeats.rs); dockerd then gives up the container that it was
//! making, and never removes its init layer, nor a layer that it did not hear was made.
//!
//! ```text
//!   image <- X-init <- X      dockerd holds the image from before it makes X-init until both are
//!                             removed: when it removes the image, it knows of neither
//!   image <- L                and as long as it knows of a layer above
//! ```
//!
//! Invariant: nothing goes that a container or BuildKit may have written or may still write, and no layer that is whole.
//! Such a layer keeps those below it, as ever. BuildKit's are told by their ids, which are no layer store's.

use uuid::Uuid;

use super::driver::{GraphDriver, docker_extra};
use super::error::DockerError;
use super::types::LayerId;
use crate::worker::{Content, Engine, Key, Volume, WorkerError};

/// Whether it is a container that has not begun.
fn is_unbegun_container(volume: &Volume) -> bool {
    docker_extra(volume).is_container && is_untouched(volume)
}

/// Whether it is a layer of the layer store that got a part of its tar, or nothing of it, and takes none from now on:
/// one that another process made, or all if dockerd has begun since.
fn is_useless_layer(volume: &Volume, session: Uuid, has_begun: bool) -> bool {
    let extra = docker_extra(volume);
    let is_of_before = extra.made_by != Some(session);
    let is_empty = is_untouched(volume) && extra.archive.is_none() && (is_of_before || has_begun);
    let is_in_part = extra.is_unpacking && is_of_before;
    !extra.is_container && LayerId::is_layer_store_key(&volume.key) && (is_empty || is_in_part)
}

fn is_untouched(volume: &Volume) -> bool {
    volume.content == Content::Inherited && volume.users == 0
}

impl GraphDriver {
    /// Removes what was made above a layer, and of which dockerd does not know; only when dockerd removes that layer, or
    /// has removed it.
    pub(super) async fn remove_forgotten_above(&self, below: &Key) -> Result<(), DockerError> {
        for child in self.worker().children(below) {
            if LayerId::is_init_key(&child) {
                for container in self.worker().children(&child) {
                    self.remove_useless(&container).await?;
                }
                // dockerd alone uses it, and only while it makes a container.
                self.remove_forgotten(&child).await?;
            } else {
                self.remove_useless(&child).await?;
            }
        }
        Ok(())
    }

    /// Removes init layers without a container, and layers that nothing is made above and that got no tar; only when
    /// dockerd begins, as no call of it is under way then.
    pub(super) async fn remove_lone_layers(&self) -> Result<(), DockerError> {
        for volume in self.worker().list(Engine::Docker) {
            let is_lone = LayerId::is_init_key(&volume.key)
                || is_useless_layer(&volume, self.inner.session, true);
            if is_lone && self.worker().children(&volume.key).is_empty() {
                self.remove_forgotten(&volume.key).await?;
            }
        }
        Ok(())
    }

    async fn remove_useless(&self, key: &Key) -> Result<(), DockerError> {
        match self.worker().get(key) {
            Some(volume)
                if is_unbegun_container(&volume)
                    || is_useless_layer(&volume, self.inner.session, false) =>
            {
                self.remove_forgotten(key).await
            }
            _ => Ok(()),
        }
    }

    async fn remove_forgotten(&self, key: &Key) -> Result<(), DockerError> {
        match self.worker().remove(key).await {
            Ok(()) => {
                tracing::info!(volume = %key, "removed: dockerd has forgotten it");
                // What was recorded of the part of a tar.
                if let Ok(id) = LayerId::parse(&key.name) {
                    self.remove_recording(&id);
                }
                Ok(())
            }
            Err(WorkerError::HasChildren { .. } | WorkerError::NotFound { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}
