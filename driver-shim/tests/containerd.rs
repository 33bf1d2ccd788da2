//! The snapshotter over its socket, with a real worker on a real appliance: what containerd asks
//! of every snapshotter, and what block clones find hard.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

use std::collections::HashMap;
use std::fs::{self, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use slackwater_client::query::ListFiles;
use slackwater_driver::containerd::proto::{CommitRequest, Kind};
use tonic::{Code, Status};

use support::snapshots::{Snapshots, labels};
use support::{Appliance, Machine, mounts_below};

#[path = "containerd/diff.rs"]
mod diff;
mod support;

/// Longest time of a test: far more than it takes on a busy machine.
const TEST_TIME: Duration = Duration::from_secs(400);

/// Runs a test with a snapshotter of its own.
fn with_snapshotter(test: impl AsyncFnOnce(&Snapshots, &Machine)) {
    with_snapshotter_for("nowhere", test);
}

/// The same for a containerd that listens, or not, at this name in the machine's directory.
fn with_snapshotter_for(api: &str, test: impl AsyncFnOnce(&Snapshots, &Machine)) {
    let appliance = Appliance::start();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let bounded = runtime.block_on(async {
        let machine = Machine::start(&appliance).await;
        let (socket, api) = (machine.path().join("c.sock"), machine.path().join(api));
        let snapshots = Snapshots::serve_for(machine.worker.clone(), &socket, &api).await;
        let bounded = tokio::time::timeout(TEST_TIME, test(&snapshots, &machine)).await;
        snapshots.stop().await;
        drop(machine);
        bounded
    });
    bounded.expect("the test takes too long");
}

#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T, Status>, code: Code) -> String {
    let status = result.unwrap_err();
    assert_eq!(status.code(), code, "{status}");
    assert!(!status.message().is_empty());
    status.message().to_owned()
}

