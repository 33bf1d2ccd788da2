//! The FUSE export: the mount, the keeper process that serves it, and taking it over.
//!
//! The daemon holds a copy of `/dev/fuse` too, and watches the keeper: one that was killed is
//! replaced. A daemon that was killed finds keeper and server by their records and takes a copy
//! of the descriptor from either. In a mount namespace that ends with its processes it takes one only when it needs it
//! (`leaving`).

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::Timespec;
use rustix::mount::MountFlags;
use tokio::task::JoinHandle;

use crate::AttachError;
use crate::keeper::{self, RESUME_FLAG, SERVER_RECORD_VARIABLE};
use crate::leaving;
use crate::process::{self, Process};
use crate::tools::UNSHARE;

/// The type under which the mount table shows the export.
pub(crate) const FILE_SYSTEM: &str = "fuse.slackwater";

/// The largest read that the kernel may send: as much as the appliance answers at once.
const READ_SIZE_BYTES_MAX: u32 = 1 << 20;

/// When the log of the server is put aside. Two such files are kept.
const LOG_SIZE_BYTES_MAX: u64 = 4 << 20;

/// The pause before a keeper that ended is replaced, so that one which ends at once each time
/// does not keep a core busy.
const KEEPER_PAUSE: Duration = Duration::from_secs(1);

/// How often the keeper is looked at. Its server goes on without it.
const WATCH_INTERVAL: Duration = Duration::from_millis(250);

/// How long the processes may take to notice that the export is unmounted.
const END_TIME_LIMIT: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };

/// What is needed to serve the export.
#[derive(Debug, Clone)]
pub(crate) struct Service {
    program: Vec<OsString>,
    keeper_record: PathBuf,
    server_record: PathBuf,
    log: PathBuf,
    /// Keeper and server leave the mount namespace of the disks, and the daemon holds no descriptor.
    leaves: bool,
}

impl Service {
    pub(crate) fn new(program: Vec<OsString>, state_directory: &Path, leaves: bool) -> Self {
        Self {
            program,
            keeper_record: state_directory.join("keeper.process"),
            server_record: state_directory.join("server.process"),
            log: state_directory.join("serve-export.log"),
            leaves,
        }
    }

    /// Mounts the export at `directory` and starts what serves it.
    pub(crate) fn start(&self, source: &str, directory: &Path) -> Result<Serving, AttachError> {
        require_descriptors()?;
        let fuse = File::options().read(true).write(true).open("/dev/fuse").map_err(|source| {
            if source.kind() == io::ErrorKind::NotFound {
                return AttachError::Missing {
                    what: "/dev/fuse".to_owned(),
                    advice: "`modprobe fuse`, or attach by `nfs` where the kernel has its client; `slackwater-driver doctor` tells what else is needed".to_owned(),
                };
            }
            AttachError::System { action: "open", path: "/dev/fuse".into(), source }
        })?;
        let fuse = OwnedFd::from(fuse);
        mount(source, directory, &fuse).map_err(|source| AttachError::System {
            action: "mount a FUSE file system at",
            path: directory.to_owned(),
            source,
        })?;
        if let Err(source) = self.start_keeper(&fuse, false) {
            // Nothing was served yet, so nothing can be busy.
            let _unmounted = rustix::mount::unmount(directory, rustix::mount::UnmountFlags::DETACH);
            let program = self.program.first().map(PathBuf::from).unwrap_or_default();
            let path = if self.leaves { UNSHARE.program.into() } else { program };
            return Err(AttachError::System { action: "start", path, source });
        }
        Ok(self.watch(fuse))
    }

    /// Takes over the export that an earlier daemon mounted. `None` if the kernel has ended its
    /// connection, or will: nobody is left who could serve it.
    pub(crate) fn adopt(&self) -> Result<Option<Serving>, AttachError> {
        require_descriptors()?;
        let fuse = self.descriptor()?;
        Ok(fuse.filter(|fuse| !process::is_disconnected(fuse.as_fd())).map(|fuse| self.watch(fuse)))
    }

