//! The workers of an appliance: who they are, and the hashes of what they prove it by.
//!
//! ```text
//! add --> invited --join--> joined --replace--> joined, with another credential
//!            |                 |
//!            +----- revoke ----+--> not there: its name is free, its credential is refused
//! ```
//! A credential that was replaced counts until the new one was used, and a minute more: the worker may not have had
//! the answer, and its other processes may have calls on their way. Until it ends, the new one is not replaced in turn,
//! so that a worker makes no more changes than one a minute.
//!
//! Invariants: a change is in the file before it is acknowledged. A worker that was revoked is refused from that moment
//! on, whatever the disk does. What a caller showed at the beginning of a call is compared again when the call changes
//! something. Secrets are kept as hashes: what the file holds is of no use to a caller. They are random and of 256 bits,
//! so they are found by their hash; the time that takes tells nothing of use. Names, ids and credentials are each of one
//! worker, and there are at most [`WORKERS_MAX`].

mod error;
mod record;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};

pub use error::{WorkersError, WorkersFileError};

use crate::types::Timestamp;
use crate::worker::{
    CREDENTIAL_PREFIX, JOIN_TOKEN_PREFIX, JoinWorker, SecretHash, Worker, WorkerName,
};
use record::Record;

/// Most workers: those of a large cluster. Each takes about half a KiB of the file, which is written whole at each
/// change.
pub const WORKERS_MAX: usize = 4096;

/// Longest file: [`WORKERS_MAX`] workers with the longest names, and as much again.
pub const WORKERS_FILE_BYTES_MAX: u64 = 8 << 20;

/// Random bytes of a join token, of a credential, and of a path to mount.
const SECRET_BYTES: usize = 32;

/// Where the workers are kept.
pub trait WorkersFile: fmt::Debug + Send + Sync {
    /// Replaces the content, so that a crash leaves the old one or the new one, and returns once it is on the disk.
    ///
    /// # Errors
    /// The disk is full or failed; the content is the old one or the new one.
    fn replace(&self, content: &[u8]) -> io::Result<()>;
}

/// Keeps nothing: for an appliance in memory.
#[derive(Clone, Copy, Debug, Default)]
struct NoFile;

impl WorkersFile for NoFile {
    fn replace(&self, _content: &[u8]) -> io::Result<()> {
        Ok(())
    }
}

/// What a secret showed its bearer to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Bearer {
    /// A worker, by the credential with this hash. The first use of a new one tells its caller to call
    /// [`Workers::retire_previous`] after a while.
    Worker {
        name: WorkerName,
        worker_id: uuid::Uuid,
        credential: SecretHash,
        retires_previous: bool,
    },
    /// A machine that may become this worker, by the join token with this hash.
    Invited { name: WorkerName, join_token: SecretHash },
}

/// The workers.
pub struct Workers {
    table: RwLock<Table>,
    /// Held from before the table is looked at for a change until the change is in the file.
    change: Mutex<()>,
    file: Box<dyn WorkersFile>,
}

#[derive(Clone, Default)]
struct Table {
    rows: BTreeMap<WorkerName, Row>,
    /// The row to look at for a secret, by its hash; that row says what it is, if it still has it. Each call looks here.
    names: HashMap<SecretHash, WorkerName>,
    /// The row to look at for an id. Each call of NFS looks here.
    ids: HashMap<uuid::Uuid, WorkerName>,
    /// Workers that were revoked and that the file still has.
    revoked: BTreeSet<WorkerName>,
    /// Whether a write failed, so that the file may have another content than it should.
    is_unsure: bool,
}

#[derive(Clone)]
struct Row {
    record: Record,
    /// Nanoseconds since the epoch; 0 before the first call.
    seen_at: Arc<AtomicU64>,
    /// Whether a call was told to end the previous credential.
    is_retiring: Arc<AtomicBool>,
}

impl Default for Workers {
    /// No workers, kept in memory alone.
    fn default() -> Self {
        Self::of(Table::default(), Box::new(NoFile))
    }
}

impl fmt::Debug for Workers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Workers")
            .field("count", &self.table.read().rows.len())
            .finish_non_exhaustive()
    }
}

