"""The driver over the kernel's NFS client: what Docker's plugin and `attach` do with real mounts.

    scenario --serial port--> curl --Unix socket--> slackwater-driver --REST--> slackwaterd
                              /run/driver/mounts/ID (ext4) <- loop <- /run/driver/export (NFS)

The other tests of the driver attach by FUSE, since the machines they run on need not have an NFS
client. Here the kernel has one, and the driver has to find that by itself.
"""

import json
import re
import time

from scenario import require, scenario

# A reference is a layer's tar of a few blocks, whatever the disk holds.
REFERENCE_BYTES_MAX = 16 << 10
DATA_BYTES = 3_000_001
# Each has to be written and fsynced before a step counts.
RECORDS = 3
# Snapshots go with their last clones, which the appliance does in the background.
SETTLE_SECONDS = 300
# What a worker leaves on the appliance when all its volumes are gone.
HEARTBEAT = re.compile(r"/?workers/[0-9a-f-]{36}/lease")
EMPTY_DISK = re.compile(r"slackwater-empty-.*")

MAKE_LAYER = """
    mkdir -p /run/layer/program /run/layer/etc
    cp /bin/busybox /run/layer/program/busybox
    echo first >/run/layer/etc/release
    ln -s ../program/busybox /run/layer/etc/link
    tar -c -f /run/layer.tar -C /run/layer .
"""
# Of one token, one after the other.
OTHER_SECRETS = ("other-0123456789abcdef", "other-fedcba9876543210")


def _call(world, call, **request):
    """One call of the plugin, which must succeed; returns the answer."""
    answer = json.loads(world.guest(f"plugin GraphDriver.{call} '{json.dumps(request)}'"))
    require(not answer.get("Err"), f"{call} {request}: {answer}")
    return answer


def _apply(world, layer, parent, tar):
    answer = json.loads(world.guest(f"plugin_apply '{layer}' '{parent}' {tar}"))
    require(not answer.get("Err"), f"ApplyDiff {layer}: {answer}")


def _commit(world, container, parent, tar):
    """A commit as dockerd does it: the tar of a container, which has to be a reference."""
    request = json.dumps({"ID": container, "Parent": parent})
    size_bytes = int(world.guest(f"plugin GraphDriver.Diff '{request}' >{tar}; stat -c %s {tar}"))
    require(
        0 < size_bytes <= REFERENCE_BYTES_MAX, f"the commit's tar has {size_bytes} bytes"
    )


def _container(world, container, image, **options):
    """Makes a container and returns where its disk is mounted."""
    _call(world, "CreateReadWrite", ID=container, Parent=image, StorageOpt=options or None)
    return _call(world, "Get", ID=container)["Dir"]


def _snapshot_of(world, layer):
    return _call(world, "GetMetadata", ID=layer)["Metadata"]["Snapshot"]


def _snapshots(world):
    """The snapshots on the appliance: id and name."""
    items = world.appliance.call("GET", "/v1/snapshots")["items"]
    return {item["id"]: item.get("name") or "" for item in items}


def _left(world):
    """What the driver left on the appliance that it should not have."""
    files = world.appliance.call("GET", "/v1/files?prefix=workers")["items"]
    left = [file["path"] for file in files if not HEARTBEAT.fullmatch(file["path"])]
    return left + [
        f"snapshot {snapshot} {name}" for snapshot, name in _snapshots(world).items()
        if snapshot not in world.fact("snapshots before") and not EMPTY_DISK.fullmatch(name)
    ]


