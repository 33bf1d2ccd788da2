"""Docker 29, which keeps its images in containerd: both configured as the driver prints it, with Debian's client."""

import json
import tarfile

from releases import NEWER_DOCKER
from scenario import require, require_equal, scenario
from scenarios import build
from scenarios.blobs import blobs_of
from scenarios.differ import BUSYBOX, READ_MAX_BYTES
from scenarios.life import CHECK_LAYERED, LAYERED, layered_output
from scenarios.reference import LAYER_BYTES_MAX

PULL_LIMIT_SECONDS = 300
# What dockerd puts into the init layer (its daemon/initlayer), as far as an image need not have it.
OF_DOCKERD = {".dockerenv", "etc/hosts", "etc/hostname", "etc/resolv.conf", "etc/mtab", "dev/console", "dev/pts", "dev/shm"}


def host(worker):
    """How the driver's commands reach a worker's Docker."""
    return ("--docker-host", f"unix://{worker.docker.socket}")


def written(docker, name, image):
    """Starts a container that has changed some files."""
    docker.run_detached(image, "sh", "-c", "rm /three; echo own >/own; exec sleep 1000",
                        options=("--name", name, "--env", "SETTING=kept"))
    docker("exec", name, "sh", "-c", "while [ ! -s /own ]; do sleep 0.1; done; sync -f /")


def run_on_plain(world, archive, *words):
    """What a command prints in a container of an archive's image on overlay2, which is removed again."""
    loaded = world.plain("load", "--input", str(archive)).split()[-1]
    output = world.plain.run(loaded, *words)
    world.plain("image", "rm", loaded)
    return output


@scenario("docker 29: pull, run, exec, restart, commit, save, load, export and rm", 400, newer=True)
def life(world):
    image = world.images.layered()
    with world.fresh_worker("life-29", release=NEWER_DOCKER) as worker:
        docker = worker.docker
        docker("pull", image)
        require_equal("output", layered_output(docker.run(image, "sh", "-c", CHECK_LAYERED)), LAYERED)
        written(docker, "work", image)
        docker("restart", "--time", "0", "work")
        require_equal("after a restart", docker("exec", "work", "cat", "/own"), "own")
        require("D /three" in docker("diff", "work").splitlines(), "docker diff lists no removed file")
        docker("commit", "work", "committed:1")
        require_equal("the container goes on", docker("exec", "work", "cat", "/own"), "own")
        require_equal("committed", docker.run("committed:1", "sh", "-c", "cat /own; ls /three 2>&1 || true"),
                      "own\nls: /three: No such file or directory")
        archive = worker.directory / "saved.tar"
        docker("save", "--output", str(archive), "committed:1")
        require_equal("on overlay2", run_on_plain(world, archive, "cat", "/own", "/one/file"), "own\none")
        docker("image", "rm", "committed:1")
        docker("load", "--input", str(archive))
        require_equal("loaded", docker.run("committed:1", "cat", "/own"), "own")
        exported = worker.directory / "exported.tar"
        docker("export", "--output", str(exported), "work")
        with tarfile.open(exported) as tar:
            require("own" in tar.getnames(), "the export lacks what the container wrote")
        worker.driver.restart(kill=True)
        require_equal("after a kill of the driver", docker("exec", "work", "cat", "/own"), "own")
        worker.containerd.wait_connected()
        require_equal("a new container", docker.run(image, "cat", "/two/file"), "two")
        worker.restart_engines()
        docker("start", "work")
        require_equal("after a restart of Docker", docker("exec", "work", "cat", "/own"), "own")
        docker("rm", "--force", "work")
        docker("image", "rm", image, "committed:1")
        require_equal("images", docker("image", "ls", "--quiet"), "")


@scenario("docker 29: image commit, convert and export by reference, and another worker pulls", 400, newer=True)
def by_reference(world):
    commit_convert_and_export(world, "disks", ("disks",))


@scenario("docker 29: the same where layers are images, and workers of both kinds pull", 500, newer=True)
def by_reference_to_images(world):
    commit_convert_and_export(world, "images", ("images", "disks"))


