//! `export SOURCE -` and `import - PATH`: a raw image through a pipe.
//!
//! ```text
//! export   diff of the snapshot -> pieces, several in flight, in order -> standard output
//! import   standard input -> pieces, several in flight -> PATH.partial -> PATH once all is there
//! ```
//! A pipe has no holes and cannot be gone back in: holes go out as zeros, zeros come in as holes, and neither can be resumed
//! or compared. Invariant: PATH is there only as a whole.

use std::fs::File;
use std::io::{self, IsTerminal, Read, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::stream::{self, TryStreamExt};
use slackwater_client::query::Diff;
use slackwater_client::types::{PAGE_LIMIT_MAX, Snapshot, SnapshotId};
use slackwater_client::{ByteRange, Client, DataSource, ProblemCode};

use crate::blocks::{blocks, indices, is_zero, runs_to_move};
use crate::context::Context;
use crate::failure::Failure;
use crate::interrupt::Notice;
use crate::progress;
use crate::transfer::{JOBS_MAX, PIECE_BYTES, Tally, Task, blocking, coalesce, pieces, shell_word};

/// What a user writes for standard input and output.
const NAME: &str = "-";

/// Zeros that are written at once.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// Whether the name stands for a pipe.
pub(crate) fn is_named(path: &Path) -> bool {
    path.as_os_str() == NAME
}

/// Refuses what a pipe cannot do.
pub(crate) fn refuse(options: &[(&str, bool)]) -> Result<(), Failure> {
    match options.iter().find(|(_, is_given)| *is_given) {
        Some((option, _)) => {
            Err(Failure::Usage(format!("{option} needs a file: it cannot be given with `{NAME}`")))
        }
        None => Ok(()),
    }
}

fn jobs(jobs: u64) -> usize {
    usize::try_from(jobs.clamp(1, JOBS_MAX)).unwrap_or(1)
}

// ---- export

/// A part of the image, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Zeros(u64),
    Data(ByteRange),
}

/// Refuses an output to which no image should go.
pub(crate) fn check_output(context: &Context) -> Result<(), Failure> {
    if io::stdout().is_terminal() {
        let text = "an image is not for a terminal: send standard output into a pipe or a file";
        return Err(Failure::Usage(text.to_owned()));
    }
    refuse(&[("--json", context.output.is_json())])
}

/// Writes the whole snapshot to standard output; answers how many bytes were fetched.
pub(crate) async fn export(
    context: &Context,
    snapshot: &Snapshot,
    jobs_max: u64,
) -> Result<u64, Failure> {
    let stdout = io::stdout().as_fd().try_clone_to_owned().map_err(Failure::Output)?;
    let stdout = Arc::new(File::from(stdout));
    let client = context.patient_client();
    let tally = Tally::new(progress::bar(context.output, "exporting", snapshot.size_bytes));
    let (fetched, id) = (&client, snapshot.id);
    let outcome = parts(&client, snapshot)
        .map_ok(|part| async move {
            match part {
                Part::Zeros(_) => Ok((part, Bytes::new())),
                Part::Data(range) => Ok((part, fetch(fetched, id, range).await?)),
            }
        })
        .try_buffered(jobs(jobs_max))
        .try_for_each(|(part, bytes)| {
            let (stdout, tally) = (Arc::clone(&stdout), &tally);
            async move {
                let moved_bytes = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
                blocking(move || put(&stdout, part, &bytes)).await?;
                tally.moved(moved_bytes);
                tally.advance(part.length_bytes());
                Ok(())
            }
        })
        .await;
    tally.finish();
    outcome.map(|()| tally.moved_bytes())
}

impl Part {
    const fn length_bytes(self) -> u64 {
        match self {
            Self::Zeros(length_bytes) => length_bytes,
            Self::Data(range) => range.length_bytes(),
        }
    }
}

/// The parts of the image from its start to its end.
fn parts(
    client: &Client,
    snapshot: &Snapshot,
) -> impl stream::Stream<Item = Result<Part, Failure>> {
    let query = Diff { base: None, limit: Some(PAGE_LIMIT_MAX), after: None };
    let (id, size_bytes) = (snapshot.id, snapshot.size_bytes);
    let pages = stream::try_unfold(Some((query, 0)), move |state| async move {
        let Some((mut query, at)) = state else { return Ok(None) };
        let page = client.diff(id, &query).await?;
        query.after = page.next;
        let is_last = query.after.is_none();
        let (parts, at) = in_order(coalesce(&page.items), at, size_bytes, is_last);
        let parts = stream::iter(parts.into_iter().map(Ok::<_, Failure>));
        Ok::<_, Failure>(Some((parts, (!is_last).then_some((query, at)))))
    });
    pages.try_flatten()
}

