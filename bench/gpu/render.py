#!/usr/bin/env python3
"""Makes `docs/results.md` from `docs/results/*.json`. Standard library only; needs no GPU.

render.py [--import OUT…] [--check]
  --import OUT…  first take over a suite run's files; of several runs of the same, medians (render_import.py)
  --check        change nothing; exit 1 if docs/results.md is not what it would write

What misses a promise, or had something not in force, gets a footnote, listed under "What falls short".
"""

import argparse
import json
import pathlib
import sys

import render_core
import render_decide
import render_decode
import render_forms
import render_frontier
import render_import
import render_kept
import render_policy
import render_programs
import render_several
import render_shares
import render_speeds
import render_streams
import render_tools
import render_trainings
import render_units
import render_waits
import render_width
from markdown import made_with, number, percent, table
from stats import host_drift

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
# Tally's paper (ASPLOS 2025): mean p99 overhead over 36 pairs, queueing left out.
PAPER_P99_OVER_SOLO = 1.072
FORMS = ("preemptible", "sliced", "sm_limited", "graph_chained")
ADDED_NS_HIGH_MAX = 100  # SPECIFICATION.md, "Ungated launch": what it may cost more


class Notes:
    """Footnotes, numbered in order of first use; the same text keeps its number."""

    def __init__(self):
        self.texts = []

    def mark(self, text):
        if text not in self.texts:
            self.texts.append(text)
        return f"[^{self.texts.index(text) + 1}]"

    def lines(self):
        numbered = [f"[^{i}]: {text}" for i, text in enumerate(self.texts, 1)]
        return numbered or ["Nothing that was measured."]


PAIR_TERMS = (
    ("solo", "the inference has the GPU to itself"),
    ("beside idle", "other programs are connected and idle; a GPU's context is faster then (docs/internals.md), so this is the stricter base"),
    ("p50, p99", "of the service time, without queueing, as in Tally's paper"),
    ("queued p99", "with queueing; compared with the queued p99 of solo"),
    ("best-effort share", "rate of the training over its rate alone"),
    ("of its own", "the same over the rate that this very process had alone in that mode"),
    ("vendor kernels", "whether kernels of NVIDIA's closed libraries were transformed too; then the training loads its kernels eagerly"),
    ("launches transformed", "of the training, in any form; in brackets, how many yielded"),
)


def pair_section(content, notes):
    """Co-location, one table for each pair, load and device."""
    lines = ["## Co-location", ""]
    lines += ["Command: `bench/gpu/run.sh --bundle DIR --out DIR pairs`. Rows: `results/pairs.json`.", ""]
    lines += ["An inference with Poisson arrivals runs beside a training: one window a mode, with the same arrivals in each. Figures are medians of the runs.", ""]
    lines += [*(f"- *{term}*: {meaning}." for term, meaning in PAIR_TERMS), ""]
    lines += summary(content)
    groups = {}
    for row in content:
        if row["be"] != "-":
            title = (row["hp"], row["be"], row["load"], row["device"], row["driver"])
            groups.setdefault(title, []).append(row)
    for (hp, be, load, device, driver), shared in groups.items():
        # The inference alone belongs to all its trainings.
        alone = [
            row
            for row in content
            if row["be"] == "-" and (row["hp"], row["load"], row["device"], row["driver"]) == (hp, load, device, driver)
        ]
        rows = alone + shared
        requests = max(row["n_requests"] for row in rows)
        lines += [
            f"### {hp} and {be} ({device})",
            "",
            f"Load {load}, about {requests} requests a row, driver {driver}, {made_of(rows)}.",
            "",
        ]
        header = [
            "mode",
            "policy",
            "vendor kernels",
            "runs",
            "p50 ms",
            "p99 ms",
            "p99 over solo",
            "over beside idle",
            "queued p99 ms",
            "over solo's",
            "over idle's",
            "best-effort share",
            "launches transformed",
        ]
        solo_p99_ms = next((row["p99_ms"] for row in rows if row["mode"] == "solo"), None)
        lines += table(header, [pair_cells(row, notes, solo_p99_ms) for row in rows])
    return lines


