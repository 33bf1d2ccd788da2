//! Layers that containerd has fetched, where the appliance has them: compared with their blobs, and not unpacked.

use std::io::Write;
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;
use slackwater_api::{Role, Secret, Token};
use slackwater_driver::containerd::proto::{
    ApplyRequest, CommitRequest, Descriptor, Mount, Payload,
};
use slackwater_driver::image::digest::{Digest, chain_id};
use slackwater_driver::worker::{Content as VolumeContent, Engine, Key, LayerKind, SnapshotRef};
use tonic::Code;

use crate::support::content::{Containerd, Content};
use crate::support::snapshots::{Snapshots, labels};
use crate::support::{Appliance, Machine};
use crate::{REF, bounded, refused, runtime, serve, snapshot, unpack, unpack_key};

const TAR: &str = "application/vnd.oci.image.layer.v1.tar";
const GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
const ZSTD: &str = "application/vnd.oci.image.layer.v1.tar+zstd";
const DOCKER_GZIP: &str = "application/vnd.docker.image.rootfs.diff.tar.gzip";

/// More than one part of a content.
const LAYER_BYTES: usize = 3 << 20;

/// Stands for the tar of a layer, which nothing here looks into.
fn tar(seed: u8) -> Vec<u8> {
    (0..LAYER_BYTES).map(|index| seed ^ u8::try_from(index % 251).unwrap()).collect()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Two members, as some programs write.
fn gzip_in_parts(bytes: &[u8]) -> Vec<u8> {
    let (first, second) = bytes.split_at(bytes.len() / 3);
    [gzip(first), gzip(second)].concat()
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 1).unwrap()
}

fn diff_id(tar: &[u8]) -> String {
    Digest::of(tar).to_string()
}

/// Has containerd have a blob; its name.
fn fetched(containerd: &Containerd, blob: Vec<u8>) -> String {
    let digest = Digest::of(&blob).to_string();
    let content = Content { namespace: "default".to_owned(), bytes: blob, labels: labels(&[]) };
    containerd.kept.lock().contents.insert(digest.clone(), content);
    digest
}

fn request(root: &Path, digest: &str, media_type: &str) -> ApplyRequest {
    let mount =
        Mount { r#type: "bind".to_owned(), source: root.display().to_string(), ..Mount::default() };
    let (media_type, digest) = (media_type.to_owned(), digest.to_owned());
    ApplyRequest {
        diff: Some(Descriptor { media_type, digest, size: 1 }),
        mounts: vec![mount],
        ..ApplyRequest::default()
    }
}

/// As some clients prepare what they unpack into: without a label.
async fn prepared_unlabelled(snapshots: &Snapshots, key: &str, parent: &str) -> PathBuf {
    let (root, _) = snapshots.prepare_labelled(key, parent, labels(&[])).await.unwrap();
    root
}

/// A worker whose clients need blobs, but for Kubernetes.
async fn serve_docker(machine: &Machine) -> (Snapshots, Containerd) {
    let api = machine.path().join("api.sock");
    let containerd = Containerd::serve(&api);
    let socket = machine.path().join("c.sock");
    let snapshots = Snapshots::serve_with(machine.worker.clone(), &socket, &api, "k8s.io").await;
    (snapshots, containerd)
}

/// A worker that unpacked a layer of this chain id, and the layer's snapshot.
async fn unpacked(appliance: &Appliance, chain: &str) -> (Machine, Snapshots, SnapshotRef) {
    let machine = Machine::start(appliance).await;
    let snapshots = serve(&machine).await;
    let name = unpack(&snapshots, chain, "", true).await;
    let unpacked = snapshot(&machine, &name).await;
    (machine, snapshots, unpacked)
}

async fn prepared(snapshots: &Snapshots, key: &str, parent: &str, chain: &str) -> PathBuf {
    let sent = labels(&[(REF, chain)]);
    let (root, is_writable) = snapshots.prepare_labelled(key, parent, sent).await.unwrap();
    assert!(is_writable, "containerd 2.4 fetches nothing for what is read-only");
    root
}

fn is_disk(machine: &Machine, key: &str) -> bool {
    let volume = machine.worker.get(&Key::containerd(key)).unwrap();
    matches!(volume.content, VolumeContent::Disk { .. })
}

#[test]
fn a_fetched_layer_that_the_appliance_has_is_not_unpacked() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let tars = [tar(1), tar(2), tar(3), tar(4)];
        let blobs = [gzip(&tars[0]), zstd(&tars[1]), tars[2].clone(), gzip_in_parts(&tars[3])];
        // Docker's type says gzip, whatever it is.
        let types = [DOCKER_GZIP, ZSTD, DOCKER_GZIP, GZIP];
        let mut chains: Vec<String> = Vec::new();
        let first = Machine::start(&appliance).await;
        let snapshots = serve(&first).await;
        let mut expected = Vec::new();
        let mut parent = String::new();
        for tar in &tars {
            chains.push(chain_id(chains.last().map(String::as_str), &diff_id(tar)));
            parent = unpack(&snapshots, chains.last().unwrap(), &parent, true).await;
            expected.push(snapshot(&first, &parent).await);
        }

        let second = Machine::start(&appliance).await;
        let (others, containerd) = serve_docker(&second).await;
        let mut parent = String::new();
        for (index, chain) in chains.iter().enumerate() {
            let key = unpack_key(index, chain);
            let root = match index % 2 {
                0 => prepared(&others, &key, &parent, chain).await,
                _ => prepared_unlabelled(&others, &key, &parent).await,
            };
            let digest = fetched(&containerd, blobs[index].clone());
            let asked = request(&root, &digest, types[index]);
            let applied = others.apply("default", asked).await.unwrap();
            assert_eq!((applied.media_type.as_str(), applied.digest), (TAR, diff_id(&tars[index])));
            assert_eq!(applied.size, i64::try_from(LAYER_BYTES).unwrap());
            let refusal = refused(others.mounts(&key).await, Code::FailedPrecondition);
            assert!(refusal.contains("read-only"), "{refusal}");
            let name = format!("default/9/{chain}");
            let sent = labels(&[(REF, chain)]);
            let commit =
                CommitRequest { name: name.clone(), key, labels: sent, ..Default::default() };
            others.commit_as(commit).await.unwrap();
            assert_eq!(snapshot(&second, &name).await, expected[index]);
            parent = name;
        }
        let above = others.prepare("default/9/container", &parent).await.unwrap();
        assert!(above.join(format!("layer {}", &chains[0][7..9])).exists());
        // Kubernetes does not fetch them.
        let key = unpack_key(1, &chains[0]).replace("default/", "k8s.io/");
        let answer = others.prepare_labelled(&key, "", labels(&[(REF, &chains[0])])).await;
        refused(answer, Code::AlreadyExists);
        others.stop().await;
        snapshots.stop().await;
    });
}

