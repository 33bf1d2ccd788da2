//! What keeps the image of a layer: the file that it was written to. And what a driver leaves that dies before it is
//! named.

use std::time::{Duration, Instant};

use slackwater_client::types::{CreateSnapshot, DeletionPolicy, RegisterChain, Snapshot};
use slackwater_driver::worker::{Content, Key, LayerKind};

use crate::images::{Stand, chains, layers};
use crate::support::Appliance;
use crate::{bounded, runtime, unpack_key};

impl Stand {
    /// The path of the file that a volume has on the appliance.
    fn hold(&self, name: &str) -> String {
        let id = self.machine.worker.worker_id();
        match self.content(name) {
            Content::ImageFile { name: hold, .. } | Content::Image { hold, .. } => {
                format!("workers/{id}/holds/{hold}")
            }
            other => panic!("no image: {other:?}"),
        }
    }

    async fn snapshot(&self, name: &str) -> Snapshot {
        let id = self.image(name).id;
        self.machine.worker.client().snapshot(id).await.unwrap()
    }

    /// Begins to unpack the lowest layer, as far as Apply; its key, its chain, and the name that it is to have.
    async fn apply_first(&self) -> (String, String, String) {
        let (layer, chain) = (&layers()[0], chains(&layers()[..1]).remove(0));
        let key = unpack_key(1, &chain);
        let mounts = self.prepare(&key, "", &chain).await;
        self.apply(&mounts, layer).await.unwrap();
        let name = format!("default/9/{chain}");
        (key, chain, name)
    }
}

#[test]
fn the_file_of_an_image_keeps_its_snapshot() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let stand = Stand::start(&appliance, LayerKind::Images).await;
        let (key, chain, name) = stand.apply_first().await;
        let hold = stand.hold(&key);
        stand.commit(&name, &key, &chain).await;
        assert_eq!(stand.hold(&name), hold);
        let snapshot = stand.snapshot(&name).await;
        assert_eq!((&snapshot.path, snapshot.clone_count), (&hold, 1));
        // Another worker makes a clone, as it has no such file.
        let other = Stand::start(&appliance, LayerKind::Images).await;
        let names = other.pull(&layers()[..1]).await;
        assert_eq!(other.snapshot(&names[0]).await.clone_count, 2);
        stand.machine.worker.remove(&Key::containerd(name.clone())).await.unwrap();
        stand.await_disks(0).await;
        assert_eq!(other.snapshot(&names[0]).await.clone_count, 1);
        other.machine.worker.remove(&Key::containerd(names[0].clone())).await.unwrap();
        other.await_disks(0).await;
        let gone = appliance.client().snapshot(snapshot.id).await.unwrap_err();
        assert!(gone.is_not_found(), "{gone}");
        other.stop().await;
        stand.stop().await;
    });
}

#[test]
fn a_commit_whose_answer_was_lost_takes_what_it_made() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        for is_registered in [true, false] {
            let stand = Stand::start(&appliance, LayerKind::Images).await;
            let (key, chain, name) = stand.apply_first().await;
            let (path, client) = (stand.hold(&key), stand.machine.worker.client().clone());
            let made = match is_registered {
                true => {
                    let chain_id = chain.parse().unwrap();
                    let labels = [("slackwater.below".to_owned(), "nothing".to_owned())].into();
                    let request =
                        RegisterChain { path, chain_id, labels, blob: None, becomes_clone: true };
                    client.register_chain(&request).await.unwrap()
                }
                false => {
                    let deletion_policy = DeletionPolicy::OnZeroClones;
                    let becomes_clone = true;
                    let request = CreateSnapshot {
                        path,
                        deletion_policy,
                        becomes_clone,
                        ..CreateSnapshot::default()
                    };
                    client.create_snapshot(&request).await.unwrap()
                }
            };
            let hold = stand.hold(&key);
            stand.commit(&name, &key, &chain).await;
            assert_eq!((stand.image(&name).id, stand.hold(&name)), (made.id, hold));
            assert_eq!(stand.snapshot(&name).await.clone_count, 1);
            stand.machine.worker.remove(&Key::containerd(name.clone())).await.unwrap();
            stand.await_disks(0).await;
            stand.stop().await;
        }
    });
}

#[test]
fn what_was_being_made_when_the_driver_died_is_found_and_deleted() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let stand = Stand::start(&appliance, LayerKind::Images).await;
        let names = stand.pull(&layers()[..1]).await;
        let (client, id) = (appliance.client(), stand.machine.worker.worker_id());
        let snapshot = stand.image(&names[0]).id;
        let lost = ["disks", "holds"].map(|folder| {
            format!("workers/{id}/{folder}/{}", "6f1f3c1e-5d0c-4d55-9d61-2f5b6f0f6c11")
        });
        for path in &lost {
            client.create_clone(snapshot, path).await.unwrap();
        }
        // And what is no name of a file of a worker stays.
        let other = format!("workers/{id}/holds/other");
        client.create_file(&other, 4096).await.unwrap();
        let stand = stand.restart(&appliance, LayerKind::Images).await;
        stand.machine.worker.reconcile(std::time::Duration::ZERO).await.unwrap();
        for path in &lost {
            assert!(client.file(path).await.unwrap_err().is_not_found(), "{path}");
        }
        client.file(&other).await.unwrap();
        assert_eq!(stand.snapshot(&names[0]).await.clone_count, 1);
        stand.stop().await;
    });
}

#[test]
fn the_image_of_a_layer_is_mounted_before_anything_is_above_it() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let stand = Stand::start(&appliance, LayerKind::Images).await;
        let name = stand.pull(&layers()[..1]).await.remove(0);
        let source = format!(".snapshot/{}", stand.image(&name).id);
        let targets = async || {
            let mounts = stand.machine.worker.attach().await.unwrap().mounts().await.unwrap();
            let images = mounts.into_iter().filter(|mounted| mounted.source == source);
            images.map(|mounted| mounted.target).collect::<Vec<_>>()
        };
        let deadline = Instant::now() + Duration::from_secs(60);
        let ahead = loop {
            if let Some(target) = targets().await.pop() {
                break target;
            }
            assert!(Instant::now() < deadline, "it is not mounted");
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        let seen = stand.view(&name).await;
        assert_eq!(seen.read("etc/kept"), "first");
        // Not a second time above it. (A machine that stands still for ten seconds unmounts it in between.)
        let there = targets().await;
        assert_eq!(there.iter().filter(|target| **target == ahead).count(), 1, "{there:?}");
        drop(seen);
        // What nothing is above is removed all the same.
        for key in [format!("view of {name}"), name] {
            stand.machine.worker.remove(&Key::containerd(key)).await.unwrap();
        }
        stand.await_disks(0).await;
        while !targets().await.is_empty() {
            assert!(Instant::now() < deadline + Duration::from_secs(60), "it stays mounted");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        stand.stop().await;
    });
}
