//! The OpenAPI document: what the handlers say about themselves, and what holds for all.

mod values;

use std::sync::LazyLock;

use serde_json::{Map, Value, json};
use utoipa::OpenApi;

use crate::auth::{Access, access};
use crate::error::{PROBLEM_MEDIA_TYPE, Problem};
use crate::paths::{IDEMPOTENCY_KEY, IDEMPOTENCY_KEY_BYTES_MAX};
use crate::routes::vmstore::{self, VmstoreError};
use crate::routes::{
    audit, chains, clones, data, files, map, reclaimable, snapshots, stats, workers,
};
use crate::tokens::Role;

/// Statuses that any call may answer, beside those that it names itself.
const COMMON_STATUSES: [(&str, &str); 11] = [
    ("400", "The request cannot be read"),
    ("401", "A valid bearer token is needed"),
    (
        "403",
        "The token's role does not allow the call, or the worker does not reach the file or snapshot",
    ),
    ("408", "The body was not sent in time"),
    ("413", "The body is too large"),
    ("415", "The body's media type is not taken"),
    ("429", "Too many wrong tokens or passwords from this address"),
    ("500", "The server, its disk or stored data failed"),
    ("503", "Too busy, stopping, or refusing writes until restart"),
    ("504", "The call took too long and may still be carried out"),
    ("507", "The store is full"),
];

/// Statuses by which HTTP itself answers, before any call is known, and without a body.
const BARE_STATUSES: [(&str, &str); 2] = [
    ("414", "The address is too long; most that are so get 431"),
    ("431", "Address and headers together are larger than 64 KiB, or the headers are too many"),
];

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Slackwater",
        description = "Sparse files over NFS with snapshots and clones whose cost does not depend on \
            size. A file's path is one segment of a route, its slashes written as `%2F`. Errors are \
            problem documents (RFC 9457) with a stable `code`. Sizes and offsets are in bytes.",
    ),
    paths(
        crate::dashboard::page,
        files::list, files::create, files::get, files::update, files::delete,
        data::get_file, data::put_file, data::get_snapshot,
        map::of_file, map::of_snapshot,
        reclaimable::of_file, reclaimable::of_snapshot,
        snapshots::list, snapshots::create, snapshots::get, snapshots::update, snapshots::delete,
        snapshots::diff, snapshots::reference,
        chains::register, chains::find, chains::add,
        clones::create,
        workers::list, workers::add, workers::get, workers::revoke, workers::join, workers::replace_credential,
        workers::add_mount_path,
        audit::list,
        stats::stats, stats::check, stats::gc, stats::metrics, stats::healthz, stats::readyz,
        stats::document,
        vmstore::session::login, vmstore::session::logout,
        vmstore::snapshots::create, vmstore::snapshots::clone, vmstore::snapshots::list,
        vmstore::snapshots::delete,
        vmstore::inventory::info, vmstore::inventory::appliance, vmstore::inventory::virtual_disk,
        vmstore::inventory::refresh,
    ),
    components(schemas(Problem, VmstoreError)),
    tags(
        (name = "files", description = "Files of the export"),
        (name = "snapshots", description = "Immutable images of files"),
        (name = "chains", description = "Which snapshot holds the layers that a chain id of an image names"),
        (name = "clones", description = "Writable files made from snapshots"),
        (name = "workers", description = "Machines with credentials of their own"),
        (name = "appliance", description = "Figures, health and care"),
        (name = "vmstore", description = "The same under the paths that clients of Tintri VMstore call"),
    ),
)]
struct Handlers;

static WITH_VMSTORE: LazyLock<String> = LazyLock::new(|| document(true).to_string());
static WITHOUT_VMSTORE: LazyLock<String> = LazyLock::new(|| document(false).to_string());

/// The document as it is served; the VMstore face is in it only where it is on.
pub(crate) fn document_text(with_vmstore: bool) -> &'static str {
    if with_vmstore { &WITH_VMSTORE } else { &WITHOUT_VMSTORE }
}

fn document(with_vmstore: bool) -> Value {
    let mut document = serde_json::to_value(Handlers::openapi()).unwrap_or_default();
    document["components"]["securitySchemes"] = json!({
        "token": {"type": "http", "scheme": "bearer"},
        "session": {"type": "apiKey", "in": "cookie", "name": "JSESSIONID"},
    });
    if let Some(paths) = document["paths"].as_object_mut() {
        paths.retain(|template, _| with_vmstore || !template.starts_with(vmstore::PREFIX));
        for (template, operations) in paths.iter_mut() {
            for (method, operation) in operations.as_object_mut().into_iter().flatten() {
                complete(template, method, operation);
            }
        }
    }
    values::complete(&mut document);
    document
}

