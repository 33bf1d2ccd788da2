"""The same stories through containerd: Kubernetes' pull of ordinary images that are unpacked once in
the cluster, and images by reference."""

from leftover import settle
from releases import LONG_SUPPORTED, NEWER_FOR_ALL
from scenario import require, require_equal, scenario
from scenarios.reference import COMPILE, FILE_BYTES, LAYER_BYTES_MAX, OUTPUT, PROGRAM

NEWER_ONES = (NEWER_FOR_ALL, LONG_SUPPORTED)


def layer_digests(world, image):
    """The digests of an image's layers in the registry."""
    return {layer["digest"] for layer in world.registry.manifest(image.split("/", 1)[1])["layers"]}


@scenario("containerd: CRI pull and run of an ordinary image", 180, stand_in=True, also=NEWER_ONES)
def ordinary(world):
    containerd, image = world.worker("a").containerd, world.images.layered()
    containerd.must_pull_through_cri(image)
    # `ctr run` would unpack what is not there.
    require("sha256:" in containerd.snapshots("list"), "CRI unpacked it for another snapshotter")
    require_equal("output", containerd.run(image, "one", "sh", "-c", "cat /one/file; ls /one"),
                  "one\nfile\n")
    containerd.run(image, "two", "sh", "-c", "rm /three && echo x >/one/x")
    require_equal("unchanged", containerd.run(image, "three", "sh", "-c", "cat /three; ls /one"),
                  "three\nfile\n")


@scenario("containerd: ctr's own pull and run of an ordinary image", 180, stand_in=True, also=NEWER_ONES)
def client(world):
    containerd, image = world.worker("a").containerd, world.images.layered()
    containerd.ctr("images", "pull", "--plain-http", "--snapshotter", containerd.snapshotter, image)
    require_equal("output", containerd.run(image, "one", "cat", "/two/file"), "two\n")


@scenario("containerd: worker B pulls an ordinary image and fetches no layer", 400, also=NEWER_ONES)
def unpacked_once(world):
    image = world.images.built("program:1", world.images.debian(), ["COPY program.c /program.c"],
                               [("program.c", PROGRAM.encode())])
    layers = layer_digests(world, image)
    # What other scenarios have published of it is there no more.
    settle(world.server(), [world.worker("a").driver])
    position = world.registry.position()
    world.worker("a").containerd.must_pull_through_cri(image)
    fetched = world.registry.blobs_fetched(position)
    require(layers <= fetched, f"the first worker fetched {fetched}, expected all of {layers}")
    with world.fresh_worker("fresh") as worker:
        position = world.registry.position()
        worker.meter.reset()
        worker.containerd.must_pull_through_cri(image)
        fetched = world.registry.blobs_fetched(position)
        configuration = world.registry.manifest(image.split("/", 1)[1])["config"]["digest"]
        require_equal("blobs that the second worker fetched", fetched, {configuration})
        pulled = worker.meter.received
        output = worker.containerd.run(image, "gcc", "busybox", "sh", "-c", COMPILE)
        require_equal("output", output, OUTPUT + "\n")
        note = f"pull {pulled >> 10} KiB, gcc {worker.meter.received >> 20} MiB from the appliance"
    return note


@scenario("containerd: convert, push, pull by CRI and by ctr, all by reference", 300, also=NEWER_ONES)
def by_reference(world):
    worker, image = world.worker("a"), world.images.layered()
    name = world.registry.name("converted:1")
    worker.containerd.must_pull_through_cri(image)
    worker.driver.image("convert", "--containerd", worker.containerd.socket, "--namespace",
                        worker.containerd.namespace, image, name)
    worker.containerd.ctr("images", "push", "--plain-http", name)
    manifest = world.registry.manifest("converted:1")
    sizes = [layer["size"] for layer in manifest["layers"]]
    require(max(sizes) < LAYER_BYTES_MAX, f"layers of {sizes} bytes were pushed")
    other = world.worker("b").containerd
    position = world.registry.position()
    other.must_pull_through_cri(name)
    fetched = world.registry.blobs_fetched(position) & layer_digests(world, name)
    require(not fetched, f"CRI fetched the layers {fetched}")
    expected = "one\ntwo\nfile\n"
    show = ("sh", "-c", "cat /one/file /two/file; ls /one")
    require_equal("pulled by CRI", other.run(name, "cri", *show), expected)
    with world.fresh_worker("fresh") as third:
        containerd = third.containerd
        containerd.ctr("images", "pull", "--plain-http", "--snapshotter", containerd.snapshotter,
                       name)
        require_equal("pulled by ctr", containerd.run(name, "ctr", *show), expected)


@scenario("containerd: commit of a container by reference, pushed and pulled", 300, also=NEWER_ONES)
def commit(world):
    worker, image = world.worker("a"), world.images.layered()
    containerd, name = worker.containerd, world.registry.name("container:1")
    containerd.must_pull_through_cri(image)
    containerd.ctr(*containerd.run_words(
        "--detach", image, "work", "sh", "-c",
        f"head -c {FILE_BYTES} /dev/urandom >/big; rm /three; echo own >/own; exec sleep 1000",
    ))
    try:
        containerd.ctr("tasks", "exec", "--exec-id", "wait", "work",
                       "sh", "-c", "while [ ! -e /own ]; do sleep 0.1; done; sync -f /")
        worker.driver.image("commit", "--containerd", containerd.socket, "--namespace",
                            containerd.namespace, "work", name)
        containerd.ctr("images", "push", "--plain-http", name)
        # As nerdctl names it, and by the beginning of its id. What was made so was not unpacked here yet.
        containerd.ctr("containers", "label", "work", "nerdctl/name=friendly")
        for given in ("friendly", "wor"):
            worker.driver.image("commit", "--containerd", containerd.socket, "--namespace",
                                containerd.namespace, given, world.registry.name(f"{given}:1"))
        made = world.registry.name("friendly:1")
        archive = worker.directory / "friendly.tar"
        worker.driver.image("export", "--containerd", containerd.socket, "--namespace",
                            containerd.namespace, made, "--output", archive)
        world.plain("load", "--input", str(archive))
        require_equal("exported", world.plain.run(made, "cat", "/own"), "own")
        world.plain("image", "rm", made)
        require_equal("run", containerd.run(made, "made", "cat", "/own"), "own\n")
    finally:
        containerd.attempt("tasks", "delete", "--force", "work")
        containerd.attempt("containers", "delete", "work")
    sizes = [layer["size"] for layer in world.registry.manifest("container:1")["layers"]]
    require(max(sizes) < LAYER_BYTES_MAX, f"layers of {sizes} bytes were pushed")
    other = world.worker("b").containerd
    other.must_pull_through_cri(name)
    output = other.run(name, "own", "sh", "-c", "cat /own; ls /three 2>&1; wc -c </big")
    require_equal("output", output, f"own\nls: /three: No such file or directory\n{FILE_BYTES}\n")
