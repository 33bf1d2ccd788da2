//! The experiment `docker`: what a user of Docker waits for, by this Docker and by others of the same machine, by turns.
//!
//! ```text
//! client  docker's command, for one of the Dockers      work   pull, run, commit, build, ...
//! turns   ours, a rival, the next rival, and again
//! ```
//! The Dockers are the user's, as they are installed and set: one whose storage is Slackwater's, the others with what he
//! would have instead. All that is made has names of this experiment, and is removed in the end; but the build cache is
//! Docker's, which has no name for a part of it.

mod client;
mod work;

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tempfile::TempDir;

use crate::arguments::DockerArguments;
use crate::compare::{Comparison, machine, progress, tell};
use crate::failure::Failure;
use crate::process::End;
use crate::row::Row;
use crate::stop::Stop;
use crate::turns::Turns;

use client::Docker;
use work::{Needs, WORK};

/// What the own side is called.
const OWN: &str = "slackwater";

/// What the other worker's Docker is called.
const HOLDER: &str = "holder";

/// Longest time of all together.
const TIME_MAX: Duration = Duration::from_secs(3600);

/// What is run, and on what.
#[derive(Debug)]
pub(crate) struct Bench<'a> {
    arguments: &'a DockerArguments,
    /// The own side, then the rivals.
    names: Vec<String>,
    dockers: Vec<Docker>,
    /// Another worker's, which has the image for `deploy`, if that is wanted.
    holder: Option<Docker>,
    is_held: AtomicBool,
    /// Directories that are built.
    contexts: TempDir,
    made: AtomicUsize,
}

/// The keys of all rows.
pub(crate) fn keys() -> impl Iterator<Item = &'static str> + Clone {
    WORK.iter().map(|work| work.key)
}

/// Measures what was asked for and prints it.
pub(crate) fn run(arguments: &DockerArguments) -> Result<bool, Failure> {
    let stop = Stop::listen(TIME_MAX)?;
    let contexts = tempfile::tempdir().map_err(Failure::on("make a directory to build"))?;
    let docker = |address: &String| Docker {
        program: arguments.docker.clone(),
        address: address.clone(),
        stop: stop.clone(),
    };
    let hosts = std::iter::once(&arguments.docker_host);
    let hosts = hosts.chain(arguments.rivals.iter().map(|rival| &rival.address));
    let wants_all = arguments.only.is_empty();
    let wants_deploy = arguments.only.iter().any(|key| key == "deploy");
    if arguments.holder.is_none() && wants_deploy {
        let reason = "the row `deploy` needs --holder, the Docker of another worker";
        return Err(Failure::Unfit(reason.to_owned()));
    }
    let bench = Bench {
        arguments,
        names: names(arguments)?,
        dockers: hosts.map(docker).collect(),
        holder: arguments.holder.as_ref().filter(|_| wants_all || wants_deploy).map(docker),
        is_held: AtomicBool::new(false),
        contexts,
        made: AtomicUsize::new(0),
    };
    bench.require_different()?;
    let mut had_image = Vec::new();
    for docker in bench.dockers.iter().chain(&bench.holder) {
        docker.require_unused()?;
        had_image.push(docker.has_image(bench.image(), End::Stop(&stop))?);
    }
    if bench.holder.is_some() && bench.wants("pull") && had_image.last() == Some(&true) {
        return Err(Failure::Unfit(format!(
            "the holder has {} already, and the row `pull` would take its layers: remove it there first, or leave `pull` out \
             by --only",
            bench.image()
        )));
    }
    let machine = machine::describe(Path::new("/var/lib"))?;
    let mut comparison = Comparison { machine, rows: Vec::new() };
    let outcome = bench.measure(&had_image, &mut comparison.rows);
    let cleared = bench.clear(&had_image);
    if comparison.rows.iter().any(|row| row.key.starts_with("build") && !row.samples.is_empty()) {
        progress("the build caches have what was built: `docker builder prune` removes it");
    }
    // What was measured is printed even if the rest was stopped.
    tell(arguments.json.as_deref(), arguments.svg.as_deref(), &comparison)?;
    match (outcome, cleared) {
        (Ok(()), Ok(())) => Ok(comparison.held()),
        (Err(failure), Ok(())) | (Ok(()), Err(failure)) => Err(failure),
        (Err(failure), Err(left)) => Err(Failure::Unfit(format!("{failure}; then {left}"))),
    }
}

/// The names of the sides.
fn names(arguments: &DockerArguments) -> Result<Vec<String>, Failure> {
    let mut names = vec![OWN.to_owned()];
    for rival in &arguments.rivals {
        if names.contains(&rival.name) || rival.name == HOLDER {
            let name = &rival.name;
            return Err(Failure::Unfit(format!(
                "`{name}` names two sides: give each rival a name of its own, other than {OWN} and {HOLDER}"
            )));
        }
        names.push(rival.name.clone());
    }
    Ok(names)
}

