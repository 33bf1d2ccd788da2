//! What the store's callers hand in and get back.

use std::collections::BTreeMap;

use bytes::Bytes;

use crate::id::{ContentHash, InodeId, SnapshotId};
use crate::kind::FileKind;
use crate::name::{FilePath, Name};
use crate::time::Timestamp;

/// The attributes of an inode, unflushed writes included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// The inode.
    pub inode: InodeId,
    /// Random at creation: with the inode's number it names one object in all the store's
    /// lives, even after the store is restored from an older copy.
    pub generation: u32,
    /// What it is.
    pub kind: FileKind,
    /// Permission bits, 0o7777.
    pub mode: u32,
    /// Hard links (2 and one a subdirectory, for a directory).
    pub link_count: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Bytes of blocks that are not holes, those shared with snapshots included.
    pub used_bytes: u64,
    /// Last READ of a file, moved as Linux does it with `relatime`, or what a client set.
    pub accessed_at: Timestamp,
    /// Last change of the content.
    pub modified_at: Timestamp,
    /// Last change of the inode; grows strictly with every change.
    pub changed_at: Timestamp,
}

/// A time in SETATTR (RFC 1813 section 2.5 `set_atime`, `set_mtime`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    /// The server's time.
    Now,
    /// The client's time.
    To(Timestamp),
}

/// What SETATTR and the creating calls may set; `None` leaves it (or takes the default).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAttributes {
    /// Permission bits.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Size in bytes; of files only.
    pub size_bytes: Option<u64>,
    /// Last read.
    pub accessed_at: Option<SetTime>,
    /// Last change of the content.
    pub modified_at: Option<SetTime>,
}

/// An object's attributes around one change, taken atomically with it (RFC 1813 section 2.6
/// `wcc_data`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// Before.
    pub before: Attributes,
    /// After.
    pub after: Attributes,
}

/// How CREATE treats a name that exists (RFC 1813 section 3.3.8 `createmode3`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CreateMode {
    /// An existing file is taken, and the attributes (a size, usually) are set on it.
    Unchecked,
    /// An existing name is an error.
    Guarded,
    /// An existing file is taken when it was created with this verifier, else an error.
    Exclusive(u64),
}

/// The outcome of a call that made a directory entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Created {
    /// The object.
    pub attributes: Attributes,
    /// The directory.
    pub directory: Change,
}

/// One entry of a directory page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectoryEntry {
    /// The name.
    pub name: Name,
    /// Where the next page starts: never used again in this directory, above 2.
    pub cookie: u64,
    /// The object's attributes.
    pub attributes: Attributes,
}

/// A page of a directory in cookie order, `.` and `..` left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectoryPage {
    /// The entries.
    pub entries: Vec<DirectoryEntry>,
    /// Nothing follows.
    pub end: bool,
}

/// How durable a WRITE is to be, or was made (RFC 1813 section 3.3.7 `stable_how`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stability {
    /// In memory; lost with the server unless COMMITted.
    Unstable,
    /// Data and what is needed to read it back are on the disk.
    DataSync,
    /// Data and attributes are on the disk.
    FileSync,
}

/// The outcome of a WRITE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// The file.
    pub file: Change,
    /// The stability achieved, at least what was asked for.
    pub stability: Stability,
    /// The write verifier under which it holds.
    pub verifier: u64,
}

/// Bytes that were read, in pieces that can be sent without copying them together.
#[derive(Clone, Debug)]
pub struct ReadReply {
    /// The bytes in order. Holes are slices of one zero page.
    pub pieces: Vec<Bytes>,
    /// The sum of the pieces.
    pub length_bytes: usize,
    /// The read reached the end of the file.
    pub end_of_file: bool,
    /// The file's attributes, of a moment no earlier than the read's start.
    pub attributes: Attributes,
}

impl ReadReply {
    /// All bytes in one buffer; for callers that cannot take pieces.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        let mut all = Vec::with_capacity(self.length_bytes);
        self.pieces.iter().for_each(|piece| all.extend_from_slice(piece));
        all
    }
}

/// A file, as the REST face shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileInfo {
    /// Its path.
    pub path: FilePath,
    /// Its attributes.
    pub attributes: Attributes,
    /// Bytes of blocks that this file alone maps: written since its last snapshot, or since it
    /// was cloned.
    pub unique_bytes: u64,
    /// The snapshot that it is a clone of: it was made from that, or that was taken of it so.
    pub origin_snapshot: Option<SnapshotId>,
    /// When it was made.
    pub created_at: Timestamp,
}

