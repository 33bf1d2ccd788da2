//! The soak `load`: hundreds of clients, thousands of files and snapshots, and beside them
//! clients that must not hurt.
//!
//! ```text
//! fill -> load: clients act, hostile ones do their worst, a guest knocks every second,
//!               memory and descriptors are watched -> hostile ones leave -> check
//!      -> clean end -> new server: everything compared
//! ```

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::Serialize;
use slackwater_client::RetryPolicy;

use super::arguments::LoadArguments;
use super::chance::{self, Chance};
use super::hostile::{self, Done, Figures, Scene};
use super::target::{Running, Target};
use super::verdict;
use super::worker::{Counts, Life, REST_LIMIT, Scale, Worker};
use crate::appliance;
use crate::failure::Failure;
use crate::stop::Stop;

/// Beyond the load itself: making ten thousand files and snapshots, and comparing them.
const REST_OF_TIME_MAX: Duration = Duration::from_secs(3600);

/// Between two looks at the server.
const LOOK: Duration = Duration::from_secs(1);

/// A guest that gets no answer in this time is kept out.
const KNOCK_LIMIT: Duration = Duration::from_secs(30);

/// Connections of the server beyond those of the clients: for guests, while mounts are made.
const SPARE_CONNECTIONS: usize = 24;

/// Files that the server may have open after the load beyond those before it: segments and
/// tables come and go.
const DESCRIPTORS_SPARE: usize = 64;

/// How long the server has to let go of connections that were closed.
const CLOSE_LIMIT: Duration = Duration::from_secs(30);

/// What was seen of the server.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Watched {
    resident_mebibytes_max: u64,
    descriptors_before: usize,
    descriptors_max: usize,
    descriptors_after: usize,
    knocks: u64,
    knock_milliseconds_max: u64,
}

/// What the soak found.
#[derive(Debug, Serialize)]
struct Report {
    soak: &'static str,
    seed: u64,
    connections: usize,
    files: u64,
    snapshots: u64,
    seconds: u64,
    memory_mebibytes: u64,
    #[serde(flatten)]
    watched: Watched,
    hostile: Figures,
    did: Counts,
    check_problems: Vec<String>,
    losses: Vec<String>,
}

/// Runs the soak; answers whether nothing was lost and nobody kept out.
pub(super) fn run(arguments: &LoadArguments) -> Result<bool, Failure> {
    let stop = Stop::listen(Duration::from_secs(arguments.seconds) + REST_OF_TIME_MAX)?;
    let seed = arguments.seed.unwrap_or_else(chance::any_seed);
    verdict::progress(&format!("load: {} clients, seed {seed}", arguments.connections));
    raise_descriptors()?;
    let folder = verdict::folder(arguments.directory.as_deref())?;
    let mut soak = Soak::new(arguments, seed, folder.path(), &stop)?;
    let outcome = soak.run();
    let report = soak.report();
    let is_sound = report.losses.is_empty() && report.check_problems.is_empty();
    verdict::conclude(folder, outcome, is_sound, &report, arguments.json.as_deref())
}

struct Soak<'a> {
    arguments: &'a LoadArguments,
    stop: &'a Stop,
    seed: u64,
    target: Target,
    workers: Vec<Worker>,
    watched: Watched,
    hostile: Done,
    check_problems: Vec<String>,
    losses: Vec<String>,
}

