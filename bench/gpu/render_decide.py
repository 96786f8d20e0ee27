"""The section of `docs/results.md` on what a policy's decision costs on a GPU's host.

No step measures it, for it is a benchmark of Rust code: `decide.json` is what it printed, carried to such a machine.
"""

from stats import median


def lines(content, table):
    """The section's lines."""
    machine = content["machine"]
    text = ["## A policy's decision", ""]
    text += [
        (
            f"On the host of an {machine['device']} ({machine['cpus']} CPUs), {machine['date']}: `cargo bench -p tally-wasm-host --bench decide -- decide/`, built elsewhere, "
            f"on one CPU; two commits in turns. Medians of the runs, and their extremes. At most {content['promise_p50_ns']} ns are promised at p50."
        ),
        "",
    ]
    rows = []
    for commit in dict.fromkeys(row["commit"] for row in content["rows"]):
        runs = [row["policies"] for row in content["rows"] if row["commit"] == commit]
        for policy in runs[0]:
            calls = [run[policy]["criterion_ns"][1] for run in runs]
            singles = [run[policy]["single_p50_ns"] for run in runs]
            told = [f"{median(values):.0f} ({min(values):.0f} to {max(values):.0f})" for values in (calls, singles)]
            rows.append([f"`{commit}`", policy, len(runs), *told])
    return text + table(["commit", "policy", "runs", "criterion, ns a call", "single calls, p50 ns"], rows)
