//! Layers of registries that `private-registries` lists: for those whom the registry lets read the blob.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use slackwater_client::types::RegistryBlob;
use slackwater_driver::containerd::proto::CommitRequest;
use slackwater_driver::registry::{Registries, RegistryError};
use slackwater_driver::worker::SnapshotRef;
use tempfile::TempDir;
use tonic::Code;

use crate::support::registry::{Asks, BASIC, ME, OTHER, Registry, write_credentials};
use crate::support::snapshots::{Snapshots, labels};
use crate::support::{Appliance, Machine, Trust};
use crate::{
    ANNOTATION, REF, bounded, chain, chain_id, runtime, serve, snapshot, unpack, unpack_key,
    unpack_labelled,
};

/// The digest of the blob of the layer with this chain id: any other digits.
fn digest(chain: &str) -> String {
    let (scheme, digits) = chain.split_once(':').unwrap();
    format!("{scheme}:{}", digits.chars().map(|_| 'b').collect::<String>())
}

fn blob_path(chain: &str) -> String {
    format!("team/app/blobs/{}", digest(chain))
}

/// The labels of a layer that is pulled by an engine that tells from where. The blob has the same digest for all.
fn pulled(chain: &str, image: &str) -> HashMap<String, String> {
    pulled_as(chain, image, 'b')
}

/// The same, with a blob of these digits.
fn pulled_as(chain: &str, image: &str, digit: char) -> HashMap<String, String> {
    labels(&[
        (REF, chain),
        ("containerd.io/snapshot/cri.image-ref", image),
        ("containerd.io/snapshot/cri.layer-digest", &crate::chain(digit)),
    ])
}

fn trust(registry: &Registry) -> Trust {
    let private = format!("{}/team", registry.host()).parse().unwrap();
    Trust { private_registries: vec![private], ..Trust::default() }
}

/// Whether a worker is given the layer, without fetching it.
async fn is_given(snapshots: &Snapshots, namespace: &str, sent: HashMap<String, String>) -> bool {
    let key = unpack_key(1, &sent[REF]).replace("default/", &format!("{namespace}/"));
    match snapshots.prepare_labelled(&key, "", sent).await {
        Ok((_, is_writable)) => {
            assert!(is_writable);
            snapshots.remove(&key).await.unwrap();
            false
        }
        Err(status) => {
            assert_eq!(status.code(), Code::AlreadyExists, "{status}");
            true
        }
    }
}

/// The registry, with a layer that one worker unpacked from it.
struct Private {
    registry: Registry,
    folder: TempDir,
    owner: Machine,
    snapshots: Snapshots,
    taken: SnapshotRef,
}

impl Private {
    async fn start(appliance: &Appliance) -> Self {
        let one = chain('1');
        let registry = Registry::start(Asks::Basic, &[blob_path(&one)]).await;
        let owner = Machine::start_with(appliance, trust(&registry)).await;
        let snapshots = serve(&owner).await;
        let image = format!("{}/team/app:1", registry.host());
        let name = unpack_labelled(&snapshots, &one, "", pulled(&one, &image)).await;
        let taken = snapshot(&owner, &name).await;
        Self { registry, folder: tempfile::tempdir().unwrap(), owner, snapshots, taken }
    }

    fn image(&self, repository: &str) -> String {
        format!("{}/{repository}:1", self.registry.host())
    }

    /// A worker that lists the registry, and has these credentials for it.
    async fn worker(&self, appliance: &Appliance, of: &str) -> Machine {
        let count = fs::read_dir(self.folder.path()).unwrap().count();
        let path = self.folder.path().join(format!("{count}.json"));
        write_credentials(&path, self.registry.host(), of);
        let registries = Registries::new(Some(path), None);
        Machine::start_asking(appliance, trust(&self.registry), registries).await
    }

    /// The labels of its layer, with the annotation that says where it is.
    async fn annotated(&self) -> HashMap<String, String> {
        let store = self.owner.worker.store_id().await.unwrap();
        let place = format!("{store}/{}/{}", self.taken.id, self.taken.size_bytes);
        let mut sent = pulled(&chain('1'), &self.image("team/app"));
        sent.insert(ANNOTATION.to_owned(), place);
        sent
    }

    /// For whom the layer is, as this chain.
    async fn blobs(&self, number: char) -> Vec<String> {
        let told = self.owner.worker.client().snapshot(self.taken.id).await.unwrap();
        let blobs = told.restricted_chains.get(&chain_id(number));
        blobs.into_iter().flatten().map(ToString::to_string).collect()
    }
}