/// What is to be copied, with zeros before it, from `at` on; and where that ends. After the last, zeros up to the end.
fn in_order(
    works: Vec<(ByteRange, Task)>,
    mut at: u64,
    size_bytes: u64,
    is_last: bool,
) -> (Vec<Part>, u64) {
    let mut parts = Vec::new();
    let copies = works.into_iter().filter(|(_, task)| *task == Task::Copy);
    for piece in copies.flat_map(|(range, _)| pieces(range)) {
        // At the end of the file the last block may be cut.
        let (start, end) = (piece.offset_bytes().max(at), piece.end_bytes().min(size_bytes));
        let Some(range) = ByteRange::new(start, end.saturating_sub(start)) else { continue };
        if start > at {
            parts.push(Part::Zeros(start - at));
        }
        parts.push(Part::Data(range));
        at = end;
    }
    if is_last && at < size_bytes {
        parts.push(Part::Zeros(size_bytes - at));
        at = size_bytes;
    }
    (parts, at)
}

async fn fetch(client: &Client, id: SnapshotId, range: ByteRange) -> Result<Bytes, Failure> {
    let bytes = client.read_bytes(DataSource::Snapshot(id), range).await?;
    let got = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
    if got == range.length_bytes() {
        return Ok(bytes);
    }
    let (at, expected) = (range.offset_bytes(), range.length_bytes());
    Err(Failure::Other(format!("the appliance gave {got} bytes at {at}, expected {expected}")))
}

fn put(mut stdout: &File, part: Part, bytes: &[u8]) -> Result<(), Failure> {
    let written = match part {
        Part::Data(_) => stdout.write_all(bytes),
        Part::Zeros(mut left) => loop {
            let length = usize::try_from(left).unwrap_or(usize::MAX).min(ZEROS.len());
            if length == 0 {
                break Ok(());
            }
            if let Err(error) = stdout.write_all(&ZEROS[..length]) {
                break Err(error);
            }
            left -= u64::try_from(length).unwrap_or(left);
        },
    };
    written.map_err(|error| match error.kind() {
        // Not a success, as it is of a list: an image that is not whole is of no use.
        io::ErrorKind::BrokenPipe => Failure::Other(
            "the reader of standard output left before the image was whole".to_owned(),
        ),
        _ => Failure::Output(error),
    })
}

// ---- import

/// Refuses an input that is no image.
pub(crate) fn check_input() -> Result<(), Failure> {
    if io::stdin().is_terminal() {
        let text = "standard input is a terminal: send an image into it by a pipe";
        return Err(Failure::Usage(text.to_owned()));
    }
    Ok(())
}

/// Makes the file `path` of what standard input holds; answers its size, and how many bytes were sent.
pub(crate) async fn import(
    context: &Context,
    path: &str,
    jobs_max: u64,
    notice: &Notice,
) -> Result<(u64, u64), Failure> {
    let client = context.patient_client();
    match client.file(path).await {
        Ok(_) => {
            let text = format!("{path} is there already: choose another path, or delete it first");
            return Err(Failure::Conflict(text));
        }
        Err(error) if error.is_not_found() => {}
        Err(error) => return Err(error.into()),
    }
    let partial = format!("{path}.partial");
    if let Err(error) = client.create_file(&partial, 0).await {
        return Err(match error.code() {
            Some(ProblemCode::Exists) => Failure::Conflict(format!(
                "{partial} is there, of an import that is under way or was cut off: choose another path, or delete it by \
                 `slackwater file rm {}`",
                shell_word(&partial)
            )),
            _ => error.into(),
        });
    }
    notice
        .set(format!("{partial} holds what had come: slackwater file rm {}", shell_word(&partial)));
    let outcome = receive(context, &client, &partial, jobs_max).await;
    let (size_bytes, sent_bytes) = match outcome {
        Ok(done) => done,
        Err(failure) => {
            // Of no use: a pipe cannot be gone on with.
            if client.delete_file(&partial).await.is_err() {
                context.output.remark(&format!("{partial} is left, and is not whole: delete it"));
            }
            return Err(failure);
        }
    };
    let moved = client.rename_file(&partial, path).await;
    moved.inspect_err(|_| {
        context.output.remark(&format!("the whole image is in {partial}, or in {path} already"))
    })?;
    Ok((size_bytes, sent_bytes))
}

