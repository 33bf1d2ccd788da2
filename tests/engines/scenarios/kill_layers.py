"""kill -9 of the driver at random points of what containerd 2.4 does where layers are images: afterwards it works, and
nothing is left."""

import random

from releases import NEWER, NEWER_AS_PRINTED
from scenario import Failure, require_equal, scenario, wait_until
from scenarios.differ import BUSYBOX
from scenarios.kill import ANSWER_LIMIT_SECONDS, COMMAND_SECONDS, KILLS, SEED, one_kill
from scenarios.layers import CHANGE_LIMIT_SECONDS, IMAGES

IMAGE_KILLS = KILLS // 2
LIMIT_SECONDS = 300 + 12 * IMAGE_KILLS
CHECK_EVERY = 10


class Commands:
    """What is under way when the driver is killed; each may fail, none may hang."""

    def __init__(self, containerd, image):
        self.containerd = containerd
        self.image = image
        self.number = 0

    def _ctr(self, *words):
        return self.containerd.attempt(*words, limit_seconds=ANSWER_LIMIT_SECONDS)

    def _pull(self, *options):
        self._ctr("images", "remove", "--sync", self.image)
        self._ctr("images", "pull", "--plain-http", *options, "--snapshotter", self.containerd.snapshotter,
                  self.image)

    def pull_by_differ(self):
        """By the diff service."""
        self._pull("--local")

    def pull_by_transfer(self):
        """Who unpacks is in the configuration: the driver, or containerd through the mounts."""
        self._pull()

    def run(self):
        """A container's whole life."""
        self._ctr(*self.containerd.run_words("--rm", self.image, f"short-{self.number}",
                                             "sh", "-c", "echo x >/x; rm /three"))

    def diff(self):
        """The layer of the container that runs all the time."""
        self._ctr("snapshots", "--snapshotter", self.containerd.snapshotter, "diff", "steady")

    def commit(self):
        """Two snapshots one above the other, in which nothing was written."""
        base, key, name = f"base-{self.number}", f"key-{self.number}", f"name-{self.number}"
        for words in (("prepare", key), ("commit", base, key), ("prepare", key, base), ("commit", name, key)):
            self._ctr("snapshots", "--snapshotter", self.containerd.snapshotter, *words)


def works(worker, image):
    """Fails unless the image can be pulled and run, and the steady container goes on."""
    containerd = worker.containerd
    containerd.wait_connected()
    containerd.ctr("images", "pull", "--plain-http", "--local", "--snapshotter", containerd.snapshotter, image)
    require_equal("ctr run", containerd.run(image, "check", "cat", "/one/file"), "one\n")
    said = containerd.ctr("tasks", "exec", "--exec-id", "look", "steady", BUSYBOX, "cat", "/steady")
    require_equal("the steady one", said, "steady\n")


@scenario(f"kill: -9 of the driver, {IMAGE_KILLS} times at random points, where layers are images", LIMIT_SECONDS,
          newer=True)
def kills(world):
    print(f"(seed {SEED}) ", end="", flush=True)
    chance = random.Random(SEED)
    # The driver unpacks where it is configured as it says, containerd through the mounts where it is not.
    kill(world, chance, NEWER_AS_PRINTED, IMAGE_KILLS - IMAGE_KILLS // 3)
    kill(world, chance, NEWER, IMAGE_KILLS // 3)
    return f"seed {SEED}"


def kill(world, chance, release, count):
    """So many times, on a new worker."""
    image, steady = world.images.layered(), world.images.busybox()
    server = world.server("kills-appliance")
    with world.fresh_worker("killed", server, release=release, arguments=IMAGES) as worker:
        containerd = worker.containerd
        containerd.ctr("images", "pull", "--plain-http", "--snapshotter", containerd.snapshotter, steady)
        containerd.ctr(*containerd.run_words("--detach", steady, "steady", "sh", "-c",
                                             "echo steady >/steady; exec sleep 100000"))
        wait_until("it has written", CHANGE_LIMIT_SECONDS, lambda: containerd.attempt(
            "tasks", "exec", "--exec-id", "look", "steady", BUSYBOX, "test", "-s", "/steady").code == 0)
        works(worker, image)
        commands = Commands(containerd, image)
        actions = [commands.pull_by_differ, commands.pull_by_transfer, commands.run, commands.diff, commands.commit]
        for number in range(count):
            commands.number = number
            action, delay_seconds = chance.choice(actions), chance.uniform(0, COMMAND_SECONDS)
            try:
                one_kill(worker, commands, action, delay_seconds)
                if number % CHECK_EVERY == CHECK_EVERY - 1:
                    works(worker, image)
            except Failure as failure:
                raise Failure(f"kill {number} in {action.__name__} after {delay_seconds:.3f} s, seed {SEED}: "
                              f"{failure}") from failure
        works(worker, image)
        containerd.ctr("tasks", "kill", "--signal", "SIGKILL", "steady")
