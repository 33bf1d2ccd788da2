//! What is measured: each by one call for each side, taken by turns.

use super::Bench;
use super::memory;
use crate::failure::Failure;
use crate::turns::{for_each_at_once, timed};

/// Something that gives a row for each rival.
pub(super) struct Work {
    /// What `--only` takes.
    pub(super) key: &'static str,
    pub(super) unit: &'static str,
    pub(super) needs: Needs,
    pub(super) title: fn(&Bench) -> String,
    /// One value of a side.
    pub(super) sample: fn(&Bench, &str) -> Result<f64, Failure>,
}

/// What is to be there before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Needs {
    Nothing,
    /// The image, at another worker of the appliance, and not here.
    Holder,
    /// The image, unpacked for each side, and each side warm.
    Image,
}

/// Bytes that a container writes before its diff is made.
const WRITTEN_BYTES: u64 = 20_000_000;

/// How long a container stays that is removed before.
const STAYS: &str = "sleep 3600";

/// Reads every file of the image.
const READ_ALL: &str = "find / -xdev -type f -exec cat {} + >/dev/null";

/// All of them, in the order in which they are run.
pub(super) const WORK: [Work; 8] = [
    Work {
        key: "pull",
        unit: "ms",
        needs: Needs::Nothing,
        title: |bench| format!("pull of {}, which nothing has", bench.image()),
        sample: |bench, side| pull(bench, side, || Ok(())),
    },
    Work {
        key: "deploy",
        unit: "ms",
        needs: Needs::Holder,
        title: |bench| format!("pull and run --rm of {}, which another worker has", bench.image()),
        sample: deploy,
    },
    Work {
        key: "prepare",
        unit: "ms",
        needs: Needs::Image,
        title: |_| "a snapshot above the image".to_owned(),
        sample: prepare,
    },
    Work {
        key: "run",
        unit: "ms",
        needs: Needs::Image,
        title: |_| "run --rm".to_owned(),
        sample: |bench, side| timed(|| bench.run(side, &bench.name(), "true")),
    },
    Work {
        key: "at-once",
        unit: "ms",
        needs: Needs::Image,
        title: |bench| format!("run --rm of {} at once", bench.at_once()),
        sample: run_at_once,
    },
    Work {
        key: "diff-fresh",
        unit: "ms",
        needs: Needs::Image,
        title: |_| "diff of a fresh container".to_owned(),
        sample: |bench, side| diff(bench, side, None),
    },
    Work {
        key: "diff-written",
        unit: "ms",
        needs: Needs::Image,
        title: |_| format!("diff of a container that wrote {} MB", WRITTEN_BYTES / 1_000_000),
        sample: |bench, side| diff(bench, side, Some(WRITTEN_BYTES)),
    },
    Work {
        key: "memory",
        unit: "MiB",
        needs: Needs::Image,
        title: |bench| {
            format!("memory of {} containers that read the whole image", bench.at_once())
        },
        sample: memory_of_many,
    },
];

/// The pull, and what is done then.
fn pull(
    bench: &Bench,
    side: &str,
    then: impl FnOnce() -> Result<(), Failure>,
) -> Result<f64, Failure> {
    let took = timed(|| bench.pull(&bench.ctr, side).and_then(|()| then()))?;
    bench.root(&bench.ctr, side)?;
    bench.ctr.run(&["images", "rm", "--sync", bench.image()])?;
    Ok(took)
}

/// The first container of an image. What the turn before has mounted is not any more.
fn deploy(bench: &Bench, side: &str) -> Result<f64, Failure> {
    bench.settle()?;
    pull(bench, side, || bench.run(side, &bench.name(), "true"))
}

fn prepare(bench: &Bench, side: &str) -> Result<f64, Failure> {
    let (key, parent) = (bench.name(), bench.root(&bench.ctr, side)?);
    let of = ["snapshots", "--snapshotter", side];
    let took = timed(|| bench.ctr.run(&[&of[..], &["prepare", &key, &parent]].concat()))?;
    bench.ctr.run(&[&of[..], &["rm", &key]].concat())?;
    Ok(took)
}

fn run_at_once(bench: &Bench, side: &str) -> Result<f64, Failure> {
    let names: Vec<_> = (0..bench.at_once()).map(|_| bench.name()).collect();
    timed(|| for_each_at_once(&names, |name| bench.run(side, name, "true")))
}

/// The tar of what a container changed, which is most of what its commit takes.
fn diff(bench: &Bench, side: &str, written_bytes: Option<u64>) -> Result<f64, Failure> {
    let name = bench.name();
    bench.start(side, &name, STAYS)?;
    if let Some(bytes) = written_bytes {
        let write = format!("head -c {bytes} /dev/urandom >/slackwater-bench && sync");
        bench.execute(&name, &write)?;
    }
    let took = timed(|| bench.ctr.run(&["snapshots", "--snapshotter", side, "diff", &name]))?;
    bench.ctr.remove_container(&name)?;
    Ok(took)
}

/// What is in use more than before, once each container has read every file.
fn memory_of_many(bench: &Bench, side: &str) -> Result<f64, Failure> {
    bench.settle()?;
    memory::drop_caches()?;
    let before = memory::used_mib()?;
    let names: Vec<_> = (0..bench.at_once()).map(|_| bench.name()).collect();
    for_each_at_once(&names, |name| {
        bench.start(side, name, STAYS)?;
        bench.execute(name, READ_ALL)
    })?;
    let after = memory::used_mib()?;
    for_each_at_once(&names, |name| bench.ctr.remove_container(name))?;
    Ok(after - before)
}
