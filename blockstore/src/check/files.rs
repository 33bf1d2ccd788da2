//! I2: the segment files: headers, and record by record all but the chunks' bytes.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::{Check, Findings, Fix};
use crate::disk::{DiskFile, FileName, FileRole};
use crate::error::{Error, Result};
use crate::segment_format::{FILE_HEADER_BYTES, decode_file_header, walk};

/// Every file that a segment lies in, and the one that the log appends to.
pub(super) fn check(check: &Check<'_>, findings: &mut Findings) {
    let core = check.core;
    let named: BTreeSet<FileName> =
        core.committer.leader.lock().segments.values().map(|record| record.file).collect();
    for name in named {
        let _gc = core.gc.lock();
        // Compaction may have removed it meanwhile.
        let is_named =
            core.committer.leader.lock().segments.values().any(|record| record.file == name);
        if !is_named {
            continue;
        }
        if let Err(error) = file(check, name) {
            findings.wrong(format!("I2: {name}: {error}"), || Fix::Move(name));
        }
        findings.report.files += 1;
    }
}

fn file(check: &Check<'_>, name: FileName) -> Result<()> {
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
    while offset < end {
        let record = walk::record(file.as_ref(), store, (offset, end))
            .map_err(|error| at(&error, offset))?;
        ends_well = is_open || record.is_directory;
        offset = record.end;
    }
    if ends_well {
        return Ok(());
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
