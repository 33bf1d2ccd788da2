//! References to the images of layers: on other workers they are the same images; and the capture of what is written
//! above images.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use slackwater_client::query::ListSnapshots;
use slackwater_driver::containerd::proto::CommitRequest;
use slackwater_driver::image::digest::{Digest, chain_id};
use slackwater_driver::worker::{
    Content as VolumeContent, Engine, Key, LayerKind, SnapshotRef, WorkerError,
};
use tonic::Code;

use crate::images::{Stand, layers, set};
use crate::kinds::unpack_as_containerd;
use crate::support::snapshots::labels;
use crate::support::{Appliance, mounts_below};
use crate::{ANNOTATION, REF, bounded, refused, runtime, unpack_key};

/// Captures of what is written all the time.
const CAPTURES: usize = 5;

/// An image by reference, the lowest layer first.
struct ByReference {
    archives: Vec<Vec<u8>>,
    chains: Vec<String>,
    annotations: Vec<String>,
}

impl ByReference {
    /// Publishes images, as `image convert` does.
    async fn of(stand: &Stand, images: &[SnapshotRef]) -> Self {
        let worker = &stand.machine.worker;
        let mut made = Self { archives: vec![], chains: vec![], annotations: vec![] };
        for image in images {
            let reference = worker.reference_to(image.id).await.unwrap();
            let archive = reference.to_archive();
            let below = made.chains.last().map(String::as_str);
            let chain = chain_id(below, &Digest::of(&archive).to_string());
            worker.publish(image.id).await.unwrap();
            worker.add_chain(image.id, &chain.parse().unwrap()).await.unwrap();
            let (store, size) = (&reference.store_id, reference.size_bytes);
            made.annotations.push(format!("{store}/{}/{size}", image.id));
            made.archives.push(archive);
            made.chains.push(chain);
        }
        made
    }
}

/// How a worker gets the layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// By the driver's differ.
    Apply,
    /// By containerd's own.
    Mounts,
    /// By the manifest's annotations, without the blobs.
    Annotation,
}

/// Pulls an image by reference; the names of its layers.
async fn pull(stand: &Stand, image: &ByReference, way: Way) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for (index, (archive, chain)) in image.archives.iter().zip(&image.chains).enumerate() {
        let parent = names.last().cloned().unwrap_or_default();
        let key = unpack_key(index, chain);
        if way == Way::Annotation {
            let key = key.replace("default/", "k8s.io/");
            let sent = labels(&[(REF, chain), (ANNOTATION, &image.annotations[index])]);
            refused(stand.snapshots.prepare_mounts(&key, &parent, sent).await, Code::AlreadyExists);
            names.push(chain.clone());
            continue;
        }
        let mounts = stand.prepare(&key, &parent, chain).await;
        match way {
            Way::Apply => drop(stand.apply(&mounts, archive).await.unwrap()),
            _ => unpack_as_containerd(stand, &mounts, archive),
        }
        let name = format!("default/9/{chain}");
        stand.commit(&name, &key, chain).await;
        names.push(name);
    }
    names
}

#[test]
fn a_reference_to_an_image_is_that_image_on_workers_of_both_kinds() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let first = Stand::start(&appliance, LayerKind::Images).await;
        let pulled = first.pull(&layers()).await;
        let images: Vec<_> = pulled.iter().map(|name| first.image(name)).collect();
        let image = ByReference::of(&first, &images).await;
        let expected = first.view(&pulled[2]).await.names();
        for (kept, way) in [
            (LayerKind::Images, Way::Apply),
            (LayerKind::Images, Way::Mounts),
            (LayerKind::Images, Way::Annotation),
            (LayerKind::Disks, Way::Mounts),
            (LayerKind::Disks, Way::Annotation),
        ] {
            let stand = Stand::start(&appliance, kept).await;
            let names = pull(&stand, &image, way).await;
            let found: Vec<_> = names.iter().map(|name| stand.image(name)).collect();
            assert_eq!(found, images, "{kept} {way:?}");
            let view = stand.view(&names[2]).await;
            assert_eq!(view.names(), expected, "{kept} {way:?}");
            drop(view);
            // What is built on it is an image, whatever is set.
            let mounts = stand.snapshots.prepare_mounts("c", &names[2], labels(&[])).await.unwrap();
            let container = stand.mount(&mounts);
            fs::write(container.path().join("new"), "x").unwrap();
            drop(container);
            stand.snapshots.commit("child", "c").await.unwrap();
            stand.make_image("child").await;
            stand.stop().await;
        }
        first.stop().await;
    });
}

