"""The lines of a suite's output that tell of a failure: what `tests/all` repeats in the end.

Every suite has its own words for a failure, and prints thousands of lines beside. Whoever looks at the end of a
run's output, or was given only that, needs to know what failed.
"""

import collections
import re

# Of our own drivers (`FAIL`), of cargo's tests and compiler, of programs that end in a panic, of Python, of the load
# and kill suites. Logs say "error" as well.
FAILURE = re.compile(r"\bFAIL(ED|URE)?\b|panicked at|^error(\[\w+\])?:|^Traceback |^slackwater-bench: ")
# Of `tests/suite`, about any suite that failed.
FRAME = "=== "
# So many lines after it say why.
REASON_LINES = 3
# A first failure may be followed by hundreds that it caused; together they fit on a screen.
SHOWN_LINES = 40
LINE_CHARACTERS = 300


def failures(output):
    """The lines of an output, a binary stream, that tell of a failure, with what follows; its last ones if none does."""
    shown, last, wanted = [], collections.deque(maxlen=2 * REASON_LINES), 0
    for raw in output:
        line = raw.decode("utf-8", "replace").rstrip()[:LINE_CHARACTERS]
        if not line or line.startswith(FRAME):
            continue
        last.append(line)
        wanted = REASON_LINES + 1 if FAILURE.search(line) else wanted - 1
        if wanted > 0:
            shown.append(line)
        if len(shown) == SHOWN_LINES:
            break
    return shown or list(last)
