//! Which snapshot a raw image holds, so that an incremental export is never laid on another one.
//!
//! ```text
//! extended attribute user.slackwater.holds = "1 SNAPSHOT SIZE SECONDS NANOSECONDS"
//!                                            size and time of change as the export left them
//! ```
//!
//! Invariants: the attribute is taken off, durably, before the first byte of an image is
//! changed, and put on once all bytes are on the disk. An image without it, or one that was
//! written to since, is compared with the base by hash, block for block; so is every image
//! where the file system keeps no attributes, or after a copy that left them behind.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::XattrFlags;
use rustix::io::Errno;
use slackwater_client::ByteRange;
use slackwater_client::types::SnapshotId;

use crate::blocks::{BLOCK_BYTES, blocks, hash, hashes_of};
use crate::context::Context;
use crate::failure::Failure;
use crate::image::Image;
use crate::progress;
use crate::transfer::{Plan, Planner, Remote, Tally, Task, Work, blocking, pieces};

const ATTRIBUTE: &str = "user.slackwater.holds";

/// First word of the value: the form of the rest.
const VERSION: &str = "1";

/// Longest value: a UUID and three numbers of 20 digits.
const VALUE_BYTES_MAX: usize = 128;

/// The value for a file as it is now.
fn value(file: &File, id: SnapshotId) -> std::io::Result<String> {
    let metadata = file.metadata()?;
    let (size, seconds, nanoseconds) = (metadata.len(), metadata.mtime(), metadata.mtime_nsec());
    Ok(format!("{VERSION} {id} {size} {seconds} {nanoseconds}"))
}

/// Notes that the file holds the snapshot. Where that cannot be noted, the next export on it
/// compares.
pub(crate) fn note(file: &File, id: SnapshotId) {
    if let Ok(value) = value(file, id) {
        // Best effort: see above.
        let _ = rustix::fs::fsetxattr(file, ATTRIBUTE, value.as_bytes(), XattrFlags::empty());
    }
}

/// Takes the note off, durably.
///
/// # Errors
/// It is there and cannot be taken off: then nothing may be changed.
pub(crate) fn forget(file: &File) -> std::io::Result<()> {
    match rustix::fs::fremovexattr(file, ATTRIBUTE) {
        Ok(()) => file.sync_all(),
        Err(Errno::NODATA | Errno::NOTSUP) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// The snapshot that the file is known to hold.
fn known(file: &File) -> Option<SnapshotId> {
    let mut bytes = [0; VALUE_BYTES_MAX];
    let length = rustix::fs::fgetxattr(file, ATTRIBUTE, &mut bytes).ok()?;
    let text = std::str::from_utf8(bytes.get(..length)?).ok()?;
    let id: SnapshotId = text.split(' ').nth(1)?.parse().ok()?;
    (value(file, id).ok()? == text).then_some(id)
}

/// Sees that the image at `path` holds the snapshot `base`, to the byte.
///
/// # Errors
/// `Conflict` with what it holds, or with the first place where it differs.
pub(crate) async fn require(
    context: &Context,
    path: &Path,
    base: SnapshotId,
    jobs: u64,
) -> Result<(), Failure> {
    let image = {
        let path = path.to_owned();
        Arc::new(blocking(move || Image::open(&path)).await?)
    };
    match known(image.file()) {
        Some(held) if held == base => return Ok(()),
        Some(held) => {
            return Err(Failure::Conflict(format!(
                "{} holds snapshot {held}, not the base {base}: give --base {held}",
                path.display()
            )));
        }
        None => {}
    }
    context.output.remark(&format!(
        "{} may have been written to since it was exported: comparing it with the base",
        path.display()
    ));
    let client = context.patient_client();
    let remote = Remote::Snapshot(base);
    let plan = Plan::Compare { client, remote, image: Arc::clone(&image) };
    let tally = Tally::new(progress::bar(context.output, "comparing", image.size_bytes()));
    let outcome = Planner::new(plan).run(jobs, &tally, |work| compare(&image, path, work)).await;
    tally.finish();
    outcome
}

/// Fails at the first block that differs.
async fn compare(image: &Arc<Image>, path: &Path, work: Work) -> Result<(), Failure> {
    let Task::Compare(hashes) = &work.task else {
        return Ok(());
    };
    for piece in pieces(work.range) {
        let (image, hashes) = (Arc::clone(image), hashes_of(hashes, work.range, piece));
        let differs = blocking(move || first_difference(&image, piece, &hashes)).await?;
        if let Some(offset_bytes) = differs {
            return Err(Failure::Conflict(format!(
                "{} does not hold the base: it differs at byte {offset_bytes}; export it anew \
                 (--force, without --base)",
                path.display()
            )));
        }
    }
    Ok(())
}

/// Offset of the first block of the piece whose hash is another one.
fn first_difference(
    image: &Image,
    piece: ByteRange,
    hashes: &[slackwater_client::BlockHash],
) -> Result<Option<u64>, Failure> {
    let bytes = image.read(piece)?;
    let block_bytes = usize::try_from(BLOCK_BYTES).unwrap_or(usize::MAX);
    let offsets = (piece.offset_bytes()..).step_by(block_bytes);
    let differs = blocks(&bytes).zip(hashes).zip(offsets);
    let mut wrong = differs.filter(|((block, known), _)| hash(block) != **known);
    Ok(wrong.next().map(|(_, offset_bytes)| offset_bytes))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    /// On the disk: the system's temporary directory may be in memory, without attributes.
    fn beside_the_program() -> tempfile::TempDir {
        let program = std::env::current_exe().unwrap();
        tempfile::tempdir_in(program.parent().unwrap()).unwrap()
    }

    const ONE: &str = "6f1f3c1e-5d0c-4d55-9d61-2f5b6f0f6c11";

    #[test]
    fn a_note_counts_until_the_image_is_written_to() {
        let directory = beside_the_program();
        let path = directory.path().join("a.img");
        std::fs::write(&path, b"content").unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let id: SnapshotId = ONE.parse().unwrap();
        assert_eq!(known(&file), None);
        note(&file, id);
        assert_eq!(known(&file), Some(id));
        forget(&file).unwrap();
        assert_eq!(known(&file), None);
        forget(&file).unwrap();

        note(&file, id);
        file.write_all_at(b"C", 0).unwrap();
        let later = std::time::SystemTime::now() + std::time::Duration::from_secs(1);
        file.set_modified(later).unwrap();
        assert_eq!(known(&file), None, "written to");
        note(&file, id);
        let time = file.metadata().unwrap().modified().unwrap();
        file.set_len(100).unwrap();
        file.set_modified(time).unwrap();
        assert_eq!(known(&file), None, "another size");
    }

    #[test]
    fn nonsense_is_no_note() {
        let directory = beside_the_program();
        let file = File::create(directory.path().join("a.img")).unwrap();
        let put = |text: &str| {
            rustix::fs::fsetxattr(&file, ATTRIBUTE, text.as_bytes(), XattrFlags::empty()).unwrap();
        };
        let good = value(&file, ONE.parse().unwrap()).unwrap();
        put(&good);
        assert!(known(&file).is_some());
        let long = format!("{good}{}", " 0".repeat(100));
        for text in ["", "1", "1 x 2 3 4", &good.replacen('1', "2", 1), &format!("{good} 5"), &long]
        {
            put(text);
            assert_eq!(known(&file), None, "{text}");
        }
    }
}