impl Workers {
    /// The workers that a file has, which is written at each change; without content, none.
    ///
    /// # Errors
    /// The content is no table of workers, or one of a newer release.
    pub fn open(
        content: Option<&[u8]>,
        file: Box<dyn WorkersFile>,
    ) -> Result<Self, WorkersFileError> {
        let records = content.map(record::read).transpose()?.unwrap_or_default();
        let rows = records.into_iter().map(|record| (record.name.clone(), Row::new(record)));
        Ok(Self::of(Table { rows: rows.collect(), ..Table::default() }.indexed(), file))
    }

    fn of(table: Table, file: Box<dyn WorkersFile>) -> Self {
        Self { table: RwLock::new(table), change: Mutex::default(), file }
    }

    /// Their names.
    #[must_use]
    pub fn names(&self) -> Vec<WorkerName> {
        self.table.read().rows.keys().cloned().collect()
    }

    /// Calls this with the names that the file may have. No other one comes until it returns. Waits for the file.
    pub(crate) fn with_names<T>(&self, work: impl FnOnce(&[WorkerName]) -> T) -> T {
        let _change = self.change.lock();
        let names: Vec<_> = {
            let table = self.table.read();
            table.rows.keys().chain(&table.revoked).cloned().collect()
        };
        work(&names)
    }

    /// All of them, in order of their names.
    pub(crate) fn list(&self) -> Vec<Worker> {
        self.table.read().rows.values().map(Row::shown).collect()
    }

    /// One of them.
    pub(crate) fn get(&self, name: &WorkerName) -> Result<Worker, WorkersError> {
        let table = self.table.read();
        let row =
            table.rows.get(name).ok_or_else(|| WorkersError::NotFound { name: name.clone() })?;
        Ok(row.shown())
    }

    /// Who presents this secret. Notes that a worker was seen.
    pub(crate) fn identify(&self, presented: &[u8], now: Timestamp) -> Option<Bearer> {
        if !is_of_a_machine(presented) {
            return None;
        }
        let hash = hash(presented);
        let table = self.table.read();
        table.rows.get(table.names.get(&hash)?)?.bearer(hash, now)
    }

    /// Adds a worker, and makes its join token. `is_of_a_token` says whether a token has the name; no other worker is
    /// added until it has returned and this worker is there.
    pub(crate) fn add(
        &self,
        name: &WorkerName,
        worker_id: Option<uuid::Uuid>,
        expires_at: Timestamp,
        now: Timestamp,
        is_of_a_token: impl FnOnce() -> bool,
    ) -> Result<(Worker, String), WorkersError> {
        let token = join_token()?;
        let worker = self.change(|table| {
            if table.rows.contains_key(name) {
                return Err(WorkersError::Exists { name: name.clone() });
            }
            if is_of_a_token() {
                return Err(WorkersError::NameOfToken { name: name.clone() });
            }
            if table.rows.len() >= WORKERS_MAX {
                return Err(WorkersError::TooMany { limit: WORKERS_MAX });
            }
            if let Some(worker_id) = worker_id {
                refuse_id_of_another(table, name, worker_id)?;
            }
            let join_token = hash(token.as_bytes());
            let record = Record::new(name.clone(), worker_id, now, join_token, expires_at);
            let row = Row::new(record);
            let shown = row.shown();
            table.rows.insert(name.clone(), row);
            Ok(shown)
        })?;
        Ok((worker, token))
    }

    /// Makes the bearer of a join token the worker `name`. The same call again changes nothing. An id that is in use, as
    /// there are files or snapshots of it, is taken only if the worker was added with it: else a machine could name that of
    /// another.
    pub(crate) fn join(
        &self,
        name: &WorkerName,
        join_token: SecretHash,
        joining: &JoinWorker,
        is_in_use: bool,
        now: Timestamp,
    ) -> Result<Worker, WorkersError> {
        let JoinWorker { worker_id, credential_blake3: credential } = *joining;
        self.change(|table| {
            refuse_id_of_another(table, name, worker_id)?;
            refuse_credential_of_another(table, name, credential)?;
            let row = row_of(table, name)?;
            match row.record.worker_id {
                Some(expected) if expected != worker_id && row.record.joined_at.is_none() => {
                    return Err(WorkersError::OtherId { got: worker_id, expected });
                }
                None if is_in_use => {
                    return Err(WorkersError::IdInUse { worker_id, name: name.clone() });
                }
                _ => {}
            }
            row.record.join(join_token, worker_id, credential, now)?;
            Ok(row.shown())
        })
    }

