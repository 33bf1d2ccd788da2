//! How soon a server is ready on a store of ten million chunks: after a clean stop, and after
//! it was killed in the middle of writing.

use std::time::Duration;

use slackwater_blockstore::Store;

use super::fill::{self, Filled};
use super::host::Host;
use super::{folder, row};
use crate::compare::context::Context;
use crate::compare::progress;
use crate::failure::Failure;
use crate::load::{self, Amount, CommitPace, Load, Work};
use crate::row::{Row, Target};
use crate::stop::Stop;

/// Chunks of the store.
const CHUNKS: u64 = 10_000_000;

/// The same for a first look.
const CHUNKS_QUICK: u64 = 1_000_000;

/// Starts of each kind.
const STARTS: u64 = 3;

/// Time until ready after a clean stop.
const CLEAN_SECONDS_MAX: f64 = 3.0;

/// Time until ready after kill -9.
const KILLED_SECONDS_MAX: f64 = 15.0;

/// How long the server is written to before it is killed: it is between two checkpoints then.
const WRITING_TIME: Duration = Duration::from_secs(2);

/// How long the writing would go on.
const WRITING_TIME_MAX: Duration = Duration::from_secs(20);

pub(super) fn run(context: &Context, stop: &Stop) -> Result<Vec<Row>, Failure> {
    let chunks = if context.is_quick { CHUNKS_QUICK } else { CHUNKS };
    progress(&format!("a store of {chunks} chunks"));
    let folder = folder(context)?;
    let data_dir = folder.path().join("data");
    let store = Store::open(fill::options(&data_dir))?;
    Filled::new(&store, chunks)?.grow(&store, chunks, stop)?;
    store.close()?;
    drop(store);
    let of = |key: &str, what: &str, seconds_max: f64| Row {
        target: Some(Target::MedianAtMost(seconds_max)),
        ..row(key, "s", format!("start on {chunks} chunks until ready, {what}"))
    };
    let mut clean = of("start-up-clean", "after a clean stop", CLEAN_SECONDS_MAX);
    let mut killed =
        of("start-up-killed", "after kill -9 in the middle of writing", KILLED_SECONDS_MAX);
    progress("starts");
    for round in 0..STARTS {
        let host = Host::start(context, &data_dir, stop)?;
        clean.samples.push(host.ready_after.as_secs_f64());
        write_and_kill(host, round, stop)?;
        let host = Host::start(context, &data_dir, stop)?;
        killed.samples.push(host.ready_after.as_secs_f64());
        host.stop(stop)?;
    }
    Ok(vec![clean, killed])
}

/// Kills the server while it is being written to.
fn write_and_kill(host: Host, seed: u64, stop: &Stop) -> Result<(), Failure> {
    let load = Load {
        work: Work::SequentialWrite,
        block_bytes: 1 << 20,
        depth: 8,
        connections: 1,
        span_bytes: 16 << 30,
        amount: Amount::Time(WRITING_TIME_MAX),
        commit: CommitPace::EverySecond,
        seed,
        file: format!("written-{seed}.img"),
        is_verified: false,
    };
    let target = host.target();
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| load::run(&target, &load, stop));
        std::thread::sleep(WRITING_TIME);
        let was_writing = !writing.is_finished();
        host.kill();
        let ended = writing.join();
        stop.check()?;
        match ended {
            // It lost its server, as it should.
            Ok(Err(_)) if was_writing => Ok(()),
            _ => Err(Failure::Unfit("the server was not written to when it was killed".to_owned())),
        }
    })
}
