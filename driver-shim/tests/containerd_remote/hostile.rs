//! Random hostile images on one worker, and what others then get of genuine ones: byte for byte what is theirs.
//!
//! ```text
//! image    1 to 3 layers; the configuration claims chain ids of its own, or of a genuine image
//! layer    random annotations (labels), members, references
//! build    a fourth of them, unpacked by BuildKit, which compares no hashes
//! token    random names and labels of snapshots over REST
//! ```
//! The unpacker here does what containerd's does: it overwrites the chain's label, takes what is there already,
//! and drops a layer whose content does not have the claimed hash. `SLACKWATER_HOSTILE_IMAGES` says how many images, by
//! default 200; `SLACKWATER_HOSTILE_SEED` repeats a run.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;

use slackwater_archive::{REFERENCE_LINK, REFERENCE_LINK_TARGET, REFERENCE_MEMBER, Reference};
use slackwater_client::types::{CreateSnapshot, Labels};
use slackwater_driver::containerd::proto::CommitRequest;
use slackwater_driver::worker::SnapshotRef;
use tonic::Code;
use uuid::Uuid;

use crate::support::snapshots::Snapshots;
use crate::support::{Appliance, Machine};
use crate::{ANNOTATION, REF, SHARED, adopted, serve, snapshot, unpack_key};

/// Images of a run in `make test`.
const IMAGES_DEFAULT: u64 = 200;

/// Longest time of one image, far more than it takes.
const IMAGE_SECONDS_MAX: u64 = 2;

/// Layers of a genuine image.
const LAYERS: usize = 3;

/// Names that hostile layers write, genuine ones among them.
const MEMBERS: [&str; 7] = [
    "file",
    "ld.so.preload",
    "layer",
    "etc",
    REFERENCE_MEMBER,
    REFERENCE_LINK,
    REFERENCE_LINK_TARGET,
];

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
}

/// xorshift64: enough to choose by.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() % limit as u64).unwrap()
    }

    fn one_in(&mut self, chances: usize) -> bool {
        self.below(chances) == 0
    }

    fn of<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        let index = self.below(choices.len());
        &choices[index]
    }

    fn chain(&mut self) -> String {
        let digits: String = (0..4).map(|_| format!("{:016x}", self.next())).collect();
        format!("sha256:{digits}")
    }
}

/// An image as its maker made it: the chain ids of its layers, the lowest first.
struct Genuine {
    chains: Vec<String>,
}

impl Genuine {
    fn new(random: &mut Random) -> Self {
        Self { chains: (0..LAYERS).map(|_| random.chain()).collect() }
    }

    fn write(chain: &str, root: &Path) {
        fs::write(root.join(&chain[7..23]), chain.repeat(100)).unwrap();
        fs::write(root.join("file"), chain).unwrap();
    }

    /// What a root of its lowest layers holds.
    fn content(&self, layers: usize) -> BTreeMap<String, Vec<u8>> {
        let own = self.chains[..layers].iter();
        let own = own.map(|chain| (chain[7..23].to_owned(), chain.repeat(100)));
        let top = ("file".to_owned(), self.chains[layers - 1].clone());
        own.chain([top]).map(|(name, content)| (name, content.into_bytes())).collect()
    }
}

fn found(root: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(root).unwrap().map(Result::unwrap);
    let read = |entry: fs::DirEntry| {
        let name = entry.file_name().into_string().unwrap();
        (name, fs::read(entry.path()).unwrap_or_default())
    };
    entries.map(read).collect()
}

/// Pulls a genuine image as containerd does, and checks what a container would see.
async fn pull(snapshots: &Snapshots, image: &Genuine, run: &str) {
    let mut above = String::new();
    for chain in &image.chains {
        let sent: HashMap<_, _> = [(REF.to_owned(), chain.clone())].into();
        let key = unpack_key(1, chain);
        match snapshots.prepare_labelled(&key, &above, sent.clone()).await {
            Ok((root, is_writable)) => {
                assert!(is_writable);
                Genuine::write(chain, &root);
                let name = format!("default/2/{chain}");
                let commit = CommitRequest { name, key, labels: sent, ..Default::default() };
                snapshots.commit_as(commit).await.unwrap();
            }
            Err(status) => assert_eq!(status.code(), Code::AlreadyExists, "{status}"),
        }
        above = adopted(snapshots, chain, &above).await.remove(0);
    }
    check(snapshots, &above, &image.content(LAYERS), run).await;
}

/// A container of a committed snapshot would see this.
async fn check(
    snapshots: &Snapshots,
    name: &str,
    expected: &BTreeMap<String, Vec<u8>>,
    about: &str,
) {
    let key = format!("view of {about}");
    let view = snapshots.view(&key, name).await.unwrap();
    assert_eq!(found(&view), *expected, "{about}");
    snapshots.remove(&key).await.unwrap();
}

