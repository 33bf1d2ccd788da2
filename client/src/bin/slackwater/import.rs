//! `slackwater import`: a raw image of this machine into a file of the appliance.
//!
//! Only data travels: holes of the image are passed over, zeros are left out. With a base, the
//! file begins as a clone of a snapshot, and only what differs is sent. That, and an interrupted
//! import that is resumed, compares the hashes of both sides, block for block. From standard input: `pipe.rs`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use slackwater_client::{ByteRange, Client};

use crate::blocks::{blocks, hash, hashes_of, indices, is_zero, runs_to_move};
use crate::context::Context;
use crate::failure::Failure;
use crate::image::Image;
use crate::interrupt::Notice;
use crate::name;
use crate::pipe;
use crate::progress;
use crate::size::human;
use crate::transfer::{
    JOBS_DEFAULT, JOBS_MAX, Plan, Planner, Remote, Tally, Task, Work, blocking, pieces, shell_word,
};

/// Copies a raw image (a file or a block device) into a new file; holes stay holes.
#[derive(Debug, Args)]
pub(crate) struct ImportArguments {
    /// The raw image; `-`: standard input, whose zeros become holes
    image: PathBuf,
    /// Path of the file on the appliance
    path: String,
    /// Begin with a clone of this snapshot, and send only what differs
    #[arg(long, value_name = "SNAPSHOT")]
    base: Option<String>,
    /// Go on after an interruption: makes the file, whose size must be the image's, equal to the
    /// image, and sends only blocks that differ
    #[arg(long)]
    resume: bool,
    /// Compare every block when all is sent
    #[arg(long)]
    verify: bool,
    /// Requests in flight
    #[arg(long, value_name = "NUMBER", default_value_t = JOBS_DEFAULT, value_parser = clap::value_parser!(u64).range(1..=JOBS_MAX))]
    jobs: u64,
}

pub(crate) async fn run(
    context: &Context,
    arguments: ImportArguments,
    notice: &Notice,
) -> Result<(), Failure> {
    let begun = Instant::now();
    let path = context.path(&arguments.path)?;
    if pipe::is_named(&arguments.image) {
        pipe::refuse(&[
            ("--base", arguments.base.is_some()),
            ("--resume", arguments.resume),
            ("--verify", arguments.verify),
        ])?;
        pipe::check_input()?;
        let (size_bytes, sent_bytes) = pipe::import(context, &path, arguments.jobs, notice).await?;
        return tell(context, &path, (size_bytes, sent_bytes), begun);
    }
    let image = {
        let local = arguments.image.clone();
        Arc::new(blocking(move || Image::open(&local)).await?)
    };
    let is_there = prepare(context, &arguments, &path, image.size_bytes()).await?;
    let resume = format!(
        "to go on: slackwater import {} {} --resume",
        shell_word(&arguments.image.display().to_string()),
        shell_word(&path)
    );
    notice.set(resume.clone());
    let outcome = transfer_all(context, &arguments, &path, &image, is_there).await;
    let moved_bytes =
        outcome.inspect_err(|_| context.output.remark(&format!("slackwater: {resume}")))?;
    tell(context, &path, (image.size_bytes(), moved_bytes), begun)
}

/// What was done.
fn tell(
    context: &Context,
    path: &str,
    (size_bytes, moved_bytes): (u64, u64),
    begun: Instant,
) -> Result<(), Failure> {
    let elapsed_milliseconds = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
    let result = serde_json::json!({
        "path": path,
        "size_bytes": size_bytes,
        "transferred_bytes": moved_bytes,
        "elapsed_milliseconds": elapsed_milliseconds,
    });
    context.output.remark(&format!(
        "imported {}, {} of it sent",
        human(size_bytes),
        human(moved_bytes)
    ));
    context.output.result(&result, || format!("{path}\n"))
}

/// Makes the file, or sees that the one that is there can be gone on with: then the answer is
/// true.
async fn prepare(
    context: &Context,
    arguments: &ImportArguments,
    path: &str,
    size_bytes: u64,
) -> Result<bool, Failure> {
    match context.client.file(path).await {
        Ok(file) if !arguments.resume => Err(Failure::Conflict(format!(
            "{path} ({}) is there already: --resume makes it equal to the image; or choose another path",
            human(file.size_bytes)
        ))),
        Ok(file) if file.size_bytes != size_bytes => Err(Failure::Conflict(format!(
            "{path} has {} bytes, the image {size_bytes}: it is no import of it that was interrupted",
            file.size_bytes
        ))),
        Ok(_) => Ok(true),
        Err(error) if error.is_not_found() => begin(context, arguments, path, size_bytes).await,
        Err(error) => Err(error.into()),
    }
}

