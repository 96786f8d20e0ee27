"""Bit-identical results under sharing, and after SIGKILL of anyone.

Reference: two deterministic trainings (ResNet-50, GPT-2 small) in a process
alone; both runs must agree, or the comparison means nothing: a model that
differs fails the step, and only the other is compared. Then, for each sharing,
one core with two inferences and two trainings:

1. shared     training next to an inference under load to the training's end:
              digest as the reference
2. core dies  SIGKILL of the core mid-run: both go on (unscheduled) and are
              right; a new core on the same socket has both again, governed
3. hp dies    SIGKILL of the inference mid-run: the training is right, the core
              sees the inference gone
4. be dies    SIGKILL of a training mid-run: the inference is right, and fast
              again (its p50 within 10 % of alone)

An inference is right if the digest of its output after the run is the one
before. Under MPS a killed client may by NVIDIA's rules disturb the others, so
failures of 3 and 4 there are reported, but do not fail the step.
"""

import contextlib
import os
import signal
import time

from clients import LEAD_S, Client, soon, started
from common import Failures, step_main
from procs import wait_until
from stats import percentile
from tally import Core, client, shortfalls

HP_JOB = "bert-graph"
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
LOAD = 0.5
SEED = 11
KILL_AFTER_S = 0.3  # after the first training step
TRAIN_TIMEOUT_S = 45
LOAD_MAX_S = 4 * TRAIN_TIMEOUT_S


def requests(seconds, rate_per_s):
    """Arguments of open-loop requests that start soon."""
    return {
        "job": HP_JOB,
        "start_at": soon(),
        "seconds": seconds,
        "rate_per_s": rate_per_s,
        "seed": SEED,
        "limit_s": seconds * 2 + 2,
    }


class Load:
    """An inference serving arrivals until `.finish()`, which gives its answer."""

    def __init__(self, hp, solo_ms):
        self.hp, self.running = hp, True
        hp.send("requests", **requests(LOAD_MAX_S, LOAD / solo_ms * 1e3), until_stop=True)

    def finish(self):
        self.running = False
        self.hp.process.send({"stop": True})
        return self.hp.receive(20)


class Scene:
    """The programs of one sharing mode and what they should produce."""

    def __init__(self, suite, sharing, core, clients, reference):
        self.suite, self.sharing, self.core, self.reference = suite, sharing, core, reference
        self.hp, self.hp_spare, self.be, self.be_spare = clients
        self.solo = {}
        # Of the scene under way: its load, and what it took, for the result.
        self.under_way, self.figures = None, {}
        for one in (self.hp, self.hp_spare):
            alone = one.ask("requests", **requests(0.5, 400))
            self.solo[one.name] = (percentile(alone["service_ms"], 0.5), alone["digest"])

    def load(self, hp):
        self.under_way = Load(hp, self.solo[hp.name][0])
        return self.under_way

    def tidy(self):
        """End the load that a scene left."""
        if self.under_way is not None and self.under_way.running:
            with contextlib.suppress(OSError, RuntimeError):
                self.under_way.finish()

    def train(self, be):
        """Start the deterministic trainings; returns once the first step is done."""
        be.send("exact", steps=self.suite.args.steps)
        be.receive(TRAIN_TIMEOUT_S)

    def trained(self, be):
        """The digests, past the progress lines."""
        while True:
            answer = be.receive(TRAIN_TIMEOUT_S)
            if "digests" in answer:
                self.figures.setdefault("training_s", round(answer["seconds"], 2))
                return answer

    def check_training(self, answer):
        digests = {name: answer["digests"][name] for name in self.reference}
        return [] if digests == self.reference else [f"training digests {digests} differ from {self.reference}"]

    def check_inference(self, hp, answer):
        self.figures["requests"] = len(answer["service_ms"])
        if answer["service_ms"]:
            self.figures["p50_ms"] = round(percentile(answer["service_ms"], 0.5), 3)
            self.figures["p50_alone_ms"] = round(self.solo[hp.name][0], 3)
        same = answer["digest"] == self.solo[hp.name][1]
        return [] if same else [f"{hp.name}: the output differs from the one before"]

    def kill(self, kill):
        """Kill somebody a little after the training began; when that was."""
        time.sleep(KILL_AFTER_S)
        kill()
        return time.monotonic()

    def check_kill_in_time(self, killed_at, answer):
        """Was the training under way?"""
        left_s = answer["ended"] - killed_at
        self.figures["training_after_kill_s"] = round(left_s, 2)
        return [] if left_s > 0 else ["the training had ended before the kill: nothing is shown"]

    def note_decisions(self, state):
        """What the core did to the training's launches."""
        entry = client(state, self.be.name)
        if entry is not None:
            decisions = entry["decisions"]
            self.figures |= {"launches": entry["launches"], "unscheduled": entry["unscheduled"]}
            self.figures |= {name: decisions[name] for name in ("run", "leased", "launches_held", "window_stalls")}

    def connected(self, name):
        """The entry of a client if it is connected."""
        return client({"clients": self.core.status()["clients"]}, name)

    def shared(self):
        load = self.load(self.hp)
        self.train(self.be)
        trained = self.trained(self.be)
        problems = self.check_training(trained) + self.check_inference(self.hp, load.finish())
        state = self.core.status()
        self.note_decisions(state)
        if not self.figures.get("launches_held"):
            problems.append("no launch of the training was held: nothing was shared")
        return problems + shortfalls(state, self.sharing, [self.hp.name, self.be.name])

    def core_dies(self):
        load = self.load(self.hp)
        self.train(self.be)
        killed_at = self.kill(self.core.kill)
        trained = self.trained(self.be)
        problems = self.check_training(trained) + self.check_kill_in_time(killed_at, trained)
        problems += self.check_inference(self.hp, load.finish())
        self.core.start()
        # A client attaches again by itself, at the latest with its next launches.
        self.hp.ask("closed", job=HP_JOB, n=20)
        self.hp_spare.ask("closed", job=HP_JOB, n=20)
        self.train(self.be)
        for one in (self.hp, self.be):
            with contextlib.suppress(TimeoutError):
                wait_until(lambda one=one: self.connected(one.name), 10, f"{one.name} to attach again", every_s=0.2)
            if not self.connected(one.name):
                problems.append(f"{one.name} did not attach to the new core within 10 s")
        problems += self.check_training(self.trained(self.be))
        state = self.core.status()
        self.note_decisions(state)
        if not self.figures.get("run", 0) + self.figures.get("leased", 0):
            problems.append("the new core decided no launch of the training")
        return problems + shortfalls(state, self.sharing, [self.hp.name, self.be.name])

    def hp_dies(self):
        self.load(self.hp)
        self.train(self.be)
        killed_at = self.kill(lambda: os.kill(self.hp.pid, signal.SIGKILL))
        trained = self.trained(self.be)
        problems = self.check_training(trained) + self.check_kill_in_time(killed_at, trained)
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: not self.connected(self.hp.name), 5, "the inference to be seen gone", every_s=0.2)
        return problems + (["the core still lists the killed inference"] if self.connected(self.hp.name) else [])

    def be_dies(self):
        load = self.load(self.hp_spare)
        self.train(self.be_spare)
        self.kill(lambda: os.kill(self.be_spare.pid, signal.SIGKILL))
        problems = []
        with contextlib.suppress(RuntimeError):  # its end
            self.trained(self.be_spare)
            problems.append("the training had ended before the kill: nothing is shown")
        # The inference goes on being served next to nobody.
        time.sleep(LEAD_S)
        problems += self.check_inference(self.hp_spare, load.finish())
        after = percentile(self.hp_spare.ask("closed", job=HP_JOB, n=300)["service_ms"][50:], 0.5)
        before = self.solo[self.hp_spare.name][0]
        self.figures["p50_after_ms"] = round(after, 3)
        if after > before * 1.1:
            problems.append(f"p50 after the kill is {after:.3f} ms, alone {before:.3f} ms")
        return problems


