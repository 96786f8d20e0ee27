"""Programs that compile kernels under a few names again and again, while they are preempted: every value is right.

NVRTC with the driver API, CuPy and Triton, several processes of each at once, as best-effort clients under the policy
`random-forms`, which has all kernels transformed, gives launches forms at random and asks clients to yield at random times.
First one short job of each without the shim: what is wrong there is not the shim's.
"""

import json

from clients import HERE
from common import Failures, clean_environment, step_main
from procs import Process
from step_exact import POLICY
from tally import Core, client, shortfalls

import sys

PROCESSES = {"nvrtc": 3, "cupy": 3, "triton": 8}
BARE_KERNELS = 8
CONFIG = "form = 3\nslices = 4\nsms = 116\ntoggle_us = 400\nseed = 11\n"


class Job:
    """One process that compiles and launches."""

    def __init__(self, suite, name, backend, kernels, seed, core=None):
        self.name, self.backend, self.kernels = name, backend, kernels
        command = [sys.executable, str(HERE / "jit_job.py"), "--backend", backend, "--kernels", str(kernels)]
        command += ["--seed", str(seed), "--seconds", str(suite.args.seconds)]
        if core is not None:
            command = core.client_command("best-effort", name, command)
        # Nothing compiled may come from an earlier run.
        folder = suite.work / f"jit-{name}"
        env = {"TRITON_CACHE_DIR": str(folder / "triton"), "CUPY_CACHE_DIR": str(folder / "cupy"), "CUDA_CACHE_DISABLE": "1"}
        self.process = Process(command, suite.logs / f"{name}.log", clean_environment(**env), pipe=True)

    def result(self, timeout_s):
        """What it printed."""
        try:
            return self.process.receive(timeout_s)
        finally:
            self.process.stop(grace_s=20)


def bare(suite, failures):
    """A few kernels of each without the shim; names of those that work."""
    jobs = [Job(suite, f"{name}-bare", name, BARE_KERNELS, 1) for name in suite.args.backends.split(",")]
    works = []
    for job in jobs:
        with failures.guard(job.name):
            found = job.result(120)
            print(job.name, found, flush=True)
            if found["wrong"]:
                failures.add(f"{job.name}: {found['wrong']} wrong values without the shim: {found['examples']}")
            else:
                works.append(job.backend)
    return works


def run_mode(suite, sharing, backends, failures):
    """All processes under one core; a row of each backend."""
    args, rows = suite.args, []
    with Core(suite, sharing, POLICY, sharing, CONFIG) as core:
        jobs = []
        for backend in backends:
            count = PROCESSES[backend]
            kernels = [args.kernels // count + (i < args.kernels % count) for i in range(count)]
            jobs += [Job(suite, f"{backend}-{i}", backend, n, 100 * i + 7, core) for i, n in enumerate(kernels)]
        results = {}
        for job in jobs:
            with failures.guard(f"{sharing}, {job.name}"):
                results[job.name] = job.result(args.seconds + 60)
        status = core.status()
        for message in shortfalls(status, sharing, []):
            failures.add(f"{sharing}: {message}")
        for backend in backends:
            names = [job.name for job in jobs if job.backend == backend and job.name in results]
            entries = [client(status, name) for name in names]
            row = {"sharing": sharing, "backend": backend, "processes": len(names)}
            for key in ("kernels", "launches", "wrong"):
                row[key] = sum(results[name][key] for name in names)
            row["seconds"] = max((results[name]["seconds"] for name in names), default=0)
            row["examples"] = [e for name in names for e in results[name]["examples"]][:5]
            row["decisions"] = add([entry["decisions"] for entry in entries if entry])
            row["transformed"] = add([entry["transformed"] for entry in entries if entry])
            rows.append(row)
            print(json.dumps(row), flush=True)
            judge(row, args, failures)
    return rows


def add(counts):
    """Sums of numbers, key by key."""
    keys = {key for one in counts for key, value in one.items() if isinstance(value, int) and not isinstance(value, bool)}
    return {key: sum(one[key] for one in counts) for key in sorted(keys)}


def judge(row, args, failures):
    """What must be of a row."""
    about = f"{row['sharing']}, {row['backend']}"
    if row["wrong"]:
        failures.add(f"{about}: {row['wrong']} of {row['launches']} launches left wrong values: {row['examples']}")
    if row["kernels"] < args.kernels:
        failures.add(f"{about}: {row['kernels']} kernels of {args.kernels} in {row['seconds']} s")
    if row["transformed"].get("launches_yielded", 0) < args.launches_yielded:
        failures.add(f"{about}: {row['transformed'].get('launches_yielded', 0)} launches yielded, {args.launches_yielded} were wanted")


def main(suite):
    """All backends at once, in each sharing mode."""
    failures, rows = Failures(), []
    backends = bare(suite, failures)
    for sharing in suite.args.sharing_modes.split(","):
        with failures.guard(sharing):
            rows += run_mode(suite, sharing, backends, failures)
        suite.write("jit.json", {"rows": rows, "failures": failures.messages})
    return failures.messages


def add_arguments(parser):
    parser.add_argument("--backends", default="nvrtc,cupy,triton", help="comma-separated")
    parser.add_argument("--sharing-modes", default="mps", help="comma-separated: mps, timeslice")
    parser.add_argument("--kernels", type=int, default=2000, help="kernels compiled with each")
    parser.add_argument("--launches-yielded", type=int, default=50, help="launches that must have yielded, of each")
    parser.add_argument("--seconds", type=float, default=200, help="no more kernels are compiled after so long")


if __name__ == "__main__":
    step_main("jit", main, add_arguments)
