"""A disk in use: ext4 through a loop device on the mount, snapshots of it, clones of those."""

import re
import time

from scenario import Failure, require, scenario

DISK_BYTES = 1 << 30
CLONES = (1, 2, 3)
# Files, directories and links of tree_write: 12 * 36; fewer would mean that it did not run.
TREE_ENTRIES_MIN = 400
# A snapshot taken before phase B is under way would prove nothing.
RECORDS_BEFORE_SNAPSHOT = 5
RECORDS_BETWEEN_CLONES = 3


@scenario("the kernel mounts the export with 1 MiB reads and writes", 60)
def mount(world):
    options = world.guest("export_mount /n; grep ' /n nfs ' /proc/mounts")
    for option in ("vers=3", "rsize=1048576", "wsize=1048576", "proto=tcp", "hard", "nolock"):
        require(f",{option}," in options.replace(" ", ","), f"{option} is not in {options}")
    # A second mount that shares no cache with the first: it sees what the server has.
    world.guest("export_mount /fresh hard,nosharecache,noac,lookupcache=none")
    world.facts["mounted"] = True


@scenario("mount.nfs mounts it with the line that the server prints", 60)
def mount_helper(world):
    printed = re.search(
        r'^mount -t nfs -o (\S+) 127\.0\.0\.1:"\$\((.+)\)" /mnt$',
        world.appliance.log_path.read_text("utf-8", "replace"), re.MULTILINE,
    )
    require(printed, "the server printed no line to mount it with")
    options, command = printed.groups()
    # The command asks for the path; its token is in the environment, as the server says.
    made = [world.appliance.printed(command) for _ in range(2)]
    world.guest(f"""
        mkdir -p /helper
        /tools/mount.nfs 10.0.2.2:{made[0]} /helper -o {options}
        mkdir -p /helper/below/it
        # A directory of the export can be mounted on its own.
        mkdir -p /below
        /tools/mount.nfs 10.0.2.2:{made[1]}/below /below -o {options}
        is "what the mount of a directory shows" "$(ls /below)" it
        umount /below
        rm -r /helper/below
        umount /helper""")


@scenario("ext4 on a 1 GiB sparse file through a loop device", 90)
def ext4_on_loop(world):
    world.fact("mounted")
    entries = world.guest(f"""
        truncate -s {DISK_BYTES} /n/disk.img
        device=$(losetup -f)
        losetup "$device" /n/disk.img
        /usr/sbin/mkfs.ext4 -q "$device"
        losetup -d "$device"
        disk_mount /n/disk.img /m
        tree_write /m/tree
        tree_print /m/tree >/run/tree.expected
        sync
        disk_unmount /m
        caches_drop
        disk_mount /n/disk.img /m
        tree_compare /m/tree
        find /m/tree | wc -l""")
    require(int(entries) >= TREE_ENTRIES_MIN, f"the tree has only {entries} entries")
    file = world.appliance.file("disk.img")
    require(file["size_bytes"] == DISK_BYTES, f"REST gives another size: {file}")
    # The tree alone is a few MiB; ext4 adds its journal and tables, most of them zeros.
    require(
        2 << 20 <= file["used_bytes"] <= 64 << 20, f"a few MiB were written, REST says {file}"
    )
    world.facts["disk"] = True


def _acknowledged(world):
    return int(world.guest("writers_healthy; acknowledged phase-b"))


def _wait_for_record(world, number):
    while _acknowledged(world) < number:
        time.sleep(0.1)


@scenario("a snapshot by REST and three clones while more is written", 90)
def snapshot_while_writing(world):
    world.fact("disk")
    # Phase B: records, each fsynced, among files that are not.
    world.guest("""
        mkdir /m/phase-b
        writers_clear
        background phase-b records_write phase-b /m/phase-b/records \
            oflag=append conv=notrunc,fsync
        background churn churn_write churn /m/phase-b""")
    _wait_for_record(world, RECORDS_BEFORE_SNAPSHOT)
    world.facts["first"] = _acknowledged(world)
    snapshot_id = world.appliance.snapshot("disk.img")
    # The record under way may be in the snapshot before its number is in the list.
    world.facts["last"] = _acknowledged(world) + 1
    # Each clone is made at another time; all of them are of the moment of the snapshot.
    for number in CLONES:
        _wait_for_record(world, world.facts["last"] + number * RECORDS_BETWEEN_CLONES)
        world.appliance.clone(snapshot_id, f"clone-{number}.img")
    world.guest("writers_stop")
    records = int(world.guest("records_last /m/phase-b/records"))
    last = _acknowledged(world)
    require(records >= last, f"the disk itself has {records} records of {last}")
    world.facts["snapshot"] = snapshot_id


