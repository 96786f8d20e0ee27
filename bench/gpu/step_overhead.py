"""What the shim costs a program that is alone: per request, and per launch.

Requests: plain and high-priority ResNet-50 processes all stay alive and are
measured in turn, a fraction of a second each, round after round; one that is
not measured is idle. So slow drifts (clocks, heat) hit both kinds alike, and several processes of a kind average what differs from one process to
the next (address layout, placement). Clients of each class have a core of their
own, so each class is alone from its core's view. `noise` is the ratio between two halves
of the plain processes: differences below it mean nothing.

Launches, also of best-effort clients: `native/launch.cpp`, which in each process compares bursts by way of
the shim with bursts straight into the driver, in turns: processes differ by
more than the shim costs. In a plain process both are the same: the noise.
"""

import json
import subprocess

from clients import Client, started
from common import Failures, clean_environment, compile_program, step_main
from stats import median, paired_ratio, summary
from tally import Core

KINDS = {"plain": None, "high": "high", "best-effort": "best-effort"}
JOBS = {"resnet50-eager": 120, "resnet50-graph": 400}  # requests a turn
DISCARD = 20  # first requests of a turn: the GPU has just changed process
ENTRY_POINTS = ("link", "dlopen", "getproc")
PROMISE_RATIO_MAX = 1.005
# Launches of a request of resnet50-eager, as CUPTI counts them (counts.json).
EAGER_LAUNCHES = 280
BURST = 250


def measure_requests(suite, cores, failures):
    """Rows of {job, kind, ratio to plain, spread, noise}."""
    args = suite.args
    # Not as best-effort: several such processes on one GPU take turns in short slices.
    kinds = ("plain", "high")
    clients = [
        Client(suite, f"{kind}-{i}", list(JOBS), cores.get(kind), KINDS[kind], {"PYTHONHASHSEED": "0"})
        for i in range(args.processes)
        for kind in kinds
    ]
    times = {(job, client.name): [] for job in JOBS for client in clients}
    with started(clients):
        for turn in range(args.rounds):
            order = clients if turn % 2 == 0 else clients[::-1]
            for job, n in JOBS.items():
                for client in order:
                    service_ms = client.ask("closed", job=job, n=n + DISCARD)["service_ms"]
                    times[job, client.name].append(median(service_ms[DISCARD:]))

    def of_round(job, kind, turn, members):
        return median([times[job, f"{kind}-{i}"][turn] for i in members])

    rows, everyone = [], range(args.processes)
    for job in JOBS:
        rounds = range(args.rounds)
        plain = [of_round(job, "plain", r, everyone) for r in rounds]
        half = max(1, args.processes // 2)
        noise = None
        if args.processes > 1:
            first = [of_round(job, "plain", r, range(half)) for r in rounds]
            second = [of_round(job, "plain", r, range(half, args.processes)) for r in rounds]
            noise = round(abs(paired_ratio(first, second)["ratio"] - 1), 5)
        for kind in kinds[1:]:
            mine = [of_round(job, kind, r, everyone) for r in rounds]
            row = {
                "job": job,
                "kind": kind,
                "plain_ms": round(median(plain), 5),
                "with_shim_ms": round(median(mine), 5),
            }
            row |= {**paired_ratio(plain, mine), "noise": noise, "processes": args.processes}
            row["process_ms"] = {n: round(median(v), 5) for (j, n), v in times.items() if j == job}
            rows.append(row)
            print(row, flush=True)
            # Beyond both the promise and what two plain processes differ by.
            if row["ratio_low"] > PROMISE_RATIO_MAX + (noise or 0):
                failures.add(f"{job} as {kind}: {row['ratio']:.4f} of plain, promised <= {PROMISE_RATIO_MAX}")
    return rows


def run_launch(program, core, kind, arguments, name):
    """One run of the launch program, plain or as a client; its result."""
    command = [program, *map(str, arguments)]
    if core is not None:
        command = core.client_command(kind, name, command)
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, env=clean_environment())
    if done.returncode:
        raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr[-800:]}")
    return json.loads(done.stdout)


def measure_launches(suite, cores):
    """Rows of {entry point, kind, added ns a launch, noise}: medians of each process, and over the processes."""
    args, program = suite.args, compile_program(suite, "launch.cpp", "launch")
    found = {}
    for _ in range(args.launch_rounds):
        for entry_point in ENTRY_POINTS:
            for kind, priority in KINDS.items():
                result = run_launch(program, cores.get(kind), priority, (entry_point, args.launches, BURST, "paired"), f"launch-{kind}")
                found.setdefault((entry_point, kind), []).append(result)
    rows = []
    for entry_point in ENTRY_POINTS:
        noise = median([abs(run["added_p50"]) for run in found[entry_point, "plain"]])
        for kind in KINDS:
            if kind != "plain":
                rows.append(launch_row(entry_point, kind, found[entry_point, kind], noise))
                print(rows[-1], flush=True)
    return rows


def launch_row(entry_point, kind, runs, noise_ns):
    """What the runs of one kind say together."""
    added, plain_ns = [run["added_p50"] for run in runs], median([run["p50"] for run in runs])
    row = {"entry_point": entry_point, "kind": kind, "plain_ns": round(plain_ns, 1), "with_shim_ns": round(plain_ns + median(added), 1)}
    row |= {"added_ns": {**summary(added), "p50": round(median(added), 1)}, "noise_ns": round(noise_ns, 1)}
    return row


def main(suite):
    """Cost of the shim for a program that is alone."""
    failures, result = Failures(), {"sharing": suite.args.sharing, "promise_ratio_max": PROMISE_RATIO_MAX}
    result["eager_launches"] = EAGER_LAUNCHES
    with (
        Core(suite, "high", "tally-priority", suite.args.sharing) as high,
        Core(suite, "best-effort", "tally-priority", suite.args.sharing) as best_effort,
    ):
        cores = {"high": high, "best-effort": best_effort}
        with failures.guard("launches"):
            result["launches"] = measure_launches(suite, cores)
            suite.write("overhead.json", result)
        with failures.guard("requests"):
            result["requests"] = measure_requests(suite, cores, failures)
        with failures.guard("status"):
            result["clients"] = {kind: core.status()["departed"][:1] for kind, core in cores.items()}
    suite.write("overhead.json", result)
    return failures.messages


def add_arguments(parser):
    parser.add_argument("--sharing", default="none", choices=("timeslice", "mps", "none"))
    parser.add_argument("--rounds", type=int, default=10, help="turns of every process")
    parser.add_argument("--processes", type=int, default=2, help="processes of each kind")
    parser.add_argument("--launch-rounds", type=int, default=5)
    parser.add_argument("--launches", type=int, default=200_000, help="launches a run")


if __name__ == "__main__":
    step_main("overhead", main, add_arguments)
