//! What is counted during a run, and what is told of it.

use std::fmt;
use std::time::Duration;

/// Latencies of which neighbours differ by a sixteenth at most.
const STEPS_PER_DOUBLING: u64 = 16;

/// Doublings from a nanosecond on: beyond all that a `u64` holds.
const DOUBLINGS: usize = 64;

/// Bytes in a MiB.
const MEBIBYTE: f64 = 1_048_576.0;

/// What a run did.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Measured {
    pub(crate) operations: u64,
    pub(crate) bytes: u64,
    /// From the first call to the last answer, the one to the last COMMIT included.
    pub(crate) elapsed: Duration,
    /// Of one operation, within a sixteenth; so is `p99`.
    pub(crate) p50: Duration,
    pub(crate) p99: Duration,
    pub(crate) max: Duration,
}

impl Measured {
    pub(crate) fn operations_per_second(&self) -> f64 {
        self.operations as f64 / self.elapsed.as_secs_f64()
    }

    pub(crate) fn mebibytes_per_second(&self) -> f64 {
        self.bytes as f64 / MEBIBYTE / self.elapsed.as_secs_f64()
    }
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (operations, bytes) = (self.operations_per_second(), self.mebibytes_per_second());
        let Self { p50, p99, max, .. } = self;
        write!(f, "{operations:.0} op/s, {bytes:.0} MiB/s; p50 {p50:.1?}, p99 {p99:.1?}, ")?;
        write!(f, "max {max:.1?}")
    }
}

/// What is counted: the memory does not grow with the run.
#[derive(Debug)]
pub(super) struct Tally {
    operations: u64,
    counts: Vec<u64>,
    max: Duration,
}

impl Tally {
    pub(super) fn new() -> Self {
        let steps = usize::try_from(STEPS_PER_DOUBLING).unwrap_or(0);
        Self { operations: 0, counts: vec![0; DOUBLINGS * steps], max: Duration::ZERO }
    }

    pub(super) fn count(&mut self, latency: Duration) {
        self.operations += 1;
        self.max = self.max.max(latency);
        let nanoseconds = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        if let Some(count) = self.counts.get_mut(step_of(nanoseconds)) {
            *count += 1;
        }
    }

    pub(super) fn measured(&self, block_bytes: usize, elapsed: Duration) -> Measured {
        Measured {
            operations: self.operations,
            bytes: self.operations * block_bytes as u64,
            elapsed,
            p50: self.percentile(50),
            p99: self.percentile(99),
            max: self.max,
        }
    }

    fn percentile(&self, percent: u64) -> Duration {
        let rank = (self.operations * percent).div_ceil(100);
        let mut seen = 0;
        for (step, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank && seen > 0 {
                return Duration::from_nanos(middle_of(step as u64)).min(self.max);
            }
        }
        Duration::ZERO
    }
}

/// The step that a latency belongs to: its highest bit and the four below it.
fn step_of(nanoseconds: u64) -> usize {
    let doubling = u64::from(nanoseconds.max(STEPS_PER_DOUBLING).ilog2());
    let fraction = (nanoseconds >> (doubling - 4)) % STEPS_PER_DOUBLING;
    let is_linear = nanoseconds < STEPS_PER_DOUBLING;
    let step = if is_linear { nanoseconds } else { doubling * STEPS_PER_DOUBLING + fraction };
    usize::try_from(step).unwrap_or(usize::MAX)
}

/// The middle of a step.
const fn middle_of(step: u64) -> u64 {
    let (doubling, fraction) = (step / STEPS_PER_DOUBLING, step % STEPS_PER_DOUBLING);
    if doubling < 4 {
        return step;
    }
    let width = 1 << (doubling - 4);
    (1 << doubling) + fraction * width + width / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_latency_is_told_within_a_sixteenth() {
        for nanoseconds in (0..100_000).chain([u64::MAX / 3, 1 << 40, (1 << 40) - 1]) {
            let told = middle_of(step_of(nanoseconds) as u64);
            assert!(told.abs_diff(nanoseconds) <= nanoseconds / 16, "{nanoseconds}: {told}");
        }
    }

    #[test]
    fn percentiles_and_rates_are_those_of_all_operations() {
        let mut tally = Tally::new();
        for microseconds in 1..=1000 {
            tally.count(Duration::from_micros(microseconds));
        }
        let measured = tally.measured(4096, Duration::from_secs(2));
        assert_eq!((measured.operations, measured.bytes), (1000, 4_096_000));
        let is_near =
            |got: Duration, expected: u128| got.as_micros().abs_diff(expected) <= expected / 16;
        assert!(is_near(measured.p50, 500), "{measured:?}");
        assert!(is_near(measured.p99, 990), "{measured:?}");
        assert_eq!(measured.max, Duration::from_millis(1));
        assert!((measured.operations_per_second() - 500.0).abs() < 1e-9);
        assert!((measured.mebibytes_per_second() - 1.953_125).abs() < 1e-9);
        let text = measured.to_string();
        assert!(
            text.starts_with("500 op/s, 2 MiB/s; p50 ") && text.ends_with("max 1.0ms"),
            "{text}"
        );
        assert_eq!(Tally::new().measured(1, Duration::from_secs(1)).p99, Duration::ZERO);
    }
}