@scenario("each clone mounts and shows the tree as of the snapshot; e2fsck -fn", 120)
def clones_show_the_tree(world):
    world.fact("snapshot")
    for number in CLONES:
        records = int(world.guest(f"""
            disk_mount /n/clone-{number}.img /clone-{number}
            tree_compare /clone-{number}/tree
            records_last /clone-{number}/phase-b/records"""))
        first, last = world.facts["first"], world.facts["last"]
        if not first <= records <= last:
            raise Failure(
                f"clone {number} has {records} records; {first} were durable before the "
                f"snapshot was asked for, and at most {last} begun when it was taken"
            )
        # The mount replayed the journal, as after a power cut; from there nothing may be wrong.
        world.guest(f"disk_unmount /clone-{number}; disk_check /n/clone-{number}.img")
    world.facts["clones"] = True


@scenario("what is written to one clone appears in no other, nor in the source", 120)
def clones_are_apart(world):
    world.fact("clones")
    for number in CLONES:
        world.guest(f"disk_mount /n/clone-{number}.img /clone-{number}")
    # All three are written while all are mounted: new files, and other bytes in the same blocks
    # of the same old file.
    for number in CLONES:
        world.guest(f"""
            mkdir /clone-{number}/own
            echo {number} >/clone-{number}/own/only-in-{number}
            pool {number * 100003} 500000 >/clone-{number}/own/data
            cp /clone-{number}/tree/directory-7/large /run/large
            pool {number * 7919} 200000 | dd of=/clone-{number}/tree/directory-7/large \
                conv=notrunc,fsync bs=64K iflag=fullblock status=none
            sync""")
    world.guest("echo source >/m/only-in-source; sync")
    # Unmounted and read from the server again, each has its own bytes and nobody else's.
    for number in CLONES:
        world.guest(f"disk_unmount /clone-{number}; disk_check /n/clone-{number}.img")
    for number in CLONES:
        world.guest(f"""
            disk_mount /n/clone-{number}.img /clone-{number}
            cd /clone-{number}
            is "files of clone {number}" "$(ls own | tr '\\n' ' ')" "data only-in-{number} "
            is "the tree's neighbours" "$(ls | tr '\\n' ' ')" "lost+found own phase-b tree "
            pool {number * 100003} 500000 | cmp - own/data
            pool {number * 7919} 200000 | cmp -n 200000 - tree/directory-7/large
            # What was overwritten is put back; then the whole tree must be the old one again.
            cat /run/large >tree/directory-7/large
            tree_print tree | grep -v '^./directory-7/large ' >/run/tree.actual
            grep -v '^./directory-7/large ' /run/tree.expected | cmp - /run/tree.actual
            cd /
            disk_unmount /clone-{number}""")
    world.guest("""
        tree_compare /m/tree
        is "files of the source" "$(ls /m | tr '\\n' ' ')" "lost+found only-in-source phase-b tree "
        disk_unmount /m
        disk_check /n/disk.img
        disk_mount /n/disk.img /m
        tree_compare /m/tree
        disk_unmount /m""")
    world.facts["source unmounted"] = True


@scenario("a snapshot mounts read-only from the unlisted .snapshot directory", 90)
def snapshot_read_only(world):
    world.fact("source unmounted")
    # Cleanly unmounted: with noload nothing replays a journal, and nothing needs it.
    snapshot_id = world.appliance.snapshot("disk.img")
    world.guest(f"""
        disk_mount /n/disk.img /m
        rm -r /m/tree/directory-0
        disk_unmount /m
        [ -z "$(ls -a /n | grep -x .snapshot)" ] || fail ".snapshot is listed in the export"
        is "size by the export's own mount" "$(stat -c %s /n/.snapshot/{snapshot_id})" {DISK_BYTES}
        export_mount /snapshots ro /.snapshot
        is "entries of .snapshot" "$(ls -A /snapshots)" ""
        is "size of the snapshot" "$(stat -c %s /snapshots/{snapshot_id})" {DISK_BYTES}
        device=$(losetup -f)
        losetup -r "$device" /snapshots/{snapshot_id}
        mkdir -p /old
        mount -t ext4 -o ro,noload "$device" /old
        tree_compare /old/tree
        disk_unmount /old
        umount /snapshots""")
    # The server itself refuses changes, whatever the client's mount options say.
    world.guest(f"""
        export_mount /snapshots rw /.snapshot
        # ACCESS offers no writing, so the client does not even try (RFC 1813 section 3.3.4).
        refused 'denied' dd if=/pool of=/snapshots/{snapshot_id} bs=4096 count=1 conv=notrunc
        refused 'ead-only' touch /snapshots/new
        refused 'ead-only' rm /snapshots/{snapshot_id}
        umount /snapshots
        if mkdir /n/.snapshot 2>/dev/null; then fail "a directory .snapshot could be made"; fi""")
    world.facts["second snapshot"] = snapshot_id