#[test]
fn no_other_differ_is_asked_while_the_appliance_is_away() {
    let mut appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let tar = tar(1);
        let chain = diff_id(&tar);
        let (_first, snapshots, _) = unpacked(&appliance, &chain).await;
        for layers in [LayerKind::Disks, LayerKind::Images] {
            let second = Machine::start_keeping(&appliance, layers).await;
            let (others, containerd) = serve_docker(&second).await;
            let key = unpack_key(1, &chain);
            let root = prepared(&others, &key, "", &chain).await;
            let digest = fetched(&containerd, gzip(&tar));
            appliance.stop();
            let asked = request(&root, &digest, GZIP);
            let said = refused(others.apply("default", asked.clone()).await, Code::Unavailable);
            // This client sends a call once: it may be the one that finds a kept connection closed.
            let reasons = ["cannot reach the appliance", "the connection was lost"];
            assert!(reasons.iter().any(|reason| said.contains(reason)), "{layers}: {said}");
            appliance.serve();
            if layers == LayerKind::Disks {
                assert_eq!(others.apply("default", asked).await.unwrap().digest, diff_id(&tar));
            }
            others.stop().await;
        }
        snapshots.stop().await;
    });
}

#[test]
fn no_other_differ_is_asked_by_a_worker_that_was_revoked() {
    for layers in [LayerKind::Disks, LayerKind::Images] {
        let mut appliance = Appliance::start();
        let runtime = runtime();
        bounded(&runtime, async {
            let tar = tar(1);
            let chain = diff_id(&tar);
            let machine = Machine::start_keeping(&appliance, layers).await;
            let (snapshots, containerd) = serve_docker(&machine).await;
            let root = prepared(&snapshots, &unpack_key(1, &chain), "", &chain).await;
            let digest = fetched(&containerd, gzip(&tar));
            appliance.stop();
            let (name, secret) = ("other".to_owned(), Secret::new("of another worker"));
            appliance.ask_for(vec![Token { name, role: Role::Admin, secret }]);
            appliance.serve();
            // This client sends a call once: the first may be the one that finds a kept connection closed.
            let _ = machine.worker.client().stats().await;
            let asked = request(&root, &digest, GZIP);
            let said = refused(snapshots.apply("default", asked).await, Code::Unavailable);
            assert!(said.contains("unauthenticated"), "{layers}: {said}");
            snapshots.stop().await;
        });
    }
}

