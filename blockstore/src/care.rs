//! The care of a store: it is verified, cleaned, and made durable, while it serves.
//!
//! ```text
//! check, gc, checkpoint ---> the modules that do it
//!            |
//!            +-- Progress: how far it is; its end, if its caller leaves
//! ```

use crate::error::Result;
use crate::progress::Progress;
use crate::store::Store;
use crate::types::{CheckReport, GcReport};
use crate::{background, check, compact};

impl Store {
    /// Verifies the invariants on one moment of the index, while the store serves; with `data`
    /// it also reads and hashes every live chunk.
    ///
    /// # Errors
    /// When the index cannot be read at all; whatever is wrong in it is in the report.
    pub fn check(&self, data: bool) -> Result<CheckReport> {
        self.check_watched(data, &Progress::default())
    }

    /// As [`Store::check`]; others see by `progress` how far it is, and can end it.
    ///
    /// # Errors
    /// As of [`Store::check`]; `Cancelled`.
    pub fn check_watched(&self, data: bool, progress: &Progress) -> Result<CheckReport> {
        check::check(&self.core, data, progress)
    }

    /// Reclaims, collapses and compacts until nothing is left to do of what is there now; what
    /// clients delete meanwhile is left to the background.
    ///
    /// # Errors
    /// The common ones.
    pub fn gc(&self) -> Result<GcReport> {
        background::gc(&self.core)
    }

    /// As [`Store::gc`]; others see by `progress` how far it is, and can end it. What was freed by then
    /// stays freed.
    ///
    /// # Errors
    /// As of [`Store::gc`]; `Cancelled`.
    pub fn gc_watched(&self, progress: &Progress) -> Result<GcReport> {
        background::gc_watched(&self.core, progress)
    }

    /// Makes the index durable, so that a start after a crash replays nothing up to here.
    ///
    /// # Errors
    /// The common ones.
    pub fn checkpoint(&self) -> Result<()> {
        compact::checkpoint(&self.core)
    }
}
