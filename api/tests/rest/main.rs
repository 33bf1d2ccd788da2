//! The REST face over a real store, in process and over real sockets.
//!
//! Every answer of every test is held against the OpenAPI document (see `schema`).
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, unreachable_pub, reason = "tests")]

#[path = "../../../tests/random.rs"]
mod random;

mod audit;
mod chains;
mod data;
mod files;
mod guard;
mod guessing;
mod harness;
mod hostile_worker;
mod idempotency;
mod maintenance;
mod publishing;
mod readable;
mod schema;
mod snapshots;
mod socket;
mod trouble;
mod vmstore;
mod workers;