# Pairs that the summary is over: those with kernels transformed, in all modes.
SUMMARY = {
    ("bert-large-graph", "gpt2-train"),
    ("resnet50-eager", "bert-b32-train"),
    ("llama-7b-decode-graph", "gpt2-large-train"),
    ("resnet50-graph", "resnet50-b128-train"),
}
# Tally's paper (ASPLOS '25), A100, means over 36 pairs: p99 over solo.
PAPER = {"time-slicing": 3.52, "mps": 4.45, "mps-client-priority": 2.95, "tally": PAPER_P99_OVER_SOLO}


def summary(content):
    """Means over the pairs in each mode, next to the paper's."""
    modes = {}
    for row in content:
        # Other settings of a policy have rows of their own below.
        if (row["hp"], row["be"]) in SUMMARY and not row["policy_config"]:
            modes.setdefault((row["mode"], row["policy"], row["vendor_rewrite"]), []).append(row)
    rows = []
    for (mode, policy, vendor), of in modes.items():
        if len(of) < len(SUMMARY):
            continue
        drifted = [row for row in of if host_drift(row.get("own_solo_p50_ms"), row["beside_idle_p50_ms"], "mps" in mode)]
        of = [row for row in of if row not in drifted]
        if not of:
            continue
        graphs = [row for row in of if not row["hp"].endswith("eager")]

        def mean(key, rows):
            """None if a row does not have it: from before it was measured."""
            return sum(row[key] for row in rows) / len(rows) if all(row[key] for row in rows) else None

        def both(key):
            """Of all rows, and of the CUDA graphs."""
            return [percent(value) if (value := mean(key, rows)) else "" for rows in (of, graphs)]

        share = mean("be_share", of)
        served = sum(row["n_requests"] / (row["n_requests"] + row["unserved"]) for row in of) / len(of)
        rows.append([
            mode + "".join(f", without {row['hp']}" for row in drifted),
            "–" if policy == "none" else policy,
            "–" if policy == "none" else "transformed" if vendor else "untouched",
            *both("p99_over_solo"),
            *both("p99_over_beside_idle"),
            number(share),
            number(served + share),
            percent(PAPER.get(mode if policy == "none" else "tally")),
        ])  # fmt: skip
    if not rows:
        return []
    lines = [
        (
            "Means over the pairs "
            + ", ".join(f"{hp} + {be}" for hp, be in sorted(SUMMARY))
            + ". The p99 of the eager inference alone varies by half from run to run, so the columns *CUDA graphs only* leave it out. "
            "System throughput is the share of arrived requests that were served, plus the best-effort share. The paper's figures "
            "are of other pairs on an A100. Under MPS an inference alone is already up to a quarter slower than without it "
            "(`own_solo_p50_ms` in the rows), which no policy can win back. In `tally-timeslice`, `tally-priority` transforms nothing, "
            "so vendor kernels make no difference there. A pair is left out of a mode if its inference alone had become slower by "
            "then, because the host had."
        ),
        "",
    ]
    header = ["mode", "policy", "vendor kernels", "mean p99 over solo", "CUDA graphs only", "over beside idle", "CUDA graphs only", "best-effort share"]
    return lines + table([*header, "system throughput", "p99 over solo in the paper"], rows)


def made_of(rows):
    """Commits and dates of rows that share a table."""
    return ", ".join(sorted({f"commit `{row['commit']}` of {row['date']}" for row in rows}))


SOLO_OFF_MAX = 0.1


