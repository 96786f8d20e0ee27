"""A language model's decode service beside best-effort work: tokens that are late, and what the other work gets.

The service (decode_job.py) replays a trace of requests. First it has the GPU to itself, which sets the target: so many
times its own p95 step. Then, in each mode, it serves beside each best-effort program, at each load. Under `full` it has
a backlog, so that it never pauses; under `half` it is alone busy half of the time, as the services of `pairs` are. A
number is a share of the tokens a second that the service alone makes of a backlog: at 0.5 there are few pauses, for it
is the batches that are smaller.

With a core the target is set as the objective for tokens while the programs run (`tallyctl client set NAME --tpot`),
and each row has what the core counted. The digest of a fixed schedule must be the same in every mode.
"""

import contextlib
import time

import decode_batch
import step_frontier
import step_pairs
from clients import Client, soon, started
from common import Failures, merge_rows, step_main, write_json
from procs import wait_until
from render_decode import KEY
from stats import percentile
from step_pairs import environment
from tally import client, launches, shortfalls

SERVICE = "llama-8b-service"
BESIDE = ("gpt2-train", "llama-prefill")
# slo-herald with an objective for tokens only, and with the same one for units of work (a step, or a chunk of a prefill).
HERALDS = {"herald-mps": "tally-mps", "herald-mps-slo": "tally-mps, objective for units too"}
step_pairs.MODES.update({mode: (label, "slo-herald", "mps") for mode, label in HERALDS.items()})
# DetShare's policies, with an objective for tokens.
DETSHARE = ("tpot-first", "throughput")
step_pairs.MODES.update({policy: ("tally-mps", policy, "mps") for policy in DETSHARE})
# What learns an objective.
LEARNS = (*HERALDS, *DETSHARE)
WIDTHS = step_frontier.WIDTHS
MODES = ("plain", "mps", "mps-priority", *(f"mps-{width}" for width in WIDTHS), "priority-timeslice", "priority-mps", *LEARNS)
FULL, HALF = "full", "half"
# The share of tokens at half load is searched for, from here on, until the service alone is so busy, percent.
HALF_FIRST, HALF_BUSY_PERCENT, HALF_TRIES_MAX = 0.2, (44, 56), 5
# How far its logits may be from those without a KV cache; with a wrong cache it is about 1.
OFF_MAX = 0.1
QUANTILES = (0.5, 0.95, 0.99)


class Alone:
    """What was measured of each program alone: the service by load, the others' steps a second."""

    def __init__(self):
        self.served, self.be_steps_per_s, self.digest, self.attention = {}, {}, None, "auto"
        # Of a load: the share of the tokens that the service makes of a backlog; None: the backlog.
        self.shares = {FULL: None, HALF: HALF_FIRST}

    def rate_per_s(self, load, trace):
        """Requests a second of a load; None: as many as it serves."""
        share = self.shares[load] if load in self.shares else float(load)
        return share and share * self.served[FULL]["tokens_per_s"] / decode_batch.generated_mean(decode_batch.read(trace))

    def target_ms(self, load, times):
        return times * percentile(self.served[load]["steps_ms"], 0.95)


def late_percent(times_ms, target_ms):
    """Share of times, percent, that are longer than the target."""
    return round(100 * sum(took > target_ms for took in times_ms) / max(len(times_ms), 1), 3)


def quantiles(times_ms):
    return {f"p{q * 100:g}": round(percentile(times_ms, q), 4) for q in QUANTILES} if times_ms else None


