"""What the names, attributes and directories of the export do for the kernel's client."""

from scenario import require, scenario

DIRECTORY_ENTRIES = 2000


@scenario("create, rename, link, symlink, chmod, chown, truncate, times", 60)
def names(world):
    world.fact("mounted")
    world.guest("""
        mkdir /n/names
        cd /n/names
        echo one >a
        ln a b
        is "links" "$(stat -c %h a)" 2
        is "inode of a link" "$(stat -c %i b)" "$(stat -c %i a)"
        mv b c
        is "content after rename" "$(cat c)" one
        echo two >d
        mv d a
        is "content after rename over a file" "$(cat a)" two
        is "the replaced file by its other name" "$(cat c)" one
        is "links of the replaced file" "$(stat -c %h c)" 1
        mkdir -p directory/below
        mv a directory/below/a
        mv directory moved
        is "content below a renamed directory" "$(cat moved/below/a)" two
        refused 'not empty' rmdir moved
        refused 'No such file' cat a
        refused 'File exists' mkdir moved
        refused 'Not a directory' ls c/below
        mkdir empty
        is "links of a directory with two directories" "$(mkdir empty/x empty/y; stat -c %h empty)" 4
        rm -r empty
        ln -s moved/below/a soft
        ln -s nothing/there dangling
        is "target" "$(readlink dangling)" nothing/there
        is "through a symbolic link" "$(cat soft)" two
        set -C
        echo first >exclusive
        refused 'exists' sh -c 'set -C; echo second >exclusive'
        set +C
        is "content after a refused exclusive create" "$(cat exclusive)" first
        age=$(($(date +%s) - $(stat -c %Y exclusive)))
        [ "$age" -ge -5 ] && [ "$age" -le 120 ] || fail "an exclusive create left a time $age s ago"
        chmod 4755 c
        is "mode" "$(stat -c %a c)" 4755
        chown 1000:2000 c
        is "owner" "$(stat -c %u:%g c)" 1000:2000
        touch -d '2001-02-03 04:05:06' c
        is "time" "$(stat -c %Y c)" 981173106""")
    world.guest("""
        cd /n/names
        pool 0 100000 >cut
        truncate -s 5000 cut
        pool 0 5000 | cmp - cut
        truncate -s 20000 cut
        is "size" "$(stat -c %s cut)" 20000
        caches_drop
        (pool 0 5000; head -c 15000 /dev/zero) | cmp - cut
        : >cut
        is "size after O_TRUNC" "$(stat -c %s cut)" 0
        long=$(head -c 255 /dev/zero | tr '\\0' x)
        echo long >"$long"
        is "content under a name of 255 bytes" "$(cat "$long")" long
        refused 'too long' touch "x$long"
        odd=$(printf '\\377\\376 \\001')
        echo odd >"$odd"
        is "content under a name that is not UTF-8" "$(cat "$odd")" odd""")
    # Through the other mount, which has none of this in its caches, all is the same.
    world.guest("""
        cd /n/names
        find . -print0 | sort -z | xargs -0 /tools/stat -c '%n %F %a %u:%g %h %s %Y %N' >/run/names.expected
        cd /fresh/names
        find . -print0 | sort -z | xargs -0 /tools/stat -c '%n %F %a %u:%g %h %s %Y %N' >/run/names.actual
        cd /
        cmp /run/names.expected /run/names.actual
        rm -r /n/names""")


@scenario("named pipes and devices: their numbers, and what goes through them", 60)
def special_files(world):
    world.fact("mounted")
    world.guest("""
        mkdir /n/special
        cd /n/special
        mkfifo -m 640 pipe
        is "a pipe's type and mode" "$(stat -c '%F %a' pipe)" 'fifo 640'
        echo through >pipe &
        is "what goes through a pipe" "$(cat pipe)" through
        wait
        mknod -m 600 null c 1 3
        mknod -m 600 loop b 7 0
        mknod -m 600 largest c 4095 1048575
        is "a character device" "$(stat -c '%F %t:%T' null)" 'character special file 1:3'
        is "a block device" "$(stat -c '%F %t:%T' loop)" 'block special file 7:0'
        is "the largest numbers" "$(stat -c '%t:%T' largest)" fff:fffff
        echo data >null
        is "what a device swallows" "$(cat null)" ""
        refused 'exists' mkfifo null
        # As any other names.
        echo old >file
        mv null file
        ln file second-name
        chown 1000:2000 pipe
        is "after rename and link" "$(stat -c '%F %h' file)" 'character special file 2'
        rm second-name
        chmod 6777 pipe; chown 0:0 pipe
        is "set-id bits after chown" "$(stat -c %a pipe)" 777
        chmod 777 .
        user() { su user -c "cd /n/special; $1"; }
        user 'mkfifo of-user'
        is "owner" "$(stat -c '%F %u' of-user)" 'fifo 1000'
        # Through the other mount, which has none of this in its caches, all is the same.
        cd /n/special; stat -c '%n %F %a %u:%g %h %t:%T' * >/run/special.expected
        cd /fresh/special; stat -c '%n %F %a %u:%g %h %t:%T' * | cmp - /run/special.expected
        cd /
        rm -r /n/special
        refused 'No such file' ls /fresh/special""")


