//! The servers of one experiment, ours and its rivals, each on a new folder of one file system.
//!
//! ```text
//! sides    who takes turns, and what became of those who could not
//! ganesha  nfs-ganesha, with rpcbind where none runs     stock  nfsserve's own server
//! usage    processor time and disk reads of a process
//! ```

mod ganesha;
mod rival;
mod stock;
mod usage;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::failure::Failure;
use crate::growth::host::Host;
use crate::load::names::NameLoad;
use crate::load::{self, Load, Measured, Target};
use crate::stop::Stop;

use super::context::Context;
use super::progress;
use rival::RunningRival;
use usage::Usage;

pub(crate) use stock::serve_directory;

/// Longest wait for the servers to do nothing.
const SETTLE_TIME_MAX: Duration = Duration::from_secs(10);

/// How long they must do nothing.
const SETTLE_PAUSE: Duration = Duration::from_millis(100);

/// Processor time in that pause that is nothing.
const SETTLED_TIME: Duration = Duration::from_millis(10);

/// Share of what is read that must come from the disk for a page cache to have been cold.
const COLD_SHARE: f64 = 0.9;

/// A rival.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rival {
    /// nfs-ganesha on a folder.
    Ganesha,
    /// The server of the crate nfsserve on a folder.
    Stock,
}

impl Rival {
    pub(super) const ALL: [Self; 2] = [Self::Ganesha, Self::Stock];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Ganesha => "nfs-ganesha",
            Self::Stock => "nfsserve",
        }
    }
}

/// One server and its folder.
#[derive(Debug)]
pub(super) struct Side {
    /// `None`: ours.
    pub(super) rival: Option<Rival>,
    pub(super) target: Target,
    // Ended before the folder is removed.
    server: Server,
    folder: TempDir,
}

#[derive(Debug)]
enum Server {
    Ours(Host),
    Rival(RunningRival),
    /// Between two lives of ours.
    Stopped,
}

/// The servers of one experiment.
#[derive(Debug)]
pub(super) struct Sides {
    /// Ours is the first.
    sides: Vec<Side>,
    /// The rivals that were asked for and could not be run, and why.
    pub(super) not_run: Vec<(Rival, String)>,
}

/// What was measured of a side in one turn.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turn {
    pub(super) measured: Measured,
    /// Of the server, meanwhile.
    pub(super) processor_time: Duration,
}

impl Sides {
    /// Starts ours and all rivals.
    pub(super) fn start(context: &Context, stop: &Stop) -> Result<Self, Failure> {
        let ours = folder(context)?;
        let host = Host::start(context, &data_folder(ours.path()), stop)?;
        let (target, server) = (host.target(), Server::Ours(host));
        let ours = Side { rival: None, target, server, folder: ours };
        let mut all = Self { sides: vec![ours], not_run: Vec::new() };
        for rival in Rival::ALL {
            let folder = folder(context)?;
            let started = match rival {
                Rival::Ganesha => ganesha::start(folder.path(), stop),
                Rival::Stock => stock::start(folder.path(), stop),
            };
            let outcome = started.map(|(target, server)| {
                let server = Server::Rival(server);
                all.sides.push(Side { rival: Some(rival), target, server, folder });
            });
            all.note(rival, outcome)?;
        }
        Ok(all)
    }

    /// Does something on each side in turn, when all have come to rest. A rival that fails
    /// takes no further turns; where ours fails, all has.
    pub(super) fn each(
        &mut self,
        stop: &Stop,
        mut act: impl FnMut(&mut Side) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let mut index = 0;
        while index < self.sides.len() {
            self.settle(stop)?;
            let side = &mut self.sides[index];
            match (act(side), side.rival) {
                (Err(failure), Some(rival)) => {
                    self.sides.remove(index);
                    self.note(rival, Err(failure))?;
                }
                (outcome, _) => {
                    outcome?;
                    index += 1;
                }
            }
        }
        Ok(())
    }

    /// Keeps why a rival was not run; an error if all must end.
    fn note(&mut self, rival: Rival, outcome: Result<(), Failure>) -> Result<(), Failure> {
        match outcome {
            Err(failure) if !failure.is_stop() => self.not_run.push((rival, failure.to_string())),
            other => other?,
        }
        Ok(())
    }

