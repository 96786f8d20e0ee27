"""Best-effort work over the objective: what each way of sharing gives a training beside a service that must keep it.

For each pair: the service alone, beside idle programs, then each baseline once, and slo-herald under MPS once for each
objective, which is set while the programs run; if asked, also time slices with each request put off by its slack.
Objectives are multiples of the service's own p99 in this run, the median of three windows. A baseline does not know the
objective: its attainment is worked out for each from the same requests. Arrivals are those of `pairs`. Whether a way
keeps an objective is told by service times; queued ones are given beside them.
"""

import argparse
import contextlib
import subprocess

from clients import Client, soon, started
from common import Failures, clean_environment, merge_rows, step_main, write_json
from procs import wait_until
from render_frontier import KEY, PUT_OFF as PUT_OFF_LABEL, TARGET_PERCENT
from stats import percentile
import step_pairs
from step_pairs import WARM_REQUESTS, Pair, arrivals, environment, measure_idle, measure_shared, names, programs
from tally import client, shortfalls

PAIRS = {
    **step_pairs.PAIRS,
    # Those of Herald's paper.
    "translation-eager+lstm": ("translation-eager", "lstm-train"),
    "translation-eager+vgg16": ("translation-eager", "vgg16-train"),
    "translation-graph+lstm": ("translation-graph", "lstm-train"),
    "translation-graph+vgg16": ("translation-graph", "vgg16-train"),
}
# Only here: without an objective it has nothing to be measured by. How the mode is called, and what the core is told.
HERALDS = {
    "herald-mps": ("tally-mps", ""),
    "herald-mps-75": ("tally-mps, training on 75 %", "[sharing.mps]\nbest_effort_percent = 75\n"),
    "herald-mps-50": ("tally-mps, training on 50 %", "[sharing.mps]\nbest_effort_percent = 50\n"),
}
step_pairs.MODES.update({mode: (label, "slo-herald", "mps") for mode, (label, _) in HERALDS.items()})
step_pairs.CORE_CONFIGS.update({mode: config for mode, (_, config) in HERALDS.items()})
# There it makes nothing of an objective.
step_pairs.MODES["herald-timeslice"] = ("tally-timeslice", "slo-herald", "timeslice")
# What a policy could gain in time slices, where slack can only put off the first launch of a unit: the service does that
# itself, for so much of the slack.
PUT_OFF, PUT_OFF_PERMILLE = "put-off-timeslice", 900
step_pairs.MODES[PUT_OFF] = (PUT_OFF_LABEL, "tally-priority", "timeslice")
# MPS with the training on so many percent of the SMs.
WIDTHS = ("75", "50", "25")
step_pairs.MODES.update({f"mps-{width}": (f"mps, training on {width} %", "none", "mps") for width in WIDTHS})
DEFAULT_BASELINES = "plain,mps,mps-priority,mps-50,priority-timeslice,priority-mps,herald-timeslice"
DEFAULT_FACTORS = "1.1,1.25,1.5,2,3"
# So many units are served beside the training before an objective is measured: some ninety reviews of the level.
LEARN_UNITS = 8000


def attainment(service_ms, slo_ms):
    """Share of requests, percent, that took no longer."""
    return round(100 * sum(took <= slo_ms for took in service_ms) / max(len(service_ms), 1), 3)


def set_objective(suite, core, name, slo_ms):
    command = [suite.program("tallyctl"), "--socket", core.socket, "client", "set", name, "--slo", f"{slo_ms * 1e3:.0f}us"]
    done = subprocess.run([str(part) for part in command], check=False, capture_output=True, text=True, timeout=15, env=clean_environment())
    if done.returncode:
        raise RuntimeError(f"tallyctl client set: {done.stderr.strip()}")
    slo = lambda: (client(core.status(), name).get("service") or {}).get("objective")
    wait_until(slo, 5, f"the objective of {name}", every_s=0.1)


class Rows:
    """Result rows, written after each."""

    def __init__(self, suite):
        self.suite, self.rows = suite, []

    def add(self, pair, mode, policy, factor, served, trained, told=None):
        service, slo_ms = served["service_ms"], factor * percentile(pair.solo["service_ms"], 0.99)
        row = {
            "hp": pair.hp_job,
            "be": pair.be_job,
            "mode": mode,
            "policy": policy,
            "slo_over_p99": factor,
            "slo_ms": round(slo_ms, 4),
            "attainment_percent": attainment(service, slo_ms),
            "attainment_queued_percent": attainment(served["queued_ms"], slo_ms),
            "p50_ms": round(percentile(service, 0.5), 4),
            "p99_ms": round(percentile(service, 0.99), 4),
            "p99_queued_ms": round(percentile(served["queued_ms"], 0.99), 4),
            "solo_p99_ms": round(percentile(pair.solo["service_ms"], 0.99), 4),
            "be_share": round(trained["steps_per_s"] / pair.be_solo_steps_per_s, 4),
            "load": self.suite.args.load,
            "n_requests": len(service),
            "unserved": served["unserved"],
            "seconds": self.suite.args.seconds,
            "runs": 1,
            "told": told,
            **{key: self.suite.machine[key] for key in ("device", "driver", "torch", "commit", "date")},
        }
        self.rows.append(row)
        write_json(self.suite.out / "frontier.json", merge_rows(self.suite.read("frontier.json") or [], self.rows, KEY))
        brief = ("hp", "mode", "policy", "slo_over_p99", "attainment_percent", "p99_ms", "be_share")
        print("  ".join(f"{key}={row[key]}" for key in brief), flush=True)


