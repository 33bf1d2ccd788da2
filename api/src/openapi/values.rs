//! What texts and numbers may be, where the handlers' types do not say it: patterns (ECMA-262) and bounds.
//!
//! What the document allows is refused only for what a schema cannot say: lengths are in characters here and in bytes
//! in the server; `after` of files is encoded in one way alone, and its names are names; `blob` and `for_all` are not given together; an end of a snapshot lies before the year 2554; and the
//! labels that the appliance itself has put on a snapshot count.

use serde_json::{Value, json};
use slackwater_blockstore::LABELS_MAX;

use crate::image_name::IMAGE_NAME_BYTES_MAX;
use crate::worker::WORKER_NAME_BYTES_MAX;

/// Labels that the appliance adds to a snapshot that is registered as a chain.
const CHAIN_LABELS: usize = 2;

/// A name in a path: not `.` or `..`, and without a slash or NUL. Without a look ahead, which generators of values
/// only manage by trying.
const NAME: &str =
    r"(?:[^/.\u0000][^/\u0000]{0,254}|\.[^/.\u0000][^/\u0000]{0,253}|\.\.[^/\u0000]{1,253})";

/// A chain id, and every digest.
const DIGEST: &str = "sha256:[0-9a-f]{64}";

/// A part of the name of a repository (OCI distribution specification, "Pulling manifests").
const REPOSITORY_PART: &str = "[a-z0-9](?:[a-z0-9._-]*[a-z0-9])?";

const HOST: &str = r"(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\])";

const PORT: &str =
    "(?:[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])";

/// A file's path.
fn path() -> Value {
    json!({"minLength": 1, "maxLength": 4096, "pattern": format!("^/?{NAME}(?:/{NAME})*$")})
}

fn chain_id() -> Value {
    json!({"pattern": format!("^{DIGEST}$")})
}

fn blob() -> Value {
    let repository = format!("{REPOSITORY_PART}(?:/{REPOSITORY_PART})*");
    json!({"maxLength": 600, "pattern": format!("^{HOST}(?::{PORT})?/{repository}@{DIGEST}$")})
}

fn image() -> Value {
    let pattern = r"^(?:[*?]|[A-Za-z0-9._:/@+-]+)$";
    json!({"minLength": 1, "maxLength": IMAGE_NAME_BYTES_MAX, "pattern": pattern})
}

fn worker_name() -> Value {
    let pattern = "^[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?$";
    json!({"minLength": 1, "maxLength": WORKER_NAME_BYTES_MAX, "pattern": pattern})
}

/// Names and labels of snapshots that callers set: the appliance's own begin with `slackwater:`.
fn snapshot_name() -> Value {
    json!({"minLength": 1, "maxLength": 1024, "pattern": r"^(?!slackwater:)[^\u0000]*$"})
}

fn labels(most: usize) -> Value {
    json!({
        "maxProperties": most,
        "propertyNames": {"minLength": 1, "maxLength": 4096, "pattern": r"^(?!slackwater:)[^\u0000]*$"},
        "additionalProperties": {"type": "string", "maxLength": 4096, "pattern": r"^[^\u0000]*$"},
    })
}

/// Sizes of files.
fn size_bytes() -> Value {
    json!({"maximum": 1_u64 << 62})
}

/// A number that a page gave; offsets reach 2^62.
fn number() -> Value {
    json!({"pattern": "^[0-9]{1,19}$"})
}

/// Where a page of files ended: a path whose names are percent-encoded, whatever bytes they have.
fn cursor() -> Value {
    const NAME: &str = "(?:[A-Za-z0-9._~-]|%[0-9A-F]{2})+";
    json!({"minLength": 1, "maxLength": 3 * 4096, "pattern": format!("^{NAME}(?:/{NAME})*$")})
}

fn uuid() -> Value {
    json!({"format": "uuid", "pattern": "^[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}$"})
}

/// Exactly one of the two changes of a file; null is as good as nothing.
fn one_change() -> Value {
    let one = |given: &str, other: &str| {
        let properties = json!({given: {"not": {"type": "null"}}, other: {"type": "null"}});
        json!({"required": [given], "properties": properties})
    };
    json!({"oneOf": [one("size_bytes", "path"), one("path", "size_bytes")]})
}

/// At most one of the two ends of a snapshot.
fn one_end() -> Value {
    let both = json!({"expires_at": {"type": "string"}, "expires_in_seconds": {"type": "integer"}});
    json!({"not": {"required": ["expires_at", "expires_in_seconds"], "properties": both}})
}

/// Adds to the document what its values may be.
pub(super) fn complete(document: &mut Value) {
    let schemas = &mut document["components"]["schemas"];
    for (schema, property, what) in [
        ("CreateFile", "path", path()),
        ("CreateFile", "size_bytes", size_bytes()),
        ("UpdateFile", "path", path()),
        ("UpdateFile", "size_bytes", size_bytes()),
        ("CreateSnapshot", "path", path()),
        ("CreateSnapshot", "name", snapshot_name()),
        ("CreateSnapshot", "labels", labels(LABELS_MAX)),
        ("UpdateSnapshot", "labels", labels(LABELS_MAX)),
        ("CreateClone", "path", path()),
        ("RegisterChain", "path", path()),
        ("RegisterChain", "labels", labels(LABELS_MAX - CHAIN_LABELS)),
    ] {
        add(&mut schemas[schema]["properties"][property], what);
    }
    for (schema, what) in [
        ("UpdateFile", one_change()),
        ("CreateSnapshot", one_end()),
        ("ChainId", chain_id()),
        ("ImageName", image()),
        ("RegistryBlob", blob()),
        ("WorkerName", worker_name()),
        ("SnapshotId", uuid()),
    ] {
        add(&mut schemas[schema], what);
    }
    for (template, operations) in document["paths"].as_object_mut().into_iter().flatten() {
        for operation in operations.as_object_mut().into_iter().flat_map(|all| all.values_mut()) {
            let parameters = operation.get_mut("parameters").and_then(Value::as_array_mut);
            for parameter in parameters.into_iter().flatten() {
                let what = of_parameter(template, parameter);
                add(&mut parameter["schema"], what);
            }
        }
    }
    // Without a body the defaults count.
    document["paths"][crate::paths::CHECK]["post"]["requestBody"]["required"] = json!(false);
}

fn of_parameter(template: &str, parameter: &Value) -> Value {
    let text = |key: &str| parameter[key].as_str().unwrap_or_default();
    match (text("in"), text("name")) {
        (_, "path") => path(),
        ("path", "chain_id") => chain_id(),
        ("query", "blob") => blob(),
        ("query", "image") => image(),
        ("path", "name") => worker_name(),
        ("path", "id") | ("query", "base") => uuid(),
        ("path", "size_bytes") => size_bytes(),
        ("query", "after") => match template {
            "/v1/files" => cursor(),
            "/v1/snapshots" => uuid(),
            _ => number(),
        },
        ("query", "label") => {
            json!({"items": {"type": "string", "pattern": r"^[^=\u0000]+=[^\u0000]*$"}})
        }
        ("query", "offset") => size_bytes(),
        // More than the largest number of the format int64.
        ("query", "length") => json!({"maximum": u64::MAX, "format": "uint64"}),
        _ => json!({}),
    }
}

/// Puts the keys of `what` into a schema, if it is there.
fn add(schema: &mut Value, what: Value) {
    if let (Some(schema), Value::Object(what)) = (schema.as_object_mut(), what) {
        schema.extend(what);
    }
}
