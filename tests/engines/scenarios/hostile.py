"""Images and workers that want another image to have their content, on a containerd that applies nothing
to a snapshot whose mount is read-only (2.4), and what the genuine image then is for others."""

import contextlib
import hashlib
import io
import json
import os
import platform
import tarfile

from images import busybox_tar
from newer import MACHINES
from process import run
from releases import NEWER
from scenario import require, require_equal, scenario, wait_until
from scenarios.chain import mounted
from tree import manifest, require_same

LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
CONFIGURATION_TYPE = "application/vnd.oci.image.config.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
RANDOM_BYTES = 3 << 20
DISK_LIMIT_SECONDS = 60
# What a driver says of an empty disk that is none.
NOT_EMPTY = "the empty disk on the appliance is not what mkfs.ext4 makes here"
# What containerd hands down to the snapshotter, as a label.
HANDED_DOWN = "containerd.io/snapshot"
SHARED = {f"{HANDED_DOWN}/slackwater.shared": "true"}
# No time counts: tar gives a directory with symbolic links another one than containerd.
SET_BEFORE_SECONDS = 0


def digest(data):
    """The digest of bytes."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def chain_id(layers):
    """The chain id of the last of some layers (OCI image specification, "ChainID")."""
    chain = digest(layers[0])
    for layer in layers[1:]:
        chain = digest(f"{chain} {digest(layer)}".encode())
    return chain


def tar_of(files):
    """A layer of files."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.mtime = len(content), 0o640, 1_000_000_000
            tar.addfile(entry, io.BytesIO(content))
    return out.getvalue()


def evil():
    """A layer that takes over each program that starts."""
    return tar_of({"etc/ld.so.preload": b"/evil.so\n", "evil.so": os.urandom(2000)})


class Genuine:
    """An ordinary image of three layers that no appliance has seen."""

    def __init__(self, world, name):
        self.layers = [
            busybox_tar() + b"\0" * 512 * (1 + int.from_bytes(os.urandom(2), "big") % 1000),
            tar_of({"opt/data": os.urandom(RANDOM_BYTES), "etc/secret": os.urandom(30).hex().encode()}),
            tar_of({"opt/other": os.urandom(RANDOM_BYTES), "etc/last": os.urandom(30).hex().encode()}),
        ]
        self._world = world
        self._name = name
        self._count = 0
        with tarfile.open(fileobj=io.BytesIO(self.layers[-1])) as tar:
            self.last = tar.extractfile("etc/last").read().decode()
        self.full_name = self.push(self.layers)
        self._root = world.scratch / "genuine" / name
        self._root.mkdir(parents=True)
        for layer in self.layers:
            run("tar", "--extract", "--numeric-owner", "--preserve-permissions", "--directory", self._root,
                input_bytes=layer)

    def push(self, layers, annotations=None):
        """Pushes an image of these layers, all with the annotations; its name. Whatever the layers are,
        it claims to be made of the genuine ones."""
        registry, self._count = self._world.registry, self._count + 1
        claimed = [digest(layer) for layer in self.layers[:len(layers)]]
        data = json.dumps({
            "architecture": MACHINES[platform.machine()], "os": "linux", "rootfs": {"type": "layers", "diff_ids": claimed},
            "config": {"Env": ["PATH=/bin"], "Labels": {"number": str(self._count)}},
        }).encode()
        listed = [
            {"mediaType": LAYER_TYPE, "size": len(layer), "annotations": annotations or {},
             "digest": registry.put_blob(self._name, layer)}
            for layer in layers
        ]
        configuration = {"mediaType": CONFIGURATION_TYPE, "size": len(data),
                         "digest": registry.put_blob(self._name, data)}
        return registry.put_manifest(f"{self._name}:{self._count}", {
            "schemaVersion": 2, "mediaType": MANIFEST_TYPE, "config": configuration, "layers": listed,
        })

    def require_whole(self, worker):
        """Fails unless the worker, which has pulled it, has it file by file."""
        containerd = worker.containerd
        containerd.view("whole", chain_id(self.layers))
        with mounted(self._world, containerd, "whole") as root:
            got = manifest(root, SET_BEFORE_SECONDS)
        containerd.snapshots("remove", "whole")
        require_same(got, manifest(self._root, SET_BEFORE_SECONDS), worker.name, "the genuine image")
        said = containerd.run(self.full_name, "whole", "cat", "/etc/last")
        require_equal("a container", said, self.last)