def row(suite, alone, mode, policy, beside, load, served, shares, core, same_tokens):
    """One line of the result."""
    base, target_ms = alone.served[load], alone.target_ms(load, suite.args.times)
    return {
        "service": SERVICE,
        "trace": suite.args.trace,
        "layers": served["layers"],
        "attention": served["attention"],
        "beside": beside,
        "mode": mode,
        "policy": policy,
        "load": load,
        "target_ms": round(target_ms, 4),
        "target_over_p95": suite.args.times,
        "violations_percent": late_percent(served["steps_ms"], target_ms),
        "violations_gap_percent": late_percent(served["gaps_ms"], target_ms),
        "step_ms": quantiles(served["steps_ms"]),
        "gap_ms": quantiles(served["gaps_ms"]),
        "prefill_ms": quantiles(served["prefills_ms"]),
        "solo_step_ms": quantiles(base["steps_ms"]),
        "tokens_per_s": round(served["tokens_per_s"], 2),
        "tokens_over_solo": round(served["tokens_per_s"] / base["tokens_per_s"], 4),
        "steps": len(served["steps_ms"]),
        "batch_mean": round(served["tokens"] / max(len(served["steps_ms"]), 1), 2),
        "busy_percent": served["busy_percent"],
        "solo_busy_percent": base["busy_percent"],
        "requests": served["requests"],
        "waiting": served["waiting"],
        **shares,
        "core": core,
        "same_tokens": same_tokens,
        "seconds": suite.args.seconds,
        **{key: suite.machine[key] for key in ("device", "driver", "torch", "commit", "date")},
    }


class Rows:
    """Result rows, written after each."""

    def __init__(self, suite):
        self.suite, self.rows = suite, []

    def add(self, line):
        self.rows = merge_rows(self.rows, [line], KEY)
        write_json(self.suite.out / "decode.json", merge_rows(self.suite.read("decode.json") or [], self.rows, KEY))
        brief = ("mode", "policy", "beside", "load", "violations_percent", "tokens_over_solo", "be_share", "batch_mean")
        print("  ".join(f"{key}={line.get(key)}" for key in brief), f"step_ms={line['step_ms']}", flush=True)


def serve(args, alone, load, hp, start_at, warm_s, seconds):
    """The service serves a load: the same requests in every mode."""
    command = {"job": SERVICE, "start_at": start_at, "warm_s": warm_s, "seconds": seconds, "trace": args.trace, "marks": args.marks}
    return hp.ask("decode", timeout_s=warm_s + seconds + 60, rate_per_s=alone.rate_per_s(load, args.trace), **command)


def serve_half(args, alone, hp, failures):
    """The service alone, with as many requests as make it busy half of the time."""
    least, most = HALF_BUSY_PERCENT
    for _ in range(HALF_TRIES_MAX):
        served = serve(args, alone, HALF, hp, soon(), args.warm, args.seconds)
        busy = max(served["busy_percent"], 1)
        if least <= busy <= most:
            return served
        alone.shares[HALF] *= min(max(50 / busy, 0.5), 2)
    failures.add(f"at half load the service alone is busy {busy} % of the time, wanted {least} to {most}")
    return served


def be_rate(args, be, job):
    """Steps a second of a best-effort program alone, the second time."""
    for _ in range(2):
        told = be.ask("train", job=job, start_at=soon(), seconds=args.be_alone_seconds, timeout_s=args.be_alone_seconds + 60)
    return told["steps_per_s"]


def exact(args, hp):
    """The digest of the fixed schedule, if wanted."""
    return hp.ask("decode_exact", timeout_s=120, job=SERVICE, steps=args.exact, trace=args.trace)["digest"] if args.exact else None


def service_environment(args, alone, env):
    return {**env, "SUITE_ATTENTION": alone.attention, **({"SUITE_LAYERS": str(args.layers)} if args.layers else {})}


def measure_alone(suite, alone, rows, failures):
    """The best-effort programs alone, with the service idle; then they end, and the service has the GPU to itself."""
    args = suite.args
    hp = Client(suite, "decode-alone", [SERVICE], env=service_environment(args, alone, {}))
    others = {job: Client(suite, f"alone-{job}", [job]) for job in args.beside.split(",")}
    with started([hp, *others.values()]):
        for job, be in others.items():
            alone.be_steps_per_s[job] = be_rate(args, be, job)
        for be in others.values():
            be.process.stop()
        checked = hp.ask("decode_check", timeout_s=60, job=SERVICE)
        if not checked["off"] <= OFF_MAX:
            failures.add(f"the service's logits are off by {checked['off']:.3f} of their spread (attention: {checked['attention']})")
        alone.digest = exact(args, hp)
        for load in dict.fromkeys([FULL, *args.loads.split(",")]):
            is_half = load == HALF
            alone.served[load] = serve_half(args, alone, hp, failures) if is_half else serve(args, alone, load, hp, soon(), args.warm, args.seconds)
            alone.attention = alone.served[load]["attention"]
            rows.add(row(suite, alone, "solo", "none", "-", load, alone.served[load], {}, None, None))


