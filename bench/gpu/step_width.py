"""What a width costs a training alone: its speed with every launch that can be on some of the SMs.

For each training, and with joins at once and put off (`sm_limits.put_off_joins`), one core in `mps` with the training
as its only client, under the policy `random-forms`. Its speed is measured with all launches whole and with those that
are offered it on so many SMs, in turns, several times, in the same process: processes differ by more than a width
costs. Each launch is decided (`decided`), or most are leased (`leased`), whole ones likewise. Counted: launches on some of the SMs, and those directly behind another one, with no event between them.
At last the width changes at random times, and launches that are decided get one at random, too. CUPTI says how long the
GPU was idle where the SMs change, also for the program's CPU; the core, how long streams waited whose launches came in
time.
"""

from clients import Client, soon, started
from common import Failures, step_main
from stats import median
from tally import Core, client, launches, shortfalls

POLICY = "../test-policies/random-forms"
# SMs kept free for each width: one green context each.
CORE = "[sm_limits]\nreserve_sms = [16, 68]\nput_off_joins = {}\n"
# On 132 SMs: green contexts have multiples of 8.
SMS, SMS_ALL = (112, 64), 132
# By way: all launches whole, and limited.
WAYS = {"decided": ("form = 4\n", "form = 2\n"), "leased": ("form = 6\nlease = 16\n", "form = 6\nlease = 16\n")}
# Short kernels cost most, and of those 10 us are to be worth it.
TRAININGS = ("gpt2-train", "resnet50-train", "short-kernels-train", "short-kernels-graph-train")
# Steps that are graphs run in the program's own stream, whatever their width.
GRAPHS = ("short-kernels-graph-train",)
# Of the speed on all SMs, that of as many as there are of them may be undercut by so much.
LOSS_MAX = 0.03
# Changes of stream that are timed, and how long a stream may wait at one behind what was before, p99.
CHANGES_MIN, CHANGE_US_MAX = 200, 50
CHANGING = "form = 6\nlease = 16\ntoggle_us = 2000\nseed = 5\n"
# Nothing was measured of a width at which fewer launches had it.
LIMITED_SHARE_MIN = 0.05


def counts(core, name):
    """What was done with the client's launches so far, and what the latest limited ones cost."""
    entry = client(core.status(), name)
    transformed = entry["transformed"]
    made = launches(entry)["total"], transformed["sm_limited"], transformed["sm_limited_consecutive"]
    return made, transformed["sm_limit_us_p50"]


class Turns:
    """One training under one core, whose policy changes."""

    def __init__(self, suite, job, core, be):
        self.suite, self.job, self.core, self.be = suite, job, core, be

    def load(self, sms, way):
        """`sms` is 0: all launches run whole."""
        file = self.suite.work / f"width-{sms}-{way}.toml"
        # Only a width may be 0; other forms than on some of the SMs ignore the number.
        file.write_text(f"{WAYS[way][sms > 0]}sms = {sms or int(way == 'decided')}\nseed = 1\n")
        self.core.ctl("policy", "load", self.suite.program(f"policies/{POLICY}.wasm"), "--config", file)

    def train(self, seconds):
        return self.be.ask("train", job=self.job, start_at=soon(), seconds=seconds, timeout_s=seconds + 60)["steps_per_s"]

    def measure(self, sms, way):
        """(steps a second, launches and how many of them were limited, what these cost)."""
        self.load(sms, way)
        self.train(self.suite.args.seconds / 4)
        before, _ = counts(self.core, self.be.name)
        rate = self.train(self.suite.args.seconds)
        after, cost_us = counts(self.core, self.be.name)
        return rate, [now - then for now, then in zip(after, before, strict=True)], cost_us


