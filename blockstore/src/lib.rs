//! The block store of the Slackwater appliance: sparse files with O(1) snapshot and clone,
//! deduplicated by content, in an append-only log with an index beside it.
//!
//! ```text
//! WRITE -> file's dirty blocks -> commit: hash, dedup, append, index -> segment + RocksDB
//!                                   ^
//! snapshot, clone, rename, ... -----+  the same commit, the same batch
//!
//! READ  <- dirty blocks <- resolved windows <- layers, top down <- segments
//! ```
//!
//! # Layout
//! - `store` (this file): the interface. It knows no NFS, no HTTP and no async runtime.
//! - `namespace`, `ancestry`, `attributes`, `paths`: directories, names, links, SETATTR; `rights`: if
//!   nothing that was judged has changed.
//! - `access_times`: what READ moves.
//! - `kind`, `special`: what inodes are; devices, sockets and pipes.
//! - `data`, `write`, `file_commit`: READ, WRITE, COMMIT; `file`, `flush`: what is dirty.
//! - `snapshot`, `diff`: snapshots, clones, what differs; `steady`: by what clock snapshots expire.
//! - `commit`, `transaction`, `mapping`: the one way in which anything changes.
//! - `resolve`, `layer_sets`, `window_set`: from a block through the layers to its chunk.
//! - `log`, `segments`, `segment_format`: chunks and commit records on the disk.
//! - `record`, `codec`: the values of the index.
//! - `reclaim`, `compact`, `background`: taking back what nothing names; `reclaimable`: how much that would be.
//! - `scrub`: reading all that is stored, slowly, once a day.
//! - `check`: the invariants I1 to I7; `repair`: back to them, and what that costs.
//! - `care`: how they are asked for; `progress`: how far such work is, and its end.
//! - [`kv`], [`disk`]: the seam at the bottom, each with a form that fails on demand.
//!
//! The invariants are listed in ARCHITECTURE.md, the bytes on the disk in FORMAT.md.

mod access_times;
mod ancestry;
mod aside;
mod attributes;
mod background;
mod care;
mod check;
mod codec;
mod commit;
mod compact;
mod core;
mod counts;
mod damage;
mod data;
mod dedup;
mod diff;
pub mod disk;
mod error;
mod file;
mod file_commit;
mod flush;
#[doc(hidden)]
pub mod fuzzing;
mod id;
mod index_copy;
mod kind;
pub mod kv;
mod large_reads;
mod layer_sets;
mod layer_windows;
mod layer_write;
mod log;
mod mapping;
mod name;
mod namespace;
mod open;
mod options;
mod own_runs;
mod paths;
mod progress;
mod rebuild;
mod reclaim;
mod reclaimable;
mod record;
mod repair;
mod reserve;
mod resolve;
mod rights;
mod scrub;
mod segment_format;
mod segments;
mod snapshot;
mod special;
mod stats;
mod steady;
mod store;
#[cfg(test)]
mod testing;
mod time;
mod transaction;
mod types;
mod units;
mod window;
mod window_set;
mod write;

pub use error::{Error, ErrorKind, Result};
pub use file_commit::{CommitDuty, Committed};
pub use id::{
    ChunkId, ContentHash, InodeId, LayerId, SegmentId, SnapshotId, SnapshotIdParseError, StoreId,
};
pub use kind::{DeviceNumber, FileKind, SpecialFile};
pub use name::{FilePath, Name, PATH_BYTES_MAX};
pub use options::Options;
pub use progress::{Progress, Step};
pub use rebuild::Rebuilt;
pub use rights::{EntryRights, Named, Rights};
pub use store::Store;
pub use time::Timestamp;
pub use types::{
    Attributes, BlockMap, CHECK_PROBLEMS_MAX, Change, ChangedExtent, CheckReport, CreateMode,
    Created, DeletionPolicy, DiffPage, DirectoryEntry, DirectoryPage, ExtentKind, FileInfo,
    GcReport, HITS_MAX, Hit, LABEL_BYTES_MAX, LABELS_MAX, LabelChange, Labels, ReadReply,
    Reclaimable, RepairReport, SNAPSHOT_NAME_BYTES_MAX, SetAttributes, SetTime, Snapshot,
    SnapshotFilter, SnapshotRequest, Source, Stability, Stats, Written,
};
pub use units::{
    BLOCK_BYTES, BLOCK_BYTES_U64, FILE_BYTES_MAX, NAME_BYTES_MAX, SYMLINK_BYTES_MAX, WINDOW_BLOCKS,
    block_of, blocks_in,
};
