//! Notes about processes that outlive us: a pid is used again, a pid with its start time is not.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, Signal};

/// The descriptor number of standard input, which is where our processes keep `/dev/fuse`.
const STANDARD_INPUT: i32 = 0;

/// A process that lives.
#[derive(Debug)]
pub(crate) struct Process {
    pidfd: OwnedFd,
}

impl Process {
    /// The process that `record` names, if it is that one still.
    pub(crate) fn recorded(record: &Path) -> Option<Self> {
        let text = fs::read_to_string(record).ok()?;
        let (pid, start_time) = text.trim().split_once(' ')?;
        let process = Self::open(pid.parse().ok().filter(|pid| *pid > 0)?)?;
        // Read after the descriptor was opened: from then on the pid is this process.
        let is_same = start_time_of(pid).as_deref() == Some(start_time);
        is_same.then_some(process)
    }

    /// The words of the command line of the process that `record` names, if it is that one still.
    pub(crate) fn recorded_words(record: &Path) -> Option<Vec<OsString>> {
        let process = Self::recorded(record)?;
        let text = fs::read_to_string(record).ok()?;
        let (pid, _) = text.trim().split_once(' ')?;
        let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        // Else the line may be that of another process with its pid. One that has just been started has none yet.
        if process.has_ended() || line.is_empty() {
            return None;
        }
        let words = line.strip_suffix(&[0]).unwrap_or(&line).split(|byte| *byte == 0);
        Some(words.map(|word| OsStr::from_bytes(word).to_owned()).collect())
    }

    /// The process of this pid.
    fn open(pid: i32) -> Option<Self> {
        let pidfd = rustix::process::pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
        Some(Self { pidfd })
    }

    /// A copy of the `/dev/fuse` that the process has as its standard input.
    pub(crate) fn fuse_descriptor(&self) -> Option<OwnedFd> {
        let flags = PidfdGetfdFlags::empty();
        let copy = rustix::process::pidfd_getfd(&self.pidfd, STANDARD_INPUT, flags).ok()?;
        let found = rustix::fs::fstat(&copy).ok()?.st_rdev;
        let expected = fs::metadata("/dev/fuse").ok()?.rdev();
        (found == expected).then_some(copy)
    }

    /// Waits for its end, at most as long as `limit`; whether it has ended.
    pub(crate) fn wait(&self, limit: Option<Timespec>) -> bool {
        has_event(self.pidfd.as_fd(), PollFlags::IN, limit)
    }

    /// Whether it has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.wait(Some(Timespec { tv_sec: 0, tv_nsec: 0 }))
    }

    /// Ends it at once.
    pub(crate) fn kill(&self) {
        // It can have ended already, and that is what is wanted.
        let _ended = rustix::process::pidfd_send_signal(&self.pidfd, Signal::KILL);
    }
}

/// The processes of this user whose words `wanted` knows, with what it answers. Those of other process
/// namespaces are left out: what runs in a container may call itself anything.
pub(crate) fn running<T>(wanted: impl Fn(&[&Path]) -> Option<T>) -> Vec<(Process, T)> {
    let space = |process: &Path| fs::read_link(process.join("ns/pid")).ok();
    let (own, own_space) = (rustix::process::geteuid().as_raw(), space(Path::new("/proc/self")));
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let known = entries.filter_map(|entry| {
        let directory = entry.ok()?.path();
        let process = Process::open(directory.file_name()?.to_str()?.parse().ok()?)?;
        // Read after the descriptor was opened: from then on the pid is this process.
        let is_own = fs::metadata(&directory).ok()?.uid() == own && space(&directory) == own_space;
        let line = fs::read(directory.join("cmdline")).ok().filter(|_| is_own)?;
        let words = line.strip_suffix(&[0]).unwrap_or(&line).split(|byte| *byte == 0);
        let words: Vec<_> = words.map(|word| Path::new(OsStr::from_bytes(word))).collect();
        let found = wanted(&words)?;
        Some((process, found))
    });
    known.collect()
}

