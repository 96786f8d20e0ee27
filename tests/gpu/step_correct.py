"""Bit-identical results under sharing, and after SIGKILL of anyone.

Reference: two deterministic trainings (ResNet-50, GPT-2 small) in a process
alone; both runs must agree, or the comparison means nothing. Then, for each
residency, one core with two inferences and two trainings:

1. shared     training next to an inference under load: digest as the reference
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

from clients import Client, soon, started
from common import Failures, step_main
from procs import wait_until
from stats import percentile
from tally import Core, client, shortfalls

HP_JOB = "bert-graph"
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
LOAD = 0.5
SEED = 11
KILL_AFTER_S = 0.3  # after the first training step
TRAIN_TIMEOUT_S = 60


def requests(seconds, rate_per_s):
    """Arguments of open-loop requests that start soon."""
    limit_s = seconds * 2 + 2
    return {
        "job": HP_JOB,
        "start_at": soon(),
        "seconds": seconds,
        "rate_per_s": rate_per_s,
        "seed": SEED,
        "limit_s": limit_s,
    }


class Load:
    """An inference serving arrivals; `.finish()` gives its answer."""

    def __init__(self, hp, solo_ms, seconds):
        self.hp, self.seconds = hp, seconds
        rate_per_s = LOAD / solo_ms * 1e3
        hp.send("requests", **requests(seconds, rate_per_s))

    def finish(self):
        return self.hp.receive(self.seconds * 2 + 20)


class Scene:
    """The programs of one residency and what they should produce."""

    def __init__(self, suite, residency, core, clients, reference):
        self.suite, self.residency, self.core, self.reference = suite, residency, core, reference
        self.hp, self.hp_spare, self.be, self.be_spare = clients
        self.solo = {}
        for one in (self.hp, self.hp_spare):
            alone = one.ask("requests", **requests(0.5, 400))
            self.solo[one.name] = (percentile(alone["service_ms"], 0.5), alone["digest"])

    def load(self, hp):
        return Load(hp, self.solo[hp.name][0], self.suite.args.load_seconds)

    def train(self, be):
        """Start the deterministic trainings; returns once the first step is done."""
        be.send("exact", steps=self.suite.args.steps)
        be.receive(TRAIN_TIMEOUT_S)

    def trained(self, be):
        """The digests, past the progress lines."""
        while True:
            answer = be.receive(TRAIN_TIMEOUT_S)
            if "digests" in answer:
                return answer["digests"]

    def check_training(self, digests):
        return [] if digests == self.reference else [f"training digests {digests} differ from {self.reference}"]

    def check_inference(self, hp, answer):
        same = answer["digest"] == self.solo[hp.name][1]
        return [] if same else [f"{hp.name}: the output differs from the one before"]

    def connected(self, name):
        """The entry of a client if it is connected."""
        return client({"clients": self.core.status()["clients"]}, name)

    def shared(self):
        load = self.load(self.hp)
        self.train(self.be)
        digests = self.trained(self.be)
        problems = self.check_training(digests) + self.check_inference(self.hp, load.finish())
        return problems + shortfalls(self.core.status(), self.residency, [self.hp.name, self.be.name])

    def core_dies(self):
        load = self.load(self.hp)
        self.train(self.be)
        time.sleep(KILL_AFTER_S)
        self.core.kill()
        problems = self.check_training(self.trained(self.be)) + self.check_inference(self.hp, load.finish())
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
        return problems + shortfalls(self.core.status(), self.residency, [self.hp.name, self.be.name])

    def hp_dies(self):
        self.load(self.hp)
        self.train(self.be)
        time.sleep(KILL_AFTER_S)
        os.kill(self.hp.pid, signal.SIGKILL)
        problems = self.check_training(self.trained(self.be))
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: not self.connected(self.hp.name), 5, "the inference to be seen gone", every_s=0.2)
        return problems + (["the core still lists the killed inference"] if self.connected(self.hp.name) else [])

    def be_dies(self):
        load = self.load(self.hp_spare)
        self.train(self.be_spare)
        time.sleep(KILL_AFTER_S)
        os.kill(self.be_spare.pid, signal.SIGKILL)
        problems = self.check_inference(self.hp_spare, load.finish())
        after = self.hp_spare.ask("closed", job=HP_JOB, n=300)["service_ms"][50:]
        before = self.solo[self.hp_spare.name][0]
        if percentile(after, 0.5) > before * 1.1:
            problems.append(f"p50 after the kill is {percentile(after, 0.5):.3f} ms, alone {before:.3f} ms")
        return problems


SCENES = ("shared", "core_dies", "hp_dies", "be_dies")


def reference_digests(suite):
    """The digests of two runs alone, without Tally; they must agree."""
    one = Client(suite, "reference", ["exact"], env=DETERMINISTIC)
    runs = []
    with started([one]):
        for _ in range(2):
            one.send("exact", steps=suite.args.steps)
            while "digests" not in (answer := one.receive(TRAIN_TIMEOUT_S)):
                pass
            runs.append(answer)
    print(f"reference: {runs}", flush=True)
    if runs[0]["digests"] != runs[1]["digests"]:
        raise RuntimeError("the unshared runs differ from each other: the training is not deterministic")
    return runs[0]["digests"]


def run_residency(suite, residency, reference, rows, failures):
    with contextlib.ExitStack() as stack:
        core = stack.enter_context(Core(suite, residency, "tally-priority", residency))
        clients = [Client(suite, f"{residency}-{n}", [HP_JOB], core, "high", DETERMINISTIC) for n in ("hp", "hp-spare")]
        clients += [
            Client(suite, f"{residency}-{n}", ["exact"], core, "best-effort", DETERMINISTIC) for n in ("be", "be-spare")
        ]
        stack.enter_context(started(clients))
        scene = Scene(suite, residency, core, clients, reference)
        for name in SCENES:
            problems, begin = [], time.monotonic()
            try:
                problems = getattr(scene, name)()
            except Exception as error:  # noqa: BLE001 - every scene has its own programs' trouble; report and go on
                problems = [f"{type(error).__name__}: {error}"]
            required = not (residency == "mps" and name in ("hp_dies", "be_dies"))
            row = {"residency": residency, "scene": name, "passed": not problems, "required": required}
            row |= {"problems": problems, "seconds": round(time.monotonic() - begin, 1)}
            rows.append(row)
            print(row, flush=True)
            if problems and required:
                failures.add(f"{residency}, {name}: {problems}")
            if core.process is None:
                core.start()


def main(suite):
    """Bit-identical results under sharing and after kills."""
    failures, rows, reference = Failures(), [], None
    with failures.guard("reference"):
        reference = reference_digests(suite)
        for residency in suite.args.residencies.split(","):
            with failures.guard(residency):
                run_residency(suite, residency, reference, rows, failures)
    suite.write("correct.json", {"steps": suite.args.steps, "reference": reference, "rows": rows})
    return failures.messages


def add_arguments(parser):
    parser.add_argument("--residencies", default="timeslice,mps", help="comma-separated")
    parser.add_argument("--steps", type=int, default=20, help="training steps of each model")
    parser.add_argument("--load-seconds", type=float, default=4, help="how long the inference serves")


if __name__ == "__main__":
    step_main("correct", main, add_arguments)
