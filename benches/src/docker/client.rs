//! `docker`, Docker's command, for one Docker.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::failure::Failure;
use crate::process::{End, command, output_until};
use crate::stop::Stop;

/// What this experiment made is found by: the label of its containers, and the repository of its images.
pub(super) const MARK: &str = "slackwater-bench";

/// How long one call may take when all is removed in the end.
const LAST_CALL_MAX: Duration = Duration::from_secs(60);

/// How often it is tried to remove all, and the time between two tries: a container that is ending is gone in less.
const CLEAR_ATTEMPTS: u32 = 5;
const CLEAR_PAUSE: Duration = Duration::from_secs(1);

/// What is asked of a Docker: its id and its directory, its release, its storage driver.
const DESCRIPTION: &str = "{{.ID}} in {{.DockerRootDir}}\t{{.ServerVersion}}\t{{.Driver}}";

/// What `docker image inspect` says of an image that is not there, in lower case.
const NO_IMAGE: &str = "no such image";

/// One Docker.
#[derive(Debug)]
pub(super) struct Docker {
    pub(super) program: PathBuf,
    /// As `docker --host` takes it.
    pub(super) address: String,
    pub(super) stop: Stop,
}

/// What a Docker says of itself.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Description {
    /// With its directory: releases before 23 take the id from a file beside their settings, which two can share.
    pub(super) id: String,
    pub(super) version: String,
    pub(super) storage_driver: String,
}

impl Docker {
    fn command(&self, words: &[&str]) -> Command {
        let mut call = command(&self.program);
        call.arg("--host").arg(&self.address).args(words);
        // Builds by BuildKit, as newer clients do unasked, which print lines.
        call.env("DOCKER_BUILDKIT", "1").env("BUILDKIT_PROGRESS", "plain");
        // It would build elsewhere.
        call.env_remove("BUILDX_BUILDER");
        call
    }

    fn call_until(&self, words: &[&str], end: End<'_>) -> Result<String, Failure> {
        output_until(self.command(words).stdout(Stdio::piped()), end)
    }

    /// Runs the command, which must succeed. What it prints on standard output is not read.
    pub(super) fn run(&self, words: &[&str]) -> Result<(), Failure> {
        let end = End::Stop(&self.stop);
        output_until(self.command(words).stdout(Stdio::null()), end).map(drop)
    }

    /// The same, and answers what it printed.
    fn call(&self, words: &[&str]) -> Result<String, Failure> {
        self.call_until(words, End::Stop(&self.stop))
    }

    /// The same also when the experiment has been stopped.
    fn last_call(&self, words: &[&str]) -> Result<String, Failure> {
        self.call_until(words, End::After(LAST_CALL_MAX))
    }

    /// What it is.
    pub(super) fn describe(&self) -> Result<Description, Failure> {
        // This one says why a Docker cannot be reached; older releases of `info` do not.
        self.run(&["version", "--format", "{{.Server.Version}}"])?;
        let said = self.call(&["info", "--format", DESCRIPTION])?;
        description(&said).ok_or_else(|| {
            let address = &self.address;
            Failure::Unfit(format!(
                "no Docker answers at {address}: `docker info` says `{}`",
                said.trim()
            ))
        })
    }

    /// Whether it has the image, by whatever form of its name.
    pub(super) fn has_image(&self, image: &str, end: End<'_>) -> Result<bool, Failure> {
        match self.call_until(&["image", "inspect", "--format", "{{.Id}}", image], end) {
            Ok(_) => Ok(true),
            Err(failure) if failure.to_string().to_lowercase().contains(NO_IMAGE) => Ok(false),
            Err(failure) => Err(failure),
        }
    }

    /// Sees that nothing is there that a run before this one left.
    pub(super) fn require_unused(&self) -> Result<(), Failure> {
        let Some(found) = self.left(End::Stop(&self.stop))? else { return Ok(()) };
        let address = &self.address;
        Err(Failure::Unfit(format!(
            "{address} has something of another run ({found}), and it would be removed at the end: wait until that run has \
             ended, or remove it (docker rm --force, docker image rm)"
        )))
    }

