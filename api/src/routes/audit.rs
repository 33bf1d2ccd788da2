//! The audit log, as administrators read it.

use axum::Json;
use axum::extract::{RawQuery, State};
use axum::http::Method;

use crate::audit::Wanted;
use crate::change::ChangePage;
use crate::error::ProblemCode;
use crate::failure::Failure;
use crate::paths;
use crate::query::{ListChanges, QueryError, page_limit};
use crate::router::Mount;
use crate::state::Shared;

pub(crate) fn mount(mount: Mount) -> Mount {
    mount.at(Method::GET, paths::AUDIT, list)
}

/// Lists changes, the newest first
///
/// What was changed by REST, by whom and from where, and the appliance's own starts and changes of token files. Writing
/// to a file is recorded once an hour for each caller. Changes over NFS are not recorded; giving out a path to mount is.
/// The appliance keeps 64 MiB of them, some 250,000 with short paths.
#[utoipa::path(
    get, path = paths::AUDIT, tag = "appliance", operation_id = "listChanges",
    params(
        ("by" = Option<String>, Query, description = "Only changes of the token or worker of this name"),
        ("limit" = Option<usize>, Query, minimum = 1, maximum = 1000, description = "Items of the page, 100 unless given"),
        ("after" = Option<String>, Query, description = "The `next` of the page before: changes with smaller numbers"),
    ),
    responses((status = 200, description = "A page of changes", body = ChangePage)),
)]
pub(crate) async fn list(
    State(state): State<Shared>,
    RawQuery(query): RawQuery,
) -> Result<Json<ChangePage>, Failure> {
    let query = ListChanges::decode(query.as_deref().unwrap_or_default())?;
    let before = query.after.as_deref().map(parse_cursor).transpose()?;
    let Some(log) = state.options.audit.clone() else {
        return Ok(Json(ChangePage { items: Vec::new(), next: None }));
    };
    let wanted = Wanted { before, by: query.by, limit: page_limit(query.limit) };
    // The same bound on blocked threads as for the store.
    match state.call(move |_| Ok(log.page(&wanted))).await? {
        Ok(page) => Ok(Json(page)),
        Err(error) => {
            tracing::error!(%error, "the audit log cannot be read");
            Err(Failure::new(ProblemCode::Io, format!("the audit log cannot be read: {error}")))
        }
    }
}

fn parse_cursor(text: &str) -> Result<u64, QueryError> {
    text.parse().map_err(|_| QueryError::new("after", "is not the `next` of a page"))
}
