#!/usr/bin/env bash
# The folder of a run, and what killed runs have left of theirs; for scripts to read.
#
# A run holds a lock on its folder until its last process has ended. An unlocked folder is that of a run
# that was killed before it could clean up: the next run does that. Each folder is a line of the file that
# SUITE_RECORD names, if it does, and so are other texts in the paths of loop devices' files: tests/all looks
# at what is left of them.

# scratch_make NAME CLEAN: sets `scratch` to a new folder. CLEAN FOLDER is called for each that is left.
scratch_make() {
    local left others own
    local locks=${XDG_CACHE_HOME:-$HOME/.cache}/slackwater
    mkdir -p "$locks"
    # Between the making of a folder and its lock, no other run may take it for one that is left.
    exec {others}>>"$locks/scratch-$1.lock"
    flock "$others"
    for left in "${TMPDIR:-/tmp}/slackwater-$1".??????; do
        if [ -d "$left" ] && [ ! -L "$left" ] && [ -O "$left" ] && [ ! -e "$left/kept" ]; then
            exec {own}<"$left"
            ! flock --nonblock "$own" || "$2" "$left" || echo "cannot remove all of $left" >&2
            exec {own}<&-
        fi
    done
    scratch=$(mktemp -d -t "slackwater-$1.XXXXXX")
    [ -z "${SUITE_RECORD:-}" ] || echo "$scratch" >>"$SUITE_RECORD"
    exec {own}<"$scratch"
    flock "$own"
    exec {others}>&-
}

# scratch_detach TEXT ...: detaches loop devices from files whose paths have one of the texts. They belong
# to no namespace: one may be left that was attached and not yet mounted when all was killed, or whose file
# system was frozen, as during a commit. /sys is read, as a tool that looks at the files themselves would
# hang on a dead one.
scratch_detach() {
    local try text entry device found
    for try in {1..50}; do
        found=
        for entry in /sys/block/loop*/loop/backing_file; do
            for text; do
                grep -qF "$text" "$entry" 2>/dev/null || continue
                found=yes
                device=${entry#/sys/block/}
                device=/dev/${device%%/*}
                # Held open, the kernel cannot free it, and another program have it, between the look and the rest.
                {
                    ! grep -qF "$text" "$entry" || losetup --detach "$device"
                    [ "$try" -eq 1 ] || ! grep -qF "$text" "$entry" || scratch_thaw "$device"
                } 2>/dev/null <"$device" || true
            done
        done
        [ -n "$found" ] || return 0
        sleep 0.1
    done
}

# scratch_thaw DEVICE: thaws the file system on it, if that is frozen. One that is frozen when its last mount
# ends, with the namespace of a run that was killed, stays in the kernel and keeps its device, until it is
# mounted once more, here in a namespace that ends with it.
scratch_thaw() {
    # shellcheck disable=SC2016
    timeout 10 unshare --mount --propagation private \
        sh -c 'mount -t ext4 "$1" "$2" && fsfreeze --unfreeze "$2"' sh "$1" "${TMPDIR:-/tmp}"
}

# scratch_end_groups FOLDER: ends what is left in control groups that have the folder's name, and
# removes them, which the kernel does not do with their last process.
scratch_end_groups() {
    local name=${1##*/} file process try
    # Never those of another program.
    case $name in slackwater-*.??????) ;; *) return 1 ;; esac
    # A container that is paused, as during a commit, is ended by no signal until it is thawed.
    while read -r file; do
        while read -r process; do
            kill -KILL "$process" 2>/dev/null || true
        done <"$file"
    done < <(find /sys/fs/cgroup -path "*/$name*" -name cgroup.procs 2>/dev/null)
    while read -r file; do
        case $file in
            */freezer.state) echo THAWED ;;
            *) echo 0 ;;
        esac 2>/dev/null >"$file" || true
    done < <(find /sys/fs/cgroup -path "*/$name*" \( -name freezer.state -o -name cgroup.freeze \) 2>/dev/null)
    for try in {1..50}; do
        find /sys/fs/cgroup -depth -type d -path "*/$name*" -exec rmdir {} + 2>/dev/null || true
        [ -n "$(find /sys/fs/cgroup -type d -path "*/$name*" -print -quit 2>/dev/null)" ] || return 0
        sleep 0.1
    done
}