def pair_cells(row, notes, solo_p99_ms):
    mode = f"{row['mode']}, vendor kernels transformed" if row["vendor_rewrite"] else row["mode"]
    where = f"{row['hp']}, {mode}"
    marks = "".join(notes.mark(f"{where}, {row['policy']}: {n}.") for n in row.get("notes") or [])
    if row.get("unserved"):
        marks += notes.mark(f"{where}, {row['policy']}: {row['unserved']} requests were not served within twice the window.")
    is_alone = row["be"] == "-"
    if row.get("solo_p99_ms") and solo_p99_ms and abs(row["solo_p99_ms"] / solo_p99_ms - 1) > SOLO_OFF_MAX:
        marks += notes.mark(f"{where}, {row['policy']}: of another run, in which solo had a p99 of {row['solo_p99_ms']:.2f} ms.")
    over, over_idle, queued_over, queued_over_idle = (
        percent(row[key]) if row.get(key) and not is_alone else ""
        for key in ("p99_over_solo", "p99_over_beside_idle", "p99_over_solo_queued", "p99_over_beside_idle_queued")
    )
    # Rows from before solo was measured with the GPU to itself have the other one only.
    above = row.get("p99_over_solo") or row["p99_over_beside_idle"]
    if row["policy"] == "tally-priority" and above > PAPER_P99_OVER_SOLO:
        mark = notes.mark(
            f"{where}: p99 over {'solo' if over else 'beside idle'} is {percent(above)}; Tally's paper reports "
            f"{percent(PAPER_P99_OVER_SOLO)} over solo as the mean of its own 36 pairs (A100)."
        )
        over, over_idle = (over + mark, over_idle) if over else (over, over_idle + mark)
    policy = row["policy"] if row["policy"] != "none" else "–"
    if row.get("policy_config"):
        policy += f" (`{'; '.join(row['policy_config'].split(chr(10))).strip('; ')}`)"
    share = number(row["be_share"]) if row["be_share"] is not None else ""
    if row.get("be_share_of_own"):
        share += f" ({number(row['be_share_of_own'])} of its own)"
    vendor = "–" if row["policy"] == "none" else "transformed" if row["vendor_rewrite"] else "untouched"
    cells = [row["mode"] + marks, policy, vendor, row.get("runs", 1), number(row["p50_ms"], 3), number(row["p99_ms"], 3), over, over_idle]
    return [*cells, number(row["p99_queued_ms"], 2), queued_over, queued_over_idle, share, launches_transformed(row.get("transformed"))]


def launches_transformed(counts):
    """Launches in any transformed form, and how many yielded; nothing for rows from before there were any."""
    if counts is None:
        return ""
    return f"{sum(counts.get(form, 0) for form in FORMS)} ({counts.get('launches_yielded', 0)})"


def count_section(content, notes):
    lines = ["## Every launch is seen", ""]
    lines += made_with(content["machine"], "count")
    lines += [
        "Launches of one profiled region, counted by the shim and, independently, by CUPTI (torch.profiler). Equal: "
        "launch calls, graph launches, kernels of launches and kernels of graphs all agree exactly.",
        "",
    ]
    rows = []
    for row in content["rows"]:
        equal = "yes" if row["equal"] else "no"
        if not row["equal"]:
            why = row.get("error") or "; ".join(row.get("differences", []))
            equal += notes.mark(f"{row['job']} as {row['priority']}: {why}.")
        keys = ("profiler_launch_calls", "shim_launches", "profiler_graph_launches", "shim_graph_launches")
        keys += ("profiler_kernels",)
        kernels = row.get("shim_launches", 0) + row.get("shim_graph_kernels", 0)
        rows.append([row["job"], row["priority"], *(row.get(key, "") for key in keys), kernels, equal])
    header = [
        "job",
        "class",
        "calls (CUPTI)",
        "(shim)",
        "graph launches (CUPTI)",
        "(shim)",
        "kernels (CUPTI)",
        "(shim)",
        "equal",
    ]
    return lines + table(header, rows)


def correct_section(content, notes):
    lines = ["## Results stay bit-identical, through kills too", ""]
    lines += made_with(content["machine"], "correct")
    names = {
        "shared": "training next to an inference under load",
        "core_dies": "the core is killed and started again",
        "hp_dies": "the inference is killed",
        "be_dies": "a training is killed",
    }
    rows = []
    for row in content["rows"]:
        passed = "yes" if row["passed"] else "no"
        if not row["passed"]:
            told = "" if row["required"] else " (reported only: under MPS a killed client may disturb the others)"
            passed += notes.mark(f"{names.get(row['scene'])}, {row['sharing']}: {'; '.join(row['problems'])}{told}.")
        device, commit, date = (row.get(key, content["machine"].get(key)) for key in ("device", "commit", "date"))
        made = f"{device}, `{commit}`, {date}"
        rows.append([names.get(row["scene"], row["scene"]), row["sharing"], made, passed])
    return lines + table(["scene", "sharing", "on, commit", "right, and bit-identical"], rows)


