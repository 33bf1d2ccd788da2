//! For whom a layer is that this worker unpacked: decided by the registry that it came from, and by what is below.
//!
//! Clients that unpack for a snapshotter of this kind say the image's name and the blob's digest in labels: CRI and the
//! transfer service of containerd where they are set to, and Docker. Others say nothing, and then an image's author may
//! write the same labels as annotations. Nor does a name say that the blob was fetched from there: containerd fetches
//! none that it has. So a layer is for more than before by no pull, and a name decides only where nothing is known.
//!
//! A layer's disk holds the layers below it, too. So above a layer that is not for all, a layer is for those alone who
//! may read the repository of both, or for this worker: else the private layer would be given to all under the chain
//! id of a layer that any image puts above it.

use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

use slackwater_client::types::RegistryBlob;

use super::Trust;

/// The name of the image that is being pulled.
const IMAGE: &str = "containerd.io/snapshot/cri.image-ref";

/// The digest of the blob that is being unpacked.
const LAYER: &str = "containerd.io/snapshot/cri.layer-digest";

/// The digests of the blobs from this layer up to the image's last, as far as a label holds them: some 55. They are said
/// with the first layer, before any is fetched (containerd, `snapshotters.AppendInfoHandlerWrapper`).
const LAYERS: &str = "containerd.io/snapshot/cri.image-layers";

/// For whom a layer is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Sharing {
    /// For all workers.
    All,
    /// For workers that may read this blob.
    Readers(RegistryBlob),
    /// For this worker.
    Kept,
}

/// For whom the layer below is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum BelowIs {
    /// For all workers.
    ForAll,
    /// For workers that may read one of these blobs.
    ForReaders(BTreeSet<RegistryBlob>),
    /// For this worker.
    Kept,
}

impl Sharing {
    /// For whom the layer is above this one.
    pub(crate) fn above(self, below: &BelowIs) -> Self {
        match (self, below) {
            (own, BelowIs::ForAll) => own,
            (Self::Readers(own), BelowIs::ForReaders(blobs))
                if blobs.iter().any(|blob| is_same_repository(blob, &own)) =>
            {
                Self::Readers(own)
            }
            _ => Self::Kept,
        }
    }
}

fn is_same_repository(one: &RegistryBlob, other: &RegistryBlob) -> bool {
    registry_of(one.host()) == registry_of(other.host()) && one.repository() == other.repository()
}

/// One name of a registry that has several: without the port of HTTPS, and Docker Hub's usual name.
fn registry_of(host: &str) -> String {
    let host = host.to_ascii_lowercase();
    let host = host.strip_suffix(":443").unwrap_or(&host);
    match host.strip_suffix('.').unwrap_or(host) {
        host if host.ends_with(".docker.io") => "docker.io".to_owned(),
        other => other.to_owned(),
    }
}

/// A registry, or some repositories of it, whose layers are for those who may pull them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrivateRegistry {
    host: String,
    /// The repository with this name, and those below it; empty for all.
    repository: String,
}

/// The text names no registry.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "expected a registry as it stands in names of images: HOST, HOST:PORT, or one with a repository behind it, such as registry.example.com/team"
)]
pub struct PrivateRegistryParseError;

impl FromStr for PrivateRegistry {
    type Err = PrivateRegistryParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (host, repository) = text.split_once('/').unwrap_or((text, ""));
        let (host, repository) = (registry_of(host), repository.trim_end_matches('/'));
        // As a blob in it would be called.
        let inside = if repository.is_empty() { "x" } else { repository };
        match blob_in(&format!("{host}/{inside}"), &format!("sha256:{}", "0".repeat(64))) {
            // A tag or a digest behind it is no part of the repository.
            Some(blob) if blob.repository() == inside => {
                Ok(Self { host, repository: repository.to_owned() })
            }
            _ => Err(PrivateRegistryParseError),
        }
    }
}

impl PrivateRegistry {
    fn holds(&self, blob: &RegistryBlob) -> bool {
        let rest = blob.repository().strip_prefix(self.repository.as_str());
        let is_inside = self.repository.is_empty()
            || rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        is_inside && registry_of(blob.host()) == self.host
    }
}

/// Whether the first part of an image's name is a registry, and not a repository of Docker Hub (the rule of Docker's
/// and containerd's names).
fn is_registry(host: &str) -> bool {
    host.contains(['.', ':']) || host == "localhost"
}

/// The blob of a layer of an image; `None` if the image's name is not a full one.
fn blob_in(image: &str, digest: &str) -> Option<RegistryBlob> {
    let name = image.split('@').next()?;
    let (host, rest) = name.split_once('/')?;
    let repository = rest.split(':').next()?;
    let blob = format!("{}/{repository}@{digest}", registry_of(host)).parse().ok()?;
    is_registry(host).then_some(blob)
}

/// The digest of the blob that was unpacked with these labels, if the client said it.
pub(crate) fn layer_digest(labels: &BTreeMap<String, String>) -> Option<&str> {
    labels.get(LAYER).map(String::as_str)
}

/// Whether a blob is among those of the image that is pulled with these labels.
pub(crate) fn is_of_image(labels: &BTreeMap<String, String>, digest: &str) -> bool {
    let layers = labels.get(LAYERS).map(String::as_str).unwrap_or_default();
    layer_digest(labels) == Some(digest) || layers.split(',').any(|layer| layer == digest)
}

