//! The soak `kill`: a server that dies at random moments, and clients that find everything there.
//!
//! ```text
//! round: start -> (at times: killed here) -> ready -> all workers compare -> all work -> SIGKILL
//! end:   start -> all workers compare everything -> check -> stopped cleanly -> compared again
//! ```

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serde::Serialize;
use slackwater_client::RetryPolicy;
use tokio::runtime::Runtime;

use super::arguments::KillArguments;
use super::chance::{self, Chance};
use super::target::{Running, Target};
use super::verdict;
use super::worker::{Counts, Life, REST_LIMIT, Scale, Worker};
use crate::appliance;
use crate::failure::Failure;
use crate::stop::Stop;

/// How often the supervisor looks whether the workers are done with comparing.
const POLL: Duration = Duration::from_millis(2);

/// Every so many rounds all snapshots are compared.
const THOROUGH_EVERY: u64 = 10;

/// How often, of a hundred, the server dies while the workers still compare.
const COMPARING_PERCENT: u64 = 10;

/// Rounds between two lines of progress.
const PROGRESS_EVERY: u64 = 10;

/// Beyond all rounds at their longest the soak hangs.
const ROUND_LIMIT: Duration = Duration::from_secs(60);

/// A call that may be sent again is, as by any client of the REST face: the server closes idle
/// connections. So short that no call outlives the server that it was made to.
const RETRY: RetryPolicy = RetryPolicy {
    attempts_max: 3,
    delay_first: Duration::from_millis(20),
    delay_max: Duration::from_millis(50),
};

/// So little for each worker that all of it is compared after each death.
const SCALE: Scale = Scale {
    sessions: 2,
    files_max: 6,
    file_blocks_max: 160,
    snapshots_max: 6,
    burst_max: 8,
    write_blocks_max: 12,
    collect_permille: 1000,
    retry: RETRY,
    is_filled_first: false,
};

/// What a soak found.
#[derive(Debug, Serialize)]
struct Report {
    soak: &'static str,
    seed: u64,
    workers: usize,
    /// Kills in all; those before the server was ready, and those while clients compared.
    kills: u64,
    kills_during_start: u64,
    kills_while_comparing: u64,
    /// Longest time from start to ready.
    ready_milliseconds_max: u64,
    seconds: u64,
    did: Counts,
    /// What the server's own check found in the end; none is right.
    check_problems: Vec<String>,
    /// Promises that were broken; none is right.
    losses: Vec<String>,
}

/// Runs the soak; answers whether nothing was lost.
pub(super) fn run(arguments: &KillArguments) -> Result<bool, Failure> {
    let round = Duration::from_millis(arguments.load_max_ms + arguments.start_max_ms);
    let rounds = u32::try_from(arguments.rounds).unwrap_or(u32::MAX);
    let ready = Duration::from_secs(arguments.ready_limit_seconds);
    let stop = Stop::listen((ROUND_LIMIT + ready + round).saturating_mul(rounds + 2))?;
    let seed = arguments.seed.unwrap_or_else(chance::any_seed);
    verdict::progress(&format!("kill: {} rounds, seed {seed}", arguments.rounds));
    let folder = verdict::folder(arguments.directory.as_deref())?;
    let mut soak = Soak::new(arguments, seed, folder.path(), &stop)?;
    let outcome = soak.run();
    let report = soak.report();
    let is_sound = report.losses.is_empty() && report.check_problems.is_empty();
    verdict::conclude(folder, outcome, is_sound, &report, arguments.json.as_deref())
}

struct Soak<'a> {
    arguments: &'a KillArguments,
    stop: &'a Stop,
    seed: u64,
    chance: Chance,
    target: Target,
    runtime: Runtime,
    workers: Vec<Worker>,
    begun: Instant,
    kills: u64,
    kills_during_start: u64,
    kills_while_comparing: u64,
    ready_max: Duration,
    check_problems: Vec<String>,
    losses: Vec<String>,
}

impl<'a> Soak<'a> {
    fn new(
        arguments: &'a KillArguments,
        seed: u64,
        folder: &Path,
        stop: &'a Stop,
    ) -> Result<Self, Failure> {
        let program: PathBuf = match &arguments.server {
            Some(server) => server.clone(),
            None => appliance::beside()?,
        };
        let mut ports = Chance::new(chance::any_seed());
        let settings = ["--squash", "no_root_squash", "--memory", &arguments.memory];
        let young = ["--dirty-age-seconds", "1"];
        let ready = Duration::from_secs(arguments.ready_limit_seconds);
        let all = [&settings[..], &young].concat();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(Failure::on("start a runtime"))?;
        let mut target = Target::new(&program, folder, &all, ready, &mut ports)?;
        target.token.clone_from(&arguments.token);
        let workers = (0..arguments.workers).map(|number| Worker::new(number, seed, SCALE));
        Ok(Self {
            target,
            workers: workers.collect::<Result<_, _>>()?,
            chance: Chance::new(seed),
            begun: Instant::now(),
            kills: 0,
            kills_during_start: 0,
            kills_while_comparing: 0,
            ready_max: Duration::ZERO,
            check_problems: Vec::new(),
            losses: Vec::new(),
            arguments,
            stop,
            seed,
            runtime,
        })
    }

