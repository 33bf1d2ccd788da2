//! Runs the system's tools as children with a time limit.
//!
//! Whatever touches the export can hang for as long as the appliance is away, in a sleep that no
//! signal ends. A child that hangs so holds nothing of this process: no thread, no descriptor.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Seek as _, Write as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::process::{Child, Command};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};

use crate::image::MOUNT_IMAGES;
use crate::sandbox;
use crate::sparse::COPY_DATA;
use crate::{Access, AttachError};

/// A program and Debian's package of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tool {
    pub(crate) program: &'static str,
    pub(crate) package: &'static str,
}

pub(crate) const MOUNT: Tool = Tool { program: "mount", package: "mount" };
pub(crate) const UMOUNT: Tool = Tool { program: "umount", package: "mount" };
pub(crate) const LOSETUP: Tool = Tool { program: "losetup", package: "mount" };
pub(crate) const FSFREEZE: Tool = Tool { program: "fsfreeze", package: "util-linux" };
pub(crate) const SYNC: Tool = Tool { program: "sync", package: "coreutils" };
pub(crate) const STAT: Tool = Tool { program: "stat", package: "coreutils" };
pub(crate) const MKFS_EXT4: Tool = Tool { program: "mkfs.ext4", package: "e2fsprogs" };
pub(crate) const DEBUGFS: Tool = Tool { program: "debugfs", package: "e2fsprogs" };
pub(crate) const E2FSCK: Tool = Tool { program: "e2fsck", package: "e2fsprogs" };
pub(crate) const RESIZE2FS: Tool = Tool { program: "resize2fs", package: "e2fsprogs" };
pub(crate) const UNSHARE: Tool = Tool { program: "unshare", package: "util-linux" };
pub(crate) const MODPROBE: Tool = Tool { program: "modprobe", package: "kmod" };

/// This program itself.
const OWN: Tool = Tool { program: "slackwater-driver", package: "slackwater-driver" };

/// All that disks are attached with.
pub(crate) const NEEDED: [Tool; 11] =
    [LOSETUP, MOUNT, UMOUNT, FSFREEZE, SYNC, STAT, MKFS_EXT4, DEBUGFS, E2FSCK, RESIZE2FS, UNSHARE];

/// Those that read what others wrote.
pub(crate) const SANDBOXED: [Tool; 4] = [MKFS_EXT4, DEBUGFS, E2FSCK, RESIZE2FS];

/// How long a tool may take. An appliance that restarts is back within it; an engine that waits
/// longer for a plugin has given up itself.
pub(crate) const TOOL_TIME_LIMIT: Duration = Duration::from_secs(60);

/// How many tools run at once: enough for a burst of containers, few enough that an outage does
/// not fill the machine with processes.
pub(crate) const CHILDREN_MAX: usize = 64;

/// What a tool that reads foreign bytes does not share with this machine. It ends with `unshare`.
/// Until it has its own root it has a copy of the machine's mounts, which keeps a disk in use. Where
/// the machine's mounts are shared, an unmount there is one in the copy, too (`slave`).
const NAMESPACES: [&str; 9] = [
    "--mount",
    "--propagation",
    "slave",
    "--net",
    "--ipc",
    "--pid",
    "--fork",
    "--kill-child",
    "--",
];

/// How much a tool may say: far more than any of them does, unless a disk makes it.
const SAID_BYTES_MAX: u64 = 1 << 20;

/// Where administrators' tools are on machines whose users do not have them in their path.
const TOOL_FOLDERS: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The folders that tools are looked for in.
pub(crate) fn search_path() -> OsString {
    match std::env::var_os("PATH") {
        Some(mut path) => {
            path.push(":");
            path.push(TOOL_FOLDERS);
            path
        }
        None => TOOL_FOLDERS.into(),
    }
}

/// Starts tools and remembers whom to name when one hangs.
#[derive(Debug, Clone)]
pub(crate) struct Tools {
    address: SocketAddr,
    permits: Arc<Semaphore>,
    /// What becomes a tool in its sandbox.
    sandbox_program: Arc<[OsString]>,
}

/// A file of the export, or of another directory, that a tool works on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OnFile<'a> {
    /// Where the export is visible, or the other directory.
    pub(crate) directory: &'a Path,
    /// The path below.
    pub(crate) path: &'a str,
    pub(crate) access: Access,
}

impl Tools {
    pub(crate) fn new(address: SocketAddr, sandbox_program: &[OsString]) -> Self {
        let permits = Arc::new(Semaphore::new(CHILDREN_MAX));
        Self { address, permits, sandbox_program: sandbox_program.into() }
    }

