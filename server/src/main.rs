//! `slackwaterd`, the Slackwater appliance's daemon.

use std::io::Write;
use std::process::ExitCode;

use rustix::fs::Mode;
use slackwater_server::config::{self, Command, ConfigCommand, ParsedCommandLine};
use slackwater_server::error::ServerError;
use slackwater_server::{certificate_command, check, heaps, help_files, run, token_command};

fn main() -> ExitCode {
    // Before any thread is there, and anything is open.
    heaps::limit();
    // What is made in the data directory is every client's disk: also where others may enter it, it is for this user alone.
    rustix::process::umask(Mode::RWXG | Mode::RWXO);
    let parsed = match ParsedCommandLine::parse(std::env::args_os()) {
        Ok(parsed) => parsed,
        // Prints help and version too, and ends with 0 after those and 2 after a fault.
        Err(error) => error.exit(),
    };
    match carry_out(&parsed) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The name on each line: those who read a journal search for it. Nothing can be done when
            // standard error is gone.
            for line in error.to_string().lines() {
                let _ = writeln!(std::io::stderr(), "slackwaterd: {line}");
            }
            ExitCode::from(error.exit_code())
        }
    }
}

/// Does what the command line asks for.
fn carry_out(parsed: &ParsedCommandLine) -> Result<(), ServerError> {
    match &parsed.line.command {
        None => run::run(config::load(parsed)?.config),
        // Not with the whole configuration: the token file may not be there yet.
        Some(Command::Token(command)) => token_command::run(parsed, command),
        Some(Command::Completions { shell }) => help_files::completions(*shell),
        Some(Command::Manual { directory }) => help_files::manual(directory),
        // Before there is a configuration.
        Some(Command::Certificate(arguments)) => certificate_command::run(arguments),
        Some(Command::Check(arguments)) => check::run(&config::load(parsed)?.config, *arguments),
        Some(Command::Config(ConfigCommand::Check)) => {
            let loaded = config::load(parsed)?;
            // A reader that closed its end early, such as `head`, wants no more.
            let _ = write!(std::io::stdout(), "{}", loaded.shown);
            for finding in &loaded.config.findings {
                let _ = writeln!(std::io::stderr(), "slackwaterd: warning: {finding}");
            }
            run::check_tls(&loaded.config)
        }
    }
}
