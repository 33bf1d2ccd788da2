//! Layers that are kept as images: unpacked, shared, put together as overlays, committed.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use slackwater_client::query::ListFiles;
use slackwater_driver::containerd::proto::{
    ApplyRequest, CommitRequest, Descriptor, DiffRequest, Mount,
};
use slackwater_driver::image::digest::{Digest, chain_id};
use slackwater_driver::worker::{
    Content as VolumeContent, Engine, Key, LayerKind, SnapshotRef, Volume,
};
use tonic::Code;

use crate::support::content::{Containerd, Content};
use crate::support::snapshots::{Snapshots, labels};
use crate::support::{Appliance, Machine, mounts_below};
use crate::{REF, adopted, bounded, refused, runtime, unpack_key};

pub(crate) const TAR: &str = "application/vnd.oci.image.layer.v1.tar";

/// Longest time in which what nothing uses is unmounted and deleted, also on a busy machine.
const LET_GO_TIME: Duration = Duration::from_secs(120);

/// Bytes of a file that no commit is to read.
const LARGE_BYTES: usize = 8 << 20;

/// The time of all members.
const SECONDS: u64 = 1_000_000;

/// A tar of these members: directories end with a slash.
pub(crate) fn tar(members: &[(&str, &[u8])]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, content) in members {
        let mut header = tar::Header::new_ustar();
        header.set_mtime(SECONDS);
        header.set_uid(7);
        header.set_gid(8);
        header.set_size(content.len() as u64);
        let is_directory = name.ends_with('/');
        header.set_mode(if is_directory { 0o751 } else { 0o640 });
        header.set_entry_type(match is_directory {
            true => tar::EntryType::Directory,
            false => tar::EntryType::Regular,
        });
        builder.append_data(&mut header, name, *content).unwrap();
    }
    builder.into_inner().unwrap()
}

/// The layers of an image, the lowest first.
pub(crate) fn layers() -> [Vec<u8>; 3] {
    let large = vec![7; LARGE_BYTES];
    let first: [(&str, &[u8]); 6] = [
        ("etc/", b""),
        ("etc/kept", b"first"),
        ("etc/removed", b"first"),
        ("large", &large),
        ("old/", b""),
        ("old/inner", b"first"),
    ];
    let second: [(&str, &[u8]); 3] =
        [("etc/.wh.removed", b""), ("old/.wh..wh..opq", b""), ("old/new", b"second")];
    [tar(&first), tar(&second), tar(&[("etc/third", b"third")])]
}

pub(crate) fn chains(layers: &[Vec<u8>]) -> Vec<String> {
    let mut chains: Vec<String> = Vec::new();
    for layer in layers {
        let diff_id = Digest::of(layer).to_string();
        chains.push(chain_id(chains.last().map(String::as_str), &diff_id));
    }
    chains
}

/// A machine, its snapshotter, and a containerd with blobs.
pub(crate) struct Stand {
    pub(crate) snapshots: Snapshots,
    pub(crate) containerd: Containerd,
    pub(crate) machine: Machine,
}

impl Stand {
    pub(crate) async fn start(appliance: &Appliance, kept: LayerKind) -> Self {
        Self::over(Machine::start_keeping(appliance, kept).await).await
    }

    async fn over(machine: Machine) -> Self {
        let api = machine.path().join("api.sock");
        let _ = fs::remove_file(&api);
        let containerd = Containerd::serve(&api);
        let socket = machine.path().join("c.sock");
        let snapshots =
            Snapshots::serve_with(machine.worker.clone(), &socket, &api, "k8s.io").await;
        Self { snapshots, containerd, machine }
    }

    /// The same machine after its daemon was killed, and how it keeps layers from then on.
    pub(crate) async fn restart(self, appliance: &Appliance, kept: LayerKind) -> Self {
        self.snapshots.stop().await;
        drop(self.containerd);
        Self::over(self.machine.keeping(kept).restart(appliance).await).await
    }