#[test]
fn an_image_by_reference_is_refused_above_a_disk() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let first = Stand::start(&appliance, LayerKind::Images).await;
        let pulled = first.pull(&layers()[..1]).await;
        let image = ByReference::of(&first, &[first.image(&pulled[0])]).await;

        let stand = Stand::start(&appliance, LayerKind::Disks).await;
        let base = Digest::of(b"base").to_string();
        let mounts = stand.prepare(&unpack_key(1, &base), "", &base).await;
        fs::write(Path::new(&mounts[0].source).join("base"), "x").unwrap();
        stand.commit("base", &unpack_key(1, &base), &base).await;
        let chain = chain_id(Some(&base), &Digest::of(&image.archives[0]).to_string());
        let key = unpack_key(2, &chain);
        let mounts = stand.prepare(&key, "base", &chain).await;
        unpack_as_containerd(&stand, &mounts, &image.archives[0]);
        let (name, key) = ("above".to_owned(), key);
        let commit = CommitRequest { name, key, ..CommitRequest::default() };
        let said = refused(stand.snapshots.commit_as(commit).await, Code::FailedPrecondition);
        assert!(said.contains("what is below it is a disk"), "{said}");
        assert_eq!(stand.snapshots.names(&["kind==committed"]).await, ["base"]);
        // Nor above itself: overlayfs refuses that when it is mounted.
        let images = Stand::start(&appliance, LayerKind::Images).await;
        let mut twice = image.archives.clone();
        twice.push(image.archives[0].clone());
        let below = pull(&images, &image, Way::Apply).await;
        let chain = chain_id(Some(&image.chains[0]), &Digest::of(&twice[1]).to_string());
        let key = unpack_key(2, &chain);
        let mounts = images.prepare(&key, &below[0], &chain).await;
        images.apply(&mounts, &twice[1]).await.unwrap();
        let commit = CommitRequest { name: "twice".to_owned(), key, ..CommitRequest::default() };
        let said = refused(images.snapshots.commit_as(commit).await, Code::FailedPrecondition);
        assert!(said.contains("below it already"), "{said}");
        images.stop().await;
        first.stop().await;
        stand.stop().await;
    });
}

/// A program that writes a number to one file and then to another, until this goes.
struct Pairs {
    is_stopped: Arc<AtomicBool>,
    writing: Option<JoinHandle<()>>,
}

impl Pairs {
    fn write_in(folder: &Path) -> Self {
        let files = ["first", "second"].map(|name| File::create(folder.join(name)).unwrap());
        let is_stopped = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&is_stopped);
        let writing = std::thread::spawn(move || {
            let mut number: u64 = 0;
            while !until.load(Ordering::Acquire) {
                number += 1;
                for file in &files {
                    file.write_all_at(&number.to_le_bytes(), 0).unwrap();
                }
            }
        });
        Self { is_stopped, writing: Some(writing) }
    }
}

impl Drop for Pairs {
    fn drop(&mut self) {
        self.is_stopped.store(true, Ordering::Release);
        let _ = self.writing.take().map(JoinHandle::join);
    }
}

fn number_in(folder: &Path, name: &str) -> u64 {
    let bytes = fs::read(folder.join(name)).unwrap();
    bytes.try_into().map(u64::from_le_bytes).unwrap_or_default()
}

#[test]
fn a_capture_is_what_was_written_at_one_moment_and_the_container_goes_on() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let stand = Stand::start(&appliance, LayerKind::Images).await;
        let worker = &stand.machine.worker;
        let names = stand.pull(&layers()).await;
        let mounts = stand.snapshots.prepare_mounts("c", &names[2], labels(&[])).await.unwrap();
        let container = stand.mount(&mounts);
        fs::remove_file(container.path().join("etc/third")).unwrap();
        fs::remove_dir_all(container.path().join("old")).unwrap();
        let pairs = Pairs::write_in(container.path());
        let (key, parent) = (Key::containerd("c"), Key::containerd(names[2].as_str()));
        let mut images: Vec<_> = names.iter().map(|name| stand.image(name)).collect();
        let mut last = 0;
        for _ in 0..CAPTURES {
            let captured = worker.capture_image(&key, Some(parent.clone())).await.unwrap();
            let tree = worker.view_of_images(&[captured, images[2], images[1], images[0]]).await;
            let tree = tree.unwrap();
            let expected = set(&["etc", "etc/kept", "first", "large", "second"]);
            assert_eq!(crate::images::names_below(tree.path(), ""), expected);
            let [first, second] = ["first", "second"].map(|name| number_in(tree.path(), name));
            assert!(second <= first && first <= second + 1, "{first} and {second}");
            assert!(first >= last, "{first} after {last}");
            last = first;
        }
        drop(pairs);
        assert!(number_in(container.path(), "first") >= last);
        assert!(matches!(stand.content("c"), VolumeContent::Upper { .. }));

        // The disk as it was is mounted no more, and gone.
        let views = stand.machine.path().join("state/views").canonicalize().unwrap();
        assert_eq!(mounts_below(&views), [""; 0].map(std::path::PathBuf::from));
        stand.await_disks(1).await;
        let disks = stand.disks().await;
        let all = worker.client().snapshots(&ListSnapshots::default()).await.unwrap().items;
        let of_disk: Vec<_> = all.iter().filter(|one| disks.contains(&one.path)).collect();
        assert!(of_disk.is_empty(), "{of_disk:?}");
        // Another worker has it by reference.
        images.push(worker.capture_image(&key, Some(parent.clone())).await.unwrap());
        let image = ByReference::of(&stand, &images).await;
        let other = Stand::start(&appliance, LayerKind::Images).await;
        let pulled = pull(&other, &image, Way::Apply).await;
        let seen = other.view(&pulled[3]).await;
        assert_eq!(seen.names(), container.names());
        assert_eq!(number_in(seen.path(), "first"), number_in(container.path(), "first"));
        drop((seen, container));
        let snapshots = other.machine.worker.list(Engine::Containerd).len();
        assert_eq!(snapshots, 4 + 1, "the layers and the view");

        let error = worker.capture_image(&parent, None).await.unwrap_err();
        assert!(matches!(error, WorkerError::NothingWritten { .. }), "{error}");
        other.stop().await;
        stand.stop().await;
    });
}
