"""What is published for images elsewhere: its names and dates, and its end by the image's name."""

import json

from leftover import settle
from releases import NEWER_FOR_ALL
from scenario import require, require_equal, scenario, wait_until
from scenarios.reference import commit_by_reference

NAMED_WITHIN_SECONDS = 60


def published(worker, *words):
    """What the driver lists, as JSON."""
    return json.loads(worker.driver.image("published", "--json", *words))


def pushed(world, worker, source, name, content):
    """A container's change on an image, committed and pushed."""
    docker = worker.docker
    docker.run_detached(source, "sh", "-c", f"echo {content} >/own; exec sleep 1000", options=("--name", "work"))
    # The image below may have another one.
    docker("exec", "work", "sh", "-c", f'until [ "$(cat /own 2>/dev/null)" = {content} ]; do sleep 0.1; done')
    commit_by_reference(world, worker, "work", name)
    docker("rm", "--force", "work")
    docker("push", name)


@scenario("image published: images by name also after a prune, and unpublished by name", 240, also=(NEWER_FOR_ALL,))
def names(world):
    worker, other, image = world.worker("a"), world.worker("b"), world.images.layered()
    first, second = (world.registry.name(f"named:{number}") for number in (1, 2))
    # What other scenarios have published of the image is there no more.
    settle(world.server(), [])
    worker.docker("pull", image)
    # What `image commit` makes refers to the layers of the image below, too; what Docker's plugin makes does not.
    below = len(world.registry.manifest(image.split("/", 1)[1])["layers"]) if world.release.has_docker else 0
    pushed(world, worker, image, first, "one")
    # The second lies above the first, whose layer the registry has.
    pushed(world, worker, first, second, "two")
    wait_until(f"{second} is named", NAMED_WITHIN_SECONDS, lambda: len(published(worker, second)) == below + 2)
    worker.docker("image", "rm", second, first)
    [upper] = [one for one in published(worker, second) if first not in one["images"]]
    lowers = published(worker, first)
    require_equal("layers of the first", len(lowers), below + 1)
    for lower in lowers:
        require_equal("images of a lower layer", sorted(lower["images"]), sorted([first, second]))
        require_equal("by whom", lower["images"][first], [worker.known_as])
        require_equal("by whom", lower["publishers"], [worker.known_as])
    ids = [lower["snapshot_id"] for lower in lowers]
    # The disks of the container and the image go in the background.
    wait_until("its end would free something", NAMED_WITHIN_SECONDS, lambda: any(
        one["reclaimable"] and one["reclaimable"]["bytes"] > 0 for one in published(worker, second)))
    table = worker.driver.image("published", second)
    require(second in table and worker.known_as in table, table)
    require_equal("older than a day", published(worker, "--older-than", "1d"), [])
    # What the second refers to stays, until it is unpublished as well.
    ended = json.loads(worker.driver.image("unpublish", "--json", first))
    require_equal("unpublished", (ended["ended"], sorted(ended["kept"])), ([], sorted(ids)))
    other.docker("pull", second)
    require_equal("on the other worker", other.docker.run(second, "cat", "/own"), "two")
    other.docker("image", "rm", second)
    ended = json.loads(worker.driver.image("unpublish", "--json", second))
    require_equal("unpublished", sorted(ended["ended"]), sorted([*ids, upper["snapshot_id"]]))
    require_equal("left", published(worker, "named:"), [])
    refused = worker.driver.attempt("--state-dir", worker.driver.state, "image", "unpublish", second)
    require("published nothing for image" in refused.must_fail(), refused.text)
    if world.release.has_docker:
        # containerd finds layers by their hashes, too, for as long as a worker has them.
        wait_until("the upper layer is gone", NAMED_WITHIN_SECONDS, lambda: all(
            item["id"] != upper["snapshot_id"] for item in world.server().listing("snapshots")))
    refused = other.docker.attempt("pull", second)
    text = refused.must_fail()
    # The second where a disk that goes in the background still holds it.
    require("no snapshot" in text or "not published" in text, text)