    /// Waits until no server works any more on what it was given before, so that it takes no
    /// time from the next. What never rests is measured all the same.
    fn settle(&self, stop: &Stop) -> Result<(), Failure> {
        if let Some(ours) = self.sides.first() {
            ours.sync()?;
        }
        let start = Instant::now();
        let mut before = self.processor_time()?;
        while start.elapsed() < SETTLE_TIME_MAX {
            stop.check()?;
            std::thread::sleep(SETTLE_PAUSE);
            let after = self.processor_time()?;
            if after.saturating_sub(before) <= SETTLED_TIME {
                return Ok(());
            }
            before = after;
        }
        Ok(())
    }

    /// Of all servers together.
    fn processor_time(&self) -> Result<Duration, Failure> {
        self.sides.iter().map(|side| Ok(side.usage()?.processor_time)).sum()
    }
}

impl Side {
    /// The name of the server.
    pub(super) fn name(&self) -> &'static str {
        self.rival.map_or("slackwater", Rival::name)
    }

    /// Puts a load on the server.
    pub(super) fn run(&self, load: &Load, stop: &Stop) -> Result<Turn, Failure> {
        self.measure(|target| load::run(target, load, stop))
    }

    /// As [`Side::run`], of names.
    pub(super) fn run_names(&self, load: &NameLoad, stop: &Stop) -> Result<Turn, Failure> {
        self.measure(|target| load::names::run(target, load, stop))
    }

    fn measure(
        &self,
        load: impl FnOnce(&Target) -> Result<Measured, Failure>,
    ) -> Result<Turn, Failure> {
        let before = self.usage()?.processor_time;
        let measured = load(&self.target)?;
        let processor_time = self.usage()?.processor_time.saturating_sub(before);
        progress(&format!("{:12} {measured}", self.name()));
        Ok(Turn { measured, processor_time })
    }

    /// As [`Side::run`], of reads that the disk must answer: nothing of the folder is in the
    /// page cache, and nothing in the server's own.
    pub(super) fn run_cold(
        &mut self,
        context: &Context,
        load: &Load,
        stop: &Stop,
    ) -> Result<Turn, Failure> {
        self.sync()?;
        if self.rival.is_none()
            && let Server::Ours(host) = std::mem::replace(&mut self.server, Server::Stopped)
        {
            host.stop(stop)?;
            evict(self.folder.path())?;
            let host = Host::start(context, &data_folder(self.folder.path()), stop)?;
            self.target = host.target();
            self.server = Server::Ours(host);
        }
        evict(self.folder.path())?;
        let before = self.usage()?.disk_read_bytes;
        let turn = self.run(load, stop)?;
        let disk_bytes = self.usage()?.disk_read_bytes.saturating_sub(before);
        if (disk_bytes as f64) < turn.measured.bytes as f64 * COLD_SHARE {
            let (name, bytes) = (self.name(), turn.measured.bytes);
            let what = format!("{name} read {disk_bytes} of {bytes} bytes from a cold disk");
            return Err(Failure::Unfit(what));
        }
        Ok(turn)
    }

    /// Writes what is dirty of the whole file system, whoever made it so.
    fn sync(&self) -> Result<(), Failure> {
        let folder = self.folder.path();
        let failed = || Failure::at("sync", folder);
        let opened = std::fs::File::open(folder).map_err(failed())?;
        rustix::fs::syncfs(opened).map_err(|error| failed()(error.into()))
    }

    fn usage(&self) -> Result<Usage, Failure> {
        match &self.server {
            Server::Ours(host) => Usage::of(host.process()),
            Server::Rival(rival) => Usage::of(rival.process()),
            Server::Stopped => Err(Failure::Unfit("the server was not started again".to_owned())),
        }
    }
}

/// A temporary folder on the file system that is measured.
fn folder(context: &Context) -> Result<TempDir, Failure> {
    let directory: &Path = &context.directory;
    tempfile::tempdir_in(directory).map_err(Failure::at("make a folder in", directory))
}

/// Where our server keeps its data within its folder.
fn data_folder(folder: &Path) -> PathBuf {
    folder.join("data")
}

/// Drops all that the page cache has of the files in a folder.
fn evict(folder: &Path) -> Result<(), Failure> {
    for entry in std::fs::read_dir(folder).map_err(Failure::at("list", folder))? {
        let path = entry.map_err(Failure::at("list", folder))?.path();
        let kind = path.symlink_metadata().map_err(Failure::at("look at", &path))?;
        if kind.is_dir() {
            evict(&path)?;
        } else if kind.is_file() {
            let file = std::fs::File::open(&path).map_err(Failure::at("open", &path))?;
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)
                .map_err(|error| Failure::at("evict", &path)(error.into()))?;
        }
    }
    Ok(())
}
