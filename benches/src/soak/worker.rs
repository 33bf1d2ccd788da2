//! A client that behaves as RFC 1813 says, and keeps the model of what it was told.
//!
//! ```text
//! life of the server: connect -> recover: look, compare, send again -> act, act, act ... killed
//! ```
//! Invariants: a worker waits for its calls before it sends the next ones, but for bursts of
//! WRITEs to different blocks; nobody else touches its names. So what it was told is all that
//! can have happened.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use serde::Serialize;
use slackwater_benches::wire::{Handle, Session, WriteVerifier};
use slackwater_client::types::{Labels, SnapshotId};
use slackwater_client::{Client, RetryPolicy};
use tokio::runtime::Runtime;

use super::chance::Chance;
use super::matter::Matter;
use super::model::{FileModel, Image};
use super::target::Target;
use super::trouble::Trouble;
use crate::failure::Failure;

/// How much a worker has and does.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scale {
    /// Connections.
    pub(super) sessions: usize,
    /// Files at once, and their largest size.
    pub(super) files_max: usize,
    pub(super) file_blocks_max: u64,
    /// Snapshots at once.
    pub(super) snapshots_max: usize,
    /// WRITEs that are under way at once, and blocks of each.
    pub(super) burst_max: u64,
    pub(super) write_blocks_max: u64,
    /// Of a thousand actions that could be a garbage collection, so many are.
    pub(super) collect_permille: u64,
    pub(super) retry: RetryPolicy,
    /// Make all files and snapshots before anything else is done.
    pub(super) is_filled_first: bool,
}

/// Longest call over REST: a garbage collection of a small store on a machine that is slow, emulated
/// and busy. Beyond that the server hangs.
pub(super) const REST_LIMIT: Duration = Duration::from_secs(300);

/// One life of the server, as all workers see it.
#[derive(Debug)]
pub(super) struct Life<'a> {
    pub(super) target: &'a Target,
    /// Set before the signal is sent: what breaks from now on may break.
    pub(super) is_killed: AtomicBool,
    /// Workers that found everything in order.
    pub(super) verified: AtomicUsize,
    /// Workers that have made all their files and snapshots.
    pub(super) filled: AtomicUsize,
    /// Workers that found something else.
    pub(super) broken: AtomicUsize,
    /// Look at every snapshot, not only at some.
    pub(super) is_thorough: bool,
    /// Only look.
    pub(super) is_last: bool,
    /// Set when it is enough: the server goes on.
    pub(super) is_over: AtomicBool,
}

impl<'a> Life<'a> {
    /// A life in which workers act, or only look.
    pub(super) const fn new(target: &'a Target, is_thorough: bool, is_last: bool) -> Self {
        Self {
            target,
            is_killed: AtomicBool::new(false),
            verified: AtomicUsize::new(0),
            filled: AtomicUsize::new(0),
            broken: AtomicUsize::new(0),
            is_thorough: is_thorough || is_last,
            is_last,
            is_over: AtomicBool::new(false),
        }
    }

    pub(super) fn killed(&self) -> bool {
        self.is_killed.load(Ordering::SeqCst)
    }

    fn goes_on(&self) -> bool {
        !self.is_last && !self.killed() && !self.is_over.load(Ordering::SeqCst)
    }
}

/// The connections of one life.
pub(super) struct Line {
    pub(super) sessions: Vec<Session>,
    pub(super) root: Handle,
    pub(super) client: Client,
}

/// A file of a worker.
#[derive(Clone, Debug)]
pub(super) struct Held {
    pub(super) handle: Handle,
    pub(super) model: FileModel,
}

/// A snapshot of a worker.
#[derive(Clone, Debug)]
pub(super) struct Taken {
    pub(super) name: String,
    pub(super) image: Image,
}

/// A change that was asked for and not answered: done as a whole or not at all.
#[derive(Clone, Debug)]
pub(super) enum Doubt {
    Create { name: String },
    Remove { name: String },
    Rename { from: String, to: String },
    Resize { name: String, size_bytes: u64 },
    Clone { name: String, image: Image },
    Snapshot { taken: Taken },
    DeleteSnapshot { id: SnapshotId },
}

/// What was done.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct Counts {
    /// WRITEs that were answered UNSTABLE.
    pub(super) unstable_writes: u64,
    /// WRITEs that were answered FILE_SYNC.
    pub(super) stable_writes: u64,
    pub(super) commits: u64,
    /// Blocks that were sent again after a death.
    pub(super) resent_blocks: u64,
    /// Files of which a forgetful client took what it found after a death.
    pub(super) adopted_files: u64,
    pub(super) creates: u64,
    pub(super) renames: u64,
    pub(super) removes: u64,
    pub(super) resizes: u64,
    pub(super) snapshots: u64,
    pub(super) clones: u64,
    pub(super) deleted_snapshots: u64,
    pub(super) collections: u64,
    /// Changes that a death left unanswered, and that were found done.
    pub(super) unanswered_done: u64,
    /// The same, found not done.
    pub(super) unanswered_not_done: u64,
    /// Files and snapshots that were compared, and their bytes.
    pub(super) compared_files: u64,
    pub(super) compared_snapshots: u64,
    pub(super) compared_bytes: u64,
}

