"""What a scenario is: a function with a title and a time limit, registered in order.

A scenario gets the World and returns; an exception is its failure. What later scenarios need of
earlier ones goes through the guest's files or through World.facts; a missing fact fails at once.
"""

import dataclasses
import typing

# The limits are written for an idle machine of two cores, with room. One that is five times slower, or
# busy, gets five times that: a limit only ends what hangs, and no scenario's verdict is in it.
PATIENCE = 5


class Failure(Exception):
    """Something is not as it has to be; the text says what."""


@dataclasses.dataclass
class Scenario:
    """One entry of the list that is run."""

    title: str
    limit_seconds: int
    action: typing.Callable


@dataclasses.dataclass
class World:
    """What scenarios act on."""

    appliance: typing.Any
    machine: typing.Any
    # The bytes of /pool in the guest: data that both sides know.
    pool: bytes
    scratch: typing.Any
    # Where packages are kept from run to run.
    cache: typing.Any
    facts: dict = dataclasses.field(default_factory=dict)

    def guest(self, script):
        """Runs a script in the guest; the scenario's own limit ends it."""
        return self.machine.run(script, limit_seconds=7200.0)

    def fact(self, name):
        """What an earlier scenario left."""
        if name not in self.facts:
            raise Failure(f"an earlier scenario did not get as far as {name}")
        return self.facts[name]


SCENARIOS = []


def scenario(title, limit_seconds):
    """Registers a function as a scenario."""

    def register(action):
        SCENARIOS.append(Scenario(title, limit_seconds * PATIENCE, action))
        return action

    return register


def require(condition, text):
    """Fails with the text unless the condition holds."""
    if not condition:
        raise Failure(text)
