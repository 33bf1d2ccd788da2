//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

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
}
