//! The layers of what differs between two snapshots, as containerd asks for them.

use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::time::{Duration, Instant, UNIX_EPOCH};

use slackwater_driver::containerd::proto::{Descriptor, DiffRequest, Mount, Timestamp};
use tonic::Code;

use crate::support::content::{Containerd, Content};
use crate::support::snapshots::{Snapshots, labels};
use crate::{TEST_TIME, refused, with_snapshotter_for};

const TAR: &str = "application/vnd.oci.image.layer.v1.tar";
const UNCOMPRESSED: &str = "containerd.io/uncompressed";

/// A file that no diff is to read: a layer with it would have more bytes.
const LARGE_BYTES: usize = 8 << 20;

fn bind(path: &Path) -> Vec<Mount> {
    vec![Mount {
        r#type: "bind".to_owned(),
        source: path.display().to_string(),
        ..Mount::default()
    }]
}

fn between(older: &Path, newer: &Path, media_type: &str) -> DiffRequest {
    DiffRequest {
        left: bind(older),
        right: bind(newer),
        media_type: media_type.to_owned(),
        labels: labels(&[("a", "b")]),
        ..DiffRequest::default()
    }
}

/// The members of a tar, with their contents; a link's is where it leads.
fn members(tar: &[u8]) -> BTreeMap<String, Vec<u8>> {
    let mut archive = tar::Archive::new(tar);
    let mut found = BTreeMap::new();
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        let name = entry.path().unwrap().to_str().unwrap().to_owned();
        let mut content = Vec::new();
        entry.read_to_end(&mut content).unwrap();
        if let Some(target) = entry.link_name().unwrap() {
            content = target.to_str().unwrap().as_bytes().to_vec();
        }
        assert!(found.insert(name, content).is_none());
    }
    found
}

fn decoded(descriptor: &Descriptor, content: &Content) -> Vec<u8> {
    let mut bytes = Vec::new();
    match descriptor.media_type.strip_prefix(TAR).unwrap() {
        "" => bytes.clone_from(&content.bytes),
        "+gzip" => {
            flate2::read::GzDecoder::new(&content.bytes[..]).read_to_end(&mut bytes).unwrap();
        }
        "+zstd" => bytes = zstd::decode_all(&content.bytes[..]).unwrap(),
        other => panic!("{other}"),
    }
    bytes
}

/// Writes a file with a time in whole seconds, which tells nothing of a later change.
fn write_at(path: &Path, content: &[u8], seconds: u64) {
    let mut file = File::create(path).unwrap();
    file.write_all(content).unwrap();
    file.set_modified(UNIX_EPOCH + Duration::from_secs(seconds)).unwrap();
}

/// A committed base, and a snapshot above it in which some files differ.
async fn changed(snapshots: &Snapshots) -> std::path::PathBuf {
    let base = snapshots.prepare("b", "").await.unwrap();
    for folder in ["kept", "gone", "dir"] {
        fs::create_dir(base.join(folder)).unwrap();
    }
    fs::write(base.join("kept/large"), vec![7; LARGE_BYTES]).unwrap();
    fs::write(base.join("gone/inner"), b"x").unwrap();
    for name in ["same", "edited", "removed"] {
        write_at(&base.join("dir").join(name), b"before", 1000);
    }
    snapshots.commit("base", "b").await.unwrap();
    let above = snapshots.prepare("c", "base").await.unwrap();
    let dir = above.join("dir");
    write_at(&dir.join("edited"), b"after!", 1000);
    fs::remove_file(dir.join("removed")).unwrap();
    fs::remove_dir_all(above.join("gone")).unwrap();
    fs::write(dir.join("new"), b"new").unwrap();
    fs::hard_link(dir.join("new"), dir.join("other")).unwrap();
    symlink("new", dir.join("link")).unwrap();
    above
}

fn expected() -> BTreeMap<String, Vec<u8>> {
    let members: [(&str, &[u8]); 7] = [
        (".wh.gone", b""),
        ("dir/", b""),
        ("dir/.wh.removed", b""),
        ("dir/edited", b"after!"),
        ("dir/link", b"new"),
        ("dir/new", b"new"),
        ("dir/other", b"dir/new"),
    ];
    members.into_iter().map(|(name, content)| (name.to_owned(), content.to_vec())).collect()
}

