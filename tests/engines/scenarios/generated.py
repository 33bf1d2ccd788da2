"""Generated images: the driver, where layers are images, and containerd for overlayfs make the same trees of them.

```
seed --> tars of layers --> one archive of all images --ctr images import--> snapshots of the driver --view--> trees
                                                      --ctr images import--> snapshots of overlayfs  --view--> trees
```

What containerd refuses, or does by accident, is not generated. It unpacks into the upper directory, and does not see
what is below (containerd 2.4, `pkg/archive/tar.go`):

- a hard link to a file of a lower layer: it looks for that in this layer alone. As in layers that engines make, this
  layer has the file once more;
- sparse members of GNU's tar, whose type it does not know: the zeros are in the archive;
- in one layer an entry and then its whiteout, or two whiteouts of one name;
- a whiteout or a file, and then a directory of that name, where a directory is below: it merges the two;
- a path through a symbolic link, or through what a layer below has as a file or a whiteout, unless this layer lists a
  directory there;
- a whiteout in a directory that no layer below has: overlayfs lists the name;
- an opaque root, which overlayfs does not look at;
- a directory that no member lists, where a directory is below that is hidden: it gets the attributes of that;
- a directory's second entry without extended attributes that it has by the first, or from below: it keeps them.
"""

import dataclasses
import io
import json
import os
import platform
import random
import tarfile

from newer import MACHINES
from releases import NEWER_AS_PRINTED
from scenario import require_equal, scenario
from scenarios.hostile import CONFIGURATION_TYPE, LAYER_TYPE, MANIFEST_TYPE, chain_id, digest
from scenarios.layers import IMAGES, image_mounts, require_none_left, seen
from tree import require_same

COUNT = 50
SEED = os.environ.get("SLACKWATER_ENGINES_SEED", str(random.SystemRandom().randrange(1 << 32)))
# How many layers an image has, and how often.
LAYERS = {2: 35, 3: 30, 4: 20, 5: 15}
FIRST_CHANGES, CHANGES = (14, 24), (8, 18)
DEPTH_MAX = 5

FILE, DIRECTORY, SYMLINK, FIFO = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE
CHARACTER, BLOCK = tarfile.CHRTYPE, tarfile.BLKTYPE
# No member has it: what a whiteout leaves in an upper directory.
WHITEOUT = b"whiteout"
KINDS = {FILE: 50, DIRECTORY: 28, SYMLINK: 10, FIFO: 4, CHARACTER: 4, BLOCK: 4}

NAMES = (
    "a", "b", "c", "d", "e", "f", ".hidden", "wh.name", "two words", " space ", "-option", "back\\slash", "quote'\"",
    "a:b,c=d", "%41", "na\u00efve", "\u65e5\u672c\u8a9e", "\U0001f980", "long-" + "n" * 120, "longest-" + "n" * 242,
    "\u00fc" * 60,
)
DIRECTORY_MODES = (0o755, 0o755, 0o700, 0o1777, 0o2775, 0o2750, 0o3711, 0o4755, 0, 0o7777)
MODES = (0o644, 0o644, 0o600, 0o755, 0o4755, 0o2755, 0o6711, 0o1644, 0, 0o7777)
OWNERS = (0, 0, 1, 1000, 65534, 65535, 65536, 100_000, 2_097_151, 2_097_152, 3_000_000_000, (1 << 32) - 2)
# Seconds since 1970. containerd takes those before, and those from the year 2262 on, as 1970.
TIMES = (
    "0", "1", "1000000000", "0.5", "1000000000.123456789", "1700000000.000000001", "1999999999.999999999",
    # Beyond what 32 bits hold, and what a tar's field holds.
    "2147483648", "4102444800.25", "8589934592", "9000000000.987654321",
    # Out of those bounds.
    "-1", "-1.5", "-86400.000000001", "-2208988800", "10000000000",
)
CAPABILITY = b"\x01\0\0\x02\0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0"
# containerd leaves out what begins with `trusted.`.
ATTRIBUTES = ("user.note", "user.a.b", "user.na\u00efve", "user." + "n" * 200, "trusted.note")
VALUES = (b"", b"value", b"a=b\n7 c=d\n", b"\0\xff\xfe\n", b"v" * 500)
DEVICES = ((1, 3), (8, 300), (259, 70_000), (4095, 1))