    fn run(&mut self) -> Result<(), Failure> {
        for round in 1..=self.arguments.rounds {
            self.stop.check()?;
            let mut server = self.target.start()?;
            if self.chance.percent(self.arguments.start_kill_percent) {
                self.kill_starting(&mut server)?;
                server = self.target.start()?;
            }
            self.wait(&mut server)?;
            self.live(&mut server, round.is_multiple_of(THOROUGH_EVERY), false)?;
            if !self.losses.is_empty() {
                return Ok(());
            }
            if round.is_multiple_of(PROGRESS_EVERY) {
                verdict::progress(&format!("{round} rounds, {} kills, nothing lost", self.kills));
            }
        }
        self.finish()
    }

    /// Kills a server that is opening its store.
    fn kill_starting(&mut self, server: &mut Running) -> Result<(), Failure> {
        let wait = self.chance.below(self.arguments.start_max_ms + 1);
        std::thread::sleep(Duration::from_millis(wait));
        server.kill()?;
        self.kills += 1;
        self.kills_during_start += 1;
        Ok(())
    }

    fn wait(&mut self, server: &mut Running) -> Result<(), Failure> {
        let took = self.target.wait(server, &self.runtime, self.stop)?;
        self.ready_max = self.ready_max.max(took);
        Ok(())
    }

    /// One life of the server, from ready to its end.
    fn live(
        &mut self,
        server: &mut Running,
        is_thorough: bool,
        is_last: bool,
    ) -> Result<(), Failure> {
        let life = Life::new(&self.target, is_thorough, is_last);
        let kill_early = !is_last && self.chance.percent(COMPARING_PERCENT);
        let load = Duration::from_millis(self.chance.below(self.arguments.load_max_ms + 1));
        let all = self.workers.len();
        let stop = self.stop;
        let mut outcome = Ok(());
        let losses = std::thread::scope(|scope| {
            let life = &life;
            let workers = self.workers.iter_mut();
            let threads: Vec<_> =
                workers.map(|worker| scope.spawn(move || worker.live(life))).collect();
            let is_busy = || {
                let done = life.verified.load(Ordering::SeqCst);
                done < all && life.broken.load(Ordering::SeqCst) == 0 && stop.check().is_ok()
            };
            if !kill_early {
                while is_busy() {
                    std::thread::sleep(POLL);
                }
            }
            if !is_last {
                let begun = Instant::now();
                while begun.elapsed() < load && life.broken.load(Ordering::SeqCst) == 0 {
                    std::thread::sleep(POLL.min(load.saturating_sub(begun.elapsed())));
                }
                self.kills_while_comparing += u64::from(is_busy());
                life.is_killed.store(true, Ordering::SeqCst);
                outcome = server.kill();
                self.kills += 1;
            }
            verdict::ends(threads)
        });
        self.losses.extend(losses);
        outcome?;
        self.stop.check()
    }

    /// Everything is compared and checked, also after a clean end.
    fn finish(&mut self) -> Result<(), Failure> {
        let mut server = self.target.start()?;
        self.wait(&mut server)?;
        self.live(&mut server, true, true)?;
        let client = self.target.client(REST_LIMIT, RetryPolicy::never())?;
        self.check_problems = verdict::problems(self.runtime.block_on(client.check(true))?);
        if let Some(why) = self.target.stop(&mut server, self.stop)? {
            self.losses.push(why);
        }
        let mut server = self.target.start()?;
        self.wait(&mut server)?;
        self.live(&mut server, true, true)?;
        drop(server);
        let alarms = self.target.alarms();
        self.losses.extend(alarms.into_iter().map(|line| format!("the server's log: {line}")));
        Ok(())
    }

    fn report(&self) -> Report {
        let mut did = Counts::default();
        for worker in &self.workers {
            did.add(&worker.counts);
        }
        Report {
            soak: "kill",
            seed: self.seed,
            workers: self.workers.len(),
            kills: self.kills,
            kills_during_start: self.kills_during_start,
            kills_while_comparing: self.kills_while_comparing,
            ready_milliseconds_max: u64::try_from(self.ready_max.as_millis()).unwrap_or(u64::MAX),
            seconds: self.begun.elapsed().as_secs(),
            did,
            check_problems: self.check_problems.clone(),
            losses: self.losses.clone(),
        }
    }
}
