"""Co-location: an inference and a training on one GPU, mode by mode.

First each inference has the GPU to itself: solo. Arrivals are open-loop Poisson
at `--load` of its solo latency, read warmed in this run, with the same seed in
every mode: each mode serves the very same requests.

For every mode (one set of environment variables, so one set of processes) the
programs of all pairs start at once; then one pair is measured after the other
while the other pairs' programs are idle. In plain mode each inference is also
measured beside the idle ones: a GPU's context is faster then than in a program
that has the GPU to itself (docs/internals.md), so that this is the stricter
figure to compare with. Time-slicing is a phase of the same plain processes.

Service times leave queueing out (as Tally's paper does); the `queued` ones
include it.
"""

import contextlib
import gzip
import json
import pathlib
import subprocess
import sys

from clients import Client, soon, started
from common import Failures, merge_rows, step_main, write_json
from procs import threads
from stats import host_drift, median_row, percentile
from tally import Core, MpsDaemon, client, shortfalls

PAIRS = {
    "bert+gpt2": ("bert-graph", "gpt2-train"),
    "resnet50+resnet50": ("resnet50-graph", "resnet50-train"),
    "bert-large+gpt2": ("bert-large-graph", "gpt2-train"),
    "resnet50-eager+bert-b32": ("resnet50-eager", "bert-b32-train"),
    "llama+gpt2-large": ("llama-7b-decode-graph", "gpt2-large-train"),
    "resnet50+resnet50-b128": ("resnet50-graph", "resnet50-b128-train"),
}
# What fits the step's time limit with all modes.
DEFAULT_PAIRS = "bert+gpt2,resnet50+resnet50"
# name: (mode in the row, policy, sharing mode or baseline kind)
MODES = {
    "plain": ("time-slicing", "none", "plain"),
    "mps": ("mps", "none", "mps"),
    "mps-priority": ("mps-client-priority", "none", "mps-priority"),
    "fifo-timeslice": ("tally-timeslice", "fifo", "timeslice"),
    "fifo-mps": ("tally-mps", "fifo", "mps"),
    "priority-timeslice": ("tally-timeslice", "tally-priority", "timeslice"),
    "priority-mps": ("tally-mps", "tally-priority", "mps"),
    # Kernels of NVIDIA's closed libraries transformed, too.
    "priority-timeslice-vendor": ("tally-timeslice", "tally-priority", "timeslice"),
    "priority-mps-vendor": ("tally-mps", "tally-priority", "mps"),
}
# More of a mode's core configuration.
CORE_CONFIGS = {}
SEED = 7
WARM_REQUESTS = 300
# A training runs alone in a mode so many times before it shares, the last of them timed; at most.
ALONE_TIMES, ALONE_TIMES_MAX = 2, 6
# Pairs whose programs are alive at once in `timeslice`: two trainings, even if one is idle, have
# longer time slices than one (docs/operate.md).
TOGETHER_TIMESLICE = 1
# A mode that cannot keep up with the arrivals may take so many windows to serve them.
LIMIT = 2
# Of each client's status, if a program does not answer.
STUCK_KEYS = ("name", "class", "busy", "standstills", "waiting", "in_flight", "in_flight_us", "ungated", "forms")
KEY = ("hp", "be", "mode", "policy", "policy_config", "vendor_rewrite", "load", "device")


class Pair:
    """One pair, and what was measured of it alone."""

    def __init__(self, name, hp, be):
        self.name, self.hp_job, self.be_job = name, hp, be
        # service_ms, queued_ms of the inference: with the GPU to itself, and beside idle programs.
        self.solo = self.beside_idle = None
        self.rate_per_s = None
        self.be_solo_steps_per_s = None


def is_vendor(mode):
    """Whether kernels of the vendor's closed libraries are transformed in this mode."""
    return mode.endswith("-vendor")


def names(pair):
    return f"hp-{pair.name}", f"be-{pair.name}"


@contextlib.contextmanager
def environment(suite, mode):
    """What a mode needs around its programs: (core or None, inference's and training's variables)."""
    kind = MODES[mode][2]
    if MODES[mode][1] != "none":
        file = suite.work / f"core-{mode}.toml"
        file.write_text(f"[rewrite]\nvendor_libraries = {str(is_vendor(mode)).lower()}\n{CORE_CONFIGS.get(mode, '')}")
        extra = ["--config", file, *suite.args.core_args]
        with Core(suite, mode, MODES[mode][1], kind, suite.policy_config(mode), extra) as core:
            yield core, {}, {}
    elif kind == "plain":
        yield None, {}, {}
    else:
        with MpsDaemon(suite) as daemon:
            low = {"CUDA_MPS_CLIENT_PRIORITY": "1"} if kind == "mps-priority" else {}
            yield None, daemon.environment, {**daemon.environment, **low}