def exact_section(content, notes):
    lines = ["## Transformed launches compute the same", ""]
    lines += made_with(content["machine"], "exact")
    lines += [
        (
            "Deterministic trainings whose launches are transformed in forms chosen at random and yield at random, against the "
            "same trainings alone: digests over all losses and parameters. With vendor kernels transformed the trainings load their kernels "
            "eagerly; their transformed forms then come later, and fewer kernels have one. *Kernels one at a time*: under CUPTI, as profilers do."
        ),
        "",
    ]
    rows = []
    for row in content["rows"]:
        vendor, counts = "transformed" if row["vendor_libraries"] else "untouched", row["transformed"]
        different = sorted({name for run in row["runs"] for name in run["different"]})
        same = "no" if different else "yes"
        machine = row.get("machine")
        if machine and machine != content["machine"]:
            same += notes.mark(f"On an {machine['device']}, commit `{machine['commit']}`.")
        if different:
            same += notes.mark(f"{row['sharing']}, vendor kernels {vendor}: {', '.join(different)} differ.")
        sharing = row["sharing"] + (", kernels one at a time" if row.get("serial_kernels") else "")
        if changes := row.get("width_changes"):
            sharing += f", {row.get('what', 'trainings')}, {changes} changes of width"
        cells = [sharing, vendor, same, counts["kernels"], counts["kernels_refused"]]
        cells += [counts[form] for form in FORMS] + [counts["launches_yielded"], counts["rescued"]]
        rows.append([*cells, f"{number(counts['turnaround_us_p50'], 0)} / {number(counts['turnaround_us_p99'], 0)}"])
    header = ["sharing", "vendor kernels", "bit-identical", "kernels transformed", "refused", "preemptible", "sliced"]
    header += ["on some SMs", "graphs in parts", "yielded", "rescued", "turnaround p50 / p99 us"]
    lines += table(header, rows)
    missing = [r for r in ("timeslice", "mps") if r not in {row["sharing"] for row in content["rows"]}]
    if missing:
        lines += [f"Not measured: {', '.join(missing)}.", ""]
    return lines


def overhead_section(content, notes):
    lines = ["## What the shim costs a program that is alone", ""]
    lines += made_with(content["machine"], "overhead")
    if content.get("requests_note"):
        lines += [content["requests_note"], ""]
    rows, limit = [], content["promise_ratio_max"]
    for row in content.get("requests", []):
        ratio = f"{(row['ratio'] - 1) * 100:+.2f} %"
        if row["ratio"] > limit:
            ratio += notes.mark(
                f"{row['job']} as {row['kind']}: {(row['ratio'] - 1) * 100:+.2f} % "
                f"({(row['ratio_low'] - 1) * 100:+.2f} to {(row['ratio_high'] - 1) * 100:+.2f} %), promised at most "
                f"{(limit - 1) * 100:.1f} %; two halves of the plain processes differ by {(row['noise'] or 0) * 100:.2f} %."
            )
        spread = f"{(row['ratio_low'] - 1) * 100:+.2f} to {(row['ratio_high'] - 1) * 100:+.2f} %"
        noise = "" if row["noise"] is None else f"{row['noise'] * 100:.2f} %"
        rows.append(
            [row["job"], row["kind"], number(row["plain_ms"], 4), number(row["with_shim_ms"], 4), ratio, spread, noise]
        )
    header = ["request", "class", "plain ms", "with shim ms", "difference", "spread", "noise"]
    lines += table(header, rows)
    rows = []
    for row in content.get("launches", []):
        added = f"{row['added_ns']['p50']:+.0f}"
        if row["kind"] == "high" and row["added_ns"]["p50"] > ADDED_NS_HIGH_MAX:
            added += notes.mark(
                f"A high-priority launch by way of {row['entry_point']} costs {row['added_ns']['p50']:.0f} ns more; "
                f"designed for {ADDED_NS_HIGH_MAX}."
            )
        spread = f"{row['added_ns']['min']:+.0f} to {row['added_ns']['max']:+.0f}"
        # Rows without are differences between processes.
        noise = number(row["noise_ns"], 0) if "noise_ns" in row else ""
        rows.append(
            [row["entry_point"], row["kind"], number(row["plain_ns"], 0), number(row["with_shim_ns"], 0), added, spread, noise]
        )
    header = ["`cuLaunchKernel` by way of", "class", "plain ns", "with shim ns", "added ns", "of the runs", "noise ns"]
    lines += table(header, rows)
    most = [row["added_ns"]["p50"] for row in content.get("launches", []) if row["kind"] == "high"]
    eager = [row for row in content.get("requests", []) if row["job"] == "resnet50-eager" and row["kind"] == "high"]
    if content.get("eager_launches") and most and eager:
        us = max(most) * content["eager_launches"] / 1e3
        share = us / eager[0]["plain_ms"] / 10
        lines += [
            (
                f"The {content['eager_launches']} launches of an eager request come to {us:.0f} us more of its CPU's time by the dearest of these ways, {share:.2f} % "
                "of the request if none of it is hidden."
            ),
            "",
        ]
    return lines


