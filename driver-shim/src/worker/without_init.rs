//! The snapshot of a container without what dockerd put into the init layer, which for Docker is no part of what the
//! container changed.
//!
//! ```text
//!   X's disk --capture--> snapshot <- commit:A:held (holds it) <- commit:A:disk (see init_layer.rs)
//!                                                                      |
//!                                                      what is returned: its snapshot
//! ```
//!
//! Both volumes pass with the call. Nothing holds the last snapshot until a volume is bound to it, or it is published;
//! the worker keeps it for that long.

use tokio::task::spawn_blocking;
use uuid::Uuid;

use super::volume::{Access, DockerExtra, Engine, Extra, Key, SnapshotRef};
use super::{Worker, WorkerError, init_layer, interrupted};

/// Begins the names of the volumes that pass; no layer's has a colon.
const PASSING: &str = "commit:";

/// What a container of Docker is made from.
#[derive(Clone, Copy, Debug, Default)]
pub struct BelowContainer {
    /// Its init layer, if that is other than the image.
    pub init: Option<SnapshotRef>,
    /// The image; none if that has no content.
    pub image: Option<SnapshotRef>,
}

/// The two volumes of a commit.
struct Passing {
    held: Key,
    disk: Key,
}

impl Worker {
    /// The snapshot `captured` of a container without what dockerd put into its init layer, where the container left
    /// that alone. Where there is no init layer it is `captured`. As that, it lives for a short time unless it is bound
    /// or published.
    ///
    /// # Errors
    /// `InitLayer`, `Appliance`, `Attach`, `State`.
    pub async fn without_init(
        &self,
        captured: SnapshotRef,
        below: BelowContainer,
    ) -> Result<SnapshotRef, WorkerError> {
        let Some(init) = below.init else { return Ok(captured) };
        let image = below.image;
        // To its end, also if the caller goes away.
        self.run(async move |worker: Self| worker.restored(captured, init, image).await).await
    }

    async fn restored(
        &self,
        captured: SnapshotRef,
        init: SnapshotRef,
        image: Option<SnapshotRef>,
    ) -> Result<SnapshotRef, WorkerError> {
        let name = format!("{PASSING}{}", Uuid::new_v4());
        let passing = Passing {
            held: Key::docker(format!("{name}:held")),
            disk: Key::docker(format!("{name}:disk")),
        };
        let prepared = self.restore(&passing, captured, init, image).await;
        self.forget(&[passing.disk, passing.held]).await;
        prepared
    }

    async fn restore(
        &self,
        passing: &Passing,
        captured: SnapshotRef,
        init: SnapshotRef,
        image: Option<SnapshotRef>,
    ) -> Result<SnapshotRef, WorkerError> {
        let extra = || Extra::Docker(DockerExtra { is_container: true, ..DockerExtra::default() });
        self.create(passing.held.clone(), None, extra()).await?;
        self.bind(&passing.held, captured.id).await?;
        self.create(passing.disk.clone(), Some(passing.held.clone()), extra()).await?;
        let init = self.view(init).await?;
        let image = match image {
            Some(image) => Some(self.view(image).await?),
            None => None,
        };
        let root = self.acquire(&passing.disk, Access::ReadWrite).await?;
        let image_path = image.as_ref().map(|image| image.path().to_owned());
        let init_path = init.path().to_owned();
        spawn_blocking(move || init_layer::restore(image_path.as_deref(), &init_path, &root))
            .await
            .map_err(interrupted)??;
        self.capture(&passing.disk).await
    }

    /// Removes the volumes of commits. Called before any is made.
    pub(super) async fn forget_commits(&self) {
        let volumes = self.list(Engine::Docker).into_iter().map(|volume| volume.key);
        let mut left: Vec<Key> = volumes.filter(|key| key.name.starts_with(PASSING)).collect();
        // The disk before what it was made above.
        left.sort();
        self.forget(&left).await;
    }

    /// Removes volumes, those that are there; the next start tries it again.
    async fn forget(&self, keys: &[Key]) {
        for key in keys.iter().filter(|key| self.get(key).is_some()) {
            if let Err(error) = self.remove(key).await {
                tracing::warn!(volume = %key, %error, "cannot remove what a commit left");
            }
        }
    }
}
