//! `slackwater export`: a snapshot to a raw image of this machine.
//!
//! ```text
//! OUTPUT.partial   while it is incomplete
//! OUTPUT           once it is whole and on the disk
//! ```
//!
//! Holes stay holes. With a base, an image that holds the base is brought forward by what
//! changed since; one that does not is refused before it is touched. An interrupted export is resumed by comparing
//! hashes, block for block. To standard output: `pipe.rs`.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use slackwater_client::types::{CreateSnapshot, Snapshot, SnapshotId};
use slackwater_client::{ByteRange, Client, DataSource};

use crate::blocks::{blocks, hash, hashes_of, indices, is_zero, runs, runs_to_move};
use crate::context::Context;
use crate::failure::Failure;
use crate::held;
use crate::image::Image;
use crate::interrupt::Notice;
use crate::name;
use crate::pipe;
use crate::progress;
use crate::size::human;
use crate::transfer::{
    JOBS_DEFAULT, JOBS_MAX, Plan, Planner, Remote, Tally, Task, Work, blocking, pieces, shell_word,
};

/// Label of the snapshot that an export of a file takes for itself.
const TEMPORARY_LABEL: &str = "slackwater.export";

/// Copies a snapshot to a raw image; holes stay holes. Until it is whole it is OUTPUT.partial.
#[derive(Debug, Args)]
pub(crate) struct ExportArguments {
    /// Id or name of the snapshot; with --file, path of a file
    source: String,
    /// The raw image to be made; `-`: standard output, where holes are zeros
    output: PathBuf,
    /// SOURCE is a file: a snapshot of it is taken for the export, and deleted after it
    #[arg(long, conflicts_with = "resume", conflicts_with = "base")]
    file: bool,
    /// OUTPUT holds this older snapshot: fetch only what changed since
    #[arg(long, value_name = "SNAPSHOT", conflicts_with = "force")]
    base: Option<String>,
    /// Go on after an interruption: compares what is there and fetches only blocks that differ
    #[arg(long)]
    resume: bool,
    /// Replace OUTPUT; without --resume, also what an interrupted export left
    #[arg(long, short)]
    force: bool,
    /// Compare every block when all is fetched
    #[arg(long)]
    verify: bool,
    /// Requests in flight
    #[arg(long, value_name = "NUMBER", default_value_t = JOBS_DEFAULT, value_parser = clap::value_parser!(u64).range(1..=JOBS_MAX))]
    jobs: u64,
}

pub(crate) async fn run(
    context: &Context,
    arguments: ExportArguments,
    notice: &Notice,
) -> Result<(), Failure> {
    if pipe::is_named(&arguments.output) {
        return to_pipe(context, &arguments, notice).await;
    }
    let begun = Instant::now();
    let place = Place::of(&arguments.output)?;
    place.check(&arguments)?;
    let snapshot = source(context, &arguments).await?;
    let base = base(context, &arguments, &place).await?;
    let resume = advice(&arguments, snapshot.id);
    notice.set(resume.clone());
    let outcome = fetch_all(context, &arguments, &place, &snapshot, base).await;
    let moved_bytes =
        outcome.inspect_err(|_| context.output.remark(&format!("slackwater: {resume}")))?;
    if arguments.file {
        context.client.delete_snapshot(snapshot.id).await?;
    }
    let elapsed_milliseconds = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
    let result = serde_json::json!({
        "output": place.whole.display().to_string(),
        "snapshot_id": snapshot.id,
        "size_bytes": snapshot.size_bytes,
        "transferred_bytes": moved_bytes,
        "elapsed_milliseconds": elapsed_milliseconds,
    });
    context.output.remark(&format!(
        "exported {}, {} of it fetched",
        human(snapshot.size_bytes),
        human(moved_bytes)
    ));
    context.output.result(&result, || {
        format!("{}\n", crate::output::printable(&place.whole.display().to_string()))
    })
}

