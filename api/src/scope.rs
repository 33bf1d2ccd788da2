//! Which files and snapshots a caller reaches.
//!
//! ```text
//! caller                      reads                                changes
//! token, or none is asked     all                                  all, as its role allows
//! worker that joined          its files, published/, the           its files, published/SNAPSHOT, snapshots of its
//!                             snapshots that `readable` says       files, but those that a token keeps; registers chains
//! ```
//! A worker's files are those below `workers/ID/`, where ID is that of its driver. What is published keeps snapshots for
//! all workers: each may add what it made or pulled, and take it away again.
//!
//! Invariant: a handler takes the [`FilePath`] and the snapshot of a request from here. `state` has no other way to a
//! path.

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use slackwater_blockstore::{
    DeletionPolicy, FilePath, Labels, Name, Snapshot as StoreSnapshot,
    SnapshotId as StoreSnapshotId, Store,
};
use uuid::Uuid;

use crate::auth::{Caller, Machine};
use crate::error::ProblemCode;
use crate::failure::Failure;
use crate::readable::WorkerReads;
use crate::reserved;
use crate::state::Shared;
use crate::types::SnapshotId;

/// Below it is a directory for each worker.
pub(crate) const WORKERS: &str = "workers";

/// In it is a file for each snapshot that is kept for images in registries.
pub(crate) const PUBLISHED: &str = "published";

/// What a caller reaches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// All, as far as its role goes.
    All,
    /// What belongs to one worker, and what all workers share.
    Worker {
        /// Its name, for errors.
        name: String,
        /// The id of its driver.
        id: Uuid,
    },
}

/// What a call that deletes is for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Deletion<'a> {
    /// A file.
    File(FilePath),
    /// The part of this worker in what keeps a snapshot published.
    Publication { worker: &'a str, snapshot: StoreSnapshotId, path: FilePath },
}

impl FromRequestParts<Shared> for Scope {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _state: &Shared) -> Result<Self, Failure> {
        match parts.extensions.get::<Caller>().map(|caller| &caller.machine) {
            Some(None) => Ok(Self::All),
            Some(Some(Machine::Worker { name, worker_id, .. })) => {
                Ok(Self::Worker { name: name.to_string(), id: *worker_id })
            }
            // No route that asks for a scope lets these in.
            Some(Some(Machine::Invited(..))) | None => {
                Err(Failure::new(ProblemCode::Internal, "the caller of this request is not known"))
            }
        }
    }
}

impl Scope {
    /// The path of a file that is to be looked at.
    ///
    /// # Errors
    /// A text that is no path, or a path that the caller does not reach.
    pub(crate) fn reads(&self, text: &str) -> Result<FilePath, Failure> {
        let path = parse(text)?;
        match self {
            Self::Worker { id, .. } if !is_of(&path, *id) && !is_published(&path) => {
                Err(self.refused("read", text))
            }
            _ => Ok(path),
        }
    }

    /// The path of a file that is to be made or changed, or that a snapshot is to be taken of.
    ///
    /// # Errors
    /// As [`Self::reads`].
    pub(crate) fn changes(&self, text: &str) -> Result<FilePath, Failure> {
        let path = parse(text)?;
        match self {
            Self::Worker { id, .. } if !is_of(&path, *id) => Err(self.refused("change", text)),
            _ => Ok(path),
        }
    }

    /// The path of a clone that is to be made of a snapshot: also that by which the snapshot is published.
    ///
    /// # Errors
    /// As [`Self::reads`].
    pub(crate) fn clones(&self, text: &str, snapshot: SnapshotId) -> Result<FilePath, Failure> {
        let path = parse(text)?;
        match self {
            Self::Worker { .. } if path.to_bytes() == published(snapshot).as_bytes() => Ok(path),
            _ => self.changes(text),
        }
    }

