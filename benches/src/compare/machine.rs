//! The machine that was measured, in one line: figures of another are others.

use std::path::Path;

use crate::failure::Failure;
use crate::process::{command, output};

/// Processor, cores, memory, kernel, and the file system of a directory.
pub(crate) fn describe(directory: &Path) -> Result<String, Failure> {
    let read =
        |path: &str| std::fs::read_to_string(path).map_err(Failure::at("read", Path::new(path)));
    let processors = read("/proc/cpuinfo")?;
    let processor = processor_in(&processors);
    let cores = std::thread::available_parallelism().map_err(Failure::on("count the cores"))?;
    let memory = memory_in(&read("/proc/meminfo")?);
    let kernel = read("/proc/sys/kernel/osrelease")?;
    let mut find = command("findmnt");
    find.args(["--noheadings", "--output", "FSTYPE,SOURCE", "--target"]).arg(directory);
    let file_system = output(&mut find)?;
    let (kind, source) = file_system.trim().split_once(' ').unwrap_or((file_system.trim(), "?"));
    Ok(format!(
        "{processor}, {cores} cores, {memory}, Linux {}, {kind} on {}",
        kernel.trim(),
        source.trim()
    ))
}

/// The processor's name.
fn processor_in(text: &str) -> &str {
    let name = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    name.map_or("unknown processor", |(_, name)| name.trim())
}

/// The memory in whole GiB.
fn memory_in(text: &str) -> String {
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kibibytes = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kibibytes.map_or_else(
        || "unknown memory".to_owned(),
        // The kernel keeps some for itself: nearest, not down.
        |kibibytes| format!("{} GiB memory", (kibibytes + (1 << 19)) >> 20),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_and_memory_are_read_from_what_the_kernel_prints() {
        assert_eq!(processor_in("processor\t: 0\nmodel name\t: A (B) 3\n"), "A (B) 3");
        assert_eq!(processor_in("processor\t: 0\n"), "unknown processor");
        assert_eq!(memory_in("MemTotal:       24600000 kB\nMemFree: 1 kB\n"), "23 GiB memory");
        assert_eq!(memory_in(""), "unknown memory");
    }

    #[test]
    fn this_machine_is_described() {
        let text = describe(Path::new("/")).unwrap();
        assert!(text.contains(" cores, ") && text.contains(", Linux "), "{text}");
    }
}
