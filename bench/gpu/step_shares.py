"""Whether weights divide the GPU's time between trainings, and floors keep some of it beside requests.

For each sharing mode one core with an inference and two trainings of one model, of weight 3 and 1, under
`tally-priority`: each training alone, both together, and both beside requests at a load at which best effort has little
time, first without and then with a floor for the lighter one. Shares are of the GPU time that the core charges.
"""

import time

from clients import Client, soon, started
from common import Failures, step_main
from step_several import BE_JOB, HP_JOB, WARM_REQUESTS, rates, requests, train
from stats import percentile
from tally import Core, client, shortfalls

POLICY = "tally-priority"
WEIGHTS = {"heavy": 3, "light": 1}
# How far the heavier one's share of the time may be from what its weight gives it, and a floor below what it promises.
# Each is promised in one mode: side by side only lost time gives a claim, and in turns the hardware's slices decide.
SHARE_OFF_MAX = 0.08
FLOOR_MISSED_MAX = 0.1


def charged_ms(core, names):
    """GPU time that each was charged so far."""
    state = core.status()
    return [client(state, name)["charged_ms"] for name in names]


def shares(core, names, work):
    """What `work` returns, and the share of the passed time that each was charged meanwhile."""
    before, begin = charged_ms(core, names), time.monotonic()
    result = work()
    passed_ms = (time.monotonic() - begin) * 1e3
    return result, [round((now - then) / passed_ms, 4) for then, now in zip(before, charged_ms(core, names), strict=True)]


def together(args, trainings):
    """Both at once, without requests: their steps a second."""
    train(args, trainings, soon())
    return rates(args, trainings)


def beside(args, hp, rate_per_s, trainings):
    """Both beside requests: what the requests took, and the trainings' steps a second."""
    start_at = soon()
    train(args, trainings, start_at, until_stop=True)
    took = requests(args, hp, rate_per_s, start_at)
    for one in trainings:
        one.process.send({"stop": True})
    return took, rates(args, trainings)


def measure(suite, sharing, failures):
    """One core, one row."""
    args = suite.args
    with Core(suite, f"shares-{sharing}", POLICY, sharing) as core:
        hp = Client(suite, f"hp-{sharing}", [HP_JOB], core, "high")
        trainings = [
            Client(suite, f"{name}-{sharing}", [BE_JOB], core, "best-effort", options=["--weight", str(weight)])
            for name, weight in WEIGHTS.items()
        ]
        names = [one.name for one in trainings]
        with started([hp, *trainings]):
            for note in shortfalls(core.status(), sharing, [hp.name, *names]):
                failures.add(f"{sharing}: {note}")
            row = {"policy": POLICY, "sharing": sharing, "weights": list(WEIGHTS.values()), "floor_percent": args.floor}
            rate_per_s = args.load / percentile(hp.ask("closed", job=HP_JOB, n=WARM_REQUESTS)["service_ms"], 0.5) * 1e3
            row["alone_ms"] = requests(args, hp, rate_per_s, soon())
            row["alone_steps_per_s"] = []
            for one in trainings:
                train(args, [one], soon())
                row["alone_steps_per_s"] += rates(args, [one])
            row["together_steps_per_s"], row["together_shares"] = shares(core, names, lambda: together(args, trainings))
            for key, floor in (("without_floor", None), ("with_floor", args.floor)):
                if floor:
                    core.ctl("client", "set", names[1], "--min-share", f"{floor}%")
                (took, steps), of_time = shares(core, names, lambda: beside(args, hp, rate_per_s, trainings))
                row[key] = {"ms": took, "steps_per_s": steps, "shares": of_time}
            # Of the time in which it had work, as a floor is promised.
            row["floor"] = client(core.status(), names[1])["min_share"]
        check(row, failures)
        return row


def check(row, failures):
    """What weights and floors promise."""
    sharing, of_time = row["sharing"], row["together_shares"]
    heavy, wanted = of_time[0] / sum(of_time), row["weights"][0] / sum(row["weights"])
    if sharing == "timeslice" and abs(heavy - wanted) > SHARE_OFF_MAX:
        failures.add(f"{sharing}: the heavier training has {heavy:.2f} of their time, wanted {wanted:.2f}")
    floor = row["floor"]
    if sharing == "mps" and floor["had_percent"] < floor["granted_percent"] * (1 - FLOOR_MISSED_MAX):
        failures.add(f"{sharing}: {floor['had_percent']:.1f} % of the time for a floor of {floor['granted_percent']:g} %")


def main(suite):
    """Sharing mode by sharing mode."""
    failures, rows = Failures(), []
    for sharing in suite.args.sharing.split(","):
        with failures.guard(sharing):
            rows.append(measure(suite, sharing, failures))
            print(rows[-1], flush=True)
            suite.write("shares.json", {"hp": HP_JOB, "be": BE_JOB, "load": suite.args.load, "rows": rows})
    return failures.messages


def add_arguments(parser):
    parser.add_argument("--sharing", default="timeslice,mps", help="comma-separated sharing modes")
    parser.add_argument("--seconds", type=float, default=6, help="length of each measurement")
    parser.add_argument("--load", type=float, default=0.8, help="arrival rate times the inference's latency alone")
    parser.add_argument("--floor", type=float, default=25, help="least share of GPU time of the lighter training, percent")


if __name__ == "__main__":
    step_main("shares", main, add_arguments)
