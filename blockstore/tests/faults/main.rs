//! Every fault at every call: one workload of all operations, and for each n the same run with the
//! n-th call to disk or index cut off, refused or torn. What was acknowledged is there (I8), `check`
//! finds nothing, and the store goes on.
//!
//! `SLACKWATER_FAULT_SEEDS=1..500` runs that many workloads of each kind of fault instead of a
//! few, and reads fail at every n, not at some. A failure prints its case;
//! `SLACKWATER_FAULT_CASE=KIND:SEED:N` runs that one alone.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

#[path = "../common/mod.rs"]
mod common;
mod workload;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use common::{assert_sound, options, path};
use slackwater_blockstore::disk::{Fault, MemoryDisk};
use slackwater_blockstore::kv::{KvFault, MemoryKv};
use slackwater_blockstore::{Error, ErrorKind, Store};
use workload::{Around, Model, Random, step};

/// Operations of a workload; fewer once it goes on after a crash.
const STEPS: u64 = 60;
const STEPS_AFTER: u64 = 12;

/// Several times what a workload takes.
const CAPACITY_BYTES: u64 = 16 << 20;

/// Reads are many: without the variable only about so many of a workload fail, those chosen by
/// the seed.
const READ_FAULTS: u64 = 60;

/// Changes of a recovery that a second power cut may strike.
const RECOVERY_CHANGES: u64 = 6;

/// What fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    PowerCut,
    Change,
    ShortWrite,
    NoSpace,
    Full,
    DiskRead,
    Apply,
    IndexNoSpace,
    Flush,
    Compact,
    KvRead,
}

impl Kind {
    const ALL: [(Self, &'static str); 11] = [
        (Self::PowerCut, "power-cut"),
        (Self::Change, "change"),
        (Self::ShortWrite, "short-write"),
        (Self::NoSpace, "no-space"),
        (Self::Full, "full"),
        (Self::DiskRead, "disk-read"),
        (Self::Apply, "apply"),
        (Self::IndexNoSpace, "index-no-space"),
        (Self::Flush, "flush"),
        (Self::Compact, "compact"),
        (Self::KvRead, "index-read"),
    ];

    fn name(self) -> &'static str {
        Self::ALL.iter().find(|(kind, _)| *kind == self).unwrap().1
    }

    fn inject(self, world: &World, nth: u64) {
        match self {
            Self::PowerCut => world.disk.inject(Fault::PowerCut(nth)),
            Self::Change => world.disk.inject(Fault::Change(nth)),
            Self::ShortWrite => world.disk.inject(Fault::ShortWrite(nth)),
            Self::NoSpace => world.disk.inject(Fault::NoSpace(nth)),
            Self::Full => world.disk.inject(Fault::Full(nth)),
            Self::DiskRead => world.disk.inject(Fault::Read(nth)),
            Self::Apply => world.kv.inject(KvFault::Apply(nth)),
            Self::IndexNoSpace => world.kv.inject(KvFault::NoSpace(nth)),
            Self::Flush => world.kv.inject(KvFault::Flush(nth)),
            Self::Compact => world.kv.inject(KvFault::Compact(nth)),
            Self::KvRead => world.kv.inject(KvFault::Read(nth)),
        }
    }
}

/// One run.
#[derive(Clone, Copy)]
struct Case {
    kind: Kind,
    seed: u64,
    nth: u64,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.kind.name(), self.seed, self.nth)
    }
}

/// Says on standard error which case it was that panicked.
struct Told(Case);

impl Drop for Told {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("to see it again: SLACKWATER_FAULT_CASE={}", self.0);
        }
    }
}

/// What lies below a store.
#[derive(Default)]
struct World {
    kv: Arc<MemoryKv>,
    disk: MemoryDisk,
}

impl World {
    fn open(&self) -> Result<Arc<Store>, Error> {
        let mut options = options();
        // The reserve follows from it.
        options.capacity_bytes = Some(CAPACITY_BYTES);
        let (kv, disk) = (Arc::clone(&self.kv), Arc::new(self.disk.clone()));
        Store::open_with(kv, disk, options)
    }

    /// What a crash leaves: all that was not synced, nothing of it, or each sector by chance; of the
    /// index what it had flushed, or had begun to flush by itself.
    fn crash(&self, random: &mut Random) -> Self {
        let mode = random.below(4);
        let flushed = random.below(u64::try_from(self.kv.unflushed()).unwrap() + 1);
        let kv = self.kv.crash_behind(usize::try_from(flushed).unwrap());
        let disk = self.disk.crash(|| match mode {
            0 => true,
            1 => false,
            _ => random.below(2) == 0,
        });
        Self { kv: Arc::new(kv), disk }
    }

