//! Disks and images of layers beside each other, on one worker and on one appliance.

use std::fs;
use std::path::Path;

use rustix::fs::XattrFlags;
use slackwater_archive::{REFERENCE_LINK, REFERENCE_LINK_TARGET, REFERENCE_MEMBER};
use slackwater_driver::containerd::proto::{DiffRequest, Mount};
use slackwater_driver::image::digest::{Digest, chain_id};
use slackwater_driver::worker::{
    Content as VolumeContent, Engine, Key, LayerKind, Volume, WorkerError,
};
use tonic::Code;

use crate::images::{Stand, TAR, chains, layers, set, tar};
use crate::support::Appliance;
use crate::support::snapshots::labels;
use crate::{REF, bounded, refused, runtime, unpack_key};

/// The beginning of the first layer, in the middle of its large file.
const LARGE_HALF: usize = 1 << 20;

#[test]
fn a_layer_is_of_the_kind_of_those_below_it_and_of_when_it_was_prepared() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let [one, two] = [tar(&[("one", b"1")]), tar(&[("two", b"2")])];
        let chains = chains(&[one, two.clone()]);
        let stand = Stand::start(&appliance, LayerKind::Disks).await;
        let below = format!("default/9/{}", chains[0]);
        let mounts = stand.prepare(&unpack_key(1, &chains[0]), "", &chains[0]).await;
        fs::write(Path::new(&mounts[0].source).join("one"), "1").unwrap();
        stand.commit(&below, &unpack_key(1, &chains[0]), &chains[0]).await;

        // Above a disk there are disks, whatever is set.
        let stand = stand.restart(&appliance, LayerKind::Images).await;
        let key = unpack_key(2, &chains[1]);
        let mounts = stand.prepare(&key, &below, &chains[1]).await;
        assert_eq!(mounts[0].r#type, "bind");
        // This driver unpacks it all the same, as containerd may have no other differ for it.
        let applied = stand.apply(&mounts, &two).await.unwrap();
        assert_eq!(applied.digest, Digest::of(&two).to_string());
        let root = Path::new(&mounts[0].source);
        for (name, content) in [("one", "1"), ("two", "2")] {
            assert_eq!(fs::read_to_string(root.join(name)).unwrap(), content);
        }
        stand.commit("above", &key, &chains[1]).await;
        assert!(matches!(stand.content("above"), VolumeContent::Snapshot { .. }));

        // What is begun as an image becomes one.
        let mounts = stand.snapshots.prepare_mounts("begun", "", labels(&[])).await.unwrap();
        fs::write(Path::new(&mounts[0].source).join("a"), "a").unwrap();
        let stand = stand.restart(&appliance, LayerKind::Disks).await;
        assert_eq!(stand.snapshots.all_mounts("begun").await.unwrap(), mounts);
        stand.snapshots.commit("image", "begun").await.unwrap();
        stand.make_image("image").await;
        let mounts = stand.snapshots.prepare_mounts("c", "image", labels(&[])).await.unwrap();
        assert_eq!((mounts[0].r#type.as_str(), mounts.len()), ("overlay", 1));
        let container = stand.mount(&mounts);
        assert_eq!(container.names(), set(&["a"]));
        drop(container);
        stand.stop().await;
    });
}

#[test]
fn an_image_is_taken_only_above_the_layers_that_it_was_made_above() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let layers = layers();
        let chains = chains(&layers);
        let first = Stand::start(&appliance, LayerKind::Images).await;
        first.pull(&layers[..2]).await;
        let second = Stand::start(&appliance, LayerKind::Images).await;
        let other = second.pull(&[tar(&[("other", b"x")])]).await;
        second.snapshots.prepare_mounts("container", "", labels(&[])).await.unwrap();
        second.snapshots.commit("stopped", "container").await.unwrap();
        for (number, parent) in ["", other[0].as_str(), "stopped"].into_iter().enumerate() {
            let key = unpack_key(number, &chains[1]).replace("default/", "k8s.io/");
            let sent = labels(&[(REF, &chains[1])]);
            // To be unpacked: it is not on the appliance.
            second.snapshots.prepare_mounts(&key, parent, sent).await.unwrap();
        }
        first.stop().await;
        second.stop().await;
    });
}

