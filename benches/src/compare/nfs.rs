//! The experiments over NFS: the same load on ours and on the rivals, by turns.

use std::time::Duration;

use crate::failure::Failure;
use crate::load::names::{NameLoad, NameWork};
use crate::load::{self, Amount, CommitPace, Load, Work};
use crate::row::{Row, Target};
use crate::stop::Stop;

use super::context::{Context, Experiment};
use super::series::{Line, Series, Unit};
use super::sides::{Rival, Sides};

/// All of them, in the order in which they are run.
pub(super) const EXPERIMENTS: [Experiment; 7] = [
    Experiment {
        key: "random-read-cached",
        title: "4 KiB random reads of what is in memory, and what they cost the server",
        run: random_read_cached,
    },
    Experiment {
        key: "sequential-read-cached",
        title: "1 MiB sequential reads of what is in memory",
        run: sequential_read_cached,
    },
    Experiment {
        key: "sequential-read-cold",
        title: "1 MiB sequential reads from the disk",
        run: sequential_read_cold,
    },
    Experiment {
        key: "sequential-write",
        title: "1 MiB sequential writes of new data, and of the same again",
        run: sequential_write,
    },
    Experiment {
        key: "random-write",
        title: "4 KiB random writes with one COMMIT a second",
        run: random_write,
    },
    Experiment {
        key: "write-commit",
        title: "4 KiB random writes with a COMMIT each, of 1 and 32 writers",
        run: write_commit,
    },
    Experiment {
        key: "names",
        title: "files of one directory: made, listed with attributes, removed",
        run: names,
    },
];

/// Names in one directory: a big one.
const NAMES: u32 = 10_000;

/// Files of new data, and of the same a second time.
const NEW: &str = "new";
const AGAIN: &str = "again";

/// The file that is there before the turns.
const FILE: &str = "data";

/// Its seed. Those of rounds follow.
const SEED: u64 = 1;

const SMALL_BYTES: usize = 4 << 10;
const LARGE_BYTES: usize = 1 << 20;

/// Calls of 4 KiB that a connection has under way: the queue of a busy loop device.
const SMALL_DEPTH: usize = 16;

/// Calls of 1 MiB that a connection has under way: the read-ahead of a Linux client.
const LARGE_DEPTH: usize = 8;

/// Writers that sync each write at the same time, all into one file: no rival is slower so than
/// with a file for each.
const WRITERS: usize = 32;

impl Context {
    /// How long a turn takes whose amount is a time.
    fn turn_time(&self) -> Duration {
        Duration::from_secs(if self.is_quick { 1 } else { 2 })
    }

    /// What fits into everybody's memory.
    fn cached_bytes(&self) -> u64 {
        if self.is_quick { 64 << 20 } else { 256 << 20 }
    }

    /// What one turn moves to or from the disk.
    fn streamed_bytes(&self) -> u64 {
        if self.is_quick { 256 << 20 } else { 1 << 30 }
    }

    /// Names that are made, listed and removed.
    fn names(&self) -> u32 {
        if self.is_quick { NAMES / 5 } else { NAMES }
    }

    /// The seeds of all rounds: none comes twice.
    fn seeds(&self) -> impl Iterator<Item = u64> {
        (SEED + 1..).take(self.rounds)
    }
}

/// One pass of 1 MiB calls over a file.
fn pass(work: Work, span_bytes: u64, seed: u64, file: &str) -> Load {
    Load {
        work,
        block_bytes: LARGE_BYTES,
        depth: LARGE_DEPTH,
        connections: 1,
        span_bytes,
        amount: Amount::Bytes(span_bytes),
        commit: CommitPace::AtEnd,
        seed,
        file: file.to_owned(),
        is_verified: false,
    }
}

/// Random 4 KiB calls on one connection, for the time of a turn.
fn random(work: Work, context: &Context) -> Load {
    Load {
        work,
        block_bytes: SMALL_BYTES,
        depth: SMALL_DEPTH,
        connections: 1,
        span_bytes: context.cached_bytes(),
        amount: Amount::Time(context.turn_time()),
        commit: CommitPace::AtEnd,
        seed: SEED,
        file: FILE.to_owned(),
        is_verified: false,
    }
}