def by_cri(containerd, image):
    """As the kubelet pulls; the error's text, or nothing."""
    return containerd.pull_through_cri(image)


def by_transfer(containerd, image):
    """As ctr pulls by default: the daemon's transfer service unpacks."""
    return _by_ctr(containerd, image)


def by_client(containerd, image):
    """As clients pull that unpack themselves."""
    return _by_ctr(containerd, image, "--local")


def _by_ctr(containerd, image, *options):
    said = containerd.attempt("images", "pull", "--plain-http", "--snapshotter", containerd.snapshotter,
                              *options, image)
    return "" if said.code == 0 else said.text.strip() or f"ctr ended with {said.code}"


PULLS = (by_cri, by_transfer, by_client)


def require_refused(containerd, image, what):
    """Fails unless each way to pull refuses the image, since a layer is not what it claims to be."""
    for pull in PULLS:
        said = pull(containerd, image)
        require("wrong diff id" in said, f"{what}, {pull.__name__}: got {said[-300:]!r}")


@contextlib.contextmanager
def newer_worker(world, name, server):
    """A worker with the newer containerd, and nothing in its caches."""
    with world.fresh_worker(name, server, release=NEWER) as worker:
        yield worker


def pull_and_fetch(world, worker, image, pull=by_cri):
    """Pulls; the digests of the layers that were fetched."""
    position = world.registry.position()
    require_equal(f"{worker.name} pulls {pull.__name__}", pull(worker.containerd, image), "")
    listed = world.registry.manifest(image.split("/", 1)[1])["layers"]
    return {layer["digest"] for layer in listed} & world.registry.blobs_fetched(position)


@scenario("hostile: annotations and claimed hashes make nothing of another image's layers", 300,
          newer=True)
def annotations(world):
    server = world.server("hostile-appliance")
    genuine = Genuine(world, "annotated")
    base, _, last = genuine.layers
    with newer_worker(world, "first", server) as first, newer_worker(world, "attacker", server) as attacker:
        # A base that all have, adopted by a worker under labels of the attacker's choice.
        require_equal("fetched", pull_and_fetch(world, first, genuine.push([base])), {digest(base)})
        shared = genuine.push([base], SHARED)
        require_equal("fetched where it is adopted", pull_and_fetch(world, attacker, shared), set())
        require_refused(attacker.containerd, genuine.push([base, evil(), last]), "labels of the parent")
        known = next(item for item in server.listing("snapshots") if digest(base) in item.get("chains", {}))
        attacker.driver.control("POST", "/publish", {"snapshot": known["id"]})
        store = server.call("GET", "/v1/stats")["store_id"]
        for what, wanted in {
            "a shared root": SHARED,
            "another chain": {f"{HANDED_DOWN}.ref": digest(base)},
            "a snapshot by its id": {
                f"{HANDED_DOWN}/slackwater": f"{store}/{known['id']}/{known['size_bytes']}",
            },
        }.items():
            require_refused(attacker.containerd, genuine.push([base, evil(), last], wanted), what)
        # The genuine blobs, with annotations.
        require_equal("genuine", by_transfer(attacker.containerd, genuine.push(genuine.layers, SHARED)), "")
        for pull in PULLS:
            with newer_worker(world, "victim", server) as victim:
                require_equal(pull.__name__, pull(victim.containerd, genuine.full_name), "")
                genuine.require_whole(victim)


def disk_of(server):
    """The path of the only disk, once the driver has deleted the one that it made the empty disk of."""
    def find():
        disks = [item["path"] for item in server.listing("files") if "/disks/" in item["path"]]
        return disks[0] if len(disks) == 1 else None
    return wait_until("there is one disk", DISK_LIMIT_SECONDS, find)


