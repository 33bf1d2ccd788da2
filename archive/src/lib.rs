//! Layer archives: references, hostile-proof unpacking, exact replay, changes.
//!
//! ```text
//!  tar stream --> recognise --+--> Reference            (a few hundred bytes name a snapshot)
//!                             +--> Ordinary --> unpack --> directory tree
//!                                      |           |            |
//!                                      v           |            |
//!                                    image --------+       (or, mounted,)
//!                                      |           |            |
//!                                                  |            |
//!                                                  v            v
//!                                              recording --> replay --> the same tar, byte for byte
//!
//!  older tree, newer tree --> changes --> pack --> tar stream (OCI whiteouts)
//!                                          +-----> recording, from which replay gives it again
//!  upper directory of an overlay --> pack_upper --> tar stream (OCI whiteouts)
//! ```
//!
//! Invariants:
//! - Nothing outside the root is read or changed, whatever names an archive or a tree holds
//!   (`root.rs` is the only module that opens anything in a tree).
//! - An archive that was cut off anywhere is refused.
//! - `replay` writes exactly what was unpacked, or fails; it says which file is not what it was.
//! - `pack` and `pack_upper` write the same bytes for the same trees; another version of them may write
//!   others.
//! - `pack_upper` takes time in proportion to what is in the upper directory; what is below is not walked.

mod changes;
mod error;
#[doc(hidden)]
pub mod fuzzing;
mod header;
mod image;
mod members;
mod overlay;
mod pack;
mod pax;
mod recording;
mod reference;
mod replay;
mod root;
mod unpack;
mod upper;
mod whiteout;

pub use changes::{Change, ChangeKind, PATHS_BYTES_MAX, changes};
pub use error::ArchiveError;
pub use image::{Imaged, image, layer_image};
pub use pack::{Packed, pack};
pub use reference::{
    Mac, MacError, Prefixed, REFERENCE_LINK, REFERENCE_LINK_TARGET, REFERENCE_MEMBER, Recognised,
    Reference, recognise,
};
pub use replay::replay;
pub use unpack::{Unpacked, unpack};
pub use upper::pack_upper;
