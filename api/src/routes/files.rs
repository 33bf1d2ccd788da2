//! Files of the export: list, make, look at, resize, rename, delete.

use axum::extract::{RawQuery, State};
use axum::http::{HeaderName, Method, StatusCode, header};
use axum::{Extension, Json};
use slackwater_blockstore::{FileInfo, FilePath, Name, Result as StoreResult, Store};

use crate::audit::record::About;
use crate::auth::Caller;
use crate::convert;
use crate::error::ProblemCode;
use crate::extract::{JsonBody, Segment};
use crate::failure::Failure;
use crate::paths::{self, decode_component, encode_component};
use crate::publishing::{self, Ended};
use crate::query::{DeleteFile, ListFiles, QueryError, page_limit};
use crate::router::Mount;
use crate::scope::{Deletion, Scope, published_snapshot};
use crate::state::Shared;
use crate::types::{CreateFile, File, FilePage, ImageName, UpdateFile};

pub(crate) fn mount(mount: Mount) -> Mount {
    mount
        .at(Method::GET, paths::FILES, list)
        .at(Method::POST, paths::FILES, create)
        .at(Method::GET, paths::FILE, get)
        .at(Method::PATCH, paths::FILE, update)
        .at(Method::DELETE, paths::FILE, delete)
}

/// The answer to a call that made a file.
pub(crate) type CreatedFile = (StatusCode, [(HeaderName, String); 1], Json<File>);

pub(crate) fn created(info: &FileInfo) -> CreatedFile {
    let file = convert::file(info);
    (StatusCode::CREATED, [(header::LOCATION, paths::file(&file.path))], Json(file))
}

/// Lists files
///
/// In byte order of their paths. Directories, symbolic links, pipes, sockets and devices are left out, and files whose path
/// is longer than 4096 bytes. A worker that joined is given the files that it reaches.
#[utoipa::path(
    get, path = paths::FILES, tag = "files", operation_id = "listFiles",
    params(
        ("prefix" = Option<String>, Query, description = "Only paths that begin with this text, which may end inside a name"),
        ("limit" = Option<usize>, Query, minimum = 1, maximum = 1000, description = "Items of the page, 100 unless given"),
        ("after" = Option<String>, Query, description = "The `next` of the page before"),
    ),
    responses((status = 200, description = "A page of files", body = FilePage)),
)]
pub(crate) async fn list(
    State(state): State<Shared>,
    scope: Scope,
    RawQuery(query): RawQuery,
) -> Result<Json<FilePage>, Failure> {
    let query = ListFiles::decode(query.as_deref().unwrap_or_default())?;
    let limit = page_limit(query.limit);
    let after = query.after.as_deref().map(parse_cursor).transpose()?;
    let prefix = query.prefix.unwrap_or_default();
    let prefix = prefix.strip_prefix('/').unwrap_or(&prefix).to_owned();
    let prefixes = scope.lists(&prefix);
    // One more than asked for tells whether a next page has anything.
    let wanted = limit + 1;
    let list = move |store: &Store| -> StoreResult<Vec<FileInfo>> {
        let mut files = Vec::new();
        for prefix in &prefixes {
            files.extend(store.list_files(prefix, after.as_ref(), wanted - files.len())?);
        }
        Ok(files)
    };
    let mut files = state.call(list).await?;
    let more = files.len() > limit;
    files.truncate(limit);
    let next = files.last().filter(|_| more).map(|last| cursor(&last.path));
    Ok(Json(FilePage { items: files.iter().map(convert::file).collect(), next }))
}

/// Makes a sparse file
///
/// Directories on the way that are missing are made. Safe to repeat: a second request is
/// refused with `exists` and changes nothing.
#[utoipa::path(
    post, path = paths::FILES, tag = "files", operation_id = "createFile",
    request_body = CreateFile,
    responses(
        (status = 201, description = "The file; `Location` is its route", body = File),
        (status = 409, description = "Something is at the path, or a part of it is no directory"),
        (status = 422, description = "The path or the size has no meaning, or is over a limit"),
    ),
)]
pub(crate) async fn create(
    State(state): State<Shared>,
    scope: Scope,
    JsonBody(request): JsonBody<CreateFile>,
) -> Result<CreatedFile, Failure> {
    let path = scope.changes(&request.path)?;
    let info = state.call(move |store| store.create_file(&path, request.size_bytes)).await?;
    Ok(created(&info))
}

/// Shows a file
#[utoipa::path(
    get, path = paths::FILE, tag = "files", operation_id = "getFile",
    params(("path" = String, Path, description = "The file's path, its slashes as %2F")),
    responses(
        (status = 200, description = "The file", body = File),
        (status = 404, description = "Nothing is at the path"),
        (status = 409, description = "What is at the path is no file"),
        (status = 422, description = "The path has no meaning"),
    ),
)]
pub(crate) async fn get(
    State(state): State<Shared>,
    scope: Scope,
    Segment(path): Segment,
) -> Result<Json<File>, Failure> {
    let path = scope.reads(&path)?;
    let info = state.call(move |store| store.file_info(&path)).await?;
    Ok(Json(convert::file(&info)))
}

