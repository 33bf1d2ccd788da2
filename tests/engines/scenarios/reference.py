"""Images by reference through Docker: what is pushed and pulled are ids, and blocks travel when they
are read. The issue's first story: a Debian with gcc from worker A to worker B."""

import json
import os

from process import attempt, run
from releases import NEWER_FOR_ALL
from scenario import require, require_equal, scenario
from without_driver import docker_29

# A reference layer, and what HTTP and the manifest around it may add to a push or pull.
LAYER_BYTES_MAX = 4 << 10
OVERHEAD_BYTES_MAX = 64 << 10
PROGRAM = r"""
#include <stdio.h>
int main(void) { int sum = 0; for (int i = 1; i <= 100; i++) sum += i;
    printf("sum %d\n", sum); return 0; }
"""
COMPILE = "gcc -O1 -o /tmp/program /program.c && /tmp/program"
OUTPUT = "sum 5050"
# Files of random bytes, of which one is read on the other worker.
FILE_COUNT, FILE_BYTES = 4, 16 << 20
# Read-ahead, directories, inodes, the shell: what reading one file may fetch beyond its bytes.
READ_SLACK = 1.25
READ_SLACK_BYTES = 8 << 20
# What an engine shows that cannot unpack a reference.
REFUSAL = "slackwater reference: pull on a worker with slackwater-driver or run slackwater-driver image export"
# Compiling reads the compiler, not the whole image.
COMPILE_SHARE_MAX = 0.7


def prepare(world, docker, image, name):
    """On worker A: pull, change, compile and commit; the image's size in bytes."""
    docker("pull", image, limit_seconds=300)
    docker.run_detached(image, "busybox", "sleep", "1000", options=("--name", "work"))
    docker("exec", "--interactive", "work", "busybox", "sh", "-c", "cat >/program.c",
           input_bytes=PROGRAM.encode())
    compiled = docker("exec", "work", "busybox", "sh", "-c", COMPILE)
    require_equal("output on worker A", compiled, OUTPUT)
    docker("exec", "work", "busybox", "sh", "-c",
           f"for i in $(seq {FILE_COUNT}); do "
           f"dd if=/dev/urandom of=/random.$i bs=1M count={FILE_BYTES >> 20} 2>/dev/null; done; sync -f /")
    docker("commit", "work", name)
    digest = docker("exec", "work", "busybox", "sha256sum", "/random.2").split()[0]
    docker("rm", "--force", "work")
    return digest


def blob_bytes(worker, image):
    """The size of an image's layers as they are in a worker's containerd."""
    containerd = ("--namespace", "moby", "content")
    digest = worker.docker.inspect(image, "{{.Id}}")
    manifest = json.loads(worker.containerd.ctr(*containerd, "get", digest))
    return sum(layer["size"] for layer in manifest["layers"])


def commit_by_reference(world, worker, container, name):
    """Commits a container by reference: by the plugin `docker commit` does, on Docker 29 the driver's command."""
    if world.release.has_docker:
        worker.driver.image("commit", "--docker-host", f"unix://{worker.docker.socket}", container, name)
    else:
        worker.docker("commit", container, name)


def push_by_reference(world, worker, source, name):
    """Converts, pushes; checks what the registry got."""
    worker.driver.image("convert", "--docker-host", f"unix://{worker.docker.socket}", source, name)
    world.registry.meter.reset()
    worker.docker("push", name)
    manifest = world.registry.manifest(name.split("/", 1)[1])
    sizes = [layer["size"] for layer in manifest["layers"]]
    require(max(sizes) < LAYER_BYTES_MAX, f"layers of {sizes} bytes were pushed")
    sent = world.registry.meter.sent
    limit = len(sizes) * LAYER_BYTES_MAX + OVERHEAD_BYTES_MAX
    require(sent < limit, f"the push sent {sent} bytes; at most {limit} for {len(sizes)} layers")
    return len(sizes)


