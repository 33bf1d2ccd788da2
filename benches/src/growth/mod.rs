//! What growth costs: clones, extents, layers, data, chunks, and work in the background. More
//! experiments of `slackwater-bench compare`.
//!
//! ```text
//! clone_reflink    clone of an aged disk, against FICLONE        aged, crate::mount
//! clone_storm      the thousandth clone, and that after 100,000  callers, host
//! depth            reading through 64 layers
//! amplification    bytes on the device a byte of data            crate::mount, crate::load
//! index_memory     memory a TiB of data                          fill, fit
//! start_up         ready on ten million chunks                   fill, host
//! under_load       the latency of a read beside work             crate::load, callers
//! ```

mod aged;
mod amplification;
mod callers;
mod clone_reflink;
mod clone_storm;
mod depth;
mod fill;
mod fit;
pub(crate) mod host;
mod index_memory;
mod start_up;
mod under_load;

use std::path::Path;
use std::time::Duration;

use tempfile::TempDir;

use crate::compare::context::{Context, Experiment};
use crate::failure::Failure;
use crate::row::Row;
use crate::statistics::Summary;

/// All of them, in the order in which they are run.
pub(crate) const EXPERIMENTS: [Experiment; 7] = [
    Experiment {
        key: "clone-reflink",
        title: "clone of an aged 8 GiB disk against FICLONE on XFS and btrfs",
        run: clone_reflink::run,
    },
    Experiment {
        key: "clone-storm",
        title: "1,000 clones from 8 callers, and clones beside 100,000 others",
        run: clone_storm::run,
    },
    Experiment { key: "depth", title: "reading through 64 layers against 1", run: depth::run },
    Experiment {
        key: "amplification",
        title: "bytes written to the disk and kept on it, a byte of new data",
        run: amplification::run,
    },
    Experiment {
        key: "index-memory",
        title: "memory and disk of the indexes, a TiB of unique data",
        run: index_memory::run,
    },
    Experiment {
        key: "start-up",
        title: "start on 10 million chunks, after a clean stop and after kill -9",
        run: start_up::run,
    },
    Experiment {
        key: "latency-under-load",
        title: "p99 of a 4 KiB read while the store compacts, reclaims and is written to",
        run: under_load::run,
    },
];

/// A row without samples, rival and target; less is better.
fn row(key: &str, unit: &str, work: impl Into<String>) -> Row {
    Row {
        work: work.into(),
        key: key.to_owned(),
        unit: unit.to_owned(),
        higher_is_better: false,
        subject: "slackwater".to_owned(),
        rival: None,
        samples: Vec::new(),
        rival_samples: Vec::new(),
        target: None,
        not_run: None,
    }
}

/// A temporary folder on the file system that is measured.
fn folder(context: &Context) -> Result<TempDir, Failure> {
    let directory: &Path = &context.directory;
    tempfile::tempdir_in(directory).map_err(Failure::at("make a folder in", directory))
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

/// The median in milliseconds.
fn median_millis(samples: &[Duration]) -> f64 {
    millis(Summary::of(samples).p50)
}

/// An id of the store's as the REST face knows it.
fn snapshot_id(
    id: slackwater_blockstore::SnapshotId,
) -> Result<slackwater_client::types::SnapshotId, Failure> {
    let text = id.to_string();
    text.parse().map_err(|_| Failure::Unfit(format!("`{text}` is no id of a snapshot over REST")))
}