def set_target(core, name, mode, target_ms):
    """Set the objective for tokens anew, so that what is recent begins anew."""
    core.ctl("client", "set", name, "--no-tpot")
    target = f"{target_ms * 1e3:.0f}us"
    core.ctl("client", "set", name, "--tpot", target, *(["--slo", target] if mode == "herald-mps-slo" else []))
    wait_until(lambda: (client(core.status(), name).get("service") or {}).get("tpot"), 5, f"the target of {name}", every_s=0.1)


def counted(core, name):
    """What the core says of the service: its tokens, graph launches and units of work."""
    entry = client(core.status(), name)
    service = entry.get("service") or {}
    marks, tpot = service.get("marks") or {}, service.get("tpot") or {}
    return {
        "tokens": marks.get("tokens"),
        "tokens_ended": (marks.get("tokens") or {}).get("count") or 0,
        "prefills": marks.get("prefills"),
        "tpot_ms": tpot.get("tpot_ms"),
        "tokens_within": tpot.get("tokens_within") or 0,
        "attainment_percent": tpot.get("attainment_percent"),
        "units": {key: service.get(key) for key in ("requests", "p50_ms", "p99_ms", "attainment_percent")},
        "graph_launches": launches(entry)["by_entry_point"]["graph"],
    }


def share(alone, own, job, trained):
    rate = trained["steps_per_s"]
    return {
        "be_steps_per_s": round(rate, 4),
        "be_solo_steps_per_s": round(alone.be_steps_per_s[job], 4),
        "be_share": round(rate / alone.be_steps_per_s[job], 4),
        "be_share_of_own": round(rate / own, 4),
    }


def stop(be, seconds):
    be.process.send({"stop": True})
    return be.receive(timeout_s=seconds + 60)


def together(args, alone, job, load, hp, be, warm_s, seconds):
    """(the service's answer, the other program's) of one window, before which both work for a while."""
    start_at = soon()
    be.send("train", job=job, start_at=start_at, seconds=warm_s)
    # Until the service has ended. The answer to the command before is dropped.
    be.send("train", job=job, start_at=start_at + warm_s, seconds=seconds, until_stop=True)
    try:
        served = serve(args, alone, load, hp, start_at, warm_s, seconds)
    finally:
        trained = stop(be, seconds)
    return served, trained


def measure(suite, alone, mode, job, load, hp, be, own, core, same_tokens):
    """The service and one other program at once; a row."""
    args, (label, policy, _) = suite.args, step_pairs.MODES[mode]
    if core:
        set_target(core, hp.name, mode, alone.target_ms(load, args.times))
    if mode in LEARNS:
        together(args, alone, job, load, hp, be, args.warm, args.learn_seconds)
    before = counted(core, hp.name) if core else None
    served, trained = together(args, alone, job, load, hp, be, args.warm, args.seconds)
    told = None
    if core:
        told = counted(core, hp.name)
        told["counted"] = {key: told[key] - before[key] for key in ("tokens_ended", "tokens_within", "graph_launches")}
        told["counted"]["steps_of_the_service"] = served["launches"]
        told["kept_percent"] = round(100 * told["counted"]["tokens_within"] / max(told["counted"]["tokens_ended"], 1), 3)
        state = core.status()
        told["policy"] = {kind: state["policy"].get(kind) for kind in ("counters", "gauges", "reasons")}
    shares = share(alone, own, job, trained)
    return row(suite, alone, label, policy, job, load, served, shares, told, same_tokens)


def groups(args, mode):
    """Best-effort programs that are alive at once: in `timeslice` one, as two have other time slices."""
    jobs = args.beside.split(",")
    return [[job] for job in jobs] if args.apart or step_pairs.MODES[mode][2] == "timeslice" else [jobs]


