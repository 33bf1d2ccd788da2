//! Publishing: a clone at `published/SNAPSHOT` keeps a snapshot for all workers, until those who wanted that end it.
//!
//! ```text
//! POST /v1/clones, path published/SNAPSHOT    the caller is one of its publishers, and the clone is made if it is not there
//!                  with an image              and for that image; without, for one whose name is not known (`*`)
//! DELETE published/SNAPSHOT, by a worker      it is no publisher any more; the file goes with the last one
//!                            by a token       the file goes
//!                  with ?image=NAME           the caller, whoever it is, is no publisher for that image any more, and none at
//!                                             all if it named no other
//! DELETE SNAPSHOT, by the worker that took it refused while others publish it
//! no call, but a long time (`age`)            the file goes, where the appliance is set to that
//! ```
//! Images in registries refer to what is published, and cannot be pulled without. So no worker ends what others
//! published.
//!
//! Invariants: who published by these calls is noted before the clone is there. One of these calls is carried out at a
//! time (`ApiState::publishing`), to its end also where its caller leaves. What tokens do by other calls and by NFS is
//! not kept apart from them.

pub(crate) mod age;

use std::collections::BTreeSet;
use std::sync::Arc;

use slackwater_blockstore::{
    Error as StoreError, FileInfo, FilePath, Labels, Result as StoreResult, SnapshotId, Store,
};

use crate::audit::record::About;
use crate::convert;
use crate::error::ProblemCode;
use crate::failure::Failure;
use crate::image_name::ImageName;
use crate::reserved::{self, Date, OTHERS, Parted};
use crate::state::Shared;

/// Makes the clone by which the snapshot is published, and notes the caller as publisher, also where it is there.
///
/// # Errors
/// Those of a clone: `exists` also where the caller was noted.
pub(crate) async fn publish(
    state: &Shared,
    about: &About,
    publisher: &str,
    (id, image): (SnapshotId, Option<ImageName>),
    path: FilePath,
) -> Result<FileInfo, Failure> {
    // One that tells none has one all the same.
    let image = image.unwrap_or_else(ImageName::unknown);
    let by = Publisher { name: publisher.to_owned(), image: Some(image) };
    let (is_noted, made) = alone(state, move |store| note_and_clone(store, &by, id, &path)).await?;
    if is_noted && made.is_err() {
        // The caller is a publisher now.
        about.has_begun();
    }
    made.map_err(Failure::from)
}

/// Who publishes, and for which image if it tells.
#[derive(Clone, Debug)]
struct Publisher {
    name: String,
    image: Option<ImageName>,
}

impl Publisher {
    fn note(&self, labels: Labels, date: Date) -> Labels {
        reserved::with_date(self.named(labels), date)
    }

    /// The same without the date.
    fn named(&self, labels: Labels) -> Labels {
        let Some(image) = &self.image else { return labels };
        let known = reserved::part(labels.clone());
        let has_told = known.images.values().any(|by| by.contains(&self.name));
        let labels = match known.publishers.contains(&self.name) && !has_told {
            // It published before there were names.
            true => reserved::with_image(labels, &self.name, &ImageName::unknown()),
            false => reserved::with_publisher(labels, &self.name),
        };
        reserved::with_image(labels, &self.name, image)
    }
}

