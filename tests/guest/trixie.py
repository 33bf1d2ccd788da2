"""Debian 13: a kernel whose NFS client speaks TLS, with the tlshd and the mount.nfs that it needs. It mounts
EROFS images from files, too.

    cache/trixie-N/            the packages, taken apart into one tree, never installed
    guest: /trixie/PROGRAM     started by Debian 13's loader, for the rest of the guest is the host's
           /trixie/lib/        the loader, and every library that the programs need

The packages come from the mirror of the host's apt, and by lists of their own: those of the host stay
as they are. Apt checks their signatures as it does the host's.

Invariant: a directory of the cache is complete or absent (unpacked aside, then renamed).
"""

import pathlib
import re
import shutil
import tempfile

import appliance
import image
import machine
from scenario import Failure

RELEASE = "trixie"
# Another number for another list of packages, so that an old cache is not taken for it.
TREE = f"{RELEASE}-1"
KEYRING = pathlib.Path("/usr/share/keyrings/debian-archive-keyring.gpg")

# What is started, and what apt would install with it that is needed for that.
PROGRAMS = ["tlshd", "mount.nfs"]
PACKAGES = [
    "ktls-utils", "nfs-common", "libc6", "libgcc-s1",
    # of tlshd
    "libatomic1", "libffi8", "libglib2.0-0t64", "libgmp10", "libgnutls30t64", "libhogweed6t64",
    "libidn2-0", "libkeyutils1", "libnettle8t64", "libnl-3-200", "libnl-genl-3-200", "libp11-kit0",
    "libpcre2-8-0", "libtasn1-6", "libunistring5", "zlib1g",
    # of mount.nfs
    "libblkid1", "libcom-err2", "libgssapi-krb5-2", "libk5crypto3", "libkrb5-3", "libkrb5support0",
    "libmount1", "libselinux1", "libssl3t64", "libtirpc3t64",
]

# TLS of the kernel, and AES-GCM, which it would have modprobe load; EROFS. FUSE is built in.
MODULES = ["tls", "aesni_intel", "ghash_generic", "gcm", "ctr", "erofs"]

# How much a failure in the guest shows of them.
CONSOLE_LINES, LOG_LINES = 20, 20

LIBRARIES = "usr/lib/x86_64-linux-gnu"
LOADER = "ld-linux-x86-64.so.2"


def _mirror():
    """Where the host's apt gets Debian from."""
    target = ["indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Label: Debian"]
    found = image.output([*image.APT_GET, *target]).split()
    if not found:
        raise image.ImageError("apt knows no mirror of Debian: see `apt-get indextargets`, and run `apt-get update`")
    return found[0]


def _apt(scratch, mirror):
    """The options by which apt knows Debian 13's main part, and nothing of the host."""
    if not KEYRING.exists():
        raise image.ImageError(f"{KEYRING} is missing, by which Debian's packages are checked")
    sources = scratch / "sources.list"
    sources.write_text(f"deb [signed-by={KEYRING}] {mirror} {RELEASE} main\n")
    for name in ["lists/partial", "archives/partial"]:
        (scratch / name).mkdir(parents=True)
    (scratch / "status").touch()
    places = {
        "Dir::Etc::SourceList": sources, "Dir::Etc::SourceParts": "-",
        "Dir::State": scratch, "Dir::State::Lists": scratch / "lists",
        "Dir::State::Status": scratch / "status", "Dir::Cache": scratch,
    }
    return [word for name, place in places.items() for word in ("-o", f"{name}={place}")]


def _download(scratch, mirror):
    """Gets the packages into `scratch`."""
    limit = {"timeout": image.DOWNLOAD_LIMIT_SECONDS}
    options = _apt(scratch, mirror)
    # By itself it only warns of a mirror that does not answer.
    image.output([*image.APT_GET, *options, "-o", "APT::Update::Error-Mode=any", "update"], **limit)
    depends = image.output(["apt-cache", *options, "depends", image.KERNEL_META_PACKAGE])
    match = re.search(r"Depends: (linux-image-\S+)", depends)
    if match is None:
        raise image.ImageError(f"{image.KERNEL_META_PACKAGE} names no kernel: {depends!r}")
    packages = [match.group(1), *PACKAGES]
    image.output([*image.APT_GET, *options, "download", *packages], cwd=scratch, **limit)


def fetch(cache):
    """Returns (kernel image, module directory, tree of Debian 13), downloading what the cache lacks."""
    cache.mkdir(parents=True, exist_ok=True)
    home = cache / TREE
    if not home.exists():
        with tempfile.TemporaryDirectory(dir=cache, prefix="download-") as scratch:
            scratch = pathlib.Path(scratch)
            mirror = _mirror()
            try:
                _download(scratch, mirror)
            except image.ImageError as error:
                raise image.ImageError(f"no packages of Debian's {RELEASE} from {mirror}: {error}") from error
            tree = scratch / "tree"
            for archive in scratch.glob("*.deb"):
                image.output(["dpkg-deb", "-x", archive, tree])
            try:
                tree.rename(home)
            except OSError:
                if not home.exists():  # else another run was quicker
                    raise
    kernel = next((home / "boot").glob("vmlinuz-*"), None)
    modules = next((home / "usr/lib/modules").glob("*"), None)
    if kernel is None or modules is None or not (home / "usr/sbin/tlshd").exists():
        raise image.ImageError(f"{home} lacks a part; remove it to fetch it again")
    return kernel, modules, home


def _install(root, home):
    """Puts the programs, their libraries and their loader into the guest's tree."""
    libraries = home / LIBRARIES
    place = root / RELEASE
    (place / "lib").mkdir(parents=True)
    shutil.copy(libraries / LOADER, place / "lib")
    for name in PROGRAMS:
        program = home / "usr/sbin" / name
        shutil.copy(program, place)
        listed = image.output([libraries / LOADER, "--library-path", libraries, "--list", program])
        for library in re.findall(rf"=> ({re.escape(str(libraries))}/\S+)", listed):
            shutil.copy(library, place / "lib")


def boot(world, scratch, programs=()):
    """Boots that kernel and returns the machine, which the caller stops; its files are put into `scratch`,
    `programs` go to /tools."""
    kernel, modules, home = fetch(world.cache)
    initramfs = image.build(scratch, modules, programs, world.pool, MODULES, lambda root: _install(root, home))
    return machine.Machine(scratch, kernel, initramfs)


def run(guest, script, log):
    """Runs a script in the guest; a failure tells what the kernel said, and the end of a file of the guest."""
    try:
        return guest.run(script, limit_seconds=7200.0)
    except machine.GuestError as error:
        said = guest.run(f"tail -n {LOG_LINES} {log} 2>/dev/null || true")
        console = appliance.tail(guest.console_path, CONSOLE_LINES)
        raise Failure(f"{error}\n--- {log}: {said}\n--- console: {console}") from error
