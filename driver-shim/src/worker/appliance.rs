//! What the worker asks of the appliance: disks, holds, snapshots.

use std::time::Duration;

use slackwater_client::query::ListSnapshots;
use slackwater_client::types::{
    CreateSnapshot, DeletionPolicy, Labels, RegisterChain, Snapshot, SnapshotId, Timestamp,
};
use slackwater_client::{ClientError, ProblemCode, RetryPolicy};
use uuid::Uuid;

use super::chains::Registration;
use super::imaging::IMAGE_SIZE_BYTES;
use super::state::{Change, FileKind, OwnFile};
use super::usage::INODES_LABEL;
use super::volume::SnapshotRef;
use super::{FULL_BELOW_BYTES, Worker, WorkerError, now};

/// Label of every snapshot that a worker takes: the worker's id.
pub(super) const WORKER_LABEL: &str = "slackwater.worker";

/// Label of the snapshot of an image: the chain id of the layers that it was made above. Only above these it is the layer.
const BELOW_LABEL: &str = "slackwater.below";

/// Its value where there are none.
const BELOW_NOTHING: &str = "nothing";

/// A new snapshot of a disk has no clone yet; should the worker die before it makes one, the appliance
/// deletes the snapshot some time after this.
pub(super) const UNHELD_AGE_MAX: Duration = Duration::from_secs(3600);

/// How long a failed call is held up by the question whether the appliance is the reason.
const REASON_TIME_MAX: Duration = Duration::from_secs(2);

/// A file that is being made: listed as obsolete, and deleted again unless a volume names it
/// before this is dropped.
#[derive(Debug)]
pub(super) struct Making {
    worker: Worker,
    pub(super) file: OwnFile,
}

impl Drop for Making {
    fn drop(&mut self) {
        self.worker.inner.in_progress.lock().remove(&self.file.name);
        self.worker.inner.reap.notify_one();
    }
}

/// Keeps a snapshot that no volume has, for as long as this lives.
#[derive(Debug)]
pub struct Held {
    _making: Making,
}

impl Worker {
    /// What to say of a failed mount or write if the reason is that the appliance is full, or that it takes nothing of this
    /// worker any more: a file system on a disk that cannot be written fails in many ways, none of which says so.
    pub async fn reason_of_appliance(&self, failed: &str) -> Option<WorkerError> {
        let asking = async {
            match self.client().with_retry(RetryPolicy::never()).stats().await {
                // The calls of a worker that was revoked can use up what its address may try: the appliance looks at the
                // next token in a second.
                Err(error) if error.code() == Some(ProblemCode::TooManyAttempts) => {
                    self.client().stats().await
                }
                answer => answer,
            }
        };
        let stats = tokio::time::timeout(REASON_TIME_MAX, asking).await.ok()?;
        match stats {
            Ok(stats) if stats.available_bytes < FULL_BELOW_BYTES => Some(WorkerError::Full {
                appliance: self.client().url().to_owned(),
                available_bytes: stats.available_bytes,
                reason: failed.to_owned(),
            }),
            Err(source) if source.code() == Some(ProblemCode::Unauthenticated) => {
                Some(source.into())
            }
            Ok(_) | Err(_) => None,
        }
    }

    /// Keeps a snapshot by a clone that is not written to. If no other is made, the snapshot goes with it.
    ///
    /// # Errors
    /// `UnknownSnapshot`, `Appliance`, `State`.
    pub async fn hold(&self, snapshot: SnapshotId) -> Result<Held, WorkerError> {
        self.run(async move |worker: Self| {
            Ok(Held { _making: worker.clone_as(FileKind::Hold, snapshot).await? })
        })
        .await
    }

    /// The path of a file of this worker.
    pub(super) fn path_of(&self, file: OwnFile) -> String {
        let folder = match file.kind {
            FileKind::Disk => "disks",
            FileKind::Hold => "holds",
        };
        format!("workers/{}/{folder}/{}", self.worker_id(), file.name)
    }

