//! The `-init` layer that dockerd puts between an image and each container: empty files and
//! directories to mount things on, the same for all containers of an image.
//!
//! ```text
//!   first container:   image <- X-init (a disk, written by dockerd, then sealed) <- X
//!   then:                       init:SNAPSHOT  is bound to X-init's snapshot
//!   later ones:        init:SNAPSHOT <- Y-init (nothing of its own) <- Y
//! ```
//!
//! So only the first container of an image costs a clone and a snapshot more. dockerd finds its
//! files on the read-only mount that it then gets for Y-init, and goes on.

use std::collections::HashSet;

use slackwater_client::types::SnapshotId;

use super::driver::GraphDriver;
use super::error::DockerError;
use super::types::LayerId;
use crate::worker::{
    BelowContainer, Content, DockerExtra, Engine, Extra, Key, SnapshotRef, Volume, WorkerError,
};

/// Begins the names of the volumes that are remembered; no layer's name has a colon.
const REMEMBERED: &str = "init:";

/// The key of what is remembered for the image of that snapshot.
fn remembered_key(image: SnapshotId) -> Key {
    Key::docker(format!("{REMEMBERED}{image}"))
}

/// The image whose init layer this is.
fn remembered_image(key: &Key) -> Option<SnapshotId> {
    key.name.strip_prefix(REMEMBERED)?.parse().ok()
}

/// Whether this is an init layer that has nothing of its own.
pub(super) fn is_made_from_remembered(volume: &Volume) -> bool {
    volume.content == Content::Inherited
        && volume.parent.as_ref().and_then(remembered_image).is_some()
}

impl GraphDriver {
    /// What an init layer for that image can be made from.
    pub(super) async fn remembered_init(
        &self,
        image: Option<&LayerId>,
    ) -> Result<Option<Key>, DockerError> {
        let Some(image) = image.filter(|image| self.worker().get(&image.key()).is_some()) else {
            return Ok(None);
        };
        let Some(snapshot) = self.worker().snapshot_of(&image.key()).await? else {
            return Ok(None);
        };
        let key = remembered_key(snapshot.id);
        let is_whole = self.worker().get(&key).is_some_and(|volume| volume.snapshot().is_some());
        Ok(is_whole.then_some(key))
    }

    /// Remembers an init layer: dockerd makes a container above it, so it is complete.
    pub(super) async fn remember_init(&self, init: &LayerId) -> Result<(), DockerError> {
        let Some(volume) = self.worker().get(&init.key()) else {
            return Ok(());
        };
        // Without content dockerd wrote nothing, and there is nothing to remember.
        if volume.content == Content::Inherited {
            return Ok(());
        }
        let snapshot = self.worker().seal(&init.key(), None).await?;
        let Some(image) = volume.parent else {
            return Ok(());
        };
        let Some(image) = self.worker().snapshot_of(&image).await? else {
            return Ok(());
        };
        let key = remembered_key(image.id);
        let _one = self.inner.remembering.lock().await;
        if self.worker().get(&key).is_some_and(|volume| volume.snapshot().is_some()) {
            return Ok(());
        }
        let extra = DockerExtra { is_container: true, ..DockerExtra::default() };
        match self.worker().create(key.clone(), None, Extra::Docker(extra)).await {
            // There it is, without content, where a process died right here.
            Ok(_) | Err(WorkerError::Exists { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        self.worker().bind(&key, snapshot.id).await?;
        Ok(())
    }

    /// Removes the init layers of images that are gone.
    pub(super) async fn forget_init_layers(&self) {
        let volumes = self.worker().list(Engine::Docker);
        let (remembered, others): (Vec<_>, Vec<_>) =
            volumes.iter().partition(|volume| remembered_image(&volume.key).is_some());
        let used: HashSet<SnapshotId> =
            others.iter().filter_map(|volume| volume.snapshot()).map(|used| used.id).collect();
        for volume in remembered {
            let is_used = remembered_image(&volume.key).is_some_and(|image| used.contains(&image));
            if is_used {
                continue;
            }
            if let Err(error) = self.remove_forgotten_above(&volume.key).await {
                tracing::warn!(volume = %volume.key, %error, "cannot remove what was made above");
                continue;
            }
            match self.worker().remove(&volume.key).await {
                // A container was made above it, or another call removed it, just now.
                Ok(()) | Err(WorkerError::HasChildren { .. } | WorkerError::NotFound { .. }) => {}
                Err(error) => {
                    tracing::warn!(volume = %volume.key, %error, "cannot remove an init layer");
                }
            }
        }
    }

    /// What a container above `parent` is made from.
    pub(super) async fn below_container(
        &self,
        parent: Option<&Key>,
    ) -> Result<BelowContainer, DockerError> {
        let Some(parent) = parent else { return Ok(BelowContainer::default()) };
        let below = self.worker().snapshot_of(parent).await?;
        if !LayerId::is_init_key(parent) {
            return Ok(BelowContainer { init: None, image: below });
        }
        let Some(volume) = self.worker().get(parent) else {
            return Ok(BelowContainer::default());
        };
        let image = match &volume.parent {
            None => None,
            Some(image) => match remembered_image(image) {
                // An init layer's disk is as large as its image's, being a clone of it.
                Some(id) => below.map(|init| SnapshotRef { id, size_bytes: init.size_bytes }),
                None => self.worker().snapshot_of(image).await?,
            },
        };
        Ok(BelowContainer { init: below.filter(|init| image != Some(*init)), image })
    }
}
