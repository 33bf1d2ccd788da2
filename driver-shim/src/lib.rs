//! The driver that a worker runs beside Docker and containerd: images are snapshots of the
//! appliance, containers are clones, and blocks travel when they are read.
//!
//! ```text
//! docker/      containerd/        what the engines ask for, in their words
//!       \      /
//!       worker/  <--- control     volumes: what is stored where, what is mounted, what is held
//!       /      \         ^        trust/: what counts of what images and others say
//!      |        |        |        registry/: whether a registry lets this worker read a blob
//!   client      attach   |        the appliance's verbs;  mounts on this machine
//!                        |
//! settings -> daemon     +--- command: image/ with engine/, status, ...
//! ```

pub mod command;
pub mod containerd;
pub mod control;
pub mod credential;
pub mod daemon;
pub mod docker;
pub mod engine;
pub mod error;
pub mod image;
pub mod logs;
pub mod metrics;
mod private;
pub mod registry;
pub mod settings;
mod small_file;
pub mod socket;
pub mod trust;
pub mod worker;
