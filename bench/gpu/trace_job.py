"""The programs of `pairs`, alone: timed without a profiler, or recorded kernel by kernel under one.

`trace_job.py time|record FOLDER JOB…` imports what it needs, waits for a line on stdin (so that several can start at
once and run in turn), then answers one JSON line a job: `{"begun": job}`, then its figures or its `error`. With `record` the rows
go to `FOLDER/JOB.csv`. Each iteration is waited for, as in `worker.py`. It must not use CUDA before it is told to.
"""

import contextlib
import gc
import json
import os
import pathlib
import sys
import tempfile
import time
import traceback

import torch
from torch.profiler import ProfilerActivity, profile

import models
from kernel_rows import kernel_rows, launched_share, to_csv
from stats import summary
from worker import WARM_REQUESTS, WARM_STEPS

TIME_S = 1.2  # each job, at least
LEAST_ITERATIONS = {"request": 50, "training": 6}
MOST_ITERATIONS = 1000
RECORDED = {"request": 8, "training": 3}
# Profiled as well and left out: the profiler's own buffers are made then.
RECORDED_COLD = 2


def build(job):
    """(its kind, what runs one iteration), warmed."""
    torch.manual_seed(0)
    if job in models.REQUESTS:
        kind, run, warm = "request", models.REQUESTS[job](), WARM_REQUESTS
    else:
        kind, warm = "training", WARM_STEPS
        run, _ = models.TRAININGS[job]()
    with grad_of(kind):
        for _ in range(warm):
            run()
    models.sync()
    return kind, run


def grad_of(kind):
    return torch.no_grad() if kind == "request" else contextlib.nullcontext()


def timed(job, _folder):
    """Milliseconds an iteration, and until the host had launched it all."""
    kind, run = build(job)
    all_ms, launched_ms = [], []
    gc.collect()
    gc.disable()
    try:
        with grad_of(kind):
            end = time.perf_counter() + TIME_S
            while len(all_ms) < MOST_ITERATIONS:
                begin = time.perf_counter()
                if begin > end and len(all_ms) >= LEAST_ITERATIONS[kind]:
                    break
                run()
                launched = time.perf_counter()
                models.sync()
                all_ms.append((time.perf_counter() - begin) * 1e3)
                launched_ms.append((launched - begin) * 1e3)
    finally:
        gc.enable()
    mean = round(sum(all_ms) / len(all_ms), 5)
    return {"kind": kind, "ms": {**summary(all_ms), "mean": mean}, "launched_ms": summary(launched_ms)}


def record(job, folder):
    """A few iterations under the profiler; without the launches of operators if it gives the kernels' launches."""
    kind, run = build(job)
    problem = None
    for activities in ([ProfilerActivity.CUDA], [ProfilerActivity.CUDA, ProfilerActivity.CPU]):
        try:
            rows, times, waits = _recorded(kind, run, activities)
            share = launched_share(rows)
            if share >= 0.99:
                break
            problem = f"of the kernels only {share:.3f} have a launch in the records"
        except (ValueError, RuntimeError, AssertionError) as error:
            problem, rows = f"{type(error).__name__}: {error}", None
    if not rows:
        raise RuntimeError(problem)
    (folder / f"{job}.csv").write_text(to_csv(rows))
    # Not told apart if the waits for the device are not among the records.
    n = len(times) or RECORDED_COLD + RECORDED[kind]
    return {
        "kind": kind,
        "iterations": n,
        "kernels": len(rows) / n,
        "gpu_ms": round(sum(row[1] for row in rows) / n / 1e3, 5),
        "ms": summary([(t["end_us"] - t["begin_us"]) / 1e3 for t in times]) if times else None,
        "activities": [str(a).rpartition(".")[2] for a in activities],
        "launches_recorded": round(share, 4),
        "iteration_times": times,
        "waits": len(waits),
        "first_waits": waits[:60],
    }


def _recorded(kind, run, activities):
    iterations = RECORDED[kind]
    gc.collect()
    with grad_of(kind), profile(activities=activities, acc_events=True) as profiler:
        models.sync()
        for _ in range(RECORDED_COLD + iterations):
            run()
            models.sync()
    with tempfile.TemporaryDirectory() as temporary:
        trace = pathlib.Path(temporary) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    return kernel_rows(events, iterations)


def main():
    # The answers keep the real stdout; everything else that prints goes to stderr.
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    what, folder, jobs = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3:]
    serve = {"time": timed, "record": record}[what]
    with contextlib.suppress(ImportError):
        models.load_libraries()
    if not sys.stdin.readline():
        return
    if what == "record":
        # CUPTI starts here, before anything is captured.
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]):
            torch.zeros(1, device=models.DEVICE).add_(1)
            models.sync()
    for job in jobs:
        channel.write(json.dumps({"begun": job}) + "\n")
        begin = time.monotonic()
        try:
            answer = serve(job, folder)
        except Exception as error:  # noqa: BLE001 - the other jobs still count
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        channel.write(json.dumps({"job": job, "took_s": round(time.monotonic() - begin, 1), **answer}) + "\n")
        # What a job left on the GPU must not crowd the next.
        gc.collect()
        if models.DEVICE == "cuda":
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