impl<'a> Soak<'a> {
    fn new(
        arguments: &'a LoadArguments,
        seed: u64,
        folder: &Path,
        stop: &'a Stop,
    ) -> Result<Self, Failure> {
        let program: PathBuf = match &arguments.server {
            Some(server) => server.clone(),
            None => appliance::beside()?,
        };
        let memory = format!("{}MiB", arguments.memory_mebibytes);
        let slow = usize::try_from(arguments.slow).unwrap_or(0);
        let places = (arguments.connections + slow + SPARE_CONNECTIONS).to_string();
        let settings =
            ["--squash", "no_root_squash", "--memory", &memory, "--nfs-connections", &places];
        // More clients come at once than one token has paths, and some speak NFS alone.
        let settings = [&settings[..], &["--insecure-address-only", "true"]].concat();
        let mut ports = Chance::new(chance::any_seed());
        let each = usize::try_from(arguments.files).unwrap_or(1).div_ceil(arguments.connections);
        let scale = Scale {
            sessions: 1,
            files_max: each,
            file_blocks_max: 16,
            snapshots_max: each,
            burst_max: 4,
            write_blocks_max: 4,
            // All of them together about as often as one worker of the soak `kill`.
            collect_permille: 2,
            retry: RetryPolicy::patient(),
            is_filled_first: true,
        };
        let workers = (0..arguments.connections).map(|number| Worker::new(number, seed, scale));
        let mut target = Target::new(&program, folder, &settings, REST_LIMIT, &mut ports)?;
        target.by_address = true;
        Ok(Self {
            target,
            workers: workers.collect::<Result<_, _>>()?,
            watched: Watched::default(),
            hostile: Done::default(),
            check_problems: Vec::new(),
            losses: Vec::new(),
            arguments,
            stop,
            seed,
        })
    }

    fn run(&mut self) -> Result<(), Failure> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(Failure::on("start a runtime"))?;
        let mut server = self.target.start()?;
        self.target.wait(&mut server, &runtime, self.stop)?;
        self.load(&mut server)?;
        self.watched.descriptors_after = self.settled_descriptors(&server)?;
        let client = self.target.client(REST_LIMIT, RetryPolicy::never())?;
        self.check_problems = verdict::problems(runtime.block_on(client.check(true))?);
        if let Some(why) = self.target.stop(&mut server, self.stop)? {
            self.losses.push(why);
        }
        verdict::progress("load: comparing everything behind a new server");
        let mut server = self.target.start()?;
        self.target.wait(&mut server, &runtime, self.stop)?;
        self.compare()?;
        self.judge();
        Ok(())
    }

    /// Clients, hostile ones, and guests, all at once.
    fn load(&mut self, server: &mut Running) -> Result<(), Failure> {
        let life = Life::new(&self.target, false, false);
        let is_over = AtomicBool::new(false);
        let (nfs, api) = (self.target.nfs, self.target.api);
        let scene = Scene { nfs, api, is_over: &is_over, done: &self.hostile };
        let all = self.workers.len();
        let (arguments, stop, watched) = (self.arguments, self.stop, &mut self.watched);
        let workers = &mut self.workers;
        let mut outcome = Ok(());
        let losses = std::thread::scope(|scope| {
            let life = &life;
            let threads: Vec<_> =
                workers.iter_mut().map(|worker| scope.spawn(move || worker.live(life))).collect();
            let is_sound = || life.broken.load(Ordering::SeqCst) == 0 && stop.check().is_ok();
            while life.filled.load(Ordering::SeqCst) < all && is_sound() {
                std::thread::sleep(LOOK);
            }
            verdict::progress("load: files and snapshots are made");
            watched.descriptors_before = descriptors(server.process_id());
            let scene = &scene;
            scope.spawn(move || scene.be_silent(arguments.silent));
            for _ in 0..arguments.slow {
                scope.spawn(move || scene.read_slowly());
                scope.spawn(move || scene.send_slowly());
                scope.spawn(move || scene.vanish());
            }
            let begun = Instant::now();
            while begun.elapsed() < Duration::from_secs(arguments.seconds) && is_sound() {
                outcome = watch(watched, server, scene.nfs);
                if outcome.is_err() {
                    break;
                }
                std::thread::sleep(LOOK);
            }
            is_over.store(true, Ordering::SeqCst);
            life.is_over.store(true, Ordering::SeqCst);
            verdict::ends(threads)
        });
        self.losses.extend(losses);
        if let Err(why) = outcome {
            self.losses.push(why);
        }
        self.stop.check()
    }

    /// Every file and every snapshot of every client.
    fn compare(&mut self) -> Result<(), Failure> {
        let life = Life::new(&self.target, true, true);
        let workers = &mut self.workers;
        let losses = std::thread::scope(|scope| {
            let life = &life;
            let threads = workers.iter_mut().map(|worker| scope.spawn(move || worker.live(life)));
            verdict::ends(threads.collect())
        });
        self.losses.extend(losses);
        self.stop.check()
    }

    /// Open files of the server once it has let go of the connections that were closed.
    fn settled_descriptors(&self, server: &Running) -> Result<usize, Failure> {
        let begun = Instant::now();
        loop {
            let open = descriptors(server.process_id());
            let enough = self.watched.descriptors_before + DESCRIPTORS_SPARE;
            if open <= enough || begun.elapsed() > CLOSE_LIMIT {
                return Ok(open);
            }
            self.stop.check()?;
            std::thread::sleep(LOOK);
        }
    }

    /// Holds what was seen against what is promised.
    fn judge(&mut self) {
        let Watched { resident_mebibytes_max, descriptors_before, descriptors_after, .. } =
            self.watched;
        if resident_mebibytes_max > self.arguments.memory_mebibytes {
            let limit = self.arguments.memory_mebibytes;
            self.losses.push(format!("{resident_mebibytes_max} MiB resident of {limit} MiB"));
        }
        if descriptors_after > descriptors_before + DESCRIPTORS_SPARE {
            let what = format!("{descriptors_after} open files, {descriptors_before} before");
            self.losses.push(what);
        }
        let alarms = self.target.alarms();
        self.losses.extend(alarms.into_iter().map(|line| format!("the server's log: {line}")));
    }

    fn report(&self) -> Report {
        let mut did = Counts::default();
        for worker in &self.workers {
            did.add(&worker.counts);
        }
        let count = |count: fn(&Worker) -> usize| {
            self.workers.iter().map(|worker| count(worker) as u64).sum()
        };
        Report {
            soak: "load",
            seed: self.seed,
            connections: self.workers.len(),
            files: count(|worker| worker.files.len()),
            snapshots: count(|worker| worker.snapshots.len()),
            seconds: self.arguments.seconds,
            memory_mebibytes: self.arguments.memory_mebibytes,
            watched: self.watched,
            hostile: self.hostile.figures(),
            did,
            check_problems: self.check_problems.clone(),
            losses: self.losses.clone(),
        }
    }
}

