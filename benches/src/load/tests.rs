//! The generator against our front end in this process: what it counts was done, what it says
//! is durable was committed, and it notices what is not as it should be.

use std::net::SocketAddr;
use std::sync::Arc;

use slackwater_blockstore::{Options, Store};
use slackwater_nfs::{NfsMetrics, NfsMetricsSnapshot, NfsOptions, Squash};
use tempfile::TempDir;
use tokio::sync::oneshot;

use super::names::{NameLoad, NameWork};
use super::*;

/// Far longer than any run of these tests.
const TIME_MAX: Duration = Duration::from_secs(120);

/// A server on a store of its own. The fields go in the order in which they must.
struct Served {
    target: Target,
    _shutdown: oneshot::Sender<()>,
    _runtime: tokio::runtime::Runtime,
    metrics: Arc<NfsMetrics>,
    store: Arc<Store>,
    _folder: TempDir,
}

impl Served {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(Options::new(folder.path())).unwrap();
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let bind = tokio::net::TcpListener::bind("127.0.0.1:0");
        let listener = runtime.block_on(bind).unwrap();
        let address: SocketAddr = listener.local_addr().unwrap();
        let options = NfsOptions { squash: Squash::NoRootSquash, ..NfsOptions::default() };
        let target = Target { nfs: address, mount: address, export: options.export_path.clone() };
        let metrics = Arc::new(NfsMetrics::new());
        let (shutdown, stopped) = oneshot::channel::<()>();
        let (of_server, counters) = (Arc::clone(&store), Arc::clone(&metrics));
        runtime.spawn(slackwater_nfs::run(listener, of_server, options, counters, async {
            let _ = stopped.await;
        }));
        Self { target, _shutdown: shutdown, _runtime: runtime, metrics, store, _folder: folder }
    }

    fn run(&self, load: &Load) -> Result<Measured, Failure> {
        run(&self.target, load, &Stop::listen(TIME_MAX).unwrap())
    }

    /// Calls that were answered.
    fn calls(&self, procedure: &str) -> u64 {
        let NfsMetricsSnapshot { procedures, .. } = self.metrics.snapshot();
        let mut procedures = procedures.iter();
        procedures.find(|other| other.name == procedure).map_or(0, |procedure| procedure.calls)
    }
}

/// One pass over 16 MiB.
fn load(work: Work, block_bytes: usize, depth: usize, connections: usize) -> Load {
    Load {
        work,
        block_bytes,
        depth,
        connections,
        span_bytes: 16 << 20,
        amount: Amount::Bytes(16 << 20),
        commit: CommitPace::AtEnd,
        seed: 1,
        file: "file".to_owned(),
        is_verified: matches!(work, Work::SequentialRead | Work::RandomRead),
    }
}

#[test]
fn what_was_written_is_read_however_both_are_cut() {
    let served = Served::start();
    // From the buffer itself, and by copies.
    for (block_bytes, depth, connections) in [(1 << 20, 8, 1), (64 << 10, 3, 3), (4096, 16, 2)] {
        let mut write = load(Work::SequentialWrite, block_bytes, depth, connections);
        write.file = format!("file-{block_bytes}");
        // A third does not go into it.
        write.span_bytes -= write.span_bytes % (3 * write.block_bytes as u64);
        write.amount = Amount::Bytes(write.span_bytes);
        let measured = served.run(&write).unwrap();
        assert_eq!(measured.bytes, write.span_bytes, "{write:?}");
        for (work, block_bytes, connections) in [
            (Work::SequentialRead, 1 << 20, 1),
            (Work::SequentialRead, 8192, 3),
            (Work::RandomRead, 4096, 4),
        ] {
            let mut read = load(work, block_bytes, 8, connections);
            read.file.clone_from(&write.file);
            read.span_bytes = 15 << 20;
            read.amount = Amount::Bytes(read.span_bytes);
            let measured = served.run(&read).unwrap();
            assert_eq!(measured.operations, read.span_bytes / block_bytes as u64, "{read:?}");
            assert!(measured.p50 > Duration::ZERO && measured.p50 <= measured.p99);
            assert!(measured.p99 <= measured.max && measured.max <= measured.elapsed);
        }
    }
    let stats = served.store.stats();
    assert!(stats.dedup_hits > 0, "the same seed gave other bytes");
}

#[test]
fn other_bytes_and_missing_ones_are_noticed() {
    let served = Served::start();
    served.run(&load(Work::SequentialWrite, 1 << 20, 8, 1)).unwrap();
    let other = Load { seed: 2, ..load(Work::SequentialRead, 4096, 8, 1) };
    let error = served.run(&other).unwrap_err().to_string();
    assert!(error.contains("is not what was written"), "{error}");
    let beyond = Load { span_bytes: 17 << 20, ..load(Work::RandomRead, 4096, 8, 1) };
    let error = served.run(&beyond).unwrap_err().to_string();
    assert!(error.contains("fewer than are read"), "{error}");
    let nowhere = Target { export: "/nowhere".to_owned(), ..served.target.clone() };
    let stop = Stop::listen(TIME_MAX).unwrap();
    let error = run(&nowhere, &beyond, &stop).unwrap_err().to_string();
    assert!(error.contains("MNT was answered"), "{error}");
}

