//! The command `slackwater-bench`: experiments that hold promises of SPECIFICATION.md, each
//! against a rival in the same run.
//!
//! ```text
//! arguments -> clone: appliance  a slackwaterd on a temporary store
//!                     cases      files of many sizes, extents and depths on it
//!                     latency    snapshot and clone of each, by turns
//!                     embedded   clone in a store without any server
//!                     reflink    the rival: cp --reflink=always on XFS
//!                     report     table, JSON, verdict
//!              compare, growth   rivals by turns, over NFS and in the store -> row
//!              containers        the same of containerd's snapshotters -> row
//!              docker            the same of two Dockers -> row
//!              link              a slower network, for experiments on one machine
//!              turns             who has the next turn, and the rows of what came of them
//!              plot              rows as SVG
//!              regressions       `cargo bench` held against a kept baseline
//!              soak              a server that is killed or flooded, and loses nothing
//! ```

mod appliance;
mod arguments;
mod cases;
mod clone;
mod compare;
mod containers;
mod docker;
mod embedded;
mod failure;
mod growth;
mod latency;
mod link;
mod load;
mod mount;
mod plot;
mod process;
mod reflink;
mod regressions;
mod report;
mod row;
mod soak;
mod statistics;
mod stop;
mod turns;

use std::process::ExitCode;

use clap::Parser;

use arguments::{Arguments, Command};

/// A promise was broken, or its rival was not run.
const EXIT_BROKEN: u8 = 1;

/// The experiment itself failed or was stopped. (2 is wrong usage, as clap has it.)
const EXIT_FAILURE: u8 = 3;

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Clone(arguments) => clone::run(&arguments),
        Command::Compare(arguments) => compare::run(&arguments),
        Command::Containers(arguments) => containers::run(&arguments),
        Command::Docker(arguments) => docker::run(&arguments),
        Command::Link(arguments) => link::run(&arguments).map(|()| true),
        Command::ServeDirectory { directory } => {
            compare::serve_directory(&directory).map(|()| true)
        }
        Command::Plot(arguments) => plot::run(&arguments).map(|()| true),
        Command::Regressions(arguments) => regressions::run(&arguments),
        Command::Soak { soak } => soak::run(&soak),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(EXIT_BROKEN),
        Err(failure) => {
            eprintln!("slackwater-bench: {failure}");
            ExitCode::from(EXIT_FAILURE)
        }
    }
}