    /// The appliance that the tools wait for.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Begins a call of a tool that reads what others wrote on a file of the export: it has that
    /// file, as `sandbox::DISK`, and nothing else.
    pub(crate) fn call_on(&self, tool: Tool, file: OnFile<'_>) -> Call {
        let mut call = self.call(UNSHARE).arguments(NAMESPACES);
        // Neither the driver's secrets nor what would have a tool make other bytes.
        call.command.env_clear().env("PATH", search_path()).env("LC_ALL", "C");
        call.command.args(self.sandbox_program.iter());
        call.command.args(sandbox::words(file.directory, file.path, file.access));
        // An end of a pipe, which is closed at once: the machine's /dev/null could be changed by it.
        call.command.stdin(Stdio::piped());
        // Their threads, one for each processor, would else take a share of the address space each.
        call.command.env("MALLOC_ARENA_MAX", "1");
        call.hidden_words = 1 + call.command.as_std().get_args().count();
        call.argument(tool.program)
    }

    /// Begins a call of a tool.
    pub(crate) fn call(&self, tool: Tool) -> Call {
        self.call_by(tool, command_of(tool.program))
    }

    fn call_by(&self, tool: Tool, mut command: Command) -> Call {
        // Their messages are read here, and `C` has no others.
        command.env("PATH", search_path()).env("LC_ALL", "C").stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        Call {
            tool,
            command,
            tools: self.clone(),
            limit: TOOL_TIME_LIMIT,
            is_lasting: false,
            needs_permit: true,
            hidden_words: 0,
        }
    }

    /// This program as the one that mounts images, outside of a sandbox.
    pub(crate) fn mounting_program(&self) -> Command {
        let mut command = self.own_program();
        command.arg(MOUNT_IMAGES).env("PATH", search_path()).env("LC_ALL", "C");
        command
    }

    /// Begins a copy of what a file holds to the same places of a device, by this program outside of a sandbox.
    /// `file` is what the device is to be on.
    pub(crate) fn copy_data(&self, from: File, device: &Path, file: &Path) -> Call {
        let call = self.call_by(OWN, self.own_program());
        call.argument(COPY_DATA).argument(device).argument(file).input(from)
    }

    fn own_program(&self) -> Command {
        let mut words = self.sandbox_program.iter();
        let program = words.next().map_or(OsStr::new(OWN.program), OsString::as_os_str);
        let mut command = Command::new(program);
        command.args(words);
        command
    }

    /// Does what may hang as a tool may: when it is its turn, and for no longer than a tool may take.
    /// The work gets the time that is left.
    pub(crate) async fn in_turn<T>(
        &self,
        action: String,
        limit: Duration,
        work: impl AsyncFnOnce(Duration) -> Result<T, AttachError>,
    ) -> Result<T, AttachError> {
        let deadline = Instant::now() + limit;
        let in_turn = async {
            // Never closed, so only its time can fail it.
            let _permit = self.permits.clone().acquire_owned().await;
            work(deadline.saturating_duration_since(Instant::now())).await
        };
        let done = timeout_at(deadline, in_turn).await;
        done.unwrap_or(Err(AttachError::TimedOut { action, address: self.address, limit }))
    }

    /// Thaws what is mounted at `target`. It waits for no permit: what holds them all may be
    /// waiting for this.
    pub(crate) fn unfreeze(&self, target: &Path) -> Call {
        self.call(FSFREEZE).argument("--unfreeze").argument(target).without_permit()
    }
}

/// A call of a tool that is being put together.
#[derive(Debug)]
pub(crate) struct Call {
    tool: Tool,
    command: Command,
    tools: Tools,
    limit: Duration,
    is_lasting: bool,
    needs_permit: bool,
    /// The words of the command line that messages leave out: those that make the sandbox.
    hidden_words: usize,
}

impl Call {
    pub(crate) fn arguments<const COUNT: usize>(mut self, arguments: [&str; COUNT]) -> Self {
        self.command.args(arguments);
        self
    }

    pub(crate) fn argument(mut self, argument: impl AsRef<OsStr>) -> Self {
        self.command.arg(argument);
        self
    }

    pub(crate) fn environment(mut self, name: &str, value: &str) -> Self {
        self.command.env(name, value);
        self
    }

    /// Gives it a file to read from, as its standard input.
    pub(crate) fn input(mut self, file: File) -> Self {
        self.command.stdin(file);
        self
    }

    /// Lets it take as long as it does once it has begun.
    pub(crate) fn without_limit(mut self) -> Self {
        self.is_lasting = true;
        self
    }

