//! What a worker does when the server is back: settles what was not answered, compares all that
//! it was promised, and sends again what was not durable.

use std::collections::{BTreeMap, BTreeSet};

use slackwater_benches::wire::{Handle, call};
use slackwater_client::query::{ListFiles, ListSnapshots};
use slackwater_client::types::SnapshotId;
use slackwater_client::{ByteRange, ClientError, DataSource, ProblemCode};

use super::actions::read_all;
use super::model::{FileModel, Image};
use super::trouble::Trouble;
use super::worker::{Doubt, Held, Line, Taken, Worker};

/// How often, of a hundred, a client has died with the server, and takes what it finds.
const ADOPT_PERCENT: u64 = 30;

/// How often, of a hundred, a client commits at once what it sent again.
const COMMIT_PERCENT: u64 = 50;

/// Snapshots that are compared after each death; all of them are when it is thorough.
const SNAPSHOTS_COMPARED: usize = 2;

/// Items of a page of a listing: more than there are.
const PAGE_ITEMS: usize = 1000;

/// The unlisted directory of the export that holds the snapshots.
const SNAPSHOT_DIRECTORY: &str = ".snapshot";

impl Worker {
    /// Finds the server as it must be, or says what is lost.
    pub(super) fn recover(&mut self, line: &mut Line, is_thorough: bool) -> Result<(), Trouble> {
        if let Some(doubt) = self.doubt.clone() {
            let is_done = self.settle(line, doubt)?;
            self.doubt = None;
            match is_done {
                true => self.counts.unanswered_done += 1,
                false => self.counts.unanswered_not_done += 1,
            }
        }
        self.compare_names(line)?;
        let names: Vec<String> = self.files.keys().cloned().collect();
        for name in names {
            self.compare_file(line, &name)?;
        }
        let mut snapshots: Vec<SnapshotId> = self.snapshots.keys().copied().collect();
        while !is_thorough && snapshots.len() > SNAPSHOTS_COMPARED {
            snapshots.swap_remove(self.chance.index(snapshots.len()));
        }
        for id in snapshots {
            self.compare_snapshot(line, id)?;
        }
        Ok(())
    }

    /// Whether the change that was not answered was made. It must be there as a whole or not at
    /// all.
    fn settle(&mut self, line: &mut Line, doubt: Doubt) -> Result<bool, Trouble> {
        match doubt {
            Doubt::Create { name } => self.settle_new(line, name, FileModel::empty()),
            Doubt::Clone { name, image } => self.settle_new(line, name, FileModel::holding(&image)),
            Doubt::Remove { name } => {
                let is_done = self.lookup(line, &name)?.is_none();
                if is_done {
                    self.files.remove(&name);
                }
                Ok(is_done)
            }
            Doubt::Rename { from, to } => self.settle_rename(line, &from, to),
            Doubt::Resize { name, size_bytes } => {
                let Some(held) = self.files.get_mut(&name) else { return Ok(false) };
                let session = line.session(&mut self.chance);
                let is_done = session.size(&held.handle)? == size_bytes;
                if is_done {
                    held.model.resized(size_bytes);
                }
                Ok(is_done)
            }
            Doubt::Snapshot { taken } => {
                let query =
                    ListSnapshots { name: Some(taken.name.clone()), ..ListSnapshots::default() };
                let page = self.runtime.block_on(line.client.snapshots(&query))?;
                let found = page.items.first().map(|snapshot| snapshot.id);
                self.snapshots.extend(found.map(|id| (id, taken)));
                Ok(found.is_some())
            }
            Doubt::DeleteSnapshot { id } => {
                let is_done = match self.runtime.block_on(line.client.snapshot(id)) {
                    Ok(_) => false,
                    Err(ClientError::Api { code: ProblemCode::NotFound, .. }) => true,
                    Err(error) => return Err(error.into()),
                };
                if is_done {
                    self.snapshots.remove(&id);
                }
                Ok(is_done)
            }
        }
    }

    fn settle_new(
        &mut self,
        line: &mut Line,
        name: String,
        model: FileModel,
    ) -> Result<bool, Trouble> {
        let found = self.lookup(line, &name)?;
        let is_done = found.is_some();
        self.files.extend(found.map(|handle| (name, Held { handle, model })));
        Ok(is_done)
    }

    fn settle_rename(&mut self, line: &mut Line, from: &str, to: String) -> Result<bool, Trouble> {
        let moved = self.files.get(from).map(|held| held.handle.clone());
        let replaced = self.files.get(&to).map(|held| held.handle.clone());
        let (at_from, at_to) = (self.lookup(line, from)?, self.lookup(line, &to)?);
        if (&at_from, &at_to) == (&moved, &replaced) {
            return Ok(false);
        }
        if at_from.is_some() || at_to != moved {
            return Err(Trouble::broken(format!("the rename of {from} to {to} is half done")));
        }
        if let Some(held) = self.files.remove(from) {
            self.files.insert(to, held);
        }
        Ok(true)
    }

