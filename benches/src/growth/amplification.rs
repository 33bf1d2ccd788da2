//! What a byte of new data costs of the disk: bytes written to the block device, and bytes that
//! stay allocated. The store is on a file system of its own on a loop device of its own, so that
//! nobody else's writes count.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use super::callers;
use super::host::Host;
use super::row;
use crate::compare::context::Context;
use crate::compare::progress;
use crate::failure::Failure;
use crate::load::{self, Amount, CommitPace, Load, Work};
use crate::mount::{Kind, Mount};
use crate::row::{Row, Target};
use crate::stop::Stop;

/// Bytes of new data.
const PAYLOAD_BYTES: u64 = 4 << 30;

/// The same for a first look.
const PAYLOAD_BYTES_QUICK: u64 = 1 << 30;

/// Samples: each is of gigabytes, and differs little from the others.
const SAMPLES_MAX: usize = 3;

/// Bytes written to the device, a byte of data.
const WRITTEN_MAX: f64 = 1.3;

/// Bytes allocated in the data directory, a byte of data.
const ALLOCATED_MAX: f64 = 1.04;

/// The store keeps this file of free room for deletes on a full disk; it holds no data.
const RESERVE: &str = "reserve";

/// Bytes of one unit of `st_blocks`.
const ALLOCATION_UNIT_BYTES: u64 = 512;

/// The store is quiet once its counters have stood still so long: more than the age at which
/// dirty blocks are committed, and several periods of the background's.
const QUIET_TIME: Duration = Duration::from_secs(6);

pub(super) fn run(context: &Context, stop: &Stop) -> Result<Vec<Row>, Failure> {
    let payload = if context.is_quick { PAYLOAD_BYTES_QUICK } else { PAYLOAD_BYTES };
    let work = format!("{} GiB of new random data over NFS, final COMMIT included", payload >> 30);
    let mut written = Row {
        target: Some(Target::MedianAtMost(WRITTEN_MAX)),
        ..row("amplification-written", "B/B", format!("{work}: bytes written to the disk"))
    };
    let mut allocated = Row {
        target: Some(Target::MedianAtMost(ALLOCATED_MAX)),
        ..row(
            "amplification-space",
            "B/B",
            format!("{work}: bytes allocated after a clean stop, but for the reserve"),
        )
    };
    for round in 0..context.rounds.min(SAMPLES_MAX) {
        progress(&format!("{} GiB of new data on a disk of its own", payload >> 30));
        let seed = u64::try_from(round).unwrap_or_default() + 100;
        match sample(context, payload, seed, stop) {
            Err(failure) if failure.is_stop() => return Err(failure),
            Err(failure) => {
                for row in [&mut written, &mut allocated] {
                    row.not_run = Some(failure.to_string());
                }
                break;
            }
            Ok(sample) => {
                written.samples.push(share(sample.written_bytes, payload));
                allocated.samples.push(share(sample.allocated_bytes, payload));
            }
        }
    }
    Ok(vec![written, allocated])
}

#[expect(clippy::cast_precision_loss, reason = "counts below 2^52")]
fn share(part_bytes: u64, whole_bytes: u64) -> f64 {
    part_bytes as f64 / whole_bytes as f64
}

struct Sample {
    written_bytes: u64,
    allocated_bytes: u64,
}

fn sample(context: &Context, payload: u64, seed: u64, stop: &Stop) -> Result<Sample, Failure> {
    // Twice the data: what was written and is dead already waits for compaction.
    let mount = Mount::new(Kind::Ext4, 2 * payload + (1 << 30), &context.directory)?;
    let data_dir = mount.point().join("data");
    mount.settle()?;
    let before = mount.written_bytes()?;
    let host = Host::start(context, &data_dir, stop)?;
    let load = Load {
        work: Work::SequentialWrite,
        block_bytes: 1 << 20,
        depth: 8,
        connections: 1,
        span_bytes: payload,
        amount: Amount::Bytes(payload),
        commit: CommitPace::AtEnd,
        seed,
        file: "new.img".to_owned(),
        is_verified: false,
    };
    load::run(&host.target(), &load, stop)?;
    host.wait_until_quiet(&callers::runtime()?, QUIET_TIME, stop)?;
    host.stop(stop)?;
    // All that is still in the page cache.
    mount.settle()?;
    let written_bytes = mount.written_bytes()? - before;
    Ok(Sample { written_bytes, allocated_bytes: allocated_bytes(&data_dir)? })
}

/// Bytes that all files below a folder are allocated, but for the reserve.
fn allocated_bytes(folder: &Path) -> Result<u64, Failure> {
    let failed = || Failure::at("look at", folder);
    let mut bytes = 0;
    for entry in std::fs::read_dir(folder).map_err(failed())? {
        let entry = entry.map_err(failed())?;
        if entry.file_name() == RESERVE {
            continue;
        }
        let metadata = entry.metadata().map_err(failed())?;
        bytes += metadata.blocks() * ALLOCATION_UNIT_BYTES;
        if metadata.is_dir() {
            bytes += allocated_bytes(&entry.path())?;
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocated_bytes_are_of_all_files_but_the_reserve_and_not_of_holes() {
        let folder = tempfile::tempdir().unwrap();
        let below = folder.path().join("below");
        std::fs::create_dir(&below).unwrap();
        let empty = allocated_bytes(folder.path()).unwrap();
        let sparse = std::fs::File::create(folder.path().join("sparse")).unwrap();
        sparse.set_len(1 << 30).unwrap();
        let data = below.join("data");
        let reserve = folder.path().join(RESERVE);
        for file in [&data, &reserve] {
            std::fs::write(file, vec![1; 1 << 20]).unwrap();
            std::fs::File::open(file).unwrap().sync_all().unwrap();
        }
        let grown = allocated_bytes(folder.path()).unwrap() - empty;
        assert!((1 << 20..(1 << 20) + (1 << 16)).contains(&grown), "{grown} bytes");
    }
}