/// To standard output.
async fn to_pipe(
    context: &Context,
    arguments: &ExportArguments,
    notice: &Notice,
) -> Result<(), Failure> {
    pipe::refuse(&[
        ("--base", arguments.base.is_some()),
        ("--resume", arguments.resume),
        ("--force", arguments.force),
        ("--verify", arguments.verify),
    ])?;
    pipe::check_output(context)?;
    let snapshot = source(context, arguments).await?;
    if arguments.file {
        notice.set(format!("its snapshot is left: slackwater snapshot rm {}", snapshot.id));
    }
    let outcome = pipe::export(context, &snapshot, arguments.jobs).await;
    // Nothing can go on with it, so it goes whatever became of the export.
    if arguments.file && context.client.delete_snapshot(snapshot.id).await.is_err() {
        let id = snapshot.id;
        context.output.remark(&format!("its snapshot is left: slackwater snapshot rm {id}"));
    }
    let (whole, fetched) = (human(snapshot.size_bytes), human(outcome?));
    context.output.remark(&format!("exported {whole}, {fetched} of it fetched"));
    Ok(())
}

/// How to go on, and what an export of a file leaves behind.
fn advice(arguments: &ExportArguments, id: SnapshotId) -> String {
    let output = shell_word(&arguments.output.display().to_string());
    let base = arguments.base.as_ref().map(|base| format!(" --base {}", shell_word(base)));
    let force = if arguments.force { " --force" } else { "" };
    let resume = format!(
        "to go on: slackwater export {id} {output}{} --resume{force}",
        base.unwrap_or_default()
    );
    if arguments.file {
        format!("{resume}; then, or to give it up: slackwater snapshot rm {id}")
    } else {
        resume
    }
}

async fn source(context: &Context, arguments: &ExportArguments) -> Result<Snapshot, Failure> {
    if arguments.file {
        let request = CreateSnapshot {
            path: context.path(&arguments.source)?,
            labels: [(TEMPORARY_LABEL.to_owned(), "temporary".to_owned())].into(),
            ..CreateSnapshot::default()
        };
        return Ok(context.client.create_snapshot(&request).await?);
    }
    let id = name::snapshot(&context.client, &arguments.source).await?;
    Ok(context.client.snapshot(id).await?)
}

/// The base, if the image can be it.
async fn base(
    context: &Context,
    arguments: &ExportArguments,
    place: &Place,
) -> Result<Option<SnapshotId>, Failure> {
    let Some(text) = &arguments.base else {
        return Ok(None);
    };
    let id = name::snapshot(&context.client, text).await?;
    let expected = context.client.snapshot(id).await?.size_bytes;
    // An interrupted export may have the new size already; going on with it compares everything.
    if !exists(&place.partial)? {
        let got = fs::metadata(&place.whole)
            .map_err(|error| Failure::local("look at", &place.whole, error))?
            .len();
        if got != expected {
            return Err(Failure::Conflict(format!(
                "{} has {got} bytes, the base {expected}: it does not hold the base",
                place.whole.display()
            )));
        }
        held::require(context, &place.whole, id, arguments.jobs).await?;
    }
    Ok(Some(id))
}

/// Where the image is while it is incomplete, and when it is whole.
struct Place {
    whole: PathBuf,
    partial: PathBuf,
}

impl Place {
    fn of(output: &Path) -> Result<Self, Failure> {
        let name = output
            .file_name()
            .ok_or_else(|| Failure::Usage(format!("{} is no name of a file", output.display())))?;
        let mut partial_name = OsString::from(name);
        partial_name.push(".partial");
        Ok(Self { whole: output.to_owned(), partial: output.with_file_name(partial_name) })
    }

    /// Sees that nothing of value is overwritten.
    fn check(&self, arguments: &ExportArguments) -> Result<(), Failure> {
        let (whole, partial) = (exists(&self.whole)?, exists(&self.partial)?);
        if whole && !self.whole.is_file() {
            let text = format!("{} is not a regular file", self.whole.display());
            return Err(Failure::Usage(text));
        }
        let conflict = |path: &Path, advice: &str| {
            Err(Failure::Conflict(format!("{} is there already: {advice}", path.display())))
        };
        if partial && !arguments.resume && !arguments.force {
            return conflict(
                &self.partial,
                "--resume goes on with that interrupted export; or delete it",
            );
        }
        if arguments.base.is_some() {
            if !whole && !partial {
                let missing = io::Error::from(io::ErrorKind::NotFound);
                return Err(Failure::local("find the base in", &self.whole, missing));
            }
            return Ok(());
        }
        if whole && !arguments.force {
            return conflict(&self.whole, "--force replaces it, --base SNAPSHOT brings it forward");
        }
        Ok(())
    }

