//! The calls on published snapshots.

use axum::Json;
use axum::extract::{Query, State};
use serde::{Deserialize, Serialize};
use slackwater_client::ProblemCode;
use slackwater_client::types::{ChainId, ImageName, SnapshotId, Timestamp};

use super::{Answer, Control};
use crate::worker::{Chosen, Published, Unpublished, WorkerError};

/// Names a snapshot to keep.
#[derive(Debug, Serialize, Deserialize)]
pub struct PublishRequest {
    /// The snapshot.
    pub snapshot: SnapshotId,
    /// The chain id that it may be taken for.
    #[serde(default)]
    pub chain_id: Option<ChainId>,
    /// The image that refers to it.
    #[serde(default)]
    pub image: Option<ImageName>,
}

/// What is published.
#[derive(Debug, Serialize, Deserialize)]
pub struct PublishedAnswer {
    /// The appliance's time, by which ages count.
    pub moment: Timestamp,
    /// The snapshots.
    pub published: Vec<Published>,
}

/// Names an image whose snapshots are to be kept no more.
#[derive(Debug, Serialize, Deserialize)]
pub struct UnpublishImageRequest {
    /// The image.
    pub image: ImageName,
}

pub(super) async fn publish(
    State(control): State<Control>,
    Json(request): Json<PublishRequest>,
) -> Answer<()> {
    control.worker.publish_for(request.snapshot, request.image.as_ref()).await?;
    // Else an image with the hashes of this one, and the snapshot's id, would be given it without its reference. Those
    // who pull this one fetch its references, of some hundred bytes.
    let shares = control.worker.trust().shares_all();
    if let Some(chain) = request.chain_id.filter(|_| shares) {
        match control.worker.add_chain(request.snapshot, &chain).await {
            // It has as many chains as others can give it, or the appliance is full. One more saves the fetch of a
            // reference, and nothing else.
            Err(WorkerError::Appliance { source })
                if matches!(
                    source.code(),
                    Some(ProblemCode::InvalidValue | ProblemCode::NoSpace)
                ) =>
            {
                tracing::warn!(%chain, snapshot = %request.snapshot, error = %source,
                    "published, but not registered as a layer: workers fetch its reference");
            }
            outcome => outcome?,
        }
    }
    Ok(Json(()))
}

/// Answers whether others keep it published, if the appliance says so.
pub(super) async fn unpublish(
    State(control): State<Control>,
    Json(request): Json<PublishRequest>,
) -> Answer<Option<bool>> {
    control.worker.unpublish(request.snapshot).await?;
    Ok(Json(control.worker.is_published(request.snapshot).await.ok()))
}

pub(super) async fn unpublish_image(
    State(control): State<Control>,
    Json(request): Json<UnpublishImageRequest>,
) -> Answer<Unpublished> {
    Ok(Json(control.worker.unpublish_image(&request.image).await?))
}

pub(super) async fn published(
    State(control): State<Control>,
    Query(chosen): Query<Chosen>,
) -> Answer<PublishedAnswer> {
    let published = control.worker.published(&chosen).await?;
    Ok(Json(PublishedAnswer {
        moment: control.worker.appliance_now().await.map_err(WorkerError::from)?,
        published,
    }))
}
