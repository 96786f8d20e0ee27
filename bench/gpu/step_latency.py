"""What a decision costs, with the core spinning.

`roundtrip`: the decision itself, from publishing a launch in the ring until its
answer is seen, by the bundle's `tally-roundtrip` against a core with that
policy; this is what is promised. Core and client are kept on CPUs of their own.
A run's figures depend on what else the host does in that second (all of them, the
median included, may double for a while), so there are many short runs, the policies
take turns, and each figure is the median of the runs.

`rows`: around every single `cuLaunchKernel` of a program (so also the shim, and
the completion writes that follow some gated launches), minus the same without
the shim; alternating runs. Leases are off there (`lease_launches = 0`): alone, a
program would not be asked about. `memops` fills its part of the same file.
"""

import json
import subprocess

from common import Failures, clean_environment, compile_program, step_main
from stats import median, summary
from step_overhead import run_launch
from tally import Core, client

# policy and its configuration, by name
POLICIES = {
    "tally-priority": ("tally-priority", "lease_launches = 0\n"),
    "fifo": ("fifo", None),
}
# 1: the stream is empty at each launch; 64: launches follow each other.
BURSTS = (1, 64)
PROMISE_P99_US = 2.0
# Back to back, and with a pause as of a program that computes between launches.
GAPS_US = (0, 5)
CPU_CORE, CPU_CLIENT = 2, 4
TURN_LAUNCHES = 50_000
QUANTILES = ("p50", "p90", "p99", "p999")


def roundtrip(suite, name, turn):
    """The decision alone, once: one answer a gap."""
    (policy, config), found = POLICIES[name], []
    extra = ["--spin-us", str(suite.args.spin_us), "--pin-cpu", str(CPU_CORE)]
    with Core(suite, f"roundtrip-{name}-{turn}", policy, "none", config, extra) as core:
        for gap in GAPS_US:
            command = ["taskset", "-c", str(CPU_CLIENT), suite.program("tally-roundtrip")]
            command += ["--socket", str(core.socket), "--gap-us", str(gap), "--launches", str(TURN_LAUNCHES)]
            done = subprocess.run(
                command, check=True, capture_output=True, text=True, timeout=30, env=clean_environment()
            )
            found.append({"policy": name, **json.loads(done.stdout)})
            print(found[-1], flush=True)
    return found


def of_runs(runs):
    """A row of {policy, gap_us}: medians over its runs, and the extremes of their p99."""
    row = {key: runs[0][key] for key in ("policy", "gap_us", "launches")}
    row |= {f"{q}_ns": round(median([run[f"{q}_ns"] for run in runs])) for q in QUANTILES}
    p99 = [run["p99_ns"] for run in runs]
    return {**row, "runs": len(runs), "p99_ns_of_runs": [min(p99), max(p99)]}


def main(suite):
    """Decision round trip of a best-effort launch."""
    args, failures, found, states = suite.args, Failures(), {}, {}
    program = compile_program(suite, "launch.cpp", "launch")
    spinning = ["--spin-us", str(args.spin_us)]
    for name, (policy, config) in POLICIES.items():
        with failures.guard(name), Core(suite, name, policy, args.sharing, config, spinning) as core:
            for _ in range(args.rounds):
                for burst in BURSTS:
                    arguments = ("getproc", args.launches, burst, "single")
                    plain = run_launch(program, None, None, arguments, "")
                    decided = run_launch(program, core, "best-effort", arguments, "decided")
                    found.setdefault((name, burst), []).append((plain, decided))
            state = core.status()
            entry = client(state, "decided")
            states[name] = {key: state[key] for key in ("decision_latency", "held_latency")}
            if entry is None or not entry["decisions"]["run"]:
                failures.add(f"{name}: the core decided no launch")
            elif entry["decisions"]["leased"]:
                failures.add(f"{name}: {entry['decisions']['leased']} launches ran on a lease, so were not decided")
            row = state["decision_latency"]
            print(f"{name}: the core's own account, p50 {row['p50_us']} us, p99 {row['p99_us']} us", flush=True)
    trips = {}
    for turn in range(args.turns):
        for name in POLICIES:
            with failures.guard(f"round trip, {name}"):
                for trip in roundtrip(suite, name, turn):
                    trips.setdefault((name, trip["gap_us"]), []).append(trip)
    roundtrips = [of_runs(runs) for runs in trips.values()]
    for row in roundtrips:
        print(row, flush=True)
        if row["gap_us"] == 0 and row["p99_ns"] > PROMISE_P99_US * 1e3:
            failures.add(f"{row['policy']}: round trip p99 {row['p99_ns']} ns, promised <= {PROMISE_P99_US} us")
    rows = []
    for (name, burst), pairs in found.items():
        row = {"policy": name, "burst": burst, "runs": len(pairs)}
        for q in QUANTILES:
            row[f"plain_{q}_us"] = round(median([a[q] for a, _ in pairs]) / 1e3, 3)
            row[f"decided_{q}_us"] = round(median([b[q] for _, b in pairs]) / 1e3, 3)
            row[f"added_{q}_us"] = round(median([b[q] - a[q] for a, b in pairs]) / 1e3, 3)
        row["added_p99_us_of_runs"] = summary([(b["p99"] - a["p99"]) / 1e3 for a, b in pairs])
        rows.append(row)
        print(row, flush=True)
    result = {"sharing": args.sharing, "spin_us": args.spin_us, "promise_p99_us": PROMISE_P99_US}
    result |= {"roundtrip": roundtrips, "rows": rows, "states": states}
    suite.write("latency.json", {**result, "memops": suite.read("latency.json").get("memops")})
    return failures.messages


def add_arguments(parser):
    parser.add_argument("--sharing", default="timeslice", choices=("timeslice", "mps", "none"))
    parser.add_argument("--spin-us", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=15, help="runs of the round trip")
    parser.add_argument("--launches", type=int, default=20_000, help="launches a run")


if __name__ == "__main__":
    step_main("latency", main, add_arguments)
