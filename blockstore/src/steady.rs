//! The time by which snapshots expire: that of the machine's clock, once it has run steadily for a while.
//!
//! ```text
//! wall clock  --+--+--+--\           a jump: it, or what was before, is wrong
//!                         \--+--+--+--+--+--+--+--
//! believed    --+--+--+--+--+--+--+--\             the time before goes on
//!                                     \--+--+--+--   until the new one was steady for long enough
//! ```
//! A snapshot that expires is gone. A machine whose clock lost its battery, or was set wrongly, would delete all that
//! expire years from now; such a clock is put right soon, which is a jump again. After a start nothing is believed for
//! that long, as nothing tells what the clock did before.

use std::time::{Duration, Instant};

use crate::time::Timestamp;

/// How far the clock may drift from the monotonic one before it is a jump: more than a leap second or what is put right
/// slowly, less than matters to a snapshot's end.
const JUMP: Duration = Duration::from_secs(60);

/// A moment by both clocks, from which the monotonic one goes on.
#[derive(Clone, Copy, Debug)]
struct Line {
    wall: Timestamp,
    at: Instant,
}

impl Line {
    fn is_near(&self, wall: Timestamp, now: Instant) -> bool {
        let apart_nanos = self.time(now).as_nanos().abs_diff(wall.as_nanos());
        u128::from(apart_nanos) <= JUMP.as_nanos()
    }

    fn time(&self, now: Instant) -> Timestamp {
        let gone = u64::try_from(now.saturating_duration_since(self.at).as_nanos());
        Timestamp::from_nanos(self.wall.as_nanos().saturating_add(gone.unwrap_or(u64::MAX)))
    }
}

/// What is believed of the clock.
#[derive(Debug, Default)]
pub(crate) struct SteadyClock {
    believed: Option<Line>,
    /// The clock has run along this line since it began.
    latest: Option<Line>,
}

impl SteadyClock {
    /// The time by which snapshots expire now; none as long as none is believed. `steady` is how long the clock has to
    /// run without a jump.
    pub(crate) fn time(
        &mut self,
        (wall, now): (Timestamp, Instant),
        steady: Duration,
    ) -> Option<Timestamp> {
        let latest = match self.latest {
            Some(line) if line.is_near(wall, now) => line,
            before => {
                self.tell_jump(before, (wall, now), steady);
                Line { wall, at: now }
            }
        };
        self.latest = Some(latest);
        let is_new = self.believed.is_none_or(|line| line.at != latest.at);
        if is_new && now.saturating_duration_since(latest.at) >= steady {
            tracing::info!(
                time_seconds = wall.seconds(),
                "snapshots expire by the machine's clock from now on"
            );
            self.believed = Some(latest);
        }
        self.believed.map(|line| line.time(now))
    }

    /// The moment from which an end counts that is given as a length of time: [`Self::time`], or the clock where that is
    /// ahead. By the one that is behind, what is taken would end too soon once the other is believed.
    pub(crate) fn time_for_ends(
        &mut self,
        (wall, now): (Timestamp, Instant),
        steady: Duration,
    ) -> Timestamp {
        self.time((wall, now), steady).map_or(wall, |believed| believed.max(wall))
    }

