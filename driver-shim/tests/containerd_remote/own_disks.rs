//! Containers above images that have a disk of their own, by labels.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use slackwater_client::query::ListSnapshots;
use slackwater_driver::containerd::proto::Mount;
use slackwater_driver::worker::{Key, LayerKind};
use tonic::Code;

use crate::images::{Stand, layers};
use crate::support::snapshots::labels;
use crate::support::tools::noted;
use crate::support::{Appliance, DISK_BYTES, mounts_below};
use crate::uppers::{directory, upper};
use crate::{SHARED, bounded, refused, runtime};

const DISK: &str = "containerd.io/snapshot/slackwater.disk";
const DISK_SIZE: &str = "containerd.io/snapshot/slackwater.disk-size";

/// No power of two, so that a smaller disk has to grow.
const SIZE_BYTES: u64 = 100 << 20;

fn disk(mounts: &[Mount]) -> PathBuf {
    directory(mounts).parent().unwrap().to_owned()
}

/// What a file system says of its size: without its own tables, which take less than a quarter of a small one.
fn file_system_bytes(path: &Path) -> u64 {
    let figures = rustix::fs::statvfs(path).unwrap();
    figures.f_blocks * figures.f_frsize
}

#[test]
fn a_container_has_a_disk_of_its_own_that_ends_with_it() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let stand = Stand::start(&appliance, LayerKind::Images).await;
        let snapshots = &stand.snapshots;
        let names = stand.pull(&layers()[..2]).await;
        let prepare = |key: &'static str, pairs: &[(&str, &str)]| {
            snapshots.prepare_mounts(key, &names[1], labels(pairs))
        };
        let common = prepare("common", &[]).await.unwrap();
        let own = prepare("own", &[(DISK, "own")]).await.unwrap();
        let size = SIZE_BYTES.to_string();
        let sized = prepare("sized", &[(DISK_SIZE, &*size)]).await.unwrap();
        let other = prepare("other", &[]).await.unwrap();
        assert_eq!(disk(&other), disk(&common), "the disk that is shared stays the same");
        let disks = [disk(&common), disk(&own), disk(&sized)];
        assert!(disks[0] != disks[1] && disks[1] != disks[2] && disks[0] != disks[2]);
        for (mounts, bytes) in [(&own, DISK_BYTES), (&sized, SIZE_BYTES)] {
            let found = file_system_bytes(&upper(mounts));
            assert!((bytes / 4 * 3..=bytes).contains(&found), "{found} of {bytes}");
        }

        // One that is full fills no other.
        let (full, beside) = (stand.mount(&sized), stand.mount(&common));
        let error =
            fs::write(full.path().join("filled"), vec![1; usize::try_from(SIZE_BYTES).unwrap()]);
        assert_eq!(error.unwrap_err().kind(), ErrorKind::StorageFull);
        fs::write(beside.path().join("written"), vec![1; 1 << 20]).unwrap();
        fs::remove_file(full.path().join("filled")).unwrap();
        fs::write(full.path().join("written"), b"sized").unwrap();
        drop(full);

        // After a restart, too.
        let stand = stand.restart(&appliance, LayerKind::Images).await;
        let snapshots = &stand.snapshots;
        stand.machine.worker.reconcile(Duration::ZERO).await.unwrap();
        assert_eq!(stand.disks().await.len(), 3);
        for (key, mounts) in [("sized", &sized), ("own", &own)] {
            assert_eq!(&snapshots.all_mounts(key).await.unwrap(), mounts);
            fs::write(upper(mounts).join("after"), b"x").unwrap();
            assert!(snapshots.usage(key).await.unwrap().inodes > 1);
        }

        // A commit keeps what was written, and not the disk.
        snapshots.commit("of sized", "sized").await.unwrap();
        stand.await_disks(2).await;
        let view = stand.view("of sized").await;
        assert_eq!((&*view.read("written"), &*view.read("etc/kept")), ("sized", "first"));
        assert!(!view.names().contains("filled"));
        drop((view, beside));
        snapshots.remove("own").await.unwrap();
        stand.await_disks(1).await;
        let mounted =
            mounts_below(&stand.machine.path().join("state/mounts").canonicalize().unwrap());
        assert_eq!(mounted, [disk(&common)]);
        for key in ["common", "other"] {
            snapshots.remove(key).await.unwrap();
        }
        stand.await_disks(0).await;
        stand.stop().await;
    });
}

#[test]
fn what_is_lost_on_the_disk_that_is_shared_is_none_of_an_own_one() {
    let name = "own_disks::what_is_lost_on_the_disk_that_is_shared_is_none_of_an_own_one";
    lose(name, "common", "own");
}

