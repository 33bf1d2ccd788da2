"""The everyday commands of Docker, with ordinary images from an ordinary registry."""

import gzip
import hashlib
import json
import tarfile

from images import require_image_absent
from releases import NEWER_FOR_ALL
from scenario import require, require_equal, scenario

CHECK_LAYERED = (
    "cat /one/file /two/file /three; stat -c '%a %h' /one /two/link; ls /one; "
    "readlink /two/symlink"
)
LAYERED = "one\ntwo\nthree\n2751 2\n644 2\nfile\n/three"
GZIP_BEGINNING = b"\x1f\x8b"


def layered_output(output):
    """The link count of a directory differs by file system; the rest is fixed."""
    lines = output.splitlines()
    if len(lines) > 3 and lines[3].startswith("2751 "):
        lines[3] = "2751 2"
    return "\n".join(lines)


@scenario("docker: pull, run, inspect, rm, rmi of an ordinary image", 120, stand_in=True, also=(NEWER_FOR_ALL,))
def ordinary(world):
    docker, image = world.worker("a").docker, world.images.layered()
    docker("pull", image)
    require_equal("output", layered_output(docker.run(image, "sh", "-c", CHECK_LAYERED)), LAYERED)
    container = docker.run_detached(image, "sleep", "1000", options=("--name", "ordinary"))
    details = docker.inspect_json(container)
    require_equal("Driver", details["Driver"], docker.storage)
    if not world.release.has_docker:
        # Docker 29 says no more.
        require_equal("GraphDriver.Name", details["GraphDriver"]["Name"], docker.storage)
    require_equal("exec", docker("exec", "ordinary", "sh", "-c", "echo hi >/new; cat /new"), "hi")
    docker("restart", "--time", "0", "ordinary")
    require_equal("after a restart", docker("exec", "ordinary", "cat", "/new"), "hi")
    require_equal("another container", docker.run(image, "sh", "-c", "ls /new 2>&1 || true"),
                  "ls: /new: No such file or directory")
    refused = docker.attempt("image", "rm", image).must_fail()
    require("container" in refused, f"rmi of a used image: {refused}")
    docker("rm", "--force", "ordinary")
    docker("image", "rm", image)
    require_image_absent(docker, image)
    docker("pull", image)
    require_equal("pulled again", docker.run(image, "cat", "/one/file"), "one")


@scenario("docker: diff and ps --size say what overlay2 says", 120, stand_in=True, also=(NEWER_FOR_ALL,))
def diff_and_size(world):
    image = world.images.layered()
    script = (
        "echo new >/two/new; rm /three; echo more >>/two/file; mkdir -p /deep/er; "
        "chmod 700 /two; rm -r /tmp; ln -s x /deep/link; "
        "dd if=/dev/urandom of=/deep/big bs=1M count=3 2>/dev/null; sync -f /; echo >/done; sync -f /"
    )
    said = {}
    for title, docker in (("worker", world.worker("a").docker), ("plain", world.plain)):
        docker("pull", image)
        docker.run_detached(image, "sh", "-c", f"{script}; sleep 1000", options=("--name", "diff"))
        docker("exec", "diff", "sh", "-c", "while [ ! -e /done ]; do sleep 0.1; done; sync -f /")
        size = int(docker("inspect", "--size", "--format", "{{.SizeRw}}", "diff"))
        docker("ps", "--size", "--all")
        said[title] = (sorted(docker("diff", "diff").splitlines()), size)
        docker("rm", "--force", "diff")
    # overlay2 lists a directory whose entry was replaced in it; so must every driver.
    require_equal("docker diff", said["worker"][0], said["plain"][0])
    require(3 << 20 <= said["worker"][1] <= 8 << 20, f"SizeRw is {said['worker'][1]}")


@scenario("docker: commit, tag, push, and run where it is pulled", 180, stand_in=True, also=(NEWER_FOR_ALL,))
def commit_and_push(world):
    docker, image = world.worker("a").docker, world.images.layered()
    docker("pull", image)
    name = world.registry.name("committed:1")
    docker.run_detached(image, "sh", "-c", "rm /three; echo own >/own; exec sleep 1000",
                        options=("--name", "work"))
    docker("exec", "work", "sh", "-c", "while [ ! -e /own ]; do sleep 0.1; done")
    docker("commit", "work", name)
    require_equal("the container goes on", docker("exec", "work", "cat", "/own"), "own")
    docker("exec", "work", "sh", "-c", "echo later >/own")
    docker("commit", "work", "local:2")
    require_equal("the first commit", docker.run(name, "cat", "/own"), "own")
    require_equal("the second commit", docker.run("local:2", "cat", "/own"), "later")
    docker("push", name)
    docker("rm", "--force", "work")
    docker("image", "rm", "local:2", name)
    other = world.worker("b").docker
    other("pull", name)
    require_equal("on the other worker", other.run(
        name, "sh", "-c", "cat /own /one/file; ls -d /three 2>&1 || true"),
                  "own\none\nls: /three: No such file or directory")
    docker("pull", name)
    require_equal("pulled back", docker.run(name, "cat", "/own"), "own")


def diff_id(saved):
    """The digest of the tar of a saved layer. Docker 29 saves the blob as it was pulled, and that is compressed."""
    data = saved.read()
    tar = gzip.decompress(data) if data.startswith(GZIP_BEGINNING) else data
    return "sha256:" + hashlib.sha256(tar).hexdigest()


@scenario("docker: save gives ordinary layers byte for byte; load and import", 180, stand_in=True,
          also=(NEWER_FOR_ALL,))
def save_and_load(world):
    docker, image = world.worker("a").docker, world.images.layered()
    docker("pull", image)
    archive = world.scratch / "saved.tar"
    docker("save", "--output", str(archive), image)
    with tarfile.open(archive) as tar:
        saved = json.load(tar.extractfile("manifest.json"))[0]
        configuration = json.load(tar.extractfile(saved["Config"]))
        digests = [diff_id(tar.extractfile(layer)) for layer in saved["Layers"]]
    require_equal("digests of the layers", digests, configuration["rootfs"]["diff_ids"])
    docker("image", "rm", image)
    require("Loaded image" in docker("load", "--input", str(archive)), "load says nothing")
    require_equal("loaded", layered_output(docker.run(image, "sh", "-c", CHECK_LAYERED)), LAYERED)
    container = docker("create", image, "x")
    exported = world.scratch / "exported.tar"
    docker("export", "--output", str(exported), container)
    docker("import", str(exported), "flat:1")
    require_equal("imported", docker.run("flat:1", "/bin/busybox", "cat", "/two/file"), "two")
    docker("cp", f"{container}:/one/file", str(world.scratch / "copied"))
    require_equal("copied", (world.scratch / "copied").read_text(), "one\n")
