//! What a check finds, and what would put each of it right.

use crate::disk::FileName;
use crate::error::Error;
use crate::id::{ChunkId, InodeId, LayerId};
use crate::kv::{Family, Write};
use crate::record::{Counters, Run};
use crate::types::{CHECK_PROBLEMS_MAX, CheckReport};

/// Changes that one round of a repair collects: a bound on its memory. What is left over is found
/// by the next round.
const FIXES_MAX: usize = 1 << 16;

/// What is said of a problem that only the log can solve.
const REBUILD: &str =
    "; no repair: rebuild the index with `slackwaterd check --data-dir DIR --rebuild`";

/// A change that a repair makes.
#[derive(Debug)]
pub(crate) enum Fix {
    /// These entries of the index.
    Write(Vec<Write>),
    /// A layer's runs, replaced by others of the same blocks.
    Replace(LayerId, Vec<Run>, Vec<Run>),
    /// The inode has no name: it gets one in `lost+found`.
    Adopt(InodeId),
    /// The counters.
    Counters(Counters),
    /// What lives of a damaged segment file is written anew.
    Move(FileName),
    /// A new copy of the index.
    CopyIndex,
}

impl Fix {
    pub(crate) fn put(family: Family, key: Vec<u8>, value: Vec<u8>) -> Self {
        Self::Write(vec![Write { family, key, value: Some(value) }])
    }

    pub(crate) fn delete(family: Family, key: &[u8]) -> Self {
        Self::Write(vec![Write { family, key: key.to_vec(), value: None }])
    }
}

/// Collects what is wrong.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    pub(crate) report: CheckReport,
    /// What would put it right; collected for a repair only.
    pub(crate) fixes: Option<Vec<Fix>>,
    /// Problems that no repair solves. With one of them nothing else is what it seems.
    pub(crate) hopeless: u64,
    /// Something was not gone through to its end: what was added up is not all.
    pub(crate) is_partial: bool,
    /// Chunks that cannot be read though blocks name them.
    pub(crate) damaged: Vec<ChunkId>,
}

impl Findings {
    /// Ready for a repair.
    pub(crate) fn with_fixes() -> Self {
        Self { fixes: Some(Vec::new()), ..Self::default() }
    }

    fn list(&mut self, problem: String) {
        if self.report.problems.len() < CHECK_PROBLEMS_MAX {
            self.report.problems.push(problem);
        } else {
            self.report.problems_left_out += 1;
        }
    }

    /// A problem that a repair solves.
    pub(crate) fn wrong(&mut self, problem: String, fix: impl FnOnce() -> Fix) {
        self.list(problem);
        if let Some(fixes) = self.fixes.as_mut().filter(|fixes| fixes.len() < FIXES_MAX) {
            fixes.push(fix());
        }
    }

    /// A problem that another change solves, or one that the next round finds.
    pub(crate) fn follows(&mut self, problem: String) {
        self.list(problem);
    }

    /// A problem of the index that only a new index solves.
    pub(crate) fn rebuild(&mut self, problem: &str) {
        self.hopeless += 1;
        self.list(format!("{problem}{REBUILD}"));
    }

    /// Something is missing that a new index may have; without one, this change gives it up.
    pub(crate) fn missing(&mut self, problem: &str, fix: impl FnOnce() -> Fix) {
        self.hopeless += 1;
        self.wrong(format!("{problem}{REBUILD}"), fix);
    }

    /// Something of the index cannot be read.
    pub(crate) fn unreadable(&mut self, what: &str, error: &Error) {
        self.is_partial = true;
        self.rebuild(&format!("index: {what}: {error}"));
    }
}

/// "stored, counted" of a number.
pub(super) fn differs(what: &str, got: u64, expected: u64) -> String {
    format!("{what}: stored {got}, counted {expected}")
}
