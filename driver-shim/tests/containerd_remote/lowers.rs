//! Committed layers before and after they have an image of their own.

use std::fs;
use std::time::{Duration, Instant};

use slackwater_client::query::ListSnapshots;
use slackwater_driver::containerd::proto::DiffRequest;
use slackwater_driver::worker::{Content as VolumeContent, Key, LayerKind, WorkerError};
use tonic::Code;

use crate::images::{Stand, TAR, layers, options, set};
use crate::support::Appliance;
use crate::support::snapshots::labels;
use crate::support::tools::noted;
use crate::uppers::{await_gone, directory, upper};
use crate::{bounded, refused, runtime};

/// Longest time until an image is made by itself, also on a busy machine.
const IMAGED_WITHIN: Duration = Duration::from_secs(120);

/// Layers that are removed, each a millisecond later than the one before.
const ROUNDS: u64 = 20;

/// Committed layers one above the other: more than the options of a mount have room for as directories.
const STEPS: usize = 40;

impl Stand {
    pub(crate) async fn make_image(&self, name: &str) {
        self.machine.worker.make_image(&Key::containerd(name)).await.unwrap();
        self.image(name);
    }

    /// The same machine after its daemon was killed, with another time until images are made.
    async fn restart_imaging_after(self, appliance: &Appliance, time: Duration) -> Self {
        let Self { snapshots, containerd, machine } = self;
        let again = Self { snapshots, containerd, machine: machine.imaging_after(time) };
        again.restart(appliance, LayerKind::Images).await
    }

    fn is_directory(&self, name: &str) -> bool {
        matches!(self.content(name), VolumeContent::Lower { .. })
    }

    async fn snapshots_of_appliance(&self) -> usize {
        let query = ListSnapshots { limit: Some(1000), ..ListSnapshots::default() };
        self.machine.worker.client().snapshots(&query).await.unwrap().items.len()
    }

    /// The digest of what one view has and another has not.
    async fn difference(&self, below: &str, above: &str) -> String {
        let [mut left, mut right] = [Vec::new(), Vec::new()];
        for (mounts, name) in [(&mut left, below), (&mut right, above)] {
            let key = format!("of {name}");
            *mounts = self.snapshots.view_mounts(&key, name).await.unwrap();
        }
        let media_type = TAR.to_owned();
        let asked = DiffRequest { left, right, media_type, ..DiffRequest::default() };
        let digest = self.snapshots.diff("default", None, asked).await.unwrap().digest;
        for name in [below, above] {
            self.snapshots.remove(&format!("of {name}")).await.unwrap();
        }
        digest
    }
}