/// What a delete would free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reclaimable {
    /// Blocks of data that nothing else names.
    pub blocks: u64,
    /// Bytes that they take on the disk. Blocks that were stored together are taken for equally large.
    pub bytes: u64,
    /// Of so many blocks one was looked at, and the sums multiplied; 1 where all were.
    pub sampled_one_in: u64,
}

/// Labels of a snapshot: at most [`LABELS_MAX`], each key and value at most
/// [`LABEL_BYTES_MAX`] bytes.
pub type Labels = BTreeMap<String, String>;

/// What becomes of a snapshot's labels.
pub type LabelChange = Box<dyn FnOnce(Labels) -> Labels + Send>;

/// Labels that one snapshot can carry: enough for containerd's, few enough that a snapshot
/// record stays a few KiB.
pub const LABELS_MAX: usize = 64;

/// Bytes of a label's key, and of its value; containerd allows 4096 for both together.
pub const LABEL_BYTES_MAX: usize = 4096;

/// Bytes of a snapshot's name.
pub const SNAPSHOT_NAME_BYTES_MAX: usize = 1024;

/// When the store deletes a snapshot by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum DeletionPolicy {
    /// Never.
    #[default]
    Keep,
    /// When its last clone is deleted.
    OnZeroClones,
}

/// What a caller gives a new snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SnapshotRequest {
    /// A name, unique in the store.
    pub name: Option<String>,
    /// Labels.
    pub labels: Labels,
    /// When the store deletes it by itself.
    pub deletion: DeletionPolicy,
    /// The store deletes it some time after this, if it has no clones then.
    pub expires_at: Option<Timestamp>,
    /// The file, which is no clone, counts as a clone of it from then on.
    pub becomes_clone: bool,
}

/// A snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Its id.
    pub id: SnapshotId,
    /// The path that the file had when it was taken (bytes as [`FilePath::to_bytes`] gives).
    pub path: Vec<u8>,
    /// Its name.
    pub name: Option<String>,
    /// Its labels.
    pub labels: Labels,
    /// The file's size.
    pub size_bytes: u64,
    /// Bytes of blocks that are not holes.
    pub used_bytes: u64,
    /// When it was taken.
    pub created_at: Timestamp,
    /// Clones of it that exist now.
    pub clone_count: u64,
    /// When the store deletes it by itself.
    pub deletion: DeletionPolicy,
    /// When it expires.
    pub expires_at: Option<Timestamp>,
}

/// Which snapshots to list; all conditions hold at once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SnapshotFilter {
    /// Taken of a file at this path (bytes as [`FilePath::to_bytes`] gives).
    pub path: Option<Vec<u8>>,
    /// Of this name: at most one.
    pub name: Option<String>,
    /// Carrying all these labels.
    pub labels: Labels,
    /// Only ids above this one: the next page.
    pub after: Option<SnapshotId>,
}

/// Whether a changed range holds data or reads as zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExtentKind {
    /// Data.
    Data,
    /// A hole.
    Hole,
}

/// A range that differs between two snapshots, as it is in the newer one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangedExtent {
    /// Start; a multiple of the block size.
    pub offset_bytes: u64,
    /// Length; a multiple of the block size, but for the end of the file.
    pub length_bytes: u64,
    /// Data or hole.
    pub kind: ExtentKind,
}

/// A page of a diff.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiffPage {
    /// The extents in order of offset.
    pub extents: Vec<ChangedExtent>,
    /// Where the next page starts; `None` at the end.
    pub next_offset_bytes: Option<u64>,
}

/// For each block of a range its hash, or `None` for a hole. Lost blocks have the hash of 32
/// bytes of 0xff, which no content has: reading them is an error.
pub type BlockMap = Vec<Option<ContentHash>>;

/// A file or a snapshot: what can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// A file of the namespace.
    File(InodeId),
    /// A snapshot.
    Snapshot(SnapshotId),
}

