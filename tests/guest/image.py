"""The guest's kernel and its initramfs.

    cache/PACKAGE_VERSION_amd64/      a Debian package, taken apart (dpkg-deb -x), never installed
        boot/vmlinuz-VERSION          linux-image-VERSION-cloud-amd64: ext4 is built in
        lib/modules/VERSION/...       nfs, loop and virtio are modules
    initramfs (newc cpio, not compressed: emulated code would unpack it slowly)
        init agent *.sh               from inside/
        bin/busybox                   the shell and small tools
        tools/ usr/sbin/              programs of the host whose exact behaviour is tested or needed
        modules/NN-name.ko            in the order in which they load

Invariant: a directory of the cache is complete or absent (unpacked aside, then renamed).
"""

import lzma
import pathlib
import re
import shutil
import subprocess
import tempfile

INSIDE = pathlib.Path(__file__).resolve().parent / "inside"

# The package that always depends on Debian's newest kernel for virtual machines.
KERNEL_META_PACKAGE = "linux-image-cloud-amd64"
# The kernel that is used from the cache when no package mirror answers.
KERNEL_GLOB = "linux-image-*-cloud-amd64_*"
MOUNT_PACKAGE = "nfs-common"

# What the guest loads; their dependencies are found in the modules themselves.
MODULES = ["nfs", "nfsv3", "virtio_net", "virtio_pci", "loop"]

# Real programs rather than busybox's: dd knows oflag=sync, sync knows single files, stat and du
# print block counts the way users see them.
HOST_TOOLS = ["dd", "sync", "stat", "du", "df"]

# Where they are on every machine: the driver's sandbox has no other folders.
E2FSPROGS = ["mkfs.ext4", "e2fsck", "debugfs", "resize2fs"]

# What the driver calls besides those, and what calls the driver over its Unix sockets.
DRIVER_TOOLS = ["mount", "umount", "losetup", "fsfreeze", "unshare", "curl"]

# Without the sandbox user apt complains when it may not read the caller's directory.
APT_GET = ["apt-get", "-o", "APT::Sandbox::User=root", "-qq"]

# A mirror that does not answer must not eat the time of the tests.
DOWNLOAD_LIMIT_SECONDS = 300


class ImageError(Exception):
    """The guest cannot be built on this machine; the text says why."""