#[test]
fn a_committed_layer_is_read_where_it_was_written_until_it_is_an_image() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let stand = Stand::start(&appliance, LayerKind::Images).await;
        let snapshots = &stand.snapshots;
        let names = stand.pull(&layers()).await;
        let made_before = stand.snapshots_of_appliance().await;
        let mounts = snapshots.prepare_mounts("a", &names[2], labels(&[])).await.unwrap();
        let step = stand.mount(&mounts);
        fs::remove_file(step.path().join("etc/third")).unwrap();
        fs::remove_dir_all(step.path().join("old")).unwrap();
        fs::create_dir(step.path().join("old")).unwrap();
        fs::write(step.path().join("old/other"), b"one").unwrap();
        drop(step);
        snapshots.commit("one", "a").await.unwrap();
        assert!(stand.is_directory("one"));
        let of_one = directory(&mounts);

        // The next step is above the directory, and a container above both.
        let mounts = snapshots.prepare_mounts("b", "one", labels(&[])).await.unwrap();
        assert_eq!(options(&mounts, "lowerdir=")[0], of_one.join("upper").to_str().unwrap());
        let step = stand.mount(&mounts);
        assert_eq!(step.names(), set(&["etc", "etc/kept", "large", "old", "old/other"]));
        fs::write(step.path().join("etc/kept"), b"two").unwrap();
        fs::remove_file(step.path().join("old/other")).unwrap();
        drop(step);
        snapshots.commit("two", "b").await.unwrap();
        let of_two = directory(&mounts);
        let expected = set(&["etc", "etc/kept", "large", "old"]);
        let mounts = snapshots.prepare_mounts("c", "two", labels(&[])).await.unwrap();
        let container = stand.mount(&mounts);
        assert_eq!(container.names(), expected);
        assert_eq!(snapshots.usage("two").await.unwrap().inodes, 5, "the mark in `old`, too");
        let differences =
            [stand.difference(&names[2], "one").await, stand.difference("one", "two").await];
        assert_eq!(stand.snapshots_of_appliance().await, made_before, "nothing is packed");

        // With their images they are the same. What was given is there for as long as the container.
        stand.make_image("two").await;
        stand.make_image("one").await;
        let again =
            [stand.difference(&names[2], "one").await, stand.difference("one", "two").await];
        assert_eq!(again, differences);
        snapshots.cleanup().await.unwrap();
        for lower in [&of_one, &of_two] {
            assert!(lower.join("upper").exists(), "{}", lower.display());
        }
        fs::write(container.path().join("old/new"), b"x").unwrap();
        drop(container);
        let container = stand.mount(&mounts);
        assert_eq!(container.read("etc/kept"), "two");
        drop(container);
        let mounts = snapshots.all_mounts("c").await.unwrap();
        assert!(options(&mounts, "lowerdir=")[0].contains("/images/"), "{mounts:?}");
        let container = stand.mount(&mounts);
        assert_eq!(container.names(), set(&["etc", "etc/kept", "large", "old", "old/new"]));
        drop(container);
        snapshots.cleanup().await.unwrap();
        assert!(of_one.exists() && of_two.exists());
        snapshots.remove("c").await.unwrap();
        await_gone(&of_one).await;
        await_gone(&of_two).await;
        let view = stand.view("two").await;
        assert_eq!(view.names(), expected);
        drop(view);
        stand.await_disks(0).await;
        stand.stop().await;
    });
}

#[test]
fn images_of_committed_layers_are_made_by_themselves_also_after_a_kill() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let stand = Stand::start(&appliance, LayerKind::Images).await;
        let names = stand.pull(&layers()[..1]).await;
        let mounts = stand.snapshots.prepare_mounts("a", &names[0], labels(&[])).await.unwrap();
        fs::write(upper(&mounts).join("written"), b"x").unwrap();
        stand.snapshots.commit("one", "a").await.unwrap();
        // A second one is removed before: nothing is made of it.
        let gone = stand.snapshots.prepare_mounts("b", &names[0], labels(&[])).await.unwrap();
        stand.snapshots.commit("gone", "b").await.unwrap();
        stand.snapshots.remove("gone").await.unwrap();
        await_gone(&directory(&gone)).await;
        let stand = stand.restart(&appliance, LayerKind::Images).await;
        assert!(stand.is_directory("one"));
        let view = stand.view("one").await;
        assert_eq!(view.read("written"), "x");
        let stand = stand.restart_imaging_after(&appliance, Duration::ZERO).await;
        let deadline = Instant::now() + IMAGED_WITHIN;
        while stand.is_directory("one") {
            assert!(Instant::now() < deadline, "no image is made");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        stand.image("one");
        assert_eq!(view.read("written"), "x");
        assert!(directory(&mounts).exists(), "the view was given it");
        drop(view);
        stand.snapshots.remove("view of one").await.unwrap();
        await_gone(&directory(&mounts)).await;
        let view = stand.view("one").await;
        assert_eq!(view.read("written"), "x");
        drop(view);
        stand.stop().await;
    });
}

