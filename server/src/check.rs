//! `slackwaterd check`: verifies, and repairs, a store that no server has open.
//!
//! Invariants: a directory without a store is refused, never made into one. Standard output
//! holds the result alone; what is told on the way goes to standard error.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;

use serde::Serialize;
use slackwater_api::types::{CheckReport, Hit};
use slackwater_blockstore::{Error, Options, Rebuilt, RepairReport, Store};

use crate::config::{CheckArguments, Config};
use crate::error::ServerError;
use crate::{logs, options, ownership};

/// What the command prints with `--json`.
#[derive(Debug, Serialize)]
struct Outcome {
    /// As it is now.
    #[serde(flatten)]
    check: CheckReport,
    #[serde(skip_serializing_if = "Option::is_none")]
    rebuilt: Option<RebuiltIndex>,
    /// What a repair did.
    #[serde(skip_serializing_if = "Option::is_none")]
    repair: Option<Repair>,
}

/// What `--rebuild` did.
#[derive(Debug, Serialize)]
struct RebuiltIndex {
    /// The copy of the index that was taken; without one, the log was enough.
    copy: Option<String>,
    copied_entries: u64,
    replayed_commits: u64,
    /// Where the old index is now, if there was one.
    set_aside: Option<PathBuf>,
}

impl From<Rebuilt> for RebuiltIndex {
    fn from(rebuilt: Rebuilt) -> Self {
        let Rebuilt { copy, copied_entries, replayed_commits, set_aside } = rebuilt;
        Self { copy, copied_entries, replayed_commits, set_aside }
    }
}

/// What a repair did.
#[derive(Debug, Serialize)]
struct Repair {
    /// What was wrong before.
    before: CheckReport,
    fixes: u64,
    /// Blocks given up, each counted once for each layer that names it.
    lost_blocks: u64,
    /// Blocks whose content was found stored elsewhere.
    healed_blocks: u64,
}

/// Checks the store of `config`.
///
/// # Errors
/// `NoStore`; `InUse`; `Rebuild` when the index cannot be rebuilt; `Open` when the store cannot be opened; after the
/// outcome was printed `Problems` when something is wrong, and `Owner` when the owner of the data directory does not get
/// what was made in it.
pub fn run(config: &Config, arguments: CheckArguments) -> Result<(), ServerError> {
    logs::start(&config.log, config.log_format).map_err(ServerError::Logs)?;
    if !config.data_dir.join("FORMAT").exists() {
        return Err(ServerError::NoStore { data_dir: config.data_dir.clone() });
    }
    let outcome = carry_out(config, &arguments);
    // Also what a check made that failed.
    let given = ownership::give_to_owner(&config.data_dir);
    let outcome = outcome?;
    print(&outcome, arguments.json)?;
    given.map_err(|source| ServerError::Owner { data_dir: config.data_dir.clone(), source })?;
    if outcome.check.clean { Ok(()) } else { Err(ServerError::Problems) }
}

fn carry_out(config: &Config, arguments: &CheckArguments) -> Result<Outcome, ServerError> {
    let rebuilt = if arguments.rebuild { Some(rebuild(config)?) } else { None };
    let store = Store::open(offline(config)).map_err(|error| not_opened(config, error))?;
    let outcome = match (arguments.repair, arguments.give_up) {
        (true, false) => repaired(store.repair()),
        (true, true) => repaired(store.repair_giving_up()),
        (false, _) => check(&store, arguments.data),
    };
    let closed = store.close().map_err(ServerError::Close);
    let outcome = outcome.map_err(ServerError::Check)?;
    let outcome = Outcome { rebuilt, ..outcome };
    closed?;
    Ok(outcome)
}