#[test]
fn random_writes_are_new_data_every_time_and_of_every_connection() {
    let served = Served::start();
    let write = Load { span_bytes: 1 << 20, ..load(Work::RandomWrite, 4096, 8, 4) };
    served.run(&Load { amount: Amount::Bytes(8 << 20), ..write.clone() }).unwrap();
    served.run(&Load { amount: Amount::Bytes(8 << 20), seed: 2, ..write }).unwrap();
    assert_eq!(served.store.stats().dedup_hits, 0);
    assert_eq!(served.calls("WRITE"), 4096);
}

#[test]
fn commits_are_sent_at_the_pace_that_was_asked_for() {
    let served = Served::start();
    let write = Load { amount: Amount::Bytes(1 << 20), ..load(Work::RandomWrite, 4096, 2, 4) };
    let measured = served.run(&Load { commit: CommitPace::EachWrite, ..write.clone() }).unwrap();
    assert_eq!(measured.operations, 256);
    assert_eq!((served.calls("WRITE"), served.calls("COMMIT")), (256, 256));
    served.run(&write).unwrap();
    assert_eq!((served.calls("WRITE"), served.calls("COMMIT")), (512, 257));
    let time = Duration::from_millis(1500);
    let (amount, commit) = (Amount::Time(time), CommitPace::EverySecond);
    let measured = served.run(&Load { amount, commit, ..write }).unwrap();
    assert!(measured.elapsed >= time);
    assert_eq!(served.calls("WRITE"), 512 + measured.operations);
    // One a second, but for the first, and one at the end. A busy machine may take longer.
    let paced = served.calls("COMMIT") - 257 - 1;
    let seconds = measured.elapsed.as_secs();
    assert!((1..=seconds).contains(&paced), "{paced} in {:?}", measured.elapsed);
}

#[test]
fn it_stops_when_it_is_told_to() {
    let served = Served::start();
    let write = load(Work::SequentialWrite, 1 << 20, 8, 1);
    let endless = Load { amount: Amount::Time(TIME_MAX), ..write };
    let stop = Stop::listen(Duration::from_millis(100)).unwrap();
    let outcome = run(&served.target, &endless, &stop);
    assert!(matches!(outcome, Err(Failure::TooLong { .. })), "{outcome:?}");
}

#[test]
fn a_load_that_makes_no_sense_is_refused() {
    let served = Served::start();
    let sound = load(Work::RandomRead, 4096, 1, 1);
    for wrong in [
        Load { depth: 0, ..sound.clone() },
        Load { depth: DEPTH_MAX + 1, ..sound.clone() },
        Load { connections: 0, ..sound.clone() },
        Load { block_bytes: 0, ..sound.clone() },
        Load { block_bytes: 5000, ..sound.clone() },
        Load { block_bytes: 12 << 10, ..sound.clone() },
        Load { span_bytes: 4095, ..sound },
    ] {
        let error = served.run(&wrong).unwrap_err().to_string();
        assert!(error.contains("no such load"), "{error}");
    }
}

#[test]
fn each_name_is_made_listed_and_removed_once() {
    let served = Served::start();
    let stop = Stop::listen(TIME_MAX).unwrap();
    let run = |work, count, depth| {
        let load = NameLoad { work, directory: "names".to_owned(), count, depth };
        names::run(&served.target, &load, &stop)
    };
    for (turn, depth) in [(1, 1), (2, 16)] {
        for work in [NameWork::Create, NameWork::List, NameWork::Remove] {
            // `.` and `..` are listed too.
            let more = if work == NameWork::List { 2 } else { 0 };
            assert_eq!(run(work, 1000, depth).unwrap().operations, 1000 + more, "{work:?}");
        }
        assert_eq!((served.calls("CREATE"), served.calls("REMOVE")), (turn * 1000, turn * 1000));
        assert!(served.calls("READDIRPLUS") > turn);
    }
    let missing = run(NameWork::Remove, 1, 1).unwrap_err().to_string();
    assert!(missing.contains("REMOVE was answered with NFS status 2"), "{missing}");
    let other = run(NameWork::List, 5, 1).unwrap_err().to_string();
    assert!(other.contains("names are listed, expected 5"), "{other}");
    for (count, depth) in [(0, 1), (1, 0), (1, DEPTH_MAX + 1)] {
        let error = run(NameWork::Create, count, depth).unwrap_err().to_string();
        assert!(error.contains("no such load"), "{error}");
    }
}