#[test]
fn a_layer_has_what_changed_in_each_form_and_is_kept() {
    with_snapshotter_for("api.sock", async |snapshots, machine| {
        let containerd = Containerd::serve(&machine.path().join("api.sock"));
        let above = changed(snapshots).await;
        let older = snapshots.view("v", "base").await.unwrap();
        let mut uncompressed = Vec::new();
        for (media_type, lease) in
            [("", None), (&format!("{TAR}+zstd"), Some("of-client")), (TAR, Some("of-client"))]
        {
            let request = between(&older, &above, media_type);
            let layer = snapshots.diff("apart", lease, request).await.unwrap();
            let kept = containerd.kept.lock();
            let content = &kept.contents[&layer.digest];
            assert_eq!(usize::try_from(layer.size).unwrap(), content.bytes.len());
            assert_eq!(content.namespace, "apart");
            let is_keeping = |digests: &&Vec<String>| digests.contains(&layer.digest);
            match lease {
                Some(lease) => assert!(is_keeping(&&kept.leases[lease])),
                None => assert_eq!(kept.leases.values().filter(is_keeping).count(), 1),
            }
            assert_eq!(content.labels["a"], "b");
            let tar = decoded(&layer, content);
            assert_eq!(members(&tar), expected(), "{media_type}");
            assert!(tar.len() < LARGE_BYTES);
            uncompressed.push(content.labels[UNCOMPRESSED].clone());
            if media_type == TAR {
                assert_eq!(content.labels[UNCOMPRESSED], layer.digest);
            }
            assert!(kept.open.is_empty());
        }
        assert!(uncompressed.iter().all(|digest| *digest == uncompressed[0]), "{uncompressed:?}");

        // Once committed it is the same layer. The content store has it, and lost its label.
        snapshots.commit("layer", "c").await.unwrap();
        let newer = snapshots.view("w", "layer").await.unwrap();
        containerd.kept.lock().contents.get_mut(&uncompressed[0]).unwrap().labels.clear();
        let layer = snapshots.diff("apart", None, between(&older, &newer, TAR)).await.unwrap();
        assert_eq!(layer.digest, uncompressed[0]);
        let content = containerd.kept.lock().contents[&layer.digest].clone();
        assert_eq!(content.labels[UNCOMPRESSED], layer.digest);
        // It is kept once more: by the client's lease it is no longer than that.
        let leases = containerd.kept.lock().leases.clone();
        assert_eq!(leases.values().filter(|digests| digests.contains(&layer.digest)).count(), 2);

        // Of nothing, it is all.
        let request = DiffRequest { left: Vec::new(), ..between(&older, &newer, "") };
        let whole = snapshots.diff("apart", None, request).await.unwrap();
        let content = containerd.kept.lock().contents[&whole.digest].clone();
        let found = members(&decoded(&whole, &content));
        assert_eq!(found["kept/large"].len(), LARGE_BYTES);
        assert!(found.contains_key("dir/same") && !found.contains_key("dir/.wh.removed"));
        let same = snapshots.diff("apart", None, between(&newer, &newer, TAR)).await.unwrap();
        let content = containerd.kept.lock().contents[&same.digest].clone();
        assert_eq!(members(&content.bytes).len(), 0);
        for key in ["w", "v", "layer", "base"] {
            snapshots.remove(key).await.unwrap();
        }
    });
}

