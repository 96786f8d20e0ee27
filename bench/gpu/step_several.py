"""Several best-effort trainings at once in `timeslice`: whether they get on, and what requests beside them wait for.

For each policy one core with an inference and two trainings that start at the same time. When all
are ready: the inference alone, one training alone, all together, both trainings alone. Then one
training ends, and the other one's time slice must become that of the only one again.
"""

import contextlib
import time

from clients import READY_TIMEOUT_S, Client, soon
from common import Failures, step_main
from procs import wait_until
from stats import percentile, summary
from tally import Core, client, shortfalls

HP_JOB, BE_JOB = "bert-graph", "gpt2-train"
TRAININGS = ("be-a", "be-b")
SEED = 7
WARM_REQUESTS = 300
# A training that gets on ends a step in a tenth of this, several at once.
STEPS_PER_S_MIN = 0.2


def wait_ready(everyone):
    """Seconds until each was ready."""
    begin, ready_s = time.monotonic(), {}
    while len(ready_s) < len(everyone):
        for one in everyone:
            if one.name in ready_s:
                continue
            with contextlib.suppress(TimeoutError):
                one.ready(timeout_s=0.1)
                ready_s[one.name] = round(time.monotonic() - begin, 1)
        if time.monotonic() > begin + READY_TIMEOUT_S:
            late = [one.name for one in everyone if one.name not in ready_s]
            raise TimeoutError(f"{', '.join(late)} not ready after {READY_TIMEOUT_S} s")
    return ready_s


def slices_us(core):
    """The time slice that each connected best-effort client wants."""
    clients = core.status()["clients"]
    return {c["name"]: c["report"]["time_slice_us"] for c in clients if c["class"] == "best-effort"}


def requests(args, hp, rate_per_s, start_at):
    """Poisson arrivals: the same in every measurement."""
    arguments = {"job": HP_JOB, "start_at": start_at, "seconds": args.seconds, "rate_per_s": rate_per_s, "seed": SEED}
    answer = hp.ask("requests", timeout_s=args.seconds * 4 + 30, limit_s=args.seconds * 3, **arguments)
    times_ms = answer["service_ms"]
    return {**summary(times_ms), "p90": round(percentile(times_ms, 0.9), 4), "unserved": answer["unserved"]}


def train(args, trainings, start_at, until_stop=False):
    """Start trainings at the same time."""
    for one in trainings:
        one.send("train", job=BE_JOB, start_at=start_at, seconds=args.seconds, until_stop=until_stop)


def rates(args, trainings):
    """Their steps a second."""
    return [round(one.receive(timeout_s=args.seconds + 60)["steps_per_s"], 4) for one in trainings]


def measure(suite, policy, failures):
    """One core, one row."""
    args = suite.args
    with Core(suite, f"several-{policy}", policy, "timeslice") as core:
        hp = Client(suite, f"hp-{policy}", [HP_JOB], core, "high")
        trainings = [Client(suite, f"{name}-{policy}", [BE_JOB], core, "best-effort") for name in TRAININGS]
        everyone = [hp, *trainings]
        try:
            row = {"policy": policy, "ready_s": wait_ready(everyone), "slices_us": slices_us(core)}
            for note in shortfalls(core.status(), "timeslice", [one.name for one in everyone]):
                failures.add(f"{policy}: {note}")
            rate_per_s = args.load / percentile(hp.ask("closed", job=HP_JOB, n=WARM_REQUESTS)["service_ms"], 0.5) * 1e3
            row["alone_ms"] = requests(args, hp, rate_per_s, soon())
            train(args, trainings[:1], soon())
            row["alone_steps_per_s"] = rates(args, trainings[:1])[0]
            start_at = soon()
            train(args, trainings, start_at, until_stop=True)
            row["together_ms"] = requests(args, hp, rate_per_s, start_at)
            for one in trainings:
                one.process.send({"stop": True})
            row["together_steps_per_s"] = rates(args, trainings)
            train(args, trainings, soon())
            row["without_requests_steps_per_s"] = rates(args, trainings)
            for key in ("together_steps_per_s", "without_requests_steps_per_s"):
                if min(row[key]) < STEPS_PER_S_MIN:
                    failures.add(f"{policy}: {key} {row[key]}: a training does not get on")
            before = row["slices_us"].get(trainings[0].name)
            trainings[1].process.stop(grace_s=0)
            wait_until(lambda: slices_us(core).get(trainings[0].name) != before, 20, "the only training's own time slice")
            row["slice_left_alone_us"] = slices_us(core)[trainings[0].name]
            if client(core.status(), trainings[0].name)["report"]["time_slice"] != "active":
                failures.add(f"{policy}: the time slice of the training that is left is not in force")
            return row
        finally:
            for one in everyone:
                one.process.stop(grace_s=0)


def main(suite):
    """Several trainings, policy by policy."""
    failures, rows = Failures(), []
    for policy in suite.args.policies.split(","):
        with failures.guard(policy):
            rows.append(measure(suite, policy, failures))
            print(rows[-1], flush=True)
            suite.write("several.json", {"hp": HP_JOB, "be": BE_JOB, "load": suite.args.load, "rows": rows})
    return failures.messages


def add_arguments(parser):
    parser.add_argument("--policies", default="tally-priority,fifo", help="comma-separated, of the bundle's")
    parser.add_argument("--seconds", type=float, default=6, help="length of each measurement")
    parser.add_argument("--load", type=float, default=0.5, help="arrival rate times the inference's latency alone")


if __name__ == "__main__":
    step_main("several", main, add_arguments)
