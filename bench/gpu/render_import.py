"""Takes results of suite runs over into `docs/results`. Several runs of the same become medians."""

import json
import shutil

import render_decode
import render_forms
import render_frontier
import render_policy
import render_programs
import render_tools
from common import merge_rows, write_json
from stats import median_row

# As step_pairs.KEY; repeated so that this imports no step.
PAIR_KEY = ("hp", "be", "mode", "policy", "policy_config", "vendor_rewrite", "load", "device")
# Files that are a list of rows, and what tells rows apart.
ROWS = {"pairs.json": PAIR_KEY, "frontier.json": render_frontier.KEY, "decode.json": render_decode.KEY}
# Told of medians, with their extremes.
SPREAD_OF = ("p99_over_solo", "p99_over_beside_idle", "attainment_percent", "violations_percent", "be_share", "be_share_of_own")


def merged_correct(old, new):
    """One sharing mode may have run alone."""
    for content in (old, new):
        for row in content["rows"]:
            for key in ("device", "commit", "date"):
                row.setdefault(key, content["machine"].get(key))
    return {**new, "rows": merge_rows(old["rows"], new["rows"], ("device", "sharing", "scene"))}


def merged_latency(old, new):
    """`latency` and `memops` fill one file and may have run apart."""
    return {**old, **{key: value for key, value in new.items() if value is not None}}


# How new content joins the old; a file that is not here replaces the old one.
MERGED = {
    **{name: lambda old, new, key=key: merge_rows(old, new, key) for name, key in ROWS.items()},
    "correct.json": merged_correct,
    "tools.json": render_tools.merged,
    "forms.json": render_forms.merged,
    "policy.json": render_policy.merged,
    "latency.json": merged_latency,
}


def of_runs(rows):
    """One row of several runs of the same: each figure their median, and the extremes of some."""
    if len(rows) == 1:
        return rows[0]
    latest = {**median_row(rows), "runs": sum(row.get("runs", 1) for row in rows)}
    spread = {key: [row.get(key) for row in rows] for key in SPREAD_OF}
    latest["of_runs"] = {key: [min(values), max(values)] for key, values in spread.items() if None not in values}
    return latest


def medians(runs, key):
    """The rows of several runs as one list: those that only some runs have are medians of fewer."""
    found = {}
    for row in (row for run in runs for row in run):
        found.setdefault(tuple(str(row.get(field)) for field in key), []).append(row)
    return [of_runs(rows) for rows in found.values()]


def take_over(outs, folder, names):
    """Bring the results of suite runs into `folder`; those of `names` that were taken."""
    folder.mkdir(parents=True, exist_ok=True)
    taken = []
    for name in names:
        sources, target = [out / name for out in outs if (out / name).is_file()], folder / name
        if not sources:
            continue
        if len(sources) > 1 and name not in ROWS:
            raise ValueError(f"{name} is in {len(sources)} of the folders; only {', '.join(ROWS)} may be: their rows become medians")
        taken.append(name)
        contents = [json.loads(source.read_text()) for source in sources]
        new = medians(contents, ROWS[name]) if name in ROWS else contents[0]
        old = json.loads(target.read_text()) if target.is_file() else None
        if name == "litmus.json":
            # A run has some of the setups.
            write_json(target, render_programs.with_litmus(old or {"reports": []}, new))
        elif old is not None and name in MERGED:
            write_json(target, MERGED[name](old, new))
        elif name in ROWS:
            write_json(target, new)
        else:
            shutil.copyfile(sources[0], target)
    return taken