/// The servers, each with the file of that size.
fn prepared(context: &Context, span_bytes: u64, stop: &Stop) -> Result<Sides, Failure> {
    let mut sides = Sides::start(context, stop)?;
    sides.each(stop, |side| {
        side.run(&pass(Work::SequentialWrite, span_bytes, SEED, FILE), stop).map(|_| ())
    })?;
    Ok(sides)
}

/// As [`prepared`], and each has read the file once.
fn warmed(context: &Context, stop: &Stop) -> Result<Sides, Failure> {
    let span_bytes = context.cached_bytes();
    let mut sides = prepared(context, span_bytes, stop)?;
    sides.each(stop, |side| {
        side.run(&pass(Work::SequentialRead, span_bytes, SEED, FILE), stop).map(|_| ())
    })?;
    Ok(sides)
}

fn random_read_cached(context: &Context, stop: &Stop) -> Result<Vec<Row>, Failure> {
    let line = |key, work, unit, target| Series::new(Line { key, work, unit, target }, &Rival::ALL);
    let mut one = line(
        "random-read-cached-1",
        "4 KiB random read, cached, depth 16, 1 connection",
        Unit::OperationsPerSecond,
        Target::RatioAtLeast(2.0),
    );
    let mut four = line(
        "random-read-cached-4",
        "4 KiB random read, cached, depth 16, 4 connections",
        Unit::OperationsPerSecond,
        Target::RatioAtLeast(2.0),
    );
    let mut processor = line(
        "random-read-cached-processor",
        "processor time of the server per cached 4 KiB read",
        Unit::MicrosecondsPerOperation,
        Target::MedianAtMost(12.0),
    );
    let mut sides = warmed(context, stop)?;
    for seed in context.seeds() {
        let load = Load { seed, ..random(Work::RandomRead, context) };
        sides.each(stop, |side| {
            let turn = side.run(&load, stop)?;
            one.push(side, &turn);
            processor.push(side, &turn);
            Ok(())
        })?;
        four.round(&mut sides, &Load { connections: 4, ..load }, stop)?;
    }
    let not_run = &sides.not_run;
    Ok([one.rows(not_run), four.rows(not_run), processor.rows(not_run)].concat())
}

fn sequential_read_cached(context: &Context, stop: &Stop) -> Result<Vec<Row>, Failure> {
    let line = Line {
        key: "sequential-read-cached",
        work: "1 MiB sequential read, cached, depth 8",
        unit: Unit::MebibytesPerSecond,
        target: Target::RatioAtLeast(1.0),
    };
    let mut series = Series::new(line, &Rival::ALL);
    let mut sides = warmed(context, stop)?;
    let read = pass(Work::SequentialRead, context.cached_bytes(), SEED, FILE);
    let read = Load { amount: Amount::Time(context.turn_time()), ..read };
    for _ in context.seeds() {
        series.round(&mut sides, &read, stop)?;
    }
    Ok(series.rows(&sides.not_run))
}

fn sequential_read_cold(context: &Context, stop: &Stop) -> Result<Vec<Row>, Failure> {
    let line = Line {
        key: "sequential-read-cold",
        work: "1 MiB sequential read, page cache cold, depth 8",
        unit: Unit::MebibytesPerSecond,
        target: Target::RatioAtLeast(0.9),
    };
    let mut series = Series::new(line, &Rival::ALL);
    let span_bytes = context.streamed_bytes();
    let mut sides = prepared(context, span_bytes, stop)?;
    let read = pass(Work::SequentialRead, span_bytes, SEED, FILE);
    for _ in context.seeds() {
        sides.each(stop, |side| {
            let turn = side.run_cold(context, &read, stop)?;
            series.push(side, &turn);
            Ok(())
        })?;
    }
    Ok(series.rows(&sides.not_run))
}

