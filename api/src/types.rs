//! What the REST calls carry: one plain type for each JSON body, shared by server and client.
//!
//! Requests refuse fields that they do not know, so that a misspelt option is an error and not
//! silently ignored. Answers may gain fields, so a client ignores those that it does not know.
//! Sizes and offsets are in bytes. A path is the file's path below the export, without a
//! leading slash, such as `images/debian.img`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

pub use crate::chain::{
    ChainId, ChainIdParseError, RegisterChain, RegistryBlob, RegistryBlobParseError,
};
pub use crate::image_name::{IMAGE_NAME_BYTES_MAX, ImageName, ImageNameError};
pub use crate::timestamp::{Timestamp, TimestampParseError};

/// Items of a page when the request names no limit.
pub const PAGE_LIMIT_DEFAULT: usize = 100;

/// Most items of a page: an answer stays within a few MiB even where every snapshot carries
/// all the labels that containerd writes.
pub const PAGE_LIMIT_MAX: usize = 1000;

/// Labels of a snapshot.
pub type Labels = BTreeMap<String, String>;

/// The id of a snapshot: a random UUID in lower case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "server", schema(value_type = String, format = Uuid, examples("6f1f3c1e-5d0c-4d55-9d61-2f5b6f0f6c11")))]
pub struct SnapshotId(uuid::Uuid);

/// The text is not a snapshot id.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a snapshot id is a UUID of 36 lower-case characters, got `{}`", got.escape_debug())]
pub struct SnapshotIdParseError {
    /// The text.
    pub got: String,
}

impl SnapshotId {
    /// The id with these bytes.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(uuid::Uuid::from_bytes(bytes))
    }

    /// The 16 bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 16] {
        self.0.as_bytes()
    }
}

impl fmt::Display for SnapshotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.as_hyphenated().fmt(f)
    }
}

impl FromStr for SnapshotId {
    type Err = SnapshotIdParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        // Only the form that Display writes: one snapshot has one spelling.
        let spelled = text.len() == 36 && !text.bytes().any(|byte| byte.is_ascii_uppercase());
        match uuid::Uuid::try_parse(text) {
            Ok(id) if spelled => Ok(Self(id)),
            _ => Err(SnapshotIdParseError { got: text.chars().take(64).collect() }),
        }
    }
}

impl Serialize for SnapshotId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for SnapshotId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// A sparse file of the export.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
pub struct File {
    /// Its path below the export. Names that are not UTF-8 are shown escaped and can be
    /// reached over NFS only.
    pub path: String,
    /// Its size.
    pub size_bytes: u64,
    /// Bytes of blocks that are not holes, those shared with snapshots included.
    pub used_bytes: u64,
    /// Bytes of blocks that this file maps and no snapshot or clone of it: written since its last snapshot, or since
    /// it was cloned. Other files may hold the same blocks: `reclaimable` tells what a delete would free.
    pub unique_bytes: u64,
    /// The snapshot that it is a clone of: it was made from that, or that was taken of it so.
    pub origin_snapshot_id: Option<SnapshotId>,
    /// When it was made.
    pub created_at: Timestamp,
    /// Last change of its content.
    pub modified_at: Timestamp,
}

/// What a delete would free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
pub struct Reclaimable {
    /// Bytes on the appliance's disk, as they are stored there: compressed, and those that were stored together taken
    /// for equally large.
    pub bytes: u64,
    /// Blocks of 4096 bytes that nothing else holds.
    pub blocks: u64,
    /// Of so many blocks one was looked at, and the sums multiplied: 1 where all were.
    pub sampled_one_in: u64,
}

/// A page of files, in byte order of their paths.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
pub struct FilePage {
    /// The files.
    pub items: Vec<File>,
    /// The `after` of the next page; null on the last one.
    #[serde(default)]
    #[cfg_attr(feature = "server", schema(required = true))]
    pub next: Option<String>,
}

/// Makes a sparse file, and the directories on the way that are missing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CreateFile {
    /// Its path below the export.
    pub path: String,
    /// Its size, at most 2^62.
    pub size_bytes: u64,
}

/// Changes a file: exactly one of the fields, so that the call is atomic.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct UpdateFile {
    /// The new size: what lies beyond is cut off, what is added reads as zeros.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
    /// The new path; nothing may be there. Missing directories are made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
}

