#!/usr/bin/env python3
"""The steps of the suite, each in one place: `run.sh`, `render.py` and the tables of README.md are made of this.

steps.py           prints a line a step: its name, its limit in seconds, and `usual` or `named`
steps.py --write   brings the tables of README.md up to date

A new step needs a row here, `step_NAME.py` that ends with `step_main("NAME", ...)`, and a section in `render.py` for each
of its results; then run `steps.py --write` and `python3 -m unittest test_suite`. Standard library only.
"""

import pathlib
import sys
from typing import NamedTuple

README = pathlib.Path(__file__).resolve().parent / "README.md"


class Step(NamedTuple):
    """A step, which `step_NAME.py` carries out."""

    name: str
    # Seconds after which it is ended; about twice what it takes on an H100.
    limit_s: int
    # What it takes, as README.md tells it.
    takes_s: str
    # What it shows, as README.md tells it.
    shows: str
    # Its files that `render.py` reads.
    results: tuple[str, ...] = ()
    # Whether it runs if no step is named.
    is_usual: bool = False


# In the order in which they run.
STEPS = (
    Step("count", 200, "80", "launches counted by the shim equal CUPTI's", ("counts.json",), is_usual=True),
    Step(
        "correct", 240, "110", "bit-identical training while sharing, and while the core or a program is killed",
        ("correct.json",), is_usual=True,
    ),
    Step("latency", 180, "43", "decision round trip of a gated launch", ("latency.json",), is_usual=True),
    Step("memops", 60, "15", "cost of ways to learn that a kernel has ended", ("latency.json",), is_usual=True),
    Step(
        "forms", 300, "52",
        "transformed kernels against their originals: bits, blocks, cost, turnaround; what the driver allows meanwhile",
        ("forms.json",), is_usual=True,
    ),
    Step("overhead", 300, "116", "what the shim costs a program alone", ("overhead.json",), is_usual=True),
    Step(
        "pairs", 540, "495 for two pairs", "an inference beside a training, mode by mode",
        ("pairs.json",), is_usual=True,
    ),
    Step("demo", 200, "95", "the demo of the bundle", is_usual=True),
    Step("exact", 400, "104", "bit-identical training in forms and at moments chosen at random", ("exact.json",)),
    Step("traces", 480, "106", "records programs for `tallyctl sim`"),
    Step(
        "policy", 300, "220", "decision log, shadow, A/B tests and misbehaving policies while programs run",
        ("policy.json",),
    ),
    Step(
        "frontier", 600, "270 a pair", "attainment and best-effort share over a service's objective",
        ("frontier.json",),
    ),
    Step(
        "decode", 1500, "250 for three modes", "late tokens of a language model's decode service and best-effort share",
        ("decode.json",),
    ),
    Step("several", 240, "83", "two trainings at once in `timeslice`", ("several.json",)),
    Step(
        "trainings", 500, "330", "one, two and four trainings that fill the GPU in part: the sum of their rates",
        ("trainings.json",),
    ),
    Step("shares", 300, "120", "weights and floors of trainings, in both sharing modes", ("shares.json",)),
    Step("shim", 300, "12", "the shim's own tests on a GPU", ("shim.json",)),
    Step("width", 900, "380 for two trainings", "what a width costs a training", ("width.json",)),
    Step("speeds", 300, "188", "what makes a GPU's context slow and fast", ("speeds.json", "speeds-vendor.json")),
    Step("units", 200, "60", "requests as the core counts and times them, against the program's own", ("units.json",)),
    Step("waits", 200, "78", "which driver calls wait for other streams", ("waits.json",)),
    Step("streams", 300, "36", "what an operation behind a kernel costs, and what it holds up", ("streams.json",)),
    Step("kept", 300, "199", "what rewritten kernels on disk save a program's start", ("kept.json",)),
    Step(
        "jit", 500, "43", "NVRTC, CuPy and Triton compile kernels of the same names while launches yield",
        ("jit.json",),
    ),
    Step(
        "tools", 420, "205", "programs under developer tools, and with memory and all-reduces across processes, as bare",
        ("tools.json",),
    ),
    Step("start", 600, "160", "how much longer a PyTorch program takes to start", ("start.json",)),
    Step(
        "litmus", 600, "480",
        "programs made from seeds, bare and under policies ([how](../../tests/litmus/README.md))", ("litmus.json",),
    ),
)  # fmt: skip


def tables():
    """The part of README.md that tells of the steps."""
    header = ["| step | shows | seconds |", "| --- | --- | ---: |"]

    def rows(is_usual):
        return [f"| `{s.name}` | {s.shows} | {s.takes_s} |" for s in STEPS if s.is_usual == is_usual]

    return "\n".join([*header, *rows(True), "", "Only when named:", "", *header, *rows(False)]) + "\n"


def updated(text):
    """README.md with these tables: they are all of its section on steps."""
    begin = text.index("## Steps\n") + len("## Steps\n")
    end = text.index("## ", begin)
    return f"{text[:begin]}\n{tables()}\n{text[end:]}"


def main(arguments):
    if arguments == ["--write"]:
        README.write_text(updated(README.read_text()))
    elif arguments:
        sys.exit(__doc__)
    else:
        for step in STEPS:
            print(step.name, step.limit_s, "usual" if step.is_usual else "named")


if __name__ == "__main__":
    main(sys.argv[1:])
