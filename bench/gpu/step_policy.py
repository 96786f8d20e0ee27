"""The policy's life on a GPU: its log, a shadow, A/B tests, and policies that misbehave, beside real programs.

One core in one sharing, one inference with Poisson arrivals and one training
as unmodified clients, started once; everything below happens to that core while
they run. The active policy is `tally-priority`.

log      `log record`, the policy anew, some seconds, `log stop`; then `log replay` with the same component. And
         once more begun in mid-run, with what the policy knew then.
shadow   `fifo` beside it: agreement, CPU share; the inference's times and the training's rate with and without
ab       `tally-priority` against `fifo`, and against itself; then a test with a guard that nobody can keep
chaos    the test policy `chaos`, in each kind of fault: until `status` names it, until the last good policy is back,
         the inference's times in the second around it, and a deterministic training through it, bit for bit

Times are reported, not judged. The step fails if a replay differs, a client is
lost, a digest differs, a fault is never named, or A or the good policy is not
back.
"""

import contextlib
import json
import subprocess
import time

from clients import Client, soon, started
from common import Failures, clean_environment, step_main
from stats import median, percentile, poisson_schedule
from tally import Core, client, shortfalls

HP_JOB, BE_JOB, EXACT = "bert-graph", "gpt2-train", "gpt2-small"
NAMES = ("hp", "be")
POLICY, OTHER = "tally-priority", "fifo"
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
SEED = 7
WARM_REQUESTS = 300
CTL_TIMEOUT_S = 60
# How often `status` is asked while something is waited for.
POLL_S = 0.02
PARTS = ("log", "shadow", "ab", "chaos")
# kind of fault as it is called here: what `chaos` does, kinds that `status` may call it
FAULTS = {
    "trap": (1, ("trap",)),
    "loop": (2, ("overrun",)),
    # Filling memory takes fuel; whichever runs out first.
    "memory": (3, ("memory", "overrun")),
    "nonsense": (11, ("nonsense",)),
    "stall": (10, ("stall",)),
}
# Around a load of `chaos`: arrivals before it, and after it.
BEFORE_S, AFTER_S = 1.5, 1.0
BACK_MAX_S = 15
# `chaos` is loaded time and again: the good policy is not to wait longer each time that it is disabled. Nothing
# is loaded but by command, whatever becomes of its file.
CONFIG = "[policy]\nwatch = false\n[policy.disabling]\nback_off_initial_ms = 10\nback_off_max_ms = 10\n"
# A guard that no policy keeps: a request takes longer.
IMPOSSIBLE = "hp_p50<1us"


def ctl(core, *arguments, codes=(0,)):
    """`tallyctl` with these arguments; its output. Another exit code than `codes` is an error."""
    command = [core.suite.program("tallyctl"), "--socket", str(core.socket), *map(str, arguments)]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=CTL_TIMEOUT_S, env=clean_environment()
    )
    if done.returncode not in codes:
        raise RuntimeError(f"tallyctl {arguments}: exit {done.returncode}: {done.stderr.strip()[-800:]}")
    return done.stdout


def ctl_json(core, *arguments, codes=(0,)):
    return json.loads(ctl(core, *arguments, "--json", codes=codes))


def times(values):
    """Percentiles of some times; `None` without any."""
    if not values:
        return None
    quantiles = {"p50": 0.5, "p99": 0.99, "max": 1}
    return {"n": len(values), **{name: round(percentile(values, q), 4) for name, q in quantiles.items()}}