    /// The same machine after its power was cut and it was started again.
    pub(crate) async fn reboot(self, appliance: &Appliance) -> Self {
        self.snapshots.stop().await;
        drop(self.containerd);
        Self::over(self.machine.reboot(appliance).await).await
    }

    fn fetched(&self, blob: &[u8]) -> String {
        let digest = Digest::of(blob).to_string();
        let content =
            Content { namespace: "default".to_owned(), bytes: blob.to_vec(), labels: labels(&[]) };
        self.containerd.kept.lock().contents.insert(digest.clone(), content);
        digest
    }

    pub(crate) async fn apply(
        &self,
        mounts: &[Mount],
        blob: &[u8],
    ) -> Result<Descriptor, tonic::Status> {
        let (media_type, digest) = (TAR.to_owned(), self.fetched(blob));
        let asked = ApplyRequest {
            diff: Some(Descriptor { media_type, digest, size: 1 }),
            mounts: mounts.to_vec(),
            ..ApplyRequest::default()
        };
        self.snapshots.apply("default", asked).await
    }

    pub(crate) async fn prepare(&self, key: &str, parent: &str, chain: &str) -> Vec<Mount> {
        self.snapshots.prepare_mounts(key, parent, labels(&[(REF, chain)])).await.unwrap()
    }

    pub(crate) async fn commit(&self, name: &str, key: &str, chain: &str) {
        let labels = labels(&[(REF, chain)]);
        let (name, key) = (name.to_owned(), key.to_owned());
        let commit = CommitRequest { name, key, labels, ..CommitRequest::default() };
        self.snapshots.commit_as(commit).await.unwrap();
    }

