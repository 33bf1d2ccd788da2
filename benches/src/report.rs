//! What the experiment found: a table for people, JSON for programs, and whether each promise
//! held.

use std::fmt;
use std::time::Duration;

use serde::Serialize;

use crate::cases::{EXTENTS_MAX, Family};
use crate::latency::{Latencies, Latency};
use crate::reflink::Rival;
use crate::statistics::Summary;

/// The slowest case of a family may take this many times as long as its fastest.
const SPREAD_MAX: f64 = 1.5;

/// A clone must be this many times as fast as the rival.
const SPEEDUP_MIN: f64 = 1000.0;

/// Everything that was found.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    rows: Vec<Row>,
    comparisons: Vec<Comparison>,
    /// Why there are none with the rival, if there are none.
    rival_not_run: Option<String>,
    promises: Vec<Promise>,
}

/// A line of the table.
#[derive(Clone, Debug, Serialize)]
struct Row {
    verb: &'static str,
    family: &'static str,
    case: &'static str,
    samples: usize,
    p50_milliseconds: f64,
    p99_milliseconds: f64,
    /// Of the medians, to the smallest case of the family.
    ratio: f64,
}

/// How the file of most extents is copied in one way.
#[derive(Clone, Debug, Serialize)]
struct Comparison {
    way: &'static str,
    samples: usize,
    p50_milliseconds: f64,
    p99_milliseconds: f64,
}

/// Something that must hold, with the measured number.
#[derive(Clone, Debug, Serialize)]
struct Promise {
    text: String,
    /// `None` if the rival was not run.
    measured: Option<f64>,
    held: bool,
}

impl Report {
    /// The report on these measurements.
    pub(crate) fn new(latencies: &Latencies, rival: &Rival) -> Self {
        let mut report = Self {
            rows: Vec::new(),
            comparisons: Vec::new(),
            rival_not_run: None,
            promises: Vec::new(),
        };
        for family in Family::ALL {
            let of_family =
                latencies.over_rest.iter().filter(|latency| latency.case.family == family);
            let cases: Vec<_> = of_family.collect();
            report.add_family("clone", &cases, |latency| latency.clone);
            report.add_family("snapshot", &cases, |latency| latency.snapshot);
        }
        let most_extents =
            latencies.over_rest.iter().rfind(|latency| latency.case.family == Family::Extents);
        let mut ways = vec![("clone in the store", latencies.clone_in_store)];
        ways.extend(most_extents.map(|latency| ("clone over REST", latency.clone)));
        for (way, summary) in &ways {
            report.compare(way, summary);
        }
        match rival {
            Rival::Ran(summary) => {
                report.compare("cp --reflink=always on XFS", summary);
                for (way, clone) in &ways {
                    report.promise_speedup(way, summary.ratio(clone));
                }
            }
            Rival::NotRun(reason) => {
                report.rival_not_run = Some(reason.clone());
                report.promises.push(Promise {
                    text: "a clone was compared with cp --reflink=always on XFS".to_owned(),
                    measured: None,
                    held: false,
                });
            }
            Rival::LeftOut => report.rival_not_run = Some("left out by --no-rival".to_owned()),
        }
        report
    }

    /// Whether every promise held.
    pub(crate) fn held(&self) -> bool {
        self.promises.iter().all(|promise| promise.held)
    }

    /// Adds one verb of one family, whose smallest case comes first.
    fn add_family(
        &mut self,
        verb: &'static str,
        cases: &[&Latency],
        summary_of: impl Fn(&Latency) -> Summary,
    ) {
        let Some(smallest) = cases.first() else {
            return;
        };
        let (family, base) = (smallest.case.family.name(), summary_of(smallest));
        let (mut fastest, mut slowest) = (base, base);
        for latency in cases {
            let summary = summary_of(latency);
            if summary.p50 < fastest.p50 {
                fastest = summary;
            }
            if summary.p50 > slowest.p50 {
                slowest = summary;
            }
            self.rows.push(Row {
                verb,
                family,
                case: latency.case.label,
                samples: summary.samples,
                p50_milliseconds: millis(summary.p50),
                p99_milliseconds: millis(summary.p99),
                ratio: summary.ratio(&base),
            });
        }
        let spread = slowest.ratio(&fastest);
        self.promises.push(Promise {
            text: format!(
                "{verb} by {family} is flat: slowest to fastest p50 is {spread:.2} \
                 (at most {SPREAD_MAX})"
            ),
            measured: Some(spread),
            held: spread <= SPREAD_MAX,
        });
    }

    fn compare(&mut self, way: &'static str, summary: &Summary) {
        self.comparisons.push(Comparison {
            way,
            samples: summary.samples,
            p50_milliseconds: millis(summary.p50),
            p99_milliseconds: millis(summary.p99),
        });
    }

