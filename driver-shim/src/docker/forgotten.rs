//! What dockerd has forgotten. A call that it repeats after the driver was killed can be one of
//! which there is no note (see repeats.rs); dockerd then gives up the container that it was
//! making, and never removes its init layer, nor a layer that it did not hear was made.
//!
//! ```text
//!   image <- X-init <- X      dockerd holds the image from before it makes X-init until both are
//!                             removed: when it removes the image, it knows of neither
//! ```
//!
//! Invariant: nothing goes that a container wrote. Such a layer keeps those below it, as ever.

use super::driver::{GraphDriver, docker_extra};
use super::error::DockerError;
use super::types::LayerId;
use crate::worker::{Content, Engine, Key, Volume, WorkerError};

/// Whether it is the layer of a container that has not begun.
fn is_unbegun(volume: &Volume) -> bool {
    docker_extra(volume).is_container && volume.content == Content::Inherited && volume.users == 0
}

impl GraphDriver {
    /// Removes what was made above a layer for containers of which dockerd does not know; only when
    /// dockerd removes that layer, or has removed it.
    pub(super) async fn remove_forgotten_above(&self, below: &Key) -> Result<(), DockerError> {
        for child in self.worker().children(below) {
            if LayerId::is_init_key(&child) {
                for container in self.worker().children(&child) {
                    self.remove_unbegun(&container).await?;
                }
                // dockerd alone uses it, and only while it makes a container.
                self.remove_forgotten(&child).await?;
            } else {
                self.remove_unbegun(&child).await?;
            }
        }
        Ok(())
    }

    /// Removes init layers without a container; only when dockerd begins, as it makes none then.
    pub(super) async fn remove_lone_init_layers(&self) -> Result<(), DockerError> {
        for volume in self.worker().list(Engine::Docker) {
            let is_lone =
                LayerId::is_init_key(&volume.key) && self.worker().children(&volume.key).is_empty();
            if is_lone {
                self.remove_forgotten(&volume.key).await?;
            }
        }
        Ok(())
    }

    async fn remove_unbegun(&self, key: &Key) -> Result<(), DockerError> {
        match self.worker().get(key) {
            Some(volume) if is_unbegun(&volume) => self.remove_forgotten(key).await,
            _ => Ok(()),
        }
    }

    async fn remove_forgotten(&self, key: &Key) -> Result<(), DockerError> {
        match self.worker().remove(key).await {
            Ok(()) => {
                tracing::info!(volume = %key, "removed: dockerd has forgotten it");
                Ok(())
            }
            Err(WorkerError::HasChildren { .. } | WorkerError::NotFound { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}