    /// Unpacks layers as containerd does with this driver's differ; their names.
    pub(crate) async fn pull(&self, layers: &[Vec<u8>]) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for (index, (layer, chain)) in layers.iter().zip(chains(layers)).enumerate() {
            let parent = names.last().cloned().unwrap_or_default();
            let key = unpack_key(index, &chain);
            let mounts = self.prepare(&key, &parent, &chain).await;
            let applied = self.apply(&mounts, layer).await.unwrap();
            assert_eq!(applied.digest, Digest::of(layer).to_string());
            let name = format!("default/9/{chain}");
            self.commit(&name, &key, &chain).await;
            names.push(name);
        }
        names
    }

    /// Has layers that another worker unpacked, as containerd does where it wants no blob for that; their names.
    pub(crate) async fn adopt(&self, chains: &[String]) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for (index, chain) in chains.iter().enumerate() {
            let parent = names.last().cloned().unwrap_or_default();
            let key = unpack_key(index, chain).replace("default/", "k8s.io/");
            let sent = labels(&[(REF, chain)]);
            let answer = self.snapshots.prepare_mounts(&key, &parent, sent).await;
            refused(answer, Code::AlreadyExists);
            names.push(adopted(&self.snapshots, chain, &parent).await.remove(0));
        }
        names
    }

    pub(crate) fn content(&self, name: &str) -> VolumeContent {
        self.machine.worker.get(&Key::containerd(name)).unwrap().content
    }

    pub(crate) fn image(&self, name: &str) -> SnapshotRef {
        match self.content(name) {
            VolumeContent::Image { snapshot, .. } => snapshot,
            other => panic!("no image: {other:?}"),
        }
    }

    /// Mounts as an engine does: with paths of lower directories as from where they are, as others would not fit.
    pub(crate) fn mount(&self, mounts: &[Mount]) -> Mounted {
        let [mount] = mounts else { panic!("one mount: {mounts:?}") };
        let point = tempfile::tempdir_in(self.machine.path()).unwrap().keep();
        let state = self.machine.worker.state_directory();
        let from_state = |option: &String| match option.starts_with("lowerdir=") {
            true => option.replace(&format!("{}/", state.display()), ""),
            false => option.clone(),
        };
        let mut command = Command::new("mount");
        command.current_dir(state);
        let options: Vec<_> = mount.options.iter().map(from_state).collect();
        match mount.r#type.as_str() {
            "overlay" => command.args(["-t", "overlay", "-o", &options.join(",")]),
            _ => command.args(["-o", &mount.options.join(",")]),
        };
        assert!(command.arg(&mount.source).arg(&point).status().unwrap().success());
        Mounted(point)
    }

    pub(crate) async fn view(&self, parent: &str) -> Mounted {
        let key = format!("view of {parent}");
        self.mount(&self.snapshots.view_mounts(&key, parent).await.unwrap())
    }

    async fn files(&self, folder: &str) -> Vec<String> {
        let prefix = Some(format!("workers/{}/{folder}/", self.machine.worker.worker_id()));
        let query = ListFiles { prefix, limit: Some(1000), ..ListFiles::default() };
        let page = self.machine.worker.client().files(&query).await.unwrap();
        page.items.into_iter().map(|file| file.path).collect()
    }

    /// The names of this worker's disks on the appliance.
    pub(crate) async fn disks(&self) -> Vec<String> {
        self.files("disks").await
    }

    /// The names of its images that no volume has, and of clones that keep what no volume is.
    async fn unnamed_holds(&self) -> Vec<String> {
        let mut holds = self.files("holds").await;
        let named: Vec<_> = self.machine.worker.list(Engine::Containerd).into_iter().collect();
        let named = named.iter().filter_map(|volume| match &volume.content {
            VolumeContent::Snapshot { hold, .. }
            | VolumeContent::Image { hold, .. }
            | VolumeContent::ImageFile { name: hold, .. } => Some(hold.to_string()),
            _ => None,
        });
        let named: BTreeSet<_> = named.collect();
        holds.retain(|path| !named.iter().any(|name| path.ends_with(name)));
        holds
    }

    /// Waits until that many disks are left, and no file that no volume needs.
    pub(crate) async fn await_disks(&self, count: usize) {
        let deadline = Instant::now() + LET_GO_TIME;
        loop {
            let (disks, holds) = (self.disks().await, self.unnamed_holds().await);
            if disks.len() == count && holds.is_empty() {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "{disks:?} and {holds:?} are left, expected {count} disks"
            );
            let is_whole = |volume: &Volume| !volume.is_damaged;
            for volume in self.machine.worker.without_image().into_iter().filter(is_whole) {
                self.machine.worker.make_image(&volume.key).await.unwrap();
            }
            // What nothing is on goes with that, too.
            self.machine.worker.reconcile(Duration::ZERO).await.unwrap();
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    pub(crate) async fn stop(self) {
        self.snapshots.stop().await;
    }
}

/// A mount of the test's own.
pub(crate) struct Mounted(PathBuf);

impl Mounted {
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn read(&self, name: &str) -> String {
        fs::read_to_string(self.0.join(name)).unwrap()
    }

    pub(crate) fn names(&self) -> BTreeSet<String> {
        names_below(&self.0, "")
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // A program that another test begins has a copy of a file that was just closed, until it is another program.
        let deadline = Instant::now() + LET_GO_TIME;
        while let Err(errno) = rustix::mount::unmount(&self.0, UnmountFlags::empty()) {
            if errno != Errno::BUSY || Instant::now() > deadline {
                eprintln!("{} stays mounted: {errno}", self.0.display());
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// All names of a tree.
pub(crate) fn names_below(root: &Path, below: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(root.join(below)).unwrap() {
        let entry = entry.unwrap();
        let name = format!("{below}{}", entry.file_name().to_str().unwrap());
        if entry.file_type().unwrap().is_dir() {
            names.extend(names_below(root, &format!("{name}/")));
        }
        names.insert(name);
    }
    names
}

pub(crate) fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

pub(crate) fn options<'a>(mounts: &'a [Mount], name: &str) -> Vec<&'a str> {
    let found = mounts[0].options.iter().filter_map(|option| option.strip_prefix(name));
    found.flat_map(|all| all.split(':')).collect()
}

/// What the tree of all three layers has.
const NAMES: [&str; 6] = ["etc", "etc/kept", "etc/third", "large", "old", "old/new"];

#[test]
fn layers_become_images_and_containers_are_overlays_of_them() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let stand = Stand::start(&appliance, LayerKind::Images).await;
        let snapshots = &stand.snapshots;
        let names = stand.pull(&layers()).await;
        for name in &names {
            stand.image(name);
        }
        let usage = snapshots.usage(&names[1]).await.unwrap();
        // The root, `old` and what it has, the mark, `etc` around that.
        assert_eq!(usage.inodes, 5);
        assert!(usage.size < 1 << 20, "its own layer alone: {usage:?}");
        assert!(
            snapshots.usage(&names[0]).await.unwrap().size >= i64::try_from(LARGE_BYTES).unwrap()
        );

        // One image is bound, several are an overlay.
        let lowest = snapshots.view_mounts("lowest", &names[0]).await.unwrap();
        assert_eq!(lowest[0].r#type, "bind");
        let lowest = stand.mount(&lowest);
        assert_eq!(lowest.read("etc/removed"), "first");
        let view = stand.view(&names[2]).await;
        assert_eq!(view.names(), set(&NAMES));
        let kept = fs::metadata(view.0.join("etc/kept")).unwrap();
        assert_eq!((kept.uid(), kept.gid(), kept.mode() & 0o7777), (7, 8, 0o640));
        assert_eq!(kept.mtime(), i64::try_from(SECONDS).unwrap());
        assert!(fs::write(view.0.join("written"), b"x").is_err());

        let mounts = snapshots.prepare_mounts("c", &names[2], labels(&[])).await.unwrap();
        assert_eq!((mounts[0].r#type.as_str(), mounts[0].source.as_str()), ("overlay", "overlay"));
        let lowers = options(&mounts, "lowerdir=");
        assert_eq!(lowers.len(), 3);
        assert_eq!(snapshots.all_mounts("c").await.unwrap(), mounts);
        let container = stand.mount(&mounts);
        assert_eq!(container.names(), set(&NAMES));
        fs::write(container.0.join("etc/kept"), b"changed").unwrap();
        // Two containers read the same file of the same file system.
        let other = snapshots.prepare_mounts("d", &names[2], labels(&[])).await.unwrap();
        assert_eq!(options(&other, "lowerdir="), lowers);
        let other = stand.mount(&other);
        assert_eq!(other.read("etc/kept"), "first");
        drop((lowest, view, container, other));
        stand.stop().await;
    });
}

#[test]
fn what_a_container_wrote_is_diffed_and_committed_as_its_own_layer() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let stand = Stand::start(&appliance, LayerKind::Images).await;
        let snapshots = &stand.snapshots;
        let names = stand.pull(&layers()).await;
        let mounts = snapshots.prepare_mounts("c", &names[2], labels(&[])).await.unwrap();
        let container = stand.mount(&mounts);
        let root = fs::metadata(&container.0).unwrap();
        assert_eq!(root.mode() & 0o7777, 0o755);
        fs::write(container.0.join("etc/kept"), b"changed").unwrap();
        fs::remove_file(container.0.join("etc/third")).unwrap();
        fs::remove_dir_all(container.0.join("old")).unwrap();
        fs::create_dir(container.0.join("old")).unwrap();
        fs::write(container.0.join("old/other"), b"written").unwrap();
        fs::set_permissions(container.0.join("old/other"), Permissions::from_mode(0o4711)).unwrap();
        let expected = set(&["etc", "etc/kept", "large", "old", "old/other"]);
        assert_eq!(container.names(), expected);

        let left = snapshots.view_mounts("below", &names[2]).await.unwrap();
        let asked = DiffRequest {
            left: left.clone(),
            right: mounts.clone(),
            media_type: TAR.to_owned(),
            ..DiffRequest::default()
        };
        let diff = snapshots.diff("default", None, asked.clone()).await.unwrap();
        let layer = stand.containerd.kept.lock().contents[&diff.digest].bytes.clone();
        assert!(layer.len() < LARGE_BYTES, "what is below is not in it");
        drop(container);
        snapshots.commit("committed", "c").await.unwrap();
        stand.make_image("committed").await;
        let view = stand.view("committed").await;
        assert_eq!(view.names(), expected);
        assert_eq!(view.read("etc/kept"), "changed");
        let mode = fs::metadata(view.0.join("old/other")).unwrap().mode();
        assert_eq!(mode & 0o7777, 0o4711);

        // A diff of what is committed is the same layer, and so is that of two views.
        let right = snapshots.view_mounts("above", "committed").await.unwrap();
        let again = DiffRequest { right: right.clone(), ..asked.clone() };
        assert_eq!(snapshots.diff("default", None, again).await.unwrap().digest, diff.digest);
        // What is no layer above the other is for containerd's own differ.
        let apart = DiffRequest { left: right, right: left, ..asked };
        refused(snapshots.diff("default", None, apart).await, Code::Unimplemented);

        // Elsewhere it is unpacked to the same tree.
        let pulled: Vec<Vec<u8>> = layers().into_iter().chain([layer]).collect();
        let other = Stand::start(&appliance, LayerKind::Images).await;
        let others = other.pull(&pulled).await;
        let seen = other.view(others.last().unwrap()).await;
        assert_eq!(seen.names(), expected);
        drop((view, seen));
        stand.await_disks(0).await;
        other.stop().await;
        stand.stop().await;
    });
}

