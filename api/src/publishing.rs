//! Publishing: a clone at `published/SNAPSHOT` keeps a snapshot for all workers, until those who wanted that end it.
//!
//! ```text
//! POST /v1/clones, path published/SNAPSHOT    the caller is one of its publishers, and the clone is made if it is not there
//! DELETE published/SNAPSHOT, by a worker      it is no publisher any more; the file goes with the last one
//!                            by a token       the file goes
//! DELETE SNAPSHOT, by the worker that took it refused while others publish it
//! ```
//! Images in registries refer to what is published, and cannot be pulled without. So no worker ends what others
//! published.
//!
//! Invariants: who published by these calls is noted before the clone is there. One of these calls is carried out at a
//! time (`ApiState::publishing`), to its end also where its caller leaves. What tokens do by other calls and by NFS is
//! not kept apart from them.

use std::collections::BTreeSet;
use std::sync::Arc;

use slackwater_blockstore::{
    Error as StoreError, FileInfo, FilePath, Result as StoreResult, SnapshotId, Store,
};

use crate::audit::record::About;
use crate::error::ProblemCode;
use crate::failure::Failure;
use crate::reserved::{self, OTHERS};
use crate::state::Shared;

/// Makes the clone by which the snapshot is published, and notes the caller as publisher, also where it is there.
///
/// # Errors
/// Those of a clone: `exists` also where the caller was noted.
pub(crate) async fn publish(
    state: &Shared,
    about: &About,
    publisher: &str,
    id: SnapshotId,
    path: FilePath,
) -> Result<FileInfo, Failure> {
    let name = publisher.to_owned();
    let (is_noted, made) =
        alone(state, move |store| note_and_clone(store, &name, id, &path)).await?;
    if is_noted && made.is_err() {
        // The caller is a publisher now.
        about.has_begun();
    }
    made.map_err(Failure::from)
}

/// Whether the publisher was noted by this, and the clone.
fn note_and_clone(
    store: &Store,
    publisher: &str,
    id: SnapshotId,
    path: &FilePath,
) -> StoreResult<(bool, StoreResult<FileInfo>)> {
    let is_there = match store.file_info(path) {
        Ok(file) if file.origin_snapshot == Some(id) => true,
        Err(StoreError::NotFound { .. }) => false,
        // What is there publishes nothing.
        _ => return Ok((false, store.clone_snapshot(id, path))),
    };
    let name = publisher.to_owned();
    let note = move |labels| match is_there {
        true => reserved::with_publisher(labels, &name),
        // What is noted from before is over.
        false => reserved::with_publisher(reserved::without_publishers(labels), &name),
    };
    let known = publishers(store, id)?;
    if is_there && known.contains(publisher) {
        // As with each push of a layer. Nothing has to be synced.
        return Ok((false, store.clone_snapshot(id, path)));
    }
    // A clone from before this label has publishers whose names are not known.
    let has_others = is_there && known.is_empty();
    let note = move |labels| match has_others {
        true => note(reserved::with_publisher(labels, OTHERS)),
        false => note(labels),
    };
    store.change_snapshot_labels(id, Box::new(note))?;
    Ok((true, store.clone_snapshot(id, path)))
}

/// Ends that a worker publishes a snapshot. Returns whether it is published no more.
///
/// # Errors
/// `not_found` if the worker is none of its publishers, as after a first call whose answer was lost; those of a delete.
pub(crate) async fn unpublish(
    state: &Shared,
    worker: &str,
    id: SnapshotId,
    path: FilePath,
) -> Result<bool, Failure> {
    let name = worker.to_owned();
    let ended = alone(state, move |store| {
        let publishers = publishers_by(store, id, &path)?;
        if !publishers.contains(&name) {
            return Ok(Err(publishers));
        }
        let is_last = publishers.len() == 1;
        if is_last {
            store.remove_path(&path)?;
            forget(store, id);
        } else {
            let note = move |labels| reserved::without_publisher(labels, &name);
            store.change_snapshot_labels(id, Box::new(note))?;
        }
        Ok(Ok(is_last))
    });
    ended.await?.map_err(|publishers| {
        let detail = format!(
            "worker `{worker}` does not publish snapshot {id}: it is published by {}; they end that, or a token does, which \
             deletes the file",
            shown(&publishers)
        );
        Failure::new(ProblemCode::NotFound, detail)
    })
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
        let publishers = publishers(store, id)?;
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

/// Those who published a snapshot by the file at the path; none if that is no clone of it.
fn publishers_by(store: &Store, id: SnapshotId, path: &FilePath) -> StoreResult<BTreeSet<String>> {
    match store.file_info(path)?.origin_snapshot {
        Some(origin) if origin == id => publishers(store, id),
        _ => Ok(BTreeSet::new()),
    }
}

fn publishers(store: &Store, id: SnapshotId) -> StoreResult<BTreeSet<String>> {
    match store.snapshot_info(id) {
        Ok(snapshot) => Ok(reserved::part(snapshot.labels).publishers),
        Err(StoreError::NotFound { .. }) => Ok(BTreeSet::new()),
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
    let name = |publisher: &String| match publisher.as_str() {
        "" => "a caller without a token".to_owned(),
        OTHERS => "others".to_owned(),
        name => name.to_owned(),
    };
    match publishers.is_empty() {
        true => "others".to_owned(),
        false => publishers.iter().map(name).collect::<Vec<_>>().join(", "),
    }
}