/// Makes the file, empty or as a clone of the base; the answer is whether it may hold data.
async fn begin(
    context: &Context,
    arguments: &ImportArguments,
    path: &str,
    size_bytes: u64,
) -> Result<bool, Failure> {
    let Some(base) = &arguments.base else {
        context.client.create_file(path, size_bytes).await?;
        return Ok(false);
    };
    let id = name::snapshot(&context.client, base).await?;
    let clone = context.client.create_clone(id, path).await?;
    if clone.size_bytes != size_bytes {
        context.client.resize_file(path, size_bytes).await?;
    }
    Ok(true)
}

/// Brings everything over, and answers how many bytes were sent.
async fn transfer_all(
    context: &Context,
    arguments: &ImportArguments,
    path: &str,
    image: &Arc<Image>,
    is_there: bool,
) -> Result<u64, Failure> {
    let job = Importer {
        client: context.patient_client(),
        path: path.to_owned(),
        image: Arc::clone(image),
    };
    let plan = if is_there { job.comparison() } else { Plan::Data(Arc::clone(image)) };
    let sent_bytes = job.run(context, plan, "importing", arguments.jobs).await?;
    {
        let image = Arc::clone(image);
        if blocking(move || image.has_changed()).await? {
            return Err(Failure::Other(
                "the image was written to during the import, so the file may be a mix".to_owned(),
            ));
        }
    }
    if arguments.verify {
        let repaired_bytes =
            job.run(context, job.comparison(), "verifying", arguments.jobs).await?;
        if repaired_bytes > 0 {
            return Err(Failure::Other(format!(
                "verification found {repaired_bytes} bytes that differed and sent them again; \
                 was something else writing to {path}?"
            )));
        }
    }
    Ok(sent_bytes)
}

/// Both sides of an import.
struct Importer {
    client: Client,
    path: String,
    image: Arc<Image>,
}

impl Importer {
    fn comparison(&self) -> Plan {
        Plan::Compare {
            client: self.client.clone(),
            remote: Remote::File(self.path.clone()),
            image: Arc::clone(&self.image),
        }
    }

    async fn run(
        &self,
        context: &Context,
        plan: Plan,
        verb: &'static str,
        jobs: u64,
    ) -> Result<u64, Failure> {
        let tally = Tally::new(progress::bar(context.output, verb, self.image.size_bytes()));
        let outcome = Planner::new(plan).run(jobs, &tally, |work| self.send(work, &tally)).await;
        tally.finish();
        outcome.map(|()| tally.moved_bytes())
    }

    async fn send(&self, work: Work, tally: &Tally) -> Result<(), Failure> {
        for piece in pieces(work.range) {
            let hashes = match &work.task {
                Task::Compare(hashes) => Some(hashes_of(hashes, work.range, piece)),
                Task::Copy | Task::Clear => None,
            };
            let image = Arc::clone(&self.image);
            let (bytes, ranges) = blocking(move || {
                let bytes = image.read(piece)?;
                let ranges = match hashes {
                    None => runs_to_move(
                        blocks(&bytes).map(|block| !is_zero(block)),
                        piece.length_bytes(),
                    ),
                    Some(hashes) => runs_to_move(differs(&bytes, &hashes), piece.length_bytes()),
                };
                Ok((bytes, ranges))
            })
            .await?;
            for range in ranges {
                let Some(part) = ByteRange::new(range.start, range.end - range.start) else {
                    continue;
                };
                let data = bytes.slice(indices(part));
                let offset_bytes = piece.offset_bytes() + part.offset_bytes();
                self.client.write_bytes(&self.path, offset_bytes, data).await?;
                tally.moved(part.length_bytes());
            }
        }
        Ok(())
    }
}

/// For each block whether its hash is another one; a block without a hash differs.
fn differs<'a>(
    bytes: &'a [u8],
    hashes: &'a [slackwater_client::BlockHash],
) -> impl Iterator<Item = bool> + 'a {
    let hashes = hashes.iter().map(Some).chain(std::iter::repeat(None));
    blocks(bytes).zip(hashes).map(|(block, known)| known != Some(&hash(block)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_differ_by_hash_and_zeros_by_being_a_hole() {
        let mut bytes = vec![1; 3 * 4096];
        bytes[4096..8192].fill(0);
        let one = hash(&[1; 4096]);
        let verdict =
            |hashes: &[slackwater_client::BlockHash]| differs(&bytes, hashes).collect::<Vec<_>>();
        assert_eq!(verdict(&[one, None, one]), [false, false, false]);
        assert_eq!(verdict(&[None, one, Some([7; 32])]), [true, true, true]);
        assert_eq!(verdict(&[one]), [false, true, true]);
    }
}
