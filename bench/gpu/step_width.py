"""What a width costs a training alone: its speed with every launch that can be on some of the SMs.

For each training and width one core in `mps` with the training as its only client, under the policy `random-forms` with
one form: launches that are offered it run on so many SMs. The first run only has kernels' forms made. The base is the
same under `fifo`, where all launches run whole. With `put_off_joins` and without. Counted: launches on some of the SMs,
and those directly behind another one, with no event between them. At last with a width (`widths.set`) and most
launches leased.
"""

from clients import Client, soon, started
from common import Failures, step_main
from tally import Core, client, launches, shortfalls

POLICY = "../test-policies/random-forms"
# SMs kept free for each width: one green context each.
CORE = "[sm_limits]\nreserve_sms = [16, 68]\nput_off_joins = {}\n"
SMS = (116, 64)
# A launch is decided, with the joins at once or put off; or most are leased.
WAYS = ("decided", "put-off", "leased")
TRAININGS = ("gpt2-train", "resnet50-train")
# Nothing was measured of a width at which fewer launches had it.
LIMITED_SHARE_MIN = 0.05


def counts(core, name):
    """What was done with the client's launches so far."""
    entry = client(core.status(), name)
    transformed = entry["transformed"]
    return launches(entry)["total"], transformed["sm_limited"], transformed["sm_limited_consecutive"]


def measure(suite, job, sms, way, failures):
    """One core, one row; `sms` is `None` for the base."""
    args, name, puts_off = suite.args, f"{job}-{sms or 'whole'}-{way}", way == "put-off"
    file = suite.work / f"width-{name}.toml"
    file.write_text(CORE.format(str(puts_off).lower()))
    form = "form = 6\nlease = 16" if way == "leased" else "form = 2"
    policy, config = ("fifo", None) if sms is None else (POLICY, f"{form}\nsms = {sms}\nseed = 1\n")
    with Core(suite, f"width-{name}", policy, "mps", config, ["--config", file]) as core:
        be = Client(suite, f"be-{name}", [job], core, "best-effort")
        with started([be]):
            for note in shortfalls(core.status(), "mps", [be.name]):
                failures.add(f"{name}: {note}")
            for _ in range(2):
                before = counts(core, be.name)
                trained = be.ask("train", job=job, start_at=soon(), seconds=args.seconds, timeout_s=args.seconds + 60)
            made, limited, consecutive = (now - then for now, then in zip(counts(core, be.name), before, strict=True))
    row = {"job": job, "sms": sms, "put_off_joins": puts_off, "leased": way == "leased", "steps_per_s": round(trained["steps_per_s"], 4)}
    row |= {"launches": made, "sm_limited": limited, "sm_limited_consecutive": consecutive}
    if sms is not None and limited < LIMITED_SHARE_MIN * made:
        failures.add(f"{name}: only {limited} of {made} launches were on some of the SMs")
    return row


def main(suite):
    """Training by training, width by width."""
    failures, rows = Failures(), []
    for job in suite.args.jobs.split(","):
        for sms, way in ((None, "decided"), *((sms, way) for sms in SMS for way in WAYS)):
            with failures.guard(f"{job} on {sms or 'all'} SMs"):
                rows.append(measure(suite, job, sms, way, failures))
                print(rows[-1], flush=True)
                suite.write("width.json", {"rows": rows})
    return failures.messages


def add_arguments(parser):
    parser.add_argument("--jobs", default=",".join(TRAININGS), help="comma-separated trainings")
    parser.add_argument("--seconds", type=float, default=5, help="length of each measurement")


if __name__ == "__main__":
    step_main("width", main, add_arguments)
