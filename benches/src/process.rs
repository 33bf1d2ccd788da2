//! Programs that an experiment runs.

use std::ffi::OsStr;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
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
    wait(&mut child, Some(stop), &failed)
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

/// The same, also killed when the experiment must end, if that is asked for.
pub(crate) fn output_until(command: &mut Command, stop: Option<&Stop>) -> Result<String, Failure> {
    let program = command.get_program().to_owned();
    let failed = |source| Failure::at("run", Path::new(&program))(source);
    let mut child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(failed)?;
    let (mut out, mut error) = (child.stdout.take(), child.stderr.take());
    let (status, out, error) = std::thread::scope(|scope| {
        // A program that prints more than a pipe holds would wait.
        let out = scope.spawn(|| read(out.as_mut()));
        let error = scope.spawn(|| read(error.as_mut()));
        let status = wait(&mut child, stop, &failed);
        (status, out.join().unwrap_or_default(), error.join().unwrap_or_default())
    });
    if !status?.success() {
        let program = Path::new(&program).display();
        return Err(Failure::Unfit(format!("{program} failed: {}", error.trim())));
    }
    Ok(out)
}

fn wait(
    child: &mut Child,
    stop: Option<&Stop>,
    failed: &dyn Fn(std::io::Error) -> Failure,
) -> Result<ExitStatus, Failure> {
    loop {
        if let Some(status) = child.try_wait().map_err(failed)? {
            return Ok(status);
        }
        if let Some(Err(failure)) = stop.map(Stop::check) {
            // Fails only if it has ended meanwhile, which is as well.
            let _ = child.kill();
            let _ = child.wait();
            return Err(failure);
        }
        std::thread::sleep(POLL);
    }
}

/// What a program prints, as far as it can be read.
fn read(from: Option<&mut impl Read>) -> String {
    let mut bytes = Vec::new();
    let _ = from.map(|from| from.read_to_end(&mut bytes));
    String::from_utf8_lossy(&bytes).into_owned()
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
    fn what_is_printed_comes_whole() {
        let mut print = command("sh");
        print.args(["-c", "head -c 1000000 /dev/zero >&2; head -c 1000000 /dev/zero"]);
        let stop = Stop::listen(Duration::from_secs(600)).unwrap();
        assert_eq!(output_until(&mut print, Some(&stop)).unwrap().len(), 1_000_000);
        let stop = Stop::listen(Duration::from_millis(50)).unwrap();
        let outcome = output_until(command("sleep").arg("60"), Some(&stop));
        assert!(matches!(outcome, Err(Failure::TooLong { .. })), "{outcome:?}");
    }

    #[test]
    fn a_failure_is_told_in_the_words_of_the_program() {
        let error = output(command("cp").arg("--no-such-option")).unwrap_err().to_string();
        assert!(error.contains("no-such-option"), "{error}");
        assert!(output(&mut command("no such program")).is_err());
        let error = output_until(command("cp").arg("--no-such-option"), None).unwrap_err();
        assert!(error.to_string().contains("no-such-option"), "{error}");
    }
}