def pull_by_reference(world, worker, name, layer_count):
    """Pulls; checks the registry's traffic and that no block was fetched that nobody read."""
    world.registry.meter.reset()
    worker.docker("pull", name)
    got = world.registry.meter.received
    limit = layer_count * LAYER_BYTES_MAX + OVERHEAD_BYTES_MAX
    require(got < limit, f"the pull fetched {got} bytes; at most {limit} for {layer_count} layers")


@scenario("docker: gcc on Debian goes from worker A to worker B by reference", 500, also=(NEWER_FOR_ALL,))
def gcc(world):
    worker = world.worker("a")
    image, local = world.images.debian(), "local-gcc:1"
    name = world.registry.name("gcc-by-reference:1")
    digest = prepare(world, worker.docker, image, local)
    size = int(worker.docker.inspect(local, "{{.Size}}"))
    if world.release.has_docker:
        # Docker 29 counts the blobs, too.
        size -= blob_bytes(worker, local)
    layers = push_by_reference(world, worker, local, name)
    with world.fresh_worker("fresh") as other:
        other.meter.reset()
        pull_by_reference(world, other, name, layers)
        after_pull = other.meter.received
        require(after_pull < READ_SLACK_BYTES, f"the pull alone fetched {after_pull} bytes of blocks")
        other.meter.reset()
        read = other.docker.run(name, "busybox", "sha256sum", "/random.2").split()[0]
        require_equal("content of a file", read, digest)
        fetched = other.meter.received
        limit = FILE_BYTES * READ_SLACK + READ_SLACK_BYTES
        require(FILE_BYTES <= fetched <= limit,
                f"reading {FILE_BYTES} bytes fetched {fetched}, expected that and at most {limit:.0f}")
        output = other.docker.run(name, "busybox", "sh", "-c", COMPILE)
        require_equal("output on worker B", output, OUTPUT)
        compiled = other.meter.received - fetched
        require(compiled < COMPILE_SHARE_MAX * size,
                f"compiling fetched {compiled} bytes of an image of {size}")
    worker.docker("image", "rm", local, name)
    return f"file of 16 MiB: {fetched >> 10} KiB fetched; gcc: {compiled >> 20} of {size >> 20} MiB"


@scenario("docker: an image by reference is committed, pushed and pulled again", 240, also=(NEWER_FOR_ALL,))
def again(world):
    worker, other = world.worker("a"), world.worker("b")
    image, name = world.images.layered(), world.registry.name("again:1")
    worker.docker("pull", image)
    layers = push_by_reference(world, worker, image, name)
    pull_by_reference(world, other, name, layers)
    other.docker.run_detached(name, "sh", "-c", "rm /two/file; echo b >/own; exec sleep 1000",
                              options=("--name", "work"))
    other.docker("exec", "work", "sh", "-c", "while [ ! -s /own ]; do sleep 0.1; done")
    second = world.registry.name("again:2")
    commit_by_reference(world, other, "work", second)
    other.docker("push", second)
    sizes = [layer["size"] for layer in world.registry.manifest("again:2")["layers"]]
    require(max(sizes) < LAYER_BYTES_MAX, f"a commit was pushed with layers of {sizes} bytes")
    # The worker that made it goes first: nothing of the image may depend on it.
    other.docker("rm", "--force", "work")
    other.docker("image", "rm", second, name)
    worker.docker("pull", second)
    require_equal("on the first worker",
                  worker.docker.run(second, "sh", "-c", "cat /own /one/file; ls /two"),
                  "b\none\nlink\nsymlink")


