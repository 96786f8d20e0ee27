"""The rows of step `tools`: which program runs under which developer tool, and what is read of its output. Standard
library only.
"""

import glob
import json
import re
import shutil
from typing import NamedTuple

# Where a tool may lie that is not on PATH; the last of several is the newest.
PLACES = ("/usr/local/cuda*/bin/{}", "/usr/local/cuda*/compute-sanitizer/{}", "/opt/nvidia/nsight-compute/*/{}")
# What a tool exits with that found something in a program which itself went well.
FOUND_EXIT = "9"
SANITIZER = ("--error-exitcode", FOUND_EXIT)
# The second stop shows that the program went on after the first.
DEBUGGER = (
    "-batch", "-nx", "-return-child-result", "-ex", "set pagination off", "-ex", "break fill_values", "-ex", "run",
    "-ex", "print n", "-ex", "print threadIdx", "-ex", "continue", "-ex", "print n", "-ex", "print threadIdx",
    "-ex", "delete", "-ex", "continue", "--args",
)  # fmt: skip
TIMESLICE, BOTH = ("timeslice",), ("timeslice", "mps")


class Result(NamedTuple):
    """What one run of a row's processes came to."""

    # Of each process; `None`: it was still running after its limit.
    exits: list
    # The last JSON object that each printed, `None` without any.
    said: list
    text: str


class Row(NamedTuple):
    """A program, alone or under a tool."""

    name: str
    shows: str
    # The tool's program; empty: none.
    tool: str
    # Its arguments, before the program's.
    options: tuple
    # What runs: `native`, `debug` (the same with debugging information) or `job` (Python), and its arguments.
    program: str
    arguments: tuple
    # What is compared besides exit status and values: from the result.
    found: object
    # Whether that is what a tool that works finds in this program.
    works: object
    modes: tuple = TIMESLICE
    # `forms`: launches are held and run in random forms; `whole`: held, and run whole.
    policy: str = "forms"
    # What the status must say of why launches go whole; `None`: anything.
    whole_because: str | None = None
    environment: tuple = ()


def last_json(text):
    """The last flat JSON object with a digest, whatever a tool printed around it."""
    found = re.findall(r'\{"digest"[^{}]*\}', text)
    try:
        return json.loads(found[-1]) if found else None
    except ValueError:
        return None


def find_tool(name):
    """Its path, or `None`."""
    if on_path := shutil.which(name):
        return on_path
    found = [path for place in PLACES for path in sorted(glob.glob(place.format(name)))]
    return found[-1] if found else None


def nothing(_result):
    """Only exit status and values are compared."""
    return {}


def _sum(pattern, text):
    numbers = [int(number) for number in re.findall(pattern, text)]
    return sum(numbers) if numbers else None


def memcheck(result):
    """Errors of the summary, and those among them that are writes outside of the program's memory."""
    return {
        "errors": _sum(r"ERROR SUMMARY: (\d+) error", result.text),
        "invalid writes": len(re.findall(r"Invalid __global__ write", result.text)),
    }


def racecheck(result):
    """Hazards of the summary."""
    return {"hazards": _sum(r"RACECHECK SUMMARY: (\d+) hazard", result.text)}


def debugger(result):
    """Stops at the breakpoint in a kernel, and the values of its parameter there."""
    return {
        # `threadIdx` exists only where a thread of the GPU is looked at.
        "stops in the kernel": len(re.findall(r"\$\d+ = \{x = \d+, y = \d+, z = \d+\}", result.text)),
        "n": re.findall(r"\$\d+ = (\d+)$", result.text, re.MULTILINE),
        "ended": "exited normally" in result.text,
    }


def profiled(result):
    """Kernels that ncu profiled."""
    names = re.findall(r'==PROF== Profiling "([^"]+?)(?:\(.*?)?"', result.text)
    return {"kernels": len(names), "names": sorted(set(names))}


def launches_and_kernels(result):
    """The profiler's records of launches by the runtime, and of kernels."""
    said = result.said[0] or {}
    return {key: said.get(key) for key in ("launch_calls", "kernels")}


def launches_only(result):
    """The profiler's records of launches: of a launch in several parts there are more kernels."""
    return {"launch_calls": (result.said[0] or {}).get("launch_calls")}


def went_well(result):
    """All processes ended well and told values."""
    return all(code == 0 for code in result.exits) and all(result.said)


def _ncu_works(result):
    return went_well(result) and profiled(result)["kernels"] == result.said[0]["launches"] > 0


def _debugger_works(result):
    found = debugger(result)
    return went_well(result) and found["stops in the kernel"] > 0 and bool(found["n"]) and found["ended"]


def _profiler_works(result):
    found = launches_and_kernels(result)
    return went_well(result) and bool(found["launch_calls"]) and bool(found["kernels"])


INJECTED = "a tool is injected"

