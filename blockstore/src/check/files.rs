//! I2: the segment files: headers, and record by record all but the chunks' bytes. And the log files
//! that a rebuild of the index needs: that they are whole, and none of them missing.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::{Check, Findings, Fix};
use crate::core::Core;
use crate::disk::{DiskFile, FileName, FileRole};
use crate::error::{Error, Result};
use crate::segment_format::{FILE_HEADER_BYTES, decode_file_header, walk};

/// What becomes of a damaged file, and of those around it.
const COPY: &str = "the index could not be made anew; a copy of it is written by `gc`";

/// The first and the last commit of a file, if it has any.
type Commits = Option<(u64, u64)>;

/// Every file that a segment lies in, the one that the log appends to, and the log files that wait
/// for a copy of the index.
pub(super) fn check(check: &Check<'_>, findings: &mut Findings) {
    let core = check.core;
    let mut logs: BTreeMap<FileName, Commits> = BTreeMap::new();
    let mut is_whole = true;
    for name in files(core) {
        let _gc = core.gc.lock();
        // Compaction, or a new copy of the index, may have removed it meanwhile.
        let is_named = is_named(core, name);
        if !is_named && !is_retired(core, name) {
            continue;
        }
        match file(check, name) {
            Ok(commits) if name.role == FileRole::Log => {
                logs.insert(name, commits);
            }
            Ok(_) => {}
            Err(error) if is_named => {
                findings.wrong(format!("I2: {name}: {error}"), || Fix::Move(name));
                is_whole = false;
            }
            Err(error) if is_retired(core, name) => {
                core.copies.note_lacking();
                findings.wrong(format!("{name}: {error}: {COPY}"), || Fix::CopyIndex);
                is_whole = false;
            }
            // It went while it was read.
            Err(_) => continue,
        }
        findings.report.files += 1;
    }
    // What is damaged was told.
    if let Some(gap) = gap(core, &logs).filter(|_| is_whole) {
        core.copies.note_lacking();
        findings.wrong(format!("log: {gap}: {COPY}"), || Fix::CopyIndex);
    }
}

fn files(core: &Core) -> BTreeSet<FileName> {
    // Compaction takes a file from the one list before it puts it on the other.
    let _gc = core.gc.lock();
    let mut files: BTreeSet<FileName> =
        core.committer.leader.lock().segments.values().map(|record| record.file).collect();
    files.extend(core.copies.retired());
    files
}

fn is_named(core: &Core, name: FileName) -> bool {
    core.committer.leader.lock().segments.values().any(|record| record.file == name)
}

fn is_retired(core: &Core, name: FileName) -> bool {
    core.copies.retired().contains(&name)
}

/// What is missing of the log that a rebuild would replay.
fn gap(core: &Core, logs: &BTreeMap<FileName, Commits>) -> Option<String> {
    let needed = core.copies.needed_from();
    let mut logs = logs.iter().filter(|(name, _)| needed.is_none_or(|from| name.number >= from));
    let (mut before, mut last) = match (needed, logs.next()?) {
        (Some(from), (name, _)) if name.number != from => {
            return Some(format!(
                "the file of number {from}, at which the copy stands, is missing"
            ));
        }
        (Some(_), (name, commits)) => (*name, commits.map(|(_, last)| last)),
        (None, (name, Some((first, last)))) if *first == 1 => (*name, Some(*last)),
        (None, (_, None)) => return None,
        (None, (name, Some((first, _)))) => {
            return Some(format!(
                "the commits before {first}, with which {name} begins, are missing"
            ));
        }
    };
    for (name, commits) in logs {
        let Some((first, end)) = *commits else { continue };
        if last.is_some_and(|last| first.checked_sub(1) != Some(last)) {
            return Some(format!("commits are missing between {before} and {name}"));
        }
        (before, last) = (*name, Some(end));
    }
    None
}

/// Reads a file, and answers its commits.
fn file(check: &Check<'_>, name: FileName) -> Result<Commits> {
    // Opened anew: a cached one may be of a file that was removed.
    let file: Arc<dyn DiskFile> = check.core.disk.open(name)?;
    // Where the next commit goes: behind a roll that is a file with nothing but its header.
    let position = check.core.committer.leader.lock().log.position();
    let is_open = name.role == FileRole::Log && name.number == position.segment;
    let end = if is_open { position.offset_bytes } else { file.length_bytes()? };
    let store = decode_file_header(name, &file.read_at(0, FILE_HEADER_BYTES)?)?;
    if store != check.core.store {
        let reason = format!("store {store}, expected {}", check.core.store);
        return Err(Error::corrupt(format!("header of {name}"), reason));
    }
    let mut offset = u64::try_from(FILE_HEADER_BYTES).unwrap_or(u64::MAX);
    let mut ends_well = is_open;
    let mut commits: Commits = None;
    while offset < end {
        let record = walk::record(file.as_ref(), store, (offset, end))
            .map_err(|error| at(&error, offset))?;
        ends_well = is_open || record.is_directory;
        offset = record.end;
        if let Some(sequence) = record.commit {
            commits = Some((commits.map_or(sequence, |(first, _)| first), sequence));
        }
    }
    if ends_well {
        return Ok(commits);
    }
    Err(Error::corrupt(format!("offset {offset}"), "the file ends without a directory"))
}

fn at(error: &Error, offset: u64) -> Error {
    let reason = match error {
        Error::Corrupt { reason, .. } => reason.clone(),
        other => other.to_string(),
    };
    Error::corrupt(format!("the record at offset {offset}"), reason)
}