    /// Something that is there of such a run.
    fn left(&self, end: End<'_>) -> Result<Option<String>, Failure> {
        let label = format!("label={MARK}");
        let lists: [(&str, &[&str]); 2] = [
            ("container", &["ps", "--all", "--quiet", "--filter", &label]),
            ("image", &["image", "ls", "--format", "{{.Repository}}:{{.Tag}}", MARK]),
        ];
        for (what, words) in lists {
            let listed = self.call_until(words, end)?;
            if let Some(first) = listed.split_whitespace().next() {
                return Ok(Some(format!("{what} {first}")));
            }
        }
        Ok(None)
    }

    /// Removes what has the marks of this experiment, and an image that it pulled. What was being made when a call was ended
    /// may come to be there for a moment yet: so it is looked twice.
    pub(super) fn clear(&self, pulled: Option<&str>) -> Result<(), Failure> {
        let mut outcome = Ok(());
        let mut empty_looks = 0;
        for _ in 0..CLEAR_ATTEMPTS {
            outcome = self.clear_once().and_then(|()| self.remove_image(pulled));
            empty_looks = if outcome.is_ok() { empty_looks + 1 } else { 0 };
            if empty_looks == 2 {
                break;
            }
            std::thread::sleep(CLEAR_PAUSE);
        }
        outcome
    }

    fn clear_once(&self) -> Result<(), Failure> {
        let label = format!("label={MARK}");
        let containers = self.last_call(&["ps", "--all", "--quiet", "--filter", &label])?;
        let images =
            self.last_call(&["image", "ls", "--format", "{{.Repository}}:{{.Tag}}", MARK])?;
        let removals: [(&[&str], String); 2] =
            [(&["rm", "--force", "--volumes"], containers), (&["image", "rm"], images)];
        let mut outcome = Ok(());
        for (remove, listed) in &removals {
            for one in listed.split_whitespace() {
                let words = [*remove, &[one][..]].concat();
                outcome = outcome.and(self.last_call(&words).map(drop));
            }
        }
        match self.left(End::After(LAST_CALL_MAX))? {
            // What could not be removed has gone by itself.
            None => Ok(()),
            Some(found) => {
                let (address, why) = (&self.address, outcome.err());
                let why = why.map_or_else(String::new, |failure| format!("; {failure}"));
                Err(Failure::Unfit(format!(
                    "{address} has {found} yet{why}: remove that by docker"
                )))
            }
        }
    }

    /// Removes an image, if there is one to remove.
    fn remove_image(&self, image: Option<&str>) -> Result<(), Failure> {
        let Some(image) = image else { return Ok(()) };
        match self.has_image(image, End::After(LAST_CALL_MAX))? {
            true => self.last_call(&["image", "rm", image]).map(drop),
            false => Ok(()),
        }
    }
}

fn description(said: &str) -> Option<Description> {
    let mut words = said.trim().split('\t').map(str::to_owned);
    let found =
        Description { id: words.next()?, version: words.next()?, storage_driver: words.next()? };
    // A client that reaches nothing prints empty fields.
    (!found.id.is_empty() && !found.version.is_empty()).then_some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn docker(program: &str) -> Docker {
        let stop = Stop::listen(Duration::from_secs(60)).unwrap();
        Docker { program: program.into(), address: "unix:///nonexistent".to_owned(), stop }
    }

    #[test]
    fn a_docker_is_known_by_its_id() {
        let found = description("a in /b c\t29.8.0\toverlayfs\n").unwrap();
        assert_eq!((found.id.as_str(), found.version.as_str()), ("a in /b c", "29.8.0"));
        assert_eq!(found.storage_driver, "overlayfs");
        for bad in ["", "\t\t\n", "id\t\t", "id"] {
            assert_eq!(description(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn what_another_run_left_is_named_and_refused() {
        // What it is called with comes back.
        let refused = docker("echo").require_unused().unwrap_err().to_string();
        assert!(refused.contains("container --host") && refused.contains("remove it"), "{refused}");
        let failed = docker("false").require_unused().unwrap_err().to_string();
        assert!(failed.contains("--host unix:///nonexistent ps --all"), "{failed}");
        assert!(docker("true").require_unused().is_ok());
    }
}
