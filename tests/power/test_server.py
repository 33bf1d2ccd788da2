#!/usr/bin/env python3
"""The machine of `server`: one that stands still as it boots is booted again. With another program for qemu."""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "guest"))

import image
import stall
from ports import held_port

LIMIT_SECONDS = 120
STALL = "[   23.657836] rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:"
BEGINS = "power: slackwaterd begins"
ENDS = "power: slackwaterd ended with 0"
# What a machine says in each of its boots; it goes on until it is killed if it does not end by itself.
QEMU = """#!/bin/sh
cd "$(dirname "$0")"
echo boot >>boots
cat "said-$(wc -l <boots)"
[ -e "ends-$(wc -l <boots)" ] || exec sleep 1000
"""


class TestServer(unittest.TestCase):
    def run_server(self, *boots):
        """Lets the machine say these lines, in one boot after the other; its exit code, what was said, and its boots."""
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            for number, lines in enumerate(boots, 1):
                (folder / f"said-{number}").write_text("\n".join(lines) + "\n")
                if ENDS in lines:
                    (folder / f"ends-{number}").touch()
            qemu = folder / "qemu-system-x86_64"
            qemu.write_text(QEMU)
            qemu.chmod(0o755)
            path = f"{folder}:{os.environ['PATH']}"
            listens = ["--nfs-listen", f"127.0.0.1:{held_port()}", "--api-listen", f"127.0.0.1:{held_port()}"]
            server = subprocess.run(
                [HERE / "server", "--data-dir", folder / "machine", *listens],
                env={**os.environ, "PATH": path, "POWER_SLACKWATERD": image.which("busybox")},
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=LIMIT_SECONDS, text=True, check=False,
            )
            return server.returncode, server.stdout, len((folder / "boots").read_text().split())

    def test_a_machine_that_boots_is_booted_once(self):
        code, said, boots = self.run_server([BEGINS, ENDS])
        self.assertEqual((code, boots), (0, 1), said)

    def test_one_that_stands_still_is_booted_again(self):
        code, said, boots = self.run_server(["x", STALL], [BEGINS, ENDS])
        self.assertEqual((code, boots), (0, 2), said)
        self.assertEqual(said.count("boots again"), 1, said)
        self.assertEqual(said.count("life 0 of the disk"), 1, said)
        self.assertNotIn("life 1 of the disk", said)

    def test_and_not_more_often_than_that(self):
        code, said, boots = self.run_server([STALL], [STALL], [STALL, BEGINS, ENDS])
        self.assertEqual((code, boots), (0, stall.BOOTS_MAX), said)
        self.assertEqual(said.count("boots again"), stall.BOOTS_MAX - 1, said)

    def test_what_stands_still_while_it_serves_is_left_alone(self):
        code, said, boots = self.run_server([BEGINS, STALL, ENDS])
        self.assertEqual((code, boots), (0, 1), said)

    def test_only_the_detector_of_stalls_counts(self):
        for line in ("rcu: INFO: rcu_sched self-detected stall on CPU", STALL,
                     "rcu: INFO: rcu_preempt detected expedited stalls on CPUs/tasks: {"):
            self.assertTrue(stall.is_one(line.encode()), line)
        for line in ("", "rcu: Hierarchical RCU implementation.", "nfs: server not responding"):
            self.assertFalse(stall.is_one(line.encode()), line)


if __name__ == "__main__":
    unittest.main()
