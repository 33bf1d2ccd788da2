//! Layers that are on the appliance already, on one worker and on two; and what is left of the
//! snapshotter when the daemon or the appliance goes away.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use slackwater_archive::{REFERENCE_MEMBER, Reference};
use slackwater_client::types::ChainId;
use slackwater_driver::containerd::proto::{CommitRequest, Kind};
use slackwater_driver::worker::{Engine, Key, SnapshotRef};
use tokio::runtime::Runtime;
use tonic::{Code, Status};
use uuid::Uuid;

use support::snapshots::{Snapshots, labels};
use support::{Appliance, Machine, Trust};

#[path = "containerd_remote/blobs.rs"]
mod blobs;
#[path = "containerd_remote/holds.rs"]
mod holds;
#[path = "containerd_remote/hostile.rs"]
mod hostile;
#[path = "containerd_remote/image_references.rs"]
mod image_references;
#[path = "containerd_remote/images.rs"]
mod images;
#[path = "containerd_remote/kinds.rs"]
mod kinds;
#[path = "containerd_remote/links.rs"]
mod links;
#[path = "containerd_remote/lowers.rs"]
mod lowers;
#[path = "containerd_remote/own_disks.rs"]
mod own_disks;
#[path = "containerd_remote/registries.rs"]
mod registries;
mod support;
#[path = "containerd_remote/trust.rs"]
mod trust;
#[path = "containerd_remote/uppers.rs"]
mod uppers;

const REF: &str = "containerd.io/snapshot.ref";
const ANNOTATION: &str = "containerd.io/snapshot/slackwater";
const SHARED: &str = "containerd.io/snapshot/slackwater.shared";

/// Longest time of a test: far more than it takes on a busy machine.
const TEST_TIME: Duration = Duration::from_secs(300);

/// Calls that are given up, each a millisecond later than the one before: from before the first
/// request to the appliance until after the last.
const ROUNDS: u64 = 40;

/// Longest time in which what a call began is finished without it.
const FINISH_TIME: Duration = Duration::from_secs(60);

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

fn bounded<T>(runtime: &Runtime, test: impl Future<Output = T>) -> T {
    bounded_by(TEST_TIME, runtime, test)
}

fn bounded_by<T>(time: Duration, runtime: &Runtime, test: impl Future<Output = T>) -> T {
    let bounded = async { tokio::time::timeout(time, test).await };
    runtime.block_on(bounded).expect("the test takes too long")
}

async fn serve(machine: &Machine) -> Snapshots {
    Snapshots::serve(machine.worker.clone(), &machine.path().join("c.sock")).await
}

fn chain(digit: char) -> String {
    format!("sha256:{}", digit.to_string().repeat(64))
}

fn chain_id(digit: char) -> ChainId {
    chain(digit).parse().unwrap()
}

#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T, Status>, code: Code) -> String {
    let status = result.unwrap_err();
    assert_eq!(status.code(), code, "{status}");
    status.message().to_owned()
}

/// How containerd's unpacker calls the snapshot that it unpacks a layer into.
fn unpack_key(number: usize, chain: &str) -> String {
    format!("default/{number}/extract-775838128-m-A0 {chain}")
}

/// Unpacks a layer as the unpacker does: with its chain id in a label, or only in its names.
async fn unpack(snapshots: &Snapshots, chain: &str, parent: &str, is_labelled: bool) -> String {
    let sent = if is_labelled { labels(&[(REF, chain)]) } else { HashMap::new() };
    unpack_labelled(snapshots, chain, parent, sent).await
}

/// The same, with the labels that annotations of the layer become.
async fn unpack_labelled(
    snapshots: &Snapshots,
    chain: &str,
    parent: &str,
    sent: HashMap<String, String>,
) -> String {
    let key = unpack_key(1, chain);
    let name = format!("default/2/{chain}");
    let (root, is_writable) = snapshots.prepare_labelled(&key, parent, sent.clone()).await.unwrap();
    assert!(is_writable, "containerd 2.4 unpacks nothing into what is read-only");
    fs::write(root.join(format!("layer {}", &chain[7..9])), chain).unwrap();
    let commit = CommitRequest { name: name.clone(), key, labels: sent, ..Default::default() };
    snapshots.commit_as(commit).await.unwrap();
    name
}

