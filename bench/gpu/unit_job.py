"""A server that counts and times its own units, for step_units.py: unit_job.py KIND SOURCE BUFFERS COUNT.

KIND is eager or graph, SOURCE activity, marks or tokens: then it is a decode loop without pauses, of which each unit is
a token. With SOURCE profile its kernels are long, and it also prints how many there are in a unit, and their GPU time,
as CUPTI tells them. With two BUFFERS the next unit is launched before the last is waited for. Prints what it measured
as JSON, then lives until its standard input ends.
"""

import collections
import contextlib
import json
import sys
import time

import torch

from stats import percentile

WARM = 20


def network(width):
    torch.manual_seed(3)
    layers = [layer for _ in range(12) for layer in (torch.nn.Linear(width, width), torch.nn.GELU())]
    return torch.nn.Sequential(*layers).cuda().eval()


def kernels_of(step):
    """(kernels, their GPU time in ms) of a unit."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return len(kernels), sum(event.device_time for event in kernels) / 1e3


def step_of(kind, model, given):
    """A function that launches one unit; when the first launch of it had returned, ns."""
    launched = [0]

    def stamp(*_):
        launched[0] = time.monotonic_ns()

    if kind == "eager":
        model[0].register_forward_hook(stamp)

        def eager():
            model(given)
            return launched[0]

        return eager
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(given)

    def replay():
        graph.replay()
        return time.monotonic_ns()

    return replay


@contextlib.contextmanager
def marked(source):
    """A marked unit; nothing with the source activity."""
    if source != "marks":
        yield
        return
    torch.cuda.nvtx.range_push("tally:request")
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


def serve(step, source, buffers, count):
    """Times of the units, ns: from before the first launch to the return of the wait that covers it. A token begins no
    earlier than the one before it ended."""
    took, from_launch, open_units, ended = [], [], collections.deque(), 0
    events = [torch.cuda.Event() for _ in range(buffers)]

    def wait():
        nonlocal ended
        since, launched, event = open_units.popleft()
        event.synchronize()
        now = time.monotonic_ns()
        from_launch.append(now - launched)
        took.append(now - (max(since, ended) if source == "tokens" else since))
        ended = now

    for n in range(count):
        if buffers == 1:
            with marked(source):
                since = time.monotonic_ns()
                open_units.append((since, step(), events[0]))
                events[0].record()
                wait()
            if source != "tokens":
                time.sleep(0.0005)
            continue
        since = time.monotonic_ns()
        open_units.append((since, step(), events[n % buffers]))
        events[n % buffers].record()
        if len(open_units) == buffers:
            wait()
    while open_units:
        wait()
    return took, from_launch


def main():
    kind, source, buffers, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    with torch.inference_mode():
        width, batch = (4096, 4096) if source == "profile" else (1024, 16)
        step = step_of(kind, network(width), torch.randn(batch, width, device="cuda"))
        for _ in range(WARM):
            step()
            torch.cuda.synchronize()
        # Before the core counts: it is a unit, too.
        kernels = kernels_of(step) if source == "profile" else None
        print(json.dumps({"ready": True}), flush=True)
        sys.stdin.readline()
        took, from_launch = serve(step, source, buffers, count)
        torch.cuda.synchronize()
    ms = lambda times, share: percentile(times, share) / 1e6
    own = {"units": len(took), "p50_ms": ms(took, 0.5), "p99_ms": ms(took, 0.99)}
    own |= {"p50_from_launch_ms": ms(from_launch, 0.5), "p99_from_launch_ms": ms(from_launch, 0.99)}
    if kernels:
        own["launches"], own["gpu_busy_ms"] = kernels
    print(json.dumps(own), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