def output(command, **options):
    """Runs a command and returns its standard output; its standard error becomes the exception."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if done.returncode != 0:
        raise ImageError(f"{' '.join(map(str, command))}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _unpacked(cache, package):
    """The directory in the cache that holds the package, downloaded first if it is not there."""
    with tempfile.TemporaryDirectory(dir=cache, prefix="download-") as scratch:
        output([*APT_GET, "download", package], cwd=scratch, timeout=DOWNLOAD_LIMIT_SECONDS)
        archive = next(pathlib.Path(scratch).glob("*.deb"))
        home = cache / archive.stem
        if not home.exists():
            tree = pathlib.Path(scratch) / "tree"
            output(["dpkg-deb", "-x", archive, tree])
            try:
                tree.rename(home)
            except OSError:
                if not home.exists():  # else another run was quicker
                    raise
        return home


def _cached(cache, pattern):
    """The newest directory of the cache that matches, or None."""
    found = sorted(cache.glob(pattern), key=lambda home: home.stat().st_mtime)
    return found[-1] if found else None


def _package(cache, package, pattern):
    """A package from the cache; from the mirror where the cache has none."""
    return _cached(cache, pattern) or _unpacked(cache, package)


def fetch(cache):
    """Returns (kernel image, module directory, mount.nfs), downloading what the cache lacks."""
    cache.mkdir(parents=True, exist_ok=True)
    home = _cached(cache, KERNEL_GLOB)
    if home is None:
        depends = output(["apt-cache", "depends", KERNEL_META_PACKAGE])
        match = re.search(r"Depends: (linux-image-\S+)", depends)
        if match is None:
            raise ImageError(f"{KERNEL_META_PACKAGE} names no kernel: {depends!r}")
        home = _unpacked(cache, match.group(1))
    mount_nfs = _package(cache, MOUNT_PACKAGE, f"{MOUNT_PACKAGE}_*") / "sbin/mount.nfs"
    kernel = next((home / "boot").glob("vmlinuz-*"), None)
    modules = next((home / "lib/modules").iterdir(), None)
    if kernel is None or modules is None or not mount_nfs.exists():
        raise ImageError(f"{home} or {mount_nfs} lacks a part; remove {cache} to fetch it again")
    return kernel, modules, mount_nfs


def _module(path):
    """The bytes of a module, as the kernel takes them; newer packages have it compressed."""
    data = path.read_bytes()
    return lzma.decompress(data) if path.suffix == ".xz" else data


def module_order(directory, wanted):
    """The files of the wanted modules and all they depend on, each after what it needs."""
    files = {path.name.split(".")[0].replace("-", "_"): path for path in directory.rglob("*.ko*")}
    ordered = []

    def visit(name):
        path = files.get(name)
        if path is None or path in ordered:
            return  # built in, or already placed
        # The kernel's build writes "depends=a,b" into the section .modinfo, ended by a zero byte.
        depends = re.search(rb"\0depends=([^\0]*)\0", _module(path))
        for needed in (depends.group(1).decode() if depends else "").split(","):
            visit(needed.replace("-", "_"))
        ordered.append(path)

    for name in wanted:
        visit(name)
    return ordered


def _libraries(program):
    """The shared libraries (and the loader) of a program, by absolute path."""
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    if "not found" in listed:
        raise ImageError(f"{program} lacks a library:\n{listed}")
    return {pathlib.Path(path) for path in re.findall(r"(/\S+) \(0x", listed)}


def install(root, program, place):
    """Copies a program into the tree at `place` and its libraries to where it expects them."""
    target = root / place
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(program, target)
    target.chmod(0o755)
    for library in _libraries(program):
        copy = root / library.relative_to("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, copy)


def which(name):
    """The path of a program of this machine."""
    program = shutil.which(name)
    if program is None:
        raise ImageError(f"{name} is not installed")
    return program


def _write_etc(root):
    """The few files of /etc that the tools read."""
    etc = root / "etc"
    # mount.nfs leaves its notes in /etc/mtab.
    (etc / "mtab").symlink_to("/proc/mounts")
    # mount.nfs and su ask how names become numbers; nothing but these files answers.
    (etc / "nsswitch.conf").write_text("hosts: files\nprotocols: files\npasswd: files\n")
    (etc / "hosts").write_text("127.0.0.1 localhost\n")
    (etc / "protocols").write_text("tcp 6 TCP\nudp 17 UDP\n")
    (etc / "netconfig").write_text(
        "udp tpi_clts v inet udp - -\ntcp tpi_cots_ord v inet tcp - -\n"
    )
    # What mkfs.ext4 makes by default is written there.
    shutil.copy("/etc/mke2fs.conf", etc)
    # user is in the group team besides the group of his own.
    (etc / "passwd").write_text("root::0:0::/:/bin/sh\nuser::1000:1000::/:/bin/sh\nother::1001:1001::/:/bin/sh\n")
    (etc / "group").write_text("root:x:0:\nuser:x:1000:\nother:x:1001:\nteam:x:2000:user\n")


def install_modules(root, modules, wanted):
    """Puts the wanted modules, and what they depend on, into /modules of a tree, by names in the order in which they
    load."""
    for number, module in enumerate(module_order(modules, wanted)):
        name = module.name.removesuffix(".xz")
        (root / "modules" / f"{number:02}-{name}").write_bytes(_module(module))


def build(scratch, modules, programs, pool, wanted=(), add=lambda root: None):
    """Writes the initramfs into `scratch` and returns its path; `programs` go to /tools, `pool`
    becomes /pool. It loads the modules `wanted`, too, and has what `add` puts into its tree."""
    root = scratch / "root"
    for name in ["bin", "tools", "modules", "proc", "sys", "dev", "run", "tmp", "etc"]:
        (root / name).mkdir(parents=True)
    (root / "pool").write_bytes(pool)
    _write_etc(root)
    install(root, which("busybox"), "bin/busybox")
    for tool in HOST_TOOLS + DRIVER_TOOLS:
        install(root, which(tool), f"tools/{tool}")
    for tool in E2FSPROGS:
        install(root, which(tool), f"usr/sbin/{tool}")
    for program in programs:
        install(root, program, f"tools/{program.name}")
    install_modules(root, modules, [*MODULES, *wanted])
    for script in INSIDE.iterdir():
        shutil.copy(script, root / script.name)
    (root / "init").chmod(0o755)
    (root / "agent").chmod(0o755)
    add(root)
    image = scratch / "initramfs"
    pack(root, image)
    return image


def pack(root, image):
    """Makes an initramfs of a tree, which is removed."""
    names = "\n".join(str(path.relative_to(root)) for path in sorted(root.rglob("*")))
    with image.open("wb") as sink:
        subprocess.run(
            ["cpio", "--quiet", "--create", "--format=newc", "--owner=0:0"],
            cwd=root, input=names.encode(), stdout=sink, check=True,
        )
    shutil.rmtree(root)