@dataclasses.dataclass
class Inode:
    """What a member says of its file."""

    kind: bytes
    mode: int = 0o755
    owner: int = 0
    group: int = 0
    time: str = "0"
    attributes: dict[str, bytes] = dataclasses.field(default_factory=dict)
    content: bytes = b""
    target: str = ""
    device: tuple[int, int] = (0, 0)
    # A directory that no member lists has the time of its unpacking.
    is_listed: bool = True

    def member(self, name, link=None):
        """The header of a member, which is a hard link to another name of this inode, if that is given."""
        info = tarfile.TarInfo(name)
        info.type, info.linkname = (self.kind, self.target) if link is None else (tarfile.LNKTYPE, link)
        info.mode, info.uid, info.gid = self.mode, self.owner, self.group
        info.devmajor, info.devminor = self.device
        info.pax_headers = {
            f"SCHILY.xattr.{key}": value.decode("utf-8", "surrogateescape") for key, value in self.attributes.items()
        }
        if self.time.isdigit():
            info.mtime = int(self.time)
        else:
            info.pax_headers["mtime"] = self.time
        content = self.content if link is None else b""
        info.size = len(content)
        return info, content


def content_of(chance):
    """The content of a file: nothing, little, some blocks, zeros between."""
    size = chance.choices((0, 1, 2, 3, 4), (4, 14, 4, 1, 1))[0]
    if size <= 1:
        return chance.randbytes(size * chance.randrange(600))
    if size == 2:
        return chance.randbytes(chance.choice((4095, 4096, 4097, chance.randrange(16_000))))
    zeros = bytes(chance.randrange(4096, 25 * 4096))
    if size == 3:
        return zeros
    return chance.randbytes(chance.randrange(1, 9000)) + zeros + chance.randbytes(chance.randrange(9000))


def inode_of(chance, kind):
    """A file of this kind."""
    inode = Inode(kind, chance.choice(DIRECTORY_MODES if kind == DIRECTORY else MODES), chance.choice(OWNERS),
                  chance.choice(OWNERS), chance.choice(TIMES))
    if kind == FILE:
        inode.content = content_of(chance)
    elif kind == SYMLINK:
        inode.mode = 0o777
        inode.target = chance.choice((
            "/a/b", "a", "../b", "../../../..", "dangling/\u65e5", "/", "./c", "two words", "t" * 99, "t/" * 200,
        ))
    elif kind in (CHARACTER, BLOCK):
        inode.device = chance.choice(DEVICES)
    if chance.random() < 0.25:
        for name in chance.sample(ATTRIBUTES, chance.randint(1, 3)):
            inode.attributes[name] = chance.choice(VALUES)
    if kind == FILE and chance.random() < 0.1:
        inode.attributes["security.capability"] = CAPABILITY
    return inode


def above(path):
    """The directories on the way to a path, without the root."""
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def merged(layers):
    """What layers are together: inodes by path."""
    tree = {}
    for layer in layers:
        tree = {path: inode for path, inode in tree.items() if not layer.hides(path)}
        tree |= {path: inode for path, inode in layer.inodes.items() if inode.kind != WHITEOUT}
    return tree


