//! Images by reference, and back: an image whose layers name snapshots of the appliance instead
//! of holding files.
//!
//! ```text
//! docker  containerd      what an engine has of an image, and how it takes a new one
//!     \    /    \
//!   reference  layout     layers that name snapshots; an archive with ordinary layers
//!        \      /
//!   name  digest  form    names of images; digests, chain ids; tar, gzip, zstd
//! ```

pub mod containerd;
pub mod digest;
pub mod docker;
pub(crate) mod form;
mod layout;
pub mod name;
mod reference;

pub use layout::Export;

/// Media types of the Open Container Initiative, which every engine of the last years takes.
pub(crate) mod media {
    /// A manifest.
    pub(crate) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
    /// A list of manifests, one a platform.
    pub(crate) const INDEX: &str = "application/vnd.oci.image.index.v1+json";
    /// A configuration.
    pub(crate) const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
    /// A layer that is not compressed.
    pub(crate) const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
}
