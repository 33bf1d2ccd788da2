//! `slackwaterd completions` and `slackwaterd manual`: what shells and `man` know of the command line.

use std::io::{self, Write};
use std::path::Path;

use clap_complete::Shell;
use clap_mangen::Man;

use crate::config::ParsedCommandLine;
use crate::error::ServerError;

/// Where `man` has daemons, and what administrators call.
const SECTION: &str = "8";

/// Prints the completion script of a shell.
///
/// # Errors
/// `Output`.
pub fn completions(shell: Shell) -> Result<(), ServerError> {
    // Into memory first: the generator panics where standard output is closed early.
    let mut script = Vec::new();
    let mut command = ParsedCommandLine::definition();
    clap_complete::generate(shell, &mut command, "slackwaterd", &mut script);
    let mut stdout = io::stdout().lock();
    stdout.write_all(&script).and_then(|()| stdout.flush()).map_err(ServerError::Output)
}

/// Writes a page for the program, and one for each command, into a directory.
///
/// # Errors
/// `Manual`, when a page cannot be written.
pub fn manual(directory: &Path) -> Result<(), ServerError> {
    let mut command = ParsedCommandLine::definition().disable_help_subcommand(true);
    command.build();
    pages(&command, directory)
        .map_err(|source| ServerError::Manual { directory: directory.to_owned(), source })
}

fn pages(command: &clap::Command, directory: &Path) -> io::Result<()> {
    for subcommand in command.get_subcommands().filter(|command| !command.is_hide_set()) {
        pages(subcommand, directory)?;
    }
    Man::new(command.clone()).section(SECTION).generate_to(directory).map(drop)
}
