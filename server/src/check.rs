//! `slackwaterd check`: verifies a store that no server has open.
//!
//! Invariants: a directory without a store is refused, never made into one. Standard output
//! holds the result alone; what is told on the way goes to standard error.

use std::fmt::Write as _;
use std::io::Write as _;

use serde::Serialize;
use slackwater_api::types::CheckReport;
use slackwater_blockstore::{Error, Options, Store};

use crate::config::{CheckArguments, Config};
use crate::error::ServerError;
use crate::{logs, options};

/// What the command prints with `--json`.
#[derive(Debug, Serialize)]
struct Outcome {
    #[serde(flatten)]
    check: CheckReport,
}

/// Checks the store of `config`.
///
/// # Errors
/// `NoStore`; `InUse`; `Open` when the store cannot be opened; `Problems` when something is wrong, after
/// it was printed.
pub fn run(config: &Config, arguments: CheckArguments) -> Result<(), ServerError> {
    logs::start(&config.log, config.log_format).map_err(ServerError::Logs)?;
    if !config.data_dir.join("FORMAT").exists() {
        return Err(ServerError::NoStore { data_dir: config.data_dir.clone() });
    }
    let store = Store::open(offline(config)).map_err(|error| not_opened(config, error))?;
    let check = store.check(arguments.data).map(CheckReport::from);
    let closed = store.close().map_err(ServerError::Close);
    let outcome = Outcome { check: check.map_err(ServerError::Check)? };
    closed?;
    print(&outcome, arguments.json)?;
    if outcome.check.clean { Ok(()) } else { Err(ServerError::Problems) }
}

fn not_opened(config: &Config, source: Error) -> ServerError {
    let data_dir = config.data_dir.clone();
    match source {
        Error::Locked { .. } => ServerError::InUse { data_dir },
        source => ServerError::Open { data_dir, source },
    }
}

/// The store's options, for one thread that changes nothing by itself.
fn offline(config: &Config) -> Options {
    Options { background: false, ..options::store(config) }
}

fn print(outcome: &Outcome, json: bool) -> Result<(), ServerError> {
    let text = if json {
        let text = serde_json::to_string(outcome);
        text.map_err(|error| ServerError::Output(error.into()))? + "\n"
    } else {
        describe(outcome)
    };
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(ServerError::Output)
}

/// The text for people: what is wrong, then the verdict, then what was looked at.
fn describe(Outcome { check }: &Outcome) -> String {
    let mut text = String::new();
    for problem in &check.problems {
        // Names of files are in it, and must not steer the terminal.
        text.extend(problem.chars().flat_map(|c| {
            let escaped = c.is_control().then(|| c.escape_default());
            escaped.into_iter().flatten().chain((!c.is_control()).then_some(c))
        }));
        text.push('\n');
    }
    if check.problems_left_out > 0 {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "... and {} more", check.problems_left_out);
    }
    let verdict = if check.clean { "no problems" } else { "PROBLEMS FOUND" };
    for (name, value) in [
        ("verdict", verdict.to_owned()),
        ("inodes", check.inodes.to_string()),
        ("layers", check.layers.to_string()),
        ("map runs", check.runs.to_string()),
        ("chunks", check.chunks.to_string()),
        ("data read", format!("{} bytes", check.data_bytes)),
    ] {
        let _ = writeln!(text, "{name:<9}  {value}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn problems_come_first_and_steer_no_terminal() {
        let check = CheckReport {
            clean: false,
            problems: vec!["I7: `a\x1b[2J` has no inode".to_owned()],
            problems_left_out: 7,
            inodes: 1,
            layers: 2,
            runs: 3,
            chunks: 4,
            data_bytes: 0,
        };
        let text = describe(&Outcome { check });
        let begin = "I7: `a\\u{1b}[2J` has no inode\n... and 7 more\nverdict    PROBLEMS FOUND\n";
        assert!(text.starts_with(begin), "{text}");
    }
}
