//! Layers and containers of Docker as volumes: made, mounted, released, removed, described.

use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::error::DockerError;
use super::init;
use super::pushed::{self, Pushed};
use super::repeats::Notes;
use super::types::{LayerId, StorageOptions};
use crate::engine::docker::Docker;
use crate::worker::{
    Access, Content, DockerExtra, Engine, Extra, Key, KeyedLocks, Push, Volume, Worker, WorkerError,
};

/// Time to read the cache's statistics for `docker info`: the file lies on the export, which
/// stalls while the appliance is away.
const STATISTICS_TIME_MAX: Duration = Duration::from_millis(500);

/// Docker's graphdriver on a worker's volumes. Cheap to clone.
#[derive(Clone, Debug)]
pub struct GraphDriver {
    pub(super) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) worker: Worker,
    pub(super) notes: Arc<Notes>,
    /// Names this process: what another one was sent of a tar is not sent again.
    pub(super) session: Uuid,
    /// Held while a volume is marked as being unpacked: one call alone finds it unmarked.
    pub(super) marking: tokio::sync::Mutex<()>,
    /// Held while the init layer of an image is remembered.
    pub(super) remembering: tokio::sync::Mutex<()>,
    /// How the tar of what a commit or a build made is given.
    pub(super) push: Push,
    /// Held while what BuildKit wrote becomes a layer: its recording is written once.
    pub(super) freezing: KeyedLocks<Key>,
    /// What left for registries and files.
    pub(super) pushed: Arc<Pushed>,
}