/// Who makes the images: what he knows, and the worker that they are unpacked on.
struct Attack<'a> {
    random: Random,
    machine: &'a Machine,
    snapshots: &'a Snapshots,
    store_id: String,
    /// Chain ids that he claims, and what a root of each holds.
    targets: Vec<(String, BTreeMap<String, Vec<u8>>)>,
    /// References and ids that he knows: of genuine snapshots and of his own.
    known: Vec<Reference>,
    images: usize,
}

impl Attack<'_> {
    fn labels(&mut self, chain: &str) -> HashMap<String, String> {
        let mut labels = HashMap::new();
        for _ in 0..self.random.below(4) {
            let located = self.random.of(&self.known).clone();
            let claimed = self.random.of(&self.targets).0.clone();
            let id = located.snapshot_id;
            let store = match self.random.one_in(8) {
                true => Uuid::new_v4().to_string(),
                false => self.store_id.clone(),
            };
            let size = located.size_bytes + u64::from(self.random.one_in(8));
            let prefix = "containerd.io/snapshot/";
            let (name, value) = match self.random.below(7) {
                0 => (SHARED.to_owned(), "true".to_owned()),
                1 | 2 => (ANNOTATION.to_owned(), format!("{store}/{id}/{size}")),
                3 => (format!("{prefix}ref"), claimed),
                4 => (format!("{prefix}slackwater.chain"), claimed),
                5 => (format!("{prefix}slackwater:chain:{claimed}"), String::new()),
                _ => (format!("{prefix}{:x}", self.random.next()), "x".repeat(1000)),
            };
            labels.insert(name, value);
        }
        // An image cannot choose this one.
        labels.insert(REF.to_owned(), chain.to_owned());
        labels
    }

    fn fill(&mut self, root: &Path) {
        if self.random.one_in(4) {
            let reference = self.random.of(&self.known).clone();
            let mac = reference.mac.filter(|_| !self.random.one_in(3));
            let archive = Reference { mac, ..reference }.to_archive();
            let _ = slackwater_archive::unpack(&archive[..], root, None);
        }
        for _ in 0..self.random.below(3) {
            let path = root.join(self.random.of(&MEMBERS));
            let _ = match self.random.below(3) {
                0 => fs::create_dir(&path),
                1 => std::os::unix::fs::symlink("/etc/passwd", &path),
                _ => fs::write(&path, b"hostile"),
            };
        }
    }

    /// Unpacks one image, as far as the unpacker lets it; then it is removed, or stays.
    async fn image(&mut self) {
        self.images += 1;
        let is_build = self.random.one_in(4);
        let mut stack: Vec<String> = Vec::new();
        for _ in 0..=self.random.below(3) {
            let parent = stack.last().cloned().unwrap_or_default();
            let unpacked = match is_build {
                true => self.layer_of_a_build(&parent).await,
                false => self.layer(&parent).await,
            };
            match unpacked {
                Some(name) => stack.push(name),
                None => break,
            }
        }
        if !self.random.one_in(10) {
            for name in stack.iter().rev() {
                // A genuine one that others are made above stays.
                let _ = self.snapshots.remove(name).await;
            }
        }
    }

    /// One layer by containerd's unpacker: `None` where it refuses.
    async fn layer(&mut self, parent: &str) -> Option<String> {
        let is_claimed = self.random.one_in(3);
        let chain = match is_claimed {
            true => self.random.of(&self.targets).0.clone(),
            false => self.random.chain(),
        };
        let sent = self.labels(&chain);
        let key = unpack_key(self.images, &chain);
        match self.snapshots.prepare_labelled(&key, parent, sent.clone()).await {
            Ok((root, is_writable)) => {
                assert!(is_writable, "{sent:?}");
                self.fill(&root);
                // What he wrote has another hash than a genuine layer.
                let name = format!("default/{}/{chain}", self.images);
                self.commit(&key, &name, sent, is_claimed).await
            }
            Err(status) => {
                assert_eq!(status.code(), Code::AlreadyExists, "{status}");
                let name = adopted(self.snapshots, &chain, parent).await.remove(0);
                // Whatever he claims of it, it is what the chain id says.
                let expected = self.targets.iter().find(|(target, _)| *target == chain);
                let expected = &expected.expect("a chain of his own is on no appliance").1;
                check(self.snapshots, &name, expected, &format!("{}: {sent:?}", self.images)).await;
                Some(name)
            }
        }
    }

    /// One layer by BuildKit, in a namespace of its own: it sends no labels, and calls what it wrote by what the
    /// image claims.
    async fn layer_of_a_build(&mut self, parent: &str) -> Option<String> {
        let chain = self.random.of(&self.targets).0.clone();
        let (namespace, random) = ("buildkit", "k2x8hz9rqm4n1v7c0t5w3y6pb");
        let key = format!("{namespace}/{}/extract-{random} {chain}", self.images);
        let root = self.snapshots.prepare(&key, parent).await.unwrap();
        self.fill(&root);
        let name = format!("{namespace}/{}/{chain}", self.images);
        self.commit(&key, &name, HashMap::new(), false).await
    }

    /// Commits what was unpacked, unless the unpacker or the driver refuses it.
    async fn commit(
        &mut self,
        key: &str,
        name: &str,
        labels: HashMap<String, String>,
        is_refused: bool,
    ) -> Option<String> {
        let (name, key) = (name.to_owned(), key.to_owned());
        let commit = CommitRequest {
            name: name.clone(),
            key: key.clone(),
            labels,
            ..CommitRequest::default()
        };
        if is_refused || self.snapshots.commit_as(commit).await.is_err() {
            self.snapshots.remove(&key).await.unwrap();
            return None;
        }
        self.learn(&name).await;
        Some(name)
    }

    /// Takes note of a snapshot, and says things of it with his token.
    async fn learn(&mut self, name: &str) {
        if !self.random.one_in(10) {
            return;
        }
        let SnapshotRef { id, size_bytes } = snapshot(self.machine, name).await;
        let client = self.machine.worker.client();
        let reference = self.machine.worker.reference_to(id).await.unwrap();
        let claimed = self.random.of(&self.targets).0.clone();
        if self.known.len() < 100 {
            self.known.push(reference);
            // It lives on, so that what names it names something.
            self.machine.worker.publish(id).await.unwrap();
        }
        let labels = Labels::from([
            ("slackwater.chain".to_owned(), claimed.clone()),
            ("slackwater.image-chain".to_owned(), claimed.clone()),
            (REF.to_owned(), claimed.clone()),
        ]);
        let _ = client.set_snapshot_labels(id, labels).await;
        let reserved = Labels::from([(format!("slackwater:chain:{claimed}"), String::new())]);
        client.set_snapshot_labels(id, reserved).await.unwrap_err();
        let path = format!("evil/{}", self.images);
        client.create_clone(id, &path).await.unwrap();
        for prefix in ["", "slackwater:"] {
            let name = Some(format!("{prefix}chain:{claimed}:{size_bytes}"));
            let request = CreateSnapshot { path: path.clone(), name, ..CreateSnapshot::default() };
            let _ = client.create_snapshot(&request).await;
        }
        client.delete_file(&path).await.unwrap();
    }
}