/// Brings standard input into the file, which is empty.
async fn receive(
    context: &Context,
    client: &Client,
    partial: &str,
    jobs_max: u64,
) -> Result<(u64, u64), Failure> {
    let stdin = io::stdin().as_fd().try_clone_to_owned().map_err(Failure::input)?;
    let stdin = Arc::new(File::from(stdin));
    let tally = Tally::new(progress::counter(context.output, "importing"));
    let reading = stream::try_unfold(0_u64, |at| {
        let stdin = Arc::clone(&stdin);
        async move {
            let bytes = blocking(move || read_piece(&stdin).map_err(Failure::input)).await?;
            let length = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
            Ok::<_, Failure>((length > 0).then_some(((at, bytes), at + length)))
        }
    });
    let sending = reading
        .map_ok(|(at, bytes)| send(client, partial, at, bytes, &tally))
        .try_buffer_unordered(jobs(jobs_max))
        .try_fold(0, async |size_bytes: u64, end_bytes| Ok(size_bytes.max(end_bytes)));
    let outcome = sending.await;
    tally.finish();
    let size_bytes = outcome?;
    // Zeros at the end were not sent.
    client.resize_file(partial, size_bytes).await?;
    Ok((size_bytes, tally.moved_bytes()))
}

/// The next piece of the input: a whole one, but for the last; empty at the end.
fn read_piece(stdin: &File) -> io::Result<Bytes> {
    let mut bytes = Vec::new();
    stdin.take(PIECE_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes.into())
}

/// Sends what is not zero of a piece; answers where the piece ends.
async fn send(
    client: &Client,
    partial: &str,
    at: u64,
    bytes: Bytes,
    tally: &Tally,
) -> Result<u64, Failure> {
    let length_bytes = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
    for range in runs_to_move(blocks(&bytes).map(|block| !is_zero(block)), length_bytes) {
        let Some(part) = ByteRange::new(range.start, range.end - range.start) else { continue };
        let data = bytes.slice(indices(part));
        client.write_bytes(partial, at + part.offset_bytes(), data).await?;
        tally.moved(part.length_bytes());
    }
    tally.advance(length_bytes);
    Ok(at + length_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(offset_bytes: u64, length_bytes: u64) -> ByteRange {
        ByteRange::new(offset_bytes, length_bytes).unwrap()
    }

    #[test]
    fn what_is_between_copies_is_zeros_up_to_the_end() {
        let works = vec![
            (range(4096, 4096), Task::Clear),
            (range(8192, 4096), Task::Copy),
            (range(PIECE_BYTES, 2 * PIECE_BYTES), Task::Copy),
        ];
        let size_bytes = 3 * PIECE_BYTES - 5;
        let (parts, at) = in_order(works, 0, size_bytes, false);
        assert_eq!(at, size_bytes);
        assert_eq!(
            parts,
            [
                Part::Zeros(8192),
                Part::Data(range(8192, 4096)),
                Part::Zeros(PIECE_BYTES - 12_288),
                Part::Data(range(PIECE_BYTES, PIECE_BYTES)),
                Part::Data(range(2 * PIECE_BYTES, PIECE_BYTES - 5)),
            ]
        );
        assert_eq!(in_order(Vec::new(), 7, 10, true), (vec![Part::Zeros(3)], 10));
        assert_eq!(in_order(Vec::new(), 7, 10, false), (Vec::new(), 7));
        assert_eq!(in_order(Vec::new(), 0, 0, true), (Vec::new(), 0));
    }

    #[test]
    fn options_that_need_a_file_are_named() {
        refuse(&[("--base", false), ("--resume", false)]).unwrap();
        let told = refuse(&[("--base", false), ("--resume", true)]).unwrap_err().to_string();
        assert!(told.contains("--resume"), "{told}");
    }
}
