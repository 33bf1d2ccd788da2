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
//! ```
//!
//! Invariants:
//! - Nothing outside the root is read or changed, whatever names an archive or a tree holds
//!   (`root.rs` is the only module that opens anything in a tree).
//! - An archive that was cut off anywhere is refused.
//! - `replay` writes exactly what was unpacked, or fails; it says which file is not what it was.
//! - `pack` writes the same bytes for the same trees; another version of it may write others.

mod changes;
mod error;
#[doc(hidden)]
pub mod fuzzing;
mod header;
mod image;
mod members;
mod pack;
mod pax;
mod recording;
mod reference;
mod replay;
mod root;
mod unpack;
mod whiteout;

pub use changes::{Change, ChangeKind, PATHS_BYTES_MAX, changes};
pub use error::ArchiveError;
pub use image::{Imaged, image};
pub use pack::{Packed, pack};
pub use reference::{
    Mac, MacError, Prefixed, REFERENCE_LINK, REFERENCE_LINK_TARGET, REFERENCE_MEMBER, Recognised,
    Reference, recognise,
};
pub use replay::replay;
pub use unpack::{Unpacked, unpack};
