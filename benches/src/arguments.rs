//! The command line.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::builder::NonEmptyStringValueParser;
use clap::{Args, Parser, Subcommand};

use crate::compare;
use crate::containers;
use crate::docker;
use crate::soak::SoakCommand;

/// Ends the help text.
const EXIT_CODES: &str = "Exit codes: 0 every promise held, 1 a promise was broken or its rival \
                          was not run, 2 wrong usage, 3 the experiment failed or was stopped";

/// Experiments that hold the promised numbers of Slackwater
#[derive(Debug, Parser)]
#[command(name = "slackwater-bench", version, after_help = EXIT_CODES)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// An experiment.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Latency of snapshot and clone by size, extents and depth, against cp --reflink on XFS
    Clone(CloneArguments),
    /// The same work by Slackwater and by its rivals, by turns: a table, JSON, plots
    Compare(CompareArguments),
    /// Pull, run and diff by this snapshotter and by others of the same containerd, by turns (as root)
    Containers(ContainersArguments),
    /// Pull, run, commit and build by this Docker and by others of the same machine, by turns; a newer docker needs buildx
    Docker(DockerArguments),
    /// Simulate a slower network on one machine: pass TCP connections on, delayed and at a limited rate, until Ctrl-C
    Link(LinkArguments),
    /// Serve a directory by nfsserve: a rival of `compare`, which starts it
    #[command(hide = true)]
    ServeDirectory {
        /// The directory
        directory: PathBuf,
    },
    /// Draw a comparison that was kept with --json of `compare`, `containers` or `docker`
    Plot(PlotArguments),
    /// Hold the latest `cargo bench` against a kept baseline
    Regressions(RegressionsArguments),
    /// Kill or flood a server, and see that nothing is lost
    Soak {
        #[command(subcommand)]
        soak: SoakCommand,
    },
}

/// What `compare` takes.
#[derive(Debug, Args)]
pub(crate) struct CompareArguments {
    /// The server to measure [default: slackwaterd beside this program]
    #[arg(long, value_name = "FILE")]
    pub(crate) server: Option<PathBuf>,

    /// Directory on the file system to measure on [default: that of temporary files]
    #[arg(long = "dir", value_name = "DIR")]
    pub(crate) directory: Option<PathBuf>,

    /// Only these experiments or rows, by their keys
    #[arg(long, value_name = "KEY", value_delimiter = ',', value_parser = known_key)]
    pub(crate) only: Vec<String>,

    /// List the experiments, and run none
    #[arg(long)]
    pub(crate) list: bool,

    /// How often each side has its turn
    #[arg(long, value_name = "COUNT", default_value = "5", value_parser = rounds)]
    pub(crate) rounds: usize,

    /// Less work a turn, for a first look
    #[arg(long)]
    pub(crate) quick: bool,

    /// Memory of our server, as its own --memory takes it
    #[arg(long, value_name = "SIZE", default_value = "2GiB")]
    pub(crate) memory: String,

    /// Write all figures to this file as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,

    /// Draw plots into this directory
    #[arg(long, value_name = "DIR")]
    pub(crate) svg: Option<PathBuf>,
}

/// What `containers` takes.
#[derive(Debug, Args)]
pub(crate) struct ContainersArguments {
    /// The image, as `ctr images pull` takes it, such as docker.io/library/debian:12
    #[arg(long, value_name = "REFERENCE")]
    pub(crate) image: String,

    /// The snapshotter that is measured
    #[arg(long, value_name = "NAME", default_value = "slackwater", value_parser = NonEmptyStringValueParser::new())]
    pub(crate) snapshotter: String,

    /// A snapshotter to compare with; may be repeated
    #[arg(long = "rival", value_name = "NAME", default_value = "overlayfs", value_parser = NonEmptyStringValueParser::new())]
    pub(crate) rivals: Vec<String>,

    /// Socket of the containerd of another worker of the same appliance, for the row `deploy`: it is made to pull the
    /// image before, and to remove it in the end
    #[arg(long, value_name = "FILE")]
    pub(crate) holder: Option<PathBuf>,

