//! The life of a WRITE, of a sync, and of what a dead process left uncommitted.
//!
//! A write is sent UNSTABLE and answered once the appliance has it in memory; its bytes are kept
//! here until a COMMIT with the same verifier. A sync is that COMMIT; if the verifier changed,
//! the appliance was restarted and may have lost them: they are sent again, and committed again.
//!
//! A process that dies takes its kept bytes with it. The one that resumes commits each file
//! that had any: if the verifier is still the journaled one, the appliance had them all along;
//! if not, they are lost, and every sync of that file fails from then on.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use rustix::io::Errno;

use crate::export::Export;
use crate::file::ServedFile;
use crate::journal::Record;
use crate::nfs::Verifier;

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
            let _order = file.order.read().await;
            let (first, last) = (offset_bytes / BLOCK_BYTES, (end - 1) / BLOCK_BYTES);
            file.writes.lock().written.mark(first, last);
            match self.nfs.write(&file.handle, offset_bytes, data.clone()).await? {
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

    /// Makes everything durable that was written before.
    pub(crate) async fn commit(&self, file: &ServedFile) -> Result<(), Errno> {
        // A recovery holds this.
        drop(file.order.read().await);
        let _one_at_a_time = file.committing.lock().await;
        if file.writes.lock().is_lost {
            return Err(Errno::IO);
        }
        loop {
            if file.writes.lock().kept.is_empty() {
                return Ok(());
            }
            let so_far = file.writes.lock().kept.watermark();
            let verifier = self.nfs.commit(&file.handle).await?;
            let is_behind = self.change_writes(file, |writes| {
                let is_behind = writes.kept.settle(so_far, verifier);
                if writes.kept.is_empty() && !writes.journaled.is_empty() {
                    let is_told = self.append(&Record::Clean { node: file.node.0 });
                    // If it is not, a resumed process is more careful than it need be.
                    writes.journaled.retain(|_| !is_told);
                }
                is_behind
            });
            if !is_behind {
                return Ok(());
            }
            self.send_again(file, verifier).await?;
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
            let outcome = self.nfs.write(&file.handle, offset, data.clone()).await?;
            match outcome {
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
        file.writes.lock().is_lost = true;
        self.append(&Record::Lost { node });
        tracing::error!(
            source = ?file.source, got = ?outcome, expected = ?dirty,
            "uncommitted writes are lost: the serving process died and the appliance was \
             restarted; every sync of this file fails from now on, check its file system"
        );
    }
}
