"""The programs of step `tools` that need PyTorch: a training under torch.profiler, and all-reduces of several GPUs.

tools_job.py profiler
tools_job.py nccl RANK WORLD FILE     FILE: where the processes of this run meet; it does not exist yet

Prints one line of JSON: `digest` of what was computed. Then the process stays a moment, so that the core can be asked
about it.
"""

import datetime
import hashlib
import json
import pathlib
import sys
import tempfile
import time

STAYS_S = 0.7
WARM_STEPS, STEPS = 5, 20
ROUNDS, CHECKED_AT_ONCE = 200, 10
# All-reduces have 1 KiB to 64 MiB.
SMALLEST_BYTES, DOUBLINGS = 1 << 10, 16
VALUES = 1001


def told(**found):
    print("\n" + json.dumps(found), flush=True)
    time.sleep(STAYS_S)
    return 3 if found["wrong"] else 0


def counted(events):
    """Launches that the program made by the runtime, and kernels that ran, of a profiler's records."""
    from launch_records import LAUNCH_NAME

    events = [event for event in events if isinstance(event, dict)]
    calls = sum(event.get("cat") == "cuda_runtime" and bool(LAUNCH_NAME.match(event["name"])) for event in events)
    return calls, sum(event.get("cat") == "kernel" for event in events)


def profiler():
    """A seeded training, of which some steps are profiled."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    import models

    torch.manual_seed(5)
    torch.use_deterministic_algorithms(True)
    layers = [torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.LayerNorm(2048), torch.nn.Linear(2048, 512)]
    model = torch.nn.Sequential(*layers).to(models.DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    inputs, targets = (torch.randn(4096, 512, device=models.DEVICE) for _ in range(2))

    def step():
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()

    for _ in range(WARM_STEPS):
        step()
    models.sync()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiled:
        for _ in range(STEPS):
            step()
        models.sync()
    with tempfile.TemporaryDirectory() as folder:
        trace = pathlib.Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(trace))
        calls, kernels = counted(json.loads(trace.read_text())["traceEvents"])
    return told(digest=models.digest(list(model.parameters()))[:16], wrong=0, launch_calls=calls, kernels=kernels)


def nccl(rank, world, file):
    """All-reduces of whole numbers, each checked."""
    import torch
    import torch.distributed

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    wait = datetime.timedelta(seconds=60)
    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{file}", rank=rank, world_size=world, timeout=wait, device_id=device
    )
    base = torch.arange((SMALLEST_BYTES << DOUBLINGS) // 4, dtype=torch.int32, device=device) % VALUES
    wrong, sums, under_way = 0, [], []
    for index in range(ROUNDS):
        count = (SMALLEST_BYTES << index % (DOUBLINGS + 1)) // 4
        values = (base[:count] + index) * (rank + 1)
        torch.distributed.all_reduce(values)
        under_way.append((index, values))
        if len(under_way) == CHECKED_AT_ONCE or index == ROUNDS - 1:
            for made, values in under_way:
                right = (base[: len(values)] + made) * (world * (world + 1) // 2)
                wrong += not torch.equal(values, right)
                sums.append(int(values.sum(dtype=torch.int64)))
            under_way.clear()
    torch.cuda.synchronize()
    digest = hashlib.sha256(json.dumps(sums).encode()).hexdigest()[:16]
    code = told(digest=digest, wrong=wrong, rounds=len(sums))
    torch.distributed.destroy_process_group()
    return code


def main(arguments):
    if arguments == ["profiler"]:
        return profiler()
    if len(arguments) == 4 and arguments[0] == "nccl":
        return nccl(int(arguments[1]), int(arguments[2]), arguments[3])
    return __doc__


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
