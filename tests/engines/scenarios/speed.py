"""Constant-time commit: a ratio of times on this machine, with all data synced before. A ratio, as
the promise is that the size does not count; a median, as the machine does other things too."""

import statistics
import time

from scenario import require, scenario

SIZES_MIB = (1, 64, 1024)
ROUNDS = 7
RATIO_MAX = 1.5
# Differences below this are the machine's, not the size's.
NOISE_SECONDS = 0.05
WRITE_LIMIT_SECONDS = 400


@scenario("speed: docker commit of 1 MiB, 64 MiB and 1 GiB takes the same time", 900)
def commit(world):
    docker, image = world.worker("a").docker, world.images.busybox()
    docker("pull", image)
    for size in SIZES_MIB:
        docker.run_detached(image, "sleep", "10000", options=("--name", f"work-{size}"))
        docker("exec", f"work-{size}", "sh", "-c",
               f"dd if=/dev/urandom of=/big bs=1M count={size} conv=fsync 2>/dev/null && sync -f /",
               limit_seconds=WRITE_LIMIT_SECONDS)
    times = {size: [] for size in SIZES_MIB}
    # In turns, so that a slow moment of the machine meets all sizes alike.
    for index in range(ROUNDS):
        for size in SIZES_MIB:
            # Something new each time: a commit of nothing new would prove nothing.
            docker("exec", f"work-{size}", "sh", "-c", f"echo {index} >/round && sync -f /")
            started = time.monotonic()
            docker("commit", f"work-{size}", f"committed-{size}:{index}")
            times[size].append(time.monotonic() - started)
    medians = {size: statistics.median(times[size]) for size in SIZES_MIB}
    said = ", ".join(f"{size} MiB {medians[size] * 1000:.0f} ms" for size in SIZES_MIB)
    smallest, largest = min(medians.values()), max(medians.values())
    require(largest <= RATIO_MAX * smallest + NOISE_SECONDS, f"medians of {ROUNDS}: {said}")
    last = docker.run(f"committed-{SIZES_MIB[-1]}:{ROUNDS - 1}", "sh", "-c", "wc -c </big; cat /round")
    require(last.split() == [str(SIZES_MIB[-1] << 20), str(ROUNDS - 1)], f"committed: {last}")
    return said