    /// Puts the incomplete image in place: a new one, what was left, or the base's.
    fn begin(&self, size_bytes: u64, mode: Mode) -> Result<Image, Failure> {
        match mode {
            Mode::Anew => match fs::remove_file(&self.partial) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(Failure::local("remove", &self.partial, error));
                }
                _ => {}
            },
            Mode::OnBase if !exists(&self.partial)? => fs::rename(&self.whole, &self.partial)
                .map_err(|error| Failure::local("rename", &self.whole, error))?,
            Mode::OnBase | Mode::Resume => {}
        }
        // Before its size changes, so before its first byte does.
        if mode != Mode::Anew {
            fs::File::open(&self.partial)
                .and_then(|file| held::forget(&file))
                .map_err(|error| Failure::local("change", &self.partial, error))?;
        }
        Image::create(&self.partial, size_bytes)
    }

    /// Gives the whole image its name, durably.
    fn finish(&self, image: &Image, id: SnapshotId) -> Result<(), Failure> {
        image.sync()?;
        held::note(image.file(), id);
        fs::rename(&self.partial, &self.whole)
            .map_err(|error| Failure::local("rename", &self.partial, error))?;
        let folder = match self.whole.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        // The name is durable with its folder only.
        fs::File::open(folder)
            .and_then(|folder| folder.sync_all())
            .map_err(|error| Failure::local("sync", folder, error))
    }
}

/// What an export begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Anew,
    OnBase,
    Resume,
}

fn exists(path: &Path) -> Result<bool, Failure> {
    path.try_exists().map_err(|error| Failure::local("look at", path, error))
}

/// Fetches everything, and answers how many bytes were fetched or cleared.
async fn fetch_all(
    context: &Context,
    arguments: &ExportArguments,
    place: &Place,
    snapshot: &Snapshot,
    base: Option<SnapshotId>,
) -> Result<u64, Failure> {
    let is_resumed = arguments.resume && exists(&place.partial)?;
    let mode = match (base, is_resumed) {
        (Some(_), _) => Mode::OnBase,
        (None, true) => Mode::Resume,
        (None, false) => Mode::Anew,
    };
    let image = Arc::new(place.begin(snapshot.size_bytes, mode)?);
    let client = context.patient_client();
    let plan = Plan::diff(client.clone(), snapshot.id, base);
    let job = Exporter { client, id: snapshot.id, image, is_empty: mode == Mode::Anew };
    let plan = if is_resumed { job.comparison() } else { plan };
    let moved_bytes = job.run(context, plan, "exporting", arguments.jobs).await?;
    if arguments.verify {
        let repaired_bytes =
            job.run(context, job.comparison(), "verifying", arguments.jobs).await?;
        if repaired_bytes > 0 && base.is_none() {
            return Err(Failure::Other(format!(
                "verification found {repaired_bytes} bytes that differed and fetched them again; \
                 is something else writing to {}?",
                place.partial.display()
            )));
        }
        if repaired_bytes > 0 {
            context.output.remark(&format!(
                "the image did not hold the base: {} more were fetched",
                human(repaired_bytes)
            ));
        }
    }
    let image = Arc::clone(&job.image);
    let place = Place { whole: place.whole.clone(), partial: place.partial.clone() };
    let id = job.id;
    blocking(move || place.finish(&image, id)).await?;
    Ok(moved_bytes)
}

/// Both sides of an export.
struct Exporter {
    client: Client,
    id: SnapshotId,
    image: Arc<Image>,
    /// The image began as one hole, so that zeros need not be made.
    is_empty: bool,
}