    fn tell_jump(&self, before: Option<Line>, (wall, now): (Timestamp, Instant), steady: Duration) {
        let Some(expected) = before.map(|line| line.time(now)) else { return };
        let (got_seconds, expected_seconds) = (wall.seconds(), expected.seconds());
        match self.believed {
            Some(_) => tracing::warn!(
                got_seconds,
                expected_seconds,
                ?steady,
                "the machine's clock jumped: snapshots expire by the time before until it has run steadily"
            ),
            None => tracing::warn!(
                got_seconds,
                expected_seconds,
                ?steady,
                "the machine's clock jumped: no snapshot expires until it has run steadily"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEADY: Duration = Duration::from_secs(3600);

    /// A machine with both clocks.
    struct Machine {
        clock: SteadyClock,
        begin: Instant,
        uptime_seconds: u64,
        wall_seconds: u64,
    }

    impl Machine {
        fn at(wall_seconds: u64) -> Self {
            let begin = Instant::now();
            Self { clock: SteadyClock::default(), begin, uptime_seconds: 0, wall_seconds }
        }

        /// Both clocks run on; looks each ten seconds, and answers the time in seconds.
        fn run(&mut self, seconds: u64) -> Option<u64> {
            for _ in 0..seconds / 10 {
                self.uptime_seconds += 10;
                self.wall_seconds += 10;
                self.look();
            }
            self.look()
        }

        /// The clock is set, which is seen at once.
        fn set(&mut self, wall_seconds: u64) {
            self.wall_seconds = wall_seconds;
            self.look();
        }

        fn clocks(&self) -> (Timestamp, Instant) {
            let wall = Timestamp::new(self.wall_seconds, 0).unwrap();
            (wall, self.begin + Duration::from_secs(self.uptime_seconds))
        }

        fn look(&mut self) -> Option<u64> {
            let clocks = self.clocks();
            self.clock.time(clocks, STEADY).map(Timestamp::seconds)
        }

        fn end(&mut self) -> u64 {
            let clocks = self.clocks();
            self.clock.time_for_ends(clocks, STEADY).seconds()
        }
    }

    #[test]
    fn ends_count_by_the_later_clock() {
        let mut machine = Machine::at(1_000_000);
        assert_eq!(machine.end(), 1_000_000, "none is believed");
        machine.run(4000);
        assert_eq!(machine.end(), 1_004_000);
        machine.set(machine.wall_seconds + 500_000);
        assert_eq!(machine.end(), 1_504_000, "the clock jumped ahead");
        machine.set(machine.wall_seconds - 900_000);
        assert_eq!(machine.end(), 1_004_000, "the clock jumped back");
    }

    #[test]
    fn nothing_is_believed_at_first() {
        let mut machine = Machine::at(1_000_000);
        assert_eq!(machine.look(), None);
        assert_eq!(machine.run(3590), None);
        assert_eq!(machine.run(10), Some(1_003_600));
        assert_eq!(machine.run(100_000), Some(1_103_600));
    }

    #[test]
    fn a_wrong_time_that_is_put_right_ends_nothing() {
        let mut machine = Machine::at(1_000_000);
        machine.run(4000);
        machine.set(machine.wall_seconds + 2_000_000_000);
        assert_eq!(machine.run(3000), Some(1_007_000), "the time before goes on");
        machine.set(machine.wall_seconds - 2_000_000_000);
        assert_eq!(machine.run(3000), Some(1_010_000));
        assert_eq!(machine.run(10_000), Some(1_020_000));
    }

    #[test]
    fn a_wrong_time_at_the_start_ends_nothing() {
        let mut machine = Machine::at(4_000_000_000);
        assert_eq!(machine.run(3000), None);
        machine.set(machine.wall_seconds - 3_000_000_000);
        assert_eq!(machine.run(3590), None);
        assert_eq!(machine.run(10), Some(1_000_006_600));
    }

    #[test]
    fn a_jump_that_stays_is_believed() {
        let mut machine = Machine::at(1_000_000);
        machine.run(4000);
        // A machine that slept.
        machine.set(machine.wall_seconds + 500_000);
        assert_eq!(machine.run(3590), Some(1_007_590));
        assert_eq!(machine.run(10), Some(1_507_600));
        // One that is set back is believed, too.
        machine.set(machine.wall_seconds - 400_000);
        assert_eq!(machine.run(3600), Some(1_111_200));
    }

    #[test]
    fn what_is_put_right_slowly_is_no_jump() {
        let mut machine = Machine::at(1_000_000);
        machine.run(4000);
        machine.wall_seconds += 1;
        assert_eq!(machine.run(100), Some(1_004_100));
        // Many small steps are one jump in the end.
        for _ in 0..100 {
            machine.wall_seconds += 1;
            machine.run(100);
        }
        let (got, wall) = (machine.run(4000).unwrap(), machine.wall_seconds);
        assert!(wall - got <= JUMP.as_secs(), "{got} {wall}");
    }
}
