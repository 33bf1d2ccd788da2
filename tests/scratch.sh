#!/usr/bin/env bash
# The folder of a run, and what killed runs have left of theirs; for scripts to read.
#
# A run holds a lock on its folder until its last process has ended. So a folder that nobody holds is
# that of a run that was killed before it could clean up, and the next run does that.

# scratch_make NAME CLEAN: sets `scratch` to a new folder. CLEAN FOLDER is called for each that is left.
scratch_make() {
    local left others own
    # Between the making of a folder and its lock, no other run may take it for one that is left.
    exec {others}>"${TMPDIR:-/tmp}/slackwater-$1-$EUID.lock"
    flock "$others"
    for left in "${TMPDIR:-/tmp}/slackwater-$1".??????; do
        if [ -d "$left" ] && [ ! -L "$left" ] && [ -O "$left" ] && [ ! -e "$left/kept" ]; then
            exec {own}<"$left"
            ! flock --nonblock "$own" || "$2" "$left" || echo "cannot remove all of $left" >&2
            exec {own}<&-
        fi
    done
    scratch=$(mktemp -d -t "slackwater-$1.XXXXXX")
    exec {own}<"$scratch"
    flock "$own"
    exec {others}>&-
}
