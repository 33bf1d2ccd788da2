//! The routes of the REST face: their templates, and how a client builds a concrete one.
//!
//! A file's path is **one** segment of a route, its slashes written as `%2F`:
//!
//! ```text
//! GET /v1/files/images%2Fdebian.img        the file images/debian.img
//! GET /v1/files/images%2Fdebian.img/data   its bytes
//! GET /v1/files/images%2Fdata              the file images/data
//! ```
//!
//! So a file may have any name, `data` and `map` included, and no route is ambiguous.

/// `GET` a page of files, `POST` a new one.
pub const FILES: &str = "/v1/files";
/// `GET`, `PATCH`, `DELETE` one file.
pub const FILE: &str = "/v1/files/{path}";
/// `GET` and `PUT` a file's bytes.
pub const FILE_DATA: &str = "/v1/files/{path}/data";
/// `GET` a file's block map.
pub const FILE_MAP: &str = "/v1/files/{path}/map";
/// `GET` what a delete of a file would free.
pub const FILE_RECLAIMABLE: &str = "/v1/files/{path}/reclaimable";
/// `GET` a page of snapshots, `POST` a new one.
pub const SNAPSHOTS: &str = "/v1/snapshots";
/// `GET`, `PATCH`, `DELETE` one snapshot.
pub const SNAPSHOT: &str = "/v1/snapshots/{id}";
/// `GET` a snapshot's bytes.
pub const SNAPSHOT_DATA: &str = "/v1/snapshots/{id}/data";
/// `GET` a snapshot's block map.
pub const SNAPSHOT_MAP: &str = "/v1/snapshots/{id}/map";
/// `GET` what a delete of a snapshot would free.
pub const SNAPSHOT_RECLAIMABLE: &str = "/v1/snapshots/{id}/reclaimable";
/// `GET` what changed in a snapshot since another one.
pub const SNAPSHOT_DIFF: &str = "/v1/snapshots/{id}/diff";
/// `GET` what an image holds to stand for a snapshot.
pub const SNAPSHOT_REFERENCE: &str = "/v1/snapshots/{id}/reference";
/// `PUT` that a snapshot is a chain.
pub const SNAPSHOT_CHAIN: &str = "/v1/snapshots/{id}/chains/{chain_id}";
/// `POST` a snapshot that is a chain.
pub const CHAINS: &str = "/v1/chains";
/// `GET` the snapshot that is registered for a chain.
pub const CHAIN: &str = "/v1/chains/{chain_id}/{size_bytes}";
/// `POST` a clone.
pub const CLONES: &str = "/v1/clones";
/// `GET` all workers, `POST` one that is to join.
pub const WORKERS: &str = "/v1/workers";
/// `GET` and `DELETE` one worker.
pub const WORKER: &str = "/v1/workers/{name}";
/// `POST` by the bearer of a join token.
pub const JOIN: &str = "/v1/join";
/// `PUT` another credential of the calling worker.
pub const CREDENTIAL: &str = "/v1/credential";
/// `POST` for a path by which the caller mounts.
pub const MOUNT_PATHS: &str = "/v1/mount-paths";
/// `GET` counts and sizes.
pub const STATS: &str = "/v1/stats";
/// `GET` who changed what.
pub const AUDIT: &str = "/v1/audit";
/// `POST` a check of the store.
pub const CHECK: &str = "/v1/check";
/// `POST` a garbage collection.
pub const GC: &str = "/v1/gc";
/// `GET` metrics in Prometheus' text format.
pub const METRICS: &str = "/metrics";
/// `GET` whether the process is up.
pub const HEALTHZ: &str = "/healthz";
/// `GET` whether the store serves reads and writes.
pub const READYZ: &str = "/readyz";
/// `GET` the OpenAPI document.
pub const OPENAPI: &str = "/openapi.json";
/// `GET` the dashboard.
pub const DASHBOARD: &str = "/";

/// Header of a `POST` that makes it safe to send again (see [`IDEMPOTENCY_KEY_BYTES_MAX`]).
///
/// The server remembers the answer in memory for up to 24 hours and gives it again for the
/// same key and body; another body under the key is refused with `idempotency_key_reused`.
/// A restart of the server forgets it. Then a repeated `POST` of a file, of a clone or of a
/// *named* snapshot is refused with `exists`, changing nothing, and the caller can look at
/// what is there; an unnamed snapshot is taken a second time, unless the file was to become its clone.
pub const IDEMPOTENCY_KEY: &str = "idempotency-key";

/// Longest idempotency key: several times a UUID, short enough to be kept by the thousand.
pub const IDEMPOTENCY_KEY_BYTES_MAX: usize = 128;

/// Header of an answer that was given again for a repeated `POST`.
pub const IDEMPOTENCY_REPLAYED: &str = "idempotency-replayed";

