//! The keeper: a small process that outlives the daemon and keeps the FUSE export served.
//!
//! ```text
//!   daemon ----starts----> keeper ----starts, again and again----> server
//!      \                     |                                       |
//!       `------ /dev/fuse ---+---------------------------------------'
//! ```
//!
//! All of them hold the same `/dev/fuse`, and the kernel ends the connection when the last holder
//! is gone. So any one of them may be killed, and any two; what the others started goes on. A
//! server that was killed is started again on the same descriptor with `--resume`. Where the mount namespace ends with its
//! processes, the daemon holds none (`leaving`): there keeper and server may not be killed both at once.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::AttachError;
use crate::leaving;
use crate::process::{self, Process};

/// Tells the program that its descriptor has served before.
pub(crate) const RESUME_FLAG: &str = "--resume";

/// Tells the keeper where to write down its server.
pub(crate) const SERVER_RECORD_VARIABLE: &str = "SLACKWATER_SERVER_RECORD";

/// The first pause after a server's death. Containers wait meanwhile.
const PAUSE_MIN: Duration = Duration::from_millis(100);

/// The longest pause: what dies at once each time shall not keep a core busy.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// A server that ran as long as this was well; its death is not of a kind with the ones before.
const STEADY: Duration = Duration::from_secs(60);

/// The main loop of the keeper process: serves the export with `program` on the descriptor until
/// the export is unmounted. It never gives up before, for containers run on it.
///
/// `program` gets the descriptor as its standard input, and `--resume` at its end whenever the
/// descriptor has served before; it is there already if this keeper replaces another.
pub fn keep_serving(program: &[OsString], fuse: OwnedFd) -> Result<ExitStatus, AttachError> {
    // Signals that end the daemon's session shall not reach us. It fails only where we lead a
    // session of our own already.
    let _leads_already = rustix::process::setsid();
    let record = std::env::var_os(SERVER_RECORD_VARIABLE).map(PathBuf::from);
    let needed =
        program.iter().map(OsString::as_os_str).chain(record.as_deref().map(Path::as_os_str));
    if let Err(error) = leaving::let_go(needed) {
        tracing::error!(%error, "this process may hang as it ends: a disk may be mounted where it is");
    }
    if let Some(orphan) = record.as_deref().and_then(Process::recorded) {
        // The server of a keeper that was killed. Two at once would take each other's requests.
        tracing::info!("waiting for the server of an earlier keeper");
        orphan.wait(None);
    }
    let mut resume = program.iter().any(|word| word == RESUME_FLAG);
    let mut pause = PAUSE_MIN;
    while !process::is_disconnected(fuse.as_fd()) {
        let started = Instant::now();
        match serve_once(program, &fuse, resume, record.as_deref()) {
            Ok(status) => tracing::warn!(%status, "the server of the export ended"),
            Err(error) => tracing::error!(%error, "the server of the export cannot be started"),
        }
        resume = true;
        if started.elapsed() >= STEADY {
            pause = PAUSE_MIN;
        }
        std::thread::sleep(pause);
        pause = PAUSE_MAX.min(pause * 2);
    }
    tracing::info!("the export is unmounted");
    Ok(ExitStatus::default())
}

/// Where the words of the keeper stand that started the server of this record.
pub(crate) fn words_of(record: &Path) -> PathBuf {
    record.with_extension("words")
}

/// Writes down the command line of this keeper, by which its server has its settings: a keeper that replaces another
/// one first waits for the end of the server that is there.
fn record_words(record: &Path) -> io::Result<()> {
    let words: Vec<_> = std::env::args_os().filter(|word| word != RESUME_FLAG).collect();
    let words = words.iter().map(|word| word.as_bytes()).collect::<Vec<_>>().join(&0);
    let new = record.with_extension("words.new");
    std::fs::write(&new, words)?;
    std::fs::rename(&new, words_of(record))
}

fn serve_once(
    program: &[OsString],
    fuse: &OwnedFd,
    resume: bool,
    record: Option<&Path>,
) -> io::Result<ExitStatus> {
    if let Some(Err(error)) = record.map(record_words) {
        tracing::warn!(%error, "the settings of the server cannot be written down");
    }
    let mut command = command_of(program)?;
    if resume && !program.iter().any(|word| word == RESUME_FLAG) {
        command.arg(RESUME_FLAG);
    }
    command.stdin(Stdio::from(fuse.try_clone()?)).env_remove(SERVER_RECORD_VARIABLE);
    let mut child = command.spawn()?;
    if let Some(record) = record
        && let Err(error) = process::record(record, child.id())
    {
        // A server that is not written down would get a second one beside it when this keeper is
        // replaced, and the two would take each other's requests.
        child.kill()?;
        let status = child.wait()?;
        // One that ended by itself could not be written down, and how it ended says more.
        return if status.code().is_some() { Ok(status) } else { Err(error) };
    }
    child.wait()
}

/// The command of a program and its arguments.
pub(crate) fn command_of(program: &[OsString]) -> io::Result<Command> {
    let (first, rest) = program.split_first().ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidInput, "the command line of the server is empty")
    })?;
    let mut command = Command::new::<&OsStr>(first);
    command.args(rest);
    Ok(command)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    #[test]
    fn a_server_that_cannot_be_written_down_is_ended() {
        let directory = tempfile::tempdir().unwrap();
        let record = directory.path().join("no-such-folder/server.process");
        let (done, is_done) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let fuse = OwnedFd::from(File::open("/dev/null").unwrap());
            let program = ["sleep".into(), "1000".into()];
            let served = serve_once(&program, &fuse, false, Some(&record));
            let _nobody_waits = done.send(served);
        });
        // It was waited for, so its process is gone.
        let served = is_done.recv_timeout(Duration::from_secs(30)).unwrap();
        assert_eq!(served.unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
