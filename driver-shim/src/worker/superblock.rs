//! Inodes in use on a disk that is not mounted: as the superblock of its ext4 says.
//!
//! ```text
//! byte 1024 + 0     inodes of the file system
//!             16    those that are free
//!             56    0xEF53: it is ext2, ext3 or ext4
//! ```
//! `struct ext4_super_block` in `fs/ext4/ext4.h`; numbers are little-endian. ext4 writes the count of free ones when it is
//! unmounted and when it is frozen, so that a snapshot of such a disk has it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::timeout;
use uuid::Uuid;

use super::state::{FileKind, OwnFile};
use super::{Worker, WorkerError};

/// Where the superblock begins, and how much of it is read.
const SUPERBLOCK_OFFSET: u64 = 1024;
const SUPERBLOCK_BYTES: usize = 64;

/// What says that it is one.
const MAGIC: u16 = 0xEF53;

/// An inode takes at least so many bytes of the disk.
const INODE_BYTES_MIN: u64 = 128;

/// How long who asks waits: the appliance has just answered. A read waits in the kernel while it is away.
const READ_WITHIN: Duration = Duration::from_secs(10);

/// The turn to read one, so that one thread at most waits for an appliance that is away.
static READING: Mutex<()> = Mutex::const_new(());

impl Worker {
    /// Inodes in use on a disk of that size, of which `clone` is the clone that keeps its snapshot; 0 if it is no ext4, or
    /// cannot be read now: a figure that is shown.
    pub(super) async fn inodes_on_disk(&self, clone: Uuid, size_bytes: u64) -> u64 {
        let worker = self.clone();
        let reading = async move {
            let turn = READING.lock().await;
            // It ends by itself later if it is waited for no more.
            let read = tokio::spawn(async move {
                let superblock = worker.read_superblock(clone).await;
                drop(turn);
                superblock
            });
            read.await.map_err(super::interrupted)?
        };
        match timeout(READ_WITHIN, reading).await {
            Ok(Ok(superblock)) => inodes_in_use(&superblock, size_bytes),
            Ok(Err(error)) => {
                tracing::debug!(%clone, %error, "it is not known how many inodes a layer has");
                0
            }
            Err(_) => 0,
        }
    }

    async fn read_superblock(&self, clone: Uuid) -> Result<[u8; SUPERBLOCK_BYTES], WorkerError> {
        let path = self.path_of(OwnFile { kind: FileKind::Hold, name: clone });
        let file = self.attach().await?.open_file(&path).await?;
        let read = move |file: File| {
            let mut superblock = [0; SUPERBLOCK_BYTES];
            file.read_exact_at(&mut superblock, SUPERBLOCK_OFFSET).map(|()| superblock)
        };
        let read = tokio::task::spawn_blocking(move || read(file)).await;
        let failed = |source| WorkerError::Local { path: path.into(), source };
        read.map_err(super::interrupted)?.map_err(failed)
    }
}

/// What a superblock says, of a disk of that size; 0 if it is none, or says what cannot be.
fn inodes_in_use(superblock: &[u8; SUPERBLOCK_BYTES], size_bytes: u64) -> u64 {
    let number = |at: usize| {
        let bytes = [superblock[at], superblock[at + 1], superblock[at + 2], superblock[at + 3]];
        u64::from(u32::from_le_bytes(bytes))
    };
    let (inodes, free) = (number(0), number(16));
    let is_ext4 = u16::from_le_bytes([superblock[56], superblock[57]]) == MAGIC;
    match is_ext4 && inodes <= size_bytes / INODE_BYTES_MIN {
        true => inodes.saturating_sub(free),
        false => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn superblock(inodes: u32, free: u32) -> [u8; SUPERBLOCK_BYTES] {
        let mut superblock = [0xAA; SUPERBLOCK_BYTES];
        superblock[0..4].copy_from_slice(&inodes.to_le_bytes());
        superblock[16..20].copy_from_slice(&free.to_le_bytes());
        superblock[56..58].copy_from_slice(&MAGIC.to_le_bytes());
        superblock
    }

    #[test]
    fn what_a_superblock_says_is_taken_if_it_can_be() {
        assert_eq!(inodes_in_use(&superblock(65_536, 65_000), 1 << 30), 536);
        assert_eq!(inodes_in_use(&superblock(8, 0), 1024), 8);
        assert_eq!(inodes_in_use(&superblock(9, 0), 1024), 0, "more than fit on the disk");
        assert_eq!(inodes_in_use(&superblock(8, 9), 1024), 0, "more are free than there are");
        let mut other = superblock(65_536, 65_000);
        other[57] = 0;
        assert_eq!(inodes_in_use(&other, 1 << 30), 0, "another file system");
    }
}
