//! `slackwater-driver completions`.

use clap::Args;
use clap_complete::Shell;

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
