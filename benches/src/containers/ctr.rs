//! `ctr`, containerd's command, in a namespace of its own that begins and ends empty.

use std::path::PathBuf;
use std::process::Command;

use crate::failure::Failure;
use crate::process::{command, output_until};
use crate::stop::Stop;

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

    /// Runs `ctr`, which must succeed, and answers its standard output.
    pub(super) fn call(&self, words: &[&str]) -> Result<String, Failure> {
        output_until(&mut self.command(words), Some(&self.stop))
    }

    /// The same also when the experiment has been stopped.
    fn call_at_the_end(&self, words: &[&str]) -> Result<String, Failure> {
        output_until(&mut self.command(words), None)
    }

    /// A call about the snapshots of a snapshotter.
    pub(super) fn snapshots(&self, snapshotter: &str, words: &[&str]) -> Result<String, Failure> {
        self.call(&[&["snapshots", "--snapshotter", snapshotter], words].concat())
    }

    /// Refuses a namespace in which something is: at the end all is removed.
    pub(super) fn require_empty(&self) -> Result<(), Failure> {
        for what in ["images", "containers"] {
            let listed = self.call(&[what, "ls", "--quiet"])?;
            if let Some(first) = listed.lines().next() {
                let namespace = &self.namespace;
                return Err(Failure::Unfit(format!(
                    "containerd's namespace `{namespace}` is not empty ({what}: {first}), and what is in it would be \
                     removed at the end: give another one by --namespace, or remove that"
                )));
            }
        }
        Ok(())
    }

    /// Whether `ctr images pull` can do without the transfer service, as before containerd 2 it always did.
    pub(super) fn has_local_pull(&self) -> Result<bool, Failure> {
        Ok(self.call(&["images", "pull", "--help"])?.contains("--local"))
    }

    /// Ends and removes a container.
    pub(super) fn remove_container(&self, id: &str) -> Result<(), Failure> {
        self.call(&["tasks", "rm", "--force", id])?;
        self.call(&["containers", "rm", id]).map(drop)
    }

    /// Removes an image, and what only it needs, before it answers.
    pub(super) fn remove_image(&self, image: &str) -> Result<(), Failure> {
        self.call(&["images", "rm", "--sync", image]).map(drop)
    }

    /// Removes all that is in the namespace, also what an experiment left that failed or was stopped.
    pub(super) fn clear(&self, snapshotters: &[String]) -> Result<(), Failure> {
        for id in lines(&self.call_at_the_end(&["containers", "ls", "--quiet"])?) {
            // One that never ran, or has ended, has no task.
            let _ = self.call_at_the_end(&["tasks", "rm", "--force", id]);
            self.call_at_the_end(&["containers", "rm", id])?;
        }
        for snapshotter in snapshotters {
            let of = ["snapshots", "--snapshotter", snapshotter];
            let listed = self.call_at_the_end(&[&of[..], &["ls"]].concat())?;
            for row in rows(&listed).filter(|row| row.kind == "Active") {
                self.call_at_the_end(&[&of[..], &["rm", row.key]].concat())?;
            }
        }
        for image in lines(&self.call_at_the_end(&["images", "ls", "--quiet"])?) {
            self.call_at_the_end(&["images", "rm", "--sync", image])?;
        }
        Ok(())
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
    fn a_failed_call_says_what_ctr_said() {
        let stop = Stop::listen(std::time::Duration::from_secs(60)).unwrap();
        let ctr = |program: &str| Ctr {
            program: program.into(),
            address: Some("/nonexistent".into()),
            namespace: "n".to_owned(),
            stop: stop.clone(),
        };
        // What it is called with comes back.
        let said = ctr("echo").call(&["images", "ls"]).unwrap();
        assert_eq!(said.trim(), "--address /nonexistent --namespace n images ls");
        assert!(ctr("echo").require_empty().unwrap_err().to_string().contains("--namespace"));
        assert!(ctr("false").call(&[]).is_err());
    }
}