    /// Gives the worker that presented `presented` another credential. The same call again changes nothing.
    pub(crate) fn replace_credential(
        &self,
        name: &WorkerName,
        presented: SecretHash,
        next: SecretHash,
        now: Timestamp,
    ) -> Result<Worker, WorkersError> {
        self.change(|table| {
            refuse_credential_of_another(table, name, next)?;
            let row = row_of(table, name)?;
            row.record.replace(presented, next, now)?;
            Ok(row.shown())
        })
    }

    /// Ends the credential before `used`, unless the worker was revoked and added again since then.
    pub(crate) fn retire_previous(
        &self,
        name: &WorkerName,
        used: SecretHash,
    ) -> Result<(), WorkersError> {
        self.change(|table| {
            let row = row_of(table, name)?;
            if row.record.credential.is_some_and(|current| current.blake3 == used) {
                // Whether it can be written or not: if not, a later call tries again.
                row.is_retiring.store(false, Ordering::Relaxed);
                row.record.previous = None;
            }
            Ok(())
        })
    }

    /// Removes a worker from memory, at once and without waiting for the disk: its credential and its join token are
    /// refused from now on. To be followed by [`Self::keep_revocation`].
    pub(crate) fn revoke(&self, name: &WorkerName) -> Result<(), WorkersError> {
        let mut table = self.table.write();
        if table.rows.remove(name).is_some() {
            table.revoked.insert(name.clone());
        }
        if table.revoked.contains(name) {
            return Ok(());
        }
        Err(WorkersError::NotFound { name: name.clone() })
    }

    /// Writes that a worker was revoked.
    pub(crate) fn keep_revocation(&self, name: &WorkerName) -> Result<(), WorkersError> {
        self.change(|_| Ok(())).map_err(|error| match error {
            WorkersError::Io { source } => WorkersError::NotKept { name: name.clone(), source },
            other => other,
        })
    }

    /// When the worker that presented `presented` was added.
    pub(crate) fn added_at(
        &self,
        name: &WorkerName,
        presented: SecretHash,
    ) -> Result<Timestamp, WorkersError> {
        let table = self.table.read();
        let row = table.rows.get(name).filter(|row| row.record.has(presented));
        Ok(row.ok_or_else(|| WorkersError::Outdated { name: name.clone() })?.record.created_at)
    }

    /// The id of the worker of this name that was added at this time, if it has joined and was not revoked.
    #[must_use]
    pub fn id_of(&self, name: &WorkerName, added_at: Timestamp) -> Option<uuid::Uuid> {
        let table = self.table.read();
        let record = &table.rows.get(name)?.record;
        let is_the_same = record.created_at == added_at && record.joined_at.is_some();
        record.worker_id.filter(|_| is_the_same)
    }

    /// Whether a worker with this id has joined, and was not revoked.
    #[must_use]
    pub fn is_worker(&self, worker_id: uuid::Uuid) -> bool {
        let table = self.table.read();
        let row = table.ids.get(&worker_id).and_then(|name| table.rows.get(name));
        row.is_some_and(|Row { record, .. }| {
            record.worker_id == Some(worker_id) && record.joined_at.is_some()
        })
    }

    /// Changes the table as soon as the change is in the file.
    fn change<T>(
        &self,
        change: impl FnOnce(&mut Table) -> Result<T, WorkersError>,
    ) -> Result<T, WorkersError> {
        let _change = self.change.lock();
        let before = self.table.read().clone();
        let mut table = before.clone();
        let outcome = change(&mut table)?;
        let is_to_be_written =
            table.is_unsure || !table.revoked.is_empty() || !table.is_same(&before);
        if !is_to_be_written {
            return Ok(outcome);
        }
        if let Err(source) = self.save(&table) {
            self.table.write().is_unsure = true;
            return Err(WorkersError::Io { source });
        }
        // Not under the lock, for which each call of NFS waits. Rows say what they have.
        let mut table = table.indexed();
        let mut live = self.table.write();
        // What was revoked while the file was written.
        let since: BTreeSet<_> = live.revoked.difference(&before.revoked).cloned().collect();
        table.rows.retain(|name, _| !since.contains(name));
        *live = Table { revoked: since, is_unsure: false, ..table };
        Ok(outcome)
    }

    fn save(&self, table: &Table) -> io::Result<()> {
        self.file.replace(&record::write(table.rows.values().map(|row| &row.record))?)
    }
}

