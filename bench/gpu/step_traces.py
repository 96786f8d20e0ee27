"""Every program of `pairs` alone: its times, plain, under MPS and on half the SMs, and its kernels. Needs no core.

For `tallyctl sim`, which takes what the archive holds. Times are read without a profiler, which makes
launches longer; the kernels under one. One process after the other has the GPU, and runs all jobs in turn; should one
die or hang, what it had not answered is left to another. `traces.json` and `traces.tar.gz` are written after each job.
"""

import contextlib
import io
import sys
import tarfile
import time

import step_pairs
from common import HERE, Failures, clean_environment, step_main
from procs import Process
from tally import MpsDaemon

# name in the results: (what trace_job.py does, variables beside the daemon's if it is under one)
PARTS = {
    "plain": ("time", None),
    "mps": ("time", {}),
    "recorded": ("record", None),
    # What fewer SMs cost each program.
    "mps-half": ("time", {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}),
}
# As in step_count.py: graphs that were captured before a profile keep their records.
CUPTI = {"DISABLE_CUPTI_LAZY_REINIT": "1", "TEARDOWN_CUPTI": "0"}


def all_jobs():
    """The jobs of all pairs, once each."""
    return list(dict.fromkeys(job for pair in step_pairs.PAIRS.values() for job in pair))


class Child:
    """One process of trace_job.py: imports at once, uses the GPU when told to."""

    def __init__(self, suite, part, jobs, variables, attempt=0):
        self.jobs = list(jobs)
        command = [sys.executable, HERE / "trace_job.py", PARTS[part][0], suite.logs, *jobs]
        log = suite.logs / f"{part}-{attempt}.log"
        self.process = Process(command, log, clean_environment(**CUPTI, **variables), pipe=True)

    def answers(self, first_timeout_s, timeout_s):
        """Its answers, job by job, until all have one. Raises if it dies or takes too long."""
        self.process.send({"go": True})
        timeout = first_timeout_s
        while self.jobs:
            answer = self.process.receive(timeout)
            timeout = timeout_s
            if "job" in answer:
                self.jobs.remove(answer["job"])
                yield answer


def timed(parts):
    """What a program takes alone, as comment lines before its rows."""
    lines = ""
    for part in ("plain", "mps"):
        ms, launched = parts.get(part, {}).get("ms"), parts.get(part, {}).get("launched_ms")
        if ms and launched:
            lines += f"# {part}_ms={ms['p50']} {part}_p99_ms={ms['p99']} {part}_launched_ms={launched['p50']}\n"
    return lines


class Results:
    """What is known so far, written after every answer."""

    def __init__(self, suite, jobs):
        self.suite, self.jobs = suite, {job: {} for job in jobs}

    def add(self, part, answer):
        self.jobs[answer["job"]][part] = {k: v for k, v in answer.items() if k != "job"}
        self.suite.write("traces.json", {"jobs": self.jobs})
        if part == "recorded":
            self.pack()

    def pack(self):
        """All recordings in one archive, renamed into place."""
        temporary = self.suite.out / "traces.tar.gz.tmp"
        with tarfile.open(temporary, "w:gz") as archive:
            for job in self.jobs:
                file = self.suite.logs / f"{job}.csv"
                if file.exists():
                    content = (timed(self.jobs[job]) + file.read_text()).encode()
                    entry = tarfile.TarInfo(file.name)
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))
        temporary.replace(self.suite.out / "traces.tar.gz")


def brief(answer):
    """One line of the log."""
    if "error" in answer:
        return f"error={answer['error']}"
    keys = ("iterations", "kernels", "gpu_ms", "launches_recorded", "waits", "activities")
    ms = answer["ms"] or {}
    parts = [f"p50_ms={ms.get('p50')}", f"max_ms={ms.get('max')}"]
    if "launched_ms" in answer:
        parts.append(f"launched_p50_ms={answer['launched_ms']['p50']}")
    return "  ".join(parts + [f"{key}={answer[key]}" for key in keys if key in answer])


def run_part(suite, part, child, variables, results, failures):
    """All of a part's answers; a process that dies or hangs costs the job it was at."""
    first_timeout_s = suite.args.start_timeout_s
    for attempt in range(1, len(child.jobs) + 2):
        try:
            for answer in child.answers(first_timeout_s, suite.args.job_timeout_s):
                results.add(part, answer)
                print(f"{part} {answer['job']} took_s={answer['took_s']}  {brief(answer)}", flush=True)
                if "error" in answer:
                    failures.add(f"{part}, {answer['job']}: {answer['error']}")
            return
        except (OSError, RuntimeError, TimeoutError) as error:
            lost, left = child.jobs[0], child.jobs[1:]
            results.add(part, {"job": lost, "error": str(error)[:500]})
            failures.add(f"{part}, {lost}: {error}")
        finally:
            child.process.stop(grace_s=3)
        if not left:
            return
        child = Child(suite, part, left, variables, attempt)


def main(suite):
    """Time and record every job."""
    failures, begin = Failures(), time.monotonic()
    jobs, parts = suite.args.jobs.split(","), suite.args.parts.split(",")
    unknown = [j for j in jobs if j not in all_jobs()] + [p for p in parts if p not in PARTS]
    if unknown:
        sys.exit(f"unknown: {unknown}; jobs are {all_jobs()}, parts {list(PARTS)}")
    results = Results(suite, jobs)
    with contextlib.ExitStack() as stack:
        daemon_variables, children = {}, {}
        if any(PARTS[part][1] is not None for part in parts):
            with failures.guard("MPS daemon"):
                daemon_variables = stack.enter_context(MpsDaemon(suite)).environment
        for part in parts:
            more = PARTS[part][1]
            if more is not None and not daemon_variables:
                failures.add(f"{part}: left out, for there is no daemon")
                continue
            # All import at once; the GPU they use in turn.
            variables = {} if more is None else {**daemon_variables, **more}
            children[part] = (Child(suite, part, jobs, variables), variables)
            stack.callback(children[part][0].process.stop, grace_s=0)
        for part, (child, variables) in children.items():
            with failures.guard(part):
                run_part(suite, part, child, variables, results, failures)
            print(f"{part} done after {time.monotonic() - begin:.0f} s", flush=True)
    return failures.messages


def add_arguments(parser):
    parser.add_argument("--jobs", default=",".join(all_jobs()), help="comma-separated; all jobs of all pairs if left out")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"comma-separated, of {','.join(PARTS)}")
    parser.add_argument("--start-timeout-s", type=float, default=120, help="for imports and the first job's first word")
    parser.add_argument("--job-timeout-s", type=float, default=60, help="for each further word of a process")


if __name__ == "__main__":
    step_main("traces", main, add_arguments)