#[test]
fn another_worker_has_the_images_unless_it_keeps_disks() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let (layers, chains) = (layers(), chains(&layers()));
        let first = Stand::start(&appliance, LayerKind::Images).await;
        let names = first.pull(&layers).await;
        let second = Stand::start(&appliance, LayerKind::Images).await;
        // By the blob.
        let taken = second.pull(&layers[..1]).await;
        assert_eq!(second.image(&taken[0]), first.image(&names[0]));
        // And where no blob is wanted.
        let have = second.adopt(&chains).await;
        for (own, of_first) in have.iter().zip(&names) {
            assert_eq!(second.image(own), first.image(of_first));
        }
        let view = second.view(&have[2]).await;
        assert_eq!(view.names(), set(&NAMES));
        drop(view);

        let third = Stand::start(&appliance, LayerKind::Disks).await;
        let key = unpack_key(1, &chains[0]);
        let mounts = third.prepare(&key, "", &chains[0]).await;
        let said = refused(third.apply(&mounts, &layers[0]).await, Code::Unimplemented);
        assert!(said.contains("set differ = \"walking\""), "{said}");
        for stand in [first, second, third] {
            stand.stop().await;
        }
    });
}

/// As containerd unpacks where this driver's differ is not set: through the mounts.
#[test]
fn a_layer_that_containerd_unpacks_above_images_becomes_one_at_its_commit() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let (layers, chains) = (layers(), chains(&layers()));
        let first = Stand::start(&appliance, LayerKind::Images).await;
        let names = first.pull(&layers[..1]).await;
        let key = unpack_key(7, &chains[1]);
        let mounts = first.prepare(&key, &names[0], &chains[1]).await;
        let root = first.mount(&mounts);
        fs::remove_file(root.0.join("etc/removed")).unwrap();
        fs::remove_file(root.0.join("old/inner")).unwrap();
        fs::write(root.0.join("old/new"), b"second").unwrap();
        drop(root);
        let name = format!("default/9/{}", chains[1]);
        first.commit(&name, &key, &chains[1]).await;
        let view = first.view(&name).await;
        assert_eq!(view.names(), set(&["etc", "etc/kept", "large", "old", "old/new"]));
        drop(view);

        let second = Stand::start(&appliance, LayerKind::Images).await;
        let taken = second.pull(&layers[..2]).await;
        assert_eq!(second.image(&taken[1]), first.image(&name));

        // The lowest one, too.
        let chain = Digest::of(b"other").to_string();
        let key = unpack_key(8, &chain);
        let mounts = first.prepare(&key, "", &chain).await;
        assert_eq!(mounts[0].r#type, "bind");
        let root = Path::new(&mounts[0].source);
        fs::set_permissions(root, Permissions::from_mode(0o711)).unwrap();
        fs::write(root.join("a"), b"a").unwrap();
        first.commit("lowest", &key, &chain).await;
        first.image("lowest");
        let mounts = first.snapshots.prepare_mounts("c", "lowest", labels(&[])).await.unwrap();
        let container = first.mount(&mounts);
        assert_eq!(container.read("a"), "a");
        assert_eq!(fs::metadata(&container.0).unwrap().mode() & 0o7777, 0o711);
        drop(container);
        first.stop().await;
        second.stop().await;
    });
}