@scenario("another user gets what modes and groups allow, and no more", 60)
def permissions(world):
    world.fact("mounted")
    world.guest("""
        mkdir /n/rights
        cd /n/rights
        chmod 755 .
        echo secret >root-only; chmod 600 root-only
        echo shared >team; chown 0:2000 team; chmod 640 team
        mkdir drop; chmod 1777 drop
        echo mine >drop/of-root
        user() { su user -c "cd /n/rights; $1"; }
        refused 'denied' user 'cat root-only'
        refused 'denied' user 'touch new'
        refused 'denied' user 'echo x >team'
        is "a file of a supplementary group" "$(user 'cat team')" shared
        user 'echo his >drop/of-user; chmod 000 drop/of-user'
        is "owner" "$(stat -c %u drop/of-user)" 1000
        refused 'permitted' user 'chmod 777 team'
        refused 'permitted' user 'chown 1000 team'
        # Sticky: only the owner removes his entries.
        refused 'permitted' user 'rm -f drop/of-root'
        user 'rm -f drop/of-user'
        # Set-id bits go with what others do; the client leaves that to the server.
        for change in "user 'echo more >>program'" "user ': >program'" "chown 1000 program"; do
            echo x >program; chown 0:0 program; chmod 6777 program
            is "mode" "$(stat -c %a program)" 6777
            eval "$change"
            is "mode after $change" "$(stat -c %a program)" 777
        done
        cd /
        rm -r /n/rights""")


@scenario("a directory of 2,000 entries: READDIR and READDIRPLUS, pages, removal", 150)
def big_directory(world):
    world.fact("mounted")
    world.guest(f"""
        mkdir /n/many
        cd /n/many
        number=0
        while [ $number -lt {DIRECTORY_ENTRIES} ]; do
            : >entry-$number
            number=$((number + 1))
        done
        seq 0 {DIRECTORY_ENTRIES - 1} | sed 's/^/entry-/' | sort >/run/many.expected
        ls | sort | cmp - /run/many.expected
        caches_drop
        ls -l | awk 'NR > 1 {{ print $NF }}' | sort | cmp - /run/many.expected
        # READDIR alone, without attributes.
        export_mount /plain hard,nosharecache,nordirplus
        ls /plain/many | sort | cmp - /run/many.expected
        umount /plain""")
    on_host = world.appliance.list_over_nfs("many") - {".", ".."}
    require(len(on_host) == DIRECTORY_ENTRIES, f"libnfs lists {len(on_host)} entries")
    # Half of it goes, and some come: what is listed follows.
    world.guest(f"""
        cd /n/many
        seq 0 2 {DIRECTORY_ENTRIES - 1} | sed 's/^/entry-/' | xargs rm
        : >later-1
        : >later-2
        (seq 1 2 {DIRECTORY_ENTRIES - 1} | sed 's/^/entry-/'; echo later-1; echo later-2) \
            | sort >/run/many.expected
        ls | sort | cmp - /run/many.expected
        caches_drop
        ls | sort | cmp - /run/many.expected
        cd /
        rm -r /n/many
        refused 'No such file' ls /fresh/many""")


@scenario("open files outlive their names (silly rename)", 60)
def silly_rename(world):
    world.fact("mounted")
    world.guest("""
        mkdir /n/silly
        cd /n/silly
        echo old >open
        exec 7<open
        echo new >next
        mv next open
        is "the name" "$(cat open)" new
        is "the open file that was renamed over" "$(cat <&7)" old
        exec 7<&-
        # The kernel removes a hidden file after the close, not in it.
        for try in $(seq 60); do
            [ "$(ls -A)" = open ] && break
            sleep 1
        done
        is "names after the first close" "$(ls -A)" open
        echo kept >victim
        exec 8<>victim
        rm victim
        is "hidden files while open" "$(ls -A | grep -c '^\\.nfs')" 1
        echo more >>/proc/self/fd/8
        is "content without a name" "$(cat /proc/self/fd/8 | tr '\\n' ' ')" "kept more "
        exec 8>&-
        for try in $(seq 60); do
            [ "$(ls -A)" = open ] && break
            sleep 1
        done
        is "names after close" "$(ls -A)" open
        cd /
        rm -r /n/silly""")
