//! The metrics of a page and those that METRICS.md describes, for tests of several crates, which include this file as a
//! module.
#![allow(dead_code, unreachable_pub, reason = "each test uses a part")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// What a histogram's name ends with in its samples.
const HISTOGRAM_PARTS: [&str; 3] = ["_bucket", "_sum", "_count"];

/// What is known of a metric but for its name.
#[derive(Debug, PartialEq, Eq)]
pub struct Metric {
    /// `counter`, `gauge`, `histogram` or `info`.
    pub kind: String,
    /// The names of its labels; without `le`, which each histogram has.
    pub labels: BTreeSet<String>,
}

/// Metrics by their names.
pub type Metrics = BTreeMap<String, Metric>;

/// A text file of the project.
pub fn document(name: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let path = root.join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The metric that a name in a query stands for.
pub fn named<'a>(metrics: &'a Metrics, name: &str) -> Option<&'a Metric> {
    let whole = HISTOGRAM_PARTS.iter().find_map(|part| name.strip_suffix(part));
    let histogram = || metrics.get(whole?).filter(|metric| metric.kind == "histogram");
    metrics.get(name).or_else(histogram)
}

/// The metrics of a page in Prometheus' text format.
pub fn of_page(page: &str) -> Metrics {
    let mut metrics = Metrics::new();
    for line in page.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let (name, kind) = line.split_once(' ').unwrap();
        // That format has no type for it.
        let kind = if name.ends_with("_info") { "info" } else { kind };
        let metric = Metric { kind: kind.to_owned(), labels: BTreeSet::new() };
        let other = metrics.insert(name.to_owned(), metric);
        assert!(other.is_none(), "{name} is twice on the page");
    }
    for sample in page.lines().filter(|line| !line.starts_with('#')) {
        let name = sample.split(['{', ' ']).next().unwrap();
        let whole = HISTOGRAM_PARTS.iter().find_map(|part| name.strip_suffix(part));
        let family = whole.filter(|whole| metrics.contains_key(*whole)).unwrap_or(name);
        let metric = metrics.get_mut(family);
        let metric = metric.unwrap_or_else(|| panic!("{name} has no type on the page"));
        metric.labels.extend(labels_of(sample).into_iter().filter(|label| label != "le"));
    }
    metrics
}

/// The names of a sample's labels.
fn labels_of(sample: &str) -> Vec<String> {
    let mut names = Vec::new();
    let Some((_, mut rest)) = sample.split_once('{') else { return names };
    while let Some((name, value)) = rest.split_once("=\"") {
        names.push(name.trim_start_matches(',').to_owned());
        let mut is_escaped = false;
        let end = value.find(|character: char| {
            let is_end = character == '"' && !is_escaped;
            is_escaped = character == '\\' && !is_escaped;
            is_end
        });
        rest = &value[end.unwrap() + 1..];
    }
    names
}

/// The metrics of the table below a heading of METRICS.md.
pub fn of_table(heading: &str) -> Metrics {
    let text = document("METRICS.md");
    let section = text.split_once(&format!("\n## {heading}\n"));
    let (_, section) = section.unwrap_or_else(|| panic!("METRICS.md has no \"{heading}\""));
    let section = section.split("\n## ").next().unwrap();
    let mut metrics = Metrics::new();
    for row in section.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<_> = row.split('|').map(str::trim).collect();
        let ["", name, kind, labels, unit, meaning, ""] = cells[..] else {
            panic!("METRICS.md: a row has other than five cells: {row}");
        };
        assert!(!unit.is_empty() && meaning.ends_with('.'), "METRICS.md: an empty cell: {row}");
        let name = name.trim_matches('`').to_owned();
        let metric = Metric { kind: kind.to_owned(), labels: labels_of_cell(labels) };
        assert!(metrics.insert(name, metric).is_none(), "METRICS.md: twice in a table: {row}");
    }
    assert!(!metrics.is_empty(), "METRICS.md: no table below \"{heading}\"");
    metrics
}

/// The names of labels, which stand in backticks; the values of each stand behind it in parentheses.
fn labels_of_cell(cell: &str) -> BTreeSet<String> {
    let without_values: String =
        cell.split('(').map(|part| part.split_once(')').map_or(part, |(_, rest)| rest)).collect();
    without_values.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// What a page and the table below a heading of METRICS.md do not have in common, a line each.
pub fn differences(page: &str, heading: &str) -> Vec<String> {
    let (page, table) = (of_page(page), of_table(heading));
    let mut found = Vec::new();
    for (name, metric) in &page {
        match table.get(name) {
            None => found.push(format!(
                "{name} ({}) is on the page, and not in METRICS.md, \"{heading}\"",
                metric.kind
            )),
            Some(described) if described != metric => found.push(format!(
                "{name} is {metric:?} on the page, and {described:?} in METRICS.md, \"{heading}\""
            )),
            Some(_) => {}
        }
    }
    for name in table.keys().filter(|name| !page.contains_key(*name)) {
        found.push(format!("{name} is in METRICS.md, \"{heading}\", and not on the page"));
    }
    found
}