    /// What is to be deleted.
    ///
    /// # Errors
    /// As [`Self::reads`].
    pub(crate) fn deletes(&self, text: &str) -> Result<Deletion<'_>, Failure> {
        match self {
            Self::Worker { name, .. } => {
                let path = parse(text)?;
                match published_snapshot(&path) {
                    Some(snapshot) => Ok(Deletion::Publication { worker: name, snapshot, path }),
                    None => self.changes(text).map(Deletion::File),
                }
            }
            Self::All => self.changes(text).map(Deletion::File),
        }
    }

    /// With what the paths of a list begin, in order, so that it has all that begins with `prefix` and that the caller
    /// reaches.
    pub(crate) fn lists(&self, prefix: &str) -> Vec<String> {
        let Self::Worker { id, .. } = self else {
            return vec![prefix.to_owned()];
        };
        let reached = [format!("{PUBLISHED}/"), format!("{WORKERS}/{id}/")];
        let both =
            |reached: String| match (prefix.starts_with(&reached), reached.starts_with(prefix)) {
                (true, _) => Some(prefix.to_owned()),
                (false, true) => Some(reached),
                (false, false) => None,
            };
        reached.into_iter().filter_map(both).collect()
    }

    /// A snapshot that is to be looked at.
    ///
    /// # Errors
    /// There is none, or the caller does not reach it.
    pub(crate) async fn snapshot(
        &self,
        state: &Shared,
        id: StoreSnapshotId,
    ) -> Result<StoreSnapshot, Failure> {
        let mut reads = self.worker_reads();
        let look_up = move |store: &Store| {
            let snapshot = store.snapshot_info(id)?;
            let is_read = reads.as_mut().map(|reads| reads.reads(store, &snapshot)).transpose()?;
            Ok((snapshot, is_read.unwrap_or(true)))
        };
        match state.call(look_up).await? {
            (snapshot, true) => Ok(snapshot),
            (_, false) => Err(self.refused_snapshot(id)),
        }
    }

    /// Whether a snapshot may be read, for a call that looks it up itself: nothing is asked for a token.
    ///
    /// # Errors
    /// It may not, or there is none.
    pub(crate) async fn require_snapshot(
        &self,
        state: &Shared,
        id: StoreSnapshotId,
    ) -> Result<(), Failure> {
        match self {
            Self::All => Ok(()),
            Self::Worker { .. } => self.snapshot(state, id).await.map(drop),
        }
    }

    /// What tells which snapshots the caller reads; `None`: all.
    pub(crate) fn worker_reads(&self) -> Option<WorkerReads> {
        match self {
            Self::All => None,
            Self::Worker { id, .. } => Some(WorkerReads::new(*id)),
        }
    }

    fn refused_snapshot(&self, id: StoreSnapshotId) -> Failure {
        self.forbidden(|name, _| {
            format!(
                "worker `{name}` may not read snapshot {id}: it is neither of its own files, nor registered as a layer, \
                 nor published, and no file of the worker is a clone of it; a token reaches all"
            )
        })
    }

    /// The labels of a snapshot that this caller is to take. One that a token takes to keep, of a worker's file, is not
    /// the worker's to end: it may be what is left when a worker deletes all that it can. One that goes with its last
    /// clone is a driver's, which may have a credential later.
    pub(crate) fn labels_of_snapshot(
        &self,
        caller: &str,
        path: &FilePath,
        deletion: DeletionPolicy,
        labels: Labels,
    ) -> Labels {
        let is_kept = deletion == DeletionPolicy::Keep;
        match *self == Self::All && is_kept && begins_with(path, &[WORKERS.as_bytes()]) {
            true => reserved::with_taker(labels, caller),
            false => labels,
        }
    }

    /// Whether a snapshot may be deleted or labelled: it is one of a file that may be changed, and no token keeps it.
    ///
    /// # Errors
    /// It is not.
    pub(crate) fn changes_snapshot(&self, snapshot: &StoreSnapshot) -> Result<(), Failure> {
        let Self::Worker { id, .. } = self else {
            return Ok(());
        };
        if !snapshot.path.starts_with(format!("{WORKERS}/{id}/").as_bytes()) {
            return Err(self.refused("change", &format!("snapshot {}", snapshot.id)));
        }
        match reserved::taker(&snapshot.labels) {
            None => Ok(()),
            Some(taker) => Err(self.forbidden(|name, _| {
                let taker = if taker.is_empty() { "a caller without a token" } else { taker };
                format!(
                    "worker `{name}` may not change snapshot {}: it is of the worker's files, and `{taker}` took it to \
                     keep; a token changes or deletes it",
                    snapshot.id
                )
            })),
        }
    }

    fn refused(&self, action: &str, what: &str) -> Failure {
        let shown: String = what.chars().take(128).collect();
        self.forbidden(|name, id| {
            format!(
                "worker `{name}` may not {action} `{}`: its files are below {WORKERS}/{id}/; a token reaches the others",
                shown.escape_debug()
            )
        })
    }

    fn forbidden(&self, detail: impl FnOnce(&str, Uuid) -> String) -> Failure {
        let detail = match self {
            Self::All => "the caller does not reach it".to_owned(),
            Self::Worker { name, id } => detail(name, *id),
        };
        Failure::new(ProblemCode::Forbidden, detail)
    }
}

/// The path by which a snapshot is published.
fn published(snapshot: SnapshotId) -> String {
    format!("{PUBLISHED}/{snapshot}")
}

fn parse(text: &str) -> Result<FilePath, Failure> {
    FilePath::parse(text).map_err(Failure::from)
}

