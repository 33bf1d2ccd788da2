//! Whether a bench of criterion became slower than a kept baseline: criterion tells, and never
//! fails.
//!
//! It keeps its figures in `GROUP/FUNCTION/.../SET/estimates.json`, where the set is `new` for
//! the latest run and otherwise the name of a baseline.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::Deserialize;

use crate::arguments::RegressionsArguments;
use crate::failure::Failure;

/// The set of the latest run.
const LATEST: &str = "new";

/// Folders in each other below criterion's: group, function, value, set, and one to spare.
const DEPTH_MAX: usize = 5;

/// What is read of `estimates.json`.
#[derive(Debug, Deserialize)]
struct Estimates {
    median: Estimate,
}

/// One figure, in nanoseconds.
#[derive(Debug, Deserialize)]
struct Estimate {
    point_estimate: f64,
}

/// What is read of `benchmark.json`.
#[derive(Debug, Deserialize)]
struct Identity {
    full_id: String,
}

/// How a bench did in the latest run.
#[derive(Debug)]
struct Line {
    name: String,
    latest_nanos: f64,
    state: State,
}

/// The latest run beside the baseline.
#[derive(Debug, PartialEq)]
enum State {
    Compared {
        baseline_nanos: f64,
    },
    /// The baseline does not have it.
    Added,
    /// The latest run is the one that the baseline was made of.
    NotRun,
}

/// What was found.
#[derive(Debug)]
struct Regressions {
    lines: Vec<Line>,
    limit: f64,
}

/// Prints every bench beside the baseline; answers whether none is slower than the limit.
pub(crate) fn run(arguments: &RegressionsArguments) -> Result<bool, Failure> {
    let directory = match &arguments.criterion {
        Some(directory) => directory.clone(),
        None => beside()?,
    };
    let found = find(&directory, &arguments.baseline, arguments.limit)?;
    print!("{found}");
    Ok(found.regressed().next().is_none())
}

/// The folder of criterion in the target directory that this program is in.
fn beside() -> Result<PathBuf, Failure> {
    let program = std::env::current_exe().map_err(Failure::on("find this program"))?;
    let target = program.parent().and_then(Path::parent).unwrap_or(Path::new("target"));
    Ok(target.join("criterion"))
}

fn find(directory: &Path, baseline: &str, limit: f64) -> Result<Regressions, Failure> {
    let missing = |what: &str| {
        let directory = directory.display();
        Failure::Unfit(format!(
            "{what} in {directory}; run `make bench-save` on the old code first"
        ))
    };
    if !directory.is_dir() {
        return Err(missing("no bench was ever run: nothing"));
    }
    let mut lines = Vec::new();
    for bench in benches(directory)? {
        lines.push(Line::read(&bench, baseline)?);
    }
    if lines.iter().all(|line| line.state == State::Added) {
        return Err(missing(&format!("there is no baseline `{baseline}`")));
    }
    if lines.iter().all(|line| line.ratio().is_none()) {
        let advice = "nothing was measured since the baseline was kept; run `make bench-check`";
        return Err(Failure::Unfit(advice.to_owned()));
    }
    lines.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(Regressions { lines, limit })
}

/// The folders of all benches that have a latest run.
fn benches(directory: &Path) -> Result<Vec<PathBuf>, Failure> {
    let mut benches = Vec::new();
    let mut folders = vec![(directory.to_owned(), 0)];
    while let Some((folder, depth)) = folders.pop() {
        if folder.join(LATEST).join("estimates.json").is_file() {
            benches.push(folder);
            continue;
        }
        if depth == DEPTH_MAX {
            continue;
        }
        for entry in std::fs::read_dir(&folder).map_err(Failure::at("read", &folder))? {
            let path = entry.map_err(Failure::at("read", &folder))?.path();
            if path.is_dir() {
                folders.push((path, depth + 1));
            }
        }
    }
    Ok(benches)
}

impl Line {
    fn read(bench: &Path, baseline: &str) -> Result<Self, Failure> {
        let latest = bench.join(LATEST);
        let kept = bench.join(baseline).join("estimates.json");
        let identity: Identity = json(&latest.join("benchmark.json"))?;
        let latest = latest.join("estimates.json");
        let state = if !kept.is_file() {
            State::Added
        } else if written(&latest)? <= written(&kept)? {
            State::NotRun
        } else {
            State::Compared { baseline_nanos: median(&kept)? }
        };
        Ok(Self { name: identity.full_id, latest_nanos: median(&latest)?, state })
    }

    /// How many times as long as at the baseline it takes.
    fn ratio(&self) -> Option<f64> {
        match self.state {
            State::Compared { baseline_nanos } => Some(self.latest_nanos / baseline_nanos),
            State::Added | State::NotRun => None,
        }
    }
}

fn median(estimates: &Path) -> Result<f64, Failure> {
    Ok(json::<Estimates>(estimates)?.median.point_estimate)
}

fn written(path: &Path) -> Result<SystemTime, Failure> {
    path.metadata().and_then(|metadata| metadata.modified()).map_err(Failure::at("look at", path))
}

fn json<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<T, Failure> {
    let text = std::fs::read_to_string(path).map_err(Failure::at("read", path))?;
    serde_json::from_str(&text).map_err(|error| Failure::at("read", path)(error.into()))
}

impl Regressions {
    fn regressed(&self) -> impl Iterator<Item = &Line> {
        self.lines.iter().filter(|line| line.ratio().is_some_and(|ratio| ratio > self.limit))
    }
}