#[test]
fn a_layer_of_a_private_registry_goes_to_those_who_may_pull_it() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let private = Private::start(&appliance).await;
        let Private { registry, owner, snapshots, taken, .. } = &private;
        let one = chain('1');
        let sent = pulled(&one, &private.image("team/app"));
        let known = [format!("{}/team/app@{}", registry.host(), digest(&one))];
        assert_eq!(private.blobs('1').await, known);
        // On its own worker only where it was unpacked, as that has no credentials.
        assert!(is_given(snapshots, "default", sent.clone()).await);
        assert!(!is_given(snapshots, "other", sent.clone()).await);

        // Not by its hash, and not by the annotation of an image either, whatever it is registered as.
        owner.worker.publish(taken.id).await.unwrap();
        for number in ['1', '9'] {
            owner.worker.add_chain(taken.id, &chain_id(number)).await.unwrap();
            assert_eq!(private.blobs(number).await, known);
        }
        let annotated = private.annotated().await;
        let unlisted = Machine::start(&appliance).await;
        let wrong = private.worker(&appliance, OTHER).await;
        for (machine, asks) in [(&unlisted, false), (&wrong, true)] {
            let others = serve(machine).await;
            registry.seen();
            for sent in [sent.clone(), annotated.clone(), labels(&[(REF, &one)])] {
                assert!(!is_given(&others, "default", sent).await);
            }
            // What others say of a layer has no registry asked that is not listed.
            assert_eq!(!registry.seen().is_empty(), asks);
            // Who fetched it has the same snapshot, and the layer is for no more than before.
            let own = unpack_labelled(&others, &one, "", sent.clone()).await;
            assert_eq!(snapshot(machine, &own).await, *taken);
            assert_eq!(private.blobs('1').await, known);
            others.stop().await;
        }
        for sent in [sent, annotated] {
            let right = private.worker(&appliance, ME).await;
            let others = serve(&right).await;
            assert!(is_given(&others, "default", sent.clone()).await, "{sent:?}");
            assert!(is_given(&others, "other", sent).await);
            assert_eq!(snapshot(&right, &one).await, *taken);
            others.stop().await;
        }
        owner.worker.unpublish(taken.id).await.unwrap();
        private.snapshots.stop().await;
    });
}

/// A layer's disk holds what is below it.
#[test]
fn a_layer_above_a_private_one_is_for_no_more() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let private = Private::start(&appliance).await;
        let right = private.worker(&appliance, ME).await;
        let reader = private.worker(&appliance, ME).await;
        let others = serve(&right).await;
        let one = chain('1');
        assert!(is_given(&others, "default", pulled(&one, &private.image("team/app"))).await);
        for (number, image, is_shared) in [
            ('2', "docker.io/library/evil:1".to_owned(), false),
            ('3', private.image("team/other"), false),
            ('4', private.image("public"), false),
            ('5', private.image("team/app"), true),
        ] {
            let above = chain(number);
            let name = unpack_labelled(&others, &above, &one, pulled(&above, &image)).await;
            let made = snapshot(&right, &name).await;
            let told = right.worker.client().snapshot(made.id).await.unwrap();
            assert_eq!(!told.chains.is_empty(), is_shared, "{image}");
            assert_eq!(
                told.restricted_chains.contains_key(&chain_id(number)),
                is_shared,
                "{image}"
            );
            let found = reader.worker.find_chain(&chain_id(number)).await.unwrap();
            assert_eq!(found.is_some(), is_shared, "{image}");
            let key = unpack_key(1, &above).replace("default/", "other/");
            let elsewhere = others.prepare_labelled(&key, &one, labels(&[(REF, &above)])).await;
            assert_eq!(elsewhere.is_err(), is_shared, "another namespace and {image}");
            // And what is above that one.
            let top = chain(char::from_digit(number.to_digit(10).unwrap() + 4, 16).unwrap());
            let name = unpack_labelled(&others, &top, &name, pulled(&top, &image)).await;
            let made = snapshot(&right, &name).await;
            let told = right.worker.client().snapshot(made.id).await.unwrap();
            assert_eq!(!told.restricted_chains.is_empty(), is_shared, "{image}");
            assert_eq!(told.chains.len(), usize::from(is_shared), "{image}");
        }
        others.stop().await;
        private.snapshots.stop().await;
    });
}

