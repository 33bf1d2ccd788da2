//! Calls that a dead process did not answer. dockerd repeats such a call for half a minute, but
//! its client has used up the body by then and sends nothing but the name of the call: without
//! a note of what was asked, a layer would be made that dockerd never hears of.
//!
//! ```text
//!   call arrives --> note it --> carry it out --> answer --> remove the note
//!                       |
//!                  kill -9: the note stays, the next process reads it
//!                                   |
//!   the call's name without a body: the noted call is carried out again, and answered
//! ```
//!
//! A note is a small file: it outlives this process, and need not outlive the machine. Where
//! several calls of a name were cut off, each will be repeated, and nobody can tell which is
//! which; those whose answers are all the same are carried out in any order, others refused. A
//! call can be repeated that has no note: the process died before it was noted, or after the note
//! was removed and before dockerd had the answer. So calls whose answers differ are gathered for
//! a moment, and carried out if one alone was noted and one alone is repeated.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use parking_lot::Mutex;
use uuid::Uuid;

/// How long a note of an earlier process counts, from when it was written and from when it was
/// read: dockerd begins no try later than half a minute after the call began, which is when the
/// note was written. The rest is for a machine that is slow.
const REPEATED_WITHIN: Duration = Duration::from_secs(60);

/// How long repetitions are gathered: the death of a process cut all calls off at one moment, so
/// dockerd repeats them at nearly the same moments.
const GATHER_TIME: Duration = Duration::from_secs(1);

/// Notes that are read at a start: dockerd has far fewer calls under way.
const NOTES_MAX: usize = 1024;

/// Calls whose answers do not differ.
const INTERCHANGEABLE: [&str; 4] = ["Create", "CreateReadWrite", "Remove", "Put"];

/// The notes of this process and of the one before.
#[derive(Debug)]
pub(super) struct Notes {
    directory: PathBuf,
    opened: Instant,
    before: Mutex<Before>,
}

/// What concerns the process before.
#[derive(Debug, Default)]
struct Before {
    notes: Vec<Note>,
    /// How often a call was repeated, by its name.
    asked: BTreeMap<String, usize>,
}

/// A call that was not answered.
#[derive(Debug)]
struct Note {
    token: Uuid,
    call: String,
    body: Vec<u8>,
}

/// A call that is being carried out; dropped once it is answered.
#[derive(Debug)]
pub(super) struct Noted {
    /// What was asked.
    pub(super) body: Bytes,
    /// Names the call: the same when it is carried out again.
    pub(super) token: Uuid,
    path: Option<PathBuf>,
}

impl Drop for Noted {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            remove(path);
        }
    }
}

fn remove(path: &Path) {
    if let Err(error) = std::fs::remove_file(path)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        tracing::warn!(path = %path.display(), %error, "cannot remove the note of a call");
    }
}

impl Notes {
    /// The notes in a directory, made if it is missing.
    pub(super) fn open(directory: &Path) -> Arc<Self> {
        let mut notes = Vec::new();
        if let Err(error) = std::fs::create_dir_all(directory) {
            tracing::warn!(path = %directory.display(), %error, "calls cannot be noted");
        }
        for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
            match Note::read(&entry.path()) {
                Some(note) if notes.len() < NOTES_MAX => notes.push(note),
                _ => remove(&entry.path()),
            }
        }
        let directory = directory.to_owned();
        let before = Before { notes, asked: BTreeMap::new() };
        Arc::new(Self { directory, opened: Instant::now(), before: Mutex::new(before) })
    }

    /// Notes a call; a call without a body is taken for the repetition of an earlier one, if
    /// there is one that it can be.
    pub(super) async fn begin(&self, call: &str, body: Bytes) -> Noted {
        if body.is_empty() {
            let path = |token: Uuid| Some(self.directory.join(token.to_string()));
            return match self.take(call).await {
                Some(note) => {
                    tracing::info!(call, "repeated by dockerd: carried out as it was noted");
                    Noted { path: path(note.token), token: note.token, body: note.body.into() }
                }
                None => Noted { body, token: Uuid::new_v4(), path: None },
            };
        }
        let token = Uuid::new_v4();
        let path = self.directory.join(token.to_string());
        let mut text = format!("{call}\n").into_bytes();
        text.extend_from_slice(&body);
        // Without a note the call is as good as ever, unless this process dies.
        if let Err(error) = std::fs::write(&path, text) {
            tracing::warn!(path = %path.display(), %error, "a call cannot be noted");
        }
        Noted { body, token, path: Some(path) }
    }

    async fn take(&self, call: &str) -> Option<Note> {
        *self.before.lock().asked.entry(call.to_owned()).or_default() += 1;
        let is_interchangeable = INTERCHANGEABLE.contains(&call);
        if !is_interchangeable {
            tokio::time::sleep(GATHER_TIME).await;
        }
        let mut before = self.before.lock();
        if self.opened.elapsed() > REPEATED_WITHIN {
            for note in before.notes.drain(..) {
                remove(&self.directory.join(note.token.to_string()));
            }
        }
        let mut same = before.notes.iter().enumerate().filter(|(_, note)| note.call == call);
        let (first, _) = same.next()?;
        let is_one_noted = same.next().is_none();
        let is_one_asked = before.asked.get(call) == Some(&1);
        if !(is_interchangeable || is_one_noted && is_one_asked) {
            return None;
        }
        Some(before.notes.swap_remove(first))
    }
}