fn names_in(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

#[test]
fn every_call_answers_with_the_code_that_containerd_acts_on() {
    with_snapshotter(async |snapshots, _| {
        let names = ["a", "default/3/extract-77-m-A0 sha256:29da", "../../etc", "v"];
        let [active, odd, escape, view] = names;
        assert!(snapshots.list(&[]).await.unwrap().is_empty(), "an empty stream");

        snapshots.prepare(active, "").await.unwrap();
        snapshots.prepare(odd, "").await.unwrap();
        snapshots.prepare(escape, "").await.unwrap();
        refused(snapshots.prepare(active, "").await, Code::AlreadyExists);
        refused(snapshots.view(active, "").await, Code::AlreadyExists);
        refused(snapshots.prepare("x", "missing").await, Code::NotFound);
        refused(snapshots.view("x", "missing").await, Code::NotFound);
        refused(snapshots.prepare("x", active).await, Code::InvalidArgument);
        refused(snapshots.view("x", active).await, Code::InvalidArgument);
        refused(snapshots.prepare("", "").await, Code::InvalidArgument);
        refused(snapshots.prepare(&"x".repeat(4097), "").await, Code::InvalidArgument);
        refused(snapshots.mounts("x").await, Code::NotFound);
        refused(snapshots.stat("x").await, Code::NotFound);
        refused(snapshots.usage("x").await, Code::NotFound);
        refused(snapshots.remove("x").await, Code::NotFound);
        refused(snapshots.update("x", HashMap::new(), &[]).await, Code::NotFound);
        refused(snapshots.commit("base", "x").await, Code::NotFound);

        snapshots.commit("base", active).await.unwrap();
        refused(snapshots.stat(active).await, Code::NotFound);
        refused(snapshots.mounts("base").await, Code::FailedPrecondition);
        refused(snapshots.commit("base", odd).await, Code::AlreadyExists);
        refused(snapshots.commit("other", "base").await, Code::FailedPrecondition);

        snapshots.view(view, "base").await.unwrap();
        refused(snapshots.commit("other", view).await, Code::FailedPrecondition);
        snapshots.prepare("child", "base").await.unwrap();
        refused(snapshots.remove("base").await, Code::FailedPrecondition);
        let rebased = CommitRequest {
            name: "other".to_owned(),
            key: "child".to_owned(),
            parent: view.to_owned(),
            ..CommitRequest::default()
        };
        refused(snapshots.commit_as(rebased.clone()).await, Code::InvalidArgument);
        let same = CommitRequest { parent: "base".to_owned(), ..rebased };
        snapshots.commit_as(same).await.unwrap();
        assert_eq!(snapshots.stat("other").await.unwrap().parent, "base");

        assert_eq!(snapshots.names(&[]).await, [escape, "base", odd, "other", view]);
        for key in ["other", view, odd, escape, "base"] {
            snapshots.remove(key).await.unwrap();
            refused(snapshots.remove(key).await, Code::NotFound);
        }
        assert!(snapshots.names(&[]).await.is_empty());
        snapshots.cleanup().await.unwrap();
    });
}

#[test]
fn labels_times_and_lists() {
    with_snapshotter(async |snapshots, _| {
        let sent = labels(&[("a", "1"), ("containerd.io/gc.root", "now")]);
        snapshots.prepare_labelled("one", "", sent.clone()).await.unwrap();
        let info = snapshots.stat("one").await.unwrap();
        assert_eq!((info.kind(), &info.labels), (Kind::Active, &sent));
        assert!(info.created_at.unwrap().seconds > 1_500_000_000);
        // As containerd's own suite for snapshotters wants it.
        assert_eq!(info.created_at, info.updated_at);

        let updated = snapshots.update("one", labels(&[("a", "2"), ("b", "3")]), &["labels.a"]);
        let updated = updated.await.unwrap();
        assert_eq!(updated.labels, labels(&[("a", "2"), ("containerd.io/gc.root", "now")]));
        assert_eq!(updated.created_at, info.created_at);
        let order =
            |time: slackwater_driver::containerd::proto::Timestamp| (time.seconds, time.nanos);
        assert!(order(updated.updated_at.unwrap()) > order(info.updated_at.unwrap()));
        refused(snapshots.update("one", HashMap::new(), &["kind"]).await, Code::InvalidArgument);
        let replaced = snapshots.update("one", labels(&[("c", "4")]), &[]).await.unwrap();
        assert_eq!(replaced.labels, labels(&[("c", "4")]));

        let mut commit =
            CommitRequest { name: "base".into(), key: "one".into(), ..Default::default() };
        commit.labels = labels(&[("kept", "yes")]);
        snapshots.commit_as(commit).await.unwrap();
        let info = snapshots.stat("base").await.unwrap();
        assert_eq!(info.created_at, info.updated_at);
        assert_eq!((info.kind(), info.labels), (Kind::Committed, labels(&[("kept", "yes")])));

        for index in 0..120 {
            snapshots.view(&format!("view {index:03}"), "base").await.unwrap();
        }
        let parts = snapshots.list(&[]).await.unwrap();
        assert_eq!(parts.iter().map(|part| part.info.len()).collect::<Vec<_>>(), [100, 21]);
        assert_eq!(snapshots.names(&["kind==committed"]).await, ["base"]);
        assert_eq!(snapshots.names(&["labels.kept==yes"]).await, ["base"]);
        let some = snapshots.names(&["name==\"view 007\",parent==base", "name~=view.11[89]"]).await;
        assert_eq!(some, ["view 007", "view 118", "view 119"]);
        refused(snapshots.list(&["name=x"]).await, Code::InvalidArgument);
        let large = labels(&[("x", &"y".repeat(4096))]);
        refused(snapshots.prepare_labelled("x", "", large).await, Code::InvalidArgument);
    });
}

#[test]
fn a_root_keeps_its_mode_and_a_view_refuses_writes() {
    with_snapshotter(async |snapshots, machine| {
        let root = snapshots.prepare("one", "").await.unwrap();
        assert_eq!(names_in(&root), [""; 0], "no lost+found");
        assert_eq!(mode(&root), 0o755);
        fs::write(root.join("file"), "one").unwrap();
        fs::set_permissions(&root, Permissions::from_mode(0o711)).unwrap();
        assert_eq!(snapshots.mounts("one").await.unwrap(), (root.clone(), true), "idempotent");
        snapshots.commit("base", "one").await.unwrap();

        let above = snapshots.prepare("two", "base").await.unwrap();
        assert_eq!((mode(&above), names_in(&above)), (0o711, vec!["file".to_owned()]));
        fs::write(above.join("file"), "two").unwrap();

        let view = snapshots.view("view", "base").await.unwrap();
        let again = snapshots.view("again", "base").await.unwrap();
        assert_eq!(view, again, "views share one mount");
        assert_eq!(mode(&view), 0o711);
        assert_eq!(fs::read_to_string(view.join("file")).unwrap(), "one");
        let error = fs::write(view.join("new"), "x").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ReadOnlyFilesystem);
        let empty = snapshots.view("empty", "").await.unwrap();
        assert_eq!(names_in(&empty), [""; 0]);
        assert_eq!(
            fs::create_dir(empty.join("new")).unwrap_err().kind(),
            ErrorKind::ReadOnlyFilesystem
        );

        let usage = snapshots.usage("two").await.unwrap();
        assert!(usage.size < 1 << 20, "without the parents: {usage:?}");
        for key in ["two", "view", "again", "empty", "base"] {
            snapshots.remove(key).await.unwrap();
        }
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            snapshots.cleanup().await.unwrap();
            let files = machine.worker.client().files(&ListFiles::default()).await.unwrap().items;
            let paths = files.into_iter().map(|file| file.path);
            let is_own = |path: &String| path.contains("/disks/") || path.contains("/holds/");
            let left: Vec<_> = paths.filter(is_own).collect();
            if left.is_empty() {
                break;
            }
            assert!(Instant::now() < deadline, "left on the appliance: {left:?}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    });
}

#[test]
fn a_shared_root_is_one_read_only_mount() {
    with_snapshotter(async |snapshots, _| {
        let root = snapshots.prepare("one", "").await.unwrap();
        fs::write(root.join("file"), "one").unwrap();
        snapshots.commit("base", "one").await.unwrap();
        let shared = labels(&[("containerd.io/snapshot/slackwater.shared", "true")]);
        let (first, is_writable) =
            snapshots.prepare_labelled("x", "base", shared.clone()).await.unwrap();
        assert!(!is_writable);
        assert_eq!(snapshots.stat("x").await.unwrap().kind(), Kind::Active);
        let (second, _) = snapshots.prepare_labelled("y", "base", shared.clone()).await.unwrap();
        assert_eq!(first, second);
        assert_eq!(fs::read_to_string(first.join("file")).unwrap(), "one");
        let message = refused(snapshots.commit("z", "x").await, Code::FailedPrecondition);
        assert!(message.contains("nothing to commit"), "{message}");
        // The parent's label has no effect: an image's annotation would be one.
        snapshots.update("base", shared, &["labels"]).await.unwrap();
        let (own, is_writable) =
            snapshots.prepare_labelled("w", "base", HashMap::new()).await.unwrap();
        assert!(is_writable);
        assert_ne!(own, first);
    });
}

#[test]
fn one_hundred_and_twenty_eight_layers() {
    with_snapshotter(async |snapshots, machine| {
        const LAYERS: usize = 128;
        let mut parent = String::new();
        for index in 0..LAYERS {
            let key = format!("extract {index}");
            let root = snapshots.prepare(&key, &parent).await.unwrap();
            assert_eq!(names_in(&root).len(), index);
            fs::write(root.join(format!("file {index:03}")), index.to_string()).unwrap();
            // A directory of one layer moves in the next: nothing is left at its old place.
            if index > 0 {
                fs::rename(root.join("moving").join((index - 1).to_string()), root.join("there"))
                    .unwrap();
                fs::rename(root.join("there"), root.join("moving").join(index.to_string()))
                    .unwrap();
            } else {
                fs::create_dir_all(root.join("moving/0")).unwrap();
                fs::write(root.join("moving/0/inside"), "it").unwrap();
                fs::remove_file(root.join("file 000")).unwrap();
            }
            parent = format!("layer {index}");
            snapshots.commit(&parent, &key).await.unwrap();
        }
        let view = snapshots.view("view", &parent).await.unwrap();
        for index in 1..LAYERS {
            let text = fs::read_to_string(view.join(format!("file {index:03}"))).unwrap();
            assert_eq!(text, index.to_string());
        }
        assert_eq!(names_in(&view.join("moving")), [(LAYERS - 1).to_string()]);
        let inside = view.join("moving").join((LAYERS - 1).to_string()).join("inside");
        assert_eq!(fs::read_to_string(inside).unwrap(), "it");
        let mounts = mounts_below(machine.path());
        assert!(mounts.len() < 40, "layers do not stay mounted: {}", mounts.len());

        refused(snapshots.remove("layer 64").await, Code::FailedPrecondition);
        snapshots.remove("view").await.unwrap();
        for index in (65..LAYERS).rev() {
            snapshots.remove(&format!("layer {index}")).await.unwrap();
        }
        let view = snapshots.view("view", "layer 64").await.unwrap();
        assert_eq!(fs::read_to_string(view.join("file 064")).unwrap(), "64");
        assert!(!view.join("file 065").exists());
    });
}