#[test]
fn what_is_no_layer_of_its_image_becomes_no_image() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let stand = Stand::start(&appliance, LayerKind::Images).await;
        let [layer, _, other] = layers();
        let chain = Digest::of(&layer).to_string();
        let key = unpack_key(1, &chain);
        let mounts = stand.prepare(&key, "", &chain).await;
        let is_written = || matches!(stand.content(&key), VolumeContent::Upper { .. });
        let short = &layer[..layer.len() / 2];
        let cases = [(&other[..], "expected"), (short, "truncated"), (b"no tar", "truncated")];
        for (blob, reason) in cases {
            let said = refused(stand.apply(&mounts, blob).await, Code::Unimplemented);
            assert!(said.contains(reason), "{said}");
            assert!(is_written());
        }
        // What was begun of them is gone; the disk is there.
        stand.await_disks(1).await;
        // All of the blob counts, also what is behind the end of its tar.
        let longer = [&layer[..], &[0; 1 << 20]].concat();
        refused(stand.apply(&mounts, &longer).await, Code::Unimplemented);
        stand.apply(&mounts, &layer).await.unwrap();
        assert!(!is_written());
        let refusal = refused(stand.snapshots.all_mounts(&key).await, Code::FailedPrecondition);
        assert!(refusal.contains("read-only"), "{refusal}");
        stand.snapshots.remove(&key).await.unwrap();
        stand.await_disks(0).await;
        stand.stop().await;
    });
}