/// The outcome of a `PUT` of data: it is on the disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
pub struct DataWritten {
    /// Where the first byte went.
    pub offset_bytes: u64,
    /// Bytes that were written.
    pub length_bytes: u64,
    /// The file's size afterwards.
    pub size_bytes: u64,
}

/// When the appliance deletes a snapshot by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum DeletionPolicy {
    /// Never.
    #[default]
    Keep,
    /// When its last clone is deleted.
    OnZeroClones,
}

/// An immutable, whole-file, point-in-time image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
pub struct Snapshot {
    /// Its id, good for ever.
    pub id: SnapshotId,
    /// The path that the file had when it was taken.
    pub path: String,
    /// Its name, unique in the appliance.
    pub name: Option<String>,
    /// Its labels.
    pub labels: Labels,
    /// The chain ids that it was registered as, each with the names of the tokens that did so: a name is
    /// empty where the appliance asks for no token.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[cfg_attr(feature = "server", schema(value_type = BTreeMap<String, Vec<String>>))]
    pub chains: BTreeMap<ChainId, BTreeSet<String>>,
    /// Those of them that are not for all, each with blobs of registries: it is for those who may read one.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[cfg_attr(feature = "server", schema(value_type = BTreeMap<String, Vec<String>>))]
    pub restricted_chains: BTreeMap<ChainId, BTreeSet<RegistryBlob>>,
    /// The names of the tokens and workers that published it: what is published stays so until each worker among them
    /// ended that, or a token did. A name is empty where no token is asked for; `*` stands for others, whose names are
    /// not known.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    #[cfg_attr(feature = "server", schema(value_type = Vec<String>))]
    pub publishers: BTreeSet<String>,
    /// The images that refer to it, as far as publishers told that, each with the names of those who did: it stays
    /// published by each until it has ended that for all of its images. `*` stands for images whose names are not
    /// known, or beyond what is kept, `?` for one whose name a publisher tells later.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[cfg_attr(feature = "server", schema(value_type = BTreeMap<String, Vec<String>>))]
    pub images: BTreeMap<String, BTreeSet<String>>,
    /// When it was published last, or at most an hour before that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub published_at: Option<Timestamp>,
    /// The file's size.
    pub size_bytes: u64,
    /// Bytes of blocks that are not holes.
    pub used_bytes: u64,
    /// When it was taken.
    pub created_at: Timestamp,
    /// Clones of it that exist now.
    pub clone_count: u64,
    /// When the appliance deletes it by itself.
    pub deletion_policy: DeletionPolicy,
    /// The appliance deletes it some time after this, if it has no clones then; not within an hour
    /// of its start.
    pub expires_at: Option<Timestamp>,
}

/// What the layer of an image holds to stand for a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
pub struct SnapshotReference {
    /// Id of the store.
    pub store_id: String,
    /// The snapshot.
    pub snapshot_id: SnapshotId,
    /// Its size.
    pub size_bytes: u64,
    /// Their message authentication code, which only this appliance can make: 64 hexadecimal digits.
    pub mac: String,
}

/// A page of snapshots, in order of their ids.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
pub struct SnapshotPage {
    /// The snapshots.
    pub items: Vec<Snapshot>,
    /// The `after` of the next page; null on the last one.
    #[serde(default)]
    #[cfg_attr(feature = "server", schema(required = true))]
    pub next: Option<String>,
}

/// Takes a snapshot of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CreateSnapshot {
    /// The file's path.
    pub path: String,
    /// A name, unique in the appliance. A named snapshot is safe to ask for again: the second
    /// request is refused with code `exists`, and the problem carries the id that holds the name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Labels: at most 64, keys and values of at most 4096 bytes.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: Labels,
    /// When the appliance deletes it by itself.
    #[serde(default)]
    pub deletion_policy: DeletionPolicy,
    /// The appliance deletes it some time after this, if it has no clones then; not within an hour
    /// of its start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<Timestamp>,
    /// Instead of `expires_at`: so long from now by the appliance's clock, for a caller whose own may be
    /// wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_in_seconds: Option<u64>,
    /// The file counts as a clone of the snapshot from then on, so that the snapshot has one as soon as it is there. Of a
    /// file that is a clone already it is refused with code `exists`, and the problem carries the id of that snapshot.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub becomes_clone: bool,
}

/// Changes a snapshot's labels; its content never changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct UpdateSnapshot {
    /// All labels that it is to have.
    pub labels: Labels,
}

