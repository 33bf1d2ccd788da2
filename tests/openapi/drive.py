"""Starts an appliance, has schemathesis call it by its own document, and looks at what is left.

    document of the server --> schemathesis --calls--> slackwaterd
                               its checks: status, media type, headers and body of each answer are documented;
                               good calls are taken, bad ones refused; no answer says that the server failed
    then: no error in the server's log, and a clean store

The calls come from a seed, which is printed. schemathesis.toml and hooks.py say what no schema tells. The face of
VMstore is not called: its types are those of another's API, and leave most open.
"""

import argparse
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "guest"))

import appliance

# It guards nothing but a test.
TOKEN = "openapi-test-token"
# Calls that are made at random for each operation. Those of the phase "coverage", of each bound and each missing part,
# are some thousand beside them.
EXAMPLES = 10
# Ten times what it takes on an idle machine: beyond that something hangs.
RUN_LIMIT_SECONDS = 1200
REQUEST_LIMIT_SECONDS = 60
# Of the tester, which reads answers into memory: else a large one is the end of the machine's.
MEMORY_BYTES = 4 << 30
TAIL_LINES = 40
SEED = "SLACKWATER_OPENAPI_SEED"
# The same choices in each run, but for ids that the server makes: a run should not fail by luck.
DEFAULT_SEED = 1
# Wrong tokens would lock out the tester's address, and its good calls with it. api/tests/rest/guessing.rs has them.
CHECKS_LEFT_OUT = ["ignored_auth"]
# Paths have slashes, which are generated and thrown away often; and no verdict depends on the machine's speed.
HEALTH_CHECKS_LEFT_OUT = ["filter_too_much", "too_slow"]
# It makes some 1,350. Far fewer, and something is left out.
CALLS_MIN = 1000


def say(text):
    """Progress, at once."""
    print(text, flush=True)


def call_all(server, scratch, seed, arguments):
    """Has schemathesis make its calls; returns its exit code."""
    command = [
        *appliance.LEASH, "prlimit", f"--as={MEMORY_BYTES}", pathlib.Path(sys.executable).with_name("schemathesis"),
        "--config-file", HERE / "schemathesis.toml",
        "run", f"http://127.0.0.1:{server.api_port}/openapi.json",
        "--header", f"Authorization: Bearer {TOKEN}",
        "--phases", "examples,coverage,fuzzing", "--max-examples", str(EXAMPLES), "--seed", str(seed),
        "--exclude-checks", ",".join(CHECKS_LEFT_OUT),
        "--suppress-health-check", ",".join(HEALTH_CHECKS_LEFT_OUT),
        "--request-timeout", str(REQUEST_LIMIT_SECONDS), "--no-color", *arguments,
    ]
    # It keeps the examples that it found in the working directory.
    environment = {
        **os.environ, "SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": str(HERE), "NO_PROXY": "*", "no_proxy": "*",
    }
    said = scratch / "said"
    with said.open("wb") as output:
        code = subprocess.run(
            command, check=False, cwd=scratch, env=environment, timeout=RUN_LIMIT_SECONDS, stdout=output, stderr=output,
        ).returncode
    text = said.read_text("utf-8", "replace")
    say(text)
    calls = re.search(r"^  (\d+) generated", text, re.MULTILINE)
    if code == 0 and (calls is None or int(calls[1]) < CALLS_MIN):
        say(f"FAIL  fewer than {CALLS_MIN} calls were made")
        return 1
    return code


def faults(server):
    """What is wrong with the appliance after the calls."""
    found = []
    report = server.call("POST", "/v1/check", {"data": True})
    if not report["clean"]:
        found.append(f"the store is not clean: {report}")
    server.stop()
    log = server.log_path.read_text("utf-8", "replace")
    bad = [line for line in log.splitlines() if re.search(r"panicked|[Cc]orrupt| ERROR ", line)]
    return found + [f"the server's log has: {line}" for line in bad[:3]]


def run(scratch, arguments):
    """Returns the exit code."""
    chosen = os.environ.get(SEED) or DEFAULT_SEED
    seed = random.SystemRandom().randrange(1 << 32) if chosen == "any" else int(chosen)
    say(f"seed {seed}; the same calls: {SEED}={seed} tests/openapi/run")
    server = appliance.Appliance(
        os.environ["SLACKWATERD"], scratch / "data", scratch / "server.log", token=TOKEN
    )
    try:
        server.start()
        code = call_all(server, scratch, seed, arguments)
        found = faults(server)
    except (appliance.ApplianceError, OSError, subprocess.TimeoutExpired) as error:
        code, found = 0, [str(error)]
    finally:
        server.kill()
    for fault in found:
        say(f"FAIL  {fault}")
    if code or found:
        say(f"--- end of the server's log\n{server.log_tail(TAIL_LINES)}")
    return 1 if code or found else 0


def main():
    """Entry point."""
    parser = argparse.ArgumentParser(description="The OpenAPI document, tried by schemathesis.")
    parser.add_argument("--scratch", type=pathlib.Path, required=True, help=argparse.SUPPRESS)
    options, arguments = parser.parse_known_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(130))
    try:
        return run(options.scratch, arguments)
    finally:
        # A second Ctrl-C does not end this half way.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        shutil.rmtree(options.scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
