//! The empty disk, which all that has nothing below it begins with: a snapshot of an ext4 that nothing was
//! written to.
//!
//! ```text
//! make an ext4 on a file of this worker
//!   no snapshot has the shared name?                 give it to one of that file
//!   the snapshot that has it is the same bytes?      take that one: all workers share it
//!   it is not?                                       one of that file, under a name of its own
//! ```
//! Any worker can give the shared name to any snapshot, and what is on an empty disk is in every image that is
//! unpacked on it. An ext4 is the same bytes wherever the same `mkfs.ext4` makes it (FORMAT.md), so each worker
//! makes one, once for each size, and compares.
//!
//! Invariant: D6 of [`super`].

use std::time::Instant;

use slackwater_client::ClientError;
use slackwater_client::query::Diff;
use slackwater_client::types::{CreateSnapshot, DeletionPolicy, Snapshot, SnapshotId};
use uuid::Uuid;

use super::appliance::{Making, existing_id};
use super::state::{Change, FileKind};
use super::volume::{Engine, LayerKind, SnapshotRef};
use super::{Worker, WorkerError};

/// Version of the empty disk: another way to make it needs another name.
const VERSION: u32 = 1;

impl Worker {
    /// A disk of that size with nothing on it. Where it is not the size of all disks it is no clone of an empty one: these
    /// stay, and a client can ask for any size.
    pub(super) async fn new_disk(&self, size_bytes: u64) -> Result<Making, WorkerError> {
        match size_bytes == self.disk_size_bytes() {
            true => Ok(self.clone_empty_disk(size_bytes).await?.1),
            false => self.format_disk(size_bytes).await,
        }
    }

    /// A disk of that size with a new file system.
    async fn format_disk(&self, size_bytes: u64) -> Result<Making, WorkerError> {
        let making = self.making(FileKind::Disk)?;
        let path = self.path_of(making.file);
        self.client().create_file(&path, size_bytes).await?;
        self.attach().await?.make_file_system(&path).await?;
        Ok(making)
    }

    /// Has the empty disk that an engine's first container begins with, and else waits for: making it takes a good part of a
    /// second, and many calls.
    ///
    /// # Errors
    /// `Appliance`, `Attach`, `State`.
    pub async fn have_empty_disk(&self, engine: Engine) -> Result<(), WorkerError> {
        let size_bytes = match (engine, self.layers_setting()) {
            (Engine::Containerd, LayerKind::Images) => self.upper_disk_size_bytes(),
            (Engine::Docker, _) | (_, LayerKind::Disks) => self.disk_size_bytes(),
        };
        self.run(async move |worker: Self| worker.empty_disk(size_bytes).await.map(drop)).await
    }

    /// A clone of the empty disk of that size, as a disk of this worker; and the empty disk.
    pub(super) async fn clone_empty_disk(
        &self,
        size_bytes: u64,
    ) -> Result<(SnapshotRef, Making), WorkerError> {
        let empty = self.empty_disk(size_bytes).await?;
        match self.clone_as(FileKind::Disk, empty.id).await {
            Err(WorkerError::UnknownSnapshot { .. }) => {
                // Somebody deleted it on the appliance.
                self.apply(vec![Change::Fact(fact(size_bytes), String::new())]).await?;
                let empty = self.empty_disk(size_bytes).await?;
                Ok((empty, self.clone_as(FileKind::Disk, empty.id).await?))
            }
            outcome => Ok((empty, outcome?)),
        }
    }

    /// The empty disk of that size.
    pub(super) async fn empty_disk(&self, size_bytes: u64) -> Result<SnapshotRef, WorkerError> {
        let _lock = self.inner.empty_disk_locks.lock(&size_bytes).await;
        if let Some(known) = self.known_empty_disk(size_bytes) {
            return Ok(known);
        }
        let started = Instant::now();
        let id = self.make_empty_disk(size_bytes).await?;
        let elapsed_ms = started.elapsed().as_millis();
        tracing::info!(size_bytes, snapshot = %id, elapsed_ms, "made the empty disk");
        self.apply(vec![Change::Fact(fact(size_bytes), id.to_string())]).await?;
        Ok(SnapshotRef { id, size_bytes })
    }

