//! What a process that resumes the mount must know, appended as it happens.
//!
//! One JSON record a line. `journal` is read from its start; once most of it is outdated it is
//! written anew beside itself and renamed. A last line that was cut off is passed over: what it
//! tells was not yet told to the kernel either, since a record is appended before the reply.
//!
//! A record that could not be appended may have left a part of its line: the journal is then
//! written anew before anything else is appended, so that no line but the last is ever cut off.
//!
//! Nothing is synced: the file has to outlive the process, not the machine, with which the
//! mount ends as well.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::ServeError;
use crate::lock::StateLock;
use crate::nfs::Verifier;

/// Records beyond twice the needed ones after which the journal is written anew.
const OUTDATED_MAX: usize = 4096;

/// The format of the journals that this program writes and reads. Release 0.2 wrote the same
/// without saying so.
const FORMAT: u32 = 1;

/// One thing that happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Record {
    /// The journal's format: its first line.
    Format { version: u32 },
    /// The kernel's greeting was answered.
    Started { minor: u32, has_resend: bool },
    /// The next number of a node: none is given twice in one mount.
    Next { node: u64 },
    /// A node that a look-up gave.
    Node { node: u64, path: String, handle: Vec<u8>, is_directory: bool },
    /// A look-up is answered with the node, `count` times.
    Looked { node: u64, count: u64 },
    /// The kernel forgets as many.
    Forgotten { node: u64, count: u64 },
    /// The file has uncommitted writes under this verifier.
    Dirty { node: u64, verifier: Verifier },
    /// All uncommitted writes of the file are under this verifier, none under an older one.
    Only { node: u64, verifier: Verifier },
    /// All writes of the file are committed.
    Clean { node: u64 },
    /// Uncommitted writes of the file are lost.
    Lost { node: u64 },
}

/// A node as it is remembered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NodeState {
    pub(crate) path: String,
    pub(crate) handle: Vec<u8>,
    pub(crate) is_directory: bool,
    /// Look-ups that the kernel has not forgotten.
    pub(crate) lookups: u64,
    /// The verifiers of uncommitted writes.
    pub(crate) dirty: Vec<Verifier>,
    pub(crate) is_lost: bool,
}

/// What all records together tell.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct State {
    /// The minor version, and whether the kernel resends; once it was greeted.
    pub(crate) started: Option<(u32, bool)>,
    pub(crate) next_node: u64,
    pub(crate) nodes: BTreeMap<u64, NodeState>,
}

impl State {
    fn apply(&mut self, record: &Record) {
        match record {
            Record::Format { .. } => {}
            Record::Started { minor, has_resend } => self.started = Some((*minor, *has_resend)),
            Record::Next { node } => self.next_node = self.next_node.max(*node),
            Record::Node { node, path, handle, is_directory } => {
                let state = NodeState {
                    path: path.clone(),
                    handle: handle.clone(),
                    is_directory: *is_directory,
                    lookups: 0,
                    dirty: Vec::new(),
                    is_lost: false,
                };
                self.nodes.insert(*node, state);
                self.next_node = self.next_node.max(node.saturating_add(1));
            }
            Record::Looked { node, count } => {
                self.change(*node, |state| state.lookups = state.lookups.saturating_add(*count));
            }
            Record::Forgotten { node, count } => {
                self.change(*node, |state| state.lookups = state.lookups.saturating_sub(*count));
                if self.nodes.get(node).is_some_and(|state| state.lookups == 0) {
                    self.nodes.remove(node);
                }
            }
            Record::Dirty { node, verifier } => self.change(*node, |state| {
                if !state.dirty.contains(verifier) {
                    state.dirty.push(*verifier);
                }
            }),
            Record::Only { node, verifier } => {
                self.change(*node, |state| state.dirty = vec![*verifier]);
            }
            Record::Clean { node } => self.change(*node, |state| state.dirty.clear()),
            Record::Lost { node } => self.change(*node, |state| {
                state.is_lost = true;
                state.dirty.clear();
            }),
        }
    }

    fn change(&mut self, node: u64, change: impl FnOnce(&mut NodeState)) {
        if let Some(state) = self.nodes.get_mut(&node) {
            change(state);
        }
    }

    /// Whether the file of the node is told to have uncommitted writes.
    pub(crate) fn is_dirty(&self, node: u64) -> bool {
        self.nodes.get(&node).is_some_and(|state| !state.dirty.is_empty())
    }

    /// The records that tell this and nothing else.
    fn records(&self) -> Vec<Record> {
        let started = self.started.map(|(minor, has_resend)| Record::Started { minor, has_resend });
        let mut records: Vec<Record> = started.into_iter().collect();
        records.push(Record::Next { node: self.next_node });
        for (&node, state) in &self.nodes {
            records.push(Record::Node {
                node,
                path: state.path.clone(),
                handle: state.handle.clone(),
                is_directory: state.is_directory,
            });
            records.push(Record::Looked { node, count: state.lookups });
            records.extend(state.dirty.iter().map(|&verifier| Record::Dirty { node, verifier }));
            records.extend(state.is_lost.then_some(Record::Lost { node }));
        }
        records
    }
}