/// Resizes or renames a file
///
/// Exactly one of the two, so that the call is atomic.
#[utoipa::path(
    patch, path = paths::FILE, tag = "files", operation_id = "updateFile",
    params(("path" = String, Path, description = "The file's path, its slashes as %2F")),
    request_body = UpdateFile,
    responses(
        (status = 200, description = "The file as it is now", body = File),
        (status = 404, description = "Nothing is at the path"),
        (status = 409, description = "Something is at the new path, or the path is no file's"),
        (status = 422, description = "Not exactly one change, or a value without meaning"),
    ),
)]
pub(crate) async fn update(
    State(state): State<Shared>,
    Extension(about): Extension<About>,
    scope: Scope,
    Segment(path): Segment,
    JsonBody(request): JsonBody<UpdateFile>,
) -> Result<Json<File>, Failure> {
    let path = scope.changes(&path)?;
    let info = match (request.size_bytes, request.path) {
        (Some(size_bytes), None) => {
            about.say(format!("{size_bytes} bytes"));
            state.call(move |store| store.resize_file(&path, size_bytes)).await?
        }
        (None, Some(target)) => {
            about.say(format!("to {target}"));
            let target = scope.changes(&target)?;
            // Directories are renamed over NFS; here the path is to be a file's.
            state.call(move |store| store.rename_file(&path, &target)).await?
        }
        (None, None) => return Err(Failure::invalid("give size_bytes or path; got neither")),
        (Some(_), Some(_)) => return Err(Failure::invalid("give size_bytes or path; got both")),
    };
    Ok(Json(convert::file(&info)))
}

/// Deletes a file
///
/// Takes the same short time whatever the size; the space is reclaimed in the background.
/// Symbolic links, pipes, sockets, devices and empty directories are deleted too. A worker deletes `published/SNAPSHOT` if it is one of the
/// snapshot's `publishers`; as long as there are others, it is no publisher any more, and the file stays.
///
/// With `image`, of `published/SNAPSHOT` alone, the caller ends what it published for that image: it is no publisher any
/// more if it has named no other image. A token ends then what it published itself, and the file goes with its last
/// publisher.
#[utoipa::path(
    delete, path = paths::FILE, tag = "files", operation_id = "deleteFile",
    params(
        ("path" = String, Path, description = "The file's path, its slashes as %2F"),
        ("image" = Option<ImageName>, Query, description = "The image for which the snapshot is published no more"),
    ),
    responses(
        (status = 204, description = "It is gone"),
        (status = 404, description = "Nothing is at the path, or the caller publishes nothing there for that image"),
        (status = 409, description = "The directory is not empty"),
        (status = 422, description = "The path has no meaning"),
    ),
)]
pub(crate) async fn delete(
    State(state): State<Shared>,
    Extension(about): Extension<About>,
    Extension(caller): Extension<Caller>,
    scope: Scope,
    Segment(path): Segment,
    RawQuery(query): RawQuery,
) -> Result<StatusCode, Failure> {
    let query = DeleteFile::decode(query.as_deref().unwrap_or_default())?;
    let deletion = match (scope.deletes(&path)?, &query.image) {
        (Deletion::File(path), Some(_)) => {
            let Some(snapshot) = published_snapshot(&path) else {
                let detail = format!(
                    "`{path}` publishes no snapshot, so none for an image: published/SNAPSHOT does"
                );
                return Err(Failure::new(ProblemCode::NotFound, detail));
            };
            Deletion::Publication { worker: &caller.name, snapshot, path }
        }
        (deletion, _) => deletion,
    };
    match deletion {
        Deletion::File(path) => match published_snapshot(&path) {
            Some(snapshot) => publishing::end(&state, snapshot, path).await?,
            None => state.call(move |store| store.remove_path(&path)).await?,
        },
        Deletion::Publication { worker, snapshot, path } => {
            let what = (snapshot, query.image);
            match publishing::unpublish(&state, worker, what, path).await? {
                Ended::Whole => {}
                Ended::KeptByOthers => about.say("it stays, as others published it, too"),
                Ended::KeptForImages => about.say("it stays, as other images refer to it"),
            }
        }
    }
    Ok(StatusCode::NO_CONTENT)
}

/// Names a place in the list, whatever bytes the path has.
fn cursor(path: &FilePath) -> String {
    path.names().iter().map(|name| encode_component(name.as_bytes())).collect::<Vec<_>>().join("/")
}

fn parse_cursor(text: &str) -> Result<FilePath, QueryError> {
    let bad = |reason: String| QueryError::new("after", reason);
    let names = text
        .split('/')
        .map(|part| {
            let bytes = decode_component(part).map_err(|error| bad(error.to_string()))?;
            Name::new(&bytes).map_err(|error| bad(error.to_string()))
        })
        .collect::<Result<Vec<_>, _>>()?;
    let path = FilePath::from_names(names).map_err(|error| bad(error.to_string()))?;
    // One spelling for each path, as the pattern of the OpenAPI document says.
    if cursor(&path) == text {
        Ok(path)
    } else {
        Err(bad("is not encoded as the `next` of a page is".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_names_every_path() {
        let names = [&b"a b"[..], b"\xff\xfe", b"50%"].map(|name| Name::new(name).unwrap());
        let path = FilePath::from_names(names.into()).unwrap();
        assert_eq!(cursor(&path), "a%20b/%FF%FE/50%25");
        assert_eq!(parse_cursor(&cursor(&path)).unwrap(), path);
        for bad in ["", "a//b", "..", "%", "%00", "a b", "a%2fb", "%ff", "%61", "\u{d7}"] {
            assert!(parse_cursor(bad).is_err(), "{bad}");
        }
    }
}
