//! The end of what was published long ago, where the appliance is set to that: images in registries go without telling
//! it, and what they refer to would stay for ever.
//!
//! What is pushed again is young again. "Now" is the time by which snapshots expire. What was published while no time was
//! believed, or by release 0.2, or has a date that is yet to come, gets the date of the first look instead of an end: so a
//! clock that is wrong for a while ends nothing.

use std::sync::{Arc, Weak};
use std::time::Duration;

use slackwater_blockstore::{
    Error as StoreError, FilePath, Result as StoreResult, SnapshotId, Store,
};

use super::parted;
use crate::audit::NewChange;
use crate::convert;
use crate::failure::Failure;
use crate::reserved::{self, Date};
use crate::scope::{PUBLISHED, published_snapshot};
use crate::state::{ApiState, Shared};
use crate::timestamp::Timestamp;

/// Time between two looks: ages are in days.
const INTERVAL: Duration = Duration::from_secs(3600);

/// Files that are looked at in one call of the store.
const PAGE: usize = 256;

/// Ends what was published longer ago than this, now and again, for as long as the state is there. Inside a runtime.
pub(crate) fn start(state: &Shared, age_max: Duration) {
    let state = Arc::downgrade(state);
    tokio::spawn(watch(state, age_max));
}

async fn watch(state: Weak<ApiState>, age_max: Duration) {
    let mut interval = tokio::time::interval(INTERVAL);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        let Some(state) = state.upgrade() else { return };
        let Some(now) = state.store.time_for_expiry() else { continue };
        if let Err(error) = end_all(&state, age_max, convert::timestamp(now)).await {
            tracing::warn!(error = error.detail(), "what was published long ago is not ended yet");
        }
    }
}

/// Ends all that is older; answers how many that were.
pub(crate) async fn end_all(
    state: &Shared,
    age_max: Duration,
    now: Timestamp,
) -> Result<usize, Failure> {
    let mut ended = 0;
    let mut after = None;
    loop {
        let list =
            move |store: &Store| store.list_files(&format!("{PUBLISHED}/"), after.as_ref(), PAGE);
        let files = state.call(list).await?;
        for file in &files {
            let Some(snapshot) = published_snapshot(&file.path) else { continue };
            match end_if_old(state, (snapshot, &file.path), age_max, now).await {
                Ok(is_ended) => ended += usize::from(is_ended),
                // It holds up no other.
                Err(error) => {
                    tracing::warn!(%snapshot, error = error.detail(), "it is not known whether it was published long ago");
                }
            }
        }
        after = match files.into_iter().next_back() {
            Some(last) => Some(last.path),
            None => return Ok(ended),
        };
    }
}

/// What is old: its images, and how old it is.
struct Old {
    images: String,
    days: u64,
}

async fn end_if_old(
    state: &Shared,
    (snapshot, path): (SnapshotId, &FilePath),
    age_max: Duration,
    now: Timestamp,
) -> Result<bool, Failure> {
    let path = path.clone();
    // Looked at and ended as one: else it could be published again in between.
    let end = move |store: &Store| end_one(store, snapshot, &path, (age_max, now));
    let Some(Old { images, days }) = super::alone(state, end).await? else { return Ok(false) };
    tracing::info!(%snapshot, %images, days, "published no more: it was published last that many days ago");
    let about = format!("published last {days} days ago, for {images}");
    let change = NewChange::of_appliance(now, format!("unpublish {snapshot}"), Some(about));
    state.recorder.append(change);
    Ok(true)
}

/// Ends one if it is old, and dates it if it has no date.
fn end_one(
    store: &Store,
    snapshot: SnapshotId,
    path: &FilePath,
    (age_max, now): (Duration, Timestamp),
) -> StoreResult<Option<Old>> {
    match store.file_info(path) {
        Ok(file) if file.origin_snapshot == Some(snapshot) => {}
        // It publishes nothing, or a caller ended it since it was listed.
        Ok(_) | Err(StoreError::NotFound { .. } | StoreError::WrongKind { .. }) => return Ok(None),
        Err(error) => return Err(error),
    }
    let known = parted(store, snapshot)?;
    let Some(date) = known.published_at.filter(|date| date.is_believed && date.at <= now) else {
        let date = move |labels| reserved::with_date(labels, Date { at: now, is_believed: true });
        let before = super::labels(store, snapshot)?;
        // With as many labels as there can be, it gets none, and stays.
        if date(before.clone()) != before {
            store.change_snapshot_labels(snapshot, Box::new(date))?;
        }
        return Ok(None);
    };
    let age = Duration::from_nanos(now.as_nanos() - date.at.as_nanos());
    if age < age_max {
        return Ok(None);
    }
    store.remove_path(path)?;
    super::forget(store, snapshot);
    let images: Vec<_> = known.images.into_keys().collect();
    let images = match images.is_empty() {
        true => "images without names".to_owned(),
        false => images.join(", "),
    };
    Ok(Some(Old { images, days: age.as_secs() / 86_400 }))
}

#[cfg(test)]
mod tests;