def measure(suite, job, puts_off, failures):
    """One core; rows of a training, whose forms are made first."""
    name = f"{job}-{'put-off' if puts_off else 'at-once'}"
    file = suite.work / f"width-{name}.toml"
    file.write_text(CORE.format(str(puts_off).lower()))
    plans = [(sms, way) for way in WAYS for sms in (0, *SMS)]
    found = {plan: [] for plan in plans}
    with Core(suite, f"width-{name}", POLICY, "mps", WAYS["decided"][True] + f"sms = {SMS[0]}\n", ["--config", file]) as core:
        be = Client(suite, f"be-{name}", [job], core, "best-effort")
        with started([be]):
            for note in shortfalls(core.status(), "mps", [be.name]):
                failures.add(f"{name}: {note}")
            turns = Turns(suite, job, core, be)
            turns.train(suite.args.forms_seconds)
            for _ in range(suite.args.rounds):
                for plan in plans:
                    found[plan].append(turns.measure(*plan))
    rows = []
    for (sms, way), runs in found.items():
        rates, counted, costs_us = zip(*runs, strict=True)
        ratios = [rate / whole for rate, (whole, *_) in zip(rates, found[0, way], strict=True)]
        made, limited, consecutive = (sum(of) for of in zip(*counted, strict=True))
        row = {"job": job, "sms": sms or None, "put_off_joins": puts_off, "leased": way == "leased", "steps_per_s": round(median(rates), 4)}
        row |= {"over_all_sms": round(median(ratios), 4), "over_all_sms_of_rounds": [round(min(ratios), 4), round(max(ratios), 4)]}
        row |= {"launches": made, "sm_limited": limited, "sm_limited_consecutive": consecutive}
        rows.append(row | {"sm_limit_us_p50": round(median(costs_us), 2) if sms else None})
        print(rows[-1], flush=True)
        if sms and job not in GRAPHS and not all(costs_us):
            failures.add(f"{name}: what launches on {sms} SMs cost was not measured")
        if sms and limited < LIMITED_SHARE_MIN * made:
            failures.add(f"{name}: only {limited} of {made} launches were on {sms} SMs")
    return rows


def shortfall(rows):
    """Trainings that lose more than the SMs that they do not have, leased and with joins put off."""
    found = []
    for row in rows:
        wanted = (row["sms"] or 0) / SMS_ALL - LOSS_MAX
        if row["sms"] == SMS[0] and row["leased"] and row["put_off_joins"] and row["over_all_sms"] < wanted:
            found.append(f"{row['job']} on {row['sms']} SMs: {row['over_all_sms']} of its speed, {wanted:.3f} wanted")
    return found


def measure_changes(suite, job, failures):
    """The width changes at random; a row of the gaps between kernels."""
    name = f"{job}-changes"
    with Core(suite, f"width-{name}", POLICY, "mps", CHANGING) as core:
        be = Client(suite, f"be-{name}", [job], core, "best-effort")
        with started([be]):
            Turns(suite, job, core, be).train(suite.args.forms_seconds)
            gaps = be.ask("gaps", job=job, steps=suite.args.gap_steps, timeout_s=90)
            # Without CUPTI: what the launches that change SMs cost their stream, by events on the GPU.
            Turns(suite, job, core, be).train(suite.args.timed_seconds)
            transformed = client(core.status(), be.name)["transformed"]
    timed = {"count": transformed["sm_limits_timed"], "p50_us": round(transformed["sm_limit_us_p50"], 2), "p99_us": round(transformed["sm_limit_us_p99"], 2)}
    row = {"job": job, "changed": gaps["changed"], "same": gaps["same"], "timed": timed}
    if not row["changed"]["count"]:
        failures.add(f"{name}: CUPTI saw no change of stream")
    if timed["count"] < CHANGES_MIN:
        failures.add(f"{name}: {timed['count']} changes timed, {CHANGES_MIN} wanted")
    elif timed["p99_us"] > CHANGE_US_MAX:
        failures.add(f"{name}: a stream waits for {timed['p99_us']} us at a change, p99; {CHANGE_US_MAX} wanted")
    return row


def main(suite):
    """Training by training, width by width."""
    failures, rows, changes = Failures(), [], []
    for job in suite.args.jobs.split(","):
        for puts_off in (False, True):
            with failures.guard(f"{job}, joins {'put off' if puts_off else 'at once'}"):
                rows += measure(suite, job, puts_off, failures)
        if job not in GRAPHS:
            with failures.guard(f"{job}, changes"):
                changes.append(measure_changes(suite, job, failures))
                print(changes[-1], flush=True)
        suite.write("width.json", {"rows": rows, "changes": changes})
    failures.messages += shortfall(rows)
    return failures.messages


def add_arguments(parser):
    parser.add_argument("--jobs", default=",".join(TRAININGS), help="comma-separated trainings")
    parser.add_argument("--seconds", type=float, default=1.6, help="length of each measurement")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each way")
    parser.add_argument("--forms-seconds", type=float, default=5, help="how long a training runs first, for its forms to be made")
    parser.add_argument("--timed-seconds", type=float, default=8, help="how long a training runs while changes of SMs are timed")
    parser.add_argument("--gap-steps", type=int, default=30, help="steps whose kernels are recorded while the width changes")


if __name__ == "__main__":
    step_main("width", main, add_arguments)
