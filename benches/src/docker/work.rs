//! What is measured: each by one or more calls for each side, taken by turns.

use std::fmt::Write as _;
use std::path::PathBuf;

use super::Bench;
use super::client::{Docker, MARK};
use crate::failure::Failure;
use crate::turns::{SETTLE, for_each_at_once, timed};

/// Something that gives a row for each rival.
pub(super) struct Work {
    /// What `--only` takes.
    pub(super) key: &'static str,
    pub(super) needs: Needs,
    pub(super) title: fn(&Bench<'_>) -> String,
    /// One value of a side, in milliseconds.
    pub(super) sample: fn(&Bench<'_>, &Docker) -> Result<f64, Failure>,
}

/// What is to be there before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Needs {
    /// Not the image.
    NoImage,
    /// The image, at another worker of the appliance, and not here.
    Holder,
    Image,
}

/// Bytes that a container writes before it is committed.
const WRITTEN_BYTES: u64 = 20_000_000;

/// How long a container stays that is removed before.
const STAYS: &str = "exec sleep 3600";

/// All of them, in the order in which they are run.
pub(super) const WORK: [Work; 9] = [
    Work {
        key: "pull",
        needs: Needs::NoImage,
        title: |bench| format!("docker pull {}", bench.image()),
        sample: |bench, docker| pull(bench, docker, || Ok(())),
    },
    Work {
        key: "deploy",
        needs: Needs::Holder,
        title: |bench| {
            format!("docker pull and run --rm of {}, which another worker has", bench.image())
        },
        sample: deploy,
    },
    Work {
        key: "run",
        needs: Needs::Image,
        title: |_| "docker run --rm".to_owned(),
        sample: |bench, docker| timed(|| bench.run(docker)),
    },
    Work {
        key: "at-once",
        needs: Needs::Image,
        title: |bench| format!("docker run --rm of {} at once", bench.arguments.at_once),
        sample: run_at_once,
    },
    Work {
        key: "commit-fresh",
        needs: Needs::Image,
        title: |_| "docker commit of a fresh container".to_owned(),
        sample: |bench, docker| commit(bench, docker, None),
    },
    Work {
        key: "commit-written",
        needs: Needs::Image,
        title: |_| {
            format!("docker commit of a container that wrote {} MB", WRITTEN_BYTES / 1_000_000)
        },
        sample: |bench, docker| commit(bench, docker, Some(WRITTEN_BYTES)),
    },
    Work {
        key: "build-1",
        needs: Needs::Image,
        title: |_| "docker build of 1 RUN".to_owned(),
        sample: |bench, docker| build(bench, docker, 1),
    },
    Work {
        key: "build-4",
        needs: Needs::Image,
        title: |_| "docker build of 4 RUN".to_owned(),
        sample: |bench, docker| build(bench, docker, 4),
    },
    Work {
        key: "build-14",
        needs: Needs::Image,
        title: |_| "docker build of 14 RUN".to_owned(),
        sample: |bench, docker| build(bench, docker, 14),
    },
];

/// The pull, and what is done then.
fn pull(
    bench: &Bench<'_>,
    docker: &Docker,
    then: impl FnOnce() -> Result<(), Failure>,
) -> Result<f64, Failure> {
    let took = timed(|| docker.run(&["pull", "--quiet", bench.image()]).and_then(|()| then()))?;
    docker.run(&["image", "rm", bench.image()])?;
    Ok(took)
}

/// The first container of an image. What the turn before has mounted is not any more.
fn deploy(bench: &Bench<'_>, docker: &Docker) -> Result<f64, Failure> {
    docker.stop.pause(SETTLE)?;
    pull(bench, docker, || bench.run(docker))
}

fn run_at_once(bench: &Bench<'_>, docker: &Docker) -> Result<f64, Failure> {
    let all = vec![docker; bench.arguments.at_once];
    timed(|| for_each_at_once(&all, |docker| bench.run(docker)))
}

fn commit(bench: &Bench<'_>, docker: &Docker, written_bytes: Option<u64>) -> Result<f64, Failure> {
    let (container, image) = (format!("{MARK}-{}", bench.name()), bench.image_name());
    bench.begin(docker, &["--detach", "--name", &container], STAYS)?;
    if let Some(bytes) = written_bytes {
        let write = format!("head -c {bytes} /dev/urandom >/{MARK} && sync");
        let mut words = vec!["exec", "--user", "0", &container];
        words.extend(bench.shell());
        words.extend(["-c", &write]);
        docker.run(&words)?;
    }
    let took = timed(|| docker.run(&["commit", &container, &image]))?;
    docker.run(&["rm", "--force", "--volumes", &container])?;
    docker.run(&["image", "rm", &image])?;
    Ok(took)
}

fn build(bench: &Bench<'_>, docker: &Docker, steps: usize) -> Result<f64, Failure> {
    let (image, context) = (bench.image_name(), bench.context(steps)?);
    let context = context.to_string_lossy();
    // Without the cache, or the second turn would do nothing.
    let mut words = vec!["build", "--no-cache", "--tag", &image];
    words.extend(bench.arguments.build_arguments.iter().map(String::as_str));
    words.push(&context);
    let took = timed(|| docker.run(&words))?;
    docker.run(&["image", "rm", &image])?;
    Ok(took)
}

impl Bench<'_> {
    /// Runs a container that does nothing, and is removed when it has ended.
    fn run(&self, docker: &Docker) -> Result<(), Failure> {
        self.begin(docker, &["--rm"], "true")
    }

    /// Starts a container with a line of a shell.
    fn begin(&self, docker: &Docker, how: &[&str], line: &str) -> Result<(), Failure> {
        let mut words = vec!["run", "--label", MARK];
        words.extend(how);
        words.extend(self.arguments.run_arguments.iter().map(String::as_str));
        let shell = self.shell();
        // In place of what the image would start.
        words.extend(["--entrypoint", shell.first().copied().unwrap_or_default(), self.image()]);
        words.extend(shell.iter().skip(1));
        words.extend(["-c", line]);
        docker.run(&words)
    }

    fn image_name(&self) -> String {
        format!("{MARK}:{}", self.name())
    }

    /// A directory whose Dockerfile has so many steps, each of which writes a file.
    fn context(&self, steps: usize) -> Result<PathBuf, Failure> {
        let directory = self.contexts.path().join(steps.to_string());
        let dockerfile = dockerfile(self.image(), &self.shell(), steps);
        let made = std::fs::create_dir_all(&directory)
            .and_then(|()| std::fs::write(directory.join("Dockerfile"), dockerfile));
        made.map_err(Failure::at("write", &directory))?;
        Ok(directory)
    }
}

fn dockerfile(image: &str, shell: &[&str], steps: usize) -> String {
    let mut text = format!("FROM {image}\nUSER 0\n");
    for step in 1..=steps {
        let line = format!("echo {step} >/{MARK}-{step}");
        let words: Vec<_> = shell.iter().copied().chain(["-c", &line]).collect();
        // Writing to a string does not fail.
        let _ = writeln!(text, "RUN {}", serde_json::json!(words));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_has_as_many_steps_as_asked_for_by_the_shell_of_the_image() {
        let text = dockerfile("debian:12", &["/bin/busybox", "sh"], 2);
        assert_eq!(
            text,
            "FROM debian:12\nUSER 0\n\
             RUN [\"/bin/busybox\",\"sh\",\"-c\",\"echo 1 >/slackwater-bench-1\"]\n\
             RUN [\"/bin/busybox\",\"sh\",\"-c\",\"echo 2 >/slackwater-bench-2\"]\n"
        );
    }
}