/// Whether the publisher was noted by this, and the clone.
fn note_and_clone(
    store: &Store,
    publisher: &Publisher,
    id: SnapshotId,
    path: &FilePath,
) -> StoreResult<(bool, StoreResult<FileInfo>)> {
    let is_there = match store.file_info(path) {
        Ok(file) if file.origin_snapshot == Some(id) => true,
        Err(StoreError::NotFound { .. }) => false,
        // What is there publishes nothing.
        _ => return Ok((false, store.clone_snapshot(id, path))),
    };
    let known = labels(store, id)?;
    let date = date(store);
    // As with each push of a layer. Nothing has to be synced.
    if is_there && publisher.note(known.clone(), date) == known {
        return Ok((false, store.clone_snapshot(id, path)));
    }
    let is_named = is_there && publisher.named(known.clone()) == known;
    // A clone from before this label has publishers whose names are not known.
    let has_others = is_there && reserved::part(known).publishers.is_empty();
    let by = publisher.clone();
    let note = move |labels| match (is_there, has_others) {
        // What is noted from before is over.
        (false, _) => by.note(reserved::without_publishers(labels), date),
        (true, true) => by.note(reserved::with_publisher(labels, OTHERS), date),
        (true, false) => by.note(labels, date),
    };
    match store.change_snapshot_labels(id, Box::new(note)) {
        Ok(_) => Ok((true, store.clone_snapshot(id, path))),
        // A push of what is published is no growth: only its date stays as it was.
        Err(StoreError::NoSpace { .. }) if is_named => Ok((false, store.clone_snapshot(id, path))),
        Err(error) => Err(error),
    }
}

/// The date of what is published now.
fn date(store: &Store) -> Date {
    let is_believed = store.time_for_expiry().is_some();
    Date { at: convert::timestamp(store.now_for_ends()), is_believed }
}

/// What became of a publication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// The snapshot is published no more.
    Whole,
    /// Others publish it.
    KeptByOthers,
    /// The caller publishes it for other images.
    KeptForImages,
}

/// Ends that a caller publishes a snapshot: at all, or for one image, and then at all if it has named no other one.
///
/// # Errors
/// `not_found` if the caller is none of its publishers, or not for that image, as after a first call whose answer was
/// lost; those of a delete.
pub(crate) async fn unpublish(
    state: &Shared,
    caller: &str,
    (id, image): (SnapshotId, Option<ImageName>),
    path: FilePath,
) -> Result<Ended, Failure> {
    let by = Publisher { name: caller.to_owned(), image };
    let caller = by.clone();
    let ended = alone(state, move |store| end_one(store, &by, id, &path));
    ended.await?.map_err(|known| {
        let name = named(&caller.name);
        let detail = match &caller.image {
            Some(image) if known.publishers.contains(&caller.name) => format!(
                "`{name}` does not publish snapshot {id} for image {image}: the snapshot tells for which, in `images`"
            ),
            _ => format!(
                "`{name}` does not publish snapshot {id}: it is published by {}; they end that, or a token does, which \
                 deletes the file without telling an image",
                shown(&known.publishers)
            ),
        };
        Failure::new(ProblemCode::NotFound, detail)
    })
}

/// What became of it; those who publish it, if the caller does not.
fn end_one(
    store: &Store,
    by: &Publisher,
    id: SnapshotId,
    path: &FilePath,
) -> StoreResult<Result<Ended, Parted>> {
    let known = parted_by(store, id, path)?;
    let name = by.name.clone();
    let of_caller = |(_, publishers): &(&String, &BTreeSet<String>)| publishers.contains(&name);
    let images: BTreeSet<_> =
        known.images.iter().filter(of_caller).map(|(image, _)| image.as_str()).collect();
    let is_named = by.image.as_ref().is_none_or(|image| images.contains(image.as_str()));
    if !known.publishers.contains(&name) || !is_named {
        return Ok(Err(known));
    }
    // What stands for one without a name ends nothing: that may have found no room for its name.
    let is_unnamed = by.image.as_ref().is_some_and(|image| image.as_str() == ImageName::UNNAMED);
    if let Some(image) = by.image.clone().filter(|_| images.len() > 1 || is_unnamed) {
        let is_only = images.len() == 1;
        let note = move |labels| {
            let labels = reserved::without_image(labels, &name, &image);
            match is_only {
                true => reserved::with_image(labels, &name, &ImageName::unknown()),
                false => labels,
            }
        };
        store.change_snapshot_labels(id, Box::new(note))?;
        return Ok(Ok(Ended::KeptForImages));
    }
    if known.publishers.len() > 1 {
        let note = move |labels| reserved::without_publisher(labels, &name);
        store.change_snapshot_labels(id, Box::new(note))?;
        return Ok(Ok(Ended::KeptByOthers));
    }
    store.remove_path(path)?;
    forget(store, id);
    Ok(Ok(Ended::Whole))
}

