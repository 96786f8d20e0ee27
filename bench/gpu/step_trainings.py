"""One, two and four programs of which each fills the GPU in part: the sum of their rates, mode by mode.

For each mode four processes start at once. Then, training by training, one, two and all four of them train at the same
time, in turns, several times; the first time is not counted. Rates are compared with one program's that is alone in
plain mode (no core, no MPS), so that one program's ratio is what the mode costs it.
"""

import contextlib

import step_pairs
from clients import Client, soon, started
from common import Failures, step_main
from stats import median
from tally import shortfalls

step_pairs.MODES["throughput"] = ("tally-mps", "throughput", "mps")
# Every program is of high priority, so that nothing of it is decided: what the mode costs by itself.
UNGATED = "ungated"
step_pairs.MODES[UNGATED] = ("tally-mps", "fifo", "mps")
MODES = ("plain", "mps", "throughput", "priority-mps", UNGATED)
TRAININGS = ("lstm-train", "bert-b8-train", "resnet50-b8-graph-train", "lstm-graph-train", "llama-prefill")
# Programs that train at the same time.
PROGRAMS = (1, 2, 4)
# DetShare's policy is to have so much of MPS's sum of rates, and so many times that of time slices where MPS has.
OF_MPS_MIN, OF_SLICES_MIN = 0.97, 1.5


def rates(args, job, trainings):
    """Steps a second of each of them at the same time."""
    start_at = soon()
    for one in trainings:
        one.send("train", job=job, start_at=start_at, seconds=args.seconds)
    return [one.receive(timeout_s=args.seconds + 60)["steps_per_s"] for one in trainings]


def measure(suite, mode, jobs, failures):
    """Rows of one mode: of each job and number of programs the sum of rates, a round each."""
    label, policy, _ = step_pairs.MODES[mode]
    rows = []
    with contextlib.ExitStack() as stack:
        core, _, env = stack.enter_context(step_pairs.environment(suite, mode))
        priority = "high" if mode == UNGATED else "best-effort"
        names = [f"be-{n}-{mode}" for n in range(max(PROGRAMS))]
        clients = [Client(suite, name, jobs, core, priority, env) for name in names]
        stack.enter_context(started(clients))
        for job in jobs:
            # Not counted: kernels are loaded, and transformed, where the policy asks for that.
            first = [round(rates(suite.args, job, [one])[0], 3) for one in clients]
            print({"job": job, "mode": mode, "each at first": first}, flush=True)
            sums = {n: [] for n in PROGRAMS}
            for _ in range(suite.args.rounds):
                for n in PROGRAMS:
                    sums[n].append(sum(rates(suite.args, job, clients[:n])))
            for n in PROGRAMS:
                rows.append({"job": job, "mode": label, "policy": policy, "ungated": mode == UNGATED, "programs": n, "steps_per_s": [round(s, 3) for s in sums[n]]})
                print(rows[-1], flush=True)
        if core:
            for note in shortfalls(core.status(), core.sharing, names):
                failures.add(f"{mode}: {note}")
    return rows


def over_alone(rows):
    """To each row its median over that of one program in plain mode, and the extremes of the rounds."""
    for row in rows:
        of = lambda one, row=row: one["job"] == row["job"] and one["mode"] == "time-slicing" and one["programs"] == 1
        alone = next((median(one["steps_per_s"]) for one in rows if of(one)), None)
        if alone:
            row["over_alone"] = round(median(row["steps_per_s"]) / alone, 4)
            row["over_alone_of_rounds"] = [round(pick(row["steps_per_s"]) / alone, 4) for pick in (min, max)]
    return rows


def shortfall(rows):
    """What `throughput` lacks."""
    def of(row, mode):
        found = [one for one in rows if (one["job"], one["programs"], one["mode"]) == (row["job"], row["programs"], mode)]
        return next((one["over_alone"] for one in found if one["policy"] == "none"), None)

    found = []
    for row in rows:
        if row["policy"] != "throughput" or row["programs"] == 1:
            continue
        what = f"{row['programs']} programs {row['job']}: {row['over_alone']} of one alone"
        mps, slices = of(row, "mps"), of(row, "time-slicing")
        if mps and row["over_alone"] < OF_MPS_MIN * mps:
            found.append(f"{what}, at least {OF_MPS_MIN} times {mps} wanted, MPS's")
        if mps and slices and row["over_alone"] < OF_SLICES_MIN * slices <= mps:
            found.append(f"{what}, at least {OF_SLICES_MIN} times {slices} wanted, that of time slices")
    return found


def main(suite):
    """Sums of rates, mode by mode."""
    failures, rows = Failures(), []
    suite.policy_config = lambda _mode: None
    for mode in suite.args.modes.split(","):
        with failures.guard(mode):
            rows += measure(suite, mode, suite.args.jobs.split(","), failures)
            suite.write("trainings.json", {"rows": over_alone(rows)})
    failures.messages += shortfall(rows)
    return failures.messages


def add_arguments(parser):
    parser.add_argument("--modes", default=",".join(MODES), help="comma-separated; plain first, as others are compared with it")
    parser.add_argument("--jobs", default=",".join(TRAININGS), help="comma-separated trainings")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each number of programs")
    parser.add_argument("--core-args", type=str.split, default=[], help="further flags of tally-core, one string")


if __name__ == "__main__":
    step_main("trainings", main, add_arguments)
