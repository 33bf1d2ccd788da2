//! The experiment `compare`: the same work by ours and by its rivals, by turns on one machine.
//!
//! ```text
//! context   what every experiment is given     crate::growth  experiments on what growth costs
//! nfs       experiments over NFS:  series  turns -> rows
//!                                  sides   the servers      crate::load  what is asked of them
//! machine, table   what is told of it          crate::plot    what is drawn of it
//! ```

pub(crate) mod context;
pub(crate) mod machine;
mod nfs;
mod series;
mod sides;
mod table;

use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use crate::appliance;
use crate::arguments::CompareArguments;
use crate::failure::Failure;
use crate::growth;
use crate::plot;
use crate::row::Row;
use crate::stop::Stop;

use context::{Context, Experiment};
pub(crate) use sides::serve_directory;
pub(crate) use table::Comparison;

/// Longest time of all experiments together.
const TIME_MAX: Duration = Duration::from_secs(40 * 60);

/// Runs the experiments that were asked for and prints what they found; answers whether every
/// target was held.
pub(crate) fn run(arguments: &CompareArguments) -> Result<bool, Failure> {
    if arguments.list {
        return list();
    }
    let stop = Stop::listen(TIME_MAX)?;
    let context = context(arguments)?;
    let mut comparison =
        Comparison { machine: machine::describe(&context.directory)?, rows: Vec::new() };
    let outcome = measure(arguments, &context, &mut comparison.rows, &stop);
    // What was measured is told even if the rest was stopped.
    tell(arguments.json.as_deref(), arguments.svg.as_deref(), &comparison)?;
    outcome.map(|()| comparison.held())
}

/// Whether there is an experiment or a row of one with that key.
pub(crate) fn is_known(key: &str) -> bool {
    experiments().any(|experiment| is_of(key, &experiment))
}

/// All experiments, in the order in which they are run.
pub(crate) fn experiments() -> impl Iterator<Item = Experiment> {
    nfs::EXPERIMENTS.into_iter().chain(growth::EXPERIMENTS)
}

/// Tells what is being done. On standard error: the table alone is on standard output.
pub(crate) fn progress(what: &str) {
    // Nobody to tell when standard error is closed.
    let _ = writeln!(std::io::stderr(), "slackwater-bench: {what}");
}

/// Whether the key is that of the experiment or of one of its rows.
fn is_of(key: &str, experiment: &Experiment) -> bool {
    let rest = key.strip_prefix(experiment.key);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
}

fn list() -> Result<bool, Failure> {
    let mut stdout = std::io::stdout().lock();
    for Experiment { key, title, .. } in experiments() {
        writeln!(stdout, "{key:24}{title}").map_err(Failure::on("print the list"))?;
    }
    Ok(true)
}

fn context(arguments: &CompareArguments) -> Result<Context, Failure> {
    let server = match &arguments.server {
        Some(server) => server.clone(),
        None => appliance::beside()?,
    };
    Ok(Context {
        server,
        directory: arguments.directory.clone().unwrap_or_else(std::env::temp_dir),
        rounds: arguments.rounds,
        is_quick: arguments.quick,
        memory: arguments.memory.clone(),
    })
}

/// Runs the experiments one after the other, and keeps the rows that were asked for.
fn measure(
    arguments: &CompareArguments,
    context: &Context,
    rows: &mut Vec<Row>,
    stop: &Stop,
) -> Result<(), Failure> {
    let only = &arguments.only;
    for experiment in experiments() {
        if !only.is_empty() && !only.iter().any(|key| is_of(key, &experiment)) {
            continue;
        }
        progress(experiment.title);
        let found = match (experiment.run)(context, stop) {
            Err(failure) if !failure.is_stop() => vec![not_run(&experiment, &failure)],
            outcome => outcome?,
        };
        // A row that stands for a failure has the experiment's own key.
        let is_wanted = |row: &Row| {
            let is_named = |key: &String| row.key.starts_with(key) || row.key == experiment.key;
            only.is_empty() || only.iter().any(is_named)
        };
        rows.extend(found.into_iter().filter(is_wanted));
    }
    Ok(())
}

/// What stands for the rows of an experiment that failed.
fn not_run(experiment: &Experiment, failure: &Failure) -> Row {
    Row {
        work: experiment.title.to_owned(),
        key: experiment.key.to_owned(),
        unit: String::new(),
        higher_is_better: true,
        subject: "slackwater".to_owned(),
        rival: None,
        samples: Vec::new(),
        rival_samples: Vec::new(),
        target: None,
        not_run: Some(failure.to_string()),
    }
}

/// Prints the table, and writes and draws what was asked for.
pub(crate) fn tell(
    json: Option<&Path>,
    svg: Option<&Path>,
    comparison: &Comparison,
) -> Result<(), Failure> {
    let mut stdout = std::io::stdout().lock();
    write!(stdout, "{comparison}").map_err(Failure::on("print the table"))?;
    if let Some(path) = json {
        let failed = Failure::at("write", path);
        let text = match serde_json::to_string_pretty(comparison) {
            Ok(text) => text + "\n",
            Err(error) => return Err(failed(error.into())),
        };
        std::fs::write(path, text).map_err(failed)?;
    }
    if let Some(directory) = svg {
        plot::draw(directory, &comparison.rows, &comparison.machine)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_key_names_one_experiment() {
        let keys: HashSet<_> = experiments().map(|experiment| experiment.key).collect();
        assert_eq!(keys.len(), experiments().count());
        for key in keys {
            let of_key = experiments().filter(|experiment| is_of(key, experiment));
            assert_eq!(of_key.count(), 1, "{key}");
        }
        assert!(is_known("write-commit") && is_known("write-commit-32"));
        assert!(!is_known("write") && !is_known("write-commits"));
    }

    #[test]
    fn what_failed_is_a_broken_row_of_what_was_asked_for() {
        let Some(experiment) = experiments().next() else {
            panic!("there are no experiments");
        };
        let row = not_run(&experiment, &Failure::Unfit("no disk".to_owned()));
        assert!(!row.held() && is_of(&row.key, &experiment));
    }
}