def latency_section(content, notes):
    lines = ["## The decision round trip", ""]
    if content.get("roundtrip"):
        lines += made_with(content["machine"], "latency")
        lines += [
            (
                "From publishing a launch to seeing its answer, a client that does nothing else against a spinning core "
                "with that policy, each on a CPU of its own; medians where there are several runs."
            ),
            "",
        ]
        rows, limit = [], content["promise_p99_us"]
        for row in content["roundtrip"]:
            p99 = number(row["p99_ns"] / 1e3)
            if row["p99_ns"] > limit * 1e3:
                p99 += notes.mark(
                    f"Decision round trip, {row['policy']}, {row['gap_us']} us between launches: p99 "
                    f"{row['p99_ns'] / 1e3:.2f} us, promised at most {limit:.0f} us."
                )
            of_runs = " to ".join(number(ns / 1e3) for ns in row.get("p99_ns_of_runs", []))
            cells = [row["policy"], row["gap_us"], row.get("runs", 1), number(row["p50_ns"] / 1e3), p99, of_runs]
            rows.append([*cells, number(row["p999_ns"] / 1e3)])
        lines += table(["policy", "us between launches", "runs", "p50 us", "p99 us", "of the runs", "p99.9 us"], rows)
        lines += ["### What a gated launch costs its program", ""]
    if content.get("rows"):
        lines += made_with(content["machine"], "latency")
        lines += [
            (
                f"Every launch of a best-effort program decided by the policy, the core spinning ({content['spin_us']} us), timed "
                "in the program around `cuLaunchKernel`: the round trip and the completion writes. Added: at the same quantile of the same program without the shim."
            ),
            "",
        ]
        rows = []
        for row in content["rows"]:
            p99 = number(row["added_p99_us"])
            core = ((content.get("states") or {}).get(row["policy"]) or {}).get("decision_latency") or {}
            own = f"{core['p50_us']:.2f} / {core['p99_us']:.2f}" if core else ""
            cells = [row["policy"], row["burst"], number(row["plain_p50_us"]), number(row["decided_p50_us"])]
            rows.append([*cells, number(row["added_p50_us"]), p99, own])
        header = ["policy", "launches between synchronisations", "plain p50 us", "decided p50 us", "added p50 us"]
        lines += table([*header, "added p99 us", "the core's own p50 / p99 us"], rows)
    memops = content.get("memops")
    if memops:
        lines += ["### Learning that a kernel has finished", ""]
        lines += made_with(memops.get("machine", content["machine"]), "memops")
        rows = [
            [
                row["tracking"],
                f"{row['kernel_ns'] / 1000:.0f}",
                number(row["us_per_kernel"]),
                number(row["host_us_per_kernel"]),
            ]
            for row in memops["per_kernel"]
        ]
        lines += table(["after each kernel", "kernel us, about", "us a kernel, end to end", "host us a kernel"], rows)
        rows = [[row["by"], number(row["p50_us"]), number(row["p99_us"])] for row in memops["seen_done"]]
        lines += table(["a 10 us kernel, launch to seen done by", "p50 us", "p99 us"], rows)
    return lines


def policy_section(content, notes):
    marks = "".join(notes.mark(f"Policy: {message}.") for message in content.get("failures", []))
    lines = ["## The policy's life while programs run", "", *made_with(content["machine"], "policy")]
    return lines + render_policy.lines(content, marks, table)


def shim_section(content, notes):
    rows = content["rows"]
    failed = [f"{row['binary']} {row['test']} {row['state']}" for row in rows if row["state"] not in ("passed", "left out")]
    passed = sum(row["state"] == "passed" for row in rows)
    out = sum(row["state"] == "left out" for row in rows)
    note = notes.mark(f"The shim's tests: {'; '.join(failed)}.") if failed else ""
    # One that was run again by itself.
    later = "".join(f" `{row['test']}` is of commit `{row['commit']}`." for row in rows if row.get("commit"))
    return [
        "## The shim's own tests on a GPU",
        "",
        *made_with(content["machine"], "shim"),
        (
            f"Transformed launches and graphs in parts (`core/shim/tests/forms`, `core/shim/tests/graphs.rs`), every block of every launch counted: "
            f"{passed} passed, {len(failed)} failed{note}, {out} left out (why is in the rows: most are of the software device only).{later}"
        ),
        "",
    ]