@scenario("docker: export of an image by reference runs on plain Docker", 180, also=(NEWER_FOR_ALL,))
def export(world):
    worker = world.worker("a")
    image, name = world.images.layered(), world.registry.name("leaving:1")
    worker.docker("pull", image)
    push_by_reference(world, worker, image, name)
    archive = worker.directory / "leaving.tar"
    words = ["image", "export", "--docker-host", f"unix://{worker.docker.socket}", name, "-o", archive]
    # A mount namespace that no later mount reaches: all layers would be empty.
    said = attempt(["unshare", "--mount", "--propagation", "private", os.environ["SLACKWATER_DRIVER"],
                    "--state-dir", worker.driver.state, *words]).must_fail()
    require("mount namespace" in said and not archive.exists(), f"export without the mounts: {said}")
    worker.driver.image(*words[1:])
    loaded = world.plain("load", "--input", str(archive)).split()[-1]
    require_equal("on overlay2", world.plain.run(loaded, "sh", "-c", "cat /one/file /three; ls /one"),
                  "one\nthree\nfile")
    world.plain("image", "rm", loaded)


def refused_by_newer(world, containerd, name):
    """What a Docker 29 without the driver says of a reference, and a containerd that is to unpack it by overlayfs."""
    with docker_29(world, "elsewhere-29") as docker:
        pulled = docker.attempt("pull", name)
        require_equal("images of a Docker 29", docker("image", "ls", "--all", "--quiet"), "")
    unpacked = containerd.attempt("images", "pull", "--plain-http", "--snapshotter", "overlayfs", name)
    return {"docker pull of Docker 29": pulled, "ctr of containerd 2.4": unpacked}


@scenario("docker: engines without the driver refuse a reference, and say why", 240, also=(NEWER_FOR_ALL,))
def elsewhere(world):
    worker, name = world.worker("a"), world.registry.name("elsewhere:1")
    worker.docker("pull", world.images.layered())
    worker.docker.run_detached(world.images.layered(), "sh", "-c", "echo own >/own; exec sleep 1000",
                               options=("--name", "work"))
    worker.docker("exec", "work", "sh", "-c", "while [ ! -s /own ]; do sleep 0.1; done")
    commit_by_reference(world, worker, "work", name)
    worker.docker("push", name)
    worker.docker("rm", "--force", "work")
    # umoci does not unpack where it did before.
    archive, layout, storage = (
        world.scratch / f"elsewhere{world.release.suffix}{end}" for end in (".tar", ".oci", ".storage"))
    worker.docker("save", "--output", str(archive), name)
    copy = ["skopeo", "--insecure-policy", "copy", "--src-tls-verify=false", f"docker://{name}"]
    run(*copy, f"oci:{layout}:1")
    containerd = world.plain_containerd
    before = sorted(world.plain("image", "ls", "--all", "--quiet").split())
    refused = {
        "docker pull": world.plain.attempt("pull", name),
        "docker load": world.plain.attempt("load", "--input", str(archive)),
        "ctr": containerd.attempt("images", "pull", "--plain-http", "--snapshotter", "overlayfs", name),
        "skopeo": attempt([*copy, f"containers-storage:[vfs@{storage}+{storage}-run]{name}"]),
        "umoci": attempt(["umoci", "unpack", "--image", f"{layout}:1", f"{layout}-bundle"]),
    }
    if world.release.has_docker:
        refused |= refused_by_newer(world, worker.containerd, name)
    for unpacker, outcome in refused.items():
        said = outcome.must_fail()
        # Containers' storage gives the kernel's error without the names.
        shown = "no such file or directory" if unpacker == "skopeo" else REFUSAL
        require(shown in said, f"{unpacker} does not show why it refuses: {said}")
    kept = sorted(world.plain("image", "ls", "--all", "--quiet").split())
    require_equal("images of the plain Docker", kept, before)
    # ctr fetched it before it unpacked.
    containerd.ctr("images", "remove", "--sync", name)
    # Unpacked by containerd itself: Docker 20.10 pushes no annotation that says what it is.
    worker.containerd.must_pull_through_cri(name)
    found = worker.containerd.run(name, "elsewhere", "sh", "-c", "cat /own /one/file; ls -A /").split()
    require_equal("files by containerd with the driver", found[:2], ["own", "one"])
    require(not any("slackwater" in word for word in found), f"left of the reference: {found}")
    return refused["docker pull"].text.strip().splitlines()[-1][-200:]
