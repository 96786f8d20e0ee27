"""How long a GPU is idle between two kernels of one program: where the second is in another stream, and where not.

A launch that is limited to some of the SMs runs in a stream of its own for each width, so that a change of width is a
change of stream, of a program that uses one. Standard library only, from a chrome trace of torch.profiler (CUPTI).
"""

from stats import percentile


def gaps_us(events):
    """(gaps where the stream changes, all others), microseconds; kernels that overlap have a gap of 0."""
    kernels = sorted((e for e in events if isinstance(e, dict) and e.get("cat") == "kernel"), key=lambda e: e["ts"])
    if not kernels:
        raise ValueError("the profiler recorded no kernel")
    changed, same = [], []
    ended, stream = kernels[0]["ts"] + kernels[0]["dur"], kernels[0]["args"]["stream"]
    for kernel in kernels[1:]:
        gap = max(kernel["ts"] - ended, 0.0)
        (same if kernel["args"]["stream"] == stream else changed).append(gap)
        ended, stream = max(ended, kernel["ts"] + kernel["dur"]), kernel["args"]["stream"]
    return changed, same


def described(gaps):
    """How many, and some percentiles."""
    quantiles = {f"p{q * 100:g}_us": round(percentile(gaps, q), 2) for q in (0.5, 0.95, 0.99)} if gaps else {}
    return {"count": len(gaps), **quantiles}
