//! Samples of one kind of work by all sides, and the rows that they make.

use std::time::Duration;

use crate::failure::Failure;
use crate::load::Load;
use crate::row::{Row, Target};
use crate::stop::Stop;

use super::sides::{Rival, Side, Sides, Turn};

/// What a row is about.
#[derive(Clone, Debug)]
pub(super) struct Line {
    pub(super) key: &'static str,
    pub(super) work: &'static str,
    pub(super) unit: Unit,
    /// Against nfs-ganesha; other rivals are told of without.
    pub(super) target: Target,
}

/// What is told of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    OperationsPerSecond,
    MebibytesPerSecond,
    /// Processor time of the server.
    MicrosecondsPerOperation,
}

/// Samples of one kind of work.
#[derive(Debug)]
pub(super) struct Series {
    line: Line,
    ours: Vec<f64>,
    rivals: Vec<(Rival, Vec<f64>)>,
}

impl Unit {
    const fn name(self) -> &'static str {
        match self {
            Self::OperationsPerSecond => "op/s",
            Self::MebibytesPerSecond => "MiB/s",
            Self::MicrosecondsPerOperation => "us",
        }
    }

    fn value(self, turn: &Turn) -> f64 {
        match self {
            Self::OperationsPerSecond => turn.measured.operations_per_second(),
            Self::MebibytesPerSecond => turn.measured.mebibytes_per_second(),
            Self::MicrosecondsPerOperation => {
                micros(turn.processor_time) / turn.measured.operations as f64
            }
        }
    }
}

impl Series {
    /// No samples yet; rows for those rivals.
    pub(super) fn new(line: Line, rivals: &[Rival]) -> Self {
        let rivals = rivals.iter().map(|rival| (*rival, Vec::new())).collect();
        Self { line, ours: Vec::new(), rivals }
    }

    /// Gives each side a turn with the load.
    pub(super) fn round(
        &mut self,
        sides: &mut Sides,
        load: &Load,
        stop: &Stop,
    ) -> Result<(), Failure> {
        sides.each(stop, |side| {
            let turn = side.run(load, stop)?;
            self.push(side, &turn);
            Ok(())
        })
    }

    /// Adds a turn.
    pub(super) fn push(&mut self, side: &Side, turn: &Turn) {
        let samples = match side.rival {
            None => Some(&mut self.ours),
            Some(rival) => {
                let mut rivals = self.rivals.iter_mut();
                rivals.find(|(other, _)| *other == rival).map(|(_, samples)| samples)
            }
        };
        samples.into_iter().for_each(|samples| samples.push(self.line.unit.value(turn)));
    }

    /// A row for each rival.
    pub(super) fn rows(&self, not_run: &[(Rival, String)]) -> Vec<Row> {
        let rows = self.rivals.iter().map(|(rival, samples)| {
            let is_promised = *rival == Rival::Ganesha;
            let reason = not_run.iter().find(|(other, _)| other == rival);
            let Line { key, work, unit, target } = &self.line;
            Row {
                work: (*work).to_owned(),
                key: if is_promised {
                    (*key).to_owned()
                } else {
                    format!("{key}-{}", rival.name())
                },
                unit: unit.name().to_owned(),
                higher_is_better: *unit != Unit::MicrosecondsPerOperation,
                subject: "slackwater".to_owned(),
                rival: Some(rival.name().to_owned()),
                samples: self.ours.clone(),
                rival_samples: samples.clone(),
                target: is_promised.then_some(*target),
                not_run: reason.map(|(_, reason)| reason.clone()),
            }
        });
        rows.collect()
    }
}

fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_target_is_against_ganesha_and_what_was_not_run_is_told() {
        let line = Line {
            key: "read",
            work: "reading",
            unit: Unit::MebibytesPerSecond,
            target: Target::RatioAtLeast(1.0),
        };
        let mut series = Series::new(line, &Rival::ALL);
        series.ours.push(2.0);
        series.rivals[0].1.push(1.0);
        let rows = series.rows(&[(Rival::Stock, "it broke".to_owned())]);
        assert_eq!([&rows[0].key, &rows[1].key], ["read", "read-nfsserve"]);
        assert!(rows[0].held() && rows[0].target.is_some());
        assert_eq!(rows[1].not_run.as_deref(), Some("it broke"));
        assert!(rows[1].target.is_none() && rows[1].rival_samples.is_empty());
    }
}
