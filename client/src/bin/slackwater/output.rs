//! What a command prints: results on standard output, everything else on standard error, so
//! that `$(slackwater ...)` in a script holds the result alone.

use std::io::{self, IsTerminal, Write};

use serde::Serialize;
use slackwater_client::types::Timestamp;

use crate::failure::Failure;

/// Where results and remarks go.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Output {
    json: bool,
}

impl Output {
    pub(crate) const fn new(json: bool) -> Self {
        Self { json }
    }

    pub(crate) const fn is_json(self) -> bool {
        self.json
    }

    /// Whether moving pictures (bars, refreshing tables) may be shown on standard error.
    pub(crate) fn is_lively(self) -> bool {
        !self.json && io::stderr().is_terminal()
    }

    /// Prints a result as one line of JSON.
    pub(crate) fn json(self, value: &impl Serialize) -> Result<(), Failure> {
        let text = serde_json::to_string(value).map_err(|error| Failure::Output(error.into()))?;
        self.text(&format!("{text}\n"))
    }

    /// Prints text as it is.
    pub(crate) fn text(self, text: &str) -> Result<(), Failure> {
        let mut stdout = io::stdout().lock();
        stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(Failure::Output)
    }

    /// Prints the result: the value with `--json`, else the text.
    pub(crate) fn result(
        self,
        value: &impl Serialize,
        text: impl FnOnce() -> String,
    ) -> Result<(), Failure> {
        if self.json { self.json(value) } else { self.text(&text()) }
    }

    /// Tells something to the person, never to a program.
    pub(crate) fn remark(self, text: &str) {
        if !self.json {
            // Nobody to tell when standard error is closed.
            let _ = writeln!(io::stderr(), "{}", printable(text));
        }
    }

    /// Tells about a failure.
    pub(crate) fn failure(self, failure: &Failure) {
        let mut stderr = io::stderr().lock();
        // Nobody to tell when standard error is closed.
        if self.json {
            let _ = writeln!(stderr, "{}", failure.to_json());
            return;
        }
        let _ = writeln!(stderr, "slackwater: {}", printable(&failure.to_string()));
        if let Some(hint) = failure.hint() {
            let _ = writeln!(stderr, "  {hint}");
        }
    }
}

/// The text with control characters escaped, so that a file's name cannot steer the terminal.
pub(crate) fn printable(text: &str) -> String {
    text.chars()
        .flat_map(|c| {
            let escaped = c.is_control().then(|| c.escape_default());
            escaped.into_iter().flatten().chain((!c.is_control()).then_some(c))
        })
        .collect()
}

/// The moment to the second, in UTC: `2025-11-21 09:05:47Z`.
pub(crate) fn moment(time: Timestamp) -> String {
    let text = time.to_string();
    match text.split_once('.').unwrap_or((&text, "")).0.split_once('T') {
        Some((day, clock)) => format!("{day} {clock}Z"),
        None => text,
    }
}

/// On which side a column's cells stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Align {
    Left,
    Right,
}

