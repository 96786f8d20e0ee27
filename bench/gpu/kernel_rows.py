"""Kernels, launches and waits of a profiler's records, one row a kernel. Standard library only.

From a chrome trace of torch.profiler (CUPTI). An *iteration* (request, training step) ends with the host's wait for
the whole device; what was launched after the wait before, and before the end of this one, belongs to it.
Times are microseconds from the first kernel's start; a launch may lie before it.
"""

import bisect
import csv
import io
import math

GPU_CATEGORIES = ("kernel", "gpu_memset", "gpu_memcpy")
API_CATEGORIES = ("cuda_runtime", "cuda_driver")
# What ends an iteration: `torch.cuda.synchronize`.
DEVICE_WAITS = ("cudaDeviceSynchronize", "cuCtxSynchronize")
# What a program may wait for within one.
OTHER_WAITS = ("cudaStreamSynchronize", "cuStreamSynchronize", "cudaEventSynchronize", "cuEventSynchronize")
COLUMNS = (
    "ts_us,dur_us,kind,name,stream,grid,block,regs,smem,blocks_per_sm,occ,iteration,"
    # The call that launched it, and when the last wait ended that the program was in since it launched the row before.
    "launch_us,launch_dur_us,waited_us"
).split(",")


def _named(event, names):
    # Versions of a function differ in what follows its name: _v3020, _ptsz.
    return event["name"].split("_")[0] in names


def kernel_rows(events, iterations):
    """(rows, iterations' times, waits) of the last `iterations` of a recording.

    Without so many waits for the device in the records, all rows, no iteration in any, and no times.
    Raises ValueError if there is no kernel.
    """
    complete = [e for e in events if isinstance(e, dict) and "ts" in e and "dur" in e]
    work = sorted((e for e in complete if e.get("cat") in GPU_CATEGORIES), key=lambda e: e["ts"])
    if not work:
        raise ValueError("the profiler recorded no kernel")
    calls = sorted((e for e in complete if e.get("cat") in API_CATEGORIES), key=lambda e: e["ts"])
    launches = {}
    for call in calls:
        correlation = call.get("args", {}).get("correlation")
        # The first, which is the outer: a driver's call within a runtime's may repeat the correlation.
        launches.setdefault(correlation, call)
    bounds = _iterations(calls, work, launches)[-iterations:]
    whole = len(bounds) < iterations
    if whole:
        bounds = [(-math.inf, math.inf)]

    rows, origin, launched = [], None, -math.inf
    wait_ends = sorted(c["ts"] + c["dur"] for c in calls if _named(c, DEVICE_WAITS + OTHER_WAITS))
    for event in work:
        args = event.get("args", {})
        launch = launches.get(args.get("correlation"))
        # A kernel whose launch was not recorded belongs where it ran.
        at = launch["ts"] if launch else event["ts"]
        index = next((i for i, (begin, end) in enumerate(bounds) if begin <= at < end), None)
        if index is None:
            continue
        origin = event["ts"] if origin is None else origin
        shape = ["x".join(map(str, args.get(k) or [])) for k in ("grid", "block")]
        rows.append(
            [round(event["ts"] - origin, 3), round(event["dur"], 3), event["cat"], event["name"], args.get("stream")]
            + [*shape, args.get("registers per thread"), args.get("shared memory"), args.get("blocks per SM")]
            + [args.get("est. achieved occupancy %"), None if whole else index]
            + ([round(launch["ts"] - origin, 3), round(launch["dur"], 3)] if launch else [None, None])
            + [_last_between(wait_ends, launched, at, origin) if launch else None]
        )
        launched = max(launched, at)
    times = [{"begin_us": round(b - origin, 3), "end_us": round(e - origin, 3)} for b, e in bounds if not whole]
    waits = [
        [call["name"], round(call["ts"] - origin, 3), round(call["dur"], 3)]
        for call in calls
        if _named(call, OTHER_WAITS) and bounds[0][0] <= call["ts"] < bounds[-1][1]
    ]
    return rows, times, waits


def _last_between(ends, after, until, origin):
    """The last of these ends that lies between, since the origin; None if there is none."""
    index = bisect.bisect_right(ends, until) - 1
    return round(ends[index] - origin, 3) if index >= 0 and ends[index] > after else None


def _iterations(calls, work, launches):
    """(begin, end) of each stretch between two waits for the device in which something was launched."""
    ends = []
    for call in calls:
        end = call["ts"] + call["dur"]
        # A driver's call within a runtime's is the same wait.
        if _named(call, DEVICE_WAITS) and (not ends or call["ts"] >= ends[-1]):
            ends.append(end)
    found = [launches.get(e.get("args", {}).get("correlation"), e)["ts"] for e in work]
    stretches = zip(ends, ends[1:])
    return [(begin, end) for begin, end in stretches if any(begin <= at < end for at in found)]


def launched_share(rows):
    """Share of the rows whose launch was recorded."""
    column = COLUMNS.index("launch_us")
    return sum(row[column] is not None for row in rows) / len(rows)


def to_csv(rows):
    """The rows below a header line, as text."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(rows)
    return text.getvalue()
