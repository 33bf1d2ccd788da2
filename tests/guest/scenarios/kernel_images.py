"""Images that the driver mounts from their files, by Debian 13's kernel, in a guest of its own.

    /run/image                     erofs: the kernel opens images/tree.erofs itself, no loop device is between
    /run/attach/attach/export      the kernel's NFS client, or FUSE and slackwater-driver --> appliance

Linux does so since 6.12; the kernel of the first guest is older. The worker keeps no blocks (`--cache-size 0`), so
that what is read past the page cache comes from the appliance.
"""

import contextlib
import hashlib
import os
import pathlib
import re
import subprocess

import trixie
from appliance import file_route
from scenario import require, scenario

# The image on the appliance, and in the guest: where it is attached, and the export that it is in.
IMAGE = "images/tree.erofs"
TARGET = "/run/image"
EXPORT = "/run/attach/attach/export"
# How disks are attached, and the type of the export's mount then.
METHODS = {"nfs": "nfs", "fuse": "fuse.slackwater"}
# What the process says that serves the export over FUSE.
SERVER_LOG = "/run/attach/attach/serve-export.log"

LINK_TO = "folder/odd"
# Prints all that is in the image: directories, the sum of each file, the link.
READ = f"""
    cd {TARGET}
    find . -type d | sort
    find . -type f | sort | xargs sha256sum
    echo "link to $(readlink link)"
"""


def _write_tree(tree, pool):
    """Writes what the image is made of; returns what READ has to print."""
    files = {
        "empty": b"",
        "small": b"hello\n",
        # Odd lengths: the last block is a partial one.
        LINK_TO: pool[:70_001],
        "folder/deeper/large": pool[1:],
    }
    directories = ["folder", "folder/deeper", "nothing"]
    for name in directories:
        (tree / name).mkdir(parents=True)
    for name, data in files.items():
        (tree / name).write_bytes(data)
    (tree / "link").symlink_to(LINK_TO)
    sums = [f"{hashlib.sha256(files[name]).hexdigest()}  ./{name}" for name in sorted(files)]
    return "\n".join([".", *(f"./{name}" for name in directories), *sums, f"link to {LINK_TO}"])


def _make_image(home, pool):
    """Returns the bytes of an image, and what READ has to print of it."""
    tree, image = home / "tree", home / "image"
    content = _write_tree(tree, pool)
    command = ["mkfs.erofs", "--quiet", str(image), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    require(done.returncode == 0, f"{command}: {done.stderr}")
    return image.read_bytes(), content


class _Trial:
    """An appliance that has the image, and the guest."""

    def __init__(self, world, cleanup):
        home = world.scratch / "images"
        home.mkdir()
        data, self.content = _make_image(home, world.pool)
        self.server = world.appliance.another(home / "data")
        cleanup.callback(self.server.kill)
        self.server.start()
        self.server.call("POST", "/v1/files", {"path": IMAGE, "size_bytes": len(data)})
        self.server.request("PUT", f"{file_route(IMAGE)}/data?offset=0", data)
        self._machine = trixie.boot(world, home, [pathlib.Path(os.environ["SLACKWATER_DRIVER"])])
        cleanup.callback(self._machine.stop)
        self._machine.run(self.server.introduction())

    def guest(self, script):
        """Runs a script in the guest; a failure tells what the process that serves FUSE and the kernel said."""
        return trixie.run(self._machine, script, SERVER_LOG)

    def require_content(self, printed, when):
        """Fails unless that is what READ has to print."""
        require(printed == self.content, f"read {when}:\n{printed}\n--- expected:\n{self.content}")


def _attach(trial, method):
    """Attaches the image; it has to be mounted from its file."""
    mounts = trial.guest(f"""
        attached --attach {method} --cache-size 0 attach --type erofs --file {IMAGE} {TARGET}
        is "loop devices in use" "$(cat /sys/block/loop*/loop/backing_file 2>/dev/null)" ""
        grep -E ' ({EXPORT}|{TARGET}) ' /proc/mounts""")
    for pattern in (
        rf"^10\.0\.2\.2:\S+ {EXPORT} {re.escape(METHODS[method])} rw,",
        rf"^{re.escape(f'{EXPORT}/{IMAGE}')} {TARGET} erofs ro,",
    ):
        require(re.search(pattern, mounts, re.M), f"{method}: no mount like {pattern}:\n{mounts}")


def _read_through_a_restart(trial, method):
    """Kills the server, and begins to read while it is away."""
    trial.guest("caches_drop")
    trial.server.kill()
    trial.guest(f"""
        (
            ({READ}) >/run/printed 2>&1 || true
            touch /run/printed.whole
        ) >/dev/null 2>&1 &
        sleep 1
        [ ! -e /run/printed.whole ] || fail "read while the appliance is away: $(cat /run/printed)" """)
    trial.server.start()
    printed = trial.guest("""
        while [ ! -e /run/printed.whole ]; do sleep 0.1; done
        cat /run/printed
        rm /run/printed /run/printed.whole""")
    trial.require_content(printed, f"by {method} while the appliance was killed and started again")


def _detach(trial, method):
    """Detaches the image; nothing of it stays."""
    trial.guest(f"""
        attached --attach {method} --cache-size 0 detach {TARGET}
        is "what is left mounted" "$(grep -e /run/attach -e ' erofs ' /proc/mounts)" ""
        is "processes left" "$(ps | grep '[s]erve-export')" ""
        [ ! -e {TARGET} ] || fail "{TARGET} is left" """)


@scenario("Debian 13's kernel: images are mounted from their files, by NFS and by FUSE, through restarts", 120)
def kernel_images(world):
    with contextlib.ExitStack() as cleanup:
        trial = _Trial(world, cleanup)
        for method in METHODS:
            _attach(trial, method)
            trial.require_content(trial.guest(READ), f"by {method}")
            trial.require_content(trial.guest(f"caches_drop\n{READ}"), f"by {method} past the page cache")
            _read_through_a_restart(trial, method)
            trial.require_content(trial.guest(f"caches_drop\n{READ}"), f"by {method} after the restart")
            _detach(trial, method)
        trial.server.stop()