/// Counts and sizes of a store, as of one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes that the store may occupy.
    pub capacity_bytes: u64,
    /// Bytes that it occupies: segments, and the index as RocksDB estimates it.
    pub used_bytes: u64,
    /// Bytes that can still be written: capacity less used less the reserve, or less if the
    /// disk below has less.
    pub available_bytes: u64,
    /// Bytes of live chunks as stored (compressed).
    pub chunk_bytes: u64,
    /// Live chunks: distinct blocks.
    pub chunk_count: u64,
    /// Bytes of chunks that nothing names any more and that compaction will free.
    pub dead_bytes: u64,
    /// Map blocks that name chunks, over all layers: what would be stored without
    /// deduplication, in blocks.
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
    /// Physical segment files.
    pub segment_count: u64,
    /// Bytes of dirty blocks in memory.
    pub dirty_bytes: u64,
    /// Bytes of memory that the store's caches and buffers hold, as they count it.
    pub memory_bytes: u64,
    /// Since start: blocks that were found to be stored already.
    pub dedup_hits: u64,
    /// Since start: blocks that were new.
    pub dedup_misses: u64,
    /// Since start: blocks that were all zeros.
    pub zero_blocks: u64,
    /// Since start: group commits (each one sync of the log).
    pub commits: u64,
    /// Since start: bytes appended to the log.
    pub appended_bytes: u64,
    /// Since start: bytes read from segments.
    pub segment_read_bytes: u64,
    /// Since start: blocks answered from the block cache.
    pub cache_hits: u64,
    /// Since start: blocks that were not in the block cache.
    pub cache_misses: u64,
    /// Since start: blocks of long runs, which are read past the block cache.
    pub cache_bypassed: u64,
    /// Since start: map entries that reclaim and collapse visited.
    pub reclaimed_entries: u64,
    /// Since start: bytes that compaction rewrote.
    pub compacted_bytes: u64,
    /// Since start: bytes that were read to find damage.
    pub scrubbed_bytes: u64,
    /// The logical segment that is scrubbed next.
    pub scrub_segment: u64,
    /// When all live chunks had last been read and verified, in seconds since 1970; 0: never.
    pub scrub_finished_at_seconds: u64,
    /// Chunks that are known to be damaged, found since start by reads, scrubbing or a check.
    pub damaged_chunks: u64,
    /// Since start: slices of reclaim and collapse, and compactions, that failed.
    pub reclaim_failures: u64,
    /// Jobs of reclaim and collapse whose last slice failed, and files that could not be compacted;
    /// they are tried again later.
    pub reclaim_jobs_set_aside: u64,
    /// A sync failed: writes are refused until restart.
    pub poisoned: bool,
}

/// What `check` found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CheckReport {
    /// Each a sentence that begins with the invariant's number; at most
    /// [`CHECK_PROBLEMS_MAX`].
    pub problems: Vec<String>,
    /// More problems than are listed.
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
    pub files: u64,
    /// Bytes of chunks read and hashed (none unless data was asked for).
    pub data_bytes: u64,
    /// Chunks that cannot be read though blocks name them. Each is among the problems.
    pub damaged_chunks: u64,
    /// Blocks that a repair gave up, over all layers. They are known, and no problem.
    pub lost_blocks: u64,
    /// Where damaged chunks and lost blocks are seen; at most [`HITS_MAX`].
    pub hits: Vec<Hit>,
    /// More such places than are listed.
    pub hits_left_out: u64,
}

/// A range of a file or snapshot that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hit {
    /// The file's path, or the one that the snapshot was taken at; what is not UTF-8 is replaced.
    pub path: String,
    /// The snapshot, if it is one.
    pub snapshot: Option<SnapshotId>,
    /// Where the range begins, in bytes.
    pub offset_bytes: u64,
    /// Its length, in bytes.
    pub length_bytes: u64,
    /// A repair gave it up; else its stored bytes are damaged.
    pub is_lost: bool,
}

/// What a repair did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RepairReport {
    /// What was wrong before.
    pub before: CheckReport,
    /// Changes made.
    pub fixes: u64,
    /// Blocks given up, each counted once for each layer that names it.
    pub lost_blocks: u64,
    /// Blocks whose content was found stored elsewhere, undamaged.
    pub healed_blocks: u64,
    /// What is wrong still, and what is lost.
    pub after: CheckReport,
}

/// Ranges that one report lists.
pub const HITS_MAX: usize = 1000;

/// Problems that one report lists.
pub const CHECK_PROBLEMS_MAX: usize = 1000;

impl CheckReport {
    /// Nothing is wrong.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.problems.is_empty()
    }
}

/// What a garbage collection did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GcReport {
    /// Layers reclaimed or collapsed.
    pub layers: u64,
    /// Map entries visited.
    pub entries: u64,
    /// Segment files removed.
    pub segments: u64,
    /// Bytes that the segment files shrank by.
    pub freed_bytes: u64,
    /// Bytes that the store occupied before it.
    pub used_bytes_before: u64,
    /// Bytes that it occupies after it, with what clients wrote at the same time.
    pub used_bytes: u64,
}
