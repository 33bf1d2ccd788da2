//! The life of a WRITE, of a sync, and of what a dead process left uncommitted.
//!
//! A write is sent UNSTABLE and answered once the appliance has it in memory; its bytes are kept
//! here until a COMMIT with the same verifier. A sync is that COMMIT; if the verifier changed,
//! the appliance was restarted and may have lost them: they are sent again, and committed again.
//! What is most likely synced next and alone, a journal's commit record, is sent FILE_SYNC: its
//! sync then has nothing to ask for.
//!
//! A process that dies takes its kept bytes with it. The one that resumes commits each file
//! that had any: if the verifier is still the journaled one, the appliance had them all along;
//! if not, they are lost, and every write and sync of that file fails from then on.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use rustix::io::Errno;

use crate::export::Export;
use crate::file::{ServedFile, WriteState};
use crate::journal::Record;
use crate::nfs::{Stability, Verifier};
use crate::wire::NodeId;

/// Uncommitted bytes of all files over which a write commits its file before it is answered:
/// 5 s of writing at 13 MB/s, which is how long ext4 lets pass between two commits of its own.
const KEPT_BYTES_MAX: u64 = 64 << 20;

/// Writes that are sent again side by side. Extents do not overlap, so any order will do.
const RESENDS_MAX: usize = 16;

const BLOCK_BYTES: u64 = 4096;

impl Export {
    /// Writes the bytes; when this returns the appliance has them, though not yet durably.
    pub(crate) async fn write(
        &self,
        file: &ServedFile,
        offset_bytes: u64,
        data: Bytes,
    ) -> Result<(), Errno> {
        if !file.is_writable() {
            return Err(Errno::ROFS);
        }
        let length = u64::try_from(data.len()).map_err(|_| Errno::INVAL)?;
        let end = offset_bytes.checked_add(length).ok_or(Errno::FBIG)?;
        if length == 0 {
            return Ok(());
        }
        let is_journaled = {
            let _under_way = file.under_way.begin(offset_bytes..end).await;
            let _order = file.order.read().await;
            let stability = {
                let mut writes = file.writes.lock();
                // Nothing of it can be synced any more.
                if writes.is_lost {
                    return Err(Errno::IO);
                }
                writes.written.mark(offset_bytes / BLOCK_BYTES, (end - 1) / BLOCK_BYTES);
                let is_all_committed = writes.kept.is_empty();
                match writes.commit_record.note_write(&(offset_bytes..end), is_all_committed) {
                    true => Stability::FileSync,
                    false => Stability::Unstable,
                }
            };
            match self.nfs.write(&file.handle, offset_bytes, data.clone(), stability).await? {
                Some(verifier) => self.keep(file, offset_bytes, data, verifier),
                None => {
                    self.change_writes(file, |writes| writes.kept.cut(offset_bytes, end));
                    true
                }
            }
        };
        // What a resumed process would not know of must be durable now.
        if !is_journaled || self.kept_bytes() > KEPT_BYTES_MAX {
            self.commit(file).await?;
        }
        Ok(())
    }

    /// Keeps what was answered with `verifier`. Tells whether the journal knows of it.
    fn keep(&self, file: &ServedFile, offset: u64, data: Bytes, verifier: Verifier) -> bool {
        self.change_writes(file, |writes| {
            if writes.is_lost {
                return false;
            }
            writes.kept.insert(offset, data, verifier);
            if writes.journaled.contains(&verifier) {
                return true;
            }
            let is_journaled = self.append(&Record::Dirty { node: file.node.0, verifier });
            if is_journaled {
                writes.journaled.push(verifier);
            }
            is_journaled
        })
    }

    fn append(&self, record: &Record) -> bool {
        let outcome = self.journal.lock().append(record);
        if let Err(error) = &outcome {
            tracing::error!(%error, ?record, "the state directory cannot be written");
        }
        outcome.is_ok()
    }

    /// What the kernel asks for: everything that was written before is durable.
    pub(crate) async fn sync(&self, file: &ServedFile) -> Result<(), Errno> {
        file.writes.lock().commit_record.note_sync();
        self.commit(file).await
    }

    /// Makes everything durable that was written before.
    pub(crate) async fn commit(&self, file: &ServedFile) -> Result<(), Errno> {
        // A recovery holds this.
        drop(file.order.read().await);
        let wanted = file.writes.lock().kept.watermark();
        let mut committed = file.committing.lock().await;
        if file.writes.lock().is_lost {
            return Err(Errno::IO);
        }
        // Many wait here once much is kept. The first commit is that of all who came before it was sent.
        if wanted <= *committed {
            return Ok(());
        }
        let outcome = self.commit_all(file).await;
        if outcome == Err(Errno::STALE) {
            self.lose(file);
            tracing::error!(
                source = ?file.source,
                "uncommitted writes are lost: the appliance has the file no more"
            );
        }
        *committed = outcome?;
        Ok(())
    }

