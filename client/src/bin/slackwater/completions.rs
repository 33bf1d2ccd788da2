//! `slackwater completions`, the script by which a shell completes the command, and `slackwater manual`, the pages of
//! `man`.

use std::path::PathBuf;

use clap::{Args, CommandFactory};
use clap_complete::Shell;

use crate::arguments::Arguments;
use crate::failure::Failure;
use crate::output::Output;

/// Prints the script; bash: `source <(slackwater completions bash)`.
#[derive(Debug, Args)]
pub(crate) struct CompletionsArguments {
    /// The shell
    shell: Shell,
}

/// Writes a page for the command, and one for each command of it.
#[derive(Debug, Args)]
pub(crate) struct ManualArguments {
    /// A directory that is there
    directory: PathBuf,
}

pub(crate) fn manual(arguments: &ManualArguments) -> Result<(), Failure> {
    clap_mangen::generate_to(Arguments::command(), &arguments.directory)
        .map_err(|error| Failure::local("write the manual pages to", &arguments.directory, error))
}

pub(crate) fn run(arguments: CompletionsArguments) -> Result<(), Failure> {
    // Into memory first: the generator panics where standard output is closed early.
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut Arguments::command(), "slackwater", &mut script);
    Output::new(false).text(&String::from_utf8_lossy(&script))
}