    /// Only these rows, by their keys: pull, deploy (with --holder), prepare, run, at-once, diff-fresh, diff-written,
    /// memory
    #[arg(long, value_name = "KEY", value_delimiter = ',', value_parser = known_work)]
    pub(crate) only: Vec<String>,

    /// How often each side has its turn
    #[arg(long, value_name = "COUNT", default_value_t = 7, value_parser = of_range::<1, 100>)]
    pub(crate) rounds: usize,

    /// Containers that run at a time in `at-once` and `memory`
    #[arg(long, value_name = "COUNT", default_value_t = 20, value_parser = of_range::<1, 200>)]
    pub(crate) at_once: usize,

    /// The shell of the image, which has to have true, sleep, sync, head, find and cat
    #[arg(long, value_name = "WORDS", default_value = "/bin/sh")]
    pub(crate) shell: String,

    /// containerd's command
    #[arg(long, value_name = "FILE", default_value = "ctr")]
    pub(crate) ctr: PathBuf,

    /// containerd's socket [default: that of ctr]
    #[arg(long, value_name = "FILE")]
    pub(crate) address: Option<PathBuf>,

    /// containerd's namespace to work in: it has to be empty, and all in it is removed at the end
    #[arg(long, value_name = "NAME", default_value = "slackwater-bench")]
    pub(crate) namespace: String,

    /// Pull by the transfer service of containerd 2, as Kubernetes does there
    #[arg(long)]
    pub(crate) transfer: bool,

    /// The registry speaks no TLS
    #[arg(long)]
    pub(crate) plain_http: bool,

    /// One more argument for `ctr run`, in which {} is the container's name; may be repeated
    #[arg(long = "run-argument", value_name = "WORD", allow_hyphen_values = true)]
    pub(crate) run_arguments: Vec<String>,

    /// Write all figures to this file as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,

    /// Draw plots into this directory
    #[arg(long, value_name = "DIR")]
    pub(crate) svg: Option<PathBuf>,
}

/// What `docker` takes.
#[derive(Debug, Args)]
pub(crate) struct DockerArguments {
    /// The image, as `docker pull` takes it, such as debian:12
    #[arg(long, value_name = "REFERENCE", value_parser = NonEmptyStringValueParser::new())]
    pub(crate) image: String,

    /// The Docker that is measured
    #[arg(long, value_name = "ADDRESS", default_value = "unix:///var/run/docker.sock", value_parser = NonEmptyStringValueParser::new())]
    pub(crate) docker_host: String,

    /// A Docker to compare with, and what to call it, such as overlayfs=unix:///run/other/docker.sock; may be repeated
    #[arg(long = "rival", value_name = "NAME=ADDRESS", required = true, value_parser = named_host)]
    pub(crate) rivals: Vec<NamedHost>,

    /// The Docker of another worker of the same appliance, for the row `deploy`: it is made to pull the image before,
    /// and to remove it in the end
    #[arg(long, value_name = "ADDRESS", value_parser = NonEmptyStringValueParser::new())]
    pub(crate) holder: Option<String>,

    /// Only these rows, by their keys: pull, deploy (with --holder), run, at-once, commit-fresh, commit-written, build-1,
    /// build-4, build-14
    #[arg(long, value_name = "KEY", value_delimiter = ',', value_parser = known_docker_work)]
    pub(crate) only: Vec<String>,

    /// How often each side has its turn
    #[arg(long, value_name = "COUNT", default_value_t = 7, value_parser = of_range::<1, 100>)]
    pub(crate) rounds: usize,

    /// Containers that run at a time in `at-once`
    #[arg(long, value_name = "COUNT", default_value_t = 20, value_parser = of_range::<1, 200>)]
    pub(crate) at_once: usize,

    /// The shell of the image, which has to have true, sleep, sync and head
    #[arg(long, value_name = "WORDS", default_value = "/bin/sh")]
    pub(crate) shell: String,

    /// Docker's command
    #[arg(long, value_name = "FILE", default_value = "docker")]
    pub(crate) docker: PathBuf,

    /// One more argument for `docker run`; may be repeated
    #[arg(long = "run-argument", value_name = "WORD", allow_hyphen_values = true)]
    pub(crate) run_arguments: Vec<String>,

