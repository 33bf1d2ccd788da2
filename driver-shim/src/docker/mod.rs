//! Docker's graphdriver plugin, for Docker up to 27.
//!
//! ```text
//!   routes     the calls as dockerd sends them, and what it wants to read
//!   repeats    calls that a dead process did not answer
//!   types      names, options, requests, answers
//!      |
//!   driver     create, get, put, remove: a volume each, cloned at the first write
//!   layers     the tar of a layer, in and out: a reference, or an ordinary one recorded
//!   init       the `-init` layer between an image and its containers: made once for an image
//!   forgotten  layers and containers that dockerd has forgotten
//!   commit     the snapshot of a container, for a reference or an ordinary tar
//!   ordinary   what a commit or a build made as an ordinary tar
//!   pushed     for which images layers leave, as far as dockerd tells it
//!   stream     a body as a blocking reader, a blocking writer as a body
//!      |
//!   worker/
//! ```
//!
//! Invariants:
//! - A layer whose tar was ever given gives the same bytes for ever: Docker knows it by their hash.
//! - A layer is complete, or marked as being unpacked before its first byte is written, and then
//!   nothing but Remove is done with it.
//! - Nothing depends on Init: after a restart of this daemon dockerd does not send it again.

mod commit;
mod driver;
mod error;
mod forgotten;
mod init;
mod layers;
mod ordinary;
mod pushed;
mod repeats;
mod routes;
mod stream;
mod types;

pub use self::driver::GraphDriver;
pub use self::error::DockerError;
pub use self::routes::router;