#[test]
fn hostile_images_change_nothing_that_another_worker_gets() {
    let images = setting("SLACKWATER_HOSTILE_IMAGES", IMAGES_DEFAULT);
    let seed = setting("SLACKWATER_HOSTILE_SEED", u64::from(std::process::id()) + 1);
    println!("{images} images, SLACKWATER_HOSTILE_SEED={seed}");
    let time = crate::TEST_TIME.max(std::time::Duration::from_secs(images * IMAGE_SECONDS_MAX));
    let appliance = Appliance::start();
    crate::bounded_by(time, &crate::runtime(), async {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let genuine: Vec<_> = (0..3).map(|_| Genuine::new(&mut random)).collect();
        // The first one is on the appliance before, the second comes to the attacked worker in between, the
        // third only to others.
        let honest = Machine::start(&appliance).await;
        let honest_snapshots = serve(&honest).await;
        pull(&honest_snapshots, &genuine[0], "honest").await;
        let mut known = Vec::new();
        for chain in &genuine[0].chains {
            let id = snapshot(&honest, &format!("default/2/{chain}")).await.id;
            known.push(honest.worker.reference_to(id).await.unwrap());
        }

        let attacked = Machine::start(&appliance).await;
        let snapshots = serve(&attacked).await;
        let store_id = attacked.worker.store_id().await.unwrap();
        let targets = genuine.iter().flat_map(|image| {
            let contents = (1..=LAYERS).map(|layers| image.content(layers));
            image.chains.iter().cloned().zip(contents)
        });
        let targets = targets.collect();
        let mut attack = Attack {
            random,
            machine: &attacked,
            snapshots: &snapshots,
            store_id,
            targets,
            known,
            images: 0,
        };
        for number in 0..images {
            attack.image().await;
            if number == images / 2 {
                pull(&snapshots, &genuine[1], "attacked, between").await;
            }
        }

        let fresh = Machine::start(&appliance).await;
        let fresh_snapshots = serve(&fresh).await;
        for (number, image) in genuine.iter().enumerate() {
            pull(&fresh_snapshots, image, &format!("fresh {number}")).await;
            pull(&snapshots, image, &format!("attacked {number}")).await;
        }
        for snapshots in [fresh_snapshots, snapshots, honest_snapshots] {
            snapshots.stop().await;
        }
    });
}