/// Writes down a process, so that `Process::recorded` finds it.
pub(crate) fn record(record: &Path, pid: u32) -> io::Result<()> {
    let start_time = start_time_of(&pid.to_string())
        .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "the process has ended"))?;
    let new = record.with_extension("new");
    fs::write(&new, format!("{pid} {start_time}\n"))?;
    fs::rename(&new, record)
}

/// When a process started, in the kernel's own unit; `None` if it has ended.
fn start_time_of(pid: &str) -> Option<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything, so count from the last parenthesis.
    let (_, rest) = text.rsplit_once(')')?;
    let mut fields = rest.split_whitespace();
    let state = fields.next()?;
    let start_time = fields.nth(18)?;
    // Ended, and nobody has asked how yet.
    (!matches!(state, "Z" | "X")).then(|| start_time.to_owned())
}

/// Whether the kernel has ended the connection of this `/dev/fuse`.
pub(crate) fn is_disconnected(fuse: BorrowedFd<'_>) -> bool {
    has_event(fuse, PollFlags::ERR, Some(Timespec { tv_sec: 0, tv_nsec: 0 }))
}

fn has_event(descriptor: BorrowedFd<'_>, event: PollFlags, limit: Option<Timespec>) -> bool {
    let mut descriptors = [PollFd::from_borrowed_fd(descriptor, event)];
    loop {
        match rustix::event::poll(&mut descriptors, limit.as_ref()) {
            Ok(_) => return descriptors[0].revents().intersects(event),
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;
    use std::time::{Duration, Instant};

    #[test]
    fn a_record_finds_its_process_only_and_only_while_it_lives() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("process");
        assert!(Process::recorded(&path).is_none());
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        record(&path, child.id()).unwrap();
        let process = Process::recorded(&path).unwrap();
        assert!(!process.has_ended());
        let end = Instant::now() + Duration::from_secs(60);
        while Process::recorded_words(&path).is_none() {
            assert!(Instant::now() < end, "no command line");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(Process::recorded_words(&path).unwrap(), ["sleep", "1000"]);
        assert!(process.fuse_descriptor().is_none(), "its standard input is no FUSE");

        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, format!("{} 1", text.split(' ').next().unwrap())).unwrap();
        assert!(Process::recorded(&path).is_none(), "a pid that was used again");

        fs::write(&path, text).unwrap();
        process.kill();
        assert!(process.wait(None));
        assert!(Process::recorded(&path).is_none(), "a process that ended and was not waited for");
        child.wait().unwrap();
        assert!(Process::recorded(&path).is_none());
    }

    #[test]
    fn as_root_what_runs_in_a_namespace_of_its_own_is_not_taken_for_ours() {
        // A time that no other process sleeps for.
        let time = format!("1001.{:09}", std::process::id());
        let sleeping = |name: &str| {
            let is_it = |words: &[&Path]| *words == [Path::new("sleep"), Path::new(name)];
            running(|words| is_it(words).then_some(())).len()
        };
        let mut own = Command::new("sleep").arg(&time).spawn().unwrap();
        let contained = format!("{time}1");
        let mut container = Command::new("unshare")
            .args(["--pid", "--fork", "--kill-child", "sleep", &contained])
            .spawn()
            .unwrap();
        let is_there = |name: &str| {
            let lines = fs::read_dir("/proc")
                .unwrap()
                .filter_map(|entry| fs::read_to_string(entry.unwrap().path().join("cmdline")).ok());
            lines.into_iter().any(|line| line == format!("sleep\0{name}\0"))
        };
        let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while !(is_there(&time) && is_there(&contained)) {
            assert!(std::time::Instant::now() < end, "they do not begin");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        let found = (sleeping(&time), sleeping(&contained));
        for child in [&mut own, &mut container] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert_eq!(found, (1, 0));
    }

    #[test]
    fn a_damaged_record_names_nobody() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("process");
        for text in ["", "1", "x y", "-1 5", "0 0", "99999999999 1"] {
            fs::write(&path, text).unwrap();
            assert!(Process::recorded(&path).is_none(), "{text:?}");
        }
    }
}
