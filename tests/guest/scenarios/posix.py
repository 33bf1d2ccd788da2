"""What POSIX asks of a file system, by a suite of others: pjdfstest, on the kernel's mount."""

from scenario import require, scenario

# Of pjdfstest 0.2.2. On their own: the kernel makes a mount read-only only while no file of it is open that has no
# name any more, and some of the other cases leave such files in its cache.
READ_ONLY = "0 failed, 0 skipped, 13 passed, 0 expected failures, 13 total"
# Skipped are those, and link::link_count_max: the C library knows no largest number of links of NFS.
ALL = "0 failed, 14 skipped, 382 passed, 2 expected failures, 398 total"


@scenario("pjdfstest: what POSIX asks of a file system, by a suite of others", 150)
def pjdfstest(world):
    said = world.guest("""
        export_mount /posix hard,nosharecache
        chmod 755 /posix
        mkdir -p /run/second
        mount -t tmpfs none /run/second
        # suite CONFIGURATION [WORD]: all that did not pass
        suite() {
            NO_COLOR=1 /tools/pjdfstest --path /posix --secondary-fs /run/second --configuration-file "$@" 2>&1 |
                grep -v ' ok$' || true
        }
        suite /pjdfstest.toml erofs
        sed 's/^allow_remount = true/allow_remount = false/' /pjdfstest.toml >/run/pjdfstest.toml
        suite /run/pjdfstest.toml
        umount /run/second
        umount /posix""")
    got = [line.removeprefix("Summary: ") for line in said.splitlines() if line.startswith("Summary: ")]
    require(got == [READ_ONLY, ALL], f"expected {READ_ONLY} and {ALL}:\n{said}")