class Harness:
    """The core, its two clients, and the arrivals that load them."""

    def __init__(self, suite, core, sharing, hp, be):
        self.suite, self.core, self.sharing, self.hp, self.be = suite, core, sharing, hp, be
        self.rate_per_s = None
        self.arrivals = []

    def policy(self, name):
        folder = "test-policies" if name == "chaos" else "policies"
        return self.suite.program(f"{folder}/{name}.wasm")

    def serve(self, seconds, until_stop=False):
        """Have the inference serve arrivals; when they start."""
        start_at = soon()
        self.arrivals = poisson_schedule(self.rate_per_s, seconds, SEED)
        self.hp.send(
            "requests", job=HP_JOB, start_at=start_at, seconds=seconds, rate_per_s=self.rate_per_s, seed=SEED,
            limit_s=2 * seconds, until_stop=until_stop,
        )  # fmt: skip
        return start_at

    def served(self, start_at, seconds):
        """What it served: (end, service ms, queued ms) of each request, and the answer."""
        answer = self.hp.receive(2 * seconds + 30)
        service, queued = answer["service_ms"], answer["queued_ms"]
        dues = [start_at + arrival for arrival in self.arrivals[: len(service)]]
        rows = [(due + q / 1e3, s, q) for due, s, q in zip(dues, service, queued)]
        return rows, answer

    def window(self, seconds, meanwhile=lambda: None):
        """Both programs for so long; `meanwhile` is called when they have begun. Their figures."""
        before = client(self.core.status(), "be")
        start_at = self.serve(seconds)
        self.be.send("train", job=BE_JOB, start_at=start_at, seconds=seconds, until_stop=True)
        time.sleep(max(0.0, start_at - time.monotonic()))
        meanwhile()
        rows, answer = self.served(start_at, seconds)
        self.be.process.send({"stop": True})
        trained = self.be.receive(seconds + 30)
        after = client(self.core.status(), "be")
        elapsed_s = time.monotonic() - start_at
        return {
            "seconds": seconds,
            "service_ms": times([s for _, s, _ in rows]),
            "queued_ms": times([q for _, _, q in rows]),
            "unserved": answer["unserved"],
            "be_steps_per_s": round(trained["steps_per_s"], 4),
            "be_launches_per_s": round((after["launches"] - before["launches"]) / elapsed_s),
        }

    @contextlib.contextmanager
    def traffic(self, seconds_max):
        """Both programs until the block ends. Yields a list that is then the inference's answer."""
        answers = []
        start_at = self.serve(seconds_max, until_stop=True)
        self.be.send("train", job=BE_JOB, start_at=start_at, seconds=0.5, until_stop=True)
        try:
            yield answers
        finally:
            for one in (self.hp, self.be):
                with contextlib.suppress(OSError):
                    one.process.send({"stop": True})
            answers.append(self.hp.receive(30))
            self.be.receive(30)


def measure_solo(harness, load):
    """The inference alone: gives the rate of arrivals."""
    warm = harness.hp.ask("closed", job=HP_JOB, n=WARM_REQUESTS)["service_ms"]
    harness.rate_per_s = load / percentile(warm, 0.5) * 1e3
    rows, _ = harness.served(harness.serve(2), 2)
    return {"rate_per_s": round(harness.rate_per_s, 2), "service_ms": times([s for _, s, _ in rows])}


# --- The decision log


def replay(core, file, name):
    """A log again with the component that made it."""
    begin = time.monotonic()
    # 1: it differs, or records were lost; the report says which.
    report = ctl_json(core, "log", "replay", file, codes=(0, 1))
    took_s = time.monotonic() - begin
    comparison, parts = report["comparison"], report["parts"]
    return {
        "begun": name,
        "equal": report["equal"],
        "same_policy": report["same_policy"],
        "decisions": comparison["decisions"],
        "equal_decisions": comparison["equal"],
        "events": comparison["events"],
        "calls_differ": comparison["calls_differ"],
        "parts": parts,
        "incomplete": report["incomplete"],
        "replay_s": round(took_s, 2),
    }


def record(harness, name, seconds, anew):
    """Record both programs for so long; with `anew` the policy starts once more at the beginning."""
    core, file = harness.core, harness.suite.work / f"{name}.tallylog"
    began = {}

    def begin():
        ctl(core, "log", "record", "--out", file)
        began["at"] = time.monotonic()
        if anew:
            ctl(core, "policy", "load", harness.policy(POLICY))

    # Anew: before anybody is decided, so that all that is compared follows from what the log holds.
    if anew:
        begin()
    figures = harness.window(seconds, (lambda: None) if anew else begin)
    recorded_s = time.monotonic() - began["at"]
    ctl(core, "log", "stop")
    status = ctl_json(core, "log", "status")
    row = replay(core, file, "with the policy's start" if anew else "in mid-run")
    row |= {key: status[key] for key in ("records", "bytes", "dropped", "ended")}
    row |= {"recorded_s": round(recorded_s, 2), "decisions_per_s": round(row["decisions"] / seconds)}
    file.unlink()
    return {**row, "while_recording": figures}


def measure_log(harness, seconds, failures):
    rows = [record(harness, "anew", seconds, True), record(harness, "mid-run", 3, False)]
    for row in rows:
        print(f"log, {row['begun']}: {row}", flush=True)
        if not row["same_policy"] or not row["decisions"]:
            failures.add(f"log, {row['begun']}: nothing was replayed with the log's own policy")
        # A call that the clock stopped is repeated by no replay; what follows it is not compared.
        elif not row["equal"]:
            failures.add(f"log, {row['begun']}: the same component decided otherwise in the replay")
    return rows


