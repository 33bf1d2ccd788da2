"""Snapshots by hand, through `ctr snapshots`: what containerd's own conformance suite asks."""

import contextlib
import os
import pathlib
import re
import shutil
import stat

from process import attempt, run
from releases import LONG_SUPPORTED, NEWER_FOR_ALL
from scenario import require, require_equal, scenario, wait_until

LAYERS = 128
# overlayfs' options for more do not fit where mount(8) puts them.
STAND_IN_LAYERS = 20
# One layer of these at the time, so that the rename crosses layers.
RENAME_EVERY = 16
USAGE_LIMIT_SECONDS = 30


@contextlib.contextmanager
def mounted(world, containerd, key):
    """The snapshot's mounts, made as containerd would make them."""
    target = world.scratch / "mounted"
    target.mkdir(exist_ok=True)
    # Lines such as: mount -t bind /source /target -o rbind,rw
    for line in containerd.snapshots("mounts", str(target), key).strip().splitlines():
        words = re.match(r"mount -t (\S+) (\S+) (\S+)(?: -o (\S+))?", line)
        require(words, f"not a mount: {line}")
        kind, source, _, options = words.groups()
        flags = (options or "").split(",")
        if kind == "bind":
            run("mount", "--rbind", source, target)
            if "ro" in flags:
                run("mount", "-o", "remount,bind,ro", target)
        else:
            run("mount", "-t", kind, "-o", options, source, target)
    try:
        yield target
    finally:
        run("umount", "--recursive", target)


def layer(world, containerd, index, parent):
    """Prepares, writes and commits one layer; its name."""
    key, name = f"active-{index}", f"layer-{index}"
    containerd.snapshots("prepare", key, *([parent] if parent else []))
    with mounted(world, containerd, key) as root:
        if parent is None:
            require_equal("a new disk", os.listdir(root), [])
            (root / "moving-0").mkdir()
            (root / "moving-0" / "inside").write_text("inside")
            os.chmod(root, 0o751)
        else:
            # overlayfs gives each upper directory a mode of its own.
            if not world.stand_in:
                require_equal("mode of the root", stat.S_IMODE(os.stat(root).st_mode), 0o751)
            above = index // RENAME_EVERY
            if index % RENAME_EVERY == 0:
                # overlayfs refuses a rename across layers, and programs copy then.
                rename = shutil.move if world.stand_in else os.rename
                rename(root / f"moving-{above - 1}", root / f"moving-{above}")
            moved = (root / f"moving-{above}" / "inside").read_text()
            require_equal("moved content", moved, "inside")
            if index > 1:
                (root / f"file-{index - 2}").unlink()
        (root / f"file-{index}").write_text(f"layer {index}")
    containerd.snapshots("commit", name, key)
    return name


@scenario(f"containerd: a chain of {LAYERS} snapshots, each mounted, written, committed", 600,
          stand_in=True, also=(LONG_SUPPORTED,))
def chain(world):
    containerd = world.worker("a").containerd
    name, count = None, STAND_IN_LAYERS if world.stand_in else LAYERS
    for index in range(count):
        name = layer(world, containerd, index, name)
    containerd.view("all", name)
    with mounted(world, containerd, "all") as root:
        moved = f"moving-{(count - 1) // RENAME_EVERY}"
        expected = {f"file-{count - 1}", f"file-{count - 2}", moved}
        require_equal("the last layer's root", set(os.listdir(root)), expected)
        refused = attempt(["touch", root / "new"]).must_fail()
        require("Read-only file system" in refused, f"writing a view: {refused}")
    middle = containerd.attempt("snapshots", "--snapshotter", containerd.snapshotter, "remove",
                                f"layer-{count // 2}").must_fail()
    require("child" in middle or "failed precondition" in middle, f"removal in the middle: {middle}")
    containerd.snapshots("remove", "all")
    for index in reversed(range(count)):
        containerd.snapshots("remove", f"layer-{index}")
    left = [line for line in containerd.snapshots("list").splitlines() if "layer-" in line]
    require(not left, f"left after removal: {left}")


@scenario("containerd: views, usage, and what is refused", 120, stand_in=True, also=(NEWER_FOR_ALL, LONG_SUPPORTED))
def rules(world):
    containerd = world.worker("a").containerd
    containerd.snapshots("prepare", "first")
    with mounted(world, containerd, "first") as root:
        pathlib.Path(root, "data").write_bytes(os.urandom(1 << 20))
        run("sync", "--file-system", root)
    # The driver answers "unavailable" rather than late while the appliance is busy, here with the removal of the chain.
    said = wait_until("the usage is known", USAGE_LIMIT_SECONDS, lambda: containerd.attempt(
        "snapshots", "--snapshotter", containerd.snapshotter, "usage", "-b", "first").output)
    usage = said.splitlines()[-1].split()
    require(1 << 20 <= int(usage[1]) <= 4 << 20, f"usage of 1 MiB: {usage}")
    containerd.snapshots("commit", "base", "first")
    for what, words in {
        "a taken name": ("prepare", "base"),
        "a missing parent": ("prepare", "second", "nobody"),
        "mounts of a committed one": ("mounts", "/nowhere", "base"),
        "commit of a missing one": ("commit", "other", "nobody"),
        "removal of a missing one": ("remove", "nobody"),
    }.items():
        said = containerd.attempt("snapshots", "--snapshotter", containerd.snapshotter, *words)
        require(said.code != 0, f"{what} is not refused")
    containerd.view("view", "base")
    said = containerd.attempt("snapshots", "--snapshotter", containerd.snapshotter, "commit",
                              "other", "view").must_fail()
    require("not" in said and "active" in said, f"commit of a view: {said}")
    containerd.snapshots("remove", "view")
    containerd.snapshots("remove", "base")