/// A reference through the mounts.
pub(crate) fn unpack_as_containerd(stand: &Stand, mounts: &[Mount], reference: &[u8]) {
    let root = stand.mount(mounts);
    let mut archive = tar::Archive::new(reference);
    let mut entries = archive.entries().unwrap();
    let text = std::io::read_to_string(entries.next().unwrap().unwrap()).unwrap();
    fs::write(root.path().join(REFERENCE_MEMBER), text).unwrap();
    let link = root.path().join(REFERENCE_LINK);
    fs::hard_link(root.path().join(REFERENCE_LINK_TARGET), link).unwrap();
}

/// Above what is not known as a chain, as a stopped container, a layer is unpacked into the tree that is seen there.
#[test]
fn a_layer_above_no_chain_is_unpacked_through_the_overlay() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let stand = Stand::start(&appliance, LayerKind::Images).await;
        let names = stand.pull(&layers()[..1]).await;
        stand.snapshots.prepare_mounts("c", &names[0], labels(&[])).await.unwrap();
        stand.snapshots.commit("stopped", "c").await.unwrap();
        let chain = chains(&layers())[1].clone();
        let key = unpack_key(3, &chain);
        let mounts = stand.prepare(&key, "stopped", &chain).await;
        let applied = stand.apply(&mounts, &layers()[1]).await.unwrap();
        assert_eq!(applied.digest, Digest::of(&layers()[1]).to_string());
        assert!(matches!(stand.content(&key), VolumeContent::Upper { .. }));
        stand.commit("above", &key, &chain).await;
        // As the second layer is above the first one, wherever it was unpacked.
        let other = Stand::start(&appliance, LayerKind::Images).await;
        let others = other.pull(&layers()[..2]).await;
        let (seen, expected) = (stand.view("above").await, other.view(&others[1]).await);
        assert_eq!(seen.names(), expected.names());
        for name in ["etc/kept", "old/new"] {
            assert_eq!(seen.read(name), expected.read(name), "{name}");
        }
        assert!(!seen.names().contains("etc/removed") && !seen.names().contains("old/inner"));
        drop((seen, expected));
        // What ends in the middle is no layer for another differ to go on with.
        let key = unpack_key(4, &chain);
        let mounts = stand.prepare(&key, "stopped", &chain).await;
        let half = &layers()[0][..LARGE_HALF];
        let said = refused(stand.apply(&mounts, half).await, Code::Internal);
        assert!(said.contains("truncated"), "{said}");
        other.stop().await;
        stand.stop().await;
    });
}

