//! The messages of `containerd.services.snapshots.v1`, written by hand from the public
//! definition: they are few, and so no build needs a protocol compiler.

use std::collections::HashMap;

use prost::Message;

/// Asks for a writable snapshot.
#[derive(Clone, PartialEq, Message)]
pub struct PrepareRequest {
    /// The plugin's name in containerd's configuration.
    #[prost(string, tag = "1")]
    pub snapshotter: String,
    /// The new snapshot.
    #[prost(string, tag = "2")]
    pub key: String,
    /// What it begins as; empty: nothing.
    #[prost(string, tag = "3")]
    pub parent: String,
    /// Labels of the new snapshot.
    #[prost(map = "string, string", tag = "4")]
    pub labels: HashMap<String, String>,
}

/// Asks for a read-only view: the same fields.
pub type ViewRequest = PrepareRequest;

/// How a directory is mounted.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct Mount {
    /// The file system.
    #[prost(string, tag = "1")]
    pub r#type: String,
    /// What is mounted.
    #[prost(string, tag = "2")]
    pub source: String,
    /// Where, below the directory that the client chooses.
    #[prost(string, tag = "3")]
    pub target: String,
    /// Options of mount(8).
    #[prost(string, repeated, tag = "4")]
    pub options: Vec<String>,
}

/// The answer of Prepare, View and Mounts.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct MountsResponse {
    /// In the order in which they are mounted.
    #[prost(message, repeated, tag = "1")]
    pub mounts: Vec<Mount>,
}

/// Names a snapshot: the request of Mounts, Remove, Stat and Usage.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct KeyRequest {
    /// The plugin's name.
    #[prost(string, tag = "1")]
    pub snapshotter: String,
    /// The snapshot.
    #[prost(string, tag = "2")]
    pub key: String,
}

/// Makes a writable snapshot immutable, under a new name.
#[derive(Clone, PartialEq, Message)]
pub struct CommitRequest {
    /// The plugin's name.
    #[prost(string, tag = "1")]
    pub snapshotter: String,
    /// The new name.
    #[prost(string, tag = "2")]
    pub name: String,
    /// The writable snapshot.
    #[prost(string, tag = "3")]
    pub key: String,
    /// Labels under the new name; those of the key are not inherited.
    #[prost(map = "string, string", tag = "4")]
    pub labels: HashMap<String, String>,
    /// Another parent than it was prepared with: since containerd 2.2, for plugins that say that
    /// they can; this one does not.
    #[prost(string, tag = "5")]
    pub parent: String,
}

/// Asks for the layer of what differs between two trees, `containerd.services.diff.v1.DiffRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct DiffRequest {
    /// The older tree; none: an empty one.
    #[prost(message, repeated, tag = "1")]
    pub left: Vec<Mount>,
    /// The newer tree.
    #[prost(message, repeated, tag = "2")]
    pub right: Vec<Mount>,
    /// The layer's form; empty: a tar, compressed by gzip.
    #[prost(string, tag = "3")]
    pub media_type: String,
    /// The name of the write to the content store; empty: any.
    #[prost(string, tag = "4")]
    pub r#ref: String,
    /// Labels of the layer in the content store.
    #[prost(map = "string, string", tag = "5")]
    pub labels: HashMap<String, String>,
    /// The time that nothing of the layer is later than, for builds that give the same bytes.
    #[prost(message, optional, tag = "6")]
    pub source_date_epoch: Option<Timestamp>,
}

/// `containerd.types.Descriptor`: names a content.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct Descriptor {
    /// What it is.
    #[prost(string, tag = "1")]
    pub media_type: String,
    /// Its digest.
    #[prost(string, tag = "2")]
    pub digest: String,
    /// Its bytes.
    #[prost(int64, tag = "3")]
    pub size: i64,
}