def _nothing_left(world):
    """Waits until the driver has left nothing."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while left := _left(world):
        require(time.monotonic() < deadline, f"on the appliance there still is {left}")
        time.sleep(0.2)


@scenario("driver: doctor finds the kernel's NFS client, the daemon mounts by it", 90)
def driver_starts(world):
    world.facts["snapshots before"] = set(_snapshots(world))
    world.guest("driver_join")
    # A machine that boots while the appliance is away: the driver does not wait for it.
    world.appliance.kill()
    world.guest("driver_start")
    world.appliance.start()
    activated = json.loads(world.guest("plugin Plugin.Activate ''"))
    require(activated == {"Implements": ["GraphDriver"]}, f"Activate answers {activated}")
    _call(world, "Init", Home="/run/docker/slackwater", Opts=None, UIDMaps=None, GIDMaps=None)
    found = world.guest("driver doctor")
    for line in ("disks are attached by: nfs", "ok    appliance, a path to mount"):
        require(line in found, f"doctor says:\n{found}")
    world.facts["driver"] = True


@scenario("driver: an image's program runs from a clone over NFS, a commit carries its file", 150)
def driver_runs(world):
    world.fact("driver")
    world.guest(MAKE_LAYER)
    _call(world, "Create", ID="layer", Parent="")
    _apply(world, "layer", "", "/run/layer.tar")
    first = _container(world, "first", "layer")
    mounts = world.guest(f"grep -E ' {first} | /run/driver/export' /proc/mounts")
    for pattern in (
        rf"^/dev/loop\d+ {first} ext4 rw,",
        # By secret paths of a worker, which counted for the moment of the mount.
        r"^10\.0\.2\.2:\S+/\.worker/\w{64} /run/driver/export nfs rw,.*nosymfollow,.*vers=3,.*\bhard,",
        r"^10\.0\.2\.2:\S+/\.worker/\w{64}/\.snapshot /run/driver/export\.snapshot nfs ro,.*nosymfollow,",
    ):
        require(re.search(pattern, mounts, re.M), f"no mount like {pattern}:\n{mounts}")
    # It sees its own files, and no others.
    world.guest(f"""
        is "the export" "$(ls -A /run/driver/export)" workers
        is "workers" "$(ls -A /run/driver/export/workers | wc -w)" 1
        touch /n/foreign
        refused 'No such file' cat /run/driver/export/foreign
        refused 'Permission denied' touch /run/driver/export/new
        rm /n/foreign
        is "a file of the image" "$(cat {first}/etc/release)" first
        is "a link of the image" "$(readlink {first}/etc/link)" ../program/busybox
        pool 5 {DATA_BYTES} | contained {first} /program/busybox dd of=/data bs=64K conv=fsync
        contained {first} /program/busybox mv /etc/release /etc/renamed
        pool 5 {DATA_BYTES} | cmp - {first}/data""")
    _commit(world, "first", "layer", "/run/commit.tar")
    # After the commit, and so not in it.
    world.guest(f"contained {first} /program/busybox rm /data")
    _call(world, "Create", ID="committed", Parent="layer")
    _apply(world, "committed", "layer", "/run/commit.tar")
    second = _container(world, "second", "committed")
    world.guest(f"""
        is "a file the commit renamed" "$(cat {second}/etc/renamed)" first
        contained {second} /program/busybox cat /data >/run/data
        pool 5 {DATA_BYTES} | cmp - /run/data
        [ ! -e {second}/etc/release ] || fail "the name before the rename is in the commit"
        [ ! -e {first}/data ] || fail "what was removed in one container is there again"
        echo more >{second}/only
        [ ! -e {first}/only ] || fail "one container sees the other's file"
        rm /run/data""")
    # On a disk that had to grow before its first mount.
    larger = _container(world, "larger", "committed", size="65GiB")
    world.guest(f"""
        size=$(df -B 1G {larger} | awk 'NR == 2 {{ print $2 }}')
        [ "$size" -ge 63 ] || fail "the larger disk has $size GiB"
        pool 5 {DATA_BYTES} | cmp - {larger}/data""")
    # One mount for all that share it, and nobody writes.
    shared = _container(world, "shared", "committed", shared="true")
    world.guest(f"""
        is "a file by a shared root" "$(contained {shared} /program/busybox cat /etc/renamed)" first
        refused 'Read-only file system' contained {shared} /program/busybox touch /new""")
    world.facts["containers"] = {
        "first": first, "second": second, "larger": larger, "shared": shared,
    }


def _records_of_commit(world, name):
    """How many records a commit of the first container has, which is then the image `name`."""
    _commit(world, "first", "layer", f"/run/{name}.tar")
    _call(world, "Create", ID=name, Parent="layer")
    _apply(world, name, "layer", f"/run/{name}.tar")
    container = f"of-{name}"
    root = world.fact("containers")[container] = _container(world, container, name)
    return int(world.guest(f"records_last {root}/records"))


@scenario("driver: SIGKILL of the driver and of the server under a container that writes", 150)
def driver_killed(world):
    root = world.fact("containers")["first"]
    world.guest(f"""
        contained_write {root}
        while [ ! -e {root}/records ]; do sleep 0.1; done
        contained_progress {root} {RECORDS}
        driver_end KILL
        contained_progress {root} {RECORDS}
        # As if it had been killed in the middle of a commit.
        /tools/fsfreeze --freeze {root}
        driver_start
        contained_progress {root} {RECORDS}""")
    again = _call(world, "Get", ID="first")["Dir"]
    require(again == root, f"after the restart the container is at {again}, not at {root}")
    _call(world, "Put", ID="first")
    # Frozen for the moment of the snapshot, and not for longer.
    records = _records_of_commit(world, "running")
    require(records >= 3 * RECORDS, f"the commit of the running container has {records} records")
    second = world.fact("containers")["second"]
    world.guest(f"contained_progress {root} {RECORDS}; sync -f {second}")
    # A commit that hangs while it freezes, since nothing reaches the server any more; the next
    # driver has to undo that freeze as soon as it is complete.
    world.appliance.kill()
    world.guest("""
        plugin GraphDriver.Diff '{"ID": "second"}' >/dev/null 2>&1 &
        while ! ps | grep -q '[f]sfreeze --freeze'; do sleep 0.1; done
        driver_end KILL
        driver_start""")
    world.appliance.start()
    world.guest(f"echo thawed >{second}/thawed; sync {second}/thawed")
    ended = int(world.guest(f"""
        contained_progress {root} {RECORDS}
        touch {root}/stop
        while [ ! -e {root}/ended ]; do sleep 0.1; done
        is "what the container said" "$(cat /run/contained.log)" ""
        cat {root}/ended"""))
    # A clone is another file to the kernel: what it shows is what the server has.
    records = _records_of_commit(world, "ended")
    require(records == ended, f"{records} records of {ended} are on the server")


@scenario("driver: attach and detach of a snapshot and a clone, without a daemon", 120)
def driver_attach(world):
    world.fact("containers")
    snapshot = _snapshot_of(world, "committed")
    clone = world.guest(f"""
        attached attach --snapshot {snapshot} /run/attach/seen
        # With a token, by its secret path.
        grep -q '/\\.export/[^ ]* /run/attach/attach/export nfs' /proc/mounts ||
            fail "how it is mounted: $(grep /run/attach/export /proc/mounts)"
        pool 5 {DATA_BYTES} | cmp - /run/attach/seen/data
        refused 'Read-only file system' touch /run/attach/seen/new
        attached attach --clone {snapshot} /run/attach/clone""")
    world.guest(f"""
        contained /run/attach/clone /program/busybox cp /data /copy
        attached detach /run/attach/clone
        attached attach --file {clone} /run/attach/clone
        pool 5 {DATA_BYTES} | cmp - /run/attach/clone/copy
        attached detach /run/attach/clone
        attached attach --suid --dev --file {clone} /run/attach/clone
        is "rights that were asked for" "$(rights /run/attach/clone)" ""
        attached detach /run/attach/clone
        is "rights of a foreign disk" "$(rights /run/attach/seen)" "nosuid,nodev"
        attached detach /run/attach/seen
        is "what is left mounted" "$(grep /run/attach /proc/mounts)" ""
        is "disks and devices left" "$(driver_mounts /run/attach)" ""
        rm -r /n/attached""")


@scenario("driver: attach makes a disk, and a clone of it as it is now", 120)
def driver_attach_new(world):
    world.guest("""
        attached attach --create 64MiB --file made/disk /run/attach/made
        echo hello >/run/attach/made/hello""")
    # Its journal is not clean, as it is in use.
    snapshot = world.appliance.call("POST", "/v1/snapshots", {"path": "made/disk"})["id"]
    world.guest(f"""
        clone=$(attached attach --clone made/disk /run/attach/clone)
        is "what was written before" "$(cat /run/attach/clone/hello)" "hello"
        refused "attach --clone" attached attach --snapshot {snapshot} /run/attach/seen
        other=$(attached attach --clone {snapshot} /run/attach/seen)
        attached detach /run/attach/seen
        refused "exists" attached attach --create 64MiB --file made/disk /run/attach/seen
        refused "bytes of data" attached attach --format --file made/disk /run/attach/seen
        attached detach /run/attach/clone 2>/run/said
        grep -q "file rm $clone" /run/said || fail "detach said: $(cat /run/said)"
        attached detach /run/attach/made
        truncate -s 64M /n/made/blank
        attached attach --format --file made/blank /run/attach/made
        is "a new disk is empty" "$(ls /run/attach/made)" ""
        attached detach /run/attach/made
        is "what is left mounted" "$(grep /run/attach /proc/mounts)" ""
        rm -r /n/attached /n/made""")
    world.appliance.request("DELETE", f"/v1/snapshots/{snapshot}")


@scenario("driver: a link that replaced a disk attaches nothing of the worker's own", 120)
def driver_link(world):
    world.fact("containers")
    world.guest("""
        # Not on a tmpfs: a loop device as the driver makes it would be refused there anyway.
        truncate -s 128M /run/below
        device=$(/tools/losetup --find --show /run/below)
        /usr/sbin/mkfs.ext4 -q "$device"
        mkdir /run/own /n/linked
        mount -t ext4 "$device" /run/own
        truncate -s 64M /run/own/file
        /usr/sbin/mkfs.ext4 -q /run/own/file
        before=$(md5sum /run/own/file)
        ln -s /run/own/file /n/linked/file
        ln -s "$device" /n/linked/device
        ln -s /run/own /n/linked/folder
        for name in file device folder/file; do
            refused "leads to" attached attach --file "linked/$name" /run/attach/link
        done
        # No program of this machine follows a link there.
        worker=workers/$(ls /run/driver/export/workers)
        ln -s /run/own/file "/n/$worker/linked"
        refused 'Too many levels of symbolic links' cat "/run/driver/export/$worker/linked"
        rm "/n/$worker/linked"
        is "what is left mounted" "$(grep /run/attach /proc/mounts)" ""
        is "the worker's own" "$(md5sum /run/own/file)" "$before"
        umount /run/own
        /tools/losetup --detach "$device"
        is "devices left" "$(grep -l -e /run/own -e /run/below /sys/block/loop*/loop/backing_file)" ""
        rm -r /n/linked /run/own /run/below""")


@scenario("driver: when its token has changed, a driver without disks mounts again once it was restarted", 90)
def driver_token(world):
    sources = []
    for secret in OTHER_SECRETS:
        world.appliance.let_in(secret)
        sources.append(world.guest(f"""
            (umask 077; echo {secret} >/run/other-token
                echo 'Authorization: Bearer {secret}' >/run/other-authorization)
            # A refusal a second: more of them are counted as guesses.
            while ! /tools/curl --silent --fail --output /run/other-stats \
                --header @/run/other-authorization "$SLACKWATER_API/v1/stats"; do sleep 1; done
            [ ! -e /run/other ] || refused 'denied' stat -f /run/other/export
            first=$(other_once)
            is "the path after another start" "$(other_once)" "$first"
            stat -f /run/other/export >/run/other-stats
            echo "$first" """))
    require(all("/.export/" in source for source in sources), f"mounted were {sources}")
    require(sources[0] != sources[1], "it is mounted by the path of the token that is gone")
    world.guest("""
        umount /run/other/export.snapshot
        umount /run/other/export
        rm /run/other-*""")


@scenario("driver: everything removed leaves no mount, no loop device, and no file", 90)
def driver_ends(world):
    containers = world.fact("containers")
    for container in containers:
        _call(world, "Put", ID=container)
        _call(world, "Remove", ID=container)
    for layer in ("ended", "running", "committed", "layer"):
        _call(world, "Remove", ID=layer)
    # A driver that ends leaves to the next one what it has not deleted yet.
    _nothing_left(world)
    world.guest("""
        while [ -n "$(driver_mounts)" ]; do sleep 0.2; done
        driver_end TERM
        # The daemon leaves the export to the next one.
        umount /run/driver/export.snapshot
        umount /run/driver/export
        is "what is left mounted" "$(grep /run/driver /proc/mounts)" "" """)
    _nothing_left(world)