/// The route of one file.
#[must_use]
pub fn file(path: &str) -> String {
    format!("{FILES}/{}", encode_path(path))
}

/// The route of a file's bytes.
#[must_use]
pub fn file_data(path: &str) -> String {
    format!("{FILES}/{}/data", encode_path(path))
}

/// The route of a file's block map.
#[must_use]
pub fn file_map(path: &str) -> String {
    format!("{FILES}/{}/map", encode_path(path))
}

/// The route of what a delete of a file would free.
#[must_use]
pub fn file_reclaimable(path: &str) -> String {
    format!("{FILES}/{}/reclaimable", encode_path(path))
}

/// The route of one snapshot.
#[must_use]
pub fn snapshot(id: crate::types::SnapshotId) -> String {
    format!("{SNAPSHOTS}/{id}")
}

/// The route of a snapshot's bytes.
#[must_use]
pub fn snapshot_data(id: crate::types::SnapshotId) -> String {
    format!("{SNAPSHOTS}/{id}/data")
}

/// The route of a snapshot's block map.
#[must_use]
pub fn snapshot_map(id: crate::types::SnapshotId) -> String {
    format!("{SNAPSHOTS}/{id}/map")
}

/// The route of what a delete of a snapshot would free.
#[must_use]
pub fn snapshot_reclaimable(id: crate::types::SnapshotId) -> String {
    format!("{SNAPSHOTS}/{id}/reclaimable")
}

/// The route of a snapshot's diff.
#[must_use]
pub fn snapshot_diff(id: crate::types::SnapshotId) -> String {
    format!("{SNAPSHOTS}/{id}/diff")
}

/// The route of a snapshot's reference.
#[must_use]
pub fn snapshot_reference(id: crate::types::SnapshotId) -> String {
    format!("{SNAPSHOTS}/{id}/reference")
}

/// The route by which a snapshot is registered as a chain.
#[must_use]
pub fn snapshot_chain(id: crate::types::SnapshotId, chain: &crate::types::ChainId) -> String {
    format!("{SNAPSHOTS}/{id}/chains/{chain}")
}

/// The route of the snapshot that is registered for a chain and a size of disk.
#[must_use]
pub fn chain(chain: &crate::types::ChainId, size_bytes: u64) -> String {
    format!("{CHAINS}/{chain}/{size_bytes}")
}

/// The route of one worker.
#[must_use]
pub fn worker(name: &crate::worker::WorkerName) -> String {
    format!("{WORKERS}/{name}")
}

/// A file's path as one segment; one leading slash is forgiven, as in requests.
fn encode_path(path: &str) -> String {
    encode_component(path.strip_prefix('/').unwrap_or(path).as_bytes())
}

/// Writes bytes as one segment of a route or as a value of a query: all but the unreserved
/// characters of RFC 3986 section 2.3 as `%XX`.
#[must_use]
pub fn encode_component(bytes: &[u8]) -> String {
    const HEX: &[u8; 16] = b"0123456789ABCDEF";
    let mut text = String::with_capacity(bytes.len() + bytes.len() / 4);
    for &byte in bytes {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            text.push(char::from(byte));
        } else {
            text.push('%');
            text.push(char::from(HEX[usize::from(byte >> 4)]));
            text.push(char::from(HEX[usize::from(byte & 0xf)]));
        }
    }
    text
}

/// A `%` that is not followed by two hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the `%` at byte {position} is not followed by two hexadecimal digits")]
pub struct PercentError {
    /// Where the `%` is.
    pub position: usize,
}

/// The bytes that [`encode_component`] wrote as `text`; a `+` stays a `+`.
///
/// # Errors
/// A `%` without two hexadecimal digits.
pub fn decode_component(text: &str) -> Result<Vec<u8>, PercentError> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes().enumerate();
    while let Some((position, byte)) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || rest.next().and_then(|(_, digit)| hex_value(digit));
        match (digit(), digit()) {
            (Some(high), Some(low)) => bytes.push(high << 4 | low),
            _ => return Err(PercentError { position }),
        }
    }
    Ok(bytes)
}

fn hex_value(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        b'A'..=b'F' => Some(digit - b'A' + 10),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_one_segment() {
        assert_eq!(file("/images/debian.img"), "/v1/files/images%2Fdebian.img");
        assert_eq!(file_data("a/data"), "/v1/files/a%2Fdata/data");
        assert_eq!(file_map("50% off?"), "/v1/files/50%25%20off%3F/map");
    }

    #[test]
    fn every_byte_survives_the_encoding() {
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(decode_component(&encode_component(&all)).unwrap(), all);
        assert_eq!(decode_component("a%2fb+").unwrap(), b"a/b+");
        for (bad, position) in [("%", 0), ("ab%4", 2), ("%zz", 0), ("a%+1", 1)] {
            assert_eq!(decode_component(bad), Err(PercentError { position }), "{bad}");
        }
    }
}
