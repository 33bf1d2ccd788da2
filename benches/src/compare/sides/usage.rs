//! What a process has used so far, as the kernel counts it.

use std::path::Path;
use std::time::Duration;

use crate::failure::Failure;

/// Where in `/proc/PID/stat`, counted behind the name of the program, its time in its own code
/// is; that in the kernel follows.
const USER_TIME_FIELD: usize = 11;

/// What a process has used so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Usage {
    /// In its own code and in the kernel, of all threads; in steps of 10 ms.
    pub(super) processor_time: Duration,
    /// What was fetched from disks for it.
    pub(super) disk_read_bytes: u64,
}

impl Usage {
    pub(super) fn of(process: u32) -> Result<Self, Failure> {
        let read = |file: &str| {
            let path = format!("/proc/{process}/{file}");
            std::fs::read_to_string(&path).map_err(Failure::at("read", Path::new(&path)))
        };
        let (stat, io) = (read("stat")?, read("io")?);
        let ticks_per_second = rustix::param::clock_ticks_per_second();
        Self::parse(&stat, &io, ticks_per_second).ok_or_else(|| {
            Failure::Unfit(format!("the kernel counts nothing of process {process}"))
        })
    }

    fn parse(stat: &str, io: &str, ticks_per_second: u64) -> Option<Self> {
        // The name is in parentheses and may hold anything.
        let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(USER_TIME_FIELD);
        let ticks = fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?;
        let read = io.lines().find_map(|line| line.strip_prefix("read_bytes: "))?;
        Some(Self {
            processor_time: Duration::from_millis(ticks * 1000 / ticks_per_second),
            disk_read_bytes: read.parse().ok()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_is_read_whatever_the_program_is_called() {
        let stat = "42 (a) b (c) S 1 42 42 0 -1 4194560 100 0 3 0 250 75 9 9 20 0 1 0 500 1 2";
        let io = "rchar: 1\nsyscr: 2\nread_bytes: 4096\nwrite_bytes: 3\n";
        let usage = Usage::parse(stat, io, 100).unwrap();
        assert_eq!(usage.processor_time, Duration::from_millis(3250));
        assert_eq!(usage.disk_read_bytes, 4096);
        assert_eq!(Usage::parse("42 (a) S 1", io, 100), None);
    }

    #[test]
    fn this_process_uses_time() {
        let start = Usage::of(std::process::id()).unwrap();
        let mut word = 1_u64;
        // A second of work on a machine a hundred times as slow as any.
        for _ in 0..1000 {
            for _ in 0..100_000 {
                word = std::hint::black_box(word.wrapping_mul(3));
            }
            if Usage::of(std::process::id()).unwrap().processor_time > start.processor_time {
                return;
            }
        }
        panic!("no time was used");
    }
}