impl Exporter {
    fn comparison(&self) -> Plan {
        Plan::Compare {
            client: self.client.clone(),
            remote: Remote::Snapshot(self.id),
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
        let outcome = Planner::new(plan).run(jobs, &tally, |work| self.fetch(work, &tally)).await;
        tally.finish();
        outcome.map(|()| tally.moved_bytes())
    }

    async fn fetch(&self, work: Work, tally: &Tally) -> Result<(), Failure> {
        match &work.task {
            Task::Clear if self.is_empty => Ok(()),
            Task::Clear => self.clear(work.range, tally).await,
            Task::Copy => self.copy(work.range, tally).await,
            Task::Compare(hashes) => {
                for piece in pieces(work.range) {
                    self.correct(piece, hashes_of(hashes, work.range, piece), tally).await?;
                }
                Ok(())
            }
        }
    }

    /// Makes the blocks of the piece that differ from the snapshot's as they should be.
    async fn correct(
        &self,
        piece: ByteRange,
        hashes: Vec<slackwater_client::BlockHash>,
        tally: &Tally,
    ) -> Result<(), Failure> {
        let image = Arc::clone(&self.image);
        let (wrong, clear) = blocking(move || {
            let bytes = image.read(piece)?;
            let differ: Vec<bool> =
                blocks(&bytes).zip(&hashes).map(|(block, known)| hash(block) != *known).collect();
            let of_kind = |is_hole: bool| {
                differ
                    .iter()
                    .zip(&hashes)
                    .map(move |(differs, known)| *differs && known.is_none() == is_hole)
            };
            let length_bytes = piece.length_bytes();
            Ok((runs_to_move(of_kind(false), length_bytes), runs(of_kind(true), length_bytes, 0)))
        })
        .await?;
        let part = |range: std::ops::Range<u64>| {
            ByteRange::new(piece.offset_bytes() + range.start, range.end - range.start)
        };
        for range in clear.into_iter().filter_map(part) {
            self.clear(range, tally).await?;
        }
        for range in wrong.into_iter().filter_map(part) {
            self.copy(range, tally).await?;
        }
        Ok(())
    }

    async fn clear(&self, range: ByteRange, tally: &Tally) -> Result<(), Failure> {
        let image = Arc::clone(&self.image);
        blocking(move || image.clear(range)).await?;
        tally.moved(range.length_bytes());
        Ok(())
    }

    async fn copy(&self, range: ByteRange, tally: &Tally) -> Result<(), Failure> {
        // At the end of the file the last block may be cut.
        let end = range.end_bytes().min(self.image.size_bytes());
        let Some(range) =
            ByteRange::new(range.offset_bytes(), end.saturating_sub(range.offset_bytes()))
        else {
            return Ok(());
        };
        for piece in pieces(range) {
            let source = DataSource::Snapshot(self.id);
            let bytes = self.client.read_bytes(source, piece).await?;
            let got = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
            if got != piece.length_bytes() {
                return Err(Failure::Other(format!(
                    "the appliance gave {got} bytes at {}, expected {}",
                    piece.offset_bytes(),
                    piece.length_bytes()
                )));
            }
            let (image, is_empty) = (Arc::clone(&self.image), self.is_empty);
            blocking(move || store(&image, piece, &bytes, is_empty)).await?;
            tally.moved(got);
        }
        Ok(())
    }
}

/// Writes what is not zero, and makes holes of the rest.
fn store(image: &Image, piece: ByteRange, bytes: &[u8], is_empty: bool) -> Result<(), Failure> {
    let zeros: Vec<bool> = blocks(bytes).map(is_zero).collect();
    for range in runs(zeros.iter().map(|is_zero| !is_zero), piece.length_bytes(), 0) {
        let Some(part) = ByteRange::new(range.start, range.end - range.start) else {
            continue;
        };
        let data = bytes.get(indices(part)).unwrap_or_default();
        image.write(piece.offset_bytes() + part.offset_bytes(), data)?;
    }
    if !is_empty {
        for range in runs(zeros, piece.length_bytes(), 0) {
            let hole = ByteRange::new(piece.offset_bytes() + range.start, range.end - range.start);
            hole.map_or(Ok(()), |hole| image.clear(hole))?;
        }
    }
    Ok(())
}