    /// No sync of the file says from now on that its writes are durable.
    fn lose(&self, file: &ServedFile) {
        self.change_writes(file, |writes| {
            writes.is_lost = true;
            writes.kept.clear();
            writes.journaled.clear();
            self.append(&Record::Lost { node: file.node.0 });
        });
    }

    /// Commits what is kept; the watermark up to which it is.
    async fn commit_all(&self, file: &ServedFile) -> Result<u64, Errno> {
        loop {
            let (so_far, is_empty) = {
                let writes = file.writes.lock();
                (writes.kept.watermark(), writes.kept.is_empty())
            };
            if is_empty {
                return Ok(so_far);
            }
            let verifier = self.nfs.commit(&file.handle).await?;
            let is_behind = self.change_writes(file, |writes| {
                let is_behind = writes.kept.settle(so_far, verifier);
                self.journal_settled(file.node, writes, verifier);
                is_behind
            });
            if !is_behind {
                return Ok(so_far);
            }
            self.send_again(file, verifier).await?;
        }
    }

    /// Journals what a commit answered with `verifier` has settled. If it cannot be told, a
    /// resumed process is more careful than it need be.
    fn journal_settled(&self, node: NodeId, writes: &mut WriteState, verifier: Verifier) {
        if writes.kept.is_empty() {
            // Asked of the journal itself: one that could not be told of a verifier in time may
            // name it later.
            if self.journal.lock().state().is_dirty(node.0) {
                // Also if that is refused: the journal written anew then names none of them.
                writes.journaled.clear();
                self.append(&Record::Clean { node: node.0 });
            }
        } else if writes.kept.stale(verifier).is_empty()
            && writes.journaled != [verifier]
            && self.append(&Record::Only { node: node.0, verifier })
        {
            writes.journaled = vec![verifier];
        }
    }

    /// Sends what was answered under another verifier than that of now.
    async fn send_again(&self, file: &ServedFile, verifier: Verifier) -> Result<(), Errno> {
        let _order = file.order.write().await;
        let stale = file.writes.lock().kept.stale(verifier);
        tracing::warn!(
            source = ?file.source, writes = stale.len(),
            "the appliance was restarted: uncommitted writes are sent again"
        );
        let resend = |(offset, data): (u64, Bytes)| async move {
            self.statistics.writes_sent_again.add(1);
            let unstable = Stability::Unstable;
            match self.nfs.write(&file.handle, offset, data.clone(), unstable).await? {
                // Journaled or not: the caller commits it before anybody is told.
                Some(verifier) => drop(self.keep(file, offset, data, verifier)),
                None => {
                    let end = offset + u64::try_from(data.len()).unwrap_or(0);
                    self.change_writes(file, |writes| writes.kept.cut(offset, end));
                }
            }
            Ok(())
        };
        stream::iter(stale).map(resend).buffer_unordered(RESENDS_MAX).try_collect().await
    }

    /// Settles what the process that served before has left, file by file; reads go on
    /// meanwhile, writes and syncs of such a file wait.
    pub(crate) async fn recover(self: &Arc<Self>) {
        let nodes = self.journal.lock().state().nodes.clone();
        for file in self.nodes.files() {
            let Some(state) = nodes.get(&file.node.0) else { continue };
            file.writes.lock().is_lost = state.is_lost;
            if state.dirty.is_empty() {
                continue;
            }
            let guard = Arc::clone(&file.order).write_owned().await;
            let (export, dirty) = (Arc::clone(self), state.dirty.clone());
            tokio::spawn(async move {
                export.recover_file(&file, &dirty).await;
                drop(guard);
            });
        }
    }

