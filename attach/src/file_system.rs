//! Makes and grows the ext4 on a file.
//!
//! An empty disk is the same bytes wherever it is made, so that the appliance stores it once.
//! Features and sizes are given one by one: the tool's own choice differs by version and machine.

use crate::export::{Export, Place};
use crate::sandbox::{DISK, NOT_BEGUN, SETTINGS};
use crate::tools::{Call, DEBUGFS, E2FSCK, MKFS_EXT4, OnFile, RESIZE2FS, Said, Tool};
use crate::{Access, AttachError, Source};

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

/// What debugfs says of a command that it did not carry out.
const NOT_OPEN: &str = "Filesystem not open";

/// How `unshare` begins what it says of itself. It ends as e2fsck does after a correction.
const NO_NAMESPACES: &str = "unshare:";

/// How e2fsck ends when it had something to put right, and did.
const CORRECTED: i32 = 1;

impl Export {
    pub(crate) async fn make_file_system(&self, path: &str) -> Result<(), AttachError> {
        let place = self.place(Source::File(path))?;
        let _turn = self.locks.lock(&place.file).await;
        self.require_unused(&place).await?;
        self.require().await?;
        let call = self.call_on(MKFS_EXT4, &place, Access::ReadWrite);
        let call = call.environment("MKE2FS_CONFIG", SETTINGS);
        let call = call.environment("E2FSPROGS_FAKE_TIME", FIXED_TIME);
        let call =
            call.arguments(["-F", "-q", "-b", "4096", "-I", "256", "-i", "16384", "-m", "0"]);
        let call = call.arguments(["-J", JOURNAL_OPTIONS, "-O", FEATURES, "-U", FILE_SYSTEM_ID]);
        run(call.arguments(["-E", EXTENDED_OPTIONS, DISK]), &place).await?;
        // Diffs and engines would show it.
        self.edit(&place, &format!("rmdir {LOST_AND_FOUND}"), true).await.map(drop)
    }

    pub(crate) async fn grow_file_system(&self, path: &str) -> Result<(), AttachError> {
        let place = self.place(Source::File(path))?;
        let _turn = self.locks.lock(&place.file).await;
        self.require_unused(&place).await?;
        self.require().await?;
        // `ls` prints nothing for a name that is not there, and the rest as an error.
        let before = self.edit(&place, &format!("ls -l {LOST_AND_FOUND}"), false).await?;
        // The kernel could grow it while it is mounted, but asks for a capability that daemons
        // in containers do not have. This way a check comes first; it replays the journal too.
        let call = self.call_on(E2FSCK, &place, Access::ReadWrite);
        match run(call.arguments(["-f", "-p", DISK]), &place).await {
            Err(AttachError::Tool { status, .. }) if status.code() == Some(CORRECTED) => {}
            Err(AttachError::Tool { reason, .. }) => {
                return Err(AttachError::Damaged { path: place.path, reason });
            }
            other => drop(other?),
        }
        let call = self.call_on(RESIZE2FS, &place, Access::ReadWrite);
        run(call.argument(DISK), &place).await?;
        if before.is_empty() {
            // The check made it.
            self.edit(&place, &format!("rmdir {LOST_AND_FOUND}"), true).await?;
        }
        Ok(())
    }

    /// Runs a command of debugfs on a file that is not mounted.
    async fn edit(&self, place: &Place, command: &str, write: bool) -> Result<String, AttachError> {
        let access = if write { Access::ReadWrite } else { Access::ReadOnly };
        let call = self.call_on(DEBUGFS, place, access);
        let call = call.environment("E2FSPROGS_FAKE_TIME", FIXED_TIME);
        let call = if write { call.argument("-w") } else { call };
        let said = tell(call.arguments(["-R", command, DISK]), place).await?;
        // It ends with success whatever became of the command.
        if said.errors.contains(NOT_OPEN) {
            return Err(AttachError::Damaged { path: place.path.clone(), reason: said.errors });
        }
        Ok(said.output)
    }

    fn call_on(&self, tool: Tool, place: &Place, access: Access) -> Call {
        self.tools.call_on(tool, OnFile { export: &self.directory, path: &place.path, access })
    }
}

async fn run(call: Call, place: &Place) -> Result<String, AttachError> {
    Ok(tell(call, place).await?.output)
}

/// Runs a tool on a file. That it did not begin is another error than that it failed.
async fn tell(call: Call, place: &Place) -> Result<Said, AttachError> {
    let sandbox = |reason| AttachError::Sandbox { path: place.path.clone(), reason };
    call.run_and_tell().await.map_err(|error| match error {
        AttachError::Tool { status, reason, .. } if status.code() == Some(NOT_BEGUN.into()) => {
            sandbox(reason)
        }
        AttachError::Tool { reason, .. } if reason.starts_with(NO_NAMESPACES) => sandbox(format!(
            "{reason}; it needs namespaces, which the systemd unit of an older release does not let it make: take the unit of this one"
        )),
        other => other,
    })
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::process::Command;

    use super::*;
    use crate::{Options, Rights};

    /// What util-linux says where it may make no namespaces, and how it ends then.
    const UNSHARE: &str = "#!/bin/sh
        echo 'unshare: unshare failed: Operation not permitted' >&2; exit 1";

    #[test]
    fn a_sandbox_that_cannot_be_made_is_no_corrected_file_system() {
        const TOOLS: &str = "SLACKWATER_TEST_UNSHARE";
        // What finds the tools is the environment, so the test runs itself again in another.
        if std::env::var_os(TOOLS).is_none() {
            let tools = tempfile::tempdir().unwrap();
            let unshare = tools.path().join("unshare");
            // By another process: one that a test beside this one forks while the file is written here would
            // hold it open for a moment, and Linux runs no program that is open for writing.
            let script = r#"printf %s "$1" >"$2" && chmod 755 "$2""#;
            let mut writer = Command::new("sh");
            writer.args(["-c", script, "sh", UNSHARE]).arg(&unshare);
            assert!(writer.status().unwrap().success());
            let name = "a_sandbox_that_cannot_be_made_is_no_corrected_file_system";
            let mut again = Command::new(std::env::current_exe().unwrap());
            again.args(["--exact", &format!("file_system::tests::{name}"), "--nocapture"]);
            let path = std::env::var("PATH").unwrap();
            again.env("PATH", format!("{}:{path}", tools.path().display())).env(TOOLS, "1");
            let ended = again.output().unwrap();
            assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let export = folder.path().join("export");
        std::fs::create_dir(&export).unwrap();
        std::fs::write(export.join("disk"), "").unwrap();
        let options = Options {
            method: None,
            nfs_address: SocketAddr::from(([127, 0, 0, 1], 2049)),
            export: "/slackwater".to_owned(),
            mount_path: None,
            state_directory: folder.path().join("state"),
            fuse_program: Vec::new(),
            tool_program: Vec::new(),
            prefers_fuse: false,
            rights: Rights::default(),
            mounts_end: false,
        };
        tokio::runtime::Runtime::new().unwrap().block_on(async {
            let export = Export::local(options, &export).await.unwrap();
            let place = export.place(Source::File("disk")).unwrap();
            let check = export.call_on(E2FSCK, &place, Access::ReadWrite);
            let grown = export.grow_file_system("disk").await;
            for outcome in [run(check, &place).await.map(drop), grown] {
                let error = outcome.unwrap_err();
                assert!(matches!(error, AttachError::Sandbox { .. }), "{error:?}");
                assert!(error.to_string().contains("systemd unit"), "{error}");
            }
        });
    }
}