    /// Opens what a crash left; half of the time after another crash in the middle of that.
    fn recover(self, random: &mut Random) -> (Self, Arc<Store>) {
        let mut world = self;
        if random.below(2) == 0 {
            world.disk.inject(Fault::PowerCut(random.below(RECOVERY_CHANGES)));
            drop(world.open());
            world = world.crash(random);
        }
        let store = world.open().unwrap_or_else(|error| panic!("after a crash: {error}"));
        (world, store)
    }
}

/// Whether an operation may answer this when the fault strikes it.
fn is_expected(kind: Kind, error: ErrorKind) -> bool {
    match kind {
        Kind::PowerCut | Kind::Change | Kind::Apply => {
            matches!(error, ErrorKind::Io | ErrorKind::Poisoned)
        }
        Kind::NoSpace | Kind::Full | Kind::IndexNoSpace => error == ErrorKind::NoSpace,
        Kind::ShortWrite | Kind::DiskRead | Kind::Flush | Kind::Compact | Kind::KvRead => {
            error == ErrorKind::Io
        }
    }
}

/// A store at work, and what it must hold.
struct Run {
    case: Case,
    world: World,
    store: Arc<Store>,
    model: Model,
    random: Random,
    /// How the world ends is told by other numbers than what is done in it.
    fate: Random,
}

impl Run {
    /// Works until the fault has struck and its consequences are seen, and to the end of the
    /// workload; answers whether it struck.
    fn work(&mut self) -> bool {
        let mut has_struck = false;
        for _ in 0..STEPS {
            let (after, outcome) = step(&self.store, &self.model, &mut self.random);
            let Err(error) = outcome else {
                self.model = after;
                continue;
            };
            assert!(!has_struck, "the fault is over, yet: {error}");
            assert!(is_expected(self.case.kind, error.kind()), "{error}");
            has_struck = true;
            let around = Around { before: std::mem::take(&mut self.model), after };
            self.go_on_after(&around);
        }
        // Some faults harm nobody: zeros that are written ahead of the log, say.
        has_struck || !(self.world.disk.disarm() | self.world.kv.disarm())
    }

    fn go_on_after(&mut self, around: &Around) {
        if self.case.kind == Kind::PowerCut || self.store.healthy().is_err() {
            self.crash(around);
            return;
        }
        self.model = around.after_failure(&self.store);
        if self.case.kind == Kind::Full {
            self.work_while_full();
        }
        self.store.commit_all().unwrap();
        self.model.adopt(&self.store);
        assert_sound(&self.store);
    }

    fn crash(&mut self, around: &Around) {
        let (world, store) = self.world.crash(&mut self.fate).recover(&mut self.fate);
        (self.world, self.store) = (world, store);
        self.model = around.after_crash(&self.store);
        assert_sound(&self.store);
    }

    /// The disk has no byte left: whatever gives bytes back works all the same.
    fn work_while_full(&mut self) {
        for _ in 0..STEPS_AFTER {
            let (after, outcome) = step(&self.store, &self.model, &mut self.random);
            match outcome {
                Ok(()) => self.model = after,
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
                    let around = Around { before: std::mem::take(&mut self.model), after };
                    self.model = around.after_failure(&self.store);
                }
            }
        }
        if self.fate.below(2) == 0 {
            self.crash(&Around { before: self.model.clone(), after: self.model.clone() });
        }
        self.model.delete_some(&self.store);
        self.store.gc().expect("a garbage collection works on a full disk");
        self.model.expire();
        assert_sound(&self.store);
        self.world.disk.set_capacity(u64::MAX);
    }

    /// The store is as it should be, survives a crash or a stop, and takes more work.
    fn end(mut self) {
        self.model.shows(&self.store).unwrap();
        assert_sound(&self.store);
        if self.fate.below(4) == 0 {
            self.store.close().unwrap();
            self.store = self.world.open().unwrap();
            self.model.shows(&self.store).unwrap();
        } else {
            self.crash(&Around { before: self.model.clone(), after: self.model.clone() });
        }
        for _ in 0..STEPS_AFTER {
            let (after, outcome) = step(&self.store, &self.model, &mut self.random);
            outcome.unwrap();
            self.model = after;
        }
        self.store.create_file(&path("after"), 1).unwrap();
        self.store.remove_path(&path("after")).unwrap();
        self.store.gc().unwrap();
        self.store.commit_all().unwrap();
        assert_sound(&self.store);
    }
}