/// containerd fetches no blob that it has, so a layer need not have come from where an image was pulled.
#[test]
fn no_pull_makes_a_private_layer_one_for_all() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let private = Private::start(&appliance).await;
        let (one, two) = (chain('1'), chain('2'));
        let known = private.blobs('1').await;
        let second = private.worker(&appliance, OTHER).await;
        let others = serve(&second).await;
        let sent = pulled(&one, "docker.io/library/a:1");
        let same = unpack_labelled(&others, &one, "", sent).await;
        assert_eq!(snapshot(&second, &same).await, private.taken);
        assert_eq!(private.blobs('1').await, known);
        assert!(!is_given(&others, "other", labels(&[(REF, &one)])).await);
        // Nor as another chain, above another layer, where the blob is, or where it is just being unpacked.
        let unpacking = private.worker(&appliance, OTHER).await;
        let early = serve(&unpacking).await;
        let theirs = pulled(&chain('8'), &private.image("team/app"));
        early.prepare_labelled(&unpack_key(7, &chain('8')), "", theirs).await.unwrap();
        for (machine, snapshots) in
            [(&private.owner, &private.snapshots), (&second, &others), (&unpacking, &early)]
        {
            assert_evil_is_kept(machine, snapshots).await;
        }
        early.stop().await;
        // Another repository of the registry lets in its readers, too.
        let third = private.worker(&appliance, OTHER).await;
        let more = serve(&third).await;
        let sent = pulled(&one, &private.image("team/other"));
        unpack_labelled(&more, &one, "", sent).await;
        assert_eq!(private.blobs('1').await.len(), 2);
        more.stop().await;

        // Without labels nothing tells from where it is: kept, also if another image says more of it.
        let kept = unpack(&others, &two, "", true).await;
        let kept = snapshot(&second, &kept).await;
        assert!(!is_given(&others, "other", labels(&[(REF, &two)])).await);
        assert!(is_given(&others, "default", labels(&[(REF, &two)])).await);
        let key = unpack_key(1, &two).replace("default/", "other/");
        let sent = pulled_as(&two, "docker.io/library/evil:1", 'd');
        let (root, _) = others.prepare_labelled(&key, "", sent.clone()).await.unwrap();
        fs::write(root.join("layer"), &two).unwrap();
        let name = format!("other/2/{two}");
        let commit = CommitRequest { name: name.clone(), key, labels: sent, ..Default::default() };
        others.commit_as(commit).await.unwrap();
        for taken in [kept, snapshot(&second, &name).await] {
            let told = second.worker.client().snapshot(taken.id).await.unwrap();
            assert!(told.chains.is_empty(), "{:?}", told.chains);
        }
        others.stop().await;
        private.snapshots.stop().await;
    });
}

/// An image of another registry lists the private blob, above a layer of its own: no other worker gets that.
async fn assert_evil_is_kept(machine: &Machine, snapshots: &Snapshots) {
    let evil = "docker.io/library/evil:1";
    let sent = pulled_as(&chain('e'), evil, 'e');
    let base = match is_given(snapshots, "default", sent.clone()).await {
        true => chain('e'),
        false => unpack_labelled(snapshots, &chain('e'), "", sent).await,
    };
    let sent = pulled(&chain('f'), evil);
    let name = unpack_labelled(snapshots, &chain('f'), &base, sent).await;
    let above = snapshot(machine, &name).await;
    let told = machine.worker.client().snapshot(above.id).await.unwrap();
    assert!(told.chains.is_empty(), "{:?}", told.chains);
}

/// containerd fetches all blobs of an image while it unpacks the first, and has them after a pull that broke off.
#[test]
fn a_blob_of_an_image_that_is_being_pulled_makes_no_layer_for_all() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let private = Private::start(&appliance).await;
        let mut first = pulled_as(&chain('8'), &private.image("team/app"), 'c');
        let layers = format!("{},{}", chain('c'), chain('b'));
        first.insert("containerd.io/snapshot/cri.image-layers".to_owned(), layers);
        for is_unpacked in [false, true] {
            let machine = private.worker(&appliance, OTHER).await;
            let snapshots = serve(&machine).await;
            match is_unpacked {
                true => drop(unpack_labelled(&snapshots, &chain('8'), "", first.clone()).await),
                false => {
                    let key = unpack_key(7, &chain('8'));
                    snapshots.prepare_labelled(&key, "", first.clone()).await.unwrap();
                }
            }
            assert_evil_is_kept(&machine, &snapshots).await;
            snapshots.stop().await;
        }
        private.snapshots.stop().await;
    });
}