async fn snapshot(machine: &Machine, name: &str) -> SnapshotRef {
    machine.worker.snapshot_of(&Key::containerd(name)).await.unwrap().unwrap()
}

/// What containerd does after "already exists": it looks for label and parent, and takes what is
/// committed.
async fn adopted(snapshots: &Snapshots, chain: &str, parent: &str) -> Vec<String> {
    let filter = format!("labels.\"{REF}\"=={chain},parent==\"{parent}\"");
    let parts = snapshots.list(&[&filter]).await.unwrap();
    let infos = parts.into_iter().flat_map(|part| part.info);
    infos.filter(|info| info.kind() == Kind::Committed).map(|info| info.name).collect()
}

#[test]
fn what_one_worker_unpacked_the_others_have() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let first = Machine::start(&appliance).await;
        let snapshots = serve(&first).await;
        let (one, two) = (chain('1'), chain('2'));
        let below = unpack(&snapshots, &one, "", true).await;
        let above = unpack(&snapshots, &two, &below, false).await;

        let second = Machine::start(&appliance).await;
        let others = serve(&second).await;
        let (prepare_one, prepare_two) = (labels(&[(REF, &one)]), labels(&[(REF, &two)]));
        let calls = (0..8).map(|index| {
            let (others, sent, key) = (&others, prepare_one.clone(), unpack_key(index, &one));
            async move { others.prepare_labelled(&key, "", sent).await }
        });
        for answer in futures_util::future::join_all(calls).await {
            let message = refused(answer, Code::AlreadyExists);
            assert!(message.contains(&one), "{message}");
        }
        let found = adopted(&others, &one, "").await;
        assert_eq!(found, [one.as_str()], "one snapshot for all that raced");
        let answer = others.prepare_labelled(&unpack_key(1, &two), &one, prepare_two).await;
        refused(answer, Code::AlreadyExists);
        assert_eq!(adopted(&others, &two, &one).await, [two.as_str()]);
        let info = others.stat(&two).await.unwrap();
        assert_eq!((info.kind(), info.parent.as_str()), (Kind::Committed, one.as_str()));
        assert_eq!(others.names(&["kind==active"]).await, [""; 0], "nothing half made is shown");
        assert_eq!(snapshot(&first, &above).await, snapshot(&second, &two).await);
        let root = others.prepare("container", &two).await.unwrap();
        assert_eq!(fs::read_to_string(root.join("layer 22")).unwrap(), two);
        assert_eq!(fs::read_to_string(root.join("layer 11")).unwrap(), one);
        // It has mounted neither layer, and knows what each adds.
        for (made, adopted) in [(&below, &one), (&above, &two)] {
            let [made, adopted] =
                [snapshots.usage(made).await.unwrap(), others.usage(adopted).await.unwrap()];
            assert_eq!((made.inodes, made), (1, adopted));
        }
        fs::write(root.join("own"), "x").unwrap();
        assert_eq!(others.usage("container").await.unwrap().inodes, 1);

        // Its own snapshots go with it; the shared one does not.
        for key in ["container", &two, &one] {
            others.remove(key).await.unwrap();
        }
        others.cleanup().await.unwrap();
        let view = snapshots.view("view", &above).await.unwrap();
        assert_eq!(fs::read_to_string(view.join("layer 22")).unwrap(), two);
        others.stop().await;
        snapshots.stop().await;
    });
}

#[test]
fn a_call_that_is_given_up_leaves_nothing_unfinished() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let first = Machine::start(&appliance).await;
        let snapshots = serve(&first).await;
        let one = chain('1');
        unpack(&snapshots, &one, "", true).await;
        let second = Machine::start(&appliance).await;
        let others = serve(&second).await;
        let names = || second.worker.list(Engine::Containerd).into_iter().map(|one| one.key.name);
        for round in 0..ROUNDS {
            let sent = labels(&[(REF, &one)]);
            let key = unpack_key(1, &one);
            let prepared = others.prepare_labelled(&key, "", sent);
            let patience = Duration::from_millis(round);
            if let Ok(answer) = tokio::time::timeout(patience, prepared).await {
                refused(answer, Code::AlreadyExists);
            }
            let begun = Instant::now();
            while names().any(|name| name != one) {
                assert!(begun.elapsed() < FINISH_TIME, "{:?}", names().collect::<Vec<_>>());
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            // For the next round to have something to adopt.
            if names().any(|name| name == one) {
                others.remove(&one).await.unwrap();
            }
        }
        others.stop().await;
        snapshots.stop().await;
    });
}

