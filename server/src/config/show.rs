//! The effective configuration as text, secrets redacted: a configuration file that gives the
//! same settings again, each with the layer that it came from.

use std::fmt::Write;

use clap::CommandFactory;
use clap::parser::ValueSource;

use super::command_line::{CommandLine, ParsedCommandLine};
use super::settings::Settings;

/// The text that `slackwaterd config check` prints.
///
/// # Errors
/// A value that TOML cannot hold, such as a path that is not UTF-8.
pub(super) fn show(
    parsed: &ParsedCommandLine,
    file: &Settings,
    effective: &Settings,
) -> Result<String, toml::ser::Error> {
    let in_file = toml::Table::try_from(file)?;
    let lines = toml::to_string(effective)?;
    let width = lines.lines().map(str::len).max().unwrap_or(0);
    let mut text = String::new();
    let mut set = Vec::new();
    for line in lines.lines() {
        let key = line.split(" = ").next().unwrap_or(line);
        let origin = match parsed.source_of(key) {
            Some(ValueSource::CommandLine) => "flag",
            Some(ValueSource::EnvVariable) => "environment",
            _ if in_file.contains_key(key) => "file",
            _ => "default",
        };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{line:width$}  # {origin}");
        set.push(key);
    }
    let unset: Vec<_> =
        setting_keys().into_iter().filter(|key| !set.contains(&key.as_str())).collect();
    if !unset.is_empty() {
        let _ = writeln!(text, "# not set: {}", unset.join(", "));
    }
    Ok(text)
}

/// The key of every setting.
fn setting_keys() -> Vec<String> {
    CommandLine::command()
        .get_arguments()
        .filter_map(|argument| argument.get_long())
        .filter(|name| *name != "config")
        .map(str::to_owned)
        .collect()
}