ROWS = (
    Row(
        "memcheck", "compute-sanitizer memcheck, no error", "compute-sanitizer", ("--tool", "memcheck", *SANITIZER),
        "native", ("run", "60"), memcheck, lambda r: went_well(r) and memcheck(r)["errors"] == 0,
        whole_because=INJECTED,
    ),
    Row(
        "memcheck-bounds", "compute-sanitizer memcheck, one write out of bounds", "compute-sanitizer",
        # Errors of calls after the write depend on which calls are made.
        ("--tool", "memcheck", "--report-api-errors", "no", *SANITIZER),
        "native", ("bounds", "60"), memcheck, lambda r: bool(memcheck(r)["errors"] and memcheck(r)["invalid writes"] and r.exits[0]),
        whole_because=INJECTED,
    ),
    Row(
        "racecheck", "compute-sanitizer racecheck, one race", "compute-sanitizer", ("--tool", "racecheck", *SANITIZER),
        "native", ("race", "60"), racecheck, lambda r: bool(racecheck(r)["hazards"] and all(r.said)),
        whole_because=INJECTED,
    ),
    Row(
        "cuda-gdb", "cuda-gdb, two stops in a kernel", "cuda-gdb", DEBUGGER, "debug", ("run", "60"), debugger, _debugger_works,
        whole_because="a debugger is attached",
    ),
    Row(
        "ncu", "ncu, every kernel", "ncu", ("--clock-control", "none", "--metrics", "gpu__time_duration.sum"),
        "native", ("run", "30"), profiled, _ncu_works,
        whole_because=INJECTED,
    ),
    Row(
        "blocking", "CUDA_LAUNCH_BLOCKING=1", "", (), "native", ("run", "300"), nothing, went_well, BOTH,
        whole_because="CUDA_LAUNCH_BLOCKING is set", environment=(("CUDA_LAUNCH_BLOCKING", "1"),),
    ),
    Row(
        "profiler", "torch.profiler, launches whole", "", (), "job", ("profiler",), launches_and_kernels, _profiler_works,
        BOTH, policy="whole", environment=(("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),),
    ),
    Row(
        "profiler-forms", "torch.profiler, launches in forms", "", (), "job", ("profiler",), launches_only, _profiler_works,
        BOTH, environment=(("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),),
    ),
    Row(
        "ipc", "memory and events of another process", "", (), "native", ("ipc", "1000"), nothing, went_well, BOTH,
    ),
    Row(
        "ipc-turns", "memory and events of another process, in turns", "", (), "native", ("ipc", "1000"), nothing, went_well, BOTH,
        policy="whole",
    ),
    Row("nccl", "all-reduces of two GPUs", "", (), "job", ("nccl",), nothing, went_well),
)  # fmt: skip
# Rows that show nothing if no launch takes another form.
IN_FORMS = ("profiler-forms", "ipc")
NAMES = tuple(row.name for row in ROWS)


def named(text):
    """Names of rows, comma-separated, in the order of `ROWS`: an argument of the command line."""
    asked = [name for name in text.split(",") if name]
    if wrong := [name for name in asked if name not in NAMES]:
        raise ValueError(f"no row {', '.join(wrong)}: there are {', '.join(NAMES)}")
    if not asked:
        raise ValueError("name a row")
    return [name for name in NAMES if name in asked]


def values(result):
    """What the programs said of their values, without what the row compares by itself."""
    apart = ("launch_calls", "kernels")
    return [said and {key: value for key, value in said.items() if key not in apart} for said in result.said]


def differences(row, bare, other):
    """What of another run is not as in the bare one, as sentences."""
    wrong = []
    if None in other.exits:
        wrong.append("it hung")
    elif bare.exits != other.exits:
        wrong.append(f"exit status {other.exits}, bare {bare.exits}")
    if values(bare) != values(other):
        wrong.append(f"values {values(other)}, bare {values(bare)}")
    before, after = row.found(bare), row.found(other)
    wrong += [f"{key}: {after[key]}, bare {before[key]}" for key in before if before[key] != after[key]]
    return wrong


def judge_clients(row, entries, processes=1):
    """What of the clients' entries, by pid, is not as it must be, as sentences."""
    wrong = []
    launching = [entry for entry in entries if entry["launches"]]
    if len(launching) < processes:
        wrong.append(f"{len(launching)} clients that launched, not {processes}")
    for entry in launching:
        if not entry["governed"]:
            wrong.append(f"{entry['name']} is not governed: {entry['not_governed_reason']}")
        why = entry["report"]["whole_because"]
        if row.whole_because and row.whole_because not in why:
            wrong.append(f"whole because {why!r}, not {row.whole_because!r}")
    forms = ("sliced", "preemptible", "sm_limited")
    if launching and row.name in IN_FORMS and not any(entry["decisions"][form] for entry in launching for form in forms):
        wrong.append("no launch was in another form: nothing is shown")
    if launching and not any(entry["decisions"]["launches_held"] for entry in launching):
        wrong.append("no launch was held: nothing is shown")
    return wrong