/// Makes the index anew, and tells what it was made from.
fn rebuild(config: &Config) -> Result<RebuiltIndex, ServerError> {
    let rebuilt = Store::rebuild_index(&offline(config)).map_err(|error| match error {
        Error::Locked { .. } => ServerError::InUse { data_dir: config.data_dir.clone() },
        error => ServerError::Rebuild(error),
    })?;
    tracing::info!(
        copy = rebuilt.copy.as_deref().unwrap_or("none"),
        copied_entries = rebuilt.copied_entries,
        replayed_commits = rebuilt.replayed_commits,
        "made the index anew"
    );
    Ok(rebuilt.into())
}

fn check(store: &Store, data: bool) -> Result<Outcome, Error> {
    Ok(Outcome { check: store.check(data)?.into(), rebuilt: None, repair: None })
}

fn repaired(report: Result<RepairReport, Error>) -> Result<Outcome, Error> {
    let report = report?;
    let repair = Repair {
        before: report.before.into(),
        fixes: report.fixes,
        lost_blocks: report.lost_blocks,
        healed_blocks: report.healed_blocks,
    };
    Ok(Outcome { check: report.after.into(), rebuilt: None, repair: Some(repair) })
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
fn describe(Outcome { check, rebuilt, repair }: &Outcome) -> String {
    let mut text = rebuilt.as_ref().map(describe_rebuilt).unwrap_or_default();
    if let Some(repair) = repair {
        text.push_str("before the repair:\n");
        list(&mut text, &repair.before);
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{} changes; {} blocks lost, {} healed from another copy\nafter the repair:",
            repair.fixes, repair.lost_blocks, repair.healed_blocks
        );
    }
    list(&mut text, check);
    let verdict = if check.clean { "no problems" } else { "PROBLEMS FOUND" };
    for (name, value) in [
        ("verdict", verdict.to_owned()),
        ("inodes", check.inodes.to_string()),
        ("layers", check.layers.to_string()),
        ("map runs", check.runs.to_string()),
        ("chunks", check.chunks.to_string()),
        ("damaged", check.damaged_chunks.to_string()),
        ("lost", format!("{} blocks", check.lost_blocks)),
        ("files", check.files.to_string()),
        ("data read", format!("{} bytes", check.data_bytes)),
    ] {
        let _ = writeln!(text, "{name:<9}  {value}");
    }
    text
}

fn describe_rebuilt(rebuilt: &RebuiltIndex) -> String {
    let from = match &rebuilt.copy {
        Some(copy) => format!("from {copy} ({} entries) and", rebuilt.copied_entries),
        None => "from".to_owned(),
    };
    let commits = rebuilt.replayed_commits;
    let mut text = format!("made the index anew {from} {commits} commits of the log\n");
    if let Some(aside) = &rebuilt.set_aside {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "the old one is in {}, which may be deleted", aside.display());
    }
    text
}

/// What is wrong, and where files and snapshots are hit by it.
fn list(text: &mut String, check: &CheckReport) {
    let hits: Vec<String> = check.hits.iter().map(Hit::describe).collect();
    let lists = [
        (&check.problems, check.problems_left_out, "more"),
        (&hits, check.hits_left_out, "more places"),
    ];
    for (lines, left_out, more) in lists {
        for line in lines {
            // Names of files are in it, and must not steer the terminal.
            text.extend(line.chars().flat_map(|c| {
                let escaped = c.is_control().then(|| c.escape_default());
                escaped.into_iter().flatten().chain((!c.is_control()).then_some(c))
            }));
            text.push('\n');
        }
        if left_out > 0 {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "... and {left_out} {more}");
        }
    }
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
            files: 5,
            damaged_chunks: 0,
            lost_blocks: 0,
            hits: Vec::new(),
            hits_left_out: 0,
            data_bytes: 0,
        };
        let text = describe(&Outcome { check, rebuilt: None, repair: None });
        let begin = "I7: `a\\u{1b}[2J` has no inode\n... and 7 more\nverdict    PROBLEMS FOUND\n";
        assert!(text.starts_with(begin), "{text}");
    }
}