/// Else nothing would be unpacked into such a layer, and its chain id would name its parent's content.
#[test]
fn annotations_and_inherited_labels_make_no_layer_a_shared_root() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let machine = Machine::start(&appliance).await;
        let snapshots = serve(&machine).await;
        let chains = ['1', '2', '3', '4'].map(chain);
        let mut above = String::new();
        for (index, chain) in chains.iter().enumerate() {
            // The last layer has no annotation, and those below it have.
            let sent = match index {
                0 | 1 => labels(&[(REF, chain), (SHARED, "true")]),
                2 => labels(&[(SHARED, "true")]),
                _ => labels(&[(REF, chain)]),
            };
            above = unpack_labelled(&snapshots, chain, &above, sent).await;
        }
        let (_, is_writable) =
            snapshots.prepare_labelled("a container", &above, HashMap::new()).await.unwrap();
        assert!(is_writable);

        let second = Machine::start(&appliance).await;
        let others = serve(&second).await;
        let mut above = String::new();
        for (index, chain) in chains.iter().enumerate() {
            let sent = labels(&[(REF, chain), (SHARED, "true")]);
            let key = unpack_key(index, chain);
            refused(others.prepare_labelled(&key, &above, sent).await, Code::AlreadyExists);
            above.clone_from(chain);
        }
        let (root, is_writable) =
            others.prepare_labelled("a container", &above, HashMap::new()).await.unwrap();
        assert!(is_writable, "what was adopted keeps the label, which decides nothing");
        for chain in &chains {
            let file = root.join(format!("layer {}", &chain[7..9]));
            assert_eq!(fs::read_to_string(file).unwrap(), *chain);
        }
        others.stop().await;
        snapshots.stop().await;
    });
}

#[test]
fn a_layer_above_a_container_is_not_shared() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let machine = Machine::start(&appliance).await;
        let snapshots = serve(&machine).await;
        let below = unpack(&snapshots, &chain('1'), "", true).await;
        // As `docker commit` of Docker 29 does it: above what a container was begun with.
        let root = snapshots.prepare("moby/1/init", &below).await.unwrap();
        fs::write(root.join("resolv.conf"), "of this machine").unwrap();
        snapshots.commit("moby/2/init", "moby/1/init").await.unwrap();
        unpack(&snapshots, &chain('2'), "moby/2/init", true).await;
        let found = machine.worker.find_chain(&chain_id('1')).await.unwrap();
        assert!(found.is_some());
        let found = machine.worker.find_chain(&chain_id('2')).await.unwrap();
        assert_eq!(found, None);
        snapshots.stop().await;
    });
}