    /// A copy of the descriptor that keeper or server holds; none if both have ended.
    fn descriptor(&self) -> Result<Option<OwnedFd>, AttachError> {
        let mut lives = false;
        for record in [&self.keeper_record, &self.server_record] {
            let Some(process) = Process::recorded(record) else {
                continue;
            };
            match process.fuse_descriptor() {
                Some(fuse) => return Ok(Some(fuse)),
                // It ended at this moment, or ends.
                None if Process::recorded(record).is_none() => {}
                None => lives = true,
            }
        }
        if lives { Err(no_descriptors()) } else { Ok(None) }
    }

    /// Whether the server has the settings that it would be started with now, by the command line of the keeper that
    /// started it. Where that cannot be said, it has.
    pub(crate) fn is_served_alike(&self) -> bool {
        let words = match fs::read(keeper::words_of(&self.server_record)) {
            Ok(line) => line
                .split(|byte| *byte == 0)
                .map(|word| OsStr::from_bytes(word).to_owned())
                .collect(),
            // A keeper of an earlier release writes none.
            Err(_) => match Process::recorded_words(&self.keeper_record) {
                Some(words) => words,
                None => return true,
            },
        };
        // Of a keeper that replaced another one.
        let words: Vec<_> = words.into_iter().filter(|word| word != RESUME_FLAG).collect();
        words.ends_with(&self.program)
    }

    fn start_keeper(&self, fuse: &OwnedFd, resume: bool) -> io::Result<()> {
        let mut command = leaving::keeper_command(&self.program, self.leaves)?;
        if resume {
            command.arg(RESUME_FLAG);
        }
        let log = self.open_log()?;
        command.env(SERVER_RECORD_VARIABLE, &self.server_record);
        command.stdin(Stdio::from(fuse.try_clone()?));
        command.stdout(Stdio::from(log.try_clone()?)).stderr(Stdio::from(log));
        // The child is let go here. The runtime asks for its end, should it come.
        let mut child = tokio::process::Command::from(command).spawn()?;
        let recorded = match child.id() {
            Some(pid) => process::record(&self.keeper_record, pid),
            None => Err(io::Error::other("the keeper ended at once")),
        };
        if recorded.is_err() {
            // Nobody would know of it, and another would be started beside it. It fails only
            // where the keeper has ended already.
            let _ended = child.start_kill();
        }
        recorded
    }

    fn open_log(&self) -> io::Result<File> {
        if fs::metadata(&self.log).is_ok_and(|metadata| metadata.len() > LOG_SIZE_BYTES_MAX) {
            fs::rename(&self.log, self.log.with_extension("log.old"))?;
        }
        File::options().append(true).create(true).open(&self.log)
    }

    fn watch(&self, fuse: OwnedFd) -> Serving {
        let fuse = (!self.leaves).then(|| Arc::new(fuse));
        let watch = tokio::spawn(replace_keepers(self.clone(), fuse.clone()));
        Serving { service: self.clone(), fuse, watch }
    }

    /// Whether the export is served no more, and cannot be. Keeper and server end when it is unmounted.
    fn is_over(&self, fuse: Option<&OwnedFd>) -> bool {
        let records = [&self.keeper_record, &self.server_record];
        match fuse {
            Some(fuse) => process::is_disconnected(fuse.as_fd()),
            None => records.iter().all(|record| Process::recorded(record).is_none()),
        }
    }

    /// Starts another keeper on the descriptor, or on that of the server.
    fn replace_keeper(&self, fuse: Option<&OwnedFd>) -> io::Result<()> {
        match fuse {
            Some(fuse) => self.start_keeper(fuse, true),
            None => match self.descriptor().map_err(io::Error::other)? {
                Some(fuse) => self.start_keeper(&fuse, true),
                None => Err(io::Error::other("the server has ended as well")),
            },
        }
    }
}

/// Starts a keeper whenever there is none, until the export is unmounted.
async fn replace_keepers(service: Service, fuse: Option<Arc<OwnedFd>>) {
    loop {
        if let Some(keeper) = Process::recorded(&service.keeper_record) {
            while !keeper.has_ended() {
                tokio::time::sleep(WATCH_INTERVAL).await;
            }
        }
        if service.is_over(fuse.as_deref()) {
            if fuse.is_none() {
                // Calls that need it say so, if it was not unmounted on purpose.
                tracing::info!("keeper and server of the export have ended");
            }
            return;
        }
        tracing::warn!("the keeper of the export ended; another is started");
        if let Err(error) = service.replace_keeper(fuse.as_deref()) {
            tracing::error!(%error, "no keeper of the export can be started");
        }
        tokio::time::sleep(KEEPER_PAUSE).await;
    }
}