def programs(suite, pairs, core, hp_env, be_env):
    """Start all programs of all pairs, at once."""
    clients = []
    for pair in pairs:
        hp, be = names(pair)
        clients.append(Client(suite, hp, [pair.hp_job], core, "high", hp_env))
        clients.append(Client(suite, be, [pair.be_job], core, "best-effort", be_env))
    return clients


def arrivals(args, pair, start_at):
    """The inference's requests: the same in every mode."""
    return {
        "job": pair.hp_job,
        "start_at": start_at,
        "seconds": args.seconds,
        "rate_per_s": pair.rate_per_s,
        "seed": SEED,
        "limit_s": args.seconds * LIMIT,
    }


def measure_solo(suite, pairs, results, failures):
    """The inferences with the GPU to themselves: one process, no other; closed loop, then the arrivals.

    The pairs whose inference was measured.
    """
    jobs = list(dict.fromkeys(pair.hp_job for pair in pairs))
    with failures.guard("solo"), started([Client(suite, "solo", jobs)]) as (client,):
        for job in jobs:
            with failures.guard(f"solo, {job}"):
                first, *others = [pair for pair in pairs if pair.hp_job == job]
                warm = client.ask("closed", job=job, n=WARM_REQUESTS)["service_ms"]
                first.rate_per_s = suite.args.load / percentile(warm, 0.5) * 1e3
                first.solo = client.ask("requests", **arrivals(suite.args, first, soon()))
                for pair in others:
                    pair.solo, pair.rate_per_s = first.solo, first.rate_per_s
                results.add(row(suite, first, "solo", "none", first.solo, None, None), first.solo)
    for pair in pairs:
        if pair.solo is None:
            failures.add(f"{pair.name}: left out, its solo figures are missing")
    return [pair for pair in pairs if pair.solo]


def measure_idle(args, pair, hp, be):
    """The inference beside idle programs (closed loop, then the arrivals), then the training likewise."""
    hp.ask("closed", job=pair.hp_job, n=WARM_REQUESTS)
    served = hp.ask("requests", **arrivals(args, pair, soon()))
    pair.be_solo_steps_per_s = be.ask("train", job=pair.be_job, start_at=soon(), seconds=args.seconds)["steps_per_s"]
    # Last: where this is there, all is.
    pair.beside_idle = served


def measure_shared(args, pair, hp, be, core, put_off_ms=0):
    """Each alone in this mode, then both at once, each request that finds its program idle put off by so much.

    (inference's answer, training's answer, the inference's warmed p50 alone, the training's rate alone).
    """
    # As a training that has run for a while: it has its transformed forms, and the policy knows its kernels. And a
    # training that its CPU limits is as fast as its process is: what sharing takes is told by this rate.
    seconds, own, transformed = args.be_alone_seconds, {}, []
    # The first time to warm up, and not looked at; more often until no kernel is transformed that was not the time before,
    # for the driver loads some images for seconds.
    while seconds and len(transformed) < ALONE_TIMES_MAX and (len(transformed) < ALONE_TIMES or transformed[-1] != transformed[-2]):
        own = be.ask("train", job=pair.be_job, start_at=soon(), seconds=seconds, timeout_s=seconds + 60)
        transformed.append(client(core.status(), names(pair)[1])["transformed"]["kernels"] if core else 0)
    warm = hp.ask("closed", job=pair.hp_job, n=WARM_REQUESTS)["service_ms"]
    start_at = soon()
    be.send("train", job=pair.be_job, start_at=start_at, seconds=args.seconds, until_stop=True)
    late = {"put_off_ms": put_off_ms} if put_off_ms else {}
    served = hp.ask("requests", timeout_s=args.seconds * LIMIT + 30, **arrivals(args, pair, start_at), **late)
    be.process.send({"stop": True})
    trained = be.receive(timeout_s=args.seconds + 30)
    return served, trained, percentile(warm, 0.5), own.get("steps_per_s")


