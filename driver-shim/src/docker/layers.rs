//! The tar of a layer, in and out.
//!
//! ```text
//!   ApplyDiff   reference   the layer is bound to the snapshot that it names
//!               ordinary    unpacked on a clone of the parent, recorded, sealed
//!   Diff        a layer     its own tar again: the reference, or the recording replayed
//!               BuildKit's  sealed, and from then on a reference, or recorded as an ordinary tar
//!               container   a snapshot of its disk now, and a reference to that, or an ordinary tar
//! ```

use std::path::Path;

use axum::body::Body;
use bytes::Bytes;
use slackwater_archive::{ArchiveError, ChangeKind, Recognised, Reference};
use slackwater_client::types::ImageName;
use tokio::task::spawn_blocking;

use super::driver::{GraphDriver, access, to_end};
use super::error::DockerError;
use super::stream::{self, BodyReader};
use super::types::{ChangeAnswer, LayerId};
use crate::worker::{Access, Archive, Content, DockerExtra, Extra, Key, Push, SnapshotRef, Volume};

/// Longest tar that can be a reference: those of this driver have less than 4 KiB, and this
/// leaves room for what another tar writer would pad. What is longer is never held in memory.
const REFERENCE_BYTES_MAX: usize = 64 << 10;

/// Changes Docker's part of a volume.
fn with_docker(
    change: impl FnOnce(&mut DockerExtra) + Send + 'static,
) -> impl FnOnce(&mut Extra) + Send + 'static {
    |extra| {
        if let Extra::Docker(extra) = extra {
            change(extra);
        }
    }
}

pub(super) fn archive_error(id: &LayerId) -> impl FnOnce(ArchiveError) -> DockerError {
    let id = id.clone();
    |source| DockerError::Archive { id, source }
}

impl GraphDriver {
    /// `ApplyDiff`: fills a layer, and answers the size that Docker shows for it.
    pub(super) async fn apply(&self, id: LayerId, body: Body) -> Result<u64, DockerError> {
        let driver = self.clone();
        to_end(async move { driver.apply_body(&id, body).await }).await
    }

    async fn apply_body(&self, id: &LayerId, body: Body) -> Result<u64, DockerError> {
        if let Err(error) = self.begin_unpacking(id).await {
            stream::drain(body.into_data_stream()).await;
            return Err(error);
        }
        let beginning = stream::read_beginning(body, REFERENCE_BYTES_MAX)
            .await
            .map_err(|source| DockerError::Body { id: id.clone(), source })?;
        let whole = beginning.rest.is_none().then(|| beginning.bytes.clone());
        let (reader, feeding) = stream::reader(beginning);
        let applied = self.apply_reader(id, whole, reader).await;
        feeding.await?;
        applied
    }

    /// Marks a layer, which must be fresh, as being unpacked, before anything is done with it.
    ///
    /// One that another process made takes no tar: that process may have been sent the beginning
    /// of it, and died before the mark; dockerd sends only the rest of its reader then, which can
    /// be a good tar, of less.
    async fn begin_unpacking(&self, id: &LayerId) -> Result<(), DockerError> {
        let _one = self.inner.marking.lock().await;
        let (volume, extra) = self.whole(id)?;
        if extra.is_container {
            return Err(DockerError::Container { id: id.clone() });
        }
        if volume.content != Content::Inherited || extra.archive.is_some() {
            return Err(DockerError::Complete { id: id.clone() });
        }
        if extra.made_by != Some(self.inner.session) {
            return Err(DockerError::Interrupted { id: id.clone() });
        }
        let mark = with_docker(|extra| extra.is_unpacking = true);
        self.worker().update(&id.key(), mark).await?;
        Ok(())
    }

    /// Records how a layer's tar is given again: it is complete.
    pub(super) async fn finish(&self, id: &LayerId, archive: Archive) -> Result<(), DockerError> {
        let finish = with_docker(move |extra| {
            extra.archive = Some(archive);
            extra.is_unpacking = false;
        });
        self.worker().update(&id.key(), finish).await?;
        Ok(())
    }

    async fn apply_reader(
        &self,
        id: &LayerId,
        whole: Option<Bytes>,
        reader: BodyReader,
    ) -> Result<u64, DockerError> {
        let recognised = spawn_blocking(move || slackwater_archive::recognise(reader)).await?;
        match recognised.map_err(archive_error(id))? {
            Recognised::Reference(reference) => {
                let bytes = whole.ok_or_else(|| DockerError::ReferenceLength {
                    id: id.clone(),
                    expected_max: REFERENCE_BYTES_MAX,
                })?;
                self.apply_reference(id, &reference, bytes).await
            }
            Recognised::Ordinary(reader) => {
                let applied = self.apply_ordinary(id, reader).await;
                let Err(error) = applied else {
                    return applied;
                };
                self.remove_recording(id);
                // A file system whose disk takes no more says so in many ways.
                Err(match &error {
                    DockerError::Archive { .. } => {
                        let full = self.worker().reason_of_appliance(&error.to_string()).await;
                        full.map_or(error, DockerError::from)
                    }
                    _ => error,
                })
            }
        }
    }

    async fn apply_reference(
        &self,
        id: &LayerId,
        reference: &Reference,
        bytes: Bytes,
    ) -> Result<u64, DockerError> {
        let snapshot = self.worker().believe(reference).await?;
        self.worker().bind(&id.key(), snapshot).await?;
        self.finish(id, Archive::Reference(bytes.to_vec())).await?;
        Ok(self.worker().usage(&id.key()).await?.size_bytes)
    }

