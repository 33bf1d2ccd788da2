//! Block maps: what a worker asks for before it asks for bytes.

use axum::extract::{RawQuery, State};
use axum::http::{HeaderName, Method, header};
use slackwater_blockstore::{
    BLOCK_BYTES_U64, FILE_BYTES_MAX, Result as StoreResult, Source, Store,
};

use crate::block_map::{self, BlockMap};
use crate::convert::parse_snapshot_id;
use crate::extract::Segment;
use crate::failure::Failure;
use crate::paths;
use crate::query::Map;
use crate::router::Mount;
use crate::scope::Scope;
use crate::state::Shared;

/// The size of a block as it is written into maps.
const BLOCK_BYTES: u32 = 4096;

const _: () = assert!(BLOCK_BYTES as u64 == BLOCK_BYTES_U64);

pub(crate) fn mount(mount: Mount) -> Mount {
    mount.at(Method::GET, paths::FILE_MAP, of_file).at(
        Method::GET,
        paths::SNAPSHOT_MAP,
        of_snapshot,
    )
}

/// A map with its media type.
type MapAnswer = ([(HeaderName, &'static str); 1], Vec<u8>);

/// Tells for each block of a file its hash, or that it is a hole
///
/// Binary, numbers big-endian. 32 bytes of header: `SWM1`; bytes of a block (4); offset of the
/// first block (8); number of blocks (8); size of the file (8). Then runs: kind (1 byte: 0
/// hole, 1 data), number of blocks (4), and in data runs for each block the 32-byte BLAKE3 hash
/// of its 4096 bytes, the last block of a file being filled up with zeros.
///
/// The range is widened to whole blocks and cut at the end of the file. An answer covers at
/// most 65536 blocks: go on where it ends.
#[utoipa::path(
    get, path = paths::FILE_MAP, tag = "files", operation_id = "getFileMap",
    params(
        ("path" = String, Path, description = "The file's path, its slashes as %2F"),
        ("offset" = Option<u64>, Query, description = "Where to begin; 0 unless given"),
        ("length" = Option<u64>, Query, description = "How much; to the end unless given"),
    ),
    responses(
        (status = 200, description = "The map", content_type = "application/octet-stream"),
        (status = 404, description = "Nothing is at the path"),
        (status = 409, description = "The path is no file's"),
        (status = 422, description = "The path or the offset has no meaning"),
    ),
)]
pub(crate) async fn of_file(
    State(state): State<Shared>,
    scope: Scope,
    Segment(path): Segment,
    RawQuery(query): RawQuery,
) -> Result<MapAnswer, Failure> {
    let path = scope.reads(&path)?;
    let query = decode(query.as_deref())?;
    let read = move |store: &Store| {
        let attributes = store.file_info(&path)?.attributes;
        encode(store, Source::File(attributes.inode), attributes.size_bytes, query)
    };
    Ok(answer(state.call(read).await?))
}

/// Tells for each block of a snapshot its hash, or that it is a hole
///
/// In the form of a file's map.
#[utoipa::path(
    get, path = paths::SNAPSHOT_MAP, tag = "snapshots", operation_id = "getSnapshotMap",
    params(
        ("id" = String, Path, format = Uuid, description = "The snapshot's id"),
        ("offset" = Option<u64>, Query, description = "Where to begin; 0 unless given"),
        ("length" = Option<u64>, Query, description = "How much; to the end unless given"),
    ),
    responses(
        (status = 200, description = "The map", content_type = "application/octet-stream"),
        (status = 404, description = "There is no such snapshot"),
        (status = 422, description = "The id is no UUID in lower case, or the offset has no meaning"),
    ),
)]
pub(crate) async fn of_snapshot(
    State(state): State<Shared>,
    scope: Scope,
    Segment(id): Segment,
    RawQuery(query): RawQuery,
) -> Result<MapAnswer, Failure> {
    let id = parse_snapshot_id(&id)?;
    let query = decode(query.as_deref())?;
    scope.require_snapshot(&state, id).await?;
    let read = move |store: &Store| {
        let size_bytes = store.snapshot_info(id)?.size_bytes;
        encode(store, Source::Snapshot(id), size_bytes, query)
    };
    Ok(answer(state.call(read).await?))
}

/// Reads the part after the `?`. No file reaches beyond the largest one's end, so what asks there is mistaken.
fn decode(query: Option<&str>) -> Result<Map, Failure> {
    let query = Map::decode(query.unwrap_or_default())?;
    if query.offset_bytes > FILE_BYTES_MAX {
        let offset_bytes = query.offset_bytes;
        let detail = format!("offset is {offset_bytes}, expected at most {FILE_BYTES_MAX}");
        return Err(Failure::invalid(detail));
    }
    Ok(query)
}

fn answer(map: Vec<u8>) -> MapAnswer {
    ([(header::CONTENT_TYPE, block_map::MEDIA_TYPE)], map)
}

fn encode(store: &Store, source: Source, size_bytes: u64, query: Map) -> StoreResult<Vec<u8>> {
    let (offset_bytes, length_bytes) = covered(query, size_bytes);
    let hashes = match length_bytes {
        0 => Vec::new(),
        length_bytes => store.block_map(source, offset_bytes, length_bytes)?,
    };
    let blocks = hashes.into_iter().map(|hash| hash.map(|hash| *hash.as_bytes())).collect();
    Ok(BlockMap { block_bytes: BLOCK_BYTES, offset_bytes, size_bytes, blocks }.encode())
}

/// The start of the first block, and the bytes from there, that an answer covers.
fn covered(query: Map, size_bytes: u64) -> (u64, u64) {
    let first = query.offset_bytes - query.offset_bytes % BLOCK_BYTES_U64;
    let asked_end = query
        .length_bytes
        .map_or(u64::MAX, |length_bytes| query.offset_bytes.saturating_add(length_bytes));
    let most = block_map::BLOCKS_MAX * BLOCK_BYTES_U64;
    let end = asked_end.min(size_bytes).min(first.saturating_add(most));
    (first, end.saturating_sub(first))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_covers_whole_blocks_up_to_its_limit() {
        let ask = |offset_bytes, length_bytes| Map { offset_bytes, length_bytes };
        assert_eq!(covered(ask(0, None), 10_000), (0, 10_000));
        assert_eq!(covered(ask(5000, Some(1)), 10_000), (4096, 905));
        assert_eq!(covered(ask(4096, Some(4096)), 10_000), (4096, 4096));
        assert_eq!(covered(ask(20_000, None), 10_000), (16_384, 0));
        assert_eq!(covered(ask(0, Some(0)), 10_000), (0, 0));
        assert_eq!(covered(ask(u64::MAX, Some(u64::MAX)), 10_000).1, 0);
        let most = block_map::BLOCKS_MAX * BLOCK_BYTES_U64;
        assert_eq!(covered(ask(8192, None), u64::MAX), (8192, most));
    }
}
