//! What makes a snapshot a layer that others take: what an unpacker committed, by a maker that is trusted. Not names, not
//! labels, and no container.

use std::fs;

use slackwater_archive::REFERENCE_LINK_TARGET;
use slackwater_client::ProblemCode;
use slackwater_client::types::{CreateSnapshot, Labels};
use slackwater_driver::containerd::proto::CommitRequest;
use slackwater_driver::trust::TrustedMakers;
use tonic::Code;

use crate::support::snapshots::labels;
use crate::support::{Appliance, Machine, Trust};
use crate::{
    ANNOTATION, REF, adopted, bounded, chain, chain_id, refused, runtime, serve, snapshot, unpack,
    unpack_key,
};

/// Kubernetes makes labels of a pod's annotations.
#[test]
fn who_starts_a_container_makes_it_no_layer_by_labels() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let machine = Machine::start(&appliance).await;
        let snapshots = serve(&machine).await;
        let (one, two) = (chain('1'), chain('2'));
        let taken = snapshot(&machine, &unpack(&snapshots, &one, "", true).await).await;
        machine.worker.publish(taken.id).await.unwrap();
        let reference = machine.worker.reference_to(taken.id).await.unwrap();
        for (number, claimed) in [&one, &two].into_iter().enumerate() {
            let key = format!("k8s.io/{number}/pause");
            let sent = labels(&[(REF, claimed)]);
            let (root, is_writable) =
                snapshots.prepare_labelled(&key, "", sent.clone()).await.unwrap();
            assert!(is_writable, "a container is not adopted");
            // What the link is to, a container can make as well.
            fs::write(root.join(REFERENCE_LINK_TARGET), &key).unwrap();
            slackwater_archive::unpack(&reference.to_archive()[..], &root, None).unwrap();
            let name = format!("k8s.io/{number}/{claimed}");
            let commit =
                CommitRequest { name: name.clone(), key, labels: sent, ..Default::default() };
            snapshots.commit_as(commit).await.unwrap();
            assert_ne!(snapshot(&machine, &name).await, taken, "it became what it names");
        }
        assert_eq!(machine.worker.find_chain(&chain_id('2')).await.unwrap(), None);
        machine.worker.unpublish(taken.id).await.unwrap();
        snapshots.stop().await;
    });
}

/// A worker with a token can give snapshots names and labels, but none that others take for a chain.
#[test]
fn names_and_labels_that_a_worker_sets_make_no_chain() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let attacker = Machine::start(&appliance).await;
        let snapshots = serve(&attacker).await;
        let root = snapshots.prepare("evil", "").await.unwrap();
        fs::write(root.join("ld.so.preload"), "/evil.so").unwrap();
        // Committed as containerd commits a container, with the labels of a layer.
        let one = chain('1');
        let sent = labels(&[(REF, &one)]);
        let key = "evil".to_owned();
        let commit =
            CommitRequest { name: one.clone(), key, labels: sent.clone(), ..Default::default() };
        snapshots.commit_as(commit).await.unwrap();
        let evil = snapshot(&attacker, &one).await;
        let client = attacker.worker.client();
        client.create_clone(evil.id, "evil").await.unwrap();
        let name = |name: String| CreateSnapshot {
            path: "evil".to_owned(),
            name: Some(name),
            ..CreateSnapshot::default()
        };
        // As release 0.2 named them.
        let size = evil.size_bytes;
        client.create_snapshot(&name(format!("chain:{one}:{size}"))).await.unwrap();
        let reserved = format!("slackwater:chain:{one}");
        let named = client.create_snapshot(&name(format!("{reserved}:{size}"))).await;
        assert_eq!(named.unwrap_err().code(), Some(ProblemCode::InvalidValue));
        for label in [&reserved, "slackwater:"] {
            let labels: Labels = [(label.to_owned(), String::new())].into();
            let labelled = client.set_snapshot_labels(evil.id, labels.clone()).await;
            assert_eq!(labelled.unwrap_err().code(), Some(ProblemCode::InvalidValue));
            let taken = CreateSnapshot { labels, ..name("other".to_owned()) };
            let taken = client.create_snapshot(&taken).await;
            assert_eq!(taken.unwrap_err().code(), Some(ProblemCode::InvalidValue));
        }

        // Nor on the worker that it is on.
        let again = snapshots.prepare_labelled(&unpack_key(1, &one), "", sent).await;
        assert!(again.unwrap().1, "a committed container is taken for the layer");
        let machine = Machine::start(&appliance).await;
        let others = serve(&machine).await;
        // BuildKit compares what it unpacks with nothing, so that is no chain either.
        let two = chain('2');
        let key = format!("default/1/extract-k2x8hz9rqm4n1v7c0t5w3y6pb {two}");
        others.prepare(&key, "").await.unwrap();
        others.commit(&format!("default/2/{two}"), &key).await.unwrap();
        assert_eq!(machine.worker.find_chain(&chain_id('2')).await.unwrap(), None);
        let name = unpack(&others, &one, "", true).await;
        let view = others.view("view", &name).await.unwrap();
        assert_eq!(fs::read_to_string(view.join("layer 11")).unwrap(), one);
        assert!(!view.join("ld.so.preload").exists());
        // This one is a chain now, and the appliance says who made it.
        let found = machine.worker.client().chain(&chain_id('1'), size).await.unwrap();
        assert_eq!(found.chains, [(chain_id('1'), [String::new()].into())].into());
        assert_eq!(snapshot(&machine, &name).await.id, found.id);
        others.stop().await;
        snapshots.stop().await;
    });
}

