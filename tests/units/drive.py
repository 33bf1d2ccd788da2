#!/usr/bin/env python3
"""Boots a Debian with systemd as its first process, and prints the verdicts of inside/checks.

    cache/guest/linux-image-.../                       the kernel, shared with tests/guest
    cache/units/debian-systemd-SUITE-ARCH-HASH.tar     Debian with systemd, made once for each list of packages
    scratch/packages/     the packages, which hold what `make install` installs
    scratch/disk.img      that Debian with the packages, a newer release of them, the checks, a container's image
    scratch/console.log   what the kernel and systemd say

    this program <--ttyS1-- checks.service: "ok NAME", "failed NAME", or a line of why

Invariants: the Debian in the cache is whole or absent (written aside, then renamed); the machine has no
network, and is killed when this program ends or its time is over.
"""

import argparse
import contextlib
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "guest"), str(HERE.parent)]

import container_image
import image
import stall
import trixie
from packaged import folder_of_run, newer, packages, run_to_its_end

SUITES = ("bookworm", trixie.RELEASE)
# systemd with what the units and the checks call, and an engine; nfs-common brings mount.nfs, kmod modprobe.
PACKAGES = (
    "systemd,systemd-sysv,libnss-systemd,dbus,nfs-common,e2fsprogs,kmod,curl,util-linux,mount,procps,"
    "libcap2-bin,ca-certificates,netbase,openssl,containerd,runc"
)
# Half of the packages' bytes, which nobody here reads.
LEFT_OUT = [
    f"--dpkgopt=path-exclude={path}" for path in
    ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/i18n/*")
]
# Ten times what a network and a machine without other work take; beyond that something hangs.
DEBIAN_LIMIT_SECONDS = 1800
# After this time without a run a Debian of other packages goes.
UNUSED_SECONDS = 14 * 86400
# Services that Debian starts by itself and no check needs.
MASKED = [
    "rpcbind.service", "rpcbind.socket", "rpc-statd.service", "nfs-client.target", "apt-daily.timer",
    "apt-daily-upgrade.timer", "e2scrub_all.timer", "e2scrub_reap.service", "dpkg-db-backup.timer",
    "fstrim.timer", "getty.target", "systemd-pstore.service", "systemd-networkd.service",
    "systemd-networkd-wait-online.service", "systemd-timesyncd.service",
]
PROGRAMS = ["slackwaterd", "slackwater", "slackwater-driver"]
DISK_BYTES = 4 << 30
MEMORY_MEBIBYTES = 2048
# What boots the machine; the rest is loaded by its own systemd and by the units.
MODULES = ["virtio_pci", "virtio_blk", "ext4"]
# Ten times what an idle machine takes; beyond that the machine hangs.
MACHINE_LIMIT_SECONDS = 2400
# What the console says once systemd runs.
SYSTEMD_BEGINS = b"systemd[1]:"
# How often the console of a machine that boots is looked at.
LOOK_SECONDS = 5
# What the machine is killed by when this program is gone, however that ended.
LEASH = ("setpriv", "--pdeathsig", "KILL", "--")

INIT = """#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t devtmpfs none /dev
mount -t proc none /proc
for module in /modules/*.ko; do
    insmod "$module" || echo "init: cannot load $module"
done
mount -t ext4 /dev/vda /disk && umount /proc && mount --move /dev /disk/dev
exec switch_root /disk /sbin/init
"""


def debian(cache, suite):
    """The cached tar of the Debian; made by mmdebstrap, once."""
    chosen = hashlib.sha256(" ".join([PACKAGES, *LEFT_OUT]).encode()).hexdigest()[:16]
    tar = cache / f"debian-systemd-{suite}-{os.uname().machine}-{chosen}.tar"
    cache.mkdir(parents=True, exist_ok=True)
    for other in cache.glob("debian-systemd-*.tar"):
        # Another clone may use it.
        if other != tar and time.time() - other.stat().st_mtime > UNUSED_SECONDS:
            other.unlink(missing_ok=True)
    if tar.exists():
        tar.touch()
    else:
        print(f"making a Debian with systemd ({suite}), once", flush=True)
        part = tar.with_suffix(f".{os.getpid()}")
        try:
            run_to_its_end(
                # By SIGTERM at first, so that it tidies up.
                ["timeout", "--kill-after=60", str(DEBIAN_LIMIT_SECONDS), "mmdebstrap", "--quiet",
                 "--variant=minbase", "--format=tar", *LEFT_OUT, f"--include={PACKAGES}", suite, part],
            )
            part.rename(tar)
        finally:
            part.unlink(missing_ok=True)
    return tar


@contextlib.contextmanager
def mounted(disk, directory):
    """The disk's file system at the directory, in the mount namespace that `run` has made: with it,
    however this program ends, the mount goes, and with the mount the loop device."""
    directory.mkdir()
    # Not by `mount -o loop`: that asks for the files of all loop devices of the machine, and waits for
    # ever if one of them is on a server that is gone.
    device = subprocess.run(
        ["losetup", "--find", "--show", disk], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()
    try:
        subprocess.run(["mount", "-t", "ext4", device, directory], check=True)
    finally:
        # One in use is detached when its last user goes.
        subprocess.run(["losetup", "--detach", device], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", directory], check=True)


def install(root, found, modules):
    """The packages, installed; a newer release of them is in /newer."""
    (root / "newer").mkdir()
    for package in found:
        newer(package, root / "newer")
        shutil.copy(package, root / "tmp")
    # Here no service is started: systemd does not run.
    names = [f"/tmp/{package.name}" for package in found]
    subprocess.run(["chroot", root, "dpkg", "--install", *names], check=True, stdout=subprocess.DEVNULL)
    shutil.copytree(modules, root / "lib/modules" / modules.name, symlinks=True)
    subprocess.run(["chroot", root, "depmod", modules.name], check=True)


def install_checks(root, wanted):
    """The checks, and that nothing else runs."""
    system = root / "etc/systemd/system"
    shutil.copytree(HERE / "inside", root / "checks")
    (root / "checks/busybox.tar").write_bytes(container_image.of_busybox(image.which("busybox")))
    (root / "checks/wanted").write_text("".join(f"{name}\n" for name in wanted))
    shutil.copy(HERE / "inside/checks.service", system)
    (system / "default.target").unlink(missing_ok=True)
    (system / "default.target").symlink_to("/lib/systemd/system/multi-user.target")
    wants = system / "multi-user.target.wants"
    wants.mkdir(exist_ok=True)
    (wants / "checks.service").symlink_to("../checks.service")
    for unit in MASKED:
        (system / unit).unlink(missing_ok=True)
        (system / unit).symlink_to("/dev/null")


def build(scratch, cache, programs, suite, wanted):
    """Makes the disk and returns (kernel, initramfs, disk)."""
    found = packages(scratch / "packages", programs)
    # That of the same Debian: it decides how disks are attached, and what a layer is.
    fetch = trixie.fetch if suite == trixie.RELEASE else image.fetch
    kernel, modules, _ = fetch(cache / "guest")
    tar = debian(cache / "units", suite)
    disk = scratch / "disk.img"
    with disk.open("wb") as file:
        file.truncate(DISK_BYTES)
    subprocess.run(["mkfs.ext4", "-q", "-F", disk], check=True)
    with mounted(disk, scratch / "disk") as root:
        subprocess.run(["tar", "-x", "-f", tar, "-C", root], check=True)
        install(root, found, modules)
        install_checks(root, wanted)
    root = scratch / "root"
    for name in ["bin", "modules", "proc", "dev", "disk"]:
        (root / name).mkdir(parents=True)
    image.install(root, image.which("busybox"), "bin/busybox")
    image.install_modules(root, modules, MODULES)
    (root / "init").write_text(INIT)
    (root / "init").chmod(0o755)
    image.pack(root, scratch / "initramfs")
    return kernel, scratch / "initramfs", disk


def boot(scratch, kernel, initramfs, disk):
    """Starts qemu; its standard output is the checks'."""
    return subprocess.Popen(
        [
            *LEASH, "qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2",
            "-m", str(MEMORY_MEBIBYTES), "-kernel", str(kernel), "-initrd", str(initramfs),
            "-append", "console=ttyS0 panic=-1 mitigations=off nokaslr no_timer_check systemd.log_color=0",
            "-no-reboot", "-nodefaults", "-no-user-config", "-display", "none", "-monitor", "none",
            "-serial", f"file:{scratch / 'console.log'}", "-serial", "stdio",
            # The disk is of no worth after the run: no sync of it has to reach the host's.
            "-drive", f"file={disk},format=raw,if=virtio,cache=unsafe",
        ],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, errors="replace",
    )


def end_if_stalled(machine, console, has_begun, is_stalled):
    """Ends a machine whose kernel stands still before it starts systemd, and says so."""
    while not has_begun.wait(LOOK_SECONDS) and machine.poll() is None:
        said = console.read_bytes() if console.exists() else b""
        # From then on it writes to its disk.
        if SYSTEMD_BEGINS in said:
            return
        if stall.is_one(said):
            is_stalled.set()
            machine.kill()


def judge(machine, has_begun):
    """Prints what the checks say; returns how many there are, passed and failed."""
    timer = threading.Timer(MACHINE_LIMIT_SECONDS, machine.kill)
    timer.daemon = True
    timer.start()
    total, passed, failed = None, 0, 0
    try:
        for line in machine.stdout:
            line = line.strip()
            print(line, flush=True)
            if match := re.fullmatch(r"checks: (\d+)", line):
                total = int(match.group(1))
                has_begun.set()
            passed += line.startswith("ok ")
            failed += line.startswith("failed ")
        machine.wait()
    finally:
        timer.cancel()
        machine.kill()
        machine.wait()
    return total, passed, failed


def run(scratch, kernel, initramfs, disk):
    """Boots the machine, again if its kernel stands still, and judges what its checks say."""
    console = scratch / "console.log"
    for number in range(1, stall.BOOTS_MAX + 1):
        console.unlink(missing_ok=True)
        has_begun, is_stalled = threading.Event(), threading.Event()
        machine = boot(scratch, kernel, initramfs, disk)
        # The last one has all its time.
        if number < stall.BOOTS_MAX:
            about = (machine, console, has_begun, is_stalled)
            threading.Thread(target=end_if_stalled, args=about, daemon=True).start()
        result = judge(machine, has_begun)
        if not is_stalled.is_set():
            break
        print(f"units: boot {number} of {stall.BOOTS_MAX}: {stall.EXPLAINED}: it boots again", flush=True)
    return result


def main():
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cache", type=pathlib.Path, required=True)
    parser.add_argument("--scratch", type=pathlib.Path, required=True)
    parser.add_argument("--programs", type=pathlib.Path, required=True)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--suite", choices=SUITES, default=SUITES[0])
    parser.add_argument("checks", nargs="*")
    options = parser.parse_args()
    for name in PROGRAMS:
        if not (options.programs / name).exists():
            sys.exit(f"units: {options.programs / name} is missing: run `make build`")
    scratch = options.scratch
    with folder_of_run("units", scratch, options.keep):
        total, passed, failed = run(
            scratch, *build(scratch, options.cache, options.programs, options.suite, options.checks)
        )
        if total is None or passed != total or failed or total == 0:
            if not failed:  # the machine itself failed
                console = (scratch / "console.log").read_text(errors="replace").splitlines()
                print("\n".join(console[-40:]))
            print(f"units: FAILED: {passed} of {total} checks passed")
            return 1
        print(f"units: {passed} of {total} checks passed")
        return 0


if __name__ == "__main__":
    sys.exit(main())