/// Looks at the server, and has a guest knock.
fn watch(watched: &mut Watched, server: &Running, nfs: SocketAddr) -> Result<(), String> {
    let id = server.process_id();
    watched.resident_mebibytes_max = watched.resident_mebibytes_max.max(resident_mebibytes(id));
    watched.descriptors_max = watched.descriptors_max.max(descriptors(id));
    let begun = Instant::now();
    hostile::knock(nfs).map_err(|error| format!("a guest was not served: {error}"))?;
    let took = begun.elapsed();
    watched.knocks += 1;
    let milliseconds = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
    watched.knock_milliseconds_max = watched.knock_milliseconds_max.max(milliseconds);
    if took > KNOCK_LIMIT {
        return Err(format!("a guest was served after {} s only", took.as_secs()));
    }
    Ok(())
}

/// Lets this process hold as many connections as the administrator allows.
fn raise_descriptors() -> Result<(), Failure> {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let failed = |source: Errno| Failure::on("raise the limit of open files")(source.into());
    setrlimit(Resource::Nofile, raised).map_err(failed)
}

/// Open files of a process.
fn descriptors(process: u32) -> usize {
    std::fs::read_dir(format!("/proc/{process}/fd")).map_or(0, Iterator::count)
}

/// Memory of a process.
fn resident_mebibytes(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kibibytes = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse().ok());
    kibibytes.unwrap_or(0_u64).div_ceil(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_seen() {
        let own = std::process::id();
        let before = descriptors(own);
        assert!(before > 2 && resident_mebibytes(own) > 0);
        assert_eq!((descriptors(u32::MAX), resident_mebibytes(u32::MAX)), (0, 0));
    }
}
