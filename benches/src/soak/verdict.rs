//! What a soak tells: progress and the verdict for people, JSON for programs.

use std::io::Write;
use std::path::Path;

use serde::Serialize;

use crate::failure::Failure;

/// Tells what is being done. On standard error: the report alone is on standard output.
pub(super) fn progress(what: &str) {
    // Nobody to tell when standard error is closed.
    let _ = writeln!(std::io::stderr(), "slackwater-bench: soak {what}");
}

/// Prints the report, one figure a line, and writes it to `json` if that is wanted.
pub(super) fn tell(report: &impl Serialize, json: Option<&Path>) -> Result<(), Failure> {
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
}
