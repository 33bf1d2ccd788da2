"""Constant-time commit: what passes by NFS for it does not grow with what was written, nor does
its time, with all data synced before. A ratio of times, as the promise is that the size does not count; of the least
of several, as the machine does other things too: on a busy one of more of them."""

import statistics
import time

from leftover import settle
from releases import NEWER_DOCKER
from scenario import require, scenario

SIZES_MIB = (1, 64, 1024)
ROUNDS = 7
# A time that depends on the size stays apart, however often it is taken.
ROUNDS_MAX = 40
RATIO_MAX = 1.5
# Differences below this are the machine's, not the size's.
NOISE_SECONDS = 0.05
# Between commits of the smallest and the largest disk: what ext4 writes to freeze, and reads to mount what a commit
# passes through. A copy of 64 MiB would be far above.
DIFFERENCE_MAX_BYTES = 4 << 20
WRITE_LIMIT_SECONDS = 400


@scenario("speed: docker commit of 1 MiB, 64 MiB and 1 GiB takes the same time", 900)
def commit(world):
    worker = world.worker("a")
    return require_same_time(worker, world.images.busybox(), lambda *words: worker.docker("commit", *words))


@scenario("speed: image commit on Docker 29 of 1 MiB, 64 MiB and 1 GiB takes the same time, where layers are disks",
          900, newer=True)
def image_commit(world):
    # `docker commit` packs what was written there, and so does `image commit` where layers are images.
    with world.fresh_worker("speed-29", release=NEWER_DOCKER, arguments=("--layers", "disks")) as worker:
        by = ("commit", "--docker-host", f"unix://{worker.docker.socket}")
        said = require_same_time(worker, world.images.busybox(), lambda *words: worker.driver.image(*by, *words))
    # What was committed so is published, and has more than a GiB.
    settle(world.server(), [])
    return said


def require_same_time(worker, image, commit_as):
    """Commits containers that have written more and more. `commit_as` takes a container and the name of an image."""
    docker = worker.docker
    docker("pull", image)
    for size in SIZES_MIB:
        docker.run_detached(image, "sleep", "10000", options=("--name", f"work-{size}"))
        docker("exec", f"work-{size}", "sh", "-c",
               f"dd if=/dev/urandom of=/big bs=1M count={size} conv=fsync 2>/dev/null && sync -f /",
               limit_seconds=WRITE_LIMIT_SECONDS)
    times, moved = ({size: [] for size in SIZES_MIB} for _ in range(2))
    def are_near():
        least = [min(times[size]) for size in SIZES_MIB]
        return max(least) <= RATIO_MAX * min(least) + NOISE_SECONDS

    rounds = 0
    # In turns, so that a slow moment of the machine meets all sizes alike.
    while rounds < ROUNDS or (rounds < ROUNDS_MAX and not are_near()):
        for size in SIZES_MIB:
            # Something new each time: a commit of nothing new would prove nothing.
            docker("exec", f"work-{size}", "sh", "-c", f"echo {rounds} >/round && sync -f /")
            worker.meter.reset()
            started = time.monotonic()
            commit_as(f"work-{size}", f"committed-{size}:{rounds}")
            times[size].append(time.monotonic() - started)
            moved[size].append(worker.meter.sent + worker.meter.received)
        rounds += 1
    said = ", ".join(
        f"{size} MiB {min(times[size]) * 1000:.0f} ms {statistics.median(moved[size]) / 1024:.0f} KiB"
        for size in SIZES_MIB
    )
    medians = [statistics.median(moved[size]) for size in SIZES_MIB]
    require(min(medians) > 0, "nothing was moved: the meter is not on the way")
    require(max(medians) - min(medians) <= DIFFERENCE_MAX_BYTES, f"bytes, medians of {rounds}: {said}")
    require(are_near(), f"the least times of {rounds}: {said}")
    last = docker.run(f"committed-{SIZES_MIB[-1]}:{rounds - 1}", "sh", "-c", "wc -c </big; cat /round")
    require(last.split() == [str(SIZES_MIB[-1] << 20), str(rounds - 1)], f"committed: {last}")
    return said