# --- The shadow


def measure_shadow(harness, seconds, percent):
    """`fifo` as the shadow of the active policy; windows without it before and after."""
    core, without = harness.core, [harness.window(seconds)]
    ctl(core, "shadow", "start", harness.policy(OTHER), "--cpu-percent", percent)
    begin, at = ctl_json(core, "shadow", "status"), time.monotonic()
    figures = harness.window(seconds)
    end, wall_s = ctl_json(core, "shadow", "status"), time.monotonic() - at
    ctl(core, "shadow", "stop")
    without.append(harness.window(seconds))
    comparison = end["comparison"]
    row = {
        "policy": OTHER,
        "active": end["active"],
        "cpu_percent_max": percent,
        "cpu_percent": round((end["cpu_ms"] - begin["cpu_ms"]) / (wall_s * 10), 3),
        "agreement_percent": round(end["agreement_percent"], 3),
        "decisions": comparison["decisions"],
        "equal": comparison["equal"],
        "matrix": comparison["matrix"],
        "kinds": end["kinds"],
        "skipped": end["parts"]["skipped"],
        "dropped": end["dropped"],
        "ended": end["ended"],
        "with": figures,
        "without": without,
    }
    print(f"shadow: {row}", flush=True)
    return row


# --- A/B tests


def wait_for_end(core, timeout_s):
    """Poll until the test has ended and A is active."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if not ctl_json(core, "ab", "status")["running"]:
            return
        time.sleep(POLL_S)
    raise TimeoutError(f"the A/B test has not ended after {timeout_s} s")


def of_blocks(report, arm):
    """Medians over an arm's blocks."""
    blocks = [block for block in report["blocks"] if block["arm"] == arm]
    p99 = [block["hp_p99_ns"] / 1e6 for block in blocks if block["hp_p99_ns"] is not None]
    work = [block["be_work_ns"] / 1e6 / block["measured_s"] for block in blocks if block["measured_s"] > 0]
    return {
        "blocks": len(blocks),
        "hp_p99_ms": round(median(p99), 4) if p99 else None,
        "be_gpu_ms_per_s": round(median(work), 3) if work else None,
    }


def ab_test(harness, what, other, metric, options, max_s, failures):
    """One test from start to end, both programs running."""
    core = harness.core
    with harness.traffic(max_s + 20) as answers:
        ctl(
            core, "ab", "start", harness.policy(other), "--metric", metric, "--max-time", f"{max_s}s", "--seed", SEED,
            *options,
        )  # fmt: skip
        wait_for_end(core, max_s + 15)
        report, serving = ctl_json(core, "ab", "report"), core.status()["policy"]
    if serving["name"] != POLICY or serving["disabled"]:
        failures.add(f"ab in {harness.sharing}, {what}: {serving['name']} is active after it, not A")
    keys = ("plan", "ended", "elapsed_s", "verdict", "e_value", "effect", "mean_effect", "pairs", "sample_ratio")
    keys += ("caveats", "a_back_after_ns")
    row = {"test": what, "sharing": harness.sharing, **{key: report[key] for key in keys}}
    row |= {arm.lower(): {"name": report[arm.lower()]["name"], **of_blocks(report, arm)} for arm in ("A", "B")}
    row |= {"requests_served": len(answers[0]["service_ms"]), "service_ms": times(answers[0]["service_ms"])}
    print(f"ab, {what}: {row}", flush=True)
    return row


def measure_ab(harness, args, failures):
    """Each test by itself: one that fails does not keep the other from being run."""
    rows, where = [], f"ab in {harness.sharing}"
    for metric in args.metrics.split(","):
        with failures.guard(f"{where}, {metric}"):
            rows.append(ab_test(harness, "compared", OTHER, metric, [], args.ab_s, failures))
    with failures.guard(f"{where}, A against itself"):
        row = ab_test(harness, "A against itself", POLICY, "hp_p99", [], args.ab_s, failures)
        if row["verdict"] not in ("keep_a", "undecided"):
            failures.add(f"{where}: A against itself ended with {row['verdict']}: {row['effect']}")
        rows.append(row)
    with failures.guard(f"{where}, guard"):
        options = ["--block", "3s", "--washout", "100ms", "--guard", IMPOSSIBLE]
        row = ab_test(harness, "a guard is breached", OTHER, "be_throughput", options, 20, failures)
        if row["ended"]["reason"] != "guard":
            failures.add(f"{where}: {IMPOSSIBLE} did not end it: {row['ended']}")
        rows.append(row)
    return rows