/// A reference has another chain id than the layer that it stands for, and the same snapshot.
#[test]
fn a_layer_above_a_reference_to_a_private_one_is_for_no_more() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let private = Private::start(&appliance).await;
        private.owner.worker.publish(private.taken.id).await.unwrap();
        let reference = private.owner.worker.reference_to(private.taken.id).await.unwrap();
        let unlisted = Machine::start(&appliance).await;
        let listing = private.worker(&appliance, OTHER).await;
        for (machine, numbers) in [(&unlisted, ['a', 'b']), (&listing, ['c', 'd'])] {
            let snapshots = serve(machine).await;
            let [below, above] = numbers.map(chain);
            let key = unpack_key(1, &below);
            let sent = pulled(&below, "docker.io/library/fast:1");
            let (root, _) = snapshots.prepare_labelled(&key, "", sent.clone()).await.unwrap();
            slackwater_archive::unpack(&reference.to_archive()[..], &root, None).unwrap();
            let name = format!("default/2/{below}");
            let commit = CommitRequest {
                name: name.clone(),
                key,
                labels: sent.clone(),
                ..Default::default()
            };
            snapshots.commit_as(commit).await.unwrap();
            assert_eq!(snapshot(machine, &name).await, private.taken, "bound by its reference");
            assert!(!is_given(&snapshots, "other", sent).await);
            let sent = pulled_as(&above, "docker.io/library/fast:1", 'd');
            let name = unpack_labelled(&snapshots, &above, &name, sent).await;
            let made = snapshot(machine, &name).await;
            let told = machine.worker.client().snapshot(made.id).await.unwrap();
            assert!(told.chains.is_empty(), "{:?}", told.chains);
            snapshots.stop().await;
        }
        private.owner.worker.unpublish(private.taken.id).await.unwrap();
        private.snapshots.stop().await;
    });
}

fn blob(registry: &Registry, name: &str) -> RegistryBlob {
    format!("{}/{name}@{}", registry.host(), digest(&chain('1'))).parse().unwrap()
}

fn with_credentials(path: &Path, registry: &Registry, of: &str) -> Registries {
    write_credentials(path, registry.host(), of);
    Registries::new(Some(path.to_owned()), None)
}

#[test]
fn registries_are_asked_as_they_ask() {
    let runtime = runtime();
    bounded(&runtime, async {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        let blobs = [blob_path(&chain('1'))];
        let identity = r#""identitytoken": "1dentity""#;
        for (asks, of, expected) in [
            (Asks::Nothing, "", true),
            (Asks::Nothing, ME, true),
            (Asks::Basic, ME, true),
            (Asks::Basic, OTHER, false),
            (Asks::Basic, "", false),
            (Asks::Basic, identity, false),
            (Asks::Bearer(None), ME, true),
            (Asks::Bearer(None), identity, true),
            (Asks::Bearer(None), OTHER, false),
            (Asks::Bearer(None), "", false),
            (Asks::Fails(403), ME, false),
        ] {
            let what = format!("{asks:?} {of}");
            let registry = Registry::start(asks.clone(), &blobs).await;
            let asking = with_credentials(&path, &registry, of);
            let answer = asking.may_read(&blob(&registry, "team/app")).await.unwrap();
            assert_eq!(answer, expected, "{what}");
            let seen = registry.seen();
            assert_eq!(seen[0].1, None, "{what}: nothing is shown that was not asked for");
            assert!(!asking.may_read(&blob(&registry, "team/other")).await.unwrap(), "{what}");
        }
        let registry = Registry::start(Asks::Basic, &blobs).await;
        assert!(!Registries::default().may_read(&blob(&registry, "team/app")).await.unwrap());
        // A log-in counts at once.
        let asking = with_credentials(&path, &registry, OTHER);
        assert!(!asking.may_read(&blob(&registry, "team/app")).await.unwrap());
        write_credentials(&path, registry.host(), ME);
        assert!(asking.may_read(&blob(&registry, "team/app")).await.unwrap());
    });
}

