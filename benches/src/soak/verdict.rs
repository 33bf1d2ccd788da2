//! What a soak tells: progress and the verdict for people, JSON for programs.

use std::io::Write;
use std::path::Path;
use std::thread::ScopedJoinHandle;

use serde::Serialize;
use slackwater_client::types::CheckReport;
use tempfile::TempDir;

use crate::failure::Failure;

/// Tells what is being done. On standard error: the report alone is on standard output.
pub(super) fn progress(what: &str) {
    // Nobody to tell when standard error is closed.
    let _ = writeln!(std::io::stderr(), "slackwater-bench: soak {what}");
}

/// Prints the report, one figure a line, and writes it to `json` if that is wanted.
fn tell(report: &impl Serialize, json: Option<&Path>) -> Result<(), Failure> {
    let failed = |error: serde_json::Error| Failure::on("write the report")(error.into());
    let value = serde_json::to_value(report).map_err(failed)?;
    let mut lines = String::new();
    write_lines(&mut lines, "", &value);
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(lines.as_bytes()).map_err(Failure::on("print the report"))?;
    let Some(path) = json else { return Ok(()) };
    let text = serde_json::to_string_pretty(&value).map_err(failed)?;
    std::fs::write(path, text + "\n").map_err(Failure::at("write", path))
}

/// A folder for data and log, below `directory` if one is given.
pub(super) fn folder(directory: Option<&Path>) -> Result<TempDir, Failure> {
    let folder = match directory {
        Some(directory) => TempDir::with_prefix_in("soak-", directory),
        None => TempDir::with_prefix("slackwater-soak-"),
    };
    folder.map_err(Failure::on("make a temporary folder"))
}

/// How the threads of clients ended, those that ended well left out.
pub(super) fn ends(threads: Vec<ScopedJoinHandle<'_, Result<(), String>>>) -> Vec<String> {
    let ends = threads.into_iter().map(|thread| match thread.join() {
        Ok(ended) => ended.err(),
        Err(_) => Some("a client of the soak panicked".to_owned()),
    });
    ends.flatten().collect()
}

/// What the server's own check found; nothing is right.
pub(super) fn problems(report: CheckReport) -> Vec<String> {
    if !report.clean && report.problems.is_empty() {
        return vec!["not clean, and no problem is named".to_owned()];
    }
    report.problems
}

/// Tells how a soak ended, and answers whether it `is_sound`. The folder of one that is not, or that failed, is kept;
/// that of one that was interrupted is not.
pub(super) fn conclude(
    folder: TempDir,
    outcome: Result<(), Failure>,
    is_sound: bool,
    report: &impl Serialize,
    json: Option<&Path>,
) -> Result<bool, Failure> {
    let is_failed = outcome.as_ref().is_err_and(|failure| !matches!(failure, Failure::Interrupted));
    if is_failed || !is_sound {
        let kept = folder.keep();
        progress(&format!("data and log are kept in {}", kept.display()));
    }
    tell(report, json)?;
    outcome?;
    Ok(is_sound)
}

/// The figures of a value, those of its parts under the names of these.
fn write_lines(lines: &mut String, name: &str, value: &serde_json::Value) {
    match value {
        serde_json::Value::Object(parts) => {
            for (part, value) in parts {
                let name = if name.is_empty() { part.clone() } else { format!("{name}.{part}") };
                write_lines(lines, &name, value);
            }
        }
        serde_json::Value::Array(items) if items.is_empty() => {
            lines.push_str(&format!("{:34} none\n", name.replace('_', " ")));
        }
        serde_json::Value::Array(items) => {
            items.iter().for_each(|item| write_lines(lines, name, item));
        }
        serde_json::Value::String(text) => {
            lines.push_str(&format!("{:34} {text}\n", name.replace('_', " ")));
        }
        other => lines.push_str(&format!("{:34} {other}\n", name.replace('_', " "))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_figure_has_a_line() {
        let value = serde_json::json!({
            "seed": 7, "did": { "writes": 3 }, "losses": [], "problems": ["a", "b"],
        });
        let mut lines = String::new();
        write_lines(&mut lines, "", &value);
        let words: Vec<Vec<&str>> =
            lines.lines().map(|line| line.split_whitespace().collect()).collect();
        let has = |line: &[&str]| words.iter().any(|words| words == line);
        assert!(has(&["seed", "7"]) && has(&["did.writes", "3"]) && has(&["losses", "none"]));
        assert!(has(&["problems", "a"]) && has(&["problems", "b"]));
    }

    #[test]
    fn a_check_that_is_not_clean_is_a_problem_by_itself() {
        let found = |clean, named: &[&str]| {
            let value = serde_json::json!({
                "clean": clean, "problems": named, "problems_left_out": 0,
                "inodes": 0, "layers": 0, "runs": 0, "chunks": 0, "data_bytes": 0,
            });
            problems(serde_json::from_value(value).unwrap())
        };
        assert!(found(true, &[]).is_empty());
        assert_eq!(found(false, &["I1 a"]), ["I1 a"]);
        assert_eq!(found(false, &[]).len(), 1);
    }
}
