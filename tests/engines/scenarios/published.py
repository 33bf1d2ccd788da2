"""What is published for images elsewhere: its names and dates, and its end by the image's name."""

import json

from scenario import require, require_equal, scenario, wait_until

NAMED_WITHIN_SECONDS = 60


def published(worker, *words):
    """What the driver lists, as JSON."""
    return json.loads(worker.driver.image("published", "--json", *words))


def pushed(world, docker, source, name, content):
    """A container's change on an image, committed and pushed."""
    docker.run_detached(source, "sh", "-c", f"echo {content} >/own; exec sleep 1000", options=("--name", "work"))
    # The image below may have another one.
    docker("exec", "work", "sh", "-c", f'until [ "$(cat /own 2>/dev/null)" = {content} ]; do sleep 0.1; done')
    docker("commit", "work", name)
    docker("rm", "--force", "work")
    docker("push", name)


@scenario("image published: images by name also after a prune, and unpublished by name", 240)
def names(world):
    worker, other, image = world.worker("a"), world.worker("b"), world.images.layered()
    first, second = (world.registry.name(f"named:{number}") for number in (1, 2))
    worker.docker("pull", image)
    pushed(world, worker.docker, image, first, "one")
    # The second lies above the first, whose layer the registry has.
    pushed(world, worker.docker, first, second, "two")

    def named(name, count):
        found = published(worker, name)
        return found if len(found) == count else None

    wait_until(f"{second} is named", NAMED_WITHIN_SECONDS, lambda: named(second, 2))
    worker.docker("image", "rm", second, first)
    [upper] = [one for one in published(worker, second) if first not in one["images"]]
    [lower] = named(first, 1) or []
    require_equal("images of the lower layer", sorted(lower["images"]), sorted([first, second]))
    require_equal("by whom", lower["images"][first], [worker.known_as])
    require_equal("by whom", lower["publishers"], [worker.known_as])
    # The disks of the container and the image go in the background.
    wait_until("its end would free something", NAMED_WITHIN_SECONDS, lambda: any(
        one["reclaimable"] and one["reclaimable"]["bytes"] > 0 for one in published(worker, second)))
    table = worker.driver.image("published", second)
    require(second in table and worker.known_as in table, table)
    require_equal("older than a day", published(worker, "--older-than", "1d"), [])
    # What the second refers to stays, until it is unpublished as well.
    ended = json.loads(worker.driver.image("unpublish", "--json", first))
    require_equal("unpublished", ended, {"ended": [], "kept": [lower["snapshot_id"]]})
    other.docker("pull", second)
    require_equal("on the other worker", other.docker.run(second, "cat", "/own"), "two")
    other.docker("image", "rm", second)
    ended = json.loads(worker.driver.image("unpublish", "--json", second))
    require_equal("unpublished", sorted(ended["ended"]), sorted([lower["snapshot_id"], upper["snapshot_id"]]))
    require_equal("left", published(worker, "named:"), [])
    refused = worker.driver.attempt("--state-dir", worker.driver.state, "image", "unpublish", second)
    require("published nothing for image" in refused.must_fail(), refused.text)
    refused = other.docker.attempt("pull", second)
    text = refused.must_fail()
    # The second where a disk that goes in the background still holds it.
    require("no snapshot" in text or "not published" in text, text)