#[test]
fn an_annotation_counts_if_the_appliance_says_the_same() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let machine = Machine::start(&appliance).await;
        let snapshots = serve(&machine).await;
        let root = snapshots.prepare("one", "").await.unwrap();
        fs::write(root.join("file"), "by reference").unwrap();
        snapshots.commit("base", "one").await.unwrap();
        let taken = snapshot(&machine, "base").await;
        let store = machine.worker.store_id().await.unwrap();
        let (size, one) = (taken.size_bytes, chain('a'));
        let annotation = |store: &str, size: u64| {
            labels(&[(REF, &one), (ANNOTATION, &format!("{store}/{}/{size}", taken.id))])
        };

        let good = annotation(&store, size);
        let unproven = snapshots.prepare_labelled(&unpack_key(1, &one), "", good.clone()).await;
        assert!(unproven.unwrap().1, "an ordinary snapshot to unpack into");
        // What another worker could have written, as release 0.2 did for chain ids that can be computed from
        // ids, is no word of the appliance.
        machine.worker.publish(taken.id).await.unwrap();
        let believed = ["slackwater.chain", "slackwater.image-chain", "containerd.io/snapshot.ref"];
        for (number, label) in (2..).zip(believed) {
            let label = [(label.to_owned(), one.clone())].into();
            machine.worker.client().set_snapshot_labels(taken.id, label).await.unwrap();
            let key = unpack_key(number, &one);
            let prepared = snapshots.prepare_labelled(&key, "", good.clone()).await;
            assert!(prepared.unwrap().1, "a label of its own is believed");
        }
        let label = [("slackwater.chain".to_owned(), one.clone())].into();
        machine.worker.client().set_snapshot_labels(taken.id, label).await.unwrap();
        let trust = Trust { references_without_mac: true, ..Trust::default() };
        let old = Machine::start_with(&appliance, trust).await;
        let others = serve(&old).await;
        refused(
            others.prepare_labelled(&unpack_key(1, &one), "", good.clone()).await,
            Code::AlreadyExists,
        );
        others.stop().await;
        drop(old);
        machine.worker.unpublish(taken.id).await.unwrap();
        machine.worker.add_chain(taken.id, &chain_id('a')).await.unwrap();
        let key = unpack_key(5, &one);
        let unpublished = snapshots.prepare_labelled(&key, "", good.clone()).await;
        assert!(unpublished.unwrap().1, "bound although it is not published");
        machine.worker.publish(taken.id).await.unwrap();
        for (number, bad) in (6..).zip([
            annotation(&Uuid::new_v4().to_string(), size),
            annotation(&store, size + 4096),
            labels(&[(REF, &chain('b')), (ANNOTATION, &good[ANNOTATION])]),
            labels(&[(REF, &one), (ANNOTATION, "../..")]),
        ]) {
            let key = unpack_key(number, &bad[REF]);
            assert!(snapshots.prepare_labelled(&key, "", bad).await.unwrap().1, "{key}");
        }
        let key = unpack_key(10, &one);
        refused(snapshots.prepare_labelled(&key, "", good).await, Code::AlreadyExists);
        assert_eq!(adopted(&snapshots, &one, "").await, [one.as_str()]);
        let view = snapshots.view("view", &one).await.unwrap();
        assert_eq!(fs::read_to_string(view.join("file")).unwrap(), "by reference");
        snapshots.stop().await;
    });
}

/// Prepares a snapshot and unpacks a reference into it; its root.
async fn unpack_reference(
    snapshots: &Snapshots,
    key: &str,
    parent: &str,
    reference: &Reference,
) -> PathBuf {
    let root = snapshots.prepare(key, parent).await.unwrap();
    slackwater_archive::unpack(&reference.to_archive()[..], &root, None).unwrap();
    root
}

/// What the first member of a reference holds.
fn text(reference: &Reference) -> Vec<u8> {
    let archive = reference.to_archive();
    archive[512..1024].iter().copied().filter(|byte| *byte != 0).collect()
}

#[test]
fn a_reference_that_was_unpacked_is_bound() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let machine = Machine::start(&appliance).await;
        let snapshots = serve(&machine).await;
        let root = snapshots.prepare("one", "").await.unwrap();
        fs::write(root.join("file"), "meant").unwrap();
        snapshots.commit("base", "one").await.unwrap();
        let taken = snapshot(&machine, "base").await;
        let meant = machine.worker.reference_to(taken.id).await.unwrap();
        assert_eq!(meant.size_bytes, taken.size_bytes);
        let write = async |key: &str, parent: &str, reference: &Reference| {
            unpack_reference(&snapshots, key, parent, reference).await
        };
        let one = chain('1');
        let key = |name: &str| format!("x/1/extract-{name} {one}");

        // That snapshot is not published: what ran in a container may have written its id, and
        // a build unpacked that as a layer.
        write(&key("0"), "", &meant).await;
        let answer = snapshots.commit("x/2/unpublished", &key("0")).await;
        let message = refused(answer, Code::FailedPrecondition);
        assert!(message.contains(&taken.id.to_string()), "{message}");
        assert!(message.contains("not published"), "{message}");
        machine.worker.publish(taken.id).await.unwrap();
        let forged = Reference { mac: Some("07".repeat(32).parse().unwrap()), ..meant.clone() };
        write(&key("forged"), "", &forged).await;
        let answer = snapshots.commit("x/2/forged", &key("forged")).await;
        let message = refused(answer, Code::FailedPrecondition);
        assert!(message.contains("forged"), "{message}");
        let without = Reference { mac: None, ..meant.clone() };
        write(&key("without"), "", &without).await;
        let answer = snapshots.commit("x/2/without", &key("without")).await;
        let message = refused(answer, Code::FailedPrecondition);
        assert!(message.contains("insecure-references-without-mac"), "{message}");

        write(&key("1"), "", &meant).await;
        snapshots.commit("x/2/first", &key("1")).await.unwrap();
        assert_eq!(snapshot(&machine, "x/2/first").await, taken);
        write(&key("2"), "x/2/first", &meant).await;
        snapshots.commit("x/2/second", &key("2")).await.unwrap();
        assert_eq!(snapshot(&machine, "x/2/second").await, taken);
        let view = snapshots.view("view", "x/2/second").await.unwrap();
        assert_eq!(fs::read_to_string(view.join("file")).unwrap(), "meant");
        assert!(!view.join(REFERENCE_MEMBER).exists());

        // Written by what runs in a container.
        let root = snapshots.prepare("x/1/container", "").await.unwrap();
        fs::write(root.join(REFERENCE_MEMBER), text(&meant)).unwrap();
        snapshots.commit("x/2/container", "x/1/container").await.unwrap();
        assert_ne!(snapshot(&machine, "x/2/container").await, taken);
        let view = snapshots.view("view of the container", "x/2/container").await.unwrap();
        assert!(view.join(REFERENCE_MEMBER).exists());

        let unknown = Reference { snapshot_id: Uuid::new_v4(), ..meant.clone() };
        write(&key("unknown"), "", &unknown).await;
        let answer = snapshots.commit("x/2/unknown", &key("unknown")).await;
        let message = refused(answer, Code::FailedPrecondition);
        assert!(message.contains(&unknown.snapshot_id.to_string()), "{message}");
        let elsewhere = Reference { store_id: Uuid::new_v4().to_string(), ..meant };
        write(&key("elsewhere"), "", &elsewhere).await;
        let answer = snapshots.commit("x/2/elsewhere", &key("elsewhere")).await;
        let message = refused(answer, Code::FailedPrecondition);
        assert!(message.contains(&elsewhere.store_id), "{message}");
        assert_eq!(
            snapshots.names(&["name~=x/2/(unpublished|forged|without|unknown|elsewhere)"]).await,
            [""; 0]
        );
        snapshots.stop().await;
    });
}