fn sequential_write(context: &Context, stop: &Stop) -> Result<Vec<Row>, Failure> {
    let line = |key, work, least| {
        let (unit, target) = (Unit::MebibytesPerSecond, Target::RatioAtLeast(least));
        Series::new(Line { key, work, unit, target }, &Rival::ALL)
    };
    let mut new = line(
        "sequential-write-new",
        "1 MiB sequential write of new random data, COMMIT included, depth 8",
        0.6,
    );
    let mut again = line(
        "sequential-write-again",
        "1 MiB sequential write of the same data again, COMMIT included, depth 8",
        1.0,
    );
    let mut sides = Sides::start(context, stop)?;
    let span_bytes = context.streamed_bytes();
    let write =
        |seed, kind| pass(Work::SequentialWrite, span_bytes, seed, &format!("{kind}-{seed}"));
    // Not counted: blocks that a virtual disk has never held are several times as slow as those
    // of a removed file, and each turn that counts begins with as much of these.
    for kind in [NEW, AGAIN] {
        let write = write(SEED, kind);
        sides.each(stop, |side| side.run(&write, stop).map(|_| ()))?;
    }
    for seed in context.seeds() {
        for (series, kind) in [(&mut new, NEW), (&mut again, AGAIN)] {
            let before = format!("{kind}-{}", seed - 1);
            sides.each(stop, |side| load::remove(&side.target, &before))?;
            series.round(&mut sides, &write(seed, kind), stop)?;
        }
    }
    Ok([new.rows(&sides.not_run), again.rows(&sides.not_run)].concat())
}

fn random_write(context: &Context, stop: &Stop) -> Result<Vec<Row>, Failure> {
    let line = Line {
        key: "random-write",
        work: "4 KiB random write, one COMMIT a second, depth 16",
        unit: Unit::OperationsPerSecond,
        target: Target::RatioAtLeast(1.5),
    };
    let mut series = Series::new(line, &Rival::ALL);
    let mut sides = prepared(context, context.cached_bytes(), stop)?;
    for seed in context.seeds() {
        let commit = CommitPace::EverySecond;
        let write = Load { commit, seed, ..random(Work::RandomWrite, context) };
        series.round(&mut sides, &write, stop)?;
    }
    Ok(series.rows(&sides.not_run))
}

fn write_commit(context: &Context, stop: &Stop) -> Result<Vec<Row>, Failure> {
    let line = |key, work, least| {
        let (unit, target) = (Unit::OperationsPerSecond, Target::RatioAtLeast(least));
        Series::new(Line { key, work, unit, target }, &Rival::ALL)
    };
    let mut one = line("write-commit-1", "4 KiB write and COMMIT each, 1 writer", 1.0);
    let mut many = line("write-commit-32", "4 KiB write and COMMIT each, 32 writers", 2.0);
    let mut sides = prepared(context, context.cached_bytes(), stop)?;
    for seed in context.seeds() {
        let commit = CommitPace::EachWrite;
        let write = Load { commit, depth: 1, seed, ..random(Work::RandomWrite, context) };
        one.round(&mut sides, &write, stop)?;
        // Other bytes than those that one writer wrote.
        let seed = seed << 32;
        many.round(&mut sides, &Load { connections: WRITERS, seed, ..write }, stop)?;
    }
    Ok([one.rows(&sides.not_run), many.rows(&sides.not_run)].concat())
}

fn names(context: &Context, stop: &Stop) -> Result<Vec<Row>, Failure> {
    let line = |key, work| {
        let (unit, target) = (Unit::OperationsPerSecond, Target::RatioAtLeast(1.0));
        Series::new(Line { key, work, unit, target }, &Rival::ALL)
    };
    // By how many calls are under way: those of one program, and of many.
    let mut create = [
        line("names-create-1", "CREATE in one directory, one call at a time"),
        line("names-create-16", "CREATE in one directory, 16 calls at a time"),
    ];
    let mut remove = [
        line("names-remove-1", "REMOVE in one directory, one call at a time"),
        line("names-remove-16", "REMOVE in one directory, 16 calls at a time"),
    ];
    let mut list = line("names-list", "READDIRPLUS of one directory, pages of 32 KiB");
    let mut sides = Sides::start(context, stop)?;
    for _ in context.seeds() {
        for (index, depth) in [1, SMALL_DEPTH].into_iter().enumerate() {
            let load = |work| NameLoad {
                work,
                directory: "names".to_owned(),
                count: context.names(),
                depth,
            };
            for (series, work) in [
                (&mut create[index], NameWork::Create),
                (&mut list, NameWork::List),
                (&mut remove[index], NameWork::Remove),
            ] {
                sides.each(stop, |side| {
                    let turn = side.run_names(&load(work), stop)?;
                    series.push(side, &turn);
                    Ok(())
                })?;
            }
        }
    }
    let all = create.iter().chain(&remove).chain([&list]);
    Ok(all.flat_map(|series| series.rows(&sides.not_run)).collect())
}
