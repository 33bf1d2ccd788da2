"""An image that another worker unpacked, pulled where clients need its blobs: fetched whole, not unpacked."""

import hashlib
import json
import tarfile

from releases import NEWER_AS_PRINTED
from scenario import require, require_equal, scenario
from scenarios.reference import PROGRAM

# The namespace of ctr, whose users export and push what they pull.
NAMESPACE = "default"
# Of an image of more than 200 MB: what ext4 writes to clones that are dropped again.
WRITTEN_MAX_BYTES = 16 << 20
COMMAND_LIMIT_SECONDS = 300


def pull(world, worker, image):
    """Pulls as a client does that unpacks by the diff service. Returns the digests of the blobs that were sent."""
    containerd = worker.containerd
    containerd.namespace = NAMESPACE
    position = world.registry.position()
    containerd.ctr("images", "pull", "--local", "--plain-http", "--snapshotter", containerd.snapshotter, image,
                   limit_seconds=COMMAND_LIMIT_SECONDS)
    return world.registry.blobs_fetched(position)


def blobs_of(archive):
    """The digests of an OCI archive's blobs, of which each is checked; and those that its manifests name."""
    found, named = set(), set()
    with tarfile.open(archive) as tar:
        for member in tar:
            if not member.isfile() or not member.name.startswith("blobs/sha256/"):
                continue
            data = tar.extractfile(member).read()
            digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
            require_equal("a blob's digest", digest.removeprefix("sha256:"), member.name.rsplit("/", 1)[1])
            found.add(digest)
            # Layers are no JSON.
            text = json.loads(data) if data[:1] == b"{" else {}
            if "layers" in text:
                named |= {part["digest"] for part in [text["config"], *text["layers"]]}
    return found, named


@scenario("blobs: what the appliance has is fetched and not unpacked, exported and pushed, by containerd 2.4", 600,
          newer=True)
def whole(world):
    image = world.images.built("program:1", world.images.debian(), ["COPY program.c /program.c"],
                               [("program.c", PROGRAM.encode())])
    server = world.server("blobs-appliance")
    layers = {layer["digest"] for layer in world.registry.manifest(image.split("/", 1)[1])["layers"]}
    with world.fresh_worker("unpacks", server, release=NEWER_AS_PRINTED) as first:
        require(layers <= pull(world, first, image), "the first worker fetched no layer")
        with world.fresh_worker("compares", server, release=NEWER_AS_PRINTED) as worker:
            containerd = worker.containerd
            # The disk of what is written above images is made with the first snapshot.
            containerd.snapshots("prepare", "first")
            before = {item["id"] for item in server.listing("snapshots")}
            worker.meter.reset()
            fetched = pull(world, worker, image)
            require(layers <= fetched, f"fetched {fetched}, expected all of {layers}")
            written = worker.meter.sent
            require(written <= WRITTEN_MAX_BYTES, f"{written} bytes were written to the appliance")
            require_equal("snapshots", {item["id"] for item in server.listing("snapshots")}, before)
            require_equal("output", containerd.run(image, "one", "/bin/busybox", "echo", "runs"), "runs\n")
            archive = worker.directory / "exported.tar"
            with world.registry.away():
                # Without --local ctr 2 copies the archive in the background, and may end before that has ended.
                containerd.ctr("images", "export", "--local", str(archive), image, limit_seconds=COMMAND_LIMIT_SECONDS)
            found, named = blobs_of(archive)
            require(layers <= named <= found, f"the archive has {found}, expected {named} with {layers}")
            other = world.registry.name("pushed-again:1")
            containerd.ctr("images", "tag", image, other)
            containerd.ctr("images", "push", "--plain-http", other, limit_seconds=COMMAND_LIMIT_SECONDS)
            world.plain("pull", other, limit_seconds=COMMAND_LIMIT_SECONDS)
            require_equal("elsewhere", world.plain.run(other, "/bin/busybox", "echo", "runs"), "runs")
            world.plain("image", "rm", other)
            log = worker.driver.process.log_path.read_text("utf-8", "replace")
            require("containerd unpacks" not in log, f"the driver left a layer to containerd: {log[-2000:]}")
    return f"{len(layers)} layers, {written >> 10} KiB written"
