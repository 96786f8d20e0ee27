"""Counting launches in a profiler's records, and comparing them with the shim's. Standard library only.

From CUPTI (through torch.profiler's trace):
- *launch call*: an API record of the region whose name is a launch function,
  or that caused a kernel. A driver call inside a runtime call is the same one.
- *kernel*: a kernel record caused by such a call (same correlation id).
  Copies and memsets have records of their own kind and are no kernels.

Equal means, exactly:
    launch calls other than graph launches == the shim's, of all entry points but `graph`
    graph launch calls                     == the shim's of `graph`
    kernels of the former                  == the same
    kernels of graph launches              == shim graph_kernels
and nothing was launched into a capture within the region.
"""

import re

LAUNCH_NAME = re.compile(
    r"^(cu|cuda)(LaunchKernel|LaunchKernelEx|LaunchKernelExC|LaunchCooperativeKernel|GraphLaunch)(_ptsz|_v\d+)*$"
)
API_CATEGORIES = ("cuda_runtime", "cuda_driver")


def is_graph(name):
    return "GraphLaunch" in name


def _without_nested(records):
    """Drop records that lie within another of the same thread (a driver call inside a runtime call)."""
    kept, open_until = [], {}
    for record in sorted(records, key=lambda e: (e["ts"], -e.get("dur", 0))):
        thread = record.get("tid")
        end = record["ts"] + record.get("dur", 0)
        if thread in open_until and end <= open_until[thread]:
            continue
        open_until[thread] = end
        kept.append(record)
    return kept


def count_records(events, region):
    """Calls and kernels of the annotated region of a chrome trace."""
    regions = [e for e in events if e.get("name") == region and e.get("cat") == "user_annotation"]
    if len(regions) != 1:
        raise ValueError(f"the trace has {len(regions)} regions named {region}, not 1")
    begin, end = regions[0]["ts"], regions[0]["ts"] + regions[0]["dur"]
    kernels = {}
    for event in events:
        if event.get("cat") == "kernel":
            correlation = event["args"]["correlation"]
            kernels[correlation] = kernels.get(correlation, 0) + 1
    calls = [
        e
        for e in events
        if e.get("cat") in API_CATEGORIES
        and begin <= e["ts"] <= end
        and (LAUNCH_NAME.match(e["name"]) or e["args"]["correlation"] in kernels)
    ]
    calls = _without_nested(calls)
    graph_calls = [c for c in calls if is_graph(c["name"])]
    direct_calls = [c for c in calls if not is_graph(c["name"])]
    by_name = {}
    for call in calls:
        by_name[call["name"]] = by_name.get(call["name"], 0) + 1
    return {
        "direct_calls": len(direct_calls),
        "graph_calls": len(graph_calls),
        "direct_kernels": sum(kernels.get(c["args"]["correlation"], 0) for c in direct_calls),
        "graph_kernels": sum(kernels.get(c["args"]["correlation"], 0) for c in graph_calls),
        "by_name": by_name,
    }


def difference(before, after):
    """What the shim counted between two answers of `tally.launches`."""
    return {
        key: difference(before[key], value) if isinstance(value, dict) else value - before[key]
        for key, value in after.items()
    }


def compare(records, shim):
    """One result row; `equal` as the module's documentation defines it."""
    graph = shim["by_entry_point"]["graph"]
    direct = sum(shim["by_entry_point"].values()) - graph
    differences = [
        f"{what}: profiler {left}, shim {right}"
        for what, left, right in (
            ("launch calls", records["direct_calls"], direct),
            ("graph launches", records["graph_calls"], graph),
            ("kernels of launches", records["direct_kernels"], direct),
            ("kernels of graphs", records["graph_kernels"], shim["graph_kernels"]),
            ("all calls", records["direct_calls"] + records["graph_calls"], shim["total"]),
            ("captured in the region", 0, shim["captured"]),
        )
        if left != right
    ]
    if not records["direct_calls"] + records["graph_calls"]:
        differences.append("the profiler recorded no launch at all")
    return {
        "profiler_launch_calls": records["direct_calls"],
        "profiler_graph_launches": records["graph_calls"],
        "profiler_kernels": records["direct_kernels"] + records["graph_kernels"],
        "profiler_calls_by_name": records["by_name"],
        "shim_launches": direct,
        "shim_graph_launches": graph,
        "shim_graph_kernels": shim["graph_kernels"],
        "shim": shim,
        "differences": differences,
        "equal": not differences,
    }
