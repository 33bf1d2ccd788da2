"""Runs the scenarios: one line each, everything down again at the end.

The exit code is 0 only when at least one scenario ran and every one passed.
"""

import argparse
import os
import pathlib
import re
import signal
import sys
import threading
import time

# The appliance's process and REST face are those of the guest's tests.
sys.path.append(str(pathlib.Path(__file__).parents[1] / "guest"))

import newer
from process import kill_strangers
from scenario import PATIENCE, SCENARIOS
from world import World

# Each import registers its scenarios; the order is the order of the run.
import scenarios.life
import scenarios.build
import scenarios.bad
import scenarios.reference
import scenarios.published
import scenarios.cri
import scenarios.store
import scenarios.chain
import scenarios.conformance
import scenarios.blobs
import scenarios.differ
import scenarios.docker_containerd
import scenarios.layers
import scenarios.hostile
import scenarios.generated
import scenarios.password
import scenarios.share
import scenarios.speed
import scenarios.bench
import scenarios.restart
import scenarios.outage
import scenarios.kill
import scenarios.kill_layers
import scenarios.identity
import scenarios.upgrade
import scenarios.end

# Of each log that is shown after a failure.
TAIL_LINES = 12
# Of the other programs' logs; the test gives containerd no network to configure.
TROUBLE = re.compile(r"level=(error|fatal) (?!.*cni)| WARN | ERROR |panicked")
ROUTINE = re.compile(r"^--- start: |^ready$|daemon: ready ")
# What a scenario may take beyond its limit, for its own cleaning.
GRACE_SECONDS = 90 * PATIENCE


class OutOfTime(BaseException):
    """A scenario used up its time limit; no handler of errors may take it."""


def _out_of_time(_signal, _frame):
    raise OutOfTime


def _terminated(_signal, _frame):
    raise KeyboardInterrupt


def say(text, end="\n"):
    """Progress, at once."""
    print(text, end=end, flush=True)


def give_up(title):
    """Something hangs in the kernel and cannot be interrupted: only the end of the namespace,
    which ends every process, helps."""
    say(f"\nFAIL  {title} hangs; ending everything")
    os._exit(1)


def run_one(world, entry):
    """Runs one scenario; returns (why it failed or None, its note)."""
    watchdog = threading.Timer(entry.limit_seconds + GRACE_SECONDS, give_up, [entry.title])
    watchdog.daemon = True
    watchdog.start()
    signal.setitimer(signal.ITIMER_REAL, entry.limit_seconds)
    try:
        world.use(entry.release)
        note = entry.action(world)
        world.clear()
        return None, note or ""
    except OutOfTime:
        return f"not done within {entry.limit_seconds} s", ""
    except Exception as error:  # every kind of failure is a verdict, not the end of the run
        return f"{type(error).__name__}: {error}", ""
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        watchdog.cancel()


def show_logs(world):
    """The ends of the logs of the appliance and the workers."""
    for path in world.logs():
        lines = [
            line for line in path.read_text("utf-8", "replace").splitlines()
            if TROUBLE.search(line) or (path.name == "driver.log" and not ROUTINE.search(line))
        ][-TAIL_LINES:]
        if lines:
            say(f"      --- {path.relative_to(world.scratch)}")
            for line in lines:
                say(f"      {line[:300]}")


def run_all(world, chosen):
    """Runs the scenarios and returns (passed, failed)."""
    passed = failed = 0
    for entry in chosen:
        started = time.monotonic()
        say(f"{entry.title} ... ", end="")
        reason, note = run_one(world, entry)
        took_seconds = time.monotonic() - started
        if reason is None:
            passed += 1
            say(f"ok ({took_seconds:.0f} s) {note}".rstrip())
            continue
        failed += 1
        say(f"FAIL ({took_seconds:.0f} s)")
        say("      " + reason.replace("\n", "\n      "))
        show_logs(world)
        world.throw_away()
    return passed, failed


def parse(arguments):
    """The command line."""
    parser = argparse.ArgumentParser(description="The driver under real engines.")
    parser.add_argument("--list", action="store_true", help="print the scenarios and end")
    parser.add_argument("--keep", action="store_true", help="keep logs and data")
    parser.add_argument(
        "--stand-in", action="store_true",
        help="the engines' own storage instead of the driver: proves the scenarios",
    )
    parser.add_argument("--debian", action="store_true", help="none by engines that are newer than Debian's")
    parser.add_argument("word", nargs="*", help="part of a title; default: all")
    return parser.parse_args(arguments)


def choose(options):
    """The scenarios whose title has one of the words; all without words."""
    return [
        entry for entry in SCENARIOS
        if (not options.word or any(word in entry.title for word in options.word))
        and (entry.stand_in or not options.stand_in) and not (entry.newer and options.debian)
    ]


def main():
    """Entry point."""
    options = parse(sys.argv[1:])
    chosen = choose(options)
    if options.list or not chosen:
        for entry in chosen or SCENARIOS:
            say(f"{entry.limit_seconds:5} s  {entry.title}")
        return 0 if options.list else 2
    for variable in ("SLACKWATERD", "SLACKWATER_DRIVER"):
        if not options.stand_in and not os.access(os.environ[variable], os.X_OK):
            say(f"no program at {os.environ[variable]}: `make build`, or set {variable}")
            return 2
    if any(entry.newer for entry in chosen):
        try:
            # Open until this program ends, so that no other run removes them.
            _used = newer.make(pathlib.Path(os.environ["SLACKWATER_ENGINES_CACHE"]))
        except newer.FAILURES as error:
            say(f"newer engines: {error}")
            return 2
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.signal(signal.SIGTERM, _terminated)
    signal.signal(signal.SIGHUP, _terminated)
    # The shell starts what it waits for with Ctrl-C ignored.
    signal.signal(signal.SIGINT, _terminated)
    world = World(pathlib.Path(os.environ["SLACKWATER_ENGINES_SCRATCH"]), options.stand_in)
    try:
        world.start()
        passed, failed = run_all(world, chosen)
        say(f"{passed} passed, {failed} failed")
        return 0 if passed and not failed else 1
    except KeyboardInterrupt:
        say("\ninterrupted")
        return 130
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        try:
            world.throw_away()
            world.end()
        finally:
            kill_strangers()


if __name__ == "__main__":
    sys.exit(main())