#[test]
fn images_and_overlays_go_on_after_a_restart_and_are_unmounted_in_the_end() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let (layers, chains) = (layers(), chains(&layers()));
        let mut stand = Stand::start(&appliance, LayerKind::Images).await;
        let names = stand.pull(&layers[..2]).await;
        let key = unpack_key(5, &chains[2]);
        let mounts = stand.prepare(&key, &names[1], &chains[2]).await;
        stand.apply(&mounts, &layers[2]).await.unwrap();
        let mounts = stand.snapshots.prepare_mounts("c", &names[1], labels(&[])).await.unwrap();
        let container = stand.mount(&mounts);
        fs::write(container.0.join("written"), b"before").unwrap();
        stand = stand.restart(&appliance, LayerKind::Images).await;
        assert_eq!(container.read("written"), "before");
        assert_eq!(stand.snapshots.all_mounts("c").await.unwrap(), mounts);
        stand.machine.worker.reconcile(Duration::ZERO).await.unwrap();
        assert_eq!(container.read("etc/kept"), "first");
        // What was unpacked, and not committed.
        stand.commit("third", &key, &chains[2]).await;
        let view = stand.view("third").await;
        assert_eq!(view.names(), set(&NAMES));
        drop((view, container));
        for name in ["view of third", "third", "c", &names[1], &names[0]] {
            stand.snapshots.remove(name).await.unwrap();
        }
        let images = stand.machine.path().join("state/images").canonicalize().unwrap();
        let deadline = Instant::now() + LET_GO_TIME;
        while !mounts_below(&images).is_empty() {
            assert!(Instant::now() < deadline, "{:?}", mounts_below(&images));
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        stand.await_disks(0).await;
        stand.stop().await;
    });
}
