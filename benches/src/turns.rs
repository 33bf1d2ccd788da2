//! Turns: what all sides do, one after the other, so that what slows the machine down slows down all of them; and the rows
//! of what came of it.

use std::time::{Duration, Instant};

use crate::failure::Failure;
use crate::row::Row;

/// Time in which snapshotters unmount and remove in the background what an engine has let go of: the driver unmounts what
/// was idle for ten seconds.
pub(crate) const SETTLE: Duration = Duration::from_secs(12);

/// The samples of one kind of work.
#[derive(Debug)]
pub(crate) struct Turns<'a> {
    /// The own one, then its rivals.
    sides: &'a [String],
    rounds: usize,
    /// By side.
    samples: Vec<Vec<f64>>,
}

impl<'a> Turns<'a> {
    /// Of these sides, each so often. There are two or more.
    pub(crate) fn new(sides: &'a [String], rounds: usize) -> Self {
        Self { sides, rounds, samples: vec![Vec::new(); sides.len()] }
    }

    /// Takes the samples; `turn` is given the number of a side. Those before a failure stay.
    pub(crate) fn take(
        &mut self,
        mut turn: impl FnMut(usize) -> Result<f64, Failure>,
    ) -> Result<(), Failure> {
        // Once before, so that the first round is as the others.
        for side in 0..self.sides.len() {
            turn(side)?;
        }
        for round in 0..self.rounds {
            let mut order: Vec<_> = (0..self.sides.len()).collect();
            // What follows on one side does not always fall to the same other one.
            if round % 2 == 1 {
                order.reverse();
            }
            for side in order {
                let sample = turn(side)?;
                self.samples[side].push(sample);
            }
        }
        Ok(())
    }

    /// The rows, one for each rival; less is better. `not_run`: why samples are missing.
    pub(crate) fn rows(
        &self,
        key: &str,
        work: &str,
        unit: &str,
        not_run: Option<&Failure>,
    ) -> Vec<Row> {
        let rivals = self.sides.iter().zip(&self.samples).skip(1);
        let row = |(rival, samples): (&String, &Vec<f64>)| Row {
            work: work.to_owned(),
            key: format!("{key}-{rival}"),
            unit: unit.to_owned(),
            higher_is_better: false,
            subject: self.sides[0].clone(),
            rival: Some(rival.clone()),
            samples: self.samples[0].clone(),
            rival_samples: samples.clone(),
            target: None,
            not_run: not_run.map(ToString::to_string),
        };
        rivals.map(row).collect()
    }
}

/// Milliseconds that something takes.
pub(crate) fn timed(work: impl FnOnce() -> Result<(), Failure>) -> Result<f64, Failure> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_secs_f64() * 1000.0)
}

/// Does something with all at a time; the first failure, if there is one, when all have ended.
pub(crate) fn for_each_at_once<T: Sync>(
    all: &[T],
    work: impl Fn(&T) -> Result<(), Failure> + Sync,
) -> Result<(), Failure> {
    let work = &work;
    std::thread::scope(|scope| {
        let begun: Vec<_> = all.iter().map(|one| scope.spawn(move || work(one))).collect();
        let ended = begun.into_iter().map(|thread| match thread.join() {
            Ok(outcome) => outcome,
            Err(_) => Err(Failure::Unfit("a thread panicked".to_owned())),
        });
        // Each is waited for, also behind one that failed.
        ended.fold(Ok(()), Result::and)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_side_has_its_turn_in_each_round_and_one_before() {
        let sides = ["own", "a", "b"].map(str::to_owned);
        let mut turns = Turns::new(&sides, 2);
        let mut order = Vec::new();
        let outcome = turns.take(|side| {
            order.push(side);
            Ok(f64::from(u32::try_from(order.len()).unwrap()))
        });
        outcome.unwrap();
        assert_eq!(order, [0, 1, 2, 0, 1, 2, 2, 1, 0]);
        let rows = turns.rows("run", "run --rm", "ms", None);
        let keys: Vec<_> = rows.iter().map(|row| row.key.as_str()).collect();
        assert_eq!(keys, ["run-a", "run-b"]);
        assert_eq!(
            (&rows[0].samples[..], &rows[0].rival_samples[..]),
            (&[4.0, 9.0][..], &[5.0, 8.0][..])
        );
        assert_eq!(rows[1].rival_samples, [6.0, 7.0]);
    }

    #[test]
    fn a_failure_ends_the_turns_and_is_in_each_row() {
        let sides = ["own", "a"].map(str::to_owned);
        let mut turns = Turns::new(&sides, 5);
        let mut count = 0;
        let outcome = turns.take(|_| {
            count += 1;
            if count > 4 { Err(Failure::Unfit("no room".to_owned())) } else { Ok(1.0) }
        });
        let failure = outcome.unwrap_err();
        let rows = turns.rows("run", "run --rm", "ms", Some(&failure));
        assert_eq!(rows[0].not_run.as_deref(), Some("no room"));
        assert_eq!((rows[0].samples.len(), rows[0].rival_samples.len()), (1, 1));
    }
}
