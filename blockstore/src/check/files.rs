//! I2: the segment files: headers, and record by record all but the chunks' bytes. And the log files
//! that a rebuild of the index needs: that they are whole, and none of them missing.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::{Check, Findings, Fix};
use crate::core::Core;
use crate::disk::{DiskFile, FileName, FileRole};
use crate::error::{Error, Result};
use crate::id::SegmentId;
use crate::segment_format::stream::PIECE_BYTES;
use crate::segment_format::{FILE_HEADER_BYTES, decode_file_header, walk};

/// What becomes of a damaged file, and of those around it.
const COPY: &str = "the index could not be made anew; a copy of it is written by `gc`";

/// The first and the last commit of a file, if it has any.
type Commits = Option<(u64, u64)>;

/// Every file that a segment lies in, the one that the log appends to, and the log files that a
/// rebuild needs.
pub(super) fn check(check: &Check<'_>, findings: &mut Findings) {
    let core = check.core;
    let mut logs: BTreeMap<FileName, Commits> = BTreeMap::new();
    let mut is_whole = true;
    let files = match files(core) {
        Ok(files) => files,
        Err(error) => return findings.follows(format!("log: {error}")),
    };
    for name in files {
        if check.progress.point().is_err() {
            // The check answers that by itself.
            return;
        }
        let _gc = core.gc.lock();
        // Compaction, or a new copy of the index, may have removed it meanwhile.
        let is_named = is_named(core, name);
        let is_kept = || core.disk.list().is_ok_and(|files| files.contains(&name));
        if !is_named && !is_kept() {
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
            Err(error) if is_kept() => {
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

fn files(core: &Core) -> Result<BTreeSet<FileName>> {
    // Compaction and copies of the index remove no file meanwhile.
    let _gc = core.gc.lock();
    let (mut files, open): (BTreeSet<FileName>, SegmentId) = {
        let leader = core.committer.leader.lock();
        let files = leader.segments.values().map(|record| record.file).collect();
        (files, leader.log.position().segment)
    };
    let needed = core.copies.needed_from().map_or(SegmentId::new(1), |from| from.segment);
    let logs = core.disk.list()?.into_iter().filter(|name| name.role == FileRole::Log);
    files.extend(logs.filter(|name| (needed..open).contains(&name.number)));
    Ok(files)
}

fn is_named(core: &Core, name: FileName) -> bool {
    core.committer.leader.lock().segments.values().any(|record| record.file == name)
}

/// What is missing of the log that a rebuild would replay.
fn gap(core: &Core, logs: &BTreeMap<FileName, Commits>) -> Option<String> {
    let needed = core.copies.needed_from();
    let is_needed = |name: &FileName| needed.is_none_or(|from| name.number >= from.segment);
    let mut logs = logs.iter().filter(|(name, _)| is_needed(name));
    let (mut before, mut last) = match (needed, logs.next()?) {
        (Some(from), (name, commits)) if name.number != from.segment => {
            // A file without a commit is taken back when the one behind the last is not made.
            core.copies.note_lacking();
            if commits.is_some_and(|(first, _)| first != from.sequence + 1) {
                let number = from.segment;
                return Some(format!(
                    "the file of number {number}, at which the copy stands, is missing"
                ));
            }
            (*name, Some(commits.map_or(from.sequence, |(_, last)| last)))
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

/// Whether there are only zeros in a part of a file.
fn is_blank(file: &dyn DiskFile, (from, end): (u64, u64)) -> Result<bool> {
    let mut offset = from;
    while offset < end {
        let left = usize::try_from(end - offset).unwrap_or(usize::MAX);
        let piece = file.read_at(offset, left.min(PIECE_BYTES))?;
        if piece.is_empty() || piece.iter().any(|&byte| byte != 0) {
            return Ok(false);
        }
        offset += u64::try_from(piece.len()).unwrap_or(u64::MAX);
    }
    Ok(true)
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
        // A power cut can bring back the zeros that were written ahead, behind a directory.
        if record.is_directory && is_blank(file.as_ref(), (offset, end))? {
            break;
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
