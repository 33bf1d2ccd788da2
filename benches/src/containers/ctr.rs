//! `ctr`, containerd's command, in a namespace of its own that begins and ends empty.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::failure::Failure;
use crate::process::{End, command, output_until};
use crate::stop::Stop;

/// How long one call may take when all is removed in the end.
const LAST_CALL_MAX: Duration = Duration::from_secs(60);

/// How often it is tried to remove all, and the time between two tries: a container that was being made, or is ending, is
/// gone in less.
const CLEAR_ATTEMPTS: u32 = 5;
const CLEAR_PAUSE: Duration = Duration::from_secs(1);

/// What can be in a namespace, as `ctr` lists it.
const LISTS: [&str; 5] = ["containers", "tasks", "images", "leases", "content"];

/// The lease by which a run has the namespace. It goes by itself a day after a run that was killed.
const OWN_LEASE: &str = "slackwater-bench";

/// A lease that is made to be removed.
const PASSING_LEASE: &str = "slackwater-bench-collect";

/// What is called of containerd.
#[derive(Debug)]
pub(super) struct Ctr {
    pub(super) program: PathBuf,
    /// containerd's socket; `ctr` has a default.
    pub(super) address: Option<PathBuf>,
    pub(super) namespace: String,
    pub(super) stop: Stop,
}

impl Ctr {
    fn command(&self, words: &[&str]) -> Command {
        let mut call = command(&self.program);
        if let Some(address) = &self.address {
            call.arg("--address").arg(address);
        }
        call.args(["--namespace", &self.namespace]).args(words);
        call
    }

    /// Runs `ctr`, which must succeed. Nothing reads what it prints, which would take time.
    pub(super) fn run(&self, words: &[&str]) -> Result<(), Failure> {
        let end = End::Stop(&self.stop);
        output_until(self.command(words).stdout(Stdio::null()), end).map(drop)
    }

    /// The same, and answers what it printed.
    pub(super) fn call(&self, words: &[&str]) -> Result<String, Failure> {
        self.call_until(words, End::Stop(&self.stop))
    }

    fn call_until(&self, words: &[&str], end: End<'_>) -> Result<String, Failure> {
        output_until(self.command(words).stdout(Stdio::piped()), end)
    }

    /// The same also when the experiment has been stopped.
    fn last_call(&self, words: &[&str]) -> Result<String, Failure> {
        self.call_until(words, End::After(LAST_CALL_MAX))
    }

    /// Takes the namespace, in which nothing may be: at the end all is removed.
    pub(super) fn begin(&self, snapshotters: &[String]) -> Result<(), Failure> {
        if let Some(found) = self.left(snapshotters, End::Stop(&self.stop))? {
            let namespace = &self.namespace;
            return Err(Failure::Unfit(format!(
                "containerd's namespace `{namespace}` is not empty ({found}), and what is in it would be removed at the \
                 end: give another one by --namespace, or remove that"
            )));
        }
        let begun = self.run(&["leases", "create", "--id", OWN_LEASE]);
        // containerd may have made it. Else it is that of another run.
        if begun.as_ref().is_err_and(Failure::is_stop) {
            let _ = self.last_call(&["leases", "rm", OWN_LEASE]);
        }
        begun
    }

    /// Something that is in the namespace.
    fn left(&self, snapshotters: &[String], end: End<'_>) -> Result<Option<String>, Failure> {
        for what in LISTS {
            let listed = self.call_until(&[what, "ls", "--quiet"], end)?;
            if let Some(first) = lines(&listed).next() {
                return Ok(Some(format!("{what}: {first}")));
            }
        }
        for snapshotter in snapshotters {
            let listed =
                self.call_until(&["snapshots", "--snapshotter", snapshotter, "ls"], end)?;
            if let Some(row) = rows(&listed).next() {
                return Ok(Some(format!("snapshots of {snapshotter}: {}", row.key)));
            }
        }
        Ok(None)
    }

    /// Whether `ctr images pull` can do without the transfer service, as before containerd 2 it always did.
    pub(super) fn has_local_pull(&self) -> Result<bool, Failure> {
        Ok(self.call(&["images", "pull", "--help"])?.contains("--local"))
    }

    /// Has containerd remove what nothing needs any more, and its snapshotters, too, before it answers.
    pub(super) fn collect(&self) -> Result<(), Failure> {
        self.run(&["leases", "create", "--id", PASSING_LEASE])?;
        self.run(&["leases", "rm", "--sync", PASSING_LEASE])
    }

    /// Ends and removes a container.
    pub(super) fn remove_container(&self, id: &str) -> Result<(), Failure> {
        self.run(&["tasks", "rm", "--force", id])?;
        self.run(&["containers", "rm", id])
    }