class Layer:
    """A layer that is being made: its members, and the upper directory that containerd makes of them."""

    def __init__(self, chance, below):
        self.members = []
        self.inodes = {}
        self.opaque = set()
        self._chance = chance
        self._below = below
        self._tree_below = merged(below)
        self._prefix = chance.choice(("", "./", "/"))
        # What comes last, as functions.
        self._late = []

    def hides(self, path):
        """Whether what is below at this path is not seen."""
        own = self.inodes.get(path)
        return (own is not None and own.kind != DIRECTORY) or self._hides_below(path)

    def _hides_below(self, path):
        """Whether a directory above this path hides what is below."""
        return any(
            parent in self.opaque or (parent in self.inodes and self.inodes[parent].kind != DIRECTORY)
            for parent in above(path)
        )

    def _seen_below(self, path):
        """What the layers below show at this path; nothing if this layer hides it."""
        return None if self._hides_below(path) else self._tree_below.get(path)

    def _is_directory_below(self, path):
        inode = self._seen_below(path)
        return inode is not None and inode.kind == DIRECTORY

    def paths(self):
        """All paths that are there now, with what is there."""
        found = {path: inode for path, inode in self._tree_below.items() if not self.hides(path)}
        found |= {path: inode for path, inode in self.inodes.items() if inode.kind != WHITEOUT}
        return dict(sorted(found.items()))

    def _directories(self):
        return ["", *(path for path, inode in self.paths().items() if inode.kind == DIRECTORY)]

    def _can_imply(self, path):
        """Whether a member may use this directory without any that lists it."""
        if path in self.inodes:
            return self.inodes[path].kind == DIRECTORY
        is_hidden = any(parent in self.opaque for parent in above(path))
        for layer in reversed(self._below):
            own = [layer.inodes.get(parent) for parent in above(path)]
            if any(inode is not None and inode.kind != DIRECTORY for inode in own):
                return False
            if path in layer.inodes:
                kind = layer.inodes[path].kind
                return kind == WHITEOUT or (kind == DIRECTORY and not is_hidden)
            is_hidden |= any(parent in layer.opaque for parent in above(path))
        return True

    def _can_reach(self, path):
        return all(self._can_imply(parent) for parent in above(path))

    def _can_add(self, path, kind):
        if not self._can_reach(path):
            return False
        own = self.inodes.get(path)
        if own is None:
            return True
        if own.kind == DIRECTORY:
            return kind == DIRECTORY
        return kind != DIRECTORY or not self._is_directory_below(path)

    def _imply(self, path):
        """Makes a directory that no member lists, unless there is one: it has the attributes of that below."""
        if path not in self.inodes:
            below = self._seen_below(path)
            attributes = dict(below.attributes) if below else {}
            self.inodes[path] = Inode(DIRECTORY, attributes=attributes, is_listed=False)

    def _reach(self, path):
        for parent in above(path):
            self._imply(parent)

    def _write(self, path, inode, link=None):
        link = None if link is None else self._prefix + link
        self.members.append(inode.member(self._prefix + path, link))

    def _add(self, path, inode):
        self._reach(path)
        own = self.inodes.get(path)
        if own is not None and own.kind == DIRECTORY:
            inode.attributes = own.attributes | inode.attributes
        self._write(path, inode)
        self.inodes[path] = inode

    def add(self):
        """An entry at any place, also at one that is taken; directories between may be missing, or come later."""
        path = self._chance.choice(self._directories())
        while self._chance.random() < 0.2:
            path = f"{path}/{self._chance.choice(NAMES)}"
        self._add_any(f"{path}/{self._chance.choice(NAMES)}".lstrip("/"))

    def add_again(self):
        """An entry in the place of another one: of the same kind, or another."""
        paths = list(self.paths())
        if paths:
            self._add_any(self._chance.choice(paths))

    def _add_any(self, path):
        kind = self._chance.choices(list(KINDS), list(KINDS.values()))[0]
        if path.count("/") >= DEPTH_MAX or not self._can_add(path, kind):
            return
        inode = inode_of(self._chance, kind)
        if kind == DIRECTORY and self._chance.random() < 0.4 and self._can_imply(path):
            self._reach(path)
            self._imply(path)
            self._late.append(lambda: self._add(path, inode))
        else:
            self._add(path, inode)

    def list_again(self):
        """A directory that is there, with other attributes."""
        path = self._chance.choice(self._directories())
        if path and self._can_add(path, DIRECTORY):
            self._add(path, inode_of(self._chance, DIRECTORY))

    def link(self):
        """Another name of a file of this layer; of a lower one, which is then listed once more."""
        files = [path for path, inode in self.paths().items() if inode.kind != DIRECTORY]
        directory = self._chance.choice(self._directories())
        name = f"{directory}/{self._chance.choice(NAMES)}".lstrip("/")
        if not files or name.count("/") >= DEPTH_MAX:
            return
        target = self._chance.choice(files)
        if name in (target, *above(target)) or not self._can_add(target, FILE) or not self._can_add(name, FILE):
            return
        if target not in self.inodes:
            self._add(target, dataclasses.replace(self.paths()[target]))
        self._reach(name)
        self._write(name, self.inodes[target], target)
        self.inodes[name] = self.inodes[target]

    def _can_white_out(self, path):
        if path in self.inodes or not self._can_reach(path):
            return False
        parent = path.rpartition("/")[0]
        is_merged = not parent or (parent not in self.opaque and self._is_directory_below(parent))
        return is_merged or not self._below

    def _white_out(self, path):
        self._reach(path)
        parent, _, name = path.rpartition("/")
        self._write(f"{parent}/.wh.{name}".lstrip("/"), Inode(FILE, 0o600))
        # A first layer is not unpacked above anything, and keeps no mark.
        if self._below:
            self.inodes[path] = Inode(WHITEOUT)

    def white_out(self):
        """The end of what is below, or of what is not there."""
        name = f"{self._chance.choice(self._directories())}/{self._chance.choice(NAMES)}".lstrip("/")
        path = self._chance.choice([*self.paths(), name])
        if self._can_white_out(path):
            self._white_out(path)

    def replace(self):
        """A whiteout, and a new entry of the same name."""
        path = self._chance.choice([*self.paths(), self._chance.choice(NAMES)])
        kind = self._chance.choice(list(KINDS))
        if self._can_white_out(path) and (kind != DIRECTORY or not self._is_directory_below(path)):
            self._white_out(path)
            self._add(path, inode_of(self._chance, kind))

    def make_opaque(self):
        """A directory that shows nothing of what is below; its mark comes before or after what it has then."""
        path = self._chance.choice(self._directories())
        if not path or path in self.opaque or not self._can_reach(path) or not self._can_imply(path):
            return
        if any(other.startswith(f"{path}/") for other in self.inodes):
            return
        self._reach(path)
        self._imply(path)
        self.opaque.add(path)

        def mark():
            self._write(f"{path}/.wh..wh..opq", Inode(FILE, 0o600))
        # In a first layer containerd would remove the directories that no member lists.
        if self._below and self._chance.random() < 0.5:
            self._late.append(mark)
        else:
            mark()

    def fill(self):
        """Makes all changes."""
        chance = self._chance
        actions = {self.add: 10, self.list_again: 2, self.link: 2, self.make_opaque: 1, self.white_out: 1}
        if self._below:
            actions |= {self.add_again: 5, self.white_out: 4, self.replace: 2}
        if chance.random() < 0.5:
            # What is said of the root itself counts for nothing.
            self.members.append(inode_of(chance, DIRECTORY).member("./"))
        for _ in range(chance.randint(*(CHANGES if self._below else FIRST_CHANGES))):
            chance.choices(list(actions), list(actions.values()))[0]()
        chance.shuffle(self._late)
        for action in self._late:
            action()

    def tar(self):
        """The archive of the layer."""
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8") as tar:
            for info, content in self.members:
                tar.addfile(info, io.BytesIO(content))
        return out.getvalue()