def measure_alone(suite, pair):
    """The service with the GPU to itself, as in `pairs`."""
    with started([Client(suite, "solo", [pair.hp_job])]) as (alone,):
        warm = alone.ask("closed", job=pair.hp_job, n=WARM_REQUESTS)["service_ms"]
        pair.rate_per_s = suite.args.load / percentile(warm, 0.5) * 1e3
        windows = [alone.ask("requests", **arrivals(suite.args, pair, soon())) for _ in range(3)]
        pair.solo = sorted(windows, key=lambda window: percentile(window["service_ms"], 0.99))[1]


def learn(suite, pair, hp, be):
    """Serve beside the training until the policy has judged the service by this objective."""
    seconds = min(max(LEARN_UNITS / pair.rate_per_s, 2.0), suite.args.learn_seconds)
    start_at = soon()
    be.send("train", job=pair.be_job, start_at=start_at, seconds=seconds, until_stop=True)
    request = {"job": pair.hp_job, "start_at": start_at, "seconds": seconds, "rate_per_s": pair.rate_per_s, "seed": 11, "limit_s": 3 * seconds}
    hp.ask("requests", timeout_s=3 * seconds + 30, **request)
    be.process.send({"stop": True})
    be.receive(timeout_s=seconds + 60)


def measure_mode(suite, pair, mode, rows, failures):
    label, policy, _ = step_pairs.MODES[mode]
    factors = [float(factor) for factor in suite.args.factors.split(",")]
    with contextlib.ExitStack() as stack:
        core, hp_env, be_env = stack.enter_context(environment(suite, mode))
        width = mode.removeprefix("mps-")
        if width in WIDTHS:
            be_env = {**be_env, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": width}
        hp, be = stack.enter_context(started(programs(suite, [pair], core, hp_env, be_env)))
        if mode == "plain":
            measure_idle(suite.args, pair, hp, be)
        # The training has run alone by the second time.
        once = suite.args
        again = argparse.Namespace(**{**vars(once), "be_alone_seconds": 0})
        for number, factor in enumerate(factors):
            if mode in HERALDS:
                slo_ms = factor * percentile(pair.solo["service_ms"], 0.99)
                set_objective(suite, core, names(pair)[0], slo_ms)
                learn(suite, pair, hp, be)
            if mode in HERALDS or mode == PUT_OFF or number == 0:
                put_off_ms = 0
                if mode == PUT_OFF:
                    put_off_ms = (factor - 1) * percentile(pair.solo["service_ms"], 0.99) * PUT_OFF_PERMILLE / 1e3
                served, trained, _, _ = measure_shared(again if number else once, pair, hp, be, core, put_off_ms)
            if mode not in HERALDS:
                rows.add(pair, label, policy, factor, served, trained)
                continue
            state = core.status()
            told = {kind: state["policy"].get(kind) for kind in ("counters", "gauges", "reasons")}
            rows.add(pair, label, policy, factor, served, trained, told)
        if core:
            for note in shortfalls(core.status(), core.sharing, names(pair)):
                failures.add(f"{mode}, {pair.name}: {note}")


def main(suite):
    """Best-effort share over objectives."""
    failures, rows = Failures(), Rows(suite)
    suite.policy_config = lambda _mode: None
    modes = suite.args.baselines.split(",") + suite.args.heralds.split(",")
    for name in suite.args.pairs.split(","):
        pair = Pair(name, *PAIRS[name])
        with failures.guard(f"{name}, alone"):
            measure_alone(suite, pair)
        for mode in modes if pair.solo else []:
            with failures.guard(f"{mode}, {name}"):
                measure_mode(suite, pair, mode, rows, failures)
        mine = [row for row in rows.rows if row["hp"] == pair.hp_job and row["be"] == pair.be_job and row["policy"] == "slo-herald"]
        for factor in dict.fromkeys(row["slo_over_p99"] for row in mine):
            kept = max(row["attainment_percent"] for row in mine if row["slo_over_p99"] == factor)
            if kept < TARGET_PERCENT:
                failures.add(f"{name}: slo-herald keeps {factor}x in {kept} %, wanted {TARGET_PERCENT} %")
    return failures.messages


def add_arguments(parser):
    parser.add_argument("--pairs", default="bert+gpt2,resnet50-eager+bert-b32", help=f"comma-separated, of {','.join(PAIRS)}")
    parser.add_argument("--baselines", default=DEFAULT_BASELINES, help="comma-separated modes of `pairs`; plain must be the first")
    parser.add_argument("--heralds", default="herald-mps,herald-mps-75", help="comma-separated ways of slo-herald")
    parser.add_argument("--factors", default=DEFAULT_FACTORS, help="objectives, as multiples of the service's own p99")
    parser.add_argument("--seconds", type=float, default=8, help="length of each measuring window")
    parser.add_argument("--learn-seconds", type=float, default=30, help="longest time for slo-herald to learn an objective")
    parser.add_argument("--load", type=float, default=0.5, help="arrival rate times solo latency")
    parser.add_argument("--core-args", type=str.split, default=[], help="further flags of tally-core, one string")
    parser.add_argument("--be-alone-seconds", type=float, default=2, help="how long a training runs alone before it shares")


if __name__ == "__main__":
    step_main("frontier", main, add_arguments)