def same(suite, alone, hp, be, job, failures, where):
    """Whether the fixed schedule gives the same tokens beside a program as alone; None: not asked."""
    if not suite.args.exact:
        return None
    be.send("train", job=job, start_at=time.monotonic(), seconds=0.1, until_stop=True)
    try:
        is_same = exact(suite.args, hp) == alone.digest
    finally:
        stop(be, 0.1)
    if not is_same:
        failures.add(f"{where}: other tokens than alone")
    return is_same


def measure_mode(suite, alone, mode, jobs, rows, failures):
    """Start a mode's programs, and measure each beside the service."""
    args = suite.args
    with contextlib.ExitStack() as stack:
        core, hp_env, be_env = stack.enter_context(environment(suite, mode))
        width = mode.removeprefix("mps-")
        if width in WIDTHS:
            be_env = {**be_env, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": width}
        hp = Client(suite, f"decode-{mode}", [SERVICE], core, "high", service_environment(args, alone, hp_env))
        others = [Client(suite, f"{job}-{mode}", [job], core, "best-effort", be_env) for job in jobs]
        stack.enter_context(started([hp, *others]))
        for job, be in zip(jobs, others, strict=True):
            where = f"{mode}, {job}"
            with failures.guard(where):
                own = be_rate(args, be, job)
                is_same = same(suite, alone, hp, be, job, failures, where)
                for load in args.loads.split(","):
                    rows.add(measure(suite, alone, mode, job, load, hp, be, own, core, is_same))
        if core:
            for note in shortfalls(core.status(), core.sharing, [hp.name, *(be.name for be in others)]):
                failures.add(f"{mode}: {note}")


def main(suite):
    """Late tokens of a decode service and best-effort shares, mode by mode."""
    args, failures, rows, alone = suite.args, Failures(), Rows(suite), Alone()
    suite.policy_config = lambda _mode: None
    modes = args.modes.split(",")
    unknown = [mode for mode in modes if mode not in step_pairs.MODES]
    if unknown:
        return [f"unknown: {', '.join(unknown)}; modes are {', '.join(step_pairs.MODES)}"]
    with failures.guard("alone"):
        measure_alone(suite, alone, rows, failures)
    if set(alone.served) < {FULL, *args.loads.split(",")}:
        return failures.messages
    for mode in modes:
        for jobs in groups(args, mode):
            with failures.guard(mode):
                measure_mode(suite, alone, mode, jobs, rows, failures)
    return failures.messages


def add_arguments(parser):
    parser.add_argument("--modes", default=",".join(MODES), help="comma-separated modes")
    parser.add_argument("--beside", default=",".join(BESIDE), help="comma-separated best-effort programs: trainings of models.py")
    parser.add_argument("--loads", default="full,half", help=f"comma-separated, of {FULL}, {HALF} and numbers such as 0.1")
    parser.add_argument("--trace", default="conv", choices=decode_batch.TRACES, help="requests")
    parser.add_argument("--times", type=float, default=1.5, help="the target, as a multiple of the service's own p95 step")
    parser.add_argument("--seconds", type=float, default=8, help="length of each measuring window")
    parser.add_argument("--warm", type=float, default=2, help="seconds of serving before each window")
    parser.add_argument("--learn-seconds", type=float, default=8, help="how long both programs work before, so that slo-herald learns")
    parser.add_argument("--be-alone-seconds", type=float, default=2, help="how long a best-effort program runs alone in each mode, twice")
    parser.add_argument("--exact", type=int, default=60, help="steps of the fixed schedule whose tokens must be the same in each mode; 0: none")
    parser.add_argument("--layers", type=int, help="of the service's model; default: all")
    parser.add_argument("--marks", action="store_true", help="the service marks tokens and prefills with NVTX, in place of graph launches")
    parser.add_argument("--apart", action="store_true", help="only one best-effort program alive at a time in every mode")
    parser.add_argument("--core-args", type=str.split, default=[], help="further flags of tally-core, one string")


if __name__ == "__main__":
    step_main("decode", main, add_arguments)
