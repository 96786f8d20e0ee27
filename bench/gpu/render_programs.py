"""The sections of `docs/results.md` on programs that must not notice the shim: litmus programs, compilers at run time, starts."""

import start_times


def litmus(content, table, made_with):
    """Counts of each setup, report by report."""
    text = ["## Litmus programs", ""]
    text += [
        "Small programs made from seeds and those of the audit of CUDA's semantics, each first bare, and then as a client of a core "
        "beside another client (`tests/litmus`). *Bare, too*: misbehaved, and then bare as well when run more often. *Mechanisms*: what was done to their launches, as the core counts it. "
        "*At once*: under MPS, four setups at a time, each with a core of its own; *vendor*: the same with closed libraries transformed; "
        "*in turns*: time slices, one setup at a time. *Not run*: the time was up.",
        "",
    ]
    header = ["campaign", "part", "setup", "ended", "hangs", "other values", "failed", "bare, too", "not run", "mechanisms"]
    for report in content["reports"]:
        rows = []
        for row in report["rows"]:
            done = ", ".join(f"{name} {count}" for name, count in sorted(row["mechanisms"].items()) if count)
            counts = [row.get(key, 0) for key in ("ended", "hangs", "different", "failed", "bare_too", "not_run")]
            rows.append([row["campaign"], row["part"], row["setup"], *counts, done])
        text += [*made_with(report["machine"], "litmus"), *table(header, rows)]
    return text


def with_litmus(old, new):
    """The reports that are kept, and a new one, which replaces those of the same code, GPU, seeds and setups."""
    of = lambda report: (
        report["machine"]["commit"], report["machine"]["device"], report.get("seed"), {(row["campaign"], row["setup"]) for row in report["rows"]}
    )  # fmt: skip
    return {"reports": [*(report for report in old["reports"] if of(report) != of(new)), new]}


def jit(content, table, made_with):
    """One row a compiler."""
    text = ["## Programs that compile kernels of the same names", "", *made_with(content["machine"], "jit")]
    text += [
        "Kernels that differ in one constant, compiled, launched while eight of them are loaded, and unloaded, by several processes at once under "
        "the policy `random-forms`, which asks them to yield at random times. Every launch's values are compared.",
        "",
    ]
    rows = []
    for row in content["rows"]:
        transformed = row["transformed"]
        counts = [row[key] for key in ("processes", "kernels", "launches", "wrong")]
        rows.append([row["sharing"], row["backend"], *counts, transformed.get("kernels", 0), transformed.get("launches_yielded", 0), row["seconds"]])
    return text + table(["sharing", "compiler", "processes", "kernels", "launches", "wrong values", "transformed", "yielded", "s"], rows)


def start(content, table, made_with):
    """Ratios of starts, and what can be told of the promise."""
    made = start_times.rows(content["times_s"])
    text = ["## How much longer a PyTorch program takes to start", "", *made_with(content["machine"], "start")]
    text += [
        "A process imports PyTorch, makes a small network and trains it for one step. `start`: from its start to the result; `import`: until PyTorch is imported; `gpu`: from there to the result (ratios of both parts are over the whole start); `wall`: from its start to "
        f"its end; `cpu`: its CPU time. {made[0]['rounds']} rounds of plain starts and clients in turns: trimmed means (the middle 60 %) of the differences within rounds, and their 95 % bootstrap intervals. "
        f"Promised: at most {content['promise_ratio_max']}. *kept* and *not kept*: the whole interval is on that side of it. "
        "The last row of each clock compares plain starts with plain starts.",
        "",
    ]
    rows = []
    for row in made:
        interval = f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f}"
        is_control = row["kind"] in start_times.PLAIN
        rows.append([row["kind"], row["clock"], row["plain_s"], f"{row['added_s']:+.3f}", f"{row['ratio']:.3f}", interval, "" if is_control else row["verdict"]])
    return text + table(["client", "clock", "plain, s", "added, s", "ratio", "interval", "promise"], rows)