#[test]
fn chains_of_makers_that_are_not_named_are_unpacked_again() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let first = Machine::start(&appliance).await;
        let snapshots = serve(&first).await;
        let (one, two) = (chain('1'), chain('2'));
        let below = unpack(&snapshots, &one, "", true).await;
        let theirs = snapshot(&first, &below).await;
        // As if one with the token `node` had registered it; tokens are tried in the tests of REST.
        let labels_of = [(format!("slackwater:chain:{one}"), "node".to_owned())].into();
        let id = slackwater_blockstore::SnapshotId::from_bytes(*theirs.id.as_bytes());
        appliance.store.change_snapshot_labels(id, Box::new(|_| labels_of)).unwrap();

        let makers = TrustedMakers::Named([String::new()].into());
        let wary = Machine::start_with(&appliance, Trust { makers, ..Trust::default() }).await;
        let others = serve(&wary).await;
        assert_eq!(wary.worker.find_chain(&chain_id('1')).await.unwrap(), None);
        let own = unpack(&others, &one, "", true).await;
        assert_ne!(snapshot(&wary, &own).await.id, theirs.id);
        // What is above it is its own word, which others take.
        let above = unpack(&others, &two, &own, true).await;
        let taken = snapshot(&wary, &above).await;
        assert_eq!(first.worker.find_chain(&chain_id('2')).await.unwrap(), Some(taken));

        let makers = TrustedMakers::Named(["node".to_owned()].into());
        let trusting = Machine::start_with(&appliance, Trust { makers, ..Trust::default() }).await;
        let third = serve(&trusting).await;
        let sent = labels(&[(REF, &one)]);
        let key = unpack_key(1, &one);
        refused(third.prepare_labelled(&key, "", sent).await, Code::AlreadyExists);
        assert_eq!(snapshot(&trusting, &one).await, theirs);
        let annotation =
            format!("{}/{}/{}", wary.worker.store_id().await.unwrap(), taken.id, taken.size_bytes);
        wary.worker.publish(taken.id).await.unwrap();
        let sent = labels(&[(REF, &two), (ANNOTATION, &annotation)]);
        let key = unpack_key(1, &two);
        assert!(third.prepare_labelled(&key, &one, sent).await.unwrap().1);
        wary.worker.unpublish(taken.id).await.unwrap();
        for snapshots in [third, others, snapshots] {
            snapshots.stop().await;
        }
    });
}

#[test]
fn private_layers_go_to_no_other_worker_and_no_other_namespace() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let public = Machine::start(&appliance).await;
        let shared = serve(&public).await;
        let (one, two) = (chain('1'), chain('2'));
        unpack(&shared, &one, "", true).await;

        let trust = Trust { private_layers: true, ..Trust::default() };
        let private = Machine::start_with(&appliance, trust).await;
        let snapshots = serve(&private).await;
        // It takes what others share.
        let sent = labels(&[(REF, &one)]);
        let taken = snapshots.prepare_labelled(&unpack_key(1, &one), "", sent).await;
        refused(taken, Code::AlreadyExists);
        let kept = unpack(&snapshots, &two, &one, true).await;
        assert_eq!(public.worker.find_chain(&chain_id('2')).await.unwrap(), None);
        let sent = labels(&[(REF, &two)]);
        let again = snapshots.prepare_labelled(&unpack_key(3, &two), &one, sent.clone()).await;
        refused(again, Code::AlreadyExists);
        assert_eq!(adopted(&snapshots, &two, &one).await, [kept]);
        let other = format!("other/4/extract-775838128-m-A0 {two}");
        let other = snapshots.prepare_labelled(&other, &one, sent).await.unwrap();
        assert!(other.1, "another namespace is given the layer for its hash");
        for snapshots in [snapshots, shared] {
            snapshots.stop().await;
        }
    });
}