SECTIONS = (
    ("pairs.json", pair_section),
    ("frontier.json", lambda content, _notes: render_frontier.lines(content, table, made_of)),
    ("decode.json", lambda content, _notes: render_decode.lines(content, table, made_of)),
    ("counts.json", count_section),
    ("correct.json", correct_section),
    ("exact.json", exact_section),
    ("forms.json", render_forms.section),
    ("overhead.json", overhead_section),
    ("latency.json", latency_section),
    ("decide.json", lambda content, _notes: render_decide.lines(content, table)),
    ("stalls.json", lambda content, _notes: render_core.stalls(content, table)),
    ("costs.json", lambda content, _notes: render_core.costs(content, table)),
    ("policy.json", policy_section),
    ("several.json", lambda content, _notes: render_several.lines(content, table, made_with)),
    ("shares.json", lambda content, _notes: render_shares.lines(content, table, made_with)),
    ("trainings.json", lambda content, _notes: render_trainings.lines(content, table, made_with)),
    ("width.json", lambda content, _notes: render_width.lines(content, table, made_with)),
    ("shim.json", shim_section),
    ("speeds.json", lambda content, _notes: render_speeds.lines(content, table, made_with)),
    ("speeds-vendor.json", lambda content, _notes: render_speeds.lines(content, table, made_with)),
    ("units.json", lambda content, _notes: render_units.lines(content, table, made_with)),
    ("waits.json", lambda content, _notes: render_waits.lines(content, table, made_with)),
    ("streams.json", lambda content, _notes: render_streams.lines(content, table, made_with)),
    ("kept.json", lambda content, _notes: render_kept.lines(content, table, made_with)),
    ("litmus.json", lambda content, _notes: render_programs.litmus(content, table, made_with)),
    ("jit.json", lambda content, _notes: render_programs.jit(content, table, made_with)),
    ("start.json", lambda content, _notes: render_programs.start(content, table, made_with)),
    ("tools.json", lambda content, notes: render_tools.lines(content, notes, table, made_with)),
)

# What is taken over from a run of the suite; `steps.py` says which step makes it.
FILES = tuple(name for name, _section in SECTIONS)


def render(folder):
    """The document, from the result files that are there."""
    notes = Notes()
    lines = [
        "# Measured results",
        "",
        "<!-- Made by bench/gpu/render.py from docs/results/*.json; do not edit. -->",
        "",
        (
            "Each section names its machine, commit and command. One machine's figures: compare ratios, and measure again "
            "before relying on one. How each figure is taken: `bench/gpu/README.md`."
        ),
        "",
        (
            "What is of a commit before `3ff10f4` was measured with an older build, in which launches were not reported by events and kernels were "
            "not identified by digests."
        ),
        "",
    ]
    missing = []
    for name, section in SECTIONS:
        path = folder / name
        if path.is_file():
            lines += section(json.loads(path.read_text()), notes)
        else:
            missing.append(name.removesuffix(".json"))
    lines += ["## What falls short", ""]
    if missing:
        lines += [f"Not measured yet: {', '.join(missing)}.", ""]
    lines += notes.lines()
    return "\n".join(lines).rstrip() + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--import", dest="outs", type=pathlib.Path, nargs="+", default=[], help="output folders of suite runs")
    parser.add_argument("--check", action="store_true", help="only compare")
    parser.add_argument("--docs", type=pathlib.Path, default=REPOSITORY / "docs", help="the documentation's folder")
    args = parser.parse_args()
    if args.outs:
        taken = render_import.take_over(args.outs, args.docs / "results", FILES)
        if not taken:
            sys.exit(f"{', '.join(map(str, args.outs))}: none of {', '.join(FILES)} is there")
        print(f"took over {', '.join(taken)}")
    page, text = args.docs / "results.md", render(args.docs / "results")
    if args.check:
        if not page.is_file() or page.read_text() != text:
            sys.exit(f"{page} is not what render.py makes of docs/results: run bench/gpu/render.py")
        return
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text)
    print(f"wrote {page}")


if __name__ == "__main__":
    main()
