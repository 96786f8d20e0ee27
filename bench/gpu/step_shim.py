"""The shim's own tests of transformed launches and of graphs in parts, on this GPU in place of the software device.

Each test is a process of its own, with a program as a second one; what they compare is exact (memory,
counts of runs of each block, counters). Tests of a faulty device, and those that count what only a device of few SMs can hold,
say something about the software device only: they are left out, by name.
"""

import concurrent.futures
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

from common import SYSTEM_LIBRARIES, Failures, clean_environment, step_main
from procs import threads

BINARIES = ("forms", "graphs")
# Why a test says nothing here, by a part of its name.
LEFT_OUT = {
    "at_once_or_whole": "the software device is made to hold fewer blocks",
    "part_that_fails": "the software device is made to fail",
    "finds_the_context_in_error": "the same",
    "cannot_go_in_parts": "the same",
    "is_refused_runs_whole": "the same",
    "keeps_its_hints": "the software device is made to refuse launches without",
    "a_full_stream": "the software device is told how many launches a stream takes",
    "goes_wrong": "the software device is made to go wrong",
    "unseen": "a compiler for a GPU loads once where a plain load is to wait",
    "is_helped": "the same",
    "nothing_is_stuck": "the same",
    "be_helped_first": "the same",
    "not_limited_again": "the same",
    "long_last_slice": "the same",
    "whose_blocks_may_wait": "the same",
    "files_that_end_early": "what a driver answers is its own",
    "opened_by_the_driver_only": "the same",
    "failed_load_says": "the same",
    "whatever_a_driver_answers": "the same",
    "debugger_that_attaches": "a driver that is told so waits for the debugger",
    "priority_of_its_stream": "the software device's kernels are slow enough to see which is first",
    "lingering": "of time slices: `pairs` and `correct` are",
}
DEBUGGER_FLAG = "cudbgIpcFlag"
TEST_LIMIT_S = 60
# When to note what its threads are at: tests wait 20 s for what does not come.
LOOK_AFTER_S = 15
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


def has_debugger_flag():
    """Whether this driver has what the shim watches for a debugger; in a process of its own."""
    code = "import ctypes, sys; ctypes.c_uint32.in_dll(ctypes.CDLL(sys.argv[1]), sys.argv[2])"
    return subprocess.run([sys.executable, "-c", code, str(driver()), DEBUGGER_FLAG], env=clean_environment(), check=False).returncode == 0


def left_out(name):
    """Why, or None."""
    return next((why for part, why in LEFT_OUT.items() if part in name), None)


def names(listing):
    """The tests that a binary lists (`--list --format terse`)."""
    return [line.removesuffix(": test") for line in listing.splitlines() if line.endswith(": test")]


def run(binary, name, env, folder):
    """One test: its row, and what it and the shim said unless it passed."""
    begin = time.monotonic()
    log = folder / f"shim-{name.replace(':', '-')}.log"
    env = {**env, "TALLY_TEST_TRACE": "1", "TALLY_SHIM_LOG": str(log)}
    # A session of its own, so that its program ends with it.
    with subprocess.Popen([binary, name, "--exact"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True) as test:
        at = ""
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                test.communicate(timeout=LOOK_AFTER_S)
            if test.poll() is None:
                # Before the test gives up.
                at = threads(lambda _, session: session == test.pid)
            words = test.communicate(timeout=TEST_LIMIT_S)[0]
            state = "passed" if test.returncode == 0 else "failed"
        except subprocess.TimeoutExpired:
            os.killpg(test.pid, signal.SIGKILL)
            state, words = "hung", test.communicate()[0]
        shim = log.read_text(errors="replace")[-2000:] if log.exists() else ""
    row = {"test": name, "state": state, "seconds": round(time.monotonic() - begin, 2)}
    return row, "" if state == "passed" else f"{at}\n{words[-5000:]}\n{shim}"


def main(suite):
    """All of both binaries, some at once."""
    failures, rows, wanted = Failures(), [], []
    env = clean_environment(**{ENV_DRIVER: str(driver()), "RUST_BACKTRACE": "0"})
    for binary in BINARIES:
        program = suite.program(f"tests/{binary}")
        listed = subprocess.run(
            [program, "--list", "--format", "terse"], check=True, capture_output=True, text=True, timeout=30, env=env
        )
        for name in names(listed.stdout):
            if why := left_out(name):
                rows.append({"binary": binary, "test": name, "state": "left out", "why": why})
            elif any(part in name for part in suite.args.only.split(",")):
                wanted.append((binary, program, name))
    if not has_debugger_flag():
        failures.add(f"{driver()} has no variable {DEBUGGER_FLAG}: the shim does not see that a debugger attaches")
    if not wanted:
        failures.add(f"no test has {suite.args.only!r} in its name")
    with concurrent.futures.ThreadPoolExecutor(suite.args.at_once) as pool:
        running = {pool.submit(run, program, name, env, suite.work): binary for binary, program, name in wanted}
        for done in concurrent.futures.as_completed(running):
            (row, words), binary = done.result(), running[done]
            rows.append({"binary": binary, **row})
            print(rows[-1], flush=True)
            if row["state"] != "passed":
                print(f"--- {row['test']}\n{words}", flush=True)
                failures.add(f"{binary} {row['test']}: {row['state']}")
            suite.write("shim.json", {"rows": rows})
    return failures.messages


def add_arguments(parser):
    parser.add_argument("--only", default="", help="tests with one of these in their names, comma-separated")
    # Each takes a while to start CUDA, in which the GPU is idle.
    parser.add_argument("--at-once", type=int, default=4, help="so many tests at the same time")


if __name__ == "__main__":
    step_main("shim", main, add_arguments)