def row(suite, pair, mode, policy, served, trained, own_solo_ms, own_be_steps_per_s=None, config=None, vendor=False):
    """One line of the result, every figure with its unit in its name."""

    def p(values, q):
        return round(percentile(values, q), 4)

    def over(alone, times):
        return round(percentile(served[times], 0.99) / percentile(alone[times], 0.99), 4) if alone else None

    service, queued, solo, idle = served["service_ms"], served["queued_ms"], pair.solo, pair.beside_idle
    share = trained["steps_per_s"] / pair.be_solo_steps_per_s if trained else None
    return {
        "hp": pair.hp_job,
        "be": pair.be_job if trained else "-",
        "mode": mode,
        "policy": policy,
        "policy_config": config,
        "vendor_rewrite": vendor,
        "load": suite.args.load,
        "rate_per_s": round(pair.rate_per_s, 3),
        "solo_p50_ms": p(solo["service_ms"], 0.5),
        "solo_p99_ms": p(solo["service_ms"], 0.99),
        "beside_idle_p50_ms": p(idle["service_ms"], 0.5) if idle else None,
        "beside_idle_p99_ms": p(idle["service_ms"], 0.99) if idle else None,
        "own_solo_p50_ms": round(own_solo_ms, 4) if own_solo_ms else None,
        "p50_ms": p(service, 0.5),
        "p99_ms": p(service, 0.99),
        "p99_over_solo": over(solo, "service_ms"),
        "p99_over_beside_idle": over(idle, "service_ms"),
        "p50_queued_ms": p(queued, 0.5),
        "p99_queued_ms": p(queued, 0.99),
        "p99_over_solo_queued": over(solo, "queued_ms"),
        "p99_over_beside_idle_queued": over(idle, "queued_ms"),
        "be_steps_per_s": round(trained["steps_per_s"], 4) if trained else None,
        "be_solo_steps_per_s": round(pair.be_solo_steps_per_s, 4) if trained else None,
        "be_share": round(share, 4) if trained else None,
        "own_be_solo_steps_per_s": round(own_be_steps_per_s, 4) if own_be_steps_per_s else None,
        "be_share_of_own": round(trained["steps_per_s"] / own_be_steps_per_s, 4) if own_be_steps_per_s else None,
        "be_alone_seconds": suite.args.be_alone_seconds if own_be_steps_per_s else None,
        "n_requests": len(service),
        "unserved": served["unserved"],
        "overrun_s": round(served["overrun_s"], 2),
        "seconds": suite.args.seconds,
        **{key: suite.machine[key] for key in ("device", "driver", "torch", "commit", "date")},
    }


def drift(own_ms, idle_ms, sharing):
    """A note if the inference beside idle programs is not what it was."""
    slower = host_drift(own_ms, idle_ms, sharing.startswith("mps"))
    return [f"alone it took {slower:.2f} of what it had taken before: its host was slower by then"] if slower else []


# Told of several runs, with their extremes.
SPREAD_OF = ("p99_over_solo", "p99_over_beside_idle", "be_share", "be_share_of_own")


def of_runs(rows):
    """One row of several runs of the same: each figure their median, and a note with the extremes of some."""
    if len(rows) == 1:
        return rows[0]
    merged = {**median_row(rows), "runs": len(rows)}
    notes = [note for row in rows for note in row.get("notes", [])]
    spread = [(key, [row[key] for row in rows]) for key in SPREAD_OF]
    told = [f"{key} {min(values)} to {max(values)}" for key, values in spread if None not in values and len(set(values)) > 1]
    return {**merged, "notes": [*dict.fromkeys(notes), ": ".join([f"medians of {len(rows)} runs", *filter(None, [", ".join(told)])])]}


class Results:
    """Rows and raw latencies, written after every pair so that a killed step keeps what it has."""

    def __init__(self, suite):
        self.suite, self.runs, self.raw = suite, {}, []

    def add(self, line, served, state=None):
        self.runs.setdefault(tuple(str(line[key]) for key in KEY), []).append(line)
        in_us = [round(v * 1e3) for v in served["service_ms"]], [round(v * 1e3) for v in served["queued_ms"]]
        keys = {key: line[key] for key in ("hp", "be", "mode", "policy", "vendor_rewrite")}
        self.raw.append({**keys, "service_us": in_us[0], "queued_us": in_us[1], "status": state})
        rows = merge_rows(self.suite.read("pairs.json") or [], [of_runs(runs) for runs in self.runs.values()], KEY)
        write_json(self.suite.out / "pairs.json", rows)
        with gzip.open(self.suite.out / "pairs-raw.json.gz", "wt") as file:
            json.dump(self.raw, file, separators=(",", ":"))
        brief = ("hp", "mode", "policy", "vendor_rewrite", "p50_ms", "p99_ms", "p99_over_solo", "p99_over_solo_queued", "be_share")
        print("  ".join(f"{key}={line[key]}" for key in brief), flush=True)


@contextlib.contextmanager
def told_when_stuck(suite, mode, core, pair):
    """If a program does not answer: what the core says of all, and what the pair's threads are at, beside the logs."""
    try:
        yield
    except TimeoutError:
        pids = {one.pid for one in pair}
        with contextlib.suppress(OSError):
            lines = threads(lambda pid, _: pid in pids).splitlines()
            # Most only wait for work.
            told = [line for line in lines if "futex" not in line or " tally-" in line or len(set(line.split()[:2])) == 1]
            (suite.logs / f"threads-{mode}.log").write_text("\n".join(told))
        with contextlib.suppress(RuntimeError, ValueError, OSError, subprocess.TimeoutExpired):
            brief = [{key: one.get(key) for key in STUCK_KEYS} for one in core.status()["clients"]] if core else []
            lines = "\n".join(map(json.dumps, brief))
            (suite.logs / f"status-{mode}.log").write_text(lines)
        raise


