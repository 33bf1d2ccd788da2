//! METRICS.md lists what the appliance's page has, and rules for alerts use what METRICS.md lists.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

mod common;
#[path = "../../tests/described_metrics.rs"]
mod described_metrics;

use std::io::{Read as _, Write as _};

use common::{Server, connect, slackwaterd, with_its_token};
use described_metrics::{differences, document, named, of_page, of_table};
use serde_json::Value;
use tempfile::TempDir;

const RULES: &str = "deploy/prometheus/alerts.yml";

const DASHBOARD: &str = "deploy/grafana/dashboards/slackwater.json";

/// The secret of a token of the role read-only, as METRICS.md gives Prometheus one.
const TOKEN: &str = "prometheus-0123456789abcdef";

/// The page, as Prometheus reads it.
fn page(server: &Server) -> String {
    let mut stream = connect(server.api);
    let request = format!(
        "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\
         Authorization: Bearer {TOKEN}\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 "), "{answer}");
    body.to_owned()
}

#[test]
fn the_table_of_the_appliance_is_what_its_page_has() {
    let directory = TempDir::new().unwrap();
    // One number is about token files, and is absent without.
    let token_file = directory.path().join("tokens");
    std::fs::write(&token_file, format!("prometheus read-only {TOKEN}\n")).unwrap();
    let mut command = slackwaterd();
    command.args(with_its_token(&directory.path().join("store")));
    let server = Server::start_with(command.arg("--token-file").arg(token_file));
    // What has labels is on the page once it has counted something.
    server.nfs_null();
    page(&server);
    let page = page(&server);
    assert_eq!(differences(&page, "The appliance"), [""; 0], "{page}");
}

/// An alert of the rules.
struct Alert<'a> {
    name: &'a str,
    expression: String,
    /// All that the rules have about it.
    text: &'a str,
}

fn alerts(rules: &str) -> Vec<Alert<'_>> {
    rules.split("- alert: ").skip(1).map(alert).collect()
}

fn alert(text: &str) -> Alert<'_> {
    let name = text.lines().next().unwrap().trim();
    Alert { name, expression: expression_of(text), text }
}

/// What stands behind `expr:`, and the lines below it that are further in.
fn expression_of(alert: &str) -> String {
    let mut lines = alert.lines().skip_while(|line| !line.trim_start().starts_with("expr: "));
    let first = lines.next().unwrap_or_else(|| panic!("no expression: {alert}"));
    let rest = lines.take_while(|line| indentation(line) > indentation(first));
    let words: Vec<_> = std::iter::once(first).chain(rest).map(str::trim).collect();
    words.join(" ")
}