/// A table whose columns are as wide as their widest cell. Printed in pages: a later page with
/// wider cells widens the columns from there on.
#[derive(Debug)]
pub(crate) struct Table {
    columns: Vec<(&'static str, Align)>,
    widths: Vec<usize>,
    has_head: bool,
}

impl Table {
    pub(crate) fn new(columns: &[(&'static str, Align)]) -> Self {
        let widths = columns.iter().map(|(title, _)| title.chars().count()).collect();
        Self { columns: columns.to_vec(), widths, has_head: false }
    }

    /// The next rows, after the titles when they are the first.
    pub(crate) fn page(&mut self, rows: &[Vec<String>]) -> String {
        let rows: Vec<Vec<String>> =
            rows.iter().map(|row| row.iter().map(|cell| printable(cell)).collect()).collect();
        for row in &rows {
            for (width, cell) in self.widths.iter_mut().zip(row) {
                *width = (*width).max(cell.chars().count());
            }
        }
        let mut text = String::new();
        if !self.has_head && !rows.is_empty() {
            let titles: Vec<String> =
                self.columns.iter().map(|(title, _)| (*title).to_owned()).collect();
            text.push_str(&self.line(&titles));
            self.has_head = true;
        }
        rows.iter().for_each(|row| text.push_str(&self.line(row)));
        text
    }

    fn line(&self, cells: &[String]) -> String {
        let mut line = String::new();
        for ((cell, &width), (_, align)) in cells.iter().zip(&self.widths).zip(&self.columns) {
            if !line.is_empty() {
                line.push_str("  ");
            }
            match align {
                Align::Left => line.push_str(&format!("{cell:<width$}")),
                Align::Right => line.push_str(&format!("{cell:>width$}")),
            }
        }
        format!("{}\n", line.trim_end())
    }
}

/// A JSON array that is printed while its items come; prints nothing without `--json`.
#[derive(Debug)]
pub(crate) struct JsonList {
    output: Output,
    is_begun: bool,
}

impl JsonList {
    pub(crate) const fn new(output: Output) -> Self {
        Self { output, is_begun: false }
    }

    pub(crate) fn items(&mut self, items: &[impl Serialize]) -> Result<(), Failure> {
        if !self.output.json {
            return Ok(());
        }
        let mut text = String::new();
        for item in items {
            text.push_str(if self.is_begun { ",\n" } else { "[" });
            self.is_begun = true;
            let json =
                serde_json::to_string(item).map_err(|error| Failure::Output(error.into()))?;
            text.push_str(&json);
        }
        self.output.text(&text)
    }

    /// Ends the array.
    pub(crate) fn finish(self) -> Result<(), Failure> {
        match (self.output.json, self.is_begun) {
            (false, _) => Ok(()),
            (true, true) => self.output.text("]\n"),
            (true, false) => self.output.text("[]\n"),
        }
    }
}

/// Names and values, one a line, the values aligned.
pub(crate) fn fields(pairs: &[(&str, String)]) -> String {
    let width = pairs.iter().map(|(name, _)| name.chars().count()).max().unwrap_or_default();
    pairs.iter().map(|(name, value)| format!("{name:<width$}  {}\n", printable(value))).collect()
}

/// The value, or a dash.
pub(crate) fn or_dash(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

/// `part` of `whole` as a percentage with one digit.
pub(crate) fn percent(part: u64, whole: u64) -> String {
    if whole == 0 {
        return "-".to_owned();
    }
    let tenths = (u128::from(part) * 1000 + u128::from(whole) / 2) / u128::from(whole);
    format!("{}.{} %", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_aligned_over_its_pages() {
        let mut table = Table::new(&[("PATH", Align::Left), ("SIZE", Align::Right)]);
        let row = |path: &str, size: &str| vec![path.to_owned(), size.to_owned()];
        let first = table.page(&[row("a.img", "8.0 GiB"), row("b", "0 B")]);
        assert_eq!(first, "PATH      SIZE\na.img  8.0 GiB\nb          0 B\n");
        assert_eq!(table.page(&[row("longer.img", "1 B")]), "longer.img      1 B\n");
        assert_eq!(Table::new(&[("PATH", Align::Left)]).page(&[]), "");
    }

    #[test]
    fn fields_are_aligned() {
        let pairs = [("path", "a".to_owned()), ("size_bytes", "7".to_owned())];
        assert_eq!(fields(&pairs), "path        a\nsize_bytes  7\n");
    }

    #[test]
    fn a_name_cannot_steer_the_terminal() {
        assert_eq!(printable("a\u{1b}[2Jb\n\u{e9}"), "a\\u{1b}[2Jb\\n\u{e9}");
    }

    #[test]
    fn moments_and_percentages_are_short() {
        assert_eq!(
            moment(Timestamp::from_nanos(1_763_715_947_000_000_001)),
            "2025-11-21 09:05:47Z"
        );
        assert_eq!(percent(1, 3), "33.3 %");
        assert_eq!(percent(2, 3), "66.7 %");
        assert_eq!(percent(1, 0), "-");
        assert_eq!(percent(u64::MAX, u64::MAX), "100.0 %");
    }
}