impl Trust {
    /// For whom the layer is that was unpacked with these labels.
    pub(crate) fn sharing(&self, labels: &BTreeMap<String, String>) -> Sharing {
        if self.private_layers {
            return Sharing::Kept;
        }
        if self.private_registries.is_empty() {
            return Sharing::All;
        }
        let said = labels.get(IMAGE).zip(labels.get(LAYER));
        match said.and_then(|(image, digest)| blob_in(image, digest)) {
            Some(blob) if self.is_private(&blob) => Sharing::Readers(blob),
            Some(_) => Sharing::All,
            // It may be of a private registry.
            None => Sharing::Kept,
        }
    }

    /// Whether a blob is in one of the registries that this worker asks.
    pub(crate) fn is_private(&self, blob: &RegistryBlob) -> bool {
        self.private_registries.iter().any(|registry| registry.holds(blob))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest() -> String {
        format!("sha256:{}", "a".repeat(64))
    }

    fn blob(name: &str) -> RegistryBlob {
        format!("{name}@{}", digest()).parse().unwrap()
    }

    fn trust(registries: &[&str]) -> Trust {
        let private_registries = registries.iter().map(|text| text.parse().unwrap()).collect();
        Trust { private_registries, ..Trust::default() }
    }

    fn labels(image: &str, digest: &str) -> BTreeMap<String, String> {
        [(IMAGE.to_owned(), image.to_owned()), (LAYER.to_owned(), digest.to_owned())].into()
    }

    #[test]
    fn layers_of_listed_registries_are_for_those_who_may_read_them() {
        let trust = trust(&["registry.example.com/team", "127.0.0.1:5000"]);
        let sharing = |image: &str| trust.sharing(&labels(image, &digest()));
        let readers = |name: &str| Sharing::Readers(blob(name));
        for (image, expected) in [
            ("registry.example.com/team/app:1", readers("registry.example.com/team/app")),
            ("registry.example.com/team", readers("registry.example.com/team")),
            ("127.0.0.1:5000/a@sha256:0", readers("127.0.0.1:5000/a")),
            ("127.0.0.1:5000/a/b:1.2@sha256:0", readers("127.0.0.1:5000/a/b")),
            ("registry.example.com/teams/app:1", Sharing::All),
            ("registry.example.com/public:1", Sharing::All),
            ("docker.io/library/busybox:latest", Sharing::All),
            // Other names of the same registry.
            ("Registry.Example.COM/team/app", readers("registry.example.com/team/app")),
            ("registry.example.com:443/team/app", readers("registry.example.com/team/app")),
            ("registry.example.com./team/app", readers("registry.example.com/team/app")),
            ("index.docker.io/a", Sharing::All),
            // What is not a full name of an image.
            ("busybox", Sharing::Kept),
            ("team/app:1", Sharing::Kept),
            ("", Sharing::Kept),
            ("127.0.0.1:5000/../x", Sharing::Kept),
        ] {
            assert_eq!(sharing(image), expected, "{image}");
        }
    }

    #[test]
    fn above_a_layer_that_is_not_for_all_is_none_for_more() {
        let readers = |name: &str| Sharing::Readers(blob(name));
        let of_readers =
            |names: &[&str]| BelowIs::ForReaders(names.iter().map(|name| blob(name)).collect());
        let (team, other) = ("registry.example.com/team/app", "registry.example.com/other");
        for (own, below, expected) in [
            (Sharing::All, BelowIs::ForAll, Sharing::All),
            (readers(team), BelowIs::ForAll, readers(team)),
            (Sharing::Kept, BelowIs::ForAll, Sharing::Kept),
            (Sharing::All, of_readers(&[team]), Sharing::Kept),
            (readers(team), of_readers(&[team]), readers(team)),
            (readers(team), of_readers(&[other, team]), readers(team)),
            (readers(team), of_readers(&["registry.example.com:443/team/app"]), readers(team)),
            (readers(team), of_readers(&[other]), Sharing::Kept),
            (readers(team), of_readers(&["registry.example.com/team"]), Sharing::Kept),
            (readers(team), of_readers(&[]), Sharing::Kept),
            (Sharing::All, BelowIs::Kept, Sharing::Kept),
            (readers(team), BelowIs::Kept, Sharing::Kept),
        ] {
            assert_eq!(own.clone().above(&below), expected, "{own:?} {below:?}");
        }
    }

    #[test]
    fn a_layer_of_unknown_origin_is_kept_where_a_registry_is_listed() {
        let trust = trust(&["docker.io/team"]);
        let image = "docker.io/library/busybox:1";
        assert_eq!(trust.sharing(&BTreeMap::new()), Sharing::Kept);
        assert_eq!(trust.sharing(&labels(image, "sha256:0")), Sharing::Kept);
        let unnamed = [(LAYER.to_owned(), digest())].into();
        assert_eq!(trust.sharing(&unnamed), Sharing::Kept);
        assert_eq!(trust.sharing(&labels(image, &digest())), Sharing::All);
    }

    #[test]
    fn without_listed_registries_all_layers_are_alike() {
        let said = labels("registry.example.com/a", &digest());
        assert_eq!(Trust::default().sharing(&said), Sharing::All);
        assert_eq!(Trust::default().sharing(&BTreeMap::new()), Sharing::All);
        let kept = Trust { private_layers: true, ..trust(&["a.example"]) };
        assert_eq!(kept.sharing(&said), Sharing::Kept);
    }

    #[test]
    fn registries_are_written_as_in_names_of_images() {
        for good in ["docker.io", "localhost", "a:5000", "[::1]:5000", "a.b/c/d", "A.b", "a.b/c/"] {
            assert!(good.parse::<PrivateRegistry>().is_ok(), "{good}");
        }
        for bad in
            ["", "a", "https://a.b", "a.b/C", "a.b/c:1", "a.b//c", "/c", "a b.c", "*.b", "a.b/c@d"]
        {
            assert!(bad.parse::<PrivateRegistry>().is_err(), "{bad}");
        }
    }
}