/// The journal of one mount.
#[derive(Debug)]
pub(crate) struct Journal {
    path: PathBuf,
    file: File,
    state: State,
    /// More than any limit once what is in the file is not known.
    lines: usize,
    _lock: StateLock,
}

impl Journal {
    /// An empty journal in the directory, in place of an earlier mount's.
    pub(crate) fn create(lock: StateLock) -> Result<Self, ServeError> {
        Self::with_state(lock, State::default())
    }

    /// The journal that a process which died has left.
    pub(crate) fn resume(lock: StateLock) -> Result<Self, ServeError> {
        let path = lock.directory().join("journal");
        let wrong = |got: String| ServeError::Journal { path: path.clone(), got };
        let file = match File::open(&path) {
            Ok(file) => file,
            // It died before it began; then the kernel still has its greeting for this one.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Self::create(lock);
            }
            Err(source) => return Err(ServeError::File { path, source }),
        };
        let mut state = State::default();
        // Not as text: a line can be cut off in the middle of a letter.
        let mut lines = BufReader::new(file).split(b'\n').peekable();
        while let Some(line) = lines.next() {
            let line = line.map_err(|source| ServeError::File { path: path.clone(), source })?;
            match serde_json::from_slice(&line) {
                Ok(Record::Format { version }) if version != FORMAT => {
                    return Err(wrong(format!(
                        "it has format {version}, this program reads format {FORMAT}: another release wrote it"
                    )));
                }
                Ok(record) => state.apply(&record),
                // The process died while it wrote this.
                Err(_) if lines.peek().is_none() => {}
                Err(error) => {
                    let line = String::from_utf8_lossy(&line);
                    return Err(wrong(format!("`{line}`: {error}")));
                }
            }
        }
        Self::with_state(lock, state)
    }

    fn with_state(lock: StateLock, state: State) -> Result<Self, ServeError> {
        let path = lock.directory().join("journal");
        let (file, lines) = rewrite(&path, &state)
            .map_err(|source| ServeError::File { path: path.clone(), source })?;
        Ok(Self { path, file, state, lines, _lock: lock })
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) const fn state(&self) -> &State {
        &self.state
    }

    /// Appends a record.
    pub(crate) fn append(&mut self, record: &Record) -> io::Result<()> {
        self.state.apply(record);
        let needed = 4 + 4 * self.state.nodes.len();
        if self.lines > 2 * needed + OUTDATED_MAX {
            (self.file, self.lines) = rewrite(&self.path, &self.state)?;
            return Ok(());
        }
        let line = line_of(record)?;
        // A part of the line may be there.
        self.file.write_all(&line).inspect_err(|_| self.lines = usize::MAX)?;
        self.lines += 1;
        Ok(())
    }
}

#[cfg(test)]
impl Journal {
    /// The next record finds the disk full.
    pub(crate) fn fill_the_disk(&mut self) {
        self.file = OpenOptions::new().write(true).open("/dev/full").unwrap();
    }
}

fn line_of(record: &Record) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(record)?;
    line.push(b'\n');
    Ok(line)
}

