//! Makes and grows the ext4 on a file.
//!
//! An empty disk is the same bytes wherever it is made, so that the appliance stores it once.
//! Features and sizes are given one by one: the tool's own choice differs by version and machine.
//!
//! It is made on a file of this machine and copied (`sparse.rs`): the tool waits for each of its many writes, on the export
//! for as long as the network takes to the appliance and back.

use crate::export::{Export, Place};
use crate::sandbox::{DISK, NOT_BEGUN, SETTINGS};
use crate::sparse::SparseFile;
use crate::tools::{Call, DEBUGFS, E2FSCK, MKFS_EXT4, OnFile, RESIZE2FS, STAT, Said, says};
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

/// The export knows no fallocate(2): there the tool writes zeros instead, and counts them in the superblock. With this, it
/// does so everywhere, and makes the same bytes.
const WITHOUT_FALLOCATE: (&str, &str) = ("UNIX_IO_NOZEROOUT", "1");

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
        // An appliance that does not answer is found out here, and is no fault of this machine's disk.
        let size_bytes = self.size_bytes(&place).await?;
        match self.make_here(&place, size_bytes).await {
            Ok(Some(here)) => return self.copy_to(&here, &place).await,
            Ok(None) => {}
            // Nothing was written to the export yet, and there is another way.
            Err(error) => tracing::warn!(
                %error, directory = %self.state_directory.display(),
                "a file system cannot be made in this directory, from which it would be copied to the appliance; it is made on \
                 the appliance, which takes longer"
            ),
        }
        self.make_on(&place, self.on_file(&place)).await
    }

    /// Makes it on a file of this machine; `None` if there can be none of that size.
    async fn make_here(
        &self,
        place: &Place,
        size_bytes: u64,
    ) -> Result<Option<SparseFile>, AttachError> {
        let Some(here) = SparseFile::make(&self.state_directory, size_bytes)? else {
            return Ok(None);
        };
        let (directory, path) = (&here.directory, &here.name);
        self.make_on(place, OnFile { directory, path, access: Access::ReadWrite }).await?;
        Ok(Some(here))
    }

    /// Copies what a file of this machine holds to one of the export that is new.
    async fn copy_to(&self, here: &SparseFile, place: &Place) -> Result<(), AttachError> {
        let from = here.open()?;
        let device = self.attach_device(place, Access::ReadWrite).await?;
        let copied = self.tools.copy_data(from, &device, &place.file).run().await;
        let left = self.leave_device(place, &device).await;
        if let (Err(_), Err(error)) = (&copied, &left) {
            tracing::warn!(%error, device = %device.display(), "a loop device stays until the next start");
        }
        copied.map_err(|error| match error {
            AttachError::Tool { reason, .. } => {
                let (address, path) = (self.tools.address(), place.path.clone());
                AttachError::NotCopied { address, path, reason }
            }
            other => other,
        })?;
        left.map(drop)
    }

    /// The size of what is to be a regular file. A child asks for it: the appliance may not answer.
    async fn size_bytes(&self, place: &Place) -> Result<u64, AttachError> {
        let call = self.tools.call(STAT).arguments(["--format=%s %F", "--"]).argument(&place.file);
        let said = call.run().await.map_err(|error| match error {
            error if says(&error, "No such file") => {
                AttachError::NotFound { address: self.tools.address(), path: place.path.clone() }
            }
            other => other,
        })?;
        let size = said.split_once(' ').filter(|(_, kind)| kind.starts_with("regular"));
        size.and_then(|(size, _)| size.parse().ok()).ok_or_else(|| {
            let kind = said.split_once(' ').map_or(&*said, |(_, kind)| kind);
            let reason = format!("it is a {kind}");
            AttachError::NotRegular { path: place.path.clone(), reason }
        })
    }

    /// Makes it on a file; `place` is what messages name.
    async fn make_on(&self, place: &Place, file: OnFile<'_>) -> Result<(), AttachError> {
        let call = self.tools.call_on(MKFS_EXT4, file);
        let call = call.environment(WITHOUT_FALLOCATE.0, WITHOUT_FALLOCATE.1);
        let call = call.environment("MKE2FS_CONFIG", SETTINGS);
        let call = call.environment("E2FSPROGS_FAKE_TIME", FIXED_TIME);
        let call =
            call.arguments(["-F", "-q", "-b", "4096", "-I", "256", "-i", "16384", "-m", "0"]);
        let call = call.arguments(["-J", JOURNAL_OPTIONS, "-O", FEATURES, "-U", FILE_SYSTEM_ID]);
        run(call.arguments(["-E", EXTENDED_OPTIONS, DISK]), place).await?;
        // Diffs and engines would show it.
        self.edit((place, file), &format!("rmdir {LOST_AND_FOUND}"), true).await.map(drop)
    }

    pub(crate) async fn grow_file_system(&self, path: &str) -> Result<(), AttachError> {
        let place = self.place(Source::File(path))?;
        let _turn = self.locks.lock(&place.file).await;
        self.require_unused(&place).await?;
        self.require().await?;
        let file = self.on_file(&place);
        // `ls` prints nothing for a name that is not there, and the rest as an error.
        let before = self.edit((&place, file), &format!("ls -l {LOST_AND_FOUND}"), false).await?;
        // The kernel could grow it while it is mounted, but asks for a capability that daemons
        // in containers do not have. This way a check comes first; it replays the journal too.
        let call = self.tools.call_on(E2FSCK, file);
        match run(call.arguments(["-f", "-p", DISK]), &place).await {
            Err(AttachError::Tool { status, .. }) if status.code() == Some(CORRECTED) => {}
            Err(AttachError::Tool { reason, .. }) => {
                return Err(AttachError::Damaged { path: place.path, reason });
            }
            other => drop(other?),
        }
        let call = self.tools.call_on(RESIZE2FS, file);
        run(call.argument(DISK), &place).await?;
        if before.is_empty() {
            // The check made it.
            self.edit((&place, file), &format!("rmdir {LOST_AND_FOUND}"), true).await?;
        }
        Ok(())
    }

    /// Runs a command of debugfs on a file that is not mounted.
    async fn edit(
        &self,
        (place, file): (&Place, OnFile<'_>),
        command: &str,
        write: bool,
    ) -> Result<String, AttachError> {
        let access = if write { Access::ReadWrite } else { Access::ReadOnly };
        let call = self.tools.call_on(DEBUGFS, OnFile { access, ..file });
        let call = call.environment(WITHOUT_FALLOCATE.0, WITHOUT_FALLOCATE.1);
        let call = call.environment("E2FSPROGS_FAKE_TIME", FIXED_TIME);
        let call = if write { call.argument("-w") } else { call };
        let said = tell(call.arguments(["-R", command, DISK]), place).await?;
        // It ends with success whatever became of the command.
        if said.errors.contains(NOT_OPEN) {
            return Err(AttachError::Damaged { path: place.path.clone(), reason: said.errors });
        }
        Ok(said.output)
    }

    /// The file of the export, to be written.
    fn on_file<'a>(&'a self, place: &'a Place) -> OnFile<'a> {
        OnFile { directory: &self.directory, path: &place.path, access: Access::ReadWrite }
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
    use std::fs;
    use std::net::SocketAddr;
    use std::process::Command;

    use super::*;
    use crate::disk::tests::{MIB, Scratch, run as run_program};
    use crate::{Options, Rights};

    /// Made here and copied, or made on the export, which knows no fallocate(2): so does a ramfs.
    #[tokio::test(flavor = "multi_thread")]
    async fn as_root_an_ext4_is_the_same_in_whichever_way_it_is_made() {
        let (scratch, export) = Scratch::new().await;
        let folder = scratch.files.join("ramfs");
        fs::create_dir(&folder).unwrap();
        let folder = folder.to_str().unwrap();
        run_program("mount", &["-n", "-t", "ramfs", "test", folder]);
        // The last one ends in the middle of a block and of a sector.
        for (number, size_bytes) in [64 * MIB, 200 * MIB, 80 * MIB + 1000].into_iter().enumerate() {
            let [copied, direct] = ["copied", "ramfs/direct"].map(|way| {
                let name = format!("{way}-{number}");
                let file = fs::File::create_new(scratch.files.join(&name)).unwrap();
                file.set_len(size_bytes).unwrap();
                export.place(Source::File(&name)).unwrap()
            });
            let here = export.make_here(&copied, size_bytes).await.unwrap().unwrap();
            export.copy_to(&here, &copied).await.unwrap();
            export.make_on(&direct, export.on_file(&direct)).await.unwrap();
            let [copied, direct] = [copied, direct].map(|place| {
                run_program("e2fsck", &["-f", "-n", place.file.to_str().unwrap()]);
                fs::read(place.file).unwrap()
            });
            assert!(copied.len() as u64 == size_bytes && copied == direct, "{size_bytes}");
        }
        run_program("umount", &["-n", folder]);
        assert_eq!(fs::read_dir(export.state_directory.join("new")).unwrap().count(), 0);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn as_root_where_nothing_can_be_made_here_it_is_made_on_the_export() {
        let (scratch, export) = Scratch::new().await;
        fs::write(export.state_directory.join("new"), "no directory").unwrap();
        let place = export.place(Source::File("disk")).unwrap();
        assert!(export.make_here(&place, 64 * MIB).await.is_err());
        export.make_file_system("disk").await.unwrap();
        run_program("e2fsck", &["-f", "-n", place.file.to_str().unwrap()]);
        let none = export.make_file_system("none").await;
        assert!(matches!(none, Err(AttachError::NotFound { .. })), "{none:?}");
        drop(scratch);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn as_root_a_copy_that_fails_is_told_with_its_reason_and_leaves_nothing() {
        let (scratch, export) = Scratch::new().await;
        let place = export.place(Source::File("disk")).unwrap();
        let here = export.make_here(&place, 64 * MIB).await.unwrap().unwrap();
        // Shorter than what is to be copied.
        fs::File::options().write(true).open(&place.file).unwrap().set_len(MIB).unwrap();
        let error = export.copy_to(&here, &place).await.unwrap_err();
        assert!(matches!(error, AttachError::NotCopied { .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.contains("`disk`") && text.contains("it cannot be written"), "{text}");
        export.require_unused(&place).await.unwrap();
        let path = here.path();
        drop(here);
        assert!(!path.exists());
        drop(scratch);
    }

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
            let check = export.tools.call_on(E2FSCK, export.on_file(&place));
            let grown = export.grow_file_system("disk").await;
            for outcome in [run(check, &place).await.map(drop), grown] {
                let error = outcome.unwrap_err();
                assert!(matches!(error, AttachError::Sandbox { .. }), "{error:?}");
                assert!(error.to_string().contains("systemd unit"), "{error}");
            }
        });
    }
}