#[test]
fn what_is_lost_on_an_own_disk_is_none_of_the_shared_one() {
    lose("own_disks::what_is_lost_on_an_own_disk_is_none_of_the_shared_one", "own", "common");
}

/// Has the first sync, for the commit of a container, say that writes were lost, and not that of the other one's disk.
fn lose(name: &str, lost: &str, kept: &str) {
    let Some(_tools) = noted(name, 1) else { return };
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let stand = Stand::start(&appliance, LayerKind::Images).await;
        // The one of the start, which is not to sync the disks.
        stand.machine.worker.reconcile(Duration::ZERO).await.unwrap();
        let names = stand.pull(&layers()[..1]).await;
        let prepare = |key, pairs| stand.snapshots.prepare_mounts(key, &names[0], labels(pairs));
        let common = prepare("common", &[]).await.unwrap();
        let own = prepare("own", &[(DISK, "own")]).await.unwrap();
        for mounts in [&common, &own] {
            fs::write(upper(mounts).join("written"), b"x").unwrap();
        }
        let said = refused(stand.snapshots.commit("of lost", lost).await, Code::Internal);
        assert!(said.contains("lost"), "{said}");
        let is_damaged = |key| stand.machine.worker.get(&Key::containerd(key)).unwrap().is_damaged;
        assert!(is_damaged(lost) && !is_damaged(kept));
        let next = prepare("next", &[]).await.unwrap();
        assert_eq!(disk(&next) == disk(&common), kept == "common");
        stand.snapshots.commit("of kept", kept).await.unwrap();
        let view = stand.view("of kept").await;
        assert_eq!(view.read("written"), "x");
        drop(view);
        for key in ["view of of kept", lost, "next"] {
            stand.snapshots.remove(key).await.unwrap();
        }
        stand.await_disks(0).await;
        stand.stop().await;
    });
}

/// The empty disks that are kept on the appliance.
async fn empty_disks(stand: &Stand) -> usize {
    let all = stand.machine.worker.client().snapshots(&ListSnapshots::default()).await.unwrap();
    let names = all.items.into_iter().filter_map(|snapshot| snapshot.name);
    names.filter(|name| name.starts_with("slackwater-empty-")).count()
}

#[test]
fn a_size_that_cannot_be_makes_no_container() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        for kept in [LayerKind::Disks, LayerKind::Images] {
            let stand = Stand::start(&appliance, kept).await;
            let snapshots = &stand.snapshots;
            let base = snapshots.prepare_mounts("base", "", labels(&[])).await;
            base.unwrap();
            snapshots.commit("base of all", "base").await.unwrap();
            let prepare = |pairs: &[(&str, &str)]| {
                snapshots.prepare_mounts("c", "base of all", labels(pairs))
            };
            let small = DISK_BYTES / 2;
            for pairs in
                [&[(DISK, "mine")][..], &[(DISK_SIZE, "1GB")], &[(DISK, "own"), (SHARED, "true")]]
            {
                refused(prepare(pairs).await, Code::InvalidArgument);
            }
            let size = small.to_string();
            match kept {
                // The layer below is a disk already.
                LayerKind::Disks => {
                    prepare(&[(DISK, "own")]).await.unwrap();
                    snapshots.remove("c").await.unwrap();
                    let said =
                        refused(prepare(&[(DISK_SIZE, &*size)]).await, Code::InvalidArgument);
                    assert!(said.contains(&DISK_BYTES.to_string()), "{said}");
                    let larger = (DISK_BYTES + SIZE_BYTES).to_string();
                    let root = prepare(&[(DISK_SIZE, &*larger)]).await.unwrap();
                    let found = file_system_bytes(Path::new(&root[0].source));
                    assert!(found > DISK_BYTES, "{found}");
                    let on_nothing = labels(&[(DISK_SIZE, &*larger)]);
                    let root = snapshots.prepare_mounts("d", "", on_nothing).await.unwrap();
                    let found = file_system_bytes(Path::new(&root[0].source));
                    assert!(found > DISK_BYTES, "{found}");
                    snapshots.remove("d").await.unwrap();
                    assert_eq!(empty_disks(&stand).await, 1, "none of another size stays");
                }
                LayerKind::Images => {
                    prepare(&[(DISK_SIZE, &*size)]).await.unwrap();
                }
            }
            snapshots.remove("c").await.unwrap();
            snapshots.remove("base of all").await.unwrap();
            stand.await_disks(0).await;
            stand.stop().await;
        }
    });
}