#[test]
fn what_a_registry_answers_may_not_lead_a_password_elsewhere() {
    let runtime = runtime();
    bounded(&runtime, async {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        let blobs = [blob_path(&chain('1'))];
        let ask = async |asks: Asks, of: &str| {
            let registry = Registry::start(asks, &blobs).await;
            with_credentials(&path, &registry, of).may_read(&blob(&registry, "team/app")).await
        };
        for asks in [
            Asks::Bearer(Some("http://registry.example.com/token".to_owned())),
            Asks::Bearer(Some("file:///token".to_owned())),
            Asks::Digest,
            Asks::Page,
            Asks::Fails(500),
            Asks::Sends("http://registry.example.com".to_owned()),
        ] {
            let error = ask(asks.clone(), ME).await.unwrap_err();
            let is_expected = match asks {
                Asks::Bearer(_) => matches!(error, RegistryError::Realm { .. }),
                Asks::Digest => matches!(error, RegistryError::Challenge { .. }),
                Asks::Page => matches!(error, RegistryError::NoBlob { .. }),
                _ => matches!(error, RegistryError::Status { .. }),
            };
            assert!(is_expected && !error.to_string().contains("s3cret"), "{asks:?}: {error}");
        }
        // Where the blobs are are other hosts, by their ports: they are shown nothing, though they ask.
        let place = Registry::start(Asks::Nothing, &blobs).await;
        let way = Registry::start(Asks::Sends(format!("http://{}", place.host())), &blobs).await;
        let to = |registry: &Registry| format!("http://{}", registry.host());
        assert!(ask(Asks::Sends(to(&place)), ME).await.unwrap());
        assert!(ask(Asks::SendsKnown(to(&way)), ME).await.unwrap());
        assert!(!ask(Asks::SendsKnown(to(&way)), OTHER).await.unwrap());
        let asking = Registry::start(Asks::Basic, &blobs).await;
        for asks in [Asks::Sends(to(&asking)), Asks::SendsKnown(to(&asking))] {
            let error = ask(asks, ME).await.unwrap_err();
            assert!(matches!(error, RegistryError::Status { got: 401, .. }), "{error}");
        }
        // Nor is what a service of tokens is sent.
        for of in [ME, r#""identitytoken": "1dentity""#] {
            let asks = Asks::Bearer(Some(format!("{}/elsewhere", to(&way))));
            let error = ask(asks, of).await.unwrap_err();
            assert!(matches!(error, RegistryError::Status { got: 307, .. }), "{error}");
        }
        for (registry, count) in [(&place, 2), (&asking, 2)] {
            let seen = registry.seen();
            assert!(
                seen.len() == count && seen.iter().all(|(_, shown)| shown.is_none()),
                "{seen:?}"
            );
        }
    });
}

#[test]
fn a_registry_that_cannot_be_asked_is_left_alone_for_a_while() {
    let runtime = runtime();
    bounded(&runtime, async {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        let registry = Registry::start(Asks::Basic, &[blob_path(&chain('1'))]).await;
        let asked = blob(&registry, "team/app");
        let fails = |asking: Registries| {
            let asked = asked.clone();
            async move {
                let error = asking.may_read(&asked).await.unwrap_err();
                let again = asking.may_read(&asked).await.unwrap_err();
                assert!(matches!(again, RegistryError::Failed { .. }), "{again}");
                error.to_string()
            }
        };
        let asking = with_credentials(&path, &registry, ME);
        assert!(asking.may_read(&asked).await.unwrap());
        assert_eq!(registry.seen()[1].1.as_deref(), Some(BASIC));
        for (bytes, said) in
            [("{", "docker login"), (r#"{"auths": {"x": {"auth": "%"}}}"#, "decode")]
        {
            std::fs::write(&path, bytes.replace('x', registry.host())).unwrap();
            let error = fails(Registries::new(Some(path.clone()), None)).await;
            assert!(error.contains(said) && error.contains("config.json"), "{error}");
            assert_eq!(registry.seen().len(), 1);
        }
        let anybody = std::os::unix::fs::PermissionsExt::from_mode(0o666);
        std::fs::set_permissions(&path, anybody).unwrap();
        let error = fails(Registries::new(Some(path.clone()), None)).await;
        assert!(error.contains("mode 666, expected root or this user, and 600"), "{error}");
        std::fs::remove_file(&path).unwrap();
        let error = fails(Registries::new(Some(path), None)).await;
        assert!(error.contains("config.json"), "{error}");
        let missing = Registries::new(None, Some(folder.path().join("ca.pem")));
        let error = fails(missing).await;
        assert!(error.contains("ca.pem"), "{error}");
    });
}
