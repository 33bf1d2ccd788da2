"""The server goes away under the mounts and comes back: hard mounts wait, nothing durable is lost.

Five writers run in the guest while the server is killed again and again. Each keeps, in the
guest's memory, a list of what the server acknowledged as durable:

    records      on the mount, append + fsync         (UNSTABLE + COMMIT, or one FILE_SYNC)
    synchronous  on the mount, O_SYNC                 (FILE_SYNC)
    disk         in ext4 through a loop device, fsync (the client's writeback + COMMIT)
    renamed      a name made and renamed              (namespace changes: durable at the reply)
    bulk         4 MiB a file, fsync at the end       (UNSTABLE data that is lost is sent again)

After each kill the data directory is first opened behind other ports, where the client cannot
repair anything by sending it again, and must hold all that was acknowledged.
"""

import re
import time

import holding_proxy
from scenario import Failure, require, scenario

KILLS = 3
# Long enough for every writer to have something acknowledged and something under way.
WRITING_SECONDS = 3.0
# What every list must grow by between two kills, so that each kill meets writers at work.
PROGRESS = 2
LISTS = ("records", "synchronous", "disk", "renamed", "bulk")
BULK_BYTES = 4_000_000
# Whole blocks, so that the server's dirty bytes reach it; few, so that it does not commit early.
UNCOMMITTED_BYTES = 128 * 4096
WRITE_BYTES = 65536
# The longest that the server takes, and longer than the scenario may take.
DIRTY_AGE_SECONDS = 3600

START_WRITERS = f"""
    mkdir /n/restart /n/restart/names
    truncate -s 256M /n/restart/disk.img
    device=$(losetup -f)
    losetup "$device" /n/restart/disk.img
    /usr/sbin/mkfs.ext4 -q "$device"
    losetup -d "$device"
    disk_mount /n/restart/disk.img /restart
    echo held >/n/restart/held
    writers_clear
    background held held_write held /n/restart/held
    background records records_write records /n/restart/records oflag=append conv=notrunc,fsync
    background synchronous records_write synchronous /n/restart/synchronous \
        oflag=append,sync conv=notrunc
    background disk records_write disk /restart/records oflag=append conv=notrunc,fsync
    background renamed renames_write renamed /n/restart/names
    background bulk bulk_write bulk /n/restart {BULK_BYTES}
"""


def _lists(world):
    """What was acknowledged so far, by list."""
    answer = world.guest("writers_healthy; " + "; ".join(f"acknowledged {name}" for name in LISTS))
    return dict(zip(LISTS, map(int, answer.split()), strict=True))


def _wait_for_progress(world, since):
    """Returns when every list has grown by PROGRESS; the scenario's limit ends the wait."""
    while True:
        now = _lists(world)
        if all(now[name] >= since[name] + PROGRESS for name in LISTS):
            return
        time.sleep(0.2)


def _check_records(text, acknowledged, what):
    """Records 1..acknowledged, each whole; one more may be there, whole or in part."""
    lines = text.decode("ascii", "replace").split("\n")
    for number in range(1, acknowledged + 1):
        got = lines[number - 1] if number <= len(lines) else "nothing"
        require(
            got == f"record {number:010}",
            f"{what}: record {number} of {acknowledged} acknowledged ones reads {got!r}",
        )


def _check_bulk(world, appliance, number, when):
    data = appliance.read_over_nfs(f"restart/bulk-{number}")
    expected = world.pool[number : number + BULK_BYTES]
    if data != expected:
        pairs = enumerate(zip(data, expected))
        place = next((at for at, (got, wanted) in pairs if got != wanted), len(data))
        raise Failure(
            f"{when}: bulk file {number} was fsynced; it has {len(data)} bytes of "
            f"{len(expected)}, the first wrong one is at {place}: {data[place:place + 16].hex()}"
        )


def _check_aside(world, acknowledged):
    """Opens the data directory where no client sends anything again, and looks."""
    aside = world.appliance.aside()
    aside.start()
    try:
        for name in ("records", "synchronous"):
            _check_records(
                aside.read_over_nfs(f"restart/{name}"), acknowledged[name],
                f"after SIGKILL, {name}",
            )
        names = aside.list_over_nfs("restart/names")
        for number in range(1, acknowledged["renamed"] + 1):
            require(f"done-{number}" in names, f"after SIGKILL: the rename of {number} is undone")
        _check_bulk(world, aside, acknowledged["bulk"], "after SIGKILL")
    finally:
        aside.kill()