    pub(super) fn disk_path(&self, name: Uuid) -> String {
        self.path_of(OwnFile { kind: FileKind::Disk, name })
    }

    /// The path of an image that is written: that of the hold that it becomes.
    pub(super) fn image_path(&self, name: Uuid) -> String {
        self.path_of(OwnFile { kind: FileKind::Hold, name })
    }

    /// Lists a file that is about to be made (D1).
    pub(super) fn making(&self, kind: FileKind) -> Result<Making, WorkerError> {
        let file = OwnFile { kind, name: Uuid::new_v4() };
        // First: what is listed and not in progress is deleted.
        self.inner.in_progress.lock().insert(file.name);
        let making = Making { worker: self.clone(), file };
        self.inner.state.list(file)?;
        Ok(making)
    }

    /// Clones a snapshot as a file of this worker.
    pub(super) async fn clone_as(
        &self,
        kind: FileKind,
        snapshot: SnapshotId,
    ) -> Result<Making, WorkerError> {
        let making = self.making(kind)?;
        match self.client().create_clone(snapshot, &self.path_of(making.file)).await {
            Ok(_) => Ok(making),
            // Nobody else knows the name: an earlier try was carried out, and its answer lost.
            Err(error) if error.code() == Some(ProblemCode::Exists) => Ok(making),
            Err(error) if self.is_out_of_reach(&error) => Err(self.unknown(snapshot)),
            Err(source) => Err(source.into()),
        }
    }

    /// Whether a call failed because there is no such snapshot, or none that this worker reads.
    pub(super) fn is_out_of_reach(&self, error: &ClientError) -> bool {
        let is_refused = error.code() == Some(ProblemCode::Forbidden);
        // To a token that says what its role lacks.
        error.is_not_found() || (is_refused && self.client().has_credential().unwrap_or(false))
    }

    pub(super) fn unknown(&self, id: SnapshotId) -> WorkerError {
        WorkerError::UnknownSnapshot { id, appliance: self.client().url().to_owned() }
    }

    /// What the appliance says of a snapshot.
    ///
    /// # Errors
    /// `UnknownSnapshot`, `Appliance`.
    pub(crate) async fn look_up(&self, id: SnapshotId) -> Result<Snapshot, WorkerError> {
        match self.client().snapshot(id).await {
            Ok(snapshot) => Ok(snapshot),
            Err(error) if self.is_out_of_reach(&error) => Err(self.unknown(id)),
            Err(source) => Err(source.into()),
        }
    }

    /// The moment by the appliance's clock, which dates snapshots: this machine's may be wrong. An older
    /// appliance does not tell it.
    pub(crate) async fn appliance_now(&self) -> Result<Timestamp, ClientError> {
        Ok(self.client().stats().await?.now.unwrap_or_else(now))
    }

    /// The labels of a snapshot that this worker takes, of a disk with so many inodes in use.
    pub(super) fn labels_of_snapshot(&self, inodes: Option<u64>) -> Labels {
        let own = (WORKER_LABEL.to_owned(), self.worker_id().to_string());
        let inodes = inodes.map(|inodes| (INODES_LABEL.to_owned(), inodes.to_string()));
        inodes.into_iter().chain([own]).collect()
    }

    /// The labels of a snapshot of an image that this worker wrote above layers of this chain.
    pub(super) fn labels_of_image(&self, inodes: u64, below: Option<&str>) -> Labels {
        let below = below.unwrap_or(BELOW_NOTHING).to_owned();
        let mut labels = self.labels_of_snapshot(Some(inodes));
        labels.insert(BELOW_LABEL.to_owned(), below);
        labels
    }

    /// Takes a snapshot of a disk that lives until its last clone goes, or an hour without one.
    pub(super) async fn take_snapshot(
        &self,
        disk: Uuid,
        inodes: Option<u64>,
    ) -> Result<Snapshot, ClientError> {
        let labels = self.labels_of_snapshot(inodes);
        self.client().create_snapshot(&unnamed(self.disk_path(disk), labels)).await
    }

