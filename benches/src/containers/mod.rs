//! The experiment `containers`: what an engine's user waits for, by this snapshotter and by others of the same
//! containerd, by turns.
//!
//! ```text
//! ctr     containerd's command, in a namespace of its own      work   pull, run, diff, memory, ...
//! memory  of the whole machine                                 turns  ours, a rival, the next rival, and again
//! ```
//! containerd is the user's, as it is installed and set: what is measured is what its containers get. All that is made
//! is in one namespace, which has to be empty before, and is emptied in the end.

mod ctr;
mod memory;
mod work;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ctr::Ctr;
use work::{WORK, Work};

use crate::arguments::ContainersArguments;
use crate::compare::{Comparison, machine, progress, tell};
use crate::failure::Failure;
use crate::row::Row;
use crate::stop::Stop;

/// Longest time of all together.
const TIME_MAX: Duration = Duration::from_secs(3600);

/// Time in which snapshotters remove in the background what containerd has let go of.
const SETTLE: Duration = Duration::from_secs(2);

/// Time between two looks whether to go on.
const STEP: Duration = Duration::from_millis(100);

/// What is run, and on what.
#[derive(Debug)]
pub(crate) struct Bench<'a> {
    arguments: &'a ContainersArguments,
    ctr: Ctr,
    /// The own snapshotter, then the rivals.
    sides: Vec<String>,
    /// `ctr images pull` takes `--local`.
    is_local: bool,
    made: AtomicUsize,
}

/// Whether there is a row with that key.
pub(crate) fn is_known(key: &str) -> bool {
    keys().any(|known| known == key)
}

/// The keys of all rows.
pub(crate) fn keys() -> impl Iterator<Item = &'static str> {
    WORK.iter().map(|work| work.key)
}

/// Measures what was asked for and prints it.
pub(crate) fn run(arguments: &ContainersArguments) -> Result<bool, Failure> {
    let ctr = Ctr {
        program: arguments.ctr.clone(),
        address: arguments.address.clone(),
        namespace: arguments.namespace.clone(),
        stop: Stop::listen(TIME_MAX)?,
    };
    ctr.require_empty()?;
    let mut sides = vec![arguments.snapshotter.clone()];
    sides.extend(arguments.rivals.iter().cloned());
    for side in &sides {
        // One that there is not is an error of containerd that names it.
        ctr.snapshots(side, &["ls"])?;
    }
    let is_local = !arguments.transfer && ctr.has_local_pull()?;
    let bench = Bench { arguments, ctr, sides, is_local, made: AtomicUsize::new(0) };
    let machine = machine::describe(Path::new("/var/lib"))?;
    let mut comparison = Comparison { machine, rows: Vec::new() };
    let outcome = bench.measure(&mut comparison.rows);
    let cleared = bench.ctr.clear(&bench.sides);
    // What was measured is told even if the rest was stopped.
    tell(arguments.json.as_deref(), arguments.svg.as_deref(), &comparison)?;
    outcome.and(cleared).map(|()| comparison.held())
}

impl Bench<'_> {
    fn measure(&self, rows: &mut Vec<Row>) -> Result<(), Failure> {
        let only = &self.arguments.only;
        let is_wanted = |work: &&Work| only.is_empty() || only.iter().any(|key| key == work.key);
        let mut has_image = false;
        for work in WORK.iter().filter(is_wanted) {
            progress(&(work.title)(self));
            if work.needs_image && !has_image {
                for side in &self.sides {
                    self.pull(side)?;
                }
                has_image = true;
            }
            rows.extend(self.rows_of(work)?);
        }
        Ok(())
    }

    /// The rows of one work, one for each rival.
    fn rows_of(&self, work: &Work) -> Result<Vec<Row>, Failure> {
        let mut samples: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        if work.needs_image && work.unit == "ms" {
            // Once before, so that the first round is as the others.
            for side in &self.sides {
                (work.sample)(self, side)?;
            }
        }
        for _ in 0..self.arguments.rounds {
            for side in &self.sides {
                let sample = (work.sample)(self, side)?;
                samples.entry(side).or_default().push(sample);
            }
        }
        let of = |side: &str| samples.get(side).cloned().unwrap_or_default();
        let rivals = self.arguments.rivals.iter().map(|rival| Row {
            work: (work.title)(self),
            key: format!("{}-{rival}", work.key),
            unit: work.unit.to_owned(),
            higher_is_better: false,
            subject: self.arguments.snapshotter.clone(),
            rival: Some(rival.clone()),
            samples: of(&self.arguments.snapshotter),
            rival_samples: of(rival),
            target: None,
            not_run: None,
        });
        Ok(rivals.collect())
    }

    fn image(&self) -> &str {
        &self.arguments.image
    }

    fn at_once(&self) -> usize {
        self.arguments.at_once
    }

    /// A name that nothing has had.
    fn name(&self) -> String {
        format!("slackwater-bench-{}", self.made.fetch_add(1, Ordering::Relaxed))
    }

    /// Fetches and unpacks the image.
    fn pull(&self, side: &str) -> Result<(), Failure> {
        let mut words = vec!["images", "pull", "--snapshotter", side];
        words.extend(self.is_local.then_some("--local"));
        words.extend(self.arguments.plain_http.then_some("--plain-http"));
        words.push(self.image());
        self.ctr.call(&words).map(drop)
    }

    /// The snapshot of the whole image.
    fn root(&self, side: &str) -> Result<String, Failure> {
        let listed = self.ctr.snapshots(side, &["ls"])?;
        ctr::highest(&listed).map(str::to_owned).ok_or_else(|| {
            Failure::Unfit(format!("snapshotter {side} does not have the image alone: {listed}"))
        })
    }

    /// Runs a line of a shell in a new container, which is removed when it has ended.
    fn run(&self, side: &str, name: &str, line: &str) -> Result<(), Failure> {
        self.begin("--rm", side, name, line)
    }

    /// Starts a container with a line of a shell.
    fn start(&self, side: &str, name: &str, line: &str) -> Result<(), Failure> {
        self.begin("--detach", side, name, line)
    }

    fn begin(&self, how: &str, side: &str, name: &str, line: &str) -> Result<(), Failure> {
        let mut words = vec!["run", how, "--snapshotter", side];
        let more: Vec<_> =
            self.arguments.run_arguments.iter().map(|word| word.replace("{}", name)).collect();
        words.extend(more.iter().map(String::as_str));
        words.extend([self.image(), name]);
        words.extend(self.shell());
        words.extend(["-c", line]);
        self.ctr.call(&words).map(drop)
    }

    /// Runs a line of a shell in a container that runs, to its end.
    fn execute(&self, name: &str, line: &str) -> Result<(), Failure> {
        let mut words = vec!["tasks", "exec", "--exec-id", "line", name];
        words.extend(self.shell());
        words.extend(["-c", line]);
        self.ctr.call(&words).map(drop)
    }

    fn shell(&self) -> impl Iterator<Item = &str> {
        self.arguments.shell.split_whitespace()
    }

    /// Waits until what is removed in the background is gone.
    fn settle(&self) -> Result<(), Failure> {
        let steps = SETTLE.as_millis() / STEP.as_millis();
        for _ in 0..steps {
            self.ctr.stop.check()?;
            std::thread::sleep(STEP);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_key_names_one_row() {
        assert_eq!(keys().collect::<HashSet<_>>().len(), WORK.len());
        assert!(is_known("at-once") && !is_known("at"));
    }
}
