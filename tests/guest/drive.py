"""Runs the scenarios: server and guest up, one line a scenario, everything down again.

The exit code is 0 only when at least one scenario ran and every one passed.
"""

import argparse
import contextlib
import os
import pathlib
import random
import shutil
import signal
import sys
import time

import appliance
import image
import machine
from scenario import SCENARIOS, Scenario, World

# Each import registers its scenarios; the order is the order of the run.
import scenarios.host
import scenarios.disk
import scenarios.names
import scenarios.posix
import scenarios.space
import scenarios.rest
import scenarios.others
import scenarios.driver
import scenarios.kernel_tls
import scenarios.kernel_images
import scenarios.restart
import scenarios.end

# Lines of the console and of the server's log that are shown when a scenario failed.
TAIL_LINES = 40
POOL_BYTES = 4 << 20
# The guest calls REST by its gateway's address, which wants a token. It guards nothing but a test.
TOKEN = "guest-test-token"
# Any number: the same data in every run.
POOL_SEED = 1813


class OutOfTime(Exception):
    """A scenario used up its time limit."""


def _out_of_time(_signal, _frame):
    raise OutOfTime


def _terminated(_signal, _frame):
    raise KeyboardInterrupt


def say(text):
    """Progress, at once."""
    print(text, flush=True)


def run_one(world, entry):
    """Runs one scenario; returns why it failed, or None."""
    signal.setitimer(signal.ITIMER_REAL, entry.limit_seconds)
    try:
        entry.action(world)
        return None
    except OutOfTime:
        return f"not done within {entry.limit_seconds} s"
    except Exception as error:  # every kind of failure is a verdict, not the end of the run
        return f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def clear_up(world):
    """After a failure: what the next scenario needs, as far as it can be had."""
    if not world.appliance.is_running():
        say("      the server is not running: starting it again")
        try:
            world.appliance.start()
        except appliance.ApplianceError as error:
            say(f"      {error}")
    world.machine.recover()


def run_all(world, chosen):
    """Runs the scenarios and returns (passed, failed)."""
    passed = failed = 0
    for entry in chosen:
        started = time.monotonic()
        reason = run_one(world, entry)
        took_seconds = time.monotonic() - started
        if reason is None:
            passed += 1
            say(f"ok    {took_seconds:6.1f} s  {entry.title}")
        else:
            failed += 1
            say(f"FAIL  {took_seconds:6.1f} s  {entry.title}")
            say("      " + reason.replace("\n", "\n      "))
            if entry is not chosen[-1]:
                clear_up(world)
        world.machine.note(f"{'FAIL' if reason else 'ok'}: {entry.title}")
    return passed, failed


def parse(arguments):
    """The command line."""
    parser = argparse.ArgumentParser(description="Real-client tests in a guest kernel.")
    parser.add_argument("--cache", type=pathlib.Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=pathlib.Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true", help="print the scenarios and end")
    parser.add_argument("--keep", action="store_true", help="keep logs and data directory")
    parser.add_argument(
        "scenario", nargs="*",
        help="part of a title; those that it needs must be named too; default: all",
    )
    return parser.parse_args(arguments)


def choose(words):
    """The scenarios whose title has one of the words; all without words."""
    return [
        entry for entry in SCENARIOS if not words or any(word in entry.title for word in words)
    ]


def run(options, chosen, scratch):
    """Brings up server and guest, runs, takes both down; returns the exit code."""
    kernel, modules, mount_nfs = image.fetch(options.cache)
    pool = random.Random(POOL_SEED).randbytes(POOL_BYTES)
    programs = [mount_nfs, *(pathlib.Path(os.environ[name]) for name in ("SLACKWATER_DRIVER", "PJDFSTEST"))]
    initramfs = image.build(scratch, modules, programs, pool)
    with contextlib.ExitStack() as cleanup:
        server = appliance.Appliance(
            os.environ["SLACKWATERD"], scratch / "data", scratch / "server.log", token=TOKEN
        )
        cleanup.callback(server.kill)
        console = scratch / "console.log"
        passed, failed = 0, 1
        try:
            say(f"starting {os.environ['SLACKWATERD']}")
            server.start()
            say(f"booting {kernel.name} (emulated)")
            guest = machine.Machine(scratch, kernel, initramfs)
            cleanup.callback(guest.stop)
            guest.run(server.introduction())
            world = World(server, guest, pool, scratch, options.cache)
            passed, failed = run_all(world, chosen)
        except (appliance.ApplianceError, machine.GuestLost, OSError) as error:
            say(f"FAIL  {error}")
        if failed:
            say(f"--- end of the guest's console\n{appliance.tail(console, TAIL_LINES)}")
            say(f"--- end of the server's log\n{server.log_tail(TAIL_LINES)}")
        say(f"{passed} passed, {failed} failed")
        return 0 if passed and not failed else 1


def main():
    """Entry point."""
    options = parse(sys.argv[1:])
    chosen = choose(options.scenario)
    if options.list or not chosen:
        for entry in SCENARIOS:
            say(f"{entry.limit_seconds:4} s  {entry.title}")
        return 0 if options.list else 2
    for variable, package in (
        ("SLACKWATERD", "slackwater-server"), ("SLACKWATER_DRIVER", "slackwater-driver"),
        ("SLACKWATER", "slackwater-client"),
    ):
        if not os.access(os.environ[variable], os.X_OK):
            say(f"no program at {os.environ[variable]}: "
                f"cargo build --release -p {package}, or set {variable}")
            return 2
    signal.signal(signal.SIGALRM, _out_of_time)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminated)
    scratch = options.scratch
    try:
        return run(options, chosen, scratch)
    except image.ImageError as error:
        say(f"FAIL  {error}\n0 passed, 1 failed")
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    finally:
        # A second Ctrl-C does not end this half way.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        if options.keep:
            say(f"kept: {scratch}")
        else:
            shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