def measure_mode(suite, mode, pairs, results, failures):
    """Start a mode's programs and measure each pair in turn."""
    label, policy, _ = MODES[mode]
    with contextlib.ExitStack() as stack:
        core, hp_env, be_env = stack.enter_context(environment(suite, mode))
        clients = stack.enter_context(started(programs(suite, pairs, core, hp_env, be_env)))
        for index, pair in enumerate(pairs):
            hp, be = clients[2 * index], clients[2 * index + 1]
            with failures.guard(f"{mode}, {pair.name}"), told_when_stuck(suite, mode, core, (hp, be)):
                if mode == "plain":
                    measure_idle(suite.args, pair, hp, be)
                    results.add(row(suite, pair, "beside-idle", "none", pair.beside_idle, None, None), pair.beside_idle)
                    if not suite.plain_shared:
                        continue
                if pair.beside_idle is None:
                    failures.add(f"{mode}, {pair.name}: skipped, its figures beside idle programs are missing")
                    continue
                served, trained, own, own_be = measure_shared(suite.args, pair, hp, be, core)
                state = core.status() if core else None
                notes = shortfalls(state, core.sharing, names(pair)) if core else []
                for note in notes:
                    failures.add(f"{mode}, {pair.name}: {note}")
                if suite.args.apart and MODES[mode][2] != "timeslice":
                    # In other rows those of all pairs are.
                    notes.append("only this pair's programs were alive")
                notes += drift(own, percentile(pair.beside_idle["service_ms"], 0.5), MODES[mode][2])
                line = row(suite, pair, label, policy, served, trained, own, own_be, suite.policy_config(mode), is_vendor(mode))
                if core:
                    line["transformed"] = client(state, names(pair)[1])["transformed"]
                results.add({**line, "notes": notes}, served, state)


def groups(args, mode, pairs):
    """The pairs whose programs are alive at once, group by group."""
    most = 1 if args.apart else TOGETHER_TIMESLICE if MODES[mode][2] == "timeslice" else len(pairs)
    return [pairs[start : start + most] for start in range(0, len(pairs), most)]


def main(suite):
    """Measure the pairs in every mode."""
    args, failures, results = suite.args, Failures(), Results(suite)
    config = pathlib.Path(args.policy_config).read_text() if args.policy_config else None
    suite.policy_config = lambda mode: config if MODES[mode][1] == "tally-priority" else None
    # Kernels of closed libraries are only rewritten when somebody asks for it by name.
    modes = args.modes.split(",") if args.modes else [m for m in MODES if not is_vendor(m)]
    unknown = [m for m in modes if m not in MODES] + [p for p in args.pairs.split(",") if p not in PAIRS]
    if unknown:
        sys.exit(f"unknown: {unknown}; modes are {list(MODES)}, pairs {list(PAIRS)}")
    # The inferences beside idle programs and the trainings alone come from plain mode: it always runs, and
    # first; the pairs only share it if asked to.
    suite.plain_shared = "plain" in modes
    modes = ["plain"] + [m for m in modes if m != "plain"]
    for _ in range(args.runs):
        pairs = [Pair(name, *PAIRS[name]) for name in args.pairs.split(",")]
        pairs = measure_solo(suite, pairs, results, failures)
        for mode in modes:
            for group in groups(args, mode, pairs):
                with failures.guard(mode):
                    measure_mode(suite, mode, group, results, failures)
    return failures.messages


def add_arguments(parser):
    parser.add_argument(
        "--modes", help=f"comma-separated, of {','.join(MODES)}; if left out all but those with kernels of closed libraries"
    )
    parser.add_argument("--pairs", default=DEFAULT_PAIRS, help=f"comma-separated, of {','.join(PAIRS)}")
    parser.add_argument("--seconds", type=float, default=8, help="length of each measuring window")
    parser.add_argument("--load", type=float, default=0.5, help="arrival rate times solo latency")
    parser.add_argument(
        "--apart", action="store_true", help="only one pair's programs alive at a time (twice the start-ups)"
    )
    parser.add_argument(
        "--be-alone-seconds", type=float, default=3, help="how long a training runs alone in each mode before it shares, twice; 0: not at all"
    )
    parser.add_argument("--runs", type=int, default=1, help="measure all so often, and give the medians: for programs that their own CPU part limits")
    parser.add_argument("--policy-config", help="file for tally-priority")
    parser.add_argument("--core-args", type=str.split, default=[], help="further flags of tally-core, one string")


if __name__ == "__main__":
    step_main("pairs", main, add_arguments)
