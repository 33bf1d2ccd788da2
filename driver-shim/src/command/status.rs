//! `slackwater-driver status`: what the daemon has.

use serde_json::Value;

use super::{Format, print};
use crate::engine::daemon::Daemon;
use crate::error::DriverError;
use crate::settings::Config;

pub(super) async fn run(config: &Config, format: Format) -> Result<(), DriverError> {
    let status = Daemon::new(&config.control_socket).status().await?;
    if format == Format::Json {
        print(&format!("{status:#}\n"));
    } else {
        let mut lines = Vec::new();
        flatten("", &status, &mut lines);
        let width = lines.iter().map(|(key, _)| key.len()).max().unwrap_or_default();
        let lines: String =
            lines.iter().map(|(key, value)| format!("{key:width$}  {value}\n")).collect();
        print(&lines);
    }
    Ok(())
}

/// One line a value, named by the way to it.
fn flatten(name: &str, value: &Value, lines: &mut Vec<(String, String)>) {
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                let name = if name.is_empty() { key.clone() } else { format!("{name}.{key}") };
                flatten(&name, value, lines);
            }
        }
        Value::Null => {}
        Value::String(text) => lines.push((name.to_owned(), text.clone())),
        other => lines.push((name.to_owned(), other.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_values_are_lines() {
        let mut lines = Vec::new();
        flatten("", &serde_json::json!({ "a": { "b": 1 }, "c": "x", "d": null }), &mut lines);
        let lines: Vec<_> =
            lines.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        assert_eq!(lines, [("a.b", "1"), ("c", "x")]);
    }
}
