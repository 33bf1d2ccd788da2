//! Does nothing. Cargo ignores `[build-dependencies]` of a crate without a build script.

fn main() {}