    fn lookup(&mut self, line: &mut Line, name: &str) -> Result<Option<Handle>, Trouble> {
        let root = line.root.clone();
        let session = line.session(&mut self.chance);
        Ok(session.call(|out, xid| call::lookup(out, xid, &root, name))?.lookup()?)
    }

    /// The names of files and snapshots are those of the model, no more and no less.
    fn compare_names(&self, line: &Line) -> Result<(), Trouble> {
        let query = ListFiles {
            prefix: Some(self.prefix()),
            limit: Some(PAGE_ITEMS),
            ..ListFiles::default()
        };
        let page = self.runtime.block_on(line.client.files(&query))?;
        let got: BTreeSet<String> = page.items.into_iter().map(|file| file.path).collect();
        let expected: BTreeSet<String> = self.files.keys().cloned().collect();
        same("files", &got, &expected)?;
        let labels = self.labels();
        let query = ListSnapshots { labels, limit: Some(PAGE_ITEMS), ..ListSnapshots::default() };
        let page = self.runtime.block_on(line.client.snapshots(&query))?;
        let items = page.items.into_iter();
        let got: BTreeMap<SnapshotId, String> =
            items.map(|snapshot| (snapshot.id, snapshot.name.unwrap_or_default())).collect();
        let name_of = |(id, taken): (&SnapshotId, &Taken)| (*id, taken.name.clone());
        let expected: BTreeMap<SnapshotId, String> = self.snapshots.iter().map(name_of).collect();
        same("snapshots", &got, &expected)
    }

    /// Compares a file, and sends again what is not durable.
    fn compare_file(&mut self, line: &mut Line, name: &str) -> Result<(), Trouble> {
        let found = self.lookup(line, name)?;
        let Some(held) = self.files.get_mut(name) else { return Ok(()) };
        if found.as_ref() != Some(&held.handle) {
            return Err(Trouble::broken(format!("{name} has another handle, or is another file")));
        }
        let got = read_all(line.session(&mut self.chance), &held.handle)?;
        held.model.observe(&got).map_err(|what| Trouble::broken(format!("{name}: {what}")))?;
        self.counts.compared_files += 1;
        self.counts.compared_bytes += got.size_bytes();
        if held.model.is_durable() {
            return Ok(());
        }
        if self.chance.percent(ADOPT_PERCENT) {
            held.model = FileModel::holding(&got);
            self.counts.adopted_files += 1;
            return Ok(());
        }
        self.resend(line, name)?;
        if self.chance.percent(COMMIT_PERCENT) {
            self.commit(line, name)?;
        }
        Ok(())
    }

    /// Compares a snapshot, over NFS or over REST.
    fn compare_snapshot(&mut self, line: &mut Line, id: SnapshotId) -> Result<(), Trouble> {
        let expected = self.snapshots[&id].image.clone();
        let got = if self.chance.percent(50) {
            self.snapshot_over_nfs(line, id)?
        } else {
            self.snapshot_over_rest(line, id, expected.size_bytes())?
        };
        self.counts.compared_snapshots += 1;
        self.counts.compared_bytes += got.size_bytes();
        match expected.difference(&got) {
            None => Ok(()),
            Some(what) => Err(Trouble::broken(format!("snapshot {id}: {what}"))),
        }
    }

    fn snapshot_over_nfs(&mut self, line: &mut Line, id: SnapshotId) -> Result<Image, Trouble> {
        let missing = || Trouble::broken(format!("snapshot {id} is not in {SNAPSHOT_DIRECTORY}"));
        let directory = self.lookup(line, SNAPSHOT_DIRECTORY)?.ok_or_else(missing)?;
        let session = line.session(&mut self.chance);
        let name = id.to_string();
        let found = session.call(|out, xid| call::lookup(out, xid, &directory, &name))?;
        let file = found.lookup()?.ok_or_else(missing)?;
        read_all(session, &file)
    }

    fn snapshot_over_rest(
        &self,
        line: &Line,
        id: SnapshotId,
        size_bytes: u64,
    ) -> Result<Image, Trouble> {
        let snapshot = self.runtime.block_on(line.client.snapshot(id))?;
        let Some(range) = ByteRange::new(0, size_bytes) else {
            return Ok(Image::of(snapshot.size_bytes, &[]));
        };
        let read = line.client.read_bytes(DataSource::Snapshot(id), range);
        let bytes = self.runtime.block_on(read)?;
        Ok(Image::of(snapshot.size_bytes, &bytes))
    }
}

fn same<T: PartialEq + std::fmt::Debug>(what: &str, got: &T, expected: &T) -> Result<(), Trouble> {
    if got == expected {
        return Ok(());
    }
    Err(Trouble::broken(format!("the {what} are {got:?}, expected {expected:?}")))
}