/// Asks for a layer to be unpacked, `containerd.services.diff.v1.ApplyRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct ApplyRequest {
    /// Where it is in the content store.
    #[prost(message, optional, tag = "1")]
    pub diff: Option<Descriptor>,
    /// The tree that it is unpacked into.
    #[prost(message, repeated, tag = "2")]
    pub mounts: Vec<Mount>,
    /// What programs need that change it first, such as keys.
    #[prost(map = "string, message", tag = "3")]
    pub payloads: HashMap<String, Payload>,
}

/// A message of some type, `google.protobuf.Any`.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct Payload {
    /// Its type.
    #[prost(string, tag = "1")]
    pub type_url: String,
    /// Its bytes.
    #[prost(bytes = "vec", tag = "2")]
    pub value: Vec<u8>,
}

/// What was unpacked.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct ApplyResponse {
    /// The tar, as it is without compression.
    #[prost(message, optional, tag = "1")]
    pub applied: Option<Descriptor>,
}

/// The layer.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct DiffResponse {
    /// Where it is in the content store.
    #[prost(message, optional, tag = "3")]
    pub diff: Option<Descriptor>,
}

/// A moment, `google.protobuf.Timestamp`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct Timestamp {
    /// Since the Unix epoch.
    #[prost(int64, tag = "1")]
    pub seconds: i64,
    /// Below one second.
    #[prost(int32, tag = "2")]
    pub nanos: i32,
}

/// `google.protobuf.FieldMask`.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct FieldMask {
    /// The fields.
    #[prost(string, repeated, tag = "1")]
    pub paths: Vec<String>,
}

/// The kind of a snapshot on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum Kind {
    /// Not said.
    Unknown = 0,
    /// Read-only.
    View = 1,
    /// Writable.
    Active = 2,
    /// Immutable.
    Committed = 3,
}

/// What is known of a snapshot.
#[derive(Clone, PartialEq, Message)]
pub struct Info {
    /// Its name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Its parent; empty: none.
    #[prost(string, tag = "2")]
    pub parent: String,
    /// Its kind.
    #[prost(enumeration = "Kind", tag = "3")]
    pub kind: i32,
    /// When it was made.
    #[prost(message, optional, tag = "4")]
    pub created_at: Option<Timestamp>,
    /// When its labels or its kind changed last.
    #[prost(message, optional, tag = "5")]
    pub updated_at: Option<Timestamp>,
    /// Its labels.
    #[prost(map = "string, string", tag = "6")]
    pub labels: HashMap<String, String>,
}

/// The answer of Stat and Update.
#[derive(Clone, PartialEq, Message)]
pub struct InfoResponse {
    /// The snapshot.
    #[prost(message, optional, tag = "1")]
    pub info: Option<Info>,
}

/// Changes labels.
#[derive(Clone, PartialEq, Message)]
pub struct UpdateRequest {
    /// The plugin's name.
    #[prost(string, tag = "1")]
    pub snapshotter: String,
    /// The snapshot's name and the new values.
    #[prost(message, optional, tag = "2")]
    pub info: Option<Info>,
    /// Which fields are changed; none: all that can be.
    #[prost(message, optional, tag = "3")]
    pub update_mask: Option<FieldMask>,
}

/// Asks for all snapshots that match one of the filters.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct ListRequest {
    /// The plugin's name.
    #[prost(string, tag = "1")]
    pub snapshotter: String,
    /// None: all snapshots.
    #[prost(string, repeated, tag = "2")]
    pub filters: Vec<String>,
}

/// A part of the answer of List.
#[derive(Clone, PartialEq, Message)]
pub struct ListResponse {
    /// Some snapshots.
    #[prost(message, repeated, tag = "1")]
    pub info: Vec<Info>,
}

/// The answer of Usage.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct UsageResponse {
    /// Bytes, without those of the parents.
    #[prost(int64, tag = "1")]
    pub size: i64,
    /// Files, without those of the parents.
    #[prost(int64, tag = "2")]
    pub inodes: i64,
}

/// Asks to do now what Remove left for later.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct CleanupRequest {
    /// The plugin's name.
    #[prost(string, tag = "1")]
    pub snapshotter: String,
}
