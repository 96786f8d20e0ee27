"""The shim's own tests of cut launches and of graphs in parts, on this GPU in place of the software device.

Each test is a process of its own, with a program as a second one; what they compare is exact (memory,
counts of runs of each block, counters). Tests of a faulty device, and those that count what only a device of few SMs can hold,
say something about the software device only: they are left out, by name.
"""

import os
import pathlib
import subprocess
import time

from common import SYSTEM_LIBRARIES, Failures, clean_environment, step_main

BINARIES = ("cut", "graphs")
# Why a test says nothing here, by a part of its name.
LEFT_OUT = {
    "part_that_fails": "the software device is made to fail",
    "lingering": "of time slices: `pairs` and `correct` are",
}
TEST_LIMIT_S = 60
ENV_DRIVER = "TALLY_TEST_DRIVER"


def driver():
    """The GPU's library, by its path, or what is named in its place."""
    if named := os.environ.get(ENV_DRIVER):
        return named
    for folder in SYSTEM_LIBRARIES:
        path = pathlib.Path(folder) / "libcuda.so.1"
        if path.exists():
            return path
    raise FileNotFoundError(f"no libcuda.so.1 in {', '.join(SYSTEM_LIBRARIES)}")


def left_out(name):
    """Why, or None."""
    return next((why for part, why in LEFT_OUT.items() if part in name), None)


def names(listing):
    """The tests that a binary lists (`--list --format terse`)."""
    return [line.removesuffix(": test") for line in listing.splitlines() if line.endswith(": test")]


def run(binary, name, env):
    """One test: its row."""
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [binary, name, "--exact"], check=False, capture_output=True, text=True, timeout=TEST_LIMIT_S, env=env
        )
        state = "passed" if done.returncode == 0 else "failed"
        said = done.stdout + done.stderr
    except subprocess.TimeoutExpired as late:
        state, said = "hung", (late.stderr or b"").decode(errors="replace")
    row = {"test": name, "state": state, "seconds": round(time.monotonic() - begin, 2)}
    if state != "passed":
        print(f"--- {name}\n{said[-3000:]}", flush=True)
    return row


def main(suite):
    """All of both binaries."""
    failures, rows = Failures(), []
    env = clean_environment(**{ENV_DRIVER: str(driver()), "RUST_BACKTRACE": "0"})
    for binary in BINARIES:
        program = suite.program(f"tests/{binary}")
        listed = subprocess.run(
            [program, "--list", "--format", "terse"], check=True, capture_output=True, text=True, timeout=30, env=env
        )
        for name in names(listed.stdout):
            if why := left_out(name):
                rows.append({"binary": binary, "test": name, "state": "left out", "why": why})
                continue
            rows.append({"binary": binary, **run(program, name, env)})
            print(rows[-1], flush=True)
            if rows[-1]["state"] != "passed":
                failures.add(f"{binary} {name}: {rows[-1]['state']}")
            suite.write("shim.json", {"rows": rows})
    return failures.messages


if __name__ == "__main__":
    step_main("shim", main)
