"""A line for each run of a suite, for tests/all and tests/repeat: what depends on luck shows over many of them.

    {"suite": "guest", "beside": ["busy"], "passed": true, "seconds": 61.2, "commit": "1234567", "ended": "2026-01-02T03:04:05Z"}
"""

import contextlib
import json
import os
import pathlib
import subprocess
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "slackwater"
# Where they are, and the output of those that failed, if no other place is named.
FOLDER = CACHE / "repeat"
FILE = "runs.jsonl"


def commit():
    """What the suites are of, if that can be told; with a plus sign where files differ from it."""
    # As root of another's clone, too, and without writing to it.
    command = ["git", "-c", f"safe.directory={ROOT}", "-C", ROOT, "describe", "--always", "--exclude=*", "--dirty=+"]
    with contextlib.suppress(OSError):
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                              env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"})
        return done.stdout.strip() or "unknown"
    return "unknown"


def note(folder, suite, beside, is_passed, seconds, of):
    """Adds a run to those so far, and returns it."""
    run = {"suite": suite, "beside": beside, "passed": is_passed, "seconds": round(seconds, 1),
           "commit": of, "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    path = folder / FILE
    with path.open("ab") as file:
        # Behind a line that a kill cut off.
        is_cut = file.tell() > 0 and not path.read_bytes().endswith(b"\n")
        file.write((b"\n" if is_cut else b"") + json.dumps(run).encode() + b"\n")
    return run


def read(folder):
    """All runs so far."""
    runs = []
    for line in (folder / FILE).read_text(encoding="utf-8").splitlines():
        # One that a kill cut off is none.
        with contextlib.suppress(ValueError):
            runs.append(json.loads(line))
    return runs