#[test]
fn nothing_is_unpacked_into_a_committed_layer_and_the_lowest_is_an_image_at_once() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let stand = Stand::start(&appliance, LayerKind::Images).await;
        let names = stand.pull(&layers()[..1]).await;
        let mounts = stand.snapshots.prepare_mounts("a", &names[0], labels(&[])).await.unwrap();
        stand.snapshots.commit("one", "a").await.unwrap();
        assert!(stand.is_directory("one"));
        // containerd's own differ would do it, if it were asked.
        refused(stand.apply(&mounts, &layers()[1]).await, Code::FailedPrecondition);
        stand.snapshots.prepare_mounts("b", "", labels(&[])).await.unwrap();
        stand.snapshots.commit("lowest", "b").await.unwrap();
        stand.image("lowest");
        stand.stop().await;
    });
}

#[test]
fn a_layer_is_removed_while_its_image_is_made() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let stand = Stand::start(&appliance, LayerKind::Images).await;
        let names = stand.pull(&layers()[..1]).await;
        let made_before = stand.snapshots_of_appliance().await;
        for round in 0..ROUNDS {
            let key = format!("step {round}");
            let mounts = stand.snapshots.prepare_mounts(&key, &names[0], labels(&[])).await;
            fs::write(upper(&mounts.unwrap()).join("written"), vec![7; 1 << 20]).unwrap();
            stand.snapshots.commit("one", &key).await.unwrap();
            let worker = stand.machine.worker.clone();
            let making = async move { worker.make_image(&Key::containerd("one")).await };
            let making = tokio::spawn(making);
            tokio::time::sleep(Duration::from_millis(round)).await;
            stand.snapshots.remove("one").await.unwrap();
            // It was made before, or not.
            match making.await.unwrap() {
                Ok(()) | Err(WorkerError::NotFound { .. }) => {}
                Err(error) => panic!("round {round}: {error}"),
            }
        }
        stand.await_disks(0).await;
        let deadline = Instant::now() + IMAGED_WITHIN;
        // One more is that of the empty disk.
        while stand.snapshots_of_appliance().await > made_before + 1 {
            assert!(Instant::now() < deadline, "snapshots are left");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        stand.stop().await;
    });
}

#[test]
fn many_committed_layers_fit_into_the_options_of_a_mount() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let stand = Stand::start(&appliance, LayerKind::Images).await;
        let mut parent = stand.pull(&layers()[..1]).await.remove(0);
        for step in 0..STEPS {
            let key = format!("step {step}");
            let mounts = stand.snapshots.prepare_mounts(&key, &parent, labels(&[])).await.unwrap();
            let name = format!("file {step}");
            fs::write(upper(&mounts).join(&name), key.as_bytes()).unwrap();
            parent = format!("after {step}");
            stand.snapshots.commit(&parent, &key).await.unwrap();
        }
        assert!(stand.is_directory(&parent) && !stand.is_directory("after 0"));
        let mounts = stand.snapshots.prepare_mounts("c", &parent, labels(&[])).await.unwrap();
        let container = stand.mount(&mounts);
        for step in 0..STEPS {
            assert_eq!(container.read(&format!("file {step}")), format!("step {step}"));
        }
        drop(container);
        stand.stop().await;
    });
}

