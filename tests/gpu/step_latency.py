"""The decision round trip: what a best-effort launch costs when each one is decided, with the core spinning.

Measured in the program around every single `cuLaunchKernel` (so it holds all
there is: submission, policy call, grant, and the completion tracking that the
shim adds to a decided launch), minus the same without the shim; alternating
runs. The core's own decision figures come beside it, from `tallyctl status`.
A program alone normally runs on a lease and is not asked about: here leases are
off (`lease_launches = 0`). `memops` fills its part of the same result file.
"""

from common import Failures, compile_program, step_main
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
QUANTILES = ("p50", "p90", "p99", "p999")


def main(suite):
    """Decision round trip of a best-effort launch."""
    args, failures, found, states = suite.args, Failures(), {}, {}
    program = compile_program(suite, "launch.cpp", "launch")
    spinning = ["--spin-us", str(args.spin_us)]
    for name, (policy, config) in POLICIES.items():
        with failures.guard(name), Core(suite, name, policy, args.residency, config, spinning) as core:
            for _ in range(args.rounds):
                for burst in BURSTS:
                    arguments = ("getproc", args.launches, burst, 1)
                    plain = run_launch(program, None, None, arguments, "")
                    decided = run_launch(program, core, "best-effort", arguments, "decided")
                    found.setdefault((name, burst), []).append((plain, decided))
            state = core.status()
            entry = client(state, "decided")
            states[name] = {key: state[key] for key in ("decision_latency", "held_latency", "policy")} | {
                "client": entry
            }
            if entry is None or not entry["decisions"]["run"]:
                failures.add(f"{name}: the core decided no launch")
            elif entry["decisions"]["leased"]:
                failures.add(f"{name}: {entry['decisions']['leased']} launches ran on a lease, so were not decided")
            row = state["decision_latency"]
            print(f"{name}: the core's own account, p50 {row['p50_us']} us, p99 {row['p99_us']} us", flush=True)
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
        if row["added_p99_us"] > PROMISE_P99_US:
            failures.add(f"{name}, burst {burst}: {row['added_p99_us']} us added at p99, promised <= {PROMISE_P99_US}")
    result = {"residency": args.residency, "spin_us": args.spin_us, "promise_p99_us": PROMISE_P99_US}
    result |= {"rows": rows, "states": states}
    suite.write("latency.json", {**result, "memops": suite.read("latency.json").get("memops")})
    return failures.messages


def add_arguments(parser):
    parser.add_argument("--residency", default="timeslice", choices=("timeslice", "mps", "none"))
    parser.add_argument("--spin-us", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--launches", type=int, default=20_000, help="launches a run")


if __name__ == "__main__":
    step_main("latency", main, add_arguments)