#[test]
fn a_restarted_daemon_has_what_it_had() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let machine = Machine::start(&appliance).await;
        let snapshots = serve(&machine).await;
        let below = unpack(&snapshots, &chain('1'), "", true).await;
        let root = snapshots.prepare("container", &below).await.unwrap();
        fs::write(root.join("before"), "kept").unwrap();
        snapshots.stop().await;

        let machine = machine.restart(&appliance).await;
        let snapshots = serve(&machine).await;
        assert_eq!(fs::read_to_string(root.join("before")).unwrap(), "kept", "still mounted");
        let (again, is_writable) = snapshots.mounts("container").await.unwrap();
        assert!(is_writable);
        assert_eq!(fs::read_to_string(again.join("before")).unwrap(), "kept");
        snapshots.commit("committed", "container").await.unwrap();
        let view = snapshots.view("view", "committed").await.unwrap();
        assert_eq!(fs::read_to_string(view.join("before")).unwrap(), "kept");
        snapshots.stop().await;
    });
}

#[test]
fn without_the_appliance_calls_say_so_or_answer_from_memory() {
    let mut appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let machine = Machine::start(&appliance).await;
        let snapshots = serve(&machine).await;
        let below = unpack(&snapshots, &chain('1'), "", true).await;
        let root = snapshots.prepare("container", &below).await.unwrap();
        fs::write(root.join("file"), vec![7; 1 << 20]).unwrap();
        let committed = snapshots.usage(&below).await.unwrap();
        let active = snapshots.usage("container").await.unwrap();

        appliance.stop();
        let sent = labels(&[(REF, &chain('2'))]);
        let key = unpack_key(1, &chain('2'));
        let answer = snapshots.prepare_labelled(&key, "", sent).await;
        let message = refused(answer, Code::Unavailable);
        assert!(message.contains(&appliance.url), "names the appliance: {message}");
        refused(snapshots.stat(&key).await, Code::NotFound);
        assert_eq!(snapshots.usage(&below).await.unwrap(), committed);
        assert_eq!(snapshots.usage("container").await.unwrap(), active);
        assert_eq!(snapshots.names(&[]).await, ["container", &below]);
        appliance.serve();
        let (root, _) = snapshots.prepare_labelled("x", &below, HashMap::new()).await.unwrap();
        assert_eq!(fs::read_to_string(root.join("layer 11")).unwrap(), chain('1'));
        snapshots.stop().await;
    });
}
