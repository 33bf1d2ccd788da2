"""What a scenario is: a function with a title and a time limit, registered in order.

A scenario gets the World and returns a note for its line, or nothing; an exception is its failure.
No scenario depends on another: after a failed one the appliance and the workers are new.
"""

import dataclasses
import time
import typing

# The limits are written for an idle machine of two cores, with room. One that is five times slower, or
# busy, gets five times that: a limit only ends what hangs, and no verdict is in it.
PATIENCE = 5


class Failure(Exception):
    """Something is not as it has to be; the text says what."""


@dataclasses.dataclass
class Scenario:
    """One entry of the list that is run."""

    title: str
    limit_seconds: int
    # Whether it can run on the engines' own storage, without the driver.
    stand_in: bool
    # Whether it takes engines that are newer than Debian's.
    newer: bool
    # Those that its workers have, where it does not say itself; None: Debian's.
    release: typing.Any
    action: typing.Callable


SCENARIOS = []


def scenario(title, limit_seconds, stand_in=False, newer=False, also=()):
    """Registers a function as a scenario, and once more for each release of the engines in `also`."""

    def register(action):
        limit = limit_seconds * PATIENCE
        SCENARIOS.append(Scenario(title, limit, stand_in, newer, None, action))
        for release in also:
            SCENARIOS.append(Scenario(f"{title}, by {release.title}", limit, False, True, release, action))
        return action

    return register


def require(condition, text):
    """Fails with the text unless the condition holds."""
    if not condition:
        raise Failure(text)


def require_equal(what, got, expected):
    """Fails unless both are equal."""
    require(got == expected, f"{what}: got {got!r}, expected {expected!r}")


def wait_until(what, limit_seconds, check):
    """Returns the first true answer of the check."""
    limit_seconds *= PATIENCE
    deadline = time.monotonic() + limit_seconds
    while True:
        answer = check()
        if answer:
            return answer
        require(time.monotonic() < deadline, f"after {limit_seconds} s still not: {what}")
        time.sleep(0.1)
