"""An emulated machine whose kernel stands still while it boots.

Rarely, on a busy machine, a processor of qemu's emulation gets no timer interrupts from the first seconds
on: the kernel waits for ever, and says so after 21 s. The programs under test do not run yet. It is no verdict on
them, so that who boots the machine cuts its power, says so, and boots it again, a few times at most. A host that
stood still for as long gives the same line; to boot once more costs time then, and nothing else.
"""

import re

# The first boot is one of them. Twice in a row is no bad luck any more.
BOOTS_MAX = 3

EXPLAINED = "the emulated machine's kernel stands still"

# As the kernel's detector of stalls says it (kernel/rcu/tree_stall.h).
_STALL = re.compile(rb"rcu: INFO: rcu_\w+ (self-)?detected (expedited )?stall")


class Stalled(Exception):
    """The kernel stands still."""

    def __init__(self):
        super().__init__(EXPLAINED)


def is_one(console):
    """Whether the bytes of a console say so."""
    return _STALL.search(console) is not None
