//! `slackwater-driver completions`, and `slackwater-driver manual`: what shells and `man` know of the command line.

use std::io;
use std::path::{Path, PathBuf};

use clap::Args;
use clap_complete::Shell;
use clap_mangen::Man;

use super::{definition, print};
use crate::error::DriverError;

/// Prints the completion script of a shell.
#[derive(Clone, Debug, Args)]
pub(super) struct CompletionsArguments {
    /// The shell
    shell: Shell,
}

pub(super) fn run(arguments: &CompletionsArguments) -> Result<(), DriverError> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut definition(), "slackwater-driver", &mut script);
    print(&String::from_utf8_lossy(&script));
    Ok(())
}

/// Where `man` has daemons, and what administrators call.
const SECTION: &str = "8";

/// Writes a page for the program, and one for each command.
#[derive(Clone, Debug, Args)]
pub(super) struct ManualArguments {
    /// A directory that is there
    directory: PathBuf,
}

pub(super) fn manual(arguments: &ManualArguments) -> Result<(), DriverError> {
    let mut command = definition().disable_help_subcommand(true);
    command.build();
    let directory = arguments.directory.as_path();
    pages(&command, directory).map_err(|source| DriverError::Io {
        action: "write the manual pages to",
        path: directory.to_owned(),
        source,
    })
}

fn pages(command: &clap::Command, directory: &Path) -> io::Result<()> {
    for subcommand in command.get_subcommands().filter(|command| !command.is_hide_set()) {
        pages(subcommand, directory)?;
    }
    Man::new(command.clone()).section(SECTION).generate_to(directory).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_command_has_a_page_but_those_that_are_not_for_people() {
        let folder = tempfile::tempdir().unwrap();
        manual(&ManualArguments { directory: folder.path().to_owned() }).unwrap();
        let page = |name: &str| std::fs::read_to_string(folder.path().join(name));
        assert!(page("slackwater-driver.8").unwrap().contains("SLACKWATER_API"));
        assert!(page("slackwater-driver-image-unpublish.8").is_ok());
        assert!(page("slackwater-driver-serve-export.8").is_err());
        let missing = manual(&ManualArguments { directory: folder.path().join("missing") });
        assert!(missing.unwrap_err().to_string().contains("missing"));
    }
}