    async fn apply_ordinary(
        &self,
        id: &LayerId,
        reader: impl std::io::Read + Send + 'static,
    ) -> Result<u64, DockerError> {
        let key = id.key();
        let recording = self.worker().recordings_directory().join(id.recording());
        let root = self.worker().acquire(&key, Access::ReadWrite).await?;
        let unpacked =
            spawn_blocking(move || slackwater_archive::unpack(reader, &root, Some(&recording)))
                .await;
        let released = self.worker().release(&key).await;
        let unpacked = unpacked?.map_err(archive_error(id))?;
        released?;
        self.worker().seal(&key, None).await?;
        self.finish(id, Archive::Recording(id.recording())).await?;
        Ok(unpacked.size_bytes)
    }

    /// `Diff`: the tar of a layer, or of what a container changed. The parent that is asked for is a layer's own, or, for
    /// `docker build --squash`, one further below.
    pub(super) async fn diff(
        &self,
        id: LayerId,
        parent: Option<LayerId>,
    ) -> Result<Body, DockerError> {
        let (volume, extra) = self.whole(&id)?;
        let driver = self.clone();
        match extra.archive {
            Some(archive) => {
                let below = parent.map(|parent| parent.key());
                self.again(id, &volume, archive, below.as_ref()).await
            }
            None if extra.is_container => to_end(async move { driver.commit(&id).await }).await,
            None => to_end(async move { driver.freeze(id).await }).await,
        }
    }

    /// The tar of a layer that gave it before, or was unpacked from it.
    async fn again(
        &self,
        id: LayerId,
        volume: &Volume,
        archive: Archive,
        below: Option<&Key>,
    ) -> Result<Body, DockerError> {
        match archive {
            Archive::Reference(bytes) => {
                // It leaves for a registry, or for a file: the snapshot must outlive the layer.
                if let Some(snapshot) = volume.snapshot() {
                    self.inner.pushed.leaves(snapshot.id);
                    let unnamed = ImageName::unnamed();
                    self.worker().publish_for(snapshot.id, Some(&unnamed)).await?;
                }
                Ok(Body::from(bytes))
            }
            Archive::Recording(name) => {
                let snapshot =
                    volume.snapshot().ok_or_else(|| DockerError::Contentless { id: id.clone() })?;
                if self.is_further_below(volume, below) {
                    let older = self.snapshot_below(below).await?;
                    return self.pack(&id, older, snapshot, None).await;
                }
                self.replay(id, name, snapshot).await
            }
        }
    }

    /// Whether this is below the parent of a layer. dockerd may have the parent under another name, as layers of equal
    /// tars are one to it: that is not further below.
    fn is_further_below(&self, layer: &Volume, below: Option<&Key>) -> bool {
        let Some(wanted) = below else { return layer.parent.is_some() };
        let parent_of = |key: &Key| self.worker().get(key).and_then(|volume| volume.parent);
        let parents = std::iter::successors(layer.parent.clone(), parent_of);
        parents.skip(1).any(|parent| parent == *wanted)
    }

    /// The bytes that were recorded.
    async fn replay(
        &self,
        id: LayerId,
        recording: String,
        snapshot: SnapshotRef,
    ) -> Result<Body, DockerError> {
        let recording = self.worker().recordings_directory().join(recording);
        let view = self.worker().view(snapshot).await?;
        let root = view.path().to_owned();
        stream::body(view, move |mut out| {
            slackwater_archive::replay(&recording, &root, &mut out).map_err(archive_error(&id))
        })
        .await
    }

    /// BuildKit asks for the tar of what it wrote: that is the layer from now on.
    async fn freeze(&self, id: LayerId) -> Result<Body, DockerError> {
        let _one = self.inner.freezing.lock(&id.key()).await;
        // Another call may have asked at the same time.
        let (volume, extra) = self.whole(&id)?;
        if let Some(archive) = extra.archive {
            return self.again(id, &volume, archive, volume.parent.as_ref()).await;
        }
        let snapshot = self.worker().seal(&id.key(), None).await?;
        match self.inner.push {
            Push::References => {
                let bytes = self.reference(snapshot).await?;
                self.finish(&id, Archive::Reference(bytes.clone())).await?;
                Ok(Body::from(bytes))
            }
            Push::Ordinary => {
                self.record(&id, volume.parent.as_ref(), snapshot).await?;
                let name = id.recording();
                self.replay(id, name, snapshot).await
            }
        }
    }

    /// `Changes`: what differs from the parent.
    pub(super) async fn changes(
        &self,
        id: LayerId,
        parent: Option<LayerId>,
    ) -> Result<Vec<ChangeAnswer>, DockerError> {
        let driver = self.clone();
        to_end(async move { driver.compare(&id, parent.as_ref()).await }).await
    }

    async fn compare(
        &self,
        id: &LayerId,
        parent: Option<&LayerId>,
    ) -> Result<Vec<ChangeAnswer>, DockerError> {
        let parent = parent.map(LayerId::key);
        let older = match self.snapshot_below(parent.as_ref()).await? {
            Some(snapshot) => Some(self.worker().view(snapshot).await?),
            None => None,
        };
        let (volume, extra) = self.whole(id)?;
        let newer = self.worker().pin(&id.key(), access(id, &volume, &extra)).await?;
        let changes = spawn_blocking(move || {
            let older = older.as_ref().map(|older| older.path());
            slackwater_archive::changes(older, newer.path())
        })
        .await?
        .map_err(archive_error(id))?;
        Ok(changes.iter().map(|change| change_answer(&change.path, change.kind)).collect())
    }
}

fn change_answer(path: &Path, kind: ChangeKind) -> ChangeAnswer {
    let kind = match kind {
        ChangeKind::Modified => 0,
        ChangeKind::Added => 1,
        ChangeKind::Deleted => 2,
    };
    ChangeAnswer { path: path.to_string_lossy().into_owned(), kind }
}