#[test]
fn a_reference_above_images_is_the_disk_that_it_names() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let disks = Stand::start(&appliance, LayerKind::Disks).await;
        let mounts = disks.snapshots.prepare_mounts("one", "", labels(&[])).await.unwrap();
        fs::write(Path::new(&mounts[0].source).join("meant"), "x").unwrap();
        disks.snapshots.commit("base", "one").await.unwrap();
        let worker = &disks.machine.worker;
        let taken = worker.snapshot_of(&Key::containerd("base")).await.unwrap().unwrap();
        worker.publish(taken.id).await.unwrap();
        let reference = worker.reference_to(taken.id).await.unwrap().to_archive();

        let base = tar(&[("base", b"x")]);
        let below_chain = Digest::of(&base).to_string();
        for by_driver in [true, false] {
            let stand = Stand::start(&appliance, LayerKind::Images).await;
            let below = stand.pull(std::slice::from_ref(&base)).await.remove(0);
            for (number, (parent, below)) in
                [("", None), (below.as_str(), Some(below_chain.as_str()))].into_iter().enumerate()
            {
                let chain = chain_id(below, &Digest::of(&reference).to_string());
                let key = unpack_key(number, &chain);
                let mounts = stand.prepare(&key, parent, &chain).await;
                if by_driver {
                    stand.apply(&mounts, &reference).await.unwrap();
                } else {
                    unpack_as_containerd(&stand, &mounts, &reference);
                }
                let name = format!("default/9/reference {chain}");
                stand.snapshots.commit(&name, &key).await.unwrap();
                assert!(matches!(stand.content(&name), VolumeContent::Snapshot { .. }));
                let seen = stand.view(&name).await;
                assert_eq!(seen.names(), set(&["meant"]));
            }
            // Nothing of the driver's keeps the disk in use.
            let worker = &stand.machine.worker;
            while !worker.list(Engine::Containerd).is_empty() {
                let childless = |volume: &Volume| worker.children(&volume.key).is_empty();
                for volume in worker.list(Engine::Containerd).into_iter().filter(childless) {
                    worker.remove(&volume.key).await.unwrap();
                }
            }
            stand.await_disks(0).await;
            stand.stop().await;
        }
        let stand = Stand::start(&appliance, LayerKind::Images).await;
        let below = stand.pull(std::slice::from_ref(&base)).await.remove(0);
        // An image is no disk, whoever says so.
        let image = stand.image(&below);
        let error = stand.machine.worker.bind(&Key::containerd("x"), image.id).await.unwrap_err();
        assert!(matches!(error, WorkerError::NotFound { .. }), "{error}");
        stand.snapshots.prepare_mounts("x", "", labels(&[])).await.unwrap();
        let error = stand.machine.worker.bind(&Key::containerd("x"), image.id).await.unwrap_err();
        assert!(matches!(error, WorkerError::OtherKind { .. }), "{error}");
        stand.stop().await;
        disks.stop().await;
    });
}

#[test]
fn the_diff_of_what_nothing_is_below_and_the_attributes_of_a_root() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let stand = Stand::start(&appliance, LayerKind::Images).await;
        let snapshots = &stand.snapshots;
        let mounts = snapshots.prepare_mounts("c", "", labels(&[])).await.unwrap();
        let root = Path::new(&mounts[0].source);
        fs::write(root.join("a"), "a").unwrap();
        rustix::fs::setxattr(root, "user.of-root", b"kept", XattrFlags::empty()).unwrap();
        // containerd compares with a view of nothing.
        let left = snapshots.view_mounts("nothing", "").await.unwrap();
        let asked = |left, right| DiffRequest {
            left,
            right,
            media_type: TAR.to_owned(),
            ..DiffRequest::default()
        };
        let diff = snapshots.diff("default", None, asked(left.clone(), mounts)).await.unwrap();
        snapshots.commit("image", "c").await.unwrap();
        let right = snapshots.view_mounts("seen", "image").await.unwrap();
        let again = snapshots.diff("default", None, asked(left, right)).await.unwrap();
        assert_eq!(again.digest, diff.digest);

        let mounts = snapshots.prepare_mounts("d", "image", labels(&[])).await.unwrap();
        let container = stand.mount(&mounts);
        let mut value = [0; 16];
        let length = rustix::fs::getxattr(container.path(), "user.of-root", &mut value).unwrap();
        assert_eq!(&value[..length], b"kept");
        drop(container);
        stand.stop().await;
    });
}

#[test]
fn images_are_no_one_snapshot() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let stand = Stand::start(&appliance, LayerKind::Images).await;
        let names = stand.pull(&layers()[..2]).await;
        stand.snapshots.prepare_mounts("c", &names[1], labels(&[])).await.unwrap();
        let worker = &stand.machine.worker;
        for name in ["c", &names[1]] {
            let error = worker.capture(&Key::containerd(name)).await.unwrap_err();
            assert!(matches!(error, WorkerError::OfImages { .. }), "{error}");
            assert!(error.to_string().contains("one for each layer"), "{error}");
        }
        let error = worker.snapshot_of(&Key::containerd(names[1].as_str())).await.unwrap_err();
        assert!(matches!(error, WorkerError::OfImages { .. }), "{error}");
        stand.stop().await;
    });
}
