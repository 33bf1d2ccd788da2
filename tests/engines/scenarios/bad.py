"""Bad input: clear errors in docker's own output, and nothing half made."""

import hashlib
import io
import json
import os
import re
import tarfile

from leftover import reconcile, require_nothing_left
from process import attempt
from releases import NEWER_FOR_ALL
from scenario import require, require_equal, scenario, wait_until
from scenarios.reference import push_by_reference

# In the words of images.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
UNKNOWN = "01234567-89ab-7def-8123-456789abcdef"
UUID = re.compile(rb"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
SMALL_CAPACITY, LARGE_BYTES = "256MiB", 400 << 20
FREE_LIMIT_SECONDS = 60
# Two kinds of text: what the kernel makes of a failed write, and what the driver says.
FULL_IN_CONTAINER = re.compile(r"No space left|I/O error|Input/output error|Read-only file system")
# By Docker 29, of `docker load`.
NOT_UNPACKED = "Error unpacking image"
FULL_IN_DOCKER = re.compile(r"full|space|capacity", re.IGNORECASE)
WITHOUT_FUSE = (
    "mount -t tmpfs tmpfs /dev && mknod /dev/null c 1 3 && mknod /dev/urandom c 1 9 && "
    "mknod /dev/random c 1 8 && mknod /dev/zero c 1 5 && mknod /dev/loop-control c 10 237 && "
    "for index in $(seq 0 15); do mknod /dev/loop$index b 7 $index; done && exec \"$@\""
)


def layer(entries):
    """A layer's tar."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, kind, content in entries:
            entry = tarfile.TarInfo(name)
            entry.type = kind
            if kind == tarfile.REGTYPE:
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
            else:
                entry.linkname = content
                tar.addfile(entry)
    return out.getvalue()


def image(layers, name):
    """A docker archive of layers, for `docker load`."""
    configuration = json.dumps({
        "architecture": ARCHITECTURES.get(os.uname().machine, os.uname().machine), "os": "linux", "config": {"Cmd": ["/x"]}, "history": [],
        "rootfs": {
            "type": "layers",
            "diff_ids": ["sha256:" + hashlib.sha256(data).hexdigest() for data in layers],
        },
    }).encode()
    names = [f"{index}/layer.tar" for index in range(len(layers))]
    manifest = [{"Config": "configuration.json", "RepoTags": [name], "Layers": names}]
    files = [("configuration.json", configuration), ("manifest.json", json.dumps(manifest).encode())]
    return layer([(path, tarfile.REGTYPE, data) for path, data in files + list(zip(names, layers))])


def refused(world, docker, layers, what):
    """Loads an image that must not load; what docker said."""
    outcome = docker.attempt("load", input_bytes=image(layers, "bad:1"))
    if world.release.has_docker:
        # Docker 29 keeps the blobs of what it cannot unpack, says so, and ends with 0.
        said = next((line for line in outcome.text.splitlines() if NOT_UNPACKED in line), "")
        docker.attempt("run", "--rm", "--network", "none", "bad:1", "/x").must_fail()
        docker("image", "rm", "--force", "bad:1")
    else:
        said = outcome.must_fail().strip()
    require(len(said) > 20, f"{what}: docker said only: {outcome.text}")
    require("panic" not in said, f"{what}: {said}")
    require_equal(f"images after {what}", docker("image", "ls", "--all", "--quiet", "bad:1"), "")
    return said.splitlines()[-1]


@scenario("bad: corrupt and truncated layers", 180, stand_in=True, also=(NEWER_FOR_ALL,))
def corrupt(world):
    docker = world.worker("a").docker
    good = layer([(f"file-{index}", tarfile.REGTYPE, os.urandom(5000)) for index in range(20)])
    damaged = bytearray(good)
    damaged[10 * 5632 + 3] ^= 0xFF
    said = [
        refused(world, docker, [good, good[:50_000]], "a layer cut within a file"),
        refused(world, docker, [bytes(damaged)], "a damaged header"),
        refused(world, docker, [os.urandom(4096)], "a layer of junk"),
    ]
    # What failed is no obstacle.
    docker("load", input_bytes=image([good], "good:1"))
    require_equal("a good one afterwards", docker("image", "ls", "--format", "{{.Repository}}"), "good")
    if not world.stand_in:
        world.clear()
        require_nothing_left(world.server(), [worker.driver for worker in world.workers])
    return "; ".join(said)[:400]


@scenario("bad: names that leave the root", 120, also=(NEWER_FOR_ALL,))
def escaping(world):
    docker = world.worker("a").docker
    # Makes the file that no whiteout may remove.
    world.images.busybox()
    mark = f"escaped-{os.getpid()}"
    outside = f"{world.scratch}/{mark}"
    up = "../" * 30
    for what, entries in {
        "..": [(f"{up}{outside[1:]}", tarfile.REGTYPE, b"x")],
        "a link to ..": [("link", tarfile.SYMTYPE, up.rstrip("/")),
                         (f"link{outside}", tarfile.REGTYPE, b"x")],
        "an absolute link": [("link", tarfile.SYMTYPE, str(world.scratch)),
                             (f"link/{mark}", tarfile.REGTYPE, b"x")],
        "a hard link": [("link", tarfile.LNKTYPE, f"{up}etc/passwd")],
        "a whiteout": [(f"{up}{world.scratch}/.wh.busybox.tar"[1:], tarfile.REGTYPE, b"")],
    }.items():
        outcome = docker.attempt("load", input_bytes=image([layer(entries)], "bad:1"))
        require(not os.path.exists(outside), f"{what} wrote outside the root")
        require("panic" not in outcome.text, f"{what}: {outcome.text}")
        # A link that stays inside, seen from the container, is legal: then it is kept inside. containerd takes `..`
        # for the root itself, as the kernel does.
        if world.release.has_docker:
            require(what != "a hard link" or NOT_UNPACKED in outcome.text, f"{what} was accepted: {outcome.text}")
        elif what in ("..", "a hard link"):
            require(outcome.code != 0, f"{what} was accepted")
        docker.attempt("image", "rm", "--force", "bad:1")
    os.stat(world.scratch / "busybox.tar")


@scenario("bad: references to an unknown snapshot, and to another appliance", 180, also=(NEWER_FOR_ALL,))
def unknown(world):
    worker, source = world.worker("a"), world.images.layered()
    docker, name = worker.docker, world.registry.name("by-reference:1")
    docker("pull", source)
    push_by_reference(world, worker, source, name)
    archive = world.scratch / "by-reference.tar"
    docker("save", "--output", str(archive), name)
    store = world.server().call("GET", "/v1/stats")["store_id"].encode()
    with tarfile.open(archive) as tar:
        listed = json.load(tar.extractfile("manifest.json"))[0]["Layers"]
        top = tar.extractfile(listed[-1]).read()
    require(store in top, "the reference does not name its appliance")
    ids = {found[0] for found in UUID.finditer(top)} - {store}
    require(len(ids) == 1, f"ids in a reference: {ids}")
    said = refused(world, docker, [top.replace(ids.pop(), UNKNOWN.encode())], "an unknown snapshot")
    require(UNKNOWN in said, f"an unknown snapshot is not named: {said}")
    foreign = bytes(reversed(store)) if store[::-1] != store else b"0" * len(store)
    if UUID.fullmatch(store):
        foreign = UNKNOWN.encode()
    other = refused(world, docker, [top.replace(store, foreign)], "another appliance")
    require(foreign.decode() in other and store.decode() in other, f"both are to be named: {other}")
    return f"{said}; {other}"[:400]


def free_disks(server, driver):
    """Waits until nothing is left of disks that nothing needs, and has the appliance take back their room."""

    def are_gone():
        return not reconcile(driver) and not any("/disks/" in item["path"] for item in server.listing("files"))

    # A disk goes with the last process that has it mounted, some moments after its container or its pull.
    wait_until("the disks that nothing needs are removed", FREE_LIMIT_SECONDS, are_gone)
    server.call("POST", "/v1/gc")


@scenario("bad: the appliance is full", 400, also=(NEWER_FOR_ALL,))
def full(world):
    server = world.server("small-appliance", SMALL_CAPACITY)
    busybox = world.images.busybox()
    large = world.images.built("large:1", busybox, ["COPY random /random"],
                               [("random", os.urandom(LARGE_BYTES))])
    with world.fresh_worker("small", server) as worker:
        docker = worker.docker
        docker("pull", busybox)
        said = docker.attempt("pull", large, limit_seconds=200).must_fail()
        require_equal("images", docker("image", "ls", "--quiet", large), "")
        free_disks(server, worker.driver)
        written = docker.attempt(
            "run", "--name", "greedy", "--network", "none", busybox, "sh", "-c",
            "dd if=/dev/urandom of=/big bs=1M count=600 conv=fsync", limit_seconds=200,
        ).must_fail()
        require(FULL_IN_CONTAINER.search(written), f"a container that writes too much: {written}")
        docker("rm", "--force", "greedy")
        free_disks(server, worker.driver)
        require_equal("afterwards", docker.run(busybox, "sh", "-c", "echo fine >/x && sync -f / && cat /x"),
                      "fine")
        docker("image", "rm", busybox)
        require_nothing_left(server, [worker.driver])
    # What containerd writes itself fails in the words of the kernel.
    is_told = FULL_IN_DOCKER.search(said.splitlines()[-1]) or (
        world.release.has_docker and FULL_IN_CONTAINER.search(said))
    require(is_told, f"a pull into a full appliance: {said}")
    return said.strip().splitlines()[-1][:200]


@scenario("bad: no FUSE on this machine", 120, also=(NEWER_FOR_ALL,))
def no_fuse(world):
    image, server = world.images.busybox(), world.server("no-fuse-appliance")
    # A /dev of its own, with what a start needs and without /dev/fuse.
    wrapper = ["unshare", "--mount", "--propagation", "unchanged", "sh", "-c", WITHOUT_FUSE, "sh"]
    # No engine of this machine is asked.
    none = world.scratch / "no-engine.sock"
    doctor = attempt([
        *wrapper, os.environ["SLACKWATER_DRIVER"], "--api", server.url,
        "--nfs", f"127.0.0.1:{server.nfs_port}", "--attach", "fuse",
        "--state-dir", world.scratch / "no-fuse",
        "doctor", "--docker-host", f"unix://{none}", "--containerd", none,
    ])
    missing = [line for line in doctor.output.splitlines() if line.startswith("FAIL")]
    require(doctor.code != 0 and any("FUSE" in line for line in missing), f"doctor: {doctor.text}")
    with world.fresh_worker("no-fuse", server, wrapper) as worker:
        said = worker.docker.attempt("pull", image).must_fail()
        require("fuse" in said.lower(), f"docker pull does not say what is missing: {said}")
        require_equal("images", worker.docker("image", "ls", "--quiet"), "")
    return said.strip().splitlines()[-1][:200]
