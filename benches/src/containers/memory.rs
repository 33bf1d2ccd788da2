//! The memory that is used on the whole machine, page cache included.

use std::path::Path;

use crate::failure::Failure;

const DROP_CACHES: &str = "/proc/sys/vm/drop_caches";

/// Gives up what the kernel can read again.
pub(super) fn drop_caches() -> Result<(), Failure> {
    rustix::fs::sync();
    // Pages, and names with inodes (Documentation/admin-guide/sysctl/vm.rst).
    std::fs::write(DROP_CACHES, "3")
        .map_err(Failure::at("write (as root) to", Path::new(DROP_CACHES)))
}

/// Refuses to begin what cannot drop the caches later.
pub(super) fn require_root() -> Result<(), Failure> {
    let opened = std::fs::File::options().write(true).open(DROP_CACHES);
    opened
        .map(drop)
        .map_err(Failure::at("open (as root, to measure memory)", Path::new(DROP_CACHES)))
}

/// MiB that are in use.
pub(super) fn used_mib() -> Result<f64, Failure> {
    let path = Path::new("/proc/meminfo");
    let text = std::fs::read_to_string(path).map_err(Failure::at("read", path))?;
    used_in(&text)
        .ok_or_else(|| Failure::Unfit(format!("{} has no MemTotal or MemFree", path.display())))
}

fn used_in(text: &str) -> Option<f64> {
    let kibibytes = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    let used = kibibytes("MemTotal")?.checked_sub(kibibytes("MemFree")?)?;
    u32::try_from(used / 1024).ok().map(f64::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_free_is_used() {
        let text = "MemTotal:  8192 kB\nMemFree:  2048 kB\nMemAvailable:  4096 kB\n";
        assert_eq!(used_in(text), Some(6.0));
        assert_eq!(used_in("MemTotal: 1 kB\n"), None);
        assert!(used_mib().unwrap() > 0.0);
    }
}
