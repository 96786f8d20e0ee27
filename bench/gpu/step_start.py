"""How much longer a PyTorch program takes to start as a client: to its first results, process start included.

Plain, high-priority and best-effort processes one after another, in rounds of changing order, in several lanes at once with CPUs of
their own. Of each process the time to its result and in all, and its CPU time (user and system, its children's included).
`start_times` says what the rounds tell.
"""

import concurrent.futures
import os
import subprocess
import sys
import tempfile
import threading
import time

import start_times
from common import Failures, clean_environment, step_main
from tally import Core

PROGRAM = """
import time
import torch
imported = time.monotonic()
torch.manual_seed(1)
layers = [torch.nn.Conv2d(3, 64, 7, stride=2), torch.nn.BatchNorm2d(64), torch.nn.ReLU(), torch.nn.Flatten()]
model = torch.nn.Sequential(*layers, torch.nn.LazyLinear(1000)).cuda()
loss = model(torch.randn(8, 3, 64, 64, device="cuda")).logsumexp(1).mean()
loss.backward()
print(loss.item(), imported, time.monotonic())
"""
# Keeps the GPU initialised: otherwise each process pays for that as well, and by another amount each time.
HOLDER = "import sys, torch; torch.zeros(1).cuda(); print('ready', flush=True); sys.stdin.read()"
PRIORITIES = {"high": "high", "best-effort": "best-effort"}
LIMIT_S = 60
# A result and two times.
WORDS = 3
ROUNDS_MIN = 4


class Holder:
    """An idle process that uses the GPU."""

    def __enter__(self):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        self.child = subprocess.Popen([sys.executable, "-c", HOLDER], env=clean_environment(), **pipes)
        if self.child.stdout.readline().strip() != "ready":
            self.child.kill()
            self.child.wait()
            raise RuntimeError("the process that keeps the GPU initialised did not start")
        return self

    def __exit__(self, *_exc):
        self.child.stdin.close()
        try:
            self.child.wait(20)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()


def run_once(command, limit_s=LIMIT_S):
    """Seconds of one process by clock; it must succeed."""
    with tempfile.TemporaryFile() as said, open(os.devnull, "wb") as nowhere:
        begin = time.monotonic()
        child = subprocess.Popen(command, stdout=said, stderr=nowhere, env=clean_environment())
        while True:
            pid, status, usage = os.wait4(child.pid, os.WNOHANG)
            wall = time.monotonic() - begin
            if pid:
                break
            if wall > limit_s:
                child.kill()
                os.wait4(child.pid, 0)
                child.returncode = -9
                raise RuntimeError(f"{command[0]} did not end within {limit_s} s")
            time.sleep(0.001)
        said.seek(0)
        words = said.read().split()
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"{command} ended with {child.returncode}")
    clocks = {"wall": wall, "cpu": usage.ru_utime + usage.ru_stime}
    if len(words) == WORDS:
        # Both clocks are the system's.
        imported, done = map(float, words[1:])
        clocks |= {"start": done - begin, "import": imported - begin, "gpu": done - imported}
    return {clock: round(seconds, 4) for clock, seconds in clocks.items()}


def start(core, kind, cpus):
    command = [sys.executable, "-c", PROGRAM]
    if kind in PRIORITIES:
        command = core.client_command(PRIORITIES[kind], f"start-{kind}", command)
    return run_once(["taskset", "-c", ",".join(map(str, cpus)), *command])


def lanes(count):
    """The CPUs of each; one is left to the core."""
    cpus = sorted(os.sched_getaffinity(0))[:-1]
    each = max(len(cpus) // count, 1)
    return [cpus[i * each : (i + 1) * each] or cpus for i in range(count)]


def main(suite):
    """The cost of starting as a client."""
    failures = Failures()
    times = {clock: {kind: [] for kind in start_times.KINDS} for clock in start_times.CLOCKS}
    begin, lock = time.monotonic(), threading.Lock()

    def run_rounds(lane, cpus, core):
        rounds, longest_s = 0, 0.0
        while rounds < suite.args.rounds and (rounds < ROUNDS_MIN or time.monotonic() - begin + longest_s < suite.args.seconds):
            round_began = time.monotonic()
            taken = [(kind, start(core, kind, cpus)) for kind in start_times.order(lane + rounds)]
            longest_s = max(longest_s, time.monotonic() - round_began)
            rounds += 1
            with lock:
                for kind, clocks in taken:
                    for clock, seconds in clocks.items():
                        times[clock][kind].append(seconds)

    with Holder(), Core(suite, "start", "tally-priority", suite.args.sharing) as core:
        all_cpus = sorted(os.sched_getaffinity(0))
        # Files into memory, the core's first client, and what profiles and caches it leaves.
        for kind in start_times.KINDS:
            start(core, kind, all_cpus)
        with concurrent.futures.ThreadPoolExecutor(suite.args.lanes) as pool:
            running = [pool.submit(run_rounds, n, cpus, core) for n, cpus in enumerate(lanes(suite.args.lanes))]
            for lane in running:
                lane.result()
    times = {clock: of_kind for clock, of_kind in times.items() if any(of_kind.values())}
    content = {"sharing": suite.args.sharing, "lanes": suite.args.lanes, "promise_ratio_max": start_times.PROMISE_RATIO_MAX, "times_s": times}
    for row in start_times.rows(times):
        print(row, flush=True)
        if row["clock"] == "start" and row["verdict"] == "not kept":
            failures.add(f"{row['kind']}: {row['ratio']:.3f} of plain ({row['ratio_low']:.3f} to {row['ratio_high']:.3f}), promised <= {start_times.PROMISE_RATIO_MAX}")
    suite.write("start.json", content)
    return failures.messages


def add_arguments(parser):
    parser.add_argument("--sharing", default="timeslice", choices=("timeslice", "mps", "none"))
    parser.add_argument("--rounds", type=int, default=24, help="rounds of four processes at most, of each lane")
    parser.add_argument("--lanes", type=int, default=4, help="processes at one time")
    parser.add_argument("--seconds", type=float, default=165, help="no round begins that would not end by then")


if __name__ == "__main__":
    step_main("start", main, add_arguments)
