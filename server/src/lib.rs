//! The Slackwater appliance: configuration, wiring, start and stop of `slackwaterd`.
//!
//! ```text
//! command line, environment, file -> config -> run -> blockstore <- nfs
//!                                                  |             <- api <- metrics
//!                                                  +-> welcome (stdout), systemd, token files
//! check, certificate_command, token_command: without a server
//! ```
//!
//! Nothing of the product happens here; what the servers do is in the crates that are wired
//! together.

pub mod certificate_command;
pub mod check;
pub mod config;
pub mod error;
pub mod gate;
pub mod heaps;
pub mod help_files;
pub mod memory;
pub mod metrics;
pub mod run;
pub mod token_command;

mod admin_token;
mod audit;
mod data_dir;
mod data_file;
mod listen;
mod logs;
mod open_files;
mod options;
mod ownership;
mod reference_key;
mod signals;
mod systemd;
mod token_files;
mod welcome;
mod workers;
