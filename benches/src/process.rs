//! Programs that an experiment runs.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use crate::failure::Failure;
use crate::stop::Stop;

/// How often a running program is looked at: little beside the milliseconds that starting one
/// takes.
const POLL: Duration = Duration::from_micros(200);

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

#[cfg(test)]
mod tests {
    use std::time::Instant;

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
    fn a_failure_is_told_in_the_words_of_the_program() {
        let error = output(command("cp").arg("--no-such-option")).unwrap_err().to_string();
        assert!(error.contains("no-such-option"), "{error}");
        assert!(output(&mut command("no such program")).is_err());
    }
}