SCENES = ("shared", "core_dies", "hp_dies", "be_dies")


def reference_digests(suite, failures):
    """The digests of two runs alone, without Tally: those that agree with each other, of which there must be some."""
    one = Client(suite, "reference", ["exact"], env=DETERMINISTIC)
    runs = []
    with started([one]):
        for _ in range(2):
            one.send("exact", steps=suite.args.steps)
            while "digests" not in (answer := one.receive(TRAIN_TIMEOUT_S)):
                pass
            runs.append(answer)
    agreed = {}
    for name, digest in runs[0]["digests"].items():
        if runs[1]["digests"][name] == digest:
            agreed[name] = digest
            continue
        steps = enumerate(zip(runs[0]["losses"][name], runs[1]["losses"][name]))
        first = next((step for step, (a, b) in steps if a != b), None)
        failures.add(f"the unshared runs of {name} differ from each other, their losses first at step {first}")
    print(f"reference: {agreed}, {[round(run['seconds'], 1) for run in runs]} s", flush=True)
    if not agreed:
        raise RuntimeError("no training is deterministic")
    return agreed


def run_sharing_mode(suite, sharing, reference, rows, failures):
    with contextlib.ExitStack() as stack:
        core = stack.enter_context(Core(suite, sharing, "tally-priority", sharing))
        clients = [Client(suite, f"{sharing}-{n}", [HP_JOB], core, "high", DETERMINISTIC) for n in ("hp", "hp-spare")]
        clients += [
            Client(suite, f"{sharing}-{n}", ["exact"], core, "best-effort", DETERMINISTIC) for n in ("be", "be-spare")
        ]
        stack.enter_context(started(clients))
        scene = Scene(suite, sharing, core, clients, reference)
        for name in SCENES:
            problems, begin, scene.figures = [], time.monotonic(), {}
            try:
                problems = getattr(scene, name)()
            except Exception as error:  # noqa: BLE001 - every scene has its own programs' trouble; report and go on
                problems = [f"{type(error).__name__}: {error}"]
            scene.tidy()
            required = not (sharing == "mps" and name in ("hp_dies", "be_dies"))
            row = {"sharing": sharing, "scene": name, "passed": not problems, "required": required}
            row |= {"problems": problems, "seconds": round(time.monotonic() - begin, 1), "figures": scene.figures}
            rows.append(row)
            write(suite, reference, rows)
            print(row, flush=True)
            if problems and required:
                failures.add(f"{sharing}, {name}: {problems}")
            if core.process is None:
                core.start()


def write(suite, reference, rows):
    suite.write("correct.json", {"steps": suite.args.steps, "reference": reference, "rows": rows})


def main(suite):
    """Bit-identical results under sharing and after kills."""
    failures, rows, reference = Failures(), [], None
    with failures.guard("reference"):
        reference = reference_digests(suite, failures)
        for sharing in suite.args.sharing_modes.split(","):
            with failures.guard(sharing):
                run_sharing_mode(suite, sharing, reference, rows, failures)
    write(suite, reference, rows)
    return failures.messages


def add_arguments(parser):
    parser.add_argument("--sharing-modes", default="timeslice,mps", help="comma-separated")
    parser.add_argument("--steps", type=int, default=20, help="training steps of each model")


if __name__ == "__main__":
    step_main("correct", main, add_arguments)