@scenario("hostile: names, labels and an empty disk of a worker are no layer of others", 300, newer=True)
def names(world):
    server = world.server("poisoned-appliance")
    images = {pull: Genuine(world, f"named-{pull.__name__}") for pull in PULLS}
    chains = [chain_id(image.layers[:count + 1]) for image in images.values() for count in range(3)]
    with newer_worker(world, "attacker", server) as attacker:
        containerd = attacker.containerd
        containerd.snapshots("prepare", "evil")
        with mounted(world, containerd, "evil") as root:
            (root / "etc").mkdir()
            (root / "etc/ld.so.preload").write_text("/evil.so\n")
            run("sync", "--file-system", root)
        disk = disk_of(server)
        for chain in chains:
            labels = {"slackwater.chain": chain, "slackwater.image-chain": chain, f"{HANDED_DOWN}.ref": chain}
            server.call("POST", "/v1/snapshots", {"path": disk, "name": f"chain:{chain}", "labels": labels})
        empty = next(item for item in server.listing("snapshots")
                     if (item.get("name") or "").startswith("slackwater-empty-"))
        server.call("DELETE", f"/v1/snapshots/{empty['id']}")
        server.call("POST", "/v1/snapshots", {"path": disk, "name": empty["name"]})
        # As containerd commits a container, under a name of its choice.
        containerd.snapshots("commit", chains[0], "evil")
        for pull, genuine in images.items():
            with newer_worker(world, "victim", server) as victim:
                fetched = pull_and_fetch(world, victim, genuine.full_name, pull)
                require_equal("fetched", fetched, {digest(layer) for layer in genuine.layers})
                genuine.require_whole(victim)
                log = victim.driver.process.log_path.read_text()
                require(NOT_EMPTY in log, "the victim did not meet the poisoned empty disk")
        # By its name it might be a layer, which nothing else removes.
        containerd.snapshots("remove", chains[0])


@scenario("hostile: layers that a worker keeps go to none who knows their hashes", 300, newer=True)
def kept(world):
    server = world.server("private-appliance")
    for arguments in ((), ("--private-layers", "true")):
        genuine = Genuine(world, f"kept-{len(arguments)}")
        claimed = genuine.push([tar_of({name: b"x"}) for name in ("one", "two", "three")])
        all_layers = {digest(layer) for layer in genuine.layers}
        with world.fresh_worker("owner", server, release=NEWER, arguments=arguments) as owner, \
                newer_worker(world, "attacker", server) as attacker:
            require_equal("owner's pull", pull_and_fetch(world, owner, genuine.full_name), all_layers)
            if not arguments:
                # What the setting is there for.
                require_equal("fetched by default", pull_and_fetch(world, attacker, claimed), set())
                continue
            require_refused(attacker.containerd, claimed, "hashes alone")
            fetched = pull_and_fetch(world, attacker, genuine.full_name)
            require_equal("fetched by one who may pull it", fetched, all_layers)
            genuine.require_whole(attacker)


@scenario("hostile: layers of a private registry go to workers that it lets read them", 300, newer=True)
def restricted(world):
    server = world.server("restricting-appliance")
    genuine = Genuine(world, "team/app")
    claimed = genuine.push([tar_of({name: b"x"}) for name in ("one", "two", "three")])
    all_layers = {digest(layer) for layer in genuine.layers}
    listing = ("--private-registries", world.registry.name("team"))
    with world.fresh_worker("owner", server, release=NEWER, arguments=listing) as owner:
        require_equal("owner's pull", pull_and_fetch(world, owner, genuine.full_name), all_layers)
        for count, layer in enumerate(genuine.layers, 1):
            chain, blob = chain_id(genuine.layers[:count]), world.registry.name(f"team/app@{digest(layer)}")
            known = next((item for item in server.listing("snapshots") if chain in item.get("chains", {})), {})
            require_equal("for whom a layer is", known.get("restricted_chains"), {chain: [blob]})
        with newer_worker(world, "attacker", server) as attacker:
            require_refused(attacker.containerd, claimed, "hashes alone")
        with world.fresh_worker("reader", server, release=NEWER, arguments=listing) as reader:
            require_equal("fetched by a reader", pull_and_fetch(world, reader, genuine.full_name), set())
            genuine.require_whole(reader)
        # As of a team that the worker left.
        for layer in all_layers:
            world.registry.delete_blob("team/app", layer)
        with world.fresh_worker("former", server, release=NEWER, arguments=listing) as former:
            other = Genuine(world, "other")
            other.layers = genuine.layers
            bogus = other.push([tar_of({name: b"y"}) for name in ("one", "two", "three")])
            require_refused(former.containerd, bogus, "hashes of layers that the registry does not show")
