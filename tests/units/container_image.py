"""An image for containers, without an engine: busybox, as `docker save` writes it.

    manifest.json --> config.json --> the layer's SHA-256
                 \\-> layer.tar        /bin/busybox, and links to it
"""

import hashlib
import io
import subprocess
import json
import tarfile

NAME = "docker.io/library/busybox:latest"
APPLETS = ("sh", "echo", "cat", "sleep")


def of_busybox(program):
    """The image's archive, of the program at this path, which needs no library."""
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    assert "=>" not in listed, f"{program} needs libraries, which no image of it has: install busybox-static"
    layer = _archive(lambda tar: _fill(tar, program))
    config = json.dumps({
        "architecture": "amd64", "os": "linux",
        "config": {"Cmd": ["sh"], "Env": ["PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    })
    manifest = json.dumps([{"Config": "config.json", "RepoTags": [NAME], "Layers": ["layer.tar"]}])
    files = {"manifest.json": manifest.encode(), "config.json": config.encode(), "layer.tar": layer}
    return _archive(lambda tar: [_add(tar, name, content) for name, content in files.items()])


def _archive(fill):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        fill(tar)
    return out.getvalue()


def _add(tar, name, content):
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))


def _fill(tar, program):
    for name in ("bin", "tmp", "proc", "sys", "dev", "etc"):
        entry = tarfile.TarInfo(name)
        entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
        tar.addfile(entry)
    with open(program, "rb") as file:
        entry = tar.gettarinfo(arcname="bin/busybox", fileobj=file)
        entry.uid = entry.gid = 0
        tar.addfile(entry, file)
    for applet in APPLETS:
        entry = tarfile.TarInfo(f"bin/{applet}")
        entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
        tar.addfile(entry)