    /// Gives it this time, in which it also waits for its turn.
    pub(crate) fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Starts it also while as many others run as may.
    pub(crate) fn without_permit(mut self) -> Self {
        self.needs_permit = false;
        self
    }

    /// Runs it; its standard output.
    pub(crate) async fn run(self) -> Result<String, AttachError> {
        Ok(self.run_and_tell().await?.output)
    }

    /// Runs it; all that it said. One that says more than is read is given up in time.
    pub(crate) async fn run_and_tell(mut self) -> Result<Said, AttachError> {
        let text = self.text();
        let given_up = |_| timed_out(&text, self.tools.address, self.limit);
        let deadline = Instant::now() + self.limit;
        let _permit = if self.needs_permit {
            let permit = self.tools.permits.clone().acquire_owned();
            // Never closed, so only its time can fail it.
            Some(timeout_at(deadline, permit).await.map_err(given_up)?)
        } else {
            None
        };
        let child = self.command.spawn().map_err(|source| AttachError::ToolStart {
            program: self.tool.program.to_owned(),
            package: self.tool.package,
            source,
        })?;
        let ended = if self.is_lasting {
            end_of(child).await
        } else {
            timeout_at(deadline, end_of(child)).await.map_err(given_up)?
        };
        let (status, output, errors) = ended.map_err(|source| AttachError::System {
            action: "wait for",
            path: self.tool.program.into(),
            source,
        })?;
        if !status.success() {
            return Err(failed(text, status, &errors));
        }
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        Ok(Said { output: text(&output), errors: text(&errors) })
    }

    /// The command line, for messages.
    fn text(&self) -> String {
        let program = OsStr::new(self.tool.program);
        let words = std::iter::once(program).chain(self.command.as_std().get_args());
        words.skip(self.hidden_words).map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ")
    }
}

/// The command of a program by its path. Of one without, the new process is to look for it by the `PATH` that it is given:
/// then the standard library copies this process for it (fork), which takes longer the more memory this one has.
fn command_of(program: &str) -> Command {
    let mut command = Command::new(file_of(program).unwrap_or_else(|| program.into()));
    command.arg0(program);
    command
}

/// The first file of that name in the search path which can be started.
fn file_of(program: &str) -> Option<PathBuf> {
    files_of(program.as_ref()).next()
}

/// The files of that name in the search path which can be started.
pub(crate) fn files_of(program: &OsStr) -> impl Iterator<Item = PathBuf> {
    let folders = search_path();
    let files: Vec<_> = std::env::split_paths(&folders).map(|one| one.join(program)).collect();
    let can_be_started = |path: &PathBuf| {
        rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok() && path.is_file()
    };
    files.into_iter().filter(can_be_started)
}

/// A file in memory with this content, to be read: for what is not to be in a command line, which all users see.
pub(crate) fn input(content: &[u8]) -> io::Result<File> {
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::memfd_create("input", flags)?);
    file.write_all(content)?;
    file.rewind()?;
    Ok(file)
}

/// What a tool that succeeded said.
#[derive(Debug)]
pub(crate) struct Said {
    /// On standard output.
    pub(crate) output: String,
    /// On standard error.
    pub(crate) errors: String,
}

/// Waits for the end of a child and what it says until then.
async fn end_of(mut child: Child) -> io::Result<(ExitStatus, Vec<u8>, Vec<u8>)> {
    drop(child.stdin.take());
    let (output, errors) = (child.stdout.take(), child.stderr.take());
    tokio::try_join!(child.wait(), beginning(output), beginning(errors))
}

/// What comes out of a pipe, as far as it is read. The rest stays in the pipe.
async fn beginning(pipe: Option<impl AsyncRead + Unpin>) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let Some(mut pipe) = pipe else { return Ok(bytes) };
    (&mut pipe).take(SAID_BYTES_MAX).read_to_end(&mut bytes).await?;
    if bytes.len() as u64 == SAID_BYTES_MAX {
        // Closing it would end the tool at once, and its last words be taken for all.
        std::future::pending::<()>().await;
    }
    Ok(bytes)
}

pub(crate) fn timed_out(command: &str, address: SocketAddr, limit: Duration) -> AttachError {
    AttachError::TimedOut { action: format!("`{command}`"), address, limit }
}

fn failed(command: String, status: ExitStatus, stderr: &[u8]) -> AttachError {
    let said = String::from_utf8_lossy(stderr);
    let lines = said.lines().map(str::trim).filter(|line| {
        // Lines that help nobody who reads them in the output of an engine.
        !line.is_empty() && !line.starts_with("dmesg(1)")
    });
    let reason = lines.collect::<Vec<_>>().join("; ");
    AttachError::Tool { command, status, reason }
}

