"""What schemathesis has to know of this API that no schema says."""

import random

import schemathesis

IDEMPOTENCY_KEY = "idempotency-key"
# A fixed seed: the tester's own makes the calls, and both are the same in each run of one seed.
KEYS = random.Random(9110)
# A file may have 2^62 bytes, and the tester reads what it gets into memory.
SIZE_BYTES_MAX, SMALL_SIZE_BYTES = 1 << 62, 1 << 20
# A snapshot ends before the year 2554, so how long it may stay depends on the day. Earlier than 1970 none can end.
EXPIRES_IN_SECONDS_MAX = 10_000_000_000
YEARS = range(1970, 2554)
# That has a 29th of February, too.
LEAP_YEAR = 2552


def whole(value):
    """JSON Schema takes 1.0 for an integer. This API, as serde, does not: 1 is sent."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [whole(item) for item in value]
    if isinstance(value, dict):
        return {name: whole(item) for name, item in value.items()}
    return value


def make_small(values, name):
    """The size of a file, in good calls and in bad ones that may be taken: only one that is refused stays as it is."""
    size = values.get(name) if isinstance(values, dict) else None
    # Not isinstance: True is an int to it.
    if type(size) is int and 0 <= size <= SIZE_BYTES_MAX:
        values[name] = size % SMALL_SIZE_BYTES


def make_good(case):
    """Changes a call that the schemas take for good, and that is not."""
    # A key that came with another body is refused, and each call has another body.
    for name in case.headers or {}:
        if name.lower() == IDEMPOTENCY_KEY:
            case.headers[name] = f"{KEYS.getrandbits(128):032x}"
    # Where a page of files ended only the page itself tells: the encoded names of a path of at most 4,096 bytes.
    if case.query and case.path == "/v1/files":
        case.query.pop("after", None)
    # A layer for all has no blob of a registry: `addChain` takes one of the two.
    if case.query and "for_all" in case.query:
        case.query.pop("blob", None)
    body = case.body if isinstance(case.body, dict) else {}
    # An image refers to what is published, and a clone of one snapshot publishes no other.
    if body.get("image") is not None:
        body["path"] = f"published/{body['snapshot_id']}"
    if type(body.get("expires_in_seconds")) is int:
        body["expires_in_seconds"] %= EXPIRES_IN_SECONDS_MAX
    if body.get("expires_at") and int(body["expires_at"][:4]) not in YEARS:
        body["expires_at"] = f"{LEAP_YEAR}{body['expires_at'][4:]}"


@schemathesis.hook
def before_call(_context, case, _kwargs):
    """Called before each call."""
    case.body = whole(case.body)
    make_small(case.body, "size_bytes")
    if case.method == "PUT":
        make_small(case.query, "offset")
    if case.meta and case.meta.generation.mode.is_positive:
        make_good(case)
