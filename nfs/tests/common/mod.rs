//! A small NFSv3 client for tests, and a server around a real store in a directory of its own.

pub mod client;
pub mod server;
pub mod wire;

pub use client::Client;
pub use server::{Server, root_options};
pub use wire::{Args, Body, Fattr, SetAttr, status};
