"""containerd's own suite of what a snapshotter must do, by its newest release and the one with long support."""

import re

from process import attempt
from releases import LONG_SUPPORTED, NEWER
from scenario import require, require_equal, scenario

# Those of containerd 2.4.2.
TESTS = 21
LIMIT_SECONDS = 900


@scenario("conformance: containerd's own suite of a snapshotter, by containerd 2.4", LIMIT_SECONDS, stand_in=True,
          newer=True)
def snapshotter(world):
    suite(world, NEWER, ("--layers", "disks"), [])
    return f"{TESTS} tests"


@scenario("conformance: the same where layers are images, but for what no overlay does", LIMIT_SECONDS, newer=True)
def images(world):
    # overlayfs renames no directory of a lower layer. The suite leaves that out for snapshotters of that name.
    said = suite(world, NEWER, ("--layers", "images"), ["Rename"])
    require("/dir2: invalid cross-device link" in said, f"another reason: {said[-6000:]}")
    return f"{TESTS - 1} tests"


@scenario("conformance: containerd's own suite of a snapshotter, by containerd 2.2", LIMIT_SECONDS, newer=True)
def long_supported(world):
    suite(world, LONG_SUPPORTED, ("--layers", "disks"), [])
    return f"{TESTS} tests"


def suite(world, release, arguments, expected):
    """All but these have to pass, by this containerd, and with a driver that has these arguments. Returns what the
    suite said. Its program is a client of containerd: that of the newest release asks the others, too."""
    with world.fresh_worker("conformance", release=release, arguments=arguments) as worker:
        containerd = worker.containerd
        # One after the other: what a test leaves is then its own.
        done = attempt(
            [NEWER.program("snapshotter.test"), "-test.v", "-test.parallel", "1", "-test.root"],
            limit_seconds=LIMIT_SECONDS,
            settings={
                "CONTAINERD_SOCKET": containerd.socket, "CONTAINERD_SNAPSHOTTER": containerd.snapshotter,
                "TMPDIR": world.scratch,
            },
        )
        verdicts = re.findall(r"^    --- (\w+): TestSnapshotter/(\S+)", done.text, re.MULTILINE)
        bad = [name for verdict, name in verdicts if verdict != "PASS"]
        is_whole = bad == expected and (done.code == 0) == (not expected)
        require(is_whole, f"not passed: {', '.join(bad)}\n{done.text[-6000:]}")
        require_equal("tests", len(verdicts), TESTS)
    return done.text
