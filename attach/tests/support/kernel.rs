//! The running kernel, and its table of mounts.

use std::fs;
use std::path::Path;

/// The first two numbers of its release.
pub(crate) fn release() -> (u32, u32) {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(|sign: char| !sign.is_ascii_digit()).map(str::parse);
    (numbers.next().unwrap().unwrap(), numbers.next().unwrap().unwrap())
}

/// The line of what is mounted there (proc(5)).
pub(crate) fn mount_line(target: &Path) -> String {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let escaped = target.to_str().unwrap().replace(' ', "\\040");
    table.lines().find(|line| line.contains(&escaped)).unwrap().to_owned()
}
