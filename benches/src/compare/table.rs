//! The table of a comparison.

use std::fmt;

use serde::Serialize;

use crate::plot::short;
use crate::row::{Row, Target};

/// What a comparison found, and where.
#[derive(Debug, Serialize)]
pub(crate) struct Comparison {
    pub(crate) machine: String,
    pub(crate) rows: Vec<Row>,
}

/// The columns, and whether they hold numbers.
const COLUMNS: [(&str, bool); 9] = [
    ("", false),
    ("work", false),
    ("unit", false),
    ("median", true),
    ("against", false),
    ("median", true),
    ("ratio", true),
    ("of rounds", true),
    ("target", true),
];

/// The texts of a row in the columns.
type Cells = [String; COLUMNS.len()];

impl Comparison {
    /// Whether everything was run and held.
    pub(crate) fn held(&self) -> bool {
        self.rows.iter().all(Row::held)
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}\n", self.machine)?;
        let head = COLUMNS.map(|(title, _)| title.to_owned());
        let lines: Vec<_> = std::iter::once(head).chain(self.rows.iter().map(cells)).collect();
        let width = |column: usize| lines.iter().map(|cells| cells[column].len()).max();
        let widths: Vec<_> = (0..COLUMNS.len()).map(|column| width(column).unwrap_or(0)).collect();
        for cells in &lines {
            let mut line = String::new();
            for ((cell, width), (_, is_number)) in cells.iter().zip(&widths).zip(COLUMNS) {
                let cell =
                    if is_number { format!("{cell:>width$}") } else { format!("{cell:width$}") };
                line.push_str(&cell);
                line.push_str("  ");
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        for row in &self.rows {
            if let Some(reason) = &row.not_run {
                writeln!(f, "\nNOT RUN  {}: {reason}", row.key)?;
            }
        }
        Ok(())
    }
}

fn cells(row: &Row) -> Cells {
    let verdict = match (&row.not_run, row.held(), row.target) {
        (Some(_), _, _) => "NOT RUN",
        (None, false, _) => "BROKEN",
        (None, true, Some(_)) => "held",
        (None, true, None) => "",
    };
    // Almost always it is the whole of ours.
    let work = match row.subject.as_str() {
        "slackwater" => row.work.clone(),
        subject => format!("{}: {subject}", row.work),
    };
    let number = |value: Option<f64>| value.map(short).unwrap_or_default();
    let spread = row.spread().map(|(least, most)| format!("{}-{}x", short(least), short(most)));
    [
        verdict.to_owned(),
        work,
        row.unit.clone(),
        number(row.median()),
        row.rival.clone().unwrap_or_default(),
        number(row.rival_median()),
        row.ratio().map(|ratio| format!("{}x", short(ratio))).unwrap_or_default(),
        spread.unwrap_or_default(),
        row.target.map(limit).unwrap_or_default(),
    ]
}

fn limit(target: Target) -> String {
    match target {
        Target::RatioAtLeast(least) => format!(">= {}x", short(least)),
        Target::MedianAtLeast(least) => format!(">= {}", short(least)),
        Target::MedianAtMost(most) => format!("<= {}", short(most)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(work: &str, rival_samples: &[f64], target: Option<Target>) -> Row {
        Row {
            work: work.to_owned(),
            key: work.replace(' ', "-"),
            unit: "op/s".to_owned(),
            higher_is_better: true,
            subject: "slackwater".to_owned(),
            rival: Some("rival".to_owned()),
            samples: vec![90_000.0, 100_000.0, 110_000.0],
            rival_samples: rival_samples.to_vec(),
            target,
            not_run: None,
        }
    }

    #[test]
    fn each_row_tells_what_it_held_to() {
        let held = row("reading", &[45_000.0, 40_000.0, 55_000.0], Some(Target::RatioAtLeast(2.0)));
        let broken = row("writing a lot", &[50_000.0], Some(Target::RatioAtLeast(2.5)));
        let told = row("looking", &[50_000.0], None);
        let not_run = Row { not_run: Some("no rival".to_owned()), ..row("trying", &[], None) };
        let mut comparison = Comparison { machine: "a machine".to_owned(), rows: vec![held, told] };
        assert!(comparison.held());
        comparison.rows.extend([broken, not_run]);
        assert!(!comparison.held());
        let text = comparison.to_string();
        let lines: Vec<Vec<_>> =
            text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(text.lines().next(), Some("a machine"));
        let expected = "held reading op/s 100,000 rival 45,000 2.22x 2.00-2.50x >= 2.00x";
        assert_eq!(lines[3].join(" "), expected);
        assert_eq!(lines[4][0], "looking");
        assert_eq!(lines[5][0], "BROKEN");
        assert_eq!(lines[6][..3], ["NOT", "RUN", "trying"]);
        assert!(text.ends_with("NOT RUN  trying: no rival\n"), "{text}");
        let starts: Vec<_> = text.lines().filter_map(|line| line.find("op/s")).collect();
        assert!(starts.iter().all(|start| *start == starts[0]), "{text}");
    }
}
