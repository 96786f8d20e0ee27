"""Units of work of unmodified and of marked programs: the core's counts and times against the program's own.

A server runs as a high-priority client, eager and as a CUDA graph, and serves so many requests one after another; the
core counts them by the program's launches and waits, or by NVTX marks. With two buffers the next request is launched
before the last is waited for. In a decode loop each launch of a CUDA graph is a token, by `--tpot`.
"""

import json
import subprocess
import sys

from common import HERE, Failures, clean_environment, step_main
from procs import wait_until
from tally import Core, client

# (kind, source, buffers)
CASES = [(kind, "activity", buffers) for kind in ("eager", "graph") for buffers in (1, 2)] + [(kind, "marks", 1) for kind in ("eager", "graph")]
CASES += [("graph", "tokens", buffers) for buffers in (1, 2)]
P_TOLERANCE = 0.02
# The core's histogram tells 1 % apart.
TOLERANCE_MS = 0.03


def measure(suite, core, case, failures):
    kind, source, buffers = case
    name = f"{kind}-{source}-{buffers}"
    command = [sys.executable, str(HERE / "unit_job.py"), kind, source, str(buffers), str(suite.args.units)]
    options = ["--tpot", "1s"] if source == "tokens" else []
    command = [str(part) for part in core.client_command("high", name, command, options)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    child = subprocess.Popen(command, env=clean_environment(), **pipes)
    try:
        json.loads(child.stdout.readline())
        service = lambda: (client(core.status(), name) or {}).get("service") or {}
        wait_until(lambda: service() or None, 10, f"the service of {name}", every_s=0.1)
        # With another objective recent figures begin anew: without the warm-up.
        core.ctl("client", "set", name, "--slo", "1s", *(["--tpot", "2s"] if source == "tokens" else []))
        tokens = lambda: (service().get("marks") or {}).get("tokens") or {}
        count = lambda: tokens().get("count", 0) if source == "tokens" else service()["requests"]
        before = 0 if source == "marks" else count()
        child.stdin.write("\n")
        child.stdin.flush()
        own = json.loads(child.stdout.readline())
        done = lambda: count() - before >= own["units"] or None
        try:
            wait_until(done, 5, f"{own['units']} units of {name}", every_s=0.2)
        except TimeoutError as error:
            failures.add(str(error))
        seen, counted = service(), count() - before
        times = tokens() if source == "tokens" else seen
    finally:
        child.stdin.close()
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
    row = {"kind": kind, "source": source, "buffers": buffers, "own": own, "requests": counted, "p50_ms": times["p50_ms"], "p99_ms": times["p99_ms"]}
    row["marks"] = seen.get("marks")
    if row["requests"] != own["units"]:
        failures.add(f"{name}: {row['requests']} units, the program counted {own['units']}")
    for key in ("p50_ms", "p99_ms"):
        # Without marks the core's clock begins at the first launch, for which the program prepares a while.
        least_ms = own[key.replace("_ms", "_from_launch_ms")] if source == "activity" else own[key]
        tolerance_ms = max(P_TOLERANCE * own[key], TOLERANCE_MS)
        if not least_ms - tolerance_ms <= row[key] <= own[key] + tolerance_ms:
            failures.add(f"{name}: {key} {row[key]:.3f}, the program measured {least_ms:.3f} to {own[key]:.3f}")
    return row


def main(suite):
    """Counts and times of units."""
    failures, rows = Failures(), []
    with Core(suite, "units", "tally-priority", suite.args.sharing) as core:
        for case in CASES:
            with failures.guard("-".join(map(str, case))):
                rows.append(measure(suite, core, case, failures))
                print(rows[-1], flush=True)
                suite.write("units.json", {"sharing": suite.args.sharing, "rows": rows})
    return failures.messages


def add_arguments(parser):
    parser.add_argument("--units", type=int, default=1000, help="requests a program serves")
    parser.add_argument("--sharing", default="timeslice", choices=("timeslice", "mps", "none"))


if __name__ == "__main__":
    step_main("units", main, add_arguments)
