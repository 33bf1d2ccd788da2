"""What a container's root file system holds, entry by entry, so that two engines can be compared."""

import hashlib
import os
import stat

from scenario import Failure

# The engines put their own there when a container starts.
ENGINES_OWN = {
    "proc", "sys", "dev", ".dockerenv", "etc/hosts", "etc/hostname", "etc/resolv.conf", "etc/mtab",
}
# overlayfs marks its own with attributes that containers do not see.
HIDDEN_ATTRIBUTES = "trusted.overlay."
SHOWN_DIFFERENCES = 12


def describe(path, set_before_seconds):
    """One entry. A time counts where it was set to the past, and not where the build's clock made it."""
    status = os.lstat(path)
    kind = stat.S_IFMT(status.st_mode)
    entry = {
        "type": oct(kind), "mode": oct(stat.S_IMODE(status.st_mode)),
        "owner": (status.st_uid, status.st_gid),
        "attributes": {
            name: os.getxattr(path, name, follow_symlinks=False).hex()
            for name in os.listxattr(path, follow_symlinks=False)
            if not name.startswith(HIDDEN_ATTRIBUTES)
        },
    }
    if status.st_mtime < set_before_seconds:
        entry["modified"] = status.st_mtime_ns
    if not stat.S_ISDIR(kind):
        entry["links"] = status.st_nlink
    if stat.S_ISREG(kind):
        entry["size"] = status.st_size
        with open(path, "rb") as file:
            entry["content"] = hashlib.file_digest(file, "sha256").hexdigest()
    elif stat.S_ISLNK(kind):
        entry["target"] = os.readlink(path)
    elif stat.S_ISCHR(kind) or stat.S_ISBLK(kind):
        entry["device"] = status.st_rdev
    return entry, (status.st_dev, status.st_ino)


def manifest(root, set_before_seconds):
    """All entries below a root, by path; names of one file name each other."""
    entries, names = {"": describe(root / ".", set_before_seconds)[0]}, {}

    def walk(directory, prefix):
        for name in sorted(os.listdir(directory)):
            path = prefix + name
            if path in ENGINES_OWN:
                continue
            full = os.path.join(directory, name)
            entry, identity = describe(full, set_before_seconds)
            entries[path] = entry
            if entry.get("links", 1) > 1:
                names.setdefault(identity, []).append(path)
            if stat.S_ISDIR(int(entry["type"], 8)):
                walk(full, path + "/")

    walk(str(root) + "/.", "")
    for same in names.values():
        for path in same:
            entries[path]["same as"] = same
    return entries


def require_same(got, expected, got_title, expected_title):
    """Fails with the first differences."""
    differences = []
    for path in sorted(got.keys() | expected.keys()):
        ours, theirs = got.get(path), expected.get(path)
        if ours is None or theirs is None:
            where = got_title if theirs is None else expected_title
            differences.append(f"/{path}: only in {where}")
        elif ours != theirs:
            fields = [
                f"{field} {ours.get(field)} instead of {theirs.get(field)}"
                for field in sorted(ours.keys() | theirs.keys())
                if ours.get(field) != theirs.get(field)
            ]
            differences.append(f"/{path}: " + ", ".join(fields))
    if differences:
        raise Failure(
            f"{len(differences)} of {len(expected)} entries of {got_title} differ from "
            f"{expected_title}:\n" + "\n".join(differences[:SHOWN_DIFFERENCES])
        )
