"""Which driver calls wait for what is in other streams of their context, each tried in a process of its own.

What yields waits at a gate in its stream, and a kernel that is stuck has to be helped by a launch beside it:
a call that waits for either holds its thread up, and one that keeps others from launching meanwhile keeps help
away (docs/internals.md, "Rescue"). Needs no core.
"""

import concurrent.futures
import json
import pathlib
import subprocess
import sys

from common import Failures, clean_environment, step_main
from step_shim import driver
from wait_job import ACTIONS, BESIDE, STATES

JOB = pathlib.Path(__file__).with_name("wait_job.py")
LIMIT_S = 12
AT_ONCE = 8
# Kernels are loaded when they are first needed unless this says otherwise.
LOADING = ("LAZY", "EAGER")
# What loads a kernel.
LOADS = ("launch_first_time", "get_function", "get_function_and_launch", "get_function_and_launch_in_same_stream", "load_module", "load_function", "get_global", "get_global_again", "get_other_global", "get_library_global", "get_other_library_global", "instantiate_graph")


def cases(wanted):
    """(loading, state, action, what another thread does)."""
    for state in STATES:
        yield from (("LAZY", state, action, None) for action in ACTIONS if action in wanted)
        yield from (("EAGER", state, action, None) for action in LOADS if action in wanted)
        yield from (("LAZY", state, "launch_known_high", beside) for beside in BESIDE if beside in wanted)


def run(loading, state, action, beside):
    """One case's row."""
    command = [sys.executable, str(JOB), state, action, "--driver", str(driver())]
    command += ["--beside", beside] if beside else []
    env = clean_environment(CUDA_MODULE_LOADING=loading)
    row = {"loading": loading, "state": state, "action": action, "beside": beside}
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_S, env=env)
    except subprocess.TimeoutExpired:
        return {**row, "waits": True, "hung": True}
    if done.returncode:
        return {**row, "error": done.stderr[-300:]}
    return {**row, **json.loads(done.stdout)}


def main(suite):
    """All cases, some at once."""
    failures, rows = Failures(), []
    wanted = suite.args.actions.split(",") if suite.args.actions else (*ACTIONS, *BESIDE)
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        for row in pool.map(lambda case: run(*case), cases(wanted)):
            rows.append(row)
            print(row, flush=True)
            if "error" in row:
                failures.add(f"{row['action']} while {row['state']}: {row['error']}")
            # The context's synchronisation waits for everything, or nothing is measured here.
            if row["action"] == "synchronize_context" and not row.get("waits"):
                failures.add(f"while {row['state']} nothing was waited for")
            suite.write("waits.json", {"rows": rows})
    return failures.messages


def add_arguments(parser):
    parser.add_argument("--actions", default="", help="comma-separated; all if left out")


if __name__ == "__main__":
    step_main("waits", main, add_arguments)
