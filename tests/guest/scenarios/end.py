"""The end of the run: clients leave, files go, and the store is whole."""

import re

from scenario import require, scenario


@scenario("unmount, delete everything, and the store checks clean", 120)
def clean_store(world):
    world.fact("mounted")
    report = world.appliance.call("POST", "/v1/check", {"data": True})
    require(report["clean"], f"check with all files there: {report}")
    world.guest(r"""
        cd /
        writers_stop || true
        [ ! -e /run/driver.process ] || driver_end KILL
        # Whatever a failed scenario left mounted goes first, the latest of all first of all.
        grep -E '^/dev/loop| nfs ' /proc/mounts | cut -d ' ' -f 2 >/run/mounts
        awk '{ line[NR] = $1 } END { for (i = NR; i > 0; i--) print line[i] }' /run/mounts \
            | grep -vx /n | xargs -r -n 1 umount
        for device in /dev/loop*; do losetup -d "$device" 2>/dev/null || true; done
        rm -rf /n/*
        is "entries of the export" "$(ls -A /n)" ""
        umount /n
        if grep -q ' nfs ' /proc/mounts; then fail "$(grep ' nfs ' /proc/mounts)"; fi""")
    page = world.appliance.call("GET", "/v1/snapshots")
    for snapshot in page["items"]:
        world.appliance.call("DELETE", f"/v1/snapshots/{snapshot['id']}")
    world.appliance.call("POST", "/v1/gc")
    report = world.appliance.call("POST", "/v1/check", {"data": True})
    require(report["clean"], f"check after everything was deleted: {report}")
    stats = world.appliance.call("GET", "/v1/stats")
    for count in ("file_count", "snapshot_count", "mapped_blocks"):
        require(stats[count] == 0, f"{count} is {stats[count]} after everything was deleted")


@scenario("the server ends cleanly; its log tells of no panic, corruption or error", 60)
def quiet_log(world):
    world.appliance.stop()
    log = world.appliance.log_path.read_text("utf-8", "replace")
    bad = [line for line in log.splitlines() if re.search(r"panicked|[Cc]orrupt| ERROR ", line)]
    require(not bad, f"{len(bad)} lines, the first: " + "\n".join(bad[:3]))
