//! Clones: writable files made from snapshots.

use axum::Extension;
use axum::extract::State;
use axum::http::Method;

use crate::audit::record::About;
use crate::auth::Caller;
use crate::convert;
use crate::extract::JsonBody;
use crate::failure::Failure;
use crate::router::Mount;
use crate::routes::files::{CreatedFile, created};
use crate::scope::{Scope, published_snapshot};
use crate::state::Shared;
use crate::types::{CreateClone, File};
use crate::{paths, publishing};

pub(crate) fn mount(mount: Mount) -> Mount {
    mount.at(Method::POST, paths::CLONES, create)
}

/// Makes a writable file with a snapshot's content
///
/// Takes the same short time whatever the size. Directories on the way that are missing are
/// made. Safe to repeat: a second request is refused with `exists` and changes no file; the
/// file at the path tells by `origin_snapshot_id` whether the first one made it.
///
/// A clone at `published/SNAPSHOT` keeps the snapshot for all workers. The caller is one of its `publishers` then, also
/// where the clone was there and `exists` is answered. If it tells an `image`, the snapshot's `images` have it.
#[utoipa::path(
    post, path = paths::CLONES, tag = "clones", operation_id = "createClone",
    request_body = CreateClone,
    responses(
        (status = 201, description = "The clone; `Location` is its route", body = File),
        (status = 404, description = "There is no such snapshot"),
        (status = 409, description = "Something is at the path, or a part of it is no directory"),
        (status = 422, description = "The id, the path or the image has no meaning, or an image is given at another path"),
    ),
)]
pub(crate) async fn create(
    State(state): State<Shared>,
    Extension(about): Extension<About>,
    Extension(caller): Extension<Caller>,
    scope: Scope,
    JsonBody(request): JsonBody<CreateClone>,
) -> Result<CreatedFile, Failure> {
    let path = scope.clones(&request.path, request.snapshot_id)?;
    about.say(format!("of snapshot {}", request.snapshot_id));
    let id = convert::store_snapshot_id(request.snapshot_id);
    scope.require_snapshot(&state, id).await?;
    let info = match published_snapshot(&path) {
        Some(published) if published == id => {
            let what = (id, request.image);
            publishing::publish(&state, &about, &caller.name, what, path).await?
        }
        _ if request.image.is_some() => {
            let detail = "`image` is for a clone at published/SNAPSHOT of that snapshot alone";
            return Err(Failure::invalid(detail));
        }
        _ => state.call(move |store| store.clone_snapshot(id, &path)).await?,
    };
    Ok(created(&info))
}