    /// Removes what an experiment left that failed or was stopped: containers, and snapshots that are no image's.
    pub(super) fn clear_containers(&self, snapshotters: &[String]) -> Result<(), Failure> {
        let mut outcome = Ok(());
        for id in lines(&self.last_call(&["containers", "ls", "--quiet"])?) {
            // One that never ran, or has ended, has no task.
            let _ = self.last_call(&["tasks", "rm", "--force", id]);
            outcome = outcome.and(self.last_call(&["containers", "rm", id]).map(drop));
        }
        for snapshotter in snapshotters {
            let of = ["snapshots", "--snapshotter", snapshotter];
            let listed = self.last_call(&[&of[..], &["ls"]].concat())?;
            for row in rows(&listed).filter(|row| row.kind != "Committed") {
                let removed = self.last_call(&[&of[..], &["rm", row.key]].concat());
                outcome = outcome.and(removed.map(drop));
            }
        }
        outcome
    }

    /// Removes all that is in the namespace. What was under way when a call was ended may come to be there for a moment yet.
    pub(super) fn clear(&self, snapshotters: &[String]) -> Result<(), Failure> {
        for _ in 1..CLEAR_ATTEMPTS {
            if self.clear_once(snapshotters).is_ok() {
                return Ok(());
            }
            std::thread::sleep(CLEAR_PAUSE);
        }
        self.clear_once(snapshotters)
    }

    fn clear_once(&self, snapshotters: &[String]) -> Result<(), Failure> {
        let mut outcome = self.clear_containers(snapshotters);
        for what in ["images", "leases"] {
            let removed = self.last_call(&[what, "ls", "--quiet"]).and_then(|listed| {
                let remove = |id| self.last_call(&[what, "rm", "--sync", id]).map(drop);
                lines(&listed).map(remove).fold(Ok(()), Result::and)
            });
            outcome = outcome.and(removed);
        }
        match self.left(snapshotters, End::After(LAST_CALL_MAX))? {
            // What could not be removed has gone by itself.
            None => Ok(()),
            Some(found) => {
                let (namespace, why) = (&self.namespace, outcome.err());
                let why = why.map_or_else(String::new, |failure| format!("; {failure}"));
                Err(Failure::Unfit(format!(
                    "containerd's namespace `{namespace}` is not empty yet ({found}){why}: remove that by ctr"
                )))
            }
        }
    }
}

fn lines(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter(|line| !line.is_empty())
}

/// A line of `ctr snapshots ls`.
#[derive(Debug, PartialEq, Eq)]
struct Row<'a> {
    key: &'a str,
    parent: Option<&'a str>,
    kind: &'a str,
}

fn rows(listed: &str) -> impl Iterator<Item = Row<'_>> {
    listed.lines().skip(1).filter_map(|line| {
        let words: Vec<_> = line.split_whitespace().collect();
        match words[..] {
            [key, parent, kind] => Some(Row { key, parent: Some(parent), kind }),
            [key, kind] => Some(Row { key, parent: None, kind }),
            _ => None,
        }
    })
}

/// The one committed snapshot that none is above, as `ctr snapshots ls` prints them: the root of an image that alone is
/// there.
pub(super) fn highest(listed: &str) -> Option<&str> {
    let committed = || rows(listed).filter(|row| row.kind == "Committed");
    let mut highest =
        committed().filter(|row| committed().all(|other| other.parent != Some(row.key)));
    let only = highest.next()?;
    highest.next().is_none().then_some(only.key)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTED: &str = "KEY          PARENT     KIND\n\
                          sha256:a                Committed\n\
                          sha256:b     sha256:a   Committed\n\
                          container    sha256:b   Active\n";

    #[test]
    fn the_root_of_an_image_is_what_no_layer_is_above() {
        assert_eq!(highest(LISTED), Some("sha256:b"));
        assert_eq!(highest("KEY PARENT KIND\n"), None);
        assert_eq!(highest(&format!("{LISTED}sha256:c Committed\n")), None, "of two images");
    }

    #[test]
    fn a_namespace_in_which_something_is_is_refused_with_what_that_is() {
        let stop = Stop::listen(Duration::from_secs(60)).unwrap();
        let ctr = |program: &str| Ctr {
            program: program.into(),
            address: Some("/nonexistent".into()),
            namespace: "n".to_owned(),
            stop: stop.clone(),
        };
        // What it is called with comes back.
        let said = ctr("echo").call(&["images", "ls"]).unwrap();
        assert_eq!(said.trim(), "--address /nonexistent --namespace n images ls");
        let refused = ctr("echo").begin(&[]).unwrap_err().to_string();
        assert!(
            refused.contains("containers: --address") && refused.contains("--namespace"),
            "{refused}"
        );
        let failed = ctr("false").call(&["images"]).unwrap_err().to_string();
        assert!(failed.contains("--namespace n images` ended with exit status: 1"), "{failed}");
    }
}