    /// The empty disk that a snapshot of that size is counted against. It may be one that this worker never
    /// compared, as nothing is read of it.
    pub(super) async fn counted_empty_disk(
        &self,
        size_bytes: u64,
    ) -> Result<Option<SnapshotRef>, WorkerError> {
        match self.known_empty_disk(size_bytes) {
            Some(known) => Ok(Some(known)),
            None => self.find_named(&shared_name(size_bytes)).await,
        }
    }

    /// Whether a snapshot is the empty disk of the size where none is asked for.
    pub(super) fn is_empty_disk(&self, id: SnapshotId) -> bool {
        self.known_empty_disk(self.disk_size_bytes()).is_some_and(|known| known.id == id)
    }

    /// Whether a snapshot is an empty disk of any size that this worker has used.
    pub(super) fn is_known_as_empty(&self, snapshot: SnapshotRef) -> bool {
        self.known_empty_disk(snapshot.size_bytes) == Some(snapshot)
    }

    fn known_empty_disk(&self, size_bytes: u64) -> Option<SnapshotRef> {
        let id = self.inner.state.fact(&fact(size_bytes))?.parse().ok()?;
        Some(SnapshotRef { id, size_bytes })
    }

    async fn make_empty_disk(&self, size_bytes: u64) -> Result<SnapshotId, WorkerError> {
        let making = self.format_disk(size_bytes).await?;
        let path = self.path_of(making.file);
        let name = shared_name(size_bytes);
        let shared = match self.keep_as(&path, name.clone()).await {
            Err(error) => existing_id(&error).ok_or(error)?,
            Ok(made) => return Ok(made),
        };
        if self.has_the_bytes_of(shared, making.file.name).await? {
            return Ok(shared);
        }
        tracing::warn!(
            name,
            snapshot = %shared,
            "the empty disk on the appliance is not what mkfs.ext4 makes here, so this worker uses one of its own: \
             another version of mkfs.ext4 made that, or somebody put something on it"
        );
        Ok(self.keep_as(&path, format!("{name}-{}", Uuid::new_v4())).await?)
    }

    /// A snapshot of a file that stays, with or without clones.
    async fn keep_as(&self, path: &str, name: String) -> Result<SnapshotId, ClientError> {
        let request = CreateSnapshot {
            path: path.to_owned(),
            name: Some(name),
            deletion_policy: DeletionPolicy::Keep,
            ..CreateSnapshot::default()
        };
        Ok(self.client().create_snapshot(&request).await?.id)
    }

    /// Whether a snapshot holds the same as a disk of this worker does now.
    async fn has_the_bytes_of(&self, other: SnapshotId, disk: Uuid) -> Result<bool, WorkerError> {
        let own = self.take_snapshot(disk, None).await?;
        let is_same = self.are_same(&own, other).await;
        // What cannot be deleted now has no clone, and goes by itself.
        if let Err(error) = self.client().delete_snapshot(own.id).await {
            tracing::debug!(snapshot = %own.id, %error, "a snapshot that was compared stays for now");
        }
        match is_same {
            // The other one is gone.
            Err(error) if self.is_out_of_reach(&error) => Ok(false),
            outcome => Ok(outcome?),
        }
    }

    async fn are_same(&self, own: &Snapshot, other: SnapshotId) -> Result<bool, ClientError> {
        if self.client().snapshot(other).await?.size_bytes != own.size_bytes {
            return Ok(false);
        }
        let query = Diff { base: Some(own.id), limit: Some(1), after: None };
        let page = self.client().diff(other, &query).await?;
        Ok(page.items.is_empty() && page.next.is_none())
    }
}

/// The name of the snapshot that all workers share, if it is what they make.
fn shared_name(size_bytes: u64) -> String {
    format!("slackwater-empty-ext4-{VERSION}-{size_bytes}")
}

/// What the state calls the empty disk that was made or compared. Release 0.2 compared none, and has another name.
fn fact(size_bytes: u64) -> String {
    format!("compared_empty_disk:{size_bytes}")
}
