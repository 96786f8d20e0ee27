"""The sections of `docs/results.md` on programs that must not notice the shim: litmus programs, compilers at run time, starts."""


def litmus(content, table, made_with):
    """Counts of each setup."""
    text = ["## Litmus programs", "", *made_with(content["machine"], "litmus")]
    text += [
        "Small programs made from seeds and those of the audit of CUDA's semantics, each first bare, and then as a client of a core "
        "beside another client (`tests/litmus`). *Bare, too*: misbehaved, and then bare as well when run more often. *Mechanisms*: what was done to their launches, as the core counts it. "
        "*All* ran four setups at a time, each with a core of its own, those in which clients take turns as well; *in turns* one.",
        "",
    ]
    rows = []
    for row in content["rows"]:
        done = ", ".join(f"{name} {count}" for name, count in sorted(row["mechanisms"].items()) if count)
        counts = [row.get(key, 0) for key in ("ended", "hangs", "different", "failed", "bare_too", "not_run")]
        rows.append([row["campaign"], row["part"], row["setup"], *counts, done])
    return text + table(["campaign", "part", "setup", "ended", "hangs", "other values", "failed", "bare, too", "not run", "mechanisms"], rows)


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
        cut = row["transformed"]
        counts = [row[key] for key in ("processes", "kernels", "launches", "wrong")]
        rows.append([row["sharing"], row["backend"], *counts, cut.get("kernels", 0), cut.get("launches_yielded", 0), row["seconds"]])
    return text + table(["sharing", "compiler", "processes", "kernels", "launches", "wrong values", "transformed", "yielded", "s"], rows)


def start(content, table, made_with, number):
    """Ratios of starts."""
    text = ["## How much longer a PyTorch program takes to start", "", *made_with(content["machine"], "start")]
    text += [
        "From the start of a process that imports PyTorch, makes a small network and trains it for one step, to its end; medians of "
        f"{len(content['times_s']['plain'])} rounds. Promised: at most {content['promise_ratio_max']}.",
        "",
    ]
    rows = []
    for row in content["rows"]:
        spread = f"{min(row['ratios']):.3f} to {max(row['ratios']):.3f}"
        rows.append([row["kind"], row["plain_s"], row["with_shim_s"], f"{row['ratio']:.3f}", spread, number(row.get("noise"), 3)])
    return text + table(["client", "plain, s", "as a client, s", "ratio", "rounds", "noise"], rows)