/// Makes a writable file with a snapshot's content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CreateClone {
    /// The snapshot.
    pub snapshot_id: SnapshotId,
    /// The clone's path; nothing may be there. Missing directories are made.
    pub path: String,
    /// Of a clone at `published/SNAPSHOT` alone: the image that refers to the snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageName>,
}

/// Whether a changed range holds data or reads as zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum ExtentKind {
    /// Data.
    Data,
    /// A hole: reads as zeros, stores nothing.
    Hole,
}

/// A range that differs between two snapshots, as it is in the newer one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
pub struct DiffExtent {
    /// Start; a multiple of 4096.
    pub offset_bytes: u64,
    /// Length; a multiple of 4096, but at the end of the file.
    pub length_bytes: u64,
    /// Data or hole.
    pub kind: ExtentKind,
}

/// A page of changed extents, in order of offset.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
pub struct DiffPage {
    /// The extents.
    pub items: Vec<DiffExtent>,
    /// The `after` of the next page; null on the last one.
    #[serde(default)]
    #[cfg_attr(feature = "server", schema(required = true))]
    pub next: Option<String>,
}

/// Counts and sizes of the appliance, as of one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
pub struct Stats {
    /// Release of the server.
    pub version: String,
    /// Id of the store, given at its creation.
    pub store_id: String,
    /// Path under which NFS clients mount the export.
    pub export_path: String,
    /// The appliance's time when this was read; older releases do not send it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub now: Option<Timestamp>,
    /// Bytes that the store may occupy.
    pub capacity_bytes: u64,
    /// Bytes that it occupies.
    pub used_bytes: u64,
    /// Bytes that can still be written.
    pub available_bytes: u64,
    /// Bytes of live chunks as stored, that is compressed.
    pub chunk_bytes: u64,
    /// Live chunks: distinct blocks.
    pub chunk_count: u64,
    /// Bytes of chunks that nothing names any more and that compaction will free.
    pub dead_bytes: u64,
    /// Blocks that files and snapshots map: what would be stored without deduplication.
    pub mapped_blocks: u64,
    /// Regular files.
    pub file_count: u64,
    /// All inodes.
    pub inode_count: u64,
    /// Snapshots.
    pub snapshot_count: u64,
    /// Layers, dead ones that wait for reclaim included.
    pub layer_count: u64,
    /// Layers that wait for reclaim.
    pub dead_layer_count: u64,
    /// Segment files.
    pub segment_count: u64,
    /// Bytes of dirty blocks in memory.
    pub dirty_bytes: u64,
    /// Bytes of memory that caches and buffers hold.
    pub memory_bytes: u64,
    /// Since start: blocks that were found to be stored already.
    pub dedup_hits: u64,
    /// Since start: blocks that were new.
    pub dedup_misses: u64,
    /// Since start: blocks that were all zeros.
    pub zero_blocks: u64,
    /// Since start: group commits, each one sync of the log.
    pub commits: u64,
    /// Since start: bytes appended to the log.
    pub appended_bytes: u64,
    /// Since start: bytes read from segments.
    pub segment_read_bytes: u64,
    /// Since start: blocks answered from the block cache.
    pub cache_hits: u64,
    /// Since start: blocks that were not in the block cache.
    pub cache_misses: u64,
    /// Since start: blocks of long runs, which are read past the block cache. Release 0.2 does not count them.
    #[serde(default)]
    pub cache_bypassed: u64,
    /// Since start: map entries that reclaim and collapse visited.
    pub reclaimed_entries: u64,
    /// Since start: bytes that compaction rewrote.
    pub compacted_bytes: u64,
    /// Since start: bytes that were read to find damage.
    #[serde(default)]
    pub scrubbed_bytes: u64,
    /// The logical segment that is scrubbed next.
    #[serde(default)]
    pub scrub_segment: u64,
    /// When all live chunks had last been read and verified, in seconds since 1970; 0: never.
    #[serde(default)]
    pub scrub_finished_at_seconds: u64,
    /// Chunks that are known to be damaged, found since start.
    #[serde(default)]
    pub damaged_chunks: u64,
    /// Since start: slices of reclaim and collapse, and compactions, that failed.
    #[serde(default)]
    pub reclaim_failures: u64,
    /// Jobs of reclaim and collapse whose last slice failed, and files that could not be compacted;
    /// they are tried again later.
    #[serde(default)]
    pub reclaim_jobs_set_aside: u64,
    /// A sync failed: writes are refused until restart.
    pub poisoned: bool,
    /// The check or garbage collection that is under way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub maintenance: Option<Maintenance>,
}

