//! What is published: snapshots that images elsewhere refer to, kept by clones at `published/SNAPSHOT`.

use std::collections::{BTreeMap, BTreeSet};

use futures_util::{StreamExt, TryStreamExt};
use serde::{Deserialize, Serialize};
use slackwater_client::query::ListFiles;
use slackwater_client::types::{
    File, ImageName, PAGE_LIMIT_MAX, Reclaimable, Snapshot, SnapshotId, Timestamp,
};
use slackwater_client::{ClientError, ProblemCode};

use super::{Worker, WorkerError};

/// Directory of the clones that keep published snapshots.
const PUBLISHED: &str = "published";

/// Snapshots that are looked up at a time: enough to hide the appliance's answer time.
const LOOKED_UP_AT_ONCE: usize = 8;

/// A published snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Published {
    /// The snapshot.
    pub snapshot_id: SnapshotId,
    /// The images that refer to it, as far as they are known, each with those who published it for them. `*` and `?`
    /// stand for images whose names are not known.
    pub images: BTreeMap<String, BTreeSet<String>>,
    /// The tokens and workers that publish it; empty for what release 0.2 published.
    pub publishers: BTreeSet<String>,
    /// When it was published last, or at most an hour before that; of what release 0.2 published, when that was first.
    pub published_at: Timestamp,
    /// Bytes of its blocks that are not holes.
    pub used_bytes: u64,
    /// What its end would free now; none if the appliance does not tell.
    pub reclaimable: Option<Reclaimable>,
}

/// Which of them are listed; all conditions hold at once.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chosen {
    /// Those of images whose name has this text in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// Those that this worker (or token) publishes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
    /// Those that were published last so long ago, by the appliance's clock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub older_than_seconds: Option<u64>,
}

impl Chosen {
    fn has(&self, published: &Published, moment: Timestamp) -> bool {
        let is_of =
            |text: &String| published.images.keys().any(|image| image.contains(text.as_str()));
        let age_nanos = moment.as_nanos().saturating_sub(published.published_at.as_nanos());
        self.text.as_ref().is_none_or(is_of)
            && self.by.as_ref().is_none_or(|by| published.publishers.contains(by))
            && self.older_than_seconds.is_none_or(|seconds| age_nanos / 1_000_000_000 >= seconds)
    }
}

/// What became of the snapshots of an image that is published no more.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unpublished {
    /// Those that are published no more.
    pub ended: Vec<SnapshotId>,
    /// Those that stay: for other images, or by other workers.
    pub kept: Vec<SnapshotId>,
}

/// A publisher in words.
pub(crate) fn publisher(name: &str) -> String {
    match name {
        "" => "a caller without a token".to_owned(),
        "*" => "others".to_owned(),
        name => name.escape_debug().to_string(),
    }
}

fn path_of(snapshot: SnapshotId) -> String {
    format!("{PUBLISHED}/{snapshot}")
}

impl Published {
    fn new(file: &File, snapshot: Snapshot, reclaimable: Option<Reclaimable>) -> Self {
        Self {
            snapshot_id: snapshot.id,
            images: snapshot.images,
            publishers: snapshot.publishers,
            published_at: snapshot.published_at.unwrap_or(file.created_at),
            used_bytes: snapshot.used_bytes,
            reclaimable,
        }
    }
}

impl Worker {
    /// [`Self::publish_for`] without a name of an image.
    ///
    /// # Errors
    /// `UnknownSnapshot`, `Appliance`.
    pub async fn publish(&self, snapshot: SnapshotId) -> Result<(), WorkerError> {
        self.publish_for(snapshot, None).await
    }

    /// Keeps a snapshot for workers that pull an image that refers to it, until [`Self::unpublish`]; for this image, if
    /// its name is known.
    ///
    /// # Errors
    /// `UnknownSnapshot`, `Appliance`.
    pub async fn publish_for(
        &self,
        snapshot: SnapshotId,
        image: Option<&ImageName>,
    ) -> Result<(), WorkerError> {
        let path = path_of(snapshot);
        let mut made = self.client().clone_for_image(snapshot, &path, image).await;
        // An appliance of release 0.2 takes no names of images.
        let is_refused = |error: &ClientError| error.code() == Some(ProblemCode::InvalidValue);
        if image.is_some() && made.as_ref().is_err_and(is_refused) {
            made = self.client().create_clone(snapshot, &path).await;
        }
        match made {
            Ok(_) => Ok(()),
            Err(error) if error.code() == Some(ProblemCode::Exists) => Ok(()),
            Err(error) if self.is_out_of_reach(&error) => Err(self.unknown(snapshot)),
            Err(source) => Err(source.into()),
        }
    }

    /// Ends what [`Self::publish_for`] began, for all images. It stays published as long as others published it, too. After
    /// that images in a registry that refer to the snapshot cannot be pulled any more, and once no worker has it, it goes.
    ///
    /// # Errors
    /// `UnknownSnapshot` if it is not published, `Appliance`; with code `not_found` if others published it, and this worker
    /// did not.
    pub async fn unpublish(&self, snapshot: SnapshotId) -> Result<(), WorkerError> {
        match self.client().delete_file(&path_of(snapshot)).await {
            Ok(()) => Ok(()),
            // Where others published it, the appliance says who.
            Err(source) if source.is_not_found() => match self.is_published(snapshot).await? {
                true => Err(source.into()),
                false => Err(self.unknown(snapshot)),
            },
            Err(source) => Err(source.into()),
        }
    }