impl Counts {
    pub(super) fn add(&mut self, other: &Self) {
        self.unstable_writes += other.unstable_writes;
        self.stable_writes += other.stable_writes;
        self.commits += other.commits;
        self.resent_blocks += other.resent_blocks;
        self.adopted_files += other.adopted_files;
        self.creates += other.creates;
        self.renames += other.renames;
        self.removes += other.removes;
        self.resizes += other.resizes;
        self.snapshots += other.snapshots;
        self.clones += other.clones;
        self.deleted_snapshots += other.deleted_snapshots;
        self.collections += other.collections;
        self.unanswered_done += other.unanswered_done;
        self.unanswered_not_done += other.unanswered_not_done;
        self.compared_files += other.compared_files;
        self.compared_snapshots += other.compared_snapshots;
        self.compared_bytes += other.compared_bytes;
    }
}

/// One client.
pub(super) struct Worker {
    pub(super) number: usize,
    pub(super) scale: Scale,
    pub(super) chance: Chance,
    pub(super) matter: Matter,
    pub(super) runtime: Runtime,
    pub(super) files: BTreeMap<String, Held>,
    pub(super) snapshots: BTreeMap<SnapshotId, Taken>,
    pub(super) doubt: Option<Doubt>,
    pub(super) counts: Counts,
    /// Names that were given so far: none is given twice.
    names: u64,
    pub(super) verifiers: Verifiers,
}

/// The write verifiers of this life of the server and of the one before.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Verifiers {
    now: Option<WriteVerifier>,
    earlier: Option<WriteVerifier>,
}

impl Verifiers {
    /// Notes one: there is one for each life of the server (RFC 1813 section 3.3.7).
    pub(super) fn saw(&mut self, verifier: WriteVerifier) -> Result<(), Trouble> {
        if self.earlier == Some(verifier) {
            return Err(Trouble::broken("the server has the write verifier of its last life"));
        }
        match self.now {
            None => self.now = Some(verifier),
            Some(other) if other == verifier => {}
            Some(_) => return Err(Trouble::broken("the write verifier changed while it lived")),
        }
        Ok(())
    }

    const fn next_life(&mut self) {
        if self.now.is_some() {
            self.earlier = self.now.take();
        }
    }
}

impl Worker {
    pub(super) fn new(number: usize, seed: u64, scale: Scale) -> Result<Self, Failure> {
        let chance = Chance::new(seed).branch(number as u64);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(Failure::on("start a runtime"))?;
        Ok(Self {
            number,
            scale,
            matter: Matter::new(seed, chance.clone().next()),
            chance,
            runtime,
            files: BTreeMap::new(),
            snapshots: BTreeMap::new(),
            doubt: None,
            counts: Counts::default(),
            names: 0,
            verifiers: Verifiers::default(),
        })
    }

    /// Works until the server is killed.
    ///
    /// # Errors
    /// The promise that is broken.
    pub(super) fn live(&mut self, life: &Life<'_>) -> Result<(), String> {
        self.verifiers.next_life();
        let lost = match self.try_live(life) {
            Ok(()) => return Ok(()),
            Err(Trouble::Gone(_)) if life.killed() => return Ok(()),
            Err(Trouble::Gone(why)) => format!("the server went away without a kill: {why}"),
            Err(Trouble::Broken(why)) => why,
        };
        life.broken.fetch_add(1, Ordering::SeqCst);
        Err(format!("worker {}: {lost}", self.number))
    }

    fn try_live(&mut self, life: &Life<'_>) -> Result<(), Trouble> {
        let mut line = Line::connect(life.target, self.scale, &self.runtime)?;
        self.recover(&mut line, life.is_thorough)?;
        life.verified.fetch_add(1, Ordering::SeqCst);
        if self.scale.is_filled_first && !life.is_last {
            self.fill(&mut line)?;
            life.filled.fetch_add(1, Ordering::SeqCst);
        }
        while life.goes_on() {
            self.act(&mut line)?;
        }
        Ok(())
    }

    /// What all names of this worker begin with.
    pub(super) fn prefix(&self) -> String {
        format!("w{}-", self.number)
    }

    /// What all snapshots of this worker carry.
    pub(super) fn labels(&self) -> Labels {
        Labels::from([("worker".to_owned(), self.prefix())])
    }

    /// A name that was never given before.
    pub(super) fn new_name(&mut self) -> String {
        self.names += 1;
        format!("{}{}", self.prefix(), self.names)
    }
}

impl Line {
    pub(super) fn connect(
        target: &Target,
        scale: Scale,
        runtime: &Runtime,
    ) -> Result<Self, Trouble> {
        let sessions = (0..scale.sessions).map(|_| Session::connect(target.nfs));
        let sessions = sessions.collect::<Result<_, _>>()?;
        let client = target.client(REST_LIMIT, scale.retry);
        let client = client.map_err(|failure| Trouble::broken(failure.to_string()))?;
        let root = target.mount(&client, runtime)?;
        Ok(Self { sessions, root, client })
    }

    /// One of the connections.
    pub(super) fn session(&mut self, chance: &mut Chance) -> &mut Session {
        let index = chance.index(self.sessions.len());
        &mut self.sessions[index]
    }
}
