//! Percentiles of durations.

use std::time::Duration;

/// What is told of the samples of one case.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Summary {
    pub(crate) samples: usize,
    pub(crate) p50: Duration,
    pub(crate) p99: Duration,
}

impl Summary {
    /// The summary; zero for no samples.
    pub(crate) fn of(samples: &[Duration]) -> Self {
        let mut sorted = samples.to_vec();
        sorted.sort_unstable();
        Self { samples: sorted.len(), p50: percentile(&sorted, 50), p99: percentile(&sorted, 99) }
    }

    /// How many times as long as the other's median this one's is.
    pub(crate) fn ratio(&self, other: &Self) -> f64 {
        self.p50.as_secs_f64() / other.p50.as_secs_f64()
    }
}

/// The smallest sample that at least that share of all samples does not exceed.
fn percentile(sorted: &[Duration], percent: usize) -> Duration {
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_samples() {
        let millis: Vec<_> = (1..=200).rev().map(Duration::from_millis).collect();
        let summary = Summary::of(&millis);
        assert_eq!(summary.samples, 200);
        assert_eq!(summary.p50, Duration::from_millis(100));
        assert_eq!(summary.p99, Duration::from_millis(198));
        let one = Summary::of(&[Duration::from_millis(50)]);
        assert_eq!((one.p50, one.p99), (one.p50, one.p50));
        assert!((summary.ratio(&one) - 2.0).abs() < 1e-9);
    }
}
