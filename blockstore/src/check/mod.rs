//! Verifies the store's invariants I1 to I7 on one moment of the index, while it serves.
//!
//! | invariant | where |
//! |---|---|
//! | I1 a chunk's count equals the map blocks naming it | `chunks.rs` |
//! | I2 every named chunk is readable and its bytes hash to its name | `stored.rs`, `files.rs` |
//! | I3 every hash entry names a stored chunk whose hash begins so | `chunks.rs` |
//! | I4 frozen layers never change | held by the model and crash tests |
//! | I5 a layer's children, snapshots, entries, blocks equal what is stored | `layers.rs`, `overlaps.rs`, `used.rs` |
//! | I6 a segment's live chunks equal its chunks with a count above 0 | `chunks.rs` |
//! | I7 every dirent names a live inode, link counts match, no orphan | `names.rs`, `snapshots.rs` |
//! | I8 after recovery all that was acknowledged is there | held by the crash tests |
//!
//! Memory is bounded: families are read in order of their keys, and what must be added up is
//! added up for as many inodes, layers or chunks at a time as the budget holds, with one pass
//! over the family that counts them for each such part. Beyond it stay 24 bytes a layer that
//! others lie upon, and 64 a segment. Compaction waits while one segment is read, no longer.

mod chunks;
mod files;
mod findings;
mod hits;
mod layers;
mod names;
mod overlaps;
mod second_look;
mod snapshots;
mod stored;
mod used;
mod watched;

use std::ops::ControlFlow;

pub(crate) use findings::{Findings, Fix};
pub(crate) use hits::parts;
pub(crate) use second_look::SecondLook;

use watched::Watched;

use crate::core::Core;
use crate::error::Result;
use crate::id::ChunkId;
use crate::kv::{Family, KvRead};
use crate::options::Options;
use crate::progress::Progress;
use crate::record::{Counters, key, number_of as number};
use crate::types::{CheckReport, Hit};

/// The share of the store's memory that a check may take for what it adds up: a fraction of what
/// the caches leave for work like this (`core.rs`).
const MEMORY_DIVISOR: u64 = 32;

/// Everything: no key of the store sorts behind 64 bytes of 0xff.
const EVERYTHING_END: [u8; 64] = [0xff; 64];

/// One check: where it reads, what it may use, what it has added up.
pub(crate) struct Check<'a> {
    pub(crate) core: &'a Core,
    pub(crate) view: &'a dyn KvRead,
    /// Read and hash the chunks' bytes.
    pub(crate) data: bool,
    progress: &'a Progress,
    memory_bytes: u64,
    /// What the counters should be.
    counted: Counters,
}

impl<'a> Check<'a> {
    fn new(core: &'a Core, view: &'a dyn KvRead, data: bool, progress: &'a Progress) -> Self {
        let memory_bytes =
            core.options.memory_bytes.max(Options::MEMORY_BYTES_MIN) / MEMORY_DIVISOR;
        Self { core, view, data, progress, memory_bytes, counted: Counters::default() }
    }

    /// How many things of this size the budget holds.
    fn at_once(&self, bytes: usize) -> usize {
        let each = u64::try_from(bytes).unwrap_or(u64::MAX).max(1);
        usize::try_from(self.memory_bytes / each).unwrap_or(usize::MAX).max(1)
    }
}

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

/// The key just behind this one.
fn behind(key: &[u8]) -> Vec<u8> {
    let mut next = key.to_vec();
    next.push(0);
    next
}

/// Runs one part; what it cannot read is a finding, and the others go on.
fn part(
    check: &mut Check<'_>,
    findings: &mut Findings,
    what: &'static str,
    run: impl FnOnce(&mut Check<'_>, &mut Findings) -> Result<()>,
) -> Result<()> {
    check.progress.begin(what, 0);
    let outcome = run(check, findings);
    // It reads nothing further then, which is no finding.
    check.progress.point()?;
    if let Err(error) = outcome {
        findings.unreadable(what, &error);
    }
    Ok(())
}

/// See the module's text. With `data` every named chunk is read and hashed, too.
pub(crate) fn check(core: &Core, data: bool, progress: &Progress) -> Result<CheckReport> {
    core.readable()?;
    let mut findings = Findings::default();
    run(core, data, &mut findings, progress)?;
    Ok(findings.report)
}

/// Where damaged chunks are seen in files and snapshots.
pub(crate) fn hits_of(core: &Core, damaged: Vec<ChunkId>) -> Result<Vec<Hit>> {
    let view = core.kv.view();
    let mut findings = Findings { damaged, ..Findings::default() };
    let progress = Progress::default();
    hits::check(&Check::new(core, view.as_ref(), false, &progress), &mut findings)?;
    // Lost blocks are known.
    Ok(findings.report.hits.into_iter().filter(|hit| !hit.is_lost).collect())
}

/// The same into findings that may collect what would put things right.
///
/// # Errors
/// `Cancelled`: the findings say nothing then.
pub(crate) fn run(
    core: &Core,
    data: bool,
    findings: &mut Findings,
    progress: &Progress,
) -> Result<()> {
    let view = core.kv.view();
    let view = Watched { view: view.as_ref(), progress };
    let check = &mut Check::new(core, &view, data, progress);
    part(check, findings, "names", names::check)?;
    part(check, findings, "snapshots", snapshots::check)?;
    part(check, findings, "layers", layers::check)?;
    part(check, findings, "used blocks", |check, findings| used::check(check, findings))?;
    part(check, findings, "chunks", chunks::check)?;
    progress.begin("files", 0);
    files::check(check, findings);
    progress.point()?;
    progress.begin("copy of the index", 0);
    if let Some(error) = crate::index_copy::check(core) {
        findings
            .wrong(format!("the copy of the index: {error}; another is written by `gc`"), || {
                Fix::CopyIndex
            });
    }
    if !findings.is_partial {
        part(check, findings, "counters", |check, findings| counters(check, findings))?;
    }
    part(check, findings, "what damage hits", |check, findings| hits::check(check, findings))?;
    core.copies.note_index(findings.hopeless > 0);
    Ok(())
}

/// The totals, and that numbers to be given out are free.
fn counters(check: &Check<'_>, findings: &mut Findings) -> Result<()> {
    let bytes = check.view.get(Family::Meta, key::META_COUNTERS)?;
    let stored = bytes.as_deref().map(Counters::decode).transpose()?.unwrap_or_default();
    let mut right = check.counted;
    right.next_inode = right.next_inode.max(stored.next_inode);
    right.next_layer = right.next_layer.max(stored.next_layer);
    if stored == right {
        return Ok(());
    }
    for (what, got, expected) in [
        ("I7: counter of inodes", stored.inodes, right.inodes),
        ("I7: counter of files", stored.files, right.files),
        ("I7: counter of snapshots", stored.snapshots, right.snapshots),
        ("I7: counter of layers", stored.layers, right.layers),
        ("I5: dead layers", stored.dead_layers, right.dead_layers),
        ("I5: mapped blocks", stored.mapped_blocks, right.mapped_blocks),
        ("I6: live chunks", stored.live_chunks, right.live_chunks),
        ("I7: next inode", stored.next_inode, right.next_inode),
        ("I5: next layer", stored.next_layer, right.next_layer),
    ] {
        if got != expected {
            findings.wrong(findings::differs(what, got, expected), || Fix::Counters(right));
        }
    }
    Ok(())
}
