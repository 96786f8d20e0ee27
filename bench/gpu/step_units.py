"""Units of work of unmodified and of marked programs: the core's counts and times against the program's own.

A server runs as a high-priority client, eager and as a CUDA graph, and serves so many requests one after another; the
core counts them by the program's launches and waits, or by NVTX marks. With two buffers the next request is launched
before the last is waited for. In a decode loop each launch of a CUDA graph is a token, by `--tpot`. With
`client.profile_units` the core also tells a unit's launches and their GPU time, against CUPTI's.
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
# Kernels of 0.1 ms and more, each with an event behind it.
PROFILE_UNITS, BUSY_TOLERANCE = 300, 0.1


def measure(suite, core, case, failures):
    kind, source, buffers = case
    name = f"{kind}-{source}-{buffers}"
    units = PROFILE_UNITS if source == "profile" else suite.args.units
    command = [sys.executable, str(HERE / "unit_job.py"), kind, source, str(buffers), str(units)]
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
        least_ms = own[key.replace("_ms", "_from_launch_ms")] if source in ("activity", "profile") else own[key]
        tolerance_ms = max(P_TOLERANCE * own[key], TOLERANCE_MS)
        if not least_ms - tolerance_ms <= row[key] <= own[key] + tolerance_ms:
            failures.add(f"{name}: {key} {row[key]:.3f}, the program measured {least_ms:.3f} to {own[key]:.3f}")
    if source == "profile":
        row["profile"] = seen.get("profile")
        for note in profile_faults(row["profile"], own):
            failures.add(f"{name}: {note}")
    return row


def profile_faults(profile, own):
    """What the core's profile of a unit says that the program's own does not."""
    if not profile:
        return ["no unit was profiled"]
    faults = []
    if profile["launches"] != own["launches"]:
        faults.append(f"{profile['launches']} launches in a unit, CUPTI has {own['launches']}")
    if abs(profile["gpu_busy_ms"] / own["gpu_busy_ms"] - 1) > BUSY_TOLERANCE:
        faults.append(f"{profile['gpu_busy_ms']:.3f} ms on the GPU, CUPTI has {own['gpu_busy_ms']:.3f}")
    if profile["sms_max"] < 100:
        faults.append(f"kernels of {profile['sms_max']} SMs at most, and they fill the GPU")
    return faults


def main(suite):
    """Counts and times of units."""
    failures, rows = Failures(), []
    config = suite.work / "units.toml"
    config.write_text("[client]\nprofile_units = true\n")
    # Profiled units are apart: the others' times are those of the usual settings.
    for number, (extra, cases) in enumerate([((), CASES), (("--config", config), [("eager", "profile", 1)])]):
        measure_cases(suite, f"units-{number}", extra, cases, rows, failures)
    return failures.messages


def measure_cases(suite, name, extra, cases, rows, failures):
    with Core(suite, name, "tally-priority", suite.args.sharing, extra=extra) as core:
        for case in cases:
            with failures.guard("-".join(map(str, case))):
                rows.append(measure(suite, core, case, failures))
                print(rows[-1], flush=True)
                suite.write("units.json", {"sharing": suite.args.sharing, "rows": rows})


def add_arguments(parser):
    parser.add_argument("--units", type=int, default=1000, help="requests a program serves")
    parser.add_argument("--sharing", default="timeslice", choices=("timeslice", "mps", "none"))


if __name__ == "__main__":
    step_main("units", main, add_arguments)
