//! What every experiment of a comparison is given, and what an experiment is.

use std::path::PathBuf;

use crate::failure::Failure;
use crate::row::Row;
use crate::stop::Stop;

/// What every experiment is given.
#[derive(Clone, Debug)]
pub(crate) struct Context {
    /// The program `slackwaterd`.
    pub(crate) server: PathBuf,
    /// Where temporary directories are made: all sides work on its file system.
    pub(crate) directory: PathBuf,
    /// How often each side has its turn.
    pub(crate) rounds: usize,
    /// Less work a sample, for a first look.
    pub(crate) is_quick: bool,
    /// What our server is given as `--memory`.
    pub(crate) memory: String,
}

/// Something that gives rows of the comparison.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Experiment {
    /// What `--only` takes; the keys of its rows begin with it.
    pub(crate) key: &'static str,
    /// What is measured, for `--list`.
    pub(crate) title: &'static str,
    pub(crate) run: fn(&Context, &Stop) -> Result<Vec<Row>, Failure>,
}
