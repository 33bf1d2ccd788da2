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

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ctr::Ctr;
use work::{Needs, WORK, Work};

use crate::arguments::ContainersArguments;
use crate::compare::{Comparison, machine, progress, tell};
use crate::failure::Failure;
use crate::row::Row;
use crate::stop::Stop;
use crate::turns::{SETTLE, Turns};

/// Longest time of all together.
const TIME_MAX: Duration = Duration::from_secs(3600);

/// What is run, and on what.
#[derive(Debug)]
pub(crate) struct Bench<'a> {
    arguments: &'a ContainersArguments,
    ctr: Ctr,
    /// Another worker's, which has the image for `deploy`.
    holder: Option<Ctr>,
    /// The own snapshotter, then the rivals.
    sides: Vec<String>,
    /// `ctr images pull` takes `--local`.
    is_local: bool,
    made: AtomicUsize,
}

/// The keys of all rows.
pub(crate) fn keys() -> impl Iterator<Item = &'static str> + Clone {
    WORK.iter().map(|work| work.key)
}

/// Measures what was asked for and prints it.
pub(crate) fn run(arguments: &ContainersArguments) -> Result<bool, Failure> {
    let stop = Stop::listen(TIME_MAX)?;
    let ctr = |address: Option<PathBuf>| Ctr {
        program: arguments.ctr.clone(),
        address,
        namespace: arguments.namespace.clone(),
        stop: stop.clone(),
    };
    let holder = arguments.holder.clone().map(|address| ctr(Some(address)));
    if holder.is_none() && arguments.only.iter().any(|key| key == "deploy") {
        let reason = "the row `deploy` needs --holder, the containerd of another worker";
        return Err(Failure::Unfit(reason.to_owned()));
    }
    let ctr = ctr(arguments.address.clone());
    let sides = sides(arguments)?;
    let has_local = ctr.has_local_pull()?;
    if arguments.transfer && !has_local {
        let reason = "--transfer is for containerd 2: this ctr has no transfer service";
        return Err(Failure::Unfit(reason.to_owned()));
    }
    let bench = Bench {
        arguments,
        ctr,
        holder,
        sides,
        is_local: has_local && !arguments.transfer,
        made: AtomicUsize::new(0),
    };
    if bench.wants("memory") {
        memory::require_root()?;
    }
    let machine = machine::describe(Path::new("/var/lib"))?;
    let mut comparison = Comparison { machine, rows: Vec::new() };
    // containerd refuses the name of a snapshotter that it does not have.
    bench.ctr.begin(&bench.sides)?;
    let begun = bench.begin_holder();
    // What was there before is not this run's to remove.
    let holder = bench.holder.as_ref().filter(|_| begun.is_ok());
    let outcome = begun.and_then(|()| bench.measure(&mut comparison.rows));
    let cleared = bench.ctr.clear(&bench.sides);
    let cleared = cleared.and(holder.map_or(Ok(()), |holder| holder.clear(&bench.sides[..1])));
    // What was measured is told even if the rest was stopped.
    tell(arguments.json.as_deref(), arguments.svg.as_deref(), &comparison)?;
    match (outcome, cleared) {
        (Ok(()), Ok(())) => Ok(comparison.held()),
        (Err(failure), Ok(())) | (Ok(()), Err(failure)) => Err(failure),
        (Err(failure), Err(left)) => Err(Failure::Unfit(format!("{failure}; then {left}"))),
    }
}

/// The own snapshotter, then the rivals.
fn sides(arguments: &ContainersArguments) -> Result<Vec<String>, Failure> {
    let mut sides = vec![arguments.snapshotter.clone()];
    for rival in &arguments.rivals {
        if sides.contains(rival) {
            let reason =
                format!("snapshotter `{rival}` is named twice: it would be compared with itself");
            return Err(Failure::Unfit(reason));
        }
        sides.push(rival.clone());
    }
    Ok(sides)
}

