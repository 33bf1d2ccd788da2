//! The limit of open files.
//!
//! A shell gives 1,024, which RocksDB's tables, segments and connections of one busy server
//! can pass. What the administrator allows at most (the hard limit) is asked for instead.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Open files that are enough: the most connections, segments of a store of many TiB, and
/// RocksDB's tables.
const OPEN_FILES_ENOUGH: u64 = 65_536;

/// Raises the soft limit as far as is allowed and of use. A lower one still serves, with
/// fewer connections, so that a failure is only told.
pub(crate) fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    let Some(wanted) = wanted(limit.current, limit.maximum) else {
        return;
    };
    let raised = Rlimit { current: Some(wanted), maximum: limit.maximum };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => tracing::debug!(from = limit.current, to = wanted, "limit of open files raised"),
        Err(error) => tracing::warn!(%error, wanted, "the limit of open files was not raised"),
    }
}

/// The soft limit to ask for, if it is above what there is; `None` as a limit is no limit.
fn wanted(current: Option<u64>, maximum: Option<u64>) -> Option<u64> {
    let current = current?;
    let wanted = maximum.map_or(OPEN_FILES_ENOUGH, |maximum| maximum.min(OPEN_FILES_ENOUGH));
    (wanted > current).then_some(wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_raised_and_never_lowered() {
        assert_eq!(wanted(Some(1024), Some(4096)), Some(4096));
        assert_eq!(wanted(Some(1024), Some(1 << 20)), Some(OPEN_FILES_ENOUGH));
        assert_eq!(wanted(Some(1024), None), Some(OPEN_FILES_ENOUGH));
        assert_eq!(wanted(Some(1 << 20), Some(1 << 20)), None);
        assert_eq!(wanted(None, None), None);
    }
}