@scenario("SIGKILL between WRITE and COMMIT: the client sends the data again", 120)
def killed_before_commit(world):
    world.fact("mounted")
    appliance = world.appliance
    # Nothing but a COMMIT makes the data durable: neither its age nor its amount does.
    appliance.stop()
    appliance.start("--dirty-age-seconds", str(DIRTY_AGE_SECONDS))
    proxy = holding_proxy.Proxy(appliance.nfs_port)
    try:
        _killed_before_commit(world, proxy)
    finally:
        proxy.close()
    appliance.stop()
    appliance.start()


def _killed_before_commit(world, proxy):
    appliance = world.appliance
    expected = world.pool[11 : 11 + UNCOMMITTED_BYTES]
    # More than one WRITE, so that the kernel sends them UNSTABLE: of a single one it asks FILE_SYNC.
    world.guest(f"""
        nfs_port={proxy.port} export_mount /held hard,nosharecache,wsize={WRITE_BYTES}
        writers_clear
        write_and_sync() {{
            pool 11 {UNCOMMITTED_BYTES} | dd of=/held/uncommitted bs={UNCOMMITTED_BYTES} \
                iflag=fullblock conv=fsync status=none 2>/run/uncommitted.error
        }}
        background uncommitted write_and_sync""")
    proxy.wait_for_commit()
    while appliance.call("GET", "/v1/stats")["dirty_bytes"] < UNCOMMITTED_BYTES:
        time.sleep(0.05)
    appliance.kill()
    aside = appliance.aside()
    aside.start()
    try:
        require(
            aside.read_over_nfs("uncommitted") != expected,
            "no COMMIT came through, and yet all of the data outlived the server",
        )
    finally:
        aside.kill()
    appliance.start("--dirty-age-seconds", str(DIRTY_AGE_SECONDS))
    writes = proxy.calls(holding_proxy.WRITE)
    proxy.release()
    # The writer's fsync: it has to learn that the server has forgotten, send again, and succeed.
    world.guest("writers_stop")
    sent_again = proxy.calls(holding_proxy.WRITE) - writes
    require(
        sent_again * WRITE_BYTES >= UNCOMMITTED_BYTES,
        f"the client sent {sent_again} WRITEs of {WRITE_BYTES} bytes again",
    )
    got = appliance.read_over_nfs("uncommitted")
    require(
        got == expected,
        f"fsync succeeded, but the file has {len(got)} bytes of {len(expected)}, or other ones",
    )
    world.guest("rm /held/uncommitted; umount /held")


@scenario("SIGKILL of the server under writers: nothing fsynced is lost", 180)
def killed(world):
    world.fact("mounted")
    world.guest(START_WRITERS)
    none = dict.fromkeys(LISTS, 0)
    _wait_for_progress(world, none)
    for _ in range(KILLS):
        time.sleep(WRITING_SECONDS)
        world.appliance.kill()
        # The writers stand still now: nothing is acknowledged without a server.
        acknowledged = _lists(world)
        _check_aside(world, acknowledged)
        world.appliance.start()
        _wait_for_progress(world, acknowledged)
        # The file that was being written when the server died: what the client had sent and not
        # committed was lost with the old process, and the new verifier made it send that again
        # (RFC 1813 section 3.3.21).
        _check_bulk(world, world.appliance, acknowledged["bulk"] + 1, "under way at SIGKILL")
    world.facts["writing"] = True


@scenario("SIGTERM and start: a clean end, and the client carries on", 90)
def restarted(world):
    world.fact("writing")
    world.appliance.stop()
    acknowledged = _lists(world)
    world.appliance.start()
    _wait_for_progress(world, acknowledged)


@scenario("after the restarts: every record, no stale handle, no I/O error", 120)
def after_restarts(world):
    world.fact("writing")
    world.guest("writers_stop")
    acknowledged = _lists(world)
    for name in ("records", "synchronous"):
        _check_records(
            world.appliance.read_over_nfs(f"restart/{name}"), acknowledged[name], name
        )
    _check_bulk(world, world.appliance, acknowledged["bulk"], "in the end")
    # The file that was held open through all of it was readable before and writable after.
    held = world.appliance.read_over_nfs("restart/held")
    require(held == b"held\nmore\n", f"the file held open through the restarts holds {held!r}")
    records = int(world.guest("""
        is "read through a file held open" "$(cat /run/held.list)" held
        disk_unmount /restart
        disk_check /n/restart/disk.img
        disk_mount /n/restart/disk.img /restart
        records_last /restart/records
        disk_unmount /restart"""))
    require(
        records >= acknowledged["disk"],
        f"the disk holds {records} records, {acknowledged['disk']} were fsynced",
    )
    messages = world.guest("dmesg")
    bad = [
        line for line in messages.splitlines()
        if re.search(r"[Ss]tale|I/O error|EXT4-fs (error|warning)|JBD2: .*error", line)
    ]
    require(not bad, "the guest's kernel complains: " + "; ".join(bad[:5]))