# --- Policies that misbehave


class Trainings:
    """A deterministic training of about so many seconds after its first step, whose digest is known."""

    def __init__(self, be, seconds):
        self.be, self.steps = be, 8
        # The first steps are no measure of the later ones: as often as it takes.
        for attempt in range(4):
            if attempt:
                self.steps = max(8, round(self.steps * seconds / self.alone_s))
            self.begin()
            reference = self.finish()
            self.alone_s = reference["ended"] - self.begun
            if self.alone_s > 0.75 * seconds:
                break
        self.digest = reference["digests"][EXACT]

    def begin(self):
        """Start it; returns once its first step is done."""
        self.be.send("exact", steps=self.steps, names=[EXACT])
        self.be.receive(60)
        self.begun = time.monotonic()

    def finish(self):
        while True:
            answer = self.be.receive(60)
            if "digests" in answer:
                return answer


def faults_of(policy, kinds):
    return sum(policy["faults"].get(kind, 0) for kind in kinds)


def watch(core, kinds, before, loaded):
    """Poll status until the good policy is back: when a fault was counted, named, and when it was back."""
    seen, end = {}, time.monotonic() + BACK_MAX_S
    while "back" not in seen and time.monotonic() < end:
        policy = core.status()["policy"]
        now = time.monotonic()
        if faults_of(policy, kinds) > before:
            seen.setdefault("counted", now)
        last = policy["last_disabled"]
        if last and last["generation"] == loaded and last["kind"] in kinds:
            seen.setdefault("named", now)
            seen.setdefault("message", last["message"].splitlines()[0][:200])
        if policy["generation"] > loaded and policy["name"] == POLICY:
            seen.setdefault("back", now)
            seen["loaded_because"] = policy["loaded_because"]
        time.sleep(POLL_S)
    return seen


def misbehave(harness, kind, trainings, failures):
    """Load `chaos` in one kind of fault while both run."""
    number, names = FAULTS[kind]
    core, file = harness.core, harness.suite.work / f"chaos-{kind}.conf"
    file.write_text(f"always {number}")
    state = core.status()
    before, by_rule = faults_of(state["policy"], names), state["policy"]["built_in_rule_decisions"]
    trainings.begin()
    window_s = BEFORE_S + AFTER_S
    start_at = harness.serve(window_s)
    time.sleep(max(0.0, start_at + BEFORE_S - time.monotonic()))
    sent = time.monotonic()
    ctl(core, "policy", "load", harness.policy("chaos"), "--config", file)
    active = time.monotonic()
    # It may have been disabled already.
    history = ctl_json(core, "policy", "history")
    loaded = max(entry["generation"] for entry in history if entry["name"] == "chaos")
    seen = watch(core, names, before, loaded)
    rows, answer = harness.served(start_at, window_s)
    after_rows, _ = harness.served(harness.serve(AFTER_S), AFTER_S)
    trained = trainings.finish()
    policy = core.status()["policy"]
    until = max(sent + 1, seen.get("back", sent))
    # All that were under way then: one that took long ends later.
    around = [s for end, s, _ in rows if end >= sent and end - s / 1e3 < until]

    def ms(name):
        return round((seen[name] - active) * 1e3, 1) if name in seen else None

    row = {
        "fault": kind,
        "load_ms": round((active - sent) * 1e3, 1),
        "counted_ms": ms("counted"),
        "named_ms": ms("named"),
        "back_ms": ms("back"),
        "message": seen.get("message"),
        "loaded_because": seen.get("loaded_because"),
        "built_in_rule_decisions": policy["built_in_rule_decisions"] - by_rule,
        "fault_cost_us_max": policy["fault_cost_us"]["max"],
        "before_ms": times([s for end, s, _ in rows if end < sent]),
        "around_ms": times(around),
        "after_ms": times([s for _, s, _ in after_rows]),
        "unserved": answer["unserved"],
        "training_equal": trained["digests"][EXACT] == trainings.digest,
        "training_after_back_s": round(trained["ended"] - seen.get("back", sent), 2),
        "training_s": round(trained["ended"] - trainings.begun, 2),
        "training_alone_s": round(trainings.alone_s, 2),
        "steps": trainings.steps,
    }
    print(f"chaos: {row}", flush=True)
    if "named" not in seen:
        failures.add(f"chaos, {kind}: not named in {BACK_MAX_S} s: {policy['faults']}, {policy['last_fault']}")
    if "back" not in seen:
        failures.add(f"chaos, {kind}: {POLICY} was not back after {BACK_MAX_S} s")
        ctl(core, "policy", "load", harness.policy(POLICY))
    if trained["ended"] < active:
        failures.add(f"chaos, {kind}: the training had ended before it was active: nothing is shown")
    if not row["training_equal"]:
        failures.add(f"chaos, {kind}: the training's digest differs from the one alone")
    return row


