//! Verifies the store's invariants I1 to I7 on one moment of the index, while it serves.
//!
//! | invariant | where |
//! |---|---|
//! | I1 a chunk's count equals the map blocks naming it | `chunks.rs` |
//! | I2 every named chunk is readable and its bytes hash to its name | `chunks.rs` |
//! | I3 every hash entry names a stored chunk whose hash begins so | `chunks.rs` |
//! | I4 frozen layers never change | held by the model and crash tests |
//! | I5 a layer's children, snapshots, entries, blocks equal what is stored | `layers.rs` |
//! | I6 a segment's live chunks equal its chunks with a count above 0 | `chunks.rs` |
//! | I7 every dirent names a live inode, link counts match, no orphan | `names.rs` |
//! | I8 after recovery all that was acknowledged is there | held by the crash tests |

mod chunks;
mod layers;
mod names;

use std::collections::HashMap;
use std::ops::ControlFlow;

use crate::core::Core;
use crate::error::Result;
use crate::id::{InodeId, LayerId, SnapshotId};
use crate::kv::{Family, KvRead};
use crate::record::{Counters, InodeRecord, LayerRecord, SnapshotRecord, key};
use crate::types::{CHECK_PROBLEMS_MAX, CheckReport};

/// Collects what is wrong.
#[derive(Debug, Default)]
struct Findings(CheckReport);

impl Findings {
    fn add(&mut self, problem: String) {
        if self.0.problems.len() < CHECK_PROBLEMS_MAX {
            self.0.problems.push(problem);
        } else {
            self.0.problems_left_out += 1;
        }
    }

    /// Adds the problem unless `fine`.
    fn expect(&mut self, fine: bool, problem: impl FnOnce() -> String) {
        if !fine {
            self.add(problem());
        }
    }

    fn expect_equal(&mut self, got: u64, expected: u64, what: impl FnOnce() -> String) {
        self.expect(got == expected, || format!("{}: stored {got}, counted {expected}", what()));
    }
}

/// The small families, read whole.
struct Tables {
    inodes: HashMap<InodeId, InodeRecord>,
    layers: HashMap<LayerId, LayerRecord>,
    snapshots: HashMap<SnapshotId, SnapshotRecord>,
    counters: Counters,
}

/// Everything: no key of the store sorts behind 64 bytes of 0xff.
const EVERYTHING_END: [u8; 64] = [0xff; 64];

/// Visits all entries of a family.
fn each(
    view: &dyn KvRead,
    family: Family,
    mut visit: impl FnMut(&[u8], &[u8]) -> Result<()>,
) -> Result<()> {
    view.scan(family, &[], &EVERYTHING_END, &mut |key, value| {
        visit(key, value)?;
        Ok(ControlFlow::Continue(()))
    })
}

fn number(key: &[u8]) -> Result<u64> {
    crate::codec::Decoder::new("key", key).u64()
}

impl Tables {
    fn load(view: &dyn KvRead) -> Result<Self> {
        let mut tables = Self {
            inodes: HashMap::new(),
            layers: HashMap::new(),
            snapshots: HashMap::new(),
            counters: Counters::default(),
        };
        each(view, Family::Inode, |key, value| {
            tables.inodes.insert(InodeId::new(number(key)?), InodeRecord::decode(value)?);
            Ok(())
        })?;
        each(view, Family::Layer, |key, value| {
            tables.layers.insert(LayerId::new(number(key)?), LayerRecord::decode(value)?);
            Ok(())
        })?;
        each(view, Family::Snapshot, |key, value| {
            if let Some((b'i', id)) = key.split_first() {
                let id = crate::codec::Decoder::new("snapshot key", id).array()?;
                let id = SnapshotId::from_bytes(id);
                tables.snapshots.insert(id, SnapshotRecord::decode(value)?);
            }
            Ok(())
        })?;
        if let Some(bytes) = view.get(Family::Meta, key::META_COUNTERS)? {
            tables.counters = Counters::decode(&bytes)?;
        }
        Ok(tables)
    }
}

pub(crate) fn check(core: &Core, data: bool) -> Result<CheckReport> {
    // Compaction would take segments from under the directories that are read here.
    let _gc = core.gc.lock();
    let view = core.kv.view();
    let mut findings = Findings::default();
    let tables = Tables::load(view.as_ref())?;
    findings.0.inodes = u64::try_from(tables.inodes.len()).unwrap_or(u64::MAX);
    findings.0.layers = u64::try_from(tables.layers.len()).unwrap_or(u64::MAX);
    names::check(view.as_ref(), &tables, &mut findings)?;
    let mapped = layers::check(view.as_ref(), &tables, &mut findings)?;
    chunks::check(core, view.as_ref(), (&tables, &mapped), (data, &mut findings))?;
    if let Some(error) = crate::index_copy::check(core) {
        findings.add(format!("the copy of the index: {error}; another is written by `gc`"));
    }
    Ok(findings.0)
}
