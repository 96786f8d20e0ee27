"""Every launch that CUPTI saw, the shim counted: stock PyTorch programs, as high priority and as best effort.

Both clients run at the same time: counting does not depend on time, and the
best-effort side then takes the path of held launches too. The `fifo` policy
starves nobody.
"""

import contextlib
import json
import sys

from common import HERE, Failures, clean_environment, step_main
from procs import Process
from tally import Core

CLIENTS = {"count-high": "high", "count-best-effort": "best-effort"}
TIMEOUT_S = 170


def main(suite):
    """Count launches twice and compare."""
    failures, rows = Failures(), []
    variables = {
        "SUITE_TALLYCTL": suite.program("tallyctl"),
        # One process, one client: Inductor compiles in it, not in workers of its own.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        # CUPTI stays up between profiles, so that graphs captured before a profile keep their records.
        "DISABLE_CUPTI_LAZY_REINIT": "1",
        "TEARDOWN_CUPTI": "0",
    }
    with Core(suite, "count", "fifo", suite.args.sharing) as core, contextlib.ExitStack() as stack:
        variables["SUITE_SOCKET"] = str(core.socket)
        running = {}
        for name, priority in CLIENTS.items():
            caches = {
                "TORCHINDUCTOR_CACHE_DIR": str(suite.work / name),
                "TRITON_CACHE_DIR": str(suite.work / f"{name}-triton"),
            }
            environment = clean_environment(**variables, **caches)
            environment["TALLY_SHIM_LOG"] = str(suite.logs / f"shim-{name}.log")
            command = [sys.executable, HERE / "count_job.py", name, suite.logs / f"{name}.json"]
            command = core.client_command(priority, name, command)
            process = Process(command, suite.logs / f"{name}.log", environment)
            running[name] = stack.enter_context(process)
            if suite.args.in_turn:
                process.wait(TIMEOUT_S)
        for name, process in running.items():
            with failures.guard(name):
                code = process.wait(TIMEOUT_S)
                if code != 0:
                    failures.add(f"{name} ended with {code}; its log ends:\n{process.tail()}")
                for row in json.loads((suite.logs / f"{name}.json").read_text()):
                    rows.append({"priority": CLIENTS[name], **row})
                    if not row["equal"]:
                        failures.add(f"{name}, {row['job']}: {row.get('error') or row['differences']}")
                    print(f"{name} {row['job']} equal={row['equal']} kernels={row.get('profiler_kernels')}", flush=True)
    suite.write("counts.json", {"sharing": suite.args.sharing, "rows": rows})
    return failures.messages


def add_arguments(parser):
    parser.add_argument("--sharing", default="timeslice", choices=("timeslice", "mps", "none"))
    parser.add_argument("--in-turn", action="store_true", help="one client after the other")


if __name__ == "__main__":
    step_main("count", main, add_arguments)
