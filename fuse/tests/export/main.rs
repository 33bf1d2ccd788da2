//! The export through real mounts, on a real appliance: root and /dev/fuse are needed.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, unreachable_pub, reason = "tests")]

mod encrypted;
mod far;
mod reading;
mod support;
mod writing;
