"""containerd's own suite of what a snapshotter must do, by its newest release."""

import re

from process import attempt
from releases import NEWER
from scenario import require, require_equal, scenario

# Those of containerd 2.4.2.
TESTS = 21
LIMIT_SECONDS = 900


@scenario("conformance: containerd's own suite of a snapshotter, by containerd 2.4", LIMIT_SECONDS, stand_in=True,
          newer=True)
def snapshotter(world):
    with world.fresh_worker("conformance", release=NEWER) as worker:
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
        require(done.code == 0 and not bad, f"not passed: {', '.join(bad)}\n{done.text[-6000:]}")
        require_equal("tests", len(verdicts), TESTS)
    return f"{TESTS} tests"
