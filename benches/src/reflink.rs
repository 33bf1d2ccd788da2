//! The rival: `cp --reflink=always` of a file of as many extents, on a new XFS in a file.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use slackwater_benches::{Content, extents_bytes};
use slackwater_blockstore::BLOCK_BYTES_U64;

use crate::cases::EXTENTS_MAX;
use crate::failure::Failure;
use crate::mount::{Kind, Mount};
use crate::process::{command, output, run};
use crate::statistics::Summary;
use crate::stop::Stop;

/// Samples: each takes about a second, and deleting the copy as long.
const SAMPLES: usize = 5;

/// Size of the file system: the file, its copy's metadata and the journal fit well.
const IMAGE_BYTES: u64 = 4 << 30;

/// What became of the rival.
#[derive(Clone, Debug)]
pub(crate) enum Rival {
    /// The time of one copy.
    Ran(Summary),
    /// It could not be run, for this reason.
    NotRun(String),
    /// It was not asked for.
    LeftOut,
}

/// Runs the rival if this machine can.
pub(crate) fn measure(stop: &Stop) -> Result<Rival, Failure> {
    match copies(stop) {
        Ok(samples) => Ok(Rival::Ran(Summary::of(&samples))),
        Err(failure) if failure.is_stop() => Err(failure),
        Err(failure) => Ok(Rival::NotRun(failure.to_string())),
    }
}

fn copies(stop: &Stop) -> Result<Vec<Duration>, Failure> {
    let mount = Mount::new(Kind::Xfs, IMAGE_BYTES, &std::env::temp_dir())?;
    let (source, target) = (mount.point().join("source"), mount.point().join("copy"));
    write_file(&source, stop)?;
    let extents = count_extents(&source)?;
    if extents < EXTENTS_MAX {
        return Err(Failure::Unfit(format!("XFS made {extents} extents, not {EXTENTS_MAX}")));
    }
    let mut samples = Vec::new();
    for _ in 0..SAMPLES {
        let mut copy = command("cp");
        copy.arg("--reflink=always").arg(&source).arg(&target);
        let start = Instant::now();
        let status = run(&mut copy, stop)?;
        samples.push(start.elapsed());
        if !status.success() {
            return Err(Failure::Unfit(format!("cp --reflink=always: {status}")));
        }
        std::fs::remove_file(&target).map_err(Failure::at("remove", &target))?;
    }
    Ok(samples)
}

/// Writes the file whose every second block is data, and syncs it.
fn write_file(path: &Path, stop: &Stop) -> Result<(), Failure> {
    let failed = || Failure::at("write", path);
    let file = File::create(path).map_err(failed())?;
    file.set_len(extents_bytes(EXTENTS_MAX)).map_err(failed())?;
    let mut content = Content::new(4);
    for extent in 0..EXTENTS_MAX {
        if extent % 1000 == 0 {
            stop.check()?;
        }
        let block = content.blocks(1);
        file.write_all_at(&block, extent * 2 * BLOCK_BYTES_U64).map_err(failed())?;
    }
    file.sync_all().map_err(failed())
}

/// The extents of a file as XFS counts them.
fn count_extents(path: &Path) -> Result<u64, Failure> {
    let text = output(command("xfs_io").args(["-r", "-c", "stat"]).arg(path))?;
    extents_in(&text).ok_or_else(|| Failure::Unfit(format!("xfs_io told no extents: {text}")))
}

/// The count in what `xfs_io -c stat` prints.
fn extents_in(text: &str) -> Option<u64> {
    let mut lines = text.lines();
    lines.find_map(|line| line.strip_prefix("fsxattr.nextents = ")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_are_read_from_what_xfs_io_prints() {
        let text = "fd.path = \"x\"\nfsxattr.xflags = 0x0 []\nfsxattr.nextents = 100000\n";
        assert_eq!(extents_in(text), Some(100_000));
        assert_eq!(extents_in("fsxattr.naextents = 0\n"), None);
    }
}