/// Whether a tool failed with these words.
pub(crate) fn says(error: &AttachError, words: &str) -> bool {
    matches!(error, AttachError::Tool { reason, .. } if reason.contains(words))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLEEP: Tool = Tool { program: "sleep", package: "coreutils" };
    const LS: Tool = Tool { program: "ls", package: "coreutils" };
    const NONE: Tool = Tool { program: "slackwater-no-such-tool", package: "nothing" };

    fn tools() -> Tools {
        Tools::new(SocketAddr::from(([192, 0, 2, 1], 2049)), &[])
    }

    #[tokio::test]
    async fn a_tool_that_hangs_is_given_up_and_the_appliance_is_named() {
        let call = tools().call(SLEEP).arguments(["1000"]).limit(Duration::from_millis(50));
        let error = call.run().await.unwrap_err();
        assert!(matches!(error, AttachError::TimedOut { .. }), "{error:?}");
        assert!(error.to_string().contains("192.0.2.1:2049"), "{error}");
        assert!(error.to_string().contains("sleep 1000"), "{error}");
    }

    #[tokio::test]
    async fn the_wait_for_a_permit_has_the_same_limit_and_a_thaw_does_not_wait() {
        let tools = tools();
        let all = u32::try_from(CHILDREN_MAX).unwrap();
        let _busy = tools.permits.clone().acquire_many_owned(all).await.unwrap();
        let patience = Duration::from_secs(30);
        for is_lasting in [false, true] {
            let call = tools.call(LS).argument("/").limit(Duration::from_millis(50));
            let call = if is_lasting { call.without_limit() } else { call };
            let error = tokio::time::timeout(patience, call.run()).await.unwrap().unwrap_err();
            assert!(matches!(error, AttachError::TimedOut { .. }), "{error:?}");
        }
        let thaw = tools.unfreeze(Path::new("/no/such/folder")).run();
        let error = tokio::time::timeout(patience, thaw).await.unwrap().unwrap_err();
        assert!(says(&error, "No such file"), "{error:?}");
    }

    #[tokio::test]
    async fn what_hangs_in_its_turn_is_given_up_and_its_turn_is_over() {
        let tools = tools();
        let in_turn = async |limit: u64, hangs: bool| {
            let limit = Duration::from_millis(limit);
            let work = async |left| {
                assert!(left <= limit);
                if hangs { std::future::pending().await } else { Ok(()) }
            };
            tools.in_turn("mounting image `x`".to_owned(), limit, work).await
        };
        for _ in 0..=CHILDREN_MAX {
            let error = in_turn(1, true).await.unwrap_err().to_string();
            assert!(
                error.contains("mounting image `x`") && error.contains("192.0.2.1:2049"),
                "{error}"
            );
        }
        in_turn(30_000, false).await.unwrap();
        let all = u32::try_from(CHILDREN_MAX).unwrap();
        let _busy = tools.permits.clone().acquire_many_owned(all).await.unwrap();
        in_turn(50, false).await.unwrap_err();
    }

    #[tokio::test]
    async fn a_tool_that_says_too_much_is_given_up_and_not_remembered() {
        // Ready at once: what is read without a bound is there before the time ends.
        let much = tokio::io::repeat(b'x').take(4 * SAID_BYTES_MAX);
        let read = beginning(Some(much));
        assert!(tokio::time::timeout(Duration::from_millis(50), read).await.is_err());
        let count = (SAID_BYTES_MAX - 1).to_string();
        let much = Tool { program: "head", package: "coreutils" };
        let call = tools().call(much).arguments(["-c", &count, "/dev/zero"]);
        assert_eq!(call.run().await.unwrap().len() as u64, SAID_BYTES_MAX - 1);
    }

    #[test]
    fn a_tool_is_called_by_its_path_and_named_without() {
        let call = tools().call(LS).argument("/");
        let program = Path::new(call.command.as_std().get_program());
        assert!(program.is_absolute() && program.ends_with("ls"), "{}", program.display());
        assert_eq!(call.text(), "ls /");
        assert_eq!(file_of("slackwater-no-such-tool"), None);
    }

    #[tokio::test]
    async fn a_failure_carries_what_the_tool_said() {
        let error = tools().call(LS).arguments(["/no/such/folder"]).run().await.unwrap_err();
        assert!(says(&error, "No such file"), "{error:?}");
        let error = tools().call(NONE).run().await.unwrap_err();
        assert!(error.to_string().contains("install the package nothing"), "{error}");
    }
}
