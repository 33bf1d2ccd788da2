//! The process's numbers, under the names that every Prometheus client gives them, read from
//! /proc/self (proc(5)).

use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use super::plain::{Plain, encode, encode_one, gauge};

/// Reads /proc/self for each page. A number that cannot be read is left out.
#[derive(Debug)]
pub(super) struct ProcessCollector {
    start_seconds: f64,
}

impl ProcessCollector {
    /// A collector for a process that starts now.
    pub(super) fn new() -> Self {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            // A clock before 1970 gives 0.
            start_seconds: since_epoch.map_or(0.0, |age| age.as_secs_f64()),
        }
    }
}

impl Collector for ProcessCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        encode(&mut encoder, "process_", &numbers())?;
        encode_one(
            &mut encoder,
            "process_start_time_seconds",
            "Start of the process, in seconds since 1970",
            &ConstGauge::new(self.start_seconds),
        )?;
        match read("stat").and_then(|stat| cpu_seconds(&stat)) {
            Some(seconds) => encode_one(
                &mut encoder,
                "process_cpu_seconds",
                "Processor time spent, in user and system mode",
                &ConstCounter::new(seconds),
            ),
            None => Ok(()),
        }
    }
}

/// The whole numbers.
fn numbers() -> Vec<Plain> {
    let status = read("status").unwrap_or_default();
    let limits = read("limits").unwrap_or_default();
    [
        status_bytes(&status, "VmRSS:")
            .map(|bytes| gauge("resident_memory_bytes", bytes, "Memory in RAM")),
        status_bytes(&status, "VmHWM:").map(|bytes| {
            gauge("resident_memory_max_bytes", bytes, "Largest memory in RAM since start")
        }),
        status_bytes(&status, "VmSize:")
            .map(|bytes| gauge("virtual_memory_bytes", bytes, "Size of the address space")),
        status_number(&status, "Threads:").map(|count| gauge("threads", count, "Threads")),
        open_files().map(|count| gauge("open_fds", count, "Open file descriptors")),
        open_files_max(&limits)
            .map(|count| gauge("max_fds", count, "File descriptors that may be open at once")),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// A file of /proc/self.
fn read(name: &str) -> Option<String> {
    std::fs::read_to_string(format!("/proc/self/{name}")).ok()
}

/// The number behind a key of /proc/self/status.
fn status_number(status: &str, key: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(key))?;
    line.split_whitespace().next()?.parse().ok()
}

/// The bytes behind a key whose unit is kB, which is 1024 bytes there.
fn status_bytes(status: &str, key: &str) -> Option<u64> {
    status_number(status, key)?.checked_mul(1024)
}

/// Open file descriptors, less the one that reads the directory.
fn open_files() -> Option<u64> {
    let count = std::fs::read_dir("/proc/self/fd").ok()?.count();
    u64::try_from(count.saturating_sub(1)).ok()
}

/// The soft limit of open files.
fn open_files_max(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// User and system time out of /proc/self/stat: fields 14 and 15, counted behind the name of
/// the program, which may hold blanks and parentheses.
fn cpu_seconds(stat: &str) -> Option<f64> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_whitespace().skip(11);
    let user: u32 = fields.next()?.parse().ok()?;
    let system: u32 = fields.next()?.parse().ok()?;
    let ticks_per_second = u32::try_from(rustix::param::clock_ticks_per_second()).ok()?;
    Some((f64::from(user) + f64::from(system)) / f64::from(ticks_per_second))
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode_registry;
    use prometheus_client::registry::Registry;

    use super::*;

    #[test]
    fn reads_the_forms_of_proc() {
        let status = "Name:\tx y\nVmSize:\t  2048 kB\nVmRSS:\t    12 kB\nThreads:\t7\n";
        assert_eq!(status_bytes(status, "VmRSS:"), Some(12 * 1024));
        assert_eq!(status_number(status, "Threads:"), Some(7));
        assert_eq!(status_number(status, "None:"), None);
        let limits = "Limit   Soft Limit  Hard Limit  Units\nMax open files  1024  4096  files\n";
        assert_eq!(open_files_max(limits), Some(1024));
        let stat = "7 (a) b) S 1 1 1 0 -1 4194560 1 0 0 0 250 50 0 0 20 0 1 0 1 1 1";
        let ticks = rustix::param::clock_ticks_per_second();
        assert_eq!(ticks, 100, "Linux's USER_HZ");
        assert_eq!(cpu_seconds(stat), Some(3.0));
    }

    #[test]
    fn page_has_the_names_that_prometheus_knows() {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(ProcessCollector::new()));
        let mut page = String::new();
        encode_registry(&mut page, &registry).unwrap();
        for name in [
            "process_resident_memory_bytes",
            "process_resident_memory_max_bytes",
            "process_virtual_memory_bytes",
            "process_threads",
            "process_open_fds",
            "process_max_fds",
            "process_start_time_seconds",
        ] {
            let value = page
                .lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))
                .unwrap_or_else(|| panic!("{name} is missing:\n{page}"));
            assert!(value.parse::<f64>().unwrap() >= 1.0, "{name} is {value}");
        }
        assert!(page.contains("\nprocess_cpu_seconds_total "), "{page}");
    }
}
