//! The messages of containerd's services for images, contents, containers, leases and plugins
//! that the commands need, written by hand from the public definitions, each with the fields
//! that are used: others are skipped on reading, and not sent.

use std::collections::HashMap;

use bytes::Bytes;
use prost::Message;

/// `containerd.types.Descriptor`: names a content.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Descriptor {
    #[prost(string, tag = "1")]
    pub(crate) media_type: String,
    #[prost(string, tag = "2")]
    pub(crate) digest: String,
    #[prost(int64, tag = "3")]
    pub(crate) size: i64,
}

/// `containerd.services.images.v1.Image`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Image {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
    #[prost(map = "string, string", tag = "2")]
    pub(crate) labels: HashMap<String, String>,
    #[prost(message, optional, tag = "3")]
    pub(crate) target: Option<Descriptor>,
}

/// Asks for an image, and for a container or a content by their own first field.
#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct NameRequest {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
}

/// An image alone: the request of Create and Update, the answer of all.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct ImageMessage {
    #[prost(message, optional, tag = "1")]
    pub(crate) image: Option<Image>,
}

/// `containerd.services.containers.v1.Container`.
#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct Container {
    #[prost(string, tag = "1")]
    pub(crate) id: String,
    #[prost(map = "string, string", tag = "2")]
    pub(crate) labels: HashMap<String, String>,
    #[prost(string, tag = "3")]
    pub(crate) image: String,
    #[prost(string, tag = "6")]
    pub(crate) snapshotter: String,
    #[prost(string, tag = "7")]
    pub(crate) snapshot_key: String,
}

/// Asks for the containers that one of the filters holds.
#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct ListContainersRequest {
    #[prost(string, repeated, tag = "1")]
    pub(crate) filters: Vec<String>,
}

/// Containers.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct ListContainersResponse {
    #[prost(message, repeated, tag = "1")]
    pub(crate) containers: Vec<Container>,
}

/// The answer to a request for a container.
#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct ContainerResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) container: Option<Container>,
}

/// A part of a content.
#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct ReadResponse {
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) data: Vec<u8>,
}

/// `WriteAction.STAT`: look at a write.
pub(crate) const STAT: i32 = 0;

/// `WriteAction.WRITE`: write.
pub(crate) const WRITE: i32 = 1;

/// `WriteAction.COMMIT`: write, then make it a content.
pub(crate) const WRITE_AND_COMMIT: i32 = 2;

/// Writes a content.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct WriteRequest {
    #[prost(int32, tag = "1")]
    pub(crate) action: i32,
    #[prost(string, tag = "2")]
    pub(crate) reference: String,
    #[prost(int64, tag = "3")]
    pub(crate) total: i64,
    #[prost(string, tag = "4")]
    pub(crate) expected: String,
    #[prost(int64, tag = "5")]
    pub(crate) offset: i64,
    #[prost(bytes = "bytes", tag = "6")]
    pub(crate) data: Bytes,
    #[prost(map = "string, string", tag = "7")]
    pub(crate) labels: HashMap<String, String>,
}

/// The answer to each of them.
#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct WriteResponse {
    #[prost(string, tag = "6")]
    pub(crate) digest: String,
}

/// `containerd.services.content.v1.Info`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct ContentInfo {
    #[prost(string, tag = "1")]
    pub(crate) digest: String,
    #[prost(map = "string, string", tag = "5")]
    pub(crate) labels: HashMap<String, String>,
}

/// The answer to a request for it.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct ContentInfoResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) info: Option<ContentInfo>,
}

/// `google.protobuf.FieldMask`.
#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct FieldMask {
    #[prost(string, repeated, tag = "1")]
    pub(crate) paths: Vec<String>,
}

/// Changes the labels of a content.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct UpdateContentRequest {
    #[prost(message, optional, tag = "1")]
    pub(crate) info: Option<ContentInfo>,
    #[prost(message, optional, tag = "2")]
    pub(crate) update_mask: Option<FieldMask>,
}

/// `containerd.services.leases.v1.CreateRequest`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct CreateLeaseRequest {
    #[prost(string, tag = "1")]
    pub(crate) id: String,
    #[prost(map = "string, string", tag = "3")]
    pub(crate) labels: HashMap<String, String>,
}

/// `containerd.services.introspection.v1.PluginsRequest`.
#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct PluginsRequest {
    #[prost(string, repeated, tag = "1")]
    pub(crate) filters: Vec<String>,
}

/// One plugin.
#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct Plugin {
    #[prost(string, tag = "1")]
    pub(crate) r#type: String,
    #[prost(string, tag = "2")]
    pub(crate) id: String,
}

/// The plugins.
#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct PluginsResponse {
    #[prost(message, repeated, tag = "1")]
    pub(crate) plugins: Vec<Plugin>,
}

/// An answer that says nothing.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub(crate) struct Nothing {}