impl Table {
    /// The same, with the secrets of its rows and no others.
    fn indexed(mut self) -> Self {
        let secrets = |row: &Row| {
            let name = row.record.name.clone();
            row.record.secrets().map(move |secret| (secret, name.clone())).collect::<Vec<_>>()
        };
        self.names = self.rows.values().flat_map(secrets).collect();
        let id = |row: &Row| Some((row.record.worker_id?, row.record.name.clone()));
        self.ids = self.rows.values().filter_map(id).collect();
        self
    }

    fn is_same(&self, other: &Self) -> bool {
        self.rows.values().map(|row| &row.record).eq(other.rows.values().map(|row| &row.record))
    }
}

impl Row {
    fn new(record: Record) -> Self {
        Self { record, seen_at: Arc::default(), is_retiring: Arc::default() }
    }

    fn bearer(&self, presented: SecretHash, now: Timestamp) -> Option<Bearer> {
        let record = &self.record;
        if let Some(worker_id) = record.worker_id.filter(|_| record.has(presented)) {
            self.seen_at.store(now.as_nanos(), Ordering::Relaxed);
            let is_current = record.credential.is_some_and(|current| current.blake3 == presented);
            let retires_previous = is_current
                && record.previous.is_some()
                && !self.is_retiring.swap(true, Ordering::Relaxed);
            let name = record.name.clone();
            let credential = presented;
            return Some(Bearer::Worker { name, worker_id, credential, retires_previous });
        }
        let invited = || Bearer::Invited { name: record.name.clone(), join_token: presented };
        record.is_invited_by(presented, now).then(invited)
    }

    fn shown(&self) -> Worker {
        let record = &self.record;
        let seen_at = self.seen_at.load(Ordering::Relaxed);
        Worker {
            name: record.name.clone(),
            worker_id: record.worker_id,
            created_at: record.created_at,
            join_token_expires_at: record.joined_at.is_none().then_some(record.join.expires_at),
            joined_at: record.joined_at,
            credential_since: record.credential.map(|credential| credential.since),
            last_seen_at: (seen_at > 0).then(|| Timestamp::from_nanos(seen_at)),
        }
    }
}

fn row_of<'a>(table: &'a mut Table, name: &WorkerName) -> Result<&'a mut Row, WorkersError> {
    table.rows.get_mut(name).ok_or_else(|| WorkersError::NotFound { name: name.clone() })
}

fn refuse_id_of_another(
    table: &Table,
    name: &WorkerName,
    worker_id: uuid::Uuid,
) -> Result<(), WorkersError> {
    let mut others = table.rows.values().filter(|row| row.record.name != *name);
    match others.find(|row| row.record.worker_id == Some(worker_id)) {
        Some(other) => Err(WorkersError::IdTaken { worker_id, name: other.record.name.clone() }),
        None => Ok(()),
    }
}

fn refuse_credential_of_another(
    table: &Table,
    name: &WorkerName,
    credential: SecretHash,
) -> Result<(), WorkersError> {
    match table.names.get(&credential) {
        Some(other) if other != name => Err(WorkersError::CredentialTaken { name: other.clone() }),
        _ => Ok(()),
    }
}

/// Whether the text has the form of a join token or a credential. Nothing else is looked for.
fn is_of_a_machine(secret: &[u8]) -> bool {
    let of = |prefix: &str| secret.strip_prefix(prefix.as_bytes());
    of(CREDENTIAL_PREFIX).or_else(|| of(JOIN_TOKEN_PREFIX)).is_some_and(|random| {
        random.len() == 2 * SECRET_BYTES && random.iter().all(u8::is_ascii_hexdigit)
    })
}

fn hash(secret: &[u8]) -> SecretHash {
    SecretHash::from_bytes(*blake3::hash(secret).as_bytes())
}

fn join_token() -> Result<String, WorkersError> {
    Ok(format!("{JOIN_TOKEN_PREFIX}{}", random_text()?))
}

/// A new secret, as hexadecimal digits.
pub(crate) fn random_text() -> Result<String, WorkersError> {
    let mut bytes = [0; SECRET_BYTES];
    getrandom::fill(&mut bytes)
        .map_err(|error| WorkersError::NoRandom { reason: error.to_string() })?;
    Ok(blake3::Hash::from_bytes(bytes).to_hex().to_string())
}

#[cfg(test)]
mod tests;