    /// Takes a snapshot of an image, and registers it as a chain if one is given. The file becomes the snapshot's clone,
    /// unless the appliance is of an older release, which has no such thing.
    pub(super) async fn take_image(
        &self,
        name: Uuid,
        chain: Option<&Registration>,
        labels: Labels,
    ) -> Result<Snapshot, ClientError> {
        match self.take_image_as(name, chain, labels.clone(), true).await {
            Err(error) if does_not_know_becomes_clone(&error) => {
                self.take_image_as(name, chain, labels, false).await
            }
            outcome => outcome,
        }
    }

    pub(super) async fn take_image_as(
        &self,
        name: Uuid,
        chain: Option<&Registration>,
        labels: Labels,
        becomes_clone: bool,
    ) -> Result<Snapshot, ClientError> {
        let path = self.image_path(name);
        match chain {
            Some(chain) => {
                let request = RegisterChain { becomes_clone, ..chain.request(path, labels) };
                self.client().register_chain(&request).await
            }
            None => {
                let request = CreateSnapshot { becomes_clone, ..unnamed(path, labels) };
                self.client().create_snapshot(&request).await
            }
        }
    }

    /// The snapshot of that name, if the appliance has it.
    ///
    /// # Errors
    /// `Appliance`.
    pub async fn find_named(&self, name: &str) -> Result<Option<SnapshotRef>, WorkerError> {
        let query = ListSnapshots {
            name: Some(name.to_owned()),
            limit: Some(1),
            ..ListSnapshots::default()
        };
        let page = self.client().snapshots(&query).await?;
        let found = page.items.first();
        Ok(found.map(|found| SnapshotRef { id: found.id, size_bytes: found.size_bytes }))
    }

    /// The id of the appliance's store: asked once, then remembered, also over restarts.
    ///
    /// # Errors
    /// `Appliance`, as long as it was never reached.
    pub async fn store_id(&self) -> Result<String, WorkerError> {
        if let Some(id) = self.inner.state.fact("store_id") {
            return Ok(id);
        }
        let id = self.client().stats().await?.store_id;
        self.apply(vec![Change::Fact("store_id".to_owned(), id.clone())]).await?;
        Ok(id)
    }

    /// The paths of all files below a prefix.
    pub(super) async fn file_paths(&self, prefix: &str) -> Result<Vec<String>, WorkerError> {
        let mut query = slackwater_client::query::ListFiles {
            prefix: Some(prefix.to_owned()),
            ..Default::default()
        };
        let mut paths = Vec::new();
        loop {
            let page = self.client().files(&query).await?;
            paths.extend(page.items.into_iter().map(|file| file.path));
            match page.next {
                Some(next) => query.after = Some(next),
                None => return Ok(paths),
            }
        }
    }
}

/// A snapshot that lives until its last clone goes, or an hour without one.
fn unnamed(path: String, labels: Labels) -> CreateSnapshot {
    CreateSnapshot {
        path,
        labels,
        deletion_policy: DeletionPolicy::OnZeroClones,
        expires_in_seconds: Some(UNHELD_AGE_MAX.as_secs()),
        ..CreateSnapshot::default()
    }
}

/// Whether a snapshot is an image that was made above layers of this chain.
pub(super) fn is_image_above(snapshot: &Snapshot, below: Option<&str>) -> bool {
    let told = snapshot.labels.get(BELOW_LABEL).map(String::as_str);
    snapshot.size_bytes == IMAGE_SIZE_BYTES && told == Some(below.unwrap_or(BELOW_NOTHING))
}

fn does_not_know_becomes_clone(error: &ClientError) -> bool {
    match error {
        ClientError::Api { code: ProblemCode::InvalidValue, detail, .. } => {
            detail.contains("unknown field `becomes_clone`")
        }
        _ => false,
    }
}

/// The snapshot that holds the wanted name, if that is why the call was refused.
pub(super) fn existing_id(error: &ClientError) -> Option<SnapshotId> {
    match error {
        ClientError::Api { existing_snapshot_id, .. } => *existing_snapshot_id,
        _ => None,
    }
}