def measure_chaos(harness, args, failures):
    trainings, rows = Trainings(harness.be, args.training_s), []
    for kind in args.faults.split(","):
        with failures.guard(f"chaos, {kind}"):
            rows.append(misbehave(harness, kind, trainings, failures))
    return rows


def clients_at_end(core, pids, failures):
    """Whether both are still there, governed, and were never let run unscheduled."""
    state, rows = core.status(), []
    for name, pid in pids.items():
        entry = client({"clients": state["clients"]}, name, pid)
        if entry is None or entry["pid"] != pid:
            failures.add(f"{name} (pid {pid}) is no client of the core any more")
            continue
        rows.append({"name": name, **{key: entry[key] for key in ("governed", "launches", "unscheduled")}})
        if not entry["governed"] or entry["unscheduled"]:
            failures.add(f"{name}: governed {entry['governed']}, {entry['unscheduled']} launches unscheduled")
    policy = state["policy"]
    return {"clients": rows, "active_policies": policy["generation"], "swap_pause_us": policy["swap_pause_us"]}


def main(suite):
    """The policy's life while programs run."""
    args, failures = suite.args, Failures()
    parts = args.parts.split(",")
    unknown = [k for k in args.faults.split(",") if k not in FAULTS] + [p for p in parts if p not in PARTS]
    if unknown:
        raise SystemExit(f"unknown: {unknown}; faults are {list(FAULTS)}, parts {list(PARTS)}")
    content = {"hp": HP_JOB, "be": BE_JOB, "exact": EXACT, "load": args.load, "sharing": args.sharing, "policy": POLICY}

    def keep(**more):
        content.update(more)
        suite.write("policy.json", content)

    config = suite.work / "core-policy.toml"
    config.write_text(CONFIG)
    with Core(suite, "policy", POLICY, args.sharing, extra=["--config", config]) as core:
        hp = Client(suite, "hp", [HP_JOB], core, "high")
        be = Client(suite, "be", [BE_JOB, "exact"], core, "best-effort", DETERMINISTIC)
        with started([hp, be]):
            harness = Harness(suite, core, args.sharing, hp, be)
            pids = {one.name: one.pid for one in (hp, be)}
            keep(solo=measure_solo(harness, args.load))
            for note in shortfalls(core.status(), args.sharing, NAMES):
                failures.add(note)
            measure = {
                "log": lambda: measure_log(harness, args.seconds, failures),
                "shadow": lambda: measure_shadow(harness, args.seconds, args.cpu_percent),
                "ab": lambda: measure_ab(harness, args, failures),
                "chaos": lambda: measure_chaos(harness, args, failures),
            }
            for part in parts:
                with failures.guard(part):
                    keep(**{part: measure[part]()})
            with failures.guard("clients"):
                keep(end=clients_at_end(core, pids, failures), failures=failures.messages)
    return failures.messages


def add_arguments(parser):
    parser.add_argument("--sharing", default="timeslice", help="of the core")
    parser.add_argument("--seconds", type=float, default=5, help="length of the log's and the shadow's windows")
    parser.add_argument("--load", type=float, default=0.5, help="arrival rate times the inference's latency alone")
    parser.add_argument("--metrics", default="be_throughput,hp_p99", help="of the A/B tests of two policies, comma-separated")
    parser.add_argument("--ab-s", type=int, default=60, help="longest time of an A/B test")
    parser.add_argument("--cpu-percent", type=float, default=5, help="what the shadow may use of one CPU")
    parser.add_argument("--training-s", type=float, default=4, help="length of a deterministic training alone, about")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated, of these")
    parser.add_argument("--faults", default=",".join(FAULTS), help="comma-separated, of these")


if __name__ == "__main__":
    step_main("policy", main, add_arguments)