/// Deletes the file by which a snapshot is published, also where others published it.
///
/// # Errors
/// Those of a delete.
pub(crate) async fn end(state: &Shared, id: SnapshotId, path: FilePath) -> Result<(), Failure> {
    let end = move |store: &Store| {
        store.remove_path(&path)?;
        forget(store, id);
        Ok(())
    };
    alone(state, end).await
}

/// Deletes a snapshot, as the worker that took it.
///
/// # Errors
/// `forbidden` while others publish it, and those of a delete.
pub(crate) async fn delete_snapshot(
    state: &Shared,
    worker: &str,
    id: SnapshotId,
) -> Result<(), Failure> {
    let name = worker.to_owned();
    let deleted = alone(state, move |store| {
        let path = FilePath::parse(&format!("{}/{id}", crate::scope::PUBLISHED))?;
        let is_published = match store.file_info(&path) {
            Ok(file) => file.origin_snapshot == Some(id),
            Err(_) => false,
        };
        let publishers = parted(store, id)?.publishers;
        if is_published && publishers != BTreeSet::from([name]) {
            return Ok(Err(publishers));
        }
        store.delete_snapshot(id).map(Ok)
    });
    deleted.await?.map_err(|publishers| {
        let detail = format!(
            "worker `{worker}` may not delete snapshot {id} while it is published by {}; a token may",
            shown(&publishers)
        );
        Failure::new(ProblemCode::Forbidden, detail)
    })
}

/// Does the work as the only one of these calls.
async fn alone<T: Send + 'static>(
    state: &Shared,
    work: impl FnOnce(&Store) -> StoreResult<T> + Send + 'static,
) -> Result<T, Failure> {
    let turn = Arc::clone(&state.publishing).lock_owned().await;
    // Held until the work is done, also if this is not waited for any more.
    let work = move |store: &Store| {
        let done = work(store);
        drop(turn);
        done
    };
    state.call(work).await
}

/// By whom and for what a snapshot is published by the file at the path; nothing if that is no clone of it.
fn parted_by(store: &Store, id: SnapshotId, path: &FilePath) -> StoreResult<Parted> {
    match store.file_info(path)?.origin_snapshot {
        Some(origin) if origin == id => parted(store, id),
        _ => Ok(Parted::default()),
    }
}

fn parted(store: &Store, id: SnapshotId) -> StoreResult<Parted> {
    labels(store, id).map(reserved::part)
}

/// The labels of a snapshot, the appliance's own among them; none if it is gone.
fn labels(store: &Store, id: SnapshotId) -> StoreResult<Labels> {
    match store.snapshot_info(id) {
        Ok(snapshot) => Ok(snapshot.labels),
        Err(StoreError::NotFound { .. }) => Ok(Labels::new()),
        Err(error) => Err(error),
    }
}

/// Notes that a snapshot is published no more, if it is still there. Without that its next publisher does.
fn forget(store: &Store, id: SnapshotId) {
    match store.change_snapshot_labels(id, Box::new(reserved::without_publishers)) {
        Ok(_) | Err(StoreError::NotFound { .. }) => {}
        Err(error) => {
            tracing::warn!(snapshot = %id, %error, "it is published no more, and still names publishers")
        }
    }
}

/// The publishers, in words.
fn shown(publishers: &BTreeSet<String>) -> String {
    match publishers.is_empty() {
        true => "others".to_owned(),
        false => publishers.iter().map(|name| named(name)).collect::<Vec<_>>().join(", "),
    }
}

fn named(publisher: &str) -> &str {
    match publisher {
        "" => "a caller without a token",
        OTHERS => "others",
        name => name,
    }
}