    async fn recover_file(&self, file: &ServedFile, dirty: &[Verifier]) {
        let node = file.node.0;
        let outcome = self.nfs.commit(&file.handle).await;
        if outcome.is_ok_and(|verifier| dirty == [verifier]) {
            self.append(&Record::Clean { node });
            return;
        }
        self.lose(file);
        tracing::error!(
            source = ?file.source, got = ?outcome, expected = ?dirty,
            "uncommitted writes are lost: the serving process died and the appliance was \
             restarted; every write and sync of this file fails from now on, check its file system"
        );
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::journal::Journal;
    use crate::lock::StateLock;
    use crate::nfs::{Found, Nfs};
    use crate::wire::{Attributes, MODE_FILE};

    const FIRST: Verifier = [1; 8];
    const SECOND: Verifier = [2; 8];

    /// An export whose appliance nobody asks, and a file of it.
    pub(crate) fn served(folder: &std::path::Path) -> (Export, Arc<ServedFile>) {
        let client = slackwater_client::Client::builder("http://127.0.0.1:9").build().unwrap();
        let path = crate::mount_path::MountPath::new(&client, "/slackwater");
        let nfs = Nfs::new(
            ([127, 0, 0, 1], 9).into(),
            crate::secured::Security::None,
            path,
            Arc::default(),
            Arc::default(),
        );
        let maps = crate::maps::Maps::new(&client, Arc::default(), Arc::default());
        let journal = Journal::create(StateLock::try_take(folder).unwrap().unwrap()).unwrap();
        let export = Export::new(nfs, maps, None, journal, Default::default());
        let attributes = Attributes { mode: MODE_FILE, ..Attributes::default() };
        let found = Found { handle: crate::nfs::Handle("one".into()), attributes };
        let node = export.nodes.look_up("disks/one".into(), &found).unwrap();
        let file = export.nodes.file(node).unwrap();
        (export, file)
    }

    #[tokio::test]
    async fn the_journal_forgets_a_verifier_under_which_nothing_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let (export, file) = served(folder.path());
        let dirty = || export.journal.lock().state().nodes[&file.node.0].dirty.clone();
        let settle = |watermark, verifier| {
            export.change_writes(&file, |writes| {
                writes.kept.settle(watermark, verifier);
                export.journal_settled(file.node, writes, verifier);
            });
        };
        assert!(export.keep(&file, 0, "a".into(), FIRST));
        let watermark = file.writes.lock().kept.watermark();
        assert!(export.keep(&file, 8, "b".into(), SECOND));
        settle(watermark, SECOND);
        assert_eq!(dirty(), [FIRST, SECOND], "the first write must be sent again");
        assert!(export.keep(&file, 0, "a".into(), SECOND));
        settle(watermark, SECOND);
        assert_eq!(dirty(), [SECOND]);
        assert_eq!((export.kept_bytes(), &file.writes.lock().journaled), (2, &vec![SECOND]));
        settle(u64::MAX, SECOND);
        assert_eq!((export.kept_bytes(), dirty()), (0, Vec::new()));
    }

    #[tokio::test]
    async fn after_a_record_that_the_disk_refused_each_write_is_journaled_again() {
        let folder = tempfile::tempdir().unwrap();
        let (export, file) = served(folder.path());
        let settle = || {
            export.change_writes(&file, |writes| {
                writes.kept.settle(u64::MAX, FIRST);
                export.journal_settled(file.node, writes, FIRST);
            });
        };
        let fill_the_disk = || export.journal.lock().fill_the_disk();
        // What a resumed process finds.
        let named = || {
            let text = std::fs::read_to_string(folder.path().join("journal")).unwrap();
            let dirty = text.lines().rev().find(|line| line.contains("dirty"));
            let clean = text.lines().rev().find(|line| line.contains("clean"));
            let place = |line: Option<&str>| line.and_then(|line| text.rfind(line));
            place(dirty) > place(clean)
        };
        assert!(export.keep(&file, 0, "a".into(), FIRST));
        assert!(named());
        // That all is committed is not told, and the next record rewrites the journal without.
        fill_the_disk();
        settle();
        export.append(&Record::Looked { node: file.node.0, count: 1 });
        assert!(!named());
        assert!(export.keep(&file, 0, "b".into(), FIRST));
        assert!(named(), "a write that no process to come would know of was answered");
        settle();
        assert!(!named());

        // A verifier that could not be told is not told later on, when nothing is kept any more.
        fill_the_disk();
        assert!(!export.keep(&file, 0, "c".into(), SECOND));
        export.change_writes(&file, |writes| {
            writes.kept.settle(u64::MAX, SECOND);
            export.journal_settled(file.node, writes, SECOND);
        });
        export.append(&Record::Looked { node: file.node.0, count: 1 });
        assert!(!named(), "a process to come would take the file for lost");
    }

    #[tokio::test]
    async fn nothing_is_kept_of_a_lost_file() {
        let folder = tempfile::tempdir().unwrap();
        let (export, file) = served(folder.path());
        assert!(export.keep(&file, 0, "abc".into(), FIRST));
        export.lose(&file);
        assert!(!export.keep(&file, 0, "late".into(), FIRST));
        assert_eq!(export.kept_bytes(), 0);
        assert!(export.journal.lock().state().nodes[&file.node.0].is_lost);
        assert_eq!(export.write(&file, 0, "more".into()).await, Err(Errno::IO));
        assert_eq!(export.commit(&file).await, Err(Errno::IO));
    }
}