/// A journal of this state alone, open to be appended to, and its lines.
fn rewrite(path: &Path, state: &State) -> io::Result<(File, usize)> {
    let beside = path.with_extension("new");
    let mut records = vec![Record::Format { version: FORMAT }];
    records.extend(state.records());
    let mut bytes = Vec::new();
    for record in &records {
        bytes.extend(line_of(record)?);
    }
    std::fs::write(&beside, bytes)?;
    std::fs::rename(&beside, path)?;
    let file = OpenOptions::new().append(true).open(path)?;
    Ok((file, records.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(node: u64) -> Record {
        let path = format!("disks/{node}");
        Record::Node { node, path, handle: vec![1, 2, 3], is_directory: false }
    }

    fn resume(directory: &Path) -> Result<Journal, ServeError> {
        Journal::resume(StateLock::try_take(directory).unwrap().expect("it is locked"))
    }

    fn filled(directory: &Path) -> Journal {
        let lock = StateLock::try_take(directory).unwrap().unwrap();
        let mut journal = Journal::create(lock).unwrap();
        for record in [
            Record::Started { minor: 40, has_resend: true },
            node(3),
            Record::Looked { node: 3, count: 2 },
            Record::Dirty { node: 3, verifier: [7; 8] },
            Record::Dirty { node: 3, verifier: [7; 8] },
            node(9),
            Record::Looked { node: 9, count: 1 },
            Record::Forgotten { node: 9, count: 1 },
        ] {
            journal.append(&record).unwrap();
        }
        journal
    }

    #[test]
    fn what_was_appended_is_resumed() {
        let folder = tempfile::tempdir().unwrap();
        let state = filled(folder.path()).state().clone();
        let mut resumed = resume(folder.path()).unwrap();
        assert_eq!(resumed.state(), &state);
        assert_eq!((state.started, state.next_node), (Some((40, true)), 10));
        assert_eq!(state.nodes.len(), 1);
        assert_eq!((state.nodes[&3].lookups, &state.nodes[&3].dirty), (2, &vec![[7; 8]]));
        resumed.append(&Record::Dirty { node: 3, verifier: [8; 8] }).unwrap();
        resumed.append(&Record::Only { node: 3, verifier: [8; 8] }).unwrap();
        drop(resumed);
        let mut resumed = resume(folder.path()).unwrap();
        assert_eq!(resumed.state().nodes[&3].dirty, [[8; 8]]);
        resumed.append(&Record::Lost { node: 3 }).unwrap();
        drop(resumed);
        let again = resume(folder.path()).unwrap();
        assert!(again.state().nodes[&3].is_lost && again.state().nodes[&3].dirty.is_empty());
    }

    #[test]
    fn a_line_that_was_cut_off_is_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        let journal = filled(folder.path());
        let state = journal.state().clone();
        let whole = std::fs::read(&journal.path).unwrap();
        let path = journal.path.clone();
        drop(journal);
        std::fs::write(&path, [&whole[..], b"{\"looked\":{\"no"].concat()).unwrap();
        assert_eq!(resume(folder.path()).unwrap().state(), &state);
        // In the middle of a letter.
        std::fs::write(&path, [&whole[..], b"{\"node\":{\"path\":\"\xc3"].concat()).unwrap();
        assert_eq!(resume(folder.path()).unwrap().state(), &state);
        std::fs::write(&path, [b"nonsense\n", &whole[..]].concat()).unwrap();
        let error = resume(folder.path()).unwrap_err();
        assert!(error.to_string().contains("nonsense"), "{error}");
        std::fs::remove_file(&path).unwrap();
        assert_eq!(resume(folder.path()).unwrap().state(), &State::default());
    }

    #[test]
    fn another_releases_journal_is_refused_unless_it_is_of_the_same_format() {
        let folder = tempfile::tempdir().unwrap();
        let journal = filled(folder.path());
        let (path, state) = (journal.path.clone(), journal.state().clone());
        drop(journal);
        let text = std::fs::read_to_string(&path).unwrap();
        let (first, rest) = text.split_once('\n').unwrap();
        assert_eq!(first, r#"{"format":{"version":1}}"#);
        // Even where all else is understood, or nothing follows.
        for rest in [rest, ""] {
            std::fs::write(&path, format!("{{\"format\":{{\"version\":2}}}}\n{rest}")).unwrap();
            let error = resume(folder.path()).unwrap_err().to_string();
            assert!(error.contains("format 2") && error.contains("unmount it"), "{error}");
        }
        // Release 0.2 wrote no such line.
        std::fs::write(&path, rest).unwrap();
        assert_eq!(resume(folder.path()).unwrap().state(), &state);
    }

    #[test]
    fn it_does_not_grow_for_ever() {
        let folder = tempfile::tempdir().unwrap();
        let mut journal = filled(folder.path());
        for _ in 0..3 * OUTDATED_MAX {
            journal.append(&Record::Dirty { node: 3, verifier: [8; 8] }).unwrap();
            journal.append(&Record::Clean { node: 3 }).unwrap();
        }
        let lines = std::fs::read_to_string(&journal.path).unwrap().lines().count();
        assert!(lines <= OUTDATED_MAX + 100, "{lines}");
        let state = journal.state().clone();
        drop(journal);
        assert_eq!(resume(folder.path()).unwrap().state(), &state);
    }

    #[test]
    fn a_line_that_the_disk_refused_is_not_in_the_middle() {
        let folder = tempfile::tempdir().unwrap();
        let mut journal = filled(folder.path());
        // A disk that takes a part of the line and then is full.
        let mut torn = OpenOptions::new().append(true).open(&journal.path).unwrap();
        torn.write_all(b"{\"dirty\":{\"no").unwrap();
        journal.fill_the_disk();
        let refused = journal.append(&Record::Dirty { node: 3, verifier: [8; 8] }).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::StorageFull);
        journal.append(&Record::Dirty { node: 3, verifier: [9; 8] }).unwrap();
        journal.append(&Record::Looked { node: 3, count: 1 }).unwrap();
        let state = journal.state().clone();
        assert!(state.nodes[&3].dirty.contains(&[9; 8]));
        drop(journal);
        assert_eq!(resume(folder.path()).unwrap().state(), &state);
    }
}