#[test]
fn what_another_differ_can_do_is_left_to_it() {
    with_snapshotter_for("api.sock", async |snapshots, machine| {
        let above = changed(snapshots).await;
        let older = snapshots.view("v", "base").await.unwrap();
        let right = between(&older, &above, "");
        let other = DiffRequest { left: bind(Path::new("/usr")), ..right.clone() };
        let overlay = Mount { r#type: "overlay".to_owned(), ..right.right[0].clone() };
        let epoch = Timestamp { seconds: 1, nanos: 0 };
        let inside = bind(&above.join("dir"));
        let sibling = bind(&above.with_file_name("00000000-0000-4000-8000-000000000000"));
        let left = |request| async move {
            let said = refused(snapshots.diff("n", None, request).await, Code::Unimplemented);
            assert!(said.contains("next differ"), "{said}");
        };
        left(other).await;
        left(DiffRequest { right: vec![overlay], ..right.clone() }).await;
        left(DiffRequest { right: Vec::new(), ..right.clone() }).await;
        left(DiffRequest { right: inside, ..right.clone() }).await;
        left(DiffRequest { right: sibling, ..right.clone() }).await;
        left(DiffRequest { media_type: "text/plain".to_owned(), ..right.clone() }).await;
        left(DiffRequest { source_date_epoch: Some(epoch), ..right.clone() }).await;
        refused(snapshots.diff("", None, right.clone()).await, Code::Unimplemented);
        // containerd is where no setting says.
        left(right.clone()).await;

        let containerd = Containerd::serve(&machine.path().join("api.sock"));
        // No layer can say that this is there; containerd's own differ writes it all the same.
        fs::write(above.join(".wh.odd"), b"").unwrap();
        left(right.clone()).await;
        assert!(
            containerd.kept.lock().open.is_empty() && containerd.kept.lock().contents.is_empty()
        );
        fs::remove_file(above.join(".wh.odd")).unwrap();
        fs::set_permissions(&above, Permissions::from_mode(0o700)).unwrap();
        let layer = snapshots.diff("n", None, right).await.unwrap();
        {
            let kept = containerd.kept.lock();
            assert!(members(&decoded(&layer, &kept.contents[&layer.digest])).contains_key("./"));
            assert_eq!(kept.leases.len(), 1, "those of layers that came to nothing are over");
        }
        for key in ["v", "c", "base"] {
            snapshots.remove(key).await.unwrap();
        }
    });
}

#[test]
fn what_containerd_does_not_take_is_an_error_and_leaves_nothing() {
    with_snapshotter_for("api.sock", async |snapshots, machine| {
        let containerd = Containerd::serve(&machine.path().join("api.sock"));
        let above = changed(snapshots).await;
        // More than what is on the way to the socket.
        let mut noise = vec![0; 32 << 20];
        File::open("/dev/urandom").unwrap().read_exact(&mut noise).unwrap();
        fs::write(above.join("noise"), &noise).unwrap();
        let older = snapshots.view("v", "base").await.unwrap();
        containerd.kept.lock().full_after = Some(1 << 20);
        let request = between(&older, &above, TAR);
        let said =
            refused(snapshots.diff("n", None, request.clone()).await, Code::ResourceExhausted);
        assert!(said.contains("no space left"), "{said}");
        {
            let mut kept = containerd.kept.lock();
            assert!(kept.leases.is_empty());
            assert!(kept.open.is_empty() && kept.contents.is_empty(), "{:?}", kept.open);
            kept.full_after = None;
        }
        let layer = snapshots.diff("n", None, request).await.unwrap();
        assert!(usize::try_from(layer.size).unwrap() > noise.len());
        // What ran goes on.
        assert!(fs::metadata(above.join("noise")).unwrap().size() > 0);
        for key in ["v", "c", "base"] {
            snapshots.remove(key).await.unwrap();
        }
    });
}

#[test]
fn a_caller_who_leaves_ends_the_work_and_leaves_nothing() {
    with_snapshotter_for("api.sock", async |snapshots, machine| {
        let containerd = Containerd::serve(&machine.path().join("api.sock"));
        let above = changed(snapshots).await;
        let mut noise = vec![0; 64 << 20];
        File::open("/dev/urandom").unwrap().read_exact(&mut noise).unwrap();
        fs::write(above.join("noise"), &noise).unwrap();
        let older = snapshots.view("v", "base").await.unwrap();
        let request = between(&older, &above, "");
        containerd.kept.lock().is_held = true;
        let has_begun = async {
            while containerd.kept.lock().open.is_empty() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::select! {
            answer = snapshots.diff("n", None, request.clone()) => panic!("not held: {answer:?}"),
            () = has_begun => {}
        }
        containerd.kept.lock().is_held = false;
        let deadline = Instant::now() + TEST_TIME;
        let is_over = || {
            let kept = containerd.kept.lock();
            kept.open.is_empty() && kept.leases.is_empty()
        };
        while !is_over() {
            assert!(Instant::now() < deadline, "{:?}", containerd.kept.lock());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert!(containerd.kept.lock().contents.is_empty());
        snapshots.diff("n", None, request).await.unwrap();
        for key in ["v", "c", "base"] {
            snapshots.remove(key).await.unwrap();
        }
    });
}
