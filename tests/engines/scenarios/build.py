"""docker build, with both builders: the image holds what overlay2's build of it holds, also where overlay2 pulls it."""

import io
import os
import tarfile
import time

import tree
from releases import NEWER_FOR_ALL
from scenario import require, scenario

# Times that a build sets lie before this; those that its clock makes, after it.
PAST_SECONDS = 3600
# VFS_CAP_REVISION_2, effective, with cap_net_raw: what `setcap cap_net_raw+ep` writes.
CAPABILITY = "0100000200200000000000000000000000000000"
LONG_NAME = "long-" + "n" * 180

STEPS = [
    # 1: things to be changed later.
    "RUN mkdir -p /data/keep /data/gone /data/opaque /data/swap && echo one >/data/keep/one && "
    "echo same >/data/keep/other && "
    "echo two >/data/gone/two && echo three >/data/opaque/three && echo s >/data/swap/s && "
    "echo file >/data/turn && touch -d '2001-02-03 04:05:06' /data/keep/one",
    # 2: owners, modes, a capability, a long name, from the context.
    "COPY --chown=1000:2000 tree/ /copied/",
    "RUN chmod 4755 /copied/program && chown -R 7:8 /data/keep && chmod 1777 /data/opaque",
    # 4: links of all kinds, pipe, device.
    "RUN ln /data/keep/one /data/keep/link && ln -s ../keep/one /data/symlink && "
    "ln -s /nowhere /data/dangling && mkfifo -m 640 /data/pipe && mknod -m 622 /data/device c 1 3",
    # 5: an archive that is unpacked, with times and owners of its own.
    "ADD archive.tar /added/",
    # 6: whiteouts: of files, of a directory, and an opaque directory.
    "RUN rm -rf /data/gone /data/opaque /copied/removed && mkdir /data/opaque && "
    "echo new >/data/opaque/new",
    # 7: a file where a directory was and the other way round.
    "RUN rm -r /data/swap && echo now >/data/swap && rm /data/turn && mkdir /data/turn && "
    "echo in >/data/turn/in",
    # 8: a directory moves across layers, and a file is linked across them.
    "RUN mv /data/keep /data/moved && ln /added/plain /data/hard && "
    "touch -h -d '2002-03-04 05:06:07' /data/symlink",
    # 9: changes of content that keep the size, or size and time, and a sparse file.
    "RUN printf 'EMAS\\n' >/data/moved/other && dd if=/dev/zero of=/data/sparse bs=1 count=1 "
    "seek=20000000 2>/dev/null && chmod 751 / && "
    "touch -d '2003-04-05 06:07:08' /data/moved/other /data/moved && cp -p /copied/sub/deep /deep && "
    "tr a-z A-Z </deep >/copied/sub/deep && touch -r /deep /copied/sub/deep && rm /deep",
    # 10
    "RUN rm /copied/" + LONG_NAME + " && echo again >/copied/" + LONG_NAME +
    " && mkdir -m 2770 /last",
]


def archive():
    """A tar with what ADD has to keep."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind, mode, data in (
            ("inner", tarfile.DIRTYPE, 0o2750, b""),
            ("inner/file", tarfile.REGTYPE, 0o604, b"inner\n"),
            ("plain", tarfile.REGTYPE, 0o644, b"plain\n"),
            ("caf\u00e9", tarfile.REGTYPE, 0o600, b"name\n"),
        ):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode, entry.size = kind, mode, len(data)
            entry.uid, entry.gid, entry.mtime = 123456, 65534, 1_000_000_007
            if name == "plain":
                entry.pax_headers["SCHILY.xattr.security.capability"] = bytes.fromhex(
                    CAPABILITY
                ).decode()
            tar.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def context(world, base):
    """The build's directory."""
    directory = world.scratch / "contexts" / "ten-steps"
    if not directory.exists():
        (directory / "tree" / "sub").mkdir(parents=True)
        (directory / "archive.tar").write_bytes(archive())
        for name in ("program", "removed", LONG_NAME, "sub/deep"):
            (directory / "tree" / name).write_bytes(name.encode() * 100)
            os.utime(directory / "tree" / name, (1_100_000_000, 1_100_000_000))
    (directory / "Dockerfile").write_text("\n".join([f"FROM {base}", *STEPS, "WORKDIR /last", ""]))
    return directory


def built(world, docker, buildkit):
    """Builds, runs, and describes the root of a container of the image."""
    base = world.images.busybox()
    docker("pull", base)
    docker.build(context(world, base), "ten:1", buildkit)
    return described(docker, "ten:1")


def described(docker, image):
    """The root of a container of an image."""
    container = docker.run_detached(image, "sleep", "1000")
    entries = tree.manifest(docker.root(container), time.time() - PAST_SECONDS)
    docker("rm", "--force", container)
    return entries


def expected_of(world, buildkit, is_overlay):
    """What overlay2's build holds; where `is_overlay`, what BuildKit makes of it on containerd's overlays."""
    expected = built(world, world.plain, buildkit)
    world.plain("image", "rm", "ten:1")
    if is_overlay and buildkit:
        # BuildKit leaves out of the layer of an overlay what was copied up and is as before (containerd does so with its
        # own overlayfs): the file that step 8 links.
        for name in list(expected["added/plain"]["same as"]):
            del expected[name]["same as"]
            expected[name]["links"] = 1
    return expected


def compare(world, docker, buildkit, tag, is_overlay=False):
    """The same build on a worker's Docker and on overlay2; it is pushed by that tag."""
    expected = expected_of(world, buildkit, is_overlay)
    got = built(world, docker, buildkit)
    require(CAPABILITY in expected["added/plain"]["attributes"].values(), "the capability is lost")
    require("data/gone" not in expected and "data/opaque/new" in expected, "the steps did not work")
    tree.require_same(got, expected, f"the worker's build, BuildKit {buildkit}", "overlay2's")
    name = world.registry.name(f"ten-{'buildkit' if buildkit else 'legacy'}:{tag}")
    docker("tag", "ten:1", name)
    docker("push", name)
    return f"{len(got)} entries"


@scenario("docker build: 10 steps, legacy builder, equal to overlay2's", 400, stand_in=True)
def legacy(world):
    return compare(world, world.worker("a").docker, buildkit=False, tag="1")


@scenario("docker build: 10 steps, BuildKit, equal to overlay2's", 400, stand_in=True)
def buildkit(world):
    return compare(world, world.worker("a").docker, buildkit=True, tag="1")


@scenario("docker build: pushed as ordinary layers, which overlay2 pulls and runs", 500, also=(NEWER_FOR_ALL,))
def ordinary(world):
    notes = []
    # What Docker 29 builds is ordinary in any case.
    is_overlay = world.release.has_docker
    arguments = ("--layers", "images") if is_overlay else ("--push", "ordinary")
    with world.fresh_worker("ordinary", arguments=arguments) as worker:
        for buildkit in (False, True):
            expected = expected_of(world, buildkit, is_overlay)
            built(world, worker.docker, buildkit)
            name = world.registry.name(f"ten-ordinary-{int(buildkit)}:1")
            worker.docker("tag", "ten:1", name)
            worker.docker("push", name)
            # Once more: a build's layers are the same bytes each time.
            worker.docker("save", "--output", str(world.scratch / "ten-ordinary.tar"), name)
            world.plain("pull", name)
            got = described(world.plain, name)
            world.plain("image", "rm", name)
            tree.require_same(got, expected, "the worker's build, pulled by overlay2", "overlay2's own")
            notes.append(f"{len(got)} entries")
            worker.docker("image", "rm", "ten:1", name)
    return ", ".join(notes)