/// Asks for a check of the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CheckRequest {
    /// Read and hash every live chunk too.
    #[serde(default)]
    pub data: bool,
}

/// A range of a file or snapshot that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
pub struct Hit {
    /// The file's path, or the one that the snapshot was taken at.
    pub path: String,
    /// The snapshot's id, if it is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_id: Option<String>,
    /// Where the range begins.
    pub offset_bytes: u64,
    /// Its length.
    pub length_bytes: u64,
    /// A repair gave it up; else its stored bytes are damaged.
    pub lost: bool,
}

impl Hit {
    /// A line for people.
    #[must_use]
    pub fn describe(&self) -> String {
        let what = if self.lost { "lost" } else { "damaged" };
        let of = match &self.snapshot_id {
            Some(id) => format!("snapshot {id} of {}", self.path),
            None => self.path.clone(),
        };
        format!(
            "{what}: {of}, bytes {} to {}",
            self.offset_bytes,
            self.offset_bytes.saturating_add(self.length_bytes)
        )
    }
}

/// What a check found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
pub struct CheckReport {
    /// Nothing is wrong.
    pub clean: bool,
    /// Each a sentence that begins with the number of the broken invariant; at most 1000.
    pub problems: Vec<String>,
    /// Problems beyond those listed.
    pub problems_left_out: u64,
    /// Inodes looked at.
    pub inodes: u64,
    /// Layers looked at.
    pub layers: u64,
    /// Map runs looked at.
    pub runs: u64,
    /// Chunks looked at.
    pub chunks: u64,
    /// Segment files looked at.
    #[serde(default)]
    pub files: u64,
    /// Chunks that cannot be read though blocks name them; each is among the problems.
    #[serde(default)]
    pub damaged_chunks: u64,
    /// Blocks that an earlier repair gave up. They are known, and no problem.
    #[serde(default)]
    pub lost_blocks: u64,
    /// Where damaged chunks and lost blocks are seen; at most 1000.
    #[serde(default)]
    pub hits: Vec<Hit>,
    /// Such places beyond those listed.
    #[serde(default)]
    pub hits_left_out: u64,
    /// Bytes of chunks read and hashed.
    pub data_bytes: u64,
}

/// What a garbage collection did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
pub struct GcReport {
    /// Layers reclaimed or collapsed.
    pub layers: u64,
    /// Map entries visited.
    pub entries: u64,
    /// Segment files removed.
    pub segments: u64,
    /// Bytes that the segment files shrank by.
    pub freed_bytes: u64,
    /// Bytes that the store occupied before it; release 0.2 does not tell.
    #[serde(default)]
    pub used_bytes_before: u64,
    /// Bytes that it occupies after it, with what clients wrote at the same time.
    #[serde(default)]
    pub used_bytes: u64,
}

/// A check or a garbage collection that is under way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
pub struct Maintenance {
    /// `check` or `gc`.
    pub call: String,
    /// When it began.
    pub started_at: Timestamp,
    /// The part of it that is under way, such as `layers`; empty before the first one.
    pub part: String,
    /// What of the part is done: chunks of a check, map entries of a reclaim, segment files of a compaction. Other parts
    /// do not count.
    pub done: u64,
    /// How much of it there is, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total: Option<u64>,
}

/// The answer of `/healthz` and `/readyz`: the status code says the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
pub struct Health {
    /// `ok`.
    pub status: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_id_has_one_spelling() {
        let text = "6f1f3c1e-5d0c-4d55-9d61-2f5b6f0f6c11";
        assert_eq!(text.parse::<SnapshotId>().unwrap().to_string(), text);
        for bad in ["", "6F1F3C1E-5D0C-4D55-9D61-2F5B6F0F6C11", "6f1f3c1e5d0c4d559d612f5b6f0f6c11"]
        {
            assert!(bad.parse::<SnapshotId>().is_err(), "{bad}");
        }
    }

    #[test]
    fn requests_refuse_fields_they_do_not_know() {
        let bad = r#"{"path":"a","size_bytes":1,"sise":2}"#;
        assert!(serde_json::from_str::<CreateFile>(bad).is_err());
        assert!(serde_json::from_str::<CreateSnapshot>(r#"{"path":"a","nam":"b"}"#).is_err());
        let least = serde_json::from_str::<CreateSnapshot>(r#"{"path":"a"}"#).unwrap();
        assert_eq!(least, CreateSnapshot { path: "a".into(), ..Default::default() });
    }
}