impl Bench<'_> {
    fn measure(&self, rows: &mut Vec<Row>) -> Result<(), Failure> {
        let mut has_image = false;
        for work in WORK.iter().filter(|work| self.wants(work.key)) {
            progress(&(work.title)(self));
            if work.needs == Needs::Image && !has_image {
                for side in &self.sides {
                    self.pull(&self.ctr, side)?;
                    self.root(&self.ctr, side)?;
                }
                has_image = true;
            }
            let mut turns = Turns::new(&self.sides, self.arguments.rounds);
            let outcome = self.prepare_holder(work.needs);
            let outcome =
                outcome.and_then(|()| turns.take(|side| self.turn(work, &self.sides[side])));
            rows.extend(turns.rows(
                work.key,
                &(work.title)(self),
                work.unit,
                outcome.as_ref().err(),
            ));
            match outcome {
                Err(failure) if failure.is_stop() => return Err(failure),
                // The next ones may do. What stays of this one is removed in the end, which says so if it cannot be.
                Err(_) => drop(self.ctr.clear_containers(&self.sides)),
                Ok(()) => {}
            }
        }
        Ok(())
    }

    /// Sees that the other worker's containerd is there, is not this one, and has nothing in the namespace.
    fn begin_holder(&self) -> Result<(), Failure> {
        let Some(holder) = &self.holder else { return Ok(()) };
        // This one's namespace has a lease by now.
        holder.begin(&self.sides[..1])
    }

    /// Has the other worker have the image, unpacked.
    fn prepare_holder(&self, needs: Needs) -> Result<(), Failure> {
        match (needs, &self.holder) {
            (Needs::Holder, Some(holder)) => {
                self.pull(holder, &self.sides[0])?;
                self.root(holder, &self.sides[0]).map(drop)
            }
            _ => Ok(()),
        }
    }

    fn wants(&self, key: &str) -> bool {
        let only = &self.arguments.only;
        match key {
            "deploy" if self.holder.is_none() => false,
            _ => only.is_empty() || only.iter().any(|wanted| wanted == key),
        }
    }

    /// One sample; what it let go of is gone afterwards.
    fn turn(&self, work: &Work, side: &str) -> Result<f64, Failure> {
        let sample = (work.sample)(self, side)?;
        self.ctr.collect()?;
        Ok(sample)
    }

    fn image(&self) -> &str {
        &self.arguments.image
    }

    fn at_once(&self) -> usize {
        self.arguments.at_once
    }

    /// A name that nothing has had: containerd removes what it has below one some moments after it has said so.
    fn name(&self) -> String {
        let number = self.made.fetch_add(1, Ordering::Relaxed);
        format!("slackwater-bench-{}-{number}", std::process::id())
    }

    /// Fetches and unpacks the image.
    fn pull(&self, ctr: &Ctr, side: &str) -> Result<(), Failure> {
        let mut words = vec!["images", "pull", "--snapshotter", side];
        words.extend(self.is_local.then_some("--local"));
        words.extend(self.arguments.plain_http.then_some("--plain-http"));
        words.push(self.image());
        ctr.run(&words)
    }

    /// The snapshot of the whole image.
    fn root(&self, ctr: &Ctr, side: &str) -> Result<String, Failure> {
        let listed = ctr.call(&["snapshots", "--snapshotter", side, "ls"])?;
        ctr::highest(&listed).map(str::to_owned).ok_or_else(|| {
            Failure::Unfit(format!(
                "snapshotter {side} does not have the image: with --transfer it needs an unpack_config of containerd's \
                 transfer service"
            ))
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
        self.ctr.run(&words)
    }

    /// Runs a line of a shell in a container that runs, to its end, as root.
    fn execute(&self, name: &str, line: &str) -> Result<(), Failure> {
        let mut words = vec!["tasks", "exec", "--user", "0", "--exec-id", "line", name];
        words.extend(self.shell());
        words.extend(["-c", line]);
        self.ctr.run(&words)
    }

    fn shell(&self) -> impl Iterator<Item = &str> {
        self.arguments.shell.split_whitespace()
    }

    /// Waits for what snapshotters do in the background.
    fn settle(&self) -> Result<(), Failure> {
        self.ctr.stop.pause(SETTLE)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use clap::Parser;

    use super::*;
    use crate::arguments::{Arguments, Command};

    #[test]
    fn a_key_names_one_row() {
        assert_eq!(keys().collect::<HashSet<_>>().len(), WORK.len());
    }

    #[test]
    fn no_snapshotter_is_compared_with_itself() {
        let sides = |words: &[&str]| {
            let all = ["slackwater-bench", "containers", "--image", "i"].iter().chain(words);
            match Arguments::try_parse_from(all.copied()).unwrap().command {
                Command::Containers(arguments) => sides(&arguments).map_err(|f| f.to_string()),
                _ => panic!("another command"),
            }
        };
        assert_eq!(sides(&[]).unwrap(), ["slackwater", "overlayfs"]);
        assert!(sides(&["--snapshotter", "overlayfs"]).unwrap_err().contains("twice"));
        assert!(sides(&["--rival", "a", "--rival", "a"]).unwrap_err().contains("`a`"));
    }
}