    /// One more argument for `docker build`; may be repeated
    #[arg(long = "build-argument", value_name = "WORD", allow_hyphen_values = true)]
    pub(crate) build_arguments: Vec<String>,

    /// Write all figures to this file as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,

    /// Draw plots into this directory
    #[arg(long, value_name = "DIR")]
    pub(crate) svg: Option<PathBuf>,
}

/// What `link` takes.
#[derive(Debug, Args)]
pub(crate) struct LinkArguments {
    /// Where to listen, and where to pass connections on to, such as 127.0.0.1:8050=127.0.0.1:8049; may be repeated
    #[arg(long = "pass", value_name = "LISTEN=TARGET", required = true, value_parser = pass)]
    pub(crate) passes: Vec<Pass>,

    /// Round trip in milliseconds
    #[arg(long, value_name = "COUNT", default_value_t = 5, value_parser = clap::value_parser!(u64).range(0..=500))]
    pub(crate) round_trip_ms: u64,

    /// Rate in Mbit/s, in each direction, shared by all connections
    #[arg(long, value_name = "COUNT", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub(crate) megabits: u64,
}

/// What is passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pass {
    pub(crate) listen: SocketAddr,
    pub(crate) target: SocketAddr,
}

fn pass(text: &str) -> Result<Pass, String> {
    let parsed = text.split_once('=').and_then(|(listen, target)| {
        Some(Pass { listen: listen.parse().ok()?, target: target.parse().ok()? })
    });
    parsed.ok_or_else(|| {
        let form = "LISTEN=TARGET, an address with a port each";
        format!("expected {form}, such as 127.0.0.1:8050=127.0.0.1:8049")
    })
}

/// A Docker, and what it is called in the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NamedHost {
    pub(crate) name: String,
    /// As `docker --host` takes it.
    pub(crate) address: String,
}

fn named_host(text: &str) -> Result<NamedHost, String> {
    match text.split_once('=') {
        Some((name, address)) if !name.is_empty() && !address.is_empty() => {
            Ok(NamedHost { name: name.to_owned(), address: address.to_owned() })
        }
        _ => {
            Err("expected NAME=ADDRESS, such as overlayfs=unix:///run/other/docker.sock".to_owned())
        }
    }
}

/// The key of a row of `containers`.
fn known_work(text: &str) -> Result<String, String> {
    one_of(text, containers::keys())
}

/// The key of a row of `docker`.
fn known_docker_work(text: &str) -> Result<String, String> {
    one_of(text, docker::keys())
}

fn one_of(
    text: &str,
    mut keys: impl Iterator<Item = &'static str> + Clone,
) -> Result<String, String> {
    let all = keys.clone();
    match keys.any(|key| key == text) {
        true => Ok(text.to_owned()),
        false => Err(format!("expected one of {}", all.collect::<Vec<_>>().join(", "))),
    }
}

/// A number from `LEAST` to `MOST`.
fn of_range<const LEAST: usize, const MOST: usize>(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|number| (LEAST..=MOST).contains(number));
    number.ok_or_else(|| format!("expected a number from {LEAST} to {MOST}"))
}

/// A number of rounds whose median is worth something.
fn rounds(text: &str) -> Result<usize, String> {
    let rounds = text.parse().ok().filter(|rounds| (5..=100).contains(rounds));
    rounds.ok_or_else(|| "expected a number from 5 to 100".to_owned())
}

/// The key of an experiment or of a row.
fn known_key(text: &str) -> Result<String, String> {
    if compare::is_known(text) {
        return Ok(text.to_owned());
    }
    let keys: Vec<_> = compare::experiments().map(|experiment| experiment.key).collect();
    Err(format!("expected one of {}, or a row of one", keys.join(", ")))
}

/// What `plot` takes.
#[derive(Debug, Args)]
pub(crate) struct PlotArguments {
    /// The comparison
    #[arg(long, value_name = "FILE")]
    pub(crate) json: PathBuf,

    /// Where the plots go
    #[arg(long, value_name = "DIR")]
    pub(crate) svg: PathBuf,
}

