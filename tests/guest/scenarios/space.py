"""Space as users see it, and writes that ask to be durable before they return."""

import hashlib
import time

from appliance import CAPACITY_BYTES
from scenario import Failure, require, scenario

MEBIBYTE = 1 << 20
# Attributes that the client cached are good for at least this long (acregmin), so a size that
# changes by itself, on a background commit, is seen that much later: some seconds, and several times
# that on a slow machine.
ATTRIBUTES_LIMIT_SECONDS = 75


def _expect_used(world, path, used_bytes):
    """du in the guest and used_bytes by REST must both come to be `used_bytes`."""
    deadline = time.monotonic() + ATTRIBUTES_LIMIT_SECONDS
    while True:
        guest = int(world.guest(f"du -B1 /fresh/{path} | cut -f 1"))
        rest = world.appliance.file(path)["used_bytes"]
        if guest == rest == used_bytes:
            return
        if time.monotonic() > deadline:
            raise Failure(f"{path}: {used_bytes} bytes are used, du says {guest}, REST {rest}")
        time.sleep(0.3)


@scenario("du of a sparse file is what is used; zeros and cuts use nothing", 60)
def sparse(world):
    world.fact("mounted")
    world.guest("truncate -s 1G /n/sparse")
    _expect_used(world, "sparse", 0)
    world.guest("""
        for place in 0 500 1000; do
            dd if=/pool of=/n/sparse bs=1M count=1 skip=$((place / 500)) seek=$place \
                conv=notrunc,fsync status=none
        done""")
    _expect_used(world, "sparse", 3 * MEBIBYTE)
    world.guest("dd if=/dev/zero of=/n/sparse bs=1M count=1 seek=500 conv=notrunc,fsync status=none")
    _expect_used(world, "sparse", 2 * MEBIBYTE)
    world.guest("truncate -s 512M /n/sparse; truncate -s 1G /n/sparse; sync")
    _expect_used(world, "sparse", MEBIBYTE)
    world.guest("""
        caches_drop
        (pool 0 1048576; head -c 1048576 /dev/zero) | cmp -n 2097152 - /n/sparse
        dd if=/n/sparse bs=1M skip=1000 count=1 status=none | cmp -n 1048576 - /dev/zero
        dd if=/dev/zero of=/n/zeros bs=1M count=8 conv=fsync status=none""")
    _expect_used(world, "zeros", 0)
    # Far beyond 32 bits of bytes, and of blocks.
    world.guest("""
        truncate -s 8796093022208 /n/sparse
        dd if=/pool of=/n/sparse bs=4096 count=1 seek=1717986917 conv=notrunc,fsync status=none
        caches_drop
        dd if=/n/sparse bs=4096 count=1 skip=1717986917 status=none | cmp -n 4096 - /pool
        dd if=/n/sparse bs=4096 count=1 skip=1717986916 status=none | cmp -n 4096 - /dev/zero
        is "size" "$(stat -c %s /n/sparse)" 8796093022208""")
    _expect_used(world, "sparse", MEBIBYTE + 4096)
    world.guest("rm /n/sparse /n/zeros")


@scenario("df shows the capacity, and what is written is gone from it", 60)
def free_space(world):
    world.fact("mounted")

    def space():
        words = world.guest("df -B1 --output=size,used,avail /fresh | tail -n 1").split()
        return [int(word) for word in words]

    # What earlier scenarios left goes now, and not while this one looks.
    world.appliance.call("POST", "/v1/gc")
    size, used_before, available_before = space()
    require(size == CAPACITY_BYTES, f"df shows {size} bytes, the capacity is {CAPACITY_BYTES}")
    # Not in the store yet: the tree and the other scenarios write other parts of the pool.
    world.guest("pool 2000003 2097152 >/n/space; sync")
    deadline = time.monotonic() + ATTRIBUTES_LIMIT_SECONDS
    while True:
        _, used, available = space()
        # Random bytes do not compress; a little more than the data itself may be used.
        if used - used_before >= 2 * MEBIBYTE and available_before - available >= 2 * MEBIBYTE:
            break
        if time.monotonic() > deadline:
            raise Failure(
                f"2 MiB were written; df's used went from {used_before} to {used}, "
                f"available from {available_before} to {available}"
            )
        time.sleep(0.3)
    stats = world.appliance.call("GET", "/v1/stats")
    require(
        abs(stats["used_bytes"] - used) <= 16 * MEBIBYTE,
        f"df says {used} bytes are used, REST {stats['used_bytes']}",
    )
    world.guest("rm /n/space")


@scenario("O_SYNC, O_DSYNC, O_DIRECT and fsync: on the server when they return", 60)
def durable_writes(world):
    world.fact("mounted")
    world.guest("mkdir /n/durable")
    expected = world.pool[: 64 * 4096]
    for name, how in (
        ("sync", "bs=4096 oflag=sync"),
        ("dsync", "bs=4096 oflag=dsync"),
        ("direct", "bs=65536 oflag=direct"),
        ("fsync", "bs=262144 conv=fsync"),
    ):
        world.guest(f"dd if=/pool of=/n/durable/{name} iflag=count_bytes count={len(expected)} "
                    f"{how} status=none")
        got = world.appliance.read_over_nfs(f"durable/{name}")
        require(got == expected, f"{name}: libnfs reads other bytes ({len(got)})")
    # Overwrites that begin and end inside blocks.
    changed = bytearray(expected)
    for offset, count, source in ((1, 4094, 900_000), (8191, 2, 5000), (100_001, 33_333, 77)):
        world.guest(f"pool {source} {count} | dd of=/n/durable/fsync bs=1M iflag=fullblock "
                    f"seek={offset} oflag=seek_bytes conv=notrunc,fsync status=none")
        changed[offset : offset + count] = world.pool[source : source + count]
    got = world.appliance.read_over_nfs("durable/fsync")
    require(got == bytes(changed), "partial overwrites: libnfs reads other bytes")
    answer = world.guest("caches_drop; sha256sum </n/durable/fsync")
    require(
        answer.split()[0] == hashlib.sha256(changed).hexdigest(),
        "partial overwrites: the guest reads other bytes",
    )
    # Two fsyncs of one file with another file's in between: its parts lie apart in the log.
    world.guest("""
        pool 1111 400000 >/n/durable/parts
        sync /n/durable/parts
        pool 2500000 1000000 >/n/durable/between
        sync /n/durable/between
        pool 401111 3000000 | dd of=/n/durable/parts bs=1M iflag=fullblock seek=400000 \
            oflag=seek_bytes conv=notrunc,fsync status=none""")
    got = world.appliance.read_over_nfs("durable/parts")
    require(got == world.pool[1111:3_401_111], "a file written in two parts: libnfs reads other bytes")
    # fsync of many pages is UNSTABLE writes and a COMMIT (RFC 1813 section 3.3.21).
    commits = int(world.guest("""
        pool 0 4194304 >/n/durable/unstable
        sync /n/durable/unstable
        awk '$1 == "COMMIT:" { count += $2 } END { print count + 0 }' /proc/self/mountstats"""))
    require(commits > 0, "the client sent no COMMIT at all")
    got = world.appliance.read_over_nfs("durable/unstable")
    require(got == world.pool, "after fsync libnfs reads other bytes")
    world.guest("rm -r /n/durable")
