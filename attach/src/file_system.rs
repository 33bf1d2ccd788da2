//! Makes and grows the ext4 on a file.
//!
//! An empty disk is the same bytes wherever it is made, so that the appliance stores it once.
//! Features and sizes are given one by one: the tool's own choice differs by version and machine.

use crate::export::{Export, Place};
use crate::tools::{DEBUGFS, E2FSCK, MKFS_EXT4, RESIZE2FS};
use crate::{AttachError, Source};

/// What every Linux since 4.x can mount; newer ones would exclude older workers.
const FEATURES: &str = "none,has_journal,ext_attr,resize_inode,dir_index,filetype,extent,64bit,\
                        flex_bg,sparse_super,large_file,huge_file,dir_nlink,extra_isize,\
                        metadata_csum";

/// One identity for all disks. ext4 does not mind that two with the same are mounted.
const FILE_SYSTEM_ID: &str = "736c6163-6b77-6174-6572-000000000001";

/// The seed of the directories' hashes, no parameter `nodiscard`: a new file is all zeros, and
/// so are its inode tables and journal.
const EXTENDED_OPTIONS: &str = "hash_seed=736c6163-6b77-6174-6572-000000000002,\
                                lazy_itable_init=1,lazy_journal_init=1,nodiscard,root_owner=0:0";

/// A journal wanders over all its blocks, and each of them is then stored for each disk: small,
/// but enough for the metadata of an unpacked layer. In MiB.
const JOURNAL_OPTIONS: &str = "size=16";

/// The time that the tools take for now: 2020-09-13.
const FIXED_TIME: &str = "1600000000";

/// What a container's root does not have, unless somebody made it.
const LOST_AND_FOUND: &str = "lost+found";

/// How e2fsck ends when it had something to put right, and did.
const CORRECTED: i32 = 1;

impl Export {
    pub(crate) async fn make_file_system(&self, path: &str) -> Result<(), AttachError> {
        let place = self.place(Source::File(path))?;
        let _turn = self.locks.lock(&place.file).await;
        self.require_unused(&place)?;
        self.require().await?;
        let call = self.tools.call(MKFS_EXT4).environment("MKE2FS_CONFIG", "/dev/null");
        let call = call.environment("E2FSPROGS_FAKE_TIME", FIXED_TIME);
        let call =
            call.arguments(["-F", "-q", "-b", "4096", "-I", "256", "-i", "16384", "-m", "0"]);
        let call = call.arguments(["-J", JOURNAL_OPTIONS, "-O", FEATURES, "-U", FILE_SYSTEM_ID]);
        call.arguments(["-E", EXTENDED_OPTIONS]).argument(&place.file).run().await?;
        // Diffs and engines would show it.
        self.edit(&place, &format!("rmdir {LOST_AND_FOUND}"), true).await.map(drop)
    }

    pub(crate) async fn grow_file_system(&self, path: &str) -> Result<(), AttachError> {
        let place = self.place(Source::File(path))?;
        let _turn = self.locks.lock(&place.file).await;
        self.require_unused(&place)?;
        self.require().await?;
        // `ls` prints nothing for a name that is not there, and the rest as an error.
        let before = self.edit(&place, &format!("ls -l {LOST_AND_FOUND}"), false).await?;
        // The kernel could grow it while it is mounted, but asks for a capability that daemons
        // in containers do not have. This way a check comes first; it replays the journal too.
        let call = self.tools.call(E2FSCK).arguments(["-f", "-p"]).argument(&place.file);
        match call.run().await {
            Err(AttachError::Tool { status, .. }) if status.code() == Some(CORRECTED) => {}
            Err(AttachError::Tool { reason, .. }) => {
                return Err(AttachError::Damaged { path: place.path, reason });
            }
            other => drop(other?),
        }
        self.tools.call(RESIZE2FS).argument(&place.file).run().await?;
        if before.is_empty() {
            // The check made it.
            self.edit(&place, &format!("rmdir {LOST_AND_FOUND}"), true).await?;
        }
        Ok(())
    }

    /// Runs a command of debugfs on a file that is not mounted.
    async fn edit(&self, place: &Place, command: &str, write: bool) -> Result<String, AttachError> {
        let call = self.tools.call(DEBUGFS).environment("E2FSPROGS_FAKE_TIME", FIXED_TIME);
        let call = if write { call.argument("-w") } else { call };
        call.arguments(["-R", command]).argument(&place.file).run().await
    }
}