/// Whether the path is below the directory of the worker with this id.
fn is_of(path: &FilePath, id: Uuid) -> bool {
    let id = id.to_string();
    let begins = [WORKERS.as_bytes(), id.as_bytes()];
    path.names().len() > begins.len() && begins_with(path, &begins)
}

fn is_published(path: &FilePath) -> bool {
    path.names().len() > 1 && begins_with(path, &[PUBLISHED.as_bytes()])
}

/// The snapshot that is published by a file at this path.
pub(crate) fn published_snapshot(path: &FilePath) -> Option<StoreSnapshotId> {
    let name = path.names().last().filter(|_| is_published(path) && path.names().len() == 2)?;
    std::str::from_utf8(name.as_bytes()).ok()?.parse().ok()
}

fn begins_with(path: &FilePath, begins: &[&[u8]]) -> bool {
    path.names().iter().map(Name::as_bytes).zip(begins).all(|(name, begin)| name == *begin)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "6f1f3c1e-5d0c-4d55-9d61-2f5b6f0f6c11";
    const OTHER: &str = "6f1f3c1e-5d0c-4d55-9d61-2f5b6f0f6c12";

    fn worker() -> Scope {
        Scope::Worker { name: "node-7".to_owned(), id: ID.parse().unwrap() }
    }

    #[test]
    fn a_worker_changes_what_is_below_its_directory() {
        for own in [format!("workers/{ID}/disks/a"), format!("/workers/{ID}/lease")] {
            assert!(worker().changes(&own).is_ok() && worker().reads(&own).is_ok(), "{own}");
            assert!(matches!(worker().deletes(&own), Ok(Deletion::File(_))), "{own}");
        }
        let upper = ID.to_uppercase();
        let others = [
            "a".to_owned(),
            "workers".to_owned(),
            format!("workers/{ID}"),
            format!("workers/{OTHER}/disks/a"),
            format!("workers/{upper}/disks/a"),
            format!("workers/{ID}x/disks/a"),
            format!("x/workers/{ID}/disks/a"),
            "published".to_owned(),
        ];
        for other in others {
            let worker = worker();
            let deleted = worker.deletes(&other).map(|_| ());
            for refused in
                [worker.changes(&other).map(drop), worker.reads(&other).map(drop), deleted]
            {
                let refused = refused.unwrap_err();
                assert_eq!(refused.code(), ProblemCode::Forbidden, "{other}");
                assert!(refused.detail().contains("node-7"), "{}", refused.detail());
            }
            assert!(Scope::All.changes(&other).is_ok() && Scope::All.deletes(&other).is_ok());
        }
        for none in ["", "a//b", "..", &format!("workers/{ID}/../{OTHER}/a")] {
            assert!(worker().changes(none).is_err() && Scope::All.reads(none).is_err(), "{none}");
        }
    }

    #[test]
    fn what_is_published_is_a_clone_of_the_snapshot_that_its_name_tells() {
        let snapshot: SnapshotId = OTHER.parse().unwrap();
        let path = format!("published/{OTHER}");
        assert!(worker().reads(&path).is_ok());
        let (worker_7, parsed) = (worker(), FilePath::parse(&path).unwrap());
        let ended = Deletion::Publication {
            worker: "node-7",
            snapshot: OTHER.parse().unwrap(),
            path: parsed.clone(),
        };
        assert_eq!(worker_7.deletes(&path).unwrap(), ended);
        assert_eq!(Scope::All.deletes(&path).unwrap(), Deletion::File(parsed));
        assert!(worker().clones(&path, snapshot).is_ok());
        assert!(worker().clones(&path, ID.parse().unwrap()).is_err());
        assert!(worker().clones(&format!("{path}/a"), snapshot).is_err());
        assert!(worker().clones(&format!("workers/{ID}/disks/a"), snapshot).is_ok());
        assert!(worker().changes(&path).is_err());
        for other in [format!("{path}/a"), "published/x".to_owned()] {
            assert!(worker().deletes(&other).is_err(), "{other}");
        }
    }

    #[test]
    fn a_list_is_of_what_is_reached() {
        let own = format!("workers/{ID}/");
        let below = format!("{own}disks/0");
        let cases = [
            ("", vec!["published/", &own]),
            ("w", vec![&own]),
            ("workers/", vec![&own]),
            (own.trim_end_matches('/'), vec![&own]),
            (&below, vec![&below]),
            ("pub", vec!["published/"]),
            ("published/6", vec!["published/6"]),
            ("images/", vec![]),
            ("workers/7", vec![]),
        ];
        for (prefix, expected) in cases {
            assert_eq!(worker().lists(prefix), expected, "{prefix}");
            assert_eq!(Scope::All.lists(prefix), [prefix]);
        }
    }
}
