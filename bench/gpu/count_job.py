"""The programs whose launches are counted twice: by the shim and by CUPTI.

`count_job.py NAME RESULT`: runs as the client NAME of a core and writes one
entry a job to RESULT. For each job, after a warm-up, one profiled region:

    profiler on; synchronise; read the shim's counters (A)
    region: run the job n times; synchronise
    read the shim's counters (B); profiler off

Only API records inside the region, and the kernels they caused, are counted,
so what the profiler itself does around it is not. The shim's counters live in
memory shared with the core: `tallyctl status` after a synchronisation is exact.
`launch_records.py` says what is counted and when the two are equal.
"""

import json
import os
import pathlib
import sys
import tempfile
import traceback

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import models
import tally
from launch_records import compare, count_records, difference

REGION = "tally-count-region"


def without_grad(request):
    def run():
        with torch.no_grad():
            request()

    return run


def compiled_job():
    """torch.compile of a small BERT: Triton kernels launched by Inductor."""
    config = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 1024}
    model = models._bert(**config)
    fast = torch.compile(model)
    x = torch.randint(0, 30000, (2, 128), device=models.DEVICE)
    return without_grad(lambda: fast(x).last_hidden_state)


# name: (what builds the function to run, how often it runs in the region)
JOBS = {
    "resnet50-inference": (lambda: without_grad(models.resnet50_request()), 10),
    "resnet50-training": (lambda: models.resnet50_training(batch=32)[0], 3),
    "bert-inference": (lambda: without_grad(models.bert_request()), 10),
    "gpt2-training": (lambda: models.gpt2_training(batch=2, tokens=256)[0], 3),
    "torch-compile": (compiled_job, 10),
    "cuda-graph": (lambda: without_grad(models.graphed(models.resnet50_request())), 10),
}
WARM_RUNS = 4


def counters(name):
    """The shim's launch counters of this process, as the core reads them."""
    state = tally.status(os.environ["SUITE_TALLYCTL"], os.environ["SUITE_SOCKET"])
    entry = tally.client({"clients": state["clients"]}, name, os.getpid())
    if entry is None:
        raise RuntimeError(f"the core has no client {name!r}: {json.dumps(state['clients'])[:800]}")
    return tally.launches(entry)


def profiled(name, run, n):
    """Run the region; (chrome trace events, counter differences)."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        models.sync()
        before = counters(name)
        with record_function(REGION):
            for _ in range(n):
                run()
            models.sync()
        after = counters(name)
    with tempfile.TemporaryDirectory() as folder:
        trace = pathlib.Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    return events, difference(before, after)


def one_job(name, job):
    build, n = JOBS[job]
    torch.manual_seed(0)
    run = build()
    for _ in range(WARM_RUNS):
        run()
    models.sync()
    events, shim = profiled(name, run, n)
    return {"runs": n, **compare(count_records(events, REGION), shim)}


def main():
    name, result = sys.argv[1], pathlib.Path(sys.argv[2])
    torch.zeros(1, device=models.DEVICE)
    # CUPTI starts here, before anything is captured or counted.
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]):
        torch.zeros(1, device=models.DEVICE).add_(1)
        models.sync()
    entries = []
    for job in JOBS:
        try:
            entry = one_job(name, job)
        except Exception as error:  # noqa: BLE001 - the other jobs still count
            traceback.print_exc()
            entry = {"equal": False, "error": f"{type(error).__name__}: {error}"[:500]}
        entries.append({"job": job, **entry})
        result.write_text(json.dumps(entries))
        print(entries[-1], flush=True)


if __name__ == "__main__":
    main()