    fn promise_speedup(&mut self, way: &str, speedup: f64) {
        self.promises.push(Promise {
            text: format!(
                "{way} of {EXTENTS_MAX} extents is {speedup:.0} times as fast as \
                 cp --reflink=always on XFS (at least {SPEEDUP_MIN})"
            ),
            measured: Some(speedup),
            held: speedup >= SPEEDUP_MIN,
        });
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let head = ("over REST", "by", "case", "samples", "p50 ms", "p99 ms", "ratio");
        let (verb, family, case, samples, p50, p99, ratio) = head;
        writeln!(f, "{verb:9}  {family:8}{case:>8}{samples:>9}{p50:>10}{p99:>10}{ratio:>8}")?;
        for row in &self.rows {
            let Row { verb, family, case, samples, p50_milliseconds, p99_milliseconds, ratio } =
                row;
            write!(f, "{verb:9}  {family:8}{case:>8}{samples:>9}")?;
            writeln!(f, "{p50_milliseconds:>10.3}{p99_milliseconds:>10.3}{ratio:>8.2}")?;
        }
        let title = format!("{EXTENTS_MAX} extents");
        writeln!(f, "\n{title:27}{samples:>9}{p50:>10}{p99:>10}")?;
        for Comparison { way, samples, p50_milliseconds, p99_milliseconds } in &self.comparisons {
            writeln!(f, "{way:27}{samples:>9}{p50_milliseconds:>10.3}{p99_milliseconds:>10.3}")?;
        }
        if let Some(reason) = &self.rival_not_run {
            writeln!(f, "cp --reflink=always on XFS was NOT RUN: {reason}")?;
        }
        writeln!(f)?;
        for Promise { text, held, .. } in &self.promises {
            writeln!(f, "{}  {text}", if *held { "held  " } else { "BROKEN" })?;
        }
        Ok(())
    }
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

#[cfg(test)]
mod tests {
    use slackwater_client::types::SnapshotId;

    use super::*;
    use crate::cases::Case;

    fn summary(micros: u64) -> Summary {
        Summary::of(&[Duration::from_micros(micros)])
    }

    fn latency(label: &'static str, clone_micros: u64) -> Latency {
        let snapshot: SnapshotId = "6f1f3c1e-5d0c-4d55-9d61-2f5b6f0f6c11".parse().unwrap();
        let path = String::new();
        let case = Case { family: Family::Extents, label, path, snapshot };
        Latency { case, clone: summary(clone_micros), snapshot: summary(100) }
    }

    fn report(clone_micros: [u64; 3], rival: &Rival) -> Report {
        let labels = ["1", "1,000", "100,000"];
        let over_rest = [0, 1, 2].map(|index| latency(labels[index], clone_micros[index]));
        let clone_in_store = summary(80);
        Report::new(&Latencies { over_rest: over_rest.into(), clone_in_store }, rival)
    }

    fn broken(report: &Report) -> Vec<&str> {
        let broken = report.promises.iter().filter(|promise| !promise.held);
        broken.map(|promise| promise.text.as_str()).collect()
    }

    #[test]
    fn flat_and_fast_holds() {
        let report = report([200, 290, 210], &Rival::Ran(summary(211_000)));
        assert!(report.held(), "{report}");
        assert_eq!(report.promises.len(), 4);
        assert!(report.to_string().contains("1005 times as fast"), "{report}");
        assert!(!report.to_string().contains("NOT RUN"));
    }

    #[test]
    fn a_slower_case_breaks_the_promise_wherever_it_stands() {
        for micros in [[200, 200, 310], [310, 200, 200], [200, 310, 200]] {
            let report = report(micros, &Rival::Ran(summary(1_000_000)));
            assert!(!report.held());
            assert_eq!(broken(&report).len(), 1, "{report}");
            assert!(broken(&report)[0].starts_with("clone by extents"), "{report}");
        }
    }

    #[test]
    fn the_rival_is_compared_with_the_file_of_most_extents() {
        let report = report([150, 150, 210], &Rival::Ran(summary(200_000)));
        assert_eq!(broken(&report).len(), 1, "{report}");
        assert!(broken(&report)[0].starts_with("clone over REST"), "{report}");
    }

    #[test]
    fn a_rival_that_was_not_run_breaks_the_promise_unless_it_was_left_out() {
        let not_run = report([200; 3], &Rival::NotRun("no mkfs".to_owned()));
        assert!(!not_run.held());
        assert!(not_run.to_string().contains("NOT RUN: no mkfs"), "{not_run}");
        let left_out = report([200; 3], &Rival::LeftOut);
        assert!(left_out.held());
        assert!(left_out.to_string().contains("NOT RUN"), "{left_out}");
    }
}
