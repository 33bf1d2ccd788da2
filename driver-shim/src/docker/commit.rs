//! The commit of a container: a snapshot of its disk, without what dockerd put into the init
//! layer, which for Docker is no part of what the container changed. The answer is a reference to it, or what it
//! has and the image has not as an ordinary tar.
//!
//! ```text
//!   X's disk --capture--> snapshot <- commit:A (holds it) <- commit:B (a disk, see restore.rs)
//!                                                               |
//!                                       what the answer is of: its snapshot
//! ```
//!
//! Both volumes pass with the call. Nothing holds the last snapshot until the layer that a
//! reference is unpacked into does; the worker keeps it for that long. An ordinary tar has a hold while it is read.

use axum::body::Body;
use tokio::task::spawn_blocking;
use uuid::Uuid;

use super::driver::GraphDriver;
use super::error::DockerError;
use super::restore;
use super::types::LayerId;
use crate::worker::{Access, DockerExtra, Engine, Extra, Key, Push, SnapshotRef};

/// Begins the names of the volumes that pass; no layer's has a colon.
const PASSING: &str = "commit:";

/// The two volumes of a commit; while this lives they are not taken for left over.
struct Passing<'a> {
    driver: &'a GraphDriver,
    held: Key,
    disk: Key,
}

impl Drop for Passing<'_> {
    fn drop(&mut self) {
        let mut commits = self.driver.inner.commits.lock();
        commits.remove(&self.held);
        commits.remove(&self.disk);
    }
}

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
        let prepared = match below.init {
            Some(init) => self.without_init(captured, init, below.image).await?,
            None => captured,
        };
        match extra.push.unwrap_or(self.inner.push) {
            Push::References => Ok(Body::from(self.reference(prepared).await?)),
            Push::Ordinary => {
                let held = self.worker().hold(prepared.id).await?;
                self.pack(id, below.image, prepared, Some(held)).await
            }
        }
    }

    async fn without_init(
        &self,
        captured: SnapshotRef,
        init: SnapshotRef,
        image: Option<SnapshotRef>,
    ) -> Result<SnapshotRef, DockerError> {
        let name = format!("{PASSING}{}", Uuid::new_v4());
        let passing = Passing {
            driver: self,
            held: Key::docker(format!("{name}:held")),
            disk: Key::docker(format!("{name}:disk")),
        };
        self.inner.commits.lock().extend([passing.held.clone(), passing.disk.clone()]);
        let prepared = self.prepare(&passing, captured, init, image).await;
        for key in [&passing.disk, &passing.held] {
            if self.worker().get(key).is_some() {
                self.worker().remove(key).await?;
            }
        }
        prepared
    }

    async fn prepare(
        &self,
        passing: &Passing<'_>,
        captured: SnapshotRef,
        init: SnapshotRef,
        image: Option<SnapshotRef>,
    ) -> Result<SnapshotRef, DockerError> {
        let worker = self.worker();
        let extra = || Extra::Docker(DockerExtra { is_container: true, ..DockerExtra::default() });
        worker.create(passing.held.clone(), None, extra()).await?;
        worker.bind(&passing.held, captured.id).await?;
        worker.create(passing.disk.clone(), Some(passing.held.clone()), extra()).await?;
        let init = worker.view(init).await?;
        let image = match image {
            Some(image) => Some(worker.view(image).await?),
            None => None,
        };
        let root = worker.acquire(&passing.disk, Access::ReadWrite).await?;
        let image_path = image.as_ref().map(|image| image.path().to_owned());
        let init_path = init.path().to_owned();
        spawn_blocking(move || restore::restore(image_path.as_deref(), &init_path, &root))
            .await??;
        Ok(worker.capture(&passing.disk).await?)
    }

    /// Removes the volumes of commits that no call works on.
    pub(super) async fn forget_commits(&self) {
        let mut left: Vec<Key> = self
            .worker()
            .list(Engine::Docker)
            .into_iter()
            .map(|volume| volume.key)
            .filter(|key| key.name.starts_with(PASSING))
            .filter(|key| !self.inner.commits.lock().contains(key))
            .collect();
        // The disk before what it was made above.
        left.sort();
        for key in left {
            if let Err(error) = self.worker().remove(&key).await {
                tracing::warn!(volume = %key, %error, "cannot remove what a commit left");
            }
        }
    }
}