#[test]
fn of_a_disk_that_lost_writes_nothing_more_is_mounted_and_the_next_has_another() {
    let name =
        "lowers::of_a_disk_that_lost_writes_nothing_more_is_mounted_and_the_next_has_another";
    // The first sync is that of the layer, the second that of what is committed after it.
    let Some(_tools) = noted(name, 2) else { return };
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let stand = Stand::start(&appliance, LayerKind::Images).await;
        // The one of the start, which is not to sync the disk.
        stand.machine.worker.reconcile(Duration::ZERO).await.unwrap();
        let names = stand.pull(&layers()[..1]).await;
        let container = async |key: &str, parent: &str| {
            stand.snapshots.prepare_mounts(key, parent, labels(&[])).await
        };
        let mounts = container("a", &names[0]).await.unwrap();
        fs::write(upper(&mounts).join("written"), b"x").unwrap();
        stand.snapshots.commit("one", "a").await.unwrap();
        container("b", "one").await.unwrap();
        let said = refused(stand.snapshots.commit("two", "b").await, Code::Internal);
        assert!(said.contains("lost"), "{said}");
        let said = refused(container("c", "one").await, Code::Internal);
        assert!(said.contains("one") && said.contains("lost"), "{said}");
        let refused = stand.machine.worker.make_image(&Key::containerd("one")).await.unwrap_err();
        assert!(matches!(refused, WorkerError::Damaged { .. }), "{refused}");
        // What is not above it is on another disk.
        let next = container("d", &names[0]).await.unwrap();
        assert_ne!(directory(&next).parent(), directory(&mounts).parent());
        for key in ["d", "b", "one"] {
            stand.snapshots.remove(key).await.unwrap();
        }
        stand.await_disks(0).await;
        stand.stop().await;
    });
}

#[test]
fn a_commit_that_is_asked_for_while_nothing_is_mounted_has_its_directory() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let stand = Stand::start(&appliance, LayerKind::Images).await;
        let names = stand.pull(&layers()[..1]).await;
        let mounts = stand.snapshots.prepare_mounts("a", &names[0], labels(&[])).await.unwrap();
        // As after a power cut before the directory was on the disk.
        fs::remove_dir_all(directory(&mounts)).unwrap();
        stand.snapshots.commit("one", "a").await.unwrap();
        assert!(upper(&mounts).exists());
        let view = stand.view("one").await;
        assert_eq!(view.read("etc/kept"), "first");
        drop(view);
        stand.stop().await;
    });
}

#[test]
fn committed_layers_are_read_and_become_images_after_a_power_cut() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let stand = Stand::start(&appliance, LayerKind::Images).await;
        // The one of the start, which is not to look at the disk while the power is cut.
        stand.machine.worker.reconcile(Duration::ZERO).await.unwrap();
        let content = |name: &str| name.repeat(100_000);
        let mut parent = stand.pull(&layers()[..1]).await.remove(0);
        // Nothing syncs them but their commits: no overlay is unmounted.
        for name in ["one", "two"] {
            let key = format!("step {name}");
            let mounts = stand.snapshots.prepare_mounts(&key, &parent, labels(&[])).await.unwrap();
            fs::write(upper(&mounts).join(name), content(name)).unwrap();
            stand.snapshots.commit(name, &key).await.unwrap();
            parent = name.to_owned();
        }
        let mounts = stand.snapshots.prepare_mounts("c", "two", labels(&[])).await.unwrap();
        fs::write(upper(&mounts).join("late"), b"x").unwrap();

        let stand = stand.reboot(&appliance).await;
        assert!(stand.is_directory("one") && stand.is_directory("two"));
        // As an engine asks that starts the container again.
        let mounts = stand.snapshots.all_mounts("c").await.unwrap();
        let container = stand.mount(&mounts);
        // What was not synced may be there.
        let mut names = container.names();
        names.remove("late");
        let expected =
            ["etc", "etc/kept", "etc/removed", "large", "old", "old/inner", "one", "two"];
        assert_eq!(names, set(&expected));
        for name in ["one", "two"] {
            assert_eq!(container.read(name), content(name));
        }
        drop(container);
        let mounts =
            stand.snapshots.prepare_mounts("step three", "two", labels(&[])).await.unwrap();
        fs::write(upper(&mounts).join("three"), b"three").unwrap();
        stand.snapshots.commit("three", "step three").await.unwrap();
        for name in ["three", "one", "two"] {
            stand.make_image(name).await;
        }
        let view = stand.view("three").await;
        assert_eq!(view.read("one") + &view.read("two"), content("one") + &content("two"));
        assert_eq!(view.read("three"), "three");
        drop(view);
        stand.stop().await;
    });
}