impl GraphDriver {
    /// The driver of these volumes, and how it gives what commits and builds made. Inside a runtime, what a dead
    /// process left is removed in the background.
    #[must_use]
    pub fn new(worker: Worker, push: Push) -> Self {
        let notes = Notes::open(&worker.state_directory().join("calls"));
        let inner = Inner {
            worker,
            notes,
            session: Uuid::new_v4(),
            marking: tokio::sync::Mutex::default(),
            remembering: tokio::sync::Mutex::default(),
            push,
            freezing: KeyedLocks::default(),
            pushed: Arc::default(),
        };
        let driver = Self { inner: Arc::new(inner) };
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let driver = driver.clone();
            runtime.spawn(async move { driver.tidy().await });
        }
        driver
    }

    /// Learns from this Docker for which images layers leave. Inside a runtime.
    #[must_use]
    pub fn named_by(self, docker: Docker) -> Self {
        let (pushed, driver) = (Arc::clone(&self.inner.pushed), Arc::downgrade(&self.inner));
        tokio::spawn(pushed::name_all(pushed, driver, docker));
        self
    }

    /// Removes what calls left that a dead process did not finish: init layers of images that are gone, recordings of
    /// layers that are gone. Harmless at any time.
    pub(super) async fn tidy(&self) {
        self.forget_init_layers().await;
        let known = |id: &LayerId| self.worker().get(&id.key()).is_some();
        let Ok(entries) = std::fs::read_dir(self.worker().recordings_directory()) else {
            return;
        };
        for entry in entries.flatten() {
            let id = entry.file_name().to_str().and_then(LayerId::of_recording);
            if let Some(id) = id.filter(|id| !known(id)) {
                self.remove_recording(&id);
            }
        }
    }

    /// Counts a call that ended.
    pub(super) fn count(&self, call: &'static str, started: Instant, has_failed: bool) {
        let metrics = self.worker().metrics();
        metrics.count(Engine::Docker, call, started.elapsed(), has_failed);
        self.inner.pushed.note_call();
    }

    pub(super) fn worker(&self) -> &Worker {
        &self.inner.worker
    }

    /// `Create`: a layer of an image, or of BuildKit.
    pub(super) async fn create(
        &self,
        id: &LayerId,
        parent: Option<&LayerId>,
    ) -> Result<(), DockerError> {
        self.require_whole(parent)?;
        let extra = DockerExtra { made_by: Some(self.inner.session), ..DockerExtra::default() };
        self.make(id, parent.map(LayerId::key), extra).await
    }

    /// `CreateReadWrite`: a container, or its init layer.
    pub(super) async fn create_read_write(
        &self,
        id: &LayerId,
        parent: Option<&LayerId>,
        options: StorageOptions,
    ) -> Result<(), DockerError> {
        self.require_whole(parent)?;
        let extra = DockerExtra { is_container: true, ..DockerExtra::default() };
        if id.is_init() {
            // The options are the container's, which is made from this.
            let remembered = self.remembered_init(parent).await?;
            return self.make(id, remembered.or_else(|| parent.map(LayerId::key)), extra).await;
        }
        if let Some(init) = parent.filter(|parent| parent.is_init()) {
            self.remember_init(init).await?;
        }
        let extra = DockerExtra {
            is_shared: options.is_shared,
            disk_size_bytes: options.size_bytes,
            push: options.push,
            ..extra
        };
        self.make(id, parent.map(LayerId::key), extra).await
    }

    /// Makes a volume; again, if dockerd repeats a call whose answer it did not get.
    async fn make(
        &self,
        id: &LayerId,
        parent: Option<Key>,
        extra: DockerExtra,
    ) -> Result<(), DockerError> {
        match self.worker().create(id.key(), parent.clone(), Extra::Docker(extra.clone())).await {
            Ok(_) => Ok(()),
            Err(WorkerError::Exists { .. }) => self.make_again(id, parent, extra).await,
            Err(error) => Err(error.into()),
        }
    }

    /// Takes a volume, if nothing was done with it yet, for what is to be made. That is a new
    /// beginning, also where another process made it: no byte of its tar was sent.
    async fn make_again(
        &self,
        id: &LayerId,
        parent: Option<Key>,
        extra: DockerExtra,
    ) -> Result<(), DockerError> {
        let _one = self.inner.marking.lock().await;
        let made = self.worker().get(&id.key()).filter(|volume| {
            volume.content == Content::Inherited
                && volume.users == 0
                && volume.parent == parent
                && DockerExtra { made_by: extra.made_by, ..docker_extra(volume) } == extra
        });
        match made {
            None => Err(DockerError::Exists { id: id.clone() }),
            Some(made) if docker_extra(&made) == extra => Ok(()),
            Some(_) => {
                let begun = move |made: &mut Extra| *made = Extra::Docker(extra);
                self.worker().update(&id.key(), begun).await?;
                Ok(())
            }
        }
    }

    /// A layer, if it is there, must not be half unpacked.
    fn require_whole(&self, id: Option<&LayerId>) -> Result<(), DockerError> {
        match id.and_then(|id| self.worker().get(&id.key()).map(|volume| (id, volume))) {
            Some((id, volume)) if docker_extra(&volume).is_unpacking => {
                Err(DockerError::Interrupted { id: id.clone() })
            }
            _ => Ok(()),
        }
    }

    /// The volume and Docker's part of it; not while it is half unpacked.
    pub(super) fn whole(&self, id: &LayerId) -> Result<(Volume, DockerExtra), DockerError> {
        self.require_whole(Some(id))?;
        let volume =
            self.worker().get(&id.key()).ok_or_else(|| WorkerError::NotFound { key: id.key() })?;
        let extra = docker_extra(&volume);
        Ok((volume, extra))
    }

    /// `Get`: mounts it. Carried out again, the same call counts once.
    pub(super) async fn get(&self, id: &LayerId, call: Uuid) -> Result<PathBuf, DockerError> {
        let (volume, extra) = self.whole(id)?;
        let access = access(id, &volume, &extra);
        Ok(self.worker().acquire_once(&id.key(), access, call).await?)
    }

    /// `Put`: also of what is not there any more. Carried out again, the same call counts once.
    pub(super) async fn put(&self, id: &LayerId, call: Uuid) -> Result<(), DockerError> {
        match self.worker().release_once(&id.key(), call).await {
            Ok(()) | Err(WorkerError::NotFound { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// `Remove`: also of what is not there any more.
    pub(super) async fn remove(&self, id: &LayerId) -> Result<(), DockerError> {
        let Some(volume) = self.worker().get(&id.key()) else {
            return Ok(());
        };
        let mut removed = self.worker().remove(&id.key()).await;
        let extra = docker_extra(&volume);
        if matches!(removed, Err(WorkerError::HasChildren { .. })) && !extra.is_container {
            self.remove_forgotten_above(&id.key()).await?;
            removed = self.worker().remove(&id.key()).await;
        }
        match removed {
            Ok(()) | Err(WorkerError::NotFound { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        if !extra.is_container {
            self.remove_recording(id);
            self.forget_init_layers().await;
        }
        Ok(())
    }

    pub(super) fn remove_recording(&self, id: &LayerId) {
        for name in [id.recording(), id.unfinished_recording()] {
            let path = self.worker().recordings_directory().join(name);
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    tracing::warn!(path = %path.display(), %error, "cannot remove a recording");
                }
                _ => {}
            }
        }
    }

    /// `GetMetadata`: what `docker inspect` shows.
    pub(super) async fn metadata(
        &self,
        id: &LayerId,
    ) -> Result<Vec<(&'static str, String)>, DockerError> {
        let (volume, _) = self.whole(id)?;
        let mut pairs = vec![
            ("Driver", "slackwater".to_owned()),
            ("Layer", id.to_string()),
            ("Worker", self.worker().worker_id().to_string()),
        ];
        // Shown where it is known; a container starts without it.
        if let Ok(store_id) = self.worker().store_id().await {
            pairs.push(("Store", store_id));
        }
        match &volume.content {
            Content::Inherited => {}
            Content::Disk { name, .. } => pairs.push(("Disk", name.to_string())),
            Content::Upper { disk, .. } | Content::Lower { disk, .. } => {
                pairs.push(("Disk", disk.to_string()))
            }
            Content::Snapshot { snapshot, .. } => pairs.push(("Snapshot", snapshot.id.to_string())),
            // Of containerd's layers alone.
            Content::ImageFile { name, .. } => pairs.push(("Image", name.to_string())),
            Content::Image { snapshot, .. } => pairs.push(("Image", snapshot.id.to_string())),
        }
        Ok(pairs)
    }

    /// `Status`: what `docker info` shows. Waits for nothing that the appliance must answer.
    pub(super) async fn status(&self) -> Vec<(String, String)> {
        let worker = self.worker();
        let volumes = worker.list(Engine::Docker);
        let containers = volumes.iter().filter(|volume| docker_extra(volume).is_container);
        let mut pairs = vec![
            ("Appliance".to_owned(), worker.client().url().to_owned()),
            ("Worker".to_owned(), worker.worker_id().to_string()),
            ("Disk size".to_owned(), format!("{} GiB", worker.disk_size_bytes() >> 30)),
            ("Commits and builds are pushed as".to_owned(), self.inner.push.to_string()),
            ("Volumes".to_owned(), volumes.len().to_string()),
            ("Containers with their init layers".to_owned(), containers.count().to_string()),
        ];
        let Some(attach) = worker.attached() else {
            pairs.push(("Attached".to_owned(), "not yet".to_owned()));
            return pairs;
        };
        pairs.push(("Attached by".to_owned(), attach.method().to_string()));
        if let Some(path) = attach.statistics_file() {
            let read = tokio::task::spawn_blocking(move || std::fs::read(path));
            if let Ok(Ok(Ok(bytes))) = tokio::time::timeout(STATISTICS_TIME_MAX, read).await {
                pairs.extend(statistics(&bytes));
            }
        }
        pairs
    }

    /// `DiffSize`: the appliance's accounting, not a walk.
    pub(super) async fn diff_size(&self, id: &LayerId) -> Result<u64, DockerError> {
        Ok(self.worker().usage(&id.key()).await?.size_bytes)
    }
}

/// How dockerd is to have it.
pub(super) fn access(id: &LayerId, volume: &Volume, extra: &DockerExtra) -> Access {
    let is_immutable = if id.is_init() {
        volume.snapshot().is_some() || init::is_made_from_remembered(volume)
    } else if extra.is_container {
        extra.is_shared
    } else {
        // What BuildKit still writes was never asked for its tar and has nothing above it.
        extra.archive.is_some() || volume.snapshot().is_some()
    };
    if is_immutable { Access::ReadOnly } else { Access::ReadWrite }
}

/// Docker's part of a volume.
pub(super) fn docker_extra(volume: &Volume) -> DockerExtra {
    match &volume.extra {
        Extra::Docker(extra) => extra.clone(),
        // A key of Docker is only ever made here.
        Extra::Containerd(_) => DockerExtra::default(),
    }
}

/// The numbers of the cache, by name.
fn statistics(bytes: &[u8]) -> Vec<(String, String)> {
    let Ok(serde_json::Value::Object(fields)) = serde_json::from_slice(bytes) else {
        return Vec::new();
    };
    let line = |name: &str| format!("Export {}", name.replace('_', " "));
    fields.iter().map(|(name, value)| (line(name), value.to_string())).collect()
}

/// Runs an operation to its end, also if dockerd stops waiting for it.
pub(super) async fn to_end<T: Send + 'static>(
    operation: impl Future<Output = Result<T, DockerError>> + Send + 'static,
) -> Result<T, DockerError> {
    tokio::spawn(operation).await?
}
