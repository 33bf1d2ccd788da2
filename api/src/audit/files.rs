//! The files of the audit log: one JSON object a line, each file named by the number of its first change.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Read as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;

const SUFFIX: &str = ".jsonl";

/// Digits of a name: those of the largest number, so that names sort as numbers do.
const DIGITS: usize = 20;

/// A file of the log.
#[derive(Debug)]
pub(super) struct Numbered {
    pub(super) path: PathBuf,
    /// The number of its first change.
    pub(super) first: u64,
}

/// The files, the oldest first; none where there is no directory. What has another name is left alone.
pub(super) fn list(directory: &Path) -> io::Result<Vec<Numbered>> {
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry?;
        if let Some(first) = entry.file_name().to_str().and_then(number_of) {
            found.push(Numbered { path: entry.path(), first });
        }
    }
    found.sort_by_key(|file| file.first);
    Ok(found)
}

fn number_of(name: &str) -> Option<u64> {
    let digits = name.strip_suffix(SUFFIX).filter(|digits| digits.len() == DIGITS)?;
    digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())?
}

/// What is in the newest file.
pub(super) struct Recovered {
    /// The file, to be appended to, without a line that was cut.
    pub(super) file: io::Result<File>,
    pub(super) length_bytes: u64,
    /// The largest number of its changes, if it has one.
    pub(super) last: Option<u64>,
}

/// The number of a change, also of one that a newer release wrote.
#[derive(Deserialize)]
struct OnlyNumber {
    number: u64,
}

/// Reads the newest file, and opens it to be appended to.
pub(super) fn recover(newest: &Numbered, bytes_max: u64) -> io::Result<Recovered> {
    let mut bytes = Vec::new();
    File::open(&newest.path)?.take(bytes_max + 1).read_to_end(&mut bytes)?;
    let is_ours = u64::try_from(bytes.len()).is_ok_and(|length| length <= bytes_max);
    let whole = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
    let length_bytes = u64::try_from(whole).unwrap_or(u64::MAX);
    let open = || {
        if !is_ours {
            return Err(io::Error::other(format!("it has more than {bytes_max} bytes")));
        }
        let file = OpenOptions::new().append(true).open(&newest.path)?;
        if whole < bytes.len() {
            file.set_len(length_bytes)?;
            file.sync_data()?;
        }
        Ok(file)
    };
    let last = lines::<OnlyNumber>(&bytes).map(|change| change.number).max();
    Ok(Recovered { file: open(), length_bytes, last })
}

/// A file that was made.
pub(super) struct Begun {
    /// The file, to be appended to.
    pub(super) file: File,
    /// The directories by which it is found, as they have to be on the disk for that after a power cut.
    pub(super) directories: Vec<File>,
}

/// Makes the file of the changes from `first` on, and the directory where there is none. First removes the oldest, so
/// that there are at most `files_max`, and room on a full disk. Nothing is synced.
pub(super) fn begin(directory: &Path, first: u64, files_max: usize) -> io::Result<Begun> {
    let is_made = match DirBuilder::new().mode(0o700).create(directory) {
        Ok(()) => true,
        Err(error) if error.kind() == ErrorKind::AlreadyExists => false,
        Err(error) => return Err(error),
    };
    let files = list(directory)?;
    let surplus = (files.len() + 1).saturating_sub(files_max);
    for file in files.iter().take(surplus) {
        std::fs::remove_file(&file.path)?;
    }
    let path = directory.join(format!("{first:0DIGITS$}{SUFFIX}"));
    let file = OpenOptions::new().append(true).create_new(true).mode(0o600).open(path)?;
    // The file is there: tried again for nothing, this would remove one more.
    let parent = directory.parent().filter(|_| is_made);
    let directories = [Some(directory), parent].into_iter().flatten().filter_map(opened);
    Ok(Begun { file, directories: directories.collect() })
}

/// A directory that is to be synced.
pub(super) fn opened(directory: &Path) -> Option<File> {
    let failed = |error: &io::Error| {
        let directory = directory.display();
        tracing::error!(%directory, %error, "a power cut may take a file of the audit log");
    };
    File::open(directory).inspect_err(failed).ok()
}

/// The first bytes of a file, at most so many. None where it was removed just now.
pub(super) fn read(file: &Numbered, bytes_max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    match File::open(&file.path) {
        Ok(opened) => opened.take(bytes_max).read_to_end(&mut bytes)?,
        Err(error) if error.kind() == ErrorKind::NotFound => 0,
        Err(error) => return Err(error),
    };
    Ok(bytes)
}

/// The whole lines that can be read, the last one first. Each is read when it is asked for.
pub(super) fn lines<T: DeserializeOwned>(bytes: &[u8]) -> impl Iterator<Item = T> {
    // What stands behind the last line feed is no line yet.
    let whole = bytes.rsplit(|&byte| byte == b'\n').skip(1);
    whole.filter_map(|line| serde_json::from_slice(line).ok())
}