fn indentation(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

/// The names of metrics in a text.
fn names_in(text: &str) -> Vec<&str> {
    let is_of_name = |character: char| {
        character.is_ascii_lowercase() || character.is_ascii_digit() || character == '_'
    };
    let words = text.split(|character: char| !is_of_name(character));
    words.filter(|word| word.starts_with("slackwater_") || word.starts_with("process_")).collect()
}

#[test]
fn alerts_and_the_dashboard_use_metrics_that_are_described() {
    let (appliance, driver) = (of_table("The appliance"), of_table("The driver"));
    let rules = document(RULES);
    let is_described =
        |name: &str| named(&appliance, name).or_else(|| named(&driver, name)).is_some();
    let dashboard: Value = serde_json::from_str(&document(DASHBOARD)).unwrap();
    let panels = dashboard["panels"].as_array().unwrap().iter();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
    let expressions: Vec<_> = targets.map(|target| target["expr"].as_str().unwrap()).collect();
    assert!(expressions.len() > 20, "{} expressions were found", expressions.len());
    for expression in expressions {
        let names = names_in(expression);
        assert!(!names.is_empty() || expression.starts_with("up{"), "{expression}");
        let unknown: Vec<_> = names.into_iter().filter(|name| !is_described(name)).collect();
        assert_eq!(unknown, [""; 0], "these are in {DASHBOARD}, and not in METRICS.md");
    }
    let alerts = alerts(&rules);
    assert!(alerts.len() > 20, "{} alerts were found in {RULES}", alerts.len());
    let mut missing = Vec::new();
    for alert in &alerts {
        let names = names_in(&alert.expression);
        // Prometheus' own, of a page that it could not read.
        let is_of_none = names.is_empty() && !alert.expression.contains("up{");
        assert!(!is_of_none, "{RULES}: {} uses no metric: {}", alert.name, alert.expression);
        let unknown = names.into_iter().filter(|name| !is_described(name));
        missing.extend(unknown.map(|name| {
            format!(
                "{name} is in the expression of {} ({RULES}), and not in METRICS.md",
                alert.name
            )
        }));
    }
    assert_eq!(missing, [""; 0]);
    let elsewhere: Vec<_> =
        names_in(&rules).into_iter().filter(|name| !is_described(name)).collect();
    assert_eq!(elsewhere, [""; 0], "these are in {RULES}, and not in METRICS.md");
}

/// The documents and their sections that a text names, as in `OPERATION.md, "One" and "Two"`.
fn sections_in(text: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut before = text;
    while let Some((start, after)) = before.split_once(".md, \"") {
        let document = start.rsplit(' ').next().unwrap();
        let mut rest = after;
        while let Some((section, behind)) = rest.split_once('"') {
            found.push((format!("{document}.md"), section.to_owned()));
            let next = [", \"", " and \""].iter().find_map(|join| behind.strip_prefix(join));
            let Some(next) = next else { break };
            rest = next;
        }
        before = after;
    }
    found
}

#[test]
fn alerts_say_where_to_read_on() {
    let rules = document(RULES);
    for alert in alerts(&rules) {
        for part in ["severity: ", "summary: ", "description: >-"] {
            assert!(alert.text.contains(part), "{RULES}: {} has no `{part}`", alert.name);
        }
        let words: Vec<_> = alert.text.split_whitespace().collect();
        let sections = sections_in(&words.join(" "));
        assert!(!sections.is_empty(), "{RULES}: {} names no section", alert.name);
        for (name, section) in sections {
            let headings = [format!("## {section}"), format!("### {section}")];
            let text = document(&name);
            let has_heading = text.lines().any(|line| headings.iter().any(|one| one == line));
            assert!(has_heading, "{RULES}: {}: {name} has no \"{section}\"", alert.name);
        }
    }
    let named = sections_in("see A.md, \"One\", \"Two\" and \"Three\"; or B.md, \"Four\"");
    let named: Vec<_> = named.iter().map(|(name, section)| format!("{name} {section}")).collect();
    assert_eq!(named, ["A.md One", "A.md Two", "A.md Three", "B.md Four"]);
}

/// That a number or a label which the table lacks, or has too much, is found.
#[test]
fn a_page_that_is_not_the_table_is_seen() {
    let page = "# HELP a_total A.\n# TYPE a_total counter\na_total{x=\"1,\\\"y=\\\"{}\",z=\"2\"} 3\n\
        # TYPE b histogram\nb_bucket{le=\"+Inf\",x=\"\"} 1\nb_sum{x=\"\"} 1.5\nb_count{x=\"\"} 1\n\
        # TYPE c_info gauge\nc_info{version=\"1\"} 1\n";
    let metrics = of_page(page);
    let all: Vec<_> = metrics
        .iter()
        .map(|(name, metric)| format!("{name} {} {:?}", metric.kind, metric.labels))
        .collect();
    assert_eq!(
        all,
        [r#"a_total counter {"x", "z"}"#, r#"b histogram {"x"}"#, r#"c_info info {"version"}"#]
    );
    assert!(named(&metrics, "b_count").is_some() && named(&metrics, "c_count").is_none());
    let faults = differences(page, "The driver");
    assert!(faults.iter().any(|fault| fault.starts_with("a_total (counter) is on the page, and")));
    let missing = "slackwater_driver_obsolete_files is in METRICS.md, \"The driver\", and";
    assert!(faults.iter().any(|fault| fault.starts_with(missing)), "{faults:?}");
    let other = "# TYPE slackwater_driver_obsolete_files counter\n";
    let faults = differences(other, "The driver");
    let kind = "slackwater_driver_obsolete_files is Metric { kind: \"counter\"";
    assert!(faults.iter().any(|fault| fault.starts_with(kind)), "{faults:?}");
}