impl Bench<'_> {
    /// Sees that each side is there, says what it is, and that none is another one by a second address.
    fn require_different(&self) -> Result<(), Failure> {
        let mut ids: Vec<String> = Vec::new();
        let holder = self.holder.iter().map(|docker| (HOLDER, docker));
        let sides = self.names.iter().map(String::as_str).zip(&self.dockers);
        for (name, docker) in sides.chain(holder) {
            let found = docker.describe()?;
            if let Some(other) = ids.iter().position(|id| *id == found.id) {
                let (other, address) = (&self.names[other], &docker.address);
                return Err(Failure::Unfit(format!(
                    "{name} ({address}) is the same Docker as {other}: it would be compared with itself"
                )));
            }
            progress(&format!(
                "{name}: Docker {} with storage driver {}",
                found.version, found.storage_driver
            ));
            if [OWN, HOLDER].contains(&name) && !found.storage_driver.contains(OWN) {
                let (driver, address) = (found.storage_driver, &docker.address);
                return Err(Failure::Unfit(format!(
                    "{address} has storage driver {driver}, expected one with `{OWN}` in its name: give the Docker that is \
                     to be measured by --docker-host, one of another worker by --holder, and the others by --rival"
                )));
            }
            ids.push(found.id);
        }
        Ok(())
    }

    fn measure(&self, had_image: &[bool], rows: &mut Vec<Row>) -> Result<(), Failure> {
        for work in WORK.iter().filter(|work| self.wants(work.key)) {
            let title = (work.title)(self);
            progress(&title);
            let mut turns = Turns::new(&self.names, self.arguments.rounds);
            let outcome = self.prepare(work.needs, had_image);
            let outcome =
                outcome.and_then(|()| turns.take(|side| (work.sample)(self, &self.dockers[side])));
            rows.extend(turns.rows(work.key, &title, "ms", outcome.as_ref().err()));
            match outcome {
                Err(failure) if failure.is_stop() => return Err(failure),
                // The next ones may do. What stays of this one is removed in the end, which says so if it cannot be.
                Err(_) => self.dockers.iter().for_each(|docker| drop(docker.clear(None))),
                Ok(()) => {}
            }
        }
        Ok(())
    }

    /// Has the image be there, or not.
    fn prepare(&self, needs: Needs, had_image: &[bool]) -> Result<(), Failure> {
        for (docker, had_image) in self.dockers.iter().zip(had_image) {
            let end = End::Stop(&docker.stop);
            match (needs == Needs::Image, docker.has_image(self.image(), end)?) {
                (true, false) => docker.run(&["pull", "--quiet", self.image()])?,
                (false, true) if *had_image => {
                    let (image, address) = (self.image(), &docker.address);
                    return Err(Failure::Unfit(format!(
                        "{address} has {image} already, and it stays there: remove it first (docker --host {address} \
                         image rm {image}), or leave `pull` and `deploy` out by --only"
                    )));
                }
                (false, true) => docker.run(&["image", "rm", self.image()])?,
                _ => {}
            }
        }
        match (needs, &self.holder) {
            (Needs::Holder, Some(holder)) => {
                self.is_held.store(true, Ordering::Relaxed);
                holder.run(&["pull", "--quiet", self.image()])
            }
            _ => Ok(()),
        }
    }

    /// Removes all that was made, and the image where it was not before.
    fn clear(&self, had_image: &[bool]) -> Result<(), Failure> {
        let mut outcome = Ok(());
        let holder = self.holder.iter().filter(|_| self.is_held.load(Ordering::Relaxed));
        for (docker, had_image) in self.dockers.iter().chain(holder).zip(had_image) {
            let pulled = if *had_image { None } else { Some(self.image()) };
            outcome = outcome.and(docker.clear(pulled));
        }
        outcome
    }

    fn wants(&self, key: &str) -> bool {
        let only = &self.arguments.only;
        match key {
            "deploy" if self.holder.is_none() => false,
            _ => only.is_empty() || only.iter().any(|wanted| wanted == key),
        }
    }

    fn image(&self) -> &str {
        &self.arguments.image
    }

    /// A name that nothing has had.
    fn name(&self) -> String {
        let number = self.made.fetch_add(1, Ordering::Relaxed);
        format!("{}-{number}", std::process::id())
    }

    fn shell(&self) -> Vec<&str> {
        self.arguments.shell.split_whitespace().collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use clap::Parser;

    use super::*;
    use crate::arguments::{Arguments, Command};

    fn parsed(words: &[&str]) -> Result<DockerArguments, String> {
        let all = ["slackwater-bench", "docker", "--image", "i"].iter().chain(words);
        match Arguments::try_parse_from(all).map_err(|error| error.to_string())?.command {
            Command::Docker(arguments) => Ok(arguments),
            _ => panic!("another command"),
        }
    }

    #[test]
    fn a_key_names_one_row() {
        assert_eq!(keys().collect::<HashSet<_>>().len(), WORK.len());
    }

    #[test]
    fn a_rival_has_a_name_and_an_address() {
        let named = parsed(&["--rival", "a=unix:///a=b", "--rival", "b=tcp://x:1"]).unwrap();
        let rivals: Vec<_> = named
            .rivals
            .iter()
            .map(|rival| (rival.name.as_str(), rival.address.as_str()))
            .collect();
        assert_eq!(rivals, [("a", "unix:///a=b"), ("b", "tcp://x:1")]);
        assert_eq!(names(&named).unwrap(), ["slackwater", "a", "b"]);
        for bad in ["", "a", "a=", "=unix:///a"] {
            assert!(parsed(&["--rival", bad]).unwrap_err().contains("NAME=ADDRESS"), "{bad}");
        }
        assert!(parsed(&[]).unwrap_err().contains("--rival"));
        for twice in [["a=x", "a=y"], ["slackwater=x", "b=y"], ["a=x", "holder=y"]] {
            let named = parsed(&["--rival", twice[0], "--rival", twice[1]]).unwrap();
            assert!(names(&named).unwrap_err().to_string().contains("two sides"), "{twice:?}");
        }
        assert!(parsed(&["--rival", "a=b", "--only", "pul"]).unwrap_err().contains("build-14"));
    }
}
