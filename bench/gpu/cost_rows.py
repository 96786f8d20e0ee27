#!/usr/bin/env python3
"""Adds runs of two commits in pairs to `docs/results/costs.json`: `cost_rows.py FILE`, then `render.py`.

FILE is JSON: `machine` (`model`, `cpus`, `pinned_cpus`), `date`, commits `before` and `after`, and `runs`, each with its
`pair`, `side` (before or after) and `figures` by name. Rows of the same commit and machine are replaced. Standard
library only.
"""

import argparse
import json
import pathlib

from common import write_json

COSTS = pathlib.Path(__file__).resolve().parents[2] / "docs/results/costs.json"

# What a run calls a figure; what the table calls it, its unit and digits.
FIGURES = {
    "policy call, tally-priority, ns": ("policy call, `tally-priority`", "ns", 0),
    "policy call, fifo, ns": ("policy call, `fifo`", "ns", 0),
    **{
        f"round trip, {rule}, core {state}, {quantile}, us": (f"round trip, core {state}, {name}, {quantile}", "us", 2)
        for state in ("spins", "sleeps")
        for rule, name in (("built-in", "built-in rule"), ("tally-priority.wasm", "`tally-priority`"))
        for quantile in ("p50", "p99")
    },
    "reload pause, p50, us": ("reload pause, p50", "us", 1),
    "reload pause, p99, us": ("reload pause, p99", "us", 1),
}


def rows_of(content):
    """The rows of one file of runs; `ValueError` if a pair or a figure is not complete."""
    sides = {side: {run["pair"]: run["figures"] for run in content["runs"] if run["side"] == side} for side in ("before", "after")}
    if not sides["before"] or sides["before"].keys() != sides["after"].keys() or len(content["runs"]) != 2 * len(sides["before"]):
        raise ValueError("not every pair has one run of each side")
    pairs = sorted(sides["before"])
    figures = [run["figures"].keys() & FIGURES.keys() for run in content["runs"]]
    if not figures[0] or any(names != figures[0] for names in figures):
        raise ValueError("the runs have different figures, or none that is known")
    machine = content["machine"]
    told = f"{machine['pinned_cpus']} of {machine['cpus']} CPUs, {machine['model']}, {content['date']}"
    rows = []
    for key, (figure, unit, digits) in FIGURES.items():
        if key in figures[0]:
            values = {side: [round(runs[pair][key], digits + 2) for pair in pairs] for side, runs in sides.items()}
            rows.append({"figure": figure, "unit": unit, "digits": digits, "commit": content["after"], "machine": told, **values})
    return rows


def added(costs, content):
    """`costs.json` with these runs; `ValueError` if they start from another commit."""
    pairs = costs["in_pairs"]
    if content["before"] != pairs["before"]:
        raise ValueError(f"the runs compare with {content['before']}, the table with {pairs['before']}")
    rows = rows_of(content)
    replaced = {identity(row) for row in rows}
    kept = [row for row in pairs["rows"] if identity(row) not in replaced]
    return {**costs, "in_pairs": {**pairs, "rows": kept + rows}}


def identity(row):
    """What a row is of; the oldest ones name neither commit nor machine."""
    return tuple(row.get(key) for key in ("figure", "commit", "machine"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=pathlib.Path, help="what the runs in pairs wrote")
    parser.add_argument("--costs", type=pathlib.Path, default=COSTS, help="the file to add to")
    args = parser.parse_args()
    write_json(args.costs, added(json.loads(args.costs.read_text()), json.loads(args.file.read_text())))
    print(f"wrote {args.costs}: now run bench/gpu/render.py")


if __name__ == "__main__":
    main()
