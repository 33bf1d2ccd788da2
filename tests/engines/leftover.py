"""What is left when no image and no container is: it has to be nothing."""

import pathlib
import re
import time
import urllib.parse

from scenario import PATIENCE, Failure, require

# The driver removes in the background, and mounts go some seconds after their last use.
SETTLE_SECONDS = 60 * PATIENCE
SHOWN = 24
# The worker's heartbeat is all that stays of a worker without volumes.
HEARTBEAT = re.compile(r"workers/[0-9a-f-]{36}/lease")
# Every first layer is a clone of it; one for all workers, and made once.
EMPTY_DISK = re.compile(r"slackwater-empty-.*")


def mounted(driver):
    """Mounts below the driver's state that are not its export."""
    found = []
    with open("/proc/self/mountinfo", encoding="utf-8") as table:
        for line in table:
            before, after = line.split(" - ")
            point, kind = before.split()[4], after.split()[0]
            if point.startswith(f"{driver.state}/") and not kind.startswith(("fuse", "nfs")):
                found.append(point)
    return found


def loop_devices(directory):
    """Loop devices on files below a directory: their names and the files."""
    found = []
    # Read from /sys: a tool that looks at the files themselves would hang on a dead one.
    for entry in pathlib.Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            backing = entry.read_text().strip()
        except OSError:
            continue
        if backing.startswith(f"{directory}/"):
            found.append((entry.parts[3], backing))
    return found


def settle(server, drivers):
    """Ends, as an administrator, all that is published, and lets the drivers finish their removals. Returns the
    reasons for which drivers refused."""
    for item in server.listing("files"):
        path = item["path"].lstrip("/")
        if path.startswith("published/"):
            server.call("DELETE", f"/v1/files/{urllib.parse.quote(path, safe='')}")
    return [said for said in map(reconcile, drivers) if said]


def reconcile(driver):
    """Lets a driver finish its removals. Returns the reason if it refuses, which it may do for a while."""
    try:
        driver.control("POST", "/reconcile")
    except Failure as failure:
        return str(failure)
    return ""


def found(server, drivers):
    """All that is left, each with a word on what it is."""
    names = {worker.get("worker_id"): worker["name"] for worker in server.call("GET", "/v1/workers")["workers"]}
    paths = [item["path"].lstrip("/") for item in server.listing("files")]
    left = [
        f"file {path} of {names.get(path.removeprefix('workers/').split('/')[0], 'no worker')}"
        for path in paths if not HEARTBEAT.fullmatch(path)
    ]
    left += [
        f"snapshot {item['id']} {item.get('name') or ''}" for item in server.listing("snapshots")
        if not EMPTY_DISK.fullmatch(item.get("name") or "")
    ]
    for driver in drivers:
        left += volumes(driver)
        left += [f"mount {point}" for point in mounted(driver)]
        left += [f"loop device {device} on {file}" for device, file in loop_devices(driver.state)]
    return left


def volumes(driver):
    """What a driver has of engines, each with a word on what it is."""
    return [
        f"volume {volume['key']['engine']} {volume['key']['name']}"
        for engine in ("docker", "containerd") for volume in driver.control("GET", f"/volumes?engine={engine}")
    ]


def require_taken_back(server, driver):
    """Lets a driver that will be stopped finish its removals, and fails if something needs its files still: what it
    has not finished by then stays on the appliance. A disk goes only once the last process of its container has,
    some moments after the container."""
    folder = f"workers/{driver.control('GET', '/status')['worker_id']}/"
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        refused = reconcile(driver)
        paths = [item["path"].lstrip("/") for item in server.listing("files")]
        left = volumes(driver) + ([refused] if refused else [])
        left += [path for path in paths if path.startswith(folder) and not HEARTBEAT.fullmatch(path)]
        if not left:
            return
        require(time.monotonic() < deadline, f"of {driver.process.title} {len(left)} things are left after "
                f"{SETTLE_SECONDS} s:\n" + "\n".join(left[:SHOWN] + users(driver)))
        time.sleep(1)


def users(driver):
    """What uses the disks of a driver: each mount of a loop device of its export, in all processes' namespaces."""
    devices = {f"/dev/{device}": file for device, file in loop_devices(driver.state)}
    found = {}
    for table in pathlib.Path("/proc").glob("[0-9]*/mountinfo"):
        try:
            lines = table.read_text("utf-8", "replace").splitlines()
            title = (table.parent / "comm").read_text("utf-8", "replace").strip()
        except OSError:
            continue
        for line in lines:
            before, after = line.split(" - ")
            device = after.split()[1]
            if device in devices:
                found.setdefault((device, before.split()[4]), []).append(f"{title} {table.parent.name}")
    used = [f"{device} is mounted at {point} in {len(by)} processes, {by[0]} among them"
            for (device, point), by in sorted(found.items())]
    return [f"loop device {device} on {file}" for device, file in devices.items()] + used[:SHOWN]


def require_nothing_left(server, drivers):
    """Fails with the first things that are left after a while."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        left = settle(server, drivers) + found(server, drivers)
        if not left:
            return
        require(time.monotonic() < deadline,
                f"{len(left)} things are left after {SETTLE_SECONDS} s:\n" + "\n".join(left[:SHOWN]))
        time.sleep(1)