/// A FUSE export that is served.
#[derive(Debug)]
pub(crate) struct Serving {
    service: Service,
    /// None where keeper and server alone hold it.
    fuse: Option<Arc<OwnedFd>>,
    watch: JoinHandle<()>,
}

impl Serving {
    /// Whether the kernel has ended the connection.
    pub(crate) fn is_over(&self) -> bool {
        self.service.is_over(self.fuse.as_deref())
    }

    /// Waits for the processes of an export that was unmounted, and ends those that do not.
    pub(crate) async fn end(self) {
        let service = self.service.clone();
        drop(self);
        service.end_processes().await;
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        // The keeper goes on; only this daemon's eye on it closes.
        self.watch.abort();
    }
}

impl Service {
    /// Waits for the processes that served an export, and ends those that stay.
    pub(crate) async fn end_processes(&self) {
        let records = [self.keeper_record.clone(), self.server_record.clone()];
        let wait = move || {
            for record in &records {
                if let Some(process) = Process::recorded(record)
                    && !process.wait(Some(END_TIME_LIMIT))
                {
                    tracing::warn!(record = %record.display(), "a process did not end by itself");
                    process.kill();
                }
                // A record without a process says nothing; it may stay.
                let _removed = fs::remove_file(record);
                let _none = fs::remove_file(keeper::words_of(record));
            }
        };
        if let Err(error) = tokio::task::spawn_blocking(wait).await {
            tracing::warn!(%error, "the processes of the export were not waited for");
        }
    }
}

fn mount(source: &str, directory: &Path, fuse: &OwnedFd) -> io::Result<()> {
    // Without `allow_other`: nobody but root has business with the disks of all containers.
    let data = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0,max_read={READ_SIZE_BYTES_MAX}",
        fuse.as_raw_fd()
    );
    let data = std::ffi::CString::new(data)?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::NOATIME;
    // A kernel that does not know this one ignores it: the mount table tells.
    let flags = flags | MountFlags::NOSYMFOLLOW;
    Ok(rustix::mount::mount(source, directory, FILE_SYSTEM, flags, data.as_c_str())?)
}

/// Whether the kernel lets a process copy a descriptor of another, which adoption needs.
pub(crate) fn has_descriptors() -> bool {
    let this = rustix::process::getpid();
    let flags = rustix::process::PidfdFlags::empty();
    let Ok(pidfd) = rustix::process::pidfd_open(this, flags) else {
        return false;
    };
    let flags = rustix::process::PidfdGetfdFlags::empty();
    rustix::process::pidfd_getfd(&pidfd, pidfd.as_raw_fd(), flags).is_ok()
}

fn require_descriptors() -> Result<(), AttachError> {
    if has_descriptors() { Ok(()) } else { Err(no_descriptors()) }
}

fn no_descriptors() -> AttachError {
    AttachError::Missing {
        what: "pidfd_getfd, with which a new daemon takes over the export,".to_owned(),
        advice: "use Linux 5.6 or newer, run as root with CAP_SYS_PTRACE, or use --attach nfs"
            .to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The processes with this word in their command line.
    fn processes_with(word: &str) -> Vec<String> {
        let entries = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path());
        let lines = entries.filter_map(|path| fs::read_to_string(path.join("cmdline")).ok());
        lines.filter(|line| line.split('\0').any(|part| part == word)).collect()
    }

    #[tokio::test]
    async fn a_keeper_that_cannot_be_written_down_is_ended() {
        let directory = tempfile::tempdir().unwrap();
        // A time that no other process sleeps for.
        let time = format!("1002.{:09}", std::process::id());
        let service =
            Service::new(vec!["sleep".into(), time.clone().into()], directory.path(), false);
        fs::create_dir(&service.keeper_record).unwrap();
        let fuse = OwnedFd::from(File::open("/dev/null").unwrap());
        service.start_keeper(&fuse, false).unwrap_err();
        // Far less than it would sleep.
        let end = std::time::Instant::now() + Duration::from_secs(60);
        while !processes_with(&time).is_empty() {
            assert!(std::time::Instant::now() < end, "it goes on");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}
