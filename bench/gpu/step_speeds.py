"""The two speeds of a GPU's context: what makes it slow, what makes it fast again, what the core does about it.

An inference as one CUDA graph, and a graph of very many very small kernels, alone, by themselves and
under MPS: as the program starts, after kernels in two streams, after something else has used the GPU. Then
the inference beside a training under the core in `mps`, with and without `[sharing.mps] refresh_ms`,
launches on some of the SMs, and short windows. See docs/internals.md.
"""

import contextlib
import sys

from clients import Client, soon, started
from common import Failures, step_main
from stats import percentile, summary
from tally import Core, MpsDaemon, client, shortfalls

HP_JOB, SMALL_JOB, BE_JOB = "bert-graph", "small-kernels-graph", "gpt2-train"
SEED = 7
# A graph's time is the median of so many.
REQUESTS = 150
# Name: the core's configuration, the policy's.
NEVER = "[sharing.mps]\nrefresh_ms = 0\n"
UNDER_THE_CORE = {
    "as it comes": ("", None),
    "never refreshed": (NEVER, None),
    "never on some of the SMs": ("", "reserve_sms = 0\n"),
    "never refreshed nor on some of the SMs": (NEVER, "reserve_sms = 0\n"),
    "short windows": ("", "window_us = 200\n"),
}


def speeds(hp):
    """Medians of both graphs, ms."""
    return {job: round(percentile(hp.ask("closed", job=job, n=REQUESTS)["service_ms"], 0.5), 4) for job in (HP_JOB, SMALL_JOB)}


def alone(suite, where, hp_env, other_env):
    """A program and what happens to it; one row a state."""
    rows = []

    def add(state):
        rows.append({"where": where, "state": state, **speeds(hp)})
        print(rows[-1], flush=True)

    with contextlib.ExitStack() as stack:
        hp = Client(suite, f"hp-{where}", [HP_JOB, SMALL_JOB], env=hp_env)
        stack.enter_context(started([hp]))
        add("as it starts")
        hp.ask("streams", job=SMALL_JOB)
        add("after kernels in two streams")
        other = Client(suite, f"other-{where}", [SMALL_JOB], env=other_env)
        stack.enter_context(started([other]))
        add("another program has started")
        hp.ask("streams", job=SMALL_JOB)
        add("after kernels in two streams, the other idle")
        other.ask("closed", job=SMALL_JOB, n=1)
        add("after a kernel of the other's")
    return rows


def beside(suite, name, alone_ms, rate_per_s, failures):
    """Under the core in `mps`: the inference before and after the training trained, and beside it."""
    args, (core_config, policy_config) = suite.args, UNDER_THE_CORE[name]
    number = list(UNDER_THE_CORE).index(name)
    file = suite.work / f"speeds-{number}.toml"
    vendor = "[rewrite]\nvendor_libraries = true\n" if args.vendor else ""
    file.write_text(vendor + core_config)
    with contextlib.ExitStack() as stack:
        core = stack.enter_context(Core(suite, f"speeds-{number}", "tally-priority", "mps", policy_config, ["--config", file]))
        hp = Client(suite, f"hp-{number}", [HP_JOB, SMALL_JOB], core, "high")
        be = Client(suite, f"be-{number}", [BE_JOB], core, "best-effort")
        stack.enter_context(started([hp, be]))
        for note in shortfalls(core.status(), "mps", [hp.name, be.name]):
            failures.add(f"{name}: {note}")
        row = {"name": name, "ready_ms": speeds(hp)}
        trained = be.ask("train", job=BE_JOB, start_at=soon(), seconds=args.seconds, timeout_s=args.seconds + 60)
        row["trained_ms"] = speeds(hp)
        start_at = soon()
        be.send("train", job=BE_JOB, start_at=start_at, seconds=args.seconds, until_stop=True)
        arguments = {"job": HP_JOB, "start_at": start_at, "seconds": args.seconds, "rate_per_s": rate_per_s, "seed": SEED}
        served = hp.ask("requests", timeout_s=args.seconds * 3 + 30, limit_s=args.seconds * 2, **arguments)
        be.process.send({"stop": True})
        shared = be.receive(timeout_s=args.seconds + 60)
        state = core.status()
        row["requests_ms"] = summary(served["service_ms"])
        row["p99_over_alone"] = round(percentile(served["service_ms"], 0.99) / alone_ms, 4)
        row["be_share"] = round(shared["steps_per_s"] / trained["steps_per_s"], 4)
        row["transformed"] = client(state, be.name)["transformed"]
        row["refreshed"] = state["sharing"]["refresh"]
        refreshed = row["refreshed"] or {}
        if core_config != NEVER and not (refreshed.get("count") and refreshed["state"] == "running"):
            failures.add(f"{name}: contexts were not refreshed: {row['refreshed']}")
        return row


def main(suite):
    """Alone, then under the core."""
    args, failures = suite.args, Failures()
    result = {"hp": HP_JOB, "be": BE_JOB, "load": args.load, "vendor_rewrite": args.vendor, "alone": [], "beside": []}
    name_of_result = "speeds-vendor.json" if args.vendor else "speeds.json"
    wanted = args.only.replace("_", " ").split(",") if args.only else list(UNDER_THE_CORE)
    if unknown := [name for name in wanted if name not in UNDER_THE_CORE]:
        sys.exit(f"unknown: {unknown}; there are {list(UNDER_THE_CORE)}")
    with failures.guard("alone"):
        result["alone"] += alone(suite, "by itself", {}, {})
    with failures.guard("mps"), MpsDaemon(suite) as daemon:
        # The other one stays outside of it.
        result["alone"] += alone(suite, "mps", daemon.environment, {})
    suite.write(name_of_result, result)
    # Fast: another program is there.
    fast = [row[HP_JOB] for row in result["alone"] if row["where"] == "by itself" and row["state"] == "after a kernel of the other's"]
    if not fast:
        return failures.messages
    for name in wanted:
        with failures.guard(name):
            result["beside"].append(beside(suite, name, fast[0], args.load / fast[0] * 1e3, failures))
            print(result["beside"][-1], flush=True)
            suite.write(name_of_result, result)
    return failures.messages


def add_arguments(parser):
    parser.add_argument("--seconds", type=float, default=6, help="length of each measurement")
    parser.add_argument("--load", type=float, default=0.5, help="arrival rate times the inference's latency alone")
    parser.add_argument("--only", help=f"comma-separated, of {', '.join(UNDER_THE_CORE)}; spaces may be underscores")
    parser.add_argument("--vendor", action="store_true", help="transform kernels of closed libraries, too: read docs/operate.md first")


if __name__ == "__main__":
    step_main("speeds", main, add_arguments)