def commit_convert_and_export(world, kind, others):
    """Makes images by reference on a worker that keeps layers so, and pulls them on others."""
    image, server = world.images.layered(), world.server(f"{kind}-29-appliance")
    committed, converted = (world.registry.name(f"{name}-29-{kind}:1") for name in ("committed", "converted"))
    with world.fresh_worker(f"commits-29-{kind}", server, release=NEWER_DOCKER, arguments=("--layers", kind)) as worker:
        docker = worker.docker
        docker("pull", image)
        written(docker, "work", image)
        worker.driver.image("commit", *host(worker), "work", committed)
        require_equal("the container goes on", docker("exec", "work", "cat", "/own"), "own")
        docker("exec", "work", "sh", "-c", "echo later >/own")
        short = docker.inspect("work", "{{.Id}}")[:12]
        docker("stop", "--time", "0", "work")
        worker.driver.image("commit", *host(worker), short, "later:1")
        require_equal("of a stopped container", docker.run("later:1", "cat", "/own"), "later")
        require_equal("configuration", docker.run(committed, "sh", "-c", "echo $SETTING; cat /own"), "kept\nown")
        worker.driver.image("convert", *host(worker), image, converted)
        archive = worker.directory / "exported.tar"
        worker.driver.image("export", *host(worker), committed, "--output", archive)
        names = top_layer_of(archive)
        require({"own", ".wh.three"} <= names, f"the commit has {sorted(names)}")
        require_equal("names of dockerd in the commit", sorted(OF_DOCKERD & names), [])
        require_equal("on overlay2", run_on_plain(world, archive, "cat", "/own", "/one/file"), "own\none")
        for name in (committed, converted):
            docker("push", name)
            sizes = [layer["size"] for layer in world.registry.manifest(name.split("/", 1)[1])["layers"]]
            require(max(sizes) < LAYER_BYTES_MAX, f"layers of {sizes} bytes were pushed")
        said = worker.driver.attempt("--state-dir", worker.driver.state, "image", "commit", *host(worker),
                                     "missing", "none:1").must_fail()
        require("No such container: missing" in said, f"a container that is not there: {said}")
        for other_kind in others:
            with world.fresh_worker(f"pulls-29-{kind}-{other_kind}", server, release=NEWER_DOCKER,
                                    arguments=("--layers", other_kind)) as other:
                other.docker("pull", committed)
                other.docker("pull", converted)
                shown = other.docker.run(committed, "sh", "-c", "cat /own; echo $SETTING")
                require_equal(f"on a worker with {other_kind}", shown, "own\nkept")
                require_equal("converted", other.docker.run(converted, "cat", "/three"), "three")
        worker.driver.image("export", *host(worker), converted, "--output", worker.directory / "converted.tar")
        require_equal("converted, on overlay2", run_on_plain(world, worker.directory / "converted.tar", "cat", "/three"),
                      "three")


def top_layer_of(archive):
    """The names in the uppermost layer of an archive as `docker save` writes it."""
    with tarfile.open(archive) as tar:
        layers = json.load(tar.extractfile("manifest.json"))[0]["Layers"]
        with tarfile.open(fileobj=tar.extractfile(layers[-1])) as layer:
            return {name.removeprefix("./") for name in layer.getnames()}


@scenario("docker 29: an image of another worker is saved, built on and pushed, without the registry", 600, newer=True)
def adopted(world):
    image, server = world.images.debian(), world.server("adopted-29-appliance")
    layers = {layer["digest"] for layer in world.registry.manifest(image.split("/", 1)[1])["layers"]}
    with world.fresh_worker("unpacks-29", server, release=NEWER_DOCKER) as first:
        first.docker("pull", image, limit_seconds=PULL_LIMIT_SECONDS)
        before = {item["id"] for item in server.listing("snapshots")}
        with world.fresh_worker("adopts-29", server, release=NEWER_DOCKER) as worker:
            docker = worker.docker
            docker("pull", image, limit_seconds=PULL_LIMIT_SECONDS)
            require_equal("snapshots", {item["id"] for item in server.listing("snapshots")}, before)
            read = read_of_commit(worker, image)
            archive = worker.directory / "saved.tar"
            with world.registry.away():
                docker("save", "--output", str(archive), image, limit_seconds=PULL_LIMIT_SECONDS)
                found, named = blobs_of(archive)
                require(layers <= named <= found, f"the archive has {found}, expected {named} with {layers}")
                context = world.scratch / "contexts" / "on-adopted"
                context.mkdir(parents=True, exist_ok=True)
                # The image has no /bin/sh.
                step = json.dumps([BUSYBOX, "sh", "-c", "echo made >/made"])
                (context / "Dockerfile").write_text(f"FROM {image}\nRUN {step}\n")
                docker.build(context, "child:1", buildkit=True)
            name = world.registry.name("child-of-adopted:1")
            docker("tag", "child:1", name)
            docker("push", name, limit_seconds=PULL_LIMIT_SECONDS)
            world.plain("pull", name, limit_seconds=PULL_LIMIT_SECONDS)
            require_equal("elsewhere", world.plain.run(name, BUSYBOX, "cat", "/made"), "made")
            world.plain("image", "rm", name)
    return f"a commit read {read >> 10} KiB"


def read_of_commit(worker, image):
    """The bytes of the appliance's blocks that are read for the commit of a container of a large image."""
    docker = worker.docker
    docker.run_detached(image, BUSYBOX, "sleep", "1000", options=("--name", "small"))
    docker("exec", "small", BUSYBOX, "sh", "-c", f"echo new >/new; {BUSYBOX} sync -f /")
    asked = worker.driver.calls("Diff")
    worker.meter.reset()
    docker("commit", "small", "small:1")
    read = worker.meter.received
    require(worker.driver.calls("Diff") > asked, "Docker did not ask the driver for the layer")
    require(read <= READ_MAX_BYTES, f"{read} bytes were read of the appliance")
    require_equal("committed", docker.run("small:1", BUSYBOX, "cat", "/new"), "new")
    log = worker.driver.process.log_path.read_text("utf-8", "replace")
    require("containerd makes a layer itself" not in log, f"the driver left it: {log[-2000:]}")
    return read


@scenario("docker 29: builds of 10 steps, by both builders, equal to overlay2's", 600, newer=True)
def builds(world):
    entries = []
    for kind in ("disks", "images"):
        with world.fresh_worker(f"builds-29-{kind}", release=NEWER_DOCKER, arguments=("--layers", kind)) as worker:
            entries += [build.compare(world, worker.docker, buildkit, f"29-{kind}", kind == "images")
                        for buildkit in (False, True)]
    return ", ".join(entries)
