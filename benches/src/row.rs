//! One line of a comparison, and what must hold of it.

use serde::{Deserialize, Serialize};

/// One line of a comparison: the same work by both sides, taken by turns in one run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Row {
    /// Such as "4 KiB random read, cached, depth 16, 1 connection".
    pub(crate) work: String,
    /// Short and stable, for programs and file names: "random-read-cached-1".
    pub(crate) key: String,
    /// Unit of the samples: "MiB/s", "op/s", "ms", "us".
    pub(crate) unit: String,
    pub(crate) higher_is_better: bool,
    /// What is measured: "slackwater", or a part of it.
    pub(crate) subject: String,
    /// Against what: "nfs-ganesha", "cp --reflink on XFS", or an own baseline such as "1 layer".
    pub(crate) rival: Option<String>,
    /// One value a round.
    pub(crate) samples: Vec<f64>,
    /// One value a round: it and the sample at its index were taken one after the other.
    pub(crate) rival_samples: Vec<f64>,
    /// What must hold.
    pub(crate) target: Option<Target>,
    /// Why the row was not run, if it was not: then it is broken.
    pub(crate) not_run: Option<String>,
}

/// What must hold of a row: of the ratio of medians (above 1 is better than the rival, whatever
/// the unit), or of the median itself.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Target {
    RatioAtLeast(f64),
    MedianAtMost(f64),
    MedianAtLeast(f64),
}

impl Row {
    /// The median of what is measured.
    pub(crate) fn median(&self) -> Option<f64> {
        median(&self.samples)
    }

    /// The median of the rival.
    pub(crate) fn rival_median(&self) -> Option<f64> {
        median(&self.rival_samples)
    }

    /// How many times as good as the rival it is, by the medians.
    pub(crate) fn ratio(&self) -> Option<f64> {
        Some(self.ratio_of(self.median()?, self.rival_median()?))
    }

    /// The least and the greatest ratio of one round.
    pub(crate) fn spread(&self) -> Option<(f64, f64)> {
        let pairs = self.samples.iter().zip(&self.rival_samples);
        let ratios = pairs.map(|(sample, rival)| self.ratio_of(*sample, *rival));
        ratios.fold(None, |spread, ratio| {
            let (least, greatest) = spread.unwrap_or((ratio, ratio));
            Some((f64::min(least, ratio), f64::max(greatest, ratio)))
        })
    }

    /// Whether it was run and what must hold of it does.
    pub(crate) fn held(&self) -> bool {
        if self.not_run.is_some() {
            return false;
        }
        // What was never measured holds nothing.
        match self.target {
            None => true,
            Some(Target::RatioAtLeast(least)) => self.ratio().is_some_and(|ratio| ratio >= least),
            Some(Target::MedianAtMost(most)) => self.median().is_some_and(|median| median <= most),
            Some(Target::MedianAtLeast(least)) => {
                self.median().is_some_and(|median| median >= least)
            }
        }
    }

    fn ratio_of(&self, sample: f64, rival: f64) -> f64 {
        if self.higher_is_better { sample / rival } else { rival / sample }
    }
}

/// The middle value; the mean of the two in the middle where their number is even.
fn median(samples: &[f64]) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let upper = *sorted.get(sorted.len() / 2)?;
    let lower = *sorted.get(sorted.len().saturating_sub(1) / 2)?;
    Some(f64::midpoint(lower, upper))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(samples: &[f64], rival_samples: &[f64], target: Option<Target>) -> Row {
        Row {
            work: "work".to_owned(),
            key: "key".to_owned(),
            unit: "op/s".to_owned(),
            higher_is_better: true,
            subject: "slackwater".to_owned(),
            rival: Some("rival".to_owned()),
            samples: samples.to_vec(),
            rival_samples: rival_samples.to_vec(),
            target,
            not_run: None,
        }
    }

    fn close(value: Option<f64>, expected: f64) -> bool {
        value.is_some_and(|value| (value - expected).abs() < 1e-9)
    }

    #[test]
    fn the_ratio_is_of_medians_and_above_one_is_better() {
        let mut row = row(&[30.0, 10.0, 20.0], &[10.0, 10.0, 5.0], None);
        assert!(close(row.median(), 20.0));
        assert!(close(row.rival_median(), 10.0));
        assert!(close(row.ratio(), 2.0));
        assert_eq!(row.spread(), Some((1.0, 4.0)));
        row.higher_is_better = false;
        assert!(close(row.ratio(), 0.5));
        assert_eq!(row.spread(), Some((0.25, 1.0)));
    }

    #[test]
    fn an_even_number_of_samples_has_a_median_between_two() {
        assert!(close(median(&[4.0, 1.0, 3.0, 2.0]), 2.5));
        assert_eq!(median(&[]), None);
    }

    #[test]
    fn a_target_holds_at_its_limit_and_not_beyond() {
        let held = |target| row(&[20.0], &[10.0], Some(target)).held();
        assert!(held(Target::RatioAtLeast(2.0)) && !held(Target::RatioAtLeast(2.1)));
        assert!(held(Target::MedianAtMost(20.0)) && !held(Target::MedianAtMost(19.9)));
        assert!(held(Target::MedianAtLeast(20.0)) && !held(Target::MedianAtLeast(20.1)));
    }

    #[test]
    fn what_was_not_run_is_broken() {
        assert!(!row(&[], &[], Some(Target::RatioAtLeast(0.0))).held());
        assert!(!row(&[1.0], &[], Some(Target::RatioAtLeast(0.0))).held());
        assert!(row(&[1.0], &[], None).held());
        let mut not_run = row(&[1.0], &[1.0], None);
        not_run.not_run = Some("no mkfs".to_owned());
        assert!(!not_run.held());
    }

    #[test]
    fn a_row_is_the_same_after_json() {
        let row = row(&[1.5], &[2.0], Some(Target::RatioAtLeast(0.6)));
        let text = serde_json::to_string(&row).unwrap();
        assert!(text.contains(r#""target":{"ratio_at_least":0.6}"#), "{text}");
        let again: Row = serde_json::from_str(&text).unwrap();
        assert_eq!(serde_json::to_string(&again).unwrap(), text);
    }
}