/// What `regressions` takes.
#[derive(Debug, Args)]
pub(crate) struct RegressionsArguments {
    /// Name under which the baseline was kept
    #[arg(long, value_name = "NAME", default_value = "main")]
    pub(crate) baseline: String,

    /// A bench may take this many times as long as at the baseline
    #[arg(long, value_name = "FACTOR", default_value = "1.25", value_parser = factor)]
    pub(crate) limit: f64,

    /// The figures [default: criterion in the target directory of this program]
    #[arg(long, value_name = "DIR")]
    pub(crate) criterion: Option<PathBuf>,
}

/// A factor of at least 1.
fn factor(text: &str) -> Result<f64, String> {
    let factor = text.parse::<f64>().ok().filter(|factor| factor.is_finite() && *factor >= 1.0);
    factor.ok_or_else(|| "expected a number of at least 1, such as 1.25".to_owned())
}

/// What `clone` takes.
#[derive(Debug, Args)]
pub(crate) struct CloneArguments {
    /// The server to measure [default: slackwaterd beside this program]
    #[arg(long, value_name = "FILE")]
    pub(crate) server: Option<PathBuf>,

    /// Samples of each case
    #[arg(long, value_name = "COUNT", default_value_t = 200,
          value_parser = clap::value_parser!(u32).range(60..=2000))]
    pub(crate) samples: u32,

    /// Write all figures to this file as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,

    /// Leave out cp --reflink=always on XFS, which needs root and mkfs.xfs
    #[arg(long)]
    pub(crate) no_rival: bool,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_sound_and_bounded() {
        Arguments::command().debug_assert();
        let parse = |samples: &str| {
            Arguments::try_parse_from(["slackwater-bench", "clone", "--samples", samples])
        };
        assert!(parse("60").is_ok());
        assert!(parse("59").is_err());
        assert!(parse("2001").is_err());
    }

    #[test]
    fn containers_takes_words_for_ctr_and_refuses_what_it_does_not_know() {
        let parse = |words: &[&str]| {
            let all = ["slackwater-bench", "containers", "--image", "i"].iter().chain(words);
            Arguments::try_parse_from(all.copied())
        };
        let Command::Containers(read) =
            parse(&["--rival", "a", "--rival", "b", "--run-argument", "--cgroup=/x/{}"])
                .unwrap()
                .command
        else {
            panic!("another command");
        };
        assert_eq!(
            (read.rivals, read.run_arguments),
            (vec!["a".into(), "b".into()], vec!["--cgroup=/x/{}".into()])
        );
        for bad in [["--only", "pul"], ["--rounds", "0"], ["--at-once", "201"], ["--rival", ""]] {
            assert!(parse(&bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn link_takes_pairs_of_addresses() {
        let parse = |words: &[&str]| {
            let all = ["slackwater-bench", "link"].iter().chain(words);
            Arguments::try_parse_from(all.copied()).map_err(|error| error.to_string())
        };
        let Command::Link(read) =
            parse(&["--pass", "127.0.0.1:0=10.0.0.1:80", "--pass", "[::1]:1=[::1]:2"])
                .unwrap()
                .command
        else {
            panic!("another command");
        };
        assert_eq!((read.passes.len(), read.round_trip_ms, read.megabits), (2, 5, 1000));
        assert_eq!(read.passes[0].target, ([10, 0, 0, 1], 80).into());
        for bad in ["127.0.0.1:1", "127.0.0.1:1=x:2", "127.0.0.1=127.0.0.1:1", ""] {
            assert!(parse(&["--pass", bad]).unwrap_err().contains("LISTEN=TARGET"), "{bad}");
        }
        assert!(parse(&[]).is_err());
        assert!(parse(&["--pass", "127.0.0.1:0=127.0.0.1:1", "--megabits", "0"]).is_err());
    }

    #[test]
    fn a_limit_below_one_is_refused() {
        let parse = |limit: &str| {
            Arguments::try_parse_from(["slackwater-bench", "regressions", "--limit", limit])
        };
        assert!(parse("1").is_ok());
        for limit in ["0.9", "NaN", "inf", "fast"] {
            assert!(parse(limit).is_err(), "{limit}");
        }
    }
}
