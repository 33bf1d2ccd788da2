//! The front end from outside: bytes in, bytes out, over a real store.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    missing_debug_implementations,
    unreachable_pub,
    dead_code,
    reason = "tests"
)]

#[path = "../common/mod.rs"]
mod common;

mod access;
mod data;
mod departures;
mod directories;
mod duplicates;
mod faults;
mod handles;
mod hooked;
mod load;
mod mount;
mod mutual_tls;
mod namespace;
mod panics;
mod permissions;
mod ports;
mod races;
mod rpc;
mod snapshots;
mod special;
mod tls;
mod who;
mod workers;
