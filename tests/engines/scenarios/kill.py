"""kill -9 of the driver at random points of pull, run, commit and rm: afterwards both engines work,
and nothing is left that no image and no container needs."""

import os
import random
import threading
import time

from leftover import require_nothing_left
from releases import NEWER_FOR_ALL
from scenario import PATIENCE, Failure, require, require_equal, scenario

KILLS = int(os.environ.get("SLACKWATER_ENGINES_KILLS", "100"))
NEWER_KILLS = (KILLS + 1) // 2
SEED = os.environ.get("SLACKWATER_ENGINES_SEED", str(random.SystemRandom().randrange(1 << 32)))
# Most commands are done after this long; a kill within it meets them at any point.
COMMAND_SECONDS = 0.8
# dockerd tries again for half a minute, several times in one command.
ANSWER_LIMIT_SECONDS = 150
CHECK_EVERY = 10
LIMIT_SECONDS = 300 + 12 * KILLS


class Commands:
    """What is under way when the driver is killed; each may fail, none may hang."""

    def __init__(self, worker, image):
        self.driver = worker.driver
        self.docker = worker.docker
        self.containerd = worker.containerd
        self.image = image
        self.number = 0

    def _docker(self, *words):
        return self.docker.attempt(*words, limit_seconds=ANSWER_LIMIT_SECONDS)

    def pull(self):
        """Docker's pull of an image that is not there."""
        self._docker("image", "rm", "--force", self.image)
        self._docker("pull", self.image)

    def run(self):
        """A container's whole life."""
        self._docker("run", "--rm", "--network", "none", self.image,
                     "sh", "-c", "echo x >/x; rm /three")

    def commit(self):
        """Commit of the container that runs all the time."""
        self._docker("commit", "steady", f"committed:{self.number}")

    def image_commit(self):
        """The driver's own commit of the container that runs all the time."""
        self.driver.attempt(
            "--state-dir", self.driver.state, "image", "commit", "--docker-host", f"unix://{self.docker.socket}",
            "steady", f"committed:{self.number}",
        )

    def require_image_commit(self):
        """Fails unless the driver's own commit works while nothing is killed."""
        self.driver.image("commit", "--docker-host", f"unix://{self.docker.socket}", "steady", "committed:first")
        require_equal("image commit", self.docker.run("committed:first", "cat", "/steady"), "steady")

    def remove(self):
        """Create, and remove."""
        self._docker("create", "--name", f"short-{self.number}", self.image, "x")
        self._docker("rm", "--force", f"short-{self.number}")

    def remove_image(self):
        """Removes the commits so far."""
        names = self._docker("image", "ls", "--quiet", "committed").output.split()
        if names:
            self._docker("image", "rm", "--force", *names)

    def containerd_pull(self):
        """CRI's pull of an image that is not there."""
        self.containerd.attempt("images", "remove", "--sync", self.image)
        self.containerd.pull_through_cri(self.image, limit_seconds=ANSWER_LIMIT_SECONDS)

    def containerd_run(self):
        """A container's whole life in containerd."""
        self.containerd.attempt(
            *self.containerd.run_words("--rm", self.image, f"short-{self.number}",
                                       "sh", "-c", "echo x >/x; rm /three"),
            limit_seconds=ANSWER_LIMIT_SECONDS,
        )


def one_kill(worker, commands, action, delay_seconds):
    """Kills the driver while the action is under way."""
    trouble = []

    def act():
        try:
            action()
        except Failure as failure:
            trouble.append(failure)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    time.sleep(delay_seconds)
    worker.driver.restart(kill=True)
    thread.join(3 * ANSWER_LIMIT_SECONDS * PATIENCE)
    require(not thread.is_alive(), f"{action.__name__} hangs after a kill")
    if trouble:
        raise trouble[0]


def both_work(worker, image, steady_runs=True):
    """Fails unless Docker and containerd pull and run."""
    worker.wait_connected()
    worker.docker("pull", image, limit_seconds=ANSWER_LIMIT_SECONDS)
    require_equal("docker run", worker.docker.run(image, "cat", "/one/file"), "one")
    worker.containerd.must_pull_through_cri(image)
    got = worker.containerd.run(image, "check", "cat", "/one/file")
    if got != "one\n":
        # Whether the file is not what it should be, or its output was lost.
        seen = worker.containerd.run(image, "look", "sh", "-c", "ls -l /one; cat /one/file; echo end")
        raise Failure(f"ctr run: got {got!r}, expected 'one\\n'; once more: {seen!r}")
    if not steady_runs:
        worker.docker("start", "steady")
    require_equal("the steady one", worker.docker("exec", "steady", "cat", "/steady"), "steady")


@scenario(f"kill: -9 of the driver, {KILLS} times at random points, nothing is left", LIMIT_SECONDS)
def kill(world):
    return kill_often(world, KILLS)


@scenario(f"kill: -9 of the driver, {NEWER_KILLS} times at random points, nothing is left, by {NEWER_FOR_ALL.title}",
          LIMIT_SECONDS, newer=True)
def newer(world):
    world.use(NEWER_FOR_ALL)
    return kill_often(world, NEWER_KILLS)


def kill_often(world, kills):
    """Kills the driver of worker a, and looks at what is left."""
    print(f"(seed {SEED}) ", end="", flush=True)
    chance = random.Random(SEED)
    worker, image = world.worker("a"), world.images.layered()
    steady = world.images.busybox()
    worker.docker("pull", steady)
    worker.docker.run_detached(steady, "sh", "-c", "echo steady >/steady; exec sleep 100000",
                               options=("--name", "steady"))
    both_work(worker, image)
    commands = Commands(worker, image)
    actions = [commands.pull, commands.run, commands.commit, commands.remove, commands.remove_image,
               commands.containerd_pull, commands.containerd_run]
    if world.release.has_docker:
        commands.require_image_commit()
        actions += [commands.image_commit]
    for number in range(kills):
        commands.number = number
        # Else nothing would be under way: containerd's connection waits before it tries again.
        worker.wait_connected()
        action = chance.choice(actions)
        delay_seconds = chance.uniform(0, COMMAND_SECONDS)
        try:
            one_kill(worker, commands, action, delay_seconds)
            if number % CHECK_EVERY == CHECK_EVERY - 1:
                both_work(worker, image)
        except Failure as failure:
            raise Failure(
                f"kill {number} in {action.__name__} after {delay_seconds:.3f} s, seed {SEED}: "
                f"{failure}"
            ) from failure
    both_work(worker, image)
    # A call that dockerd repeats after a kill has lost its body, and dockerd then forgets what the
    # driver has made. The driver can learn that only where dockerd starts and nothing is under way.
    worker.restart_engines()
    both_work(worker, image, steady_runs=False)
    world.clear()
    require_nothing_left(world.server(), [worker.driver for worker in world.workers])
    return f"seed {SEED}"
