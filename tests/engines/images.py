"""Images without the internet: a busybox of one file, and a Debian with gcc, in the registry as the
ordinary images that a plain Docker pushes."""

import io
import os
import pathlib
import tarfile

from process import run
from scenario import Failure, require

BUSYBOX = "/bin/busybox"
# gcc, what it needs to link, and a shell: unpacked and not configured, so that it stays small.
DEBIAN_PACKAGES = "gcc,libc6-dev,base-files,busybox-static"
DEBIAN_SUITE = "bookworm"
DEBIAN_LIMIT_SECONDS = 400
PATH = "ENV PATH=/usr/bin:/bin:/usr/sbin:/sbin"


def busybox_tar():
    """A root file system of one program."""
    out = io.BytesIO()
    applets = run(BUSYBOX, "--list").split()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name in ("bin", "tmp", "etc", "proc", "sys", "dev"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            tar.addfile(entry)
        tar.add(BUSYBOX, "bin/busybox")
        for applet in applets:
            if applet != "busybox":
                entry = tarfile.TarInfo(f"bin/{applet}")
                entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
                tar.addfile(entry)
    return out.getvalue()


def debian_tar():
    """The cached tar of the Debian image; made by mmdebstrap, once."""
    cache = pathlib.Path(os.environ["SLACKWATER_ENGINES_CACHE"])
    cache.mkdir(parents=True, exist_ok=True)
    image = cache / f"debian-gcc-{DEBIAN_SUITE}-{os.uname().machine}.tar"
    if not image.exists():
        part = image.with_suffix(f".{os.getpid()}")
        try:
            run("mmdebstrap", "--quiet", "--variant=extract", "--format=tar",
                f"--include={DEBIAN_PACKAGES}", DEBIAN_SUITE, part,
                limit_seconds=DEBIAN_LIMIT_SECONDS)
        except Failure as error:
            part.unlink(missing_ok=True)
            raise Failure(f"no Debian image; put one at {image}: {error}") from None
        part.rename(image)
    return image


class Images:
    """Ordinary images of the registry, each made when it is first asked for."""

    def __init__(self, world):
        self._world = world
        self._made = {}

    def _push(self, path, source):
        """Imports a root file system into the plain Docker and pushes it; its full name."""
        if path not in self._made:
            name = self._world.registry.name(path)
            self._world.plain("import", "--change", PATH, "--change", 'CMD ["/bin/busybox", "sh"]',
                              source(), name)
            self._world.plain("push", name)
            self._made[path] = name
        return self._made[path]

    def _busybox_file(self):
        path = self._world.scratch / "busybox.tar"
        path.write_bytes(busybox_tar())
        return path

    def busybox(self):
        """One layer, one program."""
        return self._push("busybox:1", self._busybox_file)

    def debian(self):
        """One layer of Debian with gcc."""
        return self._push("debian-gcc:1", debian_tar)

    def built(self, path, base, lines, files=()):
        """An image built by the plain Docker on one of the above, and pushed."""
        if path not in self._made:
            context = self._world.scratch / "contexts" / path.replace(":", "-")
            context.mkdir(parents=True)
            (context / "Dockerfile").write_text("\n".join([f"FROM {base}", *lines, ""]))
            for name, data in files:
                (context / name).write_bytes(data)
            name = self._world.registry.name(path)
            self._world.plain.build(context, name, buildkit=False)
            self._world.plain("push", name)
            self._made[path] = name
        return self._made[path]

    def layered(self):
        """Three small layers on busybox: each adds, changes and removes something."""
        return self.built("layered:1", self.busybox(), [
            "RUN mkdir /one && echo one >/one/file && echo gone >/one/gone",
            "RUN mkdir /two && echo two >/two/file && rm /one/gone && chmod 2751 /one",
            "RUN echo three >/three && ln /one/file /two/link && ln -s /three /two/symlink",
        ])


def require_image_absent(docker, name):
    """Fails if the engine lists the image."""
    require(not docker("image", "ls", "--quiet", name), f"image {name} is there")
