//! What was published long ago is ended, and nothing else.

use slackwater_blockstore::disk::MemoryDisk;
use slackwater_blockstore::kv::MemoryKv;
use slackwater_blockstore::{DeletionPolicy, Options, SnapshotRequest};

use super::*;
use crate::audit::record::About;
use crate::metrics::MetricsSource;
use crate::options::ApiOptions;

const DAY: Duration = Duration::from_secs(86_400);

#[derive(Debug)]
struct NoMetrics;

impl MetricsSource for NoMetrics {
    fn render(&self) -> String {
        String::new()
    }
}

fn state() -> Shared {
    let mut options = Options::new("unused");
    (options.background, options.steady_clock) = (false, Duration::ZERO);
    let store =
        Store::open_with(Arc::<MemoryKv>::default(), Arc::new(MemoryDisk::new()), options).unwrap();
    ApiState::new(store, ApiOptions::default(), Arc::new(NoMetrics))
}

fn path(snapshot: SnapshotId) -> FilePath {
    FilePath::parse(&format!("{PUBLISHED}/{snapshot}")).unwrap()
}

/// A snapshot of a new file, kept beside what publishes it.
fn taken(state: &Shared, name: &str) -> SnapshotId {
    let file = FilePath::parse(name).unwrap();
    state.store.create_file(&file, 4096).unwrap();
    let request = SnapshotRequest { deletion: DeletionPolicy::Keep, ..SnapshotRequest::default() };
    state.store.snapshot(&file, request).unwrap().id
}

#[tokio::test]
async fn what_was_published_long_ago_is_ended_and_nothing_else() {
    let state = state();
    let [named, old, held] = ["a", "b", "c"].map(|name| taken(&state, name));
    let image = Some("r.example/a:1".parse().unwrap());
    let about = About::default();
    super::super::publish(&state, &about, "node-1", (named, image), path(named)).await.unwrap();
    // As release 0.2 did: nothing tells when, but the file.
    state.store.clone_snapshot(old, &path(old)).unwrap();
    // Files there that publish nothing stay.
    let other = FilePath::parse("published/notes").unwrap();
    state.store.clone_snapshot(held, &other).unwrap();
    let of_another = path(held);
    state.store.create_file(&of_another, 1).unwrap();
    let now = convert::timestamp(state.store.now());
    let in_days = |days: u64| Timestamp::from_nanos(now.as_nanos() + days * 86_400_000_000_000);
    assert_eq!(end_all(&state, 30 * DAY, in_days(29)).await.unwrap(), 0);
    // A clock that went back ends nothing.
    assert_eq!(end_all(&state, 30 * DAY, in_days(31)).await.unwrap(), 1);
    // It got its date at the first look.
    assert_eq!(end_all(&state, 30 * DAY, in_days(58)).await.unwrap(), 0);
    assert_eq!(end_all(&state, 30 * DAY, in_days(60)).await.unwrap(), 1);
    for gone in [named, old] {
        assert!(state.store.file_info(&path(gone)).is_err());
        let labels = state.store.snapshot_info(gone).unwrap().labels;
        assert!(labels.is_empty(), "{labels:?}");
    }
    assert!(state.store.file_info(&other).is_ok() && state.store.file_info(&of_another).is_ok());
    assert_eq!(end_all(&state, 30 * DAY, in_days(90)).await.unwrap(), 0);
}

#[tokio::test]
async fn what_was_dated_by_a_clock_that_was_wrong_is_dated_again() {
    let state = state();
    let now = convert::timestamp(state.store.now());
    let in_days = |days: u64| Timestamp::from_nanos(now.as_nanos() + days * 86_400_000_000_000);
    let ahead = Date { at: in_days(9000), is_believed: true };
    let behind = Date { at: Timestamp::from_nanos(0), is_believed: false };
    for (name, date) in [("a", ahead), ("b", behind)] {
        let snapshot = taken(&state, name);
        state.store.clone_snapshot(snapshot, &path(snapshot)).unwrap();
        let date = move |labels| reserved::with_date(labels, date);
        state.store.change_snapshot_labels(snapshot, Box::new(date)).unwrap();
    }
    for (days, expected) in [(0, 0), (29, 0), (31, 2), (62, 0)] {
        assert_eq!(end_all(&state, 30 * DAY, in_days(days)).await.unwrap(), expected, "{days}");
    }
}