#[test]
fn a_layer_is_taken_only_for_its_own_blob() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let (good, bad) = (tar(1), tar(2));
        let chain = diff_id(&good);
        let (first, snapshots, expected) = unpacked(&appliance, &chain).await;
        let second = Machine::start(&appliance).await;
        let (others, containerd) = serve_docker(&second).await;
        let key = unpack_key(1, &chain);
        let root = prepared(&others, &key, "", &chain).await;
        let whole = gzip(&good);
        let digest = fetched(&containerd, whole.clone());
        let ordinary = request(&root, &digest, GZIP);
        let other = fetched(&containerd, gzip(&bad));
        let cut = fetched(&containerd, whole[..whole.len() / 2].to_vec());
        let cut_tar = fetched(&containerd, good[..LAYER_BYTES / 2].to_vec());
        let missing = Digest::of(b"missing").to_string();
        let requests = [
            request(&root, &other, GZIP),
            request(&root, &cut, GZIP),
            request(&root, &cut_tar, TAR),
            request(&root, &missing, GZIP),
            request(&root, &digest, "application/vnd.oci.image.layer.v1.tar+encrypted"),
            request(Path::new("/usr"), &digest, GZIP),
            request(&root.join("inside"), &digest, GZIP),
            ApplyRequest { mounts: Vec::new(), ..ordinary.clone() },
            ApplyRequest { diff: None, ..ordinary.clone() },
        ];
        for asked in requests {
            let said = refused(others.apply("default", asked.clone()).await, Code::Unimplemented);
            assert!(said.contains("next differ"), "{said}");
            assert!(is_disk(&second, &key), "bound by {asked:?}");
        }
        refused(others.apply("", ordinary.clone()).await, Code::Unimplemented);

        // Who starts a container chooses its labels, but not its key.
        let root = prepared(&others, "default/5/container", "", &chain).await;
        let asked = request(&root, &digest, GZIP);
        refused(others.apply("default", asked).await, Code::Unimplemented);
        // What the appliance does not have, and what is above something that is no chain.
        let unknown = diff_id(&bad);
        let root = prepared(&others, &unpack_key(2, &unknown), "", &unknown).await;
        let asked = request(&root, &other, GZIP);
        refused(others.apply("default", asked).await, Code::Unimplemented);
        others.commit("default/6/stopped", "default/5/container").await.unwrap();
        let root = prepared(&others, &unpack_key(3, &chain), "default/6/stopped", &chain).await;
        let asked = request(&root, &digest, GZIP);
        refused(others.apply("default", asked).await, Code::Unimplemented);

        // containerd unpacks it, or asks again; some clients with payloads.
        let payload = ("key".to_owned(), Payload::default());
        let asked = ApplyRequest { payloads: [payload].into(), ..ordinary };
        others.apply("default", asked.clone()).await.unwrap();
        assert!(!is_disk(&second, &key));
        let bound = second.worker.snapshot_of(&Key::containerd(key.as_str())).await.unwrap();
        assert_eq!(bound, Some(expected));
        let refusal = refused(others.apply("default", asked).await, Code::FailedPrecondition);
        assert!(refusal.contains("mounts again"), "{refusal}");
        others.remove(&key).await.unwrap();
        drop(containerd);
        others.stop().await;
        snapshots.stop().await;
        drop(first);
    });
}

#[test]
fn what_was_bound_is_committed_after_a_restart_or_goes() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let layer = tar(1);
        let chain = diff_id(&layer);
        let (first, snapshots, expected) = unpacked(&appliance, &chain).await;
        let second = Machine::start(&appliance).await;
        let (others, containerd) = serve_docker(&second).await;
        let digest = fetched(&containerd, layer);
        let (kept, gone) = (unpack_key(1, &chain), unpack_key(2, &chain));
        for key in [&kept, &gone] {
            let root = prepared(&others, key, "", &chain).await;
            others.apply("default", request(&root, &digest, TAR)).await.unwrap();
        }
        others.stop().await;
        drop(containerd);
        let second = second.restart(&appliance).await;
        let others = serve(&second).await;
        let name = format!("default/9/{chain}");
        others.commit(&name, &kept).await.unwrap();
        assert_eq!(snapshot(&second, &name).await, expected);
        others.remove(&gone).await.unwrap();
        others.remove(&name).await.unwrap();
        assert!(second.worker.list(Engine::Containerd).is_empty());
        others.stop().await;
        snapshots.stop().await;
        drop(first);
    });
}