    /// Ends what this worker, or those with its token, published for an image. A snapshot that they published for other
    /// images stays.
    ///
    /// # Errors
    /// `NotPublished` if they published nothing for it, `Appliance`.
    pub async fn unpublish_image(&self, image: &ImageName) -> Result<Unpublished, WorkerError> {
        let mut unpublished = Unpublished::default();
        let mut by = BTreeSet::new();
        for (_, snapshot) in self.published_snapshots().await? {
            let Some(publishers) = snapshot.images.get(image.as_str()) else { continue };
            by.extend(publishers.iter().cloned());
            let path = path_of(snapshot.id);
            match self.client().delete_file_for_image(&path, image).await {
                Ok(()) => {}
                // It is others' alone.
                Err(error) if error.is_not_found() => continue,
                Err(source) => return Err(source.into()),
            }
            match self.is_published(snapshot.id).await? {
                true => unpublished.kept.push(snapshot.id),
                false => unpublished.ended.push(snapshot.id),
            }
        }
        if unpublished == Unpublished::default() {
            return Err(WorkerError::NotPublished { image: image.clone(), by });
        }
        Ok(unpublished)
    }

    /// Ends what this worker published for an image whose name it tells later: it has told it.
    ///
    /// # Errors
    /// `Appliance`.
    pub async fn end_unnamed(&self, snapshot: SnapshotId) -> Result<(), WorkerError> {
        let unnamed = ImageName::unnamed();
        match self.look_up(snapshot).await {
            Ok(snapshot) if snapshot.images.contains_key(unnamed.as_str()) => {}
            // An appliance of release 0.2 would end all of it.
            Ok(_) | Err(WorkerError::UnknownSnapshot { .. }) => return Ok(()),
            Err(error) => return Err(error),
        }
        match self.client().delete_file_for_image(&path_of(snapshot), &unnamed).await {
            // It is another's.
            Err(error) if !error.is_not_found() => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// Whether [`Self::publish`] keeps that snapshot.
    ///
    /// # Errors
    /// `Appliance`.
    pub async fn is_published(&self, snapshot: SnapshotId) -> Result<bool, WorkerError> {
        match self.client().file(&path_of(snapshot)).await {
            Ok(_) => Ok(true),
            Err(error) if error.is_not_found() => Ok(false),
            Err(source) => Err(source.into()),
        }
    }

    /// The published snapshots that are chosen, in order of their ids.
    ///
    /// # Errors
    /// `Appliance`.
    pub async fn published(&self, chosen: &Chosen) -> Result<Vec<Published>, WorkerError> {
        let moment = self.appliance_now().await?;
        let mut published = Vec::new();
        // One after the other: the appliance adds up one at a time.
        for (file, snapshot) in self.published_snapshots().await? {
            if !chosen.has(&Published::new(&file, snapshot.clone(), None), moment) {
                continue;
            }
            let reclaimable = match self.client().file_reclaimable(&file.path).await {
                Ok(reclaimable) => Some(reclaimable),
                // An appliance of release 0.2 does not tell, one that is busy not now.
                Err(ClientError::Api { .. }) => None,
                Err(source) => return Err(source.into()),
            };
            published.push(Published::new(&file, snapshot, reclaimable));
        }
        Ok(published)
    }

    /// The files below `published/` that are clones of what they are named after, and the snapshots.
    async fn published_snapshots(&self) -> Result<Vec<(File, Snapshot)>, WorkerError> {
        let prefix = format!("{PUBLISHED}/");
        let mut query =
            ListFiles { prefix: Some(prefix.clone()), limit: Some(PAGE_LIMIT_MAX), after: None };
        let mut files = Vec::new();
        loop {
            let page = self.client().files(&query).await?;
            files.extend(page.items.into_iter().filter_map(|file| {
                let id = file.path.trim_start_matches('/').strip_prefix(&prefix)?.parse().ok()?;
                (file.origin_snapshot_id == Some(id)).then_some((file, id))
            }));
            match page.next {
                Some(next) => query.after = Some(next),
                None => break,
            }
        }
        let look_up = |(file, id)| async move {
            match self.look_up(id).await {
                Ok(snapshot) => Ok(Some((file, snapshot))),
                Err(WorkerError::UnknownSnapshot { .. }) => Ok(None),
                Err(error) => Err(error),
            }
        };
        let found = futures_util::stream::iter(files).map(look_up).buffered(LOOKED_UP_AT_ONCE);
        let found: Vec<_> = found.try_collect().await?;
        Ok(found.into_iter().flatten().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_are_chosen_by_all_conditions() {
        let at = |seconds: u64| Timestamp::from_nanos(seconds * 1_000_000_000);
        let published = Published {
            snapshot_id: SnapshotId::from_bytes([7; 16]),
            images: [
                ("r.example/a:1".to_owned(), BTreeSet::new()),
                ("r.example/b:1".to_owned(), BTreeSet::new()),
            ]
            .into(),
            publishers: ["node-1".to_owned()].into(),
            published_at: at(1_000),
            used_bytes: 0,
            reclaimable: None,
        };
        let chosen = |text: Option<&str>, by: Option<&str>, older_than_seconds| Chosen {
            text: text.map(str::to_owned),
            by: by.map(str::to_owned),
            older_than_seconds,
        };
        for all in [
            Chosen::default(),
            chosen(Some("b:1"), Some("node-1"), Some(100)),
            chosen(Some("r.example"), None, None),
        ] {
            assert!(all.has(&published, at(1_100)), "{all:?}");
        }
        for none in [
            chosen(Some("c"), None, None),
            chosen(None, Some("node-2"), None),
            chosen(Some("a"), Some("node-1"), Some(101)),
        ] {
            assert!(!none.has(&published, at(1_100)), "{none:?}");
        }
    }
}
