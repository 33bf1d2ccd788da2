"""What is shared is fetched once: twenty containers of one image, two images on one base, read-only
containers on one mount."""

import os

from images import BUSYBOX
from process import attempt
from releases import NEWER_FOR_ALL
from scenario import PATIENCE, require, require_equal, scenario
from scenarios.cri import NEWER_ONES
from scenarios.reference import COMPILE, OUTPUT, PROGRAM

CONTAINERS = 20
# The promise of the design: what many fetch, against what one does.
RATIO_MAX = 1.1
# A busy machine runs twenty at a time, not at once.
PARALLEL = 5
LIMIT_SECONDS = 300
READ_ONLY_CONTAINERS = 5
# By which a container has the root that it shares. Docker 29 gives its containers' snapshots no labels.
SHARED_ROOT = "containerd.io/snapshot/slackwater.shared=true"


def program_image(world, path, text):
    """Debian with gcc and a source file."""
    return world.images.built(path, world.images.debian(), ["COPY program.c /program.c"],
                              [("program.c", text.encode())])


def compile_in_containers(docker, image, count, expected):
    """Compiles in `count` containers; fails if one prints something else."""
    left = count
    while left:
        batch = min(left, PARALLEL)
        started = [
            docker.begin("run", "--rm", "--network", "none", image, "busybox", "sh", "-c", COMPILE)
            for _ in range(batch)
        ]
        for process in started:
            output, _ = process.communicate(timeout=LIMIT_SECONDS * PATIENCE)
            require_equal("a container's output", output.decode().strip(), expected)
        left -= batch


def fetched_by(world, server_worker, image, count):
    """Bytes of blocks that a worker with empty caches fetches for `count` containers. The image
    comes by reference: an ordinary one would be unpacked, and so be in the cache as written."""
    with world.fresh_worker("fresh") as worker:
        worker.docker("pull", image)
        worker.meter.reset()
        compile_in_containers(worker.docker, image, count, OUTPUT)
        return worker.meter.received


def referenced(world, source, path):
    """The image, by reference, in the registry."""
    worker = world.worker("a")
    name = world.registry.name(path)
    worker.docker("pull", source, limit_seconds=LIMIT_SECONDS)
    worker.driver.image("convert", "--docker-host", f"unix://{worker.docker.socket}", source, name)
    worker.docker("push", name)
    return name


@scenario(f"share: {CONTAINERS} containers of one image fetch what one fetches", 600, also=(NEWER_FOR_ALL,))
def many(world):
    image = referenced(world, program_image(world, "program:1", PROGRAM), "program-reference:1")
    one = fetched_by(world, world.worker("a"), image, 1)
    many_bytes = fetched_by(world, world.worker("a"), image, CONTAINERS)
    require(one > 0, "nothing was fetched for one container: the meter is not on the way")
    require(many_bytes <= RATIO_MAX * one,
            f"{CONTAINERS} containers fetched {many_bytes} bytes, one {one}: "
            f"{many_bytes / one:.2f} times, at most {RATIO_MAX}")
    return f"{many_bytes / one:.3f} times the {one >> 20} MiB of one"


@scenario("share: two images on one Debian base fetch the base once", 600, also=(NEWER_FOR_ALL,))
def bases(world):
    other_text = PROGRAM.replace("sum %d", "total %d")
    first = referenced(world, program_image(world, "program:1", PROGRAM), "program-reference:1")
    second = referenced(world, program_image(world, "total:1", other_text), "total-reference:1")
    with world.fresh_worker("fresh") as worker:
        worker.docker("pull", first)
        worker.docker("pull", second)
        worker.meter.reset()
        compile_in_containers(worker.docker, first, 1, OUTPUT)
        one = worker.meter.received
        compile_in_containers(worker.docker, second, 1, "total 5050")
        both = worker.meter.received
    require(both <= RATIO_MAX * one,
            f"both images fetched {both} bytes, the first alone {one}: {both / one:.2f} times")
    return f"{both / one:.3f} times the {one >> 20} MiB of one"


@scenario("share: read-only containers share one mount and cannot write", 180)
def read_only(world):
    worker, image = world.worker("a"), world.images.layered()
    worker.docker("pull", image)
    options = ("--read-only", "--storage-opt", "shared=true")
    before = len(worker.driver.mounts())
    containers = [
        worker.docker.run_detached(image, "sleep", "1000", options=options) for _ in range(READ_ONLY_CONTAINERS)
    ]
    devices = {worker.docker("exec", name, "stat", "-c", "%d", "/one/file") for name in containers}
    require_equal("file systems under five containers", len(devices), 1)
    added = len(worker.driver.mounts()) - before
    require(added <= 4, f"five shared containers added {added} mounts")
    said = worker.docker.attempt("exec", containers[0], "touch", "/new").must_fail()
    require("Read-only file system" in said, f"writing: {said}")


@scenario("share: read-only containers of containerd share one mount and cannot write", 180, also=NEWER_ONES)
def read_only_by_label(world):
    # It has each directory that ctr mounts over, as none can be made. Its one layer is mounted without an overlay.
    worker, image = world.worker("a"), world.images.debian()
    containerd = worker.containerd
    containerd.must_pull_through_cri(image, limit_seconds=LIMIT_SECONDS)
    before = len(worker.driver.mounts())
    for number in range(READ_ONLY_CONTAINERS):
        run, *words = containerd.run_words("--detach", image, f"shared-{number}", BUSYBOX, "sleep", "1000")
        containerd.ctr(run, "--snapshotter-label", SHARED_ROOT, *words)
    # Lines such as: shared-0 1234 RUNNING
    rows = [line.split() for line in containerd.ctr("tasks", "list").splitlines()[1:]]
    roots = [f"/proc/{row[1]}/root" for row in rows if row[0].startswith("shared-")]
    require_equal("containers that run", len(roots), READ_ONLY_CONTAINERS)
    devices = {os.stat(f"{root}/etc/issue").st_dev for root in roots}
    require_equal("file systems under the containers", len(devices), 1)
    added = len(worker.driver.mounts()) - before
    require(added <= 4, f"the containers added {added} mounts")
    said = attempt(["touch", f"{roots[0]}/new"]).must_fail()
    require("Read-only file system" in said, f"writing: {said}")
