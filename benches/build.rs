//! Does nothing: Cargo takes `[build-dependencies]`, which see, only of a crate that has this file.

fn main() {}