/// Adds to one operation what holds for all.
fn complete(template: &str, method: &str, operation: &mut Value) {
    let method = method.to_ascii_uppercase();
    let access = axum::http::Method::from_bytes(method.as_bytes())
        .map_or(Access::Role(Role::Admin), |method| access(&method, template));
    operation["security"] = match access {
        Access::Open => json!([]),
        Access::Session => json!([{"session": []}]),
        Access::Role(_) | Access::JoinToken | Access::Credential => json!([{"token": []}]),
    };
    match access {
        Access::Role(role) => operation["x-role"] = json!(role.to_string()),
        Access::JoinToken => operation["x-role"] = json!("join token"),
        Access::Credential => operation["x-role"] = json!("credential of a worker"),
        Access::Open | Access::Session => {}
    }
    if method == "POST" && template.starts_with("/v1/") {
        add_idempotency_key(operation);
    }
    let (media_type, schema) = if template.starts_with(vmstore::PREFIX) {
        ("application/json", "VmstoreError")
    } else {
        (PROBLEM_MEDIA_TYPE, "Problem")
    };
    if let Some(responses) = operation["responses"].as_object_mut() {
        add_failures(responses, media_type, schema);
    }
}

/// What a call with an idempotency key may be answered.
const IDEMPOTENCY_STATUSES: [(&str, &str); 2] = [
    ("409", "The first call with this idempotency key is under way still"),
    ("422", "The idempotency key came with another body before"),
];

fn add_idempotency_key(operation: &mut Value) {
    if let Some(responses) = operation["responses"].as_object_mut() {
        for (status, description) in IDEMPOTENCY_STATUSES {
            responses.entry(status).or_insert_with(|| json!({"description": description}));
        }
    }
    let parameter = json!({
        "name": IDEMPOTENCY_KEY,
        "in": "header",
        "required": false,
        "description": "Makes the call safe to send again: for 24 hours, or until the server \
            restarts, the same key and body get the answer of the first call (with the header \
            `idempotency-replayed`). Another body is refused with `idempotency_key_reused`.",
        "schema": {"type": "string", "minLength": 1, "maxLength": IDEMPOTENCY_KEY_BYTES_MAX},
    });
    match operation["parameters"].as_array_mut() {
        Some(parameters) => parameters.push(parameter),
        None => operation["parameters"] = json!([parameter]),
    }
}

fn add_failures(responses: &mut Map<String, Value>, media_type: &str, schema: &str) {
    for (status, description) in COMMON_STATUSES {
        responses.entry(status).or_insert_with(|| json!({"description": description}));
    }
    for (status, response) in responses.iter_mut() {
        if status.as_str() >= "400" {
            let reference = format!("#/components/schemas/{schema}");
            response["content"] = json!({media_type: {"schema": {"$ref": reference}}});
        }
    }
    for (status, description) in BARE_STATUSES {
        responses.insert(status.to_owned(), json!({"description": description}));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn documented(with_vmstore: bool) -> BTreeSet<(String, String)> {
        let document = document(with_vmstore);
        let paths = document["paths"].as_object().unwrap();
        paths
            .iter()
            .flat_map(|(template, operations)| {
                operations
                    .as_object()
                    .unwrap()
                    .keys()
                    .map(|method| (method.to_ascii_uppercase(), template.clone()))
            })
            .collect()
    }

    #[test]
    fn what_is_mounted_is_documented_and_the_other_way_round() {
        for with_vmstore in [false, true] {
            let mounted: BTreeSet<(String, String)> = crate::router::mount(with_vmstore)
                .mounted
                .iter()
                .map(|(method, template)| (method.to_string(), (*template).to_owned()))
                .collect();
            assert_eq!(mounted, documented(with_vmstore));
        }
        assert!(documented(true).len() > documented(false).len());
    }

    #[test]
    fn the_document_is_whole() {
        let document = document(true);
        assert!(document["openapi"].as_str().unwrap().starts_with("3.1"));
        let text = document.to_string();
        let schemas = document["components"]["schemas"].as_object().unwrap();
        let marker = "#/components/schemas/";
        for (position, _) in text.match_indices(marker) {
            let name = text[position + marker.len()..].split('"').next().unwrap();
            assert!(schemas.contains_key(name), "{name} is referred to and not there");
        }
        let mut ids = BTreeSet::new();
        for operations in document["paths"].as_object().unwrap().values() {
            for operation in operations.as_object().unwrap().values() {
                let id = operation["operationId"].as_str().unwrap();
                assert!(ids.insert(id.to_owned()), "{id} twice");
                assert!(operation["summary"].as_str().is_some_and(|text| !text.is_empty()), "{id}");
                assert!(operation["responses"].as_object().unwrap().contains_key("503"), "{id}");
            }
        }
        assert_eq!(document["paths"]["/v1/check"]["post"]["x-role"], "admin");
        assert_eq!(document["paths"]["/healthz"]["get"]["security"], json!([]));
        // What `values` says has found its place, and made none.
        let properties = schemas.values().filter_map(|schema| schema["properties"].as_object());
        assert!(properties.flat_map(|all| all.values()).all(|property| !property.is_null()));
        assert!(schemas.values().all(|schema| !schema.is_null()));
        let schemas = &document["components"]["schemas"];
        for place in [
            &schemas["CreateFile"]["properties"]["path"]["pattern"],
            &schemas["CreateSnapshot"]["properties"]["labels"]["maxProperties"],
            &schemas["ChainId"]["pattern"],
            &schemas["WorkerName"]["pattern"],
            &document["paths"]["/v1/files/{path}"]["get"]["parameters"][0]["schema"]["pattern"],
        ] {
            assert!(!place.is_null(), "{document:#}");
        }
        assert_eq!(document["paths"]["/v1/check"]["post"]["requestBody"]["required"], false);
    }
}
