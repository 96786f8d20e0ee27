"""Marks units of work of a program under `tallyctl run --priority high`. Without the package `nvtx` it does nothing.

    with unit("request", queued_us): ...    # or "token", "prefill"
"""
from contextlib import contextmanager

try:
    import nvtx
except ImportError:
    nvtx = None


@contextmanager
def unit(kind, queued_us=None):
    """A unit of work, which had queued in the program for so long. Units may overlap, as in asynchronous servers."""
    mark = nvtx and nvtx.start_range(f"tally:{kind}", payload=None if queued_us is None else int(queued_us))
    try:
        yield
    finally:
        if mark:
            nvtx.end_range(mark)
