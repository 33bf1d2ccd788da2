//! The calls, one module a kind of object.

pub(crate) mod audit;
pub(crate) mod chains;
pub(crate) mod clones;
pub(crate) mod conditional;
pub(crate) mod data;
pub(crate) mod files;
pub(crate) mod map;
pub(crate) mod range;
pub(crate) mod reclaimable;
pub(crate) mod snapshots;
pub(crate) mod stats;
pub(crate) mod vmstore;
pub(crate) mod workers;
