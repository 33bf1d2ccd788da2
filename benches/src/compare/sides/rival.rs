//! A server that is not ours, as a process.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use slackwater_benches::wire::Session;

use crate::failure::Failure;
use crate::load::Target;
use crate::stop::Stop;

/// Longest time from the start of a program until it serves.
const START_TIME_MAX: Duration = Duration::from_secs(30);

/// Of what a program said before it ended: enough to hold the reason.
const LINES_TOLD_MAX: usize = 8;

/// How often a starting program is looked at.
const POLL: Duration = Duration::from_millis(50);

/// A running program; killed when dropped, as nobody needs its data any more.
#[derive(Debug)]
pub(super) struct RunningRival {
    child: Child,
    program: PathBuf,
    log: PathBuf,
    /// What it needs, if that was started for it; ended after it.
    _helper: Option<Box<RunningRival>>,
}

impl RunningRival {
    /// Starts a program that writes its log to the file.
    pub(super) fn start(
        mut command: Command,
        log: &Path,
        helper: Option<Self>,
    ) -> Result<Self, Failure> {
        let program = PathBuf::from(command.get_program());
        let file = File::create(log).map_err(Failure::at("create", log))?;
        let errors = file.try_clone().map_err(Failure::at("write", log))?;
        command.stdout(Stdio::from(file)).stderr(errors);
        let child = command.spawn().map_err(Failure::at("run", &program))?;
        Ok(Self { child, program, log: log.to_owned(), _helper: helper.map(Box::new) })
    }

    /// The process.
    pub(super) fn process(&self) -> u32 {
        self.child.id()
    }

    /// What it has told so far.
    pub(super) fn told(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Waits until its export can be mounted.
    pub(super) fn wait_for_export(&mut self, target: &Target, stop: &Stop) -> Result<(), Failure> {
        self.wait(stop, |_| Session::mount(target.mount, &target.export).ok().map(|_| ()))
    }

    /// Waits until there is something, as long as the program runs.
    pub(super) fn wait<T>(
        &mut self,
        stop: &Stop,
        look: impl Fn(&Self) -> Option<T>,
    ) -> Result<T, Failure> {
        let start = Instant::now();
        loop {
            if let Some(found) = look(self) {
                return Ok(found);
            }
            stop.check()?;
            let has_ended = self.child.try_wait().map_err(Failure::on("wait for a server"))?;
            if has_ended.is_some() || start.elapsed() > START_TIME_MAX {
                let told = self.told();
                let lines: Vec<_> = told.trim().lines().collect();
                let last = lines[lines.len().saturating_sub(LINES_TOLD_MAX)..].join("\n");
                let program = self.program.display();
                return Err(Failure::Unfit(format!("{program} does not serve: {last}")));
            }
            std::thread::sleep(POLL);
        }
    }
}

impl Drop for RunningRival {
    fn drop(&mut self) {
        // Both fail when it has ended already, which is as well.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