impl Note {
    /// The note in that file; none if it is no note, or older than what dockerd repeats.
    fn read(path: &Path) -> Option<Self> {
        let written = std::fs::metadata(path).ok()?.modified().ok()?;
        // One from the future was written before the clock was set back: it may be young.
        if written.elapsed().is_ok_and(|age| age > REPEATED_WITHIN) {
            return None;
        }
        let token = path.file_name()?.to_str()?.parse().ok()?;
        let text = std::fs::read(path).ok()?;
        let end = text.iter().position(|byte| *byte == b'\n')?;
        let call = String::from_utf8(text.get(..end)?.to_vec()).ok()?;
        Some(Self { token, call, body: text.get(end + 1..)?.to_vec() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Bytes = Bytes::from_static(b"{\"ID\":\"one\"}");
    const TWO: Bytes = Bytes::from_static(b"{\"ID\":\"two\"}");

    fn count(directory: &Path) -> usize {
        std::fs::read_dir(directory).unwrap().count()
    }

    /// Asks for a call as dockerd repeats it: by its name alone.
    async fn repeat(notes: &Notes, call: &str) -> Noted {
        notes.begin(call, Bytes::new()).await
    }

    #[tokio::test]
    async fn a_call_that_was_cut_off_is_found_by_its_name_once() {
        let folder = tempfile::tempdir().unwrap();
        let notes = Notes::open(folder.path());
        drop(notes.begin("Get", TWO).await);
        let cut_off = notes.begin("Get", ONE).await;
        let token = cut_off.token;
        std::mem::forget(cut_off);
        let notes = Notes::open(folder.path());
        assert!(repeat(&notes, "Put").await.body.is_empty(), "another call");
        let again = repeat(&notes, "Get").await;
        assert_eq!((&again.body, again.token), (&ONE, token));
        assert!(repeat(&notes, "Get").await.body.is_empty(), "taken already");
        drop(again);
        assert_eq!(count(folder.path()), 0);
    }

    #[tokio::test]
    async fn calls_with_different_answers_are_not_confused() {
        let folder = tempfile::tempdir().unwrap();
        let notes = Notes::open(folder.path());
        for call in ["Get", "Remove"] {
            std::mem::forget(notes.begin(call, ONE).await);
            std::mem::forget(notes.begin(call, TWO).await);
        }
        let notes = Notes::open(folder.path());
        assert!(repeat(&notes, "Get").await.body.is_empty());
        let mut bodies = [
            repeat(&notes, "Remove").await.body.clone(),
            repeat(&notes, "Remove").await.body.clone(),
        ];
        bodies.sort();
        assert_eq!(bodies, [ONE, TWO]);
    }

    #[tokio::test]
    async fn a_call_without_a_note_does_not_take_that_of_another() {
        let folder = tempfile::tempdir().unwrap();
        let notes = Notes::open(folder.path());
        // The note of this one is gone, and dockerd did not hear the answer.
        drop(notes.begin("Diff", ONE).await);
        std::mem::forget(notes.begin("Diff", TWO).await);
        let notes = Notes::open(folder.path());
        let later = async {
            // Well before the end, also on a busy machine.
            tokio::time::sleep(GATHER_TIME / 10).await;
            repeat(&notes, "Diff").await
        };
        let (one, two) = tokio::join!(repeat(&notes, "Diff"), later);
        assert!(one.body.is_empty() && two.body.is_empty());
        assert!(repeat(&notes, "Diff").await.body.is_empty(), "nor one that comes later");
    }

    #[tokio::test]
    async fn a_note_older_than_dockerds_tries_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let notes = Notes::open(folder.path());
        std::mem::forget(notes.begin("Get", ONE).await);
        let old = notes.begin("Get", TWO).await;
        let file = std::fs::File::options().write(true).open(old.path.as_ref().unwrap()).unwrap();
        let before = std::time::SystemTime::now() - REPEATED_WITHIN - Duration::from_secs(1);
        file.set_modified(before).unwrap();
        std::mem::forget(old);
        let notes = Notes::open(folder.path());
        assert_eq!(count(folder.path()), 1);
        assert_eq!(repeat(&notes, "Get").await.body, ONE);
    }

    #[test]
    fn what_is_no_note_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("junk"), "junk").unwrap();
        std::fs::write(folder.path().join(Uuid::new_v4().to_string()), "no line").unwrap();
        Notes::open(folder.path());
        assert_eq!(count(folder.path()), 0);
    }
}