impl fmt::Display for Regressions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.lines.iter().map(|line| line.name.len()).max().unwrap_or(0).max(5);
        writeln!(f, "{:width$}{:>12}{:>12}{:>8}", "bench", "baseline", "latest", "ratio")?;
        for line in &self.lines {
            let latest = time(line.latest_nanos);
            let name = &line.name;
            match (&line.state, line.ratio()) {
                (State::Compared { baseline_nanos }, Some(ratio)) => {
                    let verdict = if ratio > self.limit { "  SLOWER" } else { "" };
                    let baseline = time(*baseline_nanos);
                    writeln!(f, "{name:width$}{baseline:>12}{latest:>12}{ratio:>8.2}{verdict}")?;
                }
                (State::NotRun, _) => writeln!(f, "{name:width$}{latest:>12}     not run")?,
                _ => writeln!(f, "{name:width$}{:>12}{latest:>12}     new", "")?,
            }
        }
        let (slower, limit) = (self.regressed().count(), self.limit);
        writeln!(f, "\n{slower} of {} take over {limit} times as long", self.lines.len())
    }
}

/// Nanoseconds for people.
fn time(nanos: f64) -> String {
    match nanos {
        nanos if nanos >= 1e9 => format!("{:.2} s", nanos / 1e9),
        nanos if nanos >= 1e6 => format!("{:.2} ms", nanos / 1e6),
        nanos if nanos >= 1e3 => format!("{:.2} us", nanos / 1e3),
        nanos => format!("{nanos:.2} ns"),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::time::Duration;

    use super::*;

    /// Writes one set of one bench, that many seconds after the epoch.
    fn keep(directory: &Path, bench: &str, set: &str, nanos: f64, seconds: u64) {
        let folder = directory.join(bench).join(set);
        std::fs::create_dir_all(&folder).unwrap();
        let identity = serde_json::json!({ "full_id": bench, "group_id": "x" });
        std::fs::write(folder.join("benchmark.json"), identity.to_string()).unwrap();
        let estimates = folder.join("estimates.json");
        let text = serde_json::json!({ "median": { "point_estimate": nanos }, "mean": {} });
        std::fs::write(&estimates, text.to_string()).unwrap();
        let file = File::options().write(true).open(&estimates).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)).unwrap();
    }

    fn compared(ratio: f64, limit: f64) -> Regressions {
        let folder = tempfile::tempdir().unwrap();
        keep(folder.path(), "clone/size/1GiB", "main", 1000.0, 1);
        keep(folder.path(), "clone/size/1GiB", "new", 1000.0 * ratio, 2);
        find(folder.path(), "main", limit).unwrap()
    }

    #[test]
    fn slower_than_the_limit_is_a_regression_and_at_the_limit_is_none() {
        let slower = compared(1.3, 1.25);
        assert_eq!(slower.regressed().count(), 1);
        assert!(slower.to_string().contains("1.30  SLOWER"), "{slower}");
        assert_eq!(compared(1.25, 1.25).regressed().count(), 0);
        assert_eq!(compared(0.1, 1.25).regressed().count(), 0);
        assert_eq!(compared(1.3, 1.5).regressed().count(), 0);
    }

    #[test]
    fn what_cannot_be_compared_is_listed_and_no_regression() {
        let folder = tempfile::tempdir().unwrap();
        keep(folder.path(), "a", "main", 1.0, 1);
        keep(folder.path(), "a", "new", 1.0, 2);
        keep(folder.path(), "added", "new", 1e6, 2);
        keep(folder.path(), "stale", "main", 1.0, 1);
        keep(folder.path(), "stale", "new", 1e9, 1);
        std::fs::create_dir_all(folder.path().join("report")).unwrap();
        let found = find(folder.path(), "main", 1.25).unwrap();
        assert_eq!(found.regressed().count(), 0);
        let text = found.to_string();
        assert!(text.contains("1.00 ms     new") && text.contains("not run"), "{text}");
    }

    #[test]
    fn without_a_baseline_it_says_how_to_make_one() {
        let folder = tempfile::tempdir().unwrap();
        let error = |directory: &Path| find(directory, "main", 1.25).unwrap_err().to_string();
        assert!(error(&folder.path().join("none")).contains("make bench-save"));
        assert!(error(folder.path()).contains("make bench-save"));
        keep(folder.path(), "a", "new", 1.0, 2);
        keep(folder.path(), "a", "other", 1.0, 1);
        let text = error(folder.path());
        assert!(text.contains("`main`") && text.contains("make bench-save"), "{text}");
    }

    #[test]
    fn a_run_that_measured_nothing_is_no_success() {
        let folder = tempfile::tempdir().unwrap();
        keep(folder.path(), "a", "main", 1.0, 2);
        keep(folder.path(), "a", "new", 1.0, 2);
        let error = || find(folder.path(), "main", 1.25).unwrap_err().to_string();
        assert!(error().contains("nothing was measured"), "{}", error());
        // One that the baseline does not have proves nothing of the others.
        keep(folder.path(), "added", "new", 1.0, 3);
        assert!(error().contains("nothing was measured"), "{}", error());
    }

    #[test]
    fn figures_that_cannot_be_read_are_told_with_their_file() {
        let folder = tempfile::tempdir().unwrap();
        keep(folder.path(), "a", "new", 1.0, 2);
        std::fs::write(folder.path().join("a/new/estimates.json"), "{}").unwrap();
        let error = find(folder.path(), "main", 1.25).unwrap_err().to_string();
        assert!(error.contains("a/new/estimates.json"), "{error}");
    }
}
