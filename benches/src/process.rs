//! Programs that an experiment runs.

use std::ffi::OsStr;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

use crate::failure::Failure;
use crate::stop::Stop;

/// How often a running program is looked at: little beside the milliseconds that starting one
/// takes.
const POLL: Duration = Duration::from_micros(200);

/// How often it is looked whether a program is to be ended that is waited for.
const LOOK: Duration = Duration::from_millis(50);

/// How long a program may take to end, and what it printed to come.
const GRACE: Duration = Duration::from_secs(5);

/// How long a call that is under way may go on when the experiment must end. A client of containerd that is killed while
/// a task is created leaves in containerd what no later call removes: mounts, and a shim without a task.
const UNDER_WAY_MAX: Duration = Duration::from_secs(20);

/// A command in a process group of its own: Ctrl-C at a terminal reaches this program alone,
/// which then ends the others in order.
pub(crate) fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.stdin(Stdio::null()).process_group(0);
    command
}

/// Runs the command until it ends by itself; killed when the experiment must end.
pub(crate) fn run(command: &mut Command, stop: &Stop) -> Result<ExitStatus, Failure> {
    let program = command.get_program().to_owned();
    let failed = |source| Failure::at("run", Path::new(&program))(source);
    let mut child = command.spawn().map_err(failed)?;
    loop {
        if let Some(status) = child.try_wait().map_err(failed)? {
            return Ok(status);
        }
        if let Err(failure) = stop.check() {
            // Fails only if it has ended meanwhile, which is as well.
            let _ = child.kill();
            let _ = child.wait();
            return Err(failure);
        }
        std::thread::sleep(POLL);
    }
}

/// Runs the command, which must succeed, and answers its standard output.
pub(crate) fn output(command: &mut Command) -> Result<String, Failure> {
    let program = command.get_program().to_owned();
    let output = command.output().map_err(Failure::at("run", Path::new(&program)))?;
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        let program = Path::new(&program).display();
        return Err(Failure::Unfit(format!("{program} failed: {}", error.trim())));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// When a program is ended that runs still.
#[derive(Clone, Copy, Debug)]
pub(crate) enum End<'a> {
    /// When the experiment must end, or some seconds later: a call that ends by itself until then leaves nothing half
    /// made.
    Stop(&'a Stop),
    /// After so long.
    After(Duration),
}

impl End<'_> {
    fn check(self, start: Instant, said: &str) -> Result<(), Failure> {
        match self {
            Self::Stop(stop) => stop.check(),
            Self::After(limit) if start.elapsed() < limit => Ok(()),
            Self::After(limit) => {
                Err(Failure::Unfit(format!("{said} was not done after {} s", limit.as_secs_f64())))
            }
        }
    }
}

/// Runs the command, which must succeed, and answers its standard output, as far as it has one of ours. One that runs too
/// long is ended with all of its process group: by SIGTERM, and some seconds later by SIGKILL. When the experiment must
/// end, it may first go on for `UNDER_WAY_MAX`.
pub(crate) fn output_until(command: &mut Command, end: End<'_>) -> Result<String, Failure> {
    let said = format!("`{}`", words(command));
    let failed = |source| Failure::System { what: format!("cannot run {said}"), source };
    let start = Instant::now();
    let mut child = command.stderr(Stdio::piped()).spawn().map_err(failed)?;
    let group = Pid::from_child(&child);
    let (out, error) = (child.stdout.take(), child.stderr.take());
    // A program that prints more than a pipe holds would wait. What it started may hold the pipes longer than it lives.
    let (out, error) = (read_later(out), read_later(error));
    let (sender, ended) = mpsc::channel();
    std::thread::spawn(move || sender.send(child.wait()));
    let status = loop {
        match ended.recv_timeout(LOOK) {
            Ok(status) => break status.map_err(failed)?,
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return Err(Failure::Unfit(format!("{said}: its end was not seen")));
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {}
        }
        if let Err(failure) = end.check(start, &said) {
            let is_stop = matches!(end, End::Stop(_));
            if is_stop && ended.recv_timeout(UNDER_WAY_MAX).is_ok() {
                return Err(failure);
            }
            // Fails only if it has ended by then, which is as well.
            let _ = rustix::process::kill_process_group(group, Signal::TERM);
            if ended.recv_timeout(GRACE).is_err() {
                let _ = rustix::process::kill_process_group(group, Signal::KILL);
            }
            return Err(failure);
        }
    };
    let text = |from: &mpsc::Receiver<Vec<u8>>| {
        let bytes = from.recv_timeout(GRACE).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    };
    if !status.success() {
        let error = text(&error).unwrap_or_default();
        return Err(Failure::Unfit(format!("{said} ended with {status}: {}", error.trim())));
    }
    // Half of what it printed would be taken for all.
    text(&out).ok_or_else(|| {
        Failure::Unfit(format!("{said} ended, and something that it started still has its output"))
    })
}

/// The command line.
fn words(command: &Command) -> String {
    let all = std::iter::once(command.get_program()).chain(command.get_args());
    all.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ")
}

/// What comes from a pipe, when it has ended.
fn read_later(from: Option<impl Read + Send + 'static>) -> mpsc::Receiver<Vec<u8>> {
    let (sender, read) = mpsc::channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = from.map(|mut from| from.read_to_end(&mut bytes));
        sender.send(bytes)
    });
    read
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_does_not_end_is_killed() {
        let start = Instant::now();
        let stop = Stop::listen(Duration::from_millis(50)).unwrap();
        let outcome = run(command("sleep").arg("60"), &stop);
        assert!(matches!(outcome, Err(Failure::TooLong { .. })), "{outcome:?}");
        assert!(start.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn what_is_printed_comes_whole() {
        let mut print = command("sh");
        print.args(["-c", "head -c 1000000 /dev/zero >&2; head -c 1000000 /dev/zero"]);
        let stop = Stop::listen(Duration::from_secs(600)).unwrap();
        let printed = output_until(print.stdout(Stdio::piped()), End::Stop(&stop)).unwrap();
        assert_eq!(printed.len(), 1_000_000);
        // Also where what it started has the pipe.
        let start = Instant::now();
        let mut sleep = command("sh");
        sleep.args(["-c", "sleep 60 & sleep 60"]);
        let outcome = output_until(&mut sleep, End::After(Duration::from_millis(50)));
        let failed = outcome.unwrap_err().to_string();
        assert!(failed.contains("sleep 60` was not done after 0.05 s"), "{failed}");
        assert!(start.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn a_call_that_is_under_way_ends_by_itself_when_the_experiment_must_end() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("made");
        let stop = Stop::listen(Duration::ZERO).unwrap();
        let mut call = command("sh");
        call.args(["-c", "sleep 1; echo whole >\"$0\""]).arg(&file);
        let outcome = output_until(&mut call, End::Stop(&stop));
        assert!(matches!(outcome, Err(Failure::TooLong { .. })), "{outcome:?}");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "whole\n");
    }

    #[test]
    fn a_failure_is_told_in_the_words_of_the_program() {
        let error = output(command("cp").arg("--no-such-option")).unwrap_err().to_string();
        assert!(error.contains("no-such-option"), "{error}");
        assert!(output(&mut command("no such program")).is_err());
        let limit = End::After(Duration::from_secs(600));
        let error = output_until(command("cp").arg("--no-such-option"), limit).unwrap_err();
        let error = error.to_string();
        assert!(error.starts_with("`cp --no-such-option` ended with exit status: 1: "), "{error}");
        assert!(error.contains("unrecognized option"), "{error}");
    }
}