/// Runs one case; answers whether the fault struck.
fn run(case: Case) -> bool {
    let _told = Told(case);
    let Case { kind, seed, nth } = case;
    let world = World::default();
    let mut fate = Random::new(seed ^ (nth << 24) ^ 0x5eed);
    kind.inject(&world, nth);
    let opened = world.open();
    let is_made = opened.is_ok();
    let (world, store) = match opened {
        Ok(store) => (world, store),
        // A store that was being made is empty, or not there.
        Err(_) => {
            let world = world.crash(&mut fate);
            world.disk.set_capacity(u64::MAX);
            world.recover(&mut fate)
        }
    };
    let random = Random::new(seed);
    let mut run = Run { case, world, store, model: Model::default(), random, fate };
    let has_struck = run.work() || !is_made;
    run.world.disk.set_capacity(u64::MAX);
    run.end();
    has_struck
}

fn seeds(default: Range<u64>) -> Range<u64> {
    let Ok(text) = std::env::var("SLACKWATER_FAULT_SEEDS") else { return default };
    let (from, to) = text.split_once("..").expect("SLACKWATER_FAULT_SEEDS is FROM..TO");
    from.parse().unwrap()..to.parse().unwrap()
}

/// The case that is to be run alone, if it is of this kind.
fn only(kind: Kind) -> Option<Option<Case>> {
    let text = std::env::var("SLACKWATER_FAULT_CASE").ok()?;
    let parts: Vec<&str> = text.split(':').collect();
    let [name, seed, nth] = parts[..] else { panic!("SLACKWATER_FAULT_CASE is KIND:SEED:N") };
    assert!(Kind::ALL.iter().any(|(_, known)| *known == name), "no kind of fault is {name}");
    let case = Case { kind, seed: seed.parse().unwrap(), nth: nth.parse().unwrap() };
    Some((name == kind.name()).then_some(case))
}

/// Strikes at every call of some workloads.
fn at_every_call(kind: Kind, default: Range<u64>) {
    if let Some(only) = only(kind) {
        only.map(run);
        return;
    }
    for seed in seeds(default) {
        let cases = (0..).take_while(|nth| run(Case { kind, seed, nth: *nth })).count();
        assert!(cases > 0, "the fault never struck");
        println!("{}: {cases} cases of workload {seed}", kind.name());
    }
}

#[test]
fn cases_that_failed_once() {
    // A log file that compaction had left, and a check that called it missing; a model that did not
    // know that a garbage collection lets snapshots expire; zeros behind a directory, which a power
    // cut had brought back, and a check that took them for damage.
    for (kind, seed, nth) in
        [(Kind::Change, 700, 104), (Kind::Full, 703, 132), (Kind::PowerCut, 703, 40)]
    {
        run(Case { kind, seed, nth });
    }
}

/// Strikes at some calls, of which there are too many; at every one if the variable asks for it.
fn at_some_calls(kind: Kind, default: Range<u64>) {
    if std::env::var_os("SLACKWATER_FAULT_SEEDS").is_some() || only(kind).is_some() {
        return at_every_call(kind, default);
    }
    let mut cases = 0;
    for seed in default {
        let mut calls = 1;
        while run(Case { kind, seed, nth: calls }) {
            calls *= 2;
        }
        let mut random = Random::new(seed);
        for _ in 0..READ_FAULTS {
            let nth = random.below(calls);
            cases += u64::from(run(Case { kind, seed, nth }));
        }
    }
    assert!(cases > 0, "the fault never struck");
    println!("{}: {cases} cases", kind.name());
}

#[test]
fn the_power_goes_at_any_call() {
    at_every_call(Kind::PowerCut, 1..3);
}

#[test]
fn any_change_of_the_disk_fails() {
    at_every_call(Kind::Change, 1..3);
}

#[test]
fn any_write_is_short() {
    at_every_call(Kind::ShortWrite, 1..3);
}

#[test]
fn any_write_finds_no_space() {
    at_every_call(Kind::NoSpace, 1..3);
}

#[test]
fn the_disk_is_full_from_any_call_on() {
    at_every_call(Kind::Full, 1..3);
}

#[test]
fn any_read_of_the_disk_fails() {
    at_some_calls(Kind::DiskRead, 1..3);
}

#[test]
fn any_batch_is_refused_by_the_index() {
    at_every_call(Kind::Apply, 1..3);
}

#[test]
fn any_change_of_the_index_finds_no_space() {
    at_every_call(Kind::IndexNoSpace, 1..3);
}

#[test]
fn any_flush_of_the_index_fails() {
    at_every_call(Kind::Flush, 1..6);
}

#[test]
fn any_compaction_of_the_index_fails() {
    at_every_call(Kind::Compact, 1..6);
}

#[test]
fn any_read_of_the_index_fails() {
    at_some_calls(Kind::KvRead, 1..3);
}