class Image:
    """One image, made of the seed and its number."""

    def __init__(self, number):
        chance = random.Random(f"{SEED} {number}")
        self.number = number
        self.name = f"generated.test/image:{number}"
        layers = []
        for _ in range(chance.choices(list(LAYERS), list(LAYERS.values()))[0]):
            layers.append(Layer(chance, list(layers)))
            layers[-1].fill()
        self.tree = merged(layers)
        self.layers = [layer.tar() for layer in layers]

    def without_times_of_unpacking(self, found):
        """A tree without the times of directories that the last layer which has them does not list."""
        for path, inode in self.tree.items():
            if not inode.is_listed:
                found.get(path, {}).pop("modified", None)
        return found


def write_archive(images, path):
    """All images as one archive (OCI image layout)."""
    machine = {"architecture": MACHINES[platform.machine()], "os": "linux"}
    blobs, manifests = {}, []

    def blob(kind, data):
        blobs[digest(data)] = data
        return {"mediaType": kind, "digest": digest(data), "size": len(data)}

    for image in images:
        root = {"type": "layers", "diff_ids": [digest(layer) for layer in image.layers]}
        configuration = json.dumps({**machine, "config": {}, "rootfs": root}).encode()
        manifest = json.dumps({
            "schemaVersion": 2, "mediaType": MANIFEST_TYPE, "config": blob(CONFIGURATION_TYPE, configuration),
            "layers": [blob(LAYER_TYPE, layer) for layer in image.layers],
        }).encode()
        named = {"io.containerd.image.name": image.name}
        manifests.append({**blob(MANIFEST_TYPE, manifest), "platform": machine, "annotations": named})
    files = {
        "oci-layout": b'{"imageLayoutVersion":"1.0.0"}',
        "index.json": json.dumps({"schemaVersion": 2, "manifests": manifests}).encode(),
        **{f"blobs/{name.replace(':', '/')}": data for name, data in blobs.items()},
    }
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


@scenario(f"layers: {COUNT} generated images by containerd 2.4 are overlayfs' trees", 300, newer=True)
def generated(world):
    print(f"(seed {SEED}) ", end="", flush=True)
    images = [Image(number) for number in range(COUNT)]
    archive = world.scratch / "generated.tar"
    write_archive(images, archive)
    server = world.server("generated-appliance")
    with world.fresh_worker("generated", server, release=NEWER_AS_PRINTED, arguments=IMAGES) as worker:
        containerd, driver = worker.containerd, worker.driver
        # `--local` unpacks by the diff service, which serves all snapshotters.
        words = ("images", "import", "--local", "--snapshotter")
        containerd.ctr(*words, containerd.snapshotter, archive)
        layers = sum(len(image.layers) for image in images)
        require_equal("layers that the driver unpacked", driver.calls("Apply"), layers)
        containerd.ctr(*words, "overlayfs", archive)
        archive.unlink()
        for image in images:
            title, chain = f"image {image.number} of seed {SEED}", chain_id(image.layers)
            expected, got = (
                image.without_times_of_unpacking(seen(world, containerd, snapshotter, chain))
                for snapshotter in ("overlayfs", containerd.snapshotter)
            )
            # Else the generator is wrong.
            names = sorted(expected.keys() ^ image.tree.keys() ^ {""})
            require_equal(f"{title}: names that it has by overlayfs, or should have", names, [])
            require_same(got, expected, title, "overlayfs' one")
        require_equal("file systems", set(image_mounts(driver).values()), {"erofs"})
        require_none_left(driver)
    return f"seed {SEED}, {layers} layers"
