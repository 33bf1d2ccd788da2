"""What POSIX asks of a file system, by a suite of others: pjdfstest, on the kernel's mount."""

from scenario import require, scenario

# Of pjdfstest 0.2.2. These run by themselves: the kernel refuses to make a mount read-only while a file of it is open
# that has no name any more, and some of the other cases leave such files in its cache.
READ_ONLY = "0 failed, 0 skipped, 13 passed, 0 expected failures, 13 total"
# Skipped are those, and link::link_count_max: the C library knows no largest number of links of NFS.
ALL = "0 failed, 14 skipped, 382 passed, 2 expected failures, 398 total"


@scenario("pjdfstest: what POSIX asks of a file system, by a suite of others", 150)
def pjdfstest(world):
    said = world.guest(r"""
        export_mount /posix hard,nosharecache
        mkdir -m 755 /posix/pjdfstest
        mkdir -p /run/second
        mount -t tmpfs none /run/second
        # suite CONFIGURATION [WORD]: all that did not pass
        suite() {
            NO_COLOR=1 /tools/pjdfstest --path /posix/pjdfstest --secondary-fs /run/second \
                --configuration-file "$@" 2>&1 | grep -v ' ok$' || true
        }
        suite /pjdfstest.toml erofs
        sed 's/^allow_remount = true/allow_remount = false/' /pjdfstest.toml >/run/pjdfstest.toml
        suite /run/pjdfstest.toml
        umount /run/second
        # Of utimensat::y2038, what NFSv3 has means for.
        for seconds in 2147483647 2147483648 4294967295; do
            touch -d @$seconds /posix/late
            caches_drop
            is "time" "$(stat -c %Y /posix/late)" $seconds
        done
        # It leaves folders of removed files that were open still.
        rm -r /posix/pjdfstest /posix/late
        umount /posix""")
    got = [line.removeprefix("Summary: ") for line in said.splitlines() if line.startswith("Summary: ")]
    require(got == [READ_ONLY, ALL], f"expected {READ_ONLY} and {ALL}:\n{said}")
